"""Tuning on a GPU: compile, gate, search, choose, and the rows with their evidence.

Everything that is compiled is a point of :mod:`..codegen.space`; everything that is timed has
passed the gate; every result is in the store before the next begins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ..codegen import space
from ..codegen.pool import CompilePool
from ..runtime.defaults import default_plan
from ..runtime.lookup import default_lookup
from ..runtime.plan import PLAN_ROLES, Plan, Variant
from ..runtime.spec import Spec
from ..runtime.table import Row
from .admission import Admission, Preparation, digests
from .candidates import Candidates, Compilation, by_promise, spec_jobs, work_by_work
from .choose import CurvePoint, Rules, Verdict, choose, suspects
from .errors import GateError
from .gpu_bench import GpuBench
from .invariance import Classes
from .meter import Budget, Meter
from .mix import flush_share
from .progress import Event, Report
from .records import Cell, score_mode
from .records import Event as Measured
from .request import Job, Work, curves
from .rows import CellResult
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
ROLE_SHARES = {"both": 0.5, "nonflush": 0.1, "flush": 0.1, "native": 0.3, "materialize": 0.2}
"""How a budget is divided: one launch for all rows has won nearly every row so far. Those of a step and its
baseline add up to 1; what materialises states runs seldom and has few points."""
RETRIES = 2
"""How often a row is measured again that does not fit its curve."""

ROOFS = {"read": "roof.read", "scale": "roof.scale"}


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
        self.meter = Meter(bench, store, digest=digests, progress=self._measured)
        self._admission = Admission(bench, store)
        self._curves = curves(job.work)
        self._seeds = {
            (spec, batch): seeds(spec, batch, known)
            for spec, curve in self._curves.items()
            for batch in curve
        }
        self._began = time.monotonic()
        self._deadline = job.budget.until_s(self._began)
        self._preparation: Preparation | None = None
        self._trials = job.budget.trials

    def prepare(self, pool: CompilePool) -> Preparation:
        """Begin to compile every point; the pool's caches are those of the bench.

        Without a time to keep, points come work by work, and :meth:`cells` measures one while others compile.
        Where time may end compiling, every spec gets its likeliest points first.
        """
        likely = {
            spec: interleave([self._seeds[spec, batch] for batch in curve])
            for spec, curve in self._curves.items()
        }
        work = self._job.work
        timed = math.isfinite(self._deadline)
        jobs = by_promise(spec_jobs(work), likely) if timed else work_by_work(work, likely)
        until_s = self._began + COMPILE_SHARE * (self._deadline - self._began)
        compilation = Compilation(jobs, pool, self._gpu, until_s)
        self._preparation = Preparation(self._admission, compilation, self._report)
        return self._preparation

    def cells(self, work: Work, found: Mapping[Spec, Candidates], share: float = 1.0) -> list[CellResult]:
        """Search and choose along the curve of batches of one spec.

        Args:
            work: The spec and its batches.
            found: Points of the spec and of its native baseline, if it has one.
            share: Of the budget that is left: half of it to search, half to choose.
        """
        spec = work.spec
        batches = work.effective_batches
        self._stage = spec.key
        share *= 0.5
        left = budget_share(work)
        rankings: dict[str, dict[int, Ranking]] = {}
        for of, role in _roles(work):
            budget = self._budget(share * ROLE_SHARES[role] / left)
            left -= ROLE_SHARES[role]
            rankings[role] = self._search(of, found[of], role, batches, budget)
        natives = rankings.get("native", {})
        results: dict[int, CellResult] = {}
        previous: list[Plan] = []
        for i, batch in enumerate(batches):
            plans = _compose(spec, rankings, batch)
            budget = self._budget(share / (len(batches) - i))
            fastest = _fastest(rankings, batch)
            results[batch] = self._cell(
                spec, batch, plans, natives.get(batch), previous, budget, fastest=fastest
            )
            winner = results[batch].verdict.winner
            previous = [winner] if winner else previous

        def again(batch: int, attempt: int) -> CellResult:
            plans = _compose(spec, rankings, batch)
            fastest = _fastest(rankings, batch)
            return self._cell(
                spec, batch, plans, natives.get(batch), [], self._budget(), attempt, fastest=fastest
            )

        self._retry(results, again)
        if self._job.batch_invariant:
            results = self._of_one_class(results, rankings, share)
        return list(results.values())

    def _retry(self, results: dict[int, CellResult], again: Callable[[int, int], CellResult]) -> None:
        """Measure rows ``again`` (batch, attempt) that do not fit their curve; good ones replace them."""
        for attempt in range(1, RETRIES + 1):
            curve = [self._curve_point(result) for result in results.values()]
            doubtful = suspects(curve, self._gpu.memory_gbps)
            # What has not been compared with the default may lose to it.
            uncompared = {b for b, result in results.items() if result.verdict.default_time_us is None}
            for batch in sorted({*doubtful, *uncompared}):
                found = again(batch, attempt)
                # A row that was compared with the default gives way to another such row alone.
                compared = [r.verdict.default_time_us is not None for r in (results[batch], found)]
                if found.verdict.winner is not None and compared[1] >= compared[0]:
                    results[batch] = found

    def _of_one_class(
        self, free: Mapping[int, CellResult], rankings: Mapping[str, Mapping[int, Ranking]], share: float
    ) -> dict[int, CellResult]:
        """Cells whose plans are of the numerics class that costs least over all batches.

        The winner of any class takes part in the final of every row, which says what the class costs.

        Args:
            free: The cells where any class may win, by batch.
            rankings: By role and batch.
            share: Of the budget that is left.
        """
        spec = next(iter(free.values())).spec
        classes = Classes(spec, {batch: result.verdict for batch, result in free.items()}, rankings)
        numerics = classes.choose(self.meter, self._budget(share / 2), RULES.repeats)
        results: dict[int, CellResult] = {}

        def race(batch: int, attempt: int) -> CellResult:
            given = free[batch]
            rivals = [given.verdict.winner] if given.verdict.winner else []
            before = [r.verdict.winner for b, r in results.items() if b < batch and r.verdict.winner]
            return self._cell(
                spec,
                batch,
                classes.plans(batch, numerics),
                given.native,
                before[-1:],
                self._budget(share),
                attempt,
                numerics,
                rivals,
                {mode: Variant.parse(found.subject) for mode, found in given.launches.items()},
            )

        for batch in free:
            results[batch] = race(batch, 0)
        self._retry(results, race)
        return results

    def served_cells(self, work: Work, served: Mapping[tuple[Spec, int], Plan]) -> list[CellResult]:
        """Time given plans of one spec and of its native baseline, if it has one, at every batch.

        Raises:
            GateError: One of them is numerically wrong here.
        """
        spec = work.spec
        self._stage = spec.key
        results = []
        for batch in work.effective_batches:
            plans = {of: served[of, batch] for of in work.specs}
            for of, plan in plans.items():
                verdict = self._admission.refusal(of, plan.variants)
                if verdict:
                    raise GateError(
                        f"a served plan fails the gate: {verdict}",
                        where=f"{of.key}@{batch}: {plan.key}",
                        hint="tune this shape anew on this GPU",
                    )
            natives = tuple(Ranked(p.variants[0], 0.0) for of, p in plans.items() if of.is_native) or None
            results.append(self._cell(spec, batch, [plans[spec]], natives, [], Budget()))
        return results

    def _search(
        self, spec: Spec, candidates: Candidates, role: str, batches: Sequence[int], budget: Budget
    ) -> dict[int, Ranking]:
        variants = tuple(candidates.by_role.get(role, ()))
        if not variants:
            return dict.fromkeys(batches, ())
        default = space.points(spec, role).default
        points = [candidates.compiled[variant] for variant in variants]

        def likely(batch: int) -> list[Variant]:
            won = [v for v in self._seeds[spec, batch] if v.structure.role == role]
            ranked = [v for v, _ in rank(self._gpu, points, batch)] if role in ("both", "native") else []
            return interleave([won, ranked])

        found = SearchSpace(spec, variants, default or variants[0])
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
        natives: Ranking | Verdict | None,
        neighbours: Sequence[Plan],
        budget: Budget,
        attempt: int = 0,
        numerics: str = "",
        rivals: Sequence[Plan] = (),
        fastest: Mapping[str, Variant] = MappingProxyType({}),
    ) -> CellResult:
        """One cell; ``natives`` are kernels of the baseline, if any, or what was chosen of them before.

        ``fastest`` are launches of one branch each that are timed besides, whatever is chosen.
        """
        cell = Cell(spec, batch)
        verdict = choose(
            cell,
            plans,
            self.meter,
            mode=score_mode(spec),
            default=default_plan(spec),
            neighbours=neighbours,
            budget=budget,
            rules=RULES,
            attempt=attempt,
            numerics=numerics,
            rivals=rivals,
        )
        chosen = verdict.winner or default_plan(spec)
        default = default_plan(spec)
        branch = {
            (plan, mode): self.meter.measure(cell, plan.variants, mode, FINAL_REPEATS, f"final{attempt}")
            for plan in dict.fromkeys((chosen, default))
            for mode in (("nonflush", "flush") if score_mode(spec) == "mix" else ())
        }
        launches = {
            mode: self.meter.measure(cell, (variant,), mode, FINAL_REPEATS, f"final{attempt}")
            for mode, variant in fastest.items()
        }
        read_us, scale_us = (self._roof(cell, kind, attempt) for kind in ROOFS)
        rows, heads = dataclasses.astuple(shape_for(spec, batch))
        if natives is not None and not isinstance(natives, Verdict):
            natives = choose(
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
            native=natives,
            branches={mode: found for (plan, mode), found in branch.items() if plan == chosen},
            default_branches={mode: found for (plan, mode), found in branch.items() if plan == default},
            launches={mode: found for mode, found in launches.items() if found.ok},
            read_us=read_us,
            scale_us=scale_us,
            native_steps_us=self._native_steps_us(spec, batch, attempt) if spec.verifies else None,
        )

    def _native_steps_us(self, spec: Spec, batch: int, attempt: int) -> float | None:
        """T times a native step, by the kernel that dispatch serves here; None if that cannot run."""
        step = spec.native_step
        plan = default_lookup().find(step, batch, self._gpu.info).plan
        if self._admission.refusal(step, plan.variants):
            return None
        found = self.meter.measure(
            Cell(step, batch), plan.variants, "native", FINAL_REPEATS, f"final{attempt}"
        )
        return spec.num_tokens * found.time_us if found.ok else None

    def _roof(self, cell: Cell, kind: str, attempt: int) -> float:
        mode, subject, tag = "nonflush" if kind == "read" else "flush", ROOFS[kind], f"final{attempt}"
        ask = functools.partial(self._bench.roof, cell, kind, FINAL_REPEATS)
        return self._store.recall(cell, mode, subject, tag, "", ask).time_us

    def _curve_point(self, result: CellResult) -> CurvePoint:
        state = result.spec.state_bytes(result.effective_batch)
        return CurvePoint(
            result.effective_batch,
            result.verdict.time_us,
            result.verdict.noise_floor,
            round(state * (1 + flush_share(result.spec))),
        )

    def _measured(self, event: Measured) -> None:
        batch = event.measurement.cell.effective_batch
        self._report(Event(f"{event.stage} {self._stage}", event.done, event.total, f"batch {batch}"))
        if self._preparation is not None:
            self._preparation.go_on()


def _roles(work: Work) -> list[tuple[Spec, str]]:
    """Roles that are searched for ``work``, each with the spec that it is of."""
    return [(spec, role) for spec in work.specs for role in space.roles(spec)]


def budget_share(work: Work) -> float:
    """How much of a budget ``work`` gets, next to a step's 1."""
    return sum(ROLE_SHARES[role] for _, role in _roles(work))


def _compose(spec: Spec, rankings: Mapping[str, Mapping[int, Ranking]], batch: int) -> tuple[Plan, ...]:
    whole = PLAN_ROLES[spec.op][0][0]
    both, nonflush, flush = (rankings.get(role, {}).get(batch, ()) for role in (whole, "nonflush", "flush"))
    return compose(spec, both, nonflush, flush)


def _fastest(rankings: Mapping[str, Mapping[int, Ranking]], batch: int) -> dict[str, Variant]:
    """The best launch of its own for the rows of each branch."""
    ranked = {mode: rankings.get(mode, {}).get(batch, ()) for mode in ("nonflush", "flush")}
    return {mode: found[0].variant for mode, found in ranked.items() if found}


def workers(timing: bool) -> int:
    """Compiler processes to run: a processor each, but for one where a bench times beside them."""
    return max(1, len(os.sched_getaffinity(0)) - timing)


def cache_folder(store: Path | str) -> Path:
    """Where modules and binaries of a tune lie: beside its store, or here where that is a database."""
    return store.parent / "cache" if isinstance(store, Path) else Path(".replayssm/cache")
