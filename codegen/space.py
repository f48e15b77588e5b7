"""The space of kernels, declared once: axes, constraints, and the points they leave.

An *axis* is a choice with its values. A *constraint* says by name which points cannot exist for a
spec. A *region* (:mod:`.regions`) is a box of axis values in which a role is searched; :func:`points`
lists the legal points of all regions of a role.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..runtime.abi import next_power_of_two, state_block, takes_tokens
from ..runtime.defaults import default_plan
from ..runtime.plan import PLAN_ROLES, STRUCTURE_VALUES, Structure, Tile, Variant
from ..runtime.spec import DTYPE_BYTES, Spec
from .regions import MAX_TILED_HEADS, REGIONS

WARP_SIZE: Final = 32


@dataclass(frozen=True)
class Axis:
    """One choice of a kernel.

    Args:
        name: Field of :class:`Structure` or :class:`Tile`.
        values: Everything it may be.
        doc: What it decides.
    """

    name: str
    values: tuple[object, ...]
    doc: str


_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

AXES: Final = (
    Axis(
        "coefficients",
        STRUCTURE_VALUES["coefficients"],
        "ring weights: head by head, by a kernel before, or ahead of the program's loop",
    ),
    Axis(
        "route", STRUCTURE_VALUES["route"], "rows that keep their state: read old state, or rebuild the new"
    ),
    Axis("readout", STRUCTURE_VALUES["readout"], "state read-out: sums in registers, or a tensor-core dot"),
    Axis("scores", STRUCTURE_VALUES["scores"], "ring scores B.C: sums in registers, or a tensor-core dot"),
    Axis("load", STRUCTURE_VALUES["load"], "state loaded where it is used, or ahead of everything else"),
    Axis("loop", STRUCTURE_VALUES["loop"], "a program's loop: its heads, or all row tiles of its heads"),
    Axis(
        "solve",
        STRUCTURE_VALUES["solve"],
        "triangular system of new tokens: by columns, or its inverse",
    ),
    Axis("block_p", _POWERS, "rows of the state a program holds"),
    Axis("block_n", _POWERS, "columns a read-out loads at a time (early, native: that a thread's row spans)"),
    Axis("fold_block_n", (0, *_POWERS), "columns a fold works on at a time"),
    Axis("heads_per_program", tuple(range(1, 17)), "heads of a group a program serves in turn"),
    Axis("num_warps", (1, 2, 4, 8), "warps of a program"),
    Axis("num_stages", (1, 2, 3, 4), "pipelining depth of the loop over heads"),
    Axis("max_registers", (0, 128, 168), "register cap per thread"),
    Axis("evict_first", (False, True), "state leaves the L2 first"),
)
"""All axes, in the order of the records' fields."""


@dataclass(frozen=True)
class Constraint:
    """A rule that legal points obey; rejected points are counted under ``name``."""

    name: str
    holds: Callable[[Spec, Variant], bool]


def folds(structure: Structure) -> bool:
    """Whether kernels of ``structure`` fold ring tokens into the state."""
    return structure.role in ("both", "flush", "materialize") or structure.route == "rebuild"


def reads_old(structure: Structure) -> bool:
    """Whether they read outputs from the old state, in columns of ``block_n``."""
    return structure.role in ("both", "nonflush") and structure.route == "output_only"


def _own_axes(spec: Spec, variant: Variant) -> bool:
    structure = variant.structure
    if structure.solve != "columns" and (spec.op, spec.family) != ("verify", "gdn"):
        return False
    if takes_tokens(spec, structure):
        # Products with all tokens of a row at once are dots, or the tensor cores would idle.
        fixed = dataclasses.replace(structure, route="output_only", readout="dot", scores="dot")
        return structure.role in roles(spec) and structure == fixed
    keeps_rows = structure.role in ("both", "nonflush")
    return (
        structure.role in roles(spec)
        and (keeps_rows or (structure.coefficients, structure.route) == ("inline", "output_only"))
        and (reads_old(structure) or structure.scores == "elementwise")
        and (structure.role not in ("native", "materialize") or structure == Structure(structure.role))
    )


def _prologue(spec: Spec, variant: Variant) -> bool:
    """What a program leaves in memory only it may read: its heads are its own, whole."""
    structure, tile = variant.structure, variant.tile
    return structure.coefficients != "prologue" or (
        spec.op in ("step", "verify")
        and (structure.loop == "tiles" or tile.block_p >= spec.head_dim)
        and tile.heads_per_program == next_power_of_two(tile.heads_per_program)
    )


def _early(spec: Spec, variant: Variant) -> bool:
    structure, tile = variant.structure, variant.tile
    return structure.load != "early" or (
        (structure.coefficients, structure.readout) == ("inline", "dot" if spec.verifies else "elementwise")
        and (structure.role == "both" or not spec.verifies)
        and (tile.heads_per_program, tile.num_stages) == (1, 1)
        and tile.fold_block_n in (0, state_block(spec))
    )


def _dot_readout(spec: Spec, variant: Variant) -> bool:
    structure = variant.structure
    if structure.readout != "dot":
        return True
    if takes_tokens(spec, structure):
        # Whatever the dtypes are: those that a dot does not take as they come are widened.
        folded = variant.tile.fold_block_n >= 16 or not folds(structure)
        return variant.tile.block_p >= 16 and 16 <= variant.tile.block_n == state_block(spec) and folded
    if structure.load != "late" or state_block(spec) < 16 or variant.tile.block_p < 16:
        return False
    if not reads_old(structure):
        return True
    # C stands beside the state in a dot: an fp32 state is read in tf32, another in its own dtype.
    return (
        DTYPE_BYTES[spec.activation_dtype] == 2
        and spec.state_dtype in ("fp32", spec.activation_dtype)
        and variant.tile.block_n == state_block(spec)
    )


def _dot_scores(spec: Spec, variant: Variant) -> bool:
    return (
        variant.structure.scores != "dot"
        or takes_tokens(spec, variant.structure)
        or (
            DTYPE_BYTES[spec.ring_dtype] == 2
            and spec.ring_dtype == spec.activation_dtype
            and state_block(spec) >= 16
        )
    )


def _block_of_rows(spec: Spec, variant: Variant) -> bool:
    return variant.tile.block_p <= max(32, next_power_of_two(spec.head_dim))


def _block_of_columns(spec: Spec, variant: Variant) -> bool:
    structure, tile, whole = variant.structure, variant.tile, state_block(spec)
    spans = reads_old(structure) or structure.load == "early" or structure.role == "native"
    if tile.block_n > whole or (not spans and tile.block_n != whole):
        return False
    return 1 <= tile.fold_block_n <= whole if folds(structure) else tile.fold_block_n == 0


def _heads(spec: Spec, variant: Variant) -> bool:
    return spec.heads_per_group % variant.tile.heads_per_program == 0


def _tiles(spec: Spec, variant: Variant) -> bool:
    """A loop over tiles pays where a group has few heads to loop over."""
    structure = variant.structure
    return structure.loop == "heads" or (
        structure.load == "late"
        and (structure.coefficients == "inline" or takes_tokens(spec, structure))
        and spec.heads_per_group <= MAX_TILED_HEADS
        and variant.tile.block_p <= next_power_of_two(spec.head_dim)
    )


def _stages(spec: Spec, variant: Variant) -> bool:
    return variant.tile.num_stages == 1 or variant.rounds(spec.head_dim) >= variant.tile.num_stages


def _registers(spec: Spec, variant: Variant) -> bool:
    """fp32 values of a state tile per thread: too many spill, too few leave lanes idle."""
    structure, tile = variant.structure, variant.tile
    threads = WARP_SIZE * tile.num_warps
    held = [tile.block_p * tile.fold_block_n] if folds(structure) and structure.load == "late" else []
    whole = structure.load == "early" or structure.role == "native"
    if whole:
        held.append(tile.block_p * state_block(spec))
    elif reads_old(structure) and structure.readout == "elementwise":
        held.append(tile.block_p * tile.block_n)
    if any(values > 256 * threads for values in held):
        return False
    if folds(structure) and tile.block_p * tile.fold_block_n > 128 * threads:
        return False
    return not whole or held[0] >= min(4 * threads, 512)


CONSTRAINTS: Final = (
    Constraint("axis of another role", _own_axes),
    Constraint("coefficients ahead of the loop: whole heads, a power of two of them", _prologue),
    Constraint("early load: one head, inline, the whole state; of drafts one launch", _early),
    Constraint("read-out by dot: dtypes and whole rows", _dot_readout),
    Constraint("scores by dot: 16-bit ring, or new tokens as columns", _dot_scores),
    Constraint("block_p within the head", _block_of_rows),
    Constraint("blocks within the state", _block_of_columns),
    Constraint("heads_per_program divides the group", _heads),
    Constraint(
        "loop over tiles: late load, few heads a group, blocks within the head, tokens as columns or "
        "coefficients inline",
        _tiles,
    ),
    Constraint("num_stages within the loop", _stages),
    Constraint("state values per thread", _registers),
)
"""All constraints; a point counts under the first that it breaks."""


def broken_constraint(spec: Spec, variant: Variant) -> str:
    """Name of the first constraint that ``variant`` breaks, "" for a legal point of ``spec``."""
    return next((c.name for c in CONSTRAINTS if not c.holds(spec, variant)), "")


@dataclass(frozen=True)
class Space:
    """The points of one role for one spec.

    Args:
        spec: What all of them compute.
        role: Their role.
        variants: Legal points without repeats, the default first where the role has one.
        rejected: Points of the regions that cannot exist, by the name of the constraint they break.
        default: What the field ships today; None for roles that it does not launch by themselves.
    """

    spec: Spec
    role: str
    variants: tuple[Variant, ...]
    rejected: Mapping[str, int]
    default: Variant | None

    @property
    def total(self) -> int:
        """Points of the regions, legal or not."""
        return len(self.variants) + sum(self.rejected.values())


@functools.lru_cache(maxsize=256)
def points(spec: Spec, role: str) -> Space:
    """The space of ``role`` for ``spec``, in an order that never changes.

    Args:
        spec: A ``native_step`` spec for role ``native``, else a ``step`` spec.
        role: One of :data:`~..runtime.plan.ROLES`.

    Raises:
        ValueError: ``role`` is not one that kernels of ``spec`` have.
    """
    if role not in roles(spec):
        raise ValueError(f"kernels of {spec.op} have the roles {', '.join(roles(spec))}, not '{role}'")
    default = next((v for v in default_plan(spec).variants if v.structure.role == role), None)
    held = {} if default is None else {default: None}
    rejected = {constraint.name: 0 for constraint in CONSTRAINTS}
    wanted = dict.fromkeys(
        variant
        for region in REGIONS
        if spec.op in region.ops and role in region.roles
        for variant in region.variants(spec, role)
    )
    for variant in wanted:
        broken = "" if variant in held else broken_constraint(spec, variant)
        if broken:
            rejected[broken] += 1
        else:
            held[variant] = None
    return Space(
        spec,
        role,
        tuple(held),
        MappingProxyType({name: count for name, count in rejected.items() if count}),
        default,
    )


def roles(spec: Spec) -> tuple[str, ...]:
    """Roles that kernels of ``spec`` may have."""
    return tuple(itertools.chain(*PLAN_ROLES[spec.op]))


@functools.lru_cache(maxsize=256)
def structures(spec: Spec) -> tuple[Structure, ...]:
    """Structures of the points of all roles of ``spec``: the modules that a search may render."""
    return tuple(
        dict.fromkeys(variant.structure for role in roles(spec) for variant in points(spec, role).variants)
    )


def legal_structures(spec: Spec) -> tuple[Structure, ...]:
    """Every structure for which ``spec`` has a legal tile, searched or not."""
    whole, rows = state_block(spec), max(16, next_power_of_two(spec.head_dim))
    found = []
    for role in roles(spec):
        choices = {name: values for name, values in STRUCTURE_VALUES.items() if name != "role"}
        for chosen in itertools.product(*choices.values()):
            structure = Structure(role, **dict(zip(choices, chosen, strict=True)))
            fold = whole if folds(structure) else 0
            tiles = (Tile(block_p, whole, fold, num_warps=4) for block_p in {min(16, rows), rows})
            if not all(broken_constraint(spec, Variant(structure, tile)) for tile in tiles):
                found.append(structure)
    return tuple(found)


assert [axis.name for axis in AXES] == [
    field.name for record in (Structure, Tile) for field in dataclasses.fields(record) if field.name != "role"
]
