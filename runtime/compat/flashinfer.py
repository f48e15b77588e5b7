"""FlashInfer's replay functions over the ops of this package, by their names and contracts.

``docs/compat.md`` says in a table for each how its contract maps to the ops, and what is left out. Names,
argument lists and meanings are those of flashinfer-ai/flashinfer from 0.6.18 on (rings of one buffer), in
``flashinfer/mamba/checkpointing_ssu.py`` and ``replayssm_materialize.py``.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from ..rows import folded_rows
from .adapt import (
    at_rows,
    expect_shape,
    keep_where,
    looks_at_values,
    packed,
    refuse,
    rows_of_tokens,
    see_slots,
    tied,
    unless_null,
)

__all__ = ["checkpointing_ssu", "replayssm_materialize"]

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def checkpointing_ssu(
    state: Tensor,
    x_cache: Tensor,
    B_cache: Tensor,
    dt_cache: Tensor,
    ring_start: Tensor,
    prev_num_accepted_tokens: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: Tensor | None = None,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: Tensor | None = None,
    cumAdt_vec: Tensor | None = None,
    cb_old: Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> Tensor:
    """Outputs of T tokens of each row, from its state and ring, which all of them are appended to.

    A row folds its ring into ``state`` where its ring tokens and its new ones are more than the window, which
    is the ring's capacity less T. The caller moves the cursors.

    Where rows vary (``cu_seqlens``), that rule goes by the tokens a row has, and the ops' by the most it may
    have: rows that flush by the ops' alone take ``max_seqlen - 1`` further launches of one token each, which
    are made whether there are such rows or not.

    Args:
        state: (slots, heads, head_dim, state_size); written by flushing rows.
        x_cache: (slots, heads, capacity, head_dim), dtype of x or fp32.
        B_cache: (slots, groups, capacity, state_size), dtype of x_cache.
        dt_cache: (slots, heads, capacity) fp32; dt after bias and softplus.
        ring_start: (slots,) int32, where each ring's oldest token is; read.
        prev_num_accepted_tokens: (slots,) int32, tokens in each ring; read.
        x: (rows, T, heads, head_dim), or (1, tokens, heads, head_dim) with ``cu_seqlens``; the same goes for
            dt, B, C, z and out.
        dt: (rows, T, heads, head_dim), raw, expanded over head_dim.
        A: (heads, head_dim, state_size), negative, expanded over all but heads.
        B: (rows, T, groups, state_size).
        C: (rows, T, groups, state_size).
        out: As x. Padded rows are left alone, as are tokens that no row owns.
        D: (heads, head_dim), expanded over head_dim.
        z: As x.
        dt_bias: (heads, head_dim), expanded over head_dim.
        dt_softplus: dt (after the bias) passes through softplus.
        state_batch_indices: (rows,), slots. None is row i in slot i.
        pad_slot_id: Slot that marks padding besides negative ones.
        state_scale: Refused, as are states of 8 bits.
        rand_seed: Refused: states are rounded to nearest.
        philox_rounds: Only counts with ``rand_seed``.
        d_split: Refused, as are the scratch tensors, ``precompute_heads_per_cta`` and any ``algorithm`` but
            ``"auto"``: what is launched is what the dispatch table says.
        cu_seqlens: (rows + 1,) int32, the first token of each row; row r owns those up to the next one's.
        max_seqlen: With ``cu_seqlens``, T: the most tokens of a row.
        enable_pdl: Taken; launches wait for what is before them in any case.
        cb_scaled: Refused.
        cumAdt_vec: Refused.
        cb_old: Refused.
        precompute_heads_per_cta: Refused.
        algorithm: Refused if not ``"auto"``.

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or what is asked for is not served.
        SpecError: No kernel serves the head dim, state size, window, tokens or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "checkpointing_ssu"
    hint = "use a state of fp32, bf16 or fp16, which is rounded to nearest"
    refuse(op, hint, state_scale=state_scale, rand_seed=rand_seed)
    refuse(
        op, "leave it out: launches are chosen by the dispatch table", d_split=d_split, cb_scaled=cb_scaled,
        cumAdt_vec=cumAdt_vec, cb_old=cb_old, precompute_heads_per_cta=precompute_heads_per_cta or None,
        algorithm=None if algorithm == "auto" else algorithm,
    )  # fmt: skip
    if (cu_seqlens is None) != (max_seqlen is None):
        raise ArgumentError(f"{op}: cu_seqlens and max_seqlen go together; pass both, or neither")
    expect_shape(op, "dt", dt, tuple(x.shape))
    expect_shape(op, "out", out, tuple(x.shape))
    expect_shape(op, "A", A, tuple(state.shape[1:]))
    if cu_seqlens is None:
        rows, num_tokens = x.shape[:2]
    else:
        assert max_seqlen is not None
        rows, num_tokens = len(cu_seqlens) - 1, max_seqlen
        expect_shape(op, "x", x, (1, *x.shape[1:]))
    indices = torch.arange(rows, device=x.device) if state_batch_indices is None else state_batch_indices
    slot = unless_null(indices, pad_slot_id)
    live = slot >= 0

    fixed: dict[str, Any] = {
        "A": tied(op, "A", A, trailing=2).float(),
        "D": None if D is None else packed(tied(op, "D", D)),
        "dt_bias": None if dt_bias is None else packed(tied(op, "dt_bias", dt_bias)),
        "dt_softplus": dt_softplus,
        "state": state,
        "ring_x": x_cache,
        "ring_b": B_cache,
        "ring_decay": dt_cache,
        "ring_start": ring_start,
    }
    tokens: dict[str, Any] = {"x": x, "dt": tied(op, "dt", dt), "B": B, "C": C, "z": z}
    tokens = {name: None if value is None else packed(value.flatten(0, 1)) for name, value in tokens.items()}
    length, window = prev_num_accepted_tokens, x_cache.shape[2] - num_tokens
    if cu_seqlens is None:
        y = ops.mamba2_step(
            **tokens, **fixed, ring_len=length, slot_index=slot, window=window, num_tokens=num_tokens
        )
        written = live[:, None].expand(-1, num_tokens)
    else:
        owner = rows_of_tokens(cu_seqlens, x.shape[1])
        y = _varying_rows(tokens, fixed, length, slot, packed(cu_seqlens), owner, num_tokens, window)
        written = torch.cat([live, live.new_zeros(1)])[owner][None]
    return keep_where(out, y.view(x.shape), written)


def _varying_rows(
    tokens: dict[str, Any],
    fixed: dict[str, Any],
    length: Tensor,
    slot: Tensor,
    query_start: Tensor,
    owner: Tensor,
    num_tokens: int,
    window: int,
) -> Tensor:
    """Outputs of a packed batch, whose rows flush by the tokens they have.

    Args:
        tokens: What there is per token, (tokens, ...).
        fixed: All else that the op takes, but for what follows.
        length: (slots,), tokens in each ring.
        slot: (rows,), -1 for padding.
        query_start: (rows + 1,).
        owner: (tokens,), the row of each token; how many there are for those of none.
        num_tokens: The most of a row.
        window: Tokens that a ring holds.
    """
    rows, counts = len(slot), query_start.diff()
    see_slots(slot.masked_fill(counts == 0, -1), len(fixed["state"]))
    filled = at_rows(length, slot)
    # Those that do not flush, but would with all the tokens they may have.
    early = (slot >= 0) & (counts > 0) & (filled + counts <= window) & (filled + num_tokens > window)
    y = ops.mamba2_step(
        **tokens,
        **fixed,
        ring_len=length,
        slot_index=slot.masked_fill(early, -1),
        window=window,
        num_tokens=num_tokens,
        query_start=query_start,
    )
    if num_tokens == 1 or not len(y) or not rows or (looks_at_values(slot) and not bool(early.any())):
        return y
    # One token after the other, in a window that such a row, having fewer than num_tokens, cannot fill.
    singles = []
    for i in range(num_tokens - 1):
        token = (query_start[:-1] + i).clamp(max=len(y) - 1).long()
        inputs: dict[str, Any] = {
            name: None if value is None else value[token] for name, value in tokens.items()
        }
        goes_on = slot.masked_fill(~(early & (i < counts)), -1)
        singles.append(
            ops.mamba2_step(
                **inputs, **fixed, ring_len=length + i, slot_index=goes_on, window=window + num_tokens - 1
            )
        )
    row = owner.clamp(max=rows - 1)
    place = (torch.arange(len(y), device=row.device) - query_start[row]).clamp(0, num_tokens - 2)
    return torch.where(early[row][:, None, None], torch.stack(singles)[place, row], y)


def replayssm_materialize(
    state_ptrs: Tensor,
    state_slot_strides: Tensor,
    x_cache_ptrs: Tensor,
    x_cache_slot_strides: Tensor,
    B_cache_ptrs: Tensor,
    B_cache_slot_strides: Tensor,
    dt_cache_ptrs: Tensor,
    dt_cache_slot_strides: Tensor,
    A_ptrs: Tensor,
    state_scale_ptrs: Tensor,
    state_scale_slot_strides: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    ring_start: Tensor,
    replay_prefix_len: Tensor,
    active_request_indices: Tensor,
    *,
    state_dtype: torch.dtype,
    input_dtype: torch.dtype,
    matrixA_dtype: torch.dtype,
    dim: int,
    dstate: int,
    num_heads: int,
    heads_per_group: int,
    max_window: int,
    ring_buffer_len: int,
    pad_slot_id: int = -1,
    rand_seed: Tensor | None = None,
    philox_rounds: int = 0,
) -> None:
    """Write the states after the first ring tokens of other slots, for all layers.

    The tables of addresses and the slots are read on the host, which waits for the GPU: it cannot be captured
    in a CUDA graph. Memory is taken as the tables say: a wrong address is not noticed.

    Args:
        state_ptrs: (layers,) int64, address of each layer's states, (slots, num_heads, dim, dstate),
            contiguous behind the slots, as are the next three.
        state_slot_strides: (layers,) int64, elements from slot to slot.
        x_cache_ptrs: Of the rings (slots, num_heads, ring_buffer_len, dim).
        x_cache_slot_strides: See ``state_slot_strides``.
        B_cache_ptrs: Of the rings (slots, num_heads / heads_per_group, ring_buffer_len, dstate).
        B_cache_slot_strides: See ``state_slot_strides``.
        dt_cache_ptrs: Of the rings (slots, num_heads, ring_buffer_len) fp32; dt after bias and softplus.
        dt_cache_slot_strides: See ``state_slot_strides``.
        A_ptrs: Of the rates (num_heads,).
        state_scale_ptrs: Not looked at: states of 8 bits are refused.
        state_scale_slot_strides: Not looked at.
        src_slots: (layers, requests) int32. A request is skipped in layers where it or its destination is
            ``pad_slot_id`` or negative. Requests of one source have one ring.
        dst_slots: (layers, requests) int32, likewise; distinct, and sources of no other request.
        ring_start: (requests,) int32, where the source's oldest token is.
        replay_prefix_len: (requests,) int32, tokens to fold, up to ``max_window``; 0 copies the state, a
            negative one skips the request.
        active_request_indices: (requests,) int32, requests to serve in front of the first -1.
        state_dtype: fp32, bf16 or fp16.
        input_dtype: Of the rings of x and B.
        matrixA_dtype: Of the rates.
        dim: Head dim.
        dstate: State size.
        num_heads: Heads.
        heads_per_group: Heads that share a B.
        max_window: Longest prefix; below ``ring_buffer_len``.
        ring_buffer_len: Tokens that a ring has room for.
        pad_slot_id: Slot to skip.
        rand_seed: Refused: states are rounded to nearest.
        philox_rounds: Refused if not 0.

    Raises:
        ArgumentError: An argument does not fit, or what is asked for is not served, or a CUDA graph is being
            captured. On a CPU also what :func:`..ops.mamba2_materialize` says of slots, before any layer is
            written.
        SpecError: No kernel serves the sizes or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "replayssm_materialize"
    hint = "use a state of fp32, bf16 or fp16, which is rounded to nearest"
    refuse(
        op, hint, rand_seed=rand_seed, philox_rounds=philox_rounds or None,
        state_dtype=None if state_dtype in _FLOATS else state_dtype,
    )  # fmt: skip
    layers, requests = src_slots.shape
    expect_shape(op, "dst_slots", dst_slots, (layers, requests))
    for name, value in (
        ("ring_start", ring_start),
        ("replay_prefix_len", replay_prefix_len),
        ("active_request_indices", active_request_indices),
    ):
        expect_shape(op, name, value, (requests,))
    if heads_per_group < 1 or num_heads % heads_per_group:
        raise ArgumentError(f"{op}: {num_heads} heads cannot share B in groups of {heads_per_group}")
    device = src_slots.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            f"{op}: a CUDA graph is being captured, and tables of addresses are read on the host",
            hint="call it outside of graphs, or capture mamba2_materialize, which takes tensors",
        )
    groups = num_heads // heads_per_group
    tables: dict[str, tuple[Tensor, Tensor, tuple[int, ...], torch.dtype]] = {
        "state": (state_ptrs, state_slot_strides, (num_heads, dim, dstate), state_dtype),
        "ring_x": (x_cache_ptrs, x_cache_slot_strides, (num_heads, ring_buffer_len, dim), input_dtype),
        "ring_b": (B_cache_ptrs, B_cache_slot_strides, (groups, ring_buffer_len, dstate), input_dtype),
        "ring_decay": (dt_cache_ptrs, dt_cache_slot_strides, (num_heads, ring_buffer_len), torch.float32),
    }
    for name, (addresses, strides, _, _) in tables.items():
        expect_shape(op, f"addresses of {name}", addresses, (layers,))
        expect_shape(op, f"strides of {name}", strides, (layers,))
    expect_shape(op, "A_ptrs", A_ptrs, (layers,))

    listed = (active_request_indices >= 0).to(torch.int32).cumprod(0) > 0
    active = torch.zeros(requests + 1, dtype=torch.bool, device=device)
    active[torch.where(listed, active_request_indices, requests).long()] = True
    served = active[:requests] & (replay_prefix_len >= 0)
    skipped = torch.minimum(src_slots, dst_slots) < 0
    skipped |= (src_slots == pad_slot_id) | (dst_slots == pad_slot_id) | ~served
    sources, destinations = (slots.masked_fill(skipped, -1) for slots in (src_slots, dst_slots))
    # How many slots there are nobody says: as many as are named.
    slots = 1 + (int(torch.maximum(sources, destinations).max()) if requests else -1)
    if not slots:
        return
    places = {
        name: list(zip(addresses.tolist(), strides.tolist(), strict=True))
        for name, (addresses, strides, _, _) in tables.items()
    }
    folds: list[dict[str, Any]] = []
    for layer in range(layers):
        source = sources[layer]
        length = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        start, index = torch.zeros_like(length), torch.where(source >= 0, source, slots).long()
        # Requests may share a source, and fold different parts of its ring.
        length.scatter_reduce_(0, index, replay_prefix_len.to(torch.int32), "amax")
        start[index] = ring_start.to(torch.int32)
        fold: dict[str, Any] = {
            "source": source,
            "destination": destinations[layer],
            "prefix": replay_prefix_len,
            "ring_start": start[:slots],
            "ring_len": length[:slots],
            "window": max_window,
        }
        if looks_at_values(source):  # of all layers, before the first of them is written
            folded_rows(**fold, capacity=ring_buffer_len, null_slot=-1)
        folds.append(fold)
    for layer, (A_address, fold) in enumerate(zip(A_ptrs.tolist(), folds, strict=True)):
        caches: dict[str, Any] = {
            name: _tensor_at(*places[name][layer], (slots, *shape), dtype, device)
            for name, (_, _, shape, dtype) in tables.items()
        }
        rates = _tensor_at(A_address, 1, (num_heads,), matrixA_dtype, device).float()
        ops.mamba2_materialize(rates, **fold, **caches)


class _Memory:
    """Memory of a GPU as torch takes it, without a copy."""

    def __init__(self, address: int, elements: int, dtype: torch.dtype) -> None:
        # bf16 has no name there: whole numbers of its size stand for it.
        kind = f"<i{dtype.itemsize}"
        self.__cuda_array_interface__ = {
            "shape": (elements,), "typestr": kind, "data": (address, False), "version": 3,
        }  # fmt: skip


def _tensor_at(
    address: int, stride: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The memory at an address as a tensor, contiguous behind its first dimension."""
    steps = (stride, *(math.prod(shape[i + 1 :]) for i in range(1, len(shape))))
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
    if device.type == "cuda":
        flat = torch.as_tensor(_Memory(address, elements, dtype), device=device).view(dtype)
    else:
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
        flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided(shape, steps)
