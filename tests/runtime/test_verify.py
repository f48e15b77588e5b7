"""Verification of drafts: golden trajectories, single steps, whole lives of sequences, and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replayssm_tune.runtime import ops, reference
from replayssm_tune.runtime.errors import ArgumentError, ReplayError, SpecError
from replayssm_tune.runtime.rows import owned_tokens
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import call, commit, copied, random_call
from tests.runtime.drafts import Run, Scene, agree
from tests.runtime.folds import MATERIALIZE
from tests.runtime.small_calls import CONTRACTS, arguments, named
from tests.runtime.small_calls import call as call_op

DATA = Path(__file__).parents[1] / "data"
INPUTS = {
    "mamba2": ("x", "dt", "A", "B", "C", "D", None, "dt_bias"),
    "gdn": ("q", "k", "v", "a", "b", "A_log", "dt_bias"),
}
"""What an op takes first, by the names of the golden trajectories: those with steps are per token."""


@pytest.fixture(params=sorted(INPUTS))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def vectors(family: str) -> dict[str, Tensor]:
    with np.load(DATA / f"{family}.npz") as data:
        return {name: torch.from_numpy(data[name]) for name in data}


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


def lives(scene: Scene, steps: int) -> Run:
    """A run through so many steps of all kinds, and what there is of each sequence in the end."""
    run = Run(scene)
    for step in range(steps):
        run.step(native=run.uniform() < 0.25)
        if step % 5 == 4:
            run.step(most=1)
        run.happen()
    for sequence in run.alive:
        if sequence.parked is not None:
            run.resume(sequence)
        if not sequence.kept:
            run.drain(sequence)
        run.check(sequence)
    return run


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


def fields(family: str) -> dict[str, Any]:
    return {"has_d": False, "qk_l2norm": True} if family == "gdn" else {"has_z": True}


def spec_of(family: str, window: int = 4, most: int = 2, dtype: str = "fp32", **changes: Any) -> Spec:
    dtypes = {"activation_dtype": dtype, "ring_dtype": dtype}
    return Spec(family, "verify", 8, 16, 2, window, most, **(dtypes | fields(family) | changes))


def value_of(given: dict[str, Any]) -> Tensor:
    """What outputs look like."""
    value: Tensor = given["v" if "q" in given else "x"]
    return value


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
    accepted = torch.randint(0, most + 1, (4,), generator=g)
    every, kept = copied(given), copied(given)
    y = call(given)
    commit(given, accepted)
    for i in range(most):
        for scene, tokens in ((every, count), (kept, torch.minimum(accepted, count))):
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
    assert y.dtype == value_of(given).dtype
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


@pytest.mark.parametrize("native", [False, True])
def test_which_operator_serves(family: str, native: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def operator(given: dict[str, Any]) -> str:
        del seen[:]
        with Record():
            call(given)
        (name,) = [name.split(".")[1] for name in seen if name.startswith(f"{ops.NAMESPACE}.")]
        return name

    op = f"{family}_native_verify" if native else f"{family}_verify"
    for most in (1, 2):
        spec = spec_of(family, 4, most)
        for packed in (False, True):
            given = random_call(spec.native if native else spec, 3, 4, "cpu", packed=packed)
            assert operator(given) == (op if native or packed or most > 1 else f"{family}_step")


@pytest.mark.parametrize("op", ["verify", "native_verify"])
def test_nobody_there(family: str, op: str) -> None:
    """Without rows all tokens are nobody's; rows without tokens name no slot."""
    given = arguments(f"{family}_{op}")
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    out = torch.full_like(value_of(given), math.nan)
    nobody = {"slot_index": given["slot_index"][:0], "query_start": torch.zeros(1, dtype=torch.int32)}
    empty = {"query_start": torch.zeros(4, dtype=torch.int32)}
    empty["slot_index"] = torch.full_like(given["slot_index"], 2**30)
    if op == "native_verify":
        nobody["accepted"] = given["accepted"][:0]
        empty["accepted"] = torch.full_like(given["accepted"], 99)
    for changes in (nobody, empty):
        y = call_op(f"{family}_{op}", given | changes | {"out": out.fill_(math.nan)})
        assert not y.any()
    packed = {a.name for a in CONTRACTS[f"{family}_{op}"].arguments if a.dims[0] == "tokens"}
    none = {name: value[:0] for name, value in given.items() if name in packed}
    for changes in (nobody, empty):
        assert call_op(f"{family}_{op}", given | none | changes).shape == (0, 4, 8)
    assert all(torch.equal(given[name], value) for name, value in before.items())


def test_the_native_op_starts_from_what_was_kept(family: str) -> None:
    """Whatever slot that is in, one that it writes over too; others of the row are not read."""
    op = f"{family}_native_verify"
    for kept in (1, 2, 3):
        given = arguments(op)
        given["query_start"] = torch.tensor([0, 3, 3, 3]).int()
        given["slot_index"] = torch.tensor([[4, 1, 3], [-1, 0, 0], [2**30] * 3]).int()
        given["accepted"] = torch.tensor([kept, 0, 0]).int()
        source = int(given["slot_index"][0, kept - 1])
        others = [slot for slot in range(6) if slot != source]
        step = copied(given)
        given["state"][others] = math.nan
        y = call_op(op, given)
        names = {a.name for a in CONTRACTS[op].arguments if a.dims[0] == "tokens"}
        for i in range(3):
            one = {n: v[i : i + 1] if n in names else v for n, v in step.items()}
            one = {n: v for n, v in one.items() if n not in ("accepted", "query_start")}
            one["slot_index"] = torch.tensor([source]).int()
            agree(y[i : i + 1], call_op(f"{family}_native_step", one).double())
            agree(given["state"][given["slot_index"][0, i]], step["state"][source].double())
        assert given["state"][[0, 2, 5]].isnan().all()


def test_a_query_start_is_told_apart(family: str) -> None:
    """A call without one must not be taken for one like it that has one, nor the other way round."""
    for op in ("verify", "native_verify"):
        given = arguments(f"{family}_{op}")
        wide = {
            name: torch.cat([value, value])
            for name, value in given.items()
            if name in {a.name for a in CONTRACTS[f"{family}_{op}"].arguments if a.dims[0] == "tokens"}
        }
        for _ in range(2):
            full = arguments(f"{family}_{op}") | wide | {"query_start": None}
            assert call_op(f"{family}_{op}", full).all(-1).all()
            some = arguments(f"{family}_{op}") | wide
            assert not call_op(f"{family}_{op}", some)[3:].any()


Bad = tuple[dict[str, Any], type[ReplayError], str]
BAD_NUMBERS: list[Bad] = [
    ({"num_tokens": 0}, SpecError, "-1 drafts make 0 tokens a row, verify takes 1 to 16"),
    ({"num_tokens": 17, "window": 20}, SpecError, "16 drafts make 17 tokens a row, verify takes 1 to 16"),
    ({"num_tokens": 5}, SpecError, "4 drafts make 5 tokens a step, beyond the window of 4"),
    ({"num_tokens": 3}, ArgumentError, r"room for 6 tokens .* needs window \+ 3 = 7"),
    *(({"num_tokens": odd}, ArgumentError, "num_tokens is .*; expected a whole number")
      for odd in (2.0, "2", None, True)),
]  # fmt: skip
BAD_STARTS: list[Bad] = [
    ({"query_start": None}, ArgumentError, "[xv] has 3 tokens .*expected 3 rows of 2, 6; pass query_start"),
    ({"query_start": torch.zeros(4).long()}, ArgumentError, "query_start is i64; expected i32"),
    ({"query_start": torch.zeros(3).int()}, ArgumentError, r"query_start has shape \(3,\); expected \(4,\)"),
    ({"query_start": torch.tensor([0, 3, 3, 3]).int()}, ArgumentError, "row 0 is given 3 tokens"),
    ({"query_start": torch.tensor([0, 2, 1, 3]).int()}, ArgumentError, "row 1 is given -1 tokens"),
    ({"query_start": torch.tensor([1, 2, 2, 3]).int()}, ArgumentError, "begins at 1 and ends at 3"),
    ({"query_start": torch.tensor([0, 2, 3, 5]).int()}, ArgumentError, "0 and ends at 5, of 3 tokens"),
]
# Rows of two tokens, of none and of one.
BAD_SLOTS: list[Bad] = [
    ({"slot_index": torch.arange(3)}, ArgumentError, r"slot_index has .* 2 dimension.*rows, num_tokens"),
    ({"slot_index": torch.zeros(3, 0).int()}, SpecError, "0 tokens a row, native_verify takes 1 to 16"),
    ({"slot_index": torch.zeros(3, 17).int()}, SpecError, "17 tokens a row, native_verify takes 1 to 16"),
    ({"slot_index": torch.tensor([[6, 0]] * 3)}, ArgumentError, "row 0 names slot 6, but there are 6 slots"),
    (
        {"slot_index": torch.tensor([[4, 6], [9, 9], [1, 0]]), "accepted": torch.ones(3).int()},
        ArgumentError,
        "row 0 writes the state after its token 1 to slot 6, but there are 6 slots",
    ),
    (
        {"slot_index": torch.tensor([[4, 2], [9, 9], [1, -1]]), "accepted": torch.tensor([1, 9, 2])},
        ArgumentError,
        "row 2 starts from slot -1, but there are 6 slots",
    ),
    (
        {"slot_index": torch.tensor([[4, 3], [9, 9], [1, 0]]), "null_slot": 3},
        ArgumentError,
        "row 0 (starts from|writes .* to) slot 3, .* none of them null_slot",
    ),
    ({"accepted": torch.ones(2).int()}, ArgumentError, r"accepted has shape \(2,\); expected \(3,\)"),
    ({"accepted": torch.ones(3)}, ArgumentError, "accepted is fp32; expected i32 or i64"),
    ({"accepted": None}, ArgumentError, "accepted is None; expected a tensor"),
    *(({"accepted": torch.tensor([1, 7, odd])}, ArgumentError,
       f"row 2 has accepted {odd} tokens, outside of 1 to 2") for odd in (0, 3, -1)),
]  # fmt: skip
REFUSED = [
    *((f"{family}_verify", bad) for family in sorted(INPUTS) for bad in BAD_NUMBERS + BAD_STARTS),
    *((f"{family}_native_verify", bad) for family in sorted(INPUTS) for bad in BAD_SLOTS + BAD_STARTS),
]


@pytest.mark.parametrize(("op", "bad"), REFUSED, ids=lambda part: part if isinstance(part, str) else "")
def test_what_is_refused_writes_nothing(op: str, bad: Bad) -> None:
    changes, error, message = bad
    given = arguments(op)
    given["out"] = torch.full_like(value_of(given), 7.0)
    if "ring_len" in given:
        given["ring_len"].fill_(4)  # flushes
    before = copied(given)
    with pytest.raises(error, match=message):
        call_op(op, given | changes)
    assert all(torch.equal(given[name], v) for name, v in before.items() if isinstance(v, Tensor))
    assert not (call_op(op, given) == 7.0).any()


@pytest.mark.parametrize(("start", "length"), [(-1, 0), (6, 0), (0, -1), (0, 5)])
def test_cursors_out_of_range_are_refused(family: str, start: int, length: int) -> None:
    """Of rows with tokens; the ring of an empty row is not looked at."""
    given = arguments(f"{family}_verify")
    slots = given["slot_index"].tolist()
    given["ring_start"][slots[1]] = 99
    before = copied(given)
    given["ring_start"][slots[2]], given["ring_len"][slots[2]] = start, length
    with pytest.raises(ArgumentError, match=rf"row 2: .* ring_start {start} and ring_len {length},"):
        call_op(f"{family}_verify", given)
    caches = ("state", *(named(f"{family}_verify", ring) for ring in ("ring_x", "ring_b", "ring_decay")))
    assert all(torch.equal(given[name], before[name]) for name in caches)
    assert call_op(f"{family}_verify", before).isfinite().all()


def test_caches_have_room_for_drafts(family: str) -> None:
    spec = spec_of(family, 16, 4)
    cache = ops.make_cache(spec, 3, 4, 2, "cpu")
    assert cache.capacity == ops.ring_capacity(spec) == 20
    assert ops.ring_capacity(spec, conv_width=4) == 23
    parts = (cache.state, cache.ring_x, cache.ring_b, cache.ring_decay)
    assert sum(part.numel() * part.element_size() for part in parts) == 3 * ops.bytes_per_slot(spec, 4, 2)
    assert ops.make_cache(spec.native, 3, 4, 2, "cpu").capacity == 0
    assert ops.bytes_per_slot(spec.native, 4, 2) == 4 * 8 * 16 * 4
    with pytest.raises(ArgumentError, match="capacity 19 is too small for window 16: rings need at least 20"):
        ops.make_cache(spec, 3, 4, 2, "cpu", capacity=19)
    # What folds a ring does not depend on how it was filled.
    assert spec.materialize == spec_of(family, 16, 1).materialize
