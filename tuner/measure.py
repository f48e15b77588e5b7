"""The measurement protocol: cold caches, distinct layers, one CUDA graph, production launches.

A :class:`LayerStack` holds, for one spec and effective batch, as many layers' buffers as it takes to
exceed the L2 several times over, as a model's layers do when they follow each other. A launch per
layer is captured into one CUDA graph; the time of a launch is the replay's time divided by the
number of layers.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..runtime.abi import tensor_arguments
from ..runtime.compiled import (
    CompiledPlan,
    tensor_strides,
)
from ..runtime.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ..runtime.plan import Plan, Structure
from ..runtime.spec import Spec
from . import roofs

MODES = ("nonflush", "flush", "mix", "native")
L2_MULTIPLE = 5
"""State bytes of all layers together, in units of the GPU's L2."""
GRAPH_LAUNCHES = 8
"""Launches of a graph at least (layers repeat): a replay's own cost must vanish in its time."""

PlanCompiler = Callable[[Spec, Plan, tuple[str, ...]], CompiledPlan]
"""Compiles a plan for tensors of the given dtypes, or returns it from a cache."""


@dataclass(frozen=True)
class Shape:
    """How an effective batch is laid out: sequences x heads of this GPU."""

    rows: int
    heads: int

    @property
    def effective_batch(self) -> int:
        """Sequences x heads."""
        return self.rows * self.heads


def shape_for(spec: Spec, effective_batch: int, groups: int = 8) -> Shape:
    """Layout of about ``effective_batch`` heads: whole groups first, then sequences.

    Up to ``groups`` groups a single sequence grows; beyond, sequences are added.
    """
    per_group = spec.heads_per_group
    heads = per_group * max(1, min(groups, round(effective_batch / per_group)))
    return Shape(max(1, round(effective_batch / heads)), heads)


class LayerStack:
    """Buffers of several layers of one spec at one effective batch, and the timing of plans on them.

    Args:
        spec: A ``step`` spec; its native spec is timed on the same buffers.
        shape: Rows and heads.
        device: CUDA device.
        seed: Of the random inputs.
    """

    def __init__(self, spec: Spec, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.spec, self.shape, self.device = spec, shape, device
        properties = torch.cuda.get_device_properties(device)
        state_bytes = spec.state_bytes(shape.effective_batch)
        self.layers = max(2, -(-L2_MULTIPLE * properties.L2_cache_size // state_bytes))
        self._generator = torch.Generator(device).manual_seed(seed)
        rows, heads, layers = shape.rows, shape.heads, self.layers
        groups = heads // spec.heads_per_group
        slots = rows + 1
        capacity = spec.window + spec.num_tokens
        activation, ring = TORCH_DTYPES[spec.activation_dtype], TORCH_DTYPES[spec.ring_dtype]
        p, n = spec.head_dim, spec.state_size
        self._tensors: dict[str, torch.Tensor] = {
            "state": self._normal(layers, slots, heads, p, n, dtype=TORCH_DTYPES[spec.state_dtype]),
            "ring_x": self._normal(layers, slots, heads, capacity, p, dtype=ring),
            "ring_b": self._normal(layers, slots, groups, capacity, n, dtype=ring),
            "ring_decay": self._uniform(layers, slots, heads, capacity) * 0.1 + 0.001,
            "x": self._normal(layers, rows, heads, p, dtype=activation),
            "dt": self._normal(layers, rows, heads, dtype=activation),
            "a": -self._uniform(layers, heads) * 15.0 - 1.0,
            "b": self._normal(layers, rows, groups, n, dtype=activation),
            "c": self._normal(layers, rows, groups, n, dtype=activation),
            "d": self._normal(layers, heads, dtype=torch.float32),
            "z": self._normal(layers, rows, heads, p, dtype=activation)
            if spec.has_z
            else torch.empty(layers, 0, device=device),
            "dt_bias": self._uniform(layers, heads) - 4.0,
            "out": torch.empty((layers, rows, heads, p), dtype=activation, device=device),
        }
        order = torch.randperm(rows, generator=self._generator, device=device) + 1
        self._tensors["slot_index"] = order.to(torch.int32).expand(layers, rows)
        self._tensors["ring_start"] = torch.randint(
            0, capacity, (slots,), dtype=torch.int32, device=device, generator=self._generator
        ).expand(layers, slots)
        self._lengths = {mode: self._ring_lengths(mode) for mode in ("nonflush", "flush", "mix")}
        self._arguments: dict[tuple[bool, str], list[tuple[torch.Tensor, ...]]] = {}

    def _normal(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.device, dtype=dtype)

    def _uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(size, generator=self._generator, device=self.device)

    def _ring_lengths(self, mode: str) -> torch.Tensor:
        """(layers, slots) ring lengths that make ``mode`` happen.

        The mix spreads the phases of the flush cycle evenly over the rows and shifts them by one
        per layer, so that few rows see a whole cycle over the layers.
        """
        window, (rows, layers) = self.spec.window, (self.shape.rows, self.layers)
        lengths = torch.full((layers, rows + 1), window // 2, dtype=torch.int32, device=self.device)
        if mode == "flush":
            lengths.fill_(window)
        elif mode == "mix":
            # One accepted token a step: after a flush the ring holds 1 token, at `window` it flushes.
            phase = (
                torch.arange(rows, device=self.device) * max(1, window // rows)
                + (torch.arange(layers, device=self.device)[:, None])
            )
            lengths[:, self._tensors["slot_index"][0].long()] = (1 + phase % window).to(torch.int32)
        return lengths

    def flush_share(self, mode: str) -> float:
        """Share of (layer, row) launches that flush in ``mode``: proof that a branch really runs."""
        lengths = self._lengths[mode][:, self._tensors["slot_index"][0].long()]
        return float((lengths + self.spec.num_tokens > self.spec.window).float().mean())

    def states(self) -> list[torch.Tensor]:
        """The layers' state of the served rows, contiguous: the bytes the roofs move."""
        return [layer[1:] for layer in self._tensors["state"].unbind(0)]

    def _layer_arguments(self, structure: Structure, mode: str) -> list[tuple[torch.Tensor, ...]]:
        """Tensors of every layer in argument order, without a scratch."""
        key = (structure.role == "native", mode)
        if key not in self._arguments:
            spec = self.spec.native if key[0] else self.spec
            tensors = {**self._tensors, "ring_len": self._lengths["nonflush" if key[0] else mode]}
            names = [a.name for a in tensor_arguments(spec, structure)]
            self._arguments[key] = list(zip(*(tensors[name].unbind(0) for name in names), strict=True))
        return self._arguments[key]

    def calls(self, plan: Plan, mode: str, compile_plan: PlanCompiler) -> list[Callable[[], object]]:
        """One production launch of ``plan`` per layer.

        Raises:
            CompileError: The plan does not compile.
        """
        structure = Structure(plan.variants[0].structure.role)
        native = structure.role == "native"
        spec = self.spec.native if native else self.spec
        layers = self._layer_arguments(structure, mode)
        dtypes = tuple(DTYPE_NAMES[t.dtype] for t in layers[0])
        compiled = compile_plan(spec, plan, dtypes)
        strides = tensor_strides(spec, structure, layers[0])
        scalars = (-1,) if native else (self.spec.window + self.spec.num_tokens, -1)
        rows, heads = self.shape.rows, self.shape.heads
        raw_stream = torch.cuda.current_stream

        def call(tensors: tuple[torch.Tensor, ...]) -> None:
            compiled.launch(tensors, strides, rows, heads, scalars, raw_stream().cuda_stream)

        launches = [functools.partial(call, tensors) for tensors in layers]
        return [launches[i % len(launches)] for i in range(max(len(launches), GRAPH_LAUNCHES))]

    def roof_us(self, kind: str, repeats: int) -> float:
        """Time of the roof kernel (``read`` or ``scale``) per layer: the best of a few tiles, in us."""
        states = [s for s, _ in zip(itertools.cycle(self.states()), range(GRAPH_LAUNCHES), strict=False)]
        if self.layers > GRAPH_LAUNCHES:
            states = self.states()
        candidates = (roofs.read_launches if kind == "read" else roofs.scale_launches)(states)
        return min(statistics.median(Graph(calls).time_us(repeats)) for calls in candidates)


class Graph:
    """Calls captured into one CUDA graph, timed by replay."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._count = len(calls)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            for call in calls:
                call()
        self._graph.replay()
        torch.cuda.synchronize()

    def time_us(self, repeats: int) -> list[float]:
        """Time per call, in us, of ``repeats`` replays."""
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for begin, end in events:
            begin.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / self._count for begin, end in events]
