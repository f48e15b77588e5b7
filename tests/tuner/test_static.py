"""Choosing without a GPU: the model against recorded landscapes, and a whole small static tune."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from benchmarks import landscape
from replayssm_tune.codegen import targets
from replayssm_tune.codegen.compile import Compiled, KernelBinary
from replayssm_tune.codegen.files import EmitError
from replayssm_tune.codegen.space import legal_structures, points
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import ToolchainError
from replayssm_tune.runtime.plan import Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import Table, Toolchain, dumps, loads
from replayssm_tune.tuner import candidates, interpreted, static
from replayssm_tune.tuner.interpreted import InterpretedGate, small_plan, small_spec
from replayssm_tune.tuner.progress import Event
from replayssm_tune.tuner.request import Budget, Job, Target, Work
from tests.specs import GDN
from tests.specs import P64 as SPEC

H200 = targets.find("H200")


@pytest.fixture(scope="module")
def cells():
    return landscape.load_all()


# ---- the model on recorded landscapes ----


def test_the_recorded_share_is_what_the_landscapes_give(cells):
    shares = {cell.name: cell.share(landscape.model_pick(cell)) for cell in cells}
    print(*(f"\n{name:20s} {share:.3f}" for name, share in shares.items()))
    found = landscape.quantiles(list(shares.values()))
    assert found == pytest.approx(static.RECORDED_SHARE, abs=1e-3)
    assert found["median"] >= 0.95
    assert found["p10"] >= 0.85


def test_landscapes_are_points_with_binaries_and_times(cells):
    assert {cell.effective_batch for cell in cells} == {16, 128, 1024, 32768}
    assert {cell.mode for cell in cells} == {"mix", "native"}
    for cell in cells:
        assert len(cell.times_us) >= 16
        assert all(0 < time_us < 1e4 for time_us in cell.times_us.values())
        assert set(cell.compiled) == set(cell.times_us)


def test_samplers_find_near_optima_in_few_measurements(cells):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    large = [cell for cell in cells if len(cell.times_us) >= 80]
    found = {
        name: landscape.quantiles([
            landscape.search_share(cell, name, 40, seed) for cell in large for seed in range(3)
        ])
        for name in ("model", "random")
    }  # fmt: skip
    print(found)
    assert found["model"]["median"] >= 0.98
    assert found["model"]["p10"] >= found["random"]["p10"] - 0.01


# ---- the model's terms ----


def compiled(variant, spec=SPEC, **changes):
    kernel = KernelBinary("step", 128, 0, 4096, 20_000, 1250, "d" * 16)
    return Compiled(spec, variant, (dataclasses.replace(kernel, **changes),))


EARLY = Variant(Structure("both", load="early"), Tile(16, 32, 128))


def test_estimates_grow_with_the_batch_and_never_beat_the_memory():
    for variant in (EARLY, default_plan(SPEC).variants[0]):
        times = [static.estimate_us(H200, compiled(variant), batch) for batch in (16, 128, 1024, 8192, 65536)]
        assert all(a < b for a, b in itertools.pairwise(times))
        assert times[-1] > static.traffic_bytes(SPEC, 65536) / (H200.memory_gbps * 1e3)


def test_what_costs_time_raises_the_estimate():
    plain = static.estimate_us(H200, compiled(EARLY), 1024)
    assert static.estimate_us(H200, compiled(EARLY, instructions=2500), 1024) > plain
    assert static.estimate_us(H200, compiled(EARLY, spills_bytes=128), 1024) > plain
    assert static.estimate_us(H200, compiled(EARLY, registers=255), 32768) > static.estimate_us(
        H200, compiled(EARLY), 32768
    )
    scores = dataclasses.replace(EARLY, structure=Structure("both", scores="dot", load="early"))
    assert static.estimate_us(H200, compiled(scores), 16) > static.estimate_us(H200, compiled(EARLY), 16)


def test_a_second_launch_costs():
    one = compiled(default_plan(SPEC).variants[0])
    two = dataclasses.replace(one, kernels=(one.step, one.step))
    assert static.estimate_us(H200, two, 16) > static.estimate_us(H200, one, 16) + 1


def test_a_loop_over_row_tiles_costs_what_one_over_heads_does():
    """As many programs with as many rounds; no loop at all is quicker where the GPU has room."""
    tiles = Variant(Structure("both", loop="tiles"), Tile(64, 128, 128))
    heads = Variant(Structure("both"), Tile(64, 128, 128, heads_per_program=2))
    neither = Variant(Structure("both"), Tile(64, 128, 128))
    for batch in (16, 32768):
        one, other = (static.estimate_us(H200, compiled(v, GDN), batch) for v in (tiles, heads))
        assert one == other
    assert static.estimate_us(H200, compiled(neither, GDN), 16) < static.estimate_us(
        H200, compiled(tiles, GDN), 16
    )


def test_a_slower_memory_takes_longer():
    slow = targets.find("H100 PCIe")
    assert static.estimate_us(slow, compiled(EARLY), 32768) > 1.3 * static.estimate_us(
        H200, compiled(EARLY), 32768
    )


def test_resident_programs_are_bounded_by_each_resource():
    assert static.resident_programs(H200, compiled(EARLY, registers=16, shared_bytes=0)) == 32
    assert static.resident_programs(H200, compiled(EARLY, registers=255)) == 8
    assert static.resident_programs(H200, compiled(EARLY, shared_bytes=100 * 1024)) == 2
    assert static.resident_programs(H200, compiled(EARLY, shared_bytes=227 * 1024)) == 1


def test_traffic_of_a_native_step_is_twice_the_state():
    assert static.traffic_bytes(SPEC.native, 10) == 2 * SPEC.state_bytes(10)
    share = static.traffic_bytes(SPEC, 10) / SPEC.state_bytes(10)
    assert 1 + 1 / 16 < share < 1.25


def test_verification_moves_a_state_a_token_natively_and_as_many_as_a_step_by_replay():
    verify = dataclasses.replace(SPEC, op="verify", num_tokens=4)
    state = SPEC.state_bytes(10)
    share = static.traffic_bytes(verify.native, 10) / state
    assert 5 < share < 5.1
    # A fifth of the rows flush; a ring, drafts and their outputs are small beside the state.
    share = static.traffic_bytes(verify, 10) / state
    assert 1.2 < share < 1.4


def test_two_launches_share_the_rows_and_bytes_of_one():
    verify = dataclasses.replace(SPEC, op="verify", num_tokens=4)
    parts = [static.traffic_bytes(verify, 1024, role) for role in ("nonflush", "flush")]
    assert sum(parts) == pytest.approx(static.traffic_bytes(verify, 1024))
    assert parts[0] > parts[1] > 2 * verify.state_bytes(1024) / 5
    of_role = {v.structure.role: compiled(v, verify) for v in default_plan(verify).variants}
    both = dataclasses.replace(
        of_role["flush"].variant, structure=Structure("both", readout="dot", scores="dot")
    )
    whole_us = static.estimate_us(H200, compiled(both, verify), 32768)
    assert all(static.estimate_us(H200, part, 32768) < whole_us for part in of_role.values())


def test_more_drafts_take_the_native_kernel_longer():
    native = default_plan(SPEC.native).variants[0]
    specs = [dataclasses.replace(SPEC, op="verify", num_tokens=n).native for n in (1, 2, 4, 8)]
    for batch in (16, 32768):
        times = [static.estimate_us(H200, compiled(native, spec), batch) for spec in specs]
        assert all(a < b for a, b in itertools.pairwise(times))


def test_ranking_is_sorted_and_complete():
    subjects = [compiled(v) for v in points(SPEC, "both").variants[:20]]
    ranking = static.rank(H200, subjects, 128)
    assert sorted(v for v, _ in ranking) == sorted(c.variant for c in subjects)
    assert [t for _, t in ranking] == sorted(t for _, t in ranking)


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmitError, match="cannot write") as caught:
        InterpretedGate({(SPEC, Structure("both"))}, tmp_path / "file" / "cache" / "modules")
    assert caught.value.where == str(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Spec("mamba2", "step", 80, 128, 12, 16),
        Spec("mamba2", "step", 128, 256, 24, 16),
        GDN,
        dataclasses.replace(GDN, heads_per_group=4),
    ],
    ids=lambda spec: spec.key,
)
def test_promising_points_are_few_and_hold_the_default(spec):
    both, native = static.promising(spec, "both"), static.promising(spec.native, "native")
    assert both[0] == default_plan(spec).variants[0]
    assert native[0] == default_plan(spec.native).variants[0]
    assert 40 <= len(both) <= 150
    assert 10 <= len(native) <= 25
    assert min(v.tile.fold_block_n for v in both) >= 32, "what fewer gain the model does not know"
    assert {v.structure.load for v in both} == {"early", "late"}
    assert {v.structure.readout for v in both} == {"elementwise", "dot"}
    assert ("rebuild" in {v.structure.route for v in both}) == (spec.family == "gdn")


@pytest.mark.parametrize("spec", [SPEC, GDN], ids=lambda spec: spec.family)
def test_verification_compiles_its_default_pair_and_launches_for_all_rows(spec):
    spec = dataclasses.replace(spec, op="verify", num_tokens=4)
    job = Job(
        Target(H200, False, "static"),
        (Work(spec, (16,), ("toy tp1",)),),
        Budget(),
        Path("store"),
        Path("out"),
    )
    found = [variant for of, variant in static.static_jobs(job) if of == spec]
    assert tuple(found[:2]) == default_plan(spec).variants
    assert 40 <= len(found) <= 150
    assert {v.structure.role for v in found[2:]} == {"both"}
    assert {v.structure.coefficients for v in found[2:]} == {"inline", "precomputed", "prologue"}


def test_thinning_keeps_the_first_and_the_range():
    variants = static.promising(SPEC, "both")
    for most in (1, 2, 7, 40, 500):
        kept = static.thinned(variants, most)
        assert len(kept) == min(most, len(variants))
        assert kept[0] == variants[0]
        assert list(kept) == [v for v in variants if v in kept]


# ---- the interpreter's process ----


def test_small_cases_keep_the_kind_of_a_spec():
    odd = Spec("mamba2", "step", 80, 96, 12, 16, has_z=True)
    assert small_spec(odd) == Spec(
        "mamba2", "step", 24, 24, 2, 4, activation_dtype="fp16", ring_dtype="fp16", has_z=True
    )
    assert small_spec(SPEC.native).window == 0
    assert small_spec(GDN) == Spec(
        "gdn", "step", 16, 32, 2, 4, activation_dtype="fp16", ring_dtype="fp16", has_d=False, qk_l2norm=True
    )
    for spec in map(small_spec, (SPEC, odd, SPEC.native, GDN, GDN.native)):
        for structure in legal_structures(spec):
            plan = small_plan(spec, structure)
            assert structure in [v.structure for v in plan.variants]


@pytest.mark.parametrize("spec", [SPEC, GDN], ids=lambda spec: spec.family)
def test_a_wrong_structure_is_found_and_named(tmp_path, monkeypatch, spec):
    early, native = Structure("both", load="early"), Structure("native")
    good = {(spec, early), (spec.native, native)}
    with InterpretedGate(good, tmp_path) as gate:
        assert gate.failures() == {}
    (module,) = (path for path in tmp_path.glob("*early*.py"))
    source = module.read_text()
    assert "* head_decay" in source
    broken = tmp_path / "broken"
    broken.mkdir()
    monkeypatch.setattr(interpreted, "_path", lambda: str(broken))
    # A package on the path before this one, whose rendering forgets a factor.
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        f"sys.path[1:1] = {sys.path!r}\n"
        "import replayssm_tune.codegen.cache as cache\n"
        "render = cache.render\n"
        "cache.render = lambda *key: render(*key).replace('* head_decay', '* 1.0')\n"
    )
    with InterpretedGate(good, tmp_path) as gate:
        found = gate.failures()
    assert set(found) == {(spec, early)}
    assert ("ring u is inexact" if spec.family == "gdn" else "output error") in found[spec, early]


def test_the_interpreter_ends_with_its_caller(tmp_path):
    with InterpretedGate({(SPEC, Structure("native"))}, tmp_path) as gate:
        process = gate._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()  # as the system does when the caller is killed
        assert process.wait(60) == 1


class SlowInterpreter:
    """Stands in for the interpreter's process: answers one case whenever it is waited for."""

    def __init__(self, answers, cases):
        self.answers, self.left, self.stdin = answers, list(cases), None

    def poll(self):
        return None if self.left else 0

    def wait(self, timeout_s=None):
        if self.left:
            with self.answers.open("a", encoding="utf-8") as answers:
                answers.write(json.dumps((*self.left.pop(0), "")) + "\n")
            raise subprocess.TimeoutExpired("interpreter", timeout_s or 0)


def test_progress_moves_as_structures_are_checked(tmp_path):
    structures = [Structure("both", load="early"), Structure("both"), Structure("native")]
    wide = dataclasses.replace(SPEC, head_dim=128)  # comes down to the same small case
    pairs = [(SPEC, structures[0]), (wide, structures[0]), (SPEC, structures[1])]
    pairs.append((SPEC.native, structures[2]))
    gate = InterpretedGate(pairs, tmp_path / "modules")
    cases = dict.fromkeys(gate._cases.values())
    gate._process = SlowInterpreter(gate._answers, cases)  # type: ignore[assignment]
    told: list[int] = []
    assert gate.failures(told.append) == {}
    assert told == [0, 2, 3, 4]
    gate.__exit__()


def test_half_an_answer_is_none(tmp_path):
    gate = InterpretedGate([(SPEC, Structure("both"))], tmp_path / "modules")
    gate._process = SlowInterpreter(gate._answers, [])  # type: ignore[assignment]
    for text in (None, '["mamba2'):
        if text is not None:
            gate._answers.write_text(text, encoding="utf-8")
        with pytest.raises(ToolchainError, match="gone for 1 of 1 structures"):
            gate.failures()
    gate.__exit__()


# ---- a whole static tune ----


@pytest.mark.parametrize(
    "spec",
    [
        Spec("mamba2", "step", 16, 32, 2, 4),
        Spec("gdn", "step", 16, 32, 2, 4, has_d=False, qk_l2norm=True),
        Spec("gdn", "step", 16, 32, 2, 4, has_d=False, qk_l2norm=True, ring_dtype="fp32"),
        Spec("gdn", "verify", 16, 32, 2, 4, 2, has_d=False, qk_l2norm=True),
        Spec("mamba2", "verify", 16, 32, 2, 4, 2, activation_dtype="fp32", ring_dtype="fp32"),
    ],
    ids=lambda spec: f"{spec.family} {spec.op} {spec.activation_dtype} {spec.ring_dtype}",
)
def test_a_small_static_tune_serves_every_cell(tmp_path, spec):
    job = Job(
        target=Target(H200, False, "static"),
        work=(Work(spec, (4, 64, 4096), ("toy tp1",)),),
        budget=Budget(trials=12),
        store=tmp_path / "store",
        output=tmp_path / "output",
    )
    events: list[Event] = []
    result = static.static_tune(job, tmp_path / "cache", 1, events.append)
    assert result.gate_failures == ()
    assert any("gdn kernels" in note for note in result.notes) == (spec.family == "gdn")
    assert any("draft verification kernels" in note for note in result.notes) == spec.verifies
    assert {(row.spec, row.effective_batch) for row in result.rows} == {
        (s, batch) for s in (spec, spec.native) for batch in (4, 64, 4096)
    }
    for row in result.rows:
        assert row.source == "static"
        assert row.time_us is not None
        assert row.default_time_us is not None
        assert row.time_us <= row.default_time_us * (1 + static.TIE)
        assert row.native_time_us is not None
        assert row.binaries[0][0].registers > 0
    assert [e.done for e in events if e.phase == "compile"] == list(range(1, 1 + events[0].total))
    assert events[0].total <= 12
    checked = [e for e in events if e.phase == "numerics"]
    assert [e.done for e in checked] == sorted({e.done for e in checked})
    assert checked[-1].done == checked[-1].total > 0
    assert all(plan.kept >= 1 for plan in result.specs)
    table = Table(H200.info, Toolchain("3.9.0", "", ""), "static", "0.1.0", "2026-11-30", result.rows)
    assert loads(dumps(table)) == table


def test_a_time_ends_compiling_and_every_cell_still_has_a_row(tmp_path):
    spec = Spec("mamba2", "verify", 16, 32, 2, 4, 2)
    work = (Work(spec, (4, 64), ("toy tp1",)),)
    target, here = Target(H200, False, "static"), (tmp_path / "store", tmp_path / "output")
    cut = Job(target, work, Budget(minutes=1e-6), *here)
    events: list[Event] = []
    result = static.static_tune(cut, tmp_path / "cache", 1, events.append)
    jobs = static.static_jobs(cut)
    defaults = {of: default_plan(of) for of in (spec, spec.native)}
    first = [(of, variant) for of, plan in defaults.items() for variant in plan.variants]
    assert sorted(jobs[: len(first)]) == sorted(first)
    assert [event.total for event in events if event.phase == "compile"] == [len(jobs)] * len(first)
    left = len(jobs) - len(first)
    (note,) = (note for note in result.notes if "time for compiling" in note)
    assert f"before {left} of {len(jobs)} points" in note
    dropped = [drop for plan in result.specs for drop in plan.dropped]
    assert sum(drop.count for drop in dropped if drop.reason == candidates.NO_TIME) == left
    assert {(row.spec, row.effective_batch) for row in result.rows} == {
        (of, batch) for of in defaults for batch in (4, 64)
    }
    assert all(row.plan == defaults[row.spec] for row in result.rows)


# ---- batch invariance ----


def rows_of(one_class: bool, *variants: Variant):
    points_ = [compiled(variant) for variant in (*default_plan(SPEC).variants, *variants)]
    return static._rows(H200, SPEC, points_, (16, 128, 1024, 32768), "3.9.0", one_class)


def test_static_rows_can_be_of_one_numerics_class():
    late = Variant(Structure("both"), Tile(32, 64, 32, heads_per_program=4))
    wide = dataclasses.replace(late, tile=dataclasses.replace(late.tile, heads_per_program=1))
    free, no_cost = rows_of(False, EARLY, late, wide)
    kept, costs = rows_of(True, EARLY, late, wide)
    assert len({row.plan.numerics for row in free}) > 1
    assert not no_cost
    assert not any(row.batch_invariant for row in free)
    assert len({row.plan.numerics for row in kept}) == 1
    assert all(row.batch_invariant for row in kept)
    assert [cost.effective_batch for cost in costs] == [row.effective_batch for row in kept]
    for row, other, cost in zip(kept, free, costs, strict=True):
        assert cost.plan == row.plan
        assert cost.time_us == pytest.approx(row.time_us, rel=1e-3)
        assert cost.best_time_us <= other.time_us * 1.001
        assert cost.regret == pytest.approx(cost.time_us / cost.best_time_us - 1)
        assert f"{cost.regret:.1%} slower than the best of any" in row.verdict
    assert max(cost.regret for cost in costs) > 0.01
    assert Table(
        H200.info, Toolchain("3.9.0", "", ""), "static", "1", "2026-11-30", tuple(kept)
    ).rows == tuple(kept)
