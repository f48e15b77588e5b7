"""The one way to a measurement: remembered ones from the store, new ones from the bench.

Everything that measures goes through a :class:`Meter`, so that no point is timed twice, every
result is stored before the next begins, and budgets and progress are counted in one place.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..runtime.plan import Plan, Variant
from .records import Bench, Cell, Event, Measurement, Progress, subject_key
from .store import Store


@dataclass(frozen=True)
class Budget:
    """What may be spent; None is no limit.

    Args:
        points: Points visited, remembered ones included: a run that was interrupted and resumed
            then ends where an uninterrupted one would, and repeated runs measure nothing.
        seconds: Time.
    """

    points: int | None = None
    seconds: float | None = None


class Meter:
    """Measures points for search and choosing.

    Args:
        bench: What times a candidate.
        store: Where results are kept and found again.
        digest: Digest of the modules of a candidate, so that a point whose kernel has changed is
            measured anew; by default all points count as unchanged.
        clock: Seconds; only differences matter.
        progress: Called after every result.

    Attributes:
        visited: Results asked for so far.
        measured: How many of them were new measurements.
    """

    def __init__(
        self,
        bench: Bench,
        store: Store,
        *,
        digest: Callable[[Cell, tuple[Variant, ...]], str] = lambda cell, variants: "",
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ) -> None:
        self.store = store
        self.visited = 0
        self.measured = 0
        self._bench = bench
        self._digest = digest
        self._clock = clock
        self._progress = progress
        self._stage = ""
        self._done = self._total = 0

    def begin(self, stage: str, total: int) -> None:
        """Start a stage whose progress is counted by itself."""
        self._stage, self._done, self._total = stage, 0, total

    def identity_of(self, cell: Cell) -> Callable[[Plan], str]:
        """Tells plans of a cell apart, and versions of one plan whose kernels have changed."""
        return lambda plan: f"{plan.key}@{self._digest(cell, plan.variants)}"

    def find(self, cell: Cell, variants: Sequence[Variant], mode: str, tag: str = "") -> Measurement | None:
        """What is remembered of a point; nothing is measured."""
        digest = self._digest(cell, tuple(variants))
        return self.store.find(cell, mode, subject_key(variants), tag, digest)

    def measure(
        self, cell: Cell, variants: Sequence[Variant], mode: str, repeats: int, tag: str = ""
    ) -> Measurement:
        """The measurement of a point, from the store or made now (and then in the store)."""
        kernels = tuple(variants)
        new = self.find(cell, kernels, mode, tag) is None
        ask = functools.partial(self._bench.time, cell, kernels, mode, repeats)
        subject, digest = subject_key(kernels), self._digest(cell, kernels)
        result = self.store.recall(cell, mode, subject, tag, digest, ask)
        self.measured += new
        self.visited += 1
        self._done += 1
        self._total = max(self._total, self._done)
        if self._progress is not None:
            self._progress(Event(self._stage, result, new, self._done, self._total))
        return result

    def allowance(self, budget: Budget) -> Allowance:
        """A budget that starts now."""
        deadline = None if budget.seconds is None else self.now() + budget.seconds
        last = None if budget.points is None else self.visited + budget.points
        return Allowance(self, last, deadline)

    def now(self) -> float:
        """Time of the meter's clock in seconds."""
        return self._clock()


@dataclass(frozen=True)
class Allowance:
    """A running budget."""

    meter: Meter
    last: int | None = None
    deadline: float | None = None

    @property
    def spent(self) -> bool:
        """Whether no further point may be begun."""
        left = self.left
        return left.points == 0 or left.seconds == 0

    @property
    def left(self) -> Budget:
        """What remains, never negative."""
        return Budget(
            points=None if self.last is None else max(0, self.last - self.meter.visited),
            seconds=None if self.deadline is None else max(0.0, self.deadline - self.meter.now()),
        )

    def share(self, part: float) -> Allowance:
        """A budget of ``part`` (0 to 1) of what remains, starting now."""
        left = self.left
        return self.meter.allowance(
            Budget(
                points=None if left.points is None else round(left.points * part),
                seconds=None if left.seconds is None else left.seconds * part,
            )
        )
