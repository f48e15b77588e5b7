"""vLLM's Mamba-2 replay functions: see ``docs/compat.md`` for what maps to what.

Names, argument lists and meanings are those of vLLM (vllm-project/vllm, pull request 48018) and of the
research fork that it came from (Johnny-Liou/ReplaySSM), in
``model_executor/layers/mamba/ops/selective_state_update_replayssm_*.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .adapt import (
    at_rows,
    expect_shape,
    keep_where,
    packed,
    present,
    put_rows,
    refuse,
    rows_of_slots,
    rows_of_tokens,
    step_that_folds_itself,
    tied,
    unless_null,
)
from .vllm_cursors import NULL_BLOCK_ID, expect_flags


class Skip:
    """D and z of a call, where D may have a value for every element instead of one per head.

    Args:
        op: The adapter, in messages.
        D: (heads, head_dim) or None.
        z: As x, or None.
        x: (rows, heads, head_dim).

    Raises:
        ArgumentError: D or z has another shape.
    """

    def __init__(self, op: str, D: Tensor | None, z: Tensor | None, x: Tensor) -> None:
        self._x = x
        self._outside: tuple[Tensor, Tensor | None] | None = None
        self.inside: dict[str, Any] = {"D": None, "z": None if z is None else packed(z)}
        """What the kernel is given."""
        if z is not None:
            expect_shape(op, "z", z, tuple(x.shape))
        if D is None:
            return
        expect_shape(op, "D", D, tuple(x.shape[1:]))
        if D.stride(-1) == 0 or D.shape[-1] == 1:
            self.inside["D"] = packed(tied(op, "D", D))
        else:
            # z gates what D adds, so that both wait for the kernel.
            self._outside = D, self.inside.pop("z")

    def applied(self, y: Tensor) -> Tensor:
        """The output, of the kernel's."""
        if self._outside is None:
            return y
        D, z = self._outside
        value = y.float() + D.float() * self._x.float()
        if z is not None:
            value *= torch.nn.functional.silu(z.float())
        return value.to(y.dtype)


def selective_state_update_replayssm_output_only(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    x_cache: Tensor | None = None,
    dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None,
    bc_pre: Tensor | None = None,
    write_pos: Tensor | None = None,
    is_flush: Tensor | None = None,
    max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> Tensor:
    """One decode token per row, where a full ring is folded together with that token.

    A row whose ``is_flush`` is 0 appends its token at ``write_pos``; any other folds its ``write_pos`` ring
    tokens and the new one into ``state`` and leaves its rings alone, to be overwritten from 0 on. The state
    of a flushing row is rounded to its dtype twice: after the ring tokens, and after the new one.

    Args:
        state: (slots, heads, head_dim, state_size), or (slots, head_dim, state_size) of one head, whose
            inputs then have no head dimension either. Written by flushing rows.
        x: (rows, heads, head_dim).
        dt: (rows, heads, head_dim), raw, expanded over head_dim.
        A: (heads, head_dim, state_size), negative, expanded over all but heads.
        B: (rows, groups, state_size).
        C: (rows, groups, state_size).
        D: (heads, head_dim). Expanded over head_dim it goes to the kernel; with a value for every element
            it and ``z`` are applied to the rounded output of the kernel.
        dt_bias: (heads, head_dim), expanded over head_dim.
        z: (rows, heads, head_dim).
        dt_softplus: dt (after the bias) passes through softplus.
        x_cache: (slots, heads, max_cache_len, head_dim), dtype of x or fp32.
        dt_cache: (slots, heads, max_cache_len) fp32; dt after bias and softplus.
        B_cache: (slots, groups, max_cache_len, state_size), dtype of x_cache.
        bc_pre: Scratch of vLLM's kernel: taken, neither read nor written.
        write_pos: (rows or more,), tokens in each row's ring.
        is_flush: (rows or more,) bool or int8.
        max_cache_len: Tokens that a ring has room for, 1 to 65.
        state_batch_indices: (rows or more,) or (rows or more, n), of which the first column counts. None is
            row i in slot i.
        null_block_id: Slot that marks padding besides negative ones; not looked at without
            ``state_batch_indices``.
        out: As x; padded rows are left alone. None allocates it, with zeros there.
        enable_stochastic_rounding: Refused.
        cache_philox_rounds: Only counts with stochastic rounding.

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or what is asked for is not served. On a CPU also a full ring
            that does not flush; on a GPU such a row is undefined.
        SpecError: No kernel serves the head dim, state size, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "selective_state_update_replayssm_output_only"
    refuse(
        op,
        "use a state of fp32, or one that is rounded to nearest",
        enable_stochastic_rounding=enable_stochastic_rounding,
    )
    return _standard(
        op, state, x, dt, A, B, C, D, dt_bias, z, dt_softplus, x_cache, dt_cache, B_cache, write_pos,
        is_flush, max_cache_len, state_batch_indices, null_block_id, out,
    )  # fmt: skip


def selective_state_update_replayssm_state_and_output(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    x_cache: Tensor | None = None,
    dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None,
    write_pos: Tensor | None = None,
    is_flush: Tensor | None = None,
    max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: Tensor | None = None,
) -> Tensor:
    """What :func:`selective_state_update_replayssm_output_only` does, without its scratch.

    vLLM has two ways to the same output; which one a kernel takes here is what the dispatch table says.
    """
    return _standard(
        "selective_state_update_replayssm_state_and_output", state, x, dt, A, B, C, D, dt_bias, z,
        dt_softplus, x_cache, dt_cache, B_cache, write_pos, is_flush, max_cache_len, state_batch_indices,
        null_block_id, out,
    )  # fmt: skip


def _standard(
    op: str,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    z: Tensor | None,
    dt_softplus: bool,
    x_cache: Tensor | None,
    dt_cache: Tensor | None,
    B_cache: Tensor | None,
    write_pos: Tensor | None,
    is_flush: Tensor | None,
    max_cache_len: int,
    state_batch_indices: Tensor | None,
    null_block_id: int,
    out: Tensor | None,
) -> Tensor:
    one_head = state.dim() == 3
    if one_head:
        state, x, dt, B, C = (value.unsqueeze(1) for value in (state, x, dt, B, C))
        z, out = (None if value is None else value.unsqueeze(1) for value in (z, out))
        A = A.unsqueeze(0)
        D, dt_bias = (None if value is None else value.unsqueeze(0) for value in (D, dt_bias))
    rows, (slots, heads, head_dim, state_size) = len(x), state.shape
    x_cache, dt_cache = present(op, "x_cache", x_cache), present(op, "dt_cache", dt_cache)
    position = present(op, "write_pos", write_pos)[:rows]
    flush = present(op, "is_flush", is_flush)[:rows] != 0
    expect_shape(op, "dt", dt, tuple(x.shape))
    expect_shape(op, "A", A, (heads, head_dim, state_size))
    expect_shape(op, "x_cache", x_cache, (slots, heads, max_cache_len, head_dim))
    if out is not None:
        expect_shape(op, "out", out, tuple(x.shape))

    if state_batch_indices is None:
        slot = torch.arange(rows, device=x.device)
    else:
        named = state_batch_indices if state_batch_indices.dim() == 1 else state_batch_indices[:, 0]
        slot = unless_null(named[:rows], null_block_id)
    skip = Skip(op, D, z, x)
    inputs: dict[str, Any] = {
        "x": packed(x),
        "dt": packed(tied(op, "dt", dt)),
        "A": tied(op, "A", A, trailing=2).float(),
        "B": packed(B),
        "C": packed(C),
        "dt_bias": None if dt_bias is None else packed(tied(op, "dt_bias", dt_bias)),
        "dt_softplus": dt_softplus,
        "state": state,
        **skip.inside,
    }
    rings: dict[str, Any] = {
        "ring_x": x_cache,
        "ring_b": present(op, "B_cache", B_cache),
        "ring_decay": dt_cache,
    }
    y = step_that_folds_itself(
        slot,
        position,
        flush,
        max_cache_len,
        slots,
        functools.partial(ops.mamba2_step, **inputs, **rings),
        functools.partial(ops.mamba2_native_step, **inputs),
        functools.partial(ops.mamba2_materialize, inputs["A"], state=state, **rings),
    )
    done = keep_where(out, skip.applied(y), slot >= 0)
    return done.squeeze(1) if one_head else done


def selective_state_update_replayssm_spec(
    state_checkpoint: Tensor,
    post_conv_cache: Tensor,
    dt_cache: Tensor,
    conv_out: Tensor,
    dt_spec: Tensor,
    A: Tensor,
    write_pos: Tensor,
    post_conv_state_pos: Tensor,
    is_flush: Tensor,
    query_start_loc: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    d_inner: int,
    ngroups: int,
    dstate: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    out: Tensor | None = None,
    bc_pre: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
) -> Tensor:
    """Outputs of the drafts of each row, from its state and ring, which all of them are appended to.

    A row flushes when its flag says so: its ring tokens are folded into ``state_checkpoint``. Flags are what
    :func:`.vllm_cursors.commit_replayssm_spec` and the reset set. A live row without tokens is left alone.

    Args:
        state_checkpoint: (slots, heads, head_dim, dstate); written by flushing rows.
        post_conv_cache: (slots, capacity, d_inner + ngroups * dstate): x and B of each ring token.
        dt_cache: (slots, heads, capacity), raw dt; its dtype is what new dt are rounded to first.
        conv_out: (tokens, d_inner + 2 ngroups * dstate): x, B and C, packed row after row.
        dt_spec: (tokens, heads), raw.
        A: (heads, head_dim, dstate), negative, expanded over all but heads.
        write_pos: (slots,) int32, tokens in each ring.
        post_conv_state_pos: (slots,) int32, where its oldest is.
        is_flush: (slots,) int8.
        query_start_loc: (rows + 1,), the first token of each row; row r owns those up to the next one's.
        state_batch_indices: (rows,), slots; negative ones are padding.
        max_cache_len: History and a step's tokens: the window plus ``max_spec_len``, at most the capacity.
        max_spec_len: Most tokens of a row, 1 to 16, and at most half of ``max_cache_len``.
        d_inner: heads * head_dim.
        ngroups: Groups of B and C.
        dstate: State size.
        D: (heads, head_dim); see :func:`selective_state_update_replayssm_output_only`.
        z: (tokens, heads, head_dim).
        dt_bias: (heads,), or (heads, head_dim) expanded over head_dim.
        dt_softplus: dt (after the bias) passes through softplus.
        out: (tokens, heads, head_dim); tokens of padded rows and behind the last row are left alone. None
            allocates it, with zeros there.
        bc_pre: Scratch of vLLM's kernel: taken, neither read nor written.
        null_block_id: Slot that marks padding besides negative ones.

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit. On a CPU also a flag that is not that of its cursors; on a GPU
            the cursors decide.
        SpecError: No kernel serves the head dim, state size, window, drafts or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "selective_state_update_replayssm_spec"
    slots, heads, head_dim, _ = state_checkpoint.shape
    tokens, rows, keys = len(conv_out), len(state_batch_indices), ngroups * dstate
    capacity = dt_cache.shape[-1]
    expect_shape(op, "conv_out", conv_out, (tokens, heads * head_dim + 2 * keys))
    expect_shape(op, "post_conv_cache", post_conv_cache, (slots, capacity, d_inner + keys))
    expect_shape(op, "A", A, (heads, head_dim, dstate))
    if out is not None:
        expect_shape(op, "out", out, (tokens, heads, head_dim))
    slot = unless_null(state_batch_indices, null_block_id)
    query_start = packed(query_start_loc.to(torch.int32))
    expect_shape(op, "query_start_loc", query_start, (rows + 1,))
    expect_flags(op, slot, write_pos, is_flush, query_start, max_cache_len, max_spec_len)

    x, B, C = torch.split(packed(conv_out), [d_inner, keys, keys], 1)
    ring_x, ring_b = torch.split(post_conv_cache, [d_inner, keys], 2)
    x, dt = x.view(tokens, heads, head_dim), dt_spec.to(dt_cache.dtype)
    bias = dt_bias if dt_bias is None or dt_bias.dim() == 1 else tied(op, "dt_bias", dt_bias)
    skip = Skip(op, D, z, x)
    # The ops' rings hold dt as the recurrence uses it: made anew of what the cache holds, for these slots.
    raw = at_rows(dt_cache, slot)
    delta = raw.float() if bias is None else raw.float() + bias.float()[:, None]
    if dt_softplus:
        delta = torch.nn.functional.softplus(delta)
    y = ops.mamba2_step(
        x,
        packed(dt),
        tied(op, "A", A, trailing=2).float(),
        B.view(tokens, ngroups, dstate),
        C.view(tokens, ngroups, dstate),
        state=state_checkpoint,
        ring_x=ring_x.view(slots, capacity, heads, head_dim).transpose(1, 2),
        ring_b=ring_b.view(slots, capacity, ngroups, dstate).transpose(1, 2),
        ring_decay=rows_of_slots(delta, slot, slots),
        ring_start=post_conv_state_pos,
        ring_len=write_pos,
        slot_index=slot,
        window=max_cache_len - max_spec_len,
        num_tokens=max_spec_len,
        query_start=query_start,
        dt_bias=None if bias is None else packed(bias),
        dt_softplus=dt_softplus,
        **skip.inside,
    )
    # What the cache gains are the raw ones, at the places behind the ring that the row's tokens went to.
    end = at_rows(post_conv_state_pos, slot) + at_rows(write_pos, slot)
    behind = (torch.arange(capacity, device=slot.device) - end[:, None]) % capacity
    token = (query_start[:-1, None] + behind).clamp(max=max(tokens - 1, 0)).long()
    new = behind < query_start.diff()[:, None]
    if tokens:
        # Of what a row without tokens names, nothing: another row may have that slot.
        grows = slot.masked_fill(query_start.diff() == 0, -1)
        put_rows(dt_cache, grows, torch.where(new[:, None], dt[token].transpose(1, 2), raw))
    live = torch.cat([slot >= 0, slot.new_zeros(1, dtype=torch.bool)])
    return keep_where(out, skip.applied(y), live[rows_of_tokens(query_start, tokens)])
