"""Tuning the convolution's tiles on a GPU: gate, time, choose, and the rows with their evidence.

There are few tiles and one kernel, so every tile is timed at every cell. As for plans, every result is in the
store before the next begins, the final compares by ratios within rounds of visits forwards and backwards, and
the default runs in it twice.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from typing import Any, Final, Protocol

from ..codegen.render import module_digest
from ..runtime.conv_tiles import ConvRow, ConvSpec, ConvTile, default_tile, tiles
from ..runtime.modules import CONVOLUTION, shared_path
from .choose import Rules
from .errors import GateError
from .progress import Event, Report
from .records import ConvCell, Measurement, Timing
from .request import ConvWork
from .rounding import significant
from .rows import DIGITS
from .store import Store

RULES: Final = Rules(keep_within=1.2, finalists=2, final_rounds=4)
"""Of the final; there is no race before it."""
MODE: Final = "convolve"
ROOF: Final = "roof.move"


class Bench(Protocol):
    """What gates and times tiles; the only thing that knows a GPU."""

    def conv_gate(self, spec: ConvSpec, tile: ConvTile, packed: bool) -> str | Timing:
        """Empty if the tile may serve rows that are packed or not, else why not.

        A failed timing if it crashed or did not compile.
        """

    def conv_time(self, cell: ConvCell, tile: ConvTile, repeats: int) -> Timing:
        """Samples of one launch with ``tile``."""

    def conv_roof(self, cell: ConvCell, repeats: int) -> Timing:
        """Samples of moving the bytes that a launch must move."""


@dataclass(frozen=True)
class ConvResult:
    """What was chosen for a cell; times in µs, shares as in :class:`.choose.Verdict`."""

    cell: ConvCell
    tile: ConvTile
    default: ConvTile
    time_us: float
    default_time_us: float
    roof_us: float
    noise_floor: float
    samples_us: tuple[float, ...]
    reason: str

    def row(self, digest: str, triton: str, date: str) -> ConvRow:
        """The row of a table, made with the module of that digest."""
        return ConvRow(
            spec=self.cell.spec,
            rows=self.cell.rows,
            channels=self.cell.channels,
            tile=self.tile,
            module_digest=digest,
            time_us=significant(self.time_us, DIGITS),
            default_time_us=significant(self.default_time_us, DIGITS),
            roof_time_us=significant(self.roof_us, DIGITS),
            noise_floor=significant(self.noise_floor, DIGITS),
            samples_us=tuple(significant(sample, DIGITS) for sample in self.samples_us),
            verdict=self.reason,
            triton=triton,
            date=date,
        )

    def data(self) -> dict[str, Any]:
        """The cell in a run file."""
        return {
            "spec": self.cell.spec.key,
            "rows": self.cell.rows,
            "channels": self.cell.channels,
            "tile": self.tile.key,
            "default": self.default.key,
            "time_us": self.time_us,
            "default_us": self.default_time_us,
            "roof_us": self.roof_us,
            "noise_floor": self.noise_floor,
            "samples_us": list(self.samples_us),
        }


class ConvTune:
    """One tune of convolutions on the GPU of this machine.

    Args:
        bench: Gates and times.
        store: Remembers.
        report: Is told of progress.

    Attributes:
        digest: Of the module that is timed.
        failures: Tiles that did not pass the gate, with its words.
        notes: Cells without a row, and tiles that did not run in a final, with the reasons.
    """

    def __init__(self, bench: Bench, store: Store, report: Report) -> None:
        self._bench, self._store, self._report = bench, store, report
        self.digest = module_digest(Path(shared_path(CONVOLUTION)).read_text(encoding="utf-8"))
        self.failures: list[str] = []
        self.notes: list[str] = []
        self._phase, self._done, self._total = "", 0, 0

    def results(self, work: ConvWork) -> list[ConvResult]:
        """The tile of every cell of ``work``; a cell in which the default does not run has none.

        Raises:
            GateError: A default is numerically wrong: nothing can be compared with it.
        """
        spec, cells = work.spec, [ConvCell(work.spec, rows, channels) for rows, channels in work.shapes]
        space, defaults = tiles(spec.token_block), dict.fromkeys(map(_default, cells))
        visits = 2 * RULES.final_rounds * (RULES.finalists + 2)
        self._phase, self._done = f"convolution {spec.key}", 0
        self._total = len(space) + len(defaults) + len(cells) * (len(space) + visits + 2)
        # As they are timed. Defaults and what wins are gated for the other kind of rows too, which is another
        # compilation.
        wrong = {tile: self._gate(spec, tile, spec.num_tokens > 1) for tile in space}
        for tile in defaults:
            if reason := wrong[tile] or self._gate(spec, tile, spec.num_tokens == 1):
                raise GateError(
                    f"the default tile of {spec.key} cannot run here: {reason}",
                    hint="this is a fault of the kernel or of the compiler; report it",
                )
        able = [tile for tile in space if not wrong[tile]]
        return [result for cell in cells if (result := self._choose(cell, able)) is not None]

    def served(self, work: ConvWork, tile_of: Callable[[ConvCell], ConvTile]) -> list[ConvResult]:
        """Time given tiles, as the final of a tune times winners; a cell in which one does not run has none.

        Raises:
            GateError: One of them is numerically wrong here.
        """
        cells = [ConvCell(work.spec, rows, channels) for rows, channels in work.shapes]
        tiles_of = {cell: tile_of(cell) for cell in cells}
        self._phase, self._done = f"convolution {work.spec.key}", 0
        self._total = len(cells) * (6 * RULES.final_rounds + 3)
        results = []
        for cell, tile in tiles_of.items():
            default = _default(cell)
            for one in dict.fromkeys((tile, default)):
                if wrong := self._gate(work.spec, one, False) or self._gate(work.spec, one, True):
                    raise GateError(
                        f"a served tile fails the gate: {wrong}",
                        where=f"{cell.key}: {one.key}",
                        hint="tune this convolution anew on this GPU",
                    )
            found = self._final(cell, [tile] if tile != default else [])
            if isinstance(found, _Final):
                results.append(found.result(len(found.entries) - 2, "served"))
        return results

    def _choose(self, cell: ConvCell, able: Sequence[ConvTile]) -> ConvResult | None:
        default = _default(cell)
        screened = {tile: self._time(cell, tile, "") for tile in able}
        if not screened[default].ok:
            why = screened[default].reason or screened[default].status
            self.notes.append(f"{cell.key} has no row: the default tile did not run ({why})")
            return None
        times_us = {tile: m.time_us for tile, m in screened.items() if m.ok}
        wrong: list[ConvTile] = []
        while True:
            bound_us = RULES.keep_within * min(times_us.values())
            others = sorted((time_us, tile) for tile, time_us in times_us.items() if tile != default)
            rivals = [tile for time_us, tile in others if time_us <= bound_us][: RULES.finalists]
            found = self._final(cell, rivals)
            if found is None:
                return None
            if isinstance(found, ConvTile):
                del times_us[found]
                continue
            needed = max(RULES.least_gain, found.noise_floor)
            best = max(range(1, len(found.entries) - 1), key=found.gain, default=0)
            winner = best if best and found.gain(best) > needed else 0
            tile = found.entries[winner]
            if not winner or not self._gate(cell.spec, tile, cell.spec.num_tokens == 1):
                break
            # The next one takes its place in another final.
            wrong.append(tile)
            del times_us[tile]
        reason = f"nothing beats the default by {needed:.1%}"
        if winner:
            reason = f"faster than the default by {found.gain(best):.1%}, beyond {needed:.1%}"
        elif best:
            reason += f"; the best by {found.gain(best):.1%}"
        if wrong:
            reason += f"; left out as wrong: {', '.join(tile.key for tile in wrong)}"
        return found.result(winner, reason)

    def _final(self, cell: ConvCell, rivals: Sequence[ConvTile]) -> _Final | ConvTile | None:
        """The final of the default and rivals, beside the roof.

        Where a rival does not run in it, that one; None where the default or the roof does not. Notes say so.
        """
        default = _default(cell)
        entries = (default, *rivals, default)  # the last is the control
        rounds, failed = self._rounds(cell, entries)
        if failed is not None:
            tile, why = failed
            said = f": tile {tile.key}" if tile != default else " has no row: the default tile"
            self.notes.append(f"{cell.key}{said} did not run in the final ({why})")
            return tile if tile != default else None
        roof = self._measured(cell, ROOF, "", lambda: self._bench.conv_roof(cell, RULES.repeats))
        if roof.ok:
            return _Final(cell, entries, rounds, roof.time_us)
        self.notes.append(f"{cell.key} has no row: the roof did not run ({roof.reason or roof.status})")
        return None

    def _rounds(
        self, cell: ConvCell, entries: Sequence[ConvTile]
    ) -> tuple[list[list[_Visits]], tuple[ConvTile, str] | None]:
        """Per round the visits of each entry, and an entry that failed, which ends them, with the reason."""
        # Remembered rounds of others are no pair of these.
        group = zlib.crc32("|".join(tile.key for tile in entries).encode())
        places = range(len(entries))
        rounds = []
        for number in range(RULES.final_rounds):
            visits: list[list[Measurement]] = [[] for _ in entries]
            for position, place in enumerate((*places, *reversed(places))):
                tag = f"final{number}.{group:08x}.{position}"
                visit = self._time(cell, entries[place], tag)
                if not visit.ok:
                    return [], (entries[place], visit.reason or visit.status)
                visits[place].append(visit)
            rounds.append([(sqrt(a.time_us * b.time_us), (*a.samples_us, *b.samples_us)) for a, b in visits])
        return rounds, None

    def _gate(self, spec: ConvSpec, tile: ConvTile, packed: bool) -> str:
        """Empty if the tile passed, else why not, which :attr:`failures` then says once."""

        def gate() -> Timing:
            found = self._bench.conv_gate(spec, tile, packed)
            return (
                found if isinstance(found, Timing) else Timing(status="gate" if found else "ok", reason=found)
            )

        known = self._measured(ConvCell(spec, 1, 1), tile.key, f"gate{'.packed' * packed}", gate)
        if known.status == "ok":
            return ""
        wrong = known.reason or known.status
        if (failure := f"{spec.key} {tile.key}: {wrong}") not in self.failures:
            self.failures.append(failure)
        return wrong

    def _time(self, cell: ConvCell, tile: ConvTile, tag: str) -> Measurement:
        return self._measured(cell, tile.key, tag, lambda: self._bench.conv_time(cell, tile, RULES.repeats))

    def _measured(self, cell: ConvCell, subject: str, tag: str, ask: Callable[[], Timing]) -> Measurement:
        """What the store remembers, or what ``ask`` says now, and then in the store."""
        digest = "" if subject == ROOF else self.digest
        known = self._store.recall(cell, MODE, subject, tag, digest, ask)
        self._done += 1
        where = "gate" if tag.startswith("gate") else f"{cell.rows} rows of {cell.channels} channels"
        self._report(Event(self._phase, self._done, max(self._total, self._done), where))
        return known


_Visits = tuple[float, tuple[float, ...]]
"""Time in µs of a visit forwards and one backwards, and the samples behind it."""


@dataclass(frozen=True)
class _Final:
    """Rounds of visits of some tiles, the default first and last: the last is its own control."""

    cell: ConvCell
    entries: tuple[ConvTile, ...]
    rounds: list[list[_Visits]]
    roof_us: float

    def gain(self, place: int) -> float:
        """Of an entry over the default: the median of the ratios within rounds, less 1."""
        return exp(statistics.median(log(times[0][0] / times[place][0]) for times in self.rounds)) - 1.0

    @property
    def noise_floor(self) -> float:
        """The control's largest distance from itself, not a median: no fewer rounds may look surer."""
        apart = max(abs(log(times[-1][0] / times[0][0])) for times in self.rounds)
        return max(RULES.least_floor, exp(apart) - 1.0)

    def result(self, place: int, reason: str) -> ConvResult:
        """What a cell is served with: the entry at ``place``."""
        samples = [[sample for times in self.rounds for sample in times[at][1]] for at in (place, 0)]
        time_us, default_us = map(statistics.median, samples)
        return ConvResult(
            self.cell,
            self.entries[place],
            self.entries[0],
            time_us,
            default_us,
            self.roof_us,
            self.noise_floor,
            tuple(samples[0]),
            reason,
        )


def _default(cell: ConvCell) -> ConvTile:
    return default_tile(cell.effective_batch, cell.spec.token_block)
