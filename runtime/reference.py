"""The ops in plain torch: readable, on any device, and the ops' implementation on CPUs.

Arguments are those of :mod:`.ops`, in the order of the operators' schemas. Checked here are the values
of slots and cursors alone, which kernels do not look at.
Rows are vectorised; no matrix product is used, so that no TF32 setting touches the result. Arithmetic
is in fp32 (fp64 where the state is fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ArgumentError
from .oracle import softplus


def live_rows(slot_index: Tensor, null_slot: int, slots: int) -> tuple[Tensor, Tensor]:
    """Indices of the rows that are no padding, and their slots, int64.

    Raises:
        ArgumentError: A slot is beyond the last one. Nothing has been written yet.
    """
    row = ((slot_index >= 0) & (slot_index != null_slot)).nonzero()[:, 0]
    slot = slot_index[row].long()
    beyond = (slot >= slots).nonzero()[:, 0]
    if len(beyond):
        first = int(beyond[0])
        raise ArgumentError(
            f"row {int(row[first])} names slot {int(slot[first])}, but there are {slots} slots",
            hint="correct slot_index, or mark padding by -1 or null_slot",
        )
    return row, slot


def live_cursors(
    row: Tensor, slot: Tensor, ring_start: Tensor, ring_len: Tensor, longest: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Starts and lengths, int32, of the rings of live rows.

    Raises:
        ArgumentError: A ring starts outside of its capacity or is longer than it may be. Nothing has
            been written yet.
    """
    start, length = ring_start[slot], ring_len[slot]
    bad = ((start < 0) | (start >= capacity) | (length < 0) | (length > longest)).nonzero()[:, 0]
    if len(bad):
        first = int(bad[0])
        raise ArgumentError(
            f"row {int(row[first])}: the ring of slot {int(slot[first])} has ring_start {int(start[first])} "
            f"and ring_len {int(length[first])}, outside of 0 to {capacity - 1} and 0 to {longest}",
            hint="reset the slot for a new sequence, and move cursors by commit and drained alone, with one "
            "window and capacity",
        )
    return start, length


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

    rate = A.to(work)
    delta = _delta(dt[row], dt_bias, dt_softplus, work)
    x_new, b_new = x[row].to(work), B[row].to(work)
    c_new = C[row].to(work)
    c_heads = c_new.repeat_interleave(heads_per_group, 1)

    # Ring tokens, oldest first, (rows, window, ...). Dead entries are replaced, not multiplied by zero.
    j = torch.arange(window, device=x.device)
    live = j < length[:, None]
    token = (start[:, None] + j) % capacity
    index = (slot[:, None], slice(None), token)
    zero = torch.zeros((), dtype=work, device=x.device)
    x_ring = torch.where(live[..., None, None], ring_x[index].to(work), zero)
    b_ring = torch.where(live[..., None, None], ring_b[index].to(work), zero)
    delta_ring = torch.where(live[..., None], ring_decay[index].to(work), zero)

    # Weight of token j: delta_j exp(A * sum of the deltas after j), by suffix sums.
    from_here = delta_ring.flip(1).cumsum(1).flip(1)
    later = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1)
    weight = delta_ring * torch.exp(rate * later)
    ring_decayed = torch.exp(rate * from_here[:, 0])
    token_decay = torch.exp(rate * delta)

    # y before the new token: read the old state and the ring separately.
    old = state[slot].to(work)
    score = (b_ring * c_new[:, None]).sum(-1).repeat_interleave(heads_per_group, 2)
    history = ring_decayed[..., None] * (old * c_heads[:, :, None, :]).sum(-1)
    history += ((weight * score)[..., None] * x_ring).sum(1)

    flush = length + 1 > window
    if bool(flush.any()):
        folded = ring_decayed[flush][..., None, None] * old[flush]
        weighted = weight[flush][..., None] * x_ring[flush]
        b_heads = b_ring[flush].repeat_interleave(heads_per_group, 2)
        for i in range(window):
            folded += weighted[:, i, :, :, None] * b_heads[:, i, :, None, :]
        history[flush] = (folded * c_heads[flush][:, :, None, :]).sum(-1)
        state[slot[flush]] = folded.to(state.dtype)

    new_score = (b_new * c_new).sum(-1).repeat_interleave(heads_per_group, 1)
    y = token_decay[..., None] * history + (delta * new_score)[..., None] * x_new
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


def commit(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    """Advance the cursors after a step; see :func:`.cursors.commit`."""
    row, slot = live_rows(slot_index, null_slot, len(ring_len))
    start, length = live_cursors(row, slot, ring_start, ring_len, window, capacity)
    kept = accepted[row].clamp(0, num_tokens).to(ring_len.dtype)
    flushed = length + num_tokens > window
    ring_start[slot] = torch.where(flushed, (start + length) % capacity, start)
    ring_len[slot] = torch.where(flushed, kept, length + kept)


def reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    """Empty rings; see :func:`.cursors.reset`."""
    _, slot = live_rows(slots, null_slot, len(ring_len))
    ring_start[slot] = 0
    ring_len[slot] = 0


def drained(slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int) -> None:
    """Move past all ring tokens; see :func:`.cursors.drained`."""
    row, slot = live_rows(slots, null_slot, len(ring_len))
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
