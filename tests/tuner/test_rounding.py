"""Figures of tables and run files: rounded in one place, each file to digits of its own."""

import json
import math

import pytest

from benchmarks.summary import derive, load_runs, select
from replayssm_tune.runtime.lookup import shipped_tables
from replayssm_tune.tuner import rounding, rows, runfile, static


@pytest.mark.parametrize(
    ("value", "digits", "rounded"),
    [
        (123456.0, 4, 123500.0),
        (0.000123456, 5, 0.00012346),
        (2.0, 6, 2.0),
        (0.0, 4, 0.0),
        (-1.25, 2, -1.3),
        (1.065, 3, 1.07),
        (9.995, 3, 10.0),
        (1.0649, 3, 1.06),
    ],
)
def test_significant_digits(value, digits, rounded):
    assert rounding.significant(value, digits) == rounding.known(value, digits) == rounded


def test_what_is_missing_or_not_finite():
    assert [rounding.known(value, 4) for value in (None, math.inf, math.nan)] == [None] * 3
    assert rounding.significant(math.inf, 4) == math.inf


def test_rounding_again_changes_no_shipped_table():
    for table in shipped_tables(strict=True):
        for row in table.rows:
            digits = static.DIGITS if row.source == "static" else rows.DIGITS
            for value in (row.time_us, row.native_time_us, row.default_time_us, row.flush_time_us):
                assert rounding.known(value, digits) == value


def test_a_run_file_reads_back_as_it_was_recorded(tmp_path):
    tunes = [(name, run) for name, run in load_runs() if run["what"].startswith("tune")]
    assert tunes
    for name, run in tunes:
        path = runfile.write_run(tmp_path / name, run)
        written = json.loads(path.read_text(encoding="utf-8"))
        assert written == {**run, "time": written["time"]}, name


def test_a_run_file_is_never_written_over(tmp_path):
    runs = [
        {"gpu": "H200", "date": "2026-11-30", "what": "tune", "totals": {"tune_minutes": minutes}}
        for minutes in range(12, 0, -1)
    ]
    paths = [runfile.write_run(tmp_path, run) for run in runs]
    assert [path.name for path in paths] == [
        f"2026-11-30-h200-tune{n}.json" for n in ("", *(f"-{i}" for i in range(2, 13)))
    ]
    (newest,) = select(derive([(path.name, json.loads(path.read_text())) for path in paths]), "tune_minutes")
    assert newest["value"] == 1.0
