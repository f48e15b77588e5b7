"""Values of slots, cursors, counts and row starts, checked by calls on CPUs; kernels check none of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArgumentError


def repeated(slot: Tensor) -> Tensor:
    """(n,) bool: whether an earlier entry is the same; of ``slot`` (n,) whole numbers."""
    order = slot.argsort(stable=True)
    found = torch.zeros_like(slot, dtype=torch.bool)
    found[order[1:]] = slot[order].diff() == 0
    return found


def live_rows(
    slot_index: Tensor, null_slot: int, slots: int, name: str = "slot_index", distinct: bool = True
) -> tuple[Tensor, Tensor]:
    """Indices of the rows that are no padding, and their slots, int64.

    Args:
        slot_index: (rows,).
        null_slot: Marks padding besides negative slots; -1 for none.
        slots: How many there are.
        name: The tensor's in messages.
        distinct: A slot that two rows name is refused: what they write to it would meet.

    Raises:
        ArgumentError: A slot is beyond the last one, or named twice. Nothing has been written yet.
    """
    row = ((slot_index >= 0) & (slot_index != null_slot)).nonzero()[:, 0]
    slot = slot_index[row].long()
    beyond = (slot >= slots).nonzero()[:, 0]
    if len(beyond):
        first = int(beyond[0])
        raise ArgumentError(
            f"row {int(row[first])} names slot {int(slot[first])}, but there are {slots} slots",
            hint=f"correct {name}, or mark padding by -1 or null_slot",
        )
    again = repeated(slot).nonzero()[:, 0] if distinct else slot[:0]
    if len(again):
        later = int(again[0])
        earlier = int((slot == slot[later]).nonzero()[0, 0])
        raise ArgumentError(
            f"rows {int(row[earlier])} and {int(row[later])} name the same slot, {int(slot[later])}",
            hint=f"correct {name}: a slot is that of one row, and padding is marked by -1 or null_slot",
        )
    return row, slot


def live_cursors(
    row: Tensor, slot: Tensor, ring_start: Tensor, ring_len: Tensor, longest: int, capacity: int
) -> tuple[Tensor, Tensor]:
    """Starts and lengths, int32, of the rings of live rows.

    Raises:
        ArgumentError: A ring starts outside of its capacity or is longer than it may be. Nothing has
            been written yet.
    """
    start, length = ring_start[slot], ring_len[slot]
    bad = ((start < 0) | (start >= capacity) | (length < 0) | (length > longest)).nonzero()[:, 0]
    if len(bad):
        first = int(bad[0])
        raise ArgumentError(
            f"row {int(row[first])}: the ring of slot {int(slot[first])} has ring_start {int(start[first])} "
            f"and ring_len {int(length[first])}, outside of 0 to {capacity - 1} and 0 to {longest}",
            hint="reset the slot for a new sequence, and move cursors by commit and drained alone, with one "
            "window and capacity",
        )
    return start, length


def owned_tokens(
    query_start: Tensor | None, slot_index: Tensor, num_tokens: int, tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """First token and number of tokens of each row, int64.

    Args:
        query_start: (rows + 1,); None where each row has ``num_tokens``.
        slot_index: (rows,).
        num_tokens: The most a row may have.
        tokens: How many there are; None where nobody knows.

    Raises:
        ArgumentError: The entries are no packing of rows. Nothing has been written yet.
    """
    if query_start is None:
        begin = torch.arange(len(slot_index), device=slot_index.device) * num_tokens
        return begin, torch.full_like(begin, num_tokens)
    bounds = query_start.long()
    count, first, last = bounds.diff(), int(bounds[0]), int(bounds[-1])
    bad = ((count < 0) | (count > num_tokens)).nonzero()[:, 0]
    if first != 0 or last > (last if tokens is None else tokens) or len(bad):
        what = f"query_start begins at {first} and ends at {last}"
        if len(bad):
            what = f"row {int(bad[0])} is given {int(count[bad[0]])} tokens"
        there, most = ("", "") if tokens is None else (f", of {tokens} tokens", f" to at most {tokens}")
        raise ArgumentError(
            what + there,
            hint=f"query_start goes from 0{most} in steps of 0 to num_tokens = {num_tokens}",
        )
    return bounds[:-1], count


def kept_tokens(row: Tensor, accepted: Tensor, count: Tensor) -> Tensor:
    """(live,) int64: how many tokens each live row keeps of those it has.

    Args:
        row: (live,), indices of the live rows.
        accepted: (rows,); what it says of other rows is not looked at.
        count: (rows,), tokens that rows have.

    Raises:
        ArgumentError: A row keeps fewer than none, or more than it has. Nothing has been written yet.
    """
    kept, most = accepted[row].long(), count[row]
    bad = ((kept < 0) | (kept > most)).nonzero()[:, 0]
    if len(bad):
        i = int(bad[0])
        raise ArgumentError(
            f"row {int(row[i])} has accepted {int(kept[i])} tokens, outside of 0 to {int(most[i])}",
            hint="of each row give how many of its step's tokens are kept: at most num_tokens, or those that "
            "query_start gives it",
        )
    return kept


@dataclass(frozen=True, eq=False)
class NewTokens:
    """New tokens of the rows of a call that are no padding: those are its live rows."""

    row: Tensor
    """(live,) int64, indices of the live rows."""
    slot: Tensor
    """(live,) int64."""
    mine: Tensor
    """(live, num_tokens) bool: the row has so many tokens."""
    token: Tensor
    """(live, num_tokens) int64, which tokens they are; 0 where the row has fewer."""

    def of(self, value: Tensor) -> Tensor:
        """(live, num_tokens, ...) of what there is per token, (tokens, ...); 0 where a row has fewer."""
        mine = self.mine.view(*self.mine.shape, *[1] * (value.dim() - 1))
        return torch.where(mine, value[self.token], torch.zeros((), dtype=value.dtype, device=value.device))

    def flat(self, value: Tensor) -> Tensor:
        """(n, ...) of (live, num_tokens, ...): the tokens that there are, row after row."""
        return value[self.mine]

    def put(self, out: Tensor, value: Tensor) -> None:
        """Write (live, num_tokens, ...) to the tokens of live rows, and zeros to all others."""
        out.zero_()
        out[self.token[self.mine]] = self.flat(value).to(out.dtype)

    def behind(self, end: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Slot and position in its ring (n,) of each token, if a row's first one lies at ``end`` (live,)."""
        i = torch.arange(self.mine.shape[1], device=end.device)
        return self.slot[:, None].expand_as(self.mine)[self.mine], ((end[:, None] + i) % capacity)[self.mine]

    def store(self, state: Tensor, slot_index: Tensor, i: int, value: Tensor) -> None:
        """Write (live, ...) states after token ``i`` to the slots (rows, num_tokens) that hold them."""
        has = self.mine[:, i]
        state[slot_index[self.row[has], i].long()] = value[has].to(state.dtype)


def new_tokens(
    query_start: Tensor | None,
    slot_index: Tensor,
    num_tokens: int,
    tokens: int,
    null_slot: int,
    slots: int,
) -> NewTokens:
    """Tokens of live rows; a row without tokens is padding, whatever its slot.

    Arguments and errors are those of :func:`owned_tokens` and :func:`live_rows`.
    """
    begin, count = owned_tokens(query_start, slot_index, num_tokens, tokens)
    row, slot = live_rows(torch.where(count > 0, slot_index, -1), null_slot, slots)
    i = torch.arange(num_tokens, device=slot.device)
    mine = i < count[row, None]
    return NewTokens(row, slot, mine, torch.where(mine, begin[row, None] + i, 0))


def draft_slots(new: NewTokens, slot_index: Tensor, accepted: Tensor, null_slot: int, slots: int) -> Tensor:
    """(live,) int64: the slots that live rows start from, ``slot_index[row, accepted - 1]``.

    Args:
        new: The call's tokens.
        slot_index: (rows, num_tokens): where the states after each token are written.
        accepted: (rows,).
        null_slot: Marks padding besides negative slots; -1 for none.
        slots: How many there are.

    Raises:
        ArgumentError: A row has kept no or too many tokens, or the slot of a state that it starts from or
            writes is none or is named twice. Nothing has been written yet.
    """
    held, kept = slot_index[new.row].long(), accepted[new.row].long()
    most = slot_index.shape[1]
    bad = ((kept < 1) | (kept > most)).nonzero()[:, 0]
    if len(bad):
        i = int(bad[0])
        raise ArgumentError(
            f"row {int(new.row[i])} has accepted {int(kept[i])} tokens, outside of 1 to {most}",
            hint="it starts from slot_index[row, accepted - 1]: give 1 where its state is in the first slot",
        )
    start = held.gather(1, kept[:, None] - 1)
    needed = torch.cat([start, torch.where(new.mine, held, start)], 1)
    bad = ((needed < 0) | (needed >= slots) | (needed == null_slot)).nonzero()
    if len(bad):
        i, j = (int(value) for value in bad[0])
        what = "starts from" if j == 0 else f"writes the state after its token {j - 1} to"
        raise ArgumentError(
            f"row {int(new.row[i])} {what} slot {int(needed[i, j])}, but there are {slots} slots",
            hint="correct slot_index: a live row names slots, none of them null_slot, for all of its tokens",
        )
    used = new.mine.scatter(1, kept[:, None] - 1, True).nonzero()
    named = held[used[:, 0], used[:, 1]]
    again = repeated(named).nonzero()[:, 0]
    if len(again):
        later = int(again[0])
        i, j = (int(value) for value in used[later])
        k, m = (int(value) for value in used[named == named[later]][0])
        raise ArgumentError(
            f"slot_index names slot {int(named[later])} twice: for token {m} of row {int(new.row[k])} "
            f"and for token {j} of row {int(new.row[i])}",
            hint="correct slot_index: every token whose state is written, or started from, has its own slot",
        )
    return start[:, 0]


def folded_rows(
    source: Tensor,
    destination: Tensor,
    prefix: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    window: int,
    capacity: int,
    null_slot: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of rows that are no padding: source, destination, start of the ring, tokens to fold; int64.

    Raises:
        ArgumentError: A slot or cursor is out of range, destinations meet each other or a source, or a row
            folds a part of a ring into its own slot. Nothing has been written yet.
    """
    slots = len(ring_len)
    ends = {"source": source, "destination": destination}
    padded = (torch.minimum(source, destination) < 0) | (source == null_slot) | (destination == null_slot)
    (row, slot), (_, target) = (
        live_rows(end.masked_fill(padded, -1), null_slot, slots, name, distinct=False)
        for name, end in ends.items()
    )
    start, length = live_cursors(row, slot, ring_start, ring_len, window, capacity)
    count = torch.minimum(prefix[row].long().clamp(min=0), length.long())
    in_place = target == slot
    partial = (in_place & (count != length)).nonzero()[:, 0]
    if len(partial):
        i = int(partial[0])
        raise ArgumentError(
            f"row {int(row[i])} folds {int(count[i])} of {int(length[i])} ring tokens into their own slot "
            f"{int(slot[i])}, which would fold them again later",
            hint="give another destination, or fold all (prefix None) and call drained after the last layer",
        )
    met = (repeated(target) | torch.isin(target, slot[~in_place])).nonzero()[:, 0]
    if len(met):
        i = int(met[0])
        raise ArgumentError(
            f"row {int(row[i])} writes slot {int(target[i])}, which another row reads or writes",
            hint="make destinations distinct and sources of no other row, or use one call after the other",
        )
    return slot, target, start.long(), count
