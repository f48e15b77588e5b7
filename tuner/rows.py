"""Rows of a dispatch table from the results of a measured tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..codegen.compile import Compiled
from ..codegen.emit import digest_of
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from ..runtime.table import Row
from .choose import Verdict
from .measured import CellResult
from .rounding import known, significant

DIGITS: Final = 5
"""Significant digits of a row's times."""

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
