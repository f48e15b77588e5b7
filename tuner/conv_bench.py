"""The convolution on a device: what a tile must pass before it is timed, and its layers' buffers.

Calls are those of serving: the checks, arguments and launcher of :func:`..runtime.conv.conv_step`, but for
the tile, which is given. They have a bias and SiLU. Rows of several tokens are packed, as drafts are.
"""

from __future__ import annotations

import functools
import statistics

import torch
from torch import Tensor

from ..runtime.contracts import CONV_STEP
from ..runtime.conv import check_conv_step, eager_conv_step
from ..runtime.conv_launch import tiled_launcher
from ..runtime.conv_tiles import ConvSpec, ConvTile
from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.spec import DTYPE_BYTES
from .measure import GRAPH_LAUNCHES, L2_MULTIPLE, Graph
from .records import ConvCell
from .roofs import move_launches

MAX_LAYERS = 4096
"""Layers at most: a row of a split layer touches so little that a graph to exceed the L2 has no end."""
WINDOW = 16
"""Tokens that the ring of the layer behind it holds; or T where that is more."""

_GAP = 32
"""Elements between tokens and between slots that the gate watches; what is aligned stays so."""
_LEAST_ERROR = 3e-6
"""Of fp32, where the order of adding up and the exponential count for more than rounding."""


def gate(spec: ConvSpec, tile: ConvTile, device: torch.device, packed: bool) -> str:
    """Empty if the kernel with ``tile`` does what the eager op does, else what is wrong.

    Outputs are within rounding, appended inputs equal bit by bit, no other byte has changed, and a second
    launch does the same. Rows begin anywhere in their rings, some wrap; two are padded.

    Args:
        spec: What is called.
        tile: Of any kind; one that does not compile raises CompileError.
        device: Where it runs; the CPU in Triton's interpreter.
        packed: Rows have up to T tokens, one has none, and tokens behind the last row's belong to nobody;
            else every row has T. The two are two compilations of the kernel.
    """
    generator = torch.Generator().manual_seed(spec.num_tokens)
    most, rows, slots = spec.num_tokens, 9, 12
    window, channels = max(WINDOW, most), tile.block + 16
    capacity = window + most + spec.width - 1
    activation, stored, weights = (
        TORCH_DTYPES[name] for name in (spec.activation_dtype, spec.ring_dtype, spec.weight_dtype)
    )

    def normal(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def below(end: int, count: int) -> Tensor:
        return torch.randint(0, end, (count,), generator=generator, dtype=torch.int32).to(device)

    slot_index = torch.randperm(slots - 1, generator=generator)[:rows].int().to(device) + 1
    slot_index[2], slot_index[5], null = -1, 0, 0
    count = torch.full((rows,), most, dtype=torch.int32, device=device)
    tail = 0
    if packed:
        count, tail = below(most + 1, rows), 5
        count[3], count[4] = 0, most
    query_start = torch.cat([count.new_zeros(1), count.cumsum(0).int()])
    tokens = int(query_start[-1]) + tail
    x = normal(activation, tokens, channels + _GAP)[:, :channels]
    pool = normal(stored, slots, capacity + 1, channels + _GAP)
    start, length = below(capacity, slots), below(window + 1, slots)
    # Appends that wrap, and taps that do: the inputs before a token at the ring's begin lie at its end.
    start[slot_index[3:5].long()] = capacity - 1
    start[slot_index[6:].long()] = 0
    length[slot_index[6:].long()] = torch.arange(3, dtype=torch.int32, device=device)
    fixed = (x, normal(weights, channels, spec.width), normal(weights, channels))
    untouched = (start, length, slot_index, query_start if packed else None)

    def memory() -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        """What a call writes to, with its gaps, and the call's tensors."""
        held, out = pool.clone(), torch.full((tokens, channels + _GAP), 2.0, dtype=activation, device=device)
        return out, held, (*fixed, held[:, :capacity, :channels], *untouched, out[:, :channels])

    wanted, expected, by_eager = memory()
    eager_conv_step(*by_eager, window, most, True, null)  # type: ignore[call-arg,arg-type]
    given = [tensor for tensor in (*fixed, *untouched) if tensor is not None]
    kept = [tensor.clone() for tensor in given]

    out, ring, by_kernel = memory()
    signature = check_conv_step(CONV_STEP, by_kernel, (window, most, True))
    launcher = tiled_launcher(signature, tile, _index(device))
    launcher.launch(by_kernel, null)
    first = out.clone()
    launcher.launch(by_kernel, null)

    where = "packed rows" if packed else "rows of T tokens"
    if not all(map(_same, kept, given)):
        return f"{where}: an input was written"
    if not _same(ring, expected):
        return f"{where}: {int((ring != expected).sum())} values of the pool of rings differ"
    if not _same(out, first):
        return f"{where}: two launches from the same memory differ"
    zeros = (wanted[:, :channels] == 0).all(1)
    if bool(out[zeros, :channels].any()) or not _same(out[:, channels:], wanted[:, channels:]):
        return f"{where}: tokens of nobody are not zeros, or what lies between outputs was written"
    error = max(torch.finfo(activation).eps, _LEAST_ERROR)
    if not torch.allclose(out.double(), wanted.double(), rtol=error, atol=error):
        worst = float((out.double() - wanted.double()).abs().max())
        return f"{where}: outputs are off by up to {worst:.3g}, beyond rounding ({error:.1g})"
    return ""


def _index(device: torch.device) -> int:
    return -1 if device.index is None else device.index  # of the CPU, in Triton's interpreter


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class ConvStack:
    """Buffers of several layers' convolutions at one shape, and the timing of tiles on them.

    Args:
        cell: What is timed; rows have all their tokens.
        device: CUDA device.
        seed: Of the random inputs.
    """

    def __init__(self, cell: ConvCell, device: torch.device, seed: int = 0) -> None:
        spec, rows, channels = cell.spec, cell.rows, cell.channels
        self.cell, self._index = cell, _index(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        weight_bytes = channels * (spec.width + 1) * DTYPE_BYTES[spec.weight_dtype]
        enough = -(-L2_MULTIPLE * l2_bytes // (cell.read_bytes + cell.written_bytes + weight_bytes))
        self.layers = layers = min(MAX_LAYERS, max(2, enough))
        generator = torch.Generator(device).manual_seed(seed)
        window, tokens = max(WINDOW, spec.num_tokens), rows * spec.num_tokens
        capacity, slots = window + spec.num_tokens + spec.width - 1, rows + 1
        activation, stored, weights = (
            TORCH_DTYPES[name] for name in (spec.activation_dtype, spec.ring_dtype, spec.weight_dtype)
        )

        def normal(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self._out = torch.empty(layers, tokens, channels, dtype=activation, device=device)
        start = torch.randint(0, capacity, (slots,), generator=generator, device=device, dtype=torch.int32)
        length = torch.full_like(start, (window - spec.num_tokens) // 2)
        order = (torch.randperm(rows, generator=generator, device=device) + 1).int()
        packed = spec.num_tokens > 1
        starts = (
            torch.arange(rows + 1, dtype=torch.int32, device=device) * spec.num_tokens if packed else None
        )
        self._tensors: list[tuple[Tensor | None, ...]] = [
            (x, weight, bias, ring, start, length, order, starts, out)
            for x, weight, bias, ring, out in zip(
                normal(activation, layers, tokens, channels).unbind(0),
                normal(weights, layers, channels, spec.width).unbind(0),
                normal(weights, layers, channels).unbind(0),
                normal(stored, layers, slots, capacity, channels).unbind(0),
                self._out.unbind(0),
                strict=True,
            )
        ]
        self._signature = check_conv_step(CONV_STEP, self._tensors[0], (window, spec.num_tokens, True))

    def graph(self, tile: ConvTile) -> Graph:
        """A launch per layer with ``tile``, captured, once it is proven that every output was written.

        Raises:
            CompileError: The kernel does not compile.
            RuntimeError: An output was not.
        """
        launcher = tiled_launcher(self._signature, tile, self._index)
        self._out.fill_(torch.nan)
        calls = [functools.partial(launcher.launch, tensors, -1) for tensors in self._tensors]
        graph = Graph([calls[i % len(calls)] for i in range(max(len(calls), GRAPH_LAUNCHES))])
        if not bool(self._out.isfinite().all()):
            raise RuntimeError(f"tile {tile.key} left outputs unwritten")
        return graph

    def roof_us(self, repeats: int) -> list[float]:
        """Samples, us per layer, of moving the bytes that a launch must move: of the best of a few tiles."""
        sources, targets = (
            list(
                torch.ones(self.layers, -(-count // 4), dtype=torch.int32, device=self._out.device).unbind(0)
            )
            for count in (self.cell.read_bytes, self.cell.written_bytes)
        )
        times = [Graph(calls).time_us(repeats) for calls in move_launches(sources, targets)]
        return min(times, key=statistics.median)
