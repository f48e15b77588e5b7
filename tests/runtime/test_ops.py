"""The ops' surface: registration, compilation, direct calls, and what bad arguments are told."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from contextlib import nullcontext
from subprocess import CalledProcessError
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm_tune.runtime import compiled, contracts, ops, signatures
from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.errors import ArgumentError, ReplayError, SpecError, ToolchainError
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.trajectory import Trajectory

HEADS, GROUPS, ROWS, SLOTS, WINDOW = 4, 2, 3, 6, 4


STEPS = ("mamba2_step", "gdn_step")
CONTRACTS = {
    contract.name: contract
    for contract in (
        contracts.MAMBA2_STEP,
        contracts.MAMBA2_NATIVE_STEP,
        contracts.GDN_STEP,
        contracts.GDN_NATIVE_STEP,
    )
}


@pytest.fixture(params=CONTRACTS)
def op(request: pytest.FixtureRequest) -> str:
    """Every step, by the name of its public function."""
    return str(request.param)


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    """Every step with a ring."""
    return str(request.param)


def named(op: str, kernel: str) -> str:
    """What the public function calls a kernel's argument."""
    contract = CONTRACTS[op]
    return contract.names[contract.kernel_names.index(kernel)]


def spec_of(op: str, **changes: Any) -> Spec:
    fields: dict[str, Any] = {"head_dim": 8, "state_size": 16, "heads_per_group": HEADS // GROUPS}
    fields |= {"window": WINDOW, "activation_dtype": "fp32", "ring_dtype": "fp32"} | changes
    if CONTRACTS[op].family == "gdn":
        fields |= {"has_d": False, "qk_l2norm": True}
    return Spec(CONTRACTS[op].family, "step", **fields)


def inputs_of(op: str, rows: int, heads: int, groups: int, p: int, n: int, draw: Any) -> dict[str, Any]:
    """Inputs of a step, all optional ones given; ``draw(*shape)`` draws each."""
    shapes: dict[str, tuple[int, ...]]
    if CONTRACTS[op].family == "gdn":
        shapes = {"q": (rows, groups, n), "k": (rows, groups, n), "v": (rows, heads, p)}
        shapes |= {"a": (rows, heads), "b": (rows, heads), "A_log": (heads,), "dt_bias": (heads,)}
        return {name: draw(*shape) for name, shape in shapes.items()}
    shapes = {"x": (rows, heads, p), "dt": (rows, heads), "A": (heads,), "B": (rows, groups, n)}
    shapes |= {"C": (rows, groups, n), "D": (heads,), "z": (rows, heads, p), "dt_bias": (heads,)}
    given = {name: draw(*shape) for name, shape in shapes.items()}
    return given | {"A": -given["A"].exp()}


def arguments(op: str = "mamba2_step", seed: int = 0, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call, all optional inputs given."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    cache = ops.make_cache(spec_of(op), SLOTS, HEADS, GROUPS, "cpu")
    cache.state.copy_(randn(*cache.state.shape))
    given: dict[str, Any] = inputs_of(op, rows, HEADS, GROUPS, 8, 16, randn) | {
        "state": cache.state,
        "slot_index": torch.randperm(SLOTS, generator=g)[:rows].int(),
    }
    if op in STEPS:
        given |= cache.tensors() | {"window": WINDOW}
        cache.ring_len.copy_(torch.tensor([0, 4, 0, 4, 0, 4]))
    return given | changes


def call(op: str, given: dict[str, Any]) -> torch.Tensor:
    y: torch.Tensor = getattr(ops, op)(**given)
    return y


def overload(op: str) -> Any:
    return getattr(getattr(torch.ops, ops.NAMESPACE), op).default


def output_like(op: str, given: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(given[named(op, "x")])


def positional(op: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the order of the operator's schema."""
    full = {"dt_softplus": True, "qk_l2norm": True, "null_slot": -1, "out": output_like(op, given)} | given
    return tuple(full[argument.name] for argument in overload(op)._schema.arguments)


def test_namespace_is_the_package() -> None:
    assert ops.NAMESPACE == "replayssm_tune"


def test_mutation_lists_are_exact() -> None:
    def written(name: str) -> set[str]:
        schema = getattr(getattr(torch.ops, ops.NAMESPACE), name).default._schema
        return {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    assert written("mamba2_step") == {"state", "ring_x", "ring_b", "ring_decay", "out"}
    assert written("mamba2_native_step") == {"state", "out"}
    assert written("gdn_step") == {"state", "ring_u", "ring_k", "ring_g", "out"}
    assert written("gdn_native_step") == {"state", "out"}
    for name in ("commit", "reset", "drained"):
        assert written(name) == {"ring_start", "ring_len"}


@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(op: str, optional: bool) -> None:
    given = arguments(op)
    if not optional:
        given |= {name: None for name in ("D", "z", "dt_bias") if name in given}
    torch.library.opcheck(overload(op), positional(op, given))


def test_opcheck_of_cursor_ops() -> None:
    start, length = torch.zeros(6, dtype=torch.int32), torch.full((6,), 4, dtype=torch.int32)
    slots = torch.tensor([1, -1, 3])
    namespace = getattr(torch.ops, ops.NAMESPACE)
    torch.library.opcheck(
        namespace.commit.default, (torch.ones(3, dtype=torch.int32), start, length, slots, 4, 1, 5, -1)
    )
    torch.library.opcheck(namespace.reset.default, (slots, start, length, -1))
    torch.library.opcheck(namespace.drained.default, (slots, start, length, 5, -1))


def step_and_commit(op: str, given: dict[str, Any]) -> torch.Tensor:
    y = call(op, given) * 2
    if op in STEPS:
        cursors = {name: given[name] for name in ("ring_start", "ring_len", "slot_index", "window")}
        capacity = given[named(op, "ring_x")].shape[2]
        ops.commit(torch.ones_like(given["slot_index"]), capacity=capacity, **cursors)
    return y


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(op: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step_and_commit, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5, 2) if dynamic else (3,):
        eager, traced = arguments(op, rows=rows), arguments(op, rows=rows)
        assert torch.equal(compiled(op, traced), step_and_commit(op, eager))
        for name, value in eager.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(traced[name], value), name
    if op in STEPS:
        assert bool((eager["ring_len"] != arguments(op, rows=rows)["ring_len"]).any())


def test_compiled_function_takes_out(op: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = arguments(op, out=torch.empty(ROWS, HEADS, 8))
    y = compiled(op, given)
    assert torch.equal(given["out"], y)
    assert torch.equal(y, call(op, arguments(op)))


def test_compiled_strided_caches_keep_their_gaps(op: str) -> None:
    """Separate strided tensors are a supported way of passing caches to a compiled function."""
    torch._dynamo.reset()
    padded = torch.full((SLOTS, HEADS, 8, 20), torch.nan)
    given, expected = arguments(op), arguments(op)
    padded[..., :16] = given["state"]
    given["state"] = padded[..., :16]
    torch.compile(call, fullgraph=True, backend="aot_eager")(op, given)
    call(op, expected)
    assert torch.equal(padded[..., :16], expected["state"])
    assert padded[..., 16:].isnan().all()


def test_compiled_function_takes_a_cache(step: str) -> None:
    """As documented: `vars` of a frozen dataclass cannot be traced in every torch."""
    given, family = arguments(step), CONTRACTS[step].family
    caches = ("state", "ring_x", "ring_b", "ring_decay", "ring_start", "ring_len")
    cache = ops.Cache(**{name: given.pop(named(step, name)) for name in caches}, family=family)
    assert [*cache.tensors().values()] == [getattr(cache, name) for name in caches]
    torch._dynamo.reset()
    compiled = torch.compile(lambda: call(step, given | cache.tensors()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), call(step, arguments(step)))
    assert not torch.equal(cache.ring_x, arguments(step)[named(step, "ring_x")])


def one_pool(op: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """The arguments with bf16 activations, caches one after the other in one byte pool."""
    given = arguments(op)
    halves = {"x", "b", "c", "z", "ring_x", "ring_b"} & {*CONTRACTS[op].kernel_names}
    for name in (named(op, kernel) for kernel in halves):
        given[name] = given[name].bfloat16()
    storage, offset = torch.zeros(1 << 16, dtype=torch.uint8), 0
    for name in (named(op, kernel) for kernel in ("state", "ring_x", "ring_b", "ring_decay")):
        cache = given[name]
        size = cache.numel() * cache.element_size()
        given[name] = storage[offset : offset + size].view(cache.dtype).view(cache.shape).copy_(cache)
        offset += size
    return storage, given


def test_compiled_regions_of_one_byte_pool_are_written(step: str) -> None:
    """Views of different dtypes that lie one after the other in a pool."""
    torch._dynamo.reset()
    (expected, eager), (storage, traced) = one_pool(step), one_pool(step)
    y = torch.compile(call, fullgraph=True, backend="aot_eager")(step, traced)
    assert torch.equal(y, call(step, eager))
    assert torch.equal(storage, expected)


def test_compiled_interleaved_views_of_one_byte_pool_are_refused(driver: Any) -> None:
    """Torch cannot mutate them in a compiled function and says so: nothing is lost in silence."""
    torch._dynamo.reset()
    spec = driver.make_spec(activation_dtype="bf16", ring_dtype="bf16")
    scene = Trajectory(spec, heads=2, steps=1)
    pool = scene.pool()
    (step,) = scene
    before = pool.storage.clone()
    compiled = torch.compile(driver.launch, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="mutations on views with different dtypes"):
        compiled(scene, pool, step)
    assert torch.equal(pool.storage, before)


def test_direct_call_equals_the_operator(op: str) -> None:
    direct, dispatched = arguments(op), arguments(op)
    y = call(op, direct)
    ordered = positional(op, dispatched)
    overload(op)(*ordered)
    out = ordered[[a.name for a in overload(op)._schema.arguments].index("out")]
    assert torch.equal(y, out)
    assert all(torch.equal(direct[n], dispatched[n]) for n in direct if isinstance(direct[n], torch.Tensor))


def test_modes_and_subclasses_see_the_operator(op: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Record():
        call(op, arguments(op))
    assert any(name.startswith(f"{ops.NAMESPACE}.{op}") for name in seen)


def test_gradients_are_refused_unless_switched_off(op: str) -> None:
    given = arguments(op)
    given["dt_bias"] = torch.nn.Parameter(given["dt_bias"])
    with pytest.raises(ArgumentError, match=r"dt_bias requires a gradient.*no_grad"):
        call(op, given)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert call(op, given).isfinite().all()
    with pytest.raises(ArgumentError, match="dt_bias requires a gradient"):
        call(op, given)


def fp64(given: dict[str, Any], name: str) -> torch.Tensor:
    tensor: torch.Tensor = given[name]
    return tensor.double()


Bad = tuple[str, Any, type[ReplayError], str]
BAD: dict[str, list[Bad]] = {
    "mamba2": [
        ("x", lambda g: g["x"][0], ArgumentError, r"x has shape \(4, 8\).*rows, heads, head_dim"),
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
        ("v", lambda g: g["v"][0], ArgumentError, r"v has shape \(4, 8\).*rows, value_heads, value_dim"),
        ("v", lambda g: fp64(g, "v"), SpecError, "activation_dtype 'float64'"),
        ("q", lambda g: g["q"][:, :1], ArgumentError, r"q has shape \(3, 1, 16\); expected \(3, 2, 16\)"),
        ("q", lambda g: g["q"].mT.contiguous().mT, ArgumentError, "innermost dimension of q has stride 2"),
        ("q", lambda g: g["q"].bfloat16(), ArgumentError, "q is bf16; expected fp32"),
        ("k", lambda g: g["k"][0], ArgumentError, r"k has shape \(2, 16\).*rows, key_heads, key_dim"),
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
        r"slot_index has shape \(2,\); expected \(3,\)",
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
        ("window", lambda g: 5, ArgumentError, r"room for 5 tokens .* window 5.* = 6"),
        ("ring_x", lambda g: g["ring_x"].bfloat16(), SpecError, "ring_dtype 'bf16' must be"),
        ("ring_x", lambda g: g["ring_x"][..., 0], ArgumentError, "ring_x has shape"),
        ("ring_b", lambda g: g["ring_b"][:, :, :4], ArgumentError, r"ring_b has shape \(6, 2, 4, 16\)"),
        ("ring_b", lambda g: g["ring_b"].half(), ArgumentError, "ring_b is fp16; expected fp32"),
        ("ring_decay", lambda g: g["ring_decay"].half(), ArgumentError, "ring_decay is fp16; expected fp32"),
    ],
    "gdn": [
        ("window", lambda g: 5, ArgumentError, r"room for 5 tokens .* window 5.* = 6"),
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


def test_tracing_sees_the_operator(step: str) -> None:
    given, x = arguments(step), named(step, "x")
    traced = torch.jit.trace(lambda value: call(step, given | {x: value}), (given[x],), check_trace=False)
    assert step in str(traced.graph)


def test_meta_tensors_are_checked_and_give_a_shape(op: str) -> None:
    meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in arguments(op).items()}
    y = call(op, meta)
    assert (y.shape, y.device.type) == (output_like(op, meta).shape, "meta")
    dt = named(op, "dt")
    with pytest.raises(ArgumentError, match=f"{dt} has shape"):
        call(op, meta | {dt: meta[dt][:1]})


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
        wide[named(op, "ring_x")] = torch.zeros(6, 4, 5, 257)
    with pytest.raises(SpecError, match=r"head_dim 257 is outside 1\.\.256"):
        call(op, given | wide)
    with pytest.raises(ArgumentError, match=f"{x} has 65536 rows, a launch takes at most 65535"):
        call(op, given | {x: given[x][:1].expand(65536, -1, -1)})


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
        if value is None and name in ("D", "z", "dt_bias", "out"):
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
def test_a_slot_beyond_the_last_is_refused_on_a_cpu_and_nothing_written(step: str, slot: int) -> None:
    cache, inputs = small_call(step, 2)
    slots = torch.tensor([1, slot])
    cursors: dict[str, Any] = {"ring_start": cache.ring_start, "ring_len": cache.ring_len}
    before = copy.deepcopy(cache)
    out = torch.full((2, 1, 4), 7.0)
    replay, native = getattr(ops, step), getattr(ops, step.replace("step", "native_step"))
    calls = (
        lambda: replay(*inputs, **cache.tensors(), slot_index=slots, window=2, out=out),
        lambda: native(*inputs, state=cache.state, slot_index=slots, out=out),
        lambda: ops.commit(torch.ones_like(slots), **cursors, slot_index=slots, window=2, capacity=3),
        lambda: ops.reset(slots, **cursors),
        lambda: ops.drained(slots, **cursors, capacity=3),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=f"row 1 names slot {slot}, but there are 4 slots"):
            call()
    assert (out == 7).all()
    assert all(torch.equal(value, cache.tensors()[name]) for name, value in before.tensors().items())


@pytest.mark.parametrize(
    ("start", "length"), [(-1, 0), (3, 0), (0, -1), (0, 3), (2**31 - 1, 2), (0, 2**31 - 1)]
)
def test_cursors_out_of_range_are_refused_on_a_cpu_and_nothing_written(
    step: str, start: int, length: int
) -> None:
    cache, inputs = small_call(step, 3)
    cache.ring_start[2], cache.ring_len[2] = start, length
    cache.ring_len[3] = 2  # flushes
    slots = torch.tensor([3, -1, 2])
    cursors: dict[str, Any] = {"ring_start": cache.ring_start, "ring_len": cache.ring_len}
    before = copy.deepcopy(cache)
    out = torch.full((3, 1, 4), 7.0)
    # Without a window, all that is known of a drained ring is its capacity.
    replay = getattr(ops, step)
    calls = [
        lambda: replay(*inputs, **cache.tensors(), slot_index=slots, window=2, out=out),
        lambda: ops.commit(torch.ones_like(slots), **cursors, slot_index=slots, window=2, capacity=3),
        lambda: ops.drained(slots, **cursors, capacity=3),
    ][: 2 if length == 3 else 3]
    for call in calls:
        with pytest.raises(
            ArgumentError, match=rf"row 2: .* slot 2 has ring_start {start} and ring_len {length},"
        ):
            call()
    assert (out == 7).all()
    assert all(torch.equal(value, cache.tensors()[name]) for name, value in before.tensors().items())
    # Such a slot may be padding, and a reset repairs it.
    slots[2] = -1
    calls[0]()
    ops.reset(torch.tensor([2]), **cursors)
    slots[2] = 2
    calls[0]()


def test_warmup_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = Spec("mamba2", "step", head_dim=4, state_size=4, heads_per_group=1, window=2)
    with pytest.raises(ToolchainError, match=r"no CUDA device.*skip warmup"):
        ops.warmup(spec, [8])


WITHOUT_TRITON = """
import dataclasses, sys
sys.modules["triton"] = None
import torch
from replayssm_tune.runtime import Spec, ToolchainError, make_cache, mamba2_step, warmup
from replayssm_tune.runtime import operators, signatures

spec = Spec("mamba2", "step", 4, 4, 1, 2, activation_dtype="fp32", ring_dtype="fp32")
cache, slots = make_cache(spec, 1, 1, 1, "cpu"), torch.zeros(1, dtype=torch.int32)
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
# Tensors that pass for CUDA ones up to the launch.
full_check = signatures.check_step
signatures.check_step = lambda *arguments: dataclasses.replace(full_check(*arguments), device="cuda")
row = torch.ones(1, 1, 4)
calls = {
    "warmup": lambda: warmup(spec, [1]),
    "step": lambda: mamba2_step(
        row, row[..., 0], -row[0, 0, :1], row, row, **cache.tensors(), slot_index=slots, window=2
    ),
    "reset": lambda: operators.late("launch_reset")(slots, cache.ring_start, cache.ring_len, -1),
}
for name, call in calls.items():
    try:
        call()
    except ToolchainError as error:
        print(name, error)
"""


def test_a_missing_triton_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["warmup", "step", "reset"]
    for line in lines:
        assert "triton, which compiles the kernels for CUDA tensors, cannot be imported" in line
        assert "install a triton that fits" in line


def test_a_missing_c_compiler_is_told_and_other_errors_pass() -> None:
    for error in (RuntimeError("Failed to find C compiler."), CalledProcessError(1, ["gcc"])):
        with pytest.raises(ToolchainError, match="install gcc"):
            compiled.explain_launcher_error(error)
    compiled.explain_launcher_error(RuntimeError("out of memory"))


SIGNED = {
    "mamba2_step": "mamba2-step-p8-n16-g2-w4-t1-xfp32-sfp32-rfp32-fdzbs",
    "mamba2_native_step": "mamba2-native_step-p8-n16-g2-w0-t1-xfp32-sfp32-rfp32-fdzbs",
    "gdn_step": "gdn-step-p8-n16-g2-w4-t1-xfp32-sfp32-rfp32-fbsl",
    "gdn_native_step": "gdn-native_step-p8-n16-g2-w0-t1-xfp32-sfp32-rfp32-fbsl",
}


def test_signature_says_what_a_launcher_needs(op: str) -> None:
    given, contract = arguments(op), CONTRACTS[op]

    def signature_of(given: dict[str, Any]) -> Any:
        ordered, count = positional(op, given), len(contract.arguments)
        return signatures.signature_of(contract, ordered[:count], ordered[count:-1])

    signature = signature_of(given)
    assert signature is signature_of(given | arguments(op, seed=3))
    assert signature.spec.key == SIGNED[op]
    assert (signature.rows, signature.heads, signature.effective_batch) == (ROWS, HEADS, ROWS * HEADS)
    structure = Structure("both" if op in STEPS else "native")
    for argument in tensor_arguments(signature.spec, structure):
        assert signature.dtypes[argument.name] == argument.dtype
        tensor = given.get(named(op, argument.name), output_like(op, given))
        assert signature.strides[argument.name] == tensor.stride()
        assert len(argument.stride_dims) in (0, tensor.dim() - 1)


def test_the_plain_guard_serves_tensors_passed_twice(op: str) -> None:
    given, b, c = arguments(op), named(op, "b"), named(op, "c")
    given[c] = given[b]
    assert call(op, given).isfinite().all()
    with pytest.raises(ArgumentError, match=f"{c} is bf16"):
        call(op, given | {c: given[b].bfloat16()})


def test_optional_inputs_are_told_apart(op: str) -> None:
    """A call without an input must not be taken for one like it that has one, nor the other way round."""
    given = arguments(op)
    optional = [argument.name for argument in CONTRACTS[op].arguments if argument.optional]
    for name in optional:
        without = call(op, arguments(op) | {name: None})
        for other in optional:
            call(op, arguments(op) | {name: None, other: None})
        assert torch.equal(call(op, arguments(op) | {name: None}), without)
        if name != "out":
            assert not torch.equal(call(op, arguments(op)), without)
            with pytest.raises(ArgumentError, match=f"{name} is of type int"):
                call(op, given | {name: 1})


def test_default_output_is_contiguous(op: str) -> None:
    given, x = arguments(op), named(op, "x")
    wide = torch.zeros(ROWS, HEADS, 24)
    wide[..., :8] = given[x]
    assert call(op, given | {x: wide[..., :8]}).is_contiguous()


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_cache_and_its_bytes(family: str) -> None:
    spec = Spec(family, "step", 80, 128, 12, 16, has_d=family == "mamba2")
    cache = ops.make_cache(spec, 3, 96, 8, "cpu")
    tensors = [cache.state, cache.ring_x, cache.ring_b, cache.ring_decay]
    assert sum(t.numel() * t.element_size() for t in tensors) == 3 * ops.bytes_per_slot(spec, 96, 8)
    assert cache.capacity == 17
    assert ops.make_cache(spec.native, 3, 96, 8, "cpu").capacity == 0
    assert ops.bytes_per_slot(spec.native, 96, 8) == 96 * 80 * 128 * 4
    assert ops.bytes_per_slot(spec, 96, 8, capacity=18) > ops.bytes_per_slot(spec, 96, 8)
    with pytest.raises(ArgumentError, match="95 heads in 8 groups do not fit"):
        ops.bytes_per_slot(spec, 95, 8)
    with pytest.raises(ArgumentError, match="capacity 16 is too small for window 16: rings need at least 17"):
        ops.make_cache(spec, 3, 96, 8, "cpu", capacity=16)
    tied = dataclasses.replace(cache, ring_len=cache.ring_start)
    assert tied.ring_len is cache.ring_start
    names = {argument.name for argument in CONTRACTS[f"{family}_step"].arguments}
    assert {*tied.tensors()} == {n for n in names if n == "state" or n.startswith("ring_")}


@pytest.mark.parametrize("size", [0, -8, 8.0, 2.5, None, "8", True, torch.ones(1)], ids=repr)
@pytest.mark.parametrize("name", ["slots", "heads", "groups", "capacity"])
@pytest.mark.parametrize("native", [False, True])
def test_odd_sizes_of_caches_are_refused(name: str, size: Any, native: bool) -> None:
    spec = Spec("mamba2", "step", 8, 16, 2, 4)
    given: dict[str, Any] = {"spec": spec.native if native else spec, "heads": 4, "groups": 2}
    caches: dict[str, Any] = given | {"slots": 3, "device": "cpu"}
    message = rf"{name} is .*; pass a whole number of at least \d"
    if name == "capacity" and (size is None or (native and size == 0)):
        return  # These are legal.
    if name == "capacity" and size == 0:
        message = "capacity 0 is too small for window 4: rings need at least 5"
    with pytest.raises(ArgumentError, match=message):
        ops.make_cache(**(caches | {name: size}))
    if name != "slots":
        with pytest.raises(ArgumentError, match=message):
            ops.bytes_per_slot(**(given | {name: size}))


def test_sizes_of_caches_may_be_integers_of_numpy() -> None:
    spec, four = Spec("mamba2", "step", 8, 16, 2, 4), np.int32(4)
    cache = ops.make_cache(spec, four, four, np.int32(2), "cpu", np.int64(7))
    assert cache.ring_x.shape == (4, 4, 7, 8)
    # Too much for 32 bits.
    many = np.int32(2**28)
    assert ops.bytes_per_slot(spec, many, many // 2) == ops.bytes_per_slot(spec, 2**28, 2**27)
