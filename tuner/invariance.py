"""Batch invariance: one numerics class for all batches of a spec, and what that costs each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

from ..runtime.defaults import default_plan
from ..runtime.plan import Plan, Variant
from ..runtime.spec import Spec
from .choose import Verdict
from .meter import Budget, Meter
from .records import Cell, score_mode
from .search import Ranking, interleave

CLASS_PLANS: Final = 4
"""Plans that a numerics class sends to each batch."""


def best_class(times: Sequence[Mapping[Plan, float]], default: Plan) -> str:
    """The numerics class that costs least if all batches are served by one.

    What a class costs at a batch is the time of its best plan over that of the best plan of any class; over
    the batches the geometric mean counts, since dispatch serves each of them and nobody knows how often. Of
    classes that are equal to a thousandth the default's is taken. A class that ran at more batches comes
    before any that ran at fewer.

    Args:
        times: Per batch, plans that ran with their times, all in one unit.
        default: The default plan.
    """
    costs: dict[str, list[float]] = {default.numerics: []}
    for found in times:
        fastest = min(found.values(), default=math.nan)
        of_class: dict[str, float] = {}
        for plan, time in found.items():
            of_class[plan.numerics] = min(time, of_class.get(plan.numerics, math.inf))
        for numerics, time in of_class.items():
            costs.setdefault(numerics, []).append(math.log(time / fastest))

    def order(numerics: str) -> tuple[object, ...]:
        mean = sum(costs[numerics]) / max(1, len(costs[numerics]))
        return -len(costs[numerics]), round(mean, 3), numerics != default.numerics, numerics

    return min(costs, key=order)


def of_class(numerics: str, rankings: Sequence[Ranking], few: int = 2) -> tuple[Plan, ...]:
    """Plans of a numerics class, of the best ``few`` kernels of each ranking that belong in it.

    Args:
        numerics: As :attr:`Plan.numerics` has it.
        rankings: Of any roles and batches, the most telling first.
        few: Kernels of each ranking and role.
    """
    kernels: list[list[Variant]] = []
    for part in numerics.split("+"):
        of_part = ([r.variant for r in ranking if r.variant.numerics == part] for ranking in rankings)
        kernels.append(list(dict.fromkeys(itertools.chain(*(found[:few] for found in of_part)))))
    return tuple(Plan(variants) for variants in itertools.product(*kernels))


class Classes:
    """The numerics classes that may serve all batches of a spec, with their plans at each.

    They are those of the default plan and of what won or tied at some batch.

    Args:
        spec: Of a step, or of what materialises states.
        free: By batch, what was chosen where any class could win.
        rankings: By role and batch.
    """

    def __init__(
        self, spec: Spec, free: Mapping[int, Verdict], rankings: Mapping[str, Mapping[int, Ranking]]
    ) -> None:
        self._spec, self._mode = spec, score_mode(spec)
        self._rankings = {role: found for role, found in rankings.items() if role != "native"}
        self._default = default_plan(spec)
        self._won = {batch: verdict.winner for batch, verdict in free.items()}
        tied = [Plan.parse(key) for verdict in free.values() for key in verdict.tied]
        known = (self._default, *filter(None, self._won.values()), *tied)
        self._classes = tuple(dict.fromkeys(plan.numerics for plan in known))

    def plans(self, batch: int, numerics: str) -> list[Plan]:
        """The most promising plans of a class at a batch, likeliest first.

        They are what won here or nearby, and what the search ranks first here and elsewhere.
        """
        nearest = sorted(self._won, key=lambda other: (abs(math.log(other / batch)), other))
        won = [p for b in nearest if (p := self._won[b]) is not None and p.numerics == numerics]
        ranked = [of_role[b] for b in nearest for of_role in self._rankings.values()]
        here = of_class(numerics, ranked[: len(self._rankings)])
        anywhere = of_class(numerics, ranked, few=1)
        return list(dict.fromkeys((*won[:1], *here[:2], *won, *anywhere)))[:CLASS_PLANS]

    def choose(self, meter: Meter, budget: Budget, repeats: int) -> str:
        """Time the plans of every class at every batch; the class that costs least (:func:`best_class`).

        What the search has timed is not timed again. Without a budget the default is timed all the same.
        """
        allowance = meter.allowance(budget)
        meter.begin("class", CLASS_PLANS * len(self._classes) * len(self._won))
        times = []
        for i, batch in enumerate(self._won):
            part = allowance.share(1 / (len(self._won) - i))
            cell, found = Cell(self._spec, batch), dict[Plan, float]()
            wanted = interleave([self.plans(batch, numerics) for numerics in self._classes])
            for plan in dict.fromkeys((self._default, *wanted)):
                spent = part.spent and plan != self._default
                if spent and meter.find(cell, plan.variants, self._mode) is None:
                    continue
                result = meter.measure(cell, plan.variants, self._mode, repeats)
                if result.ok:
                    found[plan] = result.time_us
            times.append(found)
        return best_class(times, self._default)
