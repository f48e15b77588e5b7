"""The short convolution in front of a layer, whose rollback is that of the layer: the same cursors.

The raw inputs of a slot lie in a ring under the cursors of its cache group, each at its token's position.
Inputs that a layer has folded away stay where they are, behind ``ring_start``: the convolution reads the
last ``width - 1`` of them there, and rejected ones are overwritten by the next append. So every ring of
the group has room for ``window + num_tokens + width - 1`` tokens: appends then never meet an input that is
still needed, under whatever :func:`.ops.commit` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .checks import (
    CallSignature,
    check_rows,
    check_tensors,
    check_tokens,
    described,
    is_whole,
    refuse_gradients,
    refuse_non_tensors,
)
from .contracts import CONV_SEED, CONV_STEP, Contract
from .conv_tiles import WIDTHS as WIDTHS
from .errors import ArgumentError
from .operators import CursorOperator, StepOperator, cuda_index, late
from .rows import live_cursors, live_rows, new_tokens
from .spec import MAX_WINDOW


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
    does not matter whether a row of the step flushes: :func:`.ops.commit`, once per step and with the same
    ``query_start``, is all there is to rollback. Until then a call may be repeated.

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
            A slot of two live rows, and slots, cursors and ``query_start`` out of range raise it on a CPU,
            before anything is written; on a GPU they are not looked at.
        CompileError: Triton refuses the kernel.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    tensors = (x, weight, bias, ring, ring_start, ring_len, slot_index, query_start, out)
    return _conv_step(tensors, (window, num_tokens, _is_silu(activation)), null_slot)


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
        ArgumentError: A tensor does not fit; on a CPU also a slot or ``ring_start`` out of range, or a slot
            named twice. Nothing has been written then.
    """
    tensors = (history, ring, ring_start, slots)
    if torch.is_grad_enabled():
        refuse_non_tensors(CONV_SEED, tensors)
        refuse_gradients(CONV_SEED, tensors)
    _conv_seed(tensors, (), null_slot)


def warmup_conv(
    channels: int,
    width: int,
    batches: Sequence[int],
    device: torch.device | str = "cuda",
    *,
    num_tokens: int = 1,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    ring_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    has_bias: bool = False,
    activation: Literal["silu"] | None = "silu",
    index_dtype: torch.dtype = torch.int32,
    aligned: bool = True,
) -> int:
    """Compile everything that :func:`conv_step` and :func:`conv_seed` will need, ahead of a capture.

    The cursor ops beside them are compiled by :func:`.ops.warmup`, for packed rows too.

    Args:
        channels: Of the convolution on this GPU.
        width: Inputs that an output is made of, 2 to 4.
        batches: Rows of the captures.
        device: CUDA device.
        num_tokens: As in the step.
        packed: The step is given ``query_start``.
        dtype: Of ``x`` and of a prompt's last inputs.
        ring_dtype: Of the ring; None for ``dtype``.
        weight_dtype: Of weight and bias; None for ``dtype``.
        has_bias: The step is given a bias.
        activation: As in the step.
        index_dtype: Of slot_index and slots.
        aligned: Pointers and strides of x, out, ring and history are multiples of 16 bytes. Call once more
            with False where they are not.

    Returns:
        Number of kernels compiled (or loaded from Triton's cache).

    Raises:
        ArgumentError: No such call of the ops is legal.
        CompileError: A kernel does not compile.
        ToolchainError: There is no CUDA device, no triton or no C compiler.
    """
    for name, value in (("channels", channels), ("width", width), ("num_tokens", num_tokens)):
        _count(name, value)
    capacity = 2 * num_tokens + width - 1  # of the smallest window; kernels do not know it

    def like(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weights = weight_dtype or dtype
    cursor, ring = like(torch.int32, 1), like(ring_dtype or dtype, 1, capacity, channels)
    weight, bias = like(weights, channels, width), like(weights, channels) if has_bias else None
    steps, seeds = [], []
    for rows in batches:
        _count("a batch", rows)
        slots, query_start = like(index_dtype, rows), like(torch.int32, rows + 1) if packed else None
        x, history = like(dtype, rows * num_tokens, channels), like(dtype, rows, width - 1, channels)
        tensors = (x, weight, bias, ring, cursor, cursor, slots, query_start, None)
        scalars = (num_tokens, num_tokens, _is_silu(activation))
        steps.append(check_conv_step(CONV_STEP, tensors, scalars))
        seeds.append((history, ring, cursor, slots))
        check_conv_seed(CONV_SEED, seeds[-1], ())
    compiled: int = _compile_ahead(steps, seeds, aligned, cuda_index(device))
    return compiled


# ---- checks, from metadata alone: they serve symbolic shapes too ----


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvSignature(CallSignature):
    """A checked call of :func:`conv_step`."""

    sizes: dict[str, int]
    """By the dimensions of the contract."""
    num_tokens: int
    silu: bool


def check_conv_step(
    contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any]
) -> ConvSignature:
    """Full check of a step, with arguments in the contract's order; see :func:`conv_step`.

    Raises:
        ArgumentError: A tensor or number does not fit.
    """
    op, (window, num_tokens, silu) = contract.name, scalars
    sizes = check_tensors(contract, tensors, scalars)
    rows, capacity, width = (sizes[dim] for dim in ("rows", "capacity", "width"))
    _check_channels(contract, sizes)
    if width not in WIDTHS:
        raise ArgumentError(
            f"{op}: weight has width {width} (its dimension 1); expected {WIDTHS[0]} to {WIDTHS[-1]}. A "
            "weight of torch's conv1d, (channels, 1, width), loses its dimension 1"
        )
    check_rows(contract, rows)
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
    check_tokens(contract, tensors, sizes, num_tokens)
    return ConvSignature(
        **described(contract, tensors), rows=rows, sizes=sizes, num_tokens=num_tokens, silu=silu
    )


def check_conv_seed(contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any]) -> None:
    """Full check of a seed, with arguments in the contract's order; see :func:`conv_seed`.

    Raises:
        ArgumentError: A tensor does not fit.
    """
    op, sizes = contract.name, check_tensors(contract, tensors, scalars)
    length, capacity = sizes["width - 1"], sizes["capacity"]
    if length + 1 not in WIDTHS:
        raise ArgumentError(
            f"{op}: history has {length} inputs a row (its dimension 1); expected width - 1, "
            f"{WIDTHS[0] - 1} to {WIDTHS[-1] - 1}"
        )
    _check_channels(contract, sizes)
    check_rows(contract, sizes["rows"])
    if capacity < length + 2:
        raise ArgumentError(
            f"{op}: ring has room for {capacity} tokens (its dimension 1), too few for any window: it needs "
            f"window + num_tokens + width - 1, at least {length + 2}"
        )


def _check_channels(contract: Contract, sizes: dict[str, int]) -> None:
    if sizes["channels"] == 0:
        position, dimension = contract.sizes_at["channels"]
        name = contract.names[position]
        raise ArgumentError(f"{contract.name}: {name} has no channels (its dimension {dimension})")


def _is_silu(activation: object) -> bool:
    if activation not in ("silu", None):
        raise ArgumentError(f"conv_step: activation is {activation!r}; expected 'silu' or None")
    return activation == "silu"


def _count(name: str, value: object) -> None:
    if not isinstance(value, int) or not is_whole(value) or value < 1:
        raise ArgumentError(f"warmup_conv: {name} is {value!r}; expected a whole number of at least 1")


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
    new = new_tokens(query_start, slot_index, num_tokens, len(x), null_slot, len(ring))
    capacity, width = ring.shape[1], weight.shape[1]
    start, length = live_cursors(new.row, new.slot, ring_start, ring_len, window, capacity)
    end = start.long() + length

    # (rows, width - 1 + num_tokens, channels): the inputs before the new ones, then those.
    back = torch.arange(1 - width, 0, device=x.device)
    old = ring[new.slot[:, None], (end[:, None] + back) % capacity].float()
    inputs = torch.cat([old, new.of(x).float()], 1)

    total = torch.zeros_like(inputs[:, width - 1 :])
    if bias is not None:
        total += bias.float()
    for tap in range(width):
        total = total + weight[:, tap].float() * inputs[:, tap : tap + num_tokens]
    if silu:
        total = total / (1.0 + torch.exp(-total))
    new.put(out, total)
    ring[new.behind(end, capacity)] = new.flat(new.of(x)).to(ring.dtype)


def eager_conv_seed(history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int) -> None:
    """:func:`conv_seed` on any device."""
    row, slot = live_rows(slots, null_slot, len(ring), "slots")
    length, capacity = history.shape[1], ring.shape[1]
    start, _ = live_cursors(row, slot, ring_start, torch.zeros_like(ring_start), 0, capacity)
    back = torch.arange(-length, 0, device=ring.device)
    ring[slot[:, None], (start.long()[:, None] + back) % capacity] = history[row].to(ring.dtype)


_conv_step: Final = StepOperator(
    CONV_STEP, eager_conv_step, late("prepare", "conv_launch"), check_conv_step
).call
_conv_seed: Final = CursorOperator(
    CONV_SEED, eager_conv_seed, late("launch_conv_seed", "conv_launch"), check_conv_seed
).call
_compile_ahead: Final = late("compile_ahead", "conv_launch")
