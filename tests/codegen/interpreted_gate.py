"""Runs in the interpreter's process: one case of tests/codegen/test_kernels_interpreted.py."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime.plan import Plan
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import Gate, PlanRunner, commit
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


def bits(
    spec_key: str, plan_keys: list[str], folder: str, device: str = "cpu", **options: Any
) -> dict[str, str]:
    """Digest of all outputs, states and rings of a trajectory, by plan key.

    Args:
        folder: For rendered modules.
        device: A GPU serves too.
        options: Of the trajectory.
    """
    torch.set_num_threads(1)
    spec = Spec.parse(spec_key)
    sizes = {"heads": spec.heads_per_group, "sequences": 2, "steps": 5, "padded_rows": 1}
    scene = Trajectory(spec, **{**sizes, **options}, device=device)
    steps = list(scene)
    assert {bool(flag) for step in steps for flag in step.stores} == {False, True}
    found = {}
    for key in plan_keys:
        runner = PlanRunner(spec, Plan.parse(key), rendered(Path(folder)), scene)
        pool, digest = scene.pool(), hashlib.sha256()
        for step in steps:
            for tensor in (runner.launch(pool, step)[step.new], pool.storage):
                digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
            commit(spec, pool, step)
        found[key] = digest.hexdigest()
    return found


def rows_that_differ(
    spec_key: str, plan_key: str, folder: str, device: str = "cpu", **options: Any
) -> list[int]:
    """Batches at which the first rows of a step (one token each) are not what they are in the whole batch.

    Arguments are those of :func:`bits`.
    """
    torch.set_num_threads(1)
    spec = Spec.parse(spec_key)
    sizes = {"heads": spec.heads_per_group, "sequences": 5, "steps": 6, "padded_rows": 0}
    scene = Trajectory(spec, **{**sizes, **options}, device=device)
    *before, last = scene
    runner = PlanRunner(spec, Plan.parse(plan_key), rendered(Path(folder)), scene)
    pool = scene.pool()
    for step in before:
        runner.launch(pool, step)
        commit(spec, pool, step)
    saved = pool.storage.clone()
    whole, rows = runner.launch(pool, last), len(last.slot_index)
    stored = pool.state.clone()
    differ = []
    for count in (n for n in (1, 2, rows - 1) if n < rows):
        pool.storage.copy_(saved)
        names = ("x", "dt", "B", "C", "z", "beta", "slot_index")
        part = {name: value[:count] for name in names if (value := getattr(last, name)) is not None}
        same = torch.equal(runner.launch(pool, replace(last, **part)), whole[:count])
        slots = part["slot_index"].long()
        slots = slots[slots >= 0]
        if not (same and torch.equal(pool.state[slots], stored[slots])):
            differ.append(count)
    return differ
