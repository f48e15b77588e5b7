"""What a budget cuts off a tune or a plan, and what it leaves of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from replayssm_tune.codegen import space
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import candidates, measured, run
from replayssm_tune.tuner.progress import Event, silent
from replayssm_tune.tuner.request import Budget, Target
from replayssm_tune.tuner.static import static_jobs
from tests.tuner.tunes import GPU, FakeGpu, job, with_materializing


def test_a_budget_is_mostly_for_steps(tmp_path: Path) -> None:
    here, _ = with_materializing(job(tmp_path))
    assert [measured.budget_share(work) for work in here.work] == [pytest.approx(1.0), 0.2]


def test_a_short_budget_still_compiles_both_kernels_of_a_default(fake: type[FakeGpu], tmp_path: Path) -> None:
    tuned = run.tune(job(tmp_path, budget=Budget(minutes=1e-6), drafts=3), silent)
    assert not tuned.missing
    assert {row.plan for row in tuned.table.rows} == {default_plan(row.spec) for row in tuned.table.rows}


def test_a_spent_budget_still_gives_every_cell_a_row(fake: type[FakeGpu], tmp_path: Path) -> None:
    tuned = run.tune(job(tmp_path, budget=Budget(trials=3)), silent)
    assert not tuned.missing
    assert len(tuned.table.rows) == 4


def test_a_short_budget_still_uses_what_the_search_found(fake: type[FakeGpu], tmp_path: Path) -> None:
    run.tune(job(tmp_path, (1,), Budget(trials=60)), silent)
    table = load(tmp_path / "generated" / "tables" / "h200.json")
    (row,) = (row for row in table.rows if row.spec.op == "step")
    assert row.plan.variants[0].structure.load == "early"


def test_a_cut_leaves_every_spec_its_default_and_what_won_elsewhere() -> None:
    spec = job(Path()).work[0].spec
    jobs = candidates.spec_jobs(job(Path()).work)
    won = space.points(spec, "both").variants[-1]
    ordered = candidates.by_promise(jobs, {spec: (won,)})
    assert sorted(ordered) == sorted(jobs)
    defaults = [(s, default_plan(s).variants[0]) for s in (spec, spec.native)]
    assert ordered[:3] == [*defaults, (spec, won)]
    assert [s for s, _ in ordered[:8]] == [spec, spec.native] * 4


def test_without_a_budget_one_work_compiles_after_the_other(tmp_path: Path) -> None:
    here, folds = with_materializing(job(tmp_path))
    spec = here.work[0].spec
    won = space.points(spec, "both").variants[-1]
    ordered = candidates.work_by_work(here.work, {spec: (won,)})
    assert sorted(ordered) == sorted(candidates.spec_jobs(here.work))
    defaults = [(s, default_plan(s).variants[0]) for s in (spec, spec.native, folds)]
    assert ordered[:4] == [*defaults, (spec, won)], "all defaults must be right"
    rest = [s for s, _ in ordered[3:]]
    assert rest == [s for s in rest if s != folds] + [folds] * rest.count(folds)


def test_a_budget_ends_compiling(fake: type[FakeGpu], tmp_path: Path) -> None:
    whole = run.tune(job(tmp_path / "whole"), silent)
    cut = run.tune(job(tmp_path / "cut", budget=Budget(minutes=1e-6)), silent)
    for plan, all_of_it in zip(cut.specs, whole.specs, strict=True):
        dropped = {d.reason: d.count for d in plan.dropped}
        assert plan.kept == 1 < all_of_it.kept
        assert dropped[candidates.NO_TIME] >= all_of_it.kept - 1
    assert not cut.missing
    left = sum(d.count for plan in cut.specs for d in plan.dropped if d.reason == candidates.NO_TIME)
    jobs = len(candidates.spec_jobs(job(tmp_path).work))
    assert candidates.left_notes(jobs, left)[0] in cut.notes
    assert f"before {left} of {jobs} points" in candidates.left_notes(jobs, left)[0]
    assert not any("time for compiling" in note for note in whole.notes)
    assert {row.plan for row in cut.table.rows} == {default_plan(row.spec) for row in cut.table.rows}


@pytest.mark.parametrize("here", [True, False], ids=["measured", "static"])
def test_a_time_ends_a_plan_and_what_is_left_is_told(fake: type[FakeGpu], tmp_path: Path, here: bool) -> None:
    target = Target(GPU, here, "")
    asked = dataclasses.replace(job(tmp_path), target=target)
    whole = run.plan(asked, silent)
    events: list[Event] = []
    cut = run.plan(dataclasses.replace(asked, budget=Budget(minutes=1e-6)), events.append)
    jobs = candidates.spec_jobs(asked.work) if here else static_jobs(asked)
    defaults = sum(variant in default_plan(spec).variants for spec, variant in jobs)
    assert len(events) == defaults < len(jobs)
    assert candidates.left_notes(len(jobs), len(jobs) - defaults)[0] in cut.notes
    for plan, all_of_it in zip(cut.specs, whole.specs, strict=True):
        assert plan.spec == all_of_it.spec
        assert plan.points == all_of_it.points
        assert 1 <= plan.kept <= all_of_it.kept
        assert not any(d.reason == candidates.NO_TIME for d in all_of_it.dropped)
    assert not any("time for compiling" in note for note in whole.notes)
    assert cut.estimate_s == pytest.approx(60e-6)
    assert whole.estimate_s is not None
    assert whole.estimate_s > 1
