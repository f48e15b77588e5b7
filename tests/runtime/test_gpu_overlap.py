"""Launches that run beside each other: of two branches, and of coefficients with what takes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.space import points
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.plan import LEADING_ROLE, Plan, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import Gate
from replayssm_tune.tuner.measure import LayerStack
from replayssm_tune.tuner.shapes import shape_for
from replayssm_tune.tuner.trajectory import Trajectory
from tests.specs import GDN_BF16, P64, P64_BF16, drafts

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


def plan_of(spec: Spec, coefficients: dict[str, str]) -> Plan:
    """A searched plan of these roles, with these coefficients."""

    def point(role: str, how: str) -> Variant:
        return next(v for v in points(spec, role).variants if v.structure.coefficients == how)

    return Plan(tuple(point(role, how) for role, how in coefficients.items()))


def ids(value: object) -> str:
    return value.key if isinstance(value, Spec) else "-".join(map("-".join, value.items()))  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "coefficients"), PLANS, ids=ids)
def test_launches_beside_each_other_pass_the_gate(
    spec: Spec, coefficients: dict[str, str], tmp_path: Path
) -> None:
    scene = Trajectory(spec, heads=2 * spec.heads_per_group, sequences=37, steps=24, device="cuda")
    verdict = Gate(scene).check(plan_of(spec, coefficients), rendered(tmp_path))
    assert verdict.passed, verdict.reason


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "coefficients"), PLANS, ids=ids)
def test_what_follows_waits_for_all_launches(
    spec: Spec, coefficients: dict[str, str], tmp_path: Path
) -> None:
    """Outputs and states copied right behind a step are those that are there in the end."""
    stack = LayerStack(spec, shape_for(spec, 16384), torch.device("cuda", torch.cuda.current_device()))
    source, plan = rendered(tmp_path), plan_of(spec, coefficients)

    def compiler(of: Spec, variants: tuple[Variant, ...], dtypes: tuple[str, ...]) -> CompiledPlan:
        return CompiledPlan(of, variants, source, dtypes, aligned=True)

    out, state = (stack._tensors[name][0] for name in ("out", "state"))
    for mode in ("nonflush", "flush", "mix"):
        # Where all rows keep their states the second launch is over at once, and the first is not.
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


def test_the_second_launch_alone_begins_early() -> None:
    """A launch of a branch by itself waits for everything before it."""
    from replayssm_tune.runtime.compiled import begins_early

    pair = plan_of(P64_BF16, {"nonflush": INLINE, "flush": INLINE}).variants
    assert [begins_early(v, pair) for v in pair] == [v.structure.role != LEADING_ROLE for v in pair]
    assert not any(begins_early(v, (v,)) for v in pair)
    both = dataclasses.replace(pair[0].structure, role="both")
    for how, early in ((INLINE, False), (PRECOMPUTED, True)):
        variant = Variant(dataclasses.replace(both, coefficients=how), pair[0].tile)
        assert begins_early(variant, (variant,)) == early
