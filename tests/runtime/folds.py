"""Calls of what materialises states, on poisoned pools, and what they should write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.oracle import Entry, recurrence
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool, make_pool
from tests.runtime.calls import cache_of

MATERIALIZE: dict[str, Callable[..., None]] = {"mamba2": ops.mamba2_materialize, "gdn": ops.gdn_materialize}


@dataclass
class Fold:
    """A call, and the pool whose caches it is given."""

    spec: Spec
    pool: Pool
    source: Tensor
    destination: Tensor
    prefix: Tensor
    A: Tensor
    """What the family's steps call A or A_log."""

    def given(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of the call."""
        given: dict[str, Any] = {"source": self.source, "destination": self.destination}
        given |= {"prefix": self.prefix, "window": self.spec.window}
        given |= cache_of(self.pool, self.spec).tensors()
        if self.spec.family == "mamba2":
            given["A"] = self.A
        return given | changes

    def call(self, **changes: Any) -> None:
        """Call the public op of the family."""
        MATERIALIZE[self.spec.family](**self.given(**changes))

    def copied(self) -> Fold:
        """The same call on memory of its own."""
        old = self.pool
        storage = old.storage.clone()
        views: dict[str, Any] = {name: field.of(storage) for name, field in old.fields.items()}
        start, length = old.ring_start.clone(), old.ring_len.clone()
        pool = replace(old, storage=storage, ring_start=start, ring_len=length, **views)
        return replace(self, pool=pool)

    def lengths(self) -> Tensor:
        """(rows,) int64: tokens in the rings of the sources."""
        return self.pool.ring_len[self.source.long()].long()

    def expected(self, count: Tensor) -> Tensor:
        """(rows, ...) fp64: the sources' states after ``count`` (rows,) ring tokens, one after the other."""
        pool, source = self.pool, self.source.long()
        rule = recurrence(self.spec, self.A)
        state = pool.state[source].double()
        for j in range(self.spec.window):
            token = (pool.ring_start[source].long() + j) % pool.capacity
            after = rule.advance(state, pool.entry(source, token))
            state = torch.where((j < count)[:, None, None, None], after, state)
        return state

    def states_only(self, slots: Tensor) -> Tensor:
        """Bytes of the pool that are states of ``slots``, as a bool mask of its storage."""
        mask = torch.zeros_like(self.pool.storage)
        self.pool.fields["state"].bytes_of(mask)[slots.long()] = 1
        return mask.bool()


def fold(
    spec: Spec,
    rows: int,
    heads: int,
    device: str = "cpu",
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    index_dtype: torch.dtype = torch.int32,
    gap_bytes: int = 16,
    seed: int = 0,
) -> Fold:
    """A legal call with every second destination after a source in a shuffled pool.

    Only states of sources and live ring entries are numbers; all else is NaN, destinations' states too.
    Prefixes run from below 0 to beyond all that a ring, or with int64 an int32, can hold.

    Args:
        spec: Of the step whose rings are folded, or of what folds them.
        lengths: (rows,) tokens in each source's ring; None runs through 0 to the window.
        starts: (rows,) where they begin; None is anywhere.
    """
    g = torch.Generator().manual_seed(seed)
    groups = heads // spec.heads_per_group
    pool = make_pool(
        spec, slots or 2 * rows + 1, heads, groups, capacity, device, generator=g, gap_bytes=gap_bytes
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(device)

    order = torch.randperm(len(pool.ring_len), generator=g).to(device)
    source, destination = order[:rows], order[rows : 2 * rows]
    length = torch.arange(rows) % (spec.window + 1) if lengths is None else lengths
    if starts is not None:
        pool.ring_start[source] = starts.int().to(device)
    pool.ring_len[source] = length.int().to(device)
    pool.state[source] = normal(rows, *pool.state.shape[1:]).to(pool.state.dtype)
    for j in range(spec.window):
        slot = source[(length > j).to(device)]
        n = len(slot)
        decay = 0.001 + 0.1 * torch.rand(n, heads, generator=g).to(device)
        key = normal(n, groups, spec.state_size)
        if spec.family == "gdn":
            decay, key = -decay, key / key.norm(dim=-1, keepdim=True)
        entry = Entry(normal(n, heads, spec.head_dim), key, decay)
        pool.put(slot, (pool.ring_start[slot].long() + j) % pool.capacity, entry)
    rate = (1.0 + 15.0 * torch.rand(heads, generator=g)).to(device)
    prefix = torch.randint(-1, spec.window + 2, (rows,), generator=g).to(index_dtype)
    bounds = torch.iinfo(index_dtype)
    prefix[::4] = torch.tensor([bounds.max, bounds.min, 2**31, -(2**31)] * rows).to(index_dtype)[
        : len(prefix[::4])
    ]
    return Fold(
        spec, pool, source.to(index_dtype), destination.to(index_dtype), prefix.to(device),
        rate.log() if spec.family == "gdn" else -rate,
    )  # fmt: skip
