"""Choosing one numerics class for all batches of a spec."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.tuner.choose import Verdict
from replayssm_tune.tuner.invariance import CLASS_PLANS, Classes, best_class, of_class
from replayssm_tune.tuner.meter import Budget, Meter
from replayssm_tune.tuner.search import Ranked
from replayssm_tune.tuner.store import Store
from tests.tuner.fake_bench import GPU, SPEC, FakeBench


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
