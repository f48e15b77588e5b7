"""CUDA implementations of the convolution's ops: compile once, launch.

Kernels are compiled ahead of their launch from dtypes and constants alone, as those of steps are (see
:mod:`.build`): strides and sizes are run-time arguments, and there is one compilation for pointers,
strides and channels that allow loads of 16 bytes, one for any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from . import compiled
from .abi import next_power_of_two
from .build import ALIGNMENT_BYTES
from .conv import Convolution
from .dtypes import DTYPE_NAMES
from .errors import CompileError
from .launch import _raw_stream
from .modules import CONVOLUTION, load_module, shared_path

TILES: Final = ((4096, 512, 4), (1024, 256, 2), (0, 128, 1))
"""Least rows x blocks of 128 channels, channels of a program, its warps. Chosen by hand, never tuned."""

_VALUES_PER_WARP: Final = 1024
"""Tokens x channels a warp holds at most: 32 values a thread."""


@dataclass(frozen=True)
class _Kernel:
    """One kernel of the module: its parameters, in order."""

    name: str
    tensors: tuple[str, ...]
    strides: tuple[tuple[str, int, str], ...]
    """Tensor, dimension, and what the kernel calls that."""
    scalars: tuple[str, ...]
    """All but ``null_slot``, which is last."""
    constants: tuple[str, ...]
    vectorized: tuple[str, ...]

    def parameters(self) -> tuple[str, ...]:
        pointers = (f"{name}_ptr" for name in self.tensors)
        strides = (f"{name}_stride_{dim}" for name, _, dim in self.strides)
        return (*pointers, *strides, *self.scalars, "null_slot", *self.constants)


_STEP: Final = _Kernel(
    "conv_step",
    (
        "ring", "ring_start", "ring_len", "slot_index", "x", "weight", "bias", "query_start", "out",
    ),
    (
        ("ring", 0, "slot"), ("ring", 1, "token"), ("x", 0, "token"), ("weight", 0, "channel"),
        ("out", 0, "token"),
    ),
    ("channels", "ring_capacity", "tokens"),
    ("NUM_TOKENS", "TOKEN_BLOCK", "WIDTH", "SILU", "BLOCK"),
    ("ring", "x", "out"),
)  # fmt: skip
_SEED: Final = _Kernel(
    "conv_seed",
    ("ring", "ring_start", "slots", "history"),
    (("ring", 0, "slot"), ("ring", 1, "token"), ("history", 0, "row"), ("history", 1, "token")),
    ("channels", "ring_capacity"),
    ("HISTORY", "BLOCK"),
    ("ring", "history"),
)


def tile(rows: int, channels: int, tokens: int) -> tuple[int, int]:
    """Channels of a program and its warps, for rows of so many tokens (a power of two)."""
    programs = rows * -(-channels // 128)
    block, warps = next((block, warps) for least, block, warps in TILES if programs >= least)
    return max(16, min(block, _VALUES_PER_WARP * warps // tokens)), warps


def launch_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    query_start: Tensor | None,
    out: Tensor,
    window: int,
    num_tokens: int,
    silu: bool,
    null_slot: int,
    call: Convolution,
) -> None:
    """CUDA implementation of :func:`.conv.conv_step`; all arguments have been checked.

    Raises:
        CompileError: The kernel does not compile.
        ToolchainError: There is no C compiler.
    """
    tensors = (ring, ring_start, ring_len, slot_index, x, weight, bias, query_start, out)
    launcher: _Launcher | None = call.launcher
    if launcher is None:
        (tokens, channels), width = x.shape, weight.shape[1]
        token_block = next_power_of_two(num_tokens)
        block, warps = tile(len(slot_index), channels, token_block)
        launcher = _Launcher(
            _STEP, tensors, len(slot_index), (channels, ring.shape[1], tokens),
            (num_tokens, token_block, width, silu, block), warps,
        )  # fmt: skip
        object.__setattr__(call, "launcher", launcher)
    launcher.launch(tensors, null_slot)


def launch_conv_seed(
    history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int
) -> None:
    """CUDA implementation of :func:`.conv.conv_seed`; errors as in :func:`launch_conv_step`."""
    rows, length, channels = history.shape
    tensors = (ring, ring_start, slots, history)
    block, warps = tile(rows, channels, 1)
    scalars = (channels, ring.shape[1])
    _Launcher(_SEED, tensors, rows, scalars, (length, block), warps).launch(tensors, null_slot)


class _Launcher:
    """What launches of one signature share.

    Args:
        kernel: Which kernel.
        tensors: Its tensors in order, optional ones None.
        rows: The second dimension of the grid.
        scalars: In order, channels first.
        constants: In order, channels of a program last.
        warps: Of a program.
    """

    def __init__(
        self,
        kernel: _Kernel,
        tensors: Sequence[Tensor | None],
        rows: int,
        scalars: tuple[int, ...],
        constants: tuple[object, ...],
        warps: int,
    ) -> None:
        given = dict(zip(kernel.tensors, tensors, strict=True))
        first = tensors[0]
        assert first is not None
        self._device_index = first.get_device()
        self._kernel, self._rows, self._constants, self._warps = kernel, rows, constants, warps
        self._blocks = -(-scalars[0] // int(str(constants[-1])))
        self._dtypes = tuple(None if t is None else DTYPE_NAMES[t.dtype] for t in tensors)
        strides, aligned = [], not scalars[0] % ALIGNMENT_BYTES
        for name, dimension, _ in kernel.strides:
            tensor = given[name]
            assert tensor is not None
            strides.append(tensor.stride(dimension))
            if name in kernel.vectorized:
                aligned &= not strides[-1] * tensor.element_size() % ALIGNMENT_BYTES
        self._fixed = (*strides, *scalars)
        self._strides_aligned = aligned
        self._vectorized = tuple(kernel.tensors.index(name) for name in kernel.vectorized)
        self._launches: list[Callable[..., None] | None] = [None, None]

    def launch(self, tensors: Sequence[Tensor | None], null_slot: int) -> None:
        """Launch on the current stream; ``tensors`` in argument order."""
        aligned = self._strides_aligned
        if aligned:
            pointers = 0
            for index in self._vectorized:
                tensor = tensors[index]
                pointers |= 0 if tensor is None else tensor.data_ptr()
            aligned = not pointers % ALIGNMENT_BYTES
        launch = self._launches[aligned]
        if launch is None:
            launch = self._launches[aligned] = self._prepare(aligned)
        stream = _raw_stream(self._device_index) if self._device_index >= 0 else 0
        launch(self._blocks, self._rows, stream, *tensors, *self._fixed, null_slot, *self._constants)

    def _prepare(self, aligned: bool) -> Callable[..., None]:
        function = getattr(load_module(shared_path(CONVOLUTION)), self._kernel.name)
        if not hasattr(function, "cache_key"):  # Triton's interpreter
            return functools.partial(compiled.interpret, function)
        with torch.cuda.device(self._device_index):
            return _loaded(
                self._kernel, self._dtypes, self._constants, self._warps, aligned, self._device_index
            )


@functools.lru_cache(maxsize=1024)
def _loaded(
    kernel: _Kernel,
    dtypes: tuple[str | None, ...],
    constants: tuple[object, ...],
    warps: int,
    aligned: bool,
    device_index: int,
) -> Callable[..., None]:
    del device_index  # of the key alone: a binary is loaded per device
    compiled.compilations += 1
    function = getattr(load_module(shared_path(CONVOLUTION)), kernel.name)
    try:
        target = triton.runtime.driver.active.get_current_target()
        return compiled.bind_binary(
            compile_kernel(function, kernel, dtypes, constants, warps, target, aligned=aligned)
        )
    except (RuntimeError, CalledProcessError) as error:
        compiled.explain_launcher_error(error)
        raise


def compile_kernel(
    function: Any,
    kernel: _Kernel,
    dtypes: Sequence[str | None],
    constants: Sequence[object],
    warps: int,
    target: Any,
    *,
    aligned: bool,
) -> Any:
    """Compile a kernel of the module for ``target``, of this machine or not.

    Args:
        function: The kernel of the loaded module.
        kernel: Its parameters.
        dtypes: Short dtype names of its tensors, None for absent ones.
        constants: Values of its constants, in order.
        warps: Of a program.
        target: Triton's.
        aligned: Pointers and strides of vectorised tensors are multiples of 16 bytes, channels of 16.

    Raises:
        CompileError: The compiler refused it, or crashed on it.
    """
    names = kernel.parameters()
    values: dict[str, object] = dict(zip(kernel.constants, constants, strict=True))
    signature: dict[str, str] = {}
    hints: dict[str, int] = {}
    element_bytes = {}
    for name, dtype in zip(kernel.tensors, dtypes, strict=True):
        if dtype is None:
            signature[f"{name}_ptr"], values[f"{name}_ptr"] = "constexpr", None
            continue
        signature[f"{name}_ptr"] = f"*{dtype}"
        if name in kernel.vectorized:
            hints[f"{name}_ptr"] = ALIGNMENT_BYTES
            element_bytes[name] = 4 if dtype == "fp32" else 2
    for name, _, dimension in kernel.strides:
        signature[f"{name}_stride_{dimension}"] = "i64"
        if name in kernel.vectorized:
            hints[f"{name}_stride_{dimension}"] = ALIGNMENT_BYTES // element_bytes[name]
    signature |= dict.fromkeys((*kernel.scalars, "null_slot"), "i32")
    signature |= dict.fromkeys(kernel.constants, "constexpr")
    hints["channels"] = ALIGNMENT_BYTES
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    if aligned:
        attributes = {(names.index(name),): [["tt.divisibility", by]] for name, by in hints.items()}
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    try:
        return triton.compile(
            ASTSource(function, signature, values, attributes), target=target, options=options
        )
    except Exception as error:
        detail = str(error).strip().splitlines()
        raise CompileError(
            f"{kernel.name} does not compile for {target.backend}:{target.arch} with triton "
            f"{triton.__version__}: {detail[-1] if detail else type(error).__name__}"
        ) from error
