"""Figures derived from run files."""

from dataclasses import replace

import pytest

from benchmarks import documents, figure, summary
from replayssm_tune.runtime.spec import Spec
from tests.benchmarks.step_runs import KEY, cell, run, value, verifying


def test_every_claim_of_a_cell():
    records = summary.derive([("a.json", run(cell(32768)))])
    assert value(records, "nonflush_roof_share") == pytest.approx(0.9)
    assert value(records, "flush_roof_share") == pytest.approx(545 / 550)
    assert value(records, "mix_roof_share") == pytest.approx((225 + 320 / 16) / 300)
    assert value(records, "mix_vs_native") == pytest.approx(560 / 300)
    assert value(records, "mix_vs_default") == pytest.approx(1.2)
    assert value(records, "step_time_us", kernel="roof") == 245.0
    assert value(records, "step_time_us", kernel="replay") == 300.0
    assert value(records, "step_time_us", kernel="native") == 560.0
    assert value(records, "step_time_us", kernel="default") == 360.0
    assert {frozenset(r) for r in records} == {
        frozenset(("claim", "cell", "value", "asked", "unit", "higher_is_better", "run"))
    }


def test_what_materialises_states_is_compared_with_its_default_alone():
    spec = Spec.parse(KEY.format("fp32")).materialize
    of_fold = cell(
        1024, spec=spec.key, time_us={"materialize": 20.0}, native_us=None, native_name="",
        roof_us={"read": 8.0, "scale": 18.0, "materialize": 18.0}, default_us={"materialize": 24.0},
    )  # fmt: skip
    records = summary.derive([("a.json", run(of_fold, cell(1024)))])
    found = [r for r in records if r["cell"]["op"] == "materialize"]
    assert {r["claim"] for r in found} == {
        "materialize_time_us", "materialize_roof_share", "materialize_vs_default",
    }  # fmt: skip
    assert value(found, "materialize_roof_share") == pytest.approx(0.9)
    assert value(found, "materialize_vs_default") == pytest.approx(1.2)
    assert [value(found, "materialize_time_us", kernel=k) for k in ("roof", "replay", "default")] == [
        18,
        20,
        24,
    ]
    alone = summary.derive([("a.json", run(cell(1024)))])
    assert [r for r in records if r not in found] == alone
    changed = {name for name, region in documents.REGIONS.items() if region(records) != region(alone)}
    assert changed == {"materialize"}
    (row,) = documents.materialize_region(records).splitlines()[2:]
    assert row.endswith("| fp32 | 1024 | 18 | 20 | 24 | 0.90 | 1.20 |")
    failed = {**of_fold, "time_us": {"materialize": float("inf")}, "default_us": {"materialize": None}}
    assert {r["cell"]["kernel"] for r in summary.derive([("a.json", run(failed))])} == {"roof"}


def test_times_without_a_stage_stand_beside_the_whole_and_the_roof():
    stage = {
        "spec": KEY.format("fp32"), "effective_batch": 16, "mode": "nonflush", "plan": "plan",
        "roof_us": 2.0, "time_us": 3.0, "without_us": {"output": 2.9},
    }  # fmt: skip
    records = summary.derive([("a.json", run(stages=[stage]))])
    assert value(records, "stage_time_us", without="nothing") == 3.0
    assert value(records, "stage_time_us", without="output") == 2.9
    assert value(records, "stage_time_us", kernel="roof") == 2.0
    region = documents.stages_region(records)
    assert "| H200 | Mamba-2 64 x 128, 16 heads/group | 1 | fp32 | 16 | nonflush | 2 | 3 | 2.9 |" in region


def test_what_is_asked_stands_beside_the_cells_it_is_asked_of():
    records = summary.derive([("a.json", run(cell(32768), cell(128), cell(32768, "bf16")))])
    asked = {
        (r["cell"]["state_dtype"], r["cell"]["effective_batch"]): r["asked"]
        for r in summary.select(records, "nonflush_roof_share")
    }
    assert asked == {("fp32", 32768): 0.87, ("fp32", 128): None, ("bf16", 32768): 0.79}
    assert all(r["asked"] == 0.995 for r in summary.select(records, "mix_vs_native"))


def test_rings_of_another_dtype_are_cells_of_their_own():
    wide = cell(
        32768, spec=KEY.format("fp32").replace("-rbf16", "-rfp32"), time_us={"mix": 320.0, "nonflush": 260.0}
    )
    spec = Spec.parse(wide["spec"])
    folds = {"time_us": {"materialize": 20.0}, "native_us": None, "roof_us": {}, "default_us": {}}
    records = summary.derive(
        [
            (
                "a.json",
                run(cell(32768), cell(1024, spec=replace(spec, ring_dtype="bf16").materialize.key, **folds)),
            ),
            ("b.json", run(wide, cell(1024, spec=spec.materialize.key, **folds), date="2026-12-01")),
        ]
    )
    assert value(records, "step_time_us", kernel="replay", ring_dtype=None) == 300.0
    assert value(records, "step_time_us", kernel="replay", ring_dtype="fp32") == 320.0
    asked = {r["cell"].get("ring_dtype"): r["asked"] for r in summary.select(records, "nonflush_roof_share")}
    assert asked == {None: 0.87, "fp32": None}
    assert len(summary.select(records, "materialize_time_us", kernel="replay")) == 2
    states = [row.split(" | ")[3] for row in documents.steps_region(records).splitlines()[2:]]
    assert states == ["fp32", "fp32, fp32 ring"]
    states = [row.split(" | ")[2] for row in documents.materialize_region(records).splitlines()[2:]]
    assert states == ["fp32", "fp32, fp32 ring"]
    (panel,) = figure.info(records, "H200", family="mamba2", head_dim=64)
    assert panel.series["replay"] == ((32768, 300.0),)


def test_activations_of_another_dtype_are_cells_of_their_own():
    key = KEY.format("fp32")
    half, mixed = (
        key.replace("-xbf16", "-xfp16").replace("-rbf16", f"-r{ring}") for ring in ("fp16", "fp32")
    )
    folds = {"time_us": {"materialize": 20.0}, "native_us": None, "roof_us": {}, "default_us": {}}
    cells = [cell(32768, spec=half), cell(128, spec=half), cell(32768, spec=mixed)]
    cells += [cell(32768), cell(128), cell(1024, spec=Spec.parse(half).materialize.key, **folds)]
    records = summary.derive([("a.json", run(*cells))])
    told = [
        (
            r["cell"].get("activation_dtype"),
            r["cell"].get("ring_dtype"),
            r["cell"]["effective_batch"],
            r["asked"],
        )
        for r in summary.select(records, "nonflush_roof_share")
    ]
    assert told == [
        (None, None, 128, None), (None, None, 32768, 0.87),
        ("fp16", None, 128, None), ("fp16", None, 32768, None), ("fp16", "fp32", 32768, None),
    ]  # fmt: skip
    (materialized,) = summary.select(records, "materialize_time_us", kernel="replay")
    assert materialized["cell"]["ring_dtype"] == "fp16"
    assert "activation_dtype" not in materialized["cell"]
    states = [row.split(" | ")[3] for row in documents.steps_region(records).splitlines()[2:]]
    assert states == ["fp32"] * 2 + ["fp32, fp16 activations"] * 2 + ["fp32, fp16 activations, fp32 ring"]
    (panel,) = figure.info(records, "H200", family="mamba2", head_dim=64)
    assert [batch for batch, _ in panel.series["replay"]] == [128, 32768]


def test_layers_of_both_families_are_told_apart():
    gdn = cell(32768, spec="gdn-step-p64-n128-g16-w16-t1-xbf16-sfp32-rbf16-fbsl")
    records = summary.derive([("a.json", run(cell(32768), gdn))])
    assert [r["asked"] for r in summary.select(records, "flush_roof_share", family="gdn")] == [None]
    assert [r["asked"] for r in summary.select(records, "flush_roof_share", family="mamba2")] == [0.93]
    region = documents.steps_region(records)
    assert "| GDN 64 x 128, 16 value heads/key head |" in region
    assert "| Mamba-2 64 x 128, 16 heads/group |" in region
    (panel,) = figure.info(records, "H200", family="mamba2", head_dim=64)
    assert panel.series["replay"] == ((32768, 300.0),)


def test_totals_and_ready_records():
    records = summary.derive(
        [
            (
                "a.json",
                run(
                    totals={"tune_minutes": 4.2, "scope": "nemotron-3-super-120b-a12b"},
                    records=[
                        {"claim": "search_share_of_optimum_median", "value": 0.98, "cell": {"scope": "x"}}
                    ],
                ),
            ),
            ("b.json", run(totals={"tune_minutes": 9.0})),
            ("c.json", run(totals={"tune_minutes": 7.0, "scope": "nemotron-3-super-120b-a12b, T 4"})),
        ]
    )
    minutes = {r["cell"]["scope"]: (r["value"], r["asked"], r["unit"]) for r in records if r["unit"] == "min"}
    assert minutes == {
        "nemotron-3-super-120b-a12b": (4.2, 6.0, "min"),
        "nemotron-3-super-120b-a12b, T 4": (7.0, None, "min"),
        "tune": (9.0, None, "min"),
    }
    (ready,) = summary.select(records, "search_share_of_optimum_median")
    assert (ready["value"], ready["run"]) == (0.98, "a.json")


def test_the_newer_run_counts_whatever_the_order():
    old = ("z.json", run(cell(128, native_us=600.0), date="2026-11-29"))
    new = ("a.json", run(cell(128), date="2026-11-30"))
    assert summary.derive([old, new]) == summary.derive([new, old])
    (record,) = summary.select(summary.derive([old, new]), "mix_vs_native")
    assert record["run"] == "a.json"


def test_of_one_day_the_time_counts_and_without_one_the_number():
    files = {"m-1000": ("m-1000", None), "m-t4": ("m-t4", None), "m": ("m", None), "m-2": ("m", None),
             "m-t4-2": ("m-t4", None), "m-10": ("m", None), "m-1000-2": ("m-1000", "09:00:00"),
             "m-3": ("m", "10:00:00")}  # fmt: skip
    shuffled = [
        (f"{name}.json", run(date="2026-11-30", what=what) | ({"time": time} if time else {}))
        for name, (what, time) in reversed(files.items())
    ]
    found = [name.removesuffix(".json") for name, _ in sorted(shuffled, key=summary._age)]
    assert found[:3] == ["m", "m-1000", "m-t4"]
    assert found[3:] == ["m-2", "m-t4-2", "m-10", "m-1000-2", "m-3"]


def test_cells_without_a_time_make_no_claims():
    bare = {"spec": KEY.format("fp32"), "effective_batch": 128, "plan": "plan"}
    assert summary.derive([("a.json", run(bare))]) == []


def test_order_and_text_are_canonical():
    records = summary.derive([("a.json", run(cell(256), cell(64), cell(1024)))])
    batches = [r["cell"]["effective_batch"] for r in summary.select(records, "mix_vs_native")]
    assert batches == [64, 256, 1024]
    assert summary.dumps(records).count("\n") == len(records) + 2
    assert summary.dumps([]) == "[]\n"


def test_what_did_not_run_makes_no_claims():
    records = summary.derive([("a.json", run(cell(128, native_us=float("inf"))))])
    assert summary.select(records, "mix_vs_native") == []
    assert "Infinity" not in summary.dumps(records)
    assert "| 300 |  | 360 |" in documents.steps_region(records)


def test_verification_is_a_step_of_more_tokens_with_goals_of_its_own():
    cells = [cell(32768), verifying(4), verifying(8), verifying(4, "gdn", batch=8192), verifying(8, "gdn")]
    records = summary.derive([("a.json", run(*cells))])
    assert {r["cell"]["op"] for r in records} == {"step"}
    shares = summary.select(records, "nonflush_roof_share")
    asked = {(r["cell"]["family"], r["cell"]["T"]): r["asked"] for r in shares}
    assert asked == {
        ("mamba2", 1): 0.87,
        ("mamba2", 4): 0.8,
        ("mamba2", 8): 0.78,
        ("gdn", 4): 0.66,
        ("gdn", 8): None,
    }
    assert {line.split(" | ")[2] for line in documents.steps_region(records).splitlines()[2:]} == {
        "1",
        "4",
        "8",
    }
    assert "T 8" in documents.asked_region(records)


def test_the_roof_of_a_mix_of_drafts_is_what_the_run_says():
    records = summary.derive([("a.json", run(verifying(4)))])
    assert value(records, "mix_roof_share") == pytest.approx(305 / 400, rel=1e-3)
    unsaid = verifying(4, roof_us={"read": 225.0, "scale": 545.0})
    assert summary.select(summary.derive([("a.json", run(unsaid))]), "mix_roof_share") == []


def test_drafts_are_compared_with_native_steps_in_turn():
    launches = {"nonflush": 80.0, "flush": 150.0}
    drafts = verifying(4, native_steps_us=1000.0, launch_us=launches)
    records = summary.derive([("a.json", run(cell(32768), drafts))])
    read_us = drafts["roof_us"]["read"]
    (alone,) = summary.select(records, "nonflush_launch_roof_share")
    assert alone["value"] == pytest.approx(read_us / 80.0, rel=1e-3)
    (ratio,) = summary.select(records, "mix_vs_native_steps")
    assert (ratio["cell"]["T"], ratio["value"], ratio["asked"]) == (4, 2.5, None)
    one, drafts = documents.steps_region(records).splitlines()[2:]
    assert one.split(" | ")[8] == ""
    assert drafts.split(" | ")[8] == "1000"
    assert drafts.endswith("| 2.50 |")


def test_a_resumed_run_claims_no_time_of_a_tune():
    totals = {"tune_minutes": 0.7, "scope": "nemotron-3-super-120b-a12b"}
    cold, resumed = (run(cell(128), totals={**totals, "resumed": again}) for again in (False, True))
    assert value(summary.derive([("a.json", cold)]), "tune_minutes") == 0.7
    records = summary.derive([("a.json", resumed)])
    assert summary.select(records, "tune_minutes") == []
    assert value(records, "step_time_us", kernel="replay") == 300.0
    assert not [r for r in records if "resumed" in r["claim"]]


def test_reached():
    assert summary.reached({"value": 0.9, "asked": 0.9, "higher_is_better": True})
    assert not summary.reached({"value": 7, "asked": 6, "higher_is_better": False})


def test_the_recorded_summary_is_what_the_recorded_runs_say():
    recorded = summary.SUMMARY.read_text(encoding="utf-8") if summary.SUMMARY.exists() else "[]\n"
    assert summary.dumps(summary.derive(summary.load_runs())) == recorded, "run: python benchmarks/summary.py"
