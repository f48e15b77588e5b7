"""Signatures met before: what keeps a warm call from being checked in full.

A *signature* is all that shapes, strides, dtypes and devices say of a call. The first call with one is
checked in full (:mod:`.checks`); later ones only pass a guard. Where tensors lie is no part of it:
:func:`check_out` looks at that.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

from torch import Tensor

from .checks import CallSignature, check_cursors, check_step
from .contracts import Contract
from .errors import ArgumentError

Tensors = tuple[Any, ...]
"""A call's tensors in the order of its contract; absent ones are None."""

Check = Callable[[Contract, Tensors, tuple[Any, ...]], Any]
"""A full check of contract, tensors and scalars; what it returns is kept."""

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


# By a short key, what recognises calls like one that was checked, and its signature: what picks the
# tensors that were given, their guard, and the positions of absent ones.
_known: dict[Any, list[tuple[Callable[[Tensors], Tensors], Callable[..., bool], tuple[int, ...], Any]]] = {}


def signature_of(
    contract: Contract, tensors: Tensors, scalars: tuple[Any, ...], check: Check | None = None
) -> Any:
    """What is known of a call, which is checked in full the first time one like it is met.

    Args:
        contract: The operator's.
        tensors: In its order; the first is a tensor.
        scalars: In its order.
        check: The full check, where it is that of neither steps nor cursor ops.

    Returns:
        What the check returns: a :class:`.checks.Signature`; None of a cursor op.

    Raises:
        ArgumentError, SpecError: See :func:`.checks.check_step` and :func:`.checks.check_cursors`.
    """
    key = contract.name, tensors[0].shape, scalars, (*map(type, scalars),)  # 4.0 is equal to 4
    try:
        known = _known.get(key, ())
    except TypeError:  # Some scalar cannot be hashed, so it is none: the full check says which.
        known = ()
    for given, guard, absent, signature in known:
        if guard(*given(tensors)):
            for position in absent:
                if tensors[position] is not None:
                    break
            else:
                return signature
    check = check or (check_step if contract.family else check_cursors)
    signature = check(contract, tensors, scalars)
    _remember(key, tensors, signature)
    return signature


def _remember(key: Any, tensors: Tensors, signature: CallSignature | None) -> None:
    if len(_known) >= _MAX_KEYS:
        _known.clear()
    same_key = _known.setdefault(key, [])
    if len(same_key) >= _MAX_PER_KEY:
        same_key.clear()
    given = itemgetter(*(i for i, tensor in enumerate(tensors) if tensor is not None))
    absent = tuple(i for i, tensor in enumerate(tensors) if tensor is None)
    same_key.append((given, _guard(given(tensors)), absent, signature))


def check_out(tensors: Tensors, signature: CallSignature) -> None:
    """Refuse an ``out`` that overlaps per-token inputs or caches.

    Looked at whenever out, the leading input or the state lies where it did not in a call before: what
    else a call brings comes and goes with them. Compared are ranges from the first to the last byte: views
    that interleave count as overlapping. Parameters per head, cursors and slot indices are not looked at.

    Args:
        tensors: In the contract's order, ``out`` among them.
        signature: Of the call.

    Raises:
        ArgumentError: It overlaps one of them; the message says which.
    """
    contract = signature.contract
    leading, pool = tensors[contract.leading], tensors[contract.pool]
    places = (begin := tensors[-1].data_ptr()), leading.data_ptr(), pool.data_ptr()
    if places in signature.apart:
        return
    end = begin + signature.out_bytes
    for position, size in zip(contract.apart, signature.apart_bytes, strict=True):
        other = tensors[position]
        if other is not None and (at := other.data_ptr()) < end and begin < at + size:
            raise ArgumentError(
                f"out overlaps the memory of {contract.names[position]}, which other programs of the launch "
                "may still have to read or write; give out memory of its own, or leave it out"
            )
    if len(signature.apart) >= _MAX_KEYS:
        signature.apart.clear()
    signature.apart.add(places)
