"""The ops in plain torch: readable, on any device, and the ops' implementation on CPUs.

Arguments are those of :mod:`.ops`, in the order of the operators' schemas. Checked are the values of slots
and cursors alone (:mod:`.rows`), which kernels do not look at.
Rows are vectorised; no matrix product is used, so that no TF32 setting touches the result. Arithmetic
is in fp32 (fp64 where the state is fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .oracle import softplus
from .rows import folded_rows, live_cursors, live_rows, owned_tokens


class _History:
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
            self._folded = _fold(*(part[flush] for part in (self._old, x, b, weight, decay)))
            state[slot[flush]] = self._folded.to(state.dtype)

    def read(self, r: Tensor) -> Tensor:
        """(rows, heads, head_dim) of keys or queries ``r`` (rows, groups, state_size)."""
        r_heads = r.repeat_interleave(self._heads_per_group, 1)[:, :, None, :]
        score = (self._b * r[:, None]).sum(-1).repeat_interleave(self._heads_per_group, 2)
        value = self._decay[..., None] * (self._old * r_heads).sum(-1)
        value += ((self._weight * score)[..., None] * self._x).sum(1)
        if bool(self._flush.any()):
            value[self._flush] = (self._folded * r_heads[self._flush]).sum(-1)
        return value


def _fold(old: Tensor, x: Tensor, b: Tensor, weight: Tensor, decay: Tensor) -> Tensor:
    """``decay old + sum_j weight_j x_j b_j^T``; shapes as in :class:`_History`, ``old`` of rows."""
    folded = decay[..., None, None] * old
    weighted = weight[..., None] * x
    b_heads = b.repeat_interleave(x.shape[2] // b.shape[2], 2)
    for i in range(x.shape[1]):
        folded += weighted[:, i, :, :, None] * b_heads[:, i, :, None, :]
    return folded


def _live_tokens(
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


def _suffix_sums(value: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over dimension 1 of everything from an entry on, and of everything after it."""
    from_here = value.flip(1).cumsum(1).flip(1)
    return from_here, torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1)


def _mamba2_weights(delta: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each ring token, ``delta_j exp(A * sum of deltas after j)``, and the old state's decay."""
    from_here, later = _suffix_sums(delta)
    rate = A.to(delta.dtype)
    return delta * torch.exp(rate * later), torch.exp(rate * from_here[:, 0])


def _gdn_weights(g: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each ring token, ``exp(sum of gates after j)``, and the old state's decay."""
    from_here, later = _suffix_sums(g)
    return torch.exp(later), torch.exp(from_here[:, 0])


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    out: Tensor,
    window: int,
    dt_softplus: bool,
    null_slot: int,
) -> None:
    """One replay decode step; see :func:`.ops.mamba2_step`."""
    row, slot = live_rows(slot_index, null_slot, len(state))
    capacity = ring_x.shape[2]
    start, length = (c.long() for c in live_cursors(row, slot, ring_start, ring_len, window, capacity))
    out.zero_()
    work = torch.promote_types(state.dtype, torch.float32)
    heads_per_group = x.shape[1] // B.shape[1]

    delta = _delta(dt[row], dt_bias, dt_softplus, work)
    x_new, b_new = x[row].to(work), B[row].to(work)
    c_new = C[row].to(work)

    x_ring, b_ring, delta_ring = _live_tokens((ring_x, ring_b, ring_decay), slot, start, length, window, work)
    history = _History(state, slot, length + 1 > window, x_ring, b_ring, *_mamba2_weights(delta_ring, A))

    new_score = (b_new * c_new).sum(-1).repeat_interleave(heads_per_group, 1)
    y = (
        torch.exp(A.to(work) * delta)[..., None] * history.read(c_new)
        + (delta * new_score)[..., None] * x_new
    )
    out[row] = _finish(y, x_new, D, None if z is None else z[row]).to(out.dtype)

    append = (start + length) % capacity
    ring_x[slot, :, append] = x[row].to(ring_x.dtype)
    ring_b[slot, :, append] = B[row].to(ring_b.dtype)
    ring_decay[slot, :, append] = delta.to(ring_decay.dtype)


def mamba2_native_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    slot_index: Tensor,
    out: Tensor,
    dt_softplus: bool,
    null_slot: int,
) -> None:
    """One decode step that writes the state; see :func:`.ops.mamba2_native_step`."""
    row, slot = live_rows(slot_index, null_slot, len(state))
    out.zero_()
    work = torch.promote_types(state.dtype, torch.float32)
    heads_per_group = x.shape[1] // B.shape[1]
    delta = _delta(dt[row], dt_bias, dt_softplus, work)
    x_new = x[row].to(work)
    b_heads = B[row].to(work).repeat_interleave(heads_per_group, 1)
    c_heads = C[row].to(work).repeat_interleave(heads_per_group, 1)
    new = torch.exp(A.to(work) * delta)[..., None, None] * state[slot].to(work)
    new += (delta[..., None] * x_new)[..., None] * b_heads[:, :, None, :]
    y = (new * c_heads[:, :, None, :]).sum(-1)
    out[row] = _finish(y, x_new, D, None if z is None else z[row]).to(out.dtype)
    state[slot] = new.to(state.dtype)


def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    out: Tensor,
    window: int,
    qk_l2norm: bool,
    null_slot: int,
) -> None:
    """One replay decode step; see :func:`.ops.gdn_step`."""
    row, slot = live_rows(slot_index, null_slot, len(state))
    capacity = ring_u.shape[2]
    start, length = (c.long() for c in live_cursors(row, slot, ring_start, ring_len, window, capacity))
    out.zero_()
    work = torch.promote_types(state.dtype, torch.float32)
    heads_per_group = v.shape[1] // k.shape[1]

    g, beta = _gates(a[row], b[row], A_log, dt_bias, work)
    q_new, k_new = _queries_and_keys(q[row], k[row], qk_l2norm, work)
    u_ring, k_ring, g_ring = _live_tokens((ring_u, ring_k, ring_g), slot, start, length, window, work)
    history = _History(state, slot, length + 1 > window, u_ring, k_ring, *_gdn_weights(g_ring))

    token_decay = torch.exp(g)[..., None]
    u = beta[..., None] * (v[row].to(work) - token_decay * history.read(k_new))
    score = (k_new * q_new).sum(-1).repeat_interleave(heads_per_group, 1)
    y = token_decay * history.read(q_new) + score[..., None] * u
    out[row] = y.to(out.dtype)

    append = (start + length) % capacity
    ring_u[slot, :, append] = u.to(ring_u.dtype)
    ring_k[slot, :, append] = k_new.to(ring_k.dtype)
    ring_g[slot, :, append] = g.to(ring_g.dtype)


def gdn_native_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    slot_index: Tensor,
    out: Tensor,
    qk_l2norm: bool,
    null_slot: int,
) -> None:
    """One decode step that writes the state; see :func:`.ops.gdn_native_step`."""
    row, slot = live_rows(slot_index, null_slot, len(state))
    out.zero_()
    work = torch.promote_types(state.dtype, torch.float32)
    heads_per_group = v.shape[1] // k.shape[1]
    g, beta = _gates(a[row], b[row], A_log, dt_bias, work)
    q_heads, k_heads = (
        value.repeat_interleave(heads_per_group, 1)[:, :, None, :]
        for value in _queries_and_keys(q[row], k[row], qk_l2norm, work)
    )
    new = torch.exp(g)[..., None, None] * state[slot].to(work)
    u = beta[..., None] * (v[row].to(work) - (new * k_heads).sum(-1))
    new += u[..., None] * k_heads
    out[row] = (new * q_heads).sum(-1).to(out.dtype)
    state[slot] = new.to(state.dtype)


def mamba2_materialize(
    source: Tensor,
    destination: Tensor,
    prefix: Tensor,
    A: Tensor,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    window: int,
    null_slot: int,
) -> None:
    """Ring tokens folded into states of other slots; see :func:`.ops.mamba2_materialize`."""
    capacity, work = ring_x.shape[2], torch.promote_types(state.dtype, torch.float32)
    slot, target, start, count = folded_rows(
        source, destination, prefix, ring_start, ring_len, window, capacity, null_slot
    )
    x, b, delta = _live_tokens((ring_x, ring_b, ring_decay), slot, start, count, window, work)
    folded = _fold(state[slot].to(work), x, b, *_mamba2_weights(delta, A))
    state[target] = folded.to(state.dtype)


def gdn_materialize(
    source: Tensor,
    destination: Tensor,
    prefix: Tensor,
    state: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    window: int,
    null_slot: int,
) -> None:
    """Ring tokens folded into states of other slots; see :func:`.ops.gdn_materialize`."""
    capacity, work = ring_u.shape[2], torch.promote_types(state.dtype, torch.float32)
    slot, target, start, count = folded_rows(
        source, destination, prefix, ring_start, ring_len, window, capacity, null_slot
    )
    u, k, g = _live_tokens((ring_u, ring_k, ring_g), slot, start, count, window, work)
    state[target] = _fold(state[slot].to(work), u, k, *_gdn_weights(g)).to(state.dtype)


def commit(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    """Advance the cursors after a step; see :func:`.cursors.commit`."""
    _, count = owned_tokens(query_start, slot_index, num_tokens)
    row, slot = live_rows(torch.where(count > 0, slot_index, -1), null_slot, len(ring_len))
    start, length = live_cursors(row, slot, ring_start, ring_len, window, capacity)
    kept = torch.minimum(accepted[row].clamp(min=0), count[row]).to(ring_len.dtype)
    flushed = length + num_tokens > window
    ring_start[slot] = torch.where(flushed, (start + length) % capacity, start)
    ring_len[slot] = torch.where(flushed, kept, length + kept)


def reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    """Empty rings; see :func:`.cursors.reset`."""
    _, slot = live_rows(slots, null_slot, len(ring_len), "slots")
    ring_start[slot] = 0
    ring_len[slot] = 0


def drained(slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int) -> None:
    """Move past all ring tokens; see :func:`.cursors.drained`."""
    row, slot = live_rows(slots, null_slot, len(ring_len), "slots")
    start, length = live_cursors(row, slot, ring_start, ring_len, capacity, capacity)
    ring_start[slot] = (start + length) % capacity
    ring_len[slot] = 0


def _delta(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, work: torch.dtype) -> Tensor:
    value = dt.to(work) if dt_bias is None else dt.to(work) + dt_bias.to(work)
    return softplus(value) if dt_softplus else value


def _finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        y = y + D.to(y.dtype)[:, None] * x
    if z is not None:
        gate = z.to(y.dtype)
        y = y * gate * torch.sigmoid(gate)
    return y


def _gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor | None, work: torch.dtype
) -> tuple[Tensor, Tensor]:
    """``-exp(A_log) softplus(a + dt_bias)`` and ``sigmoid(b)``: log decay and writing strength."""
    return -torch.exp(A_log.to(work)) * _delta(a, dt_bias, True, work), torch.sigmoid(b.to(work))


def _queries_and_keys(q: Tensor, k: Tensor, qk_l2norm: bool, work: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the recurrence sees of q and k: both normalised if asked for, q scaled by ``K^-1/2``."""
    q, k = q.to(work), k.to(work)
    if qk_l2norm:
        q, k = (value / torch.sqrt(value.square().sum(-1, keepdim=True) + 1e-6) for value in (q, k))
    return q * q.shape[-1] ** -0.5, k
