"""Full checks of the ops' arguments, from metadata alone: they serve symbolic shapes too.

A check of a step ends in a :class:`Signature`: what its launcher needs to know. Calls whose signature
has been met before skip all this; see :mod:`.signatures`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from .dtypes import DTYPE_NAMES
from .errors import ArgumentError
from .spec import Spec

MAX_ROWS: Final = 65535
"""Rows of one launch: the limit of a CUDA grid's second dimension."""

APART: Final = ("x", "dt", "B", "C", "z", "state", "ring_x", "ring_b", "ring_decay")
"""Arguments that ``out`` must not overlap."""

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_INDICES: Final = (torch.int32, torch.int64)
_OPTIONAL: Final = ("D", "z", "dt_bias", "out")


@dataclass(frozen=True, eq=False)
class Signature:
    """A checked call of a step.

    ``strides`` and ``dtypes`` are by the names of :mod:`.abi` (``a``, ``b``, ``ring_x``, …); strides are
    in elements, outermost first, innermost included.
    """

    spec: Spec
    device: str
    """Device type: ``cpu``, ``cuda``."""
    rows: int
    heads: int
    groups: int
    slots: int
    capacity: int
    """Tokens per ring; 0 for native steps."""
    strides: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    """``fp32``, ``bf16``, ``fp16``, ``i32`` or ``i64``."""

    requires_grad: bool
    """Some tensor requires a gradient."""
    out_bytes: int
    """From the first to past the last byte of ``out``; 0 where the op allocates it."""
    apart_bytes: tuple[int, ...]
    """The same of the tensors of :data:`APART`; 0 for absent ones."""
    apart: set[tuple[int, int, int]] = field(default_factory=set, compare=False)
    """Where out, x and state lay in calls whose ``out`` overlapped nothing."""
    launcher: Any = None
    """Set by :mod:`.launch` at the first launch: what need not be worked out again."""

    @property
    def effective_batch(self) -> int:
        """Rows times heads: the second half of a dispatch table's key."""
        return self.rows * self.heads


def check_step(
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
    """Full check of a replay step; see :func:`.ops.mamba2_step` for what is asked."""
    op = "mamba2_step"
    refuse_non_tensors(
        op, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, ring_x=ring_x, ring_b=ring_b,
        ring_decay=ring_decay, ring_start=ring_start, ring_len=ring_len, slot_index=slot_index, out=out,
    )  # fmt: skip
    rows, heads, head_dim, groups, state_size, slots = _sizes(op, x, B, state)
    _rank(op, "ring_x", ring_x, ("slots", "heads", "capacity", "head_dim"))
    capacity = ring_x.shape[2]
    _whole(op, "window", window)
    spec = _spec(
        "step", head_dim, state_size, heads // groups, window, x.dtype, state.dtype, ring_x.dtype,
        D is not None, z is not None, dt_bias is not None, dt_softplus,
    )  # fmt: skip
    if capacity < window + spec.num_tokens:
        raise ArgumentError(
            f"{op}: ring_x has room for {capacity} tokens (its dimension 2), too few for window {window}: "
            f"a ring needs window + {spec.num_tokens} = {window + spec.num_tokens}; allocate longer rings or "
            "use a smaller window"
        )
    ring = (ring_x.dtype,)
    tensors = _common(op, x, dt, A, B, C, D, z, dt_bias, state, slot_index, out)
    tensors |= {
        "ring_x": _tensor(op, "ring_x", ring_x, (slots, heads, capacity, head_dim), ring, x, True),
        "ring_b": _tensor(op, "ring_b", ring_b, (slots, groups, capacity, state_size), ring, x, True),
        "ring_decay": _tensor(
            op, "ring_decay", ring_decay, (slots, heads, capacity), (torch.float32,), x, True
        ),
        "ring_start": _tensor(op, "ring_start", ring_start, (slots,), (torch.int32,), x),
        "ring_len": _tensor(op, "ring_len", ring_len, (slots,), (torch.int32,), x),
    }
    return _signature(spec, x, rows, heads, groups, slots, capacity, tensors)


def check_native_step(
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
    """Full check of a native step; see :func:`.ops.mamba2_native_step` for what is asked."""
    op = "mamba2_native_step"
    refuse_non_tensors(
        op, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state, slot_index=slot_index, out=out
    )
    rows, heads, head_dim, groups, state_size, slots = _sizes(op, x, B, state)
    # Nothing of a native kernel depends on a ring's dtype; the activation dtype stands in.
    spec = _spec(
        "native_step", head_dim, state_size, heads // groups, 0, x.dtype, state.dtype, x.dtype,
        D is not None, z is not None, dt_bias is not None, dt_softplus,
    )  # fmt: skip
    tensors = _common(op, x, dt, A, B, C, D, z, dt_bias, state, slot_index, out)
    return _signature(spec, x, rows, heads, groups, slots, 0, tensors)


def refuse_non_tensors(op: str, **given: object) -> None:
    """Refuse the first argument that is no tensor; optional ones may be None.

    Raises:
        ArgumentError: There is one.
    """
    for name, value in given.items():
        if isinstance(value, Tensor) or (value is None and name in _OPTIONAL):
            continue
        kind = type(value)
        # Stand-ins for tensors, as tracers pass them.
        if hasattr(kind, "__torch_function__"):
            continue
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        found = "None" if value is None else f"of type {module}{kind.__qualname__}"
        raise ArgumentError(
            f"{op}: {name} is {found}; expected a tensor{' or None' if name in _OPTIONAL else ''}; make it "
            "one outside of the step, or look for arguments that changed places"
        )


def check_cursors(
    op: str,
    slot_index: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    accepted: Tensor | None,
    window: int,
    num_tokens: int,
    capacity: int,
) -> None:
    """Full check of a cursor op; ``slot_index`` is called ``slots`` where nothing is ``accepted``.

    Raises:
        ArgumentError: A tensor or number does not fit; the message says which and why.
    """
    for number, value in (("window", window), ("num_tokens", num_tokens), ("capacity", capacity)):
        _whole(op, number, value)
    name = "slots" if accepted is None else "slot_index"
    refuse_non_tensors(op, **{name: slot_index}, ring_start=ring_start, ring_len=ring_len)
    if accepted is not None:
        refuse_non_tensors(op, accepted=accepted)
    _rank(op, name, slot_index, ("rows",))
    _rank(op, "ring_start", ring_start, ("slots",))
    rows, slots = slot_index.shape[0], ring_start.shape[0]
    _tensor(op, name, slot_index, (rows,), _INDICES, slot_index)
    _tensor(op, "ring_start", ring_start, (slots,), (torch.int32,), slot_index)
    _tensor(op, "ring_len", ring_len, (slots,), (torch.int32,), slot_index)
    if accepted is not None:
        _tensor(op, "accepted", accepted, (rows,), _INDICES, slot_index)
        if not 1 <= num_tokens <= window:
            raise ArgumentError(
                f"{op}: num_tokens is {num_tokens} and window {window}; "
                "a step takes 1 to window tokens, as the step before this commit did"
            )
    if capacity < window + num_tokens:
        raise ArgumentError(
            f"{op}: capacity is {capacity}, too small for window {window}: rings need window + num_tokens "
            f"= {window + num_tokens}; pass the capacity of the step's rings (ring_x.shape[2])"
        )


def _spec(
    op: str,
    head_dim: int,
    state_size: int,
    heads_per_group: int,
    window: int,
    activation: torch.dtype,
    state: torch.dtype,
    ring: torch.dtype,
    has_d: bool,
    has_z: bool,
    has_dt_bias: bool,
    dt_softplus: bool,
) -> Spec:
    # int(): symbolic sizes that are baked into a kernel are made concrete.
    return Spec(
        family="mamba2",
        op=op,
        head_dim=int(head_dim),
        state_size=int(state_size),
        heads_per_group=int(heads_per_group),
        window=int(window),
        activation_dtype=_name(activation),
        state_dtype=_name(state),
        ring_dtype=_name(ring),
        has_d=has_d,
        has_z=has_z,
        has_dt_bias=has_dt_bias,
        dt_softplus=dt_softplus,
    )


def _sizes(op: str, x: Tensor, B: Tensor, state: Tensor) -> tuple[int, int, int, int, int, int]:
    """rows, heads, head_dim, groups, state_size, slots."""
    _rank(op, "x", x, ("rows", "heads", "head_dim"))
    _rank(op, "B", B, ("rows", "groups", "state_size"))
    _rank(op, "state", state, ("slots", "heads", "head_dim", "state_size"))
    rows, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    if groups == 0 or heads == 0 or heads % groups:
        raise ArgumentError(
            f"{op}: {heads} heads (x, dimension 1) cannot be divided among {groups} groups (B, dimension 1); "
            "heads must be a multiple of groups, under tensor parallelism on each GPU"
        )
    if rows > MAX_ROWS:
        raise ArgumentError(f"{op}: x has {rows} rows, a launch takes at most {MAX_ROWS}; split the batch")
    return rows, heads, head_dim, groups, state_size, state.shape[0]


def _common(
    op: str,
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
) -> dict[str, Tensor | None]:
    rows, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    activation = (x.dtype,)
    shape = (state.shape[0], heads, head_dim, state_size)
    fp32 = (torch.float32,)
    return {
        "x": _tensor(op, "x", x, (rows, heads, head_dim), _FLOATS, x),
        "dt": _tensor(op, "dt", dt, (rows, heads), _FLOATS, x),
        "a": _tensor(op, "A", A, (heads,), fp32, x),
        "b": _tensor(op, "B", B, (rows, groups, state_size), activation, x),
        "c": _tensor(op, "C", C, (rows, groups, state_size), activation, x),
        "d": None if D is None else _tensor(op, "D", D, (heads,), _FLOATS, x),
        "z": None if z is None else _tensor(op, "z", z, (rows, heads, head_dim), activation, x),
        "dt_bias": None if dt_bias is None else _tensor(op, "dt_bias", dt_bias, (heads,), _FLOATS, x),
        "state": _tensor(op, "state", state, shape, _FLOATS, x, True),
        "slot_index": _tensor(op, "slot_index", slot_index, (rows,), _INDICES, x),
        "out": None if out is None else _tensor(op, "out", out, (rows, heads, head_dim), activation, x, True),
    }


def is_whole(value: object) -> bool:
    """Whether it is a whole number, a symbolic one too."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _whole(op: str, name: str, value: object) -> None:
    if not is_whole(value):
        raise ArgumentError(f"{op}: {name} is {value!r}; expected a whole number")


def _rank(op: str, name: str, tensor: Tensor, dims: tuple[str, ...]) -> None:
    if tensor.dim() != len(dims):
        raise ArgumentError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; expected {len(dims)} dimension(s): "
            f"({', '.join(dims)})"
        )


def _tensor(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    like: Tensor,
    written: bool = False,
) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ArgumentError(
            f"{op}: {name} has shape {tuple(tensor.shape)}; expected {shape}, as the other arguments say"
        )
    if tensor.dtype not in dtypes:
        raise ArgumentError(
            f"{op}: {name} is {_name(tensor.dtype)}; expected {' or '.join(map(_name, dtypes))}; convert it "
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
    if written and any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ArgumentError(
            f"{op}: {name} is written, but an expanded dimension (strides {tuple(tensor.stride())}) makes "
            "elements share memory; pass a tensor with memory for every element"
        )
    return tensor


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _signature(
    spec: Spec,
    x: Tensor,
    rows: int,
    heads: int,
    groups: int,
    slots: int,
    capacity: int,
    tensors: dict[str, Tensor | None],
) -> Signature:
    strides = {name: tuple(t.stride()) for name, t in tensors.items() if t is not None}
    dtypes = {name: _name(t.dtype) for name, t in tensors.items() if t is not None}
    # An output that the op allocates itself is contiguous.
    strides.setdefault("out", (heads * spec.head_dim, spec.head_dim, 1))
    dtypes.setdefault("out", spec.activation_dtype)
    return Signature(
        spec=spec,
        device=x.device.type,
        rows=rows,
        heads=heads,
        groups=groups,
        slots=slots,
        capacity=capacity,
        strides=strides,
        dtypes=dtypes,
        requires_grad=any(t is not None and t.requires_grad for t in tensors.values()),
        out_bytes=_extent(tensors["out"]),
        apart_bytes=tuple(_extent(tensors.get(name.lower())) for name in APART),
    )


def _extent(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if 0 not in tensor.shape else 0
