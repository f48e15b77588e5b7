"""What scenes draw from one seed, on the CPU, so that they are the same on every device."""

from __future__ import annotations

import torch
from torch import Tensor


class Draws:
    """Draws of whoever has a generator ``g``."""

    g: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """fp32."""
        return torch.randn(shape, generator=self.g)

    def uniform(self) -> float:
        """From 0 to 1."""
        return float(torch.rand((), generator=self.g))

    def below(self, end: int) -> int:
        """From 0 to ``end - 1``."""
        return int(torch.randint(0, end, (), generator=self.g))

    def between(self, low: int, high: int) -> int:
        """Both may be drawn."""
        return low + self.below(high + 1 - low)
