"""The points of a search: listed, ordered by promise, compiled, and divided by what is worth timing."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..codegen import space
from ..codegen.compile import Compiled, Drop, select
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..runtime.defaults import default_plan
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from .progress import Event, Report
from .report import SpecPlan, dropped_by_reason
from .request import Work
from .search import interleave


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
    specs = dict.fromkeys(spec for item in work for spec in item.specs)
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
        defaults = default_plan(spec).variants
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

    After ``until_s`` (monotonic clock) only default plans are begun.
    """
    found.update((spec, Candidates(spec)) for spec, _ in jobs)

    def in_time() -> Iterator[tuple[Spec, Variant]]:
        for spec, variant in jobs:
            if variant in default_plan(spec).variants or time.monotonic() < until_s:
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
