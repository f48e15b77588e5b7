"""The data of a report, and that every kind of it can be drawn."""

import dataclasses

import pytest

from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.tuner import drawing, report
from replayssm_tune.tuner.report import Checked, Emitted, Finding, Planned
from tests.tuner import samples
from tests.tuner.samples import drawn


def test_short_names_only_what_differs_from_the_plainest_kernel():
    assert report.short(samples.TWO_LAUNCHES) == (
        "nonflush 32x128 warps2 + flush readout:dot 64x64 fold64 regs128 evict"
    )
    plain = Plan((Variant(Structure("both", coefficients="precomputed", route="rebuild"), Tile(16, 128)),))
    assert report.short(plain) == "both precomputed rebuild 16x128"


def test_row_figures():
    data = report.row_info(samples.measured_row(128))
    assert data["roof_share"] == pytest.approx(0.9)
    assert data["vs_native"] == pytest.approx(2.1)
    assert data["vs_default"] == pytest.approx(1.3)
    assert data["registers"] == [80, 255], "of the newest Triton of each kernel, 3.10 being after 3.6"
    assert data["spills_bytes"] == [0, 16]


def test_a_row_without_times_has_no_figures():
    data = report.row_info(samples.static_row(128))
    assert data["time_us"] is data["roof_share"] is data["vs_native"] is data["vs_default"] is None
    assert data["registers"] == []


def test_table_rows_stand_by_spec():
    bf16 = dataclasses.replace(samples.SPEC, state_dtype="bf16")
    table = samples.table(
        samples.measured_row(128), samples.measured_row(256), samples.measured_row(128, spec=bf16)
    )
    data = report.table_info(table)
    assert {s["spec"]: [r["effective_batch"] for r in s["rows"]] for s in data["specs"]} == {
        samples.SPEC.key: [128, 256],
        bf16.key: [128],
    }
    assert data["toolchain"]["triton"] == "3.6.0"


def test_planned_totals_and_drops_by_size():
    planned = Planned("H100", True, samples.tuned().specs * 2, estimate_s=90.0, notes=("groups replicated",))
    data = report.planned_info(planned)
    assert (data["cells"], data["points"], data["kept"]) == (4, 200, 120)
    assert [d["reason"] for d in data["specs"][0]["dropped"]] == ["same binary", "spills"]
    text = drawn(drawing.draw_planned, data)
    assert "30 same binary, 10 spills" in text
    assert "1.5 minutes" in text
    assert "groups replicated" in text


def test_tuned_says_everything():
    data = report.tuned_info(samples.tuned(gate_failures=("p3: state off by 1e-2",), missing=("cell@1",)))
    text = drawn(drawing.draw_tuned, data)
    for words in ("90%", "2.10x", "1.30x", "80+255", "p3: state off", "1 cells without a row", "4.2 minutes"):
        assert words in text, words
    assert "2 rows in generated/tables/h200.json, 2 kernels" in text


def test_dispatch_answers_share_a_line_where_they_agree():
    text = drawn(drawing.draw_served, report.tuned_info(samples.tuned())["served"])
    rows = [line.split() for line in text.splitlines() if samples.SPEC.key in line]
    assert [row[1] for row in rows] == ["96-128", "32768"]
    assert "chosen by analysis" in text


def test_a_static_row_shows_what_a_sister_measured():
    result = samples.tuned(
        table=samples.table(samples.static_row(128), samples.static_row(256), source="static"),
        sisters={(samples.SPEC.key, 128): ("H200", samples.measured_row(128))},
        static_share={"median": 0.93, "p10": 0.81},
    )
    data = report.tuned_info(result)
    rows = data["table"]["specs"][0]["rows"]
    assert rows[0]["sister"]["gpu"] == "H200"
    assert rows[0]["sister"]["plan"] == samples.TWO_LAUNCHES.key
    assert rows[1]["sister"] is None
    text = drawn(drawing.draw_tuned, data)
    assert "measured on a sister" in text
    assert "93% of the optimum" in text


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ((), "OK"),
        (("stale",), "OK"),
        (("coverage",), "COVERAGE"),
        (("coverage", "resources"), "REGRESSION"),
        (("generated", "compile"), "TOOLCHAIN"),
        (("coverage", "schema", "compile"), "TABLE"),
    ],
)
def test_the_worst_failure_of_a_check_decides(kinds, code):
    checked = Checked({"rows": 7}, tuple(Finding(kind, "row 1", "differs") for kind in kinds))
    data = report.checked_info(checked)
    assert data["exit"] == code
    assert ("all well" in drawn(drawing.draw_checked, data)) == (not kinds)


def test_what_is_only_reported_does_not_fail_a_check():
    checked = Checked(
        {"rows": 1}, (Finding("resources", "row 1", "90 registers, 80 recorded", failed=False),)
    )
    data = report.checked_info(checked)
    assert data["exit"] == "OK"
    assert "note resources: row 1" in drawn(drawing.draw_checked, data)


def test_emitted():
    data = report.emitted_info(Emitted("t.json", 3, ("kernels/a.py",), 4))
    text = drawn(drawing.draw_emitted, data)
    assert "wrote kernels/a.py" in text
    assert "3 rows in t.json; 4 files were up to date" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (3.14159, "3.14"), (273.4, "273"), (12345.6, "12346"), (0.0123, "0.0123")],
)
def test_numbers(value, text):
    assert drawing.number(value) == text
