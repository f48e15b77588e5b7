"""Timing on a GPU: graphs whose branches are proven to have run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.measure import LayerStack
from replayssm_tune.tuner.records import score_mode
from replayssm_tune.tuner.shapes import shape_for
from tests.specs import GDN_BF16, P64

STEPS = [dataclasses.replace(spec, op=op, num_tokens=n) for spec in (P64, GDN_BF16)
         for op, n in (("step", 1), ("verify", 4), ("verify", 8))]  # fmt: skip


SPECS = [*STEPS, *(spec.native for spec in STEPS), P64.materialize, GDN_BF16.materialize]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_default_plans_do_in_each_mode_what_it_says(spec: Spec, tmp_path: Path) -> None:
    stack = LayerStack(spec, shape_for(spec, 256), torch.device("cuda", torch.cuda.current_device()))
    source = rendered(tmp_path)

    def compiler(of: Spec, variants: tuple[Variant, ...], dtypes: tuple[str, ...]) -> CompiledPlan:
        return CompiledPlan(of, variants, source, dtypes, aligned=True)

    plan = default_plan(spec)
    steps = score_mode(spec) == "mix"
    for mode in ("mix", "nonflush", "flush") if steps else (score_mode(spec),):
        times_us = stack.graph(plan.variants, mode, compiler).time_us(3)
        assert all(0.1 < time_us < 1e4 for time_us in times_us), mode
    if steps:
        # Half a step: rows of the other branch are left as they are, which the mix does not allow.
        alone = next((v for v in plan.variants if v.structure.role == "nonflush"), None)
        if alone is not None:
            stack.graph((alone,), "nonflush", compiler)
            with pytest.raises(RuntimeError, match="in mode mix 0 of"):
                stack.graph((alone,), "mix", compiler)
