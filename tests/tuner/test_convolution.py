"""Tuning the convolution: what is asked, and the choice of a tile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.codegen import emit
from replayssm_tune.runtime.conv_tiles import ConvTile, default_tile, tiles
from replayssm_tune.tuner import models
from replayssm_tune.tuner.convolution import RULES, ConvTune
from replayssm_tune.tuner.errors import GateError
from replayssm_tune.tuner.progress import Event, silent
from replayssm_tune.tuner.records import Cell, ConvCell, Timing, parse_cell
from replayssm_tune.tuner.request import ConvWork, resolve_convolutions
from replayssm_tune.tuner.store import Store
from tests.tuner.conv_tunes import FAST, SPEC, WORK, FakeBench
from tests.tuner.fake_bench import GPU as FAKE_GPU
from tests.tuner.fake_bench import SPEC as STEP


@pytest.fixture
def bench() -> FakeBench:
    return FakeBench()


def tune(bench: FakeBench, folder: Path, work: ConvWork = WORK, events: list[Event] | None = None) -> Any:
    with Store(folder / "store", FAKE_GPU) as store:
        tuning = ConvTune(bench, store, silent if events is None else events.append)
        return tuning.results(work), tuning


# ---- what is asked ----


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("nemotron-3-super-120b-a12b", 128 * 64 + 2 * 8 * 128),
        ("nemotron-3-nano-4b", 96 * 80 + 2 * 8 * 128),
        ("qwen3.5-4b", 2 * 16 * 128 + 32 * 128),
        ("qwen3-next-80b-a3b", 8192),
    ],
)
def test_channels_are_those_of_public_configurations(name: str, channels: int) -> None:
    model = models.find(name)
    assert models.conv_channels(model, 1) == channels
    assert models.conv_channels(model, 2) == channels // 2
    assert model.conv_width == 4


def test_a_group_that_is_replicated_keeps_its_channels() -> None:
    model = models.find("granite-4.0-h-small")  # one group
    assert models.conv_channels(model, 4) == 32 * 64 + 2 * 128


@pytest.mark.parametrize(("key", "family"), [("conv_kernel", "nemotron_h"), ("mamba_d_conv", "bamba"),
                                             ("linear_conv_kernel_dim", "qwen3_next")])  # fmt: skip
def test_configs_say_the_width(key: str, family: str, tmp_path: Path) -> None:
    shape = {
        "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8},
        "bamba": {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
        "qwen3_next": {"linear_num_value_heads": 8, "linear_value_head_dim": 64,
                       "linear_key_head_dim": 64, "linear_num_key_heads": 4},
    }[family]  # fmt: skip
    path = tmp_path / "config.json"
    for said, width in (({}, 4), ({key: 3}, 3)):
        path.write_text(json.dumps({"model_type": family, **shape, **said}))
        assert models.from_hf_config(path).conv_width == width


def test_the_grid_is_walked_in_the_least_split_layer_that_it_takes_a_sequence_of() -> None:
    model = models.find("nemotron-3-super-120b-a12b")  # 80 blocks of channels; 10 over eight GPUs
    (work,) = resolve_convolutions([model])
    assert work.spec == SPEC
    assert work.shapes == ((2, 2560), (2, 10240), (6, 10240), (26, 10240), (102, 10240))
    (whole,) = resolve_convolutions([model], tensor_parallel=(1,))
    assert whole.shapes[0] == (1, 10240)
    assert len(whole.shapes) == 5


def test_asked_batches_are_thinned_and_drafts_are_work_of_their_own() -> None:
    model = models.find("nemotron-3-super-120b-a12b")
    found = resolve_convolutions([model], tensor_parallel=(1,), drafts=(0, 3), batches=(1, 2, 4, 8, 11))
    assert [work.spec.num_tokens for work in found] == [1, 4]
    assert {work.shapes for work in found} == {((1, 10240), (4, 10240), (11, 10240))}


def test_models_share_what_is_the_same_and_odd_widths_are_left_out() -> None:
    odd = dataclasses.replace(models.find("qwen3.5-4b"), conv_width=5)
    narrow = dataclasses.replace(odd, conv_width=3)
    found = resolve_convolutions([*map(models.find, models.DEFAULT_MODELS), odd, narrow])
    assert [work.spec.width for work in found] == [4, 3]


def test_bytes_are_those_of_inputs_taps_outputs_and_appends() -> None:
    cell = ConvCell(dataclasses.replace(SPEC, num_tokens=4, ring_dtype="fp32"), 3, 100)
    assert cell.read_bytes == 300 * (4 * 2 + 3 * 4)
    assert cell.written_bytes == 300 * 4 * (2 + 4)
    assert parse_cell(cell.key) == cell
    assert parse_cell(Cell(STEP, 64).key) == Cell(STEP, 64)


# ---- the choice ----


def test_a_tile_wins_where_it_beats_the_rule_and_the_rule_stays_elsewhere(
    bench: FakeBench, tmp_path: Path
) -> None:
    events: list[Event] = []
    (one, many), tuning = tune(bench, tmp_path, events=events)
    assert not tuning.failures
    assert not tuning.notes
    assert (one.cell, many.cell) == (ConvCell(SPEC, 1, 1280), ConvCell(SPEC, 64, 10240))
    assert one.tile == one.default == default_tile(10, 1)
    assert "nothing beats the default by" in one.reason
    assert one.time_us == one.default_time_us
    assert many.tile == FAST
    assert many.default == default_tile(64 * 80, 1)
    assert many.default_time_us / many.time_us == pytest.approx(1.2, rel=0.01)
    assert "faster than the default by" in many.reason
    assert many.roof_us == 2.0
    assert 0 < many.noise_floor < 0.01
    for result in (one, many):
        made = result.row(tuning.digest, "3.9.0", "2026-11-30")
        assert (made.tile, made.effective_batch) == (result.tile, result.cell.effective_batch)
        assert not emit.stale_tile(made)
    # Each tile once, then four rounds of visits to the default, two rivals and the default again; a roof, and
    # the gates of a winner and of the defaults for packed rows.
    space = tiles(1)
    most = len(space) + 2 + 2 * (len(space) + 4 * 2 * 4 + 2)
    assert len(space) < len(bench.asked) <= most
    assert {event.phase for event in events} == {f"convolution {SPEC.key}"}
    assert [event.done for event in events] == list(range(1, len(bench.asked) + 1))
    assert {event.total for event in events} == {most}


def test_a_gain_within_the_noise_is_none(bench: FakeBench, tmp_path: Path) -> None:
    bench.gains, bench.spread = {FAST: 1.015}, 0.3
    (_, many), _ = tune(bench, tmp_path)
    assert many.tile == many.default
    assert many.noise_floor > 0.015


def test_what_was_measured_is_remembered_and_an_interrupted_tune_goes_on(
    bench: FakeBench, tmp_path: Path
) -> None:
    bench.stop_after = 30
    with pytest.raises(KeyboardInterrupt):
        tune(bench, tmp_path)
    bench.stop_after = 10**9
    results, _ = tune(bench, tmp_path)
    whole = len(bench.asked)
    assert len(set(bench.asked[:30]) & {asked for asked in bench.asked[30:] if asked[0] == "gate"}) == 0
    events: list[Event] = []
    again, _ = tune(bench, tmp_path, events=events)
    assert len(bench.asked) == whole
    assert again == results
    assert len(events) == whole


def test_a_kernel_that_has_changed_is_measured_again(
    bench: FakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(bench, tmp_path)
    whole = len(bench.asked)
    monkeypatch.setattr("replayssm_tune.tuner.convolution.module_digest", lambda text: "another")
    tune(bench, tmp_path)
    assert len(bench.asked) == 2 * whole - len(WORK.shapes)  # of roofs nothing has changed


def test_a_tile_that_fails_its_gate_is_not_timed(bench: FakeBench, tmp_path: Path) -> None:
    bench.wrong = {FAST: "outputs are off", ConvTile(1024, 8): Timing(status="crash", reason="died")}
    (_, many), tuning = tune(bench, tmp_path)
    assert many.tile == many.default
    assert tuning.failures == [f"{SPEC.key} b256.w1: outputs are off", f"{SPEC.key} b1024.w8: died"]
    timed = {asked[2] for asked in bench.asked if asked[0] == "time"}
    assert timed == {*tiles(1)} - {*bench.wrong}


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_next_tile_wins_where_one_is_wrong_for_the_other_kind_of_rows(
    bench: FakeBench, tmp_path: Path, tokens: int
) -> None:
    """Fast ones that are wrong do not make others look slow."""
    wrong, (right, slower) = (FAST, ConvTile(256, 2), ConvTile(64, 1)), (ConvTile(512, 2), ConvTile(1024, 4))
    bench.gains = dict(zip((*wrong, right, slower), (2.0, 1.9, 1.8, 1.15, 1.1), strict=True))
    bench.wrong_otherwise = {tile: f"{tile.block} channels are off" for tile in wrong}
    bench.wrong_otherwise[wrong[1]] = Timing(status="crash", reason="died")
    work = ConvWork(dataclasses.replace(SPEC, num_tokens=tokens), (*WORK.shapes, (128, 10240)))
    assert {*bench.gains} <= {*tiles(work.spec.token_block)} - {default_tile(5120, work.spec.token_block)}
    (one, many, more), tuning = tune(bench, tmp_path, work)
    for cell in (many, more):
        assert cell.tile == right
        assert cell.default_time_us / cell.time_us == pytest.approx(1.15, rel=0.01)
        assert cell.reason.endswith("; left out as wrong: b256.w1, b256.w2, b64.w1")
    assert "nothing beats" in one.reason
    # Once each, however many cells they would have won.
    assert {*tuning.failures} >= {
        f"{work.spec.key} b256.w1: 256 channels are off", f"{work.spec.key} b256.w2: died",
        f"{work.spec.key} b64.w1: 64 channels are off",
    }  # fmt: skip
    assert len({*tuning.failures}) == len(tuning.failures) == 3
    gates = [asked for asked in bench.asked if asked[0] == "gate"]
    assert len({*gates}) == len(gates)
    # The last final is between those that are right.
    last = [asked[:3] for asked in bench.asked[-4 * RULES.final_rounds * 2 :]]
    assert {*last} == {("time", more.cell, tile) for tile in (more.default, right, slower)}


def test_the_default_stays_where_no_other_tile_passes(bench: FakeBench, tmp_path: Path) -> None:
    defaults = {default_tile(10, 1), default_tile(5120, 1)}
    bench.wrong_otherwise = dict.fromkeys({*tiles(1)} - defaults, "outputs are off")
    (_, many), tuning = tune(bench, tmp_path)
    assert many.tile == many.default
    assert many.time_us == many.default_time_us
    assert "nothing beats the default by" in many.reason
    assert f"{SPEC.key} b256.w1: outputs are off" in tuning.failures


def test_a_tile_that_does_not_run_in_the_final_is_replaced_in_it(bench: FakeBench, tmp_path: Path) -> None:
    second, third = ConvTile(512, 2), ConvTile(64, 1)
    bench.gains = {FAST: 1.3, second: 1.2, third: 1.1}
    asked: list[ConvTile] = []
    work = ConvWork(SPEC, ((64, 10240),))

    def break_second_visit(broken: ConvTile) -> Callable[[ConvTile], bool]:
        asked.clear()

        def now(tile: ConvTile) -> bool:
            asked.append(tile)
            return tile == broken and asked.count(tile) > 2

        return now

    bench.broken = break_second_visit(FAST)
    (many,), tuning = tune(bench, tmp_path / "rival", work)
    assert many.tile == second
    assert asked.count(third) == 9
    assert tuning.notes == [f"{many.cell.key}: tile b256.w1 did not run in the final (out of memory)"]
    bench.broken = break_second_visit(many.default)
    found, tuning = tune(bench, tmp_path / "default", work)
    assert found == []
    (note,) = tuning.notes
    assert "has no row: the default tile did not run in the final (out of memory)" in note


def test_a_default_that_fails_its_gate_ends_the_run(bench: FakeBench, tmp_path: Path) -> None:
    bench.wrong = {default_tile(10, 1): "outputs are off"}
    with pytest.raises(GateError, match="default tile of conv-w4-t1-bf16-bf16-bf16 cannot run here"):
        tune(bench, tmp_path)
    # Nor may it be wrong for the kind of rows that it is not timed with.
    bench.wrong, bench.wrong_otherwise = {}, {default_tile(5120, 1): "packed rows: outputs are off"}
    with pytest.raises(GateError, match="cannot run here: packed rows: outputs are off"):
        tune(bench, tmp_path / "otherwise")


def test_a_tile_that_does_not_run_loses_and_a_default_that_does_not_leaves_no_row(
    bench: FakeBench, tmp_path: Path
) -> None:
    bench.broken = lambda tile: tile == FAST
    (_, many), _ = tune(bench, tmp_path / "tile")
    assert many.tile == many.default
    bench.broken = lambda tile: tile == default_tile(10, 1)
    (many,), tuning = tune(bench, tmp_path / "default")
    assert many.cell.rows == 64
    (note,) = tuning.notes
    assert "has no row: the default tile did not run (out of memory)" in note


def test_served_tiles_are_timed_beside_the_default(bench: FakeBench, tmp_path: Path) -> None:
    with Store(tmp_path / "store", FAKE_GPU) as store:
        tuning = ConvTune(bench, store, silent)
        one, many = tuning.served(WORK, lambda cell: FAST if cell.rows > 1 else default_tile(10, 1))
        assert (one.tile, many.tile) == (one.default, FAST)
        assert one.time_us == one.default_time_us == pytest.approx(10.0, rel=0.01)
        assert many.default_time_us / many.time_us == pytest.approx(1.2, rel=0.01)
        assert many.roof_us < many.time_us
        asked = len([ask for ask in bench.asked if ask[0] == "time"])
        assert asked == 2 * RULES.final_rounds * (2 + 3), "nothing but the served tiles and the default"
        other, another = ConvTile(64, 1), ConvTile(64, 2)
        bench.wrong, bench.wrong_otherwise = {other: "outputs are off"}, {another: "outputs are off"}
        with pytest.raises(GateError, match="a served tile fails the gate: outputs are off"):
            tuning.served(WORK, lambda cell: other)
        with pytest.raises(GateError, match="a served tile fails the gate: outputs are off"):
            tuning.served(WORK, lambda cell: another)


def test_a_served_tile_that_does_not_run_is_told(bench: FakeBench, tmp_path: Path) -> None:
    bench.broken = lambda tile: tile == FAST
    with Store(tmp_path / "store", FAKE_GPU) as store:
        tuning = ConvTune(bench, store, silent)
        (one,) = tuning.served(WORK, lambda cell: FAST if cell.rows > 1 else default_tile(10, 1))
    assert one.cell.rows == 1
    assert "did not run" in tuning.notes[0]
