"""Tiles of the convolution without a GPU: work, and a bench that knows the best tile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from replayssm_tune.runtime.conv_tiles import ConvSpec, ConvTile
from replayssm_tune.tuner.records import ConvCell, Timing
from replayssm_tune.tuner.request import ConvWork
from tests.runtime.table_samples import CONV

SPEC = CONV
WORK = ConvWork(SPEC, ((1, 1280), (64, 10240)))
FAST = ConvTile(256, 1)


class FakeBench:
    """``FAST`` is the best tile of many rows; of one row all are alike."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.noise = random.Random(1)
        self.spread = 0.001
        self.gains = {FAST: 1.2}
        self.wrong: dict[ConvTile, str | Timing] = {}
        self.wrong_otherwise: dict[ConvTile, str | Timing] = {}
        self.broken: Callable[[ConvTile], bool] = lambda tile: False
        self.stop_after = 10**9

    def _ask(self, *asked: Any) -> None:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(asked)

    def conv_gate(self, spec: ConvSpec, tile: ConvTile, packed: bool) -> str | Timing:
        self._ask("gate", spec, tile, packed)
        return (self.wrong if packed == (spec.num_tokens > 1) else self.wrong_otherwise).get(tile, "")

    def conv_time(self, cell: ConvCell, tile: ConvTile, repeats: int) -> Timing:
        self._ask("time", cell, tile)
        if self.broken(tile):
            return Timing(status="resources", reason="out of memory")
        exact = 10.0 / (self.gains.get(tile, 1.0) if cell.rows > 1 else 1.0)
        return Timing(tuple(exact * self.noise.uniform(1, 1 + self.spread) for _ in range(repeats)))

    def conv_roof(self, cell: ConvCell, repeats: int) -> Timing:
        self._ask("roof", cell)
        return Timing((2.0,) * repeats)
