"""Pools and trajectories: what the gate relies on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import make_pool
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms

SPEC = Spec("mamba2", "step", head_dim=6, state_size=10, heads_per_group=2, window=3)
GDN = dataclasses.replace(SPEC, family="gdn", has_d=False, qk_l2norm=True)
FAMILIES = pytest.mark.parametrize("spec", [SPEC, GDN], ids=["mamba2", "gdn"])


@pytest.mark.parametrize("gap_bytes", [4, 16])
@pytest.mark.parametrize(
    "dtypes", [("bf16", "fp32", "bf16"), ("fp16", "fp16", "fp32"), ("fp32", "bf16", "fp32")]
)
def test_pool_is_poisoned_strided_and_disjoint(gap_bytes: int, dtypes: tuple[str, str, str]) -> None:
    activation, state, ring = dtypes
    spec = Spec(
        "mamba2", "step", 6, 10, 2, 3, activation_dtype=activation, state_dtype=state, ring_dtype=ring
    )
    pool = make_pool(spec, 5, 4, 2, gap_bytes=gap_bytes)
    views = {name: getattr(pool, name) for name in pool.fields}
    assert [tuple(v.shape) for v in views.values()] == [(5, 4, 6, 10), (5, 4, 4, 6), (5, 2, 4, 10), (5, 4, 4)]
    assert pool.capacity == 4
    for view in views.values():
        assert view.isnan().all()
        assert view.stride(-1) == 1
        assert not view.is_contiguous()
        assert view.untyped_storage().data_ptr() == pool.storage.data_ptr()
    # Writing every element of every cache writes each byte at most once and leaves gaps.
    count = torch.zeros_like(pool.storage)
    for field in pool.fields.values():
        field.bytes_of(count).add_(1)
    assert count.max() == 1
    owned = sum(v.numel() * v.element_size() for v in views.values())
    assert int(count.sum()) == owned < pool.storage.numel()
    for name, view in views.items():
        view.fill_(1.0)
        assert not getattr(pool, name).isnan().any()
    assert (pool.storage[count == 0] == 0xFF).all()


def test_writable_bytes() -> None:
    pool = make_pool(SPEC, 5, 4, 2)
    slots, append = torch.tensor([4, 0]), torch.tensor([3, 1])
    mask = pool.writable(slots, torch.tensor([True, False]), append)
    before = pool.storage.clone()
    pool.state[4] = 0
    pool.ring_x[slots, :, append] = 0
    pool.ring_b[slots, :, append] = 0
    pool.ring_decay[slots, :, append] = 0
    assert torch.equal(pool.storage != before, mask)


def test_pool_of_native_spec_has_no_rings() -> None:
    pool = make_pool(SPEC.native, 3, 4, 2)
    assert pool.capacity == 0
    assert pool.ring_x.numel() == 0
    assert pool.state.shape == (3, 4, 6, 10)


@FAMILIES
@pytest.mark.parametrize("op", ["step", "native_step"])
def test_trajectory_repeats_itself(spec: Spec, op: str) -> None:
    spec = spec if op == "step" else spec.native
    scene = Trajectory(spec, heads=4, steps=6, seed=3)
    again = Trajectory(spec, heads=4, steps=6, seed=3)
    assert torch.equal(scene.pool().storage, again.pool().storage)
    for first, second, third in zip(list(scene), list(scene), list(again), strict=True):
        for name, value in vars(first).items():
            if isinstance(value, torch.Tensor):
                for other in (getattr(second, name), getattr(third, name)):
                    assert torch.equal(value.nan_to_num(0.5), other.nan_to_num(0.5)), name
    other = Trajectory(spec, heads=4, steps=1, seed=4)
    assert not torch.equal(scene.pool().storage, other.pool().storage)


@FAMILIES
def test_trajectory_covers_what_the_gate_asks_for(spec: Spec) -> None:
    scene = Trajectory(spec, heads=4, sequences=6, steps=40, null_slot=2, accept=0.7)
    pool = scene.pool()
    assert 2 not in scene.slot_of.tolist()
    seen_padding, flushes, wrapped, orders = set(), [], False, set()
    previous = {int(s): int(n) for s, n in zip(scene.slot_of, pool.ring_len[scene.slot_of], strict=True)}
    for step in scene:
        padded = torch.ones(scene.rows, dtype=torch.bool)
        padded[step.live] = False
        seen_padding |= set(step.slot_index[padded].tolist())
        inputs = (step.x, step.dt, step.B, step.C, *(() if step.beta is None else (step.beta,)))
        assert len(inputs) == 4 + (spec.family == "gdn")
        for value in inputs:
            assert value[padded].isnan().all()
            assert value[step.live].isfinite().all()
        assert len(set(step.slots.tolist())) == len(step.slots)
        assert torch.equal(step.slot_index[step.live].long(), step.slots)
        flushes.append(float(step.stores.float().mean()) if len(step.stores) else 0.0)
        wrapped |= bool((step.append == 0).any())
        orders.add(tuple(step.slots.tolist()))
        assert len(step.stored) == int(step.stores.sum())
        assert step.y.shape[0] == len(step.live)
        for slot, stores in zip(step.slots.tolist(), step.stores.tolist(), strict=True):
            assert stores == (previous[slot] + 1 > SPEC.window)
        kept = step.accepted[step.live].tolist()
        for slot, stores, accepted in zip(step.slots.tolist(), step.stores.tolist(), kept, strict=True):
            previous[slot] = accepted + (0 if stores else previous[slot])
    assert seen_padding == {-1, 2}
    assert wrapped
    assert len(orders) > 30
    assert any(0 < share < 1 for share in flushes)


@FAMILIES
@pytest.mark.parametrize("ring_len", [0, 3])
def test_all_rows_in_one_branch(spec: Spec, ring_len: int) -> None:
    scene = Trajectory(spec, heads=2, sequences=4, steps=1, ring_len=ring_len, attend=1.0)
    (step,) = scene
    assert bool(step.stores.all()) == bool(step.stores.any()) == (ring_len == 3)


def test_step_sizes_lie_in_their_range() -> None:
    scene = Trajectory(SPEC, heads=2, steps=20, deltas=(1e-2, 1.0))
    deltas: Any = torch.cat([step.delta.flatten() for step in scene])
    assert deltas.min() > 0.9e-2
    assert deltas.max() < 1.1


def test_decays_of_gdn_are_rates_times_step_sizes() -> None:
    scene = Trajectory(GDN, heads=4, steps=20, rates=(2.0, 3.0), deltas=(1e-2, 1.0))
    gates: Any = torch.cat([step.delta.flatten() for step in scene])
    assert gates.max() < -2 * 0.9e-2
    assert gates.min() > -3 * 1.1
    assert gates.min() < -0.5


@pytest.mark.parametrize("normalises", [True, False])
def test_keys_of_gdn_are_correlated(normalises: bool) -> None:
    spec = dataclasses.replace(
        GDN, state_size=64, qk_l2norm=normalises, activation_dtype="fp32", ring_dtype="fp32"
    )
    scene = Trajectory(spec, heads=4, steps=30, attend=1.0)
    keys = torch.cat([step.B[step.live] for step in scene])
    norms = keys.norm(dim=-1, keepdim=True)
    if normalises:  # raw keys of many lengths, some where the epsilon of the norm counts
        assert norms.min() < 3e-3
        assert norms.max() > 3
    else:
        torch.testing.assert_close(norms, torch.ones_like(norms))
    keys = keys / norms
    for group in range(2):
        cosines = keys[:, group] @ keys[:, group].T
        cosines = cosines[~torch.eye(len(cosines), dtype=torch.bool)]
        assert float(cosines.mean()) == pytest.approx(0.7, abs=0.05)


@FAMILIES
def test_a_pool_begins_with_what_the_ideal_has_taken_in(spec: Spec) -> None:
    """State and ring of the pool, taken in token by token, are the ideal's state at the start."""
    scene = Trajectory(spec, heads=4, sequences=3, steps=1, ring_len=3, attend=1.0, padded_rows=0)
    pool, (step,) = scene.pool(), list(scene)
    state = pool.state[step.slots].double()
    for j in range(3):
        token = (pool.ring_start[step.slots].long() + j) % pool.capacity
        entry = pool.entry(step.slots, token)
        assert all(value.isfinite().all() for value in entry)
        state = scene.recurrence.advance(state, entry)
    rounded = state.to(pool.state.dtype).double()
    torch.testing.assert_close(rounded, step.ideal_stored, rtol=1e-12, atol=1e-12)
    pool.put(step.slots, step.append, entry)
    found = pool.entry(step.slots, step.append)
    assert all(torch.equal(a, b) for a, b in zip(entry, found, strict=True))


def test_relative_rms() -> None:
    assert relative_rms(
        torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0], dtype=torch.float64)
    ) == pytest.approx(math.sqrt(0.5) / math.sqrt(12.5))
    assert relative_rms(torch.zeros(0), torch.zeros(0)) == 0.0
