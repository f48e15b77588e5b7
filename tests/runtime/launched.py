"""Runs in the interpreter's process: the public ops through the launchers of CUDA tensors, on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.space import roles
from replayssm_tune.runtime import checks, launch, signatures
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.interpreted import small_plan
from tests.runtime.calls import call, copied, random_call
from tests.runtime.drafts import Scene, lives
from tests.runtime.folds import fold


@contextlib.contextmanager
def as_on_a_gpu(folder: str, split: bool = False) -> Iterator[None]:
    """Calls of the public ops end in kernels rendered into ``folder``.

    Args:
        split: They have several blocks of rows and columns, and heads, instead of the default's tile.
    """
    source, check = rendered(Path(folder)), checks.check_step

    def compiled(spec: Spec, plan: Plan, dtypes: tuple[str, ...], aligned: bool, index: int) -> CompiledPlan:
        del index
        return CompiledPlan(spec, plan.variants, source, dtypes, aligned=aligned)

    def plan_for(spec: Spec, batch: int, index: int) -> Plan:
        del batch, index
        return small_plan(spec, Structure(roles(spec)[0])) if split else default_plan(spec)

    replaced: dict[Any, dict[str, Any]] = {
        launch: {"plan_for": plan_for, "_compiled": compiled, "_raw_stream": int},
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
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


def largest_differences(
    spec_key: str, folder: str, packed: bool = False, split: bool = False
) -> dict[str, float]:
    """Between an op's kernel and its reference, by what a call returns (``out``) and has written.

    Args:
        spec_key: Of fp32 or fp16, with its optional inputs.
        folder: For rendered modules.
        packed: See :func:`.calls.random_call`.
        split: See :func:`as_on_a_gpu`.
    """
    torch.set_num_threads(1)
    spec = Spec.parse(spec_key)
    assert not packed or spec.verifies
    given = random_call(
        spec, 5, 2 * spec.heads_per_group, "cpu", slots=5 * spec.num_tokens + 2, packed=packed, seed=2
    )
    given["slot_index"][1] = -1
    if packed:
        # A row of padding with tokens, one without a token, and tokens that nobody owns.
        most = spec.num_tokens
        given["query_start"] = torch.tensor([0, most, 1, 0, 1, most]).cumsum(0).int()
    expected = copied(given)
    expected["out"] = call(expected)
    given["out"] = torch.full_like(expected["out"], float("nan"))
    with as_on_a_gpu(folder, split):
        call(given)
    return {
        name: float((given[name].double() - value.double()).abs().max())
        for name, value in expected.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def lives_of_drafts(family: str, folder: str, packed: bool, split: bool) -> dict[str, int]:
    """Sequences through all ops by their kernels; see :func:`.drafts.lives`.

    Args:
        family: Of the scene.
        folder: For rendered modules.
        packed: Rows vary in their tokens.
        split: See :func:`as_on_a_gpu`.

    Returns:
        How often what it is about has happened.
    """
    scene = Scene(family, 4, 3, packed, sequences=5, padded_rows=1, events=0.18, seed=6)
    with as_on_a_gpu(folder, split):
        return dict(lives(scene, 10, native=0.3).met)


def folds(spec_key: str, index_dtype: str, gap_bytes: int, split: bool, folder: str) -> dict[str, float]:
    """A call of what materialises states, by its kernel, of rows of all kinds.

    Args:
        spec_key: Of a step of fp32 or fp16.
        index_dtype: Of source, destination and prefix.
        gap_bytes: 4 leaves nothing aligned.
        split: See :func:`as_on_a_gpu`.
        folder: For rendered modules.

    Returns:
        The largest difference from the reference, relative to the largest value (``state``), and how many
        bytes have changed that are no state of a live row's destination (``elsewhere``).
    """
    torch.set_num_threads(1)
    spec = Spec.parse(spec_key)
    heads, dtype = 2 * spec.heads_per_group, getattr(torch, index_dtype)
    capacity = spec.window + 2
    starts = capacity - 1 - torch.arange(14) % 2  # from two tokens on they wrap
    scene = fold(
        spec, 14, heads, starts=starts, capacity=capacity, index_dtype=dtype, gap_bytes=gap_bytes, seed=1
    )
    scene.source[0], scene.destination[1], null = -1, -1, int(scene.destination[2])
    # In place: one row with the whole ring; one with a part of it, which a GPU leaves as it is.
    scene.destination[3:5] = scene.source[3:5]
    scene.prefix[3:5] = torch.tensor([7, 2])
    scene.prefix[9:] = torch.tensor([3, 0, -1, 1, 2])
    assert scene.lengths()[3:].tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    known = [3, *range(5, 14)]
    wanted = scene.copied()
    wanted.call(**{name: getattr(scene, name)[known] for name in ("source", "destination", "prefix")})
    before, allowed = scene.pool.storage.clone(), scene.states_only(scene.destination[known])
    with as_on_a_gpu(folder, split):
        scene.call(null_slot=null)
    found, expected = (one.pool.state[scene.destination[known].long()].double() for one in (scene, wanted))
    difference = ((found - expected).abs().max() / expected.abs().max()).nan_to_num(float("inf"))
    elsewhere = (scene.pool.storage != before) & ~allowed
    return {"state": float(difference), "elsewhere": float(elsewhere.sum())}
