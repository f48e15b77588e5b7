"""Runs in the interpreter's process: one case of tests/codegen/test_kernels_interpreted.py."""

from __future__ import annotations

from pathlib import Path

import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime.plan import Plan
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import Gate
from replayssm_tune.tuner.trajectory import Trajectory

INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}


def verdicts(
    spec_key: str, plan_keys: list[str], index_dtype: str, gap_bytes: int, spare: int, folder: str
) -> dict[str, str]:
    """Reasons of the plans that fail the gate, "" for those that pass, by key.

    Args:
        spare: Tokens that a ring holds beyond the least.
        folder: For rendered modules.
    """
    torch.set_num_threads(1)  # threads cost more than these sizes gain
    spec = Spec.parse(spec_key)
    scene = Trajectory(
        spec,
        heads=2 * spec.heads_per_group,
        sequences=2,
        steps=4,
        padded_rows=1,
        capacity=spec.window + spec.num_tokens + spare,
        null_slot=0,
        index_dtype=INDEX_DTYPES[index_dtype],
        gap_bytes=gap_bytes,
    )
    gate = Gate(scene, repeats=2)
    return {key: gate.check(Plan.parse(key), rendered(Path(folder))).reason for key in plan_keys}


def wraps(spec_key: str, spare: int) -> bool:
    """Whether a step of the scene appends before the place where its ring starts."""
    spec = Spec.parse(spec_key)
    capacity = spec.window + spec.num_tokens + spare
    scene = Trajectory(
        spec,
        heads=2 * spec.heads_per_group,
        sequences=2,
        steps=4,
        padded_rows=1,
        capacity=capacity,
        null_slot=0,
    )
    pool = scene.pool()
    start, length = pool.ring_start[scene.slot_of], pool.ring_len[scene.slot_of]
    return bool((start + length + scene.steps > capacity).any())
