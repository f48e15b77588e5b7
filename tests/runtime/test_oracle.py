"""Oracle, ideal and reference against golden trajectories and exact figures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import reference
from replayssm_tune.runtime.oracle import (
    Entry,
    GatedDeltaNet,
    Ideal,
    Mamba2,
    Oracle,
    Recurrence,
    recurrence,
    softplus,
)
from replayssm_tune.runtime.spec import Spec
from tests.runtime.golden import vectors
from tests.specs import small

INPUTS = {"mamba2": ("x", "dt", "B", "C"), "gdn": ("v", "a", "k", "q", None, "b")}
"""What a step takes, by the names of the golden trajectories."""


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return vectors("mamba2")


def accepted_tokens(golden: dict[str, torch.Tensor]) -> Any:
    """(step, token, live rows) of all accepted tokens, in order, one token of each row at a time."""
    for step, accepted in enumerate(golden["accepted"]):
        for token in range(int(accepted.max())):
            yield step, token, (accepted > token).nonzero()[:, 0]


def golden_recurrence(g: dict[str, torch.Tensor], family: str) -> Recurrence:
    if family == "gdn":
        return GatedDeltaNet(g["A_log"], dt_bias=g["dt_bias"])
    return Mamba2(g["A"], D=g["D"], dt_bias=g["dt_bias"])


def inputs(g: dict[str, torch.Tensor], family: str, step: int, rows: torch.Tensor, token: int = 0) -> Any:
    return [None if name is None else g[name][step, rows, token] for name in INPUTS[family]]


def spec_of(family: str, **changes: Any) -> Spec:
    return small(family, **{"head_dim": 16, "state_size": 32} | changes)


def test_oracle_agrees_with_golden_trajectory(family: str) -> None:
    g = vectors(family)
    oracle = Oracle(g["state0"], golden_recurrence(g, family))
    for step, token, rows in accepted_tokens(g):
        y = oracle.step(rows, *inputs(g, family, step, rows, token))
        oracle.commit(torch.ones_like(rows))
        torch.testing.assert_close(y, g["y"][step, rows, token], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(oracle.state, g["state_final"], rtol=1e-12, atol=1e-12)


def packed(g: dict[str, torch.Tensor], family: str, step: int, count: torch.Tensor) -> Any:
    """Inputs of the first ``count`` (2,) tokens of both rows, row after row, by the names of an oracle."""
    names = ("x", "dt", "B", "C", "z", "beta")
    return {
        ours: torch.cat([g[name][step, row, :n] for row, n in enumerate(count.tolist())])
        for ours, name in zip(names, INPUTS[family], strict=False)
        if name is not None
    }


def test_oracle_verifies_the_drafts_of_a_golden_trajectory(family: str) -> None:
    """Steps of 0 to 4 tokens a row: outputs of all, states of the accepted ones."""
    g = vectors(family)
    oracle = Oracle(g["state0"], golden_recurrence(g, family))
    one_by_one = Oracle(g["state0"], oracle.recurrence)
    everyone = torch.arange(2)
    assert bool((g["n_tokens"] > g["accepted"]).any())
    for step, (count, accepted) in enumerate(zip(g["n_tokens"], g["accepted"], strict=True)):
        y = oracle.step(everyone, **packed(g, family, step, count), count=count)
        wanted = torch.cat([g["y"][step, row, :n] for row, n in enumerate(count.tolist())])
        torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
        assert len(oracle.after) == len(y)
        oracle.commit(accepted)
        for token in range(int(accepted.max())):
            rows = (accepted > token).nonzero()[:, 0]
            one_by_one.step(rows, *inputs(g, family, step, rows, token))
            one_by_one.commit(torch.ones_like(rows))
        torch.testing.assert_close(oracle.state, one_by_one.state, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(oracle.state, g["state_final"], rtol=1e-12, atol=1e-12)


def test_rejected_tokens_leave_the_state(family: str) -> None:
    g = vectors(family)
    oracle = Oracle(g["state0"], golden_recurrence(g, family))
    rows = torch.tensor([1, 0])
    oracle.step(rows, *inputs(g, family, 0, rows))
    oracle.commit(torch.tensor([0, 1]))
    assert torch.equal(oracle.state[1], g["state0"][1])
    assert not torch.equal(oracle.state[0], g["state0"][0])


def test_specs_have_the_recurrence_of_their_family() -> None:
    g = vectors("gdn")
    everyone = torch.arange(2)
    token = inputs(g, "gdn", 0, everyone)
    for normalises in (True, False):
        spec = spec_of("gdn", qk_l2norm=normalises)
        oracle = Oracle(g["state0"], recurrence(spec, g["A_log"], dt_bias=g["dt_bias"]))
        oracle.step(everyone, *token)
        assert oracle.entry is not None
        norms = oracle.entry.b.norm(dim=-1)
        assert bool(((norms - 1).abs() < 1e-3).all()) == normalises
    assert isinstance(recurrence(spec_of("mamba2"), g["A_log"]), Mamba2)


@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0])
def test_the_epsilon_of_a_norm_is_inside_the_root(norm: float) -> None:
    key = torch.zeros(1, 1, 4, dtype=torch.float64)
    key[..., 0] = norm
    model = Oracle(torch.zeros(1, 1, 1, 4), GatedDeltaNet(torch.zeros(1)))
    one = torch.ones(1, 1, dtype=torch.float64)
    model.step(torch.tensor([0]), one[..., None], one, key, key, None, one)
    assert model.entry is not None
    assert float(model.entry.b[0, 0, 0]) == pytest.approx(norm / math.sqrt(norm**2 + 1e-6), abs=1e-15)


def test_a_key_met_again_recalls_its_value() -> None:
    """Where beta is 1 and nothing decays, writing a value for a key replaces the one before."""
    model = Oracle(torch.zeros(1, 1, 3, 4), GatedDeltaNet(torch.tensor([-50.0]), qk_l2norm=False))
    key = torch.tensor([[[0.0, 1.0, 0.0, 0.0]]])
    for value in (1.0, 5.0):
        v, gate = torch.full((1, 1, 3), value), torch.full((1, 1), 50.0)
        y = model.step(torch.tensor([0]), v, torch.zeros(1, 1), key, key, None, gate)
        model.commit(torch.ones(1))
        torch.testing.assert_close(y, v.double() * 0.5, rtol=1e-12, atol=0)  # the query is scaled


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("op", ["step", "native_step"])
def test_reference_agrees_with_golden_trajectory(
    golden: dict[str, torch.Tensor], dtype: torch.dtype, bound: float, window: int, op: str
) -> None:
    if op == "native_step" and window != 1:
        pytest.skip("native steps have no window")
    g = {name: value.to(dtype) if value.is_floating_point() else value for name, value in golden.items()}
    capacity = window + 1
    state = g["state0"].clone()
    slots, heads, head_dim, state_size = state.shape
    groups = g["B"].shape[3]
    ring_x = torch.full((slots, heads, capacity, head_dim), math.nan, dtype=dtype)
    ring_b = torch.full((slots, groups, capacity, state_size), math.nan, dtype=dtype)
    ring_decay = torch.full((slots, heads, capacity), math.nan, dtype=dtype)
    start = torch.tensor([1, 0], dtype=torch.int32)
    length = torch.zeros(2, dtype=torch.int32)
    everyone = torch.arange(2)

    def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)

    for step, token, rows in accepted_tokens(golden):
        slot_index = torch.full((2,), -1)
        slot_index[rows] = rows
        x, dt, B, C = (g[name][step, :, token] for name in ("x", "dt", "B", "C"))
        out = torch.empty_like(x)
        inputs = (x, dt, g["A"], B, C, g["D"], None, g["dt_bias"], state)
        if op == "native_step":
            reference.mamba2_native_step(*inputs, slot_index, out, True, -1)
        else:
            rings = (ring_x, ring_b, ring_decay, start, length)
            reference.mamba2_step(*inputs, *rings, slot_index, out, window, True, -1)
            kept = torch.ones(2, dtype=torch.int32)
            reference.commit(kept, start, length, slot_index, None, window, 1, capacity, -1)
        close(out[rows], golden["y"][step, rows, token])

    if op == "step":  # Fold what is left: a step whose token decays nothing, with a full ring.
        index = [(start + j) % capacity for j in range(window)]
        for slot in everyone:
            total = state[slot].double()
            for j in range(int(length[slot])):
                at = int(index[j][slot])
                decay = (golden["A"] * ring_decay[slot, :, at].double()).exp()
                update = ring_decay[slot, :, at, None].double() * ring_x[slot, :, at].double()
                b = ring_b[slot, :, at].double().repeat_interleave(heads // groups, 0)
                total = decay[:, None, None] * total + update[..., None] * b[:, None]
            close(total, golden["state_final"][slot])
    else:
        close(state, golden["state_final"])


@pytest.mark.parametrize("value", [-1e4, -100.0, -20.1, -1.0, 0.0, 1e-3, 19.9, 20.0, 20.1, 88.0, 100.0, 1e4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-15), (torch.float32, 3e-7)])
def test_softplus_is_accurate_and_finite(value: float, dtype: torch.dtype, bound: float) -> None:
    tensor = torch.tensor(value, dtype=dtype)
    exact = max(float(tensor), 0.0) + math.log1p(math.exp(-abs(float(tensor))))
    assert math.isclose(float(softplus(tensor)), exact, rel_tol=bound, abs_tol=1e-44)


def test_ideal_without_rounding_is_the_oracle(family: str) -> None:
    g, spec = vectors(family), spec_of(family)
    rule = golden_recurrence(g, family)
    oracle, ideal = Oracle(g["state0"], rule), Ideal(g["state0"], rule, spec=spec)
    for step, token, rows in accepted_tokens(g):
        given = inputs(g, family, step, rows, token)
        exact, rounded = oracle.step(rows, *given), ideal.step(rows, *given)
        oracle.commit(torch.ones_like(rows))
        ideal.commit(torch.ones_like(rows))
        torch.testing.assert_close(rounded, exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(rounded, rounded.float().double())
    assert int(ideal.ring_len.max()) <= spec.window


def test_an_ideal_keeps_what_its_ring_holds(family: str) -> None:
    """Between flushes the state is the old one and the rounded entries of accepted tokens."""
    g = vectors(family)
    rule = golden_recurrence(g, family)
    spec = spec_of(family, activation_dtype="bf16", ring_dtype="bf16", state_dtype="bf16")
    ideal = Ideal(g["state0"], rule, spec=spec)
    expected = g["state0"].clone()
    everyone = torch.arange(2)
    for step in range(8):
        ideal.step(everyone, *inputs(g, family, step, everyone))
        if step == spec.window:
            expected = expected.bfloat16().double()
        assert ideal.entry is not None
        for value, dtype in zip(ideal.entry, (torch.bfloat16, torch.bfloat16, torch.float32), strict=True):
            assert torch.equal(value, value.to(dtype).double())
        ideal.commit(torch.tensor([1, 1]))
        expected = rule.advance(expected, Entry(*ideal.entry))
        assert torch.equal(ideal.state, expected)


def test_a_native_ideal_rounds_every_state(family: str) -> None:
    g = vectors(family)
    spec = spec_of(family, activation_dtype="bf16", ring_dtype="bf16", state_dtype="bf16").native
    ideal = Ideal(g["state0"], golden_recurrence(g, family), spec=spec)
    everyone = torch.arange(2)
    ideal.step(everyone, *inputs(g, family, 0, everyone))
    ideal.commit(torch.tensor([1, 1]))
    assert torch.equal(ideal.state, ideal.state.bfloat16().double())


def sixteen_bits(family: str, op: str, **sizes: Any) -> Spec:
    """A spec of rows of several tokens whose every rounding shows."""
    spec = spec_of(family, activation_dtype="bf16", ring_dtype="bf16", state_dtype="bf16")
    spec = dataclasses.replace(spec, op="verify", **sizes)
    return spec.native if op == "native_verify" else spec


@pytest.mark.parametrize("op", ["verify", "native_verify"])
def test_an_ideal_rounds_nothing_between_the_tokens_of_a_step(family: str, op: str) -> None:
    """Outputs and entries are those of the exact recurrence from where the step begins, rounded at last."""
    g = vectors(family)
    rule, everyone, count = golden_recurrence(g, family), torch.arange(2), torch.tensor([4, 3])
    ideal = Ideal(g["state0"], rule, spec=sixteen_bits(family, op, num_tokens=4, window=16))
    for step in range(3):
        oracle, given = Oracle(ideal.state, rule), packed(g, family, step, count)
        y, rounded = (model.step(everyone, **given, count=count) for model in (oracle, ideal))
        assert torch.equal(rounded, y.bfloat16().double())
        assert oracle.entry is not None
        assert ideal.entry is not None
        if op == "native_verify":
            assert torch.equal(ideal.after, oracle.after.bfloat16().double())
            assert not torch.equal(ideal.after, oracle.after)
        else:
            assert torch.equal(ideal.entry.x, oracle.entry.x.bfloat16().double())
            last = rule.advance(ideal.after[5:6], ideal.entry.at(torch.tensor([6])))
            torch.testing.assert_close(ideal.after[6:], last, rtol=1e-15, atol=1e-15)
        ideal.commit(torch.tensor([2, 3]))
        assert torch.equal(ideal.state, ideal.after[[1, 6]])
    assert ideal.ring_len.tolist() == [6, 9]


def test_an_ideal_flushes_by_the_most_tokens_that_a_row_may_have(family: str) -> None:
    g = vectors(family)
    spec = sixteen_bits(family, "verify", num_tokens=3, window=5)
    start, everyone = g["state0"] * (1 + 2**-12), torch.arange(2)
    for count, flushes in (([1, 1], True), ([0, 3], False), ([3, 0], True)):
        ideal = Ideal(start, golden_recurrence(g, family), spec=spec, ring_len=torch.tensor([3, 2]))
        tokens = torch.tensor(count)
        ideal.step(everyone, **packed(g, family, 0, tokens), count=tokens)
        assert torch.equal(ideal.state[0], (start[0].bfloat16() if flushes else start[0]).double())
        assert torch.equal(ideal.state[1], start[1])
        ideal.commit(torch.zeros(2))
        assert ideal.ring_len.tolist() == [0 if flushes else 3, 2]
