"""The space of kernels: legal, modest, deterministic, and with the points that are known to win."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from replayssm_tune.codegen import space
from replayssm_tune.codegen.regions import REGIONS
from replayssm_tune.codegen.space import AXES, CONSTRAINTS, broken_constraint, points, roles
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import ROLES, Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from tests.specs import GDN
from tests.specs import P64 as SPEC
from tests.specs import drafts as verifying


def with_role(spec, role):
    """The spec of the same layer whose kernels have that role."""
    return {"native": spec.native, "materialize": spec.materialize}.get(role, spec)


specs = st.builds(
    lambda family, **fields: Spec(family, has_d=family == "mamba2", **fields),
    family=st.sampled_from(("mamba2", "gdn")),
    op=st.just("step"),
    head_dim=st.integers(1, 256) | st.sampled_from((64, 80, 96, 128)),
    state_size=st.integers(1, 256) | st.sampled_from((64, 128, 256)),
    heads_per_group=st.integers(1, 64),
    window=st.integers(1, 64),
    activation_dtype=st.just("bf16"),
    state_dtype=st.sampled_from(("fp32", "bf16", "fp16")),
    ring_dtype=st.sampled_from(("bf16", "fp32")),
)


@hypothesis.given(specs, st.sampled_from(ROLES))
def test_points_are_legal_unique_and_of_known_axis_values(spec, role):
    spec = with_role(spec, role)
    found = points(spec, role)
    assert len(set(found.variants)) == len(found.variants) > 0
    assert found.total == len(found.variants) + sum(found.rejected.values())
    for variant in found.variants:
        assert variant.structure.role == role
        assert broken_constraint(spec, variant) == "" or variant == found.default
        for axis in AXES:
            record = variant.structure if hasattr(variant.structure, axis.name) else variant.tile
            assert getattr(record, axis.name) in axis.values, axis.name


@hypothesis.given(specs)
def test_the_default_plan_is_a_point(spec):
    for one in (spec, spec.native, spec.materialize):
        (variant,) = default_plan(one).variants
        found = points(one, variant.structure.role)
        assert found.default == variant == found.variants[0]
        if one.family == "gdn" and not one.is_native:
            assert broken_constraint(one, variant) == ""


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "state_size", "heads_per_group"), [(64, 128, 16), (80, 128, 12), (128, 256, 24)]
)
def test_the_space_compiles_within_minutes(head_dim, state_size, heads_per_group, state_dtype):
    spec = Spec("mamba2", "step", head_dim, state_size, heads_per_group, 16, state_dtype=state_dtype)
    size = {role: len(points(with_role(spec, role), role).variants) for role in ROLES}
    most = {"both": 410, "nonflush": 120, "flush": 100, "native": 50, "materialize": 40}
    assert all(size[role] <= most[role] for role in ROLES), size


def test_the_order_never_changes():
    first = points(SPEC, "both").variants
    points.cache_clear()
    assert points(SPEC, "both").variants == first


@pytest.mark.parametrize("key", [
    "both.inline.output_only.elementwise.elementwise.early/p16.n32.f128.h1.w4.s1.r0.e1",
    "both.inline.output_only.elementwise.elementwise.early/p16.n64.f128.h1.w2.s1.r0.e1",
    "both.inline.output_only.elementwise.elementwise.late/p32.n64.f64.h4.w1.s1.r0.e0",
    "both.inline.output_only.elementwise.elementwise.late/p64.n64.f32.h1.w1.s1.r0.e0",
    "both.inline.output_only.dot.elementwise.late/p32.n128.f32.h4.w2.s2.r0.e0",
    "both.inline.output_only.dot.elementwise.late/p32.n128.f64.h8.w1.s2.r0.e0",
    "both.inline.output_only.dot.elementwise.late/p64.n128.f64.h8.w4.s3.r0.e0",
    "both.inline.output_only.dot.elementwise.late/p64.n128.f32.h8.w2.s3.r0.e0",
    "both.precomputed.output_only.elementwise.elementwise.late/p64.n32.f32.h2.w2.s1.r0.e0",
    "both.precomputed.output_only.dot.elementwise.late/p32.n128.f64.h4.w1.s2.r0.e0",
    "nonflush.inline.output_only.elementwise.elementwise.late/p64.n32.f0.h1.w1.s1.r0.e0",
    "nonflush.inline.output_only.dot.elementwise.late/p64.n128.f0.h4.w2.s2.r0.e0",
    "nonflush.prologue.output_only.dot.dot.late/p64.n128.f0.h16.w2.s2.r128.e0",
    "flush.inline.output_only.dot.elementwise.late/p64.n128.f64.h8.w4.s3.r0.e0",
    "flush.inline.output_only.elementwise.elementwise.early/p32.n32.f128.h1.w2.s1.r0.e0",
    "native.inline.output_only.elementwise.elementwise.late/p16.n128.f0.h1.w1.s1.r0.e0",
])  # fmt: skip
def test_points_that_won_on_an_h200_are_in(key):
    variant = Variant.parse(key)
    role = variant.structure.role
    assert variant in points(with_role(SPEC, role), role).variants


@pytest.mark.parametrize("key", [
    "both.prologue.output_only.dot.dot.late.tiles/p32.n128.f32.h2.w1.s2.r0.e0",
    "both.prologue.output_only.dot.dot.late.tiles/p64.n128.f32.h2.w2.s2.r168.e0",
    "both.inline.output_only.dot.elementwise.late.tiles/p64.n128.f32.h2.w2.s2.r0.e0",
    "both.inline.output_only.dot.elementwise.late.tiles/p32.n128.f32.h2.w1.s2.r0.e0",
    "both.inline.output_only.dot.elementwise.late/p32.n128.f32.h2.w2.s2.r0.e0",
    "both.inline.output_only.elementwise.elementwise.early/p8.n64.f128.h1.w1.s1.r0.e0",
    "both.inline.output_only.elementwise.elementwise.late/p32.n64.f64.h1.w1.s1.r0.e0",
])  # fmt: skip
def test_points_of_gdn_that_won_on_an_h200_are_in(key):
    assert Variant.parse(key) in points(GDN, "both").variants


@pytest.mark.parametrize(("spec", "key"), [
    (SPEC, "both.inline.output_only.dot.dot.early/p64.n128.f128.h1.w4.s1.r0.e0"),
    (SPEC, "both.prologue.output_only.dot.dot.late/p64.n128.f64.h16.w2.s2.r168.e0"),
    (SPEC, "both.precomputed.output_only.dot.dot.late/p64.n128.f64.h4.w2.s2.r168.e0"),
    (SPEC, "nonflush.prologue.output_only.dot.dot.late/p64.n128.f0.h4.w1.s2.r0.e0"),
    (GDN, "both.inline.output_only.dot.dot.early/p16.n128.f128.h1.w2.s1.r0.e0"),
    (GDN, "both.prologue.output_only.dot.dot.late.tiles/p32.n128.f32.h2.w1.s2.r0.e0"),
    (GDN, "both.precomputed.output_only.dot.dot.late.tiles/p32.n128.f32.h2.w1.s2.r0.e0"),
    (GDN, "nonflush.prologue.output_only.dot.dot.late.tiles/p32.n128.f0.h2.w1.s2.r0.e0"),
])  # fmt: skip
def test_points_of_drafts_that_won_on_an_h200_are_in(spec, key):
    variant = Variant.parse(key)
    assert variant in points(verifying(spec), variant.structure.role).variants


def broken(structure, spec=SPEC, **tile):
    tile = {"block_p": 32, "block_n": 128, "num_warps": 4, **tile}
    return broken_constraint(spec, Variant(structure, Tile(**tile)))


def test_every_constraint_rejects_what_it_names():
    wide = dataclasses.replace(SPEC, activation_dtype="fp32", ring_dtype="fp32")
    mixed = dataclasses.replace(SPEC, state_dtype="fp16")
    drafts = verifying(SPEC)
    of_three = verifying(GDN, heads_per_group=3)
    by_dots = {"readout": "dot", "scores": "dot"}
    dot = Structure("nonflush", readout="dot")
    found = [
        broken(Structure("native")),
        broken(Structure("flush", route="rebuild"), fold_block_n=64),
        broken(Structure("both", scores="dot", route="rebuild"), fold_block_n=64),
        broken(Structure("both", "precomputed"), GDN, fold_block_n=64),
        broken(Structure("both", "prologue"), fold_block_n=64),
        broken(Structure("both", "prologue", **by_dots), block_p=32, fold_block_n=64),
        broken(Structure("nonflush", "prologue", **by_dots), drafts, block_p=32),
        broken(Structure("nonflush", "prologue", **by_dots, loop="tiles"), of_three, heads_per_program=3),
        broken(Structure("nonflush", load="early"), heads_per_program=2),
        broken(Structure("both", load="early"), fold_block_n=64),
        broken(Structure("nonflush", "precomputed", load="early")),
        broken(dot, block_n=64),
        broken(dot, wide),
        broken(dot, mixed),
        broken(Structure("nonflush", scores="dot"), wide),
        broken(Structure("nonflush"), block_p=128),
        broken(Structure("nonflush"), block_n=256),
        broken(Structure("nonflush"), fold_block_n=64),
        broken(Structure("both")),
        broken(Structure("flush"), block_n=64, fold_block_n=64),
        broken(Structure("nonflush"), heads_per_program=6),
        broken(Structure("nonflush", loop="tiles")),
        broken(Structure("nonflush", loop="tiles"), dataclasses.replace(GDN, head_dim=8), block_p=16),
        broken(Structure("nonflush", load="early", loop="tiles"), GDN),
        broken(Structure("nonflush"), num_stages=2),
        broken(Structure("nonflush", loop="tiles"), GDN, num_stages=4, block_p=64),
        broken(Structure("flush"), block_p=64, fold_block_n=128, num_warps=1),
        broken(Structure("both", load="early"), block_p=2, fold_block_n=128, num_warps=8),
    ]
    names = [constraint.name for constraint in CONSTRAINTS]
    assert [names.index(name) for name in found] == [
        0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6, 6, 6, 6, 7, 8, 8, 8, 9, 9, 10, 10,
    ]  # fmt: skip


def test_a_loop_over_tiles_is_long_enough_for_a_pipeline():
    structure = Structure("nonflush", loop="tiles")
    assert broken(structure, GDN, num_stages=4, block_p=32) == ""


def test_a_fold_in_the_dot_asks_nothing_of_the_activation():
    wide = dataclasses.replace(SPEC, activation_dtype="fp32", ring_dtype="fp32")
    assert broken(Structure("flush", readout="dot"), wide, fold_block_n=64) == ""


def test_without_16_bit_activations_only_products_of_columns_are_dots():
    wide = dataclasses.replace(SPEC, activation_dtype="fp32", ring_dtype="fp32")
    for role in ("both", "nonflush"):
        found = points(wide, role)
        by_dot = {
            v.structure.coefficients
            for v in found.variants
            if "dot" in (v.structure.readout, v.structure.scores)
        }
        assert by_dot == ({"prologue"} if role == "nonflush" else set())
        assert found.rejected["read-out by dot: dtypes and whole rows"] > 0
        assert role != "both" or found.rejected["scores by dot: 16-bit ring, or new tokens as columns"] > 0


def test_blocks_follow_a_head_that_is_no_power_of_two():
    spec = Spec("mamba2", "step", 80, 128, 12, 16)
    blocks = {v.tile.block_p for role in roles(spec) for v in points(spec, role).variants}
    assert {16, 32, 128} <= blocks
    assert 64 not in blocks
    heads = {v.tile.heads_per_program for v in points(spec, "flush").variants}
    assert heads == {1, 4, 6, 12}


@pytest.mark.parametrize(("group", "largest"), [(5, 5), (13, 13), (17, 1), (12, 4), (1, 1)])
def test_a_group_that_nothing_divides_is_looped_over_whole(group, largest):
    drafts = verifying(dataclasses.replace(SPEC, heads_per_group=group))
    ahead = [v for v in points(drafts, "both").variants if v.structure.coefficients == "precomputed"]
    assert max((v.tile.heads_per_program for v in ahead), default=1) == largest


def test_a_role_of_another_op_is_refused():
    with pytest.raises(ValueError, match="native_step have the roles native"):
        points(SPEC.native, "both")


def test_every_region_contributes_to_a_common_shape():
    for region in REGIONS:
        for role in region.roles:
            large = dataclasses.replace(SPEC, head_dim=80, heads_per_group=12)
            shapes = (SPEC, large, GDN, *(dataclasses.replace(of, ring_dtype="fp32") for of in (SPEC, GDN)))
            specs = shapes if "step" in region.ops else [verifying(spec) for spec in shapes]
            common = [with_role(spec, role) for spec in specs]
            legal = [
                v for spec in common for v in region.variants(spec, role) if not broken_constraint(spec, v)
            ]
            assert legal, region


def test_structures_searched_are_legal():
    steps = (SPEC, SPEC.native, SPEC.materialize, GDN, GDN.native)
    for spec in (*steps, verifying(SPEC), verifying(GDN), verifying(GDN).native):
        assert set(space.structures(spec)) <= set(space.legal_structures(spec))


def test_pairs_of_points_make_plans():
    first, second = (points(SPEC, role).variants[0] for role in ("nonflush", "flush"))
    assert Plan((first, second)).variants == (first, second)
