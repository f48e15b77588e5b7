"""Operators: how a public function reaches its implementation, and their registration with torch.

Operators live in a namespace derived from the package that registers them, so that the tool and
several kernel packages can be imported into one process. Outside of compilation, tracing and
dispatch modes, a call goes to its implementation directly: torch's dispatcher costs more than all
checks together.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .checks import CallSignature, check_cursors, check_step, is_whole, refuse_gradients, refuse_non_tensors
from .contracts import Contract
from .errors import ArgumentError, ToolchainError
from .signatures import Check, Tensors, check_out, signature_of
from .spec import MAX_WINDOW

NAMESPACE: Final = (__package__ or "replayssm").removesuffix(".runtime").replace(".", "_")
"""Operators are ``torch.ops.<NAMESPACE>.<name>``."""

# Looked up once: they are asked in every call.
_is_compiling: Final = torch.compiler.is_compiling
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_has_function_mode: Final = torch._C._is_torch_function_mode_enabled
_transforms: Final = torch._C._functorch.peek_interpreter_stack
_tracing_state: Final = torch._C._get_tracing_state

_library_type: Any = torch.library.Library
_LIBRARY: Final = _library_type(NAMESPACE, "FRAGMENT")


def late(function: str, module: str = "launch") -> Callable[..., Any]:
    """A function of a module that launches, imported at the first call: importing the ops needs no Triton.

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


class _Operator(ABC):
    """What all kinds share: registration, and the choice of a way for each call.

    Args:
        contract: What the operator takes.
        cpu: Implementation on CPUs: tensors, scalars and the null slot, one after the other.
        check: See :func:`.signatures.signature_of`.
    """

    def __init__(self, contract: Contract, cpu: Callable[..., None], check: Check | None = None) -> None:
        self._contract, self._cpu, self._check = contract, cpu, check
        self._leading, self._pool = contract.leading, contract.pool
        name, count = contract.name, len(contract.arguments)
        full: Check = check or (check_step if contract.family else check_cursors)

        # What the dispatcher calls, on whatever device, checks for itself: modes, subclasses and compiled
        # code come by it without the checks of a direct call.
        def implementation(*arguments: Any) -> None:
            self._checked(arguments[:count], arguments[count:-1], arguments[-1])

        def fake(*arguments: Any) -> None:
            full(contract, arguments[:count], arguments[count:-1])

        _LIBRARY.define(contract.schema)
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, implementation, device)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        self._overload: Callable[..., None] = getattr(getattr(torch.ops, NAMESPACE), name).default

    @abstractmethod
    def _checked(self, tensors: Tensors, scalars: tuple[Any, ...], null: int) -> None:
        """Run it on arguments that nobody has checked."""


class _SignedOperator(_Operator):
    """What is launched by what its signature keeps.

    Args:
        contract: See :class:`_Operator`.
        cpu: See :class:`_Operator`.
        prepare: From a signature and the device's index, what launches it; by default the plan of its spec.
        check: See :func:`.signatures.signature_of`; returns a :class:`.checks.CallSignature`.
    """

    def __init__(
        self,
        contract: Contract,
        cpu: Callable[..., None],
        prepare: Callable[..., Any] | None = None,
        check: Check | None = None,
    ) -> None:
        super().__init__(contract, cpu, check)
        self._prepare = prepare or late("prepare")

    def _checked(self, tensors: Tensors, scalars: tuple[Any, ...], null: int) -> None:
        self._run(tensors, scalars, null, signature_of(self._contract, tensors, scalars, self._check))

    def _run(self, tensors: Tensors, scalars: tuple[Any, ...], null: int, signature: CallSignature) -> None:
        if not signature.rows:
            return
        if signature.device == "cuda":
            launcher = signature.launcher or self._prepare(signature, tensors[0].get_device())
            launcher.launch(tensors, null)
        else:
            self._cpu(*tensors, *scalars, null)


class StepOperator(_SignedOperator):
    """An operator with an ``out``: what takes new tokens, of a layer or of the convolution."""

    def call(self, tensors: Tensors, scalars: tuple[Any, ...], null_slot: int | None) -> Tensor:
        """Run it; tensors and scalars are in the contract's order, ``out`` may be None.

        Returns:
            ``out``.
        """
        null = -1 if null_slot is None else _null(null_slot)
        out: Tensor | None = tensors[-1]
        if goes_direct(tensors[0], tensors[self._pool]):
            signature = signature_of(self._contract, tensors, scalars, self._check)
            if signature.requires_grad and torch.is_grad_enabled():
                refuse_gradients(self._contract, tensors)
            if out is None:
                out = torch.empty_like(tensors[self._leading], memory_format=torch.contiguous_format)
                tensors = (*tensors[:-1], out)
            else:
                check_out(tensors, signature)
            launcher = signature.launcher
            if launcher is None:
                self._run(tensors, scalars, null, signature)
            else:
                launcher.launch(tensors, null)
            return out
        refuse_non_tensors(self._contract, tensors)
        if torch.is_grad_enabled():
            refuse_gradients(self._contract, tensors)
        if out is None:
            out = torch.empty_like(tensors[self._leading], memory_format=torch.contiguous_format)
        self._overload(*tensors[:-1], out, *scalars, null)
        return out

    def _checked(self, tensors: Tensors, scalars: tuple[Any, ...], null: int) -> None:
        signature = signature_of(self._contract, tensors, scalars, self._check)
        check_out(tensors, signature)
        self._run(tensors, scalars, null, signature)

    def _run(self, tensors: Tensors, scalars: tuple[Any, ...], null: int, signature: CallSignature) -> None:
        if not signature.rows:
            tensors[-1].zero_()  # tokens that nobody owns
        super()._run(tensors, scalars, null, signature)


class MaterializeOperator(_SignedOperator):
    """What folds rings into states; it returns nothing."""

    def call(self, tensors: Tensors, scalars: tuple[Any, ...], null_slot: int | None) -> None:
        """Run it; tensors and scalars are in the contract's order, ``prefix``, the third, may be None."""
        null = -1 if null_slot is None else _null(null_slot)
        refuse_non_tensors(self._contract, tensors)
        if torch.is_grad_enabled():
            refuse_gradients(self._contract, tensors)
        source, destination, prefix, *others = tensors
        if prefix is None:
            # Counts are clamped to the tokens there are, and no ring has more of them than this.
            prefix = torch.full_like(source, MAX_WINDOW)
        tensors = (source, destination, prefix, *others)
        if goes_direct(source, tensors[self._pool]):
            self._checked(tensors, scalars, null)
        else:
            self._overload(*tensors, *scalars, null)


class CursorOperator(_Operator):
    """An operator without an ``out``: a cursor op, or the seeding of a ring.

    Args:
        contract: See :class:`_Operator`.
        cpu: See :class:`_Operator`.
        cuda: What ``cpu`` is, on a GPU.
        check: See :func:`.signatures.signature_of`.
    """

    def __init__(
        self,
        contract: Contract,
        cpu: Callable[..., None],
        cuda: Callable[..., None],
        check: Check | None = None,
    ) -> None:
        super().__init__(contract, cpu, check)
        self._cuda = cuda

    def call(self, tensors: Tensors, scalars: tuple[Any, ...], null_slot: int | None) -> None:
        """Run it; tensors and scalars are in the contract's order."""
        null = -1 if null_slot is None else _null(null_slot)
        if goes_direct(tensors[0], tensors[self._pool]):
            self._checked(tensors, scalars, null)
            return
        refuse_non_tensors(self._contract, tensors)
        self._overload(*tensors, *scalars, null)

    def _checked(self, tensors: Tensors, scalars: tuple[Any, ...], null: int) -> None:
        signature_of(self._contract, tensors, scalars, self._check)
        run = self._cuda if tensors[0].is_cuda else self._cpu
        run(*tensors, *scalars, null)


def goes_direct(first: Tensor, second: Tensor) -> bool:
    """Whether nothing (compiler, tracer, mode, subclass, transform) needs to see the operator."""
    return (
        not _is_compiling()
        and type(first) is Tensor
        and type(second) is Tensor
        and not _dispatch_modes()
        and not _has_function_mode()
        and _transforms() is None
        and _tracing_state() is None
        and not first.is_meta
    )


def cuda_index(device: torch.device | str) -> int:
    """Index of a CUDA device that a warm-up is asked for.

    Raises:
        ToolchainError: There is none.
    """
    if not torch.cuda.is_available():
        raise ToolchainError(
            "there is no CUDA device to warm up, or torch was built without CUDA",
            hint="skip warmup on a CPU: the ops compile nothing there",
        )
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _null(null_slot: int) -> int:
    """The slot that marks padding as kernels take it: -1 for none."""
    if not is_whole(null_slot):
        raise ArgumentError(f"null_slot is {null_slot!r}; expected the number of a slot, or None")
    if null_slot >= 2**31:
        raise ArgumentError(f"null_slot is {null_slot}, beyond 32 bits; no cache has so many slots")
    return max(null_slot, -1)
