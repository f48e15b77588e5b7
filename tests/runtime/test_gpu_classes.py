"""Numerics classes on a GPU: plans of one class give equal bits, and rows the same bits in any batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from replayssm_tune.codegen.space import points
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.admission import gate_plan
from tests.codegen.interpreted_gate import bits, rows_that_differ
from tests.specs import GDN, GDN_BF16, P64, P64_BF16, drafts

SPECS = {
    "p64-fp32": P64,
    "p64-bf16": P64_BF16,
    "gdn-fp32": GDN,
    "drafts": drafts(P64),
    "gdn-drafts": drafts(GDN_BF16),
}
CLASSES = 3
"""Classes of each role that are looked at, evenly over the space."""
OTHERS = ({"evict_first": True}, {"max_registers": 168}, {"evict_first": True, "max_registers": 128})
"""What is changed within a class."""


def of_one_class(spec: Spec, role: str) -> list[list[Plan]]:
    """Plans of several classes of a role, in groups, which differ in what comes after it."""
    first_of_class = {variant.numerics: variant for variant in reversed(points(spec, role).variants)}
    several = list(first_of_class.values())
    chosen = several[:: max(1, len(several) // CLASSES)][:CLASSES]
    tiles = [[dataclasses.replace(v.tile, **other) for other in OTHERS] for v in chosen]
    return [
        [gate_plan(spec, Variant(variant.structure, tile)) for tile in dict.fromkeys((variant.tile, *others))]
        for variant, others in zip(chosen, tiles, strict=True)
    ]


@pytest.mark.parametrize("role", ["both", "nonflush", "flush"])
@pytest.mark.parametrize("name", SPECS)
def test_the_compared_plans_are_of_one_class_and_differ(name: str, role: str) -> None:
    for group in of_one_class(SPECS[name], role):
        assert len(set(group)) == len(group) > 1
        assert len({plan.numerics for plan in group}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("role", ["both", "nonflush", "flush"])
@pytest.mark.parametrize("name", SPECS)
def test_plans_of_one_class_give_equal_bits(name: str, role: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    sizes = {"heads": 2 * spec.heads_per_group, "sequences": 7, "steps": 24}
    for group in of_one_class(spec, role):
        found = bits(spec.key, [plan.key for plan in group], str(tmp_path), "cuda", **sizes)
        assert len(set(found.values())) == 1, (group[0].numerics, found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.verifies])
def test_a_row_has_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    best = points(spec, "both").variants
    for plan in (default_plan(spec), *(Plan((variant,)) for variant in best[1 :: len(best) // 3])):
        sizes = {"heads": 2 * spec.heads_per_group, "sequences": 40, "steps": 20}
        assert rows_that_differ(spec.key, plan.key, str(tmp_path), "cuda", **sizes) == [], plan.key


def test_the_tests_above_have_pairs_to_compare() -> None:
    roles = ("both", "nonflush", "flush")
    compared = {name: sum(len(of_one_class(spec, role)) for role in roles) for name, spec in SPECS.items()}
    assert min(compared.values()) >= 4, compared
