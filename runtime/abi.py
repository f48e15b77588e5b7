"""Argument lists of the generated kernels: one source for templates, compiler and launcher.

A kernel takes its tensors' pointers, then strides in elements, then scalars; tile numbers follow
as ``tl.constexpr``. Arguments of inputs that a spec leaves out do not exist.

Names are those of Mamba-2. In Gated DeltaNet ``x`` is v, ``b`` is k, ``c`` is q, ``dt`` is the raw gate a,
``a`` is A_log, ``beta`` the raw b; the ring's ``x``, ``b`` and ``decay`` are u, k and g.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from .plan import PLAN_ROLES, Structure, Tile, Variant
from .spec import DTYPE_BYTES, Spec


@dataclass(frozen=True)
class TensorArgument:
    """A tensor of a kernel: its name and the dimensions whose strides are passed.

    The innermost dimension is contiguous and has no stride argument.
    """

    name: str
    dtype: str
    """Default dtype: ``fp32``, ``bf16``, ``fp16``, ``i32``; the launcher takes the tensor's own."""
    stride_dims: tuple[str, ...] = ()
    """Names of the leading dimensions, outermost first, e.g. ``("slot", "head", "row")``."""
    vectorized: bool = False
    """Loaded in vectors along its innermost dimension: its alignment matters."""
    per_row: bool = False
    """An integer per row, int32 or int64 as the caller has it: a slot, or a count."""

    @property
    def pointer(self) -> str:
        """Name of the pointer argument."""
        return f"{self.name}_ptr"

    @property
    def strides(self) -> tuple[str, ...]:
        """Names of the stride arguments, outermost first; values are in elements."""
        return tuple(f"{self.name}_stride_{dim}" for dim in self.stride_dims)


_TILE_ARGUMENTS: Final = (
    "BLOCK_P",
    "BLOCK_N",
    "FOLD_BLOCK_N",
    "HEADS_PER_PROGRAM",
    "HEAD_BLOCK",
    "NUM_STAGES",
    "EVICTION",
)
"""Tile arguments of every step kernel, in order."""


def constexprs(structure: Structure, *, tiled: bool = True) -> tuple[str, ...]:
    """``tl.constexpr`` parameters of a kernel of ``structure``, in order.

    Args:
        structure: Of the module.
        tiled: Whether it is the main kernel, which takes the tile's numbers.
    """
    return (*(_TILE_ARGUMENTS if tiled else ()), *(("OVERLAP",) if structure.overlaps else ()))


def takes_tokens(spec: Spec, structure: Structure) -> bool:
    """Whether a replay kernel takes the new tokens of a row as columns of products: that of drafts.

    Its skeleton serves a single token too, where coefficients come ahead of the loop; of Mamba-2 those of a
    kernel before have the skeleton of one token.
    """
    ahead = ("prologue",) if spec.family == "mamba2" else ("prologue", "precomputed")
    return spec.op == "verify" or (spec.op == "step" and structure.coefficients in ahead)


@functools.cache
def tensor_arguments(spec: Spec, structure: Structure) -> tuple[TensorArgument, ...]:
    """Tensors of the main kernel of ``structure``, in the order of its pointer arguments."""
    activation, ring = spec.activation_dtype, spec.ring_dtype
    arguments = [TensorArgument("state", spec.state_dtype, ("slot", "head", "row"), True)]
    if structure.role != "native":
        arguments += [
            TensorArgument("ring_x", ring, ("slot", "head", "token"), True),
            TensorArgument("ring_b", ring, ("slot", "group", "token"), True),
            TensorArgument("ring_decay", "fp32", ("slot", "head")),
            TensorArgument("ring_start", "i32"),
            TensorArgument("ring_len", "i32"),
        ]
    if spec.op == "native_verify":
        arguments += [
            TensorArgument("slot_index", "i32", ("row",), per_row=True),
            TensorArgument("accepted", "i32", per_row=True),
        ]
    else:
        arguments.append(TensorArgument("slot_index", "i32", per_row=True))
    if structure.role == "materialize":
        arguments += [TensorArgument(name, "i32", per_row=True) for name in ("destination", "prefix")]
        return (*arguments, *([TensorArgument("a", "fp32")] if spec.family == "mamba2" else []))
    outer = "token" if spec.verifies or takes_tokens(spec, structure) else "row"
    if spec.verifies:
        arguments.append(TensorArgument("query_start", "i32"))
    arguments += [
        TensorArgument("x", activation, (outer, "head"), True),
        TensorArgument("dt", activation, (outer,)),
        TensorArgument("a", "fp32"),
        TensorArgument("b", activation, (outer, "group"), True),
        TensorArgument("c", activation, (outer, "group"), True),
    ]
    if spec.family == "gdn":
        arguments.append(TensorArgument("beta", activation, (outer,)))
    if spec.has_d:
        arguments.append(TensorArgument("d", "fp32"))
    if spec.has_z:
        arguments.append(TensorArgument("z", activation, (outer, "head"), True))
    if spec.has_dt_bias:
        arguments.append(TensorArgument("dt_bias", "fp32"))
    arguments.append(TensorArgument("out", activation, (outer, "head"), True))
    if structure.takes_scratch:
        arguments.append(TensorArgument("scratch", "fp32", ("row",), takes_tokens(spec, structure)))
    return tuple(arguments)


@functools.cache
def launch_structure(spec: Spec) -> Structure:
    """A structure whose arguments every plan of ``spec`` is launched with.

    Scratch, which some structures take beside them, is the launch's own.
    """
    return Structure(PLAN_ROLES[spec.op][0][0])


@functools.cache
def scalar_arguments(spec: Spec, structure: Structure) -> tuple[str, ...]:
    """Names of the scalar arguments (int32), in order; ``tokens`` is the length of packed tensors."""
    ring = () if structure.role == "native" else ("ring_capacity",)
    packed = ("tokens",) if spec.verifies else ()
    return (*ring, *packed, "null_slot")


@functools.cache
def parameters(spec: Spec, structure: Structure) -> tuple[str, ...]:
    """All parameter names of the main kernel in order, tile arguments excluded."""
    tensors = tensor_arguments(spec, structure)
    return (
        *(t.pointer for t in tensors),
        *(name for t in tensors for name in t.strides),
        *scalar_arguments(spec, structure),
    )


def next_power_of_two(value: int) -> int:
    """Smallest power of two that is at least ``value`` (``value`` >= 1)."""
    return 1 << (value - 1).bit_length()


def state_block(spec: Spec) -> int:
    """Columns of the whole state, rounded up to a power of two; of drafts at least a dot's 16."""
    block = next_power_of_two(spec.state_size)
    return max(16, block) if spec.op == "verify" else block


def ring_block(spec: Spec) -> int:
    """Ring tokens a kernel holds at a time: the window, rounded up to a power of two, at least 16."""
    return max(16, next_power_of_two(max(1, spec.window)))


def token_rows(spec: Spec) -> int:
    """New tokens of a row as rows of a dot's operand: a power of two, at least 16."""
    return max(16, next_power_of_two(spec.num_tokens))


def token_block(spec: Spec, structure: Structure) -> int:
    """Columns that a dot has for the new tokens of a row: a power of two, at least 8.

    A token has one, or two of GDN: what its query reads and what its key reads. 16 tokens where the product
    is an operand again.
    """
    tokens = token_rows(spec) if structure.solve == "inverse" else next_power_of_two(spec.num_tokens)
    return max(8, 2 * tokens if spec.family == "gdn" else tokens)


@dataclass(frozen=True)
class Scratch:
    """fp32 values that coefficients leave for the loop that takes them, of a row: group after group.

    Of a group first what its heads share, then head after head; everything in the order of the fields, each
    part a multiple of four values.
    """

    shared: tuple[tuple[str, int], ...]
    """Names and sizes of the parts of a group."""
    per_head: tuple[tuple[str, int], ...]
    """Of a head."""

    @property
    def group_size(self) -> int:
        """Values that the heads of a group share."""
        return sum(size for _, size in self.shared)

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return sum(size for _, size in self.per_head)

    @property
    def offsets(self) -> dict[str, int]:
        """Where each part begins, from the begin of its group or head."""
        return {
            name: sum(size for _, size in parts[:index])
            for parts in (self.shared, self.per_head)
            for index, (name, _) in enumerate(parts)
        }

    def row_size(self, heads: int, heads_per_group: int) -> int:
        """Values of a row with ``heads`` heads."""
        return heads * self.head_size + heads // heads_per_group * self.group_size


@functools.cache
def scratch(spec: Spec, structure: Structure) -> Scratch:
    """Coefficients of ``structure`` that lie in memory.

    Of a single token per head: the ring's weights, the decay of the old state, the weight of the new token
    and its decay. Where tokens are columns, see the family's template: scores of the ring's tokens with the
    new ones are shared, and a head has matrices and columns of the new tokens, its ring weights and decay.
    """
    if not takes_tokens(spec, structure):
        return Scratch((), (("weight", ring_block(spec)), ("decay", 1), ("new", 1), ("token_decay", 1)))
    columns, ring = token_block(spec, structure), ring_block(spec)
    vectors = 1 if spec.family == "mamba2" else 2
    return Scratch(
        (("score", ring * columns),),
        (
            ("matrix", spec.num_tokens * columns),
            ("weight", ring),
            *((f"column{i}", columns) for i in range(vectors)),
            ("decay", 4),
        ),
    )


def coefficient_heads(spec: Spec) -> int:
    """Heads of a group whose coefficients one program works out, of tokens to verify.

    A power of two, fewer the more tokens there are. Not fewer than four: vectors over fewer heads and the
    tokens lie so badly on threads that most of the time goes into moving them (measured).
    """
    return max(4, min(next_power_of_two(spec.heads_per_group), 64 // next_power_of_two(spec.num_tokens)))


def coefficient_warps(spec: Spec) -> int:
    """Warps of such a program: one, where its registers hold what is loaded at a time.

    Sums over a few tokens then stay within the warp, and more programs wait for their loads at once. What is
    loaded are the B of a ring and, for Mamba-2, the new x of all its heads; of more than eight tokens the
    matrices between them count as much.
    """
    ring_bytes = ring_block(spec) * state_block(spec) * DTYPE_BYTES[spec.ring_dtype]
    tokens = coefficient_heads(spec) * next_power_of_two(spec.num_tokens)
    row_bytes = next_power_of_two(spec.head_dim) * DTYPE_BYTES[spec.activation_dtype]
    x_bytes = tokens * row_bytes if spec.family == "mamba2" else 0
    warps = next_power_of_two(max(1, -(-ring_bytes // 4096), -(-x_bytes // 8192)))
    return min(8, 2 * warps if spec.num_tokens > 8 else warps)


def compiled_tile(spec: Spec, variant: Variant, *, tiled: bool) -> Tile:
    """Tile whose options a kernel compiles with: its variant's, or that of coefficients of drafts.

    Args:
        spec: What the kernel computes.
        variant: The point that it belongs to.
        tiled: Whether it is the main kernel, which takes the tile's numbers.
    """
    if tiled or not takes_tokens(spec, variant.structure):
        return variant.tile
    return Tile(1, 1, num_warps=coefficient_warps(spec))


def coefficient_programs(spec: Spec, structure: Structure, heads: int) -> int:
    """Programs of a row that work out coefficients: a group each, or some heads of one."""
    parts = -(-spec.heads_per_group // coefficient_heads(spec)) if takes_tokens(spec, structure) else 1
    return heads // spec.heads_per_group * parts
