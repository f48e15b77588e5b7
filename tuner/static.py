"""Choosing kernels without a GPU: an analytical model of a launch ranks what compiles.

A launch takes the memory's time for its bytes, the multiprocessors' time to issue its instructions
and, for every wave of programs, the time one program waits for itself; all from the binary and the
GPU's data sheet. Constants are fitted to recorded landscapes (``benchmarks/landscape.py --calibrate``),
where the model's picks are scored.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..codegen import space
from ..codegen.compile import Compiled, Drop, check_toolchain, require_any, select
from ..codegen.emit import digest_of
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..codegen.timeouts import TIMEOUT_S
from ..runtime.abi import state_block
from ..runtime.defaults import default_plan
from ..runtime.plan import Plan, Structure, Variant
from ..runtime.spec import DTYPE_BYTES, Spec
from ..runtime.table import Row
from .candidates import NO_TIME, UNPROMISING, by_promise, in_time, left_notes
from .interpreted import InterpretedGate
from .invariance import best_class
from .mix import flush_share
from .progress import Event, Report
from .report import Dropped, Invariant, SpecPlan, dropped_by_reason
from .request import Job, Work
from .rounding import known, significant


@dataclass(frozen=True)
class Constants:
    """What the data sheet does not say. Cycles are of the multiprocessors' clock.

    Attributes:
        launch_us: A launch that does nothing.
        second_launch_us: The coefficient kernel before it.
        issue_rate: Instructions that a scheduler issues per cycle, other programs' waiting hidden.
        instruction_cycles: Cycles per instruction of one program that waits for itself.
        early_cycles, late_cycles, native_cycles: Dependent loads before the loop over heads.
        head_cycles: Wait for the state of one round of the loop where no pipeline hides it.
        score_cycles: Ring scores by dot, on the way to everything else.
        barrier_cycles: Per doubling of the warps.
        fixed_share, head_share: Share of a binary's instructions that run once, and per head (and row
            tile) of its loop: either branch is in the binary.
        native_share: The same for the native step.
        spill_instructions: Per byte of stack and round of the loop.
        evict_gain: Share of the time saved where the state leaves the L2 first.
    """

    launch_us: float = 2.2
    second_launch_us: float = 2.5
    issue_rate: float = 1.2
    instruction_cycles: float = 3.3
    early_cycles: float = 550.0
    late_cycles: float = 1040.0
    native_cycles: float = 520.0
    head_cycles: float = 470.0
    score_cycles: float = 1120.0
    barrier_cycles: float = 120.0
    fixed_share: float = 0.185
    head_share: float = 0.15
    native_share: float = 0.31
    spill_instructions: float = 0.65
    evict_gain: float = 0.005


CONSTANTS: Final = Constants()

RECORDED_SHARE: Final = {"median": 0.995, "p10": 0.937}
"""Share of the optimum that the model's picks reach over the cells of the recorded landscapes."""
RECORDED_FAMILIES: Final = ("mamba2",)
"""Families that there are landscapes of."""

MAX_VARIANTS: Final = 400
"""Points that a static tune compiles at most, over all specs: five minutes on two cores."""

DIGITS: Final = 4
"""Significant digits of a row's estimates."""
TIE: Final = 0.02
"""Estimates closer than this are equal: then the neighbouring batch's choice stays."""

_MAX_PROGRAMS_PER_SM: Final = 32
_DRIVER_SHARED_BYTES: Final = 1024
"""Shared memory that the driver takes per program."""


def traffic_bytes(spec: Spec, effective_batch: int, role: str = "both") -> float:
    """Bytes that a kernel of the mix moves at least: states, the drafts of its rows, and half a ring.

    Native kernels write a state for every token. The first token of a row, which the model's constants
    cover, does not count.
    """
    state = spec.state_bytes(effective_batch)
    activation, drafts = DTYPE_BYTES[spec.activation_dtype], spec.num_tokens - 1
    # x in, y out; B and C.
    inputs = 2 * drafts * activation * (spec.head_dim + spec.state_size / spec.heads_per_group)
    if spec.is_native:
        return state * (1 + spec.num_tokens) + effective_batch * inputs
    width = DTYPE_BYTES[spec.ring_dtype]
    per_head = spec.head_dim * width + 4
    per_group = spec.state_size * width
    tokens = spec.window / 2 + drafts
    ring = tokens * effective_batch * (per_head + per_group / spec.heads_per_group)
    written = 0.0 if role == "nonflush" else state * flush_share(spec)
    return _served(spec, role) * (state + ring + effective_batch * inputs) + written


def _served(spec: Spec, role: str) -> float:
    """Share of the rows of the mix that kernels of ``role`` serve."""
    return {"nonflush": 1 - flush_share(spec), "flush": flush_share(spec)}.get(role, 1.0)


def resident_programs(gpu: Gpu, compiled: Compiled) -> int:
    """Programs of the main kernel that one multiprocessor holds at a time; at least 1."""
    kernel, warps = compiled.step, compiled.variant.tile.num_warps
    registers = -(-kernel.registers // 8) * 8 * 32 * warps
    return max(
        1,
        min(
            gpu.registers_per_sm // registers,
            gpu.shared_bytes_per_sm // (kernel.shared_bytes + _DRIVER_SHARED_BYTES),
            gpu.max_warps_per_sm // warps,
            _MAX_PROGRAMS_PER_SM,
        ),
    )


def estimate_us(
    gpu: Gpu, compiled: Compiled, effective_batch: int, constants: Constants = CONSTANTS
) -> float:
    """Estimated time of one kernel in the staggered mix (native: in every step), in µs."""
    k, spec, variant, kernel = constants, compiled.spec, compiled.variant, compiled.step
    structure, tile = variant.structure, variant.tile
    rounds = variant.rounds(spec.head_dim)
    if structure.role == "native":
        ran = k.native_share * kernel.instructions * spec.num_tokens
        chain = k.native_cycles + k.head_cycles * (spec.num_tokens - 1)
    else:
        ran = kernel.instructions * (k.fixed_share + k.head_share * rounds)
        chain = k.early_cycles if structure.load == "early" else k.late_cycles
        chain += k.score_cycles if structure.scores == "dot" else 0.0
    ran += k.spill_instructions * kernel.spills_bytes * rounds
    waits = 0.0 if tile.num_stages > 1 else k.head_cycles * rounds
    life_cycles = chain + k.barrier_cycles * math.log2(tile.num_warps) + ran * k.instruction_cycles + waits
    programs = effective_batch * variant.row_blocks(spec.head_dim) / rounds
    programs *= _served(spec, structure.role)
    waves = max(1.0, programs / (resident_programs(gpu, compiled) * gpu.sm_count))
    issued = programs * tile.num_warps * ran
    launches = k.launch_us + (k.second_launch_us if len(compiled.kernels) > 1 else 0.0)
    time_us = (
        launches
        + traffic_bytes(spec, effective_batch, structure.role) / (gpu.memory_gbps * 1e3)
        + issued / (4 * gpu.sm_count * gpu.clock_mhz * k.issue_rate)
        + waves * life_cycles / gpu.clock_mhz
    )
    return time_us * (1 - k.evict_gain) if tile.evict_first else time_us


def rank(gpu: Gpu, compiled: Iterable[Compiled], effective_batch: int) -> list[tuple[Variant, float]]:
    """Points of one role with their estimates in µs, best first."""
    estimates = ((c.variant, estimate_us(gpu, c, effective_batch)) for c in compiled)
    return sorted(estimates, key=lambda pair: (pair[1], pair[0]))


def promising(spec: Spec, role: str) -> tuple[Variant, ...]:
    """The points of ``both`` or ``native`` that are worth compiling where nothing can be timed."""
    points = space.points(spec, role)
    return tuple(v for v in points.variants if v == points.default or _is_promising(spec, v))


def _is_promising(spec: Spec, variant: Variant) -> bool:
    structure, tile = variant.structure, variant.tile
    if structure.role == "native":
        return tile.block_n >= 64 and tile.num_warps <= 2
    if tile.fold_block_n < min(32, state_block(spec)):
        return False  # what so few columns gain, registers of a read beside the fold, the model does not know
    if spec.verifies:
        return not tile.max_registers  # few points, none of which has been compared with the others
    if structure.route == "rebuild":
        return spec.family == "gdn"  # few points, and its default is one of them
    if structure != Structure("both", load=structure.load, readout=structure.readout, loop=structure.loop):
        return False
    if structure.load == "early":
        return tile.block_p >= 4 and tile.num_warps <= 4 and tile.evict_first
    if structure.readout == "dot":
        return tile.num_warps <= 2 and not tile.max_registers
    pipelined = tile.num_stages > 1
    return not tile.max_registers and tile.heads_per_program != 2 and pipelined == (tile.num_warps > 1)


def thinned(variants: Sequence[Variant], most: int) -> tuple[Variant, ...]:
    """At most ``most`` of the points, evenly over their order; the first one always."""
    if len(variants) <= most:
        return tuple(variants)
    step = (len(variants) - 1) / max(1, most - 1)
    return tuple(dict.fromkeys(variants[min(len(variants) - 1, round(i * step))] for i in range(most)))


@dataclass(frozen=True)
class StaticTune:
    """Result of :func:`static_tune`.

    Args:
        rows: A row per spec (native ones included) and effective batch.
        specs: What was tried.
        gate_failures: Structures that are numerically wrong in the interpreter.
        share: Of the optimum that the model's picks reach on recorded landscapes.
        notes: What a reader of the rows must know.
        invariant: What batch invariance costs each cell; empty where nobody asked for it.
    """

    rows: tuple[Row, ...]
    specs: tuple[SpecPlan, ...]
    gate_failures: tuple[str, ...]
    share: Mapping[str, float]
    notes: tuple[str, ...]
    invariant: tuple[Invariant, ...] = ()


def static_tune(
    job: Job, cache_dir: Path, workers: int, report: Report, max_variants: int = MAX_VARIANTS
) -> StaticTune:
    """Choose a plan for every cell of ``job`` by analysis; times nothing.

    Args:
        cache_dir: Of the compile pool.
        workers: Compiler processes.
        max_variants: Points to compile over all specs; a trial budget of the job bounds it too. A time budget
            ends compiling, but for default plans.

    Raises:
        CompileError: Nothing compiles.
        ToolchainError: The compiler or Triton's interpreter does not work.
    """
    until_s = job.budget.until_s(time.monotonic())
    version = check_toolchain()
    gpu = job.target.gpu
    works = _works(job)
    chosen = _points(works, min(max_variants, job.budget.trials or max_variants))
    jobs = _listed(chosen)
    results: dict[tuple[Spec, Variant], Compiled] = {}
    structures = dict.fromkeys((spec, variant.structure) for spec, variant in jobs)
    with (
        InterpretedGate(structures, cache_dir / "modules") as gate,
        CompilePool(gpu, workers, TIMEOUT_S, cache_dir) as pool,
    ):
        for done, result in enumerate(pool.run(in_time(jobs, until_s)), 1):
            results[result.spec, result.variant] = result
            report(Event("compile", done, len(jobs), f"{len(chosen)} specs"))
        require_any(results.values())
        wrong = gate.failures(
            lambda done: report(Event("numerics", done, len(structures), "in Triton's interpreter"))
        )
    plans: list[SpecPlan] = []
    rows: list[Row] = []
    costs: list[Invariant] = []
    for spec, variants in chosen.items():
        spaces = [space.points(spec, role) for role in dict.fromkeys(v.structure.role for v in variants)]
        kept: list[Compiled] = []
        drops: list[Drop] = []
        for points in spaces:
            compiled = [results[spec, v] for v in variants if (spec, v) in results]
            of_role = (c for c in compiled if c.variant.structure.role == points.role)
            good, bad = select(of_role, gpu.limits, points.default)
            kept += (c for c in good if (spec, c.variant.structure) not in wrong)
            failed = (c.variant for c in good if (spec, c.variant.structure) in wrong)
            drops += (*bad, *(Drop(v, "gate", wrong[spec, v.structure]) for v in failed))
        batches = sorted({batch for work in works if work.spec == spec for batch in work.effective_batches})
        tried = sum((spec, variant) in results for variant in variants)
        drops += [Drop(variants[0], NO_TIME)] * (len(variants) - tried)
        plans.append(_spec_plan(spaces, len(variants), len(kept), drops, batches))
        # The baseline is there to be compared with: one class would flatter what it is compared to.
        of_one_class = job.batch_invariant and not spec.is_native
        found, cost = _rows(gpu, spec, kept, batches, version, of_one_class)
        rows += found
        costs += cost
    return StaticTune(
        rows=tuple(_with_native_times(rows)),
        specs=tuple(plans),
        gate_failures=tuple(f"{spec.key} {s.key}: {reason}" for (spec, s), reason in wrong.items()),
        share=RECORDED_SHARE,
        notes=(*left_notes(len(jobs), len(jobs) - len(results)), *_notes(chosen)),
        invariant=tuple(costs),
    )


def _notes(specs: Iterable[Spec]) -> tuple[str, ...]:
    specs = tuple(specs)
    unknown = sorted({spec.family for spec in specs} - {*RECORDED_FAMILIES})
    if any(spec.verifies for spec in specs):
        unknown.append("draft verification")
    return (
        "times are estimates of an analytical model, made for ranking",
        *(f"the model has not been compared with measurements of {what} kernels" for what in unknown),
        "numerics were checked in Triton's interpreter, with fp16 in place of bf16",
        "what materialises states keeps its computed default: the model ranks steps alone",
    )


def _role(spec: Spec) -> str:
    return "native" if spec.is_native else "both"


def static_jobs(job: Job) -> list[tuple[Spec, Variant]]:
    """The points that a static tune of ``job`` compiles, in order; a time budget of the job may end it."""
    return _listed(_points(_works(job), min(MAX_VARIANTS, job.budget.trials or MAX_VARIANTS)))


def _listed(chosen: Mapping[Spec, Sequence[Variant]]) -> list[tuple[Spec, Variant]]:
    return by_promise([(spec, variant) for spec, variants in chosen.items() for variant in variants], {})


def _works(job: Job) -> list[Work]:
    """The work of ``job``, each spec with its native baseline."""
    return [part for work in job.work for part in (work, dataclasses.replace(work, spec=work.spec.native))]


def _points(works: Iterable[Work], most: int) -> dict[Spec, tuple[Variant, ...]]:
    """Points to compile by spec: its default plan's, and promising ones, thinned by the same factor."""
    wanted = {work.spec: promising(work.spec, _role(work.spec)) for work in works}
    besides = {spec: [v for v in default_plan(spec).variants if v not in vs] for spec, vs in wanted.items()}
    left = most - sum(map(len, besides.values()))
    share = min(1.0, left / max(1, sum(map(len, wanted.values()))))
    return {
        spec: (*besides[spec], *thinned(vs, max(2, math.floor(share * len(vs)))))
        for spec, vs in wanted.items()
    }


def _spec_plan(
    spaces: Sequence[space.Space], tried: int, kept: int, drops: Sequence[Drop], batches: Sequence[int]
) -> SpecPlan:
    dropped = dropped_by_reason(drops)
    rejected = sum((Counter(points.rejected) for points in spaces), Counter[str]())
    dropped += [Dropped(f"constraint: {name}", count) for name, count in rejected.items()]
    left = sum(len(points.variants) for points in spaces) - tried
    if left:
        dropped.append(Dropped(UNPROMISING, left))
    total = sum(points.total for points in spaces)
    return SpecPlan(spaces[0].spec, tuple(batches), total, kept, tuple(dropped))


def _rows(
    gpu: Gpu,
    spec: Spec,
    compiled: Sequence[Compiled],
    batches: Sequence[int],
    version: str,
    of_one_class: bool = False,
) -> tuple[list[Row], list[Invariant]]:
    """A row per batch: the best estimate, or its neighbour's choice where that ties.

    With ``of_one_class`` the best of the numerics class that costs least over all batches, and what it costs.
    """
    by_variant = {c.variant: c for c in compiled}
    default = default_plan(spec)
    plans = dict.fromkeys((default, *(Plan((v,)) for v in by_variant if v.structure.role == _role(spec))))
    able = [plan for plan in plans if all(v in by_variant for v in plan.variants)]
    rows: list[Row] = []
    costs: list[Invariant] = []
    before: Plan | None = None
    curve: dict[int, dict[Plan, float]] = {}
    for batch in batches if able else ():
        estimates = dict(rank(gpu, compiled, batch))
        curve[batch] = {plan: sum(estimates[v] for v in plan.variants) for plan in able}
    numerics = best_class(list(curve.values()), default) if of_one_class else ""
    for batch, times in curve.items():
        best = min(able, key=lambda plan: (times[plan], plan))
        winner = min((p for p in able if numerics in ("", p.numerics)), key=lambda plan: (times[plan], plan))
        if before is not None and times[before] <= times[winner] * (1 + TIE):
            winner = before
        before = winner
        verdict = f"best of {len(able)} by analysis"
        if numerics:
            regret = times[winner] / times[best] - 1
            costs.append(Invariant(spec, batch, winner, times[winner], best, times[best], regret))
            verdict = f"{verdict} in its numerics class; {regret:.1%} slower than the best of any"
        default_us = times.get(default)
        rows.append(
            Row(
                spec=spec,
                effective_batch=batch,
                plan=winner,
                source="static",
                module_digests=tuple(digest_of(spec, v.structure) for v in winner.variants),
                binaries=tuple((by_variant[v].binary(version),) for v in winner.variants),
                time_us=significant(times[winner], DIGITS),
                native_time_us=None,
                default_time_us=known(default_us, DIGITS),
                roof_time_us=None,
                noise_floor=None,
                nonflush_time_us=None,
                flush_time_us=None,
                nonflush_roof_us=None,
                flush_roof_us=None,
                samples_us=(),
                verdict=verdict,
                origin="",
                numerics=winner.numerics,
                batch_invariant=bool(numerics),
            )
        )
    return rows, costs


def _with_native_times(rows: Sequence[Row]) -> list[Row]:
    native = {(row.spec, row.effective_batch): row.time_us for row in rows if row.spec.is_native}
    return [
        dataclasses.replace(row, native_time_us=native.get((row.spec.native, row.effective_batch)))
        for row in rows
    ]
