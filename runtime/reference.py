"""The ops in plain torch: readable, on any device, and the ops' implementation on CPUs.

Arguments are those of :mod:`.ops`, in the order of the operators' schemas. Checked are the values of slots
and cursors alone (:mod:`.rows`), which kernels do not look at.
Rows are vectorised, tokens go one after the other; for the arithmetic see :mod:`.history`. It is in fp32
(fp64 where the state is fp64).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .history import History, attended, fold, gdn_weights, live_tokens, mamba2_weights, sums_up_to
from .oracle import softplus
from .rows import draft_slots, folded_rows, kept_tokens, live_cursors, live_rows, new_tokens, owned_tokens


def mamba2_verify(
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
    query_start: Tensor | None,
    out: Tensor,
    window: int,
    num_tokens: int,
    dt_softplus: bool,
    null_slot: int,
) -> None:
    """Replay decode of several tokens a row; see :func:`.ops.mamba2_step`."""
    new = new_tokens(query_start, slot_index, num_tokens, len(x), null_slot, len(state))
    slot, capacity = new.slot, ring_x.shape[2]
    start, length = (c.long() for c in live_cursors(new.row, slot, ring_start, ring_len, window, capacity))
    work = torch.promote_types(state.dtype, torch.float32)
    rate = A.to(work)

    delta = _delta(new.of(dt).to(work), dt_bias, dt_softplus)
    x_new, b_new, c_new = (new.of(value).to(work) for value in (x, B, C))
    x_ring, b_ring, delta_ring = live_tokens((ring_x, ring_b, ring_decay), slot, start, length, window, work)
    flush = length + num_tokens > window
    history = History(state, slot, flush, x_ring, b_ring, *mamba2_weights(delta_ring, A))

    y = torch.zeros_like(x_new)
    for i, (total, later) in enumerate(sums_up_to(delta)):
        upto = slice(0, i + 1)
        y[:, i] = torch.exp(rate * total)[..., None] * history.read(c_new[:, i])
        weight = delta[:, upto] * torch.exp(rate * later)
        y[:, i] += attended(c_new[:, i], x_new[:, upto], b_new[:, upto], weight)
    new.put(out, _finish(y, x_new, D, None if z is None else new.of(z)))

    slot, position = new.behind(start + length, capacity)
    ring_x[slot, :, position] = new.flat(new.of(x)).to(ring_x.dtype)
    ring_b[slot, :, position] = new.flat(new.of(B)).to(ring_b.dtype)
    ring_decay[slot, :, position] = new.flat(delta).to(ring_decay.dtype)


def mamba2_native_verify(
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
    accepted: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    dt_softplus: bool,
    null_slot: int,
) -> None:
    """Decode of several tokens a row, with a state of each; see :func:`.ops.mamba2_native_verify`."""
    first, num_tokens = slot_index[:, 0], slot_index.shape[1]
    new = new_tokens(query_start, first, num_tokens, len(x), null_slot, len(state))
    held = draft_slots(new, slot_index, accepted, null_slot, len(state))
    work = torch.promote_types(state.dtype, torch.float32)
    delta = _delta(new.of(dt).to(work), dt_bias, dt_softplus)
    decay = torch.exp(A.to(work) * delta)[..., None, None]
    x_new = new.of(x).to(work)
    b_heads, c_heads = (_by_head(new.of(value).to(work), x.shape[1]) for value in (B, C))
    now, y = state[held].to(work), torch.zeros_like(x_new)
    for i in range(num_tokens):
        now = decay[:, i] * now
        now += (delta[:, i, :, None] * x_new[:, i])[..., None] * b_heads[:, i, :, None]
        y[:, i] = (now * c_heads[:, i, :, None]).sum(-1)
        new.store(state, slot_index, i, now)
    new.put(out, _finish(y, x_new, D, None if z is None else new.of(z)))


def gdn_verify(
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
    query_start: Tensor | None,
    out: Tensor,
    window: int,
    num_tokens: int,
    qk_l2norm: bool,
    null_slot: int,
) -> None:
    """Replay decode of several tokens a row; see :func:`.ops.gdn_step`."""
    new = new_tokens(query_start, slot_index, num_tokens, len(v), null_slot, len(state))
    slot, capacity = new.slot, ring_u.shape[2]
    start, length = (c.long() for c in live_cursors(new.row, slot, ring_start, ring_len, window, capacity))
    work = torch.promote_types(state.dtype, torch.float32)

    g, beta = _gates(new.of(a), new.of(b), A_log, dt_bias, work)
    v_new = new.of(v).to(work)
    q_new, k_new = _queries_and_keys(new.of(q), new.of(k), qk_l2norm, work)
    u_ring, k_ring, g_ring = live_tokens((ring_u, ring_k, ring_g), slot, start, length, window, work)
    flush = length + num_tokens > window
    history = History(state, slot, flush, u_ring, k_ring, *gdn_weights(g_ring))

    # Row i of the triangular system needs the u before it, and they are known by then.
    u, y = torch.zeros_like(v_new), torch.zeros_like(v_new)
    for i, (total, later) in enumerate(sums_up_to(g)):
        decay, weight = torch.exp(total)[..., None], torch.exp(later)
        before, upto = slice(0, i), slice(0, i + 1)
        recalled = decay * history.read(k_new[:, i])
        recalled += attended(k_new[:, i], u[:, before], k_new[:, before], weight[:, :i])
        u[:, i] = beta[:, i, :, None] * (v_new[:, i] - recalled)
        y[:, i] = decay * history.read(q_new[:, i])
        y[:, i] += attended(q_new[:, i], u[:, upto], k_new[:, upto], weight)
    new.put(out, y)

    slot, position = new.behind(start + length, capacity)
    ring_u[slot, :, position] = new.flat(u).to(ring_u.dtype)
    ring_k[slot, :, position] = new.flat(k_new).to(ring_k.dtype)
    ring_g[slot, :, position] = new.flat(g).to(ring_g.dtype)


def gdn_native_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    state: Tensor,
    slot_index: Tensor,
    accepted: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    qk_l2norm: bool,
    null_slot: int,
) -> None:
    """Decode of several tokens a row, with a state of each; see :func:`.ops.gdn_native_verify`."""
    first, num_tokens = slot_index[:, 0], slot_index.shape[1]
    new = new_tokens(query_start, first, num_tokens, len(v), null_slot, len(state))
    held = draft_slots(new, slot_index, accepted, null_slot, len(state))
    work = torch.promote_types(state.dtype, torch.float32)
    g, beta = _gates(new.of(a), new.of(b), A_log, dt_bias, work)
    decay, v_new = torch.exp(g)[..., None, None], new.of(v).to(work)
    q_heads, k_heads = (
        _by_head(value, v.shape[1]) for value in _queries_and_keys(new.of(q), new.of(k), qk_l2norm, work)
    )
    now, y = state[held].to(work), torch.zeros_like(v_new)
    for i in range(num_tokens):
        key = k_heads[:, i, :, None]
        now = decay[:, i] * now
        u = beta[:, i, :, None] * (v_new[:, i] - (now * key).sum(-1))
        now += u[..., None] * key
        y[:, i] = (now * q_heads[:, i, :, None]).sum(-1)
        new.store(state, slot_index, i, now)
    new.put(out, y)


def _step(verify: Callable[..., None], *arguments: Any) -> None:
    """A step is the verification of rows of one token."""
    *tensors, out, window, flag, null_slot = arguments
    verify(*tensors, None, out, window, 1, flag, null_slot)


def _native_step(verify: Callable[..., None], *arguments: Any) -> None:
    """As :func:`_step`; the state is read where it is written."""
    *tensors, slot_index, out, flag, null_slot = arguments
    slots = slot_index[:, None]
    verify(*tensors, slots, torch.ones_like(slot_index), None, out, flag, null_slot)


mamba2_step: Final = functools.partial(_step, mamba2_verify)
"""One replay decode step; see :func:`.ops.mamba2_step`."""
mamba2_native_step: Final = functools.partial(_native_step, mamba2_native_verify)
"""One decode step that writes the state; see :func:`.ops.mamba2_native_step`."""
gdn_step: Final = functools.partial(_step, gdn_verify)
"""One replay decode step; see :func:`.ops.gdn_step`."""
gdn_native_step: Final = functools.partial(_native_step, gdn_native_verify)
"""One decode step that writes the state; see :func:`.ops.gdn_native_step`."""


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
    x, b, delta = live_tokens((ring_x, ring_b, ring_decay), slot, start, count, window, work)
    folded = fold(state[slot].to(work), x, b, *mamba2_weights(delta, A))
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
    u, k, g = live_tokens((ring_u, ring_k, ring_g), slot, start, count, window, work)
    state[target] = fold(state[slot].to(work), u, k, *gdn_weights(g)).to(state.dtype)


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
    kept = kept_tokens(row, accepted, count).to(ring_len.dtype)
    flushed = length + num_tokens > window
    ring_start[slot] = torch.where(flushed, (start + length) % capacity, start)
    ring_len[slot] = torch.where(flushed, kept, length + kept)


def reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    """Empty rings; see :func:`.cursors.reset`."""
    _, slot = live_rows(slots, null_slot, len(ring_len), "slots", distinct=False)
    ring_start[slot] = 0
    ring_len[slot] = 0


def drained(slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int) -> None:
    """Move past all ring tokens; see :func:`.cursors.drained`."""
    row, slot = live_rows(slots, null_slot, len(ring_len), "slots")
    start, length = live_cursors(row, slot, ring_start, ring_len, capacity, capacity)
    ring_start[slot] = (start + length) % capacity
    ring_len[slot] = 0


def _delta(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool) -> Tensor:
    value = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return softplus(value) if dt_softplus else value


def _by_head(value: Tensor, heads: int) -> Tensor:
    """(..., groups, n) repeated to (..., heads, n)."""
    return value.repeat_interleave(heads // value.shape[-2], -2)


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
    return -torch.exp(A_log.to(work)) * _delta(a.to(work), dt_bias, True), torch.sigmoid(b.to(work))


def _queries_and_keys(q: Tensor, k: Tensor, qk_l2norm: bool, work: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the recurrence sees of q and k: both normalised if asked for, q scaled by ``K^-1/2``."""
    q, k = q.to(work), k.to(work)
    if qk_l2norm:
        q, k = (value / torch.sqrt(value.square().sum(-1, keepdim=True) + 1e-6) for value in (q, k))
    return q * q.shape[-1] ** -0.5, k
