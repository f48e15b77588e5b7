"""Oracle, ideal and reference against golden trajectories and exact figures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replayssm_tune.runtime import reference
from replayssm_tune.runtime.oracle import Ideal, Oracle, softplus

VECTORS = Path(__file__).parents[1] / "data" / "mamba2.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    with np.load(VECTORS) as data:
        return {name: torch.from_numpy(data[name]) for name in data}


def accepted_tokens(golden: dict[str, torch.Tensor]) -> Any:
    """(step, token, live rows) of all accepted tokens, in order, one token of each row at a time."""
    for step, accepted in enumerate(golden["accepted"]):
        for token in range(int(accepted.max())):
            yield step, token, (accepted > token).nonzero()[:, 0]


def test_oracle_agrees_with_golden_trajectory(golden: dict[str, torch.Tensor]) -> None:
    oracle = Oracle(golden["state0"], golden["A"], D=golden["D"], dt_bias=golden["dt_bias"])
    for step, token, rows in accepted_tokens(golden):
        x, dt, B, C = (golden[name][step, rows, token] for name in ("x", "dt", "B", "C"))
        y = oracle.step(rows, x, dt, B, C)
        oracle.commit(torch.ones_like(rows))
        torch.testing.assert_close(y, golden["y"][step, rows, token], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(oracle.state, golden["state_final"], rtol=1e-12, atol=1e-12)


def test_rejected_tokens_leave_the_state(golden: dict[str, torch.Tensor]) -> None:
    oracle = Oracle(golden["state0"], golden["A"])
    rows = torch.tensor([1, 0])
    x, dt, B, C = (golden[name][0, rows, 0] for name in ("x", "dt", "B", "C"))
    oracle.step(rows, x, dt, B, C)
    oracle.commit(torch.tensor([0, 1]))
    assert torch.equal(oracle.state[1], golden["state0"][1])
    assert not torch.equal(oracle.state[0], golden["state0"][0])


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
            reference.commit(kept, start, length, slot_index, window, 1, capacity, -1)
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


def test_ideal_without_rounding_is_the_oracle(golden: dict[str, torch.Tensor], driver: Any) -> None:
    spec = driver.make_spec(head_dim=16, state_size=32)
    kept = {"D": golden["D"], "dt_bias": golden["dt_bias"]}
    oracle = Oracle(golden["state0"], golden["A"], **kept)
    ideal = Ideal(golden["state0"], golden["A"], spec=spec, **kept)
    for step, token, rows in accepted_tokens(golden):
        inputs = [golden[name][step, rows, token] for name in ("x", "dt", "B", "C")]
        exact, rounded = oracle.step(rows, *inputs), ideal.step(rows, *inputs)
        oracle.commit(torch.ones_like(rows))
        ideal.commit(torch.ones_like(rows))
        torch.testing.assert_close(rounded, exact, rtol=1e-5, atol=1e-5)
        assert torch.equal(rounded, rounded.float().double())
    assert int(ideal.ring_len.max()) <= spec.window
