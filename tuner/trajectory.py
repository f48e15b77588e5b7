"""Test scenes for kernels: a poisoned paged pool, and trajectories of steps with their expectations.

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
from ..runtime.oracle import Ideal, Oracle
from ..runtime.spec import DTYPE_BYTES, Spec

PAGE_BYTES = 256
"""Slots of a pool start at multiples of this."""


@dataclass(frozen=True)
class Field:
    """Where one cache lies in a pool: all numbers in bytes except ``shape``."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, storage: Tensor) -> Tensor:
        """The strided view (slots, ...) of this cache in ``storage`` (uint8)."""
        size = DTYPE_BYTES[self.dtype]
        strides = tuple(stride // size for stride in self.strides)
        return storage.view(TORCH_DTYPES[self.dtype]).as_strided(self.shape, strides, self.offset // size)

    def bytes_of(self, storage: Tensor) -> Tensor:
        """As :meth:`of`, byte by byte: the innermost dimension is longer by the dtype's size."""
        shape = (*self.shape[:-1], self.shape[-1] * DTYPE_BYTES[self.dtype])
        return storage.as_strided(shape, (*self.strides[:-1], 1), self.offset)


@dataclass(frozen=True)
class Pool:
    """Caches of all slots, interleaved slot by slot in one byte pool filled with NaN.

    Every row of every cache is followed by a gap, so that a write past an end lands in bytes that
    nobody owns. Caches of a native spec have rings of capacity 0.
    """

    storage: Tensor
    """(bytes,) uint8."""
    fields: dict[str, Field]
    state: Tensor
    """(slots, heads, head_dim, state_size)."""
    ring_x: Tensor
    """(slots, heads, capacity, head_dim)."""
    ring_b: Tensor
    """(slots, groups, capacity, state_size)."""
    ring_decay: Tensor
    """(slots, heads, capacity), fp32."""
    ring_start: Tensor
    """(slots,) int32, outside the byte pool: cursors belong to the step, not to a layer."""
    ring_len: Tensor
    """(slots,) int32."""

    @property
    def capacity(self) -> int:
        """Tokens a ring has room for."""
        return self.ring_x.shape[2]

    def writable(self, slots: Tensor, stores: Tensor, append: Tensor) -> Tensor:
        """Bytes that one launch may write, as a bool mask of the storage.

        Args:
            slots: (n,) int64, slots of the live rows.
            stores: (n,) bool, rows whose state is written.
            append: (n,) int64, where each row's new ring token goes.
        """
        mask = torch.zeros_like(self.storage)
        self.fields["state"].bytes_of(mask)[slots[stores]] = 1
        if self.capacity:
            self.fields["ring_x"].bytes_of(mask)[slots, :, append] = 1
            self.fields["ring_b"].bytes_of(mask)[slots, :, append] = 1
            # Tokens are the innermost dimension of the decay: four bytes each.
            decay = self.fields["ring_decay"].bytes_of(mask)
            decay.view(*decay.shape[:-1], self.capacity, 4)[slots, :, append] = 1
        return mask.bool()


def make_pool(
    spec: Spec,
    slots: int,
    heads: int,
    groups: int,
    capacity: int | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    gap_bytes: int = 16,
) -> Pool:
    """A pool in which everything is NaN; ring starts are random and lengths 0.

    Args:
        spec: Shapes and dtypes.
        slots: Number of slots.
        heads: Heads per slot.
        groups: Groups per slot.
        capacity: Tokens per ring; None is the least, ``window + num_tokens``.
        device: Where the pool lies.
        generator: CPU generator of the ring starts; None starts all rings at 0.
        gap_bytes: Gap after each row; 16 keeps strides multiples of 16 bytes where rows are,
            4 makes them odd.
    """
    if spec.is_native:
        capacity = 0
    elif capacity is None:
        capacity = spec.window + spec.num_tokens
    shapes = {
        "state": (spec.state_dtype, (heads, spec.head_dim, spec.state_size)),
        "ring_x": (spec.ring_dtype, (heads, capacity, spec.head_dim)),
        "ring_b": (spec.ring_dtype, (groups, capacity, spec.state_size)),
        "ring_decay": ("fp32", (heads, capacity)),
    }
    inner: dict[str, tuple[int, tuple[int, ...]]] = {}
    offset = gap_bytes
    for name, (dtype, shape) in shapes.items():
        size = DTYPE_BYTES[dtype]
        strides = [size]
        for extent in reversed(shape):
            row_bytes = extent * strides[0]
            step = row_bytes + gap_bytes if len(strides) == 1 else row_bytes
            strides.insert(0, step + -step % 4)
        inner[name] = (offset, tuple(strides[1:]))
        offset += strides[0] + gap_bytes
    slot_bytes = offset + -offset % PAGE_BYTES
    storage = torch.full((slots * slot_bytes,), 0xFF, dtype=torch.uint8, device=device)
    fields = {
        name: Field(dtype, (slots, *shape), (slot_bytes, *inner[name][1]), inner[name][0])
        for name, (dtype, shape) in shapes.items()
    }
    start = torch.zeros(slots, dtype=torch.int32)
    if generator is not None and capacity:
        start = torch.randint(0, capacity, (slots,), generator=generator, dtype=torch.int32)
    return Pool(
        storage=storage,
        fields=fields,
        **{name: field.of(storage) for name, field in fields.items()},
        ring_start=start.to(device),
        ring_len=torch.zeros(slots, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True)
class Step:
    """One launch of a trajectory: its inputs, and what must be true after it.

    ``live`` rows are those with a sequence; expectations of the stored state have one row per ``True``
    in ``stores``. Inputs of padded rows are NaN.
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
    """(live, heads) fp64: what the ring's decay gets."""
    stored: Tensor
    """(stores.sum(), heads, head_dim, state_size) fp64: the oracle's state where it is written."""
    ideal_stored: Tensor
    """As ``stored``, of the ideal."""


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
        rates: Range of -A, uniform.
        deltas: Range of step sizes after bias and softplus, log-uniform.
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
        self.capacity = 0 if spec.is_native else spec.window + spec.num_tokens
        if capacity is not None and self.capacity:
            self.capacity = capacity

        g = self._generator = torch.Generator().manual_seed(seed)
        usable = torch.randperm(self._slots, generator=g)
        if null_slot is not None:
            usable = usable[usable != null_slot]
        self._slot_of = usable[:sequences].to(self.device)
        self._start = torch.randint(0, max(1, self.capacity), (sequences,), generator=g)
        self.A = -torch.empty(heads).uniform_(*rates, generator=g).to(self.device)
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
        oracle = self._oracle()
        for j, (x, dt, B, _, _) in enumerate(self._history):
            holds = length > j
            token = (start[holds] + j) % self.capacity
            pool.ring_x[slot[holds], :, token] = x[holds].to(pool.ring_x.dtype)
            pool.ring_b[slot[holds], :, token] = B[holds].to(pool.ring_b.dtype)
            pool.ring_decay[slot[holds], :, token] = oracle.delta(dt[holds]).float()
        return pool

    def __iter__(self) -> Iterator[Step]:
        g = self._generator
        g.set_state(self._state_of_draws)
        device, spec, capacity = self.device, self.spec, self.capacity
        replays = not spec.is_native
        oracle = self._oracle()
        ideal = Ideal(self._state, self.A, spec=spec, D=self.D, dt_bias=self.dt_bias)
        everyone = torch.arange(self.sequences, device=device)
        length = self._len.clone().to(device)
        for j, (x, dt, B, C, z) in enumerate(self._history):
            holds = everyone[length > j]
            for model in (oracle, ideal):
                model.step(holds, x[holds], dt[holds], B[holds], C[holds], None if z is None else z[holds])
                model.commit(torch.ones_like(holds))
        start = self._start.clone().to(device)

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

            x, dt, B, C, z = inputs
            arguments = (sequence, x[live], dt[live], B[live], C[live], None if z is None else z[live])
            stores = torch.ones_like(sequence, dtype=torch.bool)
            append = torch.zeros_like(sequence)
            if replays:
                stores = length[sequence] + spec.num_tokens > spec.window
                append = (start[sequence] + length[sequence]) % capacity
            before = oracle.state[sequence[stores]] if replays else None
            y, ideal_y = oracle.step(*arguments), ideal.step(*arguments)
            ideal_before = ideal.state[sequence[stores]] if replays else None
            kept = accepted[live] if replays else torch.ones_like(sequence)
            oracle.commit(kept)
            ideal.commit(kept)
            yield Step(
                x=x,
                dt=dt,
                B=B,
                C=C,
                z=z,
                slot_index=slot_index.to(self._index_dtype),
                accepted=accepted,
                live=live,
                slots=self._slot_of[sequence],
                stores=stores,
                append=append,
                y=y,
                ideal_y=ideal_y,
                delta=oracle.delta(dt[live]),
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

    def _oracle(self) -> Oracle:
        return Oracle(self._state, self.A, D=self.D, dt_bias=self.dt_bias, dt_softplus=self.spec.dt_softplus)

    def _draw(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """x, dt, B, C, z of one token for ``rows`` rows, in the activation dtype."""
        g, spec = self._generator, self.spec
        activation = TORCH_DTYPES[spec.activation_dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g).to(activation).to(self.device)

        low, high = (math.log(bound) for bound in self._deltas)
        delta = torch.empty(rows, self.heads, dtype=torch.float64).uniform_(low, high, generator=g).exp()
        dt = delta + torch.log(-torch.expm1(-delta)) if spec.dt_softplus else delta
        if self.dt_bias is not None:
            dt = dt - self.dt_bias.cpu()
        x = normal(rows, self.heads, spec.head_dim)
        B = normal(rows, self.groups, spec.state_size)
        C = normal(rows, self.groups, spec.state_size)
        z = normal(rows, self.heads, spec.head_dim) if spec.has_z else None
        return x, dt.to(activation).to(self.device), B, C, z


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of ``actual - expected`` over the RMS of ``expected`` (fp64); 0 for nothing to compare."""
    if not expected.numel():
        return 0.0
    difference = actual.double() - expected
    scale = expected.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return float(difference.square().mean().sqrt() / scale)
