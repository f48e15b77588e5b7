"""Tiles of the convolution in whole runs: what tune, bench, tables and check make of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import documents, summary
from replayssm_tune.codegen import emit, targets
from replayssm_tune.runtime.conv_tiles import ConvTile, default_tile
from replayssm_tune.runtime.table import load, save
from replayssm_tune.tuner import drawing, report, run, tables
from replayssm_tune.tuner.check import check
from replayssm_tune.tuner.errors import InterruptedTune
from replayssm_tune.tuner.progress import silent
from replayssm_tune.tuner.request import ConvWork, Job, Target, Work
from tests.runtime import table_samples
from tests.runtime.table_samples import conv_row as row
from tests.tuner import tunes
from tests.tuner.conv_tunes import FAST, SPEC, WORK, FakeBench
from tests.tuner.fake_bench import SPEC as STEP
from tests.tuner.samples import drawn


def tune(
    fake: Any, bench: FakeBench, folder: Path, works: tuple[ConvWork, ...] = (WORK,)
) -> tuple[report.Tuned, Job]:
    """A measured tune of one batch and of convolutions, and its job."""
    for name in ("conv_gate", "conv_time", "conv_roof"):
        setattr(fake, name, staticmethod(getattr(bench, name)))
    job = dataclasses.replace(tunes.job(folder, batches=(1,)), convolutions=works)
    return run.tune(job, silent, folder / "results"), job


@pytest.fixture
def tuned(fake: Any, tmp_path: Path) -> tuple[report.Tuned, Job, FakeBench]:
    """A tune with its job and its bench."""
    bench = FakeBench()
    return *tune(fake, bench, tmp_path), bench


def test_a_tune_writes_tiles_beside_rows_and_resumes(
    tuned: tuple[report.Tuned, Job, FakeBench], tmp_path: Path
) -> None:
    done, job, bench = tuned
    written = load(Path(done.table_path))
    assert written == done.table
    assert {row.spec.op for row in written.rows} == {"step", "native_step"}
    assert [(row.rows, row.channels) for row in written.convolutions] == [*WORK.shapes]
    assert [row.tile for row in written.convolutions] == [default_tile(10, 1), FAST]
    asked = len(bench.asked)
    again = run.tune(job, silent)
    assert len(bench.asked) == asked
    assert again.table == written

    checked = check([job.output], silent)
    assert checked.counts["tiles"] == 2
    assert not [finding for finding in checked.findings if finding.failed]

    # The run file, what is claimed of it, and the table of a document.
    (path,) = (tmp_path / "results").glob("*.json")
    content = json.loads(path.read_text())
    assert [cell["tile"] for cell in content["convolutions"]] == [default_tile(10, 1).key, FAST.key]
    records = summary.derive([(path.name, content)])
    (gain,) = summary.select(records, "conv_vs_default", rows=64)
    assert gain["value"] == pytest.approx(1.2, rel=0.01)
    assert gain["cell"] == {
        "T": 1, "ring_dtype": "bf16", "gpu": "H200", "width": 4, "activation_dtype": "bf16",
        "weight_dtype": "bf16", "rows": 64, "channels": 10240,
    }  # fmt: skip
    times = {r["cell"]["kernel"]: r["value"] for r in summary.select(records, "conv_time_us", rows=64)}
    assert set(times) == {"roof", "tuned", "default"}
    region = documents.convolution_region(records).splitlines()
    assert region[-1].startswith("| H200 | 1 | bf16/bf16/bf16 | 64 | 10240 | 2 |")
    assert documents.convolution_region([]) == "No recorded run has timed it yet."


def test_convolutions_that_were_whole_when_a_tune_was_interrupted_are_in_the_table(
    fake: Any, tmp_path: Path
) -> None:
    drafts = ConvWork(dataclasses.replace(SPEC, num_tokens=4), WORK.shapes[:1])
    bench = FakeBench()
    tune(fake, bench, tmp_path / "first")
    bench.stop_after = len(bench.asked) - 1
    bench.asked.clear()
    with pytest.raises(KeyboardInterrupt) as early:
        tune(fake, bench, tmp_path)
    assert not isinstance(early.value, InterruptedTune), "one shape is not the whole convolution"
    assert not list((tmp_path / "generated").rglob("*.json"))
    bench.stop_after = len(bench.asked) + 3
    with pytest.raises(InterruptedTune) as late:
        tune(fake, bench, tmp_path, (WORK, drafts))
    written = load(late.value.table)
    assert not written.rows
    assert [(row.spec, row.rows, row.channels) for row in written.convolutions] == [
        (SPEC, *shape) for shape in WORK.shapes
    ]
    assert late.value.rows == len(WORK.shapes)


def test_a_bench_times_tiles_beside_rows(
    tuned: tuple[report.Tuned, Job, FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, job, _ = tuned
    monkeypatch.setattr(run, "user_tables", lambda: (load(Path(done.table_path)),))
    timed = run.bench(job, tmp_path / "bench", silent)
    assert [row.tile for row in timed.table.convolutions] == [default_tile(10, 1), FAST]
    (path,) = (tmp_path / "bench").glob("*.json")
    content = json.loads(path.read_text())
    assert [cell["tile"] for cell in content["convolutions"]] == [default_tile(10, 1).key, FAST.key]


def test_the_report_of_a_tune_says_which_tiles_are_wrong(fake: Any, tmp_path: Path) -> None:
    bench = FakeBench()
    bench.gains[ConvTile(512, 2)] = 1.1
    bench.wrong_otherwise = {FAST: "packed rows: outputs are off"}
    done, _ = tune(fake, bench, tmp_path)
    assert [row.tile for row in done.table.convolutions] == [default_tile(10, 1), ConvTile(512, 2)]
    assert done.table.convolutions[1].verdict.endswith("; left out as wrong: b256.w1")
    text = drawn(drawing.draw_tuned, report.tuned_info(done))
    assert text.count(f"numerically wrong, left out: {SPEC.key} b256.w1: packed rows: outputs are off") == 1


def test_tables_show_and_explain_tiles(tuned: tuple[report.Tuned, Job, FakeBench]) -> None:
    done, _, _ = tuned
    path = Path(done.table_path)
    text = drawn(drawing.draw_tuned, report.tuned_info(done))
    text += drawn(drawing.draw_tables, tables.shown_info([load(path)]))
    work = [Work(STEP, (128,), ("layer tp1",))]
    beyond = ConvWork(SPEC, ((64, 10240), (1, 128)))
    data = tables.explained_info([path], work, targets.find("H200"), convolutions=[beyond])
    assert [cell["step"] for cell in data["convolutions"]] == ["user", "default"]
    text += drawn(drawing.draw_explained, data)
    assert text.count("1.20x") == 2
    assert "64 rows of 10240 channels: tile b256.w1, " in text
    assert f"1 rows of 128 channels: tile b128.w1, no table has a row for {SPEC.key}" in text


def test_without_a_gpu_one_line_says_that_the_rule_serves(tmp_path: Path) -> None:
    job = tunes.job(tmp_path, batches=(1,))
    static = dataclasses.replace(
        job, target=Target(job.target.gpu, False, "static"), convolutions=(WORK,), work=()
    )
    done = run.tune(static, silent)
    assert [note for note in done.notes if "convolution" in note] == [run.CONV_STATIC]
    assert done.table.convolutions == ()


def test_a_check_finds_old_tiles_and_those_that_are_none(tmp_path: Path) -> None:
    rows = (row(64, tile=FAST), row(2, tile=ConvTile(1024, 1)), row(512, tile=ConvTile(16, 8)))
    folder = tmp_path / "generated"
    table = table_samples.table(convolutions=rows, source="measured")
    emit.emit(folder, table)
    save(table, emit.table_path(folder, table.gpu))
    found = check([folder], silent).findings
    (old,) = (f for f in found if f.kind == "stale")
    assert "since 3 tiles were timed" in old.message
    (none,) = (f for f in found if f.kind == "compile")
    assert none.subject.endswith(f"{SPEC.key}@4096")
    assert "b16.w8 is not in the space" in none.message
