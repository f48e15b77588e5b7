"""Runs in the interpreter's process: the public ops through the launchers of CUDA tensors, on a CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime import checks, launch, signatures
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.spec import Spec
from tests.runtime.calls import call, copied, random_call


def largest_differences(spec_key: str, folder: str) -> dict[str, float]:
    """Between an op's kernel and its reference, by what a call returns (``out``) and has written.

    Args:
        spec_key: Of fp32 or fp16, with its optional inputs.
        folder: For rendered modules.
    """
    torch.set_num_threads(1)
    spec = Spec.parse(spec_key)
    given = random_call(spec, 3, 2 * spec.heads_per_group, "cpu", slots=5)
    given["slot_index"][1] = -1
    expected = copied(given)
    expected["out"] = call(expected)

    source, check = rendered(Path(folder)), checks.check_step

    def compiled(spec: Spec, plan: Any, dtypes: tuple[str, ...], aligned: bool, index: int) -> CompiledPlan:
        del index
        return CompiledPlan(spec, plan.variants, source, dtypes, aligned=aligned)

    replaced: dict[Any, dict[str, Any]] = {
        launch: {
            "plan_for": lambda spec, batch, index: default_plan(spec),
            "_compiled": compiled,
            "_raw_stream": int,
        },
        signatures: {
            "check_step": lambda *arguments: dataclasses.replace(check(*arguments), device="cuda"),
            "_known": {},
        },
    }
    kept = {(module, name): getattr(module, name) for module, names in replaced.items() for name in names}
    try:
        for module, names in replaced.items():
            for name, value in names.items():
                setattr(module, name, value)
        given["out"] = torch.full_like(expected["out"], float("nan"))
        call(given)
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)
    return {
        name: float((given[name].double() - value.double()).abs().max())
        for name, value in expected.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
