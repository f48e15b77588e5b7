"""Searching the kernels of one role over a curve of batches, and composing plans of the best.

A curve costs little more than one cell. Three *anchor* batches are screened broadly: a small space
is enumerated if time is no object, any other sampled, from likely points on. Every other batch
measures only the best of its neighbours on both sides, the more of them the farther away they are,
a few likely points, and the default.

Both ways of screening are Optuna studies, asked and told in memory (see ``samplers``): asking a
study in the store would cost a write per parameter. Results go to the store as they come.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import optuna

from ..runtime.plan import Plan, Variant
from ..runtime.spec import Spec
from .meter import Allowance, Budget, Meter
from .mix import flush_share
from .records import ROLE_MODES, Cell, Measurement
from .samplers import SAMPLERS, SpaceSampler


@dataclass(frozen=True)
class Settings:
    """How broadly to search.

    Args:
        repeats: Timings per screened point.
        enumerate_up_to: Spaces of at most so many points are enumerated at an anchor.
        sampled_points: Points sampled from a larger space at each anchor.
        neighbours_best: How many of an adjacent neighbour's best another batch measures (so many
            more for every two steps along the curve), and how many likely points.
        likely_first: Likely points that an anchor begins with.
        sampler: Of larger spaces, a key of ``samplers.SAMPLERS``.
        seed: Of the sampler.
    """

    repeats: int = 3
    enumerate_up_to: int = 400
    sampled_points: int = 200
    neighbours_best: int = 12
    likely_first: int = 24
    sampler: str = "model"
    seed: int = 0


@dataclass(frozen=True)
class Space:
    """The points of one role, as search sees them: legal, compiled and gated.

    Args:
        spec: What all of them compute.
        variants: The points, of one role; the default is added if it is missing.
        default: What the field ships today; measured at every batch.
    """

    spec: Spec
    variants: tuple[Variant, ...]
    default: Variant

    def __post_init__(self) -> None:
        roles = {variant.structure.role for variant in (*self.variants, self.default)}
        if len(roles) != 1:
            raise ValueError(f"a space has one role, not {sorted(roles)}")
        unique = dict.fromkeys((self.default, *self.variants))
        object.__setattr__(self, "variants", tuple(unique))

    @property
    def role(self) -> str:
        """The role of every point."""
        return self.default.structure.role

    @property
    def mode(self) -> str:
        """The mode its points are timed in."""
        return ROLE_MODES[self.role]


@dataclass(frozen=True)
class Ranked:
    """A point and its screened time in µs."""

    variant: Variant
    time_us: float


Ranking = tuple[Ranked, ...]
"""Points of a cell that ran, fastest first."""


def search(
    space: Space,
    batches: Iterable[int],
    meter: Meter,
    budget: Budget | None = None,
    *,
    likely: Callable[[int], Sequence[Variant]] = lambda batch: (),
    settings: Settings | None = None,
) -> dict[int, Ranking]:
    """Rank the points of one role at every batch.

    Args:
        space: The points.
        batches: Effective batches.
        meter: Measures and remembers.
        budget: For this call. However small it is, the default is measured at every batch.
        likely: Points to try first at a batch, likeliest first (winners of sister specs, dtypes or
            GPUs, a model's picks); the nearest point stands in for one that this space lacks.
        settings: How broadly.

    Returns:
        Batch to ranking. A ranking is empty if nothing ran at that batch.
    """
    settings = settings or Settings()
    curve = sorted(set(batches))
    anchors = list(dict.fromkeys(curve[i] for i in (len(curve) // 2, 0, -1))) if curve else []
    others = _by_bisection(curve, anchors)
    reserve = len(others) * (4 * settings.neighbours_best + 1)
    wanted = len(space.variants)
    if wanted > settings.enumerate_up_to:
        wanted = min(wanted, settings.sampled_points)
    allowance = meter.allowance(budget or Budget())
    if allowance.deadline is not None:  # every batch its likely points, before an anchor all of its own
        wanted = min(wanted, 2 * settings.likely_first)
    total = wanted * len(anchors) + reserve
    if budget is not None and budget.points is not None:
        total = max(len(curve), min(total, budget.points))
    meter.begin("search", total)

    snap = SpaceSampler(space.variants)

    def known(batch: int, count: int) -> list[Variant]:
        return [space.default, *dict.fromkeys(snap.nearest(v) for v in likely(batch)[:count])]

    rankings: dict[int, Ranking] = {}
    for i, batch in enumerate(anchors):
        part = wanted / (wanted * (len(anchors) - i) + reserve)
        best = [_best(rankings[b], settings.neighbours_best) for b in anchors[:i]]
        first = list(dict.fromkeys((*known(batch, settings.likely_first), *interleave(best))))
        rankings[batch] = _screen(space, batch, first, meter, allowance.share(part), settings)
    for i, batch in enumerate(others):
        sides = [max(b for b in rankings if b < batch), min(b for b in rankings if b > batch)]
        steps = curve.index(sides[1]) - curve.index(sides[0])
        best = [_best(rankings[b], settings.neighbours_best * max(1, steps // 2)) for b in sides]
        points = interleave([known(batch, settings.neighbours_best), *best])
        share = allowance.share(1 / (len(others) - i))
        rankings[batch] = _visit(space, batch, points, meter, share, settings)
    return {batch: rankings[batch] for batch in curve}


def compose(spec: Spec, both: Ranking, nonflush: Ranking, flush: Ranking, few: int = 4) -> tuple[Plan, ...]:
    """Plans worth timing in the mix: best kernels for both branches, best pairs of one each.

    Pairs are ordered by the time their parts predict for the mix; both kinds alternate, so that a cut
    anywhere leaves some of each.
    """
    share = flush_share(spec)
    pairs = sorted(
        (
            ((1 - share) * a.time_us + share * b.time_us, Plan((a.variant, b.variant)))
            for a in nonflush[:few]
            for b in flush[:few]
        ),
        key=lambda pair: pair[0],
    )
    singles = [Plan((ranked.variant,)) for ranked in both[: 2 * few]]
    return tuple(interleave([[plan for _, plan in pairs], singles]))


def _screen(
    space: Space,
    batch: int,
    first: Sequence[Variant],
    meter: Meter,
    allowance: Allowance,
    settings: Settings,
) -> Ranking:
    """Broad screening of one anchor."""
    cell = Cell(space.spec, batch)
    seed = zlib.crc32(f"{cell.key}|{space.role}|{settings.seed}".encode())
    small = len(space.variants) <= settings.enumerate_up_to
    if small and allowance.left.points is not None:
        small = len(space.variants) <= allowance.left.points
    # What may be cut short goes from likely to unlikely points, not through the list.
    small = small and allowance.left.seconds is None
    sampler = SAMPLERS["enumerate" if small else settings.sampler](space.variants, seed)
    study = optuna.create_study(sampler=sampler)
    worst = 0.0

    def measured(variant: Variant) -> float:
        nonlocal worst
        result = meter.measure(cell, (variant,), space.mode, settings.repeats)
        if result.ok:
            value = math.log(result.time_us)
            worst = max(worst, value)
            return value
        return worst + 1.0  # a failed trial would teach the sampler nothing

    for count, variant in enumerate(first):
        if count and allowance.spent:
            break
        study.add_trial(
            optuna.trial.create_trial(
                params=sampler.parameters(variant),
                distributions=sampler.distributions,
                value=measured(variant),
            )
        )
    points = len(space.variants) if small else settings.sampled_points
    while len(study.get_trials(deepcopy=False)) < points and not (allowance.spent or sampler.exhausted):
        trial = study.ask(sampler.distributions)
        study.tell(trial, measured(sampler.variant(trial)))
    return _ranking(space, cell, meter)


def _visit(
    space: Space,
    batch: int,
    points: Sequence[Variant],
    meter: Meter,
    allowance: Allowance,
    settings: Settings,
) -> Ranking:
    """Measure the given points, the first whatever the budget."""
    cell = Cell(space.spec, batch)
    for count, variant in enumerate(points):
        if count and allowance.spent:
            break
        meter.measure(cell, (variant,), space.mode, settings.repeats)
    return _ranking(space, cell, meter)


def _ranking(space: Space, cell: Cell, meter: Meter) -> Ranking:
    """All that is known of a cell, from whichever run."""
    found: list[tuple[Variant, Measurement]] = [
        (variant, result)
        for variant in space.variants
        if (result := meter.find(cell, (variant,), space.mode)) is not None and result.ok
    ]
    return tuple(sorted((Ranked(v, m.time_us) for v, m in found), key=lambda r: (r.time_us, r.variant)))


def _best(ranking: Ranking, count: int) -> list[Variant]:
    return [ranked.variant for ranked in ranking[:count]]


def interleave(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The first item of each list, then the second of each, and so on; repeats left out."""
    longest = max((len(items) for items in lists), default=0)
    return list(dict.fromkeys(items[i] for i in range(longest) for items in lists if i < len(items)))


def _by_bisection(curve: Sequence[int], done: Iterable[int]) -> list[int]:
    """Batches not done, each between two done before it and as far from both as can be."""
    known = {curve.index(batch) for batch in done}
    order: list[int] = []
    while len(known) < len(curve):
        gaps = sorted(known)
        left, right = max(itertools.pairwise(gaps), key=lambda gap: gap[1] - gap[0])
        middle = (left + right) // 2
        known.add(middle)
        order.append(curve[middle])
    return order
