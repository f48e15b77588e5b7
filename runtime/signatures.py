"""Signatures met before: what keeps a warm call from being checked in full.

A *signature* is all that shapes, strides, dtypes and devices say of a call. The first call with one is
checked in full (:mod:`.checks`); later ones only pass a guard. Where tensors lie is no part of it:
:func:`check_out` looks at that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from .checks import APART, Signature, check_cursors, check_native_step, check_step
from .errors import ArgumentError

_MAX_KEYS: Final = 4096
_MAX_PER_KEY: Final = 64


class _PlainGuard:
    """Stands in for torch's compiled guard where that one is missing or cannot hold."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._expected = [self._describe(tensor) for tensor in tensors]

    def check(self, *tensors: Tensor) -> bool:
        try:
            return [self._describe(tensor) for tensor in tensors] == self._expected
        except AttributeError:
            return False  # Something is no tensor: the full check says what.

    @staticmethod
    def _describe(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A predicate over as many tensors: same shapes, strides, dtypes, devices and needs of gradients."""
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    try:
        # What torch.compile guards its inputs with: one call instead of four attributes per tensor.
        from torch._C._dynamo.guards import TensorGuards

        compiled: Callable[..., bool] = TensorGuards(
            *tensors,
            dynamic_dims_sizes=sizes,
            dynamic_dims_strides=strides,
        ).check
        # It refuses a tensor that occurs twice.
        if compiled(*tensors):
            return compiled
    except (ImportError, AttributeError, TypeError, RuntimeError):
        pass
    return _PlainGuard(tensors).check


class _Signatures:
    """Signatures met before, by a short key and then by guard."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Callable[..., bool], Signature]]] = {}

    def find(self, key: Any, tensors: tuple[Tensor, ...]) -> Signature | None:
        for check, signature in self._known.get(key, ()):
            if check(*tensors):
                return signature
        return None

    def add(self, key: Any, tensors: tuple[Tensor, ...], signature: Signature) -> None:
        if len(self._known) >= _MAX_KEYS:
            self._known.clear()
        same_key = self._known.setdefault(key, [])
        if len(same_key) >= _MAX_PER_KEY:
            same_key.clear()
        same_key.append((_guard(tensors), signature))


_steps = _Signatures()
_native_steps = _Signatures()
_cursors: set[Any] = set()
# Stand in for absent optional tensors: guards take tensors only, and each but once.
_NO_D, _NO_Z, _NO_BIAS, _NO_OUT = (torch.empty(0) for _ in range(4))


def step_signature(
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
    out: Tensor | None,
    window: int,
    dt_softplus: bool,
) -> Signature:
    """The signature of a replay step, checked in full the first time it is met.

    Raises:
        ArgumentError, SpecError: See :func:`.ops.mamba2_step`.
    """
    key = x.shape, window, type(window), dt_softplus  # 4.0 is equal to 4
    tensors = (
        x, dt, A, B, C,
        _NO_D if D is None else D,
        _NO_Z if z is None else z,
        _NO_BIAS if dt_bias is None else dt_bias,
        state, ring_x, ring_b, ring_decay, ring_start, ring_len, slot_index,
        _NO_OUT if out is None else out,
    )  # fmt: skip
    signature = _steps.find(key, tensors)
    if signature is None:
        signature = check_step(
            x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_b, ring_decay, ring_start, ring_len,
            slot_index, out, window, dt_softplus,
        )  # fmt: skip
        _steps.add(key, tensors, signature)
    return signature


def native_signature(
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
    out: Tensor | None,
    dt_softplus: bool,
) -> Signature:
    """As :func:`step_signature`, for a native step."""
    key = x.shape, dt_softplus
    tensors = (
        x, dt, A, B, C,
        _NO_D if D is None else D,
        _NO_Z if z is None else z,
        _NO_BIAS if dt_bias is None else dt_bias,
        state, slot_index,
        _NO_OUT if out is None else out,
    )  # fmt: skip
    signature = _native_steps.find(key, tensors)
    if signature is None:
        signature = check_native_step(x, dt, A, B, C, D, z, dt_bias, state, slot_index, out, dt_softplus)
        _native_steps.add(key, tensors, signature)
    return signature


def check_cursors_once(
    op: str,
    slot_index: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    accepted: Tensor | None = None,
    window: int = 1,
    num_tokens: int = 1,
    capacity: int = 2,
) -> None:
    """As :func:`.checks.check_cursors`, in full the first time alone."""
    try:
        key = (
            op, window, num_tokens, capacity,
            slot_index.shape, slot_index.stride(), slot_index.dtype, slot_index.device,
            ring_start.shape, ring_start.stride(), ring_start.dtype, ring_start.get_device(),
            ring_len.shape, ring_len.stride(), ring_len.dtype, ring_len.get_device(),
            accepted if accepted is None else (
                accepted.shape, accepted.stride(), accepted.dtype, accepted.get_device()
            ),
        )  # fmt: skip
    except AttributeError:
        check_cursors(op, slot_index, ring_start, ring_len, accepted, window, num_tokens, capacity)
        raise  # Unreached: something is no tensor, as the full check says.
    if key in _cursors:
        return
    check_cursors(op, slot_index, ring_start, ring_len, accepted, window, num_tokens, capacity)
    if len(_cursors) >= _MAX_KEYS:
        _cursors.clear()
    _cursors.add(key)


def check_out(
    out: Tensor,
    signature: Signature,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    state: Tensor,
    ring_x: Tensor | None = None,
    ring_b: Tensor | None = None,
    ring_decay: Tensor | None = None,
) -> None:
    """Refuse an ``out`` that overlaps per-token inputs or caches.

    Looked at whenever out, x or state lies where it did not in a call before: what else a call brings
    comes and goes with them. Compared are ranges from the first to the last byte: views that interleave
    count as overlapping. A, D, dt_bias, cursors and slot indices are not looked at.

    Raises:
        ArgumentError: It overlaps one of them; the message says which.
    """
    places = (begin := out.data_ptr()), x.data_ptr(), state.data_ptr()
    if places in signature.apart:
        return
    end = begin + signature.out_bytes
    others = (x, dt, B, C, z, state, ring_x, ring_b, ring_decay)
    for name, other, size in zip(APART, others, signature.apart_bytes, strict=True):
        if other is not None and (at := other.data_ptr()) < end and begin < at + size:
            raise ArgumentError(
                f"out overlaps the memory of {name}, which other programs of the launch may still have to "
                "read or write; give out memory of its own, or leave it out"
            )
    if len(signature.apart) >= _MAX_KEYS:
        signature.apart.clear()
    signature.apart.add(places)
