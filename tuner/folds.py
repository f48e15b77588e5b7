"""The gate of what materialises states: calls on poisoned pools, and what they must write.

As :mod:`.gate`, but a call stands alone: it folds ring tokens into states of other slots and leaves rings
and cursors as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..runtime.compiled import ModuleSource
from ..runtime.oracle import Entry, recurrence, round_to
from ..runtime.plan import Plan
from ..runtime.spec import Spec
from .gate import ERROR_FACTOR, ERROR_FLOOR, REPEATS, Kernels, RelativeError, Verdict
from .pool import Pool, make_pool

ROWS = 10
"""Rows of a call of the gate, six of which are special (see :meth:`FoldGate.scene`)."""
SCENES = 6
"""Calls that a candidate must pass."""

Some = TypeVar("Some", bound="Fold")


@dataclass
class Fold:
    """A call, and the pool whose caches it is given."""

    spec: Spec
    pool: Pool
    source: Tensor
    """(rows,) int32 or int64: slots whose states and rings are read."""
    destination: Tensor
    """(rows,): slots whose states are written."""
    prefix: Tensor
    """(rows,): ring tokens to fold, clamped to what the ring holds."""
    A: Tensor
    """(heads,) fp32: what the family's steps call A or A_log."""
    null_slot: int = -1
    """A slot that marks padding besides negative ones."""

    def copied(self: Some) -> Some:
        """The same call on memory of its own."""
        old = self.pool
        storage = old.storage.clone()
        views: dict[str, Any] = {name: field.of(storage) for name, field in old.fields.items()}
        start, length = old.ring_start.clone(), old.ring_len.clone()
        pool = replace(old, storage=storage, ring_start=start, ring_len=length, **views)
        return replace(self, pool=pool)

    def at(self: Some, rows: Tensor) -> Some:
        """The call of only some rows, on the same memory."""
        return replace(
            self, source=self.source[rows], destination=self.destination[rows], prefix=self.prefix[rows]
        )

    def lengths(self) -> Tensor:
        """(rows,) int64: tokens in the rings of the sources."""
        return self.pool.ring_len[self.source.long()].long()

    def counts(self) -> Tensor:
        """(rows,) int64: tokens that each row folds."""
        return torch.minimum(self.prefix.long().clamp(min=0), self.lengths())

    def writes(self) -> Tensor:
        """(rows,) bool: whose destination a kernel writes.

        Padded rows write nothing, nor do rows that would fold a part of a ring in place: the rest of it would
        follow on a state that is too new.
        """
        slots = torch.stack([self.source, self.destination])
        padded = ((slots < 0) | (slots == self.null_slot)).any(0)
        return ~padded & ((self.source != self.destination) | (self.counts() == self.lengths()))

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
    device: torch.device | str = "cpu",
    *,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    slots: int | None = None,
    capacity: int | None = None,
    index_dtype: torch.dtype = torch.int32,
    gap_bytes: int = 16,
    seed: int = 0,
) -> Fold:
    """A legal call whose sources and destinations are all different slots of a shuffled pool.

    Only states of sources and live ring entries are numbers; all else is NaN, destinations' states too.
    Prefixes run from below 0 to beyond all that a ring, or with int64 an int32, can hold.

    Args:
        spec: Of the step whose rings are folded, or of what folds them.
        rows: Of the call.
        heads: A multiple of ``spec.heads_per_group``.
        device: Where the pool lies; numbers are drawn on the CPU.
        lengths: (rows,) tokens in each source's ring; None runs through 0 to the window.
        starts: (rows,) where they begin; None is anywhere.
        slots: Of the pool; None is one more than the rows need.
        capacity: Tokens a ring has room for; None is the least.
        index_dtype: Of source, destination and prefix.
        gap_bytes: See :func:`make_pool`.
        seed: Of all draws.
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


class FoldGate:
    """Calls that a candidate must serve before it may be timed; made anew for each, since states are large.

    Args:
        spec: Of op ``materialize``.
        heads: A multiple of ``spec.heads_per_group``.
        device: Where kernels run; the fp64 fold is computed there.
        scenes: Calls.
        repeats: See :data:`.gate.REPEATS`.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        heads: int,
        device: torch.device | str = "cpu",
        scenes: int = SCENES,
        repeats: int = REPEATS,
    ) -> None:
        self.spec, self._heads, self._device = spec, heads, device
        self._scenes, self._repeats = scenes, repeats

    def scene(self, number: int) -> Fold:
        """One of the calls, the same whenever it is made.

        Over the calls fills run from none to the window, each met at least once where there are no more than
        plain rows. In shuffled order some rows are padded, by source or destination, by negative slots or (in
        every second call) the null slot, and two are in place: one that folds its whole ring and one that
        would fold a part of it.
        """
        spec, g = self.spec, torch.Generator().manual_seed(number)
        order = torch.randperm(ROWS, generator=g)
        no_source, no_destination, null, of_null, whole, part, *plain = order.tolist()
        fills = torch.randint(1, spec.window + 1, (ROWS,), generator=g)
        turns = number * len(plain) + torch.arange(len(plain))
        fills[plain] = (turns * spec.window / (SCENES * len(plain) - 1)).round().long()
        fills[whole] = spec.window
        scene = fold(spec, ROWS, self._heads, self._device, lengths=fills, seed=number)
        scene.source[no_source] = scene.destination[no_destination] = -1 - number
        if number % 2:
            scene.null_slot = int(scene.destination[null])
            scene.source[of_null] = scene.null_slot
        for row, prefix in ((whole, spec.window + number), (part, int(fills[part]) - 1)):
            scene.destination[row] = scene.source[row]
            scene.prefix[row] = prefix
        return scene

    def check(self, plan: Plan, module_source: ModuleSource) -> Verdict:
        """Let ``plan`` serve the calls.

        Raises:
            CompileError: The plan does not compile.
        """
        kernels = Kernels(self.spec, plan, module_source)

        def launch(scene: Fold) -> None:
            pool = scene.pool
            named: dict[str, Tensor | None] = {name: getattr(pool, name) for name in pool.fields}
            named |= {"ring_start": pool.ring_start, "ring_len": pool.ring_len, "slot_index": scene.source}
            named |= {"destination": scene.destination, "prefix": scene.prefix, "a": scene.A}
            numbers = {"ring_capacity": pool.capacity, "null_slot": scene.null_slot}
            kernels.launch(named, len(scene.source), self._heads, numbers)

        return self.judge(launch)

    def judge(self, launch: Callable[[Fold], None]) -> Verdict:
        """Let a candidate serve the calls; ``launch`` works on the memory of the one it is given."""
        state, ideal = RelativeError(), RelativeError()
        for number in range(self._scenes):
            scene = self.scene(number)
            served = scene.at(scene.writes())
            count, slots = served.counts(), served.destination.long()
            expected, nothing = served.expected(count), count == 0
            copies = scene.pool.state[served.source.long()][nothing]
            before = scene.copied()
            launch(scene)
            for _ in range(self._repeats - 1 if number == 0 else 0):
                again = before.copied()
                launch(again)
                if not torch.equal(again.pool.storage, scene.pool.storage):
                    return Verdict("launches from the same memory differ")
            found, pool = scene.pool.state[slots], scene.pool
            elsewhere = (pool.storage != before.pool.storage) & ~scene.states_only(slots)
            moved = [pool.ring_start != before.pool.ring_start, pool.ring_len != before.pool.ring_len]
            for wrong, what in (
                (elsewhere, "bytes outside of the states of destinations changed"),
                (torch.stack(moved), "cursors changed"),
                (~torch.isfinite(found), "states are not finite"),
                (found[nothing] != copies, "states into which nothing is folded are no copies"),
            ):
                if wrong.any():
                    return Verdict(f"{what} ({int(wrong.sum())} values in call {number})")
            state.add(found, expected)
            ideal.add(round_to(expected, self.spec.state_dtype), expected)
        error, bound = state.value(), ERROR_FACTOR * ideal.value() + ERROR_FLOOR
        reason = "" if error <= bound else f"state error {error:.3g} exceeds {bound:.3g}"
        return Verdict(reason, state_error=error, state_bound=bound)
