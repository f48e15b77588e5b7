"""Steps of both families in fp32 torch, for the gate: as they should be, or with a named fault."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from replayssm_tune.runtime import reference
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Step, Trajectory

GDN_FAULTS = {
    "v goes to the ring": "ring u is inexact",
    "beta is left out": "ring u is inexact",
    "what is recalled does not decay": "ring u is inexact",
    "a flush forgets the ring": "ring u is inexact",
    "the read-out is of bf16": "ring u is inexact",
    "beta is not a sigmoid": "ring u is inexact",
    "epsilon outside of the root": "ring k is inexact",
    "raw k goes to the ring": "ring k is inexact",
    "gates are summed": "ring gates are inexact",
    "dead entries are multiplied by 0": "outputs are not finite",
    "q is not scaled": "output error",
    "the new token is not read": "output error",
    "v is read instead of u": "output error",
    "the fold forgets decays": "state error",
    "the fold is of 16 bits": "state error",
}
"""Faults of a GDN step that :func:`launch` can have, and what the gate must find of each."""


def launch(scene: Trajectory, pool: Pool, step: Step, fault: str = "") -> Tensor:
    """Outputs of one step of ``scene`` on ``pool``."""
    spec, out = scene.spec, torch.full_like(step.x, float("nan"))
    null_slot = -1 if scene.null_slot is None else scene.null_slot
    caches = (pool.state, pool.ring_x, pool.ring_b, pool.ring_decay, pool.ring_start, pool.ring_len)
    if spec.family == "mamba2":
        inputs = (step.x, step.dt, scene.A, step.B, step.C, scene.D, step.z, scene.dt_bias)
        if spec.is_native:
            reference.mamba2_native_step(*inputs, pool.state, step.slot_index, out, True, null_slot)
        else:
            reference.mamba2_step(*inputs, *caches, step.slot_index, out, spec.window, True, null_slot)
        return out
    out.zero_()
    y = gdn(scene, pool, step, fault)
    out[step.live] = y.to(out.dtype)
    return out


def gdn(scene: Trajectory, pool: Pool, step: Step, fault: str) -> Tensor:
    """Outputs of the live rows in fp32; writes state and rings."""
    spec, slots, token = scene.spec, step.slots, step.token
    assert token.beta is not None

    def direction(value: Tensor) -> Tensor:
        value = value.float()
        if not spec.qk_l2norm:
            return value
        if fault == "epsilon outside of the root":
            return value.div(value.norm(dim=-1, keepdim=True) + 1e-6)
        return value.mul((value.square().sum(-1, keepdim=True) + 1e-6).rsqrt())

    def heads(value: Tensor, dim: int = 1) -> Tensor:
        return value.repeat_interleave(spec.heads_per_group, dim)

    k, q, v = direction(token.B), direction(token.C), token.x.float()
    q = q if fault == "q is not scaled" else q * spec.state_size**-0.5
    raw = token.dt.float() if scene.dt_bias is None else token.dt.float() + scene.dt_bias
    g = -scene.A.exp() * softplus(raw, threshold=100)
    beta = token.beta.float() if fault == "beta is not a sigmoid" else token.beta.float().sigmoid()
    if fault == "beta is left out":
        beta = torch.ones_like(beta)
    state = pool.state[slots].float()

    if spec.is_native:
        u = beta[..., None] * (v - g.exp()[..., None] * (state * heads(k)[:, :, None]).sum(-1))
        state = g.exp()[..., None, None] * state + u[..., None] * heads(k)[:, :, None]
        pool.state[slots] = state.to(pool.state.dtype)
        return (state * heads(q)[:, :, None]).sum(-1)

    tokens = torch.arange(spec.window)
    at = (pool.ring_start[slots].long()[:, None] + tokens) % pool.capacity
    index = (slots[:, None], slice(None), at)
    live = tokens < pool.ring_len[slots][:, None]
    ring_u, ring_k, ring_g = (ring[index].float() for ring in (pool.ring_x, pool.ring_b, pool.ring_decay))
    if fault == "dead entries are multiplied by 0":
        ring_u = ring_u * live[..., None, None]
    else:
        ring_u = torch.where(live[..., None, None], ring_u, 0.0)
    ring_k = torch.where(live[..., None, None], ring_k, 0.0)
    from_here = torch.where(live[..., None], ring_g, 0.0).flip(1).cumsum(1).flip(1)
    weight = torch.cat([from_here[:, 1:], torch.zeros_like(from_here[:, :1])], 1).exp()
    total = from_here[:, 0].exp()[..., None]

    def history(r: Tensor) -> Tensor:
        read = state
        if fault == "the read-out is of bf16":
            read, r = state.bfloat16().float(), r.bfloat16().float()
        score = (ring_k * r[:, None]).sum(-1)
        found = total * (read * heads(r)[:, :, None]).sum(-1)
        replayed = ((weight * heads(score, 2))[..., None] * ring_u).sum(1)
        if fault == "a flush forgets the ring":
            replayed = replayed * ~step.stores[:, None, None]
        return found + replayed

    decay = g.exp()[..., None]
    kept = 1.0 if fault == "what is recalled does not decay" else decay
    u = beta[..., None] * (v - kept * history(k))
    own = (k * q).sum(-1).repeat_interleave(spec.heads_per_group, 1)[..., None]
    y = decay * history(q)
    if fault != "the new token is not read":
        y = y + own * (v if fault == "v is read instead of u" else u)

    fold_weight = torch.ones_like(weight) if fault == "the fold forgets decays" else weight
    update = fold_weight[..., None] * ring_u
    if fault == "the fold is of 16 bits":
        update = update.bfloat16().float()
    folded = total[..., None] * state + torch.einsum("rjhp,rjhn->rhpn", update, heads(ring_k, 2))
    pool.state[slots[step.stores]] = folded[step.stores].to(pool.state.dtype)
    append = (slots, slice(None), step.append)
    pool.ring_x[append] = (v if fault == "v goes to the ring" else u).to(pool.ring_x.dtype)
    pool.ring_b[append] = (token.B if fault == "raw k goes to the ring" else k).to(pool.ring_b.dtype)
    pool.ring_decay[append] = g + from_here[:, 0] if fault == "gates are summed" else g
    return y
