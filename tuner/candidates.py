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
from ..codegen.compile import Compiled, Drop, require_any, select
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..runtime.defaults import default_plan
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from .progress import Event
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


def work_by_work(work: Iterable[Work], known: Mapping[Spec, Sequence[Variant]]) -> list[tuple[Spec, Variant]]:
    """Every point to compile, all of one work before the next, so that one is measured while others compile.

    Defaults come first: of them all must be right.
    """
    parts = [by_promise(spec_jobs([item]), known) for item in work]
    whole = [job for part in parts for job in part]
    defaults = [(spec, variant) for spec, variant in whole if variant in default_plan(spec).variants]
    return list(dict.fromkeys((*defaults, *whole)))


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


class Compilation:
    """Points on their way through the compiler: those of a spec are there when its last one is.

    Args:
        jobs: The points, in the order in which they are compiled.
        pool: Compiles.
        gpu: Whose limits hold.
        until_s: When (monotonic clock) only default plans are begun any more.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[Spec, Variant]],
        pool: CompilePool,
        gpu: Gpu,
        until_s: float = math.inf,
    ) -> None:
        self.total = len(jobs)
        self.specs = tuple(dict.fromkeys(spec for spec, _ in jobs))
        self.gpu = gpu
        self._asked = Counter((spec, variant.structure.role) for spec, variant in jobs)
        self._missing = Counter(spec for spec, _ in jobs)
        self._defaults = {(spec, variant) for spec, variant in jobs if variant in default_plan(spec).variants}
        self._results: dict[tuple[Spec, str], dict[Variant, Compiled]] = {}
        self._run = pool.begin(in_time(jobs, until_s))

    def collect(self, block: bool = True) -> list[Compiled]:
        """What has been compiled since the last call (see :meth:`.CompileRun.collect`)."""
        results = self._run.collect(block)
        for result in results:
            self._results.setdefault((result.spec, result.variant.structure.role), {})[result.variant] = (
                result
            )
            self._missing[result.spec] -= 1
            self._defaults.discard((result.spec, result.variant))
        return results

    @property
    def back(self) -> int:
        """Points that have been compiled."""
        return self.total - self._missing.total()

    @property
    def done(self) -> bool:
        """Whether everything has been collected."""
        return self._run.done

    def whole(self, spec: Spec) -> bool:
        """Whether nothing of ``spec`` is still to come."""
        return self._run.done or not self._missing[spec]

    @property
    def defaults_back(self) -> bool:
        """Whether the default plans of all specs have been compiled."""
        return not self._defaults

    def candidates(self, spec: Spec) -> Candidates:
        """The points of ``spec``, once they are :meth:`whole`.

        Raises:
            CompileError: The default plans of all specs have been compiled, and of all that was nothing does.
        """
        if self.defaults_back:
            require_any(result for found in self._results.values() for result in found.values())
        candidates = Candidates(spec)
        for role in (role for of, role in self._asked if of == spec):
            by_variant = self._results.get((spec, role), {})
            points = space.points(spec, role)
            ordered = [by_variant[v] for v in points.variants if v in by_variant]
            kept, dropped = select(ordered, self.gpu.limits, points.default)
            candidates.points += points.total
            candidates.dropped += dropped
            candidates.by_role[role] = [result.variant for result in kept]
            candidates.compiled |= by_variant
            for name, count in points.rejected.items():
                candidates.dropped += [Drop(points.variants[0], f"constraint: {name}")] * count
            asked = self._asked[spec, role]
            left = asked - len(by_variant)
            candidates.asked += asked
            candidates.left += left
            candidates.dropped += [Drop(points.variants[0], UNPROMISING)] * (len(points.variants) - asked)
            candidates.dropped += [Drop(points.variants[0], NO_TIME)] * left
        return candidates

    def event(self) -> Event:
        """Where it stands."""
        return Event("compile", self.back, self.total, f"{len(self.specs)} specs")
