"""Figures as files keep them and documents show them: digits beyond what was measured are noise.

A figure is rounded half up from its shortest decimal, as a reader does who sees 1.065; its binary value is a
little less.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal


def significant(value: float, digits: int) -> float:
    """``value`` to so many significant digits; what is not finite stays as it is."""
    if not value or not math.isfinite(value):
        return value
    return decimals(value, digits - 1 - Decimal(repr(float(value))).adjusted())


def decimals(value: float, count: int) -> float:
    """A finite ``value`` to so many decimals; with fewer than none to tens, hundreds and so on."""
    return float(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-count), ROUND_HALF_UP))


def known(value: float | None, digits: int) -> float | None:
    """The same for a figure that may be missing: None for None, and for what is not finite."""
    return None if value is None or not math.isfinite(value) else significant(value, digits)
