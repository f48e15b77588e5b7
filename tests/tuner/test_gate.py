"""What the gate lets through and what it refuses, of steps in plain torch."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner import appends
from replayssm_tune.tuner.gate import Gate, fault_names
from replayssm_tune.tuner.interpreted import small_spec
from replayssm_tune.tuner.trajectory import Trajectory
from tests.specs import STEP_DTYPES
from tests.tuner import eager, eager_verify

KINDS = ("mamba2", "gdn", "gdn-l2norm")


def spec_of(kind, dtypes=STEP_DTYPES[0], op="step"):
    activation, state, ring = dtypes
    gdn = kind != "mamba2"
    spec = Spec(
        "gdn" if gdn else "mamba2", "step", head_dim=10, state_size=24, heads_per_group=2, window=4,
        activation_dtype=activation, state_dtype=state, ring_dtype=ring,
        has_d=not gdn, has_z=not gdn, qk_l2norm=kind == "gdn-l2norm",
    )  # fmt: skip
    return spec.native if op == "native_step" else spec


@functools.cache
def scene_of(kind, dtypes=STEP_DTYPES[0], op="step"):
    return Trajectory(spec_of(kind, dtypes, op), heads=4, steps=18, null_slot=0)


@functools.cache
def gate_of(kind, dtypes=STEP_DTYPES[0], op="step"):
    return Gate(scene_of(kind, dtypes, op), repeats=2)


@pytest.mark.parametrize("op", ["step", "native_step"])
@pytest.mark.parametrize("dtypes", STEP_DTYPES, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_step_passes(kind, dtypes, op):
    scene = scene_of(kind, dtypes, op)
    verdict = gate_of(kind, dtypes, op).judge(functools.partial(eager.launch, scene))
    assert verdict.passed, verdict
    assert 0 < verdict.output_error <= verdict.output_bound
    assert 0 < verdict.state_error <= verdict.state_bound


@pytest.mark.parametrize("fault", eager.GDN_FAULTS)
def test_faults_of_a_delta_step_are_refused_by_name(fault):
    scene = scene_of("gdn-l2norm")
    verdict = gate_of("gdn-l2norm").judge(functools.partial(eager.launch, scene, fault=fault))
    if eager.GDN_FAULTS[fault] == "state error":  # outputs that are read from it later are wrong as well
        assert verdict.reason
        assert verdict.state_error > verdict.state_bound
    else:
        assert verdict.reason.startswith(eager.GDN_FAULTS[fault])


def test_sixteen_bit_rings_do_not_hide_a_coarse_read_out():
    dtypes = ("fp16", "fp32", "fp16")
    fault = "the read-out is of bf16"
    scene = scene_of("gdn-l2norm", dtypes)
    verdict = gate_of("gdn-l2norm", dtypes).judge(functools.partial(eager.launch, scene, fault=fault))
    assert verdict.reason.startswith("ring u is inexact")


ROWS = {"verify": [(1, 1), (2, 8), (3, 5), (16, 16), (13, 20)], "native_verify": [(1, 1), (3, 3), (16, 16)]}
"""Tokens of a row and window, by op."""


@functools.cache
def verified_gate(kind, op, num_tokens, window, dtypes=STEP_DTYPES[0]):
    scene = Trajectory(
        eager_verify.spec_of(kind, op, num_tokens, window, dtypes), heads=4, steps=14, null_slot=0
    )
    return Gate(scene, repeats=2)


def verdict_of(gate, fault=""):
    return gate.judge(functools.partial(eager_verify.launch, gate.trajectory, fault=fault))


@pytest.mark.parametrize(("op", "rows"), [(op, rows) for op in ROWS for rows in ROWS[op]])
@pytest.mark.parametrize("kind", KINDS)
def test_correct_verification_passes(kind, op, rows):
    verdict = verdict_of(verified_gate(kind, op, *rows))
    assert verdict.passed, verdict
    assert 0 < verdict.output_error <= verdict.output_bound / 10
    assert 0 < verdict.state_error <= verdict.state_bound / 10


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("dtypes", STEP_DTYPES[1:], ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_correct_verification_passes_with_few_bits(kind, dtypes, op):
    verdict = verdict_of(verified_gate(kind, op, 5, 7, dtypes))
    assert verdict.passed, verdict


def families(faults, kinds):
    return [(kind, fault) for kind in kinds for fault in faults]


@pytest.mark.parametrize("rows", [(3, 5), (2, 8)])
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *families(eager_verify.FAULTS, KINDS),
        *families(eager_verify.MAMBA2_FAULTS, KINDS[:1]),
        *families(eager_verify.GDN_FAULTS, KINDS[2:]),
    ],
)
def test_faults_of_verification_are_refused_by_name(kind, fault, rows):
    verdict = verdict_of(verified_gate(kind, "verify", *rows), fault)
    own = eager_verify.MAMBA2_FAULTS if kind == "mamba2" else eager_verify.GDN_FAULTS
    assert_refused(verdict, (eager_verify.FAULTS | own)[fault])


@pytest.mark.parametrize(("kind", "fault"), families(eager_verify.NATIVE_FAULTS, KINDS[::2]))
def test_faults_of_a_native_verification_are_refused_by_name(kind, fault):
    verdict = verdict_of(verified_gate(kind, "native_verify", 3, 3), fault)
    assert_refused(verdict, eager_verify.NATIVE_FAULTS[fault])


def assert_refused(verdict, reason):
    if reason == "state error":  # outputs that are read from it later are wrong as well
        assert verdict.reason
        assert verdict.state_error > verdict.state_bound
    else:
        assert verdict.reason.startswith(reason)


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_the_interpreted_check_has_rows_of_several_tokens(num_tokens):
    spec = eager_verify.spec_of("gdn", "verify", num_tokens, 16, STEP_DTYPES[1])
    for small in (small_spec(spec), small_spec(spec.native)):
        assert small.num_tokens == min(3, num_tokens)
        assert small.window in (0, 4)
        assert small.verifies


def spoil(what, pool, step, out):
    """Damage what a correct launch left behind."""
    slots, append = step.slots, step.append
    if what == "a gap":
        pool.storage[0] ^= 1
    elif what == "another slot":
        other = torch.ones(len(pool.state), dtype=torch.bool)
        other[slots] = False
        pool.state[other, 0, 0, 0] = 3.0
    elif what == "padding":
        padded = torch.ones(len(out), dtype=torch.bool)
        padded[step.live] = False
        out[padded] = 1e-30
    elif what == "an output":
        out[step.live[:1], 0, 0] = float("inf")
    elif what == "a lane of x":
        pool.ring_x[slots[:1], -1, append[:1], -1] += 0.1
    elif what == "a lane of b":
        pool.ring_b[slots[:1], -1, append[:1], -1] *= 1 + 2**-10
    elif what == "decay":
        pool.ring_decay[slots[:1], -1, append[:1]] *= 1 + 2**-18


SPOILED = {
    "a gap": 0,
    "another slot": 0,
    "padding": 1,
    "an output": 2,
    "a lane of b": 3,
    "decay": 4,
    "a lane of x": 5,
}
"""Damage, and the place of its fault among the gate's names."""


@pytest.mark.parametrize("what", SPOILED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_wrong_value_is_found(kind, what):
    scene, steps = scene_of(kind), set()

    def launch(pool, step):
        out = eager.launch(scene, pool, step)
        steps.add(id(step))
        if len(step.live) and len(steps) > 10:
            spoil(what, pool, step, out)
        return out

    verdict = gate_of(kind).judge(launch)
    assert verdict.reason.startswith(fault_names(scene.spec)[SPOILED[what]])


@pytest.mark.parametrize("kind", KINDS)
def test_launches_that_differ_are_refused(kind):
    scene, calls = scene_of(kind), []

    def launch(pool, step):
        calls.append(step)
        out = eager.launch(scene, pool, step)
        return out if len(calls) % 2 else out * (1 + 2**-20)

    assert gate_of(kind).judge(launch).reason == "launches from the same memory differ"


def test_faults_have_the_names_of_their_family():
    assert len(fault_names(spec_of("gdn", op="native_step"))) == 3
    assert "ring k differs from the inputs" in fault_names(spec_of("gdn"))
    assert "ring k is inexact" in fault_names(spec_of("gdn-l2norm"))
    assert "ring step sizes are inexact" in fault_names(spec_of("mamba2"))


def test_a_new_u_is_as_exact_as_what_it_is_the_difference_of():
    """One row, one direction: the second token recalls from the state and from the first, which cancel."""
    spec = eager_verify.spec_of("gdn", "verify", 2, 4, STEP_DTYPES[0])
    spec = dataclasses.replace(spec, state_size=1, head_dim=1, heads_per_group=1)
    scene = Trajectory(
        spec,
        heads=1,
        sequences=1,
        padded_rows=0,
        steps=1,
        ring_len=0,
        attend=1.0,
        packed=0.0,
        rates=(1e-9, 1e-8),
    )
    pool, (step,) = scene.pool(), list(scene)
    step.B.fill_(1.0)
    assert step.beta is not None
    step.beta.fill_(0.0)  # halves
    step.x[:] = torch.tensor([0.0, 16.0])[:, None, None]
    pool.state.fill_(1024.0)
    append = appends.expected_append(spec, scene.recurrence, pool, step)
    # The first recalls 1024, halved; the second as much from the state, and -512 from the first.
    values, terms = torch.tensor([[-512.0, 8.0 - 512.0 + 256.0], [512.0, 8.0 + 512.0 + 256.0]]).double()
    torch.testing.assert_close(append.entry.x.flatten(), values, rtol=1e-6, atol=0)
    bounds = append.tolerance.x.flatten() / (appends.DOT_FACTOR * appends.COMPUTED_TOLERANCE)
    torch.testing.assert_close(bounds, terms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_unit_is_one_in_the_last_place(dtype):
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    value = torch.tensor([1.0, 1.9, 2.0, 3e-4, 2.0**-14, 1e-7, 100.0], dtype=torch_dtype)
    above = torch.nextafter(value, torch.tensor(float("inf"), dtype=torch_dtype))
    assert torch.equal(appends.unit(value.double(), dtype), above.double() - value.double())
    assert float(appends.unit(torch.tensor(2.0).double(), "fp32")) == pytest.approx(2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", [STEP_DTYPES[0], STEP_DTYPES[1]], ids="-".join)
@pytest.mark.parametrize("op", ["step", "verify"])
def test_an_expected_append_is_what_the_oracle_adds(kind, dtypes, op):
    """Before the first step the pool holds what the ideal has taken in: there the two agree."""
    spec = spec_of(kind, dtypes) if op == "step" else eager_verify.spec_of(kind, op, 4, 6, dtypes)
    scene = Trajectory(spec, heads=4, steps=1, attend=1.0)
    pool, (step,) = scene.pool(), list(scene)
    append = appends.expected_append(scene.spec, scene.recurrence, pool, step)
    exact = append.entry.rounded(scene.spec.ring_dtype)
    assert [int(count) for count in append.wrong(exact)] == [0, 0, 0]
    torch.testing.assert_close(append.entry.decay, step.delta, rtol=1e-12, atol=0)
    assert len(append.entry.x) == len(step.new) >= len(step.live)
    shifted = exact._replace(x=exact.x + 2 * append.tolerance.x + 1e-9)
    assert [int(count) for count in append.wrong(shifted)] == [0, 0, exact.x.numel()]
