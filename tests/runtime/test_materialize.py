"""Materialising: what is written where, decoding on from it, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import contracts, ops, signatures
from replayssm_tune.runtime.errors import ArgumentError, SpecError
from replayssm_tune.runtime.oracle import round_to
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests.runtime.folds import Fold, fold

CONTRACTS = {"mamba2": contracts.MAMBA2_MATERIALIZE, "gdn": contracts.GDN_MATERIALIZE}
DTYPES = [
    ("fp32", "fp32"),
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp16"),
]
"""Of ring and state."""


def every_ring(spec: Spec, capacity: int, **options: Any) -> Fold:
    """A row for every fill of a ring that starts at every place."""
    lengths = torch.arange(spec.window + 1).repeat_interleave(capacity)
    starts = torch.arange(capacity).repeat(spec.window + 1)
    return fold(spec, len(starts), 4, lengths=lengths, starts=starts, capacity=capacity, **options)


@pytest.mark.parametrize(("ring", "state"), DTYPES)
@pytest.mark.parametrize("spare", [0, 2])
def test_every_prefix_of_every_ring(driver: Any, ring: str, state: str, spare: int) -> None:
    """Against the recurrence token by token in fp64; nothing but states of destinations is written."""
    spec = driver.make_spec(activation_dtype=ring, ring_dtype=ring, state_dtype=state)
    capacity = spec.window + 1 + spare
    scene = every_ring(spec, capacity, gap_bytes=16 if spare else 4)
    pool, lengths = scene.pool, scene.lengths()
    allowed, before = scene.states_only(scene.destination), pool.storage.clone()
    cursors = pool.ring_start.clone(), pool.ring_len.clone()
    for prefix in (-3, *range(spec.window + 1), spec.window + 7, None):
        pool.storage.copy_(before)
        given = None if prefix is None else torch.full_like(scene.source, prefix)
        scene.call(prefix=given)
        count = lengths if prefix is None else lengths.clamp(max=max(prefix, 0))
        expected = scene.expected(count)
        found = pool.state[scene.destination.long()]
        ideal = relative_rms(round_to(expected, state), expected)
        assert relative_rms(found, expected) <= 1.25 * ideal + 1e-6
        # Where nothing is folded the state is copied.
        assert torch.equal(found[count == 0], pool.state[scene.source.long()][count == 0])
        assert not ((pool.storage != before) & ~allowed).any()
        assert torch.equal(pool.ring_start, cursors[0])
        assert torch.equal(pool.ring_len, cursors[1])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_a_prefix_per_row_is_clamped_to_the_ring(driver: Any, index_dtype: torch.dtype) -> None:
    scene = fold(driver.make_spec(), 40, 4, index_dtype=index_dtype, seed=3)
    count = torch.minimum(scene.prefix.long().clamp(min=0), scene.lengths())
    assert (scene.prefix < 0).any()
    assert (scene.prefix > scene.lengths()).any()
    assert {*count.tolist()} == {*range(5)}
    expected = scene.expected(count)
    scene.call()
    torch.testing.assert_close(
        scene.pool.state[scene.destination.long()].double(), expected, rtol=1e-5, atol=1e-6
    )


def test_integers_of_rows_may_differ_in_dtype(driver: Any) -> None:
    scene, other = (fold(driver.make_spec(), 7, 4) for _ in range(2))
    scene.call()
    other.call(destination=other.destination.long(), prefix=other.prefix.long())
    assert torch.equal(scene.pool.storage, other.pool.storage)


def test_one_source_serves_many_rows(driver: Any) -> None:
    spec = driver.make_spec()
    scene = fold(spec, 5, 2, lengths=torch.full((5,), 4), seed=2)
    many = dataclasses.replace(
        scene, source=scene.source[:1].repeat(5), prefix=torch.arange(5, dtype=torch.int32)
    )
    expected = many.expected(torch.arange(5))
    many.call()
    found = many.pool.state[many.destination.long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(found[0], found[4])


@pytest.mark.parametrize(("ring", "state"), DTYPES)
def test_bits_are_those_that_a_flush_stores(driver: Any, ring: str, state: str) -> None:
    spec = driver.make_spec(activation_dtype=ring, ring_dtype=ring, state_dtype=state)
    scene = Trajectory(spec, heads=4, ring_len=spec.window, attend=1.0, padded_rows=0, steps=1)
    (step,) = scene
    assert bool(step.stores.all())
    flushed, pool = scene.pool(), scene.pool()
    driver.launch(scene, flushed, step)
    source = scene.slot_of
    destination = others(scene, len(source))
    folding(scene, pool).call(source=source, destination=destination, prefix=None)
    assert torch.equal(pool.state[destination], flushed.state[source])
    in_place = scene.pool()
    folding(scene, in_place).call(source=source, destination=source, prefix=None)
    assert torch.equal(in_place.state[source], flushed.state[source])


def others(scene: Trajectory, count: int) -> Tensor:
    """Slots where no sequence of the scene lies."""
    taken = set(scene.slot_of.tolist())
    free = [slot for slot in range(len(scene.pool().ring_len)) if slot not in taken]
    return torch.tensor(free[:count])


def folding(scene: Trajectory, pool: Pool) -> Fold:
    slots = scene.slot_of
    return Fold(scene.spec, pool, slots, slots, torch.full_like(slots, 64), scene.A)


def cursors(pool: Pool) -> dict[str, Any]:
    return {"ring_start": pool.ring_start, "ring_len": pool.ring_len}


@pytest.mark.parametrize("after", range(7))
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("in_place", [True, False])
def test_decoding_goes_on_from_it(driver: Any, after: int, state: str, in_place: bool) -> None:
    """After any step: in place and drained, or in other slots with empty rings, outputs stay the same."""
    scene = Trajectory(
        driver.make_spec(state_dtype=state),
        heads=2,
        sequences=4,
        slots=10,
        attend=1.0,
        padded_rows=1,
        steps=14,
    )
    here, there = scene.pool(), scene.pool()
    target = scene.slot_of if in_place else others(scene, 4)
    slot_of = torch.arange(11)
    outputs, ideal, folded = [], [], False
    for number, step in enumerate(scene):
        y = driver.launch(scene, here, step)[step.live]
        driver.commit(scene, here, step)
        # Padding is -1: it names the last entry, which is -1 too.
        slot_of[-1] = -1
        moved = dataclasses.replace(step, slot_index=slot_of[step.slot_index.long()].int())
        outputs.append((driver.launch(scene, there, moved)[step.live], y))
        ideal.append((step.y, step.ideal_y))
        driver.commit(scene, there, moved)
        if number == after:
            folded = bool((there.ring_len[scene.slot_of] > 0).any())
            folding(scene, there).call(destination=target)
            slot_of[scene.slot_of] = target
            if in_place:
                ops.drained(scene.slot_of, **cursors(there), capacity=there.capacity)
            else:
                ops.reset(target, **cursors(there))
            assert not there.ring_len[target].any()
    assert folded
    there_y, here_y = (torch.cat(part).double() for part in zip(*outputs, strict=True))
    exact, ideal_y = (torch.cat(part) for part in zip(*ideal, strict=True))
    # One more rounding of the state, beside those of its flushes.
    assert relative_rms(there_y, exact) <= 2 * relative_rms(ideal_y, exact) + 1e-5
    bound = 1e-5 if state == "fp32" else 1e-2
    assert relative_rms(there_y, here_y) <= bound


@pytest.mark.parametrize("fill", range(5))
def test_native_steps_take_over_and_hand_back(driver: Any, fill: int) -> None:
    """Steps with a ring, a drain, native steps, steps with a ring again: the oracle's outputs throughout."""
    scene = Trajectory(
        driver.make_spec(), heads=2, sequences=3, ring_len=fill, attend=1.0, accept=1.0, null_slot=2, steps=18
    )
    native = copy.copy(scene)
    native.spec = scene.spec.native
    pool = scene.pool()
    for number, step in enumerate(scene):
        if number == 5:
            folding(scene, pool).call(null_slot=2)
            ops.drained(scene.slot_of, **cursors(pool), capacity=pool.capacity, null_slot=2)
            rings = pool.ring_x.clone()
        by_native = 5 <= number < 11
        y = driver.launch(native if by_native else scene, pool, step)
        if by_native:
            assert torch.equal(pool.ring_x.nan_to_num(), rings.nan_to_num())
        else:
            driver.commit(scene, pool, step)
        torch.testing.assert_close(y[step.live].double(), step.y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("null_slot", [None, 0, 5])
def test_padded_rows_touch_nothing(driver: Any, null_slot: int | None) -> None:
    scene = fold(driver.make_spec(), 8, 4, seed=4)
    padding = torch.tensor([-7, -1 if null_slot is None else null_slot], dtype=torch.int32)
    scene.source[[0, 1]], scene.destination[[2, 3]] = padding, padding
    scene.source[4], scene.destination[4] = padding[0], padding[1]
    # A padded row may name what would be refused: a destination twice, or a slot beyond the last.
    scene.destination[0], scene.source[3] = scene.destination[5], 10**6
    live = torch.tensor(
        [row for row in (5, 6, 7) if null_slot not in (scene.source[row], scene.destination[row])]
    )
    lengths = scene.pool.ring_len[scene.source[live].long()].long()
    count = torch.minimum(scene.prefix[live].long().clamp(min=0), lengths)
    expected = dataclasses.replace(scene, source=scene.source[live]).expected(count)
    before = scene.pool.storage.clone()
    allowed = scene.states_only(scene.destination[live])
    scene.call(null_slot=null_slot)
    assert not ((scene.pool.storage != before) & ~allowed).any()
    found = scene.pool.state[scene.destination[live].long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_no_rows(driver: Any) -> None:
    scene = fold(driver.make_spec(), 3, 4)
    before = scene.pool.storage.clone()
    scene.call(**{name: getattr(scene, name)[:0] for name in ("source", "destination", "prefix")})
    scene.call(source=scene.source[:0], destination=scene.destination[:0], prefix=None)
    assert torch.equal(scene.pool.storage, before)


@pytest.mark.parametrize(("head_dim", "state_size"), [(80, 128), (48, 96), (5, 256), (256, 7), (1, 1)])
def test_odd_shapes(driver: Any, head_dim: int, state_size: int) -> None:
    spec = driver.make_spec(head_dim=head_dim, state_size=state_size, heads_per_group=1)
    scene = fold(spec, 5, 2, gap_bytes=4)
    expected = scene.expected(torch.minimum(scene.prefix.long().clamp(min=0), scene.lengths()))
    before, allowed = scene.pool.storage.clone(), scene.states_only(scene.destination)
    scene.call()
    assert not ((scene.pool.storage != before) & ~allowed).any()
    found = scene.pool.state[scene.destination.long()].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_large_decays_leave_no_nan(driver: Any, family: str) -> None:
    scene = fold(driver.make_spec(), 10, 4)
    live = ~scene.pool.ring_decay.isnan()
    exponent = torch.rand(scene.pool.ring_decay.shape, generator=torch.Generator().manual_seed(1)) * 14 - 8
    scene.pool.ring_decay[live] = (10.0**exponent)[live] * (-1 if family == "gdn" else 1)
    expected = scene.expected(scene.lengths())
    scene.call(prefix=None)
    found = scene.pool.state[scene.destination.long()]
    assert relative_rms(found, expected) < 1e-6


# What is refused.


def small(family: str, **changes: Any) -> Fold:
    fields: dict[str, Any] = {"head_dim": 8, "state_size": 16, "heads_per_group": 2, "window": 4}
    fields |= {"activation_dtype": "fp32", "ring_dtype": "fp32", "has_d": False} | changes
    return fold(Spec(family, "step", **fields), 3, 4, lengths=torch.tensor([2, 4, 3]))


def renamed(family: str, name: str) -> str:
    """What the family's op calls a kernel's argument."""
    contract = CONTRACTS[family]
    return contract.names[contract.kernel_names.index(name)]


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


# The operator.


def overload(family: str) -> Any:
    return getattr(getattr(torch.ops, ops.NAMESPACE), f"{family}_materialize").default


def positional(scene: Fold) -> tuple[Any, ...]:
    full = {"null_slot": -1} | scene.given()
    return tuple(full[argument.name] for argument in overload(scene.spec.family)._schema.arguments)


def test_the_mutation_list_is_exact(family: str) -> None:
    schema = overload(family)._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"state"}
    assert not schema.returns


def finite(family: str) -> Fold:
    """Without NaN, which checks of torch take for differences."""
    scene = small(family)
    contiguous = {name: getattr(scene.pool, name).nan_to_num() for name in scene.pool.fields}
    return dataclasses.replace(scene, pool=dataclasses.replace(scene.pool, **contiguous))


def test_opcheck(family: str) -> None:
    torch.library.opcheck(overload(family), positional(finite(family)))


def test_direct_call_equals_the_operator(family: str) -> None:
    direct, dispatched = small(family), small(family)
    direct.call()
    overload(family)(*positional(dispatched))
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
    scene, contract = small(family, state_dtype="fp16"), CONTRACTS[family]

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


def test_states_that_are_old_are_not_had_back(driver: Any) -> None:
    """A flush folds the ring into the state: prefixes of what it held are gone, as documented."""
    scene = Trajectory(
        driver.make_spec(), heads=2, ring_len=4, attend=1.0, accept=1.0, padded_rows=0, steps=1
    )
    pool, (step,) = scene.pool(), scene
    old = pool.state[scene.slot_of].clone()
    driver.launch(scene, pool, step)
    driver.commit(scene, pool, step)
    target = others(scene, 5)
    folding(scene, pool).call(destination=target, prefix=torch.zeros(5, dtype=torch.int32))
    assert torch.equal(pool.state[target], pool.state[scene.slot_of])
    assert not torch.equal(pool.state[target], old)
    assert not math.isnan(float(pool.state[target].sum()))
