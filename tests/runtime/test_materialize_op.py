"""The materialising operators: what is refused, registration, compilation, signatures."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ops, signatures
from replayssm_tune.runtime.errors import ArgumentError, SpecError
from tests import specs
from tests.runtime.folds import Fold, fold
from tests.runtime.small_calls import FOLDS, named, ordered, overload, written


def small(family: str, **changes: Any) -> Fold:
    return fold(specs.small(family, **changes), 3, 4, lengths=torch.tensor([2, 4, 3]))


def renamed(family: str, name: str) -> str:
    """What the family's op calls a kernel's argument."""
    return named(f"{family}_materialize", name)


BAD = [
    ("slot_index", lambda t: t[:, None], ArgumentError, r"source has shape \(3, 1\); expected 1 dimension"),
    ("slot_index", lambda t: t.float(), ArgumentError, "source is fp32; expected i32 or i64"),
    ("destination", lambda t: t[:2], ArgumentError, r"destination has shape \(2,\); expected \(3,\)"),
    ("destination", lambda t: t.short(), ArgumentError, "destination is int16; expected i32 or i64"),
    ("prefix", lambda t: t[:1], ArgumentError, r"prefix has shape \(1,\); expected \(3,\)"),
    ("prefix", lambda t: t.bool(), ArgumentError, "prefix is bool; expected i32 or i64"),
    ("prefix", lambda t: t[:1].expand(6)[::2].to("meta"), ArgumentError, "prefix is on meta, other"),
    ("state", lambda t: t[0], ArgumentError, "state has shape"),
    ("state", lambda t: t.double(), SpecError, "state_dtype 'float64'"),
    ("state", lambda t: t[:1].expand(7, -1, -1, -1), ArgumentError, "state is written, but an expanded"),
    ("state", lambda t: t.mT.contiguous().mT, ArgumentError, "innermost dimension of state has stride 8"),
    ("ring_x", lambda t: t[..., :7], ArgumentError, r"_[xu] has shape \(7, 4, 5, 7\)"),
    ("ring_x", lambda t: t.double(), SpecError, "_dtype 'float64'"),
    ("ring_x", lambda t: t[:, :, :4], ArgumentError, r"room for 4 tokens .* window 4.* = 5"),
    ("ring_b", lambda t: t.half(), ArgumentError, "_[bk] is fp16; expected fp32"),
    ("ring_b", lambda t: t[:, :, :4], ArgumentError, r"_[bk] has shape \(7, 2, 4, 16\)"),
    (
        "ring_b",
        lambda t: torch.zeros(7, 3, 5, 16),
        ArgumentError,
        r"4 .*heads \(state, dimension 1\) cannot be divided among 3 .*\(ring_[bk], dimension 1\)",
    ),
    ("ring_decay", lambda t: t.half(), ArgumentError, "ring_(decay|g) is fp16; expected fp32"),
    ("ring_start", lambda t: t.long(), ArgumentError, "ring_start is i64; expected i32"),
    ("ring_len", lambda t: t[:3], ArgumentError, r"ring_len has shape \(3,\); expected \(7,\)"),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad[0]}-{bad[3][:20]}")
def test_bad_arguments(family: str, bad: Any) -> None:
    kernel, make, error, message = bad
    name = renamed(family, kernel)
    scene = small(family)
    scene.call()  # A good call before: a bad one after it must not profit.
    before = scene.pool.storage.clone()
    with pytest.raises(error, match=message):
        scene.call(**{name: make(scene.given()[name])})
    assert torch.equal(scene.pool.storage, before)


@pytest.mark.parametrize("A", [torch.ones(4).bfloat16(), torch.ones(2)], ids=["dtype", "shape"])
def test_bad_rates(A: Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"A (is bf16; expected fp32|has shape \(2,\); expected \(4,\))"):
        small("mamba2").call(A=A)


@pytest.mark.parametrize("window", [4.0, "4", None, True])
def test_odd_windows_are_refused(family: str, window: Any) -> None:
    small(family).call()
    with pytest.raises(ArgumentError, match=r"window is .*; expected a whole number"):
        small(family).call(window=window)


@pytest.mark.parametrize("window", [0, 65])
def test_windows_beyond_the_kernels_are_refused(family: str, window: int) -> None:
    with pytest.raises(SpecError, match=rf"window {window} is outside 1\.\.64"):
        small(family).call(window=window)


@pytest.mark.parametrize("null_slot", [2.5, "a", True, 2**40])
def test_odd_null_slots_are_refused(family: str, null_slot: Any) -> None:
    with pytest.raises(ArgumentError, match="null_slot is"):
        small(family).call(null_slot=null_slot)


def test_large_batches_are_refused(family: str) -> None:
    scene, many = small(family), torch.full((65536,), -1)
    with pytest.raises(ArgumentError, match="source has 65536 rows, a launch takes at most 65535"):
        scene.call(source=many, destination=many, prefix=None)


@pytest.mark.parametrize("value", [None, 2.5, np.ones(3), [1]], ids=lambda value: type(value).__name__)
def test_what_is_no_tensor_is_named(family: str, value: Any) -> None:
    scene = small(family)
    for name, known in scene.given().items():
        if not isinstance(known, Tensor) or (name == "prefix" and value is None):
            continue
        with pytest.raises(ArgumentError, match=rf"{family}_materialize: {name} is .*; expected a tensor"):
            scene.call(**{name: value})


def test_gradients_are_refused_unless_switched_off(family: str) -> None:
    scene = small(family)
    state = scene.pool.state.clone().requires_grad_()
    with pytest.raises(ArgumentError, match=r"state requires a gradient.*no_grad"):
        scene.call(state=state)
    with torch.no_grad():
        scene.call(state=state)
    scene.call()
    same_state = torch.equal(state.detach().nan_to_num(), scene.pool.state.nan_to_num())
    assert same_state


def refused(scene: Fold, message: str, **changes: Any) -> None:
    """The call is refused by a message, on every way to the op, and nothing is written."""
    before = scene.pool.storage.clone()
    for mode in (torch.no_grad(), torch.device("cpu")):
        with mode, pytest.raises(ArgumentError, match=message):
            scene.call(**changes)
    assert torch.equal(scene.pool.storage, before)


@pytest.mark.parametrize("slot", [7, 2**40])
def test_slots_beyond_the_last_are_refused(family: str, slot: int) -> None:
    scene = small(family)
    for name in ("source", "destination"):
        value = getattr(scene, name).long()
        value[2] = slot
        refused(scene, f"row 2 names slot {slot}, but there are 7 slots; correct {name},", **{name: value})


def test_destinations_are_distinct_and_no_source_of_another_row(family: str) -> None:
    scene = small(family)
    source, destination = scene.source, scene.destination
    twice = destination.clone()
    twice[2] = twice[0]
    refused(
        scene, rf"row 2 writes slot {int(twice[2])}, which another row reads or writes", destination=twice
    )
    crossed = destination.clone()
    crossed[1] = source[0]
    refused(scene, rf"row 1 writes slot {int(crossed[1])}, which another row reads", destination=crossed)
    # In place is fine for a slot that serves its own row alone.
    one_slot = source[:1].repeat(3)
    in_place = torch.stack([source[0], destination[1], destination[2]])
    refused(
        scene, rf"row 0 writes slot {int(source[0])}, which another row reads", source=one_slot,
        destination=in_place, prefix=None,
    )  # fmt: skip
    scene.call(destination=torch.cat([source[:1], destination[1:]]), prefix=None)


@pytest.mark.parametrize("prefix", [-1, 0, 1, 2])
def test_a_part_of_a_ring_cannot_be_folded_in_place(family: str, prefix: int) -> None:
    scene = small(family)
    counts = torch.tensor([9, 4, prefix], dtype=torch.int32)
    message = (
        rf"row 2 folds {max(prefix, 0)} of 3 ring tokens into their own slot {int(scene.source[2])},.*drained"
    )
    refused(scene, message, destination=scene.source, prefix=counts)
    counts[2] = 3
    scene.call(destination=scene.source, prefix=counts)


@pytest.mark.parametrize(("start", "length"), [(-1, 0), (5, 0), (0, -1), (0, 5), (2**31 - 1, 2)])
def test_cursors_out_of_range_are_refused(family: str, start: int, length: int) -> None:
    scene = small(family)
    slot = int(scene.source[1])
    scene.pool.ring_start[slot], scene.pool.ring_len[slot] = start, length
    refused(scene, rf"row 1: the ring of slot {slot} has ring_start {start} and ring_len {length},")
    # Those of a destination are not read.
    scene = small(family)
    scene.pool.ring_start[scene.destination.long()], scene.pool.ring_len[scene.destination.long()] = (
        start,
        length,
    )
    scene.call()


def positional(scene: Fold) -> tuple[Any, ...]:
    return ordered(f"{scene.spec.family}_materialize", {"null_slot": -1} | scene.given())


def test_the_mutation_list_is_exact(family: str) -> None:
    op = f"{family}_materialize"
    assert written(op) == {"state"}
    assert not overload(op)._schema.returns


def finite(family: str) -> Fold:
    """Without NaN, which checks of torch take for differences."""
    scene = small(family)
    contiguous = {name: getattr(scene.pool, name).nan_to_num() for name in scene.pool.fields}
    return dataclasses.replace(scene, pool=dataclasses.replace(scene.pool, **contiguous))


def test_opcheck(family: str) -> None:
    torch.library.opcheck(overload(f"{family}_materialize"), positional(finite(family)))


def test_direct_call_equals_the_operator(family: str) -> None:
    direct, dispatched = small(family), small(family)
    direct.call()
    overload(f"{family}_materialize")(*positional(dispatched))
    assert torch.equal(direct.pool.storage, dispatched.pool.storage)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_compiles_as_one_graph(family: str, dynamic: bool, everything: bool) -> None:
    def body(given: dict[str, Any]) -> Tensor:
        ops_of = ops.gdn_materialize if "ring_u" in given else ops.mamba2_materialize
        ops_of(**given)
        moved = {name: given[name] for name in ("ring_start", "ring_len")}
        ops.drained(given["source"], **moved, capacity=5)
        total: Tensor = given["state"].sum((1, 2, 3))
        return total

    torch._dynamo.reset()
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    eager, traced = finite(family), finite(family)
    for rows in (3, 2) if dynamic else (3,):
        changes: dict[str, Any] = {"prefix": None} if everything else {"prefix": eager.prefix[:rows]}
        changes |= {name: getattr(eager, name)[:rows] for name in ("source", "destination")}
        assert torch.equal(compiled(traced.given(**changes)), body(eager.given(**changes)))
        assert torch.equal(traced.pool.state, eager.pool.state)
        assert torch.equal(traced.pool.ring_start, eager.pool.ring_start)
        assert not traced.pool.ring_len[eager.source[:rows].long()].any()


def test_bad_arguments_are_told_under_compile(family: str) -> None:
    torch._dynamo.reset()
    scene = small(family)
    with pytest.raises(Exception, match=r"destination has shape \(2,\); expected \(3,\)"):
        torch.compile(scene.call, fullgraph=True, backend="aot_eager")(destination=scene.destination[:2])


def test_meta_tensors_are_checked(family: str) -> None:
    scene = small(family)
    meta = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in scene.given(prefix=None).items()}
    scene.call(**meta)
    with pytest.raises(ArgumentError, match="destination has shape"):
        scene.call(**meta | {"destination": meta["destination"][:1]})


def test_signature_says_what_a_launcher_needs(family: str) -> None:
    scene, contract = small(family, state_dtype="fp16"), FOLDS[f"{family}_materialize"]

    def signature_of(scene: Fold) -> Any:
        *tensors, window, _ = positional(scene)
        return signatures.signature_of(contract, tuple(tensors), (window,))

    signature = signature_of(scene)
    assert signature is signature_of(small(family, state_dtype="fp16"))
    # The kernel is that of the ring, whatever inputs the steps have.
    assert signature.spec == scene.spec.materialize
    assert (signature.rows, signature.heads, signature.capacity, signature.effective_batch) == (3, 4, 5, 12)
    wide = dataclasses.replace(scene, prefix=scene.prefix.long())
    assert signature_of(wide).dtypes["prefix"] == "i64"
    assert signature_of(wide) is not signature
