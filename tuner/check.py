"""``check`` without a GPU: are generated folders what they say they are?

Everything here is deterministic. Findings are of the kinds of :data:`.report.FINDING_EXITS`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..codegen import emit
from ..codegen.compile import TileJob, check_toolchain
from ..codegen.pool import CompilePool
from ..codegen.space import broken_constraint
from ..codegen.targets import Gpu, GpuError, TritonTarget, triton_target
from ..runtime.conv_tiles import tiles
from ..runtime.defaults import defaults_beside
from ..runtime.errors import TableError
from ..runtime.modules import package_folder
from ..runtime.plan import Plan, Variant
from ..runtime.spec import Spec
from ..runtime.table import Binary, GpuInfo, Row, Table, load
from . import models, request
from .errors import UsageError
from .progress import Event, Report
from .report import Checked, Finding

RESOURCES: Final = ("registers", "spills_bytes", "shared_bytes", "size_bytes")
"""What is compared of a binary: fields of :class:`..runtime.table.Binary`."""

TIMEOUT_S: Final = 300.0
"""Time in which a kernel must compile."""

Kernel = tuple[Spec, Variant]
Compiler = Callable[[Gpu, Sequence[Kernel], Callable[[int], None]], Mapping[Kernel, Binary | str]]
"""Compiles kernels for a GPU; a text says why one does not compile. Told how many are done."""


def check(
    folders: Sequence[Path],
    report: Report,
    *,
    compiler: Compiler | None = None,
    promise: Path | None = None,
) -> Checked:
    """Look at generated folders: files, schema, binaries, defaults, coverage.

    Args:
        folders: Each with ``kernels`` and ``tables``; none means the installed package's.
        report: Told of the progress.
        compiler: None compiles in a pool of processes.
        promise: The folder that promises every cell of the default models; None is the installed one.
            In others missing cells are only reported.

    Raises:
        UsageError: A folder does not exist, or is part of one with kernels and tables.
    """
    work = _Check(report)
    opened = [_open(folder, work) for folder in folders or (package_folder(),)]
    for folder in opened:
        if folder.tables or not folder.whole:  # else there is nothing that it should have
            _files(folder, work)
        _stale(folder, work)
    _binaries([entry for folder in opened for entry in folder.tables], compiler or compile_all, work)
    _tiles([entry for folder in opened for entry in folder.tables], work)
    _defaults(opened, work)
    for folder in opened:
        _coverage(folder, (promise or package_folder()).resolve() == folder.path.resolve(), work)
    return Checked(dict(work.counts), tuple(work.findings))


class _Check:
    """What a check has looked at and found so far."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.counts: collections.Counter[str] = collections.Counter()
        self.findings: list[Finding] = []

    def find(self, kind: str, subject: object, message: str, failed: bool = True) -> None:
        self.findings.append(Finding(kind, str(subject), message, failed))


@dataclass(frozen=True)
class _Entry:
    """A table and the file it came from."""

    path: Path
    table: Table

    def subject(self, row: Row) -> str:
        return f"{self.path.name}: {row.spec.key}@{row.effective_batch}"


@dataclass(frozen=True)
class _Folder:
    path: Path
    tables: tuple[_Entry, ...]
    whole: bool
    """All tables could be read."""


def _open(path: Path, work: _Check) -> _Folder:
    meant = emit.folder_of(path)
    if meant is not None:
        hint = f"name that folder: replayssm-tune check {meant}"
        raise UsageError("not a folder with kernels and tables, but near one", where=str(path), hint=hint)
    if not path.is_dir():
        raise UsageError("no such folder", where=str(path), hint="name a folder with kernels and tables")
    files = sorted((path / "tables").glob("*.json"))
    if not files and any(path.glob("*.json")):
        hint = "put them into a folder 'tables' of another one, let generate --output write the kernels there"
        raise UsageError("tables without a folder of kernels beside theirs", where=str(path), hint=hint)
    entries = []
    for file in files:
        work.counts["tables"] += 1
        try:
            entries.append(_Entry(file, load(file)))
        except TableError as error:
            work.find("schema", file, error.what.removeprefix(f"{file}: "))
    work.counts["rows"] += sum(len(entry.table.rows) for entry in entries)
    if not files:
        work.find("coverage", path, "there is no table: tune for a GPU first")
    return _Folder(path, tuple(entries), len(entries) == len(files))


def _files(folder: _Folder, work: _Check) -> None:
    """Emitted files against fresh renderings."""
    needed = emit.modules(entry.table for entry in folder.tables)
    again = f"write it again: replayssm-tune generate --output {folder.path}"
    for done, (name, module) in enumerate(needed.items(), 1):
        path = folder.path / "kernels" / f"{name}.py"
        work.counts["files"] += 1
        if not path.is_file():
            work.find("generated", path, f"the file is missing; {again}")
        elif path.read_bytes() != emit.source(module).encode():
            work.find("generated", path, f"the file differs from a fresh rendering; {again}")
        work.report(Event("render", done, len(needed), name))
    if folder.whole:
        for path in emit.emitted(folder.path):
            if path.stem not in needed:
                work.find("generated", path, f"no table names this file; {again}")


def _stale(folder: _Folder, work: _Check) -> None:
    for entry in folder.tables:
        batches: dict[Spec, list[int]] = {}
        for row in entry.table.rows:
            if emit.stale(row):
                batches.setdefault(row.spec, []).append(row.effective_batch)
        for spec, found in batches.items():
            work.find(
                "stale",
                f"{entry.path.name}: {spec.key}",
                f"kernels have changed since the rows of effective batch {_listed(found)} were made; they "
                "still serve, tune again before a release",
            )
        old = [row for row in entry.table.convolutions if emit.stale_tile(row)]
        if old:
            message = f"the kernel has changed since {len(old)} tiles were timed; they still serve"
            work.find("stale", f"{entry.path.name}: the convolution", message)


def _binaries(entries: Iterable[_Entry], compiler: Compiler, work: _Check) -> None:
    """Every kernel of every row compiled, and its resources against the records."""
    users: dict[TritonTarget, dict[Kernel, list[str]]] = {}
    held: dict[TritonTarget, list[_Entry]] = {}
    for entry in entries:
        try:
            target = triton_target(_gpu(entry.table.gpu))
        except GpuError as error:
            work.find("compile", entry.path.name, str(error))
            continue
        held.setdefault(target, []).append(entry)
        _add_users(entry, users.setdefault(target, {}))
    total = sum(map(len, users.values()))
    work.counts["kernels"] += total
    before = 0
    for target, kernels in users.items():

        def told(done: int, before: int = before, target: TritonTarget = target) -> None:
            work.report(Event("compile", before + done, total, f"for {target.backend}:{target.arch}"))

        told(0)
        binaries = compiler(_gpu(held[target][0].table.gpu), tuple(kernels), told)
        for kernel, subjects in kernels.items():
            made = binaries[kernel]
            if isinstance(made, str):
                more = f" ({len(subjects)} rows use it)" if len(subjects) > 1 else ""
                subject = subjects[0] if subjects else f"default plan of {kernel[0].key}"
                work.find("compile", subject, f"{kernel[1].key}: {made}{more}")
        for entry in held[target]:
            _resources(entry, binaries, work)
        before += len(kernels)


def _add_users(entry: _Entry, users: dict[Kernel, list[str]]) -> None:
    """Note the rows that use each kernel; default plans, which serve beside rows, are used by none."""
    for row in entry.table.rows:
        for variant in row.plan.variants:
            users.setdefault((row.spec, variant), []).append(entry.subject(row))
        for spec, plan in defaults_beside(row.spec).items():
            for variant in plan.variants:
                users.setdefault((spec, variant), [])


def compile_all(
    gpu: Gpu, kernels: Sequence[Kernel], told: Callable[[int], None]
) -> dict[Kernel, Binary | str]:
    """Compile kernels for ``gpu`` in a pool of processes, afresh.

    Returns:
        The binary of each kernel, or why it does not compile.

    Raises:
        ToolchainError: The toolchain does not work.
    """
    version = check_toolchain()
    made: dict[Kernel, Binary | str] = {}
    with _pool(gpu) as pool:
        for result in pool.run(kernels):
            ok = result.status == "ok"
            made[result.spec, result.variant] = result.binary(version) if ok else result.reason
            told(len(made))
    return made


@contextlib.contextmanager
def _pool(gpu: Gpu) -> Iterator[CompilePool]:
    """Compiler processes that know of nothing compiled before."""
    with (
        tempfile.TemporaryDirectory(prefix="replayssm-check-") as folder,
        CompilePool(gpu, os.cpu_count() or 1, TIMEOUT_S, Path(folder)) as pool,
    ):
        yield pool


def _resources(entry: _Entry, binaries: Mapping[Kernel, Binary | str], work: _Check) -> None:
    """Resources of one table's kernels against those recorded, once a kernel."""
    seen: dict[tuple[Kernel, Binary], Row] = {}
    others: dict[tuple[Kernel, Binary], None] = {}
    version = ""
    for row in entry.table.rows:
        # The record of a stale row is of another kernel.
        if emit.stale(row):
            continue
        for variant, recorded in zip(row.plan.variants, row.binaries, strict=True):
            kernel = (row.spec, variant)
            made = binaries[kernel]
            if isinstance(made, str):
                continue
            version = made.triton
            same = [binary for binary in recorded if binary.triton == version]
            for binary in same:
                seen.setdefault((kernel, binary), row)
            if not same and recorded:
                others[kernel, recorded[-1]] = None
    for (kernel, binary), row in seen.items():
        work.counts["binaries"] += 1
        changes = _changes(binary, binaries[kernel])
        if changes:
            text = ", ".join(f"{name} {old} recorded, {new} now" for name, (old, new) in changes.items())
            work.find("resources", entry.subject(row), f"{kernel[1].key} under triton {version}: {text}")
    _report_others(entry, others, binaries, version, work)


def _report_others(
    entry: _Entry,
    others: Iterable[tuple[Kernel, Binary]],
    binaries: Mapping[Kernel, Binary | str],
    version: str,
    work: _Check,
) -> None:
    """One note on kernels recorded under other Triton versions only: their numbers may differ."""
    fields: collections.Counter[str] = collections.Counter()
    total = different = 0
    versions = set()
    for kernel, binary in others:
        changes = _changes(binary, binaries[kernel])
        total += 1
        different += bool(changes)
        fields.update(changes.keys())
        versions.add(binary.triton)
    if total:
        text = ", ".join(f"{name} in {fields[name]}" for name in RESOURCES if fields[name])
        work.find(
            "resources",
            entry.path.name,
            f"{total} kernels are recorded under triton {', '.join(sorted(versions))} only; under {version} "
            f"{different} of them differ{f': {text}' if text else ''}",
            failed=False,
        )


def _changes(recorded: Binary, made: Binary | str) -> dict[str, tuple[int, int]]:
    pairs = {name: (getattr(recorded, name), getattr(made, name)) for name in RESOURCES}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _tiles(entries: Iterable[_Entry], work: _Check) -> None:
    """Tiles of the convolution: points of their space, and their kernels compile for the table's GPU."""
    for entry in entries:
        gpu = _gpu(entry.table.gpu)
        try:
            triton_target(gpu)
        except GpuError:
            continue  # said of its rows
        users = {TileJob(row.spec, row.tile): row for row in entry.table.convolutions}
        work.counts.update({"tiles": len(users)} if users else {})
        known = [job for job in users if job.tile in tiles(job.spec.token_block)]
        reasons = dict.fromkeys(users, " is not in the space: tune again")
        if known:
            with _pool(gpu) as pool:
                reasons |= {
                    job: f"does not compile: {why}" if why else "" for job, why in pool.run_tiles(known)
                }
        for job, reason in reasons.items():
            if reason:
                subject = f"{entry.path.name}: {job.spec.key}@{users[job].effective_batch}"
                work.find("compile", subject, f"tile {job.tile.key}{reason}")


def _defaults(folders: Iterable[_Folder], work: _Check) -> None:
    """The computed default of every spec is a point of its space."""
    entries = (entry for folder in folders for entry in folder.tables)
    plans: dict[Spec, Plan] = {}
    for row in (row for entry in entries for row in entry.table.rows):
        plans |= defaults_beside(row.spec)
    for spec, plan in plans.items():
        work.counts["defaults"] += 1
        for variant in plan.variants:
            broken = broken_constraint(spec, variant)
            if broken:
                work.find("default", spec.key, f"{variant.key} is not in the space: {broken}")


def _coverage(folder: _Folder, promised: bool, work: _Check) -> None:
    """Cells of the default models that a table lacks: failures where they are promised."""
    for entry in folder.tables:
        held = {(row.spec, row.effective_batch) for row in entry.table.rows}
        missing: dict[Spec, list[int]] = {}
        total = 0
        for spec, batch in promised_cells(_gpu(entry.table.gpu)):
            total += 1
            if (spec, batch) not in held:
                missing.setdefault(spec, []).append(batch)
        work.counts["cells"] += total
        if promised:
            for spec, batches in missing.items():
                message = f"no row for effective batch {_listed(batches)}"
                work.find("coverage", f"{entry.path.name}: {spec.key}", message)
        elif missing:
            count = sum(map(len, missing.values()))
            message = f"{count} of {total} cells of the default models have no row"
            work.find("coverage", entry.path.name, message, failed=False)


def promised_cells(gpu: Gpu) -> Iterator[tuple[Spec, int]]:
    """Spec and effective batch of every cell that the default package covers, native steps included."""
    work, _ = request.resolve_work([models.find(name) for name in models.DEFAULT_MODELS], gpu)
    cells = ((spec, batch) for w in work for spec in (w.spec, w.spec.native) for batch in w.effective_batches)
    return iter(dict.fromkeys(cells))


def _gpu(info: GpuInfo) -> Gpu:
    """The GPU of a table for which kernels are compiled; it need not be in the database."""
    facts = {field.name: getattr(info, field.name) for field in dataclasses.fields(info)}
    return Gpu(**facts, aliases=(), memory_gbps=0, clock_mhz=0, source="its table")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:6]))
    return shown if len(numbers) <= 6 else f"{shown} and {len(numbers) - 6} more"
