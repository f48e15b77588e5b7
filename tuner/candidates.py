"""The points of a search: listed, ordered by promise, compiled, and divided by what is worth timing."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

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

UNPROMISING: Final = "less promising, not compiled"
NO_TIME: Final = "no time left, not compiled"


@dataclass
class Candidates:
    """The points of one spec: those worth timing by role, and why the others are not."""

    spec: Spec
    points: int = 0
    by_role: dict[str, list[Variant]] = field(default_factory=dict)
    compiled: dict[Variant, Compiled] = field(default_factory=dict)
    dropped: list[Drop] = field(default_factory=list)
    gate_failures: list[str] = field(default_factory=list)
    asked: int = 0
    """Points to compile."""
    left: int = 0
    """Those that there was no time for."""

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


def in_time(jobs: Iterable[tuple[Spec, Variant]], until_s: float) -> Iterator[tuple[Spec, Variant]]:
    """The jobs that are read before ``until_s`` (monotonic clock); those of default plans always."""
    for spec, variant in jobs:
        if time.monotonic() < until_s or variant in default_plan(spec).variants:
            yield spec, variant


def left_notes(asked: int, left: int) -> tuple[str, ...]:
    """What a user is told of points that were to be compiled and that there was no time for."""
    if not left:
        return ()
    return (
        f"time for compiling was over before {left} of {asked} points: the same command finds what was "
        "compiled, and takes more",
    )


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
    results: dict[tuple[Spec, str], dict[Variant, Compiled]] = {}
    for done, result in enumerate(pool.run(in_time(jobs, until_s)), 1):
        results.setdefault((result.spec, result.variant.structure.role), {})[result.variant] = result
        report(Event("compile", done, len(jobs), f"{len(found)} specs"))
        yield result
    for (spec, role), asked in Counter((spec, variant.structure.role) for spec, variant in jobs).items():
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
        left = asked - len(by_variant)
        candidates.asked += asked
        candidates.left += left
        candidates.dropped += [Drop(points.variants[0], UNPROMISING)] * (len(points.variants) - asked)
        candidates.dropped += [Drop(points.variants[0], NO_TIME)] * left
