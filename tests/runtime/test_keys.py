"""Specs, variants and plans: one canonical string each, which loses nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings

from replayssm_tune.runtime.errors import SpecError
from replayssm_tune.runtime.plan import STRUCTURE_VALUES, Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from tests.runtime.table_samples import SPEC, plan, plans, specs

# A valid other value of every field, changed alone or with what it must be changed with.
OTHER_SPECS: dict[str, dict[str, Any]] = {
    "op": {"op": "native_step", "window": 0},
    "head_dim": {"head_dim": 80},
    "state_size": {"state_size": 64},
    "heads_per_group": {"heads_per_group": 8},
    "window": {"window": 32},
    "activation_dtype": {"activation_dtype": "fp16", "ring_dtype": "fp16"},
    "state_dtype": {"state_dtype": "bf16"},
    "ring_dtype": {"ring_dtype": "fp32"},
    "has_d": {"has_d": False},
    "has_z": {"has_z": True},
    "has_dt_bias": {"has_dt_bias": False},
    "dt_softplus": {"dt_softplus": False},
    "family": {"family": "gdn", "has_d": False},
}
OTHER_GDN_SPECS: dict[str, dict[str, Any]] = {"qk_l2norm": {"qk_l2norm": True}}
OTHER_VERIFY_SPECS: dict[str, dict[str, Any]] = {"num_tokens": {"num_tokens": 4}}
BASES = {
    **dict.fromkeys(OTHER_SPECS, SPEC),
    **dict.fromkeys(OTHER_GDN_SPECS, dataclasses.replace(SPEC, family="gdn", has_d=False)),
    **dict.fromkeys(OTHER_VERIFY_SPECS, dataclasses.replace(SPEC, op="verify")),
}
"""What has other values of a field, by field."""


def test_every_spec_field_is_in_the_collision_test():
    assert {f.name for f in dataclasses.fields(Spec)} == set(BASES)


@pytest.mark.parametrize("field", BASES)
def test_a_changed_spec_field_changes_key_and_hash(field):
    spec = BASES[field]
    other = dataclasses.replace(spec, **(OTHER_SPECS | OTHER_GDN_SPECS | OTHER_VERIFY_SPECS)[field])
    assert other.key != spec.key
    assert other != spec
    assert len({spec, other}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "gdn"}, "neither a skip"),
        ({"family": "gdn", "has_d": False, "has_z": True}, "neither a skip"),
        ({"family": "gdn", "has_d": False, "dt_softplus": False}, "always passes through softplus"),
        ({"qk_l2norm": True}, "belongs to GDN"),
        ({"op": "materialize"}, "neither tokens nor optional inputs"),
    ],
)
def test_options_of_another_family_or_op_are_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        dataclasses.replace(SPEC, **fields)


def test_what_materialises_depends_on_the_ring_alone():
    other = dataclasses.replace(SPEC, has_d=False, has_z=True, has_dt_bias=False, dt_softplus=False)
    assert other.materialize == SPEC.materialize == SPEC.materialize.materialize
    wide = dataclasses.replace(SPEC, ring_dtype="fp32")
    assert wide.materialize == dataclasses.replace(wide, activation_dtype="fp32").materialize
    assert wide.materialize != SPEC.materialize


@settings(max_examples=50, deadline=None)
@given(specs(), specs())
def test_spec_keys_are_one_to_one(one, other):
    assert Spec.parse(one.key) == one
    assert (one.key == other.key) == (one == other)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "mamba2",
        SPEC.key + "x",
        SPEC.key.replace("p64", "p064"),
        SPEC.key.replace("-fdbs", "-fbds"),
        SPEC.key.replace("-fdbs", "-fddbs"),
        SPEC.key.replace("mamba2", "mamba9"),
    ],
)
def test_other_strings_are_no_spec_keys(key):
    with pytest.raises(SpecError):
        Spec.parse(key)


@settings(max_examples=50, deadline=None)
@given(plans(), plans(native=True))
def test_plan_keys_are_one_to_one(one, native):
    for each in (one, native):
        assert Plan.parse(each.key) == each
        for variant in each.variants:
            assert Variant.parse(variant.key) == variant
    assert one.key != native.key


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Tile)])
def test_a_changed_tile_field_changes_the_key(field):
    variant = plan().variants[0]
    value = getattr(variant.tile, field)
    changed = dataclasses.replace(variant.tile, **{field: not value if field == "evict_first" else value + 1})
    assert dataclasses.replace(variant, tile=changed).key != variant.key


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Structure)])
def test_a_changed_structure_field_changes_the_key_and_unknown_values_are_refused(field):
    first, second = STRUCTURE_VALUES[field][:2]
    structure = dataclasses.replace(Structure("both"), **{field: first})
    assert dataclasses.replace(structure, **{field: second}).key != structure.key
    with pytest.raises(SpecError, match=f"{field} 'magic' is not one of"):
        dataclasses.replace(structure, **{field: "magic"})


def test_the_native_step_of_drafts_is_that_of_their_layer():
    step = Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True)
    drafts = dataclasses.replace(step, op="verify", num_tokens=4)
    assert drafts.native_step == drafts.native.native_step == step.native_step == step.native


def test_the_command_that_tunes_a_layer_names_its_shape():
    step = Spec("gdn", "step", 128, 128, 2, 32, state_dtype="bf16", has_d=False, qk_l2norm=True)
    shape = "--family gdn --heads 2 --head-dim 128 --state-size 128 --groups 1 --tp 1 --state-dtype bf16"
    assert step.tune_command == f"replayssm-tune tune {shape} --buffer-len 32"
    drafts = dataclasses.replace(step, op="verify", num_tokens=4)
    assert drafts.tune_command == f"{step.tune_command} --drafts 3"
    assert drafts.native.tune_command == f"replayssm-tune tune {shape} --drafts 3"
    wide = dataclasses.replace(drafts, ring_dtype="fp32")
    assert wide.tune_command == f"replayssm-tune tune {shape} --ring-dtype fp32 --buffer-len 32 --drafts 3"
    assert wide.materialize.tune_command == f"replayssm-tune tune {shape} --ring-dtype fp32 --buffer-len 32"
    assert wide.native.tune_command == drafts.native.tune_command


@pytest.mark.parametrize(
    ("activation", "ring", "named"),
    [
        ("bf16", "bf16", ""),
        ("fp16", "fp16", " --activation-dtype fp16"),
        ("fp32", "fp32", " --activation-dtype fp32"),
        ("fp16", "fp32", " --activation-dtype fp16"),
    ],
)
def test_the_command_that_tunes_a_layer_names_its_activations(activation, ring, named):
    step = Spec("mamba2", "verify", 64, 128, 8, 16, 2, activation_dtype=activation, ring_dtype=ring)
    shape = "replayssm-tune tune --heads 8 --head-dim 64 --state-size 128 --groups 1 --tp 1"
    apart = " --ring-dtype fp32" if ring != activation else ""
    assert step.tune_command == f"{shape}{named} --state-dtype fp32{apart} --buffer-len 16 --drafts 1"
    assert step.native.tune_command == f"{shape}{named} --state-dtype fp32 --drafts 1"
    # Rings of fp32 are folded alike, whatever the activations.
    dtypes = " --state-dtype fp32 --ring-dtype fp32" if ring == "fp32" else f"{named} --state-dtype fp32"
    assert step.materialize.tune_command == f"{shape}{dtypes} --buffer-len 16"


def test_another_solve_is_another_class_of_numerics():
    columns, inverse = (
        Structure("both", readout="dot", scores="dot", solve=s) for s in ("columns", "inverse")
    )
    tile = Tile(16, 16, 16)
    assert Plan((Variant(columns, tile),)).numerics != Plan((Variant(inverse, tile),)).numerics


@pytest.mark.parametrize(
    "change",
    [
        lambda key: "",
        lambda key: key.partition("/")[0],
        lambda key: key.partition("/")[0] + "/",
        lambda key: key.replace("p32", "p032"),
        lambda key: key.replace(".e0", ".e7"),
        lambda key: key.replace("p32", "q32"),
        lambda key: key + ".z1",
        lambda key: f"{key}+{key}",
    ],
)
def test_other_strings_are_no_plan_keys(change):
    with pytest.raises(SpecError):
        Plan.parse(change(plan().key))


SAME_NUMERICS = {"max_registers", "evict_first"}
"""Choices that a numerics class does not name."""


def changed(variant: Variant, name: str, value: object) -> Variant:
    part = "tile" if hasattr(variant.tile, name) else "structure"
    return dataclasses.replace(
        variant, **{part: dataclasses.replace(getattr(variant, part), **{name: value})}
    )


def test_a_numerics_class_names_all_that_changes_bits_and_nothing_else():
    variant = Variant(Structure("both"), Tile(32, 64, 32))
    others: dict[str, object] = {name: values[1] for name, values in STRUCTURE_VALUES.items()}
    others |= {"block_p": 16, "block_n": 32, "fold_block_n": 64, "num_warps": 2, "num_stages": 2}
    others |= {"heads_per_program": 2, "max_registers": 168, "evict_first": True}
    assert set(others) == {f.name for record in (Structure, Tile) for f in dataclasses.fields(record)}
    classes = {name: changed(variant, name, value).numerics for name, value in others.items()}
    same = {name for name, numerics in classes.items() if numerics == variant.numerics}
    assert same == SAME_NUMERICS
    told_apart = [numerics for name, numerics in classes.items() if name not in same]
    assert len(set(told_apart)) == len(told_apart)


def test_a_plan_of_two_launches_has_a_numerics_class_of_both():
    reads = Variant(Structure("nonflush", readout="dot"), Tile(32, 128, heads_per_program=4, num_stages=2))
    folds = Variant(Structure("flush"), Tile(32, 128, 32))
    pair = Plan((reads, folds))
    assert pair.numerics == f"{reads.numerics}+{folds.numerics}"
    other = Plan((reads, changed(folds, "num_warps", 4)))
    assert other.numerics != pair.numerics
