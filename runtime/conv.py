"""The short convolution in front of a layer, whose rollback is that of the layer: the same cursors.

The raw inputs of a slot lie in a ring under the cursors of its cache group, each at its token's position.
Inputs that a layer has folded away stay where they are, behind ``ring_start``: the convolution reads the
last ``width - 1`` of them there, and rejected ones are overwritten by the next append. So every ring of
the group has room for ``window + num_tokens + width - 1`` tokens: appends then never meet an input that is
still needed, under whatever :func:`.ops.commit` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from . import checks, ops, signatures
from .errors import ArgumentError
from .reference import live_cursors, live_rows
from .spec import MAX_WINDOW

WIDTHS: Final = (2, 3, 4)
"""Inputs that an output is made of, itself included."""

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_INDICES: Final = (torch.int32, torch.int64)


def conv_step(
    x: Tensor,
    weight: Tensor,
    *,
    ring: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = "silu",
    num_tokens: int = 1,
    query_start: Tensor | None = None,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The causal convolution of each channel over a sequence's last inputs, for its new tokens.

    ``out_i = act(bias + sum_w weight[:, w] input(i - (width - 1) + w))`` in fp32, the oldest input first;
    ``silu(y) = y / (1 + exp(-y))``. New inputs are taken from ``x``, earlier ones from the ring, where the
    new ones are appended raw at ``ring_start + ring_len`` (mod capacity). Cursors are only read, and it
    does not matter whether a row of the step flushes: :func:`.ops.commit`, once per step, is all there is
    to rollback. Until then a call may be repeated.

    All rings under one pair of cursors have the same capacity. A new sequence needs :func:`conv_seed`.
    The innermost dimension of every tensor is contiguous, other strides are free. Padded rows write
    zeros to their output and touch nothing else; so do rows without tokens, and tokens beyond the last
    row's get zeros and are not read. No gradient: see :mod:`.ops`.

    Args:
        x: (tokens, channels), fp32, bf16 or fp16: the activation dtype. Row r owns tokens
            ``r num_tokens`` to ``(r + 1) num_tokens - 1``, or those that ``query_start`` gives it.
        weight: (channels, width), width 2 to 4, activation dtype or fp32; the last column meets the
            token itself.
        ring: (slots, capacity, channels), activation dtype or fp32: raw inputs; appended to.
        ring_start: (slots,) int32, position of each slot's oldest token in the layer's ring.
        ring_len: (slots,) int32, tokens in the layer's ring, at most ``window``.
        slot_index: (rows,) int32 or int64, distinct; negative or ``null_slot``: the row is padding.
        window: Of the cache group, 1 to 64; capacity is at least window + num_tokens + width - 1.
        bias: (channels,), activation dtype or fp32.
        activation: ``silu`` or None.
        num_tokens: Tokens of a row, at most ``window``; the most where ``query_start`` is given.
        query_start: (rows + 1,) int32: row r owns tokens ``query_start[r]`` to
            ``query_start[r + 1] - 1``, none to ``num_tokens`` of them. The first entry is 0.
        null_slot: Slot that marks padding besides negative ones.
        out: (tokens, channels), activation dtype, memory of its own; None allocates it. An overlap with
            ``x`` or the ring is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor or number does not fit; the message says which, where and what to do.
            Slots, cursors and ``query_start`` out of range raise it on a CPU, before anything is written;
            on a GPU they are not looked at.
        CompileError: Triton refuses the kernel.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    null = ops._null(null_slot)
    if activation not in ("silu", None):
        raise ArgumentError(f"conv_step: activation is {activation!r}; expected 'silu' or None")
    _refuse_non_tensors(x, weight, bias, ring, ring_start, ring_len, slot_index, query_start, out)
    if torch.is_grad_enabled():
        ops._refuse_grad(x=x, weight=weight, bias=bias, ring=ring, out=out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run = _step_operator if ops._goes_direct(x, ring) else _STEP
    run(
        x, weight, bias, ring, ring_start, ring_len, slot_index, query_start, out, window, num_tokens,
        activation == "silu", null,
    )  # fmt: skip
    return out


def conv_seed(
    history: Tensor, *, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int | None = None
) -> None:
    """Write the last inputs of a prompt behind ``ring_start``, where :func:`conv_step` looks for them.

    Call it after the cursor op that made the slots' rings empty: :func:`.ops.reset` for a new sequence,
    :func:`.ops.drained` for a further chunk of a prefill. With tokens still in the ring the inputs would
    come to lie before those, not before the next ones.

    Args:
        history: (rows, width - 1, channels), dtype of the ring (or any that an fp32 ring holds), oldest
            first; zeros in front where the prompt is shorter.
        ring: As in :func:`conv_step`; written.
        ring_start: As in :func:`conv_step`.
        slots: (rows,) int32 or int64, distinct; negative ones and ``null_slot`` are skipped.
        null_slot: Slot to skip.

    Raises:
        ArgumentError: A tensor does not fit.
    """
    null = ops._null(null_slot)
    checks.refuse_non_tensors("conv_seed", history=history, ring=ring, ring_start=ring_start, slots=slots)
    if torch.is_grad_enabled():
        ops._refuse_grad(history=history, ring=ring)
    run = _seed_operator if ops._goes_direct(history, ring) else _SEED
    run(history, ring, ring_start, slots, null)


# ---- checks, from metadata alone: they serve symbolic shapes too ----


@dataclass(frozen=True, eq=False)
class Convolution:
    """A checked call of :func:`conv_step`."""

    out_bytes: int
    """From the first to past the last byte of ``out``."""
    apart_bytes: tuple[int, int]
    """The same of ``x`` and of the ring."""
    launcher: Any = None
    """Set by :mod:`.conv_launch` at the first launch: what need not be worked out again."""


def check_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    window: int,
    num_tokens: int,
) -> Convolution:
    """Full check of a step; see :func:`conv_step` for what is asked.

    Raises:
        ArgumentError: A tensor or number does not fit.
    """
    op = "conv_step"
    _refuse_non_tensors(x, weight, bias, ring, ring_start, ring_len, slot_index, query_start, out)
    checks._rank(op, "x", x, ("tokens", "channels"))
    checks._rank(op, "weight", weight, ("channels", "width"))
    checks._rank(op, "ring", ring, ("slots", "capacity", "channels"))
    checks._rank(op, "slot_index", slot_index, ("rows",))
    tokens, channels = x.shape
    rows, (slots, capacity), width = slot_index.shape[0], ring.shape[:2], weight.shape[1]
    if channels == 0:
        raise ArgumentError(f"{op}: x has no channels (its dimension 1)")
    if width not in WIDTHS:
        raise ArgumentError(
            f"{op}: weight has width {width} (its dimension 1); expected {WIDTHS[0]} to {WIDTHS[-1]}. A "
            "weight of torch's conv1d, (channels, 1, width), loses its dimension 1"
        )
    if rows > checks.MAX_ROWS:
        raise ArgumentError(
            f"{op}: slot_index has {rows} rows, a launch takes at most {checks.MAX_ROWS}; split the batch"
        )
    checks._whole(op, "window", window)
    checks._whole(op, "num_tokens", num_tokens)
    if not 1 <= num_tokens <= window <= MAX_WINDOW:
        raise ArgumentError(
            f"{op}: num_tokens is {num_tokens} and window {window}; a window is 1 to {MAX_WINDOW} tokens "
            "and a row has 1 to window tokens"
        )
    least = window + num_tokens + width - 1
    if capacity < least:
        raise ArgumentError(
            f"{op}: ring has room for {capacity} tokens (its dimension 1), too few for window {window}: it "
            f"needs window + num_tokens + width - 1 = {window} + {num_tokens} + {width - 1} = {least}; "
            "allocate longer rings, all of a cache group alike"
        )
    if query_start is None:
        if tokens != rows * num_tokens:
            raise ArgumentError(
                f"{op}: x has {tokens} tokens (its dimension 0); expected {rows} rows of {num_tokens}, "
                f"{rows * num_tokens}; pass query_start where rows vary"
            )
    else:
        checks._tensor(op, "query_start", query_start, (rows + 1,), (torch.int32,), x)
    either = tuple(dict.fromkeys((x.dtype, torch.float32)))
    checks._tensor(op, "x", x, (tokens, channels), _FLOATS, x)
    checks._tensor(op, "weight", weight, (channels, width), either, x)
    if bias is not None:
        checks._tensor(op, "bias", bias, (channels,), either, x)
    checks._tensor(op, "ring", ring, (slots, capacity, channels), either, x, True)
    checks._tensor(op, "ring_start", ring_start, (slots,), (torch.int32,), x)
    checks._tensor(op, "ring_len", ring_len, (slots,), (torch.int32,), x)
    checks._tensor(op, "slot_index", slot_index, (rows,), _INDICES, x)
    checks._tensor(op, "out", out, (tokens, channels), (x.dtype,), x, True)
    return Convolution(checks._extent(out), (checks._extent(x), checks._extent(ring)))


def check_conv_seed(history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor) -> None:
    """Full check of :func:`conv_seed`.

    Raises:
        ArgumentError: A tensor does not fit.
    """
    op = "conv_seed"
    checks._rank(op, "history", history, ("rows", "width - 1", "channels"))
    checks._rank(op, "ring", ring, ("slots", "capacity", "channels"))
    rows, length, channels = history.shape
    room, capacity = ring.shape[:2]
    if length + 1 not in WIDTHS:
        raise ArgumentError(
            f"{op}: history has {length} inputs a row (its dimension 1); expected width - 1, "
            f"{WIDTHS[0] - 1} to {WIDTHS[-1] - 1}"
        )
    if channels == 0:
        raise ArgumentError(f"{op}: history has no channels (its dimension 2)")
    if rows > checks.MAX_ROWS:
        raise ArgumentError(
            f"{op}: history has {rows} rows, a launch takes at most {checks.MAX_ROWS}; split the batch"
        )
    if capacity < length + 2:
        raise ArgumentError(
            f"{op}: ring has room for {capacity} tokens (its dimension 1), too few for any window: it needs "
            f"window + num_tokens + width - 1, at least {length + 2}"
        )
    checks._tensor(op, "ring", ring, (room, capacity, channels), _FLOATS, history, True)
    held = _FLOATS if ring.dtype == torch.float32 else (ring.dtype,)
    checks._tensor(op, "history", history, (rows, length, channels), held, history)
    checks._tensor(op, "ring_start", ring_start, (room,), (torch.int32,), history)
    checks._tensor(op, "slots", slots, (rows,), _INDICES, history)


def _refuse_non_tensors(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    out: Tensor | None,
) -> None:
    optional = {"bias": bias, "query_start": query_start, "out": out}
    checks.refuse_non_tensors(
        "conv_step", x=x, weight=weight, ring=ring, ring_start=ring_start, ring_len=ring_len,
        slot_index=slot_index, **{name: value for name, value in optional.items() if value is not None},
    )  # fmt: skip


def _refuse_overlap(out: Tensor, x: Tensor, ring: Tensor, call: Convolution) -> None:
    begin = out.data_ptr()
    for name, other, size in zip(("x", "ring"), (x, ring), call.apart_bytes, strict=True):
        if (at := other.data_ptr()) < begin + call.out_bytes and begin < at + size:
            raise ArgumentError(
                f"conv_step: out overlaps the memory of {name}, which other programs of the launch may still "
                "have to read or write; give out memory of its own, or leave it out"
            )


# Calls met before, of this record; guards take tensors only, and each but once.
_calls: Any = signatures._Signatures()
_NO_BIAS, _NO_QUERY = torch.empty(0), torch.empty(0)


def _checked(*arguments: Any) -> Convolution:
    """As :func:`check_conv_step`, in full the first time alone."""
    *tensors, window, num_tokens, silu = arguments
    x, bias, query_start = tensors[0], tensors[2], tensors[7]
    key = x.shape, window, type(window), num_tokens, type(num_tokens), silu  # 4.0 is equal to 4
    tensors[2] = _NO_BIAS if bias is None else bias
    tensors[7] = _NO_QUERY if query_start is None else query_start
    call: Convolution | None = _calls.find(key, tuple(tensors))
    if call is None:
        call = check_conv_step(*arguments[:-1])
        _calls.add(key, tuple(tensors), call)
    return call


# ---- plain torch: the reference, and what serves CPUs ----


def eager_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    window: int,
    num_tokens: int,
    silu: bool,
    null_slot: int,
) -> None:
    """:func:`conv_step` on any device; arguments in the order of the operator's schema."""
    begin, count = _owned(query_start, len(slot_index), len(x), num_tokens, x.device)
    row, slot = live_rows(torch.where(count > 0, slot_index, -1), null_slot, len(ring))
    capacity, width = ring.shape[1], weight.shape[1]
    start, length = live_cursors(row, slot, ring_start, ring_len, window, capacity)
    write = (start.long() + length)[:, None]

    # (rows, width - 1 + num_tokens, channels): the inputs before the new ones, then those.
    new = torch.arange(num_tokens, device=x.device)
    mine = new < count[row, None]
    token = torch.where(mine, begin[row, None] + new, 0)
    back = torch.arange(1 - width, 0, device=x.device)
    old = ring[slot[:, None], (write + back) % capacity].float()
    inputs = torch.cat([old, torch.where(mine[..., None], x[token].float(), 0.0)], 1)

    total = torch.zeros_like(inputs[:, width - 1 :])
    if bias is not None:
        total += bias.float()
    for tap in range(width):
        total = total + weight[:, tap].float() * inputs[:, tap : tap + num_tokens]
    if silu:
        total = total / (1.0 + torch.exp(-total))
    out.zero_()
    out[token[mine]] = total[mine].to(out.dtype)
    where = slot[:, None].expand_as(mine)[mine], ((write + new) % capacity)[mine]
    ring[where] = x[token[mine]].to(ring.dtype)


def _owned(
    query_start: Tensor | None, rows: int, tokens: int, num_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """First token and number of tokens of each row, int64.

    Raises:
        ArgumentError: The entries are no packing of rows. Nothing has been written yet.
    """
    if query_start is None:
        begin = torch.arange(rows, device=device) * num_tokens
        return begin, torch.full_like(begin, num_tokens)
    bounds = query_start.long()
    count = bounds.diff()
    bad = ((count < 0) | (count > num_tokens)).nonzero()[:, 0]
    if int(bounds[0]) != 0 or int(bounds[-1]) > tokens or len(bad):
        row = int(bad[0]) if len(bad) else 0
        what = (
            f"row {row} is given {int(count[row])} tokens"
            if len(bad)
            else f"query_start begins at {int(bounds[0])} and ends at {int(bounds[-1])}"
        )
        raise ArgumentError(
            f"conv_step: {what}, of {tokens} tokens in x",
            hint=f"query_start goes from 0 to at most {tokens} in steps of 0 to num_tokens = {num_tokens}",
        )
    return bounds[:-1], count


def eager_conv_seed(history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int) -> None:
    """:func:`conv_seed` on any device."""
    row, slot = live_rows(slots, null_slot, len(ring))
    length, capacity = history.shape[1], ring.shape[1]
    start, _ = live_cursors(row, slot, ring_start, torch.zeros_like(ring_start), 0, capacity)
    back = torch.arange(-length, 0, device=ring.device)
    ring[slot[:, None], (start.long()[:, None] + back) % capacity] = history[row].to(ring.dtype)


# ---- the operators; what the dispatcher calls checks for itself ----

_launch_conv_step = ops._late("launch_conv_step", "conv_launch")
_launch_conv_seed = ops._late("launch_conv_seed", "conv_launch")


def _step_operator(*arguments: Any) -> None:
    call = _checked(*arguments[:-1])
    x, ring, slot_index, out = (arguments[i] for i in (0, 3, 6, 8))
    _refuse_overlap(out, x, ring, call)
    if not len(x) or not len(slot_index):
        out.zero_()
    elif x.is_cuda:
        _launch_conv_step(*arguments, call)
    else:
        eager_conv_step(*arguments)


def _seed_operator(history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int) -> None:
    check_conv_seed(history, ring, ring_start, slots)
    if len(slots):
        run = _launch_conv_seed if history.is_cuda else eager_conv_seed
        run(history, ring, ring_start, slots, null_slot)


def _fake_step(*arguments: Any) -> None:
    check_conv_step(*arguments[:11])


def _fake_seed(history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int) -> None:
    check_conv_seed(history, ring, ring_start, slots)


_STEP = ops._register(
    "conv_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) ring, Tensor ring_start, Tensor ring_len, "
    "Tensor slot_index, Tensor? query_start, Tensor(b!) out, int window, int num_tokens, bool silu, "
    "int null_slot) -> ()",
    _step_operator,
    _fake_step,
)
_SEED = ops._register(
    "conv_seed(Tensor history, Tensor(a!) ring, Tensor ring_start, Tensor slots, int null_slot) -> ()",
    _seed_operator,
    _fake_seed,
)
