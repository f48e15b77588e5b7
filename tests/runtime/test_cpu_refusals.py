"""Values that a CPU looks at: slots, cursors and counts out of range are refused, and nothing is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.errors import ArgumentError
from tests.runtime.small_calls import ONE_TOKEN, inputs_of, spec_of


@pytest.fixture(params=ONE_TOKEN)
def one_token(request: pytest.FixtureRequest) -> str:
    """Every step of one token a row."""
    return str(request.param)


def small_call(step: str, rows: int) -> tuple[Any, list[torch.Tensor]]:
    """Empty caches of four slots and inputs of ones, in the order of the public functions."""
    spec = spec_of(step, head_dim=4, state_size=4, heads_per_group=1, window=2)
    given = inputs_of(step, rows, 1, 1, 4, 4, torch.ones)
    optional = ("D", "z", "dt_bias")
    inputs = [value for name, value in given.items() if name not in optional]
    return ops.make_cache(spec, 4, 1, 1, "cpu"), inputs


@pytest.mark.parametrize("slot", [4, 2**40])
def test_a_slot_beyond_the_last_is_refused_on_a_cpu_and_nothing_written(one_token: str, slot: int) -> None:
    cache, inputs = small_call(one_token, 2)
    slots = torch.tensor([1, slot])
    cursors: dict[str, Any] = {"ring_start": cache.ring_start, "ring_len": cache.ring_len}
    before = copy.deepcopy(cache)
    out = torch.full((2, 1, 4), 7.0)
    replay, native = getattr(ops, one_token), getattr(ops, one_token.replace("step", "native_step"))
    calls = (
        lambda: replay(*inputs, **cache.tensors(), slot_index=slots, window=2, out=out),
        lambda: native(*inputs, state=cache.state, slot_index=slots, out=out),
        lambda: ops.commit(torch.ones_like(slots), **cursors, slot_index=slots, window=2, capacity=3),
        lambda: ops.reset(slots, **cursors),
        lambda: ops.drained(slots, **cursors, capacity=3),
    )
    for bad_call in calls:
        with pytest.raises(ArgumentError, match=f"row 1 names slot {slot}, but there are 4 slots"):
            bad_call()
    assert (out == 7).all()
    assert all(torch.equal(value, cache.tensors()[name]) for name, value in before.tensors().items())


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 0), (3, 0), (0, -1), (0, 3), (2**31 - 1, 2), (0, 2**31 - 1)]
)
def test_cursors_out_of_range_are_refused_on_a_cpu_and_nothing_written(
    one_token: str, start: int, length: int
) -> None:
    cache, inputs = small_call(one_token, 3)
    cache.ring_start[2], cache.ring_len[2] = start, length
    cache.ring_len[3] = 2  # flushes
    slots = torch.tensor([3, -1, 2])
    cursors: dict[str, Any] = {"ring_start": cache.ring_start, "ring_len": cache.ring_len}
    before = copy.deepcopy(cache)
    out = torch.full((3, 1, 4), 7.0)
    # Without a window, all that is known of a drained ring is its capacity.
    replay = getattr(ops, one_token)
    calls = [
        lambda: replay(*inputs, **cache.tensors(), slot_index=slots, window=2, out=out),
        lambda: ops.commit(torch.ones_like(slots), **cursors, slot_index=slots, window=2, capacity=3),
        lambda: ops.drained(slots, **cursors, capacity=3),
    ][: 2 if length == 3 else 3]
    for bad_call in calls:
        with pytest.raises(
            ArgumentError, match=rf"row 2: .* slot 2 has ring_start {start} and ring_len {length},"
        ):
            bad_call()
    assert (out == 7).all()
    assert all(torch.equal(value, cache.tensors()[name]) for name, value in before.tensors().items())
    # Such a slot may be padding, and a reset repairs it.
    slots[2] = -1
    calls[0]()
    ops.reset(torch.tensor([2]), **cursors)
    slots[2] = 2
    calls[0]()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("query_start", "accepted", "message"),
    [
        (None, [0, 9, 3, 4], "row 3 has accepted 4 tokens, outside of 0 to 3"),
        (None, [0, 9, -1, 9], "row 2 has accepted -1 tokens, outside of 0 to 3"),
        (None, [2**31 - 1, 9, 0, 0], "row 0 has accepted 2147483647 tokens, outside of 0 to 3"),
        ([0, 2, 4, 4, 5], [2, 9, 9, 2], "row 3 has accepted 2 tokens, outside of 0 to 1"),
        ([0, 2, 4, 4, 5], [3, -9, -9, 0], "row 0 has accepted 3 tokens, outside of 0 to 2"),
    ],
)
def test_counts_that_a_row_does_not_have_are_refused_on_a_cpu_and_nothing_written(
    query_start: list[int] | None, accepted: list[int], message: str, index_dtype: torch.dtype
) -> None:
    """Row 1 is padding by its slot, and row 2 of the packed ones by having no tokens."""
    start, length = (torch.tensor(held, dtype=torch.int32) for held in ([1, 2, 3, 4], [4, 0, 2, 3]))
    before = start.clone(), length.clone()
    starts = None if query_start is None else torch.tensor(query_start, dtype=torch.int32)
    given: dict[str, Any] = {
        "ring_start": start, "ring_len": length, "slot_index": torch.tensor([2, -1, 0, 3], dtype=index_dtype),
        "window": 4, "num_tokens": 3, "capacity": 7, "query_start": starts,
    }  # fmt: skip
    counts = torch.tensor(accepted, dtype=index_dtype)
    with pytest.raises(ArgumentError, match=message) as refused:
        ops.commit(counts, **given)
    assert "at most num_tokens, or those that query_start gives it" in refused.value.hint
    assert torch.equal(start, before[0])
    assert torch.equal(length, before[1])
    # What padded rows say stays; the live ones keep all that they have.
    most = torch.tensor([3, 3, 3, 3] if starts is None else [2, 2, 0, 1], dtype=index_dtype)
    live = torch.tensor([True, False, starts is None, True])
    ops.commit(torch.where(live, most, counts), **given)
    assert length.tolist() == ([3, 0, 3, 3] if starts is None else [4, 0, 2, 1])
