"""The public ops of Gated DeltaNet; what all ops have in common is said in :mod:`.ops`."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from . import reference
from .checks import is_whole
from .contracts import (
    GDN_MATERIALIZE,
    GDN_NATIVE_STEP,
    GDN_NATIVE_VERIFY,
    GDN_STEP,
    GDN_VERIFY,
)
from .operators import MaterializeOperator, StepOperator

_step: Final = StepOperator(GDN_STEP, reference.gdn_step).call
_verify: Final = StepOperator(GDN_VERIFY, reference.gdn_verify).call
_native_step: Final = StepOperator(GDN_NATIVE_STEP, reference.gdn_native_step).call
_native_verify: Final = StepOperator(GDN_NATIVE_VERIFY, reference.gdn_native_verify).call
_materialize: Final = MaterializeOperator(GDN_MATERIALIZE, reference.gdn_materialize).call


def gdn_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    *,
    state: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = True,
    num_tokens: int = 1,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One step of Gated DeltaNet with a ring: outputs from old state and ring, a fold when it is full.

    ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``, ``u = beta (v - exp(g) S k)``,
    ``S = exp(g) S + u k^T``, ``y = S q``, where q and k are first divided by
    ``sqrt(sum of squares + 1e-6)`` if ``qk_l2norm``, and q is always scaled by ``key_dim ** -0.5``
    (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024); for each new token of a row after those before
    it: one, or several of which a draft model has guessed all but the first. The ring holds u, k and g, so
    that replaying it has no serial dependency. A row flushes iff it has a token and
    ``ring_len + num_tokens > window``: its ring tokens are folded into ``state``. New tokens are appended to
    the ring either way. Cursors are only read; :func:`.ops.commit` moves them, once per step after the last
    layer, by the tokens that are kept, and that is all there is to rejecting the others. Between a flushing
    step and its commit nothing else may read the slot.

    Tokens of all rows lie one after the other. Row r owns tokens ``r num_tokens`` to
    ``(r + 1) num_tokens - 1``, or those that ``query_start`` gives it. Padded rows write zeros to the
    outputs of their tokens and touch nothing else, rows without tokens touch nothing, and tokens beyond the
    last row's get zeros and are not read.

    The innermost dimension of every tensor is contiguous, other strides are free: q, k and v may be views
    of one packed tensor. Outputs beyond the range of a 16-bit dtype become infinite; the state is not
    affected unless a ring of that dtype overflows too.

    Args:
        q: (tokens, key_heads, key_dim), dtype of v.
        k: (tokens, key_heads, key_dim), dtype of v. Value heads share a key head's q and k.
        v: (tokens, value_heads, value_dim), fp32, bf16 or fp16: the activation dtype.
        a: (tokens, value_heads), fp32, bf16 or fp16, raw decay gate.
        b: (tokens, value_heads), fp32, bf16 or fp16, raw writing strength.
        A_log: (value_heads,) fp32.
        state: (slots, value_heads, value_dim, key_dim), fp32, bf16 or fp16; written by flushing rows.
        ring_u: (slots, value_heads, capacity, value_dim), activation dtype or fp32; ``u`` is appended.
        ring_k: (slots, key_heads, capacity, key_dim), dtype of ring_u; k is appended, normalised if
            ``qk_l2norm``.
        ring_g: (slots, value_heads, capacity) fp32; ``g`` is appended.
        ring_start: (slots,) int32, index of each ring's oldest token, below the capacity.
        ring_len: (slots,) int32, tokens in each ring, at most ``window``.
        slot_index: (rows,) int32 or int64.
        window: Tokens a ring holds before it is folded, 1 to 64; capacity is at least window + num_tokens.
        dt_bias: (value_heads,), fp32, bf16 or fp16.
        qk_l2norm: q and k are normalised here; False if the caller has done it.
        num_tokens: Tokens of a row, 1 to 16 and at most ``window``; the most of a row where ``query_start``
            is given. The commit after the step takes the same number.
        query_start: (rows + 1,) int32: row r owns tokens ``query_start[r]`` to ``query_start[r + 1] - 1``,
            none to ``num_tokens`` of them. The first entry is 0.
        null_slot: Slot that marks padding besides negative ones.
        out: (tokens, value_heads, value_dim), activation dtype, memory of its own; None allocates it. An
            overlap with caches, q, k, v, a or b is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; the message says which, where
            and what to do.
        SpecError: No kernel serves the key or value dim, window, number of tokens or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    if query_start is None and is_whole(num_tokens) and num_tokens == 1:
        tensors = (
            q, k, v, a, b, A_log, dt_bias, state, ring_u, ring_k, ring_g, ring_start, ring_len, slot_index,
            out,
        )  # fmt: skip
        return _step(tensors, (window, qk_l2norm), null_slot)
    packed = (
        q, k, v, a, b, A_log, dt_bias, state, ring_u, ring_k, ring_g, ring_start, ring_len, slot_index,
        query_start, out,
    )  # fmt: skip
    return _verify(packed, (window, num_tokens, qk_l2norm), null_slot)


def gdn_native_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    *,
    state: Tensor,
    slot_index: Tensor,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = True,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Gated DeltaNet that reads and writes the state: the baseline without a ring.

    Arguments, result and errors are those of :func:`gdn_step` with one token a row; every live row's state
    is written.
    """
    tensors = (q, k, v, a, b, A_log, dt_bias, state, slot_index, out)
    return _native_step(tensors, (qk_l2norm,), null_slot)


def gdn_native_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    *,
    state: Tensor,
    slot_index: Tensor,
    accepted: Tensor,
    dt_bias: Tensor | None = None,
    qk_l2norm: bool = True,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Drafts of Gated DeltaNet verified with a state of each token: the baseline without a ring.

    Inputs and result are those of :func:`gdn_step`; slots, ``accepted`` and errors are as in
    :func:`.mamba2.mamba2_native_verify`.
    """
    tensors = (q, k, v, a, b, A_log, dt_bias, state, slot_index, accepted, query_start, out)
    return _native_verify(tensors, (qk_l2norm,), null_slot)


def gdn_materialize(
    *,
    source: Tensor,
    destination: Tensor,
    state: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    window: int,
    prefix: Tensor | None = None,
    null_slot: int | None = None,
) -> None:
    """Write states as they were after the first ring tokens: rings of ``source`` folded into ``destination``.

    Per row ``S = exp(sum of g) S_source + sum_j exp(sum of gates after j) u_j k_j^T`` over the oldest
    ``prefix`` tokens of the source's ring. Caches are those of :func:`gdn_step`; all else, errors included,
    is as in :func:`.mamba2.mamba2_materialize`.
    """
    tensors = (source, destination, prefix, state, ring_u, ring_k, ring_g, ring_start, ring_len)
    _materialize(tensors, (window,), null_slot)
