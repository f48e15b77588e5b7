"""Choosing the plan of a cell by a paired race, and checking rows along the curve of batches.

Times of two launches minutes apart differ by more than the plans do. So contenders are timed in
rounds, each forwards and then backwards (A B B A), which cancels drift; they are compared by ratios
within rounds, and a bootstrap over rounds says how sure a ratio is. In the final rounds one plan
runs twice under two names (A/A): what those two differ by is the noise floor, and no smaller
difference counts.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..runtime.plan import Plan
from .meter import Allowance, Budget, Meter
from .records import Cell

_CONTROL: Final = "control"


@dataclass(frozen=True)
class Rules:
    """How a winner is chosen.

    Args:
        keep_within: Plans screened slower than this factor of the best do not race.
        contenders: At most so many race, default and incumbent not counted.
        rounds: Rounds of the race.
        rounds_before_drop: Rounds before the first contender may be dropped.
        final_rounds: Rounds of the final.
        finalists: Contenders of the final, default, incumbent and control not counted.
        repeats: Timings per visit of a plan, screening included; a round visits each plan twice.
        confidence: Of the bootstrap interval.
        least_gain: A winner beats the default by at least this share.
        least_floor: The noise floor is taken to be at least this share.
        resamples: Of the bootstrap.
    """

    keep_within: float = 1.5
    contenders: int = 8
    rounds: int = 6
    rounds_before_drop: int = 3
    final_rounds: int = 8
    finalists: int = 3
    repeats: int = 3
    confidence: float = 0.95
    least_gain: float = 0.01
    least_floor: float = 0.002
    resamples: int = 1000


@dataclass(frozen=True)
class Verdict:
    """What was chosen for a cell, and how sure that is.

    Args:
        winner: The plan; None if nothing ran.
        time_us: Its median time in the final rounds, µs; infinite if nothing ran.
        default_time_us: The default's, same rounds; None if it did not run.
        margin: Default time / winner time - 1, the median of the paired ratios; None likewise.
        noise_floor: Share by which the same plan differs from itself.
        samples_us: The winner's times in the final rounds.
        kind: ``winner`` (beats the default), ``tie`` (chosen among equals by preference),
            ``default`` (nothing beats it), ``class`` (of a numerics class in which nothing beats the
            default, which is of another) or ``none``.
        reason: One sentence.
        tied: Keys of the plans that are as fast as the fastest, within the floor.
        failed: Plan key to reason, for plans that did not run.
        numerics: The numerics class that the winner had to be of; "" where any could win.
        best: With a class, the fastest plan of any class in the same final rounds.
        best_time_us: Its median time, µs.
        regret: Winner time / its time - 1, the median of the paired ratios.
    """

    winner: Plan | None
    time_us: float
    default_time_us: float | None
    margin: float | None
    noise_floor: float
    samples_us: tuple[float, ...]
    kind: str
    reason: str
    tied: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    numerics: str = ""
    best: Plan | None = None
    best_time_us: float | None = None
    regret: float | None = None


def simplicity(plan: Plan) -> tuple[object, ...]:
    """Sort key, simplest plan first: launches, then structure, then what a tile asks for."""
    structures = [v.structure for v in plan.variants]
    tiles = [v.tile for v in plan.variants]
    return (
        sum(len(s.kernels) for s in structures),
        sum(s.takes_scratch for s in structures),
        sum(s.route != "output_only" for s in structures),
        sum((s.readout, s.scores).count("dot") for s in structures),
        sum(s.loop != "heads" for s in structures),
        sum(t.max_registers != 0 for t in tiles),
        sum(t.evict_first for t in tiles),
        max(t.heads_per_program for t in tiles),
        max(t.num_stages for t in tiles),
        max(t.num_warps for t in tiles),
        plan.key,
    )


def choose(
    cell: Cell,
    candidates: Iterable[Plan],
    meter: Meter,
    *,
    mode: str,
    default: Plan,
    incumbent: Plan | None = None,
    neighbours: Sequence[Plan] = (),
    budget: Budget | None = None,
    rules: Rules | None = None,
    attempt: int = 0,
    numerics: str = "",
    rivals: Sequence[Plan] = (),
) -> Verdict:
    """Choose the plan of a cell.

    Args:
        cell: What the plan is for.
        candidates: Plans that passed the gate, likeliest first.
        meter: Measures and remembers; a resumed race continues where it stopped.
        mode: ``mix`` for steps, ``native`` for the baseline.
        default: Always a candidate, however slow.
        incumbent: What the table has now, if anything; kept within a tie.
        neighbours: What neighbouring cells use; preferred next within a tie.
        budget: When it is spent the race goes straight to the final.
        rules: How.
        attempt: Another number makes a cell be measured again, remembered rounds not counting.
        numerics: Only plans of this numerics class may win; the default is timed even if it is of another.
        rivals: Timed in the final like the default, so that it shows what the class costs.

    Returns:
        The verdict; deterministic, given the measurements.
    """
    rules = rules or Rules()
    race = _Race(cell, mode, meter, rules, attempt, numerics)
    allowance = meter.allowance(budget or Budget())
    held = [plan for plan in (default, incumbent, *rivals) if plan is not None]
    field = list(dict.fromkeys((*held, *neighbours, *candidates)))
    expected = 2 * rules.rounds * (rules.contenders + 1) + 2 * rules.final_rounds * (rules.finalists + 3)
    meter.begin("race", len(field) + expected)

    screened = race.screen(field, held, allowance)
    if not screened:
        return race.nothing_ran()
    ranked = sorted(screened, key=lambda plan: (screened[plan], plan.key))
    able = [plan for plan in ranked if race.may_win(plan)]
    within = max(rules.keep_within, 1 + 3 * race.spread)
    race.run([p for p in able if screened[p] <= within * screened[able[0]]][: rules.contenders], allowance)

    control = next((p for p in (incumbent, default, *ranked) if p in screened and p not in race.failed), None)
    known = [plan for plan in neighbours if plan in race.alive][:1]
    final = dict.fromkeys((*race.alive[: rules.finalists], *known, *(p for p in held if p in screened)))
    if control is None or not race.final([p for p in final if p not in race.failed], control):
        return race.nothing_ran()
    return race.verdict(default, incumbent, neighbours)


class _Race:
    """The measurements of one choice: visits of plans in rounds, and ratios between them."""

    def __init__(
        self, cell: Cell, mode: str, meter: Meter, rules: Rules, attempt: int, numerics: str
    ) -> None:
        self._cell, self._mode, self._meter, self._rules = cell, mode, meter, rules
        self._numerics = numerics
        self._prefix = f"again{attempt}." if attempt else ""
        self._seed = zlib.crc32(f"{cell.key}|{mode}".encode())
        self._times: dict[str, list[float]] = {}
        self._samples: dict[str, list[float]] = {}
        self._floor = rules.least_floor
        self.failed: dict[Plan, str] = {}
        self.alive: list[Plan] = []
        self._finalists: list[Plan] = []
        self.spread = 0.0
        """Relative spread of the samples of a screened plan, the median over plans."""

    def may_win(self, plan: Plan) -> bool:
        """Whether the plan is of the class that was asked for, if one was."""
        return self._numerics in ("", plan.numerics)

    def screen(self, field: Sequence[Plan], held: Sequence[Plan], allowance: Allowance) -> dict[Plan, float]:
        """Time of each plan that runs; those in ``held`` are timed whatever the budget."""
        times: dict[Plan, float] = {}
        spreads = []
        for plan in field:
            spent = times and plan not in held and allowance.spent
            if spent and self._meter.find(self._cell, plan.variants, self._mode, self._prefix) is None:
                continue  # what the search has timed costs nothing
            # Without a prefix this is the search's own tag: what the search timed is remembered.
            result = self._meter.measure(
                self._cell, plan.variants, self._mode, self._rules.repeats, self._prefix
            )
            if not result.ok:
                self.failed[plan] = f"{result.status}: {result.reason}"
                continue
            times[plan] = result.time_us
            spreads.append((max(result.samples_us) - min(result.samples_us)) / result.time_us)
        self.spread = float(np.median(spreads)) if spreads else 0.0
        return times

    def run(self, contenders: Sequence[Plan], allowance: Allowance) -> None:
        """Race; what remains stands in ``alive``, fastest first."""
        self.alive = list(contenders)
        for number in range(self._rules.rounds):
            if len(self.alive) < 2 or allowance.spent:
                break
            self._round(f"race{number}", {plan.key: plan for plan in self.alive})
            self.alive = [plan for plan in self.alive if plan not in self.failed]
            if number + 1 < self._rules.rounds_before_drop or not self.alive:
                continue
            best = min(self.alive, key=self._time)
            # A difference below the least floor is none, however sure it is.
            tie = 1.0 + self._rules.least_floor
            self.alive = [p for p in self.alive if p is best or self._interval(p.key, best.key)[0] <= tie]
        if self._times:
            self.alive.sort(key=self._time)

    def final(self, finalists: Sequence[Plan], control: Plan) -> bool:
        """Final rounds, ``control`` running twice; whether anything ran."""
        self._times, self._samples = {}, {}
        entries = {plan.key: plan for plan in (*finalists, control)}
        entries[_CONTROL] = control
        for number in range(self._rules.final_rounds):
            self._round(f"final{number}", {k: p for k, p in entries.items() if p not in self.failed})
        self._finalists = [p for p in dict.fromkeys(entries.values()) if p not in self.failed]
        if not any(map(self.may_win, self._finalists)):
            return False
        if control not in self.failed:
            low, high = self._interval(_CONTROL, control.key)
            self._floor = max(self._floor, high - 1.0, 1.0 / low - 1.0)
        return True

    def verdict(self, default: Plan, incumbent: Plan | None, neighbours: Sequence[Plan]) -> Verdict:
        """The winner of the final."""
        able = [plan for plan in self._finalists if self.may_win(plan)]
        fastest = min(able, key=self._time)
        tied = [p for p in able if self._ratio(p.key, fastest.key) <= 1.0 + self._floor]
        needed = max(self._rules.least_gain, self._floor)
        reason = ""
        if default in self._finalists:
            gains = {plan: self._ratio(default.key, plan.key) - 1.0 for plan in tied}
            better = [plan for plan in tied if gains[plan] > needed]
            if not better:
                reason = f"nothing beats the default by {needed:.1%}; the best by {max(gains.values()):.1%}"
        else:
            better = tied
        behind = not better and not self.may_win(default)
        if behind:
            better = tied
        preferences: list[tuple[str, Plan | None]] = [("what the table has", incumbent)]
        preferences += [("what a neighbouring cell uses", plan) for plan in neighbours]
        preferences.append(("the simplest", min(better, key=simplicity, default=None)))
        why, winner = next(((why, p) for why, p in preferences if p in better), ("", None))
        if winner is None:
            kind, winner = "default", default
        elif behind:
            kind = "class"
        elif len(better) > 1:
            kind = "tie"
            reason = f"{why} of {len(better)} plans within {self._floor:.1%} of the fastest"
        else:
            kind, reason = "winner", "fastest beyond the noise floor"
        if default not in self._finalists:
            reason += f"; the default did not run ({self.failed.get(default, 'no reason known')})"
        if winner == default:
            margin: float | None = 0.0
        elif default in self._finalists:
            margin = self._ratio(default.key, winner.key) - 1.0
        else:
            margin = None
        best = min(self._finalists, key=self._time) if self._numerics else None
        regret = max(0.0, self._ratio(winner.key, best.key) - 1.0) if best else None
        if best and regret is not None:
            reason += f"; {regret:.1%} slower than the best of any numerics class"
        return Verdict(
            winner=winner,
            time_us=float(np.median(self._samples[winner.key])),
            default_time_us=(
                float(np.median(self._samples[default.key])) if default in self._finalists else None
            ),
            margin=margin,
            noise_floor=self._floor,
            samples_us=tuple(self._samples[winner.key]),
            kind=kind,
            reason=reason,
            tied=tuple(sorted(p.key for p in tied)),
            failed=self._failures(),
            numerics=self._numerics,
            best=best,
            best_time_us=float(np.median(self._samples[best.key])) if best else None,
            regret=regret,
        )

    def nothing_ran(self) -> Verdict:
        reason = "no plan ran"
        if self.failed:
            reason += f"; the first failed with {next(iter(self.failed.values()))}"
        failed = self._failures()
        return Verdict(
            None,
            math.inf,
            None,
            None,
            self._floor,
            (),
            "none",
            reason,
            failed=failed,
            numerics=self._numerics,
        )

    def _failures(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted((plan.key, reason) for plan, reason in self.failed.items()))

    def _round(self, name: str, entries: Mapping[str, Plan]) -> None:
        """Visit every entry forwards, then backwards; one time per entry, of both visits."""
        # Who takes part, and in which version: remembered visits of another round are no pair of these.
        group = zlib.crc32("|".join(map(self._meter.identity_of(self._cell), entries.values())).encode())
        samples: dict[str, list[float]] = {key: [] for key in entries}
        visits: dict[str, list[float]] = {key: [] for key in entries}
        for position, key in enumerate((*entries, *reversed(list(entries)))):
            plan = entries[key]
            if plan in self.failed:
                continue
            result = self._meter.measure(
                self._cell,
                plan.variants,
                self._mode,
                self._rules.repeats,
                f"{self._prefix}{name}.{group:08x}.{position}",
            )
            if result.ok:
                visits[key].append(result.time_us)
                samples[key].extend(result.samples_us)
            else:
                self.failed[plan] = f"{result.status}: {result.reason}"
        for key, times in visits.items():
            if len(times) == 2:
                self._times.setdefault(key, []).append(math.sqrt(times[0] * times[1]))
                self._samples.setdefault(key, []).extend(samples[key])

    def _time(self, plan: Plan) -> tuple[float, str]:
        return float(np.median(self._times[plan.key])), plan.key

    def _logs(self, key: str, other: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        pairs = zip(self._times[key], self._times[other], strict=False)
        return np.array([math.log(a / b) for a, b in pairs])

    def _ratio(self, key: str, other: str) -> float:
        """Median over rounds of the time of one entry over that of another."""
        return float(np.exp(np.median(self._logs(key, other))))

    def _interval(self, key: str, other: str) -> tuple[float, float]:
        """Bootstrap interval of :meth:`_ratio`."""
        logs = self._logs(key, other)
        random = np.random.default_rng(self._seed)
        picks = random.integers(0, len(logs), size=(self._rules.resamples, len(logs)))
        medians = np.median(logs[picks], axis=1)
        tail = (1.0 - self._rules.confidence) / 2
        low, high = np.quantile(medians, [tail, 1.0 - tail])
        return float(np.exp(low)), float(np.exp(high))


@dataclass(frozen=True)
class CurvePoint:
    """A row as the curve check sees it.

    Args:
        effective_batch: Sequences x heads.
        time_us: Of the row's plan.
        noise_floor: Share, from the verdict.
        traffic_bytes: Bytes that the step must at least move; 0 if not known.
    """

    effective_batch: int
    time_us: float
    noise_floor: float
    traffic_bytes: int = 0


def suspects(points: Iterable[CurvePoint], peak_gbps: float = math.inf) -> dict[int, str]:
    """Batches whose rows cannot be right, with the reason; they are to be measured again.

    A larger batch cannot take less time, beyond noise (both rows are named: either may be wrong),
    and no row moves its bytes faster than the memory's peak.

    Args:
        points: Rows of one spec.
        peak_gbps: Memory peak, GB/s.
    """
    found: dict[int, str] = {}
    curve = sorted(points, key=lambda point: point.effective_batch)
    for small, large in itertools.combinations(curve, 2):
        noise = max(small.noise_floor, large.noise_floor)
        if large.time_us < small.time_us * (1.0 - noise):
            found.setdefault(
                small.effective_batch,
                f"takes {small.time_us:.3g} us, more than the {large.time_us:.3g} us of batch "
                f"{large.effective_batch}",
            )
            found.setdefault(
                large.effective_batch,
                f"takes {large.time_us:.3g} us, less than the {small.time_us:.3g} us of batch "
                f"{small.effective_batch}",
            )
    for point in curve:
        gbps = point.traffic_bytes / point.time_us / 1e3
        if gbps > peak_gbps:
            found[point.effective_batch] = (
                f"moves {gbps:.0f} GB/s, above the memory peak of {peak_gbps:.0f} GB/s: "
                "the benchmark is wrong, not the kernel fast"
            )
    return found
