"""The look-up chain: each step wins in its turn, says why, and rounds as the grid does."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.codegen.targets import GPUS
from replayssm_tune.runtime import lookup
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import DispatchError, TableError
from replayssm_tune.runtime.lookup import GRID, REACH, STEPS, Lookup, batch_grid, nearest
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import GpuInfo, save
from tests.runtime.table_samples import (
    A100,
    H20,
    H100,
    H200,
    OTHER_CLASS,
    SPEC,
    plan,
    row,
    specs,
    static_row,
    table,
)

H200_NVL = dataclasses.replace(H200, name="NVIDIA H200 NVL", memory_bytes=150754820096)
GATED = dataclasses.replace(SPEC, has_z=True)


def named(name: str, **changes) -> GpuInfo:
    return dataclasses.replace(H200, name=name, **changes)


# Grid


def test_grid_has_two_points_an_octave_to_4096_and_one_beyond():
    assert (GRID[0], GRID[-1]) == (8, 131072)
    assert list(GRID) == sorted(set(GRID))
    ratios = {low: high / low for low, high in itertools.pairwise(GRID)}
    assert all(ratio <= 1.5 for low, ratio in ratios.items() if low < 4096)
    assert all(ratio == 2 for low, ratio in ratios.items() if low >= 4096)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4096), st.integers(0, 131072), st.data())
def test_grid_and_lookup_round_alike(heads, more, data):
    """What is looked up at any batch in range is what was tuned nearest to it."""
    grid = batch_grid(heads, heads + more)
    batch = data.draw(st.integers(heads, heads + more))
    tuned = Lookup([table(*(row(b) for b in grid))])
    found = tuned.find(SPEC, batch, H200)
    assert found.row is not None
    assert found.row.effective_batch == nearest(batch, grid)
    assert found.row.effective_batch == min(nearest(batch, GRID), grid[-1])
    for point in grid:
        assert tuned.find(SPEC, point, H200).plan == plan(point)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 2**18), st.lists(st.integers(1, 2**18), min_size=1, max_size=8, unique=True).map(sorted)
)
def test_nearest_is_nearest_in_log_space_and_ties_go_down(batch, candidates):
    got = nearest(batch, candidates)
    distances = [abs(math.log(batch / c)) for c in candidates]
    assert abs(math.log(batch / got)) <= min(distances) + 1e-12
    assert nearest(24, (12, 48)) == 12
    assert nearest(25, (12, 48)) == 48


def test_a_grid_needs_a_range():
    assert batch_grid(16, 16) == (16,)
    assert batch_grid(13, 13) == (12,)
    for heads_min, maximum in ((0, 8), (9, 8)):
        with pytest.raises(ValueError, match="no batch lies between"):
            batch_grid(heads_min, maximum)


# The chain

USER = table(row(plan=plan(1)))
MEASURED = table(row(plan=plan(2)))
SISTER = table(row(plan=plan(4)), gpu=H100)
ARCHITECTURE = table(row(plan=plan(8)), gpu=H20)
STATIC = table(static_row(plan=plan(16)))
FOREIGN = table(row(plan=plan(64)), gpu=A100)


@pytest.mark.parametrize("first", range(5))
def test_each_step_wins_in_turn(first):
    shipped = [FOREIGN, STATIC, ARCHITECTURE, SISTER, MEASURED][: 5 - max(first - 1, 0)]
    found = Lookup(shipped, [USER] if first == 0 else []).find(SPEC, 128, H200)
    assert found.step == STEPS[first]
    assert found.plan == plan(2**first)
    assert found.row is not None
    assert found.reason


def test_the_default_is_last_and_strict_mode_refuses_it():
    only_foreign = Lookup([FOREIGN])
    found = only_foreign.find(SPEC, 128, H200)
    assert (found.step, found.row, found.plan) == ("default", None, default_plan(SPEC))
    assert "no table has a row" in found.reason
    with pytest.raises(DispatchError, match=r"no table has a row for mamba2-step.*H200.*replayssm-tune tune"):
        only_foreign.find(SPEC, 128, H200, strict=True)
    wide = dataclasses.replace(SPEC, ring_dtype="fp32")
    with pytest.raises(DispatchError, match=r"tune it with '.* --state-dtype fp32 --ring-dtype fp32 "):
        Lookup([MEASURED]).find(wide, 128, H200, strict=True)
    half = dataclasses.replace(SPEC, activation_dtype="fp16", ring_dtype="fp16")
    with pytest.raises(DispatchError, match=r"tune it with '.* --activation-dtype fp16 --state-dtype fp32 "):
        Lookup([MEASURED]).find(half, 128, H200, strict=True)
    assert Lookup([ARCHITECTURE]).find(SPEC, 128, H200, strict=True).row is not None


def test_h200_rows_serve_an_h100_and_say_so():
    h100 = next(gpu.info for gpu in GPUS if gpu.name == "H100 SXM")
    for device in (H100, h100):
        found = Lookup([MEASURED, STATIC]).find(SPEC, 128, device)
        assert found.step == "sister"
        assert found.reason == f"measured on H200, of the same capability and SM count (132) as {device.name}"
    static = table(static_row(spec=GATED, plan=plan(16)), gpu=h100)
    found = Lookup([MEASURED, static]).find(GATED, 128, H100)
    assert (found.step, found.plan) == ("static", plan(16))
    assert found.reason == "chosen by analysis for H100 SXM"


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H200", "NVIDIA H200 NVL", "nvidia h200", "GRID H200-141C", "NVIDIA Graphics Device", "PG-lab"],
)
def test_name_variants_of_the_gpu_itself_still_hit(name):
    found = Lookup([MEASURED, SISTER]).find(SPEC, 128, named(name))
    assert (found.step, found.plan) == ("measured", plan(2))


@pytest.mark.parametrize("name", ["NVIDIA H200 MIG 3g.71gb", "NVIDIA H200 MIG 1g.18gb"])
def test_a_slice_takes_rows_of_the_architecture_nearest_in_sm_count(name):
    slice_of = named(name, sm_count=60, memory_bytes=75 << 30)
    found = Lookup([MEASURED, ARCHITECTURE]).find(SPEC, 128, slice_of)
    assert (found.step, found.plan) == ("architecture", plan(8))
    assert "78 SMs against 60" in found.reason


def test_the_name_decides_between_tables_that_both_fit():
    h100_nvl = dataclasses.replace(H100, name="NVIDIA H100 NVL", memory_bytes=99456909312)
    nvl_table = table(row(plan=plan(4)), gpu=dataclasses.replace(h100_nvl, name="H100 NVL"))
    sxm_table = table(row(plan=plan(2)), gpu=dataclasses.replace(H100, name="H100 SXM"))
    for order in ([nvl_table, sxm_table], [sxm_table, nvl_table]):
        assert Lookup(order).find(SPEC, 128, h100_nvl).plan == plan(4)
        assert Lookup(order).find(SPEC, 128, H100).plan == plan(2)
        # The name counts before the memory, which a hypervisor may have cut.
        cut = dataclasses.replace(h100_nvl, memory_bytes=H100.memory_bytes)
        assert Lookup(order).find(SPEC, 128, cut).plan == plan(4)


def test_a_users_table_of_another_gpu_does_not_come_first():
    theirs = table(row(plan=plan(1)), gpu=H100)
    found = Lookup([MEASURED], [theirs]).find(SPEC, 128, H200)
    assert (found.step, found.plan) == ("measured", plan(2))
    assert Lookup([], [theirs]).find(SPEC, 128, H200).step == "sister"


def test_capabilities_of_8_do_not_serve_each_other():
    l40s = next(gpu.info for gpu in GPUS if gpu.name == "L40S")
    assert Lookup([FOREIGN]).find(SPEC, 128, l40s).step == "default"
    b200, b300 = (next(g.info for g in GPUS if g.name == name) for name in ("B200", "B300"))
    assert Lookup([table(row(), gpu=b200)]).find(SPEC, 128, b300).step == "architecture"


@pytest.mark.parametrize(
    "change",
    [
        {"state_dtype": "bf16"},
        {"ring_dtype": "fp32"},
        {"activation_dtype": "fp16", "ring_dtype": "fp16"},
        {"window": 32},
        {"heads_per_group": 8},
        {"head_dim": 80},
        {"state_size": 64},
        {"op": "native_step", "window": 0},
    ],
)
def test_rows_of_another_dtype_or_shape_do_not_serve(change):
    found = Lookup([MEASURED]).find(dataclasses.replace(SPEC, **change), 128, H200)
    assert found.step == "default"


def test_a_neighbouring_spec_serves_after_every_own_row():
    plain = dataclasses.replace(SPEC, has_d=False, dt_softplus=False)
    found = Lookup([MEASURED]).find(GATED, 128, H200)
    assert (found.step, found.plan) == ("measured", plan(2))
    assert f"neighbouring spec {SPEC.key}, which differs in has_z" in found.reason
    own = table(static_row(spec=GATED, plan=plan(16)), gpu=H200)
    assert Lookup([MEASURED, own]).find(GATED, 128, H200).plan == plan(16)
    nearer = Lookup([table(row(spec=plain, plan=plan(32)), row(plan=plan(2)))])
    assert nearer.find(GATED, 128, H200).plan == plan(2)


# Batches between and beyond the keys


@pytest.mark.parametrize(
    ("batch", "served"), [(300, 256), (363, 512), (256, 256), (1, 256), (5000, 4096), (10**7, 4096)]
)
def test_held_out_batches(batch, served):
    rows = table(row(256), row(512), row(4096))
    found = Lookup([rows]).find(SPEC, batch, H200)
    if batch * REACH < 256:
        assert found.step == "default"
    else:
        assert found.row is not None
        assert found.row.effective_batch == served
        if batch != served:
            assert f"nearest effective batch {served} to {batch}" in found.reason


def test_the_winner_of_a_small_batch_does_not_serve_a_large_one():
    small = table(row(8), row(64))
    assert Lookup([small]).find(SPEC, 64 * REACH, H200).plan == plan(64)
    assert Lookup([small]).find(SPEC, 64 * REACH + 1, H200).step == "default"
    found = Lookup([table(row(1024), gpu=H100)], [small]).find(SPEC, 1024, H200)
    assert (found.step, found.plan) == ("sister", plan(1024))


def test_beyond_the_ends_only_a_timed_row_serves():
    for end in (static_row(64), row(64, source="transferred", origin="H100")):
        tables = [table(row(32) if end.source != "static" else static_row(32), end)]
        assert Lookup(tables).find(SPEC, 70, H200).plan == plan(64), "same point of the grid"
        assert Lookup(tables).find(SPEC, 100, H200).step == "default"
    assert Lookup([table(row(32), row(64))]).find(SPEC, 100, H200).plan == plan(64)


def test_transferred_and_stale_rows_serve_and_say_so():
    taken = table(row(source="transferred", origin="NVIDIA H100"))
    found = Lookup([taken], is_stale=lambda row: True).find(SPEC, 128, H200)
    assert "not timed, from NVIDIA H100" in found.reason
    assert "stale: its kernel has changed since" in found.reason


@settings(max_examples=25, deadline=None)
@given(specs(), st.integers(1, 2**20), st.sampled_from([gpu.info for gpu in GPUS]))
def test_every_call_has_an_answer_that_explain_agrees_with(spec, batch, gpu):
    tables = Lookup(
        [MEASURED, ARCHITECTURE, STATIC, table(row(spec=SPEC.native, plan=default_plan(SPEC.native)))]
    )
    found = tables.find(spec, batch, gpu)
    assert found == tables.find(spec, batch, gpu)
    served = [line for line in tables.explain(spec, batch, gpu) if line.served]
    assert [(line.step, line.outcome) for line in served] == [(found.step, found.reason)]


def test_explain_tells_every_step_in_order():
    lines = Lookup([STATIC, ARCHITECTURE, table(row(8))], [USER]).explain(SPEC, 128, H200)
    assert [line.step for line in lines] == list(STEPS)
    by_step = {line.step: line for line in lines}
    assert by_step["user"].served
    assert by_step["user"].outcome == "user's table: measured on H200"
    assert "beyond the reach of its end row" in by_step["measured"].outcome
    assert by_step["sister"].had == "nothing for this spec"
    assert by_step["architecture"].table == "NVIDIA H20 (capability 9.0, 78 SMs)"
    assert by_step["static"].outcome == "not needed: an earlier step serves"
    assert by_step["default"].had == default_plan(SPEC).key


def test_explain_lists_neighbouring_specs():
    lines = Lookup([MEASURED]).explain(GATED, 128, H200)
    (line,) = (line for line in lines if line.served)
    assert line.had == f"neighbouring spec {SPEC.key}: 1 rows, effective batch 128 to 128"


# Defaults


def test_default_plan_of_a_step_is_what_engines_ship():
    (only,) = default_plan(SPEC).variants
    assert only.structure.key == "both.precomputed.output_only.elementwise.elementwise.late"
    assert only.tile.key == "p16.n128.f128.h1.w1.s1.r0.e0"


@pytest.mark.parametrize(
    ("state_size", "block_p", "warps"), [(16, 32, 4), (32, 16, 4), (64, 8, 4), (96, 4, 4), (256, 4, 8)]
)
def test_default_plan_of_the_native_step_shrinks_with_the_state(state_size, block_p, warps):
    spec = dataclasses.replace(SPEC, state_size=state_size)
    (only,) = default_plan(spec.native).variants
    assert only.structure.role == "native"
    assert (only.tile.block_p, only.tile.num_warps) == (block_p, warps)
    assert only.tile.block_n >= state_size


# Tables on disk


def test_a_users_folder_comes_first(tmp_path, monkeypatch):
    save(USER, tmp_path / "h200.json")
    (tmp_path / "notes.txt").write_text("not a table")
    monkeypatch.setenv("REPLAYSSM_TABLE_DIR", str(tmp_path))
    assert lookup.user_tables() == (USER,)
    lookup.default_lookup.cache_clear()
    assert lookup.default_lookup().find(SPEC, 128, H200).step == "user"
    lookup.default_lookup.cache_clear()
    monkeypatch.delenv("REPLAYSSM_TABLE_DIR")
    assert lookup.user_tables() == ()


@pytest.mark.parametrize("text", ["{", '{"schema_version": 99}', "[]", "{}"])
def test_a_malformed_table_is_warned_of_once_in_serving_and_refused_by_tools(text, tmp_path, monkeypatch):
    save(MEASURED, tmp_path / "h200.json")
    (tmp_path / "broken.json").write_text(text)
    monkeypatch.setenv("REPLAYSSM_TABLE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"broken\.json: .*served as if it were absent"):
        assert lookup.user_tables() == (MEASURED,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lookup.user_tables() == (MEASURED,)
    with pytest.raises(TableError, match=r"broken\.json"):
        lookup.user_tables(strict=True)


def test_a_missing_folder_is_warned_of_in_serving_and_refused_by_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAYSSM_TABLE_DIR", str(tmp_path / "none"))
    with pytest.warns(RuntimeWarning, match="cannot read the folder of tables"):
        assert lookup.user_tables() == ()
    with pytest.raises(TableError, match="cannot read the folder"):
        lookup.user_tables(strict=True)


def test_a_reason_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "replayssm_tune"):
        for _ in range(3):
            lookup.announce("measured on a test bench")
    assert [record.message for record in caplog.records] == ["measured on a test bench"]


def test_shipped_tables_can_all_be_read():
    assert all(isinstance(r.spec, Spec) for t in lookup.shipped_tables(strict=True) for r in t.rows)


# Batch invariance

ONE_CLASS = plan(8)
WIDE = st.one_of(st.sampled_from(GRID), st.integers(1, 2**20))


def kept(*batches: int, spec: Spec = SPEC, make=row, gpu: GpuInfo = H200, **changes):
    """A batch-invariant table; its plans differ in heads, not in their numerics class."""
    rows = (make(b, spec, plan=plan(b), batch_invariant=True, **changes) for b in batches)
    return table(*rows, gpu=gpu)


def free(*batches: int, spec: Spec = SPEC, make=row, gpu: GpuInfo = H200):
    return table(*(make(b, spec, plan=OTHER_CLASS) for b in batches), gpu=gpu)


@pytest.mark.parametrize("make", [row, static_row])
@settings(max_examples=40, deadline=None)
@given(WIDE)
def test_every_batch_is_served_from_a_users_batch_invariant_rows(make, batch):
    """Between and far beyond the keys, whatever else there is."""
    shipped = (free(8, 64, 65536), free(8, gpu=H200_NVL), free(16, spec=GATED), kept(128, gpu=H100))
    found = Lookup(shipped, (free(1, 1024), kept(8, 32, make=make))).find(SPEC, batch, H200)
    assert found.batch_invariant
    assert found.step == "user"
    assert found.plan == plan(nearest(batch, (8, 32)))
    assert "batch-invariant: one numerics class at every batch" in found.reason


@settings(max_examples=40, deadline=None)
@given(WIDE)
def test_a_neighbouring_spec_keeps_the_promise(batch):
    found = Lookup([free(8, spec=dataclasses.replace(SPEC, state_dtype="bf16"))], [kept(8, 32)])
    other = found.find(dataclasses.replace(SPEC, has_z=True), batch, H200)
    assert other.batch_invariant
    assert other.plan.numerics == ONE_CLASS.numerics


def test_shipped_batch_invariant_rows_of_this_gpu_come_before_others_of_it():
    lookup = Lookup([free(8, 1024), kept(64, gpu=named("H200 OEM"))])
    assert {lookup.find(SPEC, batch, H200).plan for batch in (1, 8, 64, 1024, 65536)} == {plan(64)}


@pytest.mark.parametrize("gpu", [H100, H20])
def test_a_promise_that_other_rows_break_is_taken_back(gpu):
    """Rows of another GPU's table come behind this one's, which reach only so far."""
    lookup = Lookup([kept(8, 64, gpu=H200), free(8, gpu=gpu)])
    served = {batch: lookup.find(SPEC, batch, gpu) for batch in (8, 4096)}
    assert [served[8].plan, served[4096].plan] == [OTHER_CLASS, plan(64)]
    assert not any(found.batch_invariant for found in served.values())
    assert "others come first: not so at every batch" in served[4096].reason


def test_what_promises_nothing_says_so():
    assert not Lookup([free(8)]).find(SPEC, 8, H200).batch_invariant
    assert not Lookup([free(8)]).find(SPEC, 65536, H200).batch_invariant, (
        "the default serves beyond the reach"
    )
    assert Lookup([]).find(SPEC, 8, H200).batch_invariant, "the default serves every batch"
