"""What tests of the adapters share: fp64 recurrences, paged caches, and memory that must not change."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEADS, GROUPS, HEAD_DIM, STATE_SIZE = 4, 2, 8, 16
"""Of the small models; in Gated DeltaNet value heads, key heads, value dim and key dim."""

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
UNTOUCHED = 42.0
"""What lies in outputs before a call."""

BOUNDS = {F32: 1e-6, BF16: 6e-3, F16: 6e-4}
"""Relative RMS error that results stored in a dtype may have."""


def bound(*dtypes: torch.dtype) -> float:
    return max(BOUNDS[dtype] for dtype in dtypes)


class Pool:
    """A cache as a strided view of a pool that is NaN everywhere else.

    Args:
        shape: Of the cache, slots first.
        dtype: Of its elements.
        fill: What is in it at first, if not NaN: (slots, ...).
    """

    def __init__(self, *shape: int, dtype: torch.dtype, fill: Tensor | None = None) -> None:
        slots, per_slot = shape[0], torch.Size(shape[1:]).numel()
        self.memory = torch.full((slots, per_slot + 24), torch.nan, dtype=dtype)
        self.view = self.memory[:, 8 : 8 + per_slot].unflatten(1, shape[1:])
        if fill is not None:
            self.view.copy_(fill)

    def copied(self) -> Pool:
        """The same in memory of its own."""
        other = Pool(*self.view.shape, dtype=self.view.dtype)
        other.memory.copy_(self.memory)
        return other


def softplus(value: Tensor) -> Tensor:
    """In fp64, of anything."""
    return torch.nn.functional.softplus(value.double(), threshold=1e9)


class Mamba2:
    """Token by token, in fp64: ``S = exp(A dt) S + dt x B^T``, ``y = (S C + D x) silu(z)``."""

    def __init__(self, state: Tensor, A: Tensor, D: Tensor | None = None) -> None:
        self.state, self.A, self.D = state.double(), A.double(), D

    def token(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None) -> Tensor:
        """(heads, head_dim); ``dt`` (heads,) after bias and softplus, B and C (groups, state_size)."""
        share = len(x) // len(B)
        x, dt = x.double(), dt.double()
        b, c = (value.double().repeat_interleave(share, 0) for value in (B, C))
        self.state = torch.exp(self.A * dt)[:, None, None] * self.state
        self.state = self.state + torch.einsum("h,hp,hn->hpn", dt, x, b)
        y = torch.einsum("hpn,hn->hp", self.state, c)
        if self.D is not None:
            y = y + (self.D.double() if self.D.dim() == 2 else self.D.double()[:, None]) * x
        return y if z is None else y * z.double() * torch.sigmoid(z.double())


class Gdn:
    """Token by token, in fp64, of one sequence of Gated DeltaNet."""

    def __init__(self, state: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, normalise: bool) -> None:
        self.state, self.A_log, self.dt_bias = state.double(), A_log.double(), dt_bias.double()
        self.scale, self.normalise = scale, normalise
        self.entry: tuple[Tensor, Tensor, Tensor] | None = None
        """Of the last token: u (value_heads, value_dim), k (key_heads, key_dim), g (value_heads,)."""

    def token(self, mixed: Tensor, a: Tensor, b: Tensor, groups: int) -> Tensor:
        """(value_heads, value_dim); ``mixed`` is q, k and v behind each other."""
        heads, value_dim, key_dim = self.state.shape
        keys = groups * key_dim
        q, k = (part.double().view(groups, key_dim) for part in (mixed[:keys], mixed[keys : 2 * keys]))
        v = mixed[2 * keys :].double().view(heads, value_dim)
        if self.normalise:
            q, k = (part / torch.sqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        qh, kh = (part.repeat_interleave(heads // groups, 0) for part in (q * self.scale, k))
        g = -torch.exp(self.A_log) * softplus(a.double() + self.dt_bias)
        state = torch.exp(g)[:, None, None] * self.state
        u = torch.sigmoid(b.double())[:, None] * (v - torch.einsum("hvk,hk->hv", state, kh))
        self.state = state + u[:, :, None] * kh[:, None, :]
        self.entry = u, k, g
        return torch.einsum("hvk,hk->hv", self.state, qh)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Its arguments as in its definition: names, defaults, and where keywords begin."""
    listed = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in listed:
            listed.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        listed.append(parameter.name + default)
    return listed
