"""What terminals of different widths show."""

import dataclasses

import pytest

from replayssm_tune.tuner import drawing, report
from tests.tuner import samples
from tests.tuner.samples import drawn


def tables(*rows):
    return {"tables": [report.table_info(samples.table(*rows))], "related": []}


ALL = ["batch", "plan", "µs", "of roof", "vs native", "vs default", "regs", "spills", "source"]


def heads(text):
    (line,) = {" ".join(line.split()) for line in text.splitlines() if line.lstrip().startswith("batch")}
    return [name for name in ALL if name in line]


def test_a_wide_terminal_shows_all_columns():
    text = drawn(drawing.draw_tables, tables(samples.measured_row(128)), 200)
    assert heads(text) == ALL
    assert "left out" not in text
    assert report.short(samples.TWO_LAUNCHES) in text


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_shows_what_matters_unbroken_and_names_the_rest(width):
    text = drawn(drawing.draw_tables, tables(samples.measured_row(128), samples.measured_row(32768)), width)
    assert max(map(len, text.splitlines())) <= width
    shown = heads(text)
    assert {"batch", "plan", "µs", "vs native"} <= set(shown)
    told = " ".join(text.split())
    assert "left out at this width: " in told
    assert "a wider terminal or --json shows them" in told
    named = told.rpartition("left out at this width: ")[2].partition(" (")[0].split(", ")
    assert sorted([*shown, *named]) == sorted(ALL)
    assert samples.SPEC.key in text.splitlines()
    # A plan of two kernels takes two lines, each whole.
    first, second = report.short(samples.TWO_LAUNCHES).split(" + ")
    if width >= 80:
        assert f"{first} +" in text
        assert second in text


def test_rows_of_former_kernels_are_counted_and_marked():
    data = tables(samples.measured_row(128, time_us=4.5), samples.measured_row(32768, time_us=8.5))
    assert "stale" not in drawn(drawing.draw_tables, data, 200)
    (group,) = data["tables"][0]["specs"]
    group["rows"][1]["stale"] = True
    text = drawn(drawing.draw_tables, data, 60)
    assert "1 rows or tiles are stale (*): their kernels have changed since they were made" in text
    assert " 8.50* " in text
    assert " 4.50 " in text


def test_columns_that_say_nothing_go_first():
    row = dataclasses.replace(
        samples.static_row(128), time_us=10.0, native_time_us=20.0, default_time_us=11.0
    )
    row = dataclasses.replace(row, binaries=((samples.binary("3.6.0", 80),),))
    wide = drawn(drawing.draw_tables, tables(row), 200)
    width = max(len(line.rstrip()) for line in wide.splitlines() if "batch" in line)
    text = drawn(drawing.draw_tables, tables(row), width - 1)
    assert "left out at this width: of roof (" in text


def test_a_tune_names_what_it_leaves_out_too():
    text = drawn(drawing.draw_tuned, report.tuned_info(samples.tuned()), 80)
    assert "left out at this width: " in text
