"""Argument checks of the ops: one full check per signature, a guard afterwards.

A *signature* is all that shapes, strides, dtypes and devices say of a call. The first call with a
signature is checked in full; later ones only pass a guard. What a launcher needs of it (spec, sizes,
strides) stands in the :class:`Signature`, so that it is worked out once as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from .dtypes import DTYPE_NAMES
from .errors import ArgumentError
from .spec import Spec

MAX_ROWS: Final = 65535
"""Rows of one launch: the limit of a CUDA grid's second dimension."""

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
_INDICES: Final = (torch.int32, torch.int64)
_MAX_KEYS: Final = 4096
_MAX_PER_KEY: Final = 64


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
    x_bytes: int
    """From the first to past the last byte of x (and of a gate z)."""
    z_bytes: int
    out_bytes: int
    launcher: Any = None
    """Set by :mod:`.launch` at the first launch: what need not be worked out again."""

    @property
    def effective_batch(self) -> int:
        """Rows times heads: the second half of a dispatch table's key."""
        return self.rows * self.heads


class _PlainGuard:
    """Stands in for torch's compiled guard where that one is missing or cannot hold."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._expected = [self._describe(tensor) for tensor in tensors]

    def check(self, *tensors: Tensor) -> bool:
        return [self._describe(tensor) for tensor in tensors] == self._expected

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
    key = x.shape, window, dt_softplus
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
    rows, heads, head_dim, groups, state_size, slots = _sizes(op, x, B, state)
    _rank(op, "ring_x", ring_x, ("slots", "heads", "capacity", "head_dim"))
    capacity = ring_x.shape[2]
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
    rows, heads, head_dim, groups, state_size, slots = _sizes(op, x, B, state)
    # Nothing of a native kernel depends on a ring's dtype; the activation dtype stands in.
    spec = _spec(
        "native_step", head_dim, state_size, heads // groups, 0, x.dtype, state.dtype, x.dtype,
        D is not None, z is not None, dt_bias is not None, dt_softplus,
    )  # fmt: skip
    tensors = _common(op, x, dt, A, B, C, D, z, dt_bias, state, slot_index, out)
    return _signature(spec, x, rows, heads, groups, slots, 0, tensors)


def check_cursors(
    op: str,
    slot_index: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    accepted: Tensor | None = None,
    window: int = 1,
    num_tokens: int = 1,
    capacity: int = 2,
) -> None:
    """Check of a cursor op, cached; ``slot_index`` is called ``slots`` where nothing is ``accepted``.

    Raises:
        ArgumentError: A tensor or number does not fit; the message says which and why.
    """
    key = (
        op, window, num_tokens, capacity,
        slot_index.shape, slot_index.stride(), slot_index.dtype, slot_index.device,
        ring_start.shape, ring_start.stride(), ring_start.dtype, ring_start.get_device(),
        ring_len.shape, ring_len.stride(), ring_len.dtype, ring_len.get_device(),
        accepted if accepted is None else (
            accepted.shape, accepted.stride(), accepted.dtype, accepted.get_device()
        ),
    )  # fmt: skip
    if key in _cursors:
        return
    check_cursors_in_full(op, slot_index, ring_start, ring_len, accepted, window, num_tokens, capacity)
    if len(_cursors) >= _MAX_KEYS:
        _cursors.clear()
    _cursors.add(key)


def check_cursors_in_full(
    op: str,
    slot_index: Tensor,
    ring_start: Tensor,
    ring_len: Tensor,
    accepted: Tensor | None,
    window: int,
    num_tokens: int,
    capacity: int,
) -> None:
    """As :func:`check_cursors`, without a cache (for symbolic shapes)."""
    name = "slots" if accepted is None else "slot_index"
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


def check_out(out: Tensor, x: Tensor, z: Tensor | None, signature: Signature) -> None:
    """Refuse an ``out`` whose memory overlaps that of x or z.

    Raises:
        ArgumentError: It does.
    """
    end = (begin := out.data_ptr()) + signature.out_bytes
    if begin < (pointer := x.data_ptr()) + signature.x_bytes and pointer < end:
        raise ArgumentError(_OVERLAP.format("x"))
    if z is not None and begin < (pointer := z.data_ptr()) + signature.z_bytes and pointer < end:
        raise ArgumentError(_OVERLAP.format("z"))


_OVERLAP: Final = (
    "out overlaps the memory of {}, which other programs of the launch may still have to read; "
    "give out memory of its own, or leave it out"
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
        x_bytes=_extent(x),
        z_bytes=_extent(tensors["z"]),
        out_bytes=_extent(tensors["out"]),
    )


def _extent(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if 0 not in tensor.shape else 0
