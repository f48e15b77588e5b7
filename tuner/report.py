"""What a run has to say: results as plain records, as data, and drawn in the terminal.

Each ``*_info`` turns a record into data made of JSON types only, which is also what ``--json``
prints; each ``draw_*`` shows such data. Tests look at the data, not at the drawing.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..runtime.plan import Plan, Structure, Tile
from ..runtime.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

    from ..codegen.compile import Drop
    from ..runtime.table import Row, Table

Data = dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    """Points of a space that fell out for one reason, e.g. ``shared memory``; one of them by key."""

    reason: str
    count: int
    example: str = ""


def dropped_by_reason(drops: Sequence[Drop]) -> list[Dropped]:
    """``drops`` counted, the most frequent reason first."""
    counts = collections.Counter(drop.reason for drop in drops)
    examples = {drop.reason: drop.variant.key for drop in drops}
    return [Dropped(reason, count, examples[reason]) for reason, count in counts.most_common()]


@dataclass(frozen=True)
class SpecPlan:
    """What is tried for one spec.

    Args:
        spec: The specification, of ``step`` or ``native_step``.
        effective_batches: Where it is tuned.
        points: Points of the space.
        kept: Points that compile and fit, each with a binary of its own; the default is one of them.
        dropped: The others, by reason.
    """

    spec: Spec
    effective_batches: tuple[int, ...]
    points: int
    kept: int
    dropped: tuple[Dropped, ...] = ()


@dataclass(frozen=True)
class Planned:
    """Result of ``plan``. ``estimate_s`` is the time a tune would take, None where nobody knows."""

    gpu: str
    static: bool
    specs: tuple[SpecPlan, ...]
    estimate_s: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Served:
    """What dispatch serves for a cell once the written tables are in place, and why."""

    spec: Spec
    effective_batch: int
    plan: Plan
    step: str
    """Name of the step of the look-up chain that hit."""
    reason: str


@dataclass(frozen=True)
class Tuned:
    """Result of ``tune`` and of ``bench``.

    Args:
        table: What was written.
        table_path: Where.
        modules: Kernel modules written.
        specs: What was tried, by spec.
        served: The look-up's answers for the cells asked for.
        sisters: For static rows: what the measured row of a sister GPU says.
        missing: Cells that were asked for and have no row, as ``spec.key@effective_batch``.
        gate_failures: Points that were numerically wrong, with the gate's words.
        minutes: Wall time.
        store: Where the measurements are.
        static_share: Share of the optimum that the analytical model's picks reach on the recorded
            landscapes: ``median`` and ``p10``; empty where nothing is ranked statically.
        notes: What else the user should know.
    """

    table: Table
    table_path: str
    modules: int
    specs: tuple[SpecPlan, ...]
    served: tuple[Served, ...] = ()
    sisters: Mapping[tuple[str, int], tuple[str, Row]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    gate_failures: tuple[str, ...] = ()
    minutes: float = 0.0
    store: str = ""
    static_share: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Emitted:
    """Result of ``generate``: files written, removed and left as they were, and the tables' rows."""

    table_path: str
    rows: int
    written: tuple[str, ...]
    unchanged: int = 0
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


FINDING_EXITS: Final = {
    "schema": "TABLE",
    "compile": "TOOLCHAIN",
    "generated": "REGRESSION",
    "resources": "REGRESSION",
    "default": "REGRESSION",
    "stale": "OK",
    "coverage": "COVERAGE",
}
"""What a check looks at, worst first, and the exit a failure of it leads to."""


@dataclass(frozen=True)
class Finding:
    """Something ``check`` found.

    Args:
        kind: A key of :data:`FINDING_EXITS`.
        subject: File or row.
        message: What is wrong.
        failed: False for what is only reported, e.g. resources under another Triton version.
    """

    kind: str
    subject: str
    message: str
    failed: bool = True


@dataclass(frozen=True)
class Checked:
    """Result of ``check``: how much was looked at, by kind, and what was found."""

    counts: Mapping[str, int]
    findings: tuple[Finding, ...] = ()


_DEFAULT_TILE: Final = Tile(0, 0)
_TELLING_AXES: Final = ("coefficients", "route")
"""Structural axes whose values need no name beside them."""
_TILE_WORDS: Final = (
    ("fold_block_n", "fold"),
    ("heads_per_program", "heads"),
    ("num_warps", "warps"),
    ("num_stages", "stages"),
    ("max_registers", "regs"),
)


def short(plan: Plan) -> str:
    """A plan in few words: what differs from the plainest kernel, e.g. ``both rebuild 32x128 warps2``."""
    parts = []
    for variant in plan.variants:
        structure, tile = variant.structure, variant.tile
        words = [structure.role]
        for axis in dataclasses.fields(Structure):
            value = getattr(structure, axis.name)
            if axis.name != "role" and value != axis.default:
                words.append(value if axis.name in _TELLING_AXES else f"{axis.name}:{value}")
        words.append(f"{tile.block_p}x{tile.block_n}")
        for name, word in _TILE_WORDS:
            value = getattr(tile, name)
            if value != getattr(_DEFAULT_TILE, name):
                words.append(f"{word}{value}")
        if tile.evict_first:
            words.append("evict")
        parts.append(" ".join(words))
    return " + ".join(parts)


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator is not None else None


def row_info(row: Row) -> Data:
    """One row of a table as data; ratios are times faster, ``roof_share`` is roof over time."""
    newest = [max(binaries, key=lambda b: _version(b.triton)) for binaries in row.binaries if binaries]
    return {
        "spec": row.spec.key,
        "effective_batch": row.effective_batch,
        "plan": row.plan.key,
        "plan_short": short(row.plan),
        "source": row.source,
        "origin": row.origin,
        "time_us": row.time_us,
        "nonflush_time_us": row.nonflush_time_us,
        "flush_time_us": row.flush_time_us,
        "roof_share": _ratio(row.roof_time_us, row.time_us),
        "vs_native": _ratio(row.native_time_us, row.time_us),
        "vs_default": _ratio(row.default_time_us, row.time_us),
        "noise_floor": row.noise_floor,
        "registers": [b.registers for b in newest],
        "spills_bytes": [b.spills_bytes for b in newest],
        "verdict": row.verdict,
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))


def table_info(table: Table, specs: Iterable[str] = ()) -> Data:
    """A table as data: provenance and its rows by spec; ``specs`` restricts it to some keys."""
    wanted = set(specs)
    groups: dict[str, list[Data]] = {}
    for row in table.rows:
        if not wanted or row.spec.key in wanted:
            groups.setdefault(row.spec.key, []).append(row_info(row))
    return {
        "gpu": table.gpu.name,
        "capability": list(table.gpu.capability),
        "sm_count": table.gpu.sm_count,
        "source": table.source,
        "date": table.date,
        "generator": table.generator,
        "toolchain": {
            "triton": table.toolchain.triton,
            "torch": table.toolchain.torch,
            "driver": table.toolchain.driver,
        },
        "specs": [{"spec": key, "rows": rows} for key, rows in groups.items()],
    }


def spec_plan_info(spec_plan: SpecPlan) -> Data:
    """One spec's part of a plan as data; drops are sorted by count."""
    return {
        "spec": spec_plan.spec.key,
        "effective_batches": list(spec_plan.effective_batches),
        "points": spec_plan.points,
        "kept": spec_plan.kept,
        "dropped": [
            {"reason": d.reason, "count": d.count, "example": d.example}
            for d in sorted(spec_plan.dropped, key=lambda d: (-d.count, d.reason))
        ],
    }


def planned_info(planned: Planned) -> Data:
    """A plan as data, with totals over its specs."""
    return {
        "gpu": planned.gpu,
        "static": planned.static,
        "specs": [spec_plan_info(s) for s in planned.specs],
        "cells": sum(len(s.effective_batches) for s in planned.specs),
        "points": sum(s.points for s in planned.specs),
        "kept": sum(s.kept for s in planned.specs),
        "estimate_s": planned.estimate_s,
        "notes": list(planned.notes),
    }


def tuned_info(tuned: Tuned) -> Data:
    """A tune as data; a static row carries the sister GPU's measured row where there is one."""
    table = table_info(tuned.table)
    for group in table["specs"]:
        for row in group["rows"]:
            name, sister = tuned.sisters.get((row["spec"], row["effective_batch"]), ("", None))
            row["sister"] = None if sister is None else {"gpu": name, **row_info(sister)}
    return {
        "table": table,
        "table_path": tuned.table_path,
        "modules": tuned.modules,
        "tried": [spec_plan_info(s) for s in tuned.specs],
        "served": [
            {
                "spec": s.spec.key,
                "effective_batch": s.effective_batch,
                "plan": s.plan.key,
                "plan_short": short(s.plan),
                "step": s.step,
                "reason": s.reason,
            }
            for s in tuned.served
        ],
        "missing": list(tuned.missing),
        "gate_failures": list(tuned.gate_failures),
        "minutes": tuned.minutes,
        "store": tuned.store,
        "static_share": dict(tuned.static_share),
        "notes": list(tuned.notes),
    }


def emitted_info(emitted: Emitted) -> Data:
    """Written files as data."""
    return {
        "table_path": emitted.table_path,
        "rows": emitted.rows,
        "written": list(emitted.written),
        "removed": list(emitted.removed),
        "unchanged": emitted.unchanged,
        "notes": list(emitted.notes),
    }


def checked_info(checked: Checked) -> Data:
    """A check as data; ``exit`` names the exit code of the worst failure, ``OK`` if there is none."""
    failed = {f.kind for f in checked.findings if f.failed}
    exits = [code for kind, code in FINDING_EXITS.items() if kind in failed and code != "OK"]
    return {
        "exit": exits[0] if exits else "OK",
        "counts": dict(checked.counts),
        "findings": [
            {"kind": f.kind, "subject": f.subject, "message": f.message, "failed": f.failed}
            for f in checked.findings
        ],
    }


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent; a dash for nothing."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _grid(title: str, columns: Sequence[str], text_columns: Sequence[str] = ()) -> Grid:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Grid

    grid = Grid(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="left" if column in text_columns else "right", overflow="fold")
    return grid


def draw_table(data: Data, console: Console) -> None:
    """Draw :func:`table_info`: one grid per spec, a row per effective batch."""
    major, minor = data["capability"]
    console.print(
        f"{data['gpu']} (sm_{major}{minor}, {data['sm_count']} SMs), {data['source']}, {data['date']}, "
        f"triton {data['toolchain']['triton']}"
    )
    for group in data["specs"]:
        _draw_rows(group["spec"], group["rows"], console)


def draw_tables(data: Data, console: Console) -> None:
    """Draw several tables, one after the other."""
    for table in data["tables"]:
        draw_table(table, console)
    if not data["tables"]:
        console.print("no tables are installed")


def _draw_rows(title: str, rows: Sequence[Data], console: Console) -> None:
    columns = ["batch", "plan", "µs", "of roof", "vs native", "vs default", "regs", "spills", "source"]
    sisters = any(row.get("sister") for row in rows)
    grid = _grid(title, [*columns, "measured on a sister"] if sisters else columns, ("plan", "source"))
    for row in rows:
        cells = [
            str(row["effective_batch"]),
            row["plan_short"],
            ("~" if row["source"] == "static" and row["time_us"] else "") + number(row["time_us"]),
            _share(row["roof_share"]),
            _times(row["vs_native"]),
            _times(row["vs_default"]),
            "+".join(map(str, row["registers"])) or "-",
            "+".join(map(str, row["spills_bytes"])) or "-",
            f"{row['source']} ({row['origin']})" if row["origin"] else row["source"],
        ]
        if sisters:
            sister = row.get("sister")
            cells.append(f"{sister['gpu']}: {sister['plan_short']}" if sister else "-")
        grid.add_row(*cells)
    console.print(grid)


def _draw_tried(tried: Sequence[Data], console: Console) -> None:
    grid = _grid("tried", ["spec", "batches", "points", "kept", "fell out"], ("spec", "fell out"))
    for entry in tried:
        reasons = ", ".join(f"{d['count']} {d['reason']}" for d in entry["dropped"])
        grid.add_row(
            entry["spec"],
            str(len(entry["effective_batches"])),
            str(entry["points"]),
            str(entry["kept"]),
            reasons or "-",
        )
    console.print(grid)


def draw_planned(data: Data, console: Console) -> None:
    """Draw :func:`planned_info`."""
    mode = "static" if data["static"] else "measured"
    console.print(f"{data['gpu']} ({mode}): {data['cells']} cells, {data['kept']} of {data['points']} points")
    _draw_tried(data["specs"], console)
    if data["estimate_s"] is not None:
        console.print(f"estimated time of a tune: {data['estimate_s'] / 60:.1f} minutes")
    for note in data["notes"]:
        console.print(f"note: {note}")


def draw_served(served: Sequence[Data], console: Console) -> None:
    """Draw what dispatch serves; neighbouring batches with one answer share a line."""
    grid = _grid("dispatch serves", ["spec", "batches", "plan", "because"], ("spec", "plan", "because"))
    for answer, cells in itertools.groupby(served, lambda s: (s["spec"], s["plan_short"], _because(s))):
        batches = [cell["effective_batch"] for cell in cells]
        span = str(batches[0]) if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
        spec, plan, because = answer
        grid.add_row(spec, span, plan, because)
    console.print(grid)


def _because(served: Data) -> str:
    """The reason without what differs from batch to batch."""
    parts = str(served["reason"]).split("; ")
    return "; ".join(part for part in parts if not part.startswith("nearest effective batch"))


def draw_tuned(data: Data, console: Console) -> None:
    """Draw :func:`tuned_info`: what fell out, the rows, what dispatch serves, where everything is."""
    if data["tried"]:
        _draw_tried(data["tried"], console)
    draw_table(data["table"], console)
    if data["served"]:
        draw_served(data["served"], console)
    if data["static_share"]:
        median, p10 = (_share(data["static_share"].get(name)) for name in ("median", "p10"))
        console.print(
            f"the analytical model's picks reach {median} of the optimum on the landscapes that "
            f"it was calibrated on (median; 10th percentile {p10})"
        )
    for failure in data["gate_failures"]:
        console.print(f"numerically wrong, left out: {failure}")
    for note in data["notes"]:
        console.print(f"note: {note}")
    if data["missing"]:
        console.print(f"{len(data['missing'])} cells without a row: {', '.join(data['missing'][:4])} ...")
    rows = sum(len(group["rows"]) for group in data["table"]["specs"])
    console.print(
        f"{rows} rows in {data['table_path']}, {data['modules']} kernels, {data['minutes']:.1f} minutes; "
        f"measurements in {data['store']}"
        if data["store"]
        else f"{rows} rows in {data['table_path']}, {data['modules']} kernels, {data['minutes']:.1f} minutes"
    )


def draw_emitted(data: Data, console: Console) -> None:
    """Draw :func:`emitted_info`."""
    for path in data["written"]:
        console.print(f"wrote {path}")
    for path in data["removed"]:
        console.print(f"removed {path}: no table names it")
    for note in data["notes"]:
        console.print(f"note: {note}")
    console.print(f"{data['rows']} rows in {data['table_path']}; {data['unchanged']} files were up to date")


def draw_checked(data: Data, console: Console) -> None:
    """Draw :func:`checked_info`: failures first."""
    for finding in sorted(data["findings"], key=lambda f: not f["failed"]):
        failed = finding["failed"] and FINDING_EXITS[finding["kind"]] != "OK"
        word = "FAILED" if failed else "note"
        console.print(f"{word} {finding['kind']}: {finding['subject']}: {finding['message']}")
    looked_at = ", ".join(f"{count} {kind}" for kind, count in data["counts"].items())
    failures = sum(f["failed"] for f in data["findings"])
    console.print(f"checked {looked_at}: {failures} failed" if failures else f"checked {looked_at}: all well")
