"""Choosing one numerics class for all batches of a spec, and tunes that do."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import request, run
from replayssm_tune.tuner.choose import Verdict
from replayssm_tune.tuner.errors import UsageError
from replayssm_tune.tuner.invariance import CLASS_PLANS, Classes, best_class, of_class
from replayssm_tune.tuner.meter import Budget, Meter
from replayssm_tune.tuner.progress import silent
from replayssm_tune.tuner.request import Job, Target
from replayssm_tune.tuner.search import Ranked
from replayssm_tune.tuner.store import Store
from tests.tuner.fake_bench import GPU, SPEC, FakeBench
from tests.tuner.tunes import GPU as H200
from tests.tuner.tunes import FakeGpu, job, with_materializing


def plan(block_p: int, registers: int = 0) -> Plan:
    return Plan((Variant(Structure("both"), Tile(block_p, 128, 64, max_registers=registers)),))


DEFAULT, SMALL, LARGE = plan(16), plan(8), plan(64)


def test_the_class_with_the_least_geometric_mean_wins() -> None:
    times = [{DEFAULT: 10.0, SMALL: 8.0, LARGE: 12.0}, {DEFAULT: 30.0, SMALL: 60.0, LARGE: 20.0}]
    # Regrets: default 1.25 x 1.5, small 1 x 3, large 1.5 x 1.
    assert best_class(times, DEFAULT) == LARGE.numerics
    assert best_class(times[:1], DEFAULT) == SMALL.numerics


def test_a_class_is_as_good_as_its_best_plan_at_each_batch() -> None:
    few, many = plan(8), plan(8, registers=128)
    times = [{DEFAULT: 10.0, few: 8.0, many: 20.0}, {DEFAULT: 30.0, few: 60.0, many: 28.0}]
    assert few.numerics == many.numerics
    assert best_class(times, DEFAULT) == few.numerics


def test_equals_give_way_to_the_default_and_gaps_to_what_ran() -> None:
    assert best_class([{SMALL: 10.0, DEFAULT: 10.004}], DEFAULT) == DEFAULT.numerics
    assert best_class([{SMALL: 10.0, DEFAULT: 10.2}], DEFAULT) == SMALL.numerics
    assert best_class([{DEFAULT: 10.0, SMALL: 5.0}, {DEFAULT: 10.0}], DEFAULT) == DEFAULT.numerics
    assert best_class([{LARGE: 1.0}, {LARGE: 2.0}], DEFAULT) == LARGE.numerics, "the default did not run"
    assert best_class([], DEFAULT) == DEFAULT.numerics


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=1, max_size=6))
def test_no_class_has_a_smaller_mean_than_the_chosen_one(rows: list[tuple[float, ...]]) -> None:
    plans = (DEFAULT, SMALL, LARGE)
    times = [dict(zip(plans, row, strict=True)) for row in rows]
    means = {p.numerics: sum(math.log(t[p] / min(t.values())) for t in times) / len(times) for p in plans}
    assert means[best_class(times, DEFAULT)] <= min(means.values()) + 1.001e-3


def test_plans_of_a_class_are_made_of_what_was_ranked() -> None:
    reads = [Variant(Structure("nonflush"), Tile(16, 128, max_registers=cap)) for cap in (0, 96, 128)]
    folds = [Variant(Structure("flush"), Tile(16, 128, 64, evict_first=first)) for first in (False, True)]
    other = Variant(Structure("flush"), Tile(32, 128, 64))
    rankings = [tuple(Ranked(v, float(i)) for i, v in enumerate(vs)) for vs in (reads, (other, *folds))]
    wanted = Plan((reads[0], folds[0])).numerics
    assert of_class(wanted, rankings, few=1) == (Plan((reads[0], folds[0])),)
    assert len(of_class(wanted, rankings)) == 4
    assert of_class(SMALL.numerics, rankings) == ()


def test_classes_are_timed_at_every_batch_and_never_twice(tmp_path: Path) -> None:
    won = {16: SMALL, 1024: LARGE}
    verdicts = {b: Verdict(p, 1.0, 1.0, 0.0, 0.01, (1.0,), "winner", "") for b, p in won.items()}
    more = tuple(Ranked(plan(64, cap).variants[0], float(cap)) for cap in (96, 128, 168, 224))
    rankings = {role: dict.fromkeys(won, ()) for role in ("nonflush", "flush")}
    classes = Classes(SPEC, verdicts, {**rankings, "both": {16: (), 1024: more}})
    assert classes.plans(16, LARGE.numerics)[0] == LARGE
    assert len(classes.plans(1024, LARGE.numerics)) <= CLASS_PLANS
    bench = FakeBench(failures=False)
    meter = Meter(bench, Store(tmp_path / "store", GPU), clock=bench.clock)
    chosen = classes.choose(meter, Budget(), 3)
    timed = {(cell, subject) for cell, _, subject in bench.calls}
    assert len(timed) == len(bench.calls)
    assert len({cell for cell, _ in timed}) == 2
    assert {SMALL.key, LARGE.key} <= {subject for _, subject in timed}
    assert classes.choose(meter, Budget(), 3) == chosen
    assert len(timed) == len(bench.calls), "everything was remembered"


def test_without_a_budget_the_default_alone_is_timed(tmp_path: Path) -> None:
    verdict = Verdict(SMALL, 1.0, 1.0, 0.0, 0.01, (1.0,), "winner", "")
    rankings = {role: dict.fromkeys((16, 64), ()) for role in ("both", "nonflush", "flush")}
    bench = FakeBench(failures=False)
    meter = Meter(bench, Store(tmp_path / "store", GPU), clock=bench.clock)
    classes = Classes(SPEC, dict.fromkeys((16, 64), dataclasses.replace(verdict)), rankings)
    assert classes.choose(meter, Budget(points=0), 3) != SMALL.numerics
    assert len(bench.calls) == 2


def invariant(folder: Path, **options: Any) -> Job:
    return dataclasses.replace(job(folder, **options), batch_invariant=True)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_batch_invariant_tune_serves_one_class_and_says_what_that_costs(
    fake: type[FakeGpu], tmp_path: Path, drafts: int
) -> None:
    here = invariant(tmp_path, drafts=drafts)
    (work,) = here.work
    tuned = run.tune(here, silent, tmp_path / "results")
    assert not tuned.missing
    rows = [row for row in load(Path(tuned.table_path)).rows if row.spec == work.spec]
    assert [row.effective_batch for row in rows] == [16, 1024]
    assert all(row.batch_invariant for row in rows)
    assert len({row.plan.numerics for row in rows}) == 1
    assert not any(row.batch_invariant for row in tuned.table.rows if row.spec.is_native)
    assert [(c.spec, c.effective_batch) for c in tuned.invariant] == [(work.spec, 16), (work.spec, 1024)]
    for cost, row in zip(tuned.invariant, rows, strict=True):
        assert cost.plan == row.plan
        assert cost.regret == pytest.approx(cost.time_us / cost.best_time_us - 1, abs=5e-3)
        assert f"{cost.regret:.1%} slower than the best of any numerics class" in row.verdict
    for served in tuned.served:
        assert (served.step, served.plan.numerics) == ("user", rows[0].plan.numerics)
        assert "batch-invariant" in served.reason
    if not drafts:  # early kernels win small batches, others large ones
        small, large = tuned.invariant
        assert small.best.variants[0].structure.load == "early"
        assert large.plan.variants[0].structure.load == "late"
        assert small.regret == pytest.approx(4.76 / 4.24 - 1, abs=0.02)
        assert large.regret == pytest.approx(0, abs=5e-3)
    (path,) = (tmp_path / "results").glob("*.json")
    assert "batch-invariant" in path.name

    again = run.tune(here, silent)
    assert fake.asked == [], "everything was remembered"
    assert again.table.rows == tuned.table.rows
    assert again.invariant == tuned.invariant


def test_an_interrupted_batch_invariant_tune_goes_on(fake: type[FakeGpu], tmp_path: Path) -> None:
    run.tune(invariant(tmp_path / "whole"), silent)
    whole = len(fake.asked)
    fake.interrupt_after = whole - 20  # among the races of the class
    with pytest.raises(KeyboardInterrupt):
        run.tune(invariant(tmp_path), silent)
    fake.interrupt_after = None
    tuned = run.tune(invariant(tmp_path), silent)
    assert 0 < len(fake.asked) <= 21
    assert len(tuned.invariant) == 2


def test_a_spent_budget_still_gives_rows_of_one_class(fake: type[FakeGpu], tmp_path: Path) -> None:
    tuned = run.tune(invariant(tmp_path, budget=request.Budget(trials=3)), silent)
    assert not tuned.missing
    (work,) = job(tmp_path).work
    rows = [row for row in tuned.table.rows if row.spec == work.spec]
    assert {(row.batch_invariant, row.plan.numerics) for row in rows} == {
        (True, default_plan(work.spec).numerics)
    }


def test_rows_that_would_break_the_promise_go_and_a_plain_tune_ends_it(
    fake: type[FakeGpu], tmp_path: Path
) -> None:
    run.tune(job(tmp_path, (1, 8, 64)), silent)
    kept = run.tune(invariant(tmp_path), silent)
    spec = job(tmp_path).work[0].spec
    assert {row.effective_batch for row in kept.table.rows if row.spec == spec} == {16, 1024}
    assert any("1 rows of other numerics classes were left out" in note for note in kept.notes)
    plain = run.tune(job(tmp_path), silent)
    assert not any(row.batch_invariant for row in plain.table.rows)
    assert any("no longer batch-invariant" in note for note in plain.notes)


def test_estimates_that_promise_one_class_are_refused_beside_measured_rows(
    fake: type[FakeGpu], tmp_path: Path
) -> None:
    run.tune(job(tmp_path), silent)
    static = dataclasses.replace(invariant(tmp_path), target=Target(H200, False, "static"))
    with pytest.raises(UsageError, match="not batch-invariant") as error:
        run.tune(static, silent)
    assert "another --output" in error.value.hint


def test_one_numerics_class_of_what_materialises_states_may_serve_all_batches(
    fake: type[FakeGpu], tmp_path: Path
) -> None:
    here, spec = with_materializing(invariant(tmp_path))
    tuned = run.tune(here, silent)
    assert not tuned.missing
    rows = [row for row in tuned.table.rows if row.spec == spec]
    assert [(row.effective_batch, row.batch_invariant) for row in rows] == [(16, True), (1024, True)]
    assert len({row.plan.numerics for row in rows}) == 1
    assert [cost.effective_batch for cost in tuned.invariant if cost.spec == spec] == [16, 1024]
