"""What a measured tune says of a cell, and the rows of a dispatch table that come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ..codegen.compile import Compiled
from ..codegen.emit import digest_of
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from ..runtime.table import Row
from .choose import Verdict
from .mix import flush_share
from .records import Measurement, score_mode
from .rounding import known, significant

DIGITS: Final = 5
"""Significant digits of a row's times."""


@dataclass(frozen=True)
class CellResult:
    """All that a run says of one cell: what a row of the table and of a run file is made of."""

    spec: Spec
    effective_batch: int
    rows: int
    heads: int
    verdict: Verdict
    native: Verdict | None
    """None of what materialises states, which has no baseline."""
    branches: Mapping[str, Measurement]
    """The chosen plan by mode, ``nonflush`` and ``flush``; empty where kernels have no branches."""
    default_branches: Mapping[str, Measurement]
    """As ``branches``, of the default plan."""
    launches: Mapping[str, Measurement]
    """The fastest launch of its own for the rows of a branch, by mode, whether or not a plan has it."""
    read_us: float
    scale_us: float
    native_steps_us: float | None = None
    """Of drafts: as many native steps as a row has tokens, one after the other."""

    @property
    def mode(self) -> str:
        """What the rows do in the score."""
        return score_mode(self.spec)

    @property
    def roof_us(self) -> float:
        """Roof of the score: rows that flush, or are materialised, write as much as they read."""
        return self._roof_us(flush_share(self.spec))

    @property
    def native_roof_us(self) -> float:
        """Roof of the native baseline: every token of a row writes a state."""
        return self._roof_us(self.spec.num_tokens)

    def _roof_us(self, written: float) -> float:
        """Of reading a state per row and writing so many of them."""
        return self.read_us + (self.scale_us - self.read_us) * written


Binaries = Callable[[Variant], Compiled]
"""What the compiler made of a variant."""


def step_row(result: CellResult, compiled: Binaries, triton_version: str) -> Row | None:
    """The row of a cell; None if nothing ran. What materialises states writes as a flush does.

    Args:
        result: The cell.
        compiled: Binaries of the spec's variants.
        triton_version: That they were compiled with.
    """
    times_us = {mode: found.time_us for mode, found in result.branches.items()}
    return _row(
        result.spec,
        result,
        result.verdict,
        compiled,
        triton_version,
        roof_us=result.roof_us,
        nonflush_us=times_us.get("nonflush"),
        flush_us=times_us.get("flush", result.verdict.time_us),
        flush_roof_us=result.scale_us,
    )


def native_row(result: CellResult, compiled: Binaries, triton_version: str) -> Row | None:
    """The row of a cell's native baseline; None if there is none, or nothing ran.

    Every step of it writes as a flush does.
    """
    if result.native is None:
        return None
    return _row(
        result.spec.native,
        result,
        result.native,
        compiled,
        triton_version,
        roof_us=result.native_roof_us,
        nonflush_us=None,
        flush_us=result.native.time_us,
        flush_roof_us=result.native_roof_us,
    )


def _row(
    spec: Spec,
    result: CellResult,
    verdict: Verdict,
    compiled: Binaries,
    triton_version: str,
    *,
    roof_us: float,
    nonflush_us: float | None,
    flush_us: float,
    flush_roof_us: float,
) -> Row | None:
    plan = verdict.winner
    if plan is None:
        return None
    return Row(
        spec=spec,
        effective_batch=result.effective_batch,
        plan=plan,
        source="measured",
        module_digests=tuple(digest_of(spec, v.structure) for v in plan.variants),
        binaries=tuple((compiled(v).binary(triton_version),) for v in plan.variants),
        time_us=known(verdict.time_us, DIGITS),
        native_time_us=None if result.native is None else known(result.native.time_us, DIGITS),
        default_time_us=known(verdict.default_time_us, DIGITS),
        roof_time_us=known(roof_us, DIGITS),
        noise_floor=known(verdict.noise_floor, DIGITS),
        nonflush_time_us=known(nonflush_us, DIGITS),
        flush_time_us=known(flush_us, DIGITS),
        nonflush_roof_us=None if nonflush_us is None else known(result.read_us, DIGITS),
        flush_roof_us=known(flush_roof_us, DIGITS),
        samples_us=tuple(significant(sample, DIGITS) for sample in verdict.samples_us),
        verdict=verdict.reason,
        origin="",
        numerics=plan.numerics,
        batch_invariant=bool(verdict.numerics),
    )
