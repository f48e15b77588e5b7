"""Materialising and snapshots with compiled kernels: numbers, memory, graphs, decoding on.

Tests with a device run on CPUs too, through the eager reference, so that they are known to be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.oracle import round_to
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import ERROR_FACTOR, ERROR_FLOOR
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests.runtime import calls
from tests.runtime.calls import cache_of, captured
from tests.runtime.folds import Fold, fold
from tests.specs import GDN, GDN_BF16, ODD, P64, P64_BF16, P80

family = calls.family

GDN_ODD = Spec("gdn", "step", 48, 96, 3, 8, activation_dtype="fp16", ring_dtype="fp32", has_d=False)

FOLDS: dict[str, tuple[Spec, dict[str, Any]]] = {
    "p64-fp32": (P64, {}),
    "p64-bf16": (P64_BF16, {"index_dtype": torch.int64}),
    "p80-fp32": (P80, {}),
    "p64-exact": (dataclasses.replace(P64, activation_dtype="fp32", ring_dtype="fp32"), {}),
    "p64-unaligned": (P64_BF16, {"gap_bytes": 4}),
    "long-window": (dataclasses.replace(P64, head_dim=16, state_size=48, window=64), {}),
    "odd-fp16": (ODD, {}),
    "gdn-fp32": (GDN, {}),
    "gdn-bf16": (GDN_BF16, {"index_dtype": torch.int64}),
    "gdn-fp32-ring": (dataclasses.replace(GDN, ring_dtype="fp32"), {}),
    "gdn-unaligned": (GDN_BF16, {"gap_bytes": 4}),
    "gdn-odd": (GDN_ODD, {}),
}
SPECS = {"mamba2-fp32": P64, "mamba2-bf16": P64_BF16, "gdn-fp32": GDN, "gdn-bf16": GDN_BF16}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.mark.parametrize("name", FOLDS)
def test_states_are_those_of_the_recurrence(device: str, renders: None, name: str) -> None:
    """Rings of every fill, any prefix: as exact as the state's dtype, and nothing else is written."""
    spec, options = FOLDS[name]
    times = 4 if device == "cuda" else 1
    rows = times * max(17, spec.window + 1)
    scene = fold(spec, rows, times * spec.heads_per_group, device, **options)
    expected, before = scene.expected(scene.counts()), scene.pool.storage.clone()
    assert len({*scene.counts().tolist()}) > 4
    scene.call()
    found = scene.pool.state[scene.destination.long()]
    ideal = relative_rms(round_to(expected, spec.state_dtype), expected)
    assert relative_rms(found, expected) <= ERROR_FACTOR * ideal + ERROR_FLOOR
    assert not ((scene.pool.storage != before) & ~scene.states_only(scene.destination)).any()
    # In place after the others have been served, all of it.
    whole, kept = scene.expected(scene.lengths()), scene.pool.storage.clone()
    scene.call(destination=scene.source, prefix=None)
    ideal = relative_rms(round_to(whole, spec.state_dtype), whole)
    found = scene.pool.state[scene.source.long()]
    assert relative_rms(found, whole) <= ERROR_FACTOR * ideal + ERROR_FLOOR
    assert not ((scene.pool.storage != kept) & ~scene.states_only(scene.source)).any()


@pytest.mark.gpu
@specs
def test_a_part_of_a_ring_in_place_is_left_as_it_is(renders: None, spec: Spec) -> None:
    """A CPU raises; a kernel cannot, and must not fold what would be folded again."""
    scene = fold(spec, 17, 2 * spec.heads_per_group, "cuda")
    part = (scene.counts() != scene.lengths()).nonzero()[:, 0]
    assert len(part) > 4
    before = scene.pool.storage.clone()
    scene.call(
        **{name: getattr(scene, name)[part] for name in ("source", "prefix")}, destination=scene.source[part]
    )
    assert torch.equal(scene.pool.storage, before)


@specs
def test_launches_from_the_same_memory_agree(device: str, renders: None, spec: Spec) -> None:
    rows, launches = (256, 20) if device == "cuda" else (5, 3)
    scene = fold(spec, rows, 2 * spec.heads_per_group, device)
    scene.call()
    first = scene.pool.storage.clone()
    for _ in range(launches):
        scene.pool.state[scene.destination.long()] = float("nan")
        scene.call()
        assert torch.equal(scene.pool.storage, first)


@specs
@pytest.mark.parametrize("everything", [False, True])
def test_graphs_replay_any_live_rows(
    device: str, renders: None, forbid_compiling: Callable[[], None], spec: Spec, everything: bool
) -> None:
    """Captured after a warm-up; slots and prefixes change in place between replays."""
    rows, heads = 17, 2 * spec.heads_per_group
    scene = fold(spec, rows, heads, device, index_dtype=torch.int64)
    other = scene.copied()
    if device == "cuda":
        assert ops.warmup(spec.materialize, [rows * heads], device, torch.int64) == 1
    forbid_compiling()
    source, destination, prefix = (t.clone() for t in (scene.source, scene.destination, scene.prefix))
    changes = {"prefix": None} if everything else {}

    def body(one: Fold) -> None:
        one.call(**changes)
        ops.drained(
            one.source, ring_start=one.pool.ring_start, ring_len=one.pool.ring_len, capacity=one.pool.capacity
        )

    start, length, storage = (
        scene.pool.ring_start.clone(),
        scene.pool.ring_len.clone(),
        scene.pool.storage.clone(),
    )
    replay = captured(device, lambda: body(scene))
    for live in (1, 7, rows):
        for one in (scene, other):
            one.pool.storage.copy_(storage)
            one.pool.ring_start.copy_(start)
            one.pool.ring_len.copy_(length)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(live)).to(device)
        for mine, given in ((scene.source, source), (scene.destination, destination), (scene.prefix, prefix)):
            mine.copy_(given[order])
        scene.source[live:] = -1
        replay()
        body(other)
        assert torch.equal(scene.pool.storage, other.pool.storage)
        allowed = scene.states_only(scene.destination[:live])
        changed = scene.pool.storage != storage
        assert bool(changed.any())
        assert not (changed & ~allowed).any()
        assert not scene.pool.ring_len[scene.source[:live]].any()


@specs
def test_decoding_goes_on_in_other_slots(driver: Any, device: str, renders: None, spec: Spec) -> None:
    """Two sequences go on from materialised states, two from a snapshot, all in other slots than before."""
    heads, steps = 2 * spec.heads_per_group, 24
    scene = Trajectory(spec, heads=heads, sequences=4, steps=steps, accept=0.9, attend=1.0, device=device)
    pool, slots = scene.pool(), scene.slot_of
    free = [slot for slot in range(len(pool.ring_len)) if slot not in set(slots.tolist())]
    targets = torch.tensor(free[:4], device=device)
    slot_of = torch.arange(len(pool.ring_len) + 1, device=device)
    slot_of[-1] = -1
    cache = cache_of(pool, spec)
    y, expected, ideal = [], [], []
    for number, step in enumerate(scene):
        moved = dataclasses.replace(step, slot_index=slot_of[step.slot_index.long()].int())
        y.append(driver.launch(scene, pool, moved)[step.live].double())
        driver.commit(scene, pool, moved)
        expected.append(step.y)
        ideal.append(step.ideal_y)
        if number == 9:
            folded, taken = slots[:2], slots[2:]
            Fold(spec, pool, folded, targets[:2], torch.full_like(folded, 64), scene.A).call()
            ops.reset(targets[:2], ring_start=pool.ring_start, ring_len=pool.ring_len)
            cache.restore(cache.snapshot(taken), targets[2:])
            # Whoever still reads the old slots shows.
            cache.state[slots] = float("nan")
            slot_of[slots] = targets
    exact = torch.cat(expected)
    assert relative_rms(torch.cat(y), exact) <= 1.5 * relative_rms(torch.cat(ideal), exact) + ERROR_FLOOR
