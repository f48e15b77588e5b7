"""A bench without a GPU: an analytic landscape with interactions, noise, drift and failures."""

from __future__ import annotations

import itertools
import math
import random
import zlib

from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.tuner.records import Cell, Environment, Timing, subject_key
from tests.specs import P64

SPEC = P64
GPU = Environment("NVIDIA Fake", (9, 0), 132, triton="3.9.0", torch="2.13.0")


def variants(role: str, large: bool = False) -> tuple[Variant, ...]:
    """Points of one role: about 100, or about 3,000."""
    points = itertools.product(
        ("inline", "precomputed"),
        ("output_only", "rebuild") if large else ("output_only",),
        ("elementwise", "dot"),
        ("elementwise", "dot") if large else ("elementwise",),
        (8, 16, 32, 64),
        (64, 128) if large else (128,),
        (1, 4, 16) if large else (1, 4),
        (1, 2, 4, 8) if large else (1, 4),
        (1, 2),
        (False, True),
    )
    found = []
    for coefficients, route, readout, scores, block_p, block_n, heads, warps, stages, evict in points:
        if stages > 1 and readout == "elementwise":
            continue
        structure = Structure(role, coefficients, route, readout, scores)
        tile = Tile(block_p, block_n, 0, heads, warps, stages, 0, evict)
        found.append(Variant(structure, tile))
    return tuple(found)


def default(role: str) -> Variant:
    return Variant(Structure(role, "precomputed"), Tile(16, 128))


def default_plan() -> Plan:
    return Plan((default("both"),))


class FakeBench:
    """Times of an analytic landscape.

    Args:
        noise: Relative standard deviation of a sample.
        failures: Whether some points crash, time out or fail the gate (the default never does).
        seed: Of the noise.
        drift: Amplitude of a slow change of all times, as of a GPU's clock.
        stop_after: Raise ``interrupt`` at this call.
    """

    def __init__(
        self,
        noise: float = 0.01,
        failures: bool = True,
        seed: int = 0,
        stop_after: int | None = None,
        interrupt: type[BaseException] = KeyboardInterrupt,
        drift: float = 0.02,
    ) -> None:
        self.noise, self.failures, self.drift = noise, failures, drift
        self.calls: list[tuple[str, str, str]] = []
        self.seconds = 0.0
        self._random = random.Random(seed)
        self._stop_after, self._interrupt = stop_after, interrupt

    def clock(self) -> float:
        return self.seconds

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        if self._stop_after is not None and len(self.calls) >= self._stop_after:
            raise self._interrupt
        subject = subject_key(variants)
        self.calls.append((cell.key, mode, subject))
        self.seconds += 0.01
        status = self.status(variants)
        if status != "ok":
            return Timing(status=status, reason=f"fake {status}")
        exact = self.exact(cell, variants, mode)
        drift = 1 + self.drift * math.sin(self.seconds)
        return Timing(
            tuple(exact * drift * math.exp(self._random.gauss(0, self.noise)) for _ in range(repeats))
        )

    def status(self, variants: tuple[Variant, ...]) -> str:
        for variant in variants:
            code = _hash(variant.key) % 40
            if self.failures and code < 3 and variant != default(variant.structure.role):
                return ("crash", "timeout", "gate")[code]
        return "ok"

    def exact(self, cell: Cell, variants: tuple[Variant, ...], mode: str) -> float:
        """Time without noise, µs."""
        if len(variants) == 2:
            a, b = (
                _kernel_us(v, cell.effective_batch, m)
                for v, m in zip(variants, ("nonflush", "flush"), strict=False)
            )
            return a * 15 / 16 + b / 16 + 0.4
        return _kernel_us(variants[0], cell.effective_batch, mode)


def _kernel_us(variant: Variant, batch: int, mode: str) -> float:
    s, t = variant.structure, variant.tile
    bytes_moved = SPEC.state_bytes(batch) * {"nonflush": 1.0, "mix": 1.08, "flush": 2.1, "native": 2.1}[mode]
    large = min(1.0, math.log2(max(batch, 16) / 16) / 12)
    loss = 0.0
    loss += 0.05 if s.coefficients == "inline" and large > 0.8 and t.heads_per_program == 1 else 0.0
    loss += 0.12 if s.route == "rebuild" else 0.0
    pipelined = s.readout == "dot" and t.num_stages == 2 and t.heads_per_program >= 4
    loss += 0.0 if pipelined else 0.06 if s.readout == "elementwise" else 0.2
    loss += 0.04 if s.scores == "dot" else 0.0
    loss += 0.09 * abs(math.log2(t.block_p) - (4 + 2 * large)) ** 1.3
    loss += 0.07 * abs(math.log2(t.block_p * t.block_n / t.num_warps) - 11)
    loss += 0.08 * abs(math.log2(t.heads_per_program) - 4 * large)
    loss += 0.01 if t.evict_first == (large < 0.5) else 0.0
    loss += 0.1 if s.role == "both" else 0.0
    loss += 0.03 * (_hash(variant.key + str(batch)) % 1000) / 1000
    launches = 1 + (s.coefficients == "precomputed")
    return float(1.5 + 1.6 * launches + bytes_moved / 4.6e6 * (1 + loss) + loss)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
