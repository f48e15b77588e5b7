"""Tables: what goes in comes out, and what should not go in is refused with a clear message."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys

import pytest
from hypothesis import given, settings

from replayssm_tune.runtime.errors import TableError
from replayssm_tune.runtime.merge import merge
from replayssm_tune.runtime.table import Toolchain, dumps, gpu_slug, is_stale, load, loads, save
from tests.runtime.table_samples import H100, H200, OTHER_CLASS, SPEC, plan, row, static_row, table, tables


@settings(max_examples=50, deadline=None)
@given(tables())
def test_round_trip(any_table):
    text = dumps(any_table)
    assert loads(text) == any_table
    assert dumps(loads(text)) == text


def test_rows_are_sorted_whatever_order_they_came_in():
    rows = [row(16), row(8), row(8, SPEC.native, plan=NATIVE_PLAN)]
    one, other = table(*rows), table(*reversed(rows))
    assert dumps(one) == dumps(other)
    assert [r.effective_batch for r in one.rows if r.spec == SPEC] == [8, 16]


def test_a_changed_row_is_a_short_diff():
    before = dumps(table(row(8), row(16), row(32))).splitlines()
    after = dumps(table(row(8), row(16, verdict="slower"), row(32))).splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_fields_are_named():
    document = json.loads(dumps(table(row())))
    (only,) = document["rows"]
    assert only["spec"]["state_dtype"] == "fp32"
    assert only["launches"][0]["tile"]["max_registers"] == 128
    assert only["launches"][0]["module_digest"] == "d" * 16
    assert only["launches"][0]["binaries"][0]["registers"] == 64


def edited(change):
    document = json.loads(dumps(table(row(8), row(16))))
    change(document)
    return json.dumps(document)


def launch(document):
    return document["rows"][1]["launches"][0]


MALFORMED = {
    "not an object": (lambda d: None, "a table is a JSON object"),
    "no schema": (lambda d: d.pop("schema_version"), "schema_version is missing"),
    "newer schema": (lambda d: d.update(schema_version=2), "upgrade replayssm-tune"),
    "older schema": (lambda d: d.update(schema_version=0), "tune again"),
    "odd schema": (lambda d: d.update(schema_version="1"), "schema_version '1' is not known"),
    "no date": (lambda d: d.pop("date"), "field 'date' is missing"),
    "odd date": (lambda d: d.update(date="yesterday"), "'yesterday' is not an ISO date"),
    "empty generator": (lambda d: d.update(generator=""), "provenance is missing: generator"),
    "no driver": (lambda d: d["toolchain"].update(driver=""), "provenance is missing: toolchain.driver"),
    "no gpu": (lambda d: d.pop("gpu"), "field 'gpu' is missing"),
    "nameless gpu": (lambda d: d["gpu"].update(name=""), "gpu: the GPU's name"),
    "no SMs": (lambda d: d["gpu"].update(sm_count=0), "gpu: sm_count 0"),
    "capability": (lambda d: d["gpu"].update(capability=[9]), "gpu: capability: expected 2 values"),
    "no rows": (lambda d: d.pop("rows"), "rows is missing"),
    "rows no list": (lambda d: d.update(rows={}), "rows is missing or not a list"),
    "row no object": (lambda d: d["rows"].append(3), "row 2: a row is a JSON object"),
    "same key": (lambda d: d["rows"].append(d["rows"][0]), "two rows for mamba2-step-.* batch 8"),
    "no spec": (lambda d: d["rows"][1].pop("spec"), "row 1: field 'spec' is missing"),
    "spec field": (lambda d: d["rows"][1]["spec"].pop("has_z"), "row 1 .*batch 16.*field 'has_z'"),
    "spec value": (lambda d: d["rows"][1]["spec"].update(head_dim=999), "spec: head_dim 999 is outside"),
    "spec type": (lambda d: d["rows"][1]["spec"].update(has_z=0), "spec: has_z: expected bool, not 0"),
    "unknown field": (lambda d: d["rows"][1].update(speed=1), "row 1 .*: unknown field 'speed'"),
    "parallel list": (lambda d: d["rows"][1].update(binaries=[]), "unknown field 'binaries'"),
    "bool batch": (lambda d: d["rows"][1].update(effective_batch=True), "effective_batch: expected int"),
    "batch 0": (lambda d: d["rows"][1].update(effective_batch=0), "effective_batch 0 must be at least 1"),
    "text time": (lambda d: d["rows"][1].update(time_us="3"), "time_us: expected float, not '3'"),
    "negative time": (lambda d: d["rows"][1].update(flush_time_us=-1.0), "flush_time_us -1.0"),
    "infinite time": (lambda d: d["rows"][1].update(time_us=float("inf")), "time_us inf"),
    "source": (lambda d: d["rows"][1].update(source="guessed"), "source 'guessed' is not one of measured"),
    "no time": (lambda d: d["rows"][1].update(time_us=None), "a measured row needs time_us"),
    "no samples": (lambda d: d["rows"][1].update(samples_us=[]), "a measured row needs samples_us"),
    "no origin": (lambda d: d["rows"][1].update(source="transferred"), "must name its origin"),
    "no launches": (lambda d: d["rows"][1].pop("launches"), "'launches' is missing or empty"),
    "roles": (lambda d: d["rows"][1]["launches"].append(launch(d)), "a plan cannot be made of roles"),
    "role": (lambda d: launch(d)["structure"].update(role="native"), "op 'step' cannot use plan"),
    "no step": (lambda d: launch(d)["structure"].update(role="materialize"), "op 'step' cannot use plan"),
    "structure": (lambda d: launch(d)["structure"].update(load="magic"), r"\[0\]: structure: load 'magic'"),
    "tile": (lambda d: launch(d)["tile"].pop("block_p"), "tile: field 'block_p' is missing"),
    "digest": (lambda d: launch(d).update(module_digest=""), "a module digest is empty"),
    "binary": (lambda d: launch(d)["binaries"][0].update(registers=1.5), r"\[0\]: registers: expected int"),
    "warps": (lambda d: launch(d)["tile"].update(num_warps=3), "tile: num_warps 3 is not a power of two"),
    "no block": (lambda d: launch(d)["tile"].update(block_p=0), "tile: block_p 0 must be at least 1"),
    "cap": (lambda d: launch(d)["tile"].update(max_registers=-1), "max_registers -1 must not be negative"),
    "endless time": (lambda d: d["rows"][1].update(time_us=10**400), "time_us: the number is beyond"),
    "measured in static": (lambda d: d.update(source="static"), "a static table holds measured rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_tables_are_refused_with_file_place_and_advice(case, tmp_path):
    change, message = MALFORMED[case]
    path = tmp_path / "h200.json"
    path.write_text("[]" if case == "not an object" else edited(change))
    with pytest.raises(TableError, match=message) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "tune again" in text or "upgrade" in text


def test_an_axis_that_the_writer_did_not_know_is_at_its_default():
    def forget(document):
        del launch(document)["structure"]["load"], launch(document)["tile"]["num_stages"]

    assert loads(edited(forget)) == table(row(8), row(16))


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "\x00", "[" * 100_000])
def test_text_that_is_not_json_is_refused(text):
    with pytest.raises(TableError, match=r"h200\.json: not JSON"):
        loads(text, "h200.json")


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(TableError, match="cannot read the table"):
        load(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TableError, match="cannot read the table"):
        load(tmp_path / "latin.json")


def test_save_makes_folders_and_files_that_others_can_read(tmp_path):
    path = tmp_path / "tables" / "h200.json"
    save(table(row()), path)
    assert load(path) == table(row())
    assert [p.name for p in path.parent.iterdir()] == ["h200.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_leaves_the_old_table_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "h200.json"
    save(table(row(8)), path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        TableError, match=r"h200.json: cannot write the table: No space left on device; make room"
    ):
        save(table(row(16)), path)
    assert load(path) == table(row(8))
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]


def test_a_crash_between_write_and_replace_leaves_the_old_table(tmp_path):
    path = tmp_path / "h200.json"
    save(table(row(8)), path)
    crash = (
        "import os, sys; from replayssm_tune.runtime import table as t\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "t.save(t.load(sys.argv[1]), sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", crash, str(path)], env=environment, check=False)
    assert done.returncode == 9
    assert load(path) == table(row(8))
    left_over = [p for p in tmp_path.iterdir() if p != path]
    assert len(left_over) == 1
    assert left_over[0].suffix != ".json"
    save(table(row(16)), path)
    assert load(path) == table(row(16))


def test_merge_prefers_measured_then_later_and_keeps_provenance():
    newer = Toolchain("3.9.0", "2.13.0", "590")
    old = table(row(8, verdict="old"), row(16, verdict="old"), static_row(32), date="2026-01-01")
    new = table(
        row(16, verdict="new"), row(32, verdict="new"), static_row(8), date="2026-02-02", toolchain=newer
    )
    merged = merge([old, new])
    assert {r.effective_batch: r.verdict for r in merged.rows} == {8: "old", 16: "new", 32: "new"}
    assert (merged.toolchain, merged.date) == (newer, "2026-02-02")
    kept = merged.rows[0]
    assert (kept.toolchain, kept.date) == (old.toolchain, "2026-01-01")
    assert all(r.toolchain is None and not r.date for r in merged.rows[1:])
    assert merge([merged]) == merged
    assert loads(dumps(merged)) == merged


def test_merging_a_static_table_after_a_measured_one_keeps_it_measured():
    merged = merge([table(row(8)), table(static_row(16), toolchain=Toolchain("3.9.0", "", ""))])
    assert (merged.source, merged.toolchain) == ("measured", table(row()).toolchain)
    assert merged.rows[1].toolchain == Toolchain("3.9.0", "", "")


def test_tables_of_different_gpus_do_not_merge():
    with pytest.raises(TableError, match="different GPUs cannot be merged: NVIDIA H100"):
        merge([table(row(), gpu=H100), table(row(), gpu=H200)])
    with pytest.raises(TableError, match="nothing to merge"):
        merge([])


def test_a_row_is_stale_when_a_module_digest_differs():
    assert not is_stale(row(), lambda spec, structure: "d" * 16)
    assert is_stale(row(), lambda spec, structure: "e" * 16)


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("A100-SXM4", "a100-sxm4")],
)
def test_slug(name, slug):
    assert gpu_slug(name) == slug


NATIVE_PLAN = dataclasses.replace(
    row().plan,
    variants=tuple(
        dataclasses.replace(v, structure=dataclasses.replace(v.structure, role="native"))
        for v in row().plan.variants
    ),
)


# Batch invariance


def promised(batch: int, heads: int = 8, **changes):
    """A row of one numerics class for all batches, unless ``changes`` say otherwise."""
    return row(batch, **{"plan": plan(heads), "batch_invariant": True, **changes})


def test_the_promise_is_written_where_it_is_made_and_read_again():
    kept = table(promised(8), promised(64, 16))
    assert dumps(kept).count('"batch_invariant": true') == 2
    assert loads(dumps(kept)) == kept
    without = dumps(table(row(8)))
    assert "batch_invariant" not in without, "older versions read it"
    assert loads(without).rows[0].batch_invariant is False


@pytest.mark.parametrize("other", [row(64, plan=plan(8)), promised(64, plan=OTHER_CLASS)])
def test_a_promise_that_other_rows_break_is_refused(other):
    with pytest.raises(TableError, match="batch-invariant, but not all of them are of one numerics class"):
        table(promised(8), other)
    gated = dataclasses.replace(SPEC, has_z=True)
    assert len(table(promised(8), dataclasses.replace(other, spec=gated)).rows) == 2


def test_a_merge_keeps_the_promise_of_the_newest_rows():
    free = table(row(8, plan=OTHER_CLASS), row(64, plan=plan(8)), static_row(128, plan=plan(8)))
    kept = merge([free, table(promised(16))])
    assert [(r.effective_batch, r.batch_invariant) for r in kept.rows] == [(16, True)]
    more = merge([kept, table(promised(256, 4))])
    assert [r.effective_batch for r in more.rows] == [16, 256]
    moved = merge([more, table(promised(16, plan=OTHER_CLASS))])
    assert [(r.effective_batch, r.plan) for r in moved.rows] == [(16, OTHER_CLASS)]


def test_a_merge_with_newer_rows_that_promise_nothing_ends_the_promise():
    merged = merge([table(promised(8), promised(64)), table(row(8, plan=OTHER_CLASS))])
    assert [(r.effective_batch, r.batch_invariant) for r in merged.rows] == [(8, False), (64, False)]


def test_static_rows_with_a_promise_do_not_drive_out_measured_ones():
    static = static_row(16, plan=plan(8), batch_invariant=True)
    merged = merge([table(row(8, plan=OTHER_CLASS)), table(static)])
    assert [(r.effective_batch, r.batch_invariant) for r in merged.rows] == [(8, False), (16, False)]
