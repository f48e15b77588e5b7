"""Cross-compiling the points of a space, on any machine: what each would take of its target.

:func:`compile_variant` compiles one point in this process, a :class:`.pool.CompilePool` many, in worker
processes that can be killed. Both leave the binaries in Triton's disk cache, where whoever launches
the same point (see :mod:`..runtime.compiled`) finds them. :func:`select` then says which points are
worth a launch, and why the others are not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..runtime.abi import compiled_tile
from ..runtime.conv_tiles import ConvSpec, ConvTile
from ..runtime.errors import CompileError, ToolchainError
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from ..runtime.table import Binary
from .cache import rendered
from .files import DISK_ERRORS, emit_error
from .targets import Gpu, Limits, triton_target

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

MAX_SPILLS_BYTES: Final = 512
"""Stack per thread above which a point is not worth a launch.

Kernels that fold and read spill in one of their branches: some with 250 to 430 bytes were the fastest of
their kind (drafts, H200).
"""

INSTRUCTION_BYTES: Final = 16
"""Size of one machine instruction, compute capability 7.0 and newer."""

_REGISTER_UNIT: Final = 8
"""Registers of a thread are handed out in units of this."""


@dataclass(frozen=True)
class KernelBinary:
    """What the compiler made of one kernel.

    Args:
        name: ``step`` or ``coefficients``.
        registers: Per thread.
        spills_bytes: Stack per thread: local memory that registers were spilled to.
        shared_bytes: Per program.
        size_bytes: Of the machine code: debug information names files, whose paths differ.
        instructions: Of the machine code, padding included.
        digest: Of the machine code alone: debug information does not count. 16 hex digits.
    """

    name: str
    registers: int
    spills_bytes: int
    shared_bytes: int
    size_bytes: int
    instructions: int
    digest: str


@dataclass(frozen=True)
class Compiled:
    """Result of one job.

    Args:
        spec, variant: The job.
        kernels: In launch order; empty if compiling failed.
        status: ``ok``, ``compile`` (the compiler refused), ``crash`` or ``timeout``, as in the
            tuner's measurements.
        reason: Why there are no kernels; "" when ``ok``.
        seconds: Wall time.
    """

    spec: Spec
    variant: Variant
    kernels: tuple[KernelBinary, ...] = ()
    status: str = "ok"
    reason: str = ""
    seconds: float = 0.0

    @property
    def step(self) -> KernelBinary:
        """The kernel that moves the state."""
        return self.kernels[-1]

    def binary(self, triton_version: str) -> Binary:
        """The record of a table's row: the largest of its kernels' needs, one digest over all."""
        digest = hashlib.sha256("".join(kernel.digest for kernel in self.kernels).encode()).hexdigest()[:16]
        return Binary(
            triton=triton_version,
            registers=max(kernel.registers for kernel in self.kernels),
            spills_bytes=max(kernel.spills_bytes for kernel in self.kernels),
            shared_bytes=max(kernel.shared_bytes for kernel in self.kernels),
            size_bytes=sum(kernel.size_bytes for kernel in self.kernels),
            digest=self.kernels[0].digest if len(self.kernels) == 1 else digest,
        )


Job = tuple[Spec, Variant]


@dataclass(frozen=True)
class TileJob:
    """A tile of the convolution to compile: its kernel with SiLU, packed rows and a bias."""

    spec: ConvSpec
    tile: ConvTile


@dataclass(frozen=True)
class Drop:
    """A point that is not worth a launch.

    Args:
        variant: The point.
        reason: What is counted, e.g. ``shared memory``.
        detail: The figures, or the key of the point with the same binary.
    """

    variant: Variant
    reason: str
    detail: str = ""


def require_any(results: Iterable[Compiled]) -> None:
    """Refuse results of which not one is a kernel: then it is not the points that are at fault.

    Raises:
        CompileError: So it is; the message has the first reason.
    """
    failed: list[Compiled] = []
    for result in results:
        if result.status == "ok":
            return
        failed.append(result)
    if failed:
        first = failed[0]
        raise CompileError(
            f"nothing compiles, of {len(failed)} tried; the first ended as {first.status}: {first.reason}",
            where=f"{first.spec.key} {first.variant.key}",
            hint="it is not the kernels: see to triton, to the disk its cache is on, and to memory",
        )


def select(
    results: Iterable[Compiled], limits: Limits, keep: Variant | None = None
) -> tuple[tuple[Compiled, ...], tuple[Drop, ...]]:
    """Divide compiled points of one spec and role into those worth a launch and the others.

    Of points with the same binary, grid and launch the first one stays. ``keep`` (the default
    point) is only dropped if it cannot run at all.

    Args:
        results: In the order of the space.
        limits: Of the target.
        keep: Never dropped for spills or as a duplicate.
    """
    ordered = sorted(results, key=lambda result: result.variant != keep)
    kept: list[Compiled] = []
    dropped: list[Drop] = []
    first: dict[tuple[object, ...], Compiled] = {}
    for result in ordered:
        drop = _over_limits(result, limits, is_default=result.variant == keep)
        if drop is None:
            same = first.setdefault(_launch_identity(result), result)
            if same is not result:
                drop = Drop(result.variant, "same binary", same.variant.key)
        if drop is None:
            kept.append(result)
        else:
            dropped.append(drop)
    return tuple(kept), tuple(dropped)


def _over_limits(result: Compiled, limits: Limits, *, is_default: bool) -> Drop | None:
    variant = result.variant
    if result.status != "ok":
        return Drop(variant, result.status, result.reason)
    for kernel in result.kernels:
        warps = compiled_tile(result.spec, variant, tiled=kernel.name == "step").num_warps
        registers = -(-kernel.registers // _REGISTER_UNIT) * _REGISTER_UNIT * 32 * warps
        if kernel.shared_bytes > limits.shared_bytes_per_block:
            detail = f"{kernel.shared_bytes} of {limits.shared_bytes_per_block} bytes"
            return Drop(variant, "shared memory", detail)
        if registers > limits.registers_per_sm:
            return Drop(variant, "registers", f"{registers} of {limits.registers_per_sm}")
        if kernel.spills_bytes > MAX_SPILLS_BYTES and not is_default:
            return Drop(variant, "spills", f"{kernel.spills_bytes} bytes a thread")
    return None


def _launch_identity(result: Compiled) -> tuple[object, ...]:
    tile = result.variant.tile
    return (
        result.spec,
        tuple((kernel.name, kernel.digest, kernel.shared_bytes) for kernel in result.kernels),
        tile.block_p,
        tile.heads_per_program,
        tile.num_warps,
    )


def compile_variant(spec: Spec, variant: Variant, gpu: Gpu, modules: Path) -> Compiled:
    """Compile one point for ``gpu`` in this process, for aligned tensors of the spec's dtypes.

    Args:
        modules: Folder for rendered modules.

    Raises:
        ToolchainError: The compiler cannot be run.
        EmitError: The module or the compiler's cache cannot be written.
    """
    from triton.backends.compiler import GPUTarget

    from ..runtime.build import compile_kernel
    from ..runtime.modules import load_module

    start = time.monotonic()
    target = triton_target(gpu)
    gpu_target = GPUTarget(target.backend, target.arch, target.warp_size)
    module = load_module(rendered(modules)(spec, variant.structure))
    kernels = []
    for name in variant.structure.kernels:
        try:
            kernel = compile_kernel(getattr(module, name), spec, variant, gpu_target, tiled=name == "step")
        except CompileError as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                cache = os.environ.get("TRITON_CACHE_DIR", "~/.triton")
                if cause.errno in DISK_ERRORS:
                    raise emit_error(Path(cache), cause) from error
                raise ToolchainError(
                    f"the compiler cannot work: {cause}",
                    where=f"cache {cache}",
                    hint="see whether it can be written, and whether its tools start",
                ) from error
            reason = str(error)
            return Compiled(spec, variant, (), "compile", reason, time.monotonic() - start)
        kernels.append(_inspect(name, kernel))
    return Compiled(spec, variant, tuple(kernels), seconds=time.monotonic() - start)


def compile_tile(job: TileJob, gpu: Gpu) -> str:
    """Compile a tile for ``gpu`` in this process; empty, or why it does not compile."""
    from triton.backends.compiler import GPUTarget

    from ..runtime.conv_launch import STEP, compile_kernel, step_choice

    spec, target = job.spec, triton_target(gpu)
    x, ring, weight = spec.activation_dtype, spec.ring_dtype, spec.weight_dtype
    dtypes = (ring, "i32", "i32", "i32", x, weight, weight, "i32", x)
    gpu_target = GPUTarget(target.backend, target.arch, target.warp_size)
    try:
        compile_kernel(STEP, step_choice(spec, job.tile, silu=True), dtypes, gpu_target, aligned=True)
    except CompileError as error:
        return str(error)
    return ""


def check_toolchain(launching: bool = False) -> str:
    """Version of Triton, if everything that compiling needs is here.

    Args:
        launching: Kernels are also to be launched: Triton then builds a launcher in C.

    Raises:
        ToolchainError: Something is missing or does not start; the message says what to install.
    """
    if importlib.util.find_spec("triton") is None:
        raise ToolchainError(
            "triton is not installed", hint="install it (on Linux: pip install triton), or torch with it"
        )
    import triton

    for name in ("ptxas", "cuobjdump"):
        try:
            subprocess.run([_tool(name), "--version"], check=True, capture_output=True, timeout=60)
        except Exception as error:
            raise ToolchainError(
                f"{name}, which comes with triton {triton.__version__}, does not start: {error}",
                hint=f"install triton again, or point TRITON_{name.upper()}_PATH at one that works",
            ) from error
    if launching:
        compiler = os.environ.get("CC") or "cc"
        if not any(shutil.which(name) for name in (compiler, "clang", "gcc")):
            raise ToolchainError(
                f"no C compiler ({compiler}, clang or gcc): triton builds launchers with it",
                hint="install gcc or clang, or set CC",
            )
    return str(triton.__version__)


def _tool(name: str) -> str:
    """Path of one of the vendor's tools that come with triton."""
    import triton

    return str(getattr(triton.knobs.nvidia, name).path)


def _inspect(name: str, kernel: CompiledKernel) -> KernelBinary:
    cubin: bytes = kernel.asm["cubin"]
    registers, stack = _resources(cubin)
    code = _sections(cubin, ".text.")
    return KernelBinary(
        name=name,
        registers=registers,
        spills_bytes=stack,
        shared_bytes=int(kernel.metadata.shared),
        size_bytes=len(code),
        instructions=len(code) // INSTRUCTION_BYTES,
        digest=hashlib.sha256(code).hexdigest()[:16],
    )


_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as the vendor's tool reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool("cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    usage = _USAGE.search(text)
    if usage is None:
        raise ToolchainError("cuobjdump names no registers", hint="use a version of triton that is allowed")
    return int(usage[1]), int(usage[2])


def _sections(elf: bytes, prefix: str) -> bytes:
    """Contents of the sections of a 64-bit ELF file whose names start with ``prefix``."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    start = headers[names][4]
    found = b""
    for name, _, _, _, offset, length in headers:
        text = elf[start + name : elf.index(b"\0", start + name)]
        if text.startswith(prefix.encode()):
            found += elf[offset : offset + length]
    return found
