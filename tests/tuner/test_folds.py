"""What the gate lets through and refuses of what materialises states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.space import points
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.folds import SCENES, Fold, FoldGate
from replayssm_tune.tuner.interpreted import small_plan, small_spec
from tests.interpreter import interpreted
from tests.specs import FOLD_DTYPES

MAMBA2 = Spec("mamba2", "step", 10, 24, 2, 4, activation_dtype="fp32", ring_dtype="fp32").materialize
GDN = Spec(
    "gdn", "step", 10, 24, 2, 4, activation_dtype="fp32", ring_dtype="fp32", has_d=False, qk_l2norm=True
).materialize
families = pytest.mark.parametrize("spec", [MAMBA2, GDN], ids=["mamba2", "gdn"])


def with_dtypes(spec: Spec, ring: str, state: str) -> Spec:
    return dataclasses.replace(spec, activation_dtype=ring, ring_dtype=ring, state_dtype=state)


def gate_of(spec: Spec, repeats: int = 2) -> FoldGate:
    return FoldGate(spec, heads=2 * spec.heads_per_group, repeats=repeats)


def serve(scene: Fold) -> None:
    """As a right kernel does: in fp64, rounded once."""
    served = scene.at(scene.writes())
    store(served, served.expected(served.counts()))


def store(served: Fold, states: torch.Tensor) -> None:
    state = served.pool.state
    state[served.destination.long()] = states.to(state.dtype)


@pytest.mark.parametrize(("ring", "state"), FOLD_DTYPES)
@families
def test_a_fold_that_is_rounded_once_passes(spec: Spec, ring: str, state: str) -> None:
    verdict = gate_of(with_dtypes(spec, ring, state)).judge(serve)
    assert verdict.passed, verdict
    assert 0 < verdict.state_error < verdict.state_bound


@pytest.mark.parametrize("window", [1, 4, 16, 40])
def test_scenes_hold_rows_of_every_kind(window: int) -> None:
    gate = gate_of(dataclasses.replace(MAMBA2, window=window))
    fills, by_null_slot, below, beyond = set(), 0, 0, 0
    for number in range(SCENES):
        scene = gate.scene(number)
        in_place = scene.source == scene.destination
        written = scene.writes()
        assert int(in_place.sum()) == 2
        assert int((in_place & written).sum()) == 1, "the one that folds its whole ring"
        padded = ~written & ~in_place
        assert int(padded.sum()) == (4 if number % 2 else 2)
        by_null_slot += int(
            ((scene.source == scene.null_slot) | (scene.destination == scene.null_slot)).sum()
        )
        live = scene.at(written)
        assert len({*live.destination.tolist()}) == len(live.destination)
        fills |= {*live.lengths().tolist()}
        below += int((live.prefix < 0).sum())
        beyond += int((live.prefix > live.lengths()).sum())
        assert torch.equal(scene.pool.storage, gate.scene(number).pool.storage)
    assert len(fills) > min(window, 23)
    assert {0, window} <= fills
    assert min(by_null_slot, below, beyond) > 1


def too_short(scene: Fold) -> None:
    served = scene.at(scene.writes())
    store(served, served.expected((served.counts() - 1).clamp(min=0)))


def not_clamped(scene: Fold) -> None:
    serve(dataclasses.replace(scene, prefix=scene.prefix.abs()))


def wrong_slot(scene: Fold) -> None:
    served = scene.at(scene.writes())
    served = dataclasses.replace(served, source=served.source.roll(1))
    store(served, served.expected(served.counts()))


def padding_is_served(scene: Fold) -> None:
    serve(scene)
    served = scene.at(scene.destination == -1)
    store(dataclasses.replace(served, destination=served.destination * 0), served.expected(served.counts()))


def null_slot_is_served(scene: Fold) -> None:
    serve(dataclasses.replace(scene, null_slot=-1))


def part_in_place(scene: Fold) -> None:
    serve(scene)
    served = scene.at((scene.source == scene.destination) & ~scene.writes())
    store(served, served.expected(served.counts()))


def drained(scene: Fold) -> None:
    serve(scene)
    scene.pool.ring_len[scene.source[scene.writes()].long()] = 0


def not_written(scene: Fold) -> None:
    serve(scene.at(torch.arange(len(scene.source)) > 0))


def rounded_twice(scene: Fold) -> None:
    served = scene.at(scene.writes())
    states = served.expected(served.counts())
    states[served.counts() > 0] = states[served.counts() > 0].bfloat16().double()
    store(served, states)


def scaled_copy(scene: Fold) -> None:
    served = scene.at(scene.writes())
    states = served.expected(served.counts())
    states[served.counts() == 0] *= 1 + 1e-6
    store(served, states)


def beyond_the_row(scene: Fold) -> None:
    serve(scene)
    scene.pool.storage[0] ^= 1


FAULTS: dict[Callable[[Fold], None], str] = {
    too_short: "state error",
    not_clamped: "states into which nothing",
    wrong_slot: "state",
    padding_is_served: "bytes outside",
    null_slot_is_served: "bytes outside",
    part_in_place: "bytes outside",
    drained: "cursors changed",
    not_written: "states are not finite",
    rounded_twice: "state error",
    scaled_copy: "states into which nothing is folded are no copies",
    beyond_the_row: "bytes outside",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@families
def test_faults_are_refused_by_name(spec: Spec, fault: Callable[[Fold], None]) -> None:
    verdict = gate_of(spec).judge(fault)
    assert verdict.reason.startswith(FAULTS[fault]), verdict


def test_launches_that_differ_are_refused() -> None:
    calls = []

    def noisy(scene: Fold) -> None:
        serve(scene)
        calls.append(scene)
        served = scene.at(scene.writes())
        noise = 1e-6 if len(calls) == 3 else 0.0
        scene.pool.state[served.destination[served.counts() > 0].long()[-1]] *= 1 + noise

    assert gate_of(MAMBA2, repeats=2).judge(noisy).passed
    calls.clear()
    assert gate_of(MAMBA2, repeats=3).judge(noisy).reason == "launches from the same memory differ"


KERNELS = [
    small_spec(with_dtypes(spec, ring, state))
    for spec in (MAMBA2, GDN, dataclasses.replace(GDN, head_dim=64, state_size=128, heads_per_group=3))
    for ring, state in (("fp32", "fp32"), ("fp16", "fp32"), ("fp16", "fp16"))
]


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.key)
@interpreted
def test_kernels_pass(spec: Spec, tmp_path: Path) -> None:
    """Generated kernels in Triton's interpreter: the default, and a tile that divides the work."""
    gate = FoldGate(spec, heads=2 * spec.heads_per_group, scenes=2, repeats=2)
    for plan in (default_plan(spec), small_plan(spec, Structure("materialize"))):
        verdict = gate.check(plan, rendered(tmp_path))
        assert verdict.passed, (plan.key, verdict)


@interpreted
def test_every_tile_of_a_small_space_passes(tmp_path: Path) -> None:
    spec = small_spec(with_dtypes(GDN, "fp16", "fp16"))
    gate = FoldGate(spec, heads=spec.heads_per_group, scenes=1, repeats=1)
    variants = points(spec, "materialize").variants
    assert len(variants) > 3
    for variant in variants:
        verdict = gate.check(Plan((variant,)), rendered(tmp_path))
        assert verdict.passed, (variant.key, verdict)


@interpreted
def test_a_kernel_that_takes_a_wrong_order_of_tokens_is_refused(tmp_path: Path) -> None:
    spec = small_spec(MAMBA2)
    source = rendered(tmp_path)
    path = source(spec, Structure("materialize"))
    text = path.read_text()
    line = "token = ring_start + j\n"
    assert line in text
    broken = path.with_name("broken.py")
    broken.write_text(text.replace(line, "token = ring_start + j + 1\n"))
    verdict = gate_of(spec).check(default_plan(spec), lambda spec, structure: broken)
    assert verdict.reason.startswith("state error") or "finite" in verdict.reason, verdict
