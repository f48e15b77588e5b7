"""The public ops of Mamba-2; what all ops have in common is said in :mod:`.ops`."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from . import reference
from .checks import is_whole
from .contracts import (
    MAMBA2_MATERIALIZE,
    MAMBA2_NATIVE_STEP,
    MAMBA2_NATIVE_VERIFY,
    MAMBA2_STEP,
    MAMBA2_VERIFY,
)
from .operators import MaterializeOperator, StepOperator

_step: Final = StepOperator(MAMBA2_STEP, reference.mamba2_step).call
_verify: Final = StepOperator(MAMBA2_VERIFY, reference.mamba2_verify).call
_native_step: Final = StepOperator(MAMBA2_NATIVE_STEP, reference.mamba2_native_step).call
_native_verify: Final = StepOperator(MAMBA2_NATIVE_VERIFY, reference.mamba2_native_verify).call
_materialize: Final = MaterializeOperator(MAMBA2_MATERIALIZE, reference.mamba2_materialize).call


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    num_tokens: int = 1,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One step of Mamba-2 with a ring: outputs from old state and ring, a fold when it is full.

    ``delta = softplus(dt + dt_bias)``, ``S = exp(A delta) S + delta x B^T``, ``y = S C (+ D x) (silu(z))``,
    for each new token of a row after those before it: one, or several of which a draft model has guessed all
    but the first. A row flushes iff it has a token and ``ring_len + num_tokens > window``: its ring tokens
    are folded into ``state``. New tokens are appended to the ring either way. Cursors are only read;
    :func:`.ops.commit` moves them, once per step after the last layer, by the tokens that are kept, and that
    is all there is to rejecting the others. Between a flushing step and its commit nothing else may read the
    slot.

    Tokens of all rows lie one after the other. Row r owns tokens ``r num_tokens`` to
    ``(r + 1) num_tokens - 1``, or those that ``query_start`` gives it. Padded rows write zeros to the
    outputs of their tokens and touch nothing else, rows without tokens touch nothing, and tokens beyond the
    last row's get zeros and are not read.

    The innermost dimension of every tensor is contiguous, other strides are free. Outputs beyond the
    range of a 16-bit dtype become infinite; the state is not affected.

    Args:
        x: (tokens, heads, head_dim), fp32, bf16 or fp16: the activation dtype.
        dt: (tokens, heads), fp32, bf16 or fp16, raw.
        A: (heads,) fp32, negative.
        B: (tokens, groups, state_size), activation dtype. Heads share a group's B and C.
        C: (tokens, groups, state_size), activation dtype.
        state: (slots, heads, head_dim, state_size), fp32, bf16 or fp16; written by flushing rows.
        ring_x: (slots, heads, capacity, head_dim), activation dtype or fp32; appended to.
        ring_b: (slots, groups, capacity, state_size), dtype of ring_x; appended to.
        ring_decay: (slots, heads, capacity) fp32; ``delta`` is appended.
        ring_start: (slots,) int32, index of each ring's oldest token, below the capacity.
        ring_len: (slots,) int32, tokens in each ring, at most ``window``.
        slot_index: (rows,) int32 or int64.
        window: Tokens a ring holds before it is folded, 1 to 64; capacity is at least window + num_tokens.
        D: (heads,), fp32, bf16 or fp16.
        z: (tokens, heads, head_dim), activation dtype.
        dt_bias: (heads,), fp32, bf16 or fp16.
        dt_softplus: dt (after the bias) passes through softplus.
        num_tokens: Tokens of a row, 1 to 16 and at most ``window``; the most of a row where ``query_start``
            is given. The commit after the step takes the same number.
        query_start: (rows + 1,) int32: row r owns tokens ``query_start[r]`` to ``query_start[r + 1] - 1``,
            none to ``num_tokens`` of them. The first entry is 0.
        null_slot: Slot that marks padding besides negative ones.
        out: (tokens, heads, head_dim), activation dtype, memory of its own; None allocates it. An overlap
            with caches, x, dt, B, C or z is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; the message says which, where
            and what to do.
        SpecError: No kernel serves the head dim, state size, window, number of tokens or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    if query_start is None and is_whole(num_tokens) and num_tokens == 1:
        tensors = (
            x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
            slot_index, out,
        )  # fmt: skip
        return _step(tensors, (window, dt_softplus), null_slot)
    packed = (
        x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len, slot_index,
        query_start, out,
    )  # fmt: skip
    return _verify(packed, (window, num_tokens, dt_softplus), null_slot)


def mamba2_native_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    slot_index: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-2 that reads and writes the state: the baseline without a ring.

    Arguments, result and errors are those of :func:`mamba2_step` with one token a row; every live row's
    state is written.
    """
    tensors = (x, dt, A, B, C, D, z, dt_bias, state, slot_index, out)
    return _native_step(tensors, (dt_softplus,), null_slot)


def mamba2_native_verify(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    slot_index: Tensor,
    accepted: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Drafts of Mamba-2 verified with a state of each token: the baseline without a ring.

    A row starts from the state in ``slot_index[row, accepted - 1]``, that of the last token it has kept, and
    stores the state after its token i, rounded to the dtype of ``state``, to ``slot_index[row, i]``; from
    one token to the next it is fp32. A row is padding if ``slot_index[row, 0]`` is negative or ``null_slot``,
    or if it has no token. All else is as in :func:`mamba2_step`, whose other arguments these are.

    Args:
        state: (slots, heads, head_dim, state_size), fp32, bf16 or fp16; written for every token.
        slot_index: (rows, num_tokens) int32 or int64; no slot twice, in one live row or in two. Slots of
            tokens that a row does not have are not looked at, unless it starts from them.
        accepted: (rows,) int32 or int64, tokens kept in the step before, 1 to num_tokens; 1 for a sequence
            whose state is in its first slot. Of padded rows it is not looked at.
        query_start: (rows + 1,) int32, as in :func:`mamba2_step`; None where each row has num_tokens.

    Raises:
        ArgumentError: As :func:`mamba2_step`; on a CPU also an ``accepted`` out of range, and a slot that is
            started from or written and is none, or is named twice. Nothing is written then.
        SpecError: As :func:`mamba2_step`.
        ToolchainError: As :func:`mamba2_step`.
    """
    tensors = (x, dt, A, B, C, D, z, dt_bias, state, slot_index, accepted, query_start, out)
    return _native_verify(tensors, (dt_softplus,), null_slot)


def mamba2_materialize(
    A: Tensor,
    *,
    source: Tensor,
    destination: Tensor,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    window: int,
    prefix: Tensor | None = None,
    null_slot: int | None = None,
) -> None:
    """Write states as they were after the first ring tokens: rings of ``source`` folded into ``destination``.

    Per row ``S = exp(A * sum of delta) S_source + sum_j delta_j exp(A * sum of deltas after j) x_j B_j^T``
    over the oldest ``prefix`` tokens of the source's ring: what a flush would store, were they the whole
    ring. Only states of destinations are written; cursors and rings are read, of sources alone. Whoever
    makes a destination a sequence of its own empties its ring by :func:`.ops.reset`. States older than the
    last flush cannot be had back: who needs one materialises it before.

    A row whose destination is its source folds all its tokens, and its ring must then be emptied by
    :func:`.ops.drained`, once, after the last layer: until then nothing else may read the slot. Of a shorter
    prefix the later tokens would have to move; that is refused.

    Destinations are distinct, and none is the source of another row: programs run in any order. A source may
    serve many rows. Values are looked at on CPUs alone. On a GPU rows that break this give undefined states
    of their destinations, and a row that folds a part of its ring in place is left as it is.

    Args:
        A: (heads,) fp32, negative, as in :func:`mamba2_step`.
        source: (rows,) int32 or int64, slots after a commit. Negative ones and ``null_slot`` skip the row.
        destination: (rows,) int32 or int64, likewise.
        state: As in :func:`mamba2_step`; destinations are written.
        ring_x: As in :func:`mamba2_step`; read.
        ring_b: As in :func:`mamba2_step`; read.
        ring_decay: As in :func:`mamba2_step`; read.
        ring_start: As in :func:`mamba2_step`.
        ring_len: As in :func:`mamba2_step`.
        window: As in :func:`mamba2_step`.
        prefix: (rows,) int32 or int64, tokens to fold, clamped to 0 and the ring's length. None folds all.
        null_slot: Slot that marks padding besides negative ones.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; on a CPU also a slot or cursor out of
            range, destinations that are not as above, and a part of a ring folded in place. Nothing is
            written then.
        SpecError: No kernel serves the head dim, state size, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    tensors = (
        source, destination, prefix, A, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
    )  # fmt: skip
    _materialize(tensors, (window,), null_slot)
