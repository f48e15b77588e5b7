"""What a kernel *is* beyond its spec: the variant (structure and tile) and the plan of launches.

A :class:`Variant` is one generated kernel with its tile numbers; a :class:`Plan` is the one or
two launches that together make a step. Both are frozen records with one canonical string.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Final

from .errors import SpecError

ROLES: Final = ("both", "nonflush", "flush", "native", "materialize")
"""Which rows a kernel serves. ``both``: a per-row branch in one launch; ``nonflush``/``flush``:
one branch, rows of the other leave at once; ``native``: the baseline without a ring;
``materialize``: no step, ring tokens are folded into a state elsewhere."""

PLAN_ROLES: Final = {
    "step": (("both",), ("nonflush", "flush")),
    "verify": (("both",), ("nonflush", "flush")),
    "native_step": (("native",),),
    "native_verify": (("native",),),
    "materialize": (("materialize",),),
}
"""Roles of the kernels that plans are made of, by the op of their spec."""

LEADING_ROLE: Final = "flush"
"""Role of the launch that goes first, where there is one per branch; the other begins while it still runs."""

STRUCTURE_VALUES: Final = {
    "role": ROLES,
    "coefficients": ("inline", "precomputed", "prologue"),
    "route": ("output_only", "rebuild"),
    "readout": ("elementwise", "dot"),
    "scores": ("elementwise", "dot"),
    "load": ("late", "early"),
    "loop": ("heads", "tiles"),
    "solve": ("columns", "inverse"),
}
"""What each field of a :class:`Structure` may be; the first is what a role without the axis has."""


@dataclass(frozen=True, order=True)
class Structure:
    """Structural choices: they change the generated module.

    Axes that a role does not have stand at their first value (``inline``, ``output_only``,
    ``elementwise``, ``late``, ``heads``, ``columns``), so that equal kernels are equal records.
    """

    role: str
    coefficients: str = "inline"
    """``inline``, head by head; ``precomputed`` by a small kernel launched before; ``prologue`` by the
    program itself, of all its heads at once ahead of its loop: the skeleton of drafts, for one token too."""
    route: str = "output_only"
    """Non-flush rows: ``output_only`` reads old state and ring; ``rebuild`` forms the new state."""
    readout: str = "elementwise"
    """State read-out: ``elementwise`` in registers, or ``dot`` fed from shared memory."""
    scores: str = "elementwise"
    """Ring scores B.C: ``elementwise`` or ``dot``."""
    load: str = "late"
    """State load: ``late``, where it is used, or ``early``, ahead of the cursors (one head, one tile)."""
    loop: str = "heads"
    """What a program loops over: its ``heads``, with one block of rows each, or all row ``tiles`` of them."""
    solve: str = "columns"
    """GDN with drafts: the triangular system of the new tokens is solved ``columns`` by columns on the right
    hand side, or its ``inverse`` is formed and applied by a dot."""

    def __post_init__(self) -> None:
        for name, values in STRUCTURE_VALUES.items():
            value = getattr(self, name)
            if value not in values:
                raise SpecError(f"{name} '{value}' is not one of {', '.join(values)}")

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the module's kernels, in launch order."""
        return ("coefficients", "step") if self.coefficients == "precomputed" else ("step",)

    @property
    def overlaps(self) -> bool:
        """Whether it has kernels that run beside the launch before or behind them, on GPUs that can do so."""
        return self.role in ("nonflush", "flush") or self.coefficients == "precomputed"

    @property
    def takes_scratch(self) -> bool:
        """Whether coefficients lie in memory that the launch brings."""
        return self.coefficients != "inline"

    @property
    def key(self) -> str:
        """Canonical string, e.g. ``both.inline.output_only.elementwise.elementwise.late``.

        A loop over heads and a solve by columns at the end go without saying, as in keys from before
        there was another.
        """
        parts = list(dataclasses.astuple(self))
        for unsaid in ("columns", "heads"):
            if parts[-1] != unsaid:
                break
            parts.pop()
        return ".".join(parts)


@dataclass(frozen=True, order=True)
class Tile:
    """Tile numbers and compiler options: they do not change the generated module."""

    block_p: int
    """Rows of the state (head dim) a program holds at a time; a power of two."""
    block_n: int
    """Columns of the state a read-out loads at a time; a power of two."""
    fold_block_n: int = 0
    """Columns of the state a fold works on at a time; 0 where nothing is folded."""
    heads_per_program: int = 1
    """Heads of one group that a program serves one after the other."""
    num_warps: int = 1
    num_stages: int = 1
    """Software pipelining depth of the loop over heads; 1 is none."""
    max_registers: int = 0
    """Register cap per thread; 0 leaves it to the compiler."""
    evict_first: bool = False
    """Cache policy of the state load: True marks its lines to leave the L2 first."""

    @property
    def key(self) -> str:
        """Canonical string, e.g. ``p32.n128.f0.h1.w1.s1.r0.e0``."""
        values = (int(v) for v in dataclasses.astuple(self))
        return ".".join(f"{letter}{value}" for letter, value in zip("pnfhwsre", values, strict=True))


@dataclass(frozen=True, order=True)
class Variant:
    """One kernel of the space: a structure with its tile."""

    structure: Structure
    tile: Tile

    @functools.cached_property
    def key(self) -> str:
        """Canonical string of structure and tile, joined by ``/``."""
        return f"{self.structure.key}/{self.tile.key}"

    @functools.cached_property
    def numerics(self) -> str:
        """What its outputs' and states' bits hang on: its key, without what changes no arithmetic.

        Blocks and warps decide how the values of a sum lie on threads, hence its order. Which multiplications
        and additions the compiler contracts hangs on the whole loop around them, its length and its depth
        included (measured: kernels that differ in heads a program alone gave other bits). Register caps and
        cache policies come after that choice.
        """
        tile = dataclasses.replace(self.tile, max_registers=0, evict_first=False)
        return f"{self.structure.key}/{tile.key}"

    def row_blocks(self, head_dim: int) -> int:
        """Blocks of rows that a head is divided into."""
        return -(-head_dim // self.tile.block_p)

    def rounds(self, head_dim: int) -> int:
        """Rounds of a program's loop: heads, or all row tiles of them."""
        tiles = self.row_blocks(head_dim) if self.structure.loop == "tiles" else 1
        return self.tile.heads_per_program * tiles

    def programs_per_row(self, head_dim: int, heads: int) -> int:
        """Programs that serve one sequence with ``heads`` heads."""
        return heads * self.row_blocks(head_dim) // self.rounds(head_dim)

    @classmethod
    def parse(cls, key: str) -> Variant:
        """Inverse of :attr:`key`.

        Raises:
            SpecError: ``key`` is not a canonical variant string.
        """
        try:
            structure_key, tile_key = key.split("/")
            numbers: list[Any] = [int(part[1:]) for part in tile_key.split(".")]
            numbers[-1] = bool(numbers[-1])
            variant = cls(Structure(*structure_key.split(".")), Tile(*numbers))
        except (ValueError, TypeError) as error:
            raise SpecError(f"'{key}' is not a variant key: {error}") from error
        if variant.key != key:
            raise SpecError(f"'{key}' is not a variant key; did you mean '{variant.key}'?")
        return variant


@dataclass(frozen=True, order=True)
class Plan:
    """The launches of one call.

    What they may be, and in which order they are named, is in :data:`PLAN_ROLES`.
    """

    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        if not any(self.roles in legal for legal in PLAN_ROLES.values()):
            raise SpecError(f"a plan cannot be made of roles {self.roles}")

    @property
    def roles(self) -> tuple[str, ...]:
        """Which rows each kernel serves, in order."""
        return tuple(variant.structure.role for variant in self.variants)

    @functools.cached_property
    def key(self) -> str:
        """Canonical string: the variants' keys joined by ``+``."""
        return "+".join(v.key for v in self.variants)

    @functools.cached_property
    def numerics(self) -> str:
        """Numerics class: arithmetic and reduction order of outputs and stored states, of all launches.

        Two plans of one class give a spec's calls equal bits, if the calls' tensors have equal dtypes and are
        both aligned to 16 bytes or both not. The converse need not hold. Which rows flush hangs on their ring
        lengths alone, so a class says nothing of batches.
        """
        return "+".join(variant.numerics for variant in self.variants)

    @classmethod
    def parse(cls, key: str) -> Plan:
        """Inverse of :attr:`key`.

        Raises:
            SpecError: ``key`` is not a canonical plan string.
        """
        return cls(tuple(Variant.parse(part) for part in key.split("+")))
