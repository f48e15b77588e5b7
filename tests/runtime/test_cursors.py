"""Cursors and rings: commits, recycled and moved slots, and the cursor kernels against the reference."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.codegen.render import render_cursors
from replayssm_tune.runtime import ops, reference
from replayssm_tune.runtime.errors import ArgumentError
from replayssm_tune.tuner.pool import make_pool
from replayssm_tune.tuner.trajectory import Trajectory
from tests.runtime.calls import cache_of
from tests.runtime.small_calls import NO_TENSORS


@st.composite
def cursors(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """window, num_tokens, capacity, start, length of a legal ring."""
    window = draw(st.integers(1, 64))
    num_tokens = draw(st.integers(1, window))
    capacity = window + num_tokens + draw(st.integers(0, 5))
    return window, num_tokens, capacity, draw(st.integers(0, capacity - 1)), draw(st.integers(0, window))


@settings(deadline=None, max_examples=50)
@given(cursors(), st.lists(st.integers(0, 16), min_size=1, max_size=40))
def test_appends_never_meet_live_entries(ring: tuple[int, int, int, int, int], accepts: list[int]) -> None:
    window, num_tokens, capacity, first, tokens = ring
    start, length = torch.tensor([first], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    for accepted in accepts:
        begin, held = int(start), int(length)
        live = {(begin + j) % capacity for j in range(held)}
        appended = {(begin + held + t) % capacity for t in range(num_tokens)}
        assert len(live) == held
        assert len(appended) == num_tokens
        assert not live & appended
        kept = min(accepted, num_tokens)
        ops.commit(
            torch.tensor([kept]), ring_start=start, ring_len=length, slot_index=slot,
            window=window, num_tokens=num_tokens, capacity=capacity,
        )  # fmt: skip
        assert 0 <= int(start) < capacity
        assert 0 <= int(length) <= window
        after = [(int(start) + j) % capacity for j in range(int(length))]
        old = [] if held + num_tokens > window else [(begin + j) % capacity for j in range(held)]
        assert after == old + [(begin + held + t) % capacity for t in range(kept)]


@settings(deadline=None, max_examples=100)
@given(cursors(), st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64)), min_size=1, max_size=8))
def test_packed_commits_are_those_of_rows_with_tokens(
    ring: tuple[int, int, int, int, int], rows: list[tuple[int, int]]
) -> None:
    """A row without tokens is padding, whatever it is said to keep."""
    window, num_tokens, capacity, first, tokens = ring
    count = torch.tensor([min(given, num_tokens) for given, _ in rows], dtype=torch.int32)
    accepted = torch.minimum(torch.tensor([kept for _, kept in rows]), count)
    slots = torch.arange(len(rows))
    query_start = torch.cat([torch.zeros(1, dtype=torch.int32), count.cumsum(0).int()])
    numbers: dict[str, Any] = {"window": window, "num_tokens": num_tokens, "capacity": capacity}

    def committed(accepted: torch.Tensor, index: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        start, length = (torch.full((len(rows),), value, dtype=torch.int32) for value in (first, tokens))
        ops.commit(
            accepted, ring_start=start, ring_len=length, slot_index=index, **numbers, **options
        )  # fmt: skip
        return [start, length]

    # Empty rows name slots that are not there: nobody looks.
    stale = torch.where(count > 0, accepted, -9)
    packed = committed(stale, torch.where(count > 0, slots, 2**31), query_start=query_start)
    padded = committed(accepted, torch.where(count > 0, slots, -1))
    full = torch.arange(len(rows) + 1, dtype=torch.int32) * num_tokens
    for found, wanted in zip(packed, padded, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(
        committed(accepted, slots, query_start=full), committed(accepted, slots), strict=True
    ):
        assert torch.equal(found, wanted)
    empty = count == 0
    assert bool((packed[0][empty] == first).all())
    assert bool((packed[1][empty] == tokens).all())


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(0, 3), st.data())
def test_a_step_appends_behind_any_ring(family: str, window: int, spare: int, data: st.DataObject) -> None:
    """The op itself, at any start and fill: live entries keep their bits, dead ones may be NaN."""
    capacity = window + 1 + spare
    start, length = data.draw(st.integers(0, capacity - 1)), data.draw(st.integers(0, window))
    ring_x = torch.full((1, 1, capacity, 2), float("nan"))
    ring_b, ring_decay = (
        torch.full((1, 1, capacity, 3), float("nan")),
        torch.full((1, 1, capacity), float("nan")),
    )
    live = [(start + j) % capacity for j in range(length)]
    ring_x[:, :, live], ring_b[:, :, live], ring_decay[:, :, live] = 1.0, 2.0, -0.5
    before = [ring.clone() for ring in (ring_x, ring_b, ring_decay)]
    state = torch.ones(1, 1, 2, 3)
    cache = ops.Cache(
        state, ring_x, ring_b, ring_decay, torch.tensor([start], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32), family,
    )  # fmt: skip
    # A token that writes 7: what GDN's state recalls for a key of zeros is 0, and a gate of 50 lets all in.
    x, key, one = torch.full((1, 1, 2), 7.0), torch.full((1, 1, 3), float(family != "gdn")), torch.zeros(1, 1)
    common: dict[str, Any] = {"slot_index": torch.zeros(1, dtype=torch.int32), "window": window}
    if family == "gdn":
        y = ops.gdn_step(key + 1, key, x, one, one + 50, one[0], **common, **cache.tensors())
    else:
        y = ops.mamba2_step(x, one, one[0] - 1, key, key, **common, **cache.tensors())
    assert y.isfinite().all()
    assert state.isfinite().all()
    append = (start + length) % capacity
    for ring, old, new in zip((ring_x, ring_b), before, (7.0, float(family != "gdn")), strict=False):
        old[:, :, append] = new
        assert torch.equal(old.nan_to_num(-1.0), ring.nan_to_num(-1.0))
    sizes = torch.tensor(-math.log(2.0) if family == "gdn" else math.log(2.0))
    torch.testing.assert_close(ring_decay[0, 0, append], sizes)
    before[2][:, :, append] = ring_decay[:, :, append]
    assert torch.equal(before[2].nan_to_num(-1.0), ring_decay.nan_to_num(-1.0))
    assert bool((state != 1.0).any()) == (length + 1 > window)


@pytest.mark.parametrize("accept", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("window", [1, 4])
def test_random_accepts(driver: Any, window: int, accept: float) -> None:
    scene = Trajectory(driver.make_spec(window=window), heads=2, steps=30, accept=accept)
    assert driver.passes_gate(driver.run(scene))


@pytest.mark.parametrize("fill", range(5))
def test_recycled_slot_starts_empty(driver: Any, fill: int) -> None:
    """Reset at every fill: the next tenant sees nothing of the last one's ring."""
    scene = Trajectory(driver.make_spec(), heads=2, sequences=3, ring_len=0, steps=12)
    tenant = Trajectory(driver.make_spec(), heads=2, sequences=3, ring_len=fill, steps=1, seed=9)
    pool, old = scene.pool(), tenant.pool()
    pool.ring_x[:], pool.ring_b[:], pool.ring_decay[:] = old.ring_x, old.ring_b, old.ring_decay
    pool.ring_start[:], pool.ring_len[:] = old.ring_start, fill
    ops.reset(
        torch.cat([scene.slot_of, torch.tensor([-1])]), ring_start=pool.ring_start, ring_len=pool.ring_len
    )
    assert pool.ring_len[scene.slot_of].eq(0).all()
    others = torch.ones(8, dtype=torch.bool)
    others[scene.slot_of] = False
    assert pool.ring_len[others].eq(fill).all()
    y, expected = [], []
    for step in scene:
        y.append(driver.launch(scene, pool, step)[step.live])
        driver.commit(scene, pool, step)
        expected.append(step.y)
    torch.testing.assert_close(torch.cat(y).double(), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_first_token_after_prefill_is_kept(driver: Any, window: int) -> None:
    scene = Trajectory(
        driver.make_spec(window=window), heads=2, ring_len=0, steps=2 * window + 2, accept=1.0, attend=1.0
    )
    errors = driver.run(scene)
    assert driver.passes_gate(errors)
    assert len(errors.state_by_launch) >= 2


@pytest.mark.parametrize("fill", range(5))
@pytest.mark.parametrize("first", range(5))
def test_snapshot_moves_a_sequence(driver: Any, fill: int, first: int) -> None:
    """State, ring and cursors, saved after a commit and restored into another slot, continue bit by bit."""
    spec = driver.make_spec()
    scene = Trajectory(spec, heads=2, sequences=1, padded_rows=0, slots=4, ring_len=fill, attend=1.0, steps=8)
    here, there = scene.pool(), make_pool(spec, 4, 2, 1)
    slot = int(scene.slot_of[0])
    target = (slot + 1) % 4
    # Rotate the ring so that it starts at `first`: wrapped and not.
    shift = first - int(here.ring_start[slot])
    for name in ("ring_x", "ring_b", "ring_decay"):
        ring = getattr(here, name)[slot]
        ring.copy_(ring.roll(shift, 1))
    here.ring_start[slot] = first
    caches = [cache_of(pool, spec) for pool in (here, there)]
    caches[1].restore(caches[0].snapshot(torch.tensor([slot])), torch.tensor([target]))
    for step in scene:
        y = driver.launch(scene, here, step)
        driver.commit(scene, here, step)
        torch.testing.assert_close(y.double(), step.y, rtol=1e-4, atol=1e-5)
        step.slot_index.fill_(target)
        assert torch.equal(driver.launch(scene, there, step), y)
        driver.commit(scene, there, step)
        assert torch.equal(there.state[target], here.state[slot])


def test_drained_moves_past_the_ring() -> None:
    start = torch.tensor([3, 4, 0, 2], dtype=torch.int32)
    length = torch.tensor([2, 3, 0, 4], dtype=torch.int32)
    ops.drained(torch.tensor([1, 3, -1, 0]), ring_start=start, ring_len=length, capacity=5, null_slot=0)
    assert start.tolist() == [3, 2, 0, 1]
    assert length.tolist() == [2, 0, 0, 0]


def test_commit_skips_padding() -> None:
    start = torch.tensor([4, 1, 2, 0], dtype=torch.int32)
    length = torch.tensor([4, 1, 2, 3], dtype=torch.int32)
    ops.commit(
        torch.tensor([1, 9, 0, -9]), ring_start=start, ring_len=length,
        slot_index=torch.tensor([0, -1, 2, 3]),
        window=4, capacity=5, null_slot=3,
    )  # fmt: skip
    assert start.tolist() == [3, 1, 2, 0]
    assert length.tolist() == [1, 1, 2, 3]


INTERPRETED = """
import importlib.util, sys, torch
path, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("cursors", path)
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
case = torch.load(folder + "/in.pt")
start, length, index, packed_index, accepted, query_start, window, tokens, capacity, null = case
grid = (-(-len(index) // 4),)
result = []
for kernel in ("commit", "packed", "reset", "drained"):
    s, n = start.clone(), length.clone()
    if kernel in ("commit", "packed"):
        rows = (packed_index, query_start) if kernel == "packed" else (index, None)
        kernels.commit[grid](accepted, s, n, *rows, len(index), window, tokens, capacity, null, BLOCK=4)
    elif kernel == "reset":
        kernels.reset[grid](index, s, n, len(index), null, BLOCK=4)
    else:
        kernels.drained[grid](index, s, n, len(index), capacity, null, BLOCK=4)
    result += [s, n]
torch.save(result, folder + "/out.pt")
"""


@pytest.mark.interpreter
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("null_slot", "num_tokens"), [(-1, 1), (0, 2)])
def test_cursor_kernels_match_the_reference(
    tmp_path: Any, index_dtype: torch.dtype, null_slot: int, num_tokens: int
) -> None:
    window, slots = 4, 11
    capacity = window + num_tokens
    g = torch.Generator().manual_seed(null_slot + 7)
    start = torch.randint(0, capacity, (slots,), generator=g, dtype=torch.int32)
    length = torch.arange(slots, dtype=torch.int32) % (window + 1)
    index = torch.randperm(slots, generator=g)[:9].to(index_dtype)
    index[3] = -1
    accepted = torch.randint(-1, num_tokens + 2, (9,), generator=g).to(index_dtype)
    count = torch.tensor([num_tokens, 0, 1, 0, num_tokens, 1, 0, 1, num_tokens])
    packed_index = torch.where(count == 0, 2**30, index)  # what an empty row names is not looked at
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]).int()
    numbers = (window, num_tokens, capacity, null_slot)
    torch.save((start, length, index, packed_index, accepted, query_start, *numbers), tmp_path / "in.pt")
    (tmp_path / "cursors.py").write_text(render_cursors())
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path / "cursors.py"), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    result = torch.load(tmp_path / "out.pt")

    expected = []
    for name in ("commit", "packed", "reset", "drained"):
        s, n = start.clone(), length.clone()
        if name in ("commit", "packed"):
            named, starts = (packed_index, query_start) if name == "packed" else (index, None)
            # Kernels clamp what the reference refuses.
            most = count.clamp(max=num_tokens) if name == "packed" else torch.tensor(num_tokens)
            kept = torch.minimum(accepted.clamp(min=0), most)
            reference.commit(kept, s, n, named, starts, *numbers)
        elif name == "reset":
            reference.reset(index, s, n, null_slot)
        else:
            reference.drained(index, s, n, capacity, null_slot)
        expected += [s, n]
    for actual, wanted in zip(result, expected, strict=True):
        assert torch.equal(actual, wanted)


def test_rendering_of_cursors_is_deterministic() -> None:
    source = render_cursors()
    render_cursors.cache_clear()
    assert render_cursors() == source
    compile(source, "cursors.py", "exec")


def test_rejected_tokens_leave_the_length(driver: Any) -> None:
    scene = Trajectory(
        driver.make_spec(), heads=2, sequences=2, padded_rows=0, attend=1.0, accept=0.0, steps=3
    )
    pool = scene.pool()
    lengths = pool.ring_len.clone()
    for step in scene:
        driver.launch(scene, pool, step)
        driver.commit(scene, pool, step)
        lengths[step.slots[step.stores]] = 0
        assert torch.equal(pool.ring_len, lengths)


@pytest.mark.parametrize(("value", "found"), NO_TENSORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["commit", "reset", "drained"])
def test_what_is_no_tensor_is_named_by_cursor_ops(name: str, value: Any, found: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(6, dtype=torch.int32) for name in ("ring_start", "ring_len")}
    if name == "commit":
        given |= {"accepted": torch.ones(3, dtype=torch.int32), "slot_index": torch.arange(3), "window": 4}
    else:
        given["slots"] = torch.arange(3)
    if name != "reset":
        given["capacity"] = 5
    function = getattr(ops, name)
    function(**given)
    for argument, known in given.items():
        if isinstance(known, torch.Tensor):
            with pytest.raises(ArgumentError, match=rf"{name}: {argument} is {found}; expected a tensor"):
                function(**(given | {argument: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 4}, r"commit: capacity is 4, too small for window 4.*= 5"),
        ({"capacity": 2**31}, r"commit: capacity is 2147483648, beyond int32"),
        ({"num_tokens": 5, "capacity": 20}, "num_tokens is 5 and window 4"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"accepted": torch.ones(2, dtype=torch.int32)}, r"accepted has shape \(2,\); expected \(3,\)"),
        ({"accepted": torch.ones(3)}, "accepted is fp32; expected i32 or i64"),
        ({"slot_index": torch.zeros(3, 1)}, "slot_index has shape"),
        ({"ring_len": torch.zeros(6)}, "ring_len is fp32; expected i32"),
        ({"query_start": torch.zeros(3).int()}, r"query_start has shape \(3,\); expected \(4,\)"),
        ({"query_start": torch.zeros(4).long()}, "query_start is i64; expected i32"),
        ({"query_start": [0, 1, 2, 3]}, "query_start is of type list; expected a tensor or None"),
        ({"query_start": torch.tensor([0, 2, 2, 2]).int()}, "row 0 is given 2 tokens; .* to num_tokens = 1"),
        ({"query_start": torch.tensor([0, 1, 0, 1]).int()}, "row 1 is given -1 tokens"),
        (
            {"query_start": torch.tensor([1, 1, 2, 3]).int()},
            "begins at 1 and ends at 3; query_start goes",
        ),
    ],
)
def test_bad_commits(changes: dict[str, Any], message: str) -> None:
    cursor = torch.zeros(6, dtype=torch.int32)
    good = {
        "accepted": torch.ones(3, dtype=torch.int32), "ring_start": cursor, "ring_len": cursor.clone(),
        "slot_index": torch.tensor([0, 1, -1]), "window": 4, "capacity": 5,
    }  # fmt: skip
    ops.commit(**good)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=message):
        ops.commit(**(good | changes))  # type: ignore[arg-type]


def test_bad_resets() -> None:
    cursor = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="reset: slots is fp32"):
        ops.reset(torch.zeros(2), ring_start=cursor, ring_len=cursor)
    with pytest.raises(ArgumentError, match="drained: capacity is 1"):
        ops.drained(torch.zeros(2).long(), ring_start=cursor, ring_len=cursor, capacity=1)
