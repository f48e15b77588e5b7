"""The ops' surface: registration, compilation, direct calls, signatures, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import compiled, ops, signatures
from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.errors import ArgumentError, ToolchainError
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.trajectory import Trajectory
from tests.runtime import small_calls
from tests.runtime.small_calls import (
    CONTRACTS,
    HEADS,
    ROWS,
    SLOTS,
    STEPS,
    arguments,
    call,
    dispatched,
    named,
    output_like,
    overload,
    positional,
    written,
)

op, step = small_calls.op, small_calls.step


def test_namespace_is_the_package() -> None:
    assert ops.NAMESPACE == "replayssm_tune"


def test_mutation_lists_are_exact() -> None:
    for name in ("step", "verify"):
        assert written(f"mamba2_{name}") == {"state", "ring_x", "ring_b", "ring_decay", "out"}
        assert written(f"gdn_{name}") == {"state", "ring_u", "ring_k", "ring_g", "out"}
        assert written(f"mamba2_native_{name}") == written(f"gdn_native_{name}") == {"state", "out"}
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
    accepted, query_start = torch.ones(3, dtype=torch.int32), torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    for packed in (None, query_start):
        torch.library.opcheck(namespace.commit.default, (accepted, start, length, slots, packed, 4, 1, 5, -1))
    torch.library.opcheck(namespace.reset.default, (slots, start, length, -1))
    torch.library.opcheck(namespace.drained.default, (slots, start, length, 5, -1))


def step_and_commit(op: str, given: dict[str, Any]) -> torch.Tensor:
    y = call(op, given) * 2
    if op in STEPS:
        shared = ("ring_start", "ring_len", "slot_index", "window", "num_tokens", "query_start")
        capacity = given[named(op, "ring_x")].shape[2]
        options = {name: given[name] for name in shared if name in given}
        ops.commit(torch.ones_like(given["slot_index"]), capacity=capacity, **options)
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
    with dispatched() as seen:
        call(op, arguments(op))
    assert seen == [op]


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
    "mamba2_verify": "mamba2-verify-p8-n16-g2-w4-t2-xfp32-sfp32-rfp32-fdzbs",
    "mamba2_native_verify": "mamba2-native_verify-p8-n16-g2-w0-t2-xfp32-sfp32-rfp32-fdzbs",
    "gdn_step": "gdn-step-p8-n16-g2-w4-t1-xfp32-sfp32-rfp32-fbsl",
    "gdn_native_step": "gdn-native_step-p8-n16-g2-w0-t1-xfp32-sfp32-rfp32-fbsl",
    "gdn_verify": "gdn-verify-p8-n16-g2-w4-t2-xfp32-sfp32-rfp32-fbsl",
    "gdn_native_verify": "gdn-native_verify-p8-n16-g2-w0-t2-xfp32-sfp32-rfp32-fbsl",
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
    assert signature.tokens == ROWS
    if op in STEPS:
        assert signature.capacity == signature.spec.ring_capacity == 4 + given.get("num_tokens", 1)
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
    arguments_of_op = (argument for argument in CONTRACTS[op].arguments if argument.optional)
    # Whether rows own others than num_tokens each, the tokens say too.
    optional = [argument.name for argument in arguments_of_op if argument.name != "query_start"]
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
