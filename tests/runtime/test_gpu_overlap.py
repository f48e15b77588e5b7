"""Launches that run beside each other: of two branches, and of coefficients with what takes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime import compiled
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.plan import Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import Gate
from replayssm_tune.tuner.measure import Graph, LayerStack
from replayssm_tune.tuner.shapes import shape_for
from replayssm_tune.tuner.trajectory import Trajectory
from tests.runtime.calls import same_bits
from tests.specs import GDN_BF16, P64, P64_BF16, drafts, searched_plan

INLINE, PRECOMPUTED, PROLOGUE = "inline", "precomputed", "prologue"

PLANS = [
    (P64, {"nonflush": INLINE, "flush": INLINE}),
    (P64_BF16, {"nonflush": PRECOMPUTED, "flush": INLINE}),
    (P64, {"both": PRECOMPUTED}),
    (GDN_BF16, {"nonflush": PROLOGUE, "flush": INLINE}),
    (drafts(P64, 4), {"nonflush": PRECOMPUTED, "flush": PRECOMPUTED}),
    (drafts(P64_BF16, 4), {"nonflush": PROLOGUE, "flush": PRECOMPUTED}),
    (drafts(P64_BF16, 4), {"nonflush": PROLOGUE, "flush": PROLOGUE}),
    (drafts(GDN_BF16, 8), {"nonflush": PRECOMPUTED, "flush": PRECOMPUTED}),
    (drafts(GDN_BF16, 4), {"nonflush": PROLOGUE, "flush": PROLOGUE}),
    (drafts(GDN_BF16, 4), {"both": PRECOMPUTED}),
]

plans = pytest.mark.parametrize(
    ("spec", "coefficients"),
    PLANS,
    ids=["-".join((spec.key, *(f"{role}_{how}" for role, how in plan.items()))) for spec, plan in PLANS],
)


@pytest.mark.gpu
@plans
def test_launches_beside_each_other_pass_the_gate(
    spec: Spec, coefficients: dict[str, str], tmp_path: Path
) -> None:
    scene = Trajectory(spec, heads=2 * spec.heads_per_group, sequences=37, steps=24, device="cuda")
    verdict = Gate(scene).check(searched_plan(spec, coefficients), rendered(tmp_path))
    assert verdict.passed, verdict.reason


@pytest.mark.gpu
@plans
def test_what_follows_waits_for_all_launches(
    spec: Spec, coefficients: dict[str, str], tmp_path: Path
) -> None:
    """Outputs and states copied right behind a step are those that are there in the end."""
    stack = LayerStack(spec, shape_for(spec, 16384), torch.device("cuda", torch.cuda.current_device()))
    source, plan = rendered(tmp_path), searched_plan(spec, coefficients)

    def compiler(of: Spec, variants: tuple[Variant, ...], dtypes: tuple[str, ...]) -> CompiledPlan:
        return CompiledPlan(of, variants, source, dtypes, aligned=True)

    out, state = (stack._tensors[name][0] for name in ("out", "state"))
    for mode in ("nonflush", "flush", "mix"):
        # Where all rows are of one branch one launch is over at once, and the other is not.
        step = stack.calls(plan.variants, mode, compiler)[0]
        step()
        for _ in range(5):
            out.fill_(float("nan"))
            stack.clear()
            torch.cuda.synchronize()
            step()
            copies = out.clone(), state.clone()
            torch.cuda.synchronize()
            assert bool(out.isfinite().all()), mode
            assert torch.equal(copies[0], out), mode
            assert torch.equal(copies[1], state), mode


class Poisoned:
    """torch, whose new tensors are not merely arbitrary."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, math.nan, dtype=dtype, device=device)


@pytest.mark.gpu
@plans
def test_overlapping_launches_give_the_bits_of_those_that_do_not(
    spec: Spec, coefficients: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph, where a launch costs less than coefficients take, and nothing of older ones is left."""
    stack = LayerStack(spec, shape_for(spec, 8192), torch.device("cuda", torch.cuda.current_device()))
    source, plan = rendered(tmp_path), searched_plan(spec, coefficients)
    names = ("out", "state", "ring_x", "ring_b", "ring_decay")
    before = {name: stack._tensors[name].clone() for name in names}
    monkeypatch.setattr(compiled, "torch", Poisoned())

    def compiler(of: Spec, variants: tuple[Variant, ...], dtypes: tuple[str, ...]) -> CompiledPlan:
        return CompiledPlan(of, variants, source, dtypes, aligned=True)

    def after(overlap: bool) -> dict[str, torch.Tensor]:
        monkeypatch.setenv(compiled.OVERLAP_VARIABLE, str(int(overlap)))
        graph = Graph(stack.calls(plan.variants, "mix", compiler))
        for name, values in before.items():
            stack._tensors[name].copy_(values)
        stack._tensors["out"].fill_(math.nan)
        graph.time_us(20)
        return {name: stack._tensors[name].clone() for name in names}

    expected, found = after(False), after(True)
    assert bool(expected["out"].isfinite().all())
    assert not torch.equal(expected["state"], before["state"])
    for name in names:
        assert same_bits(found[name], expected[name]), name
