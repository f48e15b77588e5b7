"""The measured pipeline from job to table and run file, with a bench that needs no GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.codegen import space
from replayssm_tune.codegen.compile import Compiled
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import CompileError
from replayssm_tune.runtime.plan import Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import load
from replayssm_tune.tuner import choose, measured, run, static
from replayssm_tune.tuner.admission import gate_plan
from replayssm_tune.tuner.errors import StoreError
from replayssm_tune.tuner.progress import Event, Report, silent
from replayssm_tune.tuner.records import Cell, Timing
from replayssm_tune.tuner.request import Budget, Job, Target
from replayssm_tune.tuner.static import StaticTune, static_jobs
from tests.tuner.tunes import GPU, HERE, FakeGpu, job, with_materializing


def test_a_tune_writes_table_kernels_and_run_file_and_resumes(
    fake: type[FakeGpu], tmp_path: Path, compiled: Path
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
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for company, told in ((0, ""), (1, "another process computed"), (2, "2 other processes computed")):
        monkeypatch.setattr(fake, "company", company)
        tuned = run.tune(job(tmp_path), silent, tmp_path / str(company))
        notes = [note for note in tuned.notes if "computed on this GPU" in note]
        assert [note.startswith(told) for note in notes] == ([True] if told else [])
        (path,) = (tmp_path / str(company)).glob("*.json")
        assert json.loads(path.read_text())["environment"]["other_processes"] == company


def test_drafts_are_tuned_beside_a_baseline_that_keeps_a_state_for_each(
    fake: type[FakeGpu], tmp_path: Path
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


def test_rings_of_two_dtypes_share_a_baseline_and_are_named(fake: type[FakeGpu], tmp_path: Path) -> None:
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
    fake: type[FakeGpu],
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


def test_a_store_of_another_gpu_is_refused(fake: type[FakeGpu], tmp_path: Path) -> None:
    run.tune(job(tmp_path, (1,)), silent)
    fake.environment = dataclasses.replace(HERE, gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(StoreError, match="choose another store"):
        run.tune(job(tmp_path, (1,)), silent)


def test_winners_of_a_sister_are_tried_first(
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = {"failed": False}
    default = default_plan(job(tmp_path).work[0].spec)
    time = fake.time

    def flaky(self: FakeGpu, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
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
    fake: type[FakeGpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both batches are measured again for not fitting a curve; this time nothing runs."""
    time = fake.time

    def odd(self: FakeGpu, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
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
    fake: type[FakeGpu], tmp_path: Path, drafts: int
) -> None:
    here = job(tmp_path, (64,), drafts=drafts)
    run.bench(here, tmp_path / "results", silent)
    first = len(fake.asked)
    tuned = run.bench(here, tmp_path / "results", silent)
    assert len(fake.asked) == first > 0
    assert len(tuned.table.rows) == 1
    one, other = (tmp_path / "results").glob("*.json")
    assert all(json.loads(path.read_text())["what"].startswith("bench-") for path in (one, other))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_branch_goes_through_the_gate_with_a_partner(drafts: int) -> None:
    spec = job(Path(), drafts=drafts).work[0].spec
    for role in ("both", "nonflush", "flush"):
        for variant in space.points(spec, role).variants[:3]:
            plan = gate_plan(spec, variant)
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


class RefusingPool:
    """A compile pool that gets nothing compiled."""

    def __init__(self, *_: object) -> None:
        self._jobs: list[tuple[Spec, Variant]] = []

    def __enter__(self) -> RefusingPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def done(self) -> bool:
        return not self._jobs

    def begin(self, jobs: Iterable[tuple[Spec, Variant]]) -> RefusingPool:
        self._jobs = list(jobs)
        return self

    def collect(self, block: bool = True) -> list[Compiled]:
        jobs, self._jobs = self._jobs, []
        return list(self.run(jobs))

    def run(self, jobs: Iterable[tuple[Spec, Variant]]) -> Iterator[Compiled]:
        return (Compiled(spec, variant, (), "compile", "no assembler") for spec, variant in jobs)


@pytest.mark.parametrize("command", [run.plan, run.tune], ids=["plan", "static tune"])
def test_where_nothing_compiles_the_budget_is_not_blamed(
    command: Callable[[Job, Report], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (run, static):
        monkeypatch.setattr(module, "CompilePool", RefusingPool)
    here = dataclasses.replace(job(tmp_path, budget=Budget(trials=8)), target=Target(GPU, False, "static"))
    with pytest.raises(CompileError, match=r"nothing compiles, of \d tried; .* as compile: no ass"):
        command(here, silent)
    assert not list((tmp_path / "generated").rglob("*.json"))


def test_a_static_tune_says_that_it_records_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "check_toolchain", lambda launching=False: "")
    monkeypatch.setattr(run, "static_tune", lambda *_: StaticTune((), (), (), {}, ()))
    here = dataclasses.replace(job(tmp_path), target=Target(GPU, False, "static"))
    (note,) = (n for n in run.tune(here, silent, tmp_path / "results").notes if "run file" in n)
    assert note == f"no run file in {tmp_path / 'results'}: nothing was timed"
    assert not any("run file" in n for n in run.tune(here, silent).notes)


@pytest.mark.parametrize("name", ["gdn 2x128x128", "nvidia/Nemotron H", "/models/mine"])
def test_a_run_file_is_named_after_any_layer(fake: type[FakeGpu], tmp_path: Path, name: str) -> None:
    here = job(tmp_path, batches=(1,))
    layer = (f"{name} tp8",)
    here = dataclasses.replace(here, work=tuple(dataclasses.replace(w, layers=layer) for w in here.work))
    run.tune(here, silent, tmp_path / "results")
    (path,) = (tmp_path / "results").iterdir()
    plain = {"gdn 2x128x128": "gdn-2x128x128", "nvidia/Nemotron H": "nvidia-Nemotron-H"}
    assert path.name.endswith(f"-tune-{plain.get(name, 'models-mine')}-fp32.json")
    assert json.loads(path.read_text())["totals"]["scope"] == f"{name}, fp32 state"
