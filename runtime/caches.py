"""Caches of a layer: their record, their allocation and their size."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dtypes import TORCH_DTYPES
from .errors import ArgumentError
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


def bytes_per_slot(spec: Spec, heads: int, groups: int, capacity: int | None = None) -> int:
    """Bytes of state and ring per slot and layer; the two cursors (8 bytes) are shared by layers.

    Args:
        spec: Shapes and dtypes.
        heads: Heads (GDN: value heads) on this GPU.
        groups: Groups (GDN: key heads) on this GPU.
        capacity: Tokens per ring; None is the least, ``window + num_tokens`` (0 for native).

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
    least = 0 if spec.is_native else spec.window + spec.num_tokens
    given = least if capacity is None else _size("capacity", capacity, 0)
    if given < least:
        raise ArgumentError(
            f"capacity {given} is too small for window {spec.window}: rings need at least {least}"
        )
    return heads, groups, 0 if spec.is_native else given
