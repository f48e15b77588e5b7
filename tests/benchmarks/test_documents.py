"""Documents that state what run files hold: tables of steps, and what is asked of them."""

import json

import pytest

from benchmarks import documents, summary
from tests.benchmarks.step_runs import KEY, cell, run


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


def test_documents_state_the_recorded_figures():
    records = summary.recorded()
    for path in documents.documents():
        text = path.read_text(encoding="utf-8")
        assert documents.render(text, records) == text, f"{path.name}: run benchmarks/documents.py"
