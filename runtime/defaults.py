"""The computed default: the plan of an architecture's spec that no table covers.

It is what engines ship today: for Mamba-2 decode a coefficient kernel and one launch with a branch
per row, 16 rows of the state at a time, one warp; for its native step a block that shrinks with the
state size and four to eight warps. For Gated DeltaNet one launch that rebuilds the state, and a native
step, 32 rows at a time, one warp each: engines' rebuild takes 64 rows, which spill here. What
materialises states is ours alone. Drafts are verified by two launches that rows of the other branch leave
at once, 64 rows of the state at a time (32 to fold), two warps, and natively 32 rows at a time by one.
"""

from __future__ import annotations

import functools

from .abi import next_power_of_two, state_block
from .plan import Plan, Structure, Tile, Variant
from .spec import Spec

_NATIVE_TILES = ((16, 32, 4), (32, 16, 4), (64, 8, 4), (128, 4, 4))
"""(largest state size, rows of the state at a time, warps); larger states take the last with 8 warps."""


@functools.lru_cache(maxsize=4096)
def default_plan(spec: Spec) -> Plan:
    """Default plan of ``spec``: a point of its space, never tuned, always legal."""
    block_n = state_block(spec)
    if spec.op == "materialize":
        tile = Tile(min(32, next_power_of_two(spec.head_dim)), block_n, min(64, block_n))
        return Plan((Variant(Structure(role="materialize"), tile),))
    if spec.op == "verify":
        return _verify_plan(spec, block_n)
    if spec.op == "native_verify":
        tile = Tile(min(32, next_power_of_two(spec.head_dim)), block_n)
        return Plan((Variant(Structure(role="native"), tile),))
    if spec.family == "gdn":
        return Plan((_gdn_variant(spec, block_n),))
    if spec.is_native:
        block_p, num_warps = next(
            (tile[1:] for tile in _NATIVE_TILES if spec.state_size <= tile[0]), (_NATIVE_TILES[-1][1], 8)
        )
        tile = Tile(block_p=block_p, block_n=block_n, num_warps=num_warps)
        return Plan((Variant(Structure(role="native"), tile),))
    structure = Structure(role="both", coefficients="precomputed")
    tile = Tile(block_p=16, block_n=block_n, fold_block_n=block_n)
    return Plan((Variant(structure, tile),))


def _verify_plan(spec: Spec, block_n: int) -> Plan:
    whole = max(16, next_power_of_two(spec.head_dim))

    def variant(role: str, rows: int, fold: int) -> Variant:
        tile = Tile(min(rows, whole), block_n, fold, num_warps=2)
        return Variant(Structure(role, readout="dot", scores="dot"), tile)

    return Plan((variant("nonflush", 64, 0), variant("flush", 32, min(64, block_n))))


def defaults_beside(spec: Spec) -> dict[Spec, Plan]:
    """What serves beside a table's rows of ``spec``: its default, and that of what materialises a step."""
    specs = (spec, spec.materialize) if spec.op in ("step", "verify") else (spec,)
    return {one: default_plan(one) for one in specs}


def _gdn_variant(spec: Spec, block_n: int) -> Variant:
    rows = min(32, next_power_of_two(spec.head_dim))
    if spec.is_native:
        return Variant(Structure(role="native"), Tile(block_p=rows, block_n=block_n))
    tile = Tile(block_p=rows, block_n=block_n, fold_block_n=max(1, min(64, block_n // 2)))
    return Variant(Structure(role="both", route="rebuild"), tile)
