"""vLLM's cursor functions of speculative decoding: see ``docs/compat.md`` for what maps to what.

Names, argument lists and meanings are those of the research fork of vLLM that has them
(Johnny-Liou/ReplaySSM), in ``selective_state_update_replayssm_spec.py`` and ``gdn_replayssm_spec_decode.py``.
Cursors are those of :func:`..cursors.commit` with a flag of each slot beside them, which says whether the
next step folds.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ..errors import ArgumentError
from .adapt import at_rows, beyond_null, looks_at_values, put_rows, see_slots, unless_null

NULL_BLOCK_ID: Final = 0
"""The block that padded rows name."""


def commit_replayssm_spec(
    write_pos: Tensor,
    post_conv_state_pos: Tensor,
    is_flush: Tensor,
    num_accepted_tokens: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    cache_buf_len: int | None = None,
    null_block_id: int = NULL_BLOCK_ID,
) -> None:
    """Move the cursors after a step of all layers, and set the flags of the next.

    A row that flushed moves its start past what it folded and is left with the accepted tokens; any other
    gains them. A row without accepted tokens keeps its cursors, and may name the slot of another row.

    Args:
        write_pos: (slots,) int32, tokens in each ring; written.
        post_conv_state_pos: (slots,) int32, where each ring's oldest token is; written.
        is_flush: (slots,) int8, whether the next step folds the ring; written: where
            ``write_pos + 2 max_spec_len`` is more than ``max_cache_len``.
        num_accepted_tokens: (rows or more,), tokens kept.
        state_batch_indices: (rows,), slots; negative ones are skipped.
        max_cache_len: History and a step's tokens: the window plus ``max_spec_len``.
        max_spec_len: Most tokens of a row in a step.
        cache_buf_len: Tokens a ring has room for; the next power of 2 of ``max_cache_len`` if left out.
        null_block_id: Slot to skip.

    Raises:
        ArgumentError: On a CPU, a slot is beyond the last one, or two rows that move its cursors name it.
            Nothing has been written.
    """
    slot = unless_null(state_batch_indices, null_block_id)
    _commit(
        write_pos, post_conv_state_pos, is_flush, num_accepted_tokens, slot, max_cache_len, max_spec_len,
        cache_buf_len, keep_without_tokens=True,
    )  # fmt: skip


def reset_replayssm_spec_cursors(
    write_pos: Tensor,
    post_conv_state_pos: Tensor,
    is_flush: Tensor,
    first_decode_mask: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    null_block_id: int = NULL_BLOCK_ID,
) -> None:
    """Empty the rings of rows that decode for the first time; arguments as in :func:`commit_replayssm_spec`.

    Args:
        write_pos: Set to 0.
        post_conv_state_pos: Set to 0.
        is_flush: Set as by a commit.
        first_decode_mask: (rows or more,), not 0 for the rows to reset; two may have one slot.
        state_batch_indices: See :func:`commit_replayssm_spec`.
        max_cache_len: See :func:`commit_replayssm_spec`.
        max_spec_len: See :func:`commit_replayssm_spec`.
        null_block_id: Slot to skip.

    Raises:
        ArgumentError: On a CPU, a slot is beyond the last one. Nothing has been written.
    """
    slot = unless_null(state_batch_indices, null_block_id)
    _reset(write_pos, post_conv_state_pos, is_flush, first_decode_mask, slot, max_cache_len, max_spec_len)


def commit_gdn_replayssm_spec(
    write_pos: Tensor,
    cache_base: Tensor,
    is_flush: Tensor,
    num_accepted: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    cache_buf_len: int | None = None,
    null_block_id: int = 0,
) -> None:
    """What :func:`commit_replayssm_spec` does, for Gated DeltaNet.

    Skipped are slots up to ``null_block_id``, and a row that flushed without keeping a token is left with
    an empty ring.
    """
    slot = beyond_null(state_batch_indices, null_block_id)
    _commit(
        write_pos, cache_base, is_flush, num_accepted, slot, max_cache_len, max_spec_len, cache_buf_len,
        keep_without_tokens=False,
    )  # fmt: skip


def reset_gdn_replayssm_spec_cursors(
    write_pos: Tensor,
    cache_base: Tensor,
    is_flush: Tensor,
    do_reset: Tensor,
    state_batch_indices: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    null_block_id: int = 0,
) -> None:
    """What :func:`reset_replayssm_spec_cursors` does, for Gated DeltaNet.

    Skipped are slots up to ``null_block_id``.
    """
    slot = beyond_null(state_batch_indices, null_block_id)
    _reset(write_pos, cache_base, is_flush, do_reset, slot, max_cache_len, max_spec_len)


def expect_flags(
    op: str,
    slot: Tensor,
    write_pos: Tensor,
    is_flush: Tensor,
    query_start: Tensor,
    max_cache_len: int,
    max_spec_len: int,
) -> None:
    """On a CPU, see that rows flush when their cursors say so, which is what the ops go by.

    Args:
        op: The adapter, in messages.
        slot: (rows,), -1 for padding.
        write_pos: (slots,).
        is_flush: (slots,).
        query_start: (rows + 1,); rows without tokens are not looked at.
        max_cache_len: As in a commit.
        max_spec_len: As in a commit.

    Raises:
        ArgumentError: The flag of a slot is not that of its cursors.
    """
    if not looks_at_values(slot):
        return
    live = (slot >= 0) & (slot < len(write_pos)) & (query_start.diff() > 0)
    length, flag = at_rows(write_pos, slot), at_rows(is_flush, slot) != 0
    wrong = live & (flag != (length + 2 * max_spec_len > max_cache_len))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ArgumentError(
            f"{op}: is_flush of slot {int(slot[row])} is {int(flag[row])} with write_pos {int(length[row])}, "
            f"max_spec_len {max_spec_len} and max_cache_len {max_cache_len}",
            hint="leave flags to commit and reset: set where write_pos + 2 max_spec_len > max_cache_len",
        )


def _commit(
    write_pos: Tensor,
    start: Tensor,
    is_flush: Tensor,
    accepted: Tensor,
    slot: Tensor,
    max_cache_len: int,
    max_spec_len: int,
    capacity: int | None,
    *,
    keep_without_tokens: bool,
) -> None:
    capacity = capacity or 1 << (max_cache_len - 1).bit_length()
    kept = accepted[: len(slot)].to(write_pos.dtype)
    length, first, flush = (at_rows(cursor, slot) for cursor in (write_pos, start, is_flush))
    flushed = flush != 0
    after = torch.where(flushed, kept, length + kept)
    if keep_without_tokens:
        after = torch.where(kept > 0, after, length)
    flag = (after + 2 * max_spec_len > max_cache_len).to(is_flush.dtype)
    # A row whose cursors stay leaves them to another that has its slot, as it does in the step.
    stays = (kept == 0) & (after == length)
    idle, moved = slot.masked_fill(~stays, -1), slot.masked_fill(stays, -1)
    see_slots(slot, len(write_pos), distinct=False)
    see_slots(moved, len(write_pos))
    put_rows(is_flush, idle, flag)
    put_rows(start, moved, torch.where(flushed & (kept > 0), (first + length) % capacity, first))
    put_rows(write_pos, moved, after)
    put_rows(is_flush, moved, flag)


def _reset(
    write_pos: Tensor,
    start: Tensor,
    is_flush: Tensor,
    chosen: Tensor,
    slot: Tensor,
    max_cache_len: int,
    max_spec_len: int,
) -> None:
    slot = torch.where(chosen[: len(slot)] != 0, slot, -1)
    see_slots(slot, len(write_pos), distinct=False)
    for cursor, value in ((write_pos, 0), (start, 0), (is_flush, int(2 * max_spec_len > max_cache_len))):
        put_rows(cursor, slot, torch.full_like(slot, value, dtype=cursor.dtype))
