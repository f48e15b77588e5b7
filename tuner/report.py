"""What a run has to say: results as plain records, and as data.

Each ``*_info`` turns a record into data made of JSON types only: what ``--json`` prints and
:mod:`.drawing` shows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..codegen import emit
from ..runtime.plan import Plan, Structure, Tile
from ..runtime.spec import Spec

if TYPE_CHECKING:
    from ..codegen.compile import Drop
    from ..runtime.conv_tiles import ConvRow
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
        spec: The specification, of any op that is tuned.
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
class Invariant:
    """What one numerics class for all batches costs at one of them; times in µs, of one run.

    Args:
        spec, effective_batch: The cell.
        plan, time_us: What serves it.
        best, best_time_us: The best plan of any class.
        regret: By which share the first is slower than the second.
    """

    spec: Spec
    effective_batch: int
    plan: Plan
    time_us: float
    best: Plan
    best_time_us: float
    regret: float


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
        invariant: What batch invariance costs each cell; empty where nobody asked for it.
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
    invariant: tuple[Invariant, ...] = ()
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
        "numerics": row.plan.numerics,
        "batch_invariant": row.batch_invariant,
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


def conv_row_info(row: ConvRow) -> Data:
    """One tile of a table as data; shares and ratios as in :func:`row_info`."""
    return {
        "spec": row.spec.key,
        "rows": row.rows,
        "channels": row.channels,
        "effective_batch": row.effective_batch,
        "tile": row.tile.key,
        "time_us": row.time_us,
        "roof_share": _ratio(row.roof_time_us, row.time_us),
        "vs_default": _ratio(row.default_time_us, row.time_us),
        "noise_floor": row.noise_floor,
        "verdict": row.verdict,
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in text.split("."))


def table_info(table: Table) -> Data:
    """A table as data: provenance and its rows by spec, each with whether its kernels have changed since."""
    groups: dict[str, list[Data]] = {}
    for row in table.rows:
        groups.setdefault(row.spec.key, []).append({**row_info(row), "stale": emit.stale(row)})
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
        "convolutions": [{**conv_row_info(row), "stale": emit.stale_tile(row)} for row in table.convolutions],
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
        "batch_invariant": _invariance_info(tuned.invariant),
        "missing": list(tuned.missing),
        "gate_failures": list(tuned.gate_failures),
        "minutes": tuned.minutes,
        "store": tuned.store,
        "static_share": dict(tuned.static_share),
        "notes": list(tuned.notes),
    }


def _invariance_info(cells: Iterable[Invariant]) -> list[Data]:
    """What batch invariance costs, by spec: its numerics class, mean and worst regret, and each batch."""
    found = []
    for spec, group in itertools.groupby(cells, key=lambda cell: cell.spec):
        of_spec = list(group)
        worst = max(of_spec, key=lambda cell: cell.regret)
        mean = math.exp(math.fsum(math.log1p(cell.regret) for cell in of_spec) / len(of_spec)) - 1
        found.append(
            {
                "spec": spec.key,
                "numerics": worst.plan.numerics,
                "mean_regret": mean,
                "worst_regret": worst.regret,
                "worst_batch": worst.effective_batch,
                "cells": [
                    {
                        "effective_batch": cell.effective_batch,
                        "plan": cell.plan.key,
                        "plan_short": short(cell.plan),
                        "time_us": cell.time_us,
                        "best": cell.best.key,
                        "best_short": short(cell.best),
                        "best_time_us": cell.best_time_us,
                        "regret": cell.regret,
                    }
                    for cell in of_spec
                ],
            }
        )
    return found


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
