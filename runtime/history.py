"""What rows have behind them, in plain torch: old states and ring tokens, weighted, read and folded.

No matrix product is used, so that no TF32 setting touches a result. Decays come from sums over the tokens
in between, never from differences of sums: exponents are never above 0, and nothing cancels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


class History:
    """Old state and ring of a step's rows as one linear map; flushing rows fold, store and are read anew.

    Args:
        state: (slots, heads, head_dim, state_size); flushing rows' slots are written.
        slot: (rows,) int64, of the live rows.
        flush: (rows,) bool.
        x: (rows, window, heads, head_dim), ring tokens, oldest first; dead ones are 0.
        b: (rows, window, groups, state_size), likewise.
        weight: (rows, window, heads), what is left of each token.
        decay: (rows, heads), what is left of the old state.
    """

    def __init__(
        self, state: Tensor, slot: Tensor, flush: Tensor, x: Tensor, b: Tensor, weight: Tensor, decay: Tensor
    ) -> None:
        self._x, self._b, self._weight, self._decay, self._flush = x, b, weight, decay, flush
        self._heads_per_group = x.shape[2] // b.shape[2]
        self._old = state[slot].to(x.dtype)
        if bool(flush.any()):
            self._folded = fold(*(part[flush] for part in (self._old, x, b, weight, decay)))
            state[slot[flush]] = self._folded.to(state.dtype)

    def read(self, r: Tensor) -> Tensor:
        """(rows, heads, head_dim) of keys or queries ``r`` (rows, groups, state_size)."""
        r_heads = r.repeat_interleave(self._heads_per_group, 1)[:, :, None, :]
        value = self._decay[..., None] * (self._old * r_heads).sum(-1)
        value += attended(r, self._x, self._b, self._weight)
        if bool(self._flush.any()):
            value[self._flush] = (self._folded * r_heads[self._flush]).sum(-1)
        return value


def attended(r: Tensor, x: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """``sum_j weight_j (b_j . r) x_j`` over tokens; shapes as in :class:`History`."""
    score = (b * r[:, None]).sum(-1).repeat_interleave(x.shape[2] // b.shape[2], 2)
    return ((weight * score)[..., None] * x).sum(1)


def fold(old: Tensor, x: Tensor, b: Tensor, weight: Tensor, decay: Tensor) -> Tensor:
    """``decay old + sum_j weight_j x_j b_j^T``; shapes as in :class:`History`, ``old`` of rows."""
    folded = decay[..., None, None] * old
    weighted = weight[..., None] * x
    b_heads = b.repeat_interleave(x.shape[2] // b.shape[2], 2)
    for i in range(x.shape[1]):
        folded += weighted[:, i, :, :, None] * b_heads[:, i, :, None, :]
    return folded


def live_tokens(
    rings: tuple[Tensor, Tensor, Tensor],
    slot: Tensor,
    start: Tensor,
    length: Tensor,
    window: int,
    work: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ring tokens of live rows, oldest first, (rows, window, ...); dead ones are replaced by 0."""
    ring_x, ring_b, ring_decay = rings
    j = torch.arange(window, device=slot.device)
    live = j < length[:, None]
    index = (slot[:, None], slice(None), (start[:, None] + j) % ring_x.shape[2])
    zero = torch.zeros((), dtype=work, device=slot.device)
    return (
        torch.where(live[..., None, None], ring_x[index].to(work), zero),
        torch.where(live[..., None, None], ring_b[index].to(work), zero),
        torch.where(live[..., None], ring_decay[index].to(work), zero),
    )


def mamba2_weights(delta: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each ring token, ``delta_j exp(A * sum of deltas after j)``, and the old state's decay."""
    from_here, later = _suffix_sums(delta)
    rate = A.to(delta.dtype)
    return delta * torch.exp(rate * later), torch.exp(rate * from_here[:, 0])


def gdn_weights(g: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each ring token, ``exp(sum of gates after j)``, and the old state's decay."""
    from_here, later = _suffix_sums(g)
    return torch.exp(later), torch.exp(from_here[:, 0])


def _suffix_sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over dimension 1 of everything from an entry on, and of everything after it."""
    from_here = value.flip(1).cumsum(1).flip(1)
    return from_here, torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1)


def sums_up_to(value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each entry i of dimension 1: the sum of all up to it, and of those after each one up to it.

    Args:
        value: (rows, tokens, heads).

    Yields:
        (rows, heads) and (rows, i + 1, heads); the second is overwritten for the next entry.
    """
    total, later = torch.zeros_like(value[:, 0]), torch.zeros_like(value)
    for i in range(value.shape[1]):
        total = total + value[:, i]
        later[:, :i] += value[:, i : i + 1]
        yield total, later[:, : i + 1]
