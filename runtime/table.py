"""Dispatch tables: the records of one GPU's winners, and their JSON form.

A table is one file per GPU. Its records are frozen, know nothing of torch and are checked when
they are made, so that a table that exists is a table that can be served. The JSON form has named
fields only, a fixed order and few lines a row: two tables can be compared with ``diff``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from .codec import decode, encode, json_text
from .conv_tiles import ConvRow, ConvSpec
from .errors import SpecError, TableError, require, require_date
from .plan import PLAN_ROLES, Plan, Structure, Tile, Variant
from .spec import Spec

SCHEMA_VERSION: Final = 1

SOURCES: Final = ("measured", "static", "transferred")
"""Where a row comes from: ``measured`` on the table's GPU; ``static``, ranked by analysis without a
GPU; ``transferred`` from a neighbouring spec or a sister GPU without being timed."""


@dataclass(frozen=True)
class GpuInfo:
    """The GPU a table is for, or the device that asks for a row.

    Raises:
        TableError: A field is empty or not positive.
    """

    name: str
    """As the driver or the GPU database calls it, e.g. ``NVIDIA H200``; a preference, never a key."""
    vendor: str
    """``nvidia``."""
    capability: tuple[int, int]
    """Compute capability, (major, minor)."""
    sm_count: int
    """Streaming multiprocessors, those of the slice on a partitioned GPU."""
    memory_bytes: int
    """Device memory, bytes."""
    l2_bytes: int
    """Second-level cache, bytes; 0 where unknown."""

    def __post_init__(self) -> None:
        require(bool(self.name and self.vendor), "the GPU's name and vendor must not be empty")
        require(self.sm_count >= 1, f"sm_count {self.sm_count} must be at least 1")
        require(self.memory_bytes >= 1, f"memory_bytes {self.memory_bytes} must be at least 1")
        require(self.l2_bytes >= 0, f"l2_bytes {self.l2_bytes} must not be negative")


@dataclass(frozen=True)
class Toolchain:
    """Versions that rows were made with; ``""`` where one does not apply."""

    triton: str
    torch: str
    driver: str


@dataclass(frozen=True)
class Binary:
    """What one Triton version made of one variant, without running it."""

    triton: str
    """Version of Triton."""
    registers: int
    """Registers a thread."""
    spills_bytes: int
    """Stack a thread, bytes."""
    shared_bytes: int
    """Shared memory a program, bytes."""
    size_bytes: int
    """Size of the binary, bytes."""
    digest: str
    """Digest of the binary."""


@dataclass(frozen=True)
class Row:
    """The plan that serves one spec at one effective batch, and the evidence for it.

    Times are medians in microseconds of one step; in a static row they are the analytical model's
    estimates.

    Raises:
        TableError: The fields do not fit each other, or the evidence that ``source`` asks for is missing.
    """

    spec: Spec
    effective_batch: int
    """Sequences times heads on this GPU."""
    plan: Plan
    source: str
    """``measured``, ``static`` or ``transferred``."""
    module_digests: tuple[str, ...]
    """Digest of the module's syntax tree, one per variant of the plan."""
    binaries: tuple[tuple[Binary, ...], ...]
    """Per variant of the plan, one record per Triton version."""
    time_us: float | None
    """The score: the staggered mix of flushing and other rows, or states materialised from whole rings."""
    native_time_us: float | None
    """The fastest native kernel of the same run; None also of what materialises states, which has none."""
    default_time_us: float | None
    """The default plan in the same run."""
    roof_time_us: float | None
    """The score's roof: only the state's bytes are moved."""
    noise_floor: float | None
    """Relative spread of the incumbent against itself, e.g. 0.01."""
    nonflush_time_us: float | None
    """No row flushes."""
    flush_time_us: float | None
    """Every row flushes, or is materialised."""
    nonflush_roof_us: float | None
    """Roof of ``nonflush_time_us``: reading the state."""
    flush_roof_us: float | None
    """Roof of ``flush_time_us``: reading and writing the state."""
    samples_us: tuple[float, ...]
    """Samples behind ``time_us``."""
    verdict: str
    """Why this plan was chosen."""
    origin: str
    """Where a transferred row came from, else ``""``."""
    numerics: str
    """Numerics class as the writer names it: arithmetic and reduction order of outputs and stored states."""
    toolchain: Toolchain | None = None
    """Versions this row was made with, where they are not the table's."""
    date: str = ""
    """ISO date this row was made on, where it is not the table's."""
    batch_invariant: bool = False
    """Whether all rows of the spec in this table are of one numerics class: equal bits at every batch."""

    @property
    def key(self) -> tuple[Spec, int]:
        """What it is found by: one row a table."""
        return (self.spec, self.effective_batch)

    def __post_init__(self) -> None:
        variants = len(self.plan.variants)
        require(self.effective_batch >= 1, f"effective_batch {self.effective_batch} must be at least 1")
        _one_of("source", self.source, SOURCES)
        legal = self.plan.roles in PLAN_ROLES[self.spec.op]
        require(legal, f"op '{self.spec.op}' cannot use plan {self.plan.key}")
        for name in ("module_digests", "binaries"):
            count = len(getattr(self, name))
            require(count == variants, f"{name} has {count} entries for {variants} kernels of the plan")
        require(all(self.module_digests), "a module digest is empty")
        for variant in self.plan.variants:
            _check_tile(variant.tile)
        for name, value in vars(self).items():
            if isinstance(value, float):
                positive = value >= 0 if name == "noise_floor" else value > 0
                require(math.isfinite(value) and positive, f"{name} {value} is not a positive number")
        require(all(math.isfinite(s) and s > 0 for s in self.samples_us), "samples_us must be positive")
        if self.source == "measured":
            require(self.time_us is not None, "a measured row needs time_us")
            require(bool(self.samples_us), "a measured row needs samples_us")
        if self.source == "transferred":
            require(bool(self.origin), "a transferred row must name its origin")
        if self.date:
            require_date(self.date)


@dataclass(frozen=True)
class Table:
    """All rows of one GPU, sorted by spec and effective batch, with their provenance.

    Raises:
        TableError: Provenance is missing, two rows have one key, a static table holds measured rows, or
            batch-invariant rows of a spec stand beside others or are of several numerics classes.
    """

    gpu: GpuInfo
    toolchain: Toolchain
    source: str
    """``measured``, or ``static`` for a table made without a GPU."""
    generator: str
    """Version of the program that wrote the table."""
    date: str
    """ISO date of the newest row."""
    rows: tuple[Row, ...]
    convolutions: tuple[ConvRow, ...] = ()
    """Tiles of the convolution that were timed on this GPU; where there is none, a rule serves."""

    def __post_init__(self) -> None:
        _one_of("source", self.source, SOURCES[:2])
        require(bool(self.generator), "provenance is missing: generator is empty")
        require_date(self.date)
        needed = ("triton", "torch", "driver") if self.source == "measured" else ("triton",)
        for name in needed:
            require(bool(getattr(self.toolchain, name)), f"provenance is missing: toolchain.{name} is empty")
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=lambda row: row.key)))
        for before, after in itertools.pairwise(self.rows):
            require(
                before.key != after.key,
                f"two rows for {after.spec.key} at effective batch {after.effective_batch}",
            )
        by_key: dict[tuple[ConvSpec, int], ConvRow] = {}
        for tile in self.convolutions:
            spec, batch = tile.key
            require(tile.key not in by_key, f"two rows for {spec.key} at effective batch {batch}")
            by_key[tile.key] = tile
        object.__setattr__(self, "convolutions", tuple(by_key[key] for key in sorted(by_key)))
        if self.source == "static":
            timed = bool(self.convolutions) or any(r.source == "measured" for r in self.rows)
            require(not timed, "a static table holds measured rows")
        for spec, group in itertools.groupby(self.rows, key=lambda row: row.spec):
            promises = {(row.batch_invariant, row.batch_invariant and row.plan.numerics) for row in group}
            require(
                len(promises) == 1,
                f"some rows of {spec.key} are batch-invariant, but not all of them are of one numerics class",
            )


def load(path: str | Path) -> Table:
    """Read the table at ``path``.

    Raises:
        TableError: Unreadable file, unknown schema, malformed row or missing provenance; the
            message names file, row and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot read the table: {error}; check the path and its rights") from error
    return loads(text, str(path))


def loads(text: str, where: str = "table") -> Table:
    """Table from its JSON text; ``where`` stands at the head of error messages.

    Raises:
        TableError: As :func:`load`.
    """
    advice = "correct it, or remove the file and tune again"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where}: not JSON ({error}); {advice}") from error
    try:
        require(isinstance(document, dict), "a table is a JSON object")
        _check_schema(document.pop("schema_version", None))
        rows = document.pop("rows", None)
        require(isinstance(rows, list), "rows is missing or not a list")
        document["rows"] = []
        header: Table = decode(Table, document, "")
        return replace(header, rows=tuple(_decode_row(row, i) for i, row in enumerate(rows)))
    except _SchemaError as error:
        raise TableError(f"{where}: {error}") from error
    except (TableError, SpecError) as error:
        raise TableError(f"{where}: {error}; {advice}") from error


def dumps(table: Table) -> str:
    """JSON text of ``table``: the same table gives the same bytes."""
    header = {"schema_version": SCHEMA_VERSION, **encode(replace(table, rows=(), convolutions=()))}
    del header["rows"], header["convolutions"]
    head = ",\n".join(f"  {json_text(name)}: {json_text(value)}" for name, value in sorted(header.items()))
    rows = ",\n".join(_row_text(row) for row in table.rows)
    tail = ",\n".join(f"    {json_text(encode(row))}" for row in table.convolutions)
    if tail:  # said where there are some, so that older versions read all other tables
        tail = f',\n  "convolutions": [\n{tail}\n  ]'
    return f'{{\n{head},\n  "rows": [{rows and chr(10) + rows + chr(10) + "  "}]{tail}\n}}\n'


def save(table: Table, path: str | Path) -> None:
    """Write ``table`` to ``path`` atomically: readers see the old file or the new one, never a part.

    Missing folders are made.

    Raises:
        TableError: The folder is read-only, or the disk is full; the old file is intact.
    """
    path = Path(path)
    # Hidden and without the .json ending, so that a left-over of a crash is never taken for a table.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "x", encoding="utf-8", newline="\n") as file:
                file.write(dumps(table))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TableError(
            f"{path}: cannot write the table: {error.strerror or error}; make room or choose another folder"
        ) from error


def is_stale(row: Row, digest_of: Callable[[Spec, Structure], str]) -> bool:
    """Whether a module of ``row`` has changed since the row was made.

    Args:
        row: Row of a table.
        digest_of: Digest of the module that is rendered today for a spec and structure.
    """
    today = tuple(digest_of(row.spec, variant.structure) for variant in row.plan.variants)
    return today != row.module_digests


def gpu_slug(name: str) -> str:
    """File stem for a GPU's table: ``NVIDIA H100 80GB HBM3`` gives ``h100-80gb-hbm3``."""
    return "-".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word != "nvidia")


class _SchemaError(TableError):
    """The table is of another schema: not a mistake in the file."""


def _check_schema(version: object) -> None:
    require(version is not None, "schema_version is missing")
    if version == SCHEMA_VERSION and not isinstance(version, bool):
        return
    newer = isinstance(version, int) and version > SCHEMA_VERSION
    raise _SchemaError(
        f"schema_version {version!r} is not known, this version reads {SCHEMA_VERSION}; "
        + ("upgrade replayssm-tune to read it" if newer else "tune again to write the table anew")
    )


# The JSON form is the records' own, but for a row's plan: there each launch stands with its
# digest and binaries, so that nothing depends on positions in parallel lists.


@dataclass(frozen=True)
class Launch:
    """One launch of a row's plan in the JSON form."""

    structure: Structure
    tile: Tile
    module_digest: str
    """Digest of the module's syntax tree."""
    binaries: tuple[Binary, ...]
    """One record per Triton version."""


SPLIT_FIELDS: Final = ("plan", "module_digests", "binaries")
"""Fields of :class:`Row` that the JSON form replaces by ``launches``."""

_ROW_LINES: Final = (
    ("spec", "effective_batch"),
    ("source", "origin", "verdict", "numerics", "batch_invariant", "toolchain", "date"),
    ("launches",),
    ("time_us", "native_time_us", "default_time_us", "roof_time_us", "noise_floor"),
    ("nonflush_time_us", "nonflush_roof_us", "flush_time_us", "flush_roof_us"),
    ("samples_us",),
)


def _row_text(row: Row) -> str:
    fields = {f.name: encode(getattr(row, f.name)) for f in dataclasses.fields(row)}
    launches = (
        Launch(variant.structure, variant.tile, digest, binaries)
        for variant, digest, binaries in zip(row.plan.variants, row.module_digests, row.binaries, strict=True)
    )
    fields["launches"] = [encode(launch) for launch in launches]
    if not row.batch_invariant:  # said where it holds, so that older versions read all other tables
        del fields["batch_invariant"]
    lines = []
    for names in _ROW_LINES:
        if names == ("launches",):
            inner = ",\n".join(f"        {json_text(launch)}" for launch in fields["launches"])
            lines.append(f'      "launches": [\n{inner}\n      ]')
        else:
            lines.append(
                "      " + ", ".join(f"{json_text(n)}: {json_text(fields[n])}" for n in names if n in fields)
            )
    return "    {\n" + ",\n".join(lines) + "\n    }"


def _decode_row(data: object, index: int) -> Row:
    where = f"row {index}"
    require(isinstance(data, dict), f"{where}: a row is a JSON object")
    assert isinstance(data, dict)
    spec, batch = data.get("spec"), data.get("effective_batch")
    if isinstance(spec, dict):
        where += f" (op {spec.get('op')}, head_dim {spec.get('head_dim')}, effective_batch {batch})"
    launches: tuple[Launch, ...] = decode(tuple[Launch, ...], data.get("launches", []), f"{where}: launches")
    plain = {name: value for name, value in data.items() if name != "launches"}
    require(bool(launches), f"{where}: field 'launches' is missing or empty")
    row: Row = decode(
        Row,
        plain,
        where,
        plan=lambda: Plan(tuple(Variant(launch.structure, launch.tile) for launch in launches)),
        module_digests=lambda: tuple(launch.module_digest for launch in launches),
        binaries=lambda: tuple(launch.binaries for launch in launches),
    )
    return row


def _check_tile(tile: Tile) -> None:
    for name in ("block_p", "block_n", "heads_per_program", "num_warps", "num_stages"):
        require(getattr(tile, name) >= 1, f"tile: {name} {getattr(tile, name)} must be at least 1")
    for name in ("fold_block_n", "max_registers"):
        require(getattr(tile, name) >= 0, f"tile: {name} {getattr(tile, name)} must not be negative")
    for name in ("block_p", "block_n", "fold_block_n", "num_warps"):
        value = getattr(tile, name)
        require(value & (value - 1) == 0, f"tile: {name} {value} is not a power of two")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    require(value in allowed, f"{name} '{value}' is not one of {', '.join(allowed)}")
