"""Figures derived from run files; documents that state them; the figure drawn from them."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from benchmarks import documents, figure, summary
from replayssm_tune.runtime.spec import Spec

KEY = "mamba2-step-p64-n128-g16-w16-t1-xbf16-s{}-rbf16-fdbs"


def cell(batch, state_dtype="fp32", **changes):
    values = {
        "spec": KEY.format(state_dtype),
        "effective_batch": batch,
        "plan": "plan",
        "time_us": {"mix": 300.0, "nonflush": 250.0, "flush": 550.0},
        "roof_us": {"read": 225.0, "scale": 545.0},
        "native_us": 560.0,
        "native_name": "native_step",
        "default_us": {"mix": 360.0},
        "noise_floor": 0.005,
    }
    return {**values, **changes}


def run(*cells, date="2026-11-30", **more):
    return {"what": "tune", "gpu": "H200", "date": date, "cells": list(cells), **more}


def value(records, claim, **of):
    (record,) = summary.select(records, claim, **of)
    return record["value"]


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


def test_cells_without_a_time_make_no_claims():
    bare = {"spec": KEY.format("fp32"), "effective_batch": 128, "plan": "plan"}
    assert summary.derive([("a.json", run(bare))]) == []


def test_order_and_text_are_canonical():
    records = summary.derive([("a.json", run(cell(256), cell(64), cell(1024)))])
    batches = [r["cell"]["effective_batch"] for r in summary.select(records, "mix_vs_native")]
    assert batches == [64, 256, 1024]
    assert summary.dumps(records).count("\n") == len(records) + 2
    assert summary.dumps([]) == "[]\n"


def test_regions_are_rewritten_and_the_rest_is_left_alone():
    records = summary.derive([("a.json", run(cell(32768)))])
    text = "before\n<!-- figures:begin steps -->\nstale 123\n<!-- figures:end -->\nafter 55\n"
    rendered = documents.render(text, records)
    assert "stale" not in rendered
    assert rendered.startswith("before\n")
    assert rendered.endswith("after 55\n")
    layer = "| H200 | Mamba-2 64 x 128, 16 heads/group | 1 | fp32 | 32768 |"
    assert f"{layer} 245 | 300 | 560 | 360 | 0.82 | 1.87 |" in rendered
    assert documents.render(rendered, records) == rendered
    with pytest.raises(KeyError):
        documents.render("<!-- figures:begin nobody -->\n<!-- figures:end -->", records)


def test_figures_of_documents_are_rounded_once_and_half_up():
    ready = {"claim": "lookup_1000_ms", "value": 1.065, "asked": 10, "unit": "ms", "higher_is_better": False}
    # Of 1.18479 the summary's file keeps 1.185, of 1.86748 it keeps 1.867.
    cells = [cell(16, native_us=355.437), cell(32, native_us=560.244)]
    runs = [("a.json", run(*cells)), ("b.json", run(records=[{**ready, "cell": {"scope": "cold"}}]))]
    records = summary.derive(runs)
    region = documents.goals_region(records)
    assert "| cold | 1.07 ms | ≤ 10 ms |" in region
    assert "every batch | 1.18 to 1.87 | ≥ 1 |" in region
    assert "| cold | 1.07 ms | ≤ 10 ms |" in documents.asked_region(records)
    shown = [row.split(" | ")[-1] for row in documents.steps_region(records).splitlines()[2:]]
    assert shown == ["1.18 |", "1.87 |"]
    written = json.loads(summary.dumps(records))
    assert [r["value"] for r in summary.select(written, "mix_vs_native")] == [1.185, 1.867]


def test_asked_region_shows_goal_and_value():
    records = summary.derive([("a.json", run(cell(32768)))])
    assert "| flush_roof_share | H200 |" in documents.asked_region(records)
    assert "| 0.991 | ≥ 0.93 |" in documents.asked_region(records)


def test_what_did_not_run_makes_no_claims():
    records = summary.derive([("a.json", run(cell(128, native_us=float("inf"))))])
    assert summary.select(records, "mix_vs_native") == []
    assert "Infinity" not in summary.dumps(records)
    assert "| 300 |  | 360 |" in documents.steps_region(records)


def test_losses_are_counted_per_curve():
    slow = cell(64, native_us=240.0, default_us={"mix": 300.0})
    records = summary.derive([("a.json", run(slow, cell(128), cell(32, native_us=270.0)))])
    row = "| H200 | Mamba-2 64 x 128, 16 heads/group | 1 | fp32 | 3 | 2 | 64 | 0.80 | 1.87 | 1 |"
    assert row in documents.losses_region(records)
    assert documents.losses_region([]).count("\n") == 1


def test_the_overview_has_a_row_per_curve_with_the_batches_near_round_ones():
    faster = [cell(batch, native_us=native) for batch, native in ((16, 270.0), (48, 240.0), (96, 330.0))]
    large = cell(32832, time_us={"mix": 280.0}, native_us=560.0, default_us={"mix": 308.0})
    records = summary.derive([("a.json", run(*faster, cell(1056), large, cell(16, "bf16")))])
    fp32, bf16 = documents.overview_region(records).splitlines()[:1:-1]
    layer = "| H200 | Mamba-2 64 x 128, 16 heads/group | 1 |"
    # None of the timed batches is near 8192.
    assert fp32 == f"{layer} fp32 | 48 | 0.90 | 1.10 | 1.87 |  | 2.00 | 280 | 0.88 | 1.10 |"
    assert bf16 == f"{layer} bf16 | nowhere | 1.87 |  |  |  |  |  |  |  |"


def test_goals_count_the_layers_and_batches_that_reach_them():
    other = cell(32768, spec=KEY.format("fp32").replace("g16", "g8"), time_us={"nonflush": 300.0})
    runs = [("a.json", run(cell(32768), other, cell(128, native_us=280.0), totals={"tune_minutes": 9.0}))]
    ready = {"claim": "lookup_1000_ms", "value": 4, "asked": 10, "unit": "ms", "higher_is_better": False}
    region = documents.goals_region(
        summary.derive([*runs, ("b.json", run(records=[{**ready, "cell": {"scope": "cold"}}]))])
    )
    of = "Mamba-2, T 1, fp32"
    assert f"| nonflush_roof_share | H200 | {of}, batch 32768 | 0.75 to 0.9 | ≥ 0.87 | 1 of 2 |" in region
    assert f"| mix_vs_native | H200 | {of}, every batch | 0.933 to 1.87 | ≥ 1 | 1 of 2 |" in region
    assert "| lookup_1000_ms |  | cold | 4 ms | ≤ 10 ms | yes |" in region
    assert "tune_minutes" not in region


def verifying(tokens, family="mamba2", **changes):
    key = KEY.format("fp32") if family == "mamba2" else "gdn-step-p128-n128-g2-w16-t1-xbf16-sfp32-rbf16-fbsl"
    spec = key.replace("-step-", "-verify-").replace("-t1-", f"-t{tokens}-")
    roofs = {
        "roof_us": {"read": 225.0, "scale": 545.0, "mix": 305.0},
        "time_us": {"mix": 400.0, "nonflush": 250.0},
    }
    return cell(changes.pop("batch", 32768), spec=spec, **{**roofs, **changes})


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


def test_documents_state_the_recorded_figures():
    records = summary.recorded()
    for path in documents.documents():
        text = path.read_text(encoding="utf-8")
        assert documents.render(text, records) == text, f"{path.name}: run benchmarks/documents.py"


def curve(state_dtype):
    return [
        cell(batch, state_dtype, time_us={"mix": 3.0 + batch / 100}, native_us=4.0 + batch / 50)
        for batch in (16, 128, 1024, 8192)
    ]


def test_figure_data():
    records = summary.derive([("a.json", run(*curve("fp32"), *curve("bf16")))])
    panels = figure.info(records, head_dim=64)
    assert [panel.state_dtype for panel in panels] == ["fp32", "bf16"]
    assert {panel.layer for panel in panels} == {"Mamba-2 64 x 128"}
    assert list(panels[0].series) == ["native", "replay", "roof"]
    assert panels[0].series["replay"] == ((16, 3.16), (128, 4.28), (1024, 13.24), (8192, 84.92))
    assert figure.info(records, head_dim=80) == ()


def test_figure_takes_the_gpu_with_most_points():
    other = {**run(cell(16)), "gpu": "H20"}
    records = summary.derive([("a.json", run(*curve("fp32"))), ("b.json", other)])
    assert len(figure.info(records)[0].series["replay"]) == 4
    assert len(figure.info(records, gpu="H20")[0].series["replay"]) == 1


def test_the_figure_is_well_formed_and_the_same_every_time():
    gdn = [{**c, "spec": "gdn-step-p128-n128-g2-w16-t1-xbf16-sfp32-rbf16-fbsl"} for c in curve("fp32")]
    records = summary.derive([("a.json", run(*curve("fp32"), *curve("bf16"), *gdn))])
    text = figure.figure(records)
    assert text == figure.figure(records)
    svg = ET.fromstring(text)
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 9
    height = float(svg.attrib["viewBox"].split()[3])
    texts = [element.text for element in svg.findall("{http://www.w3.org/2000/svg}text")]
    assert {"Mamba-2 64 x 128, fp32 state", "Mamba-2 64 x 128, bf16 state"} <= set(texts)
    assert "GDN 128 x 128, fp32 state" in texts
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert all(0 <= x <= figure.WIDTH and 0 <= y <= height for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="record a run first"):
        figure.figure([])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(2.5, 60.0, [5, 10, 20, 50]), (1.0, 1e5, [1, 10, 100, 1000, 10000, 100000])],
)
def test_ticks(low, high, expected):
    assert figure.ticks(low, high) == expected


def test_the_published_figure_is_the_recorded_one():
    records = summary.recorded()
    if not summary.select(records, "step_time_us"):
        assert not figure.FIGURE.exists()
        return
    assert figure.FIGURE.read_text(encoding="utf-8") == figure.figure(records), (
        "run: python benchmarks/figure.py"
    )
