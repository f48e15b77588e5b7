"""Pools and trajectories: what the gate relies on."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import commit
from replayssm_tune.tuner.pool import make_pool
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests import specs

SPEC = Spec("mamba2", "step", head_dim=6, state_size=10, heads_per_group=2, window=3)
GDN = dataclasses.replace(SPEC, family="gdn", has_d=False, qk_l2norm=True)
FAMILIES = pytest.mark.parametrize("spec", [SPEC, GDN], ids=["mamba2", "gdn"])


def drafts(spec: Spec, num_tokens: int, window: int = 5) -> Spec:
    return specs.drafts(spec, num_tokens, window=window)


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
@pytest.mark.parametrize("op", ["step", "native_step", "verify", "native_verify"])
def test_trajectory_repeats_itself(spec: Spec, op: str) -> None:
    spec = drafts(spec, 3) if op.endswith("verify") else spec
    spec = spec.native if op.startswith("native") else spec
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


def owned(scene: Trajectory, step: Any) -> list[range]:
    """Tokens of each row."""
    most = scene.spec.num_tokens
    if step.query_start is None:
        return [range(row * most, (row + 1) * most) for row in range(scene.rows)]
    bounds = step.query_start.tolist()
    assert bounds[0] == 0
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


@FAMILIES
@pytest.mark.parametrize("op", ["verify", "native_verify"])
@pytest.mark.parametrize(("num_tokens", "window"), [(1, 3), (3, 5), (4, 4)])
def test_rows_of_several_tokens(spec: Spec, op: str, num_tokens: int, window: int) -> None:
    spec = drafts(spec, num_tokens, window)
    spec = spec.native if op == "native_verify" else spec
    scene = Trajectory(spec, heads=4, sequences=5, steps=30, null_slot=2)
    assert 2 not in scene.slot_of.flatten().tolist()
    pool, slots_of = scene.pool(), scene.slot_of.reshape(5, -1)
    assert slots_of.shape[1] == (num_tokens if op == "native_verify" else 1)
    cursors = {}
    if op == "verify":
        cursors = {s: (int(pool.ring_start[s]), int(pool.ring_len[s])) for s in slots_of[:, 0].tolist()}
    begins_at: dict[
        int, int
    ] = {}  # of native_verify: the slot that each sequence starts from, by its first one
    met = set()
    for number, step in enumerate(scene):
        rows = owned(scene, step)
        assert (step.query_start is None) == (number % 2 == 1)
        met.add("tail" if len(step.x) > rows[-1].stop else "no tail")
        live = dict(zip(step.live.tolist(), range(len(step.live)), strict=True))
        first = step.slot_index.reshape(scene.rows, -1)[:, 0].tolist()
        assert step.new.tolist() == [token for row in step.live.tolist() for token in rows[row]]
        assert step.row.tolist() == [live[row] for row in step.live.tolist() for _ in rows[row]]
        assert step.count.tolist() == [len(rows[row]) for row in step.live.tolist()]
        for row, tokens in enumerate(rows):
            assert 0 <= len(tokens) <= num_tokens
            met.add(f"{len(tokens)} tokens, {'live' if row in live else 'padded'}")
            if row not in live and len(tokens):
                assert first[row] in (-1, 2)
            else:
                assert first[row] in slots_of[:, 0].tolist()
        inputs = (step.x, step.dt, step.B, step.C, *(() if step.beta is None else (step.beta,)))
        nobodys = torch.ones(len(step.x), dtype=torch.bool)
        nobodys[step.new] = False
        for value in inputs:
            assert len(value) == len(step.x)
            assert value[nobodys].isnan().all()
            assert value[step.new].isfinite().all()
        assert len(step.y) == len(step.ideal_y) == len(step.delta) == len(step.new)
        assert len(step.stored) == len(step.ideal_stored) == len(step.stored_slots)

        targets, append, stored = [], [], []
        for row, index in live.items():
            slot, count, kept = first[row], len(rows[row]), int(step.accepted[row])
            if op == "native_verify":
                assert step.previous is not None
                names = step.slot_index[row].tolist()
                begin = names[int(step.previous[row]) - 1]
                assert begin == begins_at.get(slot, begin) == step.slots[index]
                assert 1 <= kept <= count
                begins_at[slot] = names[kept - 1]
                targets += names[:count]
                continue
            start, length = cursors[slot]
            assert 0 <= kept <= count
            flushes = length + num_tokens > window
            met.add(f"{'flushes' if flushes else 'stays'}, {'fits' if length + count <= window else 'full'}")
            assert bool(step.stores[index]) == flushes
            targets += [slot] * count
            append += [(start + length + i) % pool.capacity for i in range(count)]
            stored += [slot] * flushes
            cursors[slot] = ((start + length) % pool.capacity, kept) if flushes else (start, length + kept)
            assert cursors[slot][1] <= window
            met |= {f"{kept} kept of {count}"}
        assert step.targets.tolist() == targets
        assert step.stored_slots.tolist() == (targets if op == "native_verify" else stored)
        if op == "verify":
            assert step.append.tolist() == append
    wanted = {f"{n} tokens, {kind}" for n in range(num_tokens + 1) for kind in ("live", "padded")}
    wanted = wanted - {"0 tokens, live"} | {"no tail"}
    if num_tokens > 1:
        wanted |= {"tail"}
        if op == "verify":
            wanted |= {"flushes, fits", "flushes, full", "stays, fits", f"{num_tokens} kept of {num_tokens}"}
            wanted |= {f"0 kept of {num_tokens}"}
    assert wanted <= met


@FAMILIES
@pytest.mark.parametrize(("num_tokens", "window"), [(1, 3), (3, 5), (4, 4)])
def test_some_row_without_tokens_has_a_ring_that_would_flush(
    spec: Spec, num_tokens: int, window: int
) -> None:
    spec = drafts(spec, num_tokens, window)
    scene = Trajectory(spec, heads=4, steps=12, padded_rows=1, packed=1.0)
    pool, seen = scene.pool(), 0
    for step in scene:
        assert step.query_start is not None
        full = pool.ring_len + num_tokens > window
        empty = step.slot_index[step.query_start.diff() == 0]
        if full[scene.slot_of].any():
            assert full[empty[empty >= 0].long()].any()
            seen += 1
        commit(spec, pool, step)
    assert seen >= 3


@pytest.mark.parametrize("packed", [0.0, 1.0])
def test_all_steps_are_packed_or_none(packed: float) -> None:
    scene = Trajectory(drafts(SPEC, 2), heads=2, steps=7, packed=packed)
    assert {step.query_start is not None for step in scene} == {packed == 1.0}


def test_a_pool_of_native_verify_begins_in_the_slots_that_the_first_step_reads() -> None:
    scene = Trajectory(drafts(SPEC, 3).native, heads=2, sequences=4, padded_rows=0, attend=1.0, packed=0.0)
    pool, step = scene.pool(), next(iter(scene))
    assert step.previous is not None
    begin = step.slot_index[torch.arange(4), step.previous.long() - 1].long()
    assert pool.state[begin].isfinite().all()
    assert int(pool.state.flatten(1).isfinite().all(1).sum()) == 4
    assert len(set(step.previous.tolist())) > 1


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
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_pool_begins_with_what_the_ideal_has_taken_in(spec: Spec, num_tokens: int) -> None:
    """State and ring of the pool, taken in token by token, are the ideal's state at the start."""
    if num_tokens > 1:
        spec = drafts(spec, num_tokens, spec.window)
    scene = Trajectory(spec, heads=4, sequences=3, steps=1, ring_len=3, attend=1.0, padded_rows=0, packed=0.0)
    pool, (step,) = scene.pool(), list(scene)
    state = pool.state[step.slots].double()
    for j in range(3):
        token = (pool.ring_start[step.slots].long() + j) % pool.capacity
        entry = pool.entry(step.slots, token)
        assert all(value.isfinite().all() for value in entry)
        state = scene.recurrence.advance(state, entry)
    rounded = state.to(pool.state.dtype).double()
    torch.testing.assert_close(rounded, step.ideal_stored, rtol=1e-12, atol=1e-12)
    first = step.append[::num_tokens]
    pool.put(step.slots, first, entry)
    found = pool.entry(step.slots, first)
    assert all(torch.equal(a, b) for a, b in zip(entry, found, strict=True))


def test_relative_rms() -> None:
    assert relative_rms(
        torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0], dtype=torch.float64)
    ) == pytest.approx(math.sqrt(0.5) / math.sqrt(12.5))
    assert relative_rms(torch.zeros(0), torch.zeros(0)) == 0.0
