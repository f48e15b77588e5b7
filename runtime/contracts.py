"""What each operator takes: one record per operator, from which everything else about it is derived.

Derived are the schema torch is given, the full check (:mod:`.checks`), the guards of signatures
(:mod:`.signatures`), the order in which kernels take their tensors (:mod:`.launch`), and what an ``out``
may not overlap. Records know nothing of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

FLOATS: Final = ("fp32", "bf16", "fp16")
INDICES: Final = ("i32", "i64")


@dataclass(frozen=True)
class Argument:
    """A tensor argument of an operator."""

    name: str
    """Name in the public function and in messages."""
    dims: tuple[str, ...]
    """Its dimensions, outermost first: ``rows``, ``tokens``, ``num_tokens``, ``heads``, ``groups``,
    ``head_dim``, ``state_size``, ``slots``, ``capacity``; of the convolution ``channels``, ``width``.
    ``rows + 1`` is one more than rows."""
    dtypes: tuple[str, ...] | str
    """Short names of the dtypes it may have; the name of another argument stands for its dtype."""
    kernel: str = ""
    """Name in :mod:`.abi`; by default the public one."""
    optional: bool = False
    """None stands for leaving it out."""
    made: bool = False
    """Where it is left out the public function makes it: operators always get one."""
    written: bool = False
    apart: bool = False
    """``out`` must not overlap it."""

    def __post_init__(self) -> None:
        if not self.kernel:
            object.__setattr__(self, "kernel", self.name)


@dataclass(frozen=True)
class Contract:
    """An operator: ``name(*arguments, *scalars, null_slot)``.

    The public functions keep their own order; the implementations have this one.
    """

    name: str
    arguments: tuple[Argument, ...]
    """Tensors; the last one of a step, or of the convolution, is ``out``."""
    scalars: tuple[tuple[str, str], ...]
    """(type in the schema, name) of each scalar in front of ``null_slot``; fields of its spec, if any."""
    sized_by: tuple[str, ...]
    """Arguments that say how large the dimensions are: each names the sizes of those not met before.
    Others are measured against them, and all lie on the first one's device. Where there is an ``out``, the
    first one is also what it looks like."""
    family: str = ""
    """Family of what kernels of a spec serve; empty for what serves every family."""
    op: str = ""
    """What :class:`.spec.Spec` calls it."""
    dim_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Names that the family has for dimensions, where they are not those of :class:`Argument`."""

    @functools.cached_property
    def schema(self) -> str:
        """The operator's schema for :class:`torch.library.Library`, with its exact mutation list."""
        parts = []
        alias = ord("a")
        for argument in self.arguments:
            kind = "Tensor?" if argument.optional and not argument.made else "Tensor"
            if argument.written:
                kind += f"({chr(alias)}!)"
                alias += 1
            parts.append(f"{kind} {argument.name}")
        parts += [f"{kind} {name}" for kind, name in (*self.scalars, ("int", "null_slot"))]
        return f"{self.name}({', '.join(parts)}) -> ()"

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Public names of the tensors."""
        return tuple(argument.name for argument in self.arguments)

    @functools.cached_property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the tensors in :mod:`.abi`."""
        return tuple(argument.kernel for argument in self.arguments)

    @functools.cached_property
    def apart(self) -> tuple[int, ...]:
        """Positions of the tensors that ``out`` must not overlap."""
        return tuple(i for i, argument in enumerate(self.arguments) if argument.apart)

    @functools.cached_property
    def sizes_at(self) -> dict[str, tuple[int, int]]:
        """Where the size of each dimension is read: position of the argument, and its dimension."""
        found: dict[str, tuple[int, int]] = {}
        for name in self.sized_by:
            position = self.position(name)
            for dimension, dim in enumerate(self.arguments[position].dims):
                found.setdefault(dim, (position, dimension))
        return found

    @functools.cached_property
    def leading(self) -> int:
        """Position of the tensor that lies where all others must, the model of an ``out``."""
        return self.position(self.sized_by[0])

    @functools.cached_property
    def pool(self) -> int:
        """Position of the tensor whose size says how many slots there are."""
        return self.sizes_at["slots"][0]

    def position(self, name: str) -> int:
        """Position of the tensor with this public name."""
        return self.names.index(name)

    def dim_name(self, dim: str) -> str:
        """What the family calls a dimension."""
        return self.dim_names.get(dim, dim)


_READ_CURSORS: Final = (
    Argument("ring_start", ("slots",), ("i32",)),
    Argument("ring_len", ("slots",), ("i32",)),
)
_SLOT_INDEX: Final = Argument("slot_index", ("rows",), INDICES)
_QUERY_START: Final = Argument("query_start", ("rows + 1",), ("i32",), optional=True)
_STATE: Final = Argument(
    "state", ("slots", "heads", "head_dim", "state_size"), FLOATS, written=True, apart=True
)


def _out(like: str) -> Argument:
    return Argument("out", ("rows", "heads", "head_dim"), like, optional=True, made=True, written=True)


def _rings(x: str, b: str, decay: str) -> tuple[Argument, ...]:
    """The rings of a family, by its names for them."""
    return (
        Argument(x, ("slots", "heads", "capacity", "head_dim"), FLOATS, "ring_x", written=True, apart=True),
        Argument(b, ("slots", "groups", "capacity", "state_size"), x, "ring_b", written=True, apart=True),
        Argument(decay, ("slots", "heads", "capacity"), ("fp32",), "ring_decay", written=True, apart=True),
    )


def _packed(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Those of a step with the tokens of all rows one after the other; which row owns which is said last."""
    *inputs, slot_index, out = (
        replace(argument, dims=tuple("tokens" if dim == "rows" else dim for dim in argument.dims))
        for argument in arguments
    )
    return (*inputs, replace(slot_index, dims=("rows",)), _QUERY_START, out)


def _verify(step: Contract) -> Contract:
    """What takes several tokens a row where ``step`` takes one."""
    window, *flags = step.scalars
    return replace(
        step,
        name=f"{step.family}_verify",
        arguments=_packed(step.arguments),
        scalars=(window, ("int", "num_tokens"), *flags),
        sized_by=(*step.sized_by, "slot_index"),
        op="verify",
    )


def _native_verify(step: Contract) -> Contract:
    """What writes a state for each of several tokens where ``step`` writes that of one."""
    *inputs, slot_index, query_start, out = _packed(step.arguments)
    slots, kept = (
        replace(slot_index, dims=("rows", "num_tokens")),
        replace(slot_index, name="accepted", kernel="accepted"),
    )
    return replace(
        step,
        name=f"{step.family}_native_verify",
        arguments=(*inputs, slots, kept, query_start, out),
        sized_by=(*step.sized_by, "slot_index"),
        op="native_verify",
    )


def _materialize(step: Contract, *parameters: str) -> Contract:
    """What folds the rings of ``step`` into states elsewhere, and which of its inputs that takes."""
    arguments = {argument.name: replace(argument, apart=False) for argument in step.arguments}
    rings = [argument for argument in step.arguments if argument.kernel.startswith("ring_")]
    return Contract(
        f"{step.family}_materialize",
        (
            Argument("source", ("rows",), INDICES, "slot_index"),
            Argument("destination", ("rows",), INDICES),
            Argument("prefix", ("rows",), INDICES, optional=True, made=True),
            *(arguments[name] for name in (*parameters, "state")),
            *(replace(arguments[ring.name], written=False) for ring in rings),
        ),
        (("int", "window"),),
        sized_by=("source", "state", *(ring.name for ring in rings[:2])),
        family=step.family,
        op="materialize",
        dim_names=step.dim_names,
    )


_MAMBA2_INPUTS: Final = (
    Argument("x", ("rows", "heads", "head_dim"), FLOATS, apart=True),
    Argument("dt", ("rows", "heads"), FLOATS, apart=True),
    Argument("A", ("heads",), ("fp32",), "a"),
    Argument("B", ("rows", "groups", "state_size"), "x", "b", apart=True),
    Argument("C", ("rows", "groups", "state_size"), "x", "c", apart=True),
    Argument("D", ("heads",), FLOATS, "d", optional=True),
    Argument("z", ("rows", "heads", "head_dim"), "x", optional=True, apart=True),
    Argument("dt_bias", ("heads",), FLOATS, optional=True),
    _STATE,
)
_MAMBA2_OUT: Final = _out("x")

MAMBA2_STEP: Final = Contract(
    "mamba2_step",
    (
        *_MAMBA2_INPUTS,
        *_rings("ring_x", "ring_b", "ring_decay"),
        *_READ_CURSORS,
        _SLOT_INDEX,
        _MAMBA2_OUT,
    ),
    (("int", "window"), ("bool", "dt_softplus")),
    sized_by=("x", "B", "state", "ring_x"),
    family="mamba2",
    op="step",
)
MAMBA2_NATIVE_STEP: Final = Contract(
    "mamba2_native_step",
    (*_MAMBA2_INPUTS, _SLOT_INDEX, _MAMBA2_OUT),
    (("bool", "dt_softplus"),),
    sized_by=("x", "B", "state"),
    family="mamba2",
    op="native_step",
)
MAMBA2_VERIFY: Final = _verify(MAMBA2_STEP)
MAMBA2_NATIVE_VERIFY: Final = _native_verify(MAMBA2_NATIVE_STEP)
MAMBA2_MATERIALIZE: Final = _materialize(MAMBA2_STEP, "A")

_GDN_DIMS: Final = {
    "heads": "value_heads",
    "groups": "key_heads",
    "head_dim": "value_dim",
    "state_size": "key_dim",
}
_GDN_INPUTS: Final = (
    Argument("q", ("rows", "groups", "state_size"), "v", "c", apart=True),
    Argument("k", ("rows", "groups", "state_size"), "v", "b", apart=True),
    Argument("v", ("rows", "heads", "head_dim"), FLOATS, "x", apart=True),
    Argument("a", ("rows", "heads"), FLOATS, "dt", apart=True),
    Argument("b", ("rows", "heads"), FLOATS, "beta", apart=True),
    Argument("A_log", ("heads",), ("fp32",), "a"),
    Argument("dt_bias", ("heads",), FLOATS, optional=True),
    _STATE,
)
_GDN_OUT: Final = _out("v")

GDN_STEP: Final = Contract(
    "gdn_step",
    (
        *_GDN_INPUTS,
        *_rings("ring_u", "ring_k", "ring_g"),
        *_READ_CURSORS,
        _SLOT_INDEX,
        _GDN_OUT,
    ),
    (("int", "window"), ("bool", "qk_l2norm")),
    sized_by=("v", "k", "state", "ring_u"),
    family="gdn",
    op="step",
    dim_names=_GDN_DIMS,
)
GDN_NATIVE_STEP: Final = Contract(
    "gdn_native_step",
    (*_GDN_INPUTS, _SLOT_INDEX, _GDN_OUT),
    (("bool", "qk_l2norm"),),
    sized_by=("v", "k", "state"),
    family="gdn",
    op="native_step",
    dim_names=_GDN_DIMS,
)
GDN_VERIFY: Final = _verify(GDN_STEP)
GDN_NATIVE_VERIFY: Final = _native_verify(GDN_NATIVE_STEP)
GDN_MATERIALIZE: Final = _materialize(GDN_STEP)

_CURSORS: Final = (
    Argument("ring_start", ("slots",), ("i32",), written=True),
    Argument("ring_len", ("slots",), ("i32",), written=True),
)
_SLOTS: Final = Argument("slots", ("rows",), INDICES)

COMMIT: Final = Contract(
    "commit",
    (Argument("accepted", ("rows",), INDICES), *_CURSORS, _SLOT_INDEX, _QUERY_START),
    (("int", "window"), ("int", "num_tokens"), ("int", "capacity")),
    sized_by=("slot_index", "ring_start"),
)
RESET: Final = Contract("reset", (_SLOTS, *_CURSORS), (), sized_by=("slots", "ring_start"))
DRAINED: Final = Contract(
    "drained", (_SLOTS, *_CURSORS), (("int", "capacity"),), sized_by=("slots", "ring_start")
)

CONV_STEP: Final = Contract(
    "conv_step",
    (
        Argument("x", ("tokens", "channels"), FLOATS, apart=True),
        Argument("weight", ("channels", "width"), ("x", "fp32")),
        Argument("bias", ("channels",), ("x", "fp32"), optional=True),
        Argument("ring", ("slots", "capacity", "channels"), ("x", "fp32"), written=True, apart=True),
        *_READ_CURSORS,
        _SLOT_INDEX,
        _QUERY_START,
        Argument("out", ("tokens", "channels"), "x", optional=True, made=True, written=True),
    ),
    (("int", "window"), ("int", "num_tokens"), ("bool", "silu")),
    sized_by=("x", "weight", "ring", "slot_index"),
)
CONV_SEED: Final = Contract(
    "conv_seed",
    (
        Argument("history", ("rows", "width - 1", "channels"), FLOATS),
        Argument("ring", ("slots", "capacity", "channels"), ("history", "fp32"), written=True),
        _READ_CURSORS[0],
        _SLOTS,
    ),
    (),
    sized_by=("history", "ring"),
)
