"""What bad arguments are told, on every way to an op, and that nothing is written then."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.errors import ArgumentError, ReplayError, SpecError
from tests.runtime.small_calls import (
    CONTRACTS,
    HEADS,
    ONE_TOKEN,
    ROWS,
    STEPS,
    arguments,
    call,
    inputs_of,
    named,
    spec_of,
)


@pytest.fixture(params=CONTRACTS)
def op(request: pytest.FixtureRequest) -> str:
    """Every op of layers that has an output, by the name of its operator."""
    return str(request.param)


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    """Every one of them with a ring."""
    return str(request.param)


@pytest.fixture(params=ONE_TOKEN)
def one_token(request: pytest.FixtureRequest) -> str:
    """Every step of one token a row."""
    return str(request.param)


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


NO_TENSORS = [
    (None, "None"),
    (2.5, "of type float"),
    (np.ones(3), r"of type numpy\.ndarray"),
    ([1], "of type list"),
]


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
