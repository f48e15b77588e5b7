"""Inputs of tokens as layers see them: step sizes over decades, keys of GDN that resemble one another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.oracle import Token
from ..runtime.spec import Spec

KEY_COSINE = 0.7
"""Cosine between two keys of a head of GDN, on average: what the delta rule corrects must occur."""
KEY_NORMS = (1e-3, 10.0)
"""Range of the norms of raw q and k where the kernel normalises them, log-uniform: the least ones are
where the epsilon under the root counts."""


class Draws:
    """Draws tokens on the CPU.

    Args:
        spec: What takes them.
        heads: Heads; a multiple of ``spec.heads_per_group``.
        generator: Of all draws.
        deltas: Range of step sizes after bias and softplus, log-uniform.
        dt_bias: (heads,), added by the kernel to what is drawn; None for none.
        device: Where tokens go.
    """

    def __init__(
        self,
        spec: Spec,
        heads: int,
        generator: torch.Generator,
        deltas: tuple[float, float],
        dt_bias: Tensor | None,
        device: torch.device,
    ) -> None:
        self._spec, self._heads, self._groups = spec, heads, heads // spec.heads_per_group
        self._generator, self._deltas, self._device = generator, deltas, device
        self._dt_bias = None if dt_bias is None else dt_bias.cpu()
        self._key: Tensor | None = None
        if spec.family == "gdn":
            common = self._normal(self._groups, spec.state_size)
            self._key = common / common.square().mean(-1, keepdim=True).sqrt()

    def tokens(self, count: int) -> Token:
        """Inputs of so many tokens, in the activation dtype."""
        spec, heads = self._spec, self._heads
        delta = self._log_uniform(self._deltas, count, heads)
        dt = delta + torch.log(-torch.expm1(-delta)) if spec.dt_softplus else delta
        if self._dt_bias is not None:
            dt = dt - self._dt_bias
        token = Token(
            x=self._normal(count, heads, spec.head_dim),
            dt=dt,
            B=self._keys(count),
            C=self._keys(count),
            z=self._normal(count, heads, spec.head_dim) if spec.has_z else None,
            beta=self._normal(count, heads) if spec.family == "gdn" else None,
        )
        return token.to(TORCH_DTYPES[spec.activation_dtype], self._device)

    def _keys(self, count: int) -> Tensor:
        value = self._normal(count, self._groups, self._spec.state_size)
        if self._key is None:
            return value
        value = math.sqrt(KEY_COSINE) * self._key + math.sqrt(1 - KEY_COSINE) * value
        value /= value.norm(dim=-1, keepdim=True)
        if self._spec.qk_l2norm:
            value *= self._log_uniform(KEY_NORMS, count, self._groups, 1)
        return value

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _log_uniform(self, bounds: tuple[float, float], *shape: int) -> Tensor:
        low, high = (math.log(bound) for bound in bounds)
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=self._generator).exp()
