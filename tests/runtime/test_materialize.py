"""Materialising: what is written where, and decoding on from it."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.oracle import round_to
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests.runtime.folds import Fold, fold
from tests.specs import FOLD_DTYPES


def every_ring(spec: Spec, capacity: int, **options: Any) -> Fold:
    """A row for every fill of a ring that starts at every place."""
    lengths = torch.arange(spec.window + 1).repeat_interleave(capacity)
    starts = torch.arange(capacity).repeat(spec.window + 1)
    return fold(spec, len(starts), 4, lengths=lengths, starts=starts, capacity=capacity, **options)


@pytest.mark.parametrize(("ring", "state"), FOLD_DTYPES)
@pytest.mark.parametrize("spare", [0, 2])
def test_every_prefix_of_every_ring(driver: Any, ring: str, state: str, spare: int) -> None:
    """Against the recurrence token by token in fp64; nothing but states of destinations is written."""
    spec = driver.make_spec(activation_dtype=ring, ring_dtype=ring, state_dtype=state)
    capacity = spec.window + 1 + spare
    scene = every_ring(spec, capacity, gap_bytes=16 if spare else 4)
    pool, lengths = scene.pool, scene.lengths()
    allowed, before = scene.states_only(scene.destination), pool.storage.clone()
    cursors = pool.ring_start.clone(), pool.ring_len.clone()
    for prefix in (-3, *range(spec.window + 1), spec.window + 7, None):
        pool.storage.copy_(before)
        given = None if prefix is None else torch.full_like(scene.source, prefix)
        scene.call(prefix=given)
        count = lengths if prefix is None else lengths.clamp(max=max(prefix, 0))
        expected = scene.expected(count)
        found = pool.state[scene.destination.long()]
        ideal = relative_rms(round_to(expected, state), expected)
        assert relative_rms(found, expected) <= 1.25 * ideal + 1e-6
        # Where nothing is folded the state is copied.
        assert torch.equal(found[count == 0], pool.state[scene.source.long()][count == 0])
        assert not ((pool.storage != before) & ~allowed).any()
        assert torch.equal(pool.ring_start, cursors[0])
        assert torch.equal(pool.ring_len, cursors[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_prefix_per_row_is_clamped_to_the_ring(driver: Any, index_dtype: torch.dtype) -> None:
    scene = fold(driver.make_spec(), 40, 4, index_dtype=index_dtype, seed=3)
    count = torch.minimum(scene.prefix.long().clamp(min=0), scene.lengths())
    assert (scene.prefix < 0).any()
    assert (scene.prefix > scene.lengths()).any()
    assert {*count.tolist()} == {*range(5)}
    expected = scene.expected(count)
    scene.call()
    torch.testing.assert_close(
        scene.pool.state[scene.destination.long()].double(), expected, rtol=1e-5, atol=1e-6
    )


def test_integers_of_rows_may_differ_in_dtype(driver: Any) -> None:
    scene, other = (fold(driver.make_spec(), 7, 4) for _ in range(2))
    scene.call()
    other.call(destination=other.destination.long(), prefix=other.prefix.long())
    assert torch.equal(scene.pool.storage, other.pool.storage)


def test_one_source_serves_many_rows(driver: Any) -> None:
    spec = driver.make_spec()
    scene = fold(spec, 5, 2, lengths=torch.full((5,), 4), seed=2)
    many = dataclasses.replace(
        scene, source=scene.source[:1].repeat(5), prefix=torch.arange(5, dtype=torch.int32)
    )
    expected = many.expected(torch.arange(5))
    many.call()
    found = many.pool.state[many.destination.long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[4])


@pytest.mark.parametrize(("ring", "state"), FOLD_DTYPES)
def test_bits_are_those_that_a_flush_stores(driver: Any, ring: str, state: str) -> None:
    spec = driver.make_spec(activation_dtype=ring, ring_dtype=ring, state_dtype=state)
    scene = Trajectory(spec, heads=4, ring_len=spec.window, attend=1.0, padded_rows=0, steps=1)
    (step,) = scene
    assert bool(step.stores.all())
    flushed, pool = scene.pool(), scene.pool()
    driver.launch(scene, flushed, step)
    source = scene.slot_of
    destination = others(scene, len(source))
    folding(scene, pool).call(source=source, destination=destination, prefix=None)
    assert torch.equal(pool.state[destination], flushed.state[source])
    in_place = scene.pool()
    folding(scene, in_place).call(source=source, destination=source, prefix=None)
    assert torch.equal(in_place.state[source], flushed.state[source])


def others(scene: Trajectory, count: int) -> Tensor:
    """Slots where no sequence of the scene lies."""
    taken = set(scene.slot_of.tolist())
    free = [slot for slot in range(len(scene.pool().ring_len)) if slot not in taken]
    return torch.tensor(free[:count])


def folding(scene: Trajectory, pool: Pool) -> Fold:
    slots = scene.slot_of
    return Fold(scene.spec, pool, slots, slots, torch.full_like(slots, 64), scene.A)


def cursors(pool: Pool) -> dict[str, Any]:
    return {"ring_start": pool.ring_start, "ring_len": pool.ring_len}


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("in_place", [True, False])
def test_decoding_goes_on_from_it(driver: Any, after: int, state: str, in_place: bool) -> None:
    """After any step: in place and drained, or in other slots with empty rings, outputs stay the same."""
    scene = Trajectory(
        driver.make_spec(state_dtype=state),
        heads=2,
        sequences=4,
        slots=10,
        attend=1.0,
        padded_rows=1,
        steps=14,
    )
    here, there = scene.pool(), scene.pool()
    target = scene.slot_of if in_place else others(scene, 4)
    slot_of = torch.arange(11)
    outputs, ideal, folded = [], [], False
    for number, step in enumerate(scene):
        y = driver.launch(scene, here, step)[step.live]
        driver.commit(scene, here, step)
        # Padding is -1: it names the last entry, which is -1 too.
        slot_of[-1] = -1
        moved = dataclasses.replace(step, slot_index=slot_of[step.slot_index.long()].int())
        outputs.append((driver.launch(scene, there, moved)[step.live], y))
        ideal.append((step.y, step.ideal_y))
        driver.commit(scene, there, moved)
        if number == after:
            folded = bool((there.ring_len[scene.slot_of] > 0).any())
            folding(scene, there).call(destination=target)
            slot_of[scene.slot_of] = target
            if in_place:
                ops.drained(scene.slot_of, **cursors(there), capacity=there.capacity)
            else:
                ops.reset(target, **cursors(there))
            assert not there.ring_len[target].any()
    assert folded
    there_y, here_y = (torch.cat(part).double() for part in zip(*outputs, strict=True))
    exact, ideal_y = (torch.cat(part) for part in zip(*ideal, strict=True))
    # One more rounding of the state, beside those of its flushes.
    assert relative_rms(there_y, exact) <= 2 * relative_rms(ideal_y, exact) + 1e-5
    bound = 1e-5 if state == "fp32" else 1e-2
    assert relative_rms(there_y, here_y) <= bound


@pytest.mark.parametrize("fill", range(5))
def test_native_steps_take_over_and_hand_back(driver: Any, fill: int) -> None:
    """Steps with a ring, a drain, native steps, steps with a ring again: the oracle's outputs throughout."""
    scene = Trajectory(
        driver.make_spec(), heads=2, sequences=3, ring_len=fill, attend=1.0, accept=1.0, null_slot=2, steps=18
    )
    native = copy.copy(scene)
    native.spec = scene.spec.native
    pool = scene.pool()
    for number, step in enumerate(scene):
        if number == 5:
            folding(scene, pool).call(null_slot=2)
            ops.drained(scene.slot_of, **cursors(pool), capacity=pool.capacity, null_slot=2)
            rings = pool.ring_x.clone()
        by_native = 5 <= number < 11
        y = driver.launch(native if by_native else scene, pool, step)
        if by_native:
            assert torch.equal(pool.ring_x.nan_to_num(), rings.nan_to_num())
        else:
            driver.commit(scene, pool, step)
        torch.testing.assert_close(y[step.live].double(), step.y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("null_slot", [None, 0, 5])
def test_padded_rows_touch_nothing(driver: Any, null_slot: int | None) -> None:
    scene = fold(driver.make_spec(), 8, 4, seed=4)
    padding = torch.tensor([-7, -1 if null_slot is None else null_slot], dtype=torch.int32)
    scene.source[[0, 1]], scene.destination[[2, 3]] = padding, padding
    scene.source[4], scene.destination[4] = padding[0], padding[1]
    # A padded row may name what would be refused: a destination twice, or a slot beyond the last.
    scene.destination[0], scene.source[3] = scene.destination[5], 10**6
    live = torch.tensor(
        [row for row in (5, 6, 7) if null_slot not in (scene.source[row], scene.destination[row])]
    )
    lengths = scene.pool.ring_len[scene.source[live].long()].long()
    count = torch.minimum(scene.prefix[live].long().clamp(min=0), lengths)
    expected = dataclasses.replace(scene, source=scene.source[live]).expected(count)
    before = scene.pool.storage.clone()
    allowed = scene.states_only(scene.destination[live])
    scene.call(null_slot=null_slot)
    assert not ((scene.pool.storage != before) & ~allowed).any()
    found = scene.pool.state[scene.destination[live].long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_no_rows(driver: Any) -> None:
    scene = fold(driver.make_spec(), 3, 4)
    before = scene.pool.storage.clone()
    scene.call(**{name: getattr(scene, name)[:0] for name in ("source", "destination", "prefix")})
    scene.call(source=scene.source[:0], destination=scene.destination[:0], prefix=None)
    assert torch.equal(scene.pool.storage, before)


@pytest.mark.parametrize(("head_dim", "state_size"), [(80, 128), (48, 96), (5, 256), (256, 7), (1, 1)])
def test_odd_shapes(driver: Any, head_dim: int, state_size: int) -> None:
    spec = driver.make_spec(head_dim=head_dim, state_size=state_size, heads_per_group=1)
    scene = fold(spec, 5, 2, gap_bytes=4)
    expected = scene.expected(torch.minimum(scene.prefix.long().clamp(min=0), scene.lengths()))
    before, allowed = scene.pool.storage.clone(), scene.states_only(scene.destination)
    scene.call()
    assert not ((scene.pool.storage != before) & ~allowed).any()
    found = scene.pool.state[scene.destination.long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_large_decays_leave_no_nan(driver: Any, family: str) -> None:
    scene = fold(driver.make_spec(), 10, 4)
    live = ~scene.pool.ring_decay.isnan()
    exponent = torch.rand(scene.pool.ring_decay.shape, generator=torch.Generator().manual_seed(1)) * 14 - 8
    scene.pool.ring_decay[live] = (10.0**exponent)[live] * (-1 if family == "gdn" else 1)
    expected = scene.expected(scene.lengths())
    scene.call(prefix=None)
    found = scene.pool.state[scene.destination.long()]
    assert relative_rms(found, expected) < 1e-6


def test_states_that_are_old_are_not_had_back(driver: Any) -> None:
    """A flush folds the ring into the state: prefixes of what it held are gone, as documented."""
    scene = Trajectory(
        driver.make_spec(), heads=2, ring_len=4, attend=1.0, accept=1.0, padded_rows=0, steps=1
    )
    pool, (step,) = scene.pool(), scene
    old = pool.state[scene.slot_of].clone()
    driver.launch(scene, pool, step)
    driver.commit(scene, pool, step)
    target = others(scene, 5)
    folding(scene, pool).call(destination=target, prefix=torch.zeros(5, dtype=torch.int32))
    assert torch.equal(pool.state[target], pool.state[scene.slot_of])
    assert not torch.equal(pool.state[target], old)
    assert not math.isnan(float(pool.state[target].sum()))
