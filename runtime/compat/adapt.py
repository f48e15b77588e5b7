"""What adapters share: rows that are padding, cursors that belong to rows, parameters expanded per head.

Nothing here waits for a GPU or has shapes that depend on values, so that CUDA graphs can capture it; where
values are looked at, it is on CPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..rows import live_rows


def present(op: str, name: str, value: Tensor | None) -> Tensor:
    """A tensor that the other library's signature gives a default of None, but needs.

    Raises:
        ArgumentError: It is None.
    """
    if value is None:
        raise ArgumentError(f"{op}: {name} is None; pass the tensor, it only looks optional")
    return value


def refuse(op: str, hint: str, **given: object) -> None:
    """Refuse arguments that are served by nothing here.

    Args:
        op: The adapter.
        hint: What to do.
        **given: By name; those that are None or False are fine.

    Raises:
        ArgumentError: One is given.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ArgumentError(f"{op}: {name} is {found}, which is not served here", hint=hint)


def expect_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Measure a tensor.

    Raises:
        ArgumentError: It has another shape.
    """
    if tuple(tensor.shape) != shape:
        raise ArgumentError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {shape}")


def tied(op: str, name: str, value: Tensor, trailing: int = 1) -> Tensor:
    """One value per head, of what is expanded over the dimensions behind the heads.

    Args:
        op: The adapter, in messages.
        name: The argument's, in messages.
        value: (..., heads, head_dim), or (heads, head_dim, state_size) where ``trailing`` is 2.
        trailing: Dimensions behind the heads.

    Returns:
        A view, (..., heads).

    Raises:
        ArgumentError: There is memory behind the heads.
    """
    for _ in range(trailing):
        if value.stride(-1) and value.shape[-1] > 1:
            raise ArgumentError(
                f"{op}: {name} has a value for every element (shape {tuple(value.shape)}, strides "
                f"{tuple(value.stride())})",
                hint="expand one value per head, so that strides behind the heads are 0",
            )
        value = value.select(-1, 0)
    return value


def packed(value: Tensor) -> Tensor:
    """``value``, copied if its innermost dimension is not contiguous; for inputs of a token's size."""
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def unless_null(indices: Tensor, null_slot: int) -> Tensor:
    """Slots as the rows name them, -1 for padding: ``null_slot`` and negative ones."""
    return torch.where((indices == null_slot) | (indices < 0), -1, indices)


def beyond_null(indices: Tensor, null_slot: int) -> Tensor:
    """Slots as the rows name them, -1 for padding: all up to ``null_slot``, and negative ones."""
    return torch.where((indices > null_slot) & (indices >= 0), indices, -1)


def see_slots(slot: Tensor, slots: int, distinct: bool = True) -> None:
    """On a CPU, see that live rows have slots of their own, ahead of calls that write one after the other.

    Args:
        slot: (rows,), -1 for padding.
        slots: How many there are.
        distinct: False where rows of one slot write the same.

    Raises:
        ArgumentError: A slot is beyond the last one, or two rows name it.
    """
    if looks_at_values(slot):
        live_rows(slot, -1, slots, "the slots of the rows", distinct)


def values_of_slots(values: Tensor, slot: Tensor, slots: int) -> Tensor:
    """(slots,) int32: each row's value at its slot, 0 elsewhere; what the ops take as a cursor.

    Args:
        values: (rows,), of any whole dtype.
        slot: (rows,), -1 for padding; live ones are distinct. Those beyond the last are left to the op.
        slots: How many there are.
    """
    # One more than there are takes what belongs nowhere, so that padding meets no live slot.
    spread = values.new_zeros(slots + 1, dtype=torch.int32)
    spread[_spare(slot, slots)] = values.to(torch.int32)
    return spread[:slots]


def rows_of_slots(rows: Tensor, slot: Tensor, slots: int) -> Tensor:
    """(slots, ...) with each row's entry at its slot and nothing (uninitialised memory) elsewhere."""
    spread = rows.new_empty(slots + 1, *rows.shape[1:])
    spread[_spare(slot, slots)] = rows
    return spread[:slots]


def at_rows(source: Tensor, slot: Tensor) -> Tensor:
    """(rows, ...): the entries of the rows' slots; of padding those of some slot."""
    return source[slot.clamp(0, len(source) - 1).long()]


def put_rows(target: Tensor, slot: Tensor, values: Tensor) -> None:
    """Write each live row's entry to its slot; padding writes nothing.

    Args:
        target: (slots, ...); written.
        slot: (rows,), -1 for padding; live ones are distinct, or have the same values.
        values: (rows, ...), dtype of ``target``.
    """
    if not len(slot) or not len(target):
        return
    # Padding repeats what the first live row writes, or without one rewrites what is there: a masked write
    # without a shape that depends on values.
    live = slot >= 0
    first = live.to(torch.int8).argmax(0, keepdim=True)
    model = slot.index_select(0, first)
    there = at_rows(target, model)
    repeated = torch.where(_like(live.index_select(0, first), there), values.index_select(0, first), there)
    index = torch.where(live, slot, model.clamp(min=0)).long()
    target[index] = torch.where(_like(live, values), values, repeated)


def looks_at_values(tensor: Tensor) -> bool:
    """Whether values may be looked at: on a CPU, where that waits for nothing, and if there are any."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def keep_where(out: Tensor | None, y: Tensor, written: Tensor) -> Tensor:
    """``out`` with ``y`` where ``written``, a mask of its first dimensions, is set; ``y`` without ``out``."""
    if out is None:
        return y
    out.copy_(torch.where(_like(written, y), y, out))
    return out


def rows_of_tokens(query_start: Tensor, tokens: int) -> Tensor:
    """(tokens,) int64: the row that owns each; behind the last row's tokens how many rows there are."""
    token = torch.arange(tokens, dtype=query_start.dtype, device=query_start.device)
    return torch.searchsorted(query_start[1:].contiguous(), token, right=True)


def step_that_folds_itself(
    slot: Tensor,
    write_pos: Tensor,
    flush: Tensor,
    length: int,
    slots: int,
    step: Callable[..., Tensor],
    native: Callable[..., Tensor],
    materialize: Callable[..., None],
) -> Tensor:
    """One token per row of a ring whose flush folds that token too, and begins again at 0.

    Rows that do not flush append at ``write_pos``. Of the others the ring is folded in place, without being
    written, and a native step adds the token: the state is rounded to its dtype twice.

    Args:
        slot: (rows,), -1 for padding.
        write_pos: (rows,), tokens in each row's ring.
        flush: (rows,) bool.
        length: Tokens that a ring has room for.
        slots: How many there are.
        step: The op with everything but cursors, window and slots.
        native: The native op with everything but slots.
        materialize: What folds rings, with everything but source, destination, cursors and window.

    Returns:
        (rows, heads, head_dim); zeros for padding.

    Raises:
        ArgumentError: On a CPU, a full ring is not flushed, a slot is beyond the last one, or two rows name
            it. Nothing has been written yet.
    """
    see_slots(slot, slots)
    full = (slot >= 0) & ~flush & (write_pos >= length - 1)
    if looks_at_values(slot) and bool(full.any()):
        row = int(full.nonzero()[0, 0])
        raise ArgumentError(
            f"row {row} has write_pos {int(write_pos[row])} of {length} and does not flush; its next token "
            "would have no room",
            hint=f"flush rows at write_pos {length - 1}, and begin again at 0",
        )
    folds = slot.masked_fill(~flush, -1)
    if length == 1:
        return native(slot_index=folds)
    ring_len = values_of_slots(write_pos, slot, slots)
    # Full rings flush, so that one token less than there is room for is never exceeded.
    ring = {"ring_start": torch.zeros_like(ring_len), "ring_len": ring_len, "window": length - 1}
    y = step(slot_index=slot.masked_fill(flush, -1), **ring)
    materialize(source=folds, destination=folds, **ring)
    return torch.where(_like(flush, y), native(slot_index=folds), y)


def _spare(slot: Tensor, slots: int) -> Tensor:
    return torch.where((slot >= 0) & (slot < slots), slot, slots).long()


def _like(mask: Tensor, values: Tensor) -> Tensor:
    """``mask`` of the first dimensions, with as many dimensions as ``values``."""
    return mask.view(*mask.shape, *[1] * (values.dim() - mask.dim()))
