"""Tuning on a GPU: compile, gate, search, choose, and the rows with their evidence.

Everything that is compiled is a point of :mod:`..codegen.space`; everything that is timed has
passed the gate; every result is in the store before the next begins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..codegen import space
from ..codegen.compile import Compiled, Drop, select
from ..codegen.emit import digest_of
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..runtime.abi import state_block
from ..runtime.defaults import default_plan
from ..runtime.plan import Plan, Structure, Tile, Variant
from ..runtime.spec import Spec
from ..runtime.table import Row
from .choose import CurvePoint, Rules, Verdict, choose, suspects
from .errors import GateError
from .gpu_bench import GpuBench
from .meter import Budget, Meter
from .progress import Event, Report
from .records import ROLE_MODES, Cell, Measurement, Timing
from .records import Event as Measured
from .report import SpecPlan, dropped_by_reason
from .request import Job, Work
from .search import Ranked, Ranking, Settings, compose, interleave, search
from .search import Space as SearchSpace
from .seeds import seeds
from .shapes import shape_for
from .static import rank
from .store import Store

FINAL_REPEATS = 8
"""Timings of a chosen plan's branches and of the roofs."""
SETTINGS = Settings(repeats=3, enumerate_up_to=400, neighbours_best=6)
RULES = Rules(contenders=5, rounds=4, rounds_before_drop=2, final_rounds=6, finalists=2)
NATIVE_RULES = dataclasses.replace(RULES, contenders=3, rounds=2)
COMPILE_SHARE = 0.4
"""Share of a time budget after which no further point is compiled."""
ROLE_SHARES = {"both": 0.5, "nonflush": 0.1, "flush": 0.1, "native": 0.3}
"""How a budget for searching is divided: one launch for all rows has won nearly every row so far."""
RETRIES = 2
"""How often a row is measured again that does not fit its curve."""

ROOFS = {"read": "roof.read", "scale": "roof.scale"}


@dataclass(frozen=True)
class CellResult:
    """All that a run says of one cell: what a row of the table and of a run file is made of."""

    spec: Spec
    effective_batch: int
    rows: int
    heads: int
    verdict: Verdict
    native: Verdict
    nonflush: Measurement
    flush: Measurement
    default_nonflush: Measurement
    default_flush: Measurement
    read_us: float
    scale_us: float

    @property
    def mix_roof_us(self) -> float:
        """Roof of the staggered mix: one row in ``window`` writes what it reads."""
        return self.read_us + (self.scale_us - self.read_us) / self.spec.window


@dataclass
class Candidates:
    """The points of one spec: those worth timing by role, and why the others are not."""

    spec: Spec
    points: int = 0
    by_role: dict[str, list[Variant]] = field(default_factory=dict)
    compiled: dict[Variant, Compiled] = field(default_factory=dict)
    dropped: list[Drop] = field(default_factory=list)
    gate_failures: list[str] = field(default_factory=list)

    def plan(self, effective_batches: Sequence[int]) -> SpecPlan:
        """What the report says of this spec."""
        return SpecPlan(
            spec=self.spec,
            effective_batches=tuple(effective_batches),
            points=self.points,
            kept=sum(map(len, self.by_role.values())),
            dropped=tuple(dropped_by_reason(self.dropped)),
        )


def spec_jobs(work: Iterable[Work]) -> list[tuple[Spec, Variant]]:
    """Every point to compile for ``work`` and its native baselines, spec by spec."""
    specs = dict.fromkeys(s for w in work for s in (w.spec, w.spec.native))
    return [
        (spec, variant)
        for spec in specs
        for role in space.roles(spec)
        for variant in space.points(spec, role).variants
    ]


def by_promise(
    jobs: Sequence[tuple[Spec, Variant]], known: Mapping[Spec, Sequence[Variant]]
) -> list[tuple[Spec, Variant]]:
    """The same jobs, so ordered that a cut anywhere leaves every spec its likeliest points.

    Defaults come first, then what is ``known`` to have won elsewhere, then the others, evenly over
    the space.
    """
    queues: list[list[tuple[Spec, Variant]]] = []
    for spec in dict.fromkeys(spec for spec, _ in jobs):
        points = [variant for of, variant in jobs if of == spec]
        defaults = [default_plan(spec).variants[0]]
        others = random.Random(spec.key).sample(points, len(points))
        wanted = set(points)
        ordered = dict.fromkeys(v for v in (*defaults, *known.get(spec, ()), *others) if v in wanted)
        queues.append([(spec, variant) for variant in ordered])
    return interleave(queues)


def compile_candidates(
    jobs: Sequence[tuple[Spec, Variant]],
    pool: CompilePool,
    gpu: Gpu,
    found: dict[Spec, Candidates],
    report: Report,
    until_s: float = math.inf,
) -> Iterator[Compiled]:
    """Compile points, yielding each result; ``found`` is filled when all are there.

    After ``until_s`` (monotonic clock) only points of specs that have none are begun.
    """
    found.update((spec, Candidates(spec)) for spec, _ in jobs)
    begun: set[Spec] = set()

    def in_time() -> Iterator[tuple[Spec, Variant]]:
        for spec, variant in jobs:
            if spec not in begun or time.monotonic() < until_s:
                begun.add(spec)
                yield spec, variant

    results: dict[tuple[Spec, str], dict[Variant, Compiled]] = {}
    for done, result in enumerate(pool.run(in_time()), 1):
        results.setdefault((result.spec, result.variant.structure.role), {})[result.variant] = result
        report(Event("compile", done, len(jobs), f"{len(found)} specs"))
        yield result
    for spec, role in dict.fromkeys((spec, variant.structure.role) for spec, variant in jobs):
        by_variant = results.get((spec, role), {})
        points = space.points(spec, role)
        ordered = [by_variant[v] for v in points.variants if v in by_variant]
        kept, dropped = select(ordered, gpu.limits, points.default)
        candidates = found[spec]
        candidates.points += points.total
        candidates.dropped += dropped
        candidates.by_role[role] = [result.variant for result in kept]
        candidates.compiled |= by_variant
        for name, count in points.rejected.items():
            candidates.dropped += [Drop(points.variants[0], f"constraint: {name}")] * count
        left = len(points.variants) - len(by_variant)
        candidates.dropped += [Drop(points.variants[0], "less promising, not compiled")] * left


class MeasuredTune:
    """One tune on the GPU of this machine.

    Args:
        job: What is asked.
        bench: Gates and times.
        store: Remembers.
        report: Is told of progress.
        known: Rows of other tunes, whose winners are tried first.
    """

    def __init__(
        self, job: Job, bench: GpuBench, store: Store, report: Report, known: Sequence[Row] = ()
    ) -> None:
        self._job, self._bench, self._store, self._report = job, bench, store, report
        self._gpu = job.target.gpu
        self._stage = ""
        self.meter = Meter(bench, store, digest=_digest, progress=self._measured)
        curves = {s: work.effective_batches for work in job.work for s in (work.spec, work.spec.native)}
        self._seeds = {
            (spec, batch): seeds(spec, batch, known) for spec, curve in curves.items() for batch in curve
        }
        self._curves = curves
        budget = job.budget
        self._began = time.monotonic()
        self._deadline = math.inf if budget.minutes is None else self._began + 60 * budget.minutes
        self._trials = budget.trials

    def prepare(self, pool: CompilePool) -> dict[Spec, Candidates]:
        """Compile and gate every point; the pool's caches are those of the bench.

        Raises:
            GateError: A default plan is numerically wrong: nothing can be compared with it.
        """
        likely = {
            spec: interleave([self._seeds[spec, batch] for batch in curve])
            for spec, curve in self._curves.items()
        }
        jobs = by_promise(spec_jobs(self._job.work), likely)
        until_s = self._began + COMPILE_SHARE * (self._deadline - self._began)
        found: dict[Spec, Candidates] = {}
        passed: dict[tuple[Spec, Variant], str] = {}
        # The GPU gates what is compiled while the processors compile what is not.
        for result in compile_candidates(jobs, pool, self._gpu, found, self._report, until_s):
            keep = space.points(result.spec, result.variant.structure.role).default
            kept, _ = select([result], self._gpu.limits, keep)
            if kept:
                passed[result.spec, result.variant] = self._gate(result.spec, result.variant)
        for candidates in found.values():
            for role, variants in candidates.by_role.items():
                good = []
                for variant in variants:
                    reason = passed[candidates.spec, variant]
                    if reason:
                        candidates.dropped.append(Drop(variant, "gate", reason))
                        candidates.gate_failures.append(f"{candidates.spec.key} {variant.key}: {reason}")
                    else:
                        good.append(variant)
                candidates.by_role[role] = good
            default = default_plan(candidates.spec).variants[0]
            if default not in candidates.by_role[default.structure.role]:
                why = next(
                    (d.detail or d.reason for d in candidates.dropped if d.variant == default), "dropped"
                )
                raise GateError(
                    f"the default plan of {candidates.spec.key} cannot run here: {why}",
                    hint="this is a fault of the default or of the compiler; report it with `plan --json`",
                )
        return found

    def _gate(self, spec: Spec, variant: Variant) -> str:
        """Empty if the point passed, else why not; remembered in the store."""
        cell, mode, key = Cell(spec, 1), ROLE_MODES[variant.structure.role], variant.key
        digest = _digest(cell, (variant,))
        known = self._store.find(cell, mode, key, "gate", digest)
        if known is None:
            verdict = self._bench.gate(spec, gate_plan(spec, variant))
            status = verdict.status if isinstance(verdict, Timing) else "ok" if verdict.passed else "gate"
            known = self._store.add(
                Measurement(cell, mode, key, status=status, reason=verdict.reason, tag="gate", digest=digest)
            )
        return "" if known.status == "ok" else known.reason or known.status

    def _gated(self, spec: Spec, plan: Plan) -> str:
        """As :meth:`_gate`, of a whole plan."""
        return "; ".join(filter(None, (self._gate(spec, variant) for variant in plan.variants)))

    def cells(self, work: Work, step: Candidates, native: Candidates, share: float = 1.0) -> list[CellResult]:
        """Search and choose along the curve of batches of one spec.

        Args:
            work: The spec and its batches.
            step: Points of the spec.
            native: Points of its native baseline.
            share: Of the budget that is left: half of it to search, half to choose.
        """
        spec = work.spec
        batches = work.effective_batches
        self._stage = spec.key
        share *= 0.5
        left = sum(ROLE_SHARES.values())
        rankings: dict[str, dict[int, Ranking]] = {}
        for role, part in ROLE_SHARES.items():
            budget = self._budget(share * part / left)
            left -= part
            of, among = (spec.native, native) if role == "native" else (spec, step)
            rankings[role] = self._search(of, among, role, batches, budget)
        natives = rankings["native"]
        results: dict[int, CellResult] = {}
        previous: list[Plan] = []
        for i, batch in enumerate(batches):
            plans = _compose(spec, rankings, batch)
            budget = self._budget(share / (len(batches) - i))
            results[batch] = self._cell(spec, batch, plans, natives[batch], previous, budget)
            winner = results[batch].verdict.winner
            previous = [winner] if winner else previous
        for attempt in range(1, RETRIES + 1):
            curve = [self._curve_point(result) for result in results.values()]
            doubtful = suspects(curve, self._gpu.memory_gbps)
            # What has not been compared with the default may lose to it.
            uncompared = {b for b, result in results.items() if result.verdict.default_time_us is None}
            for batch in sorted({*doubtful, *uncompared}):
                plans = _compose(spec, rankings, batch)
                budget = self._budget()
                again = self._cell(spec, batch, plans, natives[batch], [], budget, attempt)
                # A row that was compared with the default gives way to another such row alone.
                compared = [r.verdict.default_time_us is not None for r in (results[batch], again)]
                if again.verdict.winner is not None and compared[1] >= compared[0]:
                    results[batch] = again
        return list(results.values())

    def served_cells(self, work: Work, served: Mapping[tuple[Spec, int], Plan]) -> list[CellResult]:
        """Time given plans of one spec and its native baseline, at every batch.

        Raises:
            GateError: One of them is numerically wrong here.
        """
        spec = work.spec
        self._stage = spec.key
        results = []
        for batch in work.effective_batches:
            step, native = served[spec, batch], served[spec.native, batch]
            for of, plan in ((spec, step), (spec.native, native)):
                verdict = self._gated(of, plan)
                if verdict:
                    raise GateError(
                        f"a served plan fails the gate: {verdict}",
                        where=f"{of.key}@{batch}: {plan.key}",
                        hint="tune this shape anew on this GPU",
                    )
            results.append(self._cell(spec, batch, [step], (Ranked(native.variants[0], 0.0),), [], Budget()))
        return results

    def _search(
        self, spec: Spec, candidates: Candidates, role: str, batches: Sequence[int], budget: Budget
    ) -> dict[int, Ranking]:
        variants = tuple(candidates.by_role.get(role, ()))
        if not variants:
            return dict.fromkeys(batches, ())
        default = default_plan(spec).variants[0]
        first = default if default.structure.role == role else variants[0]
        points = [candidates.compiled[variant] for variant in variants]

        def likely(batch: int) -> list[Variant]:
            won = [v for v in self._seeds[spec, batch] if v.structure.role == role]
            ranked = [v for v, _ in rank(self._gpu, points, batch)] if role in ("both", "native") else []
            return interleave([won, ranked])

        found = SearchSpace(spec, variants, first)
        return search(found, batches, self.meter, budget, likely=likely, settings=SETTINGS)

    def _budget(self, share: float = 1.0) -> Budget:
        """``share`` of the budget that is left."""
        seconds = None if math.isinf(self._deadline) else max(0.0, self._deadline - time.monotonic()) * share
        points = None if self._trials is None else round(max(0, self._trials - self.meter.visited) * share)
        return Budget(points=points, seconds=seconds)

    def _cell(
        self,
        spec: Spec,
        batch: int,
        plans: Sequence[Plan],
        natives: Ranking,
        neighbours: Sequence[Plan],
        budget: Budget,
        attempt: int = 0,
    ) -> CellResult:
        cell = Cell(spec, batch)
        verdict = choose(
            cell,
            plans,
            self.meter,
            mode="mix",
            default=default_plan(spec),
            neighbours=neighbours,
            budget=budget,
            rules=RULES,
            attempt=attempt,
        )
        chosen = verdict.winner or default_plan(spec)
        default = default_plan(spec)
        branch = {
            (plan, mode): self.meter.measure(cell, plan.variants, mode, FINAL_REPEATS, f"final{attempt}")
            for plan in dict.fromkeys((chosen, default))
            for mode in ("nonflush", "flush")
        }
        read_us, scale_us = (self._roof(cell, kind, attempt) for kind in ROOFS)
        rows, heads = dataclasses.astuple(shape_for(spec, batch))
        native = choose(
            Cell(spec.native, batch),
            [Plan((ranked.variant,)) for ranked in natives[:4]],
            self.meter,
            mode="native",
            default=default_plan(spec.native),
            budget=budget,
            rules=NATIVE_RULES,
            attempt=attempt,
        )
        return CellResult(
            spec=spec,
            effective_batch=batch,
            rows=rows,
            heads=heads,
            verdict=verdict,
            native=native,
            nonflush=branch[chosen, "nonflush"],
            flush=branch[chosen, "flush"],
            default_nonflush=branch[default, "nonflush"],
            default_flush=branch[default, "flush"],
            read_us=read_us,
            scale_us=scale_us,
        )

    def _roof(self, cell: Cell, kind: str, attempt: int) -> float:
        mode, subject, tag = "nonflush" if kind == "read" else "flush", ROOFS[kind], f"final{attempt}"
        known = self._store.find(cell, mode, subject, tag)
        if known is None:
            timing = self._bench.roof(cell, kind, FINAL_REPEATS)
            known = self._store.add(
                Measurement(cell, mode, subject, timing.samples_us, timing.status, timing.reason, tag)
            )
        return known.time_us

    def _curve_point(self, result: CellResult) -> CurvePoint:
        state = result.spec.state_bytes(result.effective_batch)
        return CurvePoint(
            result.effective_batch,
            result.verdict.time_us,
            result.verdict.noise_floor,
            round(state * (1 + 1 / result.spec.window)),
        )

    def _measured(self, event: Measured) -> None:
        batch = event.measurement.cell.effective_batch
        self._report(Event(f"{event.stage} {self._stage}", event.done, event.total, f"batch {batch}"))


def _compose(spec: Spec, rankings: Mapping[str, Mapping[int, Ranking]], batch: int) -> tuple[Plan, ...]:
    both, nonflush, flush = (rankings[role][batch] for role in ("both", "nonflush", "flush"))
    return compose(spec, both, nonflush, flush)


def gate_plan(spec: Spec, variant: Variant) -> Plan:
    """The plan that takes one kernel through the gate: a branch needs a partner for the other one."""
    role = variant.structure.role
    if role in ("both", "native"):
        return Plan((variant,))
    block = state_block(spec)
    if role == "nonflush":
        return Plan((variant, Variant(Structure("flush"), Tile(16, block, min(64, block)))))
    return Plan((Variant(Structure("nonflush"), Tile(16, min(64, block))), variant))


def workers() -> int:
    """Compiler processes to run: all processors but one, which the bench needs."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


@functools.lru_cache(maxsize=16384)
def _digest(cell: Cell, variants: tuple[Variant, ...]) -> str:
    return "+".join(digest_of(cell.spec, variant.structure) for variant in variants)


def cache_folder(store: Path | str) -> Path:
    """Where modules and binaries of a tune lie: beside its store, or here where that is a database."""
    return store.parent / "cache" if isinstance(store, Path) else Path(".replayssm/cache")
