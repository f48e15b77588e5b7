"""Poisoned pools: the memory that test scenes give to kernels.

All caches of all slots lie in one byte pool filled with NaN, as strided views with gaps between their
rows: whatever a kernel reads or writes beyond its own shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.oracle import Entry
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

    def entry(self, slots: Tensor, token: Tensor) -> Entry:
        """What the rings of ``slots`` (n,) hold at the indices ``token`` (n,), in fp64."""
        rings = (self.ring_x, self.ring_b, self.ring_decay)
        return Entry(*(ring[slots, :, token].double() for ring in rings))

    def put(self, slots: Tensor, token: Tensor, entry: Entry) -> None:
        """Write an entry per slot at the indices ``token`` (n,), rounded to the rings' dtypes."""
        for ring, value in zip((self.ring_x, self.ring_b, self.ring_decay), entry, strict=True):
            ring[slots, :, token] = value.to(ring.dtype)

    def writable(self, slots: Tensor, stores: Tensor, append: Tensor) -> Tensor:
        """Bytes that one launch may write, as a bool mask of the storage.

        Args:
            slots: (n,) int64, the slot of each new token.
            stores: (n,) bool, whether the slot's state is written.
            append: (n,) int64, where the token goes in the slot's ring.
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
        capacity = spec.ring_capacity
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
