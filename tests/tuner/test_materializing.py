"""Tunes of what materialises states, beside the steps whose rings it folds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.codegen import space
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import drawing, report, run
from replayssm_tune.tuner.check import check
from replayssm_tune.tuner.errors import GateError
from replayssm_tune.tuner.progress import silent
from replayssm_tune.tuner.records import Cell
from tests.tuner.samples import drawn
from tests.tuner.tunes import FakeGpu, job, with_materializing


def test_what_materialises_states_is_tuned_beside_the_steps(fake: type[FakeGpu], tmp_path: Path) -> None:
    plain = job(tmp_path)
    here, spec = with_materializing(
        dataclasses.replace(plain, work=(*plain.work, *job(tmp_path, drafts=3).work))
    )
    assert [work.spec.op for work in here.work] == ["step", "verify", "materialize"]
    tuned = run.tune(here, silent, tmp_path / "results")
    assert not tuned.missing
    assert not tuned.gate_failures
    table = load(tmp_path / "generated" / "tables" / "h200.json")
    rows = {row.effective_batch: row for row in table.rows if row.spec == spec}
    assert set(rows) == {16, 1024}
    tried = space.points(spec, "materialize").variants
    assert len(tried) > 1
    for batch, row in rows.items():
        assert row.plan.variants[0] in tried
        assert row.native_time_us is row.nonflush_time_us is row.nonflush_roof_us is None
        assert row.time_us == row.flush_time_us
        assert row.roof_time_us == row.flush_roof_us == pytest.approx(1.0 + 0.016 * batch)
        assert row.default_time_us is not None
        assert row.verdict
        timed = {subject for mode, cell, subject in fake.asked if cell == Cell(spec, batch)}
        assert timed == {variant.key for variant in tried}
    assert {mode for mode, cell, _ in fake.asked if cell.spec == spec} == {"materialize"}
    served = [one for one in tuned.served if one.spec == spec]
    assert [(one.effective_batch, one.step, one.plan) for one in served] == [
        (batch, "user", row.plan) for batch, row in rows.items()
    ]
    data = report.tuned_info(tuned)
    (group,) = (group for group in data["table"]["specs"] if group["spec"] == spec.key)
    assert [row["vs_native"] for row in group["rows"]] == [None, None]
    assert spec.key in [entry["spec"] for entry in data["tried"]]
    assert "materialize" in drawn(drawing.draw_tuned, data, 300)

    (path,) = (tmp_path / "results").glob("*.json")
    recorded = json.loads(path.read_text())
    cell = next(c for c in recorded["cells"] if c["spec"] == spec.key and c["effective_batch"] == 1024)
    assert cell["time_us"] == {"materialize": pytest.approx(rows[1024].time_us, rel=1e-3)}
    assert cell["roof_us"]["materialize"] == cell["roof_us"]["scale"]
    assert (cell["native_us"], cell["native_name"]) == (None, "")
    assert set(cell["samples_us"]) == {"materialize"}

    fake.asked.clear()
    again = run.tune(here, silent)
    assert fake.asked == [], "everything was remembered"
    assert again.table.rows == tuned.table.rows


def test_rows_of_what_materialises_states_are_checked_and_timed_again(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, spec = with_materializing(job(tmp_path, (64,)))
    run.tune(here, silent)
    folder = tmp_path / "generated"
    table = load(folder / "tables" / "h200.json")
    (row,) = (row for row in table.rows if row.spec == spec)
    recorded = {
        (one.spec, v): binaries[0]
        for one in table.rows
        for v, binaries in zip(one.plan.variants, one.binaries, strict=True)
    }

    def compiler(gpu: Any, kernels: Any, told: Any) -> dict[Any, Any]:
        return {kernel: recorded.get(kernel, row.binaries[0][0]) for kernel in kernels}

    checked = check([folder], silent, compiler=compiler)
    assert not [finding for finding in checked.findings if finding.failed]
    key = (spec, row.plan.variants[0])
    recorded[key] = dataclasses.replace(recorded[key], registers=recorded[key].registers + 1)
    (found,) = (f for f in check([folder], silent, compiler=compiler).findings if f.failed)
    assert (found.kind, spec.key in found.subject) == ("resources", True)

    monkeypatch.setenv("REPLAYSSM_TABLE_DIR", str(folder / "tables"))
    run.bench(here, tmp_path / "results", silent)
    assert (("materialize", Cell(spec, 1024), row.plan.key)) in fake.asked
    (path,) = (tmp_path / "results").glob("*.json")
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["spec"], cell["plan"]) for cell in cells if cell["spec"] == spec.key] == [
        (spec.key, row.plan.key)
    ]


def test_a_wrong_default_of_what_materialises_states_ends_the_tune(
    fake: type[FakeGpu], tmp_path: Path
) -> None:
    here, spec = with_materializing(job(tmp_path, (1,)))
    fake.wrong = frozenset({default_plan(spec).key})
    with pytest.raises(GateError, match="default plan of mamba2-materialize"):
        run.tune(here, silent)
