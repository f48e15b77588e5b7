"""The public ops, one function each, and their registration with torch.

Operators live in a namespace derived from the package that registers them, so that the tool and
several kernel packages can be imported into one process. Outside of compilation, tracing and
dispatch modes, a public function calls its implementation directly: torch's dispatcher costs more
than all checks together.

Ops have no gradient. Tensors that require one are refused under grad mode; decode under
``torch.no_grad()`` or ``torch.inference_mode()``.

Under ``torch.compile`` pass caches as separate tensors, strided as they like, or as views of disjoint
regions of one pool. Views of different dtypes that interleave in one byte pool are refused there by
torch; eager calls and CUDA graphs take them.

Row contract: ``slot_index`` names each row's slot, -1 (any negative number) or ``null_slot`` marks
padding. No slot may occur twice among the live rows of one call. Slots and cursors out of range raise
ArgumentError on a CPU, before anything is written; on a GPU they are not looked at. A step must not be
run twice on the same slots without the ``commit`` in between.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from . import checks, reference, signatures
from .dtypes import TORCH_DTYPES
from .errors import ArgumentError, ToolchainError
from .spec import DTYPE_BYTES, Spec

NAMESPACE: Final = (__package__ or "replayssm").removesuffix(".runtime").replace(".", "_")
"""Operators are ``torch.ops.<NAMESPACE>.<name>``."""


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    ring_x: Tensor,
    ring_b: Tensor,
    ring_decay: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-2 with a ring: outputs from old state and ring, a fold when it is full.

    ``delta = softplus(dt + dt_bias)``, ``S = exp(A delta) S + delta x B^T``, ``y = S C (+ D x) (silu(z))``.
    A row flushes iff ``ring_len + 1 > window``: its ring tokens are folded into ``state``. The new token
    is appended to the ring either way. Cursors are only read; :func:`commit` moves them, once per step
    after the last layer. Between a flushing step and its commit nothing else may read the slot.

    The innermost dimension of every tensor is contiguous, other strides are free. Outputs beyond the
    range of a 16-bit dtype become infinite; the state is not affected. Padded rows write zeros to
    their output and touch nothing else.

    Args:
        x: (rows, heads, head_dim), fp32, bf16 or fp16: the activation dtype.
        dt: (rows, heads), fp32, bf16 or fp16, raw.
        A: (heads,) fp32, negative.
        B: (rows, groups, state_size), activation dtype. Heads share a group's B and C.
        C: (rows, groups, state_size), activation dtype.
        state: (slots, heads, head_dim, state_size), fp32, bf16 or fp16; written by flushing rows.
        ring_x: (slots, heads, capacity, head_dim), activation dtype or fp32; appended to.
        ring_b: (slots, groups, capacity, state_size), dtype of ring_x; appended to.
        ring_decay: (slots, heads, capacity) fp32; ``delta`` is appended.
        ring_start: (slots,) int32, index of each ring's oldest token, below the capacity.
        ring_len: (slots,) int32, tokens in each ring, at most ``window``.
        slot_index: (rows,) int32 or int64.
        window: Tokens a ring holds before it is folded, 1 to 64; capacity is at least window + 1.
        D: (heads,), fp32, bf16 or fp16.
        z: (rows, heads, head_dim), activation dtype.
        dt_bias: (heads,), fp32, bf16 or fp16.
        dt_softplus: dt (after the bias) passes through softplus.
        null_slot: Slot that marks padding besides negative ones.
        out: (rows, heads, head_dim), activation dtype, memory of its own; None allocates it. An overlap
            with caches, x, dt, B, C or z is refused (in eager calls, from first to last byte).

    Returns:
        ``out``.

    Raises:
        ArgumentError: A tensor does not fit, or something is no tensor; the message says which, where
            and what to do.
        SpecError: No kernel serves the head dim, state size, window or dtypes.
        ToolchainError: CUDA tensors, and triton or the C compiler is missing.
    """
    null = _null(null_slot)
    if _goes_direct(x, state):
        signature = signatures.step_signature(
            x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
            slot_index, out, window, dt_softplus,
        )  # fmt: skip
        if signature.requires_grad and torch.is_grad_enabled():
            _refuse_grad(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, out=out)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        else:
            signatures.check_out(out, signature, x, dt, B, C, z, state, ring_x, ring_b, ring_decay)
        if not signature.rows:
            return out
        step = _launch_step if signature.device == "cuda" else _cpu_step
        step(
            x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
            slot_index, out, window, dt_softplus, null, signature,
        )  # fmt: skip
        return out
    checks.refuse_non_tensors(
        "mamba2_step", x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, ring_x=ring_x,
        ring_b=ring_b, ring_decay=ring_decay, ring_start=ring_start, ring_len=ring_len, slot_index=slot_index,
        out=out,
    )  # fmt: skip
    if torch.is_grad_enabled():
        _refuse_grad(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, out=out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _STEP(
        x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
        slot_index, out, window, dt_softplus, null,
    )  # fmt: skip
    return out


def mamba2_native_step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    state: Tensor,
    slot_index: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    null_slot: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One decode step of Mamba-2 that reads and writes the state: the baseline without a ring.

    Arguments, result and errors are those of :func:`mamba2_step`; every live row's state is written.
    """
    null = _null(null_slot)
    if _goes_direct(x, state):
        signature = signatures.native_signature(
            x, dt, A, B, C, D, z, dt_bias, state, slot_index, out, dt_softplus
        )
        if signature.requires_grad and torch.is_grad_enabled():
            _refuse_grad(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, out=out)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        else:
            signatures.check_out(out, signature, x, dt, B, C, z, state)
        if not signature.rows:
            return out
        step = _launch_native_step if signature.device == "cuda" else _cpu_native_step
        step(x, dt, A, B, C, D, z, dt_bias, state, slot_index, out, dt_softplus, null, signature)
        return out
    checks.refuse_non_tensors(
        "mamba2_native_step", x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state,
        slot_index=slot_index, out=out,
    )  # fmt: skip
    if torch.is_grad_enabled():
        _refuse_grad(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, out=out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _NATIVE_STEP(x, dt, A, B, C, D, z, dt_bias, state, slot_index, out, dt_softplus, null)
    return out


def commit(
    accepted: Tensor,
    *,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int = 1,
    capacity: int,
    null_slot: int | None = None,
) -> None:
    """Move the cursors after a step of all layers; the only way back for rejected tokens.

    A row that flushed (``ring_len + num_tokens > window``): ``ring_start += ring_len`` (mod capacity),
    ``ring_len = accepted``. Any other: ``ring_len += accepted``. Padded rows are left alone.

    Args:
        accepted: (rows,) int32 or int64, tokens kept, 0 to num_tokens (clamped to that).
        ring_start: (slots,) int32; written.
        ring_len: (slots,) int32; written.
        slot_index: (rows,) int32 or int64, as in the step; no live slot twice.
        window: As in the step.
        num_tokens: Tokens per row that the step was given.
        capacity: Tokens a ring has room for: ``ring_x.shape[2]``.
        null_slot: As in the step.

    Raises:
        ArgumentError: A tensor or number does not fit.
    """
    null = _null(null_slot)
    run = _commit_operator
    if not _goes_direct(accepted, ring_len):
        checks.refuse_non_tensors(
            "commit", accepted=accepted, ring_start=ring_start, ring_len=ring_len, slot_index=slot_index
        )
        run = _COMMIT
    run(accepted, ring_start, ring_len, slot_index, window, num_tokens, capacity, null)


def reset(slots: Tensor, *, ring_start: Tensor, ring_len: Tensor, null_slot: int | None = None) -> None:
    """Empty the rings of slots given to a new sequence; their state is left to the prefill.

    Args:
        slots: (n,) int32 or int64, distinct; negative ones and ``null_slot`` are skipped.
        ring_start: (slots,) int32; set to 0.
        ring_len: (slots,) int32; set to 0.
        null_slot: Slot to skip.

    Raises:
        ArgumentError: A tensor does not fit.
    """
    null = _null(null_slot)
    run = _reset_operator
    if not _goes_direct(slots, ring_len):
        checks.refuse_non_tensors("reset", slots=slots, ring_start=ring_start, ring_len=ring_len)
        run = _RESET
    run(slots, ring_start, ring_len, null)


def drained(
    slots: Tensor, *, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int | None = None
) -> None:
    """Move past all ring tokens of slots whose rings have been folded into their states.

    Args:
        slots: (n,) int32 or int64, distinct; negative ones and ``null_slot`` are skipped.
        ring_start: (slots,) int32; moved by ``ring_len`` (mod capacity).
        ring_len: (slots,) int32; set to 0.
        capacity: Tokens a ring has room for: ``ring_x.shape[2]``.
        null_slot: Slot to skip.

    Raises:
        ArgumentError: A tensor or number does not fit.
    """
    null = _null(null_slot)
    run = _drained_operator
    if not _goes_direct(slots, ring_len):
        checks.refuse_non_tensors("drained", slots=slots, ring_start=ring_start, ring_len=ring_len)
        run = _DRAINED
    run(slots, ring_start, ring_len, capacity, null)


@dataclass(frozen=True, eq=False)
class Cache:
    """The caches of one layer and the cursors of its cache group; shapes as in :func:`mamba2_step`.

    ``dataclasses.replace(cache, ring_start=…, ring_len=…)`` ties another layer to the same cursors.
    """

    state: Tensor
    ring_x: Tensor
    ring_b: Tensor
    ring_decay: Tensor
    ring_start: Tensor
    ring_len: Tensor

    @property
    def capacity(self) -> int:
        """Tokens a ring has room for."""
        return self.ring_x.shape[2]

    def tensors(self) -> dict[str, Any]:
        """All tensors by the names of :func:`mamba2_step`'s arguments, for ``**cache.tensors()``."""
        # Written out: torch.compile cannot trace `vars` of an object in every supported torch.
        return {
            "state": self.state,
            "ring_x": self.ring_x,
            "ring_b": self.ring_b,
            "ring_decay": self.ring_decay,
            "ring_start": self.ring_start,
            "ring_len": self.ring_len,
        }


def make_cache(
    spec: Spec,
    slots: int,
    heads: int,
    groups: int,
    device: torch.device | str,
    capacity: int | None = None,
) -> Cache:
    """Separately allocated caches of zeros with empty rings; of capacity 0 for a native spec.

    Args:
        spec: Shapes and dtypes.
        slots: Sequences there is room for, at least 1.
        heads: Heads on this GPU.
        groups: Groups on this GPU.
        device: Where to allocate.
        capacity: Tokens per ring, as in :func:`bytes_per_slot`.

    Raises:
        ArgumentError: A size is no whole number or too small, or heads, groups and spec do not fit.
    """
    slots = _size("slots", slots)
    heads, groups, capacity = _sizes(spec, heads, groups, capacity)

    def zeros(dtype: str, *shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=TORCH_DTYPES[dtype], device=device)

    return Cache(
        state=zeros(spec.state_dtype, heads, spec.head_dim, spec.state_size),
        ring_x=zeros(spec.ring_dtype, heads, capacity, spec.head_dim),
        ring_b=zeros(spec.ring_dtype, groups, capacity, spec.state_size),
        ring_decay=zeros("fp32", heads, capacity),
        ring_start=torch.zeros(slots, dtype=torch.int32, device=device),
        ring_len=torch.zeros(slots, dtype=torch.int32, device=device),
    )


def bytes_per_slot(spec: Spec, heads: int, groups: int, capacity: int | None = None) -> int:
    """Bytes of state and ring per slot and layer; the two cursors (8 bytes) are shared by layers.

    Args:
        spec: Shapes and dtypes.
        heads: Heads on this GPU.
        groups: Groups on this GPU.
        capacity: Tokens per ring; None is the least, ``window + num_tokens`` (0 for native).

    Raises:
        ArgumentError: A size is no whole number or too small, or heads, groups and spec do not fit.
    """
    heads, groups, capacity = _sizes(spec, heads, groups, capacity)
    ring = heads * spec.head_dim + groups * spec.state_size
    return spec.state_bytes(heads) + capacity * (ring * DTYPE_BYTES[spec.ring_dtype] + heads * 4)


def _size(name: str, value: int, least: int = 1) -> int:
    try:
        whole = -1 if isinstance(value, bool) else operator.index(value)  # numpy's integers too
    except TypeError:
        whole = -1
    if whole < least:
        raise ArgumentError(f"{name} is {value!r}", hint=f"pass a whole number of at least {least}")
    return whole


def _sizes(spec: Spec, heads: int, groups: int, capacity: int | None) -> tuple[int, int, int]:
    """heads, groups and capacity, checked."""
    heads, groups = _size("heads", heads), _size("groups", groups)
    if heads != groups * spec.heads_per_group:
        raise ArgumentError(
            f"{heads} heads in {groups} groups do not fit the spec's {spec.heads_per_group} heads per group; "
            "pass the heads and groups of one GPU"
        )
    least = 0 if spec.is_native else spec.window + spec.num_tokens
    given = least if capacity is None else _size("capacity", capacity, 0)
    if given < least:
        raise ArgumentError(
            f"capacity {given} is too small for window {spec.window}: rings need at least {least}"
        )
    return heads, groups, 0 if spec.is_native else given


def warmup(
    spec: Spec,
    effective_batches: Sequence[int],
    device: torch.device | str = "cuda",
    index_dtype: torch.dtype = torch.int32,
    aligned: bool = True,
) -> int:
    """Compile everything that steps of ``spec`` and their cursor ops will need, ahead of a capture.

    Args:
        spec: A ``step`` or ``native_step`` spec.
        effective_batches: Sequences x heads of the captures.
        device: CUDA device.
        index_dtype: dtype of slot_index and of accepted counts.
        aligned: Pointers and strides of the captures are multiples of 16 bytes. Call once more with
            False for a pool where they are not.

    Returns:
        Number of plans compiled (or loaded from Triton's cache).

    Raises:
        DispatchError: Strict mode, and no table has a row.
        CompileError: A kernel does not compile.
        ToolchainError: There is no CUDA device, no triton or no C compiler.
    """
    if not torch.cuda.is_available():
        raise ToolchainError(
            "there is no CUDA device to warm up, or torch was built without CUDA",
            hint="skip warmup on a CPU: the ops compile nothing there",
        )
    index = torch.device(device).index
    device_index = torch.cuda.current_device() if index is None else index
    compiled: int = _compile_ahead(spec, effective_batches, device_index, index_dtype, aligned)
    return compiled


def _goes_direct(first: Tensor, second: Tensor) -> bool:
    """Whether nothing (compiler, tracer, mode, subclass, transform) needs to see the operator."""
    return (
        not torch.compiler.is_compiling()
        and type(first) is Tensor
        and type(second) is Tensor
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not first.is_meta
    )


def _null(null_slot: int | None) -> int:
    """The slot that marks padding as kernels take it: -1 for none."""
    if null_slot is None:
        return -1
    if not checks.is_whole(null_slot):
        raise ArgumentError(f"null_slot is {null_slot!r}; expected the number of a slot, or None")
    if null_slot >= 2**31:
        raise ArgumentError(f"null_slot is {null_slot}, beyond 32 bits; no cache has so many slots")
    return max(null_slot, -1)


def _refuse_grad(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                f"{name} requires a gradient and decode steps have none; call under torch.no_grad() or "
                "torch.inference_mode(), or detach it"
            )


def _late(function: str, module: str = "launch") -> Callable[..., Any]:
    """A function of a module that launches, imported at the first call: importing ops needs no Triton.

    The function raises ToolchainError where Triton is missing or broken.
    """
    target: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal target
        if target is None:
            try:
                target = getattr(importlib.import_module(f".{module}", __package__), function)
            except ImportError as error:
                if (error.name or "").partition(".")[0] != "triton":
                    raise
                raise ToolchainError(
                    f"triton, which compiles the kernels for CUDA tensors, cannot be imported: {error}",
                    where=f"{function} of {__package__}.{module}",
                    hint="install a triton that fits this torch, or call the ops on CPU tensors: those need "
                    "none",
                ) from error
        return target(*arguments)

    return call


_launch_step = _late("launch_step")
_launch_native_step = _late("launch_native_step")
_launch_commit = _late("launch_commit")
_launch_reset = _late("launch_reset")
_launch_drained = _late("launch_drained")
_compile_ahead = _late("compile_ahead")


def _cpu_step(*arguments: Any) -> None:
    reference.mamba2_step(*arguments[:19])


def _cpu_native_step(*arguments: Any) -> None:
    reference.mamba2_native_step(*arguments[:13])


# What the dispatcher calls, on whatever device, checks for itself: modes, subclasses and compiled code come
# by it without a public function's checks.


def _step_operator(*arguments: Any) -> None:
    signature = signatures.step_signature(*arguments[:18])
    x, dt, _, B, C, _, z, _, *caches = arguments[:12]
    signatures.check_out(arguments[15], signature, x, dt, B, C, z, *caches)
    if signature.rows:
        step = _launch_step if signature.device == "cuda" else _cpu_step
        step(*arguments, signature)


def _native_step_operator(*arguments: Any) -> None:
    signature = signatures.native_signature(*arguments[:12])
    x, dt, _, B, C, _, z, _, state = arguments[:9]
    signatures.check_out(arguments[10], signature, x, dt, B, C, z, state)
    if signature.rows:
        step = _launch_native_step if signature.device == "cuda" else _cpu_native_step
        step(*arguments, signature)


def _commit_operator(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    signatures.check_cursors_once(
        "commit", slot_index, ring_start, ring_len, accepted, window, num_tokens, capacity
    )
    run = _launch_commit if slot_index.is_cuda else reference.commit
    run(accepted, ring_start, ring_len, slot_index, window, num_tokens, capacity, null_slot)


def _reset_operator(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    signatures.check_cursors_once("reset", slots, ring_start, ring_len)
    run = _launch_reset if slots.is_cuda else reference.reset
    run(slots, ring_start, ring_len, null_slot)


def _drained_operator(
    slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int
) -> None:
    signatures.check_cursors_once("drained", slots, ring_start, ring_len, capacity=capacity)
    run = _launch_drained if slots.is_cuda else reference.drained
    run(slots, ring_start, ring_len, capacity, null_slot)


def _fake_step(*arguments: Any) -> None:
    checks.check_step(*arguments[:18])


def _fake_native_step(*arguments: Any) -> None:
    checks.check_native_step(*arguments[:12])


def _fake_commit(
    accepted: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    slot_index: Tensor,
    window: int,
    num_tokens: int,
    capacity: int,
    null_slot: int,
) -> None:
    checks.check_cursors("commit", slot_index, ring_start, ring_len, accepted, window, num_tokens, capacity)


def _fake_reset(slots: Tensor, ring_start: Tensor, ring_len: Tensor, null_slot: int) -> None:
    checks.check_cursors("reset", slots, ring_start, ring_len, None, 1, 1, 2)


def _fake_drained(slots: Tensor, ring_start: Tensor, ring_len: Tensor, capacity: int, null_slot: int) -> None:
    checks.check_cursors("drained", slots, ring_start, ring_len, None, 1, 1, capacity)


_INPUTS: Final = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor(a!) state"
)
_library_type: Any = torch.library.Library
_LIBRARY: Final = _library_type(NAMESPACE, "FRAGMENT")


def _register(
    schema: str, implementation: Callable[..., None], fake: Callable[..., None]
) -> Callable[..., None]:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


_STEP = _register(
    f"mamba2_step({_INPUTS}, Tensor(b!) ring_x, Tensor(c!) ring_b, Tensor(d!) ring_decay, Tensor ring_start, "
    "Tensor ring_len, Tensor slot_index, Tensor(e!) out, int window, bool dt_softplus, int null_slot) -> ()",
    _step_operator,
    _fake_step,
)
_NATIVE_STEP = _register(
    f"mamba2_native_step({_INPUTS}, Tensor slot_index, Tensor(b!) out, bool dt_softplus, "
    "int null_slot) -> ()",
    _native_step_operator,
    _fake_native_step,
)
_COMMIT = _register(
    "commit(Tensor accepted, Tensor(a!) ring_start, Tensor(b!) ring_len, Tensor slot_index, int window, "
    "int num_tokens, int capacity, int null_slot) -> ()",
    _commit_operator,
    _fake_commit,
)
_RESET = _register(
    "reset(Tensor slots, Tensor(a!) ring_start, Tensor(b!) ring_len, int null_slot) -> ()",
    _reset_operator,
    _fake_reset,
)
_DRAINED = _register(
    "drained(Tensor slots, Tensor(a!) ring_start, Tensor(b!) ring_len, int capacity, int null_slot) -> ()",
    _drained_operator,
    _fake_drained,
)
