"""Verification of drafts in fp32 torch, row by row, for the gate: as it should be, or with a named fault.

Outputs come from the closed forms over old state, ring and new tokens; there is no recurrence here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Step, Trajectory

BYTES = "bytes outside of state and ring changed"
ZEROS = "outputs of padded rows or beyond the last row are not zero"
FAULTS = {
    "the first of several tokens is skipped": "output error",
    "tokens see the one after them": "output error",
    "appends go past the count": BYTES,
    "appends begin where the ring does": BYTES,
    "all new entries are of the last token": "ring",
    "rows flush by their own count": "output error",
    "rows that do not flush store their state": BYTES,
    "a flush takes new tokens in": "state error",
    "a flush forgets the ring": "state error",
    "empty rows store their state": BYTES,
    "rows begin at multiples of num_tokens": BYTES,
    "a token beyond the row is read": "output",
    "padded rows write nothing": ZEROS,
    "tokens beyond the last row are left as they are": ZEROS,
    "dead entries are multiplied by 0": "outputs are not finite",
}
"""Faults of verification of either family, and what the gate must find of each."""
MAMBA2_FAULTS = {
    "the read-out is of bf16": "output error",
    "decay between new tokens is left out": "output error",
}
GDN_FAULTS = {
    "the read-out is of bf16": "ring u is inexact",
    "decay between new tokens is left out": "ring u is inexact",
    "u goes to the next tokens as 16 bits hold it": "ring u is inexact",
    "u does not know of the new tokens": "ring u is inexact",
    "what a new token recalls does not decay": "ring u is inexact",
    "raw k goes to the ring": "ring k is inexact",
    "gates are summed": "ring gates are inexact",
}
NATIVE_FAULTS = {
    "tokens beyond the last row are left as they are": ZEROS,
    "rows start from their first slot": "output",
    "all slots get the last state": "state error",
    "states go past the count": BYTES,
    "only the last state is stored": "outputs are not finite",
    "the state is not read back": "output error",
    "rows begin at multiples of num_tokens": BYTES,
    "padded rows write nothing": ZEROS,
}
"""As :data:`FAULTS`, of native_verify."""


def launch(scene: Trajectory, pool: Pool, step: Step, fault: str = "") -> Tensor:
    """Outputs of one step of ``scene`` on ``pool``."""
    spec, out = scene.spec, torch.full_like(step.x, float("nan"))
    rows, most = step.slot_index.shape[0], spec.num_tokens
    bounds = step.query_start
    if bounds is None or fault == "rows begin at multiples of num_tokens":
        bounds = (torch.arange(rows + 1) * most).clamp(max=len(out))
    first = step.slot_index.reshape(rows, -1)[:, 0]
    for row in range(rows):
        begin, end = int(bounds[row]), int(bounds[row + 1])
        padded = int(first[row]) < 0 or int(first[row]) == scene.null_slot
        if padded:
            if fault != "padded rows write nothing":
                out[begin:end] = 0
            continue
        if begin == end and fault != "empty rows store their state":
            continue
        run = _native if spec.is_native else _replay
        run(_Row(scene, step, row, begin, end, fault), pool, out)
    if fault != "tokens beyond the last row are left as they are":
        out[int(bounds[-1]) :] = 0
    return out


class _Row:
    """Inputs of one row's tokens in fp32, by head, and what becomes of them."""

    def __init__(self, scene: Trajectory, step: Step, row: int, begin: int, end: int, fault: str) -> None:
        self.scene, self.spec, self.fault, self.begin = scene, scene.spec, fault, begin
        self.n = end - begin
        self.slots = [int(slot) for slot in step.slot_index[row].reshape(-1)]
        if step.previous is not None:
            self.previous = 1 if fault == "rows start from their first slot" else int(step.previous[row])
        if fault == "a token beyond the row is read":
            end = min(end + 1, len(step.x))
        spec = scene.spec

        def taken(value: Tensor | None) -> Tensor:
            assert value is not None
            return value[begin:end].float()

        self.x, dt = taken(step.x), taken(step.dt)
        self.raw_b, self.b, self.c = taken(step.B), taken(step.B), taken(step.C)
        if scene.dt_bias is not None:
            dt = dt + scene.dt_bias
        if spec.family == "gdn":
            self.beta = taken(step.beta).sigmoid()
            self.decay = self.gate = -scene.A.exp() * softplus(dt, threshold=100)
            if spec.qk_l2norm:
                self.b, self.c = (
                    v * (v.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for v in (self.b, self.c)
                )
            self.c = self.c * spec.state_size**-0.5
        else:
            self.decay = softplus(dt, threshold=100) if spec.dt_softplus else dt
            self.gate = scene.A * self.decay
            self.z = taken(step.z) if spec.has_z else None

    def by_head(self, value: Tensor) -> Tensor:
        """(tokens, groups, n) repeated to (tokens, heads, n)."""
        return value.repeat_interleave(self.spec.heads_per_group, 1)

    def finish(self, y: Tensor, out: Tensor) -> None:
        """Skip, gate and store outputs (tokens, heads, head_dim)."""
        if self.spec.family == "mamba2":
            if self.scene.D is not None:
                y = y + self.scene.D[:, None] * self.x
            if self.z is not None:
                y = y * self.z * self.z.sigmoid()
        out[self.begin : self.begin + self.n] = y[: self.n].to(out.dtype)

    def outputs(self, history: Tensor, recalled: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and updates (tokens, heads, head_dim).

        Args:
            history: (tokens, heads, head_dim), what old tokens say for each c, not decayed.
            recalled: Likewise for each b.
        """
        n, fault, spec = len(self.x), self.fault, self.spec
        total = self.gate.cumsum(0)
        between = (total[:, None] - total[None]).exp()  # (to, from, heads); only from <= to is looked at
        if fault == "decay between new tokens is left out":
            between = torch.ones_like(between)
        keys = torch.einsum("ihn,mhn->imh", self.by_head(self.b), self.by_head(self.b)) * between
        scores = torch.einsum("ihn,mhn->imh", self.by_head(self.c), self.by_head(self.b)) * between
        update = self.x * self.decay[..., None] if spec.family == "mamba2" else torch.zeros_like(self.x)
        if spec.family == "gdn":
            for i in range(n):
                grown = 1.0 if fault == "what a new token recalls does not decay" else total[i].exp()[:, None]
                known = grown * recalled[i]
                if fault != "u does not know of the new tokens":
                    known = known + torch.einsum("mh,mhp->hp", keys[i, :i], update[:i])
                update[i] = self.beta[i][:, None] * (self.x[i] - known)
                if fault == "u goes to the next tokens as 16 bits hold it":
                    update[i] = update[i].bfloat16().float()
        y = torch.zeros_like(self.x)
        for i in range(n):
            low = 1 if fault == "the first of several tokens is skipped" and i else 0
            high = i + 2 if fault == "tokens see the one after them" and i + 1 < self.n else i + 1
            if fault == "a token beyond the row is read":
                high = n
            own = torch.einsum("mh,mhp->hp", scores[i, low:high], update[low:high])
            y[i] = total[i].exp()[:, None] * history[i] + own
        return y, update


def _native(row: _Row, pool: Pool, out: Tensor) -> None:
    start = row.slots[row.previous - 1]
    state = pool.state[start].float()
    states, y = [], []
    for i in range(row.n):
        b, c = (row.by_head(v[i : i + 1])[0] for v in (row.b, row.c))
        decayed = row.gate[i].exp()[:, None, None] * state
        if row.spec.family == "gdn":
            u = row.beta[i][:, None] * (row.x[i] - (decayed * b[:, None]).sum(-1))
        else:
            u = row.decay[i][:, None] * row.x[i]
        if row.fault == "the state is not read back":
            decayed = torch.zeros_like(decayed)
        state = decayed + u[..., None] * b[:, None]
        states.append(state)
        y.append((state * c[:, None]).sum(-1))
    for i, slot in enumerate(row.slots):
        if row.fault == "states go past the count":
            pool.state[slot] = states[min(i, row.n - 1)].to(pool.state.dtype)
        elif row.fault == "only the last state is stored" and i < row.n - 1:
            continue
        elif i < row.n:
            chosen = states[-1] if row.fault == "all slots get the last state" else states[i]
            pool.state[slot] = chosen.to(pool.state.dtype)
    row.finish(torch.stack(y), out)


def _replay(row: _Row, pool: Pool, out: Tensor) -> None:
    spec, slot, fault = row.spec, row.slots[0], row.fault
    length, begin = int(pool.ring_len[slot]), int(pool.ring_start[slot])
    live = torch.arange(spec.window) < length
    at = (begin + torch.arange(spec.window)) % pool.capacity
    x, b, decay = (r[slot][:, at].float() for r in (pool.ring_x, pool.ring_b, pool.ring_decay))
    b = torch.where(live[:, None], b, 0.0)
    x = (
        x * live[:, None]
        if fault == "dead entries are multiplied by 0"
        else torch.where(live[:, None], x, 0.0)
    )
    decay = torch.where(live, decay, 0.0)
    gate = decay if spec.family == "gdn" else row.scene.A[:, None] * decay
    after = gate.flip(1).cumsum(1).flip(1) - gate  # (heads, window): gates of later ring tokens
    weight = after.exp() if spec.family == "gdn" else after.exp() * decay
    heads_of_b = b.repeat_interleave(spec.heads_per_group, 0)
    total = gate.sum(1).exp()
    old = pool.state[slot].float()
    folded = total[:, None, None] * old
    if fault != "a flush forgets the ring":
        folded = folded + torch.einsum("hjp,hjn->hpn", weight[..., None] * x, heads_of_b)

    def history(r: Tensor) -> Tensor:
        by_head = row.by_head(r)
        values, vectors = old, by_head
        if fault == "the read-out is of bf16":
            values, vectors = old.bfloat16().float(), by_head.bfloat16().float()
        read = torch.einsum("hpn,ihn->ihp", values, vectors) * total[:, None]
        score = torch.einsum("hjn,ihn->ihj", heads_of_b, by_head) * weight
        return read + torch.einsum("ihj,hjp->ihp", score, x)

    y, update = row.outputs(history(row.c), history(row.b))
    row.finish(y, out)

    most = row.n if fault == "rows flush by their own count" else spec.num_tokens
    flushes = length + most > spec.window
    if fault == "a flush takes new tokens in":
        folded = folded + torch.einsum("ihp,ihn->hpn", update, row.by_head(row.b))
    if flushes or fault == "rows that do not flush store their state":
        pool.state[slot] = folded.to(pool.state.dtype)
    new_x = update if spec.family == "gdn" else row.x
    new_b = row.raw_b if fault == "raw k goes to the ring" else row.b
    new_decay = row.decay.cumsum(0) if fault == "gates are summed" else row.decay
    first = begin if fault == "appends begin where the ring does" else begin + length
    count = spec.num_tokens if fault == "appends go past the count" else row.n
    for i in range(count):
        place, token = (first + i) % pool.capacity, min(i, row.n - 1)
        if fault == "all new entries are of the last token":
            token = row.n - 1
        pool.ring_x[slot, :, place] = new_x[token].to(pool.ring_x.dtype)
        pool.ring_b[slot, :, place] = new_b[token].to(pool.ring_b.dtype)
        pool.ring_decay[slot, :, place] = new_decay[token]


def spec_of(family: str, op: str, num_tokens: int, window: int, dtypes: tuple[str, str, str]) -> Spec:
    """A small spec; ``dtypes`` are those of activation, state and ring."""
    gdn = family != "mamba2"
    spec = Spec(
        "gdn" if gdn else "mamba2", "verify", head_dim=10, state_size=24, heads_per_group=2, window=window,
        num_tokens=num_tokens, activation_dtype=dtypes[0], state_dtype=dtypes[1], ring_dtype=dtypes[2],
        has_d=not gdn, has_z=not gdn, qk_l2norm=family == "gdn-l2norm",
    )  # fmt: skip
    return spec.native if op == "native_verify" else spec
