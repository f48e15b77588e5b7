"""Figures as files keep them: digits beyond what was measured are noise, and hide what changed."""

from __future__ import annotations

import math


def significant(value: float, digits: int) -> float:
    """``value`` to so many significant digits; what is not finite stays as it is."""
    return float(f"{value:.{digits}g}")


def known(value: float | None, digits: int) -> float | None:
    """The same for a figure that may be missing: None for None, and for what is not finite."""
    return None if value is None or not math.isfinite(value) else significant(value, digits)
