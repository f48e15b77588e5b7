from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from replayssm_tune.runtime.plan import Variant
from replayssm_tune.tuner.meter import Budget, Meter
from replayssm_tune.tuner.records import Cell, Event
from replayssm_tune.tuner.samplers import SAMPLERS
from replayssm_tune.tuner.search import Settings, Space, compose, search
from replayssm_tune.tuner.store import Store
from tests.tuner.fake_bench import GPU, SPEC, FakeBench, default, variants

BATCHES = (16, 64, 256, 1024, 4096, 16384, 65536)
SMALL = Space(SPEC, variants("nonflush"), default("nonflush"))


def optimum(bench: FakeBench, space: Space, batch: int) -> float:
    cell = Cell(SPEC, batch)
    runs = [v for v in space.variants if bench.status((v,)) == "ok"]
    return min(bench.exact(cell, (v,), space.mode) for v in runs)


def share(bench: FakeBench, space: Space, batch: int, variant: Variant) -> float:
    return optimum(bench, space, batch) / bench.exact(Cell(SPEC, batch), (variant,), space.mode)


def test_a_curve_costs_little_more_than_its_anchors(tmp_path: Path) -> None:
    bench = FakeBench()
    meter = Meter(bench, Store(tmp_path / "s", GPU), clock=bench.clock)
    curve = search(SMALL, BATCHES, meter)
    assert tuple(curve) == BATCHES
    visits = {b: sum(call[0] == Cell(SPEC, b).key for call in bench.calls) for b in BATCHES}
    for batch in (16, 1024, 65536):
        assert visits[batch] == len(SMALL.variants), "an anchor is enumerated"
    assert all(visits[b] <= 25 for b in (64, 256, 4096, 16384))
    assert len(bench.calls) == len(set(bench.calls)), "a point was measured twice"
    for batch, ranking in curve.items():
        times = [ranked.time_us for ranked in ranking]
        assert times == sorted(times)
        assert default("nonflush") in [ranked.variant for ranked in ranking]
        assert share(bench, SMALL, batch, ranking[0].variant) > 0.95


def test_failures_do_not_stop_a_run_and_are_not_repeated(tmp_path: Path) -> None:
    bench = FakeBench()
    meter = Meter(bench, Store(tmp_path / "s", GPU), clock=bench.clock)
    curve = search(SMALL, (256,), meter)
    statuses = {m.status for m in meter.store.measurements()}
    assert statuses == {"ok", "crash", "timeout", "gate"}
    assert all(bench.status((ranked.variant,)) == "ok" for ranked in curve[256])
    before = len(bench.calls)
    assert search(SMALL, (256,), meter) == curve
    assert len(bench.calls) == before


def test_a_cell_where_nothing_runs_has_an_empty_ranking(tmp_path: Path) -> None:
    class Broken(FakeBench):
        def status(self, variants: tuple[Variant, ...]) -> str:
            return "resources"

    meter = Meter(Broken(), Store(tmp_path / "s", GPU))
    assert search(SMALL, BATCHES, meter) == dict.fromkeys(BATCHES, ())


@pytest.mark.parametrize(
    ("stop_after", "interrupt"), [(0, KeyboardInterrupt), (30, RuntimeError), (101, KeyboardInterrupt)]
)
def test_an_interrupted_run_resumes_to_the_same_end(
    tmp_path: Path, stop_after: int, interrupt: type[BaseException]
) -> None:
    space = Space(SPEC, variants("nonflush", large=True)[::7], default("nonflush"))
    settings = Settings(sampled_points=40)
    whole = FakeBench(noise=0, drift=0)
    expected = search(space, BATCHES[:4], Meter(whole, Store(tmp_path / "a", GPU)), settings=settings)

    first = FakeBench(noise=0, drift=0, stop_after=stop_after, interrupt=interrupt)
    with pytest.raises(interrupt):
        search(space, BATCHES[:4], Meter(first, Store(tmp_path / "b", GPU)), settings=settings)
    second = FakeBench(noise=0, drift=0)
    resumed = search(space, BATCHES[:4], Meter(second, Store(tmp_path / "b", GPU)), settings=settings)
    assert resumed == expected
    assert first.calls + second.calls == whole.calls


def test_a_changed_module_is_measured_again(tmp_path: Path) -> None:
    bench = FakeBench()
    store = Store(tmp_path / "s", GPU)
    search(SMALL, (16,), Meter(bench, store, digest=lambda cell, variants: "old"))
    search(SMALL, (16,), Meter(bench, store, digest=lambda cell, variants: "new"))
    assert len(bench.calls) == 2 * len(SMALL.variants)


@pytest.mark.parametrize("budget", [Budget(points=90), Budget(seconds=0.9), Budget(0), Budget(seconds=0)])
def test_a_budget_is_kept_but_for_the_default(tmp_path: Path, budget: Budget) -> None:
    bench = FakeBench()
    meter = Meter(bench, Store(tmp_path / "s", GPU), clock=bench.clock)
    curve = search(SMALL, BATCHES, meter, budget)
    limit = 90 if budget in (Budget(points=90), Budget(seconds=0.9)) else 0
    assert len(bench.calls) <= limit + len(BATCHES)
    assert len(bench.calls) >= 0.8 * limit
    for ranking in curve.values():
        assert default("nonflush") in [ranked.variant for ranked in ranking]


def test_likely_points_are_tried_first_and_snapped_to_the_space(tmp_path: Path) -> None:
    bench = FakeBench()
    alien = dataclasses.replace(
        SMALL.variants[40], tile=dataclasses.replace(SMALL.variants[40].tile, max_registers=128)
    )
    meter = Meter(bench, Store(tmp_path / "s", GPU))
    search(SMALL, (256,), meter, likely=lambda batch: (SMALL.variants[70], alien))
    tried = [call[2] for call in bench.calls[:3]]
    assert tried == [default("nonflush").key, SMALL.variants[70].key, SMALL.variants[40].key]


def test_under_a_time_limit_every_batch_gets_its_likely_points(tmp_path: Path) -> None:
    bench = FakeBench()
    meter = Meter(bench, Store(tmp_path / "s", GPU), clock=bench.clock)

    def likely(batch: int) -> list[Variant]:
        by_time = {v: bench.exact(Cell(SPEC, batch), (v,), SMALL.mode) for v in SMALL.variants}
        return sorted(by_time, key=by_time.__getitem__)[10:40]

    search(SMALL, BATCHES, meter)
    tenth = Budget(seconds=bench.clock() / 10)
    worst = {}
    for name, hints in {"with": likely, "without": lambda batch: ()}.items():
        bench = FakeBench()
        meter = Meter(bench, Store(tmp_path / name, GPU), clock=bench.clock)
        curve = search(SMALL, BATCHES, meter, tenth, likely=hints)
        worst[name] = min(share(bench, SMALL, b, ranking[0].variant) for b, ranking in curve.items())
    assert worst["with"] > max(0.85, worst["without"])


def test_progress_reaches_its_total(tmp_path: Path) -> None:
    events: list[Event] = []
    meter = Meter(FakeBench(), Store(tmp_path / "s", GPU), progress=events.append)
    search(SMALL, BATCHES, meter)
    assert [event.done for event in events] == list(range(1, len(events) + 1))
    assert all(event.stage == "search" and event.new for event in events)
    assert events[0].total >= len(events) >= 0.7 * events[0].total


def test_the_model_finds_more_than_tpe_and_random_search(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Share of the optimum after 60 points out of thousands, over seeds."""
    space = Space(SPEC, variants("nonflush", large=True), default("nonflush"))
    found: dict[str, list[float]] = {}
    for sampler in ("model", "tpe", "random"):
        for seed in range(6):
            batch = (128, 32768)[seed % 2]
            bench = FakeBench(seed=seed)
            meter = Meter(bench, Store(tmp_path / f"{sampler}{seed}", GPU))
            settings = Settings(sampled_points=60, seed=seed, sampler=sampler)
            best = search(space, (batch,), meter, settings=settings)[batch][0].variant
            assert len(bench.calls) == 60
            found.setdefault(sampler, []).append(share(bench, space, batch, best))
        record_testsuite_property(f"share of optimum, {sampler}", sorted(found[sampler]))
    medians = {sampler: statistics.median(shares) for sampler, shares in found.items()}
    assert medians["model"] > medians["random"]
    assert medians["tpe"] > medians["random"] - 0.02
    assert medians["model"] > 0.95
    assert min(found["model"]) > 0.9


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_visits_each_point_once_in_an_optuna_study(name: str) -> None:
    points = variants("flush")[:40]
    bench = FakeBench(failures=False)
    sampler = SAMPLERS[name](points, 7)
    study = optuna.create_study(sampler=sampler)
    seen = []
    while not sampler.exhausted:
        trial = study.ask(sampler.distributions)
        seen.append(sampler.variant(trial))
        study.tell(trial, bench.exact(Cell(SPEC, 64), (seen[-1],), "flush"))
    assert sorted(seen) == sorted(points)
    assert (tuple(seen) == points) == (name == "enumerate")
    assert "flush.block_p" in study.trials[0].params
    with pytest.raises(RuntimeError, match="every point"):
        study.ask(sampler.distributions)
    with pytest.raises(NotImplementedError):
        optuna.create_study(sampler=SAMPLERS[name](points, 7)).ask().suggest_int("other", 0, 1)


def test_a_space_of_one_point(tmp_path: Path) -> None:
    space = Space(SPEC, (), default("both"))
    curve = search(space, (16, 32), Meter(FakeBench(), Store(tmp_path / "s", GPU)))
    assert [[r.variant for r in ranking] for ranking in curve.values()] == [[default("both")]] * 2


def test_a_space_has_one_role_and_its_default() -> None:
    space = Space(SPEC, variants("flush")[5:], default("flush"))
    assert default("flush") in space.variants
    assert space.mode == "flush"
    with pytest.raises(ValueError, match="one role"):
        Space(SPEC, variants("flush"), default("both"))


def test_composed_plans_mix_singles_and_the_best_pairs(tmp_path: Path) -> None:
    rankings = {}
    for role in ("both", "nonflush", "flush"):
        bench = FakeBench(noise=0, drift=0)
        meter = Meter(bench, Store(tmp_path / role, GPU))
        rankings[role] = search(Space(SPEC, variants(role), default(role)), (1024,), meter)[1024]
    plans = compose(SPEC, rankings["both"], rankings["nonflush"], rankings["flush"], few=3)
    assert len(plans) == len(set(plans)) == 3 * 3 + 6
    assert plans[0].variants == (rankings["nonflush"][0].variant, rankings["flush"][0].variant)
    assert plans[1].variants == (rankings["both"][0].variant,)
    assert compose(SPEC, (), rankings["nonflush"], ()) == ()
