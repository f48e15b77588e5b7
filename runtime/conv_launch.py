"""CUDA implementations of the convolution's ops: look the tile up, compile once, launch.

Kernels are compiled ahead of their launch from dtypes and constants alone, as those of steps are (see
:mod:`.build`): strides and sizes are run-time arguments, and there is one compilation for pointers,
strides and channels that allow loads of 16 bytes, one for any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from .abi import TensorArgument
from .build import ALIGNMENT_BYTES, compile_unit, typed
from .compiled import Launch, interpret, loaded
from .contracts import CONV_SEED, CONV_STEP, Contract
from .conv import ConvSignature
from .conv_lookup import find_tile
from .conv_tiles import ConvSpec, ConvTile, default_tile, effective_batch
from .dtypes import DTYPE_NAMES
from .launch import Launcher, gpu_info
from .lookup import announce, default_lookup
from .modules import CONVOLUTION, load_module, shared_path

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel


@dataclass(frozen=True)
class Kernel:
    """A kernel of the module: its parameters, in order. Constants end with the channels of a program."""

    contract: Contract
    tensors: tuple[TensorArgument, ...]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]

    @property
    def function(self) -> Any:
        """The kernel itself, loaded."""
        return getattr(load_module(shared_path(CONVOLUTION)), self.contract.name)


STEP: Final = Kernel(
    CONV_STEP,
    (
        TensorArgument("ring", "bf16", ("slot", "token"), True),
        TensorArgument("ring_start", "i32"),
        TensorArgument("ring_len", "i32"),
        TensorArgument("slot_index", "i32"),
        TensorArgument("x", "bf16", ("token",), True),
        TensorArgument("weight", "bf16", ("channel",)),
        TensorArgument("bias", "bf16"),
        TensorArgument("query_start", "i32"),
        TensorArgument("out", "bf16", ("token",), True),
    ),
    ("channels", "ring_capacity", "tokens", "null_slot"),
    ("NUM_TOKENS", "TOKEN_BLOCK", "WIDTH", "SILU", "BLOCK"),
)
SEED: Final = Kernel(
    CONV_SEED,
    (
        TensorArgument("ring", "bf16", ("slot", "token"), True),
        TensorArgument("ring_start", "i32"),
        TensorArgument("slots", "i32"),
        TensorArgument("history", "bf16", ("row", "token"), True),
    ),
    ("channels", "ring_capacity", "null_slot"),
    ("HISTORY", "BLOCK"),
)


@functools.cache
def tile_for(spec: ConvSpec, batch: int, device_index: int) -> ConvTile:
    """The tile that serves an effective batch, announced once."""
    found = find_tile(default_lookup(), spec, batch, gpu_info(device_index))
    announce(found.reason)
    return found.tile


@dataclass(frozen=True)
class Choice:
    """What a kernel is compiled for, besides dtypes and alignment."""

    constants: tuple[int, ...]
    """In order; the last is the channels of a program."""
    warps: int


class _ConvLauncher(Launcher):
    """Of one kernel, for a grid of channels by rows.

    Args:
        kernel: Which kernel.
        choice: What it is compiled for.
        strides: As in :class:`.launch.Launcher`.
        dtypes: As in :class:`.launch.Launcher`.
        rows: Sequences.
        scalars: All but the null slot, in order, channels first.
        device_index: CUDA device.
    """

    def __init__(
        self,
        kernel: Kernel,
        choice: Choice,
        strides: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, str],
        rows: int,
        scalars: tuple[int, ...],
        device_index: int,
    ) -> None:
        super().__init__(kernel.contract.kernel_names, kernel.tensors, strides, dtypes, device_index)
        self.kernel, self.choice = kernel, choice
        self._rows, self._scalars = rows, scalars

    def prepare(self, aligned: bool) -> Launch:
        aligned &= not self._scalars[0] % ALIGNMENT_BYTES
        run = _launch_of(self.kernel, self.choice, self._dtypes, aligned, self._device_index)
        constants, rows, fixed = self.choice.constants, self._rows, (*self._strides, *self._scalars)
        blocks = -(-self._scalars[0] // constants[-1])

        def launch(tensors: Sequence[Tensor], null_slot: int, stream: int) -> None:
            run(blocks, rows, stream, *tensors, *fixed, null_slot, *constants)

        return launch


def prepare(signature: ConvSignature, device_index: int) -> Launcher:
    """What launches calls of ``conv_step`` with ``signature``, worked out once and kept with it."""
    launcher = _step_launcher(signature, device_index)
    object.__setattr__(signature, "launcher", launcher)
    return launcher


def _step_launcher(signature: ConvSignature, device_index: int) -> _ConvLauncher:
    spec, channels = conv_spec(signature), signature.sizes["channels"]
    tile = tile_for(spec, effective_batch(signature.rows, channels), device_index)
    return tiled_launcher(signature, tile, device_index)


def conv_spec(signature: ConvSignature) -> ConvSpec:
    """What the tile of a call of ``conv_step`` is looked up by."""
    dtypes = (signature.dtypes[name] for name in ("x", "ring", "weight"))
    return ConvSpec(signature.sizes["width"], signature.num_tokens, *dtypes)


def tiled_launcher(signature: ConvSignature, tile: ConvTile, device_index: int) -> _ConvLauncher:
    """What launches calls of ``conv_step`` with ``signature`` by a given tile: serving and tuning alike."""
    channels, capacity, tokens = (signature.sizes[dim] for dim in ("channels", "capacity", "tokens"))
    choice = step_choice(conv_spec(signature), tile, signature.silu)
    scalars = (channels, capacity, tokens)
    return _ConvLauncher(
        STEP, choice, signature.strides, signature.dtypes, signature.rows, scalars, device_index
    )


def step_choice(spec: ConvSpec, tile: ConvTile, silu: bool) -> Choice:
    """What the kernel of ``conv_step`` is compiled for."""
    return Choice((spec.num_tokens, spec.token_block, spec.width, silu, tile.block), tile.num_warps)


def launch_conv_seed(
    history: Tensor, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int
) -> None:
    """CUDA implementation of :func:`.conv.conv_seed`; all arguments have been checked.

    Raises:
        CompileError: The kernel does not compile.
        ToolchainError: There is no C compiler.
    """
    if len(slots):
        tensors = (history, ring, ring_start, slots)
        _seed_launcher(tensors, history.get_device()).launch(tensors, null_slot)


def _seed_launcher(tensors: tuple[Tensor, ...], device_index: int) -> _ConvLauncher:
    (rows, length, channels), capacity = tensors[0].shape, tensors[1].shape[1]
    tile = default_tile(effective_batch(rows, channels), 1)
    given = dict(zip(CONV_SEED.names, tensors, strict=True))
    strides = {name: tensor.stride() for name, tensor in given.items()}
    dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in given.items()}
    choice = Choice((length, tile.block), tile.num_warps)
    return _ConvLauncher(SEED, choice, strides, dtypes, rows, (channels, capacity), device_index)


def compile_ahead(
    steps: Sequence[ConvSignature], seeds: Sequence[tuple[Tensor, ...]], aligned: bool, device_index: int
) -> int:
    """CUDA implementation of :func:`.conv.warmup_conv`.

    Args:
        steps: Calls of ``conv_step`` to come.
        seeds: Tensors of calls of ``conv_seed`` to come.
        aligned: As there.
        device_index: CUDA device.

    Raises:
        CompileError: A kernel does not compile.
        ToolchainError: There is no C compiler.
    """
    launchers = [_step_launcher(signature, device_index) for signature in steps]
    launchers += [_seed_launcher(tensors, device_index) for tensors in seeds]
    for launcher in launchers:
        launcher.prepare(aligned)
    return len({(launcher.kernel, launcher.choice) for launcher in launchers})


def _launch_of(
    kernel: Kernel, choice: Choice, dtypes: tuple[str | None, ...], aligned: bool, device_index: int
) -> Callable[..., None]:
    function = kernel.function
    if not hasattr(function, "cache_key"):  # Triton's interpreter
        return functools.partial(interpret, function)
    with torch.cuda.device(device_index):
        return _compiled(kernel, choice, dtypes, aligned, device_index)


@functools.lru_cache(maxsize=1024)
def _compiled(
    kernel: Kernel, choice: Choice, dtypes: tuple[str | None, ...], aligned: bool, device_index: int
) -> Callable[..., None]:
    del device_index  # of the key alone: a binary is loaded per device
    return loaded(lambda target: compile_kernel(kernel, choice, dtypes, target, aligned=aligned))


def compile_kernel(
    kernel: Kernel, choice: Choice, dtypes: Sequence[str | None], target: GPUTarget, *, aligned: bool
) -> CompiledKernel:
    """Compile a kernel of the module for ``target``, of this machine or not.

    Args:
        kernel: Which kernel.
        choice: Its constants and warps.
        dtypes: Short dtype names of its tensors, None for absent ones.
        target: Triton's.
        aligned: Pointers and strides of vectorised tensors are multiples of 16 bytes, channels of 16.

    Raises:
        CompileError: The compiler refused it, or crashed on it.
    """
    values = dict(zip(kernel.constants, choice.constants, strict=True))
    unit = typed(
        kernel.function,
        kernel.tensors,
        dtypes,
        kernel.scalars,
        values,
        aligned=aligned,
        multiples=["channels"],
    )
    options = {"num_warps": choice.warps, "num_stages": 1, "enable_fp_fusion": True}
    return compile_unit(unit, options, target, kernel.contract.name)
