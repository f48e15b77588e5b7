"""The public ops of layers: one function per op and family, with all that a caller must know.

Ops have no gradient. Tensors that require one are refused under grad mode; decode under
``torch.no_grad()`` or ``torch.inference_mode()``.

Under ``torch.compile`` pass caches as separate tensors, strided as they like, or as views of disjoint
regions of one pool. Views of different dtypes that interleave in one byte pool are refused there by
torch; eager calls and CUDA graphs take them.

Row contract: ``slot_index`` names each row's slot, -1 (any negative number) or ``null_slot`` marks
padding. No slot may occur twice among the live rows of one call. Slots and cursors out of range raise
ArgumentError on a CPU, before anything is written; on a GPU they are not looked at. A step must not be
run twice on the same slots without the ``commit`` in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from . import reference
from .caches import Cache, Snapshot, bytes_per_slot, make_cache, ring_capacity
from .contracts import (
    GDN_MATERIALIZE,
    GDN_NATIVE_STEP,
    GDN_STEP,
    MAMBA2_MATERIALIZE,
    MAMBA2_NATIVE_STEP,
    MAMBA2_STEP,
)
from .cursors import commit, drained, reset
from .operators import NAMESPACE, MaterializeOperator, StepOperator, cuda_index, late
from .spec import Spec

__all__ = [
    "NAMESPACE",
    "Cache",
    "Snapshot",
    "bytes_per_slot",
    "commit",
    "drained",
    "gdn_materialize",
    "gdn_native_step",
    "gdn_step",
    "make_cache",
    "mamba2_materialize",
    "mamba2_native_step",
    "mamba2_step",
    "reset",
    "ring_capacity",
    "warmup",
]

_mamba2_step: Final = StepOperator(MAMBA2_STEP, reference.mamba2_step).call
_mamba2_native_step: Final = StepOperator(MAMBA2_NATIVE_STEP, reference.mamba2_native_step).call
_gdn_step: Final = StepOperator(GDN_STEP, reference.gdn_step).call
_gdn_native_step: Final = StepOperator(GDN_NATIVE_STEP, reference.gdn_native_step).call
_mamba2_materialize: Final = MaterializeOperator(MAMBA2_MATERIALIZE, reference.mamba2_materialize).call
_gdn_materialize: Final = MaterializeOperator(GDN_MATERIALIZE, reference.gdn_materialize).call
_compile_ahead: Final = late("compile_ahead")


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
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-2 with a ring: outputs from old state and ring, a fold when it is full.

    ``delta = softplus(dt + dt_bias)``, ``S = exp(A delta) S + delta x B^T``, ``y = S C (+ D x) (silu(z))``.
    A row flushes iff ``ring_len + 1 > window``: its ring tokens are folded into ``state``. The new token
    is appended to the ring either way. Cursors are only read; :func:`commit` moves them, once per step
    after the last layer. Between a flushing step and its commit nothing else may read the slot.

    The innermost dimension of every tensor is contiguous, other strides are free. Outputs beyond the
    range of a 16-bit dtype become infinite; the state is not affected. Padded rows write zeros to
    their output and touch nothing else.

    Args:
        x: (rows, heads, head_dim), fp32, bf16 or fp16: the activation dtype.
        dt: (rows, heads), fp32, bf16 or fp16, raw.
        A: (heads,) fp32, negative.
        B: (rows, groups, state_size), activation dtype. Heads share a group's B and C.
        C: (rows, groups, state_size), activation dtype.
        state: (slots, heads, head_dim, state_size), fp32, bf16 or fp16; written by flushing rows.
        ring_x: (slots, heads, capacity, head_dim), activation dtype or fp32; appended to.
        ring_b: (slots, groups, capacity, state_size), dtype of ring_x; appended to.
        ring_decay: (slots, heads, capacity) fp32; ``delta`` is appended.
        ring_start: (slots,) int32, index of each ring's oldest token, below the capacity.
        ring_len: (slots,) int32, tokens in each ring, at most ``window``.
        slot_index: (rows,) int32 or int64.
        window: Tokens a ring holds before it is folded, 1 to 64; capacity is at least window + 1.
        D: (heads,), fp32, bf16 or fp16.
        z: (rows, heads, head_dim), activation dtype.
        dt_bias: (heads,), fp32, bf16 or fp16.
        dt_softplus: dt (after the bias) passes through softplus.
        null_slot: Slot that marks padding besides negative ones.
        out: (rows, heads, head_dim), activation dtype, memory of its own; None allocates it. An overlap
            with caches, x, dt, B, C or z is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; the message says which, where
            and what to do.
        SpecError: No kernel serves the head dim, state size, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    tensors = (
        x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len, slot_index,
        out,
    )  # fmt: skip
    return _mamba2_step(tensors, (window, dt_softplus), null_slot)


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

    Arguments, result and errors are those of :func:`mamba2_step`; every live row's state is written.
    """
    tensors = (x, dt, A, B, C, D, z, dt_bias, state, slot_index, out)
    return _mamba2_native_step(tensors, (dt_softplus,), null_slot)


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
    makes a destination a sequence of its own empties its ring by :func:`reset`. States older than the last
    flush cannot be had back: who needs one materialises it before.

    A row whose destination is its source folds all its tokens, and its ring must then be emptied by
    :func:`drained`, once, after the last layer: until then nothing else may read the slot. Of a shorter
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
    _mamba2_materialize(tensors, (window,), null_slot)


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
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Gated DeltaNet with a ring: outputs from old state and ring, a fold when it is full.

    ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``, ``u = beta (v - exp(g) S k)``,
    ``S = exp(g) S + u k^T``, ``y = S q``, where q and k are first divided by
    ``sqrt(sum of squares + 1e-6)`` if ``qk_l2norm``, and q is always scaled by ``key_dim ** -0.5``
    (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024). The ring holds u, k and g, so that replaying
    it has no serial dependency. A row flushes iff ``ring_len + 1 > window``: its ring tokens are folded
    into ``state``. The new token is appended to the ring either way. Cursors are only read; :func:`commit`
    moves them, once per step after the last layer. Between a flushing step and its commit nothing else may
    read the slot.

    The innermost dimension of every tensor is contiguous, other strides are free: q, k and v may be views
    of one packed tensor. Outputs beyond the range of a 16-bit dtype become infinite; the state is not
    affected unless a ring of that dtype overflows too. Padded rows write zeros to their output and touch
    nothing else.

    Args:
        q: (rows, key_heads, key_dim), dtype of v.
        k: (rows, key_heads, key_dim), dtype of v. Value heads share a key head's q and k.
        v: (rows, value_heads, value_dim), fp32, bf16 or fp16: the activation dtype.
        a: (rows, value_heads), fp32, bf16 or fp16, raw decay gate.
        b: (rows, value_heads), fp32, bf16 or fp16, raw writing strength.
        A_log: (value_heads,) fp32.
        state: (slots, value_heads, value_dim, key_dim), fp32, bf16 or fp16; written by flushing rows.
        ring_u: (slots, value_heads, capacity, value_dim), activation dtype or fp32; ``u`` is appended.
        ring_k: (slots, key_heads, capacity, key_dim), dtype of ring_u; k is appended, normalised if
            ``qk_l2norm``.
        ring_g: (slots, value_heads, capacity) fp32; ``g`` is appended.
        ring_start: (slots,) int32, index of each ring's oldest token, below the capacity.
        ring_len: (slots,) int32, tokens in each ring, at most ``window``.
        slot_index: (rows,) int32 or int64.
        window: Tokens a ring holds before it is folded, 1 to 64; capacity is at least window + 1.
        dt_bias: (value_heads,), fp32, bf16 or fp16.
        qk_l2norm: q and k are normalised here; False if the caller has done it.
        null_slot: Slot that marks padding besides negative ones.
        out: (rows, value_heads, value_dim), activation dtype, memory of its own; None allocates it. An
            overlap with caches, q, k, v, a or b is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; the message says which, where
            and what to do.
        SpecError: No kernel serves the key or value dim, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    tensors = (
        q, k, v, a, b, A_log, dt_bias, state, ring_u, ring_k, ring_g, ring_start, ring_len, slot_index, out,
    )  # fmt: skip
    return _gdn_step(tensors, (window, qk_l2norm), null_slot)


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

    Arguments, result and errors are those of :func:`gdn_step`; every live row's state is written.
    """
    tensors = (q, k, v, a, b, A_log, dt_bias, state, slot_index, out)
    return _gdn_native_step(tensors, (qk_l2norm,), null_slot)


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
    is as in :func:`mamba2_materialize`.
    """
    tensors = (source, destination, prefix, state, ring_u, ring_k, ring_g, ring_start, ring_len)
    _gdn_materialize(tensors, (window,), null_slot)


def warmup(
    spec: Spec,
    effective_batches: Sequence[int],
    device: torch.device | str = "cuda",
    index_dtype: torch.dtype = torch.int32,
    aligned: bool = True,
) -> int:
    """Compile everything that calls of ``spec`` and the cursor ops will need, ahead of a capture.

    Args:
        spec: Of steps, native steps (``spec.native``) or what materialises states (``spec.materialize``).
        effective_batches: Sequences x heads of the captures.
        device: CUDA device.
        index_dtype: dtype of slot_index and of accepted counts; of source, destination and prefix.
        aligned: Pointers and strides of the captures are multiples of 16 bytes. Call once more with
            False for a pool where they are not.

    Returns:
        Number of plans compiled (or loaded from Triton's cache).

    Raises:
        DispatchError: Strict mode, and no table has a row.
        CompileError: A kernel does not compile.
        ToolchainError: There is no CUDA device, no triton or no C compiler.
    """
    compiled: int = _compile_ahead(spec, effective_batches, cuda_index(device), index_dtype, aligned)
    return compiled
