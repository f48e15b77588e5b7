"""Caches of a layer: their record, their allocation and size, and what is taken out and put back."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .dtypes import TORCH_DTYPES
from .errors import ArgumentError
from .rows import repeated
from .spec import DTYPE_BYTES, Spec


@dataclass(frozen=True, eq=False)
class Cache:
    """The caches of one layer and the cursors of its cache group; shapes as in :func:`.ops.mamba2_step`.

    The fields are those of Mamba-2. In a cache of Gated DeltaNet ``ring_x``, ``ring_b`` and
    ``ring_decay`` are what :func:`.ops.gdn_step` calls ``ring_u``, ``ring_k`` and ``ring_g``.
    ``dataclasses.replace(cache, ring_start=…, ring_len=…)`` ties another layer to the same cursors.
    """

    state: Tensor
    ring_x: Tensor
    ring_b: Tensor
    ring_decay: Tensor
    ring_start: Tensor
    ring_len: Tensor
    family: str = "mamba2"
    """As in :class:`.spec.Spec`: says by which names :meth:`tensors` gives the rings."""

    @property
    def capacity(self) -> int:
        """Tokens a ring has room for."""
        return self.ring_x.shape[2]

    def tensors(self) -> dict[str, Any]:
        """All tensors by the names of the family's step, for ``**cache.tensors()``."""
        # Written out: torch.compile cannot trace `vars` of an object in every supported torch.
        x, b, decay = (
            ("ring_u", "ring_k", "ring_g") if self.family == "gdn" else ("ring_x", "ring_b", "ring_decay")
        )
        return {
            "state": self.state,
            x: self.ring_x,
            b: self.ring_b,
            decay: self.ring_decay,
            "ring_start": self.ring_start,
            "ring_len": self.ring_len,
        }

    def snapshot(self, slots: Tensor) -> Snapshot:
        """What this cache holds of some sequences: state, rings and cursors, in memory of their own.

        The ring of a convolution in front of the layer is no part of the cache: copy its slots beside this.
        Take it after a commit, never between a step and its commit: the state may then be newer than the
        cursors. Layers that share cursors have them in each layer's snapshot.

        Args:
            slots: (n,) int32 or int64.

        Raises:
            ArgumentError: ``slots`` is no such tensor, or lies on another device; on a CPU also a slot out of
                range (on a GPU torch's own assertion fails).
        """
        index = self._index(slots)
        parts = {name: part.index_select(0, index) for name, part in zip(_PARTS, self._parts(), strict=True)}
        return Snapshot(Cache(**parts, family=self.family))

    def restore(self, snapshot: Snapshot, slots: Tensor) -> None:
        """Put sequences into slots of this cache, bit for bit; they go on where their snapshot was taken.

        The cache may be another one than the snapshot's, of equal sizes and dtypes but for the number of
        slots. Cursors are written too, the ring of a convolution is not. With layers that share cursors
        restore each layer's snapshot of the same moment: each writes the same numbers.

        Args:
            snapshot: Of a cache like this one.
            slots: (n,) int32 or int64, distinct; one for each of the snapshot's, in its order.

        Raises:
            ArgumentError: The snapshot does not fit the cache, or ``slots`` is no such tensor, or lies on
                another device; on a CPU also a slot that is out of range or named twice. Nothing is written
                then.
        """
        index, held = self._index(slots), snapshot.held
        if held.family != self.family:
            raise ArgumentError(
                f"a snapshot of {held.family} does not fit a cache of {self.family}",
                hint="restore it into a cache made with the same spec",
            )
        for name, mine, theirs in zip(_PARTS, self._parts(), held._parts(), strict=True):
            kept = (*mine.shape[1:], mine.dtype, mine.device)
            taken = (*theirs.shape[1:], theirs.dtype, theirs.device)
            if kept != taken:
                raise ArgumentError(
                    f"{name} of the snapshot is {_described(taken)} a slot, of the cache {_described(kept)}",
                    hint="restore it into a cache of the same spec, heads, capacity and device",
                )
        if len(index) != len(held.state):
            raise ArgumentError(
                f"{len(index)} slots are named for a snapshot of {len(held.state)}", hint="name one for each"
            )
        if index.device.type == "cpu" and bool(repeated(index).any()):
            raise ArgumentError(
                f"slots {index.tolist()} name a slot twice", hint="restore each sequence into its own slot"
            )
        for mine, theirs in zip(self._parts(), held._parts(), strict=True):
            mine.index_copy_(0, index, theirs)

    def _parts(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _PARTS)

    def _index(self, slots: Tensor) -> Tensor:
        """``slots`` as torch indexes by them, checked."""
        if not isinstance(slots, Tensor):
            raise ArgumentError(f"slots is {slots!r}", hint="pass a tensor of int32 or int64")
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise ArgumentError(
                f"slots is {_described((*slots.shape, slots.dtype, slots.device))}",
                hint="pass one dimension of int32 or int64",
            )
        if slots.device != self.state.device:
            raise ArgumentError(
                f"slots is on {slots.device}, the cache on {self.state.device}", hint="move slots there"
            )
        if slots.device.type == "cpu":
            beyond = slots[(slots < 0) | (slots >= len(self.state))]
            if len(beyond):
                raise ArgumentError(
                    f"slots names {int(beyond[0])}, but there are {len(self.state)} slots",
                    hint="name slots of live sequences alone: nothing here is padding",
                )
        return slots.long()


_PARTS: Final = ("state", "ring_x", "ring_b", "ring_decay", "ring_start", "ring_len")


def _described(sizes: tuple[object, ...]) -> str:
    *shape, dtype, device = sizes
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Some sequences of a cache at one moment; see :meth:`Cache.snapshot` and :meth:`Cache.restore`."""

    held: Cache
    """Their state, rings and cursors: a cache of as many slots, in the order in which they were named."""


def make_cache(
    spec: Spec,
    slots: int,
    heads: int,
    groups: int,
    device: torch.device | str,
    capacity: int | None = None,
) -> Cache:
    """Separately allocated caches of zeros with empty rings; of capacity 0 for a native spec.

    Args:
        spec: Shapes and dtypes.
        slots: Sequences there is room for, at least 1.
        heads: Heads (GDN: value heads) on this GPU.
        groups: Groups (GDN: key heads) on this GPU.
        device: Where to allocate.
        capacity: Tokens per ring, as in :func:`bytes_per_slot`.

    Raises:
        ArgumentError: A size is no whole number or too small, or heads, groups and spec do not fit.
    """
    slots = _size("slots", slots)
    heads, groups, capacity = _sizes(spec, heads, groups, capacity)

    def zeros(dtype: str, *shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=TORCH_DTYPES[dtype], device=device)

    return Cache(
        state=zeros(spec.state_dtype, heads, spec.head_dim, spec.state_size),
        ring_x=zeros(spec.ring_dtype, heads, capacity, spec.head_dim),
        ring_b=zeros(spec.ring_dtype, groups, capacity, spec.state_size),
        ring_decay=zeros("fp32", heads, capacity),
        ring_start=torch.zeros(slots, dtype=torch.int32, device=device),
        ring_len=torch.zeros(slots, dtype=torch.int32, device=device),
        family=spec.family,
    )


def ring_capacity(spec: Spec, conv_width: int = 1) -> int:
    """The least tokens per ring: ``window + num_tokens``, and what a convolution looks back to; 0 for native.

    All rings under one pair of cursors wrap at the same capacity, so that one of a layer with a convolution
    is the capacity of its whole cache group.

    Args:
        spec: Gives window and tokens per step.
        conv_width: Width of the :func:`.conv.conv_step` under the same cursors; 1 without one.

    Raises:
        ArgumentError: ``conv_width`` is no whole number of at least 1.
    """
    back = _size("conv_width", conv_width) - 1
    return 0 if spec.is_native else spec.ring_capacity + back


def bytes_per_slot(spec: Spec, heads: int, groups: int, capacity: int | None = None) -> int:
    """Bytes of state and ring per slot and layer; the two cursors (8 bytes) are shared by layers.

    Args:
        spec: Shapes and dtypes.
        heads: Heads (GDN: value heads) on this GPU.
        groups: Groups (GDN: key heads) on this GPU.
        capacity: Tokens per ring; None is the least without a convolution, :func:`ring_capacity`.

    Raises:
        ArgumentError: A size is no whole number or too small, or heads, groups and spec do not fit.
    """
    heads, groups, capacity = _sizes(spec, heads, groups, capacity)
    ring = heads * spec.head_dim + groups * spec.state_size
    return spec.state_bytes(heads) + capacity * (ring * DTYPE_BYTES[spec.ring_dtype] + heads * 4)


def _size(name: str, value: int, least: int = 1) -> int:
    try:
        whole = -1 if isinstance(value, bool) else operator.index(value)  # numpy's integers too
    except TypeError:
        whole = -1
    if whole < least:
        raise ArgumentError(f"{name} is {value!r}", hint=f"pass a whole number of at least {least}")
    return whole


def _sizes(spec: Spec, heads: int, groups: int, capacity: int | None) -> tuple[int, int, int]:
    """heads, groups and capacity, checked."""
    heads, groups = _size("heads", heads), _size("groups", groups)
    if heads != groups * spec.heads_per_group:
        raise ArgumentError(
            f"{heads} heads in {groups} groups do not fit the spec's {spec.heads_per_group} heads per group; "
            "pass the heads and groups of one GPU"
        )
    least = spec.ring_capacity
    given = least if capacity is None else _size("capacity", capacity, 0)
    if given < least:
        raise ArgumentError(
            f"capacity {given} is too small for window {spec.window}: rings need at least {least}"
        )
    return heads, groups, 0 if spec.is_native else given
