"""vLLM's Gated DeltaNet replay functions: see ``docs/compat.md`` for what maps to what.

Names, argument lists and meanings are those of the research fork of vLLM that has them
(Johnny-Liou/ReplaySSM), in ``model_executor/layers/fla/ops/fused_recurrent_replayssm.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import ArgumentError
from .adapt import expect_shape, packed, refuse, step_that_folds_itself


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
        torch.where(ssm_state_indices > 0, ssm_state_indices, -1),
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
