# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Roof kernels: what the memory allows for the same bytes, measured beside the real kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def read_kernel(source, sink, elements, BLOCK: tl.constexpr, REPEATS: tl.constexpr):
    """Read every element once; the sum keeps the loads alive and is almost never stored."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for repeat in tl.static_range(REPEATS):
        offsets = (program * REPEATS + repeat) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(source + offsets, mask=offsets < elements, other=0.0)
    checksum = tl.sum(total, 0)
    if checksum == 123456.789:
        tl.store(sink, checksum)


@triton.jit
def scale_kernel(target, elements, BLOCK: tl.constexpr):
    """Read, scale and write back every element once."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < elements
    tl.store(target + offsets, tl.load(target + offsets, mask=mask) * 0.999, mask=mask)


@triton.jit
def move_kernel(source, target, read, written, BLOCK: tl.constexpr):
    """Read so many elements and write so many others, each once."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + offsets, mask=offsets < read, other=0)
    tl.store(target + offsets, values, mask=offsets < written)


_READ_TILES = ((1024, 1, 4), (2048, 1, 4), (4096, 1, 8), (2048, 4, 4), (512, 1, 1), (1024, 1, 2))
_SCALE_TILES = ((1024, 4), (2048, 4), (4096, 8), (512, 1), (1024, 2))


def read_launches(states: list[torch.Tensor]) -> list[list[Callable[[], object]]]:
    """Launches of the read roof over ``states`` (viewed as fp32), one list per tile to try."""
    flat = [s.reshape(-1).view(torch.float32) for s in states]
    sink = torch.zeros(1, device=flat[0].device)
    return [[_reader(f, sink, block, repeats, warps) for f in flat] for block, repeats, warps in _READ_TILES]


def scale_launches(states: list[torch.Tensor]) -> list[list[Callable[[], object]]]:
    """Launches of the in-place scaling roof over ``states``, one list per tile to try."""
    flat = [s.reshape(-1).view(torch.float32) for s in states]
    return [[_scaler(f, block, warps) for f in flat] for block, warps in _SCALE_TILES]


def move_launches(
    sources: list[torch.Tensor], targets: list[torch.Tensor]
) -> list[list[Callable[[], object]]]:
    """Launches of the roof that reads a source and writes a target each, one list per tile to try.

    All are flat, int32, and as long as what is read and written.
    """
    pairs = list(zip(sources, targets, strict=True))
    return [[_mover(*pair, block, warps) for pair in pairs] for block, warps in _SCALE_TILES]


def _reader(
    flat: torch.Tensor, sink: torch.Tensor, block: int, repeats: int, warps: int
) -> Callable[[], object]:
    grid = (triton.cdiv(flat.numel(), block * repeats),)
    return lambda: read_kernel[grid](flat, sink, flat.numel(), block, repeats, num_warps=warps)


def _scaler(flat: torch.Tensor, block: int, warps: int) -> Callable[[], object]:
    grid = (triton.cdiv(flat.numel(), block),)
    return lambda: scale_kernel[grid](flat, flat.numel(), block, num_warps=warps)


def _mover(source: torch.Tensor, target: torch.Tensor, block: int, warps: int) -> Callable[[], object]:
    read, written = source.numel(), target.numel()
    grid = (triton.cdiv(max(read, written), block),)
    return lambda: move_kernel[grid](source, target, read, written, block, num_warps=warps)
