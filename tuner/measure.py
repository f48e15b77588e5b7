# mypy: disable-error-code="no-untyped-call"
"""The measurement protocol: cold caches, distinct layers, one CUDA graph, production launches.

A :class:`LayerStack` holds, for one spec and effective batch, as many layers' buffers as it takes to
exceed the L2 several times over, as a model's layers do when they follow each other. A launch per
layer is captured into one CUDA graph; the time of a launch is the replay's time divided by the
number of layers.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence

import torch

from ..runtime.abi import scalar_arguments, tensor_arguments
from ..runtime.compiled import CompiledPlan, tensor_strides
from ..runtime.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ..runtime.plan import Structure, Variant
from ..runtime.spec import Spec
from . import roofs
from .mix import accepted_tokens, cycle, ring_length
from .shapes import Shape

L2_MULTIPLE = 5
"""State bytes of all layers together, in units of the GPU's L2."""
GRAPH_LAUNCHES = 8
"""Launches of a graph at least (layers repeat): a replay's own cost must vanish in its time."""

Compiler = Callable[[Spec, tuple[Variant, ...], tuple[str, ...]], CompiledPlan]
"""Compiles kernels for tensors of the given dtypes, or returns them from a cache."""


class LayerStack:
    """Buffers of several layers of one spec at one effective batch, and the timing of plans on them.

    Args:
        spec: A spec of any op that is tuned. Rows have all their ``num_tokens`` tokens.
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
        tokens = rows * spec.num_tokens
        # Verification without a ring keeps a state for every token of a row.
        served = tokens if spec.is_native else rows
        # What materialises states writes them into other slots.
        written = rows if spec.op == "materialize" else 0
        slots = served + written + 1
        capacity = spec.ring_capacity
        activation, ring = TORCH_DTYPES[spec.activation_dtype], TORCH_DTYPES[spec.ring_dtype]
        p, n = spec.head_dim, spec.state_size
        gdn = spec.family == "gdn"
        # Keys of about unit norm: the delta rule would grow without bound on longer ones.
        key_scale = n**-0.5 if gdn else 1.0
        rate = self._uniform(layers, heads)
        self.native = spec.is_native
        tensors = {
            "state": self._normal(layers, slots, heads, p, n, dtype=TORCH_DTYPES[spec.state_dtype]),
            "x": self._normal(layers, tokens, heads, p, dtype=activation),
            "dt": self._normal(layers, tokens, heads, dtype=activation),
            # Of GDN A_log; a token decays by about 0.9 to 0.999, as in trained models.
            "a": (2.0 * rate + 0.05).log() if gdn else -15.0 * rate - 1.0,
            "b": self._normal(layers, tokens, groups, n, dtype=activation).mul_(key_scale),
            "c": self._normal(layers, tokens, groups, n, dtype=activation).mul_(key_scale),
            "beta": self._normal(layers, tokens if gdn else 0, heads, dtype=activation),
            "d": self._normal(layers, heads, dtype=torch.float32),
            "z": self._normal(layers, tokens if spec.has_z else 0, heads, p, dtype=activation),
            "dt_bias": self._uniform(layers, heads) - 4.0,
            "out": torch.empty((layers, tokens, heads, p), dtype=activation, device=device),
        }
        order = torch.randperm(slots - 1, generator=self._generator, device=device) + 1
        slot_index = order.view(rows, -1) if spec.op == "native_verify" else order[:served]
        # Of a step, not of a layer: all layers have the same.
        of_step = {
            "slot_index": slot_index,
            "destination": order[served:],
            "prefix": torch.full((rows,), spec.window, device=device),
            "accepted": torch.full((rows,), accepted_tokens(spec), device=device),
            "query_start": torch.arange(rows + 1, device=device) * spec.num_tokens,
        }
        tensors |= {
            name: value.to(torch.int32).expand(layers, *value.shape) for name, value in of_step.items()
        }
        if not self.native:
            start = torch.randint(0, capacity, (slots,), device=device, generator=self._generator)
            decay = self._uniform(layers, slots, heads, capacity) * 0.1 + 0.001
            tensors |= {
                "ring_x": self._normal(layers, slots, heads, capacity, p, dtype=ring),
                "ring_b": self._normal(layers, slots, groups, capacity, n, dtype=ring).mul_(key_scale),
                "ring_decay": -decay if gdn else decay,
                "ring_start": start.to(torch.int32).expand(layers, slots),
            }
        self._tensors = tensors
        modes = ("materialize",) if written else () if self.native else ("nonflush", "flush", "mix")
        self._lengths = {mode: self._ring_lengths(mode) for mode in modes}
        self._arguments: dict[str, list[tuple[torch.Tensor, ...]]] = {}

    def _normal(self, *size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self.device, dtype=dtype)

    def _uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(size, generator=self._generator, device=self.device)

    def _ring_lengths(self, mode: str) -> torch.Tensor:
        """(layers, slots) ring lengths that make ``mode`` happen.

        In the mix the lengths of the flush cycle follow each other over the rows of one layer after the
        other: each occurs as often as any other, to within one, also where there are few rows.
        """
        spec, rows, layers = self.spec, self.shape.rows, self.layers
        size = self._tensors["ring_start"].shape
        lengths = torch.full(size, ring_length(spec, mode), dtype=torch.int32, device=self.device)
        if mode == "mix":
            turn = torch.arange(layers * rows, dtype=torch.int32, device=self.device).view(layers, rows)
            lengths[:, self._slots] = cycle(spec) - turn % cycle(spec)
        return lengths

    @property
    def _slots(self) -> torch.Tensor:
        """(rows,) or (rows, num_tokens) int64: where rows' states lie, the same in every layer."""
        return self._tensors["slot_index"][0].long()

    @property
    def _targets(self) -> torch.Tensor:
        """As :attr:`_slots`, where the states of rows that write theirs go."""
        return self._tensors["destination"][0].long() if self.spec.op == "materialize" else self._slots

    def clear(self) -> None:
        """Set the first row of every state to zero, which no state that is written anew leaves there."""
        self._tensors["state"][:, :, :, 0] = 0

    def prove(self, mode: str) -> None:
        """Look at whose states have been written since :meth:`clear`.

        Raises:
            RuntimeError: They are not those of the rows that write theirs in ``mode``.
        """
        wrote = (self._tensors["state"][:, :, :, 0] != 0).any(-1).any(-1)[:, self._targets]
        should = torch.ones_like(wrote)
        if not self.native and mode != "materialize":
            should = self._lengths[mode][:, self._slots] + self.spec.num_tokens > self.spec.window
        if not torch.equal(wrote, should):
            raise RuntimeError(
                f"in mode {mode} {int(wrote.sum())} of {wrote.numel()} states were written, "
                f"not the {int(should.sum())} of the rows that should write theirs"
            )

    def states(self) -> list[torch.Tensor]:
        """A state of every row and layer, contiguous: the bytes the roofs move."""
        return [layer[1 : 1 + self.shape.rows] for layer in self._tensors["state"].unbind(0)]

    def _layer_arguments(self, structure: Structure, mode: str) -> list[tuple[torch.Tensor, ...]]:
        """Tensors of every layer in argument order, without a scratch."""
        if mode not in self._arguments:
            tensors = dict(self._tensors)
            if not self.native:
                tensors["ring_len"] = self._lengths[mode]
            names = [a.name for a in tensor_arguments(self.spec, structure)]
            self._arguments[mode] = list(zip(*(tensors[name].unbind(0) for name in names), strict=True))
        return self._arguments[mode]

    def calls(
        self, variants: tuple[Variant, ...], mode: str, compile_variants: Compiler
    ) -> list[Callable[[], object]]:
        """One production launch of ``variants`` (a plan, or one branch of it) per layer.

        Raises:
            CompileError: A kernel does not compile.
        """
        structure = Structure(variants[0].structure.role)
        layers = self._layer_arguments(structure, mode)
        dtypes = tuple(DTYPE_NAMES[t.dtype] for t in layers[0])
        compiled = compile_variants(self.spec, variants, dtypes)
        strides = tensor_strides(self.spec, structure, layers[0])
        named = {"ring_capacity": self.spec.ring_capacity, "tokens": self.shape.rows * self.spec.num_tokens}
        scalars = tuple(named[name] for name in scalar_arguments(self.spec, structure)[:-1])
        launch = compiled.bind(self.shape.rows, self.shape.heads, strides, scalars)
        raw_stream = torch.cuda.current_stream

        def call(tensors: tuple[torch.Tensor, ...]) -> None:
            launch(tensors, -1, raw_stream().cuda_stream)

        launches = [functools.partial(call, tensors) for tensors in layers]
        return [launches[i % len(launches)] for i in range(max(len(launches), GRAPH_LAUNCHES))]

    def graph(self, variants: tuple[Variant, ...], mode: str, compile_variants: Compiler) -> Graph:
        """:meth:`calls`, captured, once it is proven that they do what ``mode`` says.

        Raises:
            CompileError: A kernel does not compile.
            RuntimeError: Other rows wrote their states than should.
        """
        self.clear()
        graph = Graph(self.calls(variants, mode, compile_variants))
        self.prove(mode)
        return graph

    def roof_us(self, kind: str, repeats: int) -> list[float]:
        """Samples of the roof kernel (``read`` or ``scale``) per layer: of the best of a few tiles, in us."""
        states = self.states()
        states = [states[i % len(states)] for i in range(max(len(states), GRAPH_LAUNCHES))]
        candidates = (roofs.read_launches if kind == "read" else roofs.scale_launches)(states)
        return min((Graph(calls).time_us(repeats) for calls in candidates), key=statistics.median)


class Graph:
    """Calls captured into one CUDA graph, timed by replay."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self._count = len(calls)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
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
