"""Compiling a generated kernel for a target: signature, alignment and options in one place.

Kernels are compiled ahead of their first launch with :func:`triton.compile` rather than through
the just-in-time path: the signature is then the same for every pool layout (strides are always
64-bit run-time arguments), nothing is specialised on values, and a launch costs no argument
analysis. Needs no GPU: any target can be compiled for on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .abi import (
    TensorArgument,
    compiled_tile,
    constexprs,
    next_power_of_two,
    scalar_arguments,
    tensor_arguments,
)
from .errors import CompileError
from .plan import Structure, Tile, Variant
from .spec import DTYPE_BYTES, Spec

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

ALIGNMENT_BYTES = 16
"""Vector width of a load: pointers and strides of an aligned call are multiples of it."""

_ITEM_BYTES = {**DTYPE_BYTES, "i32": 4, "i64": 8}


def can_overlap(target: GPUTarget) -> bool:
    """Whether a launch can begin while the one before it still runs: programmatic dependent launch."""
    return target.backend == "cuda" and int(target.arch) >= 90


def constants(variant: Variant, *, tiled: bool = True, overlap: bool = False) -> tuple[object, ...]:
    """Values of the ``tl.constexpr`` parameters, in the order of :func:`.abi.constexprs`.

    Args:
        variant: The point.
        tiled: Of its main kernel.
        overlap: The target's :func:`can_overlap`; means nothing to a launch of what is compiled.
    """
    tile = variant.tile
    tile_values = (
        tile.block_p,
        tile.block_n,
        tile.fold_block_n,
        tile.heads_per_program,
        next_power_of_two(tile.heads_per_program),
        tile.num_stages,
        "evict_first" if tile.evict_first else "",
    )
    return (*(tile_values if tiled else ()), *((overlap,) if variant.structure.overlaps else ()))


def default_dtypes(spec: Spec, structure: Structure) -> tuple[str, ...]:
    """Element dtypes of the tensor arguments as the spec implies them."""
    return tuple(t.dtype for t in tensor_arguments(spec, structure))


def source(
    kernel: Any,
    spec: Spec,
    variant: Variant,
    dtypes: tuple[str, ...],
    *,
    aligned: bool,
    tiled: bool = True,
    overlap: bool = False,
) -> ASTSource:
    """The unit that Triton compiles: ``kernel`` with its types, tile numbers and alignment.

    Args:
        kernel: ``step`` or ``coefficients`` of a generated module.
        dtypes: Element dtype of each tensor argument (``fp32``, ``bf16``, ``fp16``, ``i32``, ``i64``).
        aligned: All pointers and strides of vector-loaded tensors are multiples of 16 bytes.
        tiled: The kernel takes the tile arguments (``coefficients`` does not).
        overlap: The target's :func:`can_overlap`.
    """
    names = constexprs(variant.structure, tiled=tiled)
    values = dict(zip(names, constants(variant, tiled=tiled, overlap=overlap), strict=True))
    tensors = tensor_arguments(spec, variant.structure)
    return typed(kernel, tensors, dtypes, scalar_arguments(spec, variant.structure), values, aligned=aligned)


def typed(
    kernel: Any,
    tensors: Sequence[TensorArgument],
    dtypes: Sequence[str | None],
    scalars: Sequence[str],
    values: Mapping[str, object],
    *,
    aligned: bool,
    multiples: Sequence[str] = (),
) -> ASTSource:
    """The unit that Triton compiles, of any generated kernel: pointers, strides, scalars, constants.

    Args:
        kernel: A function of a generated module.
        tensors: In the order of its pointers.
        dtypes: As in :func:`source`; None for a tensor that is left out.
        scalars: Its scalars, int32, in order.
        values: Its ``tl.constexpr`` parameters, in order.
        aligned: As in :func:`source`.
        multiples: Scalars that are multiples of 16 where ``aligned``.
    """
    signature: dict[str, str] = {}
    left_out: dict[str, object] = {}
    multiple_of = dict.fromkeys(multiples, ALIGNMENT_BYTES)
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        signature[tensor.pointer] = f"*{dtype}" if dtype else "constexpr"
        if dtype is None:
            left_out[tensor.pointer] = None
        elif tensor.vectorized:
            multiple_of[tensor.pointer] = ALIGNMENT_BYTES
            multiple_of |= dict.fromkeys(tensor.strides, ALIGNMENT_BYTES // _ITEM_BYTES[dtype])
    signature |= dict.fromkeys((name for tensor in tensors for name in tensor.strides), "i64")
    signature |= dict.fromkeys(scalars, "i32")
    signature |= dict.fromkeys(values, "constexpr")
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    if aligned:
        names = tuple(signature)
        attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in multiple_of.items()}
    return ASTSource(kernel, signature, {**left_out, **values}, attributes)


def options(tile: Tile) -> dict[str, object]:
    """Compiler options. Floating-point contraction is stated, since Triton's default changes."""
    stated: dict[str, object] = {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }
    if tile.max_registers:
        stated["maxnreg"] = tile.max_registers
    return stated


def compile_kernel(
    kernel: Any,
    spec: Spec,
    variant: Variant,
    target: GPUTarget,
    dtypes: tuple[str, ...] | None = None,
    *,
    aligned: bool = True,
    tiled: bool = True,
) -> CompiledKernel:
    """Compile one kernel of a generated module for ``target``.

    Raises:
        CompileError: The compiler refused the kernel, or crashed on it.
    """
    dtypes = dtypes or default_dtypes(spec, variant.structure)
    overlap = can_overlap(target)
    unit = source(kernel, spec, variant, dtypes, aligned=aligned, tiled=tiled, overlap=overlap)
    stated = options(compiled_tile(spec, variant, tiled=tiled))
    return compile_unit(unit, stated, target, f"{spec.key} {variant.key}")


def compile_unit(
    unit: ASTSource, stated: Mapping[str, object], target: GPUTarget, name: str
) -> CompiledKernel:
    """Compile ``unit`` with options as :func:`options` states them; ``name`` is for the message.

    Raises:
        CompileError: The compiler refused the kernel, or crashed on it.
    """
    try:
        return triton.compile(unit, target=target, options=dict(stated))
    except Exception as error:
        detail = str(error).strip().splitlines()
        raise CompileError(
            f"{name} does not compile for {target.backend}:{target.arch} with triton "
            f"{triton.__version__}: {detail[-1] if detail else type(error).__name__}"
        ) from error
