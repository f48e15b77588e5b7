"""CUDA implementations of the ops: look the plan up, compile it once, launch.

The first call with a signature looks up its plan and compiles it (or loads it from Triton's cache);
later ones only assemble arguments. A signature says everything but where the tensors lie: a launch
whose pointers are not multiples of 16 bytes takes a second compilation of the same kernels.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from subprocess import CalledProcessError
from typing import Any, Final

import torch
from torch import Tensor

from .abi import TensorArgument, launch_structure, scalar_arguments, tensor_arguments
from .build import ALIGNMENT_BYTES
from .checks import MAX_ROWS, Signature
from .compiled import CompiledPlan, Launch, explain_launcher_error
from .dtypes import DTYPE_NAMES, TORCH_DTYPES
from .errors import ArgumentError
from .lookup import announce, default_lookup
from .modules import CURSORS, load_module, module_path, shared_path
from .plan import Plan
from .spec import Spec
from .table import GpuInfo

STRICT_VARIABLE: Final = "REPLAYSSM_STRICT"
"""Environment variable: ``1`` raises where no table has a row, instead of serving the default plan."""

_CURSOR_BLOCK: Final = 128
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


@functools.cache
def gpu_info(device_index: int) -> GpuInfo:
    """The GPU as the look-up knows it."""
    properties = torch.cuda.get_device_properties(device_index)
    return GpuInfo(
        name=properties.name,
        vendor="nvidia",
        capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
    )


@functools.cache
def plan_for(spec: Spec, effective_batch: int, device_index: int) -> Plan:
    """The plan that serves, announced once.

    Raises:
        DispatchError: Strict mode, and no table has a row of the step.
    """
    # Strict mode is about steps, which static tables have rows of alone.
    strict = os.environ.get(STRICT_VARIABLE, "") == "1" and spec.op != "materialize"
    found = default_lookup().find(spec, effective_batch, gpu_info(device_index), strict)
    announce(found.reason)
    return found.plan


@functools.cache
def _compiled(
    spec: Spec, plan: Plan, dtypes: tuple[str, ...], aligned: bool, device_index: int
) -> CompiledPlan:
    with torch.cuda.device(device_index):
        return CompiledPlan(spec, plan.variants, module_path, dtypes, aligned=aligned)


class Launcher(ABC):
    """What the launches of like calls share; one launch serves aligned pointers, another any.

    Args:
        names: Of the tensors of a call, in the order of its contract, as kernels name them.
        arguments: The kernel's tensors.
        strides: In elements, by name; needed of tensors whose strides the kernel takes.
        dtypes: Short names, by name of the tensor; those without one are left out.
        device_index: CUDA device.
    """

    def __init__(
        self,
        names: Sequence[str],
        arguments: Sequence[TensorArgument],
        strides: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, str],
        device_index: int,
    ) -> None:
        self._device_index = device_index
        self._dtypes = tuple(dtypes.get(a.name) for a in arguments)
        self._strides = tuple(s for a in arguments for s in _strides(a, strides))
        positions = {name: i for i, name in enumerate(names)}
        self._in_kernel_order = itemgetter(*(positions[a.name] for a in arguments))
        self._vectorized = tuple(positions[a.name] for a in arguments if a.vectorized)
        self._strides_aligned = not any(
            stride * TORCH_DTYPES[dtypes[a.name]].itemsize % ALIGNMENT_BYTES
            for a in arguments if a.vectorized for stride in _strides(a, strides)
        )  # fmt: skip
        self._launches: list[Launch | None] = [None, None]

    @abstractmethod
    def prepare(self, aligned: bool) -> Launch:
        """Compile; the launch for pointers and strides that are, or are not, multiples of 16 bytes."""

    def launch(self, tensors: tuple[Any, ...], null_slot: int) -> None:
        """Launch on the current stream; ``tensors`` in the order of the contract.

        Raises:
            CompileError: A kernel does not compile.
        """
        aligned = self._strides_aligned
        if aligned:
            pointers = 0
            for index in self._vectorized:
                pointers |= tensors[index].data_ptr()
            aligned = not pointers % ALIGNMENT_BYTES
        launch = self._launches[aligned]
        if launch is None:
            launch = self._launches[aligned] = self.prepare(aligned)
        index = self._device_index
        if index == _current_device():
            launch(self._in_kernel_order(tensors), null_slot, _raw_stream(index))
        else:
            with torch.cuda.device(index):
                launch(self._in_kernel_order(tensors), null_slot, _raw_stream(index))


class _PlanLauncher(Launcher):
    """By the plan that serves a signature."""

    def __init__(self, signature: Signature, device_index: int) -> None:
        spec, names = signature.spec, signature.contract.kernel_names
        super().__init__(names, _arguments(spec), signature.strides, signature.dtypes, device_index)
        self._rows, self._heads = signature.rows, signature.heads
        scalars = {"ring_capacity": signature.capacity, "tokens": signature.tokens}
        *scalar_names, _ = scalar_arguments(spec, launch_structure(spec))
        self._scalars = tuple(scalars[name] for name in scalar_names)
        self._spec, self._plan = spec, plan_for(spec, signature.effective_batch, device_index)

    def prepare(self, aligned: bool) -> Launch:
        dtypes = tuple(dtype for dtype in self._dtypes if dtype)
        compiled = _compiled(self._spec, self._plan, dtypes, aligned, self._device_index)
        return compiled.bind(self._rows, self._heads, self._strides, self._scalars)


class _FixedRowsLauncher(_PlanLauncher):
    """Of rows that all have ``num_tokens`` tokens: kernels take ``query_start``, the call leaves it out."""

    def __init__(self, signature: Signature, device_index: int) -> None:
        dtypes = {**signature.dtypes, "query_start": "i32"}
        super().__init__(replace(signature, dtypes=dtypes), device_index)
        self._position = signature.contract.position("query_start")
        self._starts = fixed_starts(signature.spec.num_tokens, device_index)[: signature.rows + 1]

    def launch(self, tensors: tuple[Any, ...], null_slot: int) -> None:
        """As in :class:`Launcher`."""
        before, behind = tensors[: self._position], tensors[self._position + 1 :]
        super().launch((*before, self._starts, *behind), null_slot)


@functools.cache
def fixed_starts(num_tokens: int, device_index: int) -> Tensor:
    """``query_start`` of as many rows as a launch takes, each of ``num_tokens`` tokens.

    Kernels always take it, so that one binary serves, and passes the gates, whatever the rows' lengths.

    Raises:
        ArgumentError: A CUDA graph is being captured: what is made now would be the graph's own.
    """
    device = torch.device("cuda", device_index) if device_index >= 0 else torch.device("cpu")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            f"the first rows of {num_tokens} tokens without query_start come while a CUDA graph is captured",
            hint="call warmup, or the step itself, before the capture, or pass query_start",
        )
    # From the host: such a copy has arrived when it returns, so that any stream may read it at once.
    return (torch.arange(MAX_ROWS + 1, dtype=torch.int32, device="cpu") * num_tokens).to(device)


def _arguments(spec: Spec) -> tuple[TensorArgument, ...]:
    """Tensors that every plan of ``spec`` takes; scratch is the plan's own."""
    return tensor_arguments(spec, launch_structure(spec))


def _strides(argument: TensorArgument, strides: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """The strides of ``argument`` that its kernel takes."""
    return strides[argument.name][: len(argument.stride_dims)] if argument.stride_dims else ()


def prepare(signature: Signature, device_index: int) -> Launcher:
    """What launches calls with ``signature``, worked out once and kept with it.

    Raises:
        DispatchError: Strict mode, and no table has a row.
    """
    fixed_rows = signature.spec.verifies and "query_start" not in signature.dtypes
    launcher = (_FixedRowsLauncher if fixed_rows else _PlanLauncher)(signature, device_index)
    object.__setattr__(signature, "launcher", launcher)
    return launcher


def _cursor_kernel(name: str) -> Any:
    return getattr(load_module(shared_path(CURSORS)), name)


def _launch_cursors(name: str, rows: int, first: Tensor, *arguments: object) -> None:
    grid = (-(-rows // _CURSOR_BLOCK),)
    try:
        # Triton launches on the current device, wherever the tensors lie.
        with torch.cuda.device(first.get_device()):
            _cursor_kernel(name)[grid](first, *arguments, BLOCK=_CURSOR_BLOCK)
    except (RuntimeError, CalledProcessError) as error:
        explain_launcher_error(error)
        raise


def launch_commit(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    """CUDA implementation of :func:`.cursors.commit`."""
    rows = slot_index.shape[0]
    if rows:
        scalars = (rows, window, num_tokens, capacity, null_slot)
        tensors = (accepted, ring_start, ring_len, slot_index, query_start)
        _launch_cursors("commit", rows, *tensors, *scalars)


def launch_reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    """CUDA implementation of :func:`.cursors.reset`."""
    rows = slots.shape[0]
    if rows:
        _launch_cursors("reset", rows, slots, ring_start, ring_len, rows, null_slot)


def launch_drained(
    slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int
) -> None:
    """CUDA implementation of :func:`.cursors.drained`."""
    rows = slots.shape[0]
    if rows:
        _launch_cursors("drained", rows, slots, ring_start, ring_len, rows, capacity, null_slot)


def compile_ahead(
    spec: Spec,
    effective_batches: Sequence[int],
    device_index: int,
    index_dtype: torch.dtype,
    aligned: bool,
) -> int:
    """CUDA implementation of :func:`.ops.warmup`.

    Raises:
        DispatchError: Strict mode, and no table has a row.
        CompileError: A kernel does not compile.
        ToolchainError: There is no C compiler.
    """
    plans = {plan_for(spec, batch, device_index) for batch in effective_batches}
    dtypes = tuple(DTYPE_NAMES[index_dtype] if a.per_row else a.dtype for a in _arguments(spec))
    for plan in plans:
        _compiled(spec, plan, dtypes, aligned, device_index)
    if spec.verifies:
        fixed_starts(spec.num_tokens, device_index)
    _compile_cursors(device_index, index_dtype)
    return len(plans)


def _compile_cursors(device_index: int, index_dtype: torch.dtype) -> None:
    """Cursor ops go through the just-in-time path: calls that touch nothing compile them."""
    with torch.cuda.device(device_index):
        slots = torch.full((1,), -1, dtype=index_dtype, device="cuda")
        cursor = torch.zeros(1, dtype=torch.int32, device="cuda")
        for query_start in (None, torch.zeros(2, dtype=torch.int32, device="cuda")):
            launch_commit(slots, cursor, cursor, slots, query_start, 1, 1, 2, -1)
        launch_reset(slots, cursor, cursor, -1)
        launch_drained(slots, cursor, cursor, 2, -1)
