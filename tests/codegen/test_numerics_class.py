"""What a program loops over changes no operand, and a row's bits hang on no other row.

In Triton's interpreter sums have the order of the arrays, and nothing contracts: there kernels agree that
differ in loops and pipelines alone. On a GPU the compiler may contract other operations in another loop, so
that they are of several numerics classes: ``tests/runtime/test_gpu_classes.py`` compares bits there.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from replayssm_tune.codegen.space import broken_constraint
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.admission import gate_plan
from tests.interpreter import run_interpreted
from tests.specs import drafts

STEP = Spec("mamba2", "step", 32, 32, 4, 4, activation_dtype="fp16", ring_dtype="fp16")
GDN = dataclasses.replace(STEP, family="gdn", has_d=False, qk_l2norm=True)
DOTS = {"readout": "dot", "scores": "dot"}


FOLDING, READING = Tile(16, 32, 16), Tile(16, 32)
CASES: dict[str, tuple[Spec, Structure, Tile]] = {
    "inline": (STEP, Structure("both"), FOLDING),
    "precomputed": (STEP, Structure("both", "precomputed"), FOLDING),
    "dot": (STEP, Structure("both", readout="dot"), FOLDING),
    "flush": (STEP, Structure("flush", readout="dot"), FOLDING),
    "gdn": (GDN, Structure("both"), FOLDING),
    "gdn-rebuild": (GDN, Structure("both", route="rebuild"), FOLDING),
    "prologue": (STEP, Structure("both", "prologue", **DOTS), Tile(32, 32, 16)),
    "drafts": (drafts(STEP, 3), Structure("both", "precomputed", **DOTS), FOLDING),
    "drafts-prologue": (drafts(STEP, 3), Structure("both", "prologue", **DOTS), Tile(32, 32, 16)),
    "gdn-drafts": (drafts(GDN, 3), Structure("both", **DOTS), FOLDING),
    "gdn-drafts-inverse": (
        drafts(GDN, 3),
        Structure("nonflush", "precomputed", **DOTS, solve="inverse"),
        READING,
    ),
}


def of_one_arithmetic(spec: Spec, structure: Structure, tile: Tile) -> list[Variant]:
    """Legal kernels that differ in loop, heads, depth of the pipeline, register cap and cache policy."""
    found = []
    # The interpreter knows no pipelines: two depths of one are enough.
    shallow = itertools.product(("heads", "tiles"), (1, 4), (1,))
    for loop, heads, stages in (*shallow, ("heads", 2, 2), ("heads", 4, 3)):
        variant = Variant(
            dataclasses.replace(structure, loop=loop),
            dataclasses.replace(
                tile,
                heads_per_program=heads,
                num_stages=stages,
                max_registers=168 if stages == 3 else 0,
                evict_first=heads == 2,
            ),
        )
        if not broken_constraint(spec, variant):
            found.append(variant)
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
def test_loops_and_pipelines_change_no_bits_in_the_interpreter(name: str, tmp_path: Path) -> None:
    spec, structure, tile = CASES[name]
    plans = [gate_plan(spec, variant) for variant in of_one_arithmetic(spec, structure, tile)]
    assert len({variant.tile.heads_per_program for plan in plans for variant in plan.variants}) > 1
    found = run_interpreted(
        "tests.codegen.interpreted_gate:bits", spec.key, [plan.key for plan in plans], str(tmp_path)
    )
    assert len(set(found.values())) == 1


@pytest.mark.interpreter
def test_bits_tell_other_classes_apart_in_the_interpreter(tmp_path: Path) -> None:
    """The comparison above can fail: other cuts of a sum give other bits."""
    tiles = (Tile(16, 32, 32), Tile(16, 16, 32))
    plans = [Plan((Variant(Structure("both"), tile),)) for tile in tiles]
    found = run_interpreted(
        "tests.codegen.interpreted_gate:bits", STEP.key, [plan.key for plan in plans], str(tmp_path)
    )
    assert len(set(found.values())) == len({plan.numerics for plan in plans}) == 2


@pytest.mark.interpreter
@pytest.mark.parametrize("spec", [STEP, GDN], ids=["mamba2", "gdn"])
def test_a_row_has_the_same_bits_in_any_batch(spec: Spec, tmp_path: Path) -> None:
    plan = Plan((Variant(Structure("both"), dataclasses.replace(FOLDING, heads_per_program=2)),))
    target = "tests.codegen.interpreted_gate:rows_that_differ"
    assert run_interpreted(target, spec.key, plan.key, str(tmp_path)) == []
