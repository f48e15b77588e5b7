"""Where each role is searched: boxes of axis values in which winners have been seen, or may be.

What was never seen near an optimum stays out, so that a whole space compiles in minutes, though it is
legal and can be gated or timed by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..runtime.abi import next_power_of_two, state_block
from ..runtime.plan import Structure, Tile, Variant
from ..runtime.spec import Spec

MAX_TILED_HEADS: Final = 4
"""Heads of a group up to which a program's loop may go over row tiles."""

MAX_LOOPED_HEADS: Final = 16
"""Heads of a group up to which a program may loop over all of them, where no smaller number divides it."""

Values = tuple[int, ...] | Callable[[Spec], tuple[int, ...]]
"""Values of a tile axis: the same for every spec, or computed from it."""


@dataclass(frozen=True)
class Region:
    """A box of the space: every combination of its values is a point.

    Args:
        roles: Where it belongs.
        warps_stages: Pairs of ``num_warps`` and ``num_stages``: deeper pipelines want more warps.
    """

    doc: str
    roles: tuple[str, ...]
    structure: Mapping[str, str]
    block_p: Values
    block_n: Values
    fold_block_n: Values = (0,)
    heads_per_program: Values = (1,)
    warps_stages: tuple[tuple[int, int], ...] = ((1, 1),)
    max_registers: tuple[int, ...] = (0,)
    evict_first: tuple[bool, ...] = (False,)
    ops: tuple[str, ...] = ("step", "native_step", "native_verify", "materialize")

    def variants(self, spec: Spec, role: str) -> list[Variant]:
        """Its points for one role, legal or not."""
        structure = Structure(role, **self.structure)

        def of(values: Values) -> tuple[int, ...]:
            return values(spec) if callable(values) else values

        boxes = (
            itertools.product(
                of(self.block_p), of(self.block_n), of(self.fold_block_n), of(self.heads_per_program)
            ),
            self.warps_stages,
            itertools.product(self.max_registers, self.evict_first),
        )
        return [
            Variant(structure, Tile(*block, *launch, *compiler))
            for block, launch, compiler in itertools.product(*boxes)
        ]


def _small_rows(spec: Spec) -> tuple[int, ...]:
    """Blocks that divide the head."""
    return tuple(p for p in (2, 4, 8, 16, 32) if spec.head_dim % p == 0) or (_whole_head(spec),)


def _early_rows(spec: Spec) -> tuple[int, ...]:
    """Blocks that divide the head, up to 64."""
    return (*_small_rows(spec), 64) if spec.head_dim % 64 == 0 else _small_rows(spec)


def _large_rows(spec: Spec) -> tuple[int, ...]:
    """Blocks of 32 and 64 where they divide the head, else what divides it best and masked ones."""
    dividing = tuple(p for p in (32, 64) if spec.head_dim % p == 0)
    if dividing:
        return dividing
    return tuple(sorted({min(p, _whole_head(spec)) for p in (16, 32)} | {_whole_head(spec)}))


def _whole_head(spec: Spec) -> int:
    return next_power_of_two(spec.head_dim)


def _whole(spec: Spec) -> tuple[int, ...]:
    return (state_block(spec),)


def _columns(*sizes: int) -> Callable[[Spec], tuple[int, ...]]:
    """Blocks of these sizes, cut to the state."""

    def values(spec: Spec) -> tuple[int, ...]:
        return tuple(sorted({min(size, state_block(spec)) for size in sizes}))

    return values


def _few_columns(spec: Spec) -> tuple[int, ...]:
    """So few that the fold's registers do not bound how many programs read, of an fp32 state.

    Of a narrower one they are a single sector of a row, and stores of those are slow.
    """
    return (min(16, state_block(spec)),) if spec.state_dtype == "fp32" else ()


def _heads_up_to(*counts: int) -> Callable[[Spec], tuple[int, ...]]:
    """For each count the largest divisor of the group within it; all heads of a small group without such."""

    def values(spec: Spec) -> tuple[int, ...]:
        found = {max(h for h in range(1, n + 1) if spec.heads_per_group % h == 0) for n in counts}
        if found == {1} and max(counts) > 1 and spec.heads_per_group <= MAX_LOOPED_HEADS:
            found.add(spec.heads_per_group)
        return tuple(sorted(found))

    return values


def _wide_ring_rows(spec: Spec) -> tuple[int, ...]:
    """Large ones, where a ring is fp32: the terms of its products take registers of more threads."""
    return _large_rows(spec) if spec.ring_dtype == "fp32" else ()


def _whole_rows(spec: Spec) -> tuple[int, ...]:
    """All rows of a head at a time; none where a loop over row tiles does better."""
    return () if spec.heads_per_group <= MAX_TILED_HEADS else (max(16, _whole_head(spec)),)


def _large_whole_rows(spec: Spec) -> tuple[int, ...]:
    """The same, of heads that are more than two warps hold in registers."""
    return tuple(p for p in _whole_rows(spec) if p > 64)


def _power_heads_up_to(*counts: int) -> Callable[[Spec], tuple[int, ...]]:
    """For each count the largest power of two within it that divides the group."""

    def values(spec: Spec) -> tuple[int, ...]:
        power = spec.heads_per_group & -spec.heads_per_group
        return tuple(sorted({min(power, count) for count in counts}))

    return values


def _dot_rows(spec: Spec) -> tuple[int, ...]:
    """Blocks for a dot, within the head."""
    return tuple(p for p in (16, 32, 64) if p <= max(16, _whole_head(spec)))


_STEP: Final = ("step",)
_DRAFTS: Final = ("verify",)
_COLUMNS_OPS: Final = ("step", "verify")
_DOT: Final = MappingProxyType({"readout": "dot"})
_EARLY: Final = MappingProxyType({"load": "early"})
_LATE: Final[Mapping[str, str]] = MappingProxyType({})
_PRECOMPUTED: Final = MappingProxyType({"coefficients": "precomputed"})
_PRECOMPUTED_DOT: Final = MappingProxyType({"coefficients": "precomputed", "readout": "dot"})
_REBUILD: Final = MappingProxyType({"route": "rebuild"})
_TILES: Final = MappingProxyType({"loop": "tiles"})
_TILES_DOT: Final = MappingProxyType({"readout": "dot", "loop": "tiles"})
_COLUMNS: Final = MappingProxyType({"readout": "dot", "scores": "dot"})
_COLUMNS_AHEAD: Final = MappingProxyType({**_COLUMNS, "coefficients": "precomputed"})
_COLUMNS_TILES: Final = MappingProxyType({**_COLUMNS_AHEAD, "loop": "tiles"})
_COLUMNS_EARLY: Final = MappingProxyType({**_COLUMNS, "load": "early"})
_COLUMNS_PROLOGUE: Final = MappingProxyType({**_COLUMNS, "coefficients": "prologue"})
_COLUMNS_PROLOGUE_TILES: Final = MappingProxyType({**_COLUMNS_PROLOGUE, "loop": "tiles"})
_SCORES: Final = MappingProxyType({"scores": "dot"})

REGIONS: Final = (
    Region(
        "Few programs: the latency of one is what counts. Whole tiles, all loads at once.",
        ("both",), _EARLY, _early_rows, _columns(32, 64), _whole,
        warps_stages=((1, 1), (2, 1), (4, 1), (8, 1)), evict_first=(False, True),
    ),
    Region(
        "Many programs of one warp each; registers decide how many.",
        ("both",), _LATE, _large_rows, _columns(32, 64), _columns(32, 64), _heads_up_to(1, 2, 4),
        max_registers=(0, 168),
    ),
    Region(
        "As above, the next head's state on its way.",
        ("both",), _LATE, _large_rows, _columns(32, 64), _columns(64), _heads_up_to(4),
        warps_stages=((1, 2), (2, 2)),
    ),
    Region(
        "As above, the fold in few columns.",
        ("both",), _LATE, _large_rows, _columns(32, 64), _few_columns, _heads_up_to(1, 4),
    ),
    Region(
        "State through shared memory into the dot, several heads in flight.",
        ("both",), _DOT, _large_rows, _whole, _columns(32, 64), _heads_up_to(2, 4, 8),
        warps_stages=((1, 2), (2, 2), (2, 3), (4, 2), (4, 3)),
    ),
    Region(
        "As above, more programs at a time.",
        ("both",), _DOT, _large_rows, _whole, _columns(64), _heads_up_to(4, 8),
        warps_stages=((2, 2),), max_registers=(128, 168), ops=_STEP,
    ),
    Region(
        "As above, the fold in few columns.",
        ("both",), _DOT, _large_rows, _whole, _few_columns, _heads_up_to(4, 8),
        warps_stages=((1, 2), (2, 2)), ops=_STEP,
    ),
    Region(
        "Groups of few heads: the loop goes over row tiles too.",
        ("both",), _TILES_DOT, _large_rows, _whole, _columns(32, 64), _heads_up_to(1, 2, 4),
        warps_stages=((1, 2), (2, 2), (2, 3), (4, 2), (4, 3)),
    ),
    Region(
        "As above, the fold in few columns.",
        ("both",), _TILES_DOT, _large_rows, _whole, _few_columns, _heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_STEP,
    ),
    Region(
        "As above, the state through registers.",
        ("both",), _TILES, _large_rows, _columns(32, 64), _columns(32, 64), _heads_up_to(1, 2, 4),
        warps_stages=((1, 1), (2, 1), (2, 2)),
    ),
    Region(
        "Ring scores by dot.",
        ("both",), _SCORES, _large_rows, _columns(64), _columns(64), _heads_up_to(1, 4),
    ),
    Region(
        "Coefficients and appends by a kernel of their own.",
        ("both",), _PRECOMPUTED, _large_rows, _columns(32, 64), _columns(32, 64), _heads_up_to(2, 4, 8),
        warps_stages=((1, 1), (2, 1), (2, 2)),
    ),
    Region(
        "As above, the state through shared memory into the dot.",
        ("both",), _PRECOMPUTED_DOT, _large_rows, _whole, _columns(32, 64), _heads_up_to(4, 8),
        warps_stages=((1, 2), (2, 2), (2, 3), (4, 3)),
    ),
    Region(
        "One way for all rows: the new state is formed, and stored by rows that flush.",
        ("both",), _REBUILD, _large_rows, _whole, _columns(32, 64), _heads_up_to(1, 4),
    ),
    Region(
        "Whole tiles, all loads at once.",
        ("nonflush",), _EARLY, _large_rows, _columns(32, 64), warps_stages=((1, 1), (2, 1), (4, 1)),
    ),
    Region(
        "Many programs of one warp each.",
        ("nonflush",), _LATE, _large_rows, _columns(32, 64), heads_per_program=_heads_up_to(1, 4, 16),
    ),
    Region(
        "State through shared memory into the dot, several heads in flight.",
        ("nonflush",), _DOT, _large_rows, _whole, heads_per_program=_heads_up_to(2, 4, 8, 16),
        warps_stages=((1, 2), (2, 2), (4, 2), (4, 3)),
    ),
    Region(
        "As above, groups of few heads: the loop goes over row tiles too.",
        ("nonflush",), _TILES_DOT, _large_rows, _whole, heads_per_program=_heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2), (4, 3)), max_registers=(0, 128), ops=_STEP,
    ),
    Region(
        "Coefficients and appends by a kernel of their own.",
        ("nonflush",), _PRECOMPUTED_DOT, _large_rows, _whole, heads_per_program=_heads_up_to(4, 8),
        warps_stages=((1, 2), (2, 2)),
    ),
    Region(
        "Fold in the dot, the state its accumulator, deeply pipelined.",
        ("flush",), _DOT, _large_rows, _whole, _columns(32, 64), _heads_up_to(4, 8, 16),
        warps_stages=((2, 2), (4, 3), (4, 4)),
    ),
    Region(
        "As above, groups of few heads: the loop goes over row tiles too.",
        ("flush",), _TILES_DOT, _large_rows, _whole, _columns(32, 64), _heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_STEP,
    ),
    Region(
        "As above, one warp.",
        ("flush",), _DOT, lambda spec: tuple(p for p in (16, 32) if spec.head_dim % p == 0), _whole,
        _columns(64), _heads_up_to(4), warps_stages=((1, 2),), ops=_STEP,
    ),
    Region(
        "Fold in the dot, one head a program.",
        ("flush",), _DOT, _large_rows, _whole, _columns(32, 64),
    ),
    Region(
        "Fold beside the dot.",
        ("flush",), _LATE, _large_rows, _whole, _columns(64), _heads_up_to(1, 8),
    ),
    Region(
        "Whole tiles, all loads at once.",
        ("flush",), _EARLY, lambda spec: tuple(p for p in _small_rows(spec) if p >= 8), _columns(32, 64),
        _whole, warps_stages=((1, 1), (2, 1), (4, 1)),
    ),
    Region(
        "The native step: reads and writes only.",
        ("native",), _LATE, _small_rows, _columns(32, 64, 128), warps_stages=((1, 1), (2, 1), (4, 1)),
        ops=("native_step",),
    ),
    Region(
        "Natively a state after every token: one warp was the fastest wherever it was measured.",
        ("native",), _LATE, _small_rows, _columns(32, 64, 128), warps_stages=((1, 1), (2, 1)),
        ops=("native_verify",),
    ),
    Region(
        "Reads a state, folds ring tokens, writes another.",
        ("materialize",), _LATE, _large_rows, _whole, _columns(32, 64), _heads_up_to(1, 4),
        warps_stages=((1, 1), (2, 1), (4, 1)),
    ),
    Region(
        "Few programs: one launch, small tiles.",
        ("both",), _COLUMNS, _dot_rows, _whole, _columns(32),
        warps_stages=((1, 1), (2, 1)), ops=_DRAFTS,
    ),
    Region(
        "As above, every load issued before the first is waited for.",
        ("both",), _COLUMNS_EARLY, _dot_rows, _whole, _whole,
        warps_stages=((1, 1), (2, 1), (4, 1)), ops=_DRAFTS,
    ),
    Region(
        "Coefficients by a kernel before, the state through shared memory, heads in flight; registers decide "
        "how many programs.",
        ("both",), _COLUMNS_AHEAD, _large_rows, _whole, _columns(32, 64), _heads_up_to(2, 4),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_DRAFTS,
    ),
    Region(
        "As above, the next state but one on its way too.",
        ("both",), _COLUMNS_AHEAD, _large_rows, _whole, _columns(64), _heads_up_to(4),
        warps_stages=((2, 3),), max_registers=(0, 168), ops=_DRAFTS,
    ),
    Region(
        "Coefficients by a kernel before, the fold in few columns.",
        ("both",), _COLUMNS_AHEAD, _large_rows, _whole, _few_columns, _heads_up_to(2, 4),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "As above, the state leaves the cache to what the two kernels pass on.",
        ("both",), _COLUMNS_AHEAD, _large_rows, _whole, _columns(32), _heads_up_to(4),
        warps_stages=((2, 2),), evict_first=(True,), ops=_DRAFTS,
    ),
    Region(
        "As above, groups of few heads: the loop goes over row tiles too.",
        ("both",), _COLUMNS_TILES, _large_rows, _whole, _columns(32, 64), _heads_up_to(2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_DRAFTS,
    ),
    Region(
        "As above, the fold in few columns.",
        ("both",), _COLUMNS_TILES, _large_rows, _whole, _few_columns, _heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "As above, more threads for the products of an fp32 ring.",
        ("both",), _COLUMNS_TILES, _wide_ring_rows, _whole, _columns(32), _heads_up_to(2),
        warps_stages=((4, 2),), ops=_DRAFTS,
    ),
    Region(
        "Heads in flight, more threads for the products of an fp32 ring.",
        ("both",), _COLUMNS_AHEAD, _wide_ring_rows, _whole, _columns(32), _heads_up_to(2, 4),
        warps_stages=((4, 2),), ops=_DRAFTS,
    ),
    Region(
        "Coefficients of a program's heads ahead of its loop.",
        ("both",), _COLUMNS_PROLOGUE, _whole_rows, _whole, _columns(32, 64), _power_heads_up_to(2, 4, 8, 16),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_DRAFTS,
    ),
    Region(
        "As above, more threads for large heads.",
        ("both",), _COLUMNS_PROLOGUE, _large_whole_rows, _whole, _columns(32), _power_heads_up_to(4, 8),
        warps_stages=((4, 2),), ops=_DRAFTS,
    ),
    Region(
        "Coefficients of a program's heads ahead of its loop, groups of few heads.",
        ("both",), _COLUMNS_PROLOGUE_TILES, _large_rows, _whole, _columns(32, 64), _power_heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_DRAFTS,
    ),
    Region(
        "As above, the fold in few columns.",
        ("both",), _COLUMNS_PROLOGUE_TILES, _large_rows, _whole, _few_columns, _power_heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "One token by columns of products, coefficients ahead of the loop, groups of few heads.",
        ("both",), _COLUMNS_PROLOGUE_TILES, _large_rows, _whole, _columns(32, 64), _power_heads_up_to(2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_STEP,
    ),
    Region(
        "As above, coefficients by a kernel before.",
        ("both",), _COLUMNS_TILES, _large_rows, _whole, _columns(32), _heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_STEP,
    ),
    Region(
        "A launch of their own for rows that keep their state.",
        ("nonflush",), _COLUMNS_AHEAD, _whole_rows, _whole, heads_per_program=_heads_up_to(4),
        warps_stages=((2, 2), (4, 2)), ops=_DRAFTS,
    ),
    Region(
        "As above, groups of few heads.",
        ("nonflush",), _COLUMNS_TILES, _large_rows, _whole, heads_per_program=_heads_up_to(2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_COLUMNS_OPS,
    ),
    Region(
        "A launch of their own for rows that keep their state, coefficients ahead of the loop.",
        ("nonflush",), _COLUMNS_PROLOGUE, _whole_rows, _whole, heads_per_program=_power_heads_up_to(4, 8, 16),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 128, 168), ops=_COLUMNS_OPS,
    ),
    Region(
        "As above, the next state but one on its way too.",
        ("nonflush",), _COLUMNS_PROLOGUE, _whole_rows, _whole, heads_per_program=_power_heads_up_to(8, 16),
        warps_stages=((2, 3), (4, 3)), max_registers=(0, 168), ops=_COLUMNS_OPS,
    ),
    Region(
        "Coefficients ahead of the loop, groups of few heads.",
        ("nonflush",), _COLUMNS_PROLOGUE_TILES, _large_rows, _whole, heads_per_program=_power_heads_up_to(2),
        warps_stages=((1, 2), (2, 2)), max_registers=(0, 168), ops=_COLUMNS_OPS,
    ),
    Region(
        "A launch of their own for rows that fold.",
        ("flush",), _COLUMNS_AHEAD, _large_rows, _whole, _columns(32, 64), _heads_up_to(4),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "As above, groups of few heads.",
        ("flush",), _COLUMNS_TILES, _large_rows, _whole, _columns(32, 64), _heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "A launch of their own for rows that fold, coefficients ahead of the loop.",
        ("flush",), _COLUMNS_PROLOGUE, _whole_rows, _whole, _columns(32, 64), _power_heads_up_to(4, 8),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
    Region(
        "As above, groups of few heads.",
        ("flush",), _COLUMNS_PROLOGUE_TILES, _large_rows, _whole, _columns(32, 64), _power_heads_up_to(1, 2),
        warps_stages=((1, 2), (2, 2)), ops=_DRAFTS,
    ),
)  # fmt: skip
"""Where each role is searched. Widen a region, or add one, for a GPU that differs."""
