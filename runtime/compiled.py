"""A plan compiled for one device, dtypes and alignment, ready to launch.

This is the only place that turns tensors into kernel arguments; the ops, the gate and the
benchmarks all launch through it, so that what is timed is what ships.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget

from .abi import coefficient_programs, scratch, tensor_arguments
from .build import ALIGNMENT_BYTES, can_overlap, compile_kernel, constants
from .errors import ToolchainError
from .modules import load_module
from .plan import LEADING_ROLE, Structure, Variant
from .spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

Launch = Callable[["Sequence[Tensor]", int, int], None]
"""Launches a plan on tensors, with a null slot, on a raw stream; see :meth:`CompiledPlan.bind`."""

ModuleSource = Callable[[Spec, Structure], Path]
"""Where the module of (spec, structure) lies as a file: a package, or a renderer's cache."""

OVERLAP_VARIABLE: Final = "REPLAYSSM_OVERLAP"
"""Environment variable: ``0`` lets no launch begin before the one before it has ended."""

_OVERLAP_DRIVER: Final = 12030
"""CUDA version of the first driver that captures launches which overlap into graphs."""

compilations = 0
"""Kernels compiled or loaded by this process; a test counts them over pool layouts."""


def tensor_strides(spec: Spec, structure: Structure, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Stride arguments, in elements, of tensors given in the order of the kernel's arguments."""
    strides: list[int] = []
    for argument, tensor in zip(tensor_arguments(spec, structure), tensors, strict=False):
        strides += tensor.stride()[: len(argument.stride_dims)]
    return tuple(strides)


def is_aligned(spec: Spec, structure: Structure, tensors: Sequence[Tensor]) -> bool:
    """Whether pointers and strides of all vector-loaded tensors are multiples of 16 bytes."""
    for argument, tensor in zip(tensor_arguments(spec, structure), tensors, strict=False):
        if not argument.vectorized:
            continue
        bits = tensor.data_ptr()
        for stride in tensor.stride()[: len(argument.stride_dims)]:
            bits |= stride * tensor.element_size()
        if bits % ALIGNMENT_BYTES:
            return False
    return True


class CompiledPlan:
    """The launches of one plan, or of some of its kernels, on the current device.

    Args:
        spec: What the kernels compute.
        variants: Which kernels, with their tiles.
        module_source: Finds the modules' files.
        dtypes: Element dtype names of the tensors, in argument order without the scratch.
        aligned: See :func:`is_aligned`.
    """

    def __init__(
        self,
        spec: Spec,
        variants: Sequence[Variant],
        module_source: ModuleSource,
        dtypes: tuple[str, ...],
        *,
        aligned: bool,
    ) -> None:
        self.spec = spec
        self._launches: list[tuple[Callable[..., None], Variant, bool, tuple[object, ...]]] = []
        for variant in variants:
            path = module_source(spec, variant.structure)
            kernel_dtypes = (*dtypes, "fp32") if variant.structure.takes_scratch else dtypes
            for name in variant.structure.kernels:
                tiled = name == "step"
                beside = tiled and begins_early(variant, variants) and _overlap_allowed()
                launcher = _launcher(path, name, spec, variant, kernel_dtypes, aligned, beside)
                self._launches.append((launcher, variant, tiled, constants(variant, tiled=tiled)))
        # Main kernels come last, side by side, that of the leading role first: see `begins_early`.
        self._launches.sort(key=lambda launch: (launch[2], launch[1].structure.role != LEADING_ROLE))
        self._needs_scratch = any(variant.structure.takes_scratch for variant in variants)

    def bind(self, rows: int, heads: int, strides: tuple[int, ...], scalars: tuple[int, ...] = ()) -> Launch:
        """The launch of one shape: all but tensors, null slot and stream is worked out here.

        Args:
            rows: Sequences, the second grid dimension.
            heads: Heads on this device.
            strides: Of :func:`tensor_strides`.
            scalars: Of :func:`.abi.scalar_arguments`, all but the null slot.

        Returns:
            A function of the tensors (in argument order, without the scratch), the null slot (-1 for
            none) and the raw CUDA stream.
        """
        spec = self.spec
        size = max(
            scratch(spec, variant.structure).row_size(heads, spec.heads_per_group)
            for _, variant, _, _ in self._launches
        )
        bound = []
        for launcher, variant, tiled, values in self._launches:
            takes_scratch = variant.structure.takes_scratch
            blocks = coefficient_programs(spec, variant.structure, heads)
            if tiled:
                blocks = variant.programs_per_row(spec.head_dim, heads)
            fixed = (*strides, size, *scalars) if takes_scratch else (*strides, *scalars)
            bound.append((launcher, blocks, takes_scratch, fixed, values))

        if len(bound) == 1 and not self._needs_scratch:
            launcher, blocks, _, fixed, values = bound[0]

            def launch_one(tensors: Sequence[Tensor], null_slot: int, stream: int) -> None:
                launcher(blocks, rows, stream, *tensors, *fixed, null_slot, *values)

            return launch_one

        def launch_all(tensors: Sequence[Tensor], null_slot: int, stream: int) -> None:
            between: tuple[Tensor, ...] = ()
            if self._needs_scratch:
                between = (torch.empty((rows, size), dtype=torch.float32, device=tensors[0].device),)
            for launcher, blocks, takes_scratch, fixed, values in bound:
                extra = between if takes_scratch else ()
                launcher(blocks, rows, stream, *tensors, *extra, *fixed, null_slot, *values)

        return launch_all


def begins_early(variant: Variant, variants: Sequence[Variant]) -> bool:
    """Whether the main kernel of ``variant`` may begin while the launch before it still runs.

    It may beside the other branch, no row being in both, and beside coefficients, which it waits for itself.
    Where both branches have coefficients before, that which goes first begins when all of them have ended:
    the other, which begins beside it, waits for nothing.
    """
    if variant.structure.role not in ("both", LEADING_ROLE):
        return len(variants) > 1
    others = [other for other in variants if other != variant]
    return _precomputed(variant) and not any(map(_precomputed, others))


def _precomputed(variant: Variant) -> bool:
    return variant.structure.coefficients == "precomputed"


def _launcher(
    path: Path,
    name: str,
    spec: Spec,
    variant: Variant,
    dtypes: tuple[str, ...],
    aligned: bool,
    beside: bool,
) -> Callable[..., None]:
    kernel = getattr(load_module(path), name)
    if not hasattr(kernel, "cache_key"):  # Triton's interpreter
        return functools.partial(interpret, kernel)
    return _compiled(path, name, spec, variant, dtypes, aligned, beside, torch.cuda.current_device())


@functools.lru_cache(maxsize=8192)
def _compiled(
    path: Path,
    name: str,
    spec: Spec,
    variant: Variant,
    dtypes: tuple[str, ...],
    aligned: bool,
    beside: bool,
    device_index: int,
) -> Callable[..., None]:
    del device_index  # of the key alone: a binary is loaded per device
    kernel = getattr(load_module(path), name)

    def compile_for(target: GPUTarget) -> Any:
        return compile_kernel(kernel, spec, variant, target, dtypes, aligned=aligned, tiled=name == "step")

    return loaded(compile_for, beside)


def loaded(compile_for: Callable[[GPUTarget], Any], beside: bool = False) -> Callable[..., None]:
    """Compile for the current device and load; arguments and result are those of :func:`bind_binary`.

    Raises:
        CompileError: As ``compile_for`` raises it.
        ToolchainError: There is no C compiler.
    """
    global compilations
    compilations += 1
    try:
        target = triton.runtime.driver.active.get_current_target()
        return bind_binary(compile_for(target), beside and can_overlap(target))
    except (RuntimeError, subprocess.CalledProcessError) as error:
        explain_launcher_error(error)
        raise


def explain_launcher_error(error: Exception) -> None:
    """Say so where ``error`` is of the C compiler, which Triton builds launchers with.

    Raises:
        ToolchainError: It is.
    """
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error):
        raise ToolchainError(
            f"triton cannot build the launcher of a kernel: {error}",
            hint="install gcc or clang and Python's headers, or set CC",
        ) from error


def bind_binary(compiled: Any, beside: bool = False) -> Callable[..., None]:
    """The launch of a compiled kernel: a function of blocks, rows, raw stream and all its parameters.

    Args:
        compiled: Of Triton, and nobody else's: how it is launched is kept with it.
        beside: It may begin while the launch before it in the stream still runs, if that one says so.
    """
    compiled._init_handles()
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if beside:
        # Triton makes it a compiler's option, though it is an attribute of a launch alone.
        run.launch_pdl = True

    def launch(blocks: int, rows: int, stream: int, *arguments: object) -> None:
        run(blocks, rows, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


def _overlap_allowed() -> bool:
    """Whether launches may overlap on this machine, as far as its GPU can; see :data:`OVERLAP_VARIABLE`."""
    driver: Callable[[], int] = getattr(torch._C, "_cuda_getDriverVersion", int)
    return os.environ.get(OVERLAP_VARIABLE, "") != "0" and driver() >= _OVERLAP_DRIVER


def interpret(kernel: Any, blocks: int, rows: int, stream: int, *arguments: object) -> None:
    """As a function of :func:`bind_binary`, in Triton's interpreter."""
    del stream
    kernel[(blocks, rows)](*arguments)
