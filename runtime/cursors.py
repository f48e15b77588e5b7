"""The cursor ops: what moves ``ring_start`` and ``ring_len``, once per step, for all layers."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from . import reference
from .contracts import COMMIT, DRAINED, RESET
from .operators import CursorOperator, late

_commit: Final = CursorOperator(COMMIT, reference.commit, late("launch_commit")).call
_reset: Final = CursorOperator(RESET, reference.reset, late("launch_reset")).call
_drained: Final = CursorOperator(DRAINED, reference.drained, late("launch_drained")).call


def commit(
    accepted: Tensor,
    *,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int = 1,
    capacity: int,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
) -> None:
    """Move the cursors after a step of all layers; the only way back for rejected tokens.

    A row that flushed (``ring_len + num_tokens > window``): ``ring_start += ring_len`` (mod capacity),
    ``ring_len = accepted``. Any other: ``ring_len += accepted``. Padded rows are left alone, and of a packed
    batch so are rows without tokens: those have not flushed either.

    Args:
        accepted: (rows,) int32 or int64, tokens kept, 0 to those of the row: kernels clamp to that. What it
            says of padded rows is not looked at.
        ring_start: (slots,) int32; written.
        ring_len: (slots,) int32; written.
        slot_index: (rows,) int32 or int64, as in the step; no live slot twice.
        window: As in the step.
        num_tokens: Tokens per row that the step was given; the most where ``query_start`` is given.
        capacity: Tokens a ring has room for: dimension 2 of ``ring_x``, or of ``ring_u``.
        query_start: (rows + 1,) int32, as in the step, where rows vary: row r has tokens
            ``query_start[r]`` to ``query_start[r + 1] - 1``.
        null_slot: As in the step.

    Raises:
        ArgumentError: A tensor or number does not fit; on a CPU also where a row keeps fewer than no tokens
            or more than it has, its slot or cursors are out of range, or another row has its slot. Nothing
            has been written then.
    """
    tensors = (accepted, ring_start, ring_len, slot_index, query_start)
    _commit(tensors, (window, num_tokens, capacity), null_slot)


def reset(slots: Tensor, *, ring_start: Tensor, ring_len: Tensor, null_slot: int | None = None) -> None:
    """Empty the rings of slots given to a new sequence; their state is left to the prefill.

    Args:
        slots: (n,) int32 or int64; negative ones and ``null_slot`` are skipped. One that is named twice is
            emptied as if named once.
        ring_start: (slots,) int32; set to 0.
        ring_len: (slots,) int32; set to 0.
        null_slot: Slot to skip.

    Raises:
        ArgumentError: A tensor does not fit; on a CPU also a slot beyond the last one. Nothing has been
            written then.
    """
    _reset((slots, ring_start, ring_len), (), null_slot)


def drained(
    slots: Tensor, *, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int | None = None
) -> None:
    """Move past all ring tokens of slots whose rings have been folded into their states.

    Args:
        slots: (n,) int32 or int64, distinct: twice could move a ring past twice its tokens. Negative ones
            and ``null_slot`` are skipped.
        ring_start: (slots,) int32; moved by ``ring_len`` (mod capacity).
        ring_len: (slots,) int32; set to 0.
        capacity: Tokens a ring has room for: dimension 2 of ``ring_x``, or of ``ring_u``.
        null_slot: Slot to skip.

    Raises:
        ArgumentError: A tensor or number does not fit; on a CPU also a slot or cursor out of range, or a slot
            named twice. Nothing has been written then.
    """
    _drained((slots, ring_start, ring_len), (capacity,), null_slot)
