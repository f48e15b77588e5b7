"""The measured pipeline from job to table and run file, with a bench that needs no GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from replayssm_tune.codegen import space, targets
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import candidates, choose, drawing, measured, models, report, run
from replayssm_tune.tuner.check import check
from replayssm_tune.tuner.errors import GateError, StoreError, UsageError
from replayssm_tune.tuner.gate import Verdict
from replayssm_tune.tuner.progress import Event, silent
from replayssm_tune.tuner.records import Cell, Environment, Timing
from replayssm_tune.tuner.request import Budget, Job, Target, materializing, resolve_work
from replayssm_tune.tuner.shapes import shape_for
from replayssm_tune.tuner.static import static_jobs

GPU = targets.find("H200")
HERE = Environment("NVIDIA H200", (9, 0), 132, "3.9.0", "2.13.0", "580.1")


class FakeBench:
    """Stands in for :class:`GpuBench`: early kernels win small batches, others large ones."""

    environment = HERE
    company = 0
    asked: list[tuple[str, Cell, str]]
    wrong: frozenset[str] = frozenset()
    interrupt_after: int | None = None

    def __init__(self, *paths: Path) -> None:
        del paths
        self.noise = random.Random(1)
        type(self).asked = []

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gate(self, spec: Spec, plan: Plan) -> Verdict:
        del spec
        wrong = any(v.key in self.wrong for v in plan.variants)
        return Verdict("output error 1 exceeds 0.1" if wrong else "")

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        self.asked.append((mode, cell, "+".join(v.key for v in variants)))
        if self.interrupt_after is not None and len(self.asked) > self.interrupt_after:
            raise KeyboardInterrupt
        time_us = 3.0 + 0.01 * cell.effective_batch * (2 if mode in ("flush", "native", "materialize") else 1)
        for variant in variants:
            early = variant.structure.load == "early"
            time_us += 1.0 + (0.005 * cell.effective_batch if early else 0.6)
        return Timing(tuple(time_us * self.noise.uniform(0.999, 1.001) for _ in range(repeats)))

    def roof(self, cell: Cell, kind: str, repeats: int) -> Timing:
        time_us = 1.0 + 0.008 * cell.effective_batch * (2 if kind == "scale" else 1)
        return Timing((time_us,) * repeats)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compile cache for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> type[FakeBench]:
    """A small space and a fake bench, in place of the real ones."""
    everything = space.points

    @functools.cache
    def few(spec: Spec, role: str) -> space.Space:
        points = everything(spec, role)
        late = [v for v in points.variants if v.structure.load == "late"][:2]
        early = [v for v in points.variants if v.structure.load == "early"][:1]
        return dataclasses.replace(points, variants=tuple(dict.fromkeys((*late, *early))))

    bench = type("Bench", (FakeBench,), {})
    monkeypatch.setattr(space, "points", few)
    monkeypatch.setattr(run, "GpuBench", bench)
    monkeypatch.setattr(run, "check_toolchain", lambda launching=False: "")
    monkeypatch.setattr(run, "cache_folder", lambda store: compiled)
    return bench


def job(
    folder: Path,
    batches: tuple[int, ...] = (1, 64),
    budget: Budget | None = None,
    drafts: int = 0,
    rings: tuple[str, ...] = (),
    activations: tuple[str, ...] = (),
) -> Job:
    work, _ = resolve_work(
        [models.find("nemotron-3-super-120b-a12b")],
        GPU,
        tensor_parallel=(8,),
        activation_dtypes=activations,
        state_dtypes=("fp32",),
        ring_dtypes=rings,
        drafts=(drafts,),
        batches=batches,
    )
    target = Target(GPU, True, "measuring on NVIDIA H200")
    return Job(target, work, budget or Budget(), folder / "store", folder / "generated")


def test_a_tune_writes_table_kernels_and_run_file_and_resumes(
    fake: type[FakeBench], tmp_path: Path, compiled: Path
) -> None:
    events: list[Event] = []
    warm = any(compiled.glob("*/*"))
    tuned = run.tune(job(tmp_path), events.append, tmp_path / "results")
    assert not tuned.missing
    table = load(tmp_path / "generated" / "tables" / "h200.json")
    rows = {(row.spec.op, row.effective_batch): row for row in table.rows}
    assert set(rows) == {(op, batch) for op in ("step", "native_step") for batch in (16, 1024)}
    small, large = rows["step", 16], rows["step", 1024]
    assert small.plan.variants[0].structure.load == "early"
    assert large.plan.variants[0].structure.load == "late"
    assert small.source == "measured"
    assert small.time_us is not None
    assert small.roof_time_us is not None
    assert small.roof_time_us < small.time_us
    assert {spec.name for spec in (tmp_path / "generated" / "kernels").glob("*.py")} >= {"cursors.py"}
    assert events[0].phase == "compile"
    assert all(served.step == "user" for served in tuned.served)

    (path,) = (tmp_path / "results").glob("*.json")
    data = json.loads(path.read_text())
    cell = next(c for c in data["cells"] if c["effective_batch"] == 1024)
    assert cell["time_us"]["mix"] == pytest.approx(large.time_us, rel=1e-3)
    assert cell["roof_us"]["scale"] > cell["roof_us"]["read"]
    assert len(cell["samples_us"]["mix"]) > 2
    assert data["environment"]["gpu"] == "NVIDIA H200"
    assert data["totals"]["tune_minutes"] > 0
    assert data["totals"]["resumed"] == warm

    asked = len(fake.asked)
    assert asked > 50
    again = run.tune(job(tmp_path), silent, tmp_path / "again")
    assert fake.asked == [], "everything was remembered"
    assert again.table.rows == tuned.table.rows
    (path,) = (tmp_path / "again").glob("*.json")
    assert json.loads(path.read_text())["totals"]["resumed"]


def test_other_processes_on_the_gpu_are_told_and_recorded(
    fake: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for company, told in ((0, ""), (1, "another process computed"), (2, "2 other processes computed")):
        monkeypatch.setattr(fake, "company", company)
        tuned = run.tune(job(tmp_path), silent, tmp_path / str(company))
        notes = [note for note in tuned.notes if "computed on this GPU" in note]
        assert [note.startswith(told) for note in notes] == ([True] if told else [])
        (path,) = (tmp_path / str(company)).glob("*.json")
        assert json.loads(path.read_text())["environment"]["other_processes"] == company


def invariant(folder: Path, **options: Any) -> Job:
    return dataclasses.replace(job(folder, **options), batch_invariant=True)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_batch_invariant_tune_serves_one_class_and_says_what_that_costs(
    fake: type[FakeBench], tmp_path: Path, drafts: int
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


def test_an_interrupted_batch_invariant_tune_goes_on(fake: type[FakeBench], tmp_path: Path) -> None:
    run.tune(invariant(tmp_path / "whole"), silent)
    whole = len(fake.asked)
    fake.interrupt_after = whole - 20  # among the races of the class
    with pytest.raises(KeyboardInterrupt):
        run.tune(invariant(tmp_path), silent)
    fake.interrupt_after = None
    tuned = run.tune(invariant(tmp_path), silent)
    assert 0 < len(fake.asked) <= 21
    assert len(tuned.invariant) == 2


def test_a_spent_budget_still_gives_rows_of_one_class(fake: type[FakeBench], tmp_path: Path) -> None:
    tuned = run.tune(invariant(tmp_path, budget=Budget(trials=3)), silent)
    assert not tuned.missing
    (work,) = job(tmp_path).work
    rows = [row for row in tuned.table.rows if row.spec == work.spec]
    assert {(row.batch_invariant, row.plan.numerics) for row in rows} == {
        (True, default_plan(work.spec).numerics)
    }


def test_rows_that_would_break_the_promise_go_and_a_plain_tune_ends_it(
    fake: type[FakeBench], tmp_path: Path
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
    fake: type[FakeBench], tmp_path: Path
) -> None:
    run.tune(job(tmp_path), silent)
    static = dataclasses.replace(invariant(tmp_path), target=Target(GPU, False, "static"))
    with pytest.raises(UsageError, match="not batch-invariant") as error:
        run.tune(static, silent)
    assert "another --output" in error.value.hint


def test_drafts_are_tuned_beside_a_baseline_that_keeps_a_state_for_each(
    fake: type[FakeBench], tmp_path: Path
) -> None:
    here = job(tmp_path, drafts=3)
    (work,) = here.work
    assert work.spec.verifies
    assert work.spec.num_tokens == 4
    tuned = run.tune(here, silent, tmp_path / "results")
    assert not tuned.missing
    assert not tuned.gate_failures
    table = load(tmp_path / "generated" / "tables" / "h200.json")
    rows = {(row.spec.op, row.effective_batch): row for row in table.rows}
    assert set(rows) == {(op, batch) for op in ("verify", "native_verify") for batch in (16, 1024)}
    for batch in (16, 1024):
        step, native = rows["verify", batch], rows["native_verify", batch]
        assert step.spec == work.spec
        assert native.spec == work.spec.native
        assert step.native_time_us == native.time_us
        read_us, scale_us = (1.0 + 0.008 * batch * n for n in (1, 2))
        # Of 16 ring tokens, 3 kept of every 4: 3 of 15 lengths leave no room for another 4.
        assert step.roof_time_us == pytest.approx(read_us + (scale_us - read_us) / 5, rel=1e-4)
        assert step.flush_roof_us == pytest.approx(scale_us, rel=1e-4)
        assert native.roof_time_us == native.flush_roof_us
        assert native.roof_time_us == pytest.approx(read_us + 4 * (scale_us - read_us), rel=1e-4)
    modes = {(cell.spec.op, mode) for mode, cell, _ in fake.asked}
    assert {("verify", mode) for mode in ("mix", "nonflush", "flush")} <= modes
    default = default_plan(work.spec)
    assert ("mix", Cell(work.spec, 16), default.key) in fake.asked, "the default is always a candidate"
    (path,) = (tmp_path / "results").glob("*.json")
    recorded = json.loads(path.read_text())
    assert path.stem.endswith("-t4-fp32"), "runs of several T of one model do not meet in one file"
    assert recorded["totals"]["scope"].endswith(", T 4, fp32 state")
    (cell, *_) = recorded["cells"]
    assert cell["spec"] == work.spec.key
    assert cell["flush_share"] == 0.2
    steps = [b for mode, b, _ in fake.asked if mode == "native" and b.spec == work.spec.native_step]
    assert {b.effective_batch for b in steps} == {16, 1024}
    one_us = 3.0 + 0.02 * cell["effective_batch"]
    for mode, alone_us in cell["launch_us"].items():
        assert cell["launch_names"][mode].startswith(mode)
        assert 0 < alone_us < cell["time_us"]["mix"] * 2
    assert set(cell["launch_us"]) == {"nonflush", "flush"}
    assert cell["native_steps_us"] == pytest.approx(4 * (one_us + 1.6), rel=2e-3), "a row has 4 tokens"
    assert cell["roof_us"]["mix"] == pytest.approx(rows["verify", 16].roof_time_us, rel=1e-4)
    assert all(served.step == "user" for served in tuned.served)

    fake.asked.clear()
    run.tune(here, silent)
    assert fake.asked == [], "everything was remembered"


def test_rings_of_two_dtypes_share_a_baseline_and_are_named(fake: type[FakeBench], tmp_path: Path) -> None:
    here = job(tmp_path, rings=("bf16", "fp32"))
    narrow, wide = here.work
    # More batches of one ring than of the other, as where memory ends.
    here = dataclasses.replace(here, work=(narrow, dataclasses.replace(wide, effective_batches=(16,))))
    tuned = run.tune(here, silent, tmp_path / "results")
    assert not tuned.missing
    native = narrow.spec.native
    assert wide.spec.native == native
    assert [row.key for row in tuned.table.rows] == sorted(
        [*((spec, batch) for spec in (narrow.spec, native) for batch in (16, 1024)), (wide.spec, 16)]
    )
    times_us = {row.key: (row.time_us, row.native_time_us) for row in tuned.table.rows}
    assert times_us[wide.spec, 16][1] == times_us[narrow.spec, 16][1] == times_us[native, 16][0]
    assert {plan.spec: plan.effective_batches for plan in tuned.specs} == {
        narrow.spec: (16, 1024), native: (16, 1024), wide.spec: (16,),
    }  # fmt: skip
    assert len(tuned.specs) == 3
    (path,) = (tmp_path / "results").glob("*.json")
    assert path.stem.endswith("120b-a12b-fp32-rbf16-rfp32")
    recorded = json.loads(path.read_text())
    assert recorded["totals"]["scope"].endswith(", fp32 state, bf16 and fp32 ring")
    assert [cell["spec"] for cell in recorded["cells"]] == [narrow.spec.key, narrow.spec.key, wide.spec.key]


@pytest.mark.parametrize(
    ("activations", "rings", "name", "scope"),
    [
        ((), ("fp32",), "-fp32-rfp32", ", fp32 state, fp32 ring"),
        (("fp16",), (), "-xfp16-fp32", ", fp16 activations, fp32 state"),
    ],
)
def test_a_run_of_dtypes_that_are_not_the_default_says_so(
    fake: type[FakeBench],
    tmp_path: Path,
    activations: tuple[str, ...],
    rings: tuple[str, ...],
    name: str,
    scope: str,
) -> None:
    here, _ = with_materializing(job(tmp_path, batches=(1,), drafts=3, rings=rings, activations=activations))
    run.tune(here, silent, tmp_path / "results")
    run.bench(here, tmp_path / "results", silent)
    names = sorted(path.stem.partition("nemotron")[2] for path in (tmp_path / "results").glob("*.json"))
    assert names == [f"-3-super-120b-a12b-t4{name}"] * 2
    for path in (tmp_path / "results").glob("*.json"):
        totals = json.loads(path.read_text())["totals"]
        assert totals["scope"].endswith(f", T 4{scope}")


def with_materializing(here: Job) -> tuple[Job, Spec]:
    """The job as the command line makes it, and the spec of what materialises its states."""
    (folds,) = materializing(here.work, GPU)
    return dataclasses.replace(here, work=(*here.work, folds)), folds.spec


def test_what_materialises_states_is_tuned_beside_the_steps(fake: type[FakeBench], tmp_path: Path) -> None:
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
    text = StringIO()
    drawing.draw_tuned(json.loads(json.dumps(data)), Console(file=text, width=300))
    assert "materialize" in text.getvalue()

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
    fake: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    fake: type[FakeBench], tmp_path: Path
) -> None:
    here, spec = with_materializing(job(tmp_path, (1,)))
    fake.wrong = frozenset({default_plan(spec).key})
    with pytest.raises(GateError, match="default plan of mamba2-materialize"):
        run.tune(here, silent)


def test_one_numerics_class_of_what_materialises_states_may_serve_all_batches(
    fake: type[FakeBench], tmp_path: Path
) -> None:
    here, spec = with_materializing(invariant(tmp_path))
    tuned = run.tune(here, silent)
    assert not tuned.missing
    rows = [row for row in tuned.table.rows if row.spec == spec]
    assert [(row.effective_batch, row.batch_invariant) for row in rows] == [(16, True), (1024, True)]
    assert len({row.plan.numerics for row in rows}) == 1
    assert [cost.effective_batch for cost in tuned.invariant if cost.spec == spec] == [16, 1024]


def test_a_budget_is_mostly_for_steps(tmp_path: Path) -> None:
    here, _ = with_materializing(job(tmp_path))
    assert [measured.budget_share(work) for work in here.work] == [pytest.approx(1.0), 0.2]


def test_a_short_budget_still_compiles_both_kernels_of_a_default(
    fake: type[FakeBench], tmp_path: Path
) -> None:
    tuned = run.tune(job(tmp_path, budget=Budget(minutes=1e-6), drafts=3), silent)
    assert not tuned.missing
    assert {row.plan for row in tuned.table.rows} == {default_plan(row.spec) for row in tuned.table.rows}


def test_an_interrupted_tune_loses_nothing(fake: type[FakeBench], tmp_path: Path) -> None:
    fake.interrupt_after = 40
    with pytest.raises(KeyboardInterrupt):
        run.tune(job(tmp_path), silent)
    fake.interrupt_after = None
    run.tune(job(tmp_path), silent)
    resumed = len(fake.asked)
    run.tune(job(tmp_path / "whole"), silent)
    assert resumed == len(fake.asked) - 40


def test_what_fails_the_gate_is_never_timed(fake: type[FakeBench], tmp_path: Path) -> None:
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


def test_a_wrong_default_ends_the_tune(fake: type[FakeBench], tmp_path: Path) -> None:
    spec = job(tmp_path).work[0].spec
    fake.wrong = frozenset({default_plan(spec).variants[0].key})
    with pytest.raises(GateError, match="default plan"):
        run.tune(job(tmp_path), silent)


def test_a_store_of_another_gpu_is_refused(fake: type[FakeBench], tmp_path: Path) -> None:
    run.tune(job(tmp_path, (1,)), silent)
    fake.environment = dataclasses.replace(HERE, gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(StoreError, match="choose another store"):
        run.tune(job(tmp_path, (1,)), silent)


def test_a_spent_budget_still_gives_every_cell_a_row(fake: type[FakeBench], tmp_path: Path) -> None:
    tuned = run.tune(job(tmp_path, budget=Budget(trials=3)), silent)
    assert not tuned.missing
    assert len(tuned.table.rows) == 4


def test_a_short_budget_still_uses_what_the_search_found(fake: type[FakeBench], tmp_path: Path) -> None:
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


def test_a_budget_ends_compiling(fake: type[FakeBench], tmp_path: Path) -> None:
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


def test_winners_of_a_sister_are_tried_first(
    fake: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "shipped_tables", lambda: ())
    sister = dataclasses.replace(job(tmp_path).work[0].spec, heads_per_group=8)
    (work, *_) = job(tmp_path).work
    here = job(tmp_path)
    other = dataclasses.replace(here, work=(dataclasses.replace(work, spec=sister, effective_batches=(16,)),))
    run.tune(other, silent)
    tuned = load(tmp_path / "generated" / "tables" / "h200.json")
    (winner,) = (row.plan.variants[0] for row in tuned.rows if row.spec == sister)
    run.tune(dataclasses.replace(here, store=tmp_path / "another"), silent)
    cell = Cell(work.spec, 16)
    tried = [subject for mode, of, subject in fake.asked if of == cell and mode == "mix"]
    assert winner != default_plan(sister).variants[0]
    assert tried[:2] == [default_plan(work.spec).variants[0].key, winner.key]


def test_a_row_that_was_not_compared_with_the_default_is_measured_again(
    fake: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = {"failed": False}
    default = default_plan(job(tmp_path).work[0].spec)
    time = fake.time

    def flaky(self: FakeBench, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        timing = time(self, cell, variants, mode, repeats)
        if mode == "mix" and variants == default.variants and not once["failed"]:
            once["failed"] = True
            return Timing((), "timeout", "took more than 60 s")
        return timing

    monkeypatch.setattr(fake, "time", flaky)
    tuned = run.tune(job(tmp_path), silent)
    assert once["failed"]
    assert all(row.default_time_us is not None for row in tuned.table.rows)


def test_a_compared_row_does_not_give_way_to_one_that_is_not(
    fake: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both batches are measured again for not fitting a curve; this time nothing runs."""
    time = fake.time

    def odd(self: FakeBench, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        if mode == "mix" and broken["now"]:
            return Timing((), "timeout", "took more than 60 s")
        timing = time(self, cell, variants, mode, repeats)
        if mode == "mix" and cell.effective_batch == 1024:  # faster than a small batch
            return Timing(tuple(us / 10 for us in timing.samples_us))
        return timing

    broken = {"now": False}
    again = choose.suspects

    def suspects(*arguments: Any) -> dict[int, str]:
        broken["now"] = True
        return again(*arguments)

    monkeypatch.setattr(fake, "time", odd)
    monkeypatch.setattr(measured, "suspects", suspects)
    tuned = run.tune(job(tmp_path), silent)
    assert broken["now"]
    assert not tuned.missing
    assert all(row.default_time_us is not None for row in tuned.table.rows)


@pytest.mark.parametrize("drafts", [0, 3])
def test_bench_times_what_is_served_and_remembers_nothing(
    fake: type[FakeBench], tmp_path: Path, drafts: int
) -> None:
    here = job(tmp_path, (64,), drafts=drafts)
    run.bench(here, tmp_path / "results", silent)
    first = len(fake.asked)
    tuned = run.bench(here, tmp_path / "results", silent)
    assert len(fake.asked) == first > 0
    assert len(tuned.table.rows) == 1
    one, other = (tmp_path / "results").glob("*.json")
    assert all(json.loads(path.read_text())["what"].startswith("bench-") for path in (one, other))


@pytest.mark.parametrize("heads_per_group", [1, 8, 12, 16])
def test_shapes_are_whole_groups_near_the_batch_asked_for(heads_per_group: int) -> None:
    spec = dataclasses.replace(job(Path()).work[0].spec, heads_per_group=heads_per_group)
    for batch in (8, 16, 24, 192, 1000, 32768):
        shape = shape_for(spec, batch)
        assert shape.heads % heads_per_group == 0
        assert shape.effective_batch == shape.rows * shape.heads
        # Whole groups, and the same number of them in every sequence.
        slack = heads_per_group * shape.rows / 2 + heads_per_group / 2
        assert abs(shape.effective_batch - batch) <= max(slack, heads_per_group - batch)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_branch_goes_through_the_gate_with_a_partner(drafts: int) -> None:
    spec = job(Path(), drafts=drafts).work[0].spec
    for role in ("both", "nonflush", "flush"):
        for variant in space.points(spec, role).variants[:3]:
            plan = measured.gate_plan(spec, variant)
            assert variant in plan.variants
            assert plan.roles == (("both",) if role == "both" else ("nonflush", "flush"))
            assert all(space.broken_constraint(spec, v) == "" for v in plan.variants)


def test_a_plan_without_the_gpu_compiles_what_a_static_tune_would(tmp_path: Path) -> None:
    here = dataclasses.replace(job(tmp_path, budget=Budget(trials=8)), target=Target(GPU, False, "static"))
    planned = run.plan(here, silent)
    asked = static_jobs(here)
    assert planned.static
    assert 4 <= len(asked) <= 8
    for plan in planned.specs:
        compiled = sum(spec == plan.spec for spec, _ in asked)
        dropped = {d.reason: d.count for d in plan.dropped}
        constraints = sum(count for reason, count in dropped.items() if reason.startswith("constraint"))
        assert plan.kept <= compiled
        assert plan.points == compiled + dropped["less promising, not compiled"] + constraints
    assert planned.estimate_s is not None
    assert planned.estimate_s > 0


@pytest.mark.parametrize("here", [True, False], ids=["measured", "static"])
def test_a_time_ends_a_plan_and_what_is_left_is_told(
    fake: type[FakeBench], tmp_path: Path, here: bool
) -> None:
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
