"""Numbers and memory of the step ops: each test is a kind of fault that bit other implementations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ops
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests.specs import STEP_DTYPES


@pytest.mark.parametrize(("activation", "state", "ring"), STEP_DTYPES)
@pytest.mark.parametrize("gap_bytes", [16, 4])
@pytest.mark.parametrize("null_slot", [None, 0, 5])
def test_random_trajectories_pass_the_gate(
    driver: Any, op: str, activation: str, state: str, ring: str, gap_bytes: int, null_slot: int | None
) -> None:
    spec = driver.make_spec(op, activation_dtype=activation, state_dtype=state, ring_dtype=ring, has_z=True)
    scene = Trajectory(spec, heads=4, steps=24, null_slot=null_slot, gap_bytes=gap_bytes, seed=gap_bytes)
    errors = driver.run(scene)
    assert driver.passes_gate(errors), errors
    assert len(errors.state_by_launch) >= 5


OPTIONAL = {"mamba2": ("has_d", "has_dt_bias", "dt_softplus"), "gdn": ("has_dt_bias", "qk_l2norm")}


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_optional_inputs(driver: Any, family: str, op: str, index_dtype: torch.dtype) -> None:
    names = OPTIONAL[family]
    for values in itertools.product((True, False), repeat=len(names)):
        spec = driver.make_spec(op, **dict(zip(names, values, strict=True)))
        scene = Trajectory(spec, heads=2, steps=10, index_dtype=index_dtype)
        assert driver.passes_gate(driver.run(scene)), spec.key


@pytest.mark.parametrize(
    ("head_dim", "state_size"), [(80, 128), (48, 96), (96, 64), (5, 256), (256, 7), (1, 1)]
)
def test_red_zones_of_odd_shapes(driver: Any, op: str, head_dim: int, state_size: int) -> None:
    spec = driver.make_spec(op, head_dim=head_dim, state_size=state_size, heads_per_group=1)
    scene = Trajectory(spec, heads=2, sequences=3, steps=7, gap_bytes=4)
    assert driver.passes_gate(driver.run(scene))


@pytest.mark.parametrize("window", [1, 2, 16, 64])
@pytest.mark.parametrize("spare", [0, 3])
def test_windows_and_capacities(driver: Any, window: int, spare: int) -> None:
    spec = driver.make_spec(window=window)
    scene = Trajectory(
        spec, heads=2, sequences=3, steps=2 * window + 8, capacity=window + 1 + spare, accept=0.9
    )
    errors = driver.run(scene)
    assert driver.passes_gate(errors)
    assert errors.state_by_launch


def test_fp32_bound_catches_tf32(driver: Any, op: str) -> None:
    scene = Trajectory(driver.make_spec(op), heads=4, steps=20)
    errors = driver.run(scene)
    assert errors.y < 1e-6
    # Ten mantissa bits in the state read-out, as a TF32 product has.
    rounded = (errors.expected.float().view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert relative_rms(rounded, errors.expected) > 1e-5


def test_large_state_with_small_updates_keeps_fp32(driver: Any, family: str, op: str) -> None:
    # GDN's u is as large as what the state recalls: only an fp32 ring keeps it as exact as the state.
    ring = "fp32" if family == "gdn" else "bf16"
    options: dict[str, Any] = {
        "heads": 4,
        "steps": 30,
        "state_scale": 4096.0,
        "rates": (0.01, 0.1),
        "attend": 1.0,
    }
    fp32 = driver.make_spec(op, activation_dtype="bf16", ring_dtype=ring, has_d=False)
    bf16 = driver.make_spec(op, activation_dtype="bf16", ring_dtype=ring, has_d=False, state_dtype="bf16")
    wide, narrow = driver.run(Trajectory(fp32, **options)), driver.run(Trajectory(bf16, **options))
    assert wide.y < narrow.y
    assert wide.state < narrow.state / 100


def test_error_does_not_grow_with_flushes(driver: Any, family: str) -> None:
    # What GDN writes depends on what it recalls: a 16-bit ring adds errors of its own.
    ring = "fp32" if family == "gdn" else "bf16"
    spec = driver.make_spec(head_dim=2, state_size=4, activation_dtype="bf16", ring_dtype=ring)
    scene = Trajectory(spec, heads=2, sequences=2, slots=3, padded_rows=0, steps=4000, accept=1.0, attend=1.0)
    errors = driver.run(scene).state_by_launch
    assert len(errors) >= 900
    early, late = errors[: len(errors) // 4], errors[-len(errors) // 4 :]
    assert sum(late) / len(late) < 2 * sum(early) / len(early) + 1e-7


def test_extreme_decays_in_random_order(driver: Any, op: str) -> None:
    # Of smaller step sizes fp32 has no 1e-6: dt + bias is beyond -16 then, and rounded by more.
    scene = Trajectory(driver.make_spec(op), heads=4, steps=40, rates=(1.0, 16.0), deltas=(1e-6, 1e6 / 16))
    errors = driver.run(scene)
    assert driver.passes_gate(errors), errors


def one_row(op: str) -> dict[str, Any]:
    """Slot 0 as the only row, with one token."""
    zero = torch.zeros(1, dtype=torch.int32)
    if op == "native_verify":
        return {"slot_index": zero[:, None], "accepted": zero + 1}
    return {"slot_index": zero} | ({"query_start": torch.arange(2).int()} if op == "verify" else {})


SOFTPLUS_ENDS = [-100.0, 0.0, 19.9, 20.0, 20.1, 88.0, 100.0, 1e4]


@pytest.mark.parametrize("bias", [None, 1.5])
def test_step_sizes_at_the_ends_of_softplus(op: str, bias: float | None) -> None:
    values, heads = SOFTPLUS_ENDS, len(SOFTPLUS_ENDS)
    dt = torch.tensor([values]) - (bias or 0.0)
    dt_bias = None if bias is None else torch.full((heads,), bias)
    x, B, C = torch.ones(1, heads, 1), torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    state = torch.zeros(1, heads, 1, 1)
    common: dict[str, Any] = {"state": state, "dt_bias": dt_bias}
    A = -torch.ones(heads)
    if op.startswith("native"):
        y = getattr(ops, f"mamba2_{op}")(x, dt, A, B, C, **one_row(op), **common)
    else:
        y = ops.mamba2_step(
            x, dt, A, B, C, **one_row(op), **common, window=1,
            ring_x=torch.zeros(1, heads, 2, 1), ring_b=torch.zeros(1, 1, 2, 1),
            ring_decay=torch.zeros(1, heads, 2),
            ring_start=torch.zeros(1, dtype=torch.int32), ring_len=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
    # Of an empty state, y is delta itself.
    exact = [max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in (dt + (bias or 0.0))[0].double().tolist()]
    torch.testing.assert_close(
        y[0, :, 0].double(), torch.tensor(exact, dtype=torch.float64), rtol=2e-6, atol=1e-44
    )


@pytest.mark.parametrize("bias", [None, 1.5])
@pytest.mark.parametrize("A_log", [0.0, 2.5])
def test_gates_at_the_ends_of_softplus(op: str, A_log: float, bias: float | None) -> None:
    """What is left of a state of ones after one token that writes nothing, and the gate in the ring."""
    heads = len(SOFTPLUS_ENDS)
    a = torch.tensor([SOFTPLUS_ENDS]) - (bias or 0.0)
    given: dict[str, Any] = {
        "q": torch.ones(1, 1, 1), "k": torch.zeros(1, 1, 1), "v": torch.zeros(1, heads, 1), "a": a,
        "b": torch.zeros(1, heads), "A_log": torch.full((heads,), A_log), "state": torch.ones(1, heads, 1, 1),
        "dt_bias": None if bias is None else torch.full((heads,), bias), "qk_l2norm": False,
    } | one_row(op)  # fmt: skip
    biased = (a + (bias or 0.0))[0].double()
    exact = torch.stack([v.clamp(min=0) + torch.log1p(torch.exp(-v.abs())) for v in biased])
    g = -math.exp(A_log) * exact
    if op.startswith("native"):
        y = getattr(ops, f"gdn_{op}")(**given)
    else:
        ring_g = torch.zeros(1, heads, 2)
        y = ops.gdn_step(
            **given, window=1, ring_u=torch.zeros(1, heads, 2, 1), ring_k=torch.zeros(1, 1, 2, 1),
            ring_g=ring_g, ring_start=torch.zeros(1, dtype=torch.int32),
            ring_len=torch.zeros(1, dtype=torch.int32),
        )  # fmt: skip
        torch.testing.assert_close(ring_g[0, :, 0].double(), g, rtol=2e-6, atol=1e-43)  # denormal
    torch.testing.assert_close(y[0, :, 0].double(), g.exp(), rtol=2e-4, atol=1e-37)


def test_fp16_outputs_overflow_to_infinity_and_states_stay_right(driver: Any, family: str, op: str) -> None:
    # GDN's u is as large as what the state recalls: an fp16 ring would overflow with it.
    ring, scale = ("fp32", 5e5) if family == "gdn" else ("fp16", 1e5)
    spec = driver.make_spec(op, activation_dtype="fp16", ring_dtype=ring)
    errors = driver.run(Trajectory(spec, heads=2, steps=12, state_scale=scale))
    over = errors.expected.abs() > 65520
    assert over.any()
    assert torch.equal(errors.outputs[over], errors.expected[over].sign() * math.inf)
    assert errors.outputs[errors.expected.abs() < 65400].isfinite().all()
    assert errors.state < 1e-5


@pytest.mark.parametrize("live", [0, 1, 3, 6])
def test_padded_rows_touch_nothing(driver: Any, op: str, live: int) -> None:
    """Rows beyond the live ones hold stale inputs; both sentinels mark them."""
    scene = Trajectory(
        driver.make_spec(op), heads=2, sequences=6, padded_rows=0, attend=1.0, packed=0.0, null_slot=0,
        steps=1,
    )  # fmt: skip
    pool = scene.pool()
    (step,) = scene
    step.slot_index.view(6, -1)[live:, 0] = torch.tensor([-1, 0] * 3)[: 6 - live]
    before = pool.storage.clone()
    out = torch.full_like(step.x, math.nan)
    driver.launch(scene, pool, step, out)
    new = live * scene.spec.num_tokens
    stores = step.stores[step.row]
    allowed = pool.writable(step.targets[:new], stores[:new], step.append[:new])
    assert not ((pool.storage != before) & ~allowed).any()
    assert torch.equal(out[new:], torch.zeros_like(out[new:]))
    torch.testing.assert_close(out[:new].double(), step.y[:new], rtol=1e-4, atol=1e-5)
    lengths = pool.ring_len.clone()
    driver.commit(scene, pool, step)
    moved = (pool.ring_len != lengths).nonzero()[:, 0].tolist()
    assert set(moved) <= set(step.slots[:live].tolist())


def test_slot_zero_is_live_without_a_null_slot(driver: Any, op: str) -> None:
    spec = driver.make_spec(op)
    slots = 4 * (spec.num_tokens if spec.is_native else 1)
    scene = Trajectory(spec, heads=2, sequences=4, slots=slots, steps=12)
    assert 0 in scene.slot_of.flatten().tolist()
    assert driver.passes_gate(driver.run(scene))


def test_same_memory_gives_the_same_bits(driver: Any, op: str) -> None:
    scene = Trajectory(driver.make_spec(op, activation_dtype="bf16", ring_dtype="bf16"), heads=2, steps=1)
    results = []
    for _ in range(3):
        pool = scene.pool()
        (step,) = scene
        out = driver.launch(scene, pool, step)
        results.append((out.view(torch.int16), pool.storage))
    for out, storage in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(storage, results[0][1])


def test_no_rows(driver: Any, op: str) -> None:
    scene = Trajectory(driver.make_spec(op), heads=2, sequences=1, padded_rows=0, packed=0.0, steps=1)
    pool = scene.pool()
    (step,) = scene
    inputs = {n: getattr(step, n) for n in ("x", "dt", "B", "C", "slot_index", "beta", "previous")}
    empty = replace(step, **{n: value[:0] for n, value in inputs.items() if value is not None})
    before = pool.storage.clone()
    assert driver.launch(scene, pool, empty).shape == (0, 2, 8)
    assert torch.equal(pool.storage, before)
