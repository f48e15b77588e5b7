"""Drafts against golden trajectories, single steps, and the recurrence over whole lives of sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm_tune.runtime import reference
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from replayssm_tune.runtime.rows import owned_tokens
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import call, commit, copied, random_call
from tests.runtime.drafts import Scene, agree, lives, spec_of
from tests.runtime.folds import MATERIALIZE
from tests.runtime.golden import vectors
from tests.runtime.small_calls import CONTRACTS

INPUTS = {
    "mamba2": ("x", "dt", "A", "B", "C", "D", None, "dt_bias"),
    "gdn": ("q", "k", "v", "a", "b", "A_log", "dt_bias"),
}
"""What an op takes first, by the names of the golden trajectories: those with steps are per token."""


def packed(g: dict[str, Tensor], family: str, step: int, counts: list[int]) -> list[Tensor | None]:
    """Inputs of a golden step's rows, so many tokens of each, one after the other, and some of nobody."""

    def of(name: str | None) -> Tensor | None:
        if name is None or len(g[name]) != 20:
            return None if name is None else g[name]
        rows = [g[name][step, row, :count] for row, count in enumerate(counts)]
        return torch.cat([*rows, torch.full_like(rows[0][:1], math.nan)])

    return [of(name) for name in INPUTS[family]]


def starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("window", [4, 6, 16])
@pytest.mark.parametrize("varying", [True, False])
def test_reference_agrees_with_golden_trajectory(
    family: str, dtype: torch.dtype, bound: float, window: int, varying: bool
) -> None:
    """Rows of 1 to 4 tokens, or of 4 each of which the last are not kept."""
    golden = vectors(family)
    g = {name: value.to(dtype) if value.is_floating_point() else value for name, value in golden.items()}
    (slots, heads, head_dim, state_size), groups = g["state0"].shape, g["B" if "B" in g else "k"].shape[3]
    capacity, slot_index = window + 4, torch.tensor([1, -1, 0])
    state = g["state0"].flip(0).clone()
    rings = [
        torch.full(shape, math.nan, dtype=dtype)
        for shape in ((slots, heads, capacity, head_dim), (slots, groups, capacity, state_size))
    ] + [torch.full((slots, heads, capacity), math.nan, dtype=dtype)]
    cursors = torch.tensor([capacity - 1, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    verify = getattr(reference, f"{family}_verify")
    flushed = 0
    for step, accepted in enumerate(g["accepted"]):
        own = g["n_tokens"][step].tolist()
        counts = own if varying else [4, 4]
        tensors = packed(g, family, step, counts)
        out = torch.full((sum(counts) + 1, heads, head_dim), math.nan, dtype=dtype)
        bounds = torch.tensor([0, counts[0], counts[0], sum(counts)]).int()  # none of the padded row
        flushed += int((cursors[1] + 4 > window).sum())
        verify(*tensors, state, *rings, *cursors, slot_index, bounds, out, window, 4, True, -1)
        for row, first in enumerate((0, counts[0])):
            y = golden["y"][step, row, : own[row]]
            torch.testing.assert_close(out[first : first + own[row]].double(), y, rtol=bound, atol=bound)
        assert not out[-1].any()
        kept = torch.tensor([accepted[0], 9, accepted[1]])
        reference.commit(kept, *cursors, slot_index, bounds, window, 4, capacity, -1)
    assert flushed >= 2
    for slot in range(2):
        fold = getattr(reference, f"{family}_materialize")
        rates = [g["A"]] if family == "mamba2" else []
        one = torch.tensor([slot])
        fold(one, one, torch.tensor([99]), *rates, state, *rings, *cursors, window, -1)
    torch.testing.assert_close(state.flip(0).double(), golden["state_final"], rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_native_reference_agrees_with_golden_trajectory(
    family: str, dtype: torch.dtype, bound: float
) -> None:
    """Where no token was kept, a row starts from where it did: from a fifth slot that no token writes."""
    golden = vectors(family)
    g = {name: value.to(dtype) if value.is_floating_point() else value for name, value in golden.items()}
    state = torch.full((20, *g["state0"].shape[1:]), math.nan, dtype=dtype)
    slot_index = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:10].view(2, 5)
    state[slot_index[:, 4]] = g["state0"]
    verify = getattr(reference, f"{family}_native_verify")
    for step, accepted in enumerate(g["accepted"].tolist()):
        counts = g["n_tokens"][step].tolist()
        out = torch.full((sum(counts) + 1, *g["y"].shape[3:]), math.nan, dtype=dtype)
        kept, bounds = torch.tensor([5, 5]), starts(counts)
        tensors = packed(g, family, step, counts)
        verify(*tensors, state, slot_index, kept, bounds, out, True, -1)
        for row, first in enumerate((0, counts[0])):
            y = golden["y"][step, row, : counts[row]]
            torch.testing.assert_close(out[first : first + counts[row]].double(), y, rtol=bound, atol=bound)
            # What was kept becomes what the next step starts from.
            i = (accepted[row] - 1) % 5
            slot_index[row, [i, 4]] = slot_index[row, [4, i]]
        assert not out[-1].any()
    torch.testing.assert_close(
        state[slot_index[:, 4]].double(), golden["state_final"], rtol=bound, atol=bound
    )


@pytest.mark.parametrize("packed", [True, False])
def test_whole_lives_of_sequences(family: str, packed: bool) -> None:
    """Thousands of tokens: drafts, rejections, preemption, reused slots, states moved and handed over."""
    scene = Scene(family, packed=packed, sequences=16, slots=90, events=0.03, seed=11 + packed)
    run = lives(scene, 600 if packed else 300)
    met = run.met
    assert met["ring"] + met["native"] >= 4000
    assert min(met["flushed"], met["wrapped"], met["rejected"], met["native"]) >= 200
    for what in ("begin", "park", "resume", "move", "roll_back", "drain", "hand_over", "hand_back"):
        assert met[what] >= 5, what
    assert (met["empty"] > 100) == packed
    assert relative_rms(torch.cat(run.found), torch.cat(run.wanted)) < 3e-6


@settings(max_examples=60)
@given(
    family=st.sampled_from(sorted(INPUTS)),
    window=st.integers(1, 9),
    most=st.integers(1, 6),
    packed=st.booleans(),
    spare=st.integers(0, 3),
    null_slot=st.sampled_from([None, 0, 7]),
    wide=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_steps_agree_with_the_recurrence(
    family: str,
    window: int,
    most: int,
    packed: bool,
    spare: int,
    null_slot: int | None,
    wide: bool,
    seed: int,
) -> None:
    """Every start and length of a ring, rows of any length, any number of them kept, in any order."""
    scene = Scene(
        family, window, min(most, window), packed, spare, sequences=3, null_slot=null_slot, seed=seed,
        index_dtype=torch.int64 if wide else torch.int32,
    )  # fmt: skip
    run = lives(scene, 6)
    assert run.met["tokens"] > 0


@pytest.mark.parametrize("window", [5, 16])
def test_extreme_decays_in_random_order(family: str, window: int) -> None:
    """Decays of nothing beside decays of everything, within the drafts of a row too."""
    for large in (1e2, 1e6 / 16):
        run = lives(Scene(family, window, 5, sequences=8, rates=(0.1, 16.0), large=large), 40)
        assert run.met["flushed"] >= 10


def single(given: dict[str, Any], rows: Tensor, token: Tensor) -> dict[str, Any]:
    """The call of one token for each of some rows."""
    family = "gdn" if "q" in given else "mamba2"
    packed = {a.name for a in CONTRACTS[f"{family}_verify"].arguments if a.dims[0] == "tokens"}
    one = {name: value[token] if name in packed else value for name, value in given.items()}
    one["slot_index"] = given["slot_index"][rows]
    return {name: value for name, value in one.items() if name not in ("num_tokens", "query_start")}


def folded(given: dict[str, Any]) -> Tensor:
    """(rows, ...): states of a call's slots after all that their rings hold."""
    family, slots, on_copies = "gdn" if "q" in given else "mamba2", given["slot_index"], copied(given)
    names = ({*CONTRACTS[f"{family}_verify"].names} & {"A", "state"}) | {n for n in given if n[:5] == "ring_"}
    caches = {name: on_copies[name] for name in (*names, "window")}
    MATERIALIZE[family](source=slots, destination=slots, **caches)
    state: Tensor = caches["state"][slots.long()]
    return state


@settings(max_examples=60)
@given(
    family=st.sampled_from(sorted(INPUTS)),
    window=st.integers(1, 9),
    most=st.integers(1, 6),
    packed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_drafts_are_as_many_single_steps(
    family: str, window: int, most: int, packed: bool, seed: int
) -> None:
    """Outputs of all tokens, and what the accepted ones leave behind, by steps of one token and commits."""
    most = min(most, window)
    spec, g = spec_of(family, window, most), torch.Generator().manual_seed(seed)
    given = random_call(spec, 4, 4, "cpu", slots=6, seed=seed, packed=packed)
    given["ring_len"].random_(0, window + 1, generator=g)
    begin, count = owned_tokens(given.get("query_start"), given["slot_index"], most)
    accepted = torch.minimum(torch.randint(0, most + 1, (4,), generator=g), count)
    every, kept = copied(given), copied(given)
    y = call(given)
    commit(given, accepted)
    for i in range(most):
        for scene, tokens in ((every, count), (kept, accepted)):
            rows = (tokens > i).nonzero()[:, 0]
            if len(rows):
                step = single(scene, rows, begin[rows] + i)
                agree(call(step), y[begin[rows] + i].double())
                commit(step)
    agree(folded(given), folded(kept).double())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_drafts_of_16_bits_are_as_many_single_steps(family: str, dtype: str) -> None:
    """Within a step a u is not rounded yet, which is all that outputs may differ by."""
    spec = spec_of(family, 6, 4, dtype, state_dtype=dtype)
    given = random_call(spec, 8, 4, "cpu", packed=True)
    begin, count = owned_tokens(given["query_start"], given["slot_index"], 4)
    every = copied(given)
    y = call(given)
    assert y.dtype == TORCH_DTYPES[dtype]
    found, wanted = [], []
    for i in range(4):
        rows = (count > i).nonzero()[:, 0]
        step = single(every, rows, begin[rows] + i)
        found.append(y[begin[rows] + i].double())
        wanted.append(call(step).double())
        commit(step)
    assert relative_rms(torch.cat(found), torch.cat(wanted)) < (8e-3 if dtype == "bf16" else 1e-3)


def test_one_token_is_the_step(family: str) -> None:
    """To the bit, whoever says where rows begin."""
    given = random_call(spec_of(family, 4, 1), 5, 4, "cpu", packed=True)
    rows = torch.tensor([0, 1, 2, 3, 4])
    given["query_start"] = torch.arange(6, dtype=torch.int32)
    step = copied(single(given, rows, rows))
    assert torch.equal(call(given), call(step))
    for name, value in step.items():
        if isinstance(value, Tensor):
            assert torch.equal(given[name], value), name
