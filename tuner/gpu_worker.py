"""The process that owns the GPU: it gates and times candidates, one at a time.

A candidate can hang or kill the CUDA context, so all CUDA work happens here and
:mod:`.gpu_bench` replaces the process when it dies. Requests and answers are pickled tuples.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..runtime.conv_tiles import ConvSpec, ConvTile
from ..runtime.plan import Plan, Variant
from ..runtime.spec import Spec
from .records import Cell, ConvCell, Environment, Timing

if TYPE_CHECKING:
    import torch

    from ..runtime.compiled import CompiledPlan
    from .conv_bench import ConvStack
    from .folds import FoldGate
    from .gate import Gate, Verdict
    from .measure import Graph, LayerStack

Stack = TypeVar("Stack", bound="LayerStack | ConvStack")

PROTOCOL = 2
"""Version of the measurement protocol: raised whenever times before and after do not compare."""

_GRAPHS = 96
"""Captured graphs kept for the layer stack in use: a race visits the same few plans many times."""
_GATE_GROUPS, _GATE_SEQUENCES, _GATE_STEPS = 2, 7, 20
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""NVML: hardware slowdown, software and hardware thermal slowdown, power brake."""


def serve(pipe: Connection, modules: Path, triton_cache: Path) -> None:
    """Answer requests until the pipe closes.

    Requests are ``(method, *arguments)`` of :class:`GpuWorker`; answers ``("ok", result, company)`` or
    ``("error", text, company)``, with the count of other processes that compute on the GPU.
    """
    os.environ["TRITON_CACHE_DIR"] = str(triton_cache)
    worker = GpuWorker(modules)
    while True:
        try:
            method, *arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[str, Any, int] = ("ok", getattr(worker, method)(*arguments), worker.company())
        except Exception as error:
            if _context_is_dead(error):
                os._exit(70)
            answer = ("error", f"{type(error).__name__}: {error}", 0)
        pipe.send(answer)


def _context_is_dead(error: Exception) -> bool:
    text = str(error)
    return "CUDA error" in text or "illegal memory access" in text or "device-side assert" in text


class GpuWorker:
    """Gates and times on the current CUDA device.

    Args:
        modules: Folder of rendered modules.
    """

    def __init__(self, modules: Path) -> None:
        import torch

        from ..codegen.cache import rendered

        self._torch = torch
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._source = rendered(modules)
        self._compiled: dict[tuple[Spec, tuple[Variant, ...], tuple[str, ...]], CompiledPlan] = {}
        self._gates: dict[Spec, Gate | FoldGate] = {}
        self._stack: tuple[object, LayerStack | ConvStack] | None = None
        self._graphs: OrderedDict[tuple[object, ...], Graph] = OrderedDict()
        self._throttled = _throttle_reader(self._device)
        self.company = _company_reader(self._device)

    def environment(self) -> Environment:
        """Where measurements are made."""
        import triton

        torch = self._torch
        properties = torch.cuda.get_device_properties(self._device)
        return Environment(
            gpu=properties.name,
            capability=(properties.major, properties.minor),
            sm_count=properties.multi_processor_count,
            triton=triton.__version__,
            torch=torch.__version__,
            driver=_driver_version(),
            protocol=PROTOCOL,
        )

    def gate(self, spec: Spec, plan: Plan) -> Verdict:
        """Whether ``plan`` may be timed; compiles it."""
        from .folds import FoldGate
        from .gate import Gate
        from .trajectory import Trajectory

        gate = self._gates.get(spec)
        if gate is None and spec.op == "materialize":
            gate = FoldGate(spec, heads=_GATE_GROUPS * spec.heads_per_group, device=self._device)
            self._gates[spec] = gate
        if gate is None:
            trajectory = Trajectory(
                spec,
                heads=_GATE_GROUPS * spec.heads_per_group,
                sequences=_GATE_SEQUENCES,
                steps=_GATE_STEPS,
                device=self._device,
            )
            gate = self._gates[spec] = Gate(trajectory)
        return gate.check(plan, self._source)

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        """Time one step of ``variants`` in ``mode``; see :meth:`.records.Bench.time`."""
        stack = self._stack_of(cell)
        captured = functools.partial(stack.graph, variants, mode, self._compile)
        return Timing(self._samples((cell, variants, mode), captured, repeats))

    def roof(self, cell: Cell, kind: str, repeats: int) -> Timing:
        """Time of the roof kernel ``read`` or ``scale`` on the cell's states."""
        return Timing(tuple(self._stack_of(cell).roof_us(kind, repeats)))

    def conv_gate(self, spec: ConvSpec, tile: ConvTile, packed: bool) -> str:
        """Whether ``tile`` may be timed: empty, or why not; compiles it."""
        from .conv_bench import gate

        return gate(spec, tile, self._device, packed)

    def conv_time(self, cell: ConvCell, tile: ConvTile, repeats: int) -> Timing:
        """Time of one launch of the convolution."""
        stack = self._conv_stack_of(cell)
        return Timing(self._samples((cell, tile), functools.partial(stack.graph, tile), repeats))

    def conv_roof(self, cell: ConvCell, repeats: int) -> Timing:
        """Time of moving the bytes that a launch of the convolution must move."""
        return Timing(tuple(self._conv_stack_of(cell).roof_us(repeats)))

    def _samples(
        self, key: tuple[object, ...], capture: Callable[[], Graph], repeats: int
    ) -> tuple[float, ...]:
        """Of the graph of that key of the stack in use, captured if it was not."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._remember(key, capture())
        self._graphs.move_to_end(key)
        for _ in range(3):
            samples = tuple(graph.time_us(repeats))
            if not self._throttled():
                break
        return samples

    def _remember(self, key: tuple[object, ...], graph: Graph) -> Graph:
        self._graphs[key] = graph
        while len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _stack_of(self, cell: Cell) -> LayerStack:
        from .measure import LayerStack
        from .shapes import shape_for

        def make() -> LayerStack:
            return LayerStack(cell.spec, shape_for(cell.spec, cell.effective_batch), self._device)

        return self._stack_at((cell.spec, cell.effective_batch), make)

    def _conv_stack_of(self, cell: ConvCell) -> ConvStack:
        from .conv_bench import ConvStack

        return self._stack_at(cell, lambda: ConvStack(cell, self._device))

    def _stack_at(self, key: object, make: Callable[[], Stack]) -> Stack:
        """The stack of ``key``, which is the only one there is."""
        if self._stack is None or self._stack[0] != key:
            # The graphs hold the buffers' addresses: they go first.
            self._graphs.clear()
            self._stack = None
            self._torch.cuda.empty_cache()
            self._stack = (key, make())
        return cast("Stack", self._stack[1])

    def _compile(self, spec: Spec, variants: tuple[Variant, ...], dtypes: tuple[str, ...]) -> CompiledPlan:
        from ..runtime.compiled import CompiledPlan

        key = (spec, variants, dtypes)
        if key not in self._compiled:
            self._compiled[key] = CompiledPlan(spec, variants, self._source, dtypes, aligned=True)
        return self._compiled[key]


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    yield pynvml


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML's handle of a CUDA device: it numbers GPUs as they are, whatever CUDA_VISIBLE_DEVICES says."""
    import torch

    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _driver_version() -> str:
    try:
        with _nvml() as nvml:
            version = nvml.nvmlSystemGetDriverVersion()
    except Exception:
        # NVML is missing in some containers; measurements are then marked so.
        return "unknown"
    return version.decode() if isinstance(version, bytes) else str(version)


def _throttle_reader(device: torch.device) -> Callable[[], bool]:
    """Whether the GPU is slowed down by heat or power at the moment; never, where NVML is missing."""
    try:
        with _nvml() as nvml:
            handle = _handle(nvml, device)
            nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except Exception:
        return lambda: False

    def throttled() -> bool:
        return bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & _THROTTLED)

    return throttled


def _company_reader(device: torch.device) -> Callable[[], int]:
    """How many other processes compute on the GPU at the moment; none, where NVML is missing.

    They are counted, not named: of a container's processes NVML knows the numbers outside of it.
    """
    try:
        with _nvml() as nvml:
            handle = _handle(nvml, device)
            nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except Exception:
        return lambda: 0

    def company() -> int:
        # This process is among them, but for the time before its first work.
        return max(0, len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1)

    return company
