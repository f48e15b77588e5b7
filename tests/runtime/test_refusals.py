"""What bad arguments are told, on every way to an op, and that nothing is written then."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.errors import ArgumentError, ReplayError, SpecError
from tests.runtime import small_calls
from tests.runtime.small_calls import (
    CONTRACTS,
    HEADS,
    NO_TENSORS,
    ROWS,
    STEPS,
    arguments,
    call,
    named,
)

op, step = small_calls.op, small_calls.step


def fp64(given: dict[str, Any], name: str) -> torch.Tensor:
    tensor: torch.Tensor = given[name]
    return tensor.double()


Bad = tuple[str, Any, type[ReplayError], str]
BAD: dict[str, list[Bad]] = {
    "mamba2": [
        ("x", lambda g: g["x"][0], ArgumentError, r"x has shape \(4, 8\).*(rows|tokens), heads, head_dim"),
        ("x", lambda g: fp64(g, "x"), SpecError, "activation_dtype 'float64'"),
        ("dt", lambda g: g["dt"][:, :2], ArgumentError, r"dt has shape \(3, 2\); expected \(3, 4\)"),
        ("dt", lambda g: fp64(g, "dt"), ArgumentError, "dt is float64; expected fp32 or bf16 or fp16"),
        ("A", lambda g: g["A"].bfloat16(), ArgumentError, "A is bf16; expected fp32"),
        (
            "A",
            lambda g: g["A"][:, None].expand(4, 8),
            ArgumentError,
            r"A has shape \(4, 8\); expected \(4,\)",
        ),
        ("B", lambda g: torch.zeros(3, 3, 16), ArgumentError, "4 heads .* cannot be divided among 3 groups"),
        ("B", lambda g: g["B"].bfloat16(), ArgumentError, "B is bf16; expected fp32"),
        ("C", lambda g: g["C"][:, :1], ArgumentError, "C has shape"),
        ("C", lambda g: g["C"].mT.contiguous().mT, ArgumentError, "innermost dimension of C has stride 2"),
        ("D", lambda g: torch.zeros(5), ArgumentError, r"D has shape \(5,\); expected \(4,\)"),
        ("z", lambda g: g["z"][:2], ArgumentError, "z has shape"),
    ],
    "gdn": [
        ("v", lambda g: g["v"][0], ArgumentError, r"v has shape \(4, 8\).*s, value_heads, value_dim"),
        ("v", lambda g: fp64(g, "v"), SpecError, "activation_dtype 'float64'"),
        ("q", lambda g: g["q"][:, :1], ArgumentError, r"q has shape \(3, 1, 16\); expected \(3, 2, 16\)"),
        ("q", lambda g: g["q"].mT.contiguous().mT, ArgumentError, "innermost dimension of q has stride 2"),
        ("q", lambda g: g["q"].bfloat16(), ArgumentError, "q is bf16; expected fp32"),
        ("k", lambda g: g["k"][0], ArgumentError, r"k has shape \(2, 16\).*s, key_heads, key_dim"),
        (
            "k",
            lambda g: torch.zeros(3, 3, 16),
            ArgumentError,
            r"4 value heads \(v, dimension 1\) cannot be divided among 3 key heads \(k, dimension 1\)",
        ),
        ("k", lambda g: g["k"].half(), ArgumentError, "k is fp16; expected fp32"),
        ("a", lambda g: g["a"][:, :2], ArgumentError, r"a has shape \(3, 2\); expected \(3, 4\)"),
        ("a", lambda g: fp64(g, "a"), ArgumentError, "a is float64; expected fp32 or bf16 or fp16"),
        ("b", lambda g: g["b"][:2], ArgumentError, r"b has shape \(2, 4\); expected \(3, 4\)"),
        ("b", lambda g: g["b"].long(), ArgumentError, "b is i64; expected fp32 or bf16 or fp16"),
        ("A_log", lambda g: g["A_log"].bfloat16(), ArgumentError, "A_log is bf16; expected fp32"),
        ("A_log", lambda g: torch.zeros(2), ArgumentError, r"A_log has shape \(2,\); expected \(4,\)"),
    ],
}
BAD_ANYWHERE: list[Bad] = [
    ("dt_bias", lambda g: torch.zeros(4, dtype=torch.int32), ArgumentError, "dt_bias is i32"),
    ("state", lambda g: g["state"].mT, ArgumentError, "state has shape"),
    ("state", lambda g: fp64(g, "state"), SpecError, "state_dtype 'float64'"),
    (
        "state",
        lambda g: g["state"][:1].expand(6, -1, -1, -1),
        ArgumentError,
        "state is written, but an expanded",
    ),
    ("state", lambda g: g["state"].to("meta"), ArgumentError, "state is on meta, other arguments on cpu"),
    (
        "slot_index",
        lambda g: g["slot_index"].short(),
        ArgumentError,
        "slot_index is int16; expected i32 or i64",
    ),
    (
        "slot_index",
        lambda g: g["slot_index"][:2],
        ArgumentError,
        # What is measured against it, where it says how many rows there are.
        r"slot_index has shape \(2,\); expected \(3,\)|"
        r"(query_start has shape \(4,\); expected \(3,\)|accepted has shape \(3,\); expected \(2,\))",
    ),
    ("out", lambda g: torch.empty(3, 4, 9), ArgumentError, "out has shape"),
    (
        "out",
        lambda g: torch.empty(3, 4, 8, dtype=torch.bfloat16),
        ArgumentError,
        "out is bf16; expected fp32",
    ),
]
BAD_RINGS: dict[str, list[Bad]] = {
    "mamba2": [
        ("window", lambda g: 5, ArgumentError, r"room for (5|6) tokens .* window 5.* = (6|7)"),
        ("ring_x", lambda g: g["ring_x"].bfloat16(), SpecError, "ring_dtype 'bf16' must be"),
        ("ring_x", lambda g: g["ring_x"][..., 0], ArgumentError, "ring_x has shape"),
        ("ring_b", lambda g: g["ring_b"][:, :, :4], ArgumentError, r"ring_b has shape \(6, 2, 4, 16\)"),
        ("ring_b", lambda g: g["ring_b"].half(), ArgumentError, "ring_b is fp16; expected fp32"),
        ("ring_decay", lambda g: g["ring_decay"].half(), ArgumentError, "ring_decay is fp16; expected fp32"),
    ],
    "gdn": [
        ("window", lambda g: 5, ArgumentError, r"room for (5|6) tokens .* window 5.* = (6|7)"),
        ("ring_u", lambda g: g["ring_u"].bfloat16(), SpecError, "ring_dtype 'bf16' must be"),
        ("ring_u", lambda g: g["ring_u"][..., 0], ArgumentError, "ring_u has shape"),
        ("ring_k", lambda g: g["ring_k"][:, :, :4], ArgumentError, r"ring_k has shape \(6, 2, 4, 16\)"),
        ("ring_k", lambda g: g["ring_k"].half(), ArgumentError, "ring_k is fp16; expected fp32"),
        ("ring_g", lambda g: g["ring_g"].half(), ArgumentError, "ring_g is fp16; expected fp32"),
    ],
}
BAD_ANY_RING: list[Bad] = [
    ("window", lambda g: 0, SpecError, r"window 0 is outside 1\.\.64"),
    ("window", lambda g: 65, SpecError, r"window 65 is outside 1\.\.64"),
    ("ring_start", lambda g: g["ring_start"].long(), ArgumentError, "ring_start is i64; expected i32"),
    ("ring_len", lambda g: g["ring_len"][:5], ArgumentError, r"ring_len has shape \(5,\); expected \(6,\)"),
]


def for_each(*pairs: tuple[str, list[Bad]]) -> pytest.MarkDecorator:
    """Parametrises over (step, bad argument)."""
    cases = [pytest.param(op, bad, id=f"{op}-{bad[0]}-{bad[3][:20]}") for op, bads in pairs for bad in bads]
    return pytest.mark.parametrize(("op", "bad"), cases)


@for_each(*((op, BAD[contract.family] + BAD_ANYWHERE) for op, contract in CONTRACTS.items()))
def test_bad_arguments(op: str, bad: Bad) -> None:
    name, make, error, message = bad
    given = arguments(op)
    call(op, given)  # A good call before: a bad one after it must not profit.
    with pytest.raises(error, match=message):
        call(op, given | {name: make(given)})


@for_each(*((op, BAD_RINGS[CONTRACTS[op].family] + BAD_ANY_RING) for op in STEPS))
def test_bad_rings(op: str, bad: Bad) -> None:
    name, make, error, message = bad
    given = arguments(op)
    call(op, given)
    with pytest.raises(error, match=message):
        call(op, given | {name: make(given)})


SIZE = ROWS * HEADS * 8


def at_the_end(given: dict[str, Any], name: str) -> torch.Tensor:
    """Room for an output whose first element is the last one of an argument, which moves there."""
    tensor = given[name]
    room = torch.zeros(tensor.numel() + SIZE - 1)
    given[name] = room[: tensor.numel()].view(tensor.shape).copy_(tensor)
    return room[-SIZE:].view(ROWS, HEADS, 8)


def at_the_start(given: dict[str, Any], name: str) -> torch.Tensor:
    """As :func:`at_the_end`, with the output in front."""
    tensor = given[name]
    room = torch.zeros(tensor.numel() + SIZE - 1)
    given[name] = room[SIZE - 1 :].view(tensor.shape).copy_(tensor)
    return room[:SIZE].view(ROWS, HEADS, 8)


RINGS = {"mamba2": ["ring_x", "ring_b", "ring_decay"], "gdn": ["ring_u", "ring_k", "ring_g"]}
APART = {
    "mamba2": ["x", "dt", "B", "C", "z", "state"],
    "gdn": ["q", "k", "v", "a", "b", "state"],
}


@pytest.mark.parametrize("place", [at_the_end, at_the_start])
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op, contract in CONTRACTS.items()
        for name in APART[contract.family] + RINGS[contract.family] * (op in STEPS)
    ],
)
def test_overlapping_outputs_are_refused_in_every_call(op: str, name: str, place: Any) -> None:
    given = arguments(op)
    expected = call(op, arguments(op))
    out = place(given, name)
    before = {n: value.clone() for n, value in given.items() if isinstance(value, torch.Tensor)}
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"out overlaps the memory of {name},.*memory of its own"):
            call(op, given | {"out": out})
        assert all(torch.equal(given[n], value) for n, value in before.items())
    # Side by side is fine.
    given = arguments(op)
    room = torch.zeros(given[name].numel() + SIZE)
    given[name] = room[:-SIZE].view(given[name].shape).copy_(given[name])
    assert torch.equal(call(op, given | {"out": room[-SIZE:].view(ROWS, HEADS, 8)}), expected)


def test_modes_do_not_switch_checks_off(step: str) -> None:
    """A default device is a mode: the dispatcher then calls the operator, which checks for itself."""
    given, x, ring = arguments(step), named(step, "x"), named(step, "ring_x")
    before = given[ring].clone()
    with torch.device("cpu"):
        with pytest.raises(ArgumentError, match=f"out overlaps the memory of {x}"):
            call(step, given | {"out": given[x]})
        with pytest.raises(ArgumentError, match="dt_bias has shape"):
            call(step, given | {"dt_bias": given["dt_bias"][:1]})
        with pytest.raises(ArgumentError, match="num_tokens is 9"):
            ops.commit(
                torch.ones(ROWS, dtype=torch.int32),
                ring_start=given["ring_start"],
                ring_len=given["ring_len"],
                slot_index=given["slot_index"],
                window=4,
                num_tokens=9,
                capacity=5,
            )
        assert torch.equal(given[ring], before)
        assert torch.equal(call(step, given), call(step, arguments(step)))


@pytest.mark.parametrize("null_slot", [2.5, "a", True, [0], 2**40])
def test_odd_null_slots_are_refused(op: str, null_slot: Any) -> None:
    with pytest.raises(ArgumentError, match="null_slot is"):
        call(op, arguments(op) | {"null_slot": null_slot})


@pytest.mark.parametrize("window", [4.5, 4.0, "4", None])
def test_odd_windows_are_refused(step: str, window: Any) -> None:
    call(step, arguments(step))  # 4.0 is equal to the window of this one.
    with pytest.raises(ArgumentError, match=rf"{step}: window is .*; expected a whole number"):
        call(step, arguments(step) | {"window": window})


def test_flags_that_are_no_booleans_are_refused(op: str) -> None:
    flag = "qk_l2norm" if CONTRACTS[op].family == "gdn" else "dt_softplus"
    with pytest.raises(SpecError, match=f"{flag} 'yes' is neither True nor False"):
        call(op, arguments(op) | {flag: "yes"})


def test_an_output_that_moves_is_looked_at_again(step: str) -> None:
    given, x = arguments(step), named(step, "x")
    apart = torch.empty_like(given[x])
    call(step, given | {"out": apart})
    with pytest.raises(ArgumentError, match=f"out overlaps the memory of {x}"):
        call(step, given | {"out": given[x]})
    first = CONTRACTS[step].names[0]
    moved = torch.empty_like(given[first])
    room = moved.flatten()[: apart.numel()].view(apart.shape)
    with pytest.raises(ArgumentError, match=f"out overlaps the memory of {first}"):
        call(step, given | {first: moved, "out": room})


def test_large_head_dims_and_batches_are_refused(op: str) -> None:
    given, x = arguments(op), named(op, "x")
    wide = {x: torch.zeros(3, 4, 257), "state": torch.zeros(6, 4, 257, 16)}
    if op in STEPS:
        wide[named(op, "ring_x")] = torch.zeros(6, 4, 6, 257)
    with pytest.raises(SpecError, match=r"head_dim 257 is outside 1\.\.256"):
        call(op, given | wide)
    rows = "slot_index" if "verify" in op else x
    many = given[rows][:1].expand(65536, *[-1] * (given[rows].dim() - 1))
    with pytest.raises(ArgumentError, match=f"{rows} has 65536 rows, a launch takes at most 65535"):
        call(op, given | {rows: many})


def test_bad_arguments_are_told_under_compile(op: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"4 .*heads .* cannot be divided among 3 (groups|key heads)"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(
            op, arguments(op) | {named(op, "b"): torch.zeros(3, 3, 16)}
        )


@pytest.mark.parametrize(("value", "found"), NO_TENSORS, ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_named(op: str, value: Any, found: str) -> None:
    given = arguments(op, out=torch.empty(ROWS, HEADS, 8))
    names = [name for name, known in given.items() if isinstance(known, torch.Tensor)]
    twice = given | {named(op, "c"): given[named(op, "b")]}  # its guard is a plain one
    call(op, twice)
    for name in names:
        if value is None and CONTRACTS[op].arguments[CONTRACTS[op].position(name)].optional:
            continue
        # On the direct way with either guard, and on torch's.
        for around, mode in ((given, nullcontext()), (twice, nullcontext()), (given, FakeTensorMode())):
            call(op, around)
            message = rf"{op}: {name} is {found}; expected a tensor"
            with mode, pytest.raises(ArgumentError, match=message):
                call(op, around | {name: value})


@pytest.mark.parametrize("scalar", [[4], {}, np.array([4, 4])])
def test_scalars_that_cannot_be_hashed_are_refused(step: str, scalar: Any) -> None:
    with pytest.raises(ArgumentError, match=r"window is .*; expected a whole number"):
        call(step, arguments(step) | {"window": scalar})
    with pytest.raises(ArgumentError, match="capacity is"):
        ops.drained(
            torch.zeros(1, dtype=torch.int32),
            ring_start=torch.zeros(1, dtype=torch.int32),
            ring_len=torch.zeros(1, dtype=torch.int32),
            capacity=scalar,
        )


def test_an_out_that_comes_to_lie_on_v_is_refused_in_a_warm_call() -> None:
    given = arguments("gdn_step")
    memory = torch.zeros(2, *given["v"].shape)
    out, apart = memory[0], memory[1].copy_(given["v"])
    call("gdn_step", given | {"v": apart, "out": out})
    with pytest.raises(ArgumentError, match="out overlaps the memory of v"):
        call("gdn_step", given | {"v": out, "out": out})
