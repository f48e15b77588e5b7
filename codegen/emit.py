"""Emitting: the modules that dispatch tables name, and the tables, as files of a ``generated`` folder."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..runtime.conv_tiles import ConvRow
from ..runtime.defaults import defaults_beside
from ..runtime.errors import TableError
from ..runtime.lookup import read_folder
from ..runtime.merge import merge
from ..runtime.modules import module_name
from ..runtime.plan import Structure
from ..runtime.spec import Spec
from ..runtime.table import GpuInfo, Row, Table, dumps, gpu_slug, is_stale, load
from .files import emit_error, write
from .render import GENERATED_MARK, SHARED, module_digest, render, render_conv

Progress = Callable[[int, int, str], None]
"""Told of every module: done, total, name."""

Module = tuple[Spec, Structure] | str
"""What a module is rendered from: spec and structure, or a name of :data:`.render.SHARED`."""


@dataclass(frozen=True)
class Emission:
    """What emitting did to a folder; paths are relative to it."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    """Modules that no table names any more."""
    unchanged: int
    """Files that were up to date and not touched."""
    table_path: Path
    """The table, or the folder of tables."""
    rows: int
    """Rows of the table, or of all tables."""
    notes: tuple[str, ...] = ()


def check_writable(folder: Path, gpu: GpuInfo) -> None:
    """Make sure, before any work, that :func:`emit` can write a table of ``gpu`` into ``folder``.

    Raises:
        EmitError: As :func:`emit`.
        TableError: As :func:`emit`.
    """
    path = table_path(folder, gpu)
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with _locked(folder):
        if path.is_file():
            held = load(path)
            try:
                merge((held, replace(held, gpu=gpu, rows=())))
            except TableError as error:
                raise TableError(str(error), where=str(path), hint="choose another folder") from error
        write(probe, "probe")
        try:
            probe.unlink()
        except OSError as error:
            raise emit_error(probe, error) from error


def table_path(folder: Path, gpu: GpuInfo) -> Path:
    """Where :func:`emit` writes the table of a GPU."""
    return folder / "tables" / f"{gpu_slug(gpu.name)}.json"


def folder_of(path: Path) -> Path | None:
    """The ``generated`` folder that is meant where ``path`` is not one: what it is part of, or has in it.

    Returns:
        A folder with tables; None where there is none, and for one.
    """
    path = path.absolute()
    part = next((place for place in (path, path.parent) if place.name in ("kernels", "tables")), None)
    places = (path, path if part is None else part.parent, path / "generated")
    found = next((place for place in places if any((place / "tables").glob("*.json"))), path)
    return None if found == path else found


def emit(folder: Path, table: Table, *, keep: bool = True, progress: Progress | None = None) -> Emission:
    """Write ``table`` and the modules it names; remove modules that no table of ``folder`` names.

    Modules come before the table and removals after it: whenever this is interrupted, every table
    finds its modules. Two processes may emit into one folder.

    Args:
        folder: A ``generated`` folder; made where missing.
        table: Rows to write, of one GPU.
        keep: Rows that the GPU's file already has stay, as :func:`..runtime.merge.merge` joins them;
            False replaces the file.
        progress: Called once a module.

    Raises:
        EmitError: Full disk or read-only folder.
        TableError: The GPU's file cannot be read, or is of another GPU; nothing is written.
    """
    path = table_path(folder, table.gpu)
    with _locked(folder):
        if keep and path.is_file():
            table = merge((load(path), table))
        return _emit(folder, modules([table]), {path: dumps(table)}, path, len(table.rows), progress)


def regenerate(folder: Path, progress: Progress | None = None) -> Emission:
    """Render the modules that the tables of ``folder`` name; the tables stay as they are.

    Raises:
        EmitError: As :func:`emit`.
        TableError: A table cannot be read, or there is none; nothing is written.
    """
    where = folder / "tables"
    tables = read_folder(where, strict=True) if where.is_dir() else ()
    if not tables:
        meant = folder_of(folder)
        hint = "name a folder that a tune has written" + (f", such as {meant}" if meant else "")
        raise TableError("there is no table", where=str(where), hint=hint)
    with _locked(folder):
        rows = [row for table in tables for row in table.rows]
        done = _emit(folder, modules(tables), {}, where, len(rows), progress)
    stale = sum(is_stale(row, digest_of) for row in rows)
    note = f"{stale} rows are stale: their kernels have changed since they were timed"
    return Emission(**{**vars(done), "notes": (*done.notes, note) if stale else done.notes})


def modules(tables: Iterable[Table]) -> dict[str, Module]:
    """Modules that tables need, by name: of their rows, and of the default plans beside each spec.

    Defaults serve where no row does (another architecture, say), also in a slim package, and what
    materialises states always. The shared modules are always there.
    """
    found: dict[str, Module] = {name: name for name in SHARED}
    for table in tables:
        for row in table.rows:
            for spec, plan in ((row.spec, row.plan), *defaults_beside(row.spec).items()):
                for variant in plan.variants:
                    found[module_name(spec, variant.structure)] = (spec, variant.structure)
    return dict(sorted(found.items()))


def source(module: Module) -> str:
    """Source of a module of :func:`modules`."""
    return SHARED[module]() if isinstance(module, str) else render(*module)


@functools.lru_cache(maxsize=4096)
def digest_of(spec: Spec, structure: Structure) -> str:
    """Digest of the module as it is rendered today."""
    return module_digest(render(spec, structure))


def stale(row: Row) -> bool:
    """Whether a module of ``row`` has changed since the row was made."""
    return is_stale(row, digest_of)


def stale_tile(row: ConvRow) -> bool:
    """Whether the convolution's module has changed since the row was made."""
    return module_digest(render_conv()) != row.module_digest


def emitted(folder: Path) -> list[Path]:
    """Module files in ``folder``, by name; files of others are not among them."""
    return [path for path in sorted((folder / "kernels").glob("*.py")) if _is_generated(path)]


def _emit(
    folder: Path,
    needed: dict[str, Module],
    texts: dict[Path, str],
    table_path: Path,
    rows: int,
    progress: Progress | None,
) -> Emission:
    written, total = [], len(needed)
    for done, (name, module) in enumerate(needed.items(), 1):
        path = folder / "kernels" / f"{name}.py"
        if write(path, source(module)):
            written.append(path)
        if progress is not None:
            progress(done, total, name)
    written += [path for path, text in texts.items() if write(path, text)]
    removed, notes = _prune(folder, needed)
    return Emission(
        written=tuple(path.relative_to(folder).as_posix() for path in written),
        removed=removed,
        unchanged=total + len(texts) - len(written),
        table_path=table_path,
        rows=rows,
        notes=notes,
    )


def _prune(folder: Path, needed: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove modules that neither ``needed`` nor any table names; nothing while a table is unreadable."""
    spare = [path for path in emitted(folder) if path.stem not in needed]
    if not spare:
        return (), ()
    tables = folder / "tables"
    try:
        named = modules(read_folder(tables, strict=True)) if tables.is_dir() else {}
    except TableError as error:
        return (), (f"no module was removed, since a table cannot be read: {error}",)
    removed = []
    for path in spare:
        if path.stem in named:
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise emit_error(path, error) from error
        removed.append(path.relative_to(folder).as_posix())
    return tuple(removed), ()


def _is_generated(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return GENERATED_MARK in file.read(1024)
    except (OSError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time reads and writes ``folder``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise emit_error(folder, error) from error
    try:
        # A file system without locks still takes one process at a time.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
