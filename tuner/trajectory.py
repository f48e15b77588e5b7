"""Test scenes for kernels: trajectories of steps on a poisoned pool, with their expectations.

Numbers are drawn on the CPU from a seed and moved to the device, so that a scene is the same
everywhere. Nothing here launches a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.oracle import Ideal, Oracle, Token, recurrence
from ..runtime.spec import Spec
from .pool import Pool, make_pool

KEY_COSINE = 0.7
"""Cosine between two keys of a head of GDN, on average: what the delta rule corrects must occur."""
KEY_NORMS = (1e-3, 10.0)
"""Range of the norms of raw q and k where the kernel normalises them, log-uniform: the least ones are
where the epsilon under the root counts."""


@dataclass(frozen=True)
class Step:
    """One launch of a trajectory: its inputs, and what must be true after it.

    ``live`` rows are those with a sequence; expectations of the stored state have one row per ``True``
    in ``stores``. Inputs of padded rows are NaN. They bear the names of kernel arguments: x is v of GDN,
    B is k, C is q, dt is the raw gate a and beta the raw b.
    """

    x: Tensor
    """(rows, heads, head_dim)."""
    dt: Tensor
    """(rows, heads), raw."""
    B: Tensor
    """(rows, groups, state_size)."""
    C: Tensor
    """(rows, groups, state_size)."""
    z: Tensor | None
    """(rows, heads, head_dim)."""
    beta: Tensor | None
    """(rows, heads), raw."""
    slot_index: Tensor
    """(rows,); padding is -1 or the null slot."""
    accepted: Tensor
    """(rows,) int32, for the commit after the launch; garbage where padded."""
    live: Tensor
    """(live,) int64: rows that are no padding. The tensors below have one entry per such row."""
    slots: Tensor
    """(live,) int64."""
    stores: Tensor
    """(live,) bool: the launch writes the state."""
    append: Tensor
    """(live,) int64: index of the new token in the ring."""
    y: Tensor
    """(live, heads, head_dim) fp64, the oracle's output."""
    ideal_y: Tensor
    """(live, heads, head_dim) fp64."""
    delta: Tensor
    """(live, heads) fp64: what the ring's decay gets, a step size or (GDN) a log decay."""
    stored: Tensor
    """(stores.sum(), heads, head_dim, state_size) fp64: the oracle's state where it is written."""
    ideal_stored: Tensor
    """As ``stored``, of the ideal."""

    @property
    def token(self) -> Token:
        """Inputs of the live rows."""
        return Token(self.x, self.dt, self.B, self.C, self.z, self.beta).at(self.live)


class Trajectory:
    """Many steps of several sequences on shuffled slots: iterate once per fresh :meth:`pool`.

    Every step has ``sequences + padded_rows`` rows in shuffled order. ``ring_len`` tokens are in the
    rings at the start, so that rows flush at different steps.

    Args:
        spec: What the kernel computes.
        heads: Heads; a multiple of ``spec.heads_per_group``.
        sequences: Sequences, each on a slot of its own.
        steps: Number of steps.
        padded_rows: Rows of each step that are always padding.
        slots: Slots of the pool; None is twice the sequences plus 2.
        capacity: Tokens per ring; None is the least.
        null_slot: A slot that marks padding besides negative indices; no sequence lies there.
        accept: Probability that a token is kept.
        attend: Probability that a sequence takes part in a step; others leave a padded row.
        ring_len: Tokens in every ring at the start, 0 to window; None is random per sequence.
        rates: Range of -A, of GDN of exp(A_log), uniform.
        deltas: Range of step sizes after bias and softplus, log-uniform; GDN decays by rate x delta.
        state_scale: Standard deviation of the initial states.
        seed: Of all draws.
        device: Where inputs and expectations lie; the oracle computes there.
        index_dtype: dtype of slot_index.
        gap_bytes: See :func:`make_pool`.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        heads: int,
        sequences: int = 5,
        steps: int = 20,
        padded_rows: int = 2,
        slots: int | None = None,
        capacity: int | None = None,
        null_slot: int | None = None,
        accept: float = 0.8,
        attend: float = 0.8,
        ring_len: int | None = None,
        rates: tuple[float, float] = (1.0, 16.0),
        deltas: tuple[float, float] = (1e-3, 0.1),
        state_scale: float = 1.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        index_dtype: torch.dtype = torch.int32,
        gap_bytes: int = 16,
    ) -> None:
        self.spec, self.heads, self.groups = spec, heads, heads // spec.heads_per_group
        self.sequences, self.steps, self.rows = sequences, steps, sequences + padded_rows
        self.null_slot, self.device, self._seed = null_slot, torch.device(device), seed
        self._slots = 2 * sequences + 2 if slots is None else slots
        self._accept, self._attend, self._deltas = accept, attend, deltas
        self._index_dtype, self._gap_bytes = index_dtype, gap_bytes
        self.capacity = spec.ring_capacity
        if capacity is not None and self.capacity:
            self.capacity = capacity

        g = self._generator = torch.Generator().manual_seed(seed)
        usable = torch.randperm(self._slots, generator=g)
        if null_slot is not None:
            usable = usable[usable != null_slot]
        self._slot_of = usable[:sequences].to(self.device)
        self._start = torch.randint(0, max(1, self.capacity), (sequences,), generator=g)
        rate = torch.empty(heads).uniform_(*rates, generator=g)
        self.A = (rate.log() if spec.family == "gdn" else -rate).to(self.device)
        self.D = torch.randn(heads, generator=g).to(self.device) if spec.has_d else None
        self.dt_bias = torch.randn(heads, generator=g).to(self.device) if spec.has_dt_bias else None
        shape = (sequences, heads, spec.head_dim, spec.state_size)
        self._state = (torch.randn(shape, generator=g) * state_scale).to(TORCH_DTYPES[spec.state_dtype])
        self._state = self._state.to(self.device)
        self._len = torch.zeros(sequences, dtype=torch.long)
        if not spec.is_native:
            if ring_len is None:
                self._len = torch.randint(0, spec.window + 1, (sequences,), generator=g)
            else:
                self._len.fill_(ring_len)
        self.recurrence = recurrence(spec, self.A, D=self.D, dt_bias=self.dt_bias)
        self._key: Tensor | None = None
        if spec.family == "gdn":
            common = torch.randn(self.groups, spec.state_size, generator=g)
            self._key = common / common.square().mean(-1, keepdim=True).sqrt()
        history = max(1, int(self._len.max()))
        self._history = [self._draw(sequences) for _ in range(history)]
        self._state_of_draws = g.get_state()

    def pool(self) -> Pool:
        """A fresh pool as it must be before the first step."""
        pool = make_pool(
            self.spec,
            self._slots,
            self.heads,
            self.groups,
            self.capacity,
            self.device,
            torch.Generator().manual_seed(self._seed + 1),
            self._gap_bytes,
        )
        slot = self._slot_of
        pool.state[slot] = self._state
        if not self.capacity:
            return pool
        start, length = self._start.to(self.device), self._len.to(self.device)
        pool.ring_start[slot], pool.ring_len[slot] = start.int(), length.int()
        # What a ring of GDN holds depends on the state and ring before it: the ideal's.
        ideal = self._ideal()
        for j, holds in enumerate(self._take_in(ideal)):
            assert ideal.entry is not None
            pool.put(slot[holds], (start[holds] + j) % self.capacity, ideal.entry)
        return pool

    def __iter__(self) -> Iterator[Step]:
        g = self._generator
        g.set_state(self._state_of_draws)
        device, spec, capacity = self.device, self.spec, self.capacity
        replays = not spec.is_native
        oracle, ideal = Oracle(self._state, self.recurrence), self._ideal()
        for model in (oracle, ideal):
            for _ in self._take_in(model):
                pass
        start, length = self._start.clone().to(device), self._len.clone().to(device)

        for _ in range(self.steps):
            order = torch.randperm(self.rows, generator=g)
            attends = (order < self.sequences) & (torch.rand(self.rows, generator=g) < self._attend)
            padding = torch.full((self.rows,), -1)
            if self.null_slot is not None:
                padding[torch.rand(self.rows, generator=g) < 0.5] = self.null_slot
            accepted = (torch.rand(self.rows, generator=g) < self._accept).int().to(device)
            inputs = self._draw(self.rows)
            order, attends, padding = order.to(device), attends.to(device), padding.to(device)
            live = attends.nonzero()[:, 0]
            sequence = order[live]
            for tensor in inputs:
                if tensor is not None:
                    tensor[~attends] = math.nan
            slot_index = padding
            slot_index[live] = self._slot_of[sequence]

            token = inputs.at(live)
            stores = torch.ones_like(sequence, dtype=torch.bool)
            append = torch.zeros_like(sequence)
            if replays:
                stores = length[sequence] + spec.num_tokens > spec.window
                append = (start[sequence] + length[sequence]) % capacity
            before = oracle.state[sequence[stores]] if replays else None
            y, ideal_y = oracle.step(sequence, *token), ideal.step(sequence, *token)
            ideal_before = ideal.state[sequence[stores]] if replays else None
            kept = accepted[live] if replays else torch.ones_like(sequence)
            oracle.commit(kept)
            ideal.commit(kept)
            yield Step(
                **inputs._asdict(),
                slot_index=slot_index.to(self._index_dtype),
                accepted=accepted,
                live=live,
                slots=self._slot_of[sequence],
                stores=stores,
                append=append,
                y=y,
                ideal_y=ideal_y,
                delta=self.recurrence.decay(token.dt),
                stored=oracle.state[sequence] if before is None else before,
                ideal_stored=ideal.state[sequence] if ideal_before is None else ideal_before,
            )
            flushed = sequence[stores]
            if replays:
                start[flushed] = (start[flushed] + length[flushed]) % capacity
                length[flushed] = 0
                length[sequence] += kept

    @property
    def slot_of(self) -> Tensor:
        """(sequences,) int64: slot of each sequence."""
        return self._slot_of

    def _ideal(self) -> Ideal:
        return Ideal(self._state, self.recurrence, spec=self.spec)

    def _take_in(self, model: Oracle) -> Iterator[Tensor]:
        """Step ``model`` through the tokens in the rings at the start; yields whose each one was."""
        length = self._len.to(self.device)
        for j, token in enumerate(self._history):
            holds = (length > j).nonzero()[:, 0]
            model.step(holds, *token.at(holds))
            model.commit(torch.ones_like(holds))
            yield holds

    def _draw(self, rows: int) -> Token:
        """Inputs of one token for ``rows`` rows, in the activation dtype."""
        g, spec = self._generator, self.spec

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        def key() -> Tensor:
            value = normal(rows, self.groups, spec.state_size)
            if self._key is None:
                return value
            value = math.sqrt(KEY_COSINE) * self._key + math.sqrt(1 - KEY_COSINE) * value
            value /= value.norm(dim=-1, keepdim=True)
            if spec.qk_l2norm:
                value *= self._log_uniform(KEY_NORMS, rows, self.groups, 1)
            return value

        delta = self._log_uniform(self._deltas, rows, self.heads)
        dt = delta + torch.log(-torch.expm1(-delta)) if spec.dt_softplus else delta
        if self.dt_bias is not None:
            dt = dt - self.dt_bias.cpu()
        token = Token(
            x=normal(rows, self.heads, spec.head_dim),
            dt=dt,
            B=key(),
            C=key(),
            z=normal(rows, self.heads, spec.head_dim) if spec.has_z else None,
            beta=normal(rows, self.heads) if spec.family == "gdn" else None,
        )
        return token.to(TORCH_DTYPES[spec.activation_dtype], self.device)

    def _log_uniform(self, bounds: tuple[float, float], *shape: int) -> Tensor:
        low, high = (math.log(bound) for bound in bounds)
        return torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=self._generator).exp()


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of ``actual - expected`` over the RMS of ``expected`` (fp64); 0 for nothing to compare."""
    if not expected.numel():
        return 0.0
    difference = actual.double() - expected
    scale = expected.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return float(difference.square().mean().sqrt() / scale)
