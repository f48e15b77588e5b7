"""vLLM's Gated DeltaNet replay functions: see ``docs/compat.md`` for what maps to what.

Names, argument lists and meanings are those of the research fork of vLLM that has them
(Johnny-Liou/ReplaySSM), in ``fused_recurrent_replayssm.py`` and ``gdn_replayssm_spec_decode.py`` of
``model_executor/layers/fla/ops/``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from .adapt import (
    at_rows,
    beyond_null,
    expect_shape,
    keep_where,
    packed,
    refuse,
    rows_of_tokens,
    see_slots,
    step_that_folds_itself,
)
from .vllm_cursors import expect_flags


def fused_recurrent_gated_delta_rule_replayssm(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    block_v: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    nk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One decode token per row, where a full ring is folded together with that token.

    A row with ``write_pos`` below the last place of its ring appends there; one at the last place folds the
    ring tokens and the new one into ``initial_state`` and leaves its rings alone. The state of a flushing
    row is rounded to its dtype twice. beta is not rounded to the dtype of ``b``, as vLLM's kernel does.

    Args:
        mixed_qkv: (rows, 2 key_heads key_dim + value_heads value_dim): q, k and v of each row.
        a: (rows, value_heads), raw decay gate.
        b: (rows, value_heads), raw writing strength.
        A_log: (value_heads,).
        dt_bias: (value_heads,).
        scale: What q is multiplied by. Other than ``key_dim ** -0.5`` it is made up for in the rounded
            output.
        initial_state: (slots, value_heads, value_dim, key_dim); written by flushing rows.
        d_cache: (slots, value_heads, length, value_dim), dtype of mixed_qkv or fp32.
        k_cache: (slots, key_heads, length, key_dim), dtype of d_cache; keys as the recurrence uses them.
        g_cache: (slots, value_heads, length) fp32, log decay of each token.
        out: (rows, value_heads, value_dim), or with a 1 behind rows; dtype of mixed_qkv. Padded rows get
            zeros.
        ssm_state_indices: (rows,); 0 and negative ones are padding.
        write_pos: (rows or more,), tokens in each row's ring; ``length - 1`` flushes.
        use_qk_l2norm_in_kernel: q and k are normalised here.
        block_v: Refused, as are the next three: what is launched is what the dispatch table says.
        num_warps: Refused.
        num_stages: Refused.
        nk: Refused.

    Returns:
        ``out`` and ``initial_state``.

    Raises:
        ArgumentError: A tensor does not fit, or what is asked for is not served.
        SpecError: No kernel serves the key or value dim, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "fused_recurrent_gated_delta_rule_replayssm"
    hint = "leave it out: launches are chosen by the dispatch table"
    refuse(op, hint, block_v=block_v, num_warps=num_warps, num_stages=num_stages, nk=nk)
    rows, (slots, heads, value_dim, _) = len(mixed_qkv), initial_state.shape
    length = d_cache.shape[2]
    inputs = gdn_inputs(op, mixed_qkv, a, b, A_log, dt_bias, initial_state, use_qk_l2norm_in_kernel)
    rings: dict[str, Any] = {"ring_u": d_cache, "ring_k": k_cache, "ring_g": g_cache}
    if out.dim() == 4:
        expect_shape(op, "out", out, (rows, 1, heads, value_dim))
    expect_shape(op, "d_cache", d_cache, (slots, heads, length, value_dim))
    if not length:
        raise ArgumentError(f"{op}: d_cache has room for no token; allocate at least one")
    position = write_pos[:rows]
    y = step_that_folds_itself(
        beyond_null(ssm_state_indices, 0),
        position,
        position >= length - 1,
        length,
        slots,
        functools.partial(ops.gdn_step, **inputs, **rings),
        functools.partial(ops.gdn_native_step, **inputs),
        functools.partial(ops.gdn_materialize, state=initial_state, **rings),
    )
    out.copy_(rescaled(y, scale, inputs["q"]).view(out.shape))
    return out, initial_state


def gdn_replayssm_spec_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    query_start_loc: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    cache_base: Tensor,
    is_flush: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    null_block_id: int = 0,
    launch_mode: str = "both",
) -> Tensor:
    """Outputs of the drafts of each row, from its state and ring, which all of them are appended to.

    A row flushes when its flag says so: its ring tokens are folded into ``checkpoint_state``. Flags are what
    :func:`.vllm_cursors.commit_gdn_replayssm_spec` and the reset set. A live row without tokens flushes too:
    its commit empties the ring.

    Args:
        mixed_qkv: (tokens, 2 key_heads key_dim + value_heads value_dim): q, k and v, packed row after row.
        a: (tokens, value_heads), raw decay gate.
        b: (tokens, value_heads), raw writing strength.
        A_log: (value_heads,).
        dt_bias: (value_heads,).
        checkpoint_state: (slots, value_heads, value_dim, key_dim); written by flushing rows.
        d_cache: (slots, value_heads, capacity, value_dim), dtype of mixed_qkv or fp32.
        k_cache: (slots, key_heads, capacity, key_dim), dtype of d_cache; keys as the recurrence uses them.
        g_cache: (slots, value_heads, capacity) fp32, log decay of each token.
        out: (tokens, value_heads, value_dim), dtype of mixed_qkv. Tokens of padded rows get zeros, those
            behind the last row are left alone.
        query_start_loc: (rows + 1,), the first token of each row; row r owns those up to the next one's.
        ssm_state_indices: (rows or more,), slots; those up to ``null_block_id`` are padding.
        write_pos: (slots,) int32, tokens in each ring.
        cache_base: (slots,) int32, where its oldest is.
        is_flush: (slots,), not 0 where a step folds the ring.
        max_cache_len: History and a step's tokens: the window plus ``max_spec_len``, at most the capacity.
        max_spec_len: Most tokens of a row, 1 to 16, and at most half of ``max_cache_len``.
        scale: See :func:`fused_recurrent_gated_delta_rule_replayssm`; None is ``key_dim ** -0.5``.
        use_qk_l2norm_in_kernel: q and k are normalised here.
        null_block_id: The last slot that is padding.
        launch_mode: ``"both"``; a half of a step is refused.

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or what is asked for is not served. On a CPU also a flag that is
            not that of its cursors; on a GPU the cursors decide.
        SpecError: No kernel serves the key or value dim, window, drafts or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    op = "gdn_replayssm_spec_decode"
    if launch_mode != "both":
        raise ArgumentError(f"{op}: launch_mode is {launch_mode!r}, a half of a step; pass 'both'")
    tokens, rows = len(mixed_qkv), len(query_start_loc) - 1
    expect_shape(op, "out", out, (tokens, *checkpoint_state.shape[1:3]))
    slot = beyond_null(ssm_state_indices[:rows], null_block_id)
    query_start = packed(query_start_loc.to(torch.int32))
    expect_flags(op, slot, write_pos, is_flush, query_start, max_cache_len, max_spec_len)
    inputs = gdn_inputs(op, mixed_qkv, a, b, A_log, dt_bias, checkpoint_state, use_qk_l2norm_in_kernel)
    caches: dict[str, Any] = {
        "ring_u": d_cache,
        "ring_k": k_cache,
        "ring_g": g_cache,
        "ring_start": cache_base,
        "ring_len": write_pos,
        "window": max_cache_len - max_spec_len,
    }
    # Rows without tokens are left alone by the step.
    has_tokens, folds = query_start.diff() > 0, at_rows(is_flush, slot) != 0
    see_slots(slot.masked_fill(~(has_tokens | folds), -1), len(checkpoint_state))
    empty = slot.masked_fill(has_tokens | ~folds, -1)
    ops.gdn_materialize(source=empty, destination=empty, state=checkpoint_state, **caches)
    y = ops.gdn_step(**inputs, **caches, slot_index=slot, num_tokens=max_spec_len, query_start=query_start)
    owned = rows_of_tokens(query_start, tokens) < rows
    return keep_where(out, rescaled(y, scale, inputs["q"]), owned)


def gdn_inputs(
    op: str,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    qk_l2norm: bool,
) -> dict[str, Any]:
    """Arguments of the GDN ops, from vLLM's.

    Raises:
        ArgumentError: q, k and v do not fill what is packed.
    """
    _, heads, value_dim, key_dim = state.shape
    keys, rest = divmod(mixed_qkv.shape[-1] - heads * value_dim, 2)
    groups = keys // key_dim
    if mixed_qkv.dim() != 2 or rest or groups < 1 or keys % key_dim:
        raise ArgumentError(
            f"{op}: mixed_qkv has shape {tuple(mixed_qkv.shape)}; expected (tokens, 2 key_heads * {key_dim} "
            f"+ {heads} * {value_dim}), as the state {tuple(state.shape)} says"
        )
    q, k, v = torch.split(packed(mixed_qkv), [keys, keys, heads * value_dim], 1)
    return {
        "q": q.view(-1, groups, key_dim),
        "k": k.view(-1, groups, key_dim),
        "v": v.view(-1, heads, value_dim),
        "a": packed(a),
        "b": packed(b),
        "A_log": A_log.float(),
        "dt_bias": dt_bias,
        "qk_l2norm": qk_l2norm,
        "state": state,
    }


def rescaled(y: Tensor, scale: float | None, q: Tensor) -> Tensor:
    """Outputs for queries scaled by ``scale`` rather than ``key_dim ** -0.5``: they are linear in them."""
    factor = 1.0 if scale is None else float(scale) * float(q.shape[-1]) ** 0.5
    return y if abs(factor - 1.0) < 1e-6 else y * factor
