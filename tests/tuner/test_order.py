"""What a tune does before what, and what an interruption leaves: compiling, gates, defaults, timing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.codegen import space
from replayssm_tune.codegen.pool import CompileRun
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import run
from replayssm_tune.tuner.errors import GateError, InterruptedTune
from replayssm_tune.tuner.progress import silent
from replayssm_tune.tuner.records import Cell, Timing
from tests.tuner.tunes import FakeGpu, job, with_materializing


def test_an_interrupted_tune_loses_nothing(fake: type[FakeGpu], tmp_path: Path) -> None:
    fake.interrupt_after = 40
    with pytest.raises(KeyboardInterrupt):
        run.tune(job(tmp_path), silent)
    fake.interrupt_after = None
    run.tune(job(tmp_path), silent)
    resumed = len(fake.asked)
    run.tune(job(tmp_path / "whole"), silent)
    assert resumed == len(fake.asked) - 40


def test_what_was_whole_when_a_tune_was_interrupted_is_in_the_table(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, folds = with_materializing(job(tmp_path))
    fake.interrupt_after = 1
    with pytest.raises(KeyboardInterrupt) as early:
        run.tune(here, silent)
    assert not isinstance(early.value, InterruptedTune), "nothing was whole"
    assert not list((tmp_path / "generated").rglob("*.json"))
    fake.interrupt_after = None
    whole = run.tune(dataclasses.replace(here, store=tmp_path / "whole", output=tmp_path / "all"), silent)
    steps = [row for row in whole.table.rows if row.spec != folds]
    time = fake.time

    def stopped(self: FakeGpu, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        if cell.spec == folds:
            raise KeyboardInterrupt
        return time(self, cell, variants, mode, repeats)

    there = dataclasses.replace(here, store=tmp_path / "again")
    monkeypatch.setattr(fake, "time", stopped)
    with pytest.raises(InterruptedTune) as late:
        run.tune(there, silent, tmp_path / "results")
    assert late.value.table == tmp_path / "generated" / "tables" / "h200.json"
    written = load(late.value.table).rows
    assert {row.key for row in written} == {row.key for row in steps}
    assert late.value.rows == len(steps)
    (path,) = (tmp_path / "results").glob("*.json")
    recorded = json.loads(path.read_text())
    assert {(cell["spec"], cell["effective_batch"]) for cell in recorded["cells"]} == {
        (row.spec.key, row.effective_batch) for row in steps if not row.spec.is_native
    }
    assert "tune_minutes" not in recorded["totals"], "of a part of a run"
    assert recorded["totals"]["scope"].endswith(", interrupted")
    assert late.value.recorded == path
    (tmp_path / "file").touch()
    with pytest.raises(InterruptedTune) as unrecorded:
        run.tune(there, silent, tmp_path / "file")
    assert unrecorded.value.rows == len(steps), "rows are written, whatever becomes of the run file"
    assert unrecorded.value.recorded is None
    monkeypatch.setattr(fake, "time", time)
    assert {row.key for row in run.tune(there, silent).table.rows} == {row.key for row in whole.table.rows}


def test_an_interrupted_tune_in_which_nothing_ran_writes_no_table(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, folds = with_materializing(job(tmp_path))

    def fails(self: FakeGpu, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        if cell.spec == folds:
            raise KeyboardInterrupt
        return Timing((), "resources", "out of memory")

    monkeypatch.setattr(fake, "time", fails)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        run.tune(here, silent)
    assert not isinstance(interrupt.value, InterruptedTune)
    assert not list((tmp_path / "generated").rglob("*.json"))


def test_a_spec_is_timed_while_the_next_ones_compile(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compilers that finish one point at a time, of the last work when they are waited for alone."""
    here, folds = with_materializing(job(tmp_path))
    back: list[Spec] = []
    timed: list[tuple[Spec, int]] = []
    collect, time = CompileRun.collect, fake.time

    def one(self: CompileRun, block: bool = True) -> list[Any]:
        pending: list[Any] = self.__dict__.setdefault("pending", [])
        while not self.done:
            pending += collect(self)
        ready = pending and (block or pending[0].spec != folds)
        found = [pending.pop(0)] if ready else []
        back.extend(result.spec for result in found)
        self.done = not pending
        return found

    def noted(self: FakeGpu, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        timed.append((cell.spec, back.count(folds)))
        return time(self, cell, variants, mode, repeats)

    monkeypatch.setattr(CompileRun, "collect", one)
    monkeypatch.setattr(fake, "time", noted)
    tuned = run.tune(here, silent)
    assert not tuned.missing
    assert timed[0] == (here.work[0].spec, 1), "only its default, which comes first"
    assert {count for spec, count in timed if spec == folds} == {back.count(folds)}
    assert back.count(folds) > 1


def test_what_fails_the_gate_is_never_timed(fake: type[FakeGpu], tmp_path: Path) -> None:
    spec = job(tmp_path).work[0].spec
    bad = next(v for v in space.points(spec, "both").variants if v.structure.load == "early")
    fake.wrong = frozenset({bad.key})
    tuned = run.tune(job(tmp_path), silent)
    assert all(bad.key not in subject for _, _, subject in fake.asked)
    (failure,) = tuned.gate_failures
    assert "output error" in failure
    assert bad.key in failure
    dropped = {d.reason: d.count for plan in tuned.specs for d in plan.dropped}
    assert dropped["gate"] == 1


def test_a_wrong_default_ends_the_tune(fake: type[FakeGpu], tmp_path: Path) -> None:
    spec = job(tmp_path).work[0].spec
    fake.wrong = frozenset({default_plan(spec).variants[0].key})
    with pytest.raises(GateError, match="default plan"):
        run.tune(job(tmp_path), silent)


@pytest.mark.parametrize("status", ["timeout", "ok"])
def test_no_spec_is_timed_before_all_defaults_are_right(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The default of the last spec comes back from the compiler last, and fails there or at the gate."""
    here, folds = with_materializing(job(tmp_path))
    (bad,) = default_plan(folds).variants
    collect = CompileRun.collect

    def last(self: CompileRun, block: bool = True) -> list[Any]:
        held: list[Any] = self.__dict__.setdefault("held", [])
        found = collect(self, block)
        late = [result for result in found if (result.spec, result.variant) == (folds, bad)]
        held += [dataclasses.replace(r, status=status, reason="it takes its time") for r in late]
        found = [result for result in found if result not in late]
        if self.done and held:
            found.append(held.pop())
        self.done = self.done and not found
        return found

    monkeypatch.setattr(CompileRun, "collect", last)
    fake.wrong = frozenset({bad.key} if status == "ok" else ())
    with pytest.raises(GateError, match=f"default plan of {folds.key}"):
        run.tune(here, silent)
    assert fake.asked == []
