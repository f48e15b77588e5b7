"""Test scenes for kernels: trajectories of steps on a poisoned pool, with their expectations.

Numbers are drawn on the CPU from a seed and moved to the device, so that a scene is the same
everywhere. Nothing here launches a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.oracle import Ideal, Oracle, Token, recurrence
from ..runtime.spec import Spec
from .draws import Draws
from .pool import Pool, make_pool


@dataclass(frozen=True)
class Step:
    """One launch of a trajectory: its inputs, and what must be true after it.

    ``live`` rows are those with a sequence and a token. Where rows have one token each, the token of a row
    bears its number; else tokens are packed row by row. Inputs of other tokens than ``new`` ones are NaN.
    They bear the names of kernel arguments: x is v of GDN, B is k, C is q, dt is the raw gate a and beta
    the raw b.
    """

    x: Tensor
    """(tokens, heads, head_dim)."""
    dt: Tensor
    """(tokens, heads), raw."""
    B: Tensor
    """(tokens, groups, state_size)."""
    C: Tensor
    """(tokens, groups, state_size)."""
    z: Tensor | None
    """(tokens, heads, head_dim)."""
    beta: Tensor | None
    """(tokens, heads), raw."""
    slot_index: Tensor
    """(rows,), of native_verify (rows, num_tokens); padding is -1 or the null slot. A row without tokens
    may name any sequence's."""
    query_start: Tensor | None
    """(rows + 1,) int32 where the step is packed: where each row's tokens begin, and where the last end."""
    previous: Tensor | None
    """(rows,) of native_verify: tokens kept in the step before, the kernel argument ``accepted``; garbage
    where padded."""
    accepted: Tensor
    """(rows,) int32, for the commit after the launch; garbage where padded."""
    live: Tensor
    """(live,) int64: rows that are no padding. The tensors below have one entry per such row."""
    slots: Tensor
    """(live,) int64: slots that the rows start from."""
    count: Tensor
    """(live,) int64: tokens of the row."""
    stores: Tensor
    """(live,) bool: the launch writes the state."""
    new: Tensor
    """(new,) int64: tokens of live rows; outputs of others are zeros. The tensors below have one entry per
    such token."""
    row: Tensor
    """(new,) int64: whose it is, an index into ``live``."""
    targets: Tensor
    """(new,) int64: the slot that gets the token's ring entry; of native specs, the state after it."""
    append: Tensor
    """(new,) int64: index of the token in the ring."""
    y: Tensor
    """(new, heads, head_dim) fp64, the oracle's output."""
    ideal_y: Tensor
    """(new, heads, head_dim) fp64."""
    delta: Tensor
    """(new, heads) fp64: what the ring's decay gets, a step size or (GDN) a log decay."""
    stored_slots: Tensor
    """(stored,) int64: slots whose states are written: of rows in ``stores``, of native specs ``targets``."""
    stored: Tensor
    """(stored, heads, head_dim, state_size) fp64: the oracle's states there."""
    ideal_stored: Tensor
    """As ``stored``, of the ideal."""

    @property
    def token(self) -> Token:
        """Inputs of the new tokens."""
        return Token(self.x, self.dt, self.B, self.C, self.z, self.beta).at(self.new)


@dataclass(frozen=True)
class _Rows:
    """Who takes part in a step, and with how many tokens; as in :class:`Step` but for the last ones."""

    slot_index: Tensor
    query_start: Tensor | None
    previous: Tensor | None
    accepted: Tensor
    live: Tensor
    count: Tensor
    new: Tensor
    row: Tensor
    sequence: Tensor
    """(live,) int64: which sequence a row is of."""
    place: Tensor
    """(new,) int64: 0 for the first token of its row, and so on."""
    tokens: int
    """All that there are, with those that nobody owns."""

    def to(self, device: torch.device) -> _Rows:
        """The same on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in vars(self).items()
        }
        return _Rows(**moved)


class Trajectory:
    """Many steps of several sequences on shuffled slots: iterate once per fresh :meth:`pool`.

    Every step has ``sequences + padded_rows`` rows in shuffled order. ``ring_len`` tokens are in the
    rings at the start, so that rows flush at different steps. Where a spec verifies drafts, some steps
    have rows of ``num_tokens`` tokens, others are packed: rows of 0 to ``num_tokens`` tokens, and tokens
    behind them that nobody owns. In native_verify each sequence has ``num_tokens`` slots.

    Args:
        spec: What the kernel computes.
        heads: Heads; a multiple of ``spec.heads_per_group``.
        sequences: Sequences, each on a slot of its own.
        steps: Number of steps.
        padded_rows: Rows of each step that are always padding.
        slots: Slots of the pool; None is twice what the sequences need plus 2.
        capacity: Tokens per ring; None is the least.
        null_slot: A slot that marks padding besides negative indices; no sequence lies there.
        accept: Probability that a token is kept, if those before it in its step are.
        attend: Probability that a sequence takes part in a step; others leave a padded row.
        packed: Share of the steps that are packed, where the spec verifies; the first step is one.
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
        packed: float = 0.5,
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
        each = spec.num_tokens if spec.op == "native_verify" else 1
        self._slots = 2 * each * sequences + 2 if slots is None else slots
        self._accept, self._attend, self._packed = accept, attend, packed
        self._index_dtype, self._gap_bytes = index_dtype, gap_bytes
        self.capacity = spec.ring_capacity
        if capacity is not None and self.capacity:
            self.capacity = capacity

        g = self._generator = torch.Generator().manual_seed(seed)
        usable = torch.randperm(self._slots, generator=g)
        if null_slot is not None:
            usable = usable[usable != null_slot]
        self._slot_of = usable[: each * sequences].reshape(sequences, each).to(self.device)
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
                if spec.verifies:  # rows that flush; of several tokens some would fit
                    least = spec.window - spec.num_tokens + 1
                    self._len[::2].random_(least, max(least + 1, spec.window), generator=g)
            else:
                self._len.fill_(ring_len)
        self.recurrence = recurrence(spec, self.A, D=self.D, dt_bias=self.dt_bias)
        self._draws = Draws(spec, heads, g, deltas, self.dt_bias, self.device)
        self._previous = torch.ones(sequences, dtype=torch.long)
        if each > 1:
            self._previous = torch.randint(1, each + 1, (sequences,), generator=g)
        history = max(1, int(self._len.max()))
        self._history = [self._draws.tokens(sequences) for _ in range(history)]
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
        everyone = torch.arange(self.sequences, device=self.device)
        slot = self._slot_before(everyone, self._previous.to(self.device))
        pool.state[slot] = self._state
        if not self.capacity:
            return pool
        start, length = self._start.to(self.device), self._len.to(self.device)
        pool.ring_start[slot], pool.ring_len[slot] = start.int(), length.int()
        # What a ring of GDN holds depends on the state and ring before it: the ideal's.
        ideal = self._before_the_ring()
        for j, holds in enumerate(self._take_in(ideal)):
            assert ideal.entry is not None
            pool.put(slot[holds], (start[holds] + j) % self.capacity, ideal.entry)
        return pool

    def __iter__(self) -> Iterator[Step]:
        self._generator.set_state(self._state_of_draws)
        device, spec, capacity = self.device, self.spec, self.capacity
        replays = not spec.is_native
        oracle, taken_in = Oracle(self._state, self.recurrence), self._before_the_ring()
        for model in (oracle, taken_in):
            for _ in self._take_in(model):
                pass
        ideal = Ideal(taken_in.state, self.recurrence, spec=spec, ring_len=taken_in.ring_len)
        start, length = self._start.clone().to(device), self._len.clone().to(device)
        previous = self._previous.clone().to(device)

        for number in range(self.steps):
            is_packed = math.ceil((number + 1) * self._packed) > math.ceil(number * self._packed)
            rows = self._arrange(previous, length, is_packed and spec.verifies)
            inputs = self._draws.tokens(rows.tokens)
            nobodys = torch.ones(rows.tokens, dtype=torch.bool, device=device)
            nobodys[rows.new] = False
            for tensor in inputs:
                if tensor is not None:
                    tensor[nobodys] = math.nan

            token, sequence, kept = inputs.at(rows.new), rows.sequence, rows.accepted[rows.live].long()
            slots, owner = self._slot_before(sequence, previous[sequence]), sequence[rows.row]
            targets = slots[rows.row]
            if spec.op == "native_verify":
                targets = self._slot_of[owner, rows.place]
            stores, stored_slots = torch.ones_like(sequence, dtype=torch.bool), targets
            if replays:
                stores = length[sequence] + spec.num_tokens > spec.window
                stored_slots = slots[stores]
            elif not spec.verifies:
                kept = torch.ones_like(kept)  # a native step cannot be taken back
            append = (start[owner] + length[owner] + rows.place) % max(1, capacity)
            before = oracle.state[sequence[stores]]
            y, ideal_y = (model.step(sequence, *token, count=rows.count) for model in (oracle, ideal))
            yield Step(
                **inputs._asdict(),
                slot_index=rows.slot_index,
                query_start=rows.query_start,
                previous=rows.previous,
                accepted=rows.accepted,
                live=rows.live,
                slots=slots,
                count=rows.count,
                stores=stores,
                new=rows.new,
                row=rows.row,
                targets=targets,
                append=append,
                y=y,
                ideal_y=ideal_y,
                delta=self.recurrence.decay(token.dt),
                stored_slots=stored_slots,
                stored=before if replays else oracle.after,
                ideal_stored=ideal.state[sequence[stores]] if replays else ideal.after,
            )
            oracle.commit(kept)
            ideal.commit(kept)
            previous[sequence] = kept
            if replays:
                flushed = sequence[stores]
                start[flushed] = (start[flushed] + length[flushed]) % capacity
                length[flushed] = 0
                length[sequence] += kept

    @property
    def slot_of(self) -> Tensor:
        """(sequences,) int64: slot of each sequence; of native_verify (sequences, num_tokens)."""
        return self._slot_of if self.spec.op == "native_verify" else self._slot_of[:, 0]

    def _slot_before(self, sequence: Tensor, previous: Tensor) -> Tensor:
        """Slots that ``sequence`` (n,) start from where they kept ``previous`` (n,) tokens before."""
        place = previous - 1 if self.spec.op == "native_verify" else torch.zeros_like(previous)
        return self._slot_of[sequence, place]

    def _before_the_ring(self) -> Ideal:
        """The ideal before the tokens in the rings, which come one by one and flush nothing."""
        spec = self.spec if self.spec.is_native else replace(self.spec, op="step", num_tokens=1)
        return Ideal(self._state, self.recurrence, spec=spec)

    def _take_in(self, model: Oracle) -> Iterator[Tensor]:
        """Step ``model`` through the tokens in the rings at the start; yields whose each one was."""
        length = self._len.to(self.device)
        for j, token in enumerate(self._history):
            holds = (length > j).nonzero()[:, 0]
            model.step(holds, *token.at(holds))
            model.commit(torch.ones_like(holds))
            yield holds

    def _arrange(self, previous: Tensor, length: Tensor, is_packed: bool) -> _Rows:
        """Draw the rows of a step.

        Args:
            previous: (sequences,), tokens kept in the step before.
            length: (sequences,), tokens in the rings.
            is_packed: The rows have any number of tokens.
        """
        g, spec, rows, most = self._generator, self.spec, self.rows, self.spec.num_tokens
        order = torch.randperm(rows, generator=g)
        attends = (order < self.sequences) & (torch.rand(rows, generator=g) < self._attend)
        padding = torch.full((rows,), -1)
        if self.null_slot is not None:
            padding[torch.rand(rows, generator=g) < 0.5] = self.null_slot
        kept = (torch.rand(rows, most, generator=g) < self._accept).int().cumprod(1).sum(1)
        count, query_start, spare, stale = torch.full((rows,), most), None, 0, torch.zeros_like(order)
        if spec.verifies:
            stale = torch.randint(0, self.sequences, (rows,), generator=g)
        sequence = torch.where(attends, order, stale)
        if is_packed:
            count = torch.randint(0, most + 1, (rows,), generator=g)
            # Half of the rows have as few tokens as their rings have room for.
            room = (spec.window - length.cpu()[sequence]).clamp(min=1)
            fits = (torch.rand(rows, generator=g) < 0.5) & (not spec.is_native)
            count = torch.where(fits, torch.minimum(count, room), count)
            # A row without tokens leaves even a ring alone that it would have to fold.
            full = (length.cpu() + spec.num_tokens > spec.window).nonzero()[:1, 0]
            if not spec.is_native and len(full):
                idle = (~attends).nonzero()[:1, 0]
                count[idle], sequence[idle] = 0, full
            query_start = torch.cat([torch.zeros(1), count.cumsum(0)]).int()
            spare = int(torch.randint(0, 2 * most, (), generator=g))
        live = attends & (count > 0)
        slot_index = self._slot_of.cpu()[sequence]
        marked = ~attends & (count > 0)
        slot_index[marked, 0] = padding[marked]
        accepted, before = torch.minimum(kept, count), None
        if spec.op == "native_verify":
            accepted = accepted.clamp(min=1)
            garbage = torch.randint(0, most + 1, (rows,), generator=g)
            before = torch.where(live, previous.cpu()[sequence], garbage).to(self._index_dtype)
        else:
            slot_index = slot_index[:, 0]
        owner = torch.repeat_interleave(torch.arange(rows), count)
        place = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
        new = live[owner].nonzero()[:, 0]
        arranged = _Rows(
            slot_index=slot_index.to(self._index_dtype),
            query_start=query_start,
            previous=before,
            accepted=accepted.int(),
            live=live.nonzero()[:, 0],
            sequence=sequence[live],
            count=count[live],
            new=new,
            row=(live.long().cumsum(0) - 1)[owner[new]],
            place=place[new],
            tokens=len(owner) + spare,
        )
        return arranged.to(self.device)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of ``actual - expected`` over the RMS of ``expected`` (fp64); 0 for nothing to compare."""
    if not expected.numel():
        return 0.0
    difference = actual.double() - expected
    scale = expected.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return float(difference.square().mean().sqrt() / scale)
