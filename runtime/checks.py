"""Full checks of the ops' arguments, from metadata alone: they serve symbolic shapes too.

What is asked of each argument is in :mod:`.contracts`. A check of what kernels of a spec serve ends in a
:class:`Signature`: what its launcher needs to know. Calls whose signature has been met before skip all
this; see :mod:`.signatures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from .contracts import Argument, Contract
from .dtypes import DTYPE_NAMES
from .errors import ArgumentError
from .spec import Spec

MAX_ROWS: Final = 65535
"""Rows of one launch: the limit of a CUDA grid's second dimension."""

MAX_CURSOR: Final = 2**31 - 1
"""The largest number that a cursor holds."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSignature:
    """A checked call of an operator whose kernels are launched by what its signature says.

    ``strides`` and ``dtypes`` are by the names of kernels (of a step those of :mod:`.abi`: ``a``, ``b``,
    ``ring_x``, …); strides are in elements, outermost first, innermost included.
    """

    contract: Contract
    device: str
    """Device type: ``cpu``, ``cuda``."""
    rows: int
    """Sequences of the call, padding too; for none nothing is launched."""
    strides: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    """``fp32``, ``bf16``, ``fp16``, ``i32`` or ``i64``."""

    requires_grad: bool
    """Some tensor requires a gradient."""
    out_bytes: int
    """From the first to past the last byte of ``out``; 0 where the op allocates it."""
    apart_bytes: tuple[int, ...]
    """The same of the tensors that ``out`` must not overlap, in the contract's order; 0 for absent ones."""
    apart: set[tuple[int, int, int]] = field(default_factory=set, compare=False)
    """Where out, the leading input and state lay in calls whose ``out`` overlapped nothing."""
    launcher: Any = None
    """Set at the first launch: what need not be worked out again."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Signature(CallSignature):
    """A checked call of an op with a spec."""

    spec: Spec
    heads: int
    groups: int
    slots: int
    capacity: int
    """Tokens per ring; 0 for native steps."""
    tokens: int
    """Of all rows and behind the last one's: as many as ``out`` has."""

    @property
    def effective_batch(self) -> int:
        """Rows times heads: the second half of a dispatch table's key."""
        return self.rows * self.heads


def check_step(contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any]) -> Signature:
    """Full check of an op with a spec; see the public function for what is asked.

    Args:
        contract: Of a step, or of what materialises states.
        tensors: In its order; absent ones are None.
        scalars: In its order.

    Raises:
        ArgumentError: A tensor or number does not fit; the message says which and why.
        SpecError: No kernel serves the sizes or dtypes.
    """
    op = contract.name
    sizes = _sizes(contract, tensors)
    rows, heads, groups = sizes["rows"], sizes["heads"], sizes["groups"]
    if groups == 0 or heads == 0 or heads % groups:
        many, few = (contract.dim_name(dim).replace("_", " ") for dim in ("heads", "groups"))
        raise ArgumentError(
            f"{op}: {heads} {many} ({_where(contract, 'heads')}) cannot be divided among {groups} {few} "
            f"({_where(contract, 'groups')}); {many} must be a multiple of {few}, under tensor parallelism "
            "on each GPU"
        )
    check_rows(contract, rows)
    _whole_numbers(contract, scalars)
    spec = _spec(contract, tensors, scalars, sizes)
    capacity = sizes.get("capacity", 0)
    if capacity < spec.ring_capacity:
        ring = contract.names[contract.sizes_at["capacity"][0]]
        raise ArgumentError(
            f"{op}: {ring} has room for {capacity} tokens (its dimension 2), too few for window "
            f"{spec.window}: a ring needs window + {spec.num_tokens} = {spec.ring_capacity}; "
            "allocate longer rings or use a smaller window"
        )
    _measure(contract, tensors, sizes)
    if spec.verifies:
        check_tokens(contract, tensors, sizes, spec.num_tokens)
    return Signature(
        **described(contract, tensors),
        spec=spec,
        rows=rows,
        heads=heads,
        groups=groups,
        slots=sizes["slots"],
        capacity=capacity,
        tokens=sizes.get("tokens", rows),
    )


def check_cursors(contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any]) -> None:
    """Full check of a cursor op; arguments as in :func:`check_step`.

    Raises:
        ArgumentError: A tensor or number does not fit; the message says which and why.
    """
    check_tensors(contract, tensors, scalars)
    numbers = {"window": 1, "num_tokens": 1, "capacity": 2}
    numbers |= {name: value for (_, name), value in zip(contract.scalars, scalars, strict=True)}
    window, num_tokens, capacity = numbers["window"], numbers["num_tokens"], numbers["capacity"]
    if not 1 <= num_tokens <= window:
        raise ArgumentError(
            f"{contract.name}: num_tokens is {num_tokens} and window {window}; "
            "a step takes 1 to window tokens, as the step before this commit did"
        )
    if capacity < window + num_tokens:
        raise ArgumentError(
            f"{contract.name}: capacity is {capacity}, too small for window {window}: rings need window + "
            f"num_tokens = {window + num_tokens}; pass the capacity of the step's rings: dimension 2 of "
            "ring_x or ring_u"
        )
    if capacity > MAX_CURSOR:
        raise ArgumentError(
            f"{contract.name}: capacity is {capacity}, beyond int32, which cursors are of; pass the capacity "
            "of the step's rings: dimension 2 of ring_x or ring_u"
        )


def check_tensors(
    contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any]
) -> dict[str, int]:
    """What a contract asks of each argument by itself; arguments as in :func:`check_step`.

    Returns:
        Sizes of the dimensions.

    Raises:
        ArgumentError: A tensor does not fit, or a scalar is no whole number.
    """
    _whole_numbers(contract, scalars)
    sizes = _sizes(contract, tensors)
    _measure(contract, tensors, sizes)
    return sizes


def check_rows(contract: Contract, rows: int) -> None:
    """Refuse more rows than a launch takes.

    Raises:
        ArgumentError: There are more.
    """
    if rows > MAX_ROWS:
        position, _ = contract.sizes_at["rows"]
        raise ArgumentError(
            f"{contract.name}: {contract.names[position]} has {rows} rows, a launch takes at most "
            f"{MAX_ROWS}; split the batch"
        )


def check_tokens(
    contract: Contract, tensors: Sequence[Tensor | None], sizes: Mapping[str, int], num_tokens: int
) -> None:
    """Refuse tokens that are not ``num_tokens`` of each row, where no ``query_start`` says whose they are.

    Raises:
        ArgumentError: They are not.
    """
    rows, tokens = sizes["rows"], sizes["tokens"]
    if tensors[contract.position("query_start")] is None and tokens != rows * num_tokens:
        position, dimension = contract.sizes_at["tokens"]
        raise ArgumentError(
            f"{contract.name}: {contract.names[position]} has {tokens} tokens (its dimension {dimension}); "
            f"expected {rows} rows of {num_tokens}, {rows * num_tokens}; pass query_start where rows vary"
        )


def described(contract: Contract, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
    """What a :class:`CallSignature` says of tensors: all but its rows."""
    given = {
        argument.kernel: tensor
        for argument, tensor in zip(contract.arguments, tensors, strict=True)
        if tensor is not None
    }
    like = given[contract.kernel_names[contract.leading]]
    strides = {name: tuple(tensor.stride()) for name, tensor in given.items()}
    dtypes = {name: _name(tensor.dtype) for name, tensor in given.items()}
    if "out" in contract.names:
        # One that the op allocates itself is contiguous.
        strides.setdefault("out", tuple(math.prod(like.shape[i + 1 :]) for i in range(like.dim())))
        dtypes.setdefault("out", _name(like.dtype))
    return {
        "contract": contract,
        "device": like.device.type,
        "strides": strides,
        "dtypes": dtypes,
        "requires_grad": any(tensor.requires_grad for tensor in given.values()),
        "out_bytes": _extent(given.get("out")),
        "apart_bytes": tuple(_extent(tensors[position]) for position in contract.apart),
    }


def refuse_non_tensors(contract: Contract, tensors: Sequence[object]) -> None:
    """Refuse the first argument that is no tensor; optional ones may be None.

    Raises:
        ArgumentError: There is one.
    """
    for argument, value in zip(contract.arguments, tensors, strict=True):
        if isinstance(value, Tensor) or (value is None and argument.optional):
            continue
        kind = type(value)
        # Stand-ins for tensors, as tracers pass them.
        if hasattr(kind, "__torch_function__"):
            continue
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        found = "None" if value is None else f"of type {module}{kind.__qualname__}"
        raise ArgumentError(
            f"{contract.name}: {argument.name} is {found}; expected a tensor"
            f"{' or None' if argument.optional else ''}; make it "
            "one outside of the step, or look for arguments that changed places"
        )


def refuse_gradients(contract: Contract, tensors: Sequence[Tensor | None]) -> None:
    """Refuse the first tensor that requires a gradient.

    Raises:
        ArgumentError: There is one.
    """
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                f"{argument.name} requires a gradient and the ops have none; call under "
                "torch.no_grad() or torch.inference_mode(), or detach it"
            )


def is_whole(value: object) -> bool:
    """Whether it is a whole number, a symbolic one too."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _sizes(contract: Contract, tensors: Sequence[Tensor | None]) -> dict[str, int]:
    """The size of every dimension, from the arguments that say so; what is no tensor is refused."""
    refuse_non_tensors(contract, tensors)
    for name in contract.sized_by:
        position = contract.position(name)
        argument, tensor = contract.arguments[position], tensors[position]
        assert tensor is not None
        if tensor.dim() != len(argument.dims):
            dims = ", ".join(map(contract.dim_name, argument.dims))
            raise ArgumentError(
                f"{contract.name}: {name} has shape {tuple(tensor.shape)}; expected {len(argument.dims)} "
                f"dimension(s): ({dims})"
            )
    sizes = {}
    for dim, (position, dimension) in contract.sizes_at.items():
        tensor = tensors[position]
        assert tensor is not None
        sizes[dim] = tensor.shape[dimension]
    sizes["rows + 1"] = sizes["rows"] + 1
    return sizes


def _where(contract: Contract, dim: str) -> str:
    position, dimension = contract.sizes_at[dim]
    return f"{contract.names[position]}, dimension {dimension}"


def _whole_numbers(contract: Contract, scalars: Sequence[object]) -> None:
    for (kind, name), value in zip(contract.scalars, scalars, strict=True):
        if kind == "int" and not is_whole(value):
            raise ArgumentError(f"{contract.name}: {name} is {value!r}; expected a whole number")


def _spec(
    contract: Contract, tensors: Sequence[Tensor | None], scalars: Sequence[Any], sizes: dict[str, int]
) -> Spec:
    given = dict(zip(contract.kernel_names, tensors, strict=True))
    # Nothing of a native kernel depends on a ring's dtype, nor of one without tokens on an activation dtype.
    x = given.get("x", given.get("ring_x"))
    ring, state = given.get("ring_x", x), given["state"]
    assert x is not None
    assert ring is not None
    assert state is not None
    materializes = contract.op == "materialize"
    # int(): symbolic sizes that are baked into a kernel are made concrete.
    numbers: dict[str, Any] = {"window": 0, "num_tokens": int(sizes.get("num_tokens", 1))} | {
        name: int(value) if kind == "int" else value
        for (kind, name), value in zip(contract.scalars, scalars, strict=True)
    }
    spec = Spec(
        family=contract.family,
        op="step" if materializes else contract.op,
        head_dim=int(sizes["head_dim"]),
        state_size=int(sizes["state_size"]),
        heads_per_group=int(sizes["heads"] // sizes["groups"]),
        activation_dtype=_name(x.dtype),
        state_dtype=_name(state.dtype),
        ring_dtype=_name(ring.dtype),
        has_d=given.get("d") is not None,
        has_z=given.get("z") is not None,
        has_dt_bias=given.get("dt_bias") is not None,
        **numbers,
    )
    return spec.materialize if materializes else spec


def _measure(contract: Contract, tensors: Sequence[Tensor | None], sizes: dict[str, int]) -> None:
    """Measure every tensor against the sizes, dtypes and device that the contract asks of it."""
    by_name = dict(zip(contract.names, tensors, strict=True))
    like = by_name[contract.sized_by[0]]
    assert like is not None
    for argument, tensor in zip(contract.arguments, tensors, strict=True):
        if tensor is None:
            continue
        dtypes = (argument.dtypes,) if isinstance(argument.dtypes, str) else argument.dtypes
        models = ((name, by_name.get(name)) for name in dtypes)
        allowed = dict.fromkeys(name if model is None else _name(model.dtype) for name, model in models)
        shape = tuple(sizes[dim] for dim in argument.dims)
        _tensor(contract.name, argument, tensor, shape, tuple(allowed), like)


def _tensor(
    op: str, argument: Argument, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[str, ...], like: Tensor
) -> None:
    name = argument.name
    if tuple(tensor.shape) != shape:
        raise ArgumentError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; expected {shape}, as the other arguments say"
        )
    if _name(tensor.dtype) not in dtypes:
        raise ArgumentError(
            f"{op}: {name} is {_name(tensor.dtype)}; expected {' or '.join(dtypes)}; convert it "
            "once, outside the step"
        )
    if tensor.device != like.device:
        raise ArgumentError(
            f"{op}: {name} is on {tensor.device}, other arguments on {like.device}; move all to one device"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ArgumentError(
            f"{op}: the innermost dimension of {name} has stride {tensor.stride(-1)}; it must be contiguous "
            "(stride 1), other strides are free"
        )
    if argument.written and any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ArgumentError(
            f"{op}: {name} is written, but an expanded dimension (strides {tuple(tensor.stride())}) makes "
            "elements share memory; pass a tensor with memory for every element"
        )


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _extent(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if 0 not in tensor.shape else 0
