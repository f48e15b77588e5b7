"""CUDA implementations of the ops: look the plan up, compile it once, launch.

The first call with a signature looks up its plan and compiles it (or loads it from Triton's cache);
later ones only assemble arguments. A signature says everything but where the tensors lie: a launch
whose pointers are not multiples of 16 bytes takes a second compilation of the same kernels.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from subprocess import CalledProcessError
from typing import Any, Final

import torch
from torch import Tensor

from .abi import TensorArgument, tensor_arguments
from .build import ALIGNMENT_BYTES
from .checks import Signature
from .compiled import CompiledPlan, Launch, explain_launcher_error
from .dtypes import DTYPE_NAMES, TORCH_DTYPES
from .lookup import announce, default_lookup
from .modules import CURSORS, load_module, module_path, shared_path
from .plan import Plan, Structure
from .spec import Spec
from .table import GpuInfo

STRICT_VARIABLE: Final = "REPLAYSSM_STRICT"
"""Environment variable: ``1`` raises where no table has a row, instead of serving the default plan."""

_CURSOR_BLOCK: Final = 128
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


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
        DispatchError: Strict mode, and no table has a row.
    """
    strict = os.environ.get(STRICT_VARIABLE, "") == "1"
    found = default_lookup().find(spec, effective_batch, gpu_info(device_index), strict)
    announce(found.reason)
    return found.plan


@functools.cache
def _compiled(
    spec: Spec, plan: Plan, dtypes: tuple[str, ...], aligned: bool, device_index: int
) -> CompiledPlan:
    with torch.cuda.device(device_index):
        return CompiledPlan(spec, plan.variants, module_path, dtypes, aligned=aligned)


class _Launcher:
    """What a signature's launches share."""

    def __init__(self, signature: Signature, device_index: int) -> None:
        spec = signature.spec
        arguments = _arguments(spec)
        self.device_index = device_index
        strides = tuple(s for a in arguments for s in signature.strides[a.name][: len(a.stride_dims)])
        scalars = () if spec.is_native else (signature.capacity,)
        self._shape = (signature.rows, signature.heads, strides, scalars)
        self._dtypes = tuple(signature.dtypes[a.name] for a in arguments)
        self._spec, self._plan = spec, plan_for(spec, signature.effective_batch, device_index)
        self.vectorized = tuple(i for i, a in enumerate(arguments) if a.vectorized)
        self.strides_aligned = all(_is_aligned(a, signature) for a in arguments)
        self._launches: list[Launch | None] = [None, None]

    def _launch(self, aligned: bool) -> Launch:
        """The launch for pointers that are, or are not, multiples of 16 bytes."""
        compiled = _compiled(self._spec, self._plan, self._dtypes, aligned, self.device_index)
        launch = self._launches[aligned] = compiled.bind(*self._shape)
        return launch

    def launch(self, tensors: Sequence[Tensor], null_slot: int) -> None:
        """Launch on the current stream; ``tensors`` in argument order."""
        aligned = self.strides_aligned
        if aligned:
            pointers = 0
            for index in self.vectorized:
                pointers |= tensors[index].data_ptr()
            aligned = not pointers % ALIGNMENT_BYTES
        launch = self._launches[aligned] or self._launch(aligned)
        launch(tensors, null_slot, _raw_stream(self.device_index))


def _arguments(spec: Spec) -> tuple[TensorArgument, ...]:
    """Tensors that every plan of ``spec`` takes; scratch is the plan's own."""
    return tensor_arguments(spec, Structure("native" if spec.is_native else "both"))


def _is_aligned(argument: TensorArgument, signature: Signature) -> bool:
    size = TORCH_DTYPES[signature.dtypes[argument.name]].itemsize
    strides = signature.strides[argument.name][: len(argument.stride_dims)]
    return not argument.vectorized or not any(stride * size % ALIGNMENT_BYTES for stride in strides)


def launch_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    out: Tensor,
    window: int,
    dt_softplus: bool,
    null_slot: int,
    signature: Signature,
) -> None:
    """CUDA implementation of :func:`.ops.mamba2_step`; all arguments have been checked.

    Raises:
        DispatchError: Strict mode, and no table has a row.
        CompileError: The plan's kernels do not compile.
    """
    launcher: _Launcher = signature.launcher or _prepare(signature, x)
    tensors = [state, ring_x, ring_b, ring_decay, ring_start, ring_len, slot_index, x, dt, A, B, C]
    _append_present(tensors, D, z, dt_bias, out)
    launcher.launch(tensors, null_slot)


def launch_native_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    slot_index: Tensor,
    out: Tensor,
    dt_softplus: bool,
    null_slot: int,
    signature: Signature,
) -> None:
    """CUDA implementation of :func:`.ops.mamba2_native_step`; errors as in :func:`launch_step`."""
    launcher: _Launcher = signature.launcher or _prepare(signature, x)
    tensors = [state, slot_index, x, dt, A, B, C]
    _append_present(tensors, D, z, dt_bias, out)
    launcher.launch(tensors, null_slot)


def _append_present(
    tensors: list[Tensor], D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, out: Tensor
) -> None:
    if D is not None:
        tensors.append(D)
    if z is not None:
        tensors.append(z)
    if dt_bias is not None:
        tensors.append(dt_bias)
    tensors.append(out)


def _prepare(signature: Signature, x: Tensor) -> _Launcher:
    launcher = _Launcher(signature, x.get_device())
    object.__setattr__(signature, "launcher", launcher)
    return launcher


def _cursor_kernel(name: str) -> Any:
    return getattr(load_module(shared_path(CURSORS)), name)


def _launch_cursors(name: str, rows: int, *arguments: object) -> None:
    grid = (-(-rows // _CURSOR_BLOCK),)
    try:
        _cursor_kernel(name)[grid](*arguments, BLOCK=_CURSOR_BLOCK)
    except (RuntimeError, CalledProcessError) as error:
        explain_launcher_error(error)
        raise


def launch_commit(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    """CUDA implementation of :func:`.ops.commit`."""
    rows = slot_index.shape[0]
    if rows:
        scalars = (rows, window, num_tokens, capacity, null_slot)
        _launch_cursors("commit", rows, accepted, ring_start, ring_len, slot_index, *scalars)


def launch_reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    """CUDA implementation of :func:`.ops.reset`."""
    rows = slots.shape[0]
    if rows:
        _launch_cursors("reset", rows, slots, ring_start, ring_len, rows, null_slot)


def launch_drained(
    slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int
) -> None:
    """CUDA implementation of :func:`.ops.drained`."""
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
    dtypes = tuple(DTYPE_NAMES[index_dtype] if a.name == "slot_index" else a.dtype for a in _arguments(spec))
    for plan in plans:
        _compiled(spec, plan, dtypes, aligned, device_index)
    with torch.cuda.device(device_index):
        slots = torch.full((1,), -1, dtype=index_dtype, device="cuda")
        cursor = torch.zeros(1, dtype=torch.int32, device="cuda")
        launch_commit(slots, cursor, cursor, slots, 1, 1, 2, -1)
        launch_reset(slots, cursor, cursor, -1)
        launch_drained(slots, cursor, cursor, 2, -1)
    return len(plans)
