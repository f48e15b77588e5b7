from __future__ import annotations

import dataclasses
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.runtime.plan import Plan, Variant
from replayssm_tune.tuner.choose import CurvePoint, Rules, Verdict, choose, simplicity, suspects
from replayssm_tune.tuner.meter import Budget, Meter
from replayssm_tune.tuner.records import Cell
from replayssm_tune.tuner.search import Space, compose, search
from replayssm_tune.tuner.store import Store
from tests.tuner.fake_bench import GPU, SPEC, FakeBench, default, default_plan, variants

CELL = Cell(SPEC, 1024)
PLANS = tuple(Plan((v,)) for v in variants("both"))


class TableBench(FakeBench):
    """Times and statuses by plan key; 100 µs and "ok" otherwise."""

    def __init__(
        self,
        times: dict[Plan, float],
        noise: float = 0.003,
        seed: int = 0,
        failing: dict[str, str] | None = None,
    ) -> None:
        super().__init__(noise=noise, failures=False, seed=seed)
        self._times = {plan.variants: time for plan, time in times.items()}
        self._failing = failing or {}

    def exact(self, cell: Cell, variants: tuple[Variant, ...], mode: str) -> float:
        return self._times.get(variants, 100.0)

    def status(self, variants: tuple[Variant, ...]) -> str:
        return self._failing.get(Plan(variants).key, "ok")


def decide(bench: FakeBench, path: Path, candidates: tuple[Plan, ...], **options: object) -> Verdict:
    meter = Meter(bench, Store(path, GPU), clock=bench.clock)
    return choose(CELL, candidates, meter, mode="mix", default=default_plan(), **options)  # type: ignore[arg-type]


def tune(bench: FakeBench, path: Path, batch: int = 1024) -> Verdict:
    meter = Meter(bench, Store(path, GPU), clock=bench.clock)
    both, nonflush, flush = (
        search(Space(SPEC, variants(role), default(role)), (batch,), meter)[batch]
        for role in ("both", "nonflush", "flush")
    )
    plans = compose(SPEC, both, nonflush, flush)
    return choose(Cell(SPEC, batch), plans, meter, mode="mix", default=default_plan())


def exact(plan: Plan | None, batch: int = 1024) -> float:
    assert plan is not None
    return FakeBench().exact(Cell(SPEC, batch), plan.variants, "mix")


@pytest.mark.parametrize("batch", [16, 1024, 65536])
@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_winner_is_never_worse_than_the_default_beyond_the_floor(
    tmp_path: Path, batch: int, noise: float
) -> None:
    for seed in range(2):
        verdict = tune(FakeBench(noise=noise, seed=seed), tmp_path / str(seed), batch)
        gain = exact(default_plan(), batch) / exact(verdict.winner, batch) - 1
        assert gain >= -verdict.noise_floor
        assert verdict.margin is not None
        assert verdict.default_time_us is not None
        assert verdict.margin == pytest.approx(gain, abs=max(0.01, 2 * verdict.noise_floor))
        assert verdict.kind in ("winner", "tie")
        assert verdict.margin > max(0.01, verdict.noise_floor)


def test_tuned_twice_the_same_cell_differs_by_at_most_the_floor(tmp_path: Path) -> None:
    excess = []
    for batch in (64, 4096):
        verdicts = [tune(FakeBench(noise=0.005, seed=s), tmp_path / f"{batch}.{s}", batch) for s in range(4)]
        times = [exact(v.winner, batch) for v in verdicts]
        floor = max(v.noise_floor for v in verdicts)
        excess += [time / min(times) - 1 - floor for time in times]
    # A floor is itself an estimate: one in eight may miss by a little, none by much.
    assert statistics.quantiles(excess, n=8)[-1] <= 0.005
    assert max(excess) <= 0.01


def test_default_wins_when_nothing_beats_it_by_one_percent(tmp_path: Path) -> None:
    times = {default_plan(): 100.0, **dict(zip(PLANS[1:6], (99.6, 99.5, 101, 102, 105), strict=True))}
    verdict = decide(TableBench(times, noise=0.0005), tmp_path / "s", PLANS[1:6])
    assert verdict.winner == default_plan()
    assert verdict.kind == "default"
    assert verdict.margin == 0.0
    assert "nothing beats the default by 1.0%" in verdict.reason
    assert verdict.time_us == verdict.default_time_us == statistics.median(verdict.samples_us)


def test_noise_does_not_make_a_winner(tmp_path: Path) -> None:
    """A/A at large: every plan is as fast as the default."""
    verdicts = [decide(TableBench({}, noise=0.02, seed=s), tmp_path / str(s), PLANS[:20]) for s in range(20)]
    assert sum(verdict.kind != "default" for verdict in verdicts) <= 2
    assert all(abs(v.margin or 0) <= 0.04 for v in verdicts)


def test_a_slow_default_stays_to_the_end(tmp_path: Path) -> None:
    times = {default_plan(): 400.0, PLANS[7]: 80.0}
    verdict = decide(TableBench(times), tmp_path / "s", PLANS)
    assert verdict.winner == PLANS[7]
    assert verdict.kind == "winner"
    assert verdict.default_time_us == pytest.approx(400, rel=0.03)
    assert verdict.margin == pytest.approx(4.0, rel=0.03)


def test_within_a_tie_incumbent_then_neighbour_then_simplest(tmp_path: Path) -> None:
    simple, plain, fancy = sorted(PLANS[8:11], key=simplicity)
    bench_times = {default_plan(): 120.0, PLANS[30]: 130.0, simple: 100.1, plain: 100.0, fancy: 100.05}
    rules = Rules(least_floor=0.004)

    def winner(name: str, **options: object) -> Verdict:
        bench = TableBench(bench_times, noise=0.001)
        return decide(bench, tmp_path / name, (plain, fancy, simple), rules=rules, **options)

    verdict = winner("a")
    assert verdict.winner == simple
    assert verdict.kind == "tie"
    assert "simplest of 3" in verdict.reason
    assert verdict.tied == tuple(sorted(p.key for p in (simple, plain, fancy)))
    assert winner("b", neighbours=(PLANS[30], plain)).winner == plain
    assert winner("c", neighbours=(plain,), incumbent=fancy).winner == fancy
    slower = {**bench_times, fancy: 104.0}
    bench = TableBench(slower, noise=0.001)
    assert decide(bench, tmp_path / "d", (plain, simple), incumbent=fancy).winner == simple


def test_a_tied_preference_must_beat_the_default_too(tmp_path: Path) -> None:
    """Within the floor of the fastest, yet less than 1 % better than the default."""
    times = {default_plan(): 101.2, PLANS[3]: 100.0, PLANS[4]: 100.35}
    verdict = decide(
        TableBench(times, noise=0.0002),
        tmp_path / "s",
        PLANS[3:5],
        neighbours=(PLANS[4],),
        rules=Rules(least_floor=0.005),
    )
    assert verdict.winner == PLANS[3]


def test_failures_in_any_phase_are_reported_not_raised(tmp_path: Path) -> None:
    times = {default_plan(): 120.0, PLANS[5]: 90.0, PLANS[6]: 95.0}
    bench = TableBench(times, failing={PLANS[5].key: "crash"})
    verdict = decide(bench, tmp_path / "a", PLANS[5:9])
    assert verdict.winner == PLANS[6]
    assert verdict.failed == ((PLANS[5].key, "crash: fake crash"),)

    class Late(TableBench):
        def status(self, variants: tuple[Variant, ...]) -> str:
            return "timeout" if len(self.calls) > 30 and variants == PLANS[5].variants else "ok"

    verdict = decide(Late(times), tmp_path / "b", PLANS[5:9])
    assert verdict.winner == PLANS[6]
    assert verdict.failed[0][1] == "timeout: fake timeout"


def test_without_a_default_the_fastest_wins_and_the_reason_says_so(tmp_path: Path) -> None:
    bench = TableBench({PLANS[5]: 90.0}, failing={default_plan().key: "resources"})
    verdict = decide(bench, tmp_path / "s", PLANS[5:9])
    assert verdict.winner == PLANS[5]
    assert verdict.margin is None
    assert verdict.default_time_us is None
    assert "the default did not run (resources" in verdict.reason


def test_nothing_runs(tmp_path: Path) -> None:
    bench = TableBench({}, failing={plan.key: "crash" for plan in (default_plan(), *PLANS[:3])})
    verdict = decide(bench, tmp_path / "s", PLANS[:3])
    assert verdict.winner is None
    assert verdict.kind == "none"
    assert "crash: fake crash" in verdict.reason


@pytest.mark.parametrize("stop_after", [3, 40, 90])
def test_an_interrupted_race_resumes_to_the_same_verdict(tmp_path: Path, stop_after: int) -> None:
    def bench(**options: int) -> FakeBench:
        return FakeBench(noise=0, drift=0, **options)  # type: ignore[arg-type]

    whole = bench()
    expected = decide(whole, tmp_path / "a", PLANS[:20])
    first, second = bench(stop_after=stop_after), bench()
    with pytest.raises(KeyboardInterrupt):
        decide(first, tmp_path / "b", PLANS[:20])
    assert decide(second, tmp_path / "b", PLANS[:20]) == expected
    assert first.calls + second.calls == whole.calls
    again = bench()
    assert decide(again, tmp_path / "b", PLANS[:20]) == expected
    assert again.calls == []
    assert decide(again, tmp_path / "b", PLANS[:20], attempt=1) == expected
    assert len(again.calls) == len(whole.calls)


def test_screened_times_of_the_search_are_not_measured_again(tmp_path: Path) -> None:
    bench = FakeBench(failures=False)
    meter = Meter(bench, Store(tmp_path / "s", GPU))
    ranking = search(Space(SPEC, variants("both"), default("both")), (1024,), meter)[1024]
    before = len(bench.calls)
    choose(CELL, [Plan((r.variant,)) for r in ranking], meter, mode="mix", default=default_plan())
    rules = Rules()
    assert len(bench.calls) - before <= 2 * (
        rules.rounds * rules.contenders + rules.final_rounds * (rules.finalists + 2)
    )


def test_a_spent_budget_still_ends_in_a_final(tmp_path: Path) -> None:
    bench = TableBench({PLANS[5]: 50.0})
    verdict = decide(bench, tmp_path / "s", PLANS[5:9], budget=Budget(points=3))
    assert verdict.winner == PLANS[5]
    assert len(verdict.samples_us) > 0
    assert len(bench.calls) <= 3 + 2 * 8 * 4


@given(st.lists(st.sampled_from(PLANS), min_size=2, max_size=2, unique=True))
@settings(deadline=None, max_examples=30)
def test_simplicity_is_a_total_order(pair: list[Plan]) -> None:
    a, b = map(simplicity, pair)
    assert (a < b) != (b < a)


def test_simplicity_prefers_fewer_launches_then_plainer_kernels() -> None:
    point = next(v for v in variants("both") if v.structure.coefficients == "inline")
    pair = Plan(
        tuple(
            dataclasses.replace(point, structure=dataclasses.replace(point.structure, role=role))
            for role in ("nonflush", "flush")
        )
    )
    heads = dataclasses.replace(point, tile=dataclasses.replace(point.tile, heads_per_program=4))
    dot = dataclasses.replace(point, structure=dataclasses.replace(point.structure, readout="dot"))
    order = [Plan((point,)), Plan((heads,)), Plan((dot,)), default_plan(), pair]
    shuffled = random.Random(1).sample(order, len(order))
    ranked = sorted(shuffled, key=simplicity)
    assert ranked[:3] == order[:3]
    assert set(ranked[3:]) == set(order[3:])


def test_suspects_of_a_curve() -> None:
    def points(*times: float, floor: float = 0.01) -> list[CurvePoint]:
        return [
            CurvePoint(2**i, t, floor, traffic_bytes=2**i * 1_000_000) for i, t in enumerate(times, start=4)
        ]

    assert suspects(points(4.0, 5.0, 8.0)) == {}
    assert suspects(points(5.0, 4.96, 8.0)) == {}, "within the floor"
    assert set(suspects(points(4.0, 9.0, 8.0, 16.0))) == {32, 64}
    assert set(suspects(points(20.0, 10.0, 16.0, 30.0))) == {16, 32, 64}
    above = suspects(points(4.0, 5.0, 8.0), peak_gbps=7_000)
    assert set(above) == {64}
    assert "8000 GB/s" in above[64]


def test_the_fastest_native_is_chosen_likewise(tmp_path: Path) -> None:
    bench = FakeBench(noise=0.002)
    meter = Meter(bench, Store(tmp_path / "s", GPU))
    space = Space(SPEC.native, variants("native"), default("native"))
    ranking = search(space, (1024,), meter)[1024]
    plans = [Plan((ranked.variant,)) for ranked in ranking]
    cell = Cell(SPEC.native, 1024)
    verdict = choose(cell, plans, meter, mode="native", default=Plan((default("native"),)))
    assert verdict.winner is not None
    best = min(bench.exact(cell, plan.variants, "native") for plan in plans)
    assert bench.exact(cell, verdict.winner.variants, "native") <= best * (1.002 + verdict.noise_floor)


def test_rounds_of_another_session_are_no_pairs(tmp_path: Path) -> None:
    """The default's kernel has changed and the GPU is slower today: all take part anew."""
    rival, first = PLANS[3], {default_plan(): 100.0, PLANS[3]: 95.0}
    assert decide(TableBench(first, noise=0.0), tmp_path / "s", (rival,)).winner == rival
    today = TableBench({default_plan(): 93.0 * 1.04, rival: 95.0 * 1.04}, noise=0.0)
    meter = Meter(
        today,
        Store(tmp_path / "s", GPU),
        clock=today.clock,
        digest=lambda cell, kernels: "new" if kernels == default_plan().variants else "",
    )
    verdict = choose(CELL, (rival,), meter, mode="mix", default=default_plan())
    assert verdict.winner == default_plan()
    assert verdict.time_us == pytest.approx(93.0 * 1.04, rel=0.02)


# One numerics class


def of_class(numerics: str) -> list[Plan]:
    return [plan for plan in PLANS if plan.numerics == numerics]


def test_only_plans_of_the_class_asked_for_win_and_the_verdict_says_what_that_costs(tmp_path):
    fast, slow = (
        next(p for p in PLANS if p.variants[0].structure.readout == r) for r in ("dot", "elementwise")
    )
    times = {fast: 50.0, slow: 60.0}
    verdict = decide(TableBench(times), tmp_path / "s", (slow,), numerics=slow.numerics, rivals=[fast])
    assert verdict.winner == slow
    assert verdict.kind == "winner"
    assert verdict.best == fast
    assert verdict.numerics == slow.numerics
    assert verdict.best_time_us == pytest.approx(50, rel=0.02)
    assert verdict.regret == pytest.approx(0.2, abs=0.02)
    assert "20" in verdict.reason or "19" in verdict.reason
    free = decide(TableBench(times), tmp_path / "t", (slow, fast))
    assert (free.winner, free.numerics, free.best, free.regret) == (fast, "", None, None)


def test_a_class_that_loses_to_the_default_still_serves(tmp_path):
    slow = next(p for p in PLANS if p.numerics != default_plan().numerics)
    times = {slow: 130.0, default_plan(): 100.0}
    verdict = decide(TableBench(times), tmp_path / "s", (slow,), numerics=slow.numerics)
    assert (verdict.winner, verdict.kind, verdict.best) == (slow, "class", default_plan())
    assert verdict.margin == pytest.approx(-0.23, abs=0.02)
    assert verdict.regret == pytest.approx(0.3, abs=0.02)


def test_a_class_that_does_not_run_gives_no_row(tmp_path):
    broken = next(p for p in PLANS if p.numerics != default_plan().numerics)
    bench = TableBench({}, failing={broken.key: "crash"})
    verdict = decide(bench, tmp_path / "s", (broken,), numerics=broken.numerics)
    assert (verdict.winner, verdict.kind, verdict.numerics) == (None, "none", broken.numerics)
