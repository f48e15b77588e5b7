"""The convolution's ops: against fp64 token by token, their room in a ring, their surface."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from replayssm_tune.runtime import (
    ArgumentError,
    checks,
    commit,
    conv,
    conv_seed,
    conv_step,
    drained,
    reset,
    signatures,
)
from tests.runtime import conv_scenes
from tests.runtime.calls import same_bits
from tests.runtime.conv_calls import CHANNELS, I32, ROWS, arguments, positional, seeding
from tests.runtime.conv_scenes import DTYPES, Scene, scene_of
from tests.runtime.small_calls import overload, written

# ---- outputs and rings ----


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", conv.WIDTHS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_random_accepts(dtypes: str, width: int, packed: bool, num_tokens: int) -> None:
    met = conv_scenes.run(
        scene_of(dtypes, width=width, packed=packed, num_tokens=num_tokens, steps=60, recycle=0.02)
    )
    assert met["wrapped"]
    assert met["flushed"]
    assert met["rejected"]
    assert bool(met["empty"]) == packed


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_bias_and_activation(num_tokens: int, silu: bool, has_bias: bool) -> None:
    conv_scenes.run(Scene(num_tokens=num_tokens, silu=silu, has_bias=has_bias))


@pytest.mark.parametrize("accept", [0.0, 1.0])
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize(("window", "num_tokens"), [(1, 1), (2, 2), (16, 5)])
def test_windows_and_rings(window: int, num_tokens: int, spare: int, accept: float) -> None:
    conv_scenes.run(
        Scene(window=window, num_tokens=num_tokens, spare=spare, accept=accept, recycle=0.0, steps=30)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_recycled_slots_and_chunks_of_a_prefill(packed: bool) -> None:
    """Whatever the last tenant or the last chunk left, at any fill."""
    conv_scenes.run(Scene(num_tokens=2, packed=packed, recycle=0.5, steps=60))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_slot", [None, 0, 6])
@pytest.mark.parametrize("gap", [0, 5])
def test_padding_and_pools(gap: int, null_slot: int | None, index_dtype: torch.dtype) -> None:
    conv_scenes.run(
        Scene(gap=gap, null_slot=null_slot, index_dtype=index_dtype, padded_rows=3, packed=True, num_tokens=2)
    )


def test_a_scene_notices_a_wrong_tap() -> None:
    def wrong(**options: Any) -> torch.Tensor:
        return conv_step(**options | {"weight": options["weight"].roll(1, 1)})

    with pytest.raises(AssertionError, match="not close"):
        conv_scenes.run(Scene(), wrong)


def test_a_scene_notices_a_ring_that_is_not_seeded() -> None:
    with pytest.raises(AssertionError, match="not close"):
        conv_scenes.run(Scene(), seed=lambda *args, **options: None)


def test_a_scene_notices_a_missing_append() -> None:
    def reading(**options: Any) -> torch.Tensor:
        return conv_step(**options | {"ring": options["ring"].clone()})

    with pytest.raises(AssertionError):
        conv_scenes.run(Scene(), reading)


def test_a_step_may_be_repeated_before_its_commit() -> None:
    run = conv_scenes.Run(Scene(num_tokens=3))
    for _ in range(20):
        call = run.call()
        first = conv_step(**run.options(call))
        storage = run.storage.clone()
        assert same_bits(conv_step(**run.options(call)), first)
        assert same_bits(run.storage, storage)
        run.advance(call)


def test_a_flush_is_nothing_to_the_convolution() -> None:
    """Tokens one by one in a window of 2 and in one of 16 give the same outputs."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(30, 1, 8, generator=g), torch.randn(8, 4, generator=g)
    outputs = []
    for window in (2, 16):
        options = arguments(window=window, weight=weight, rows=1)
        cursors = {name: options[name] for name in ("ring_start", "ring_len", "slot_index", "window")}
        cursors["ring_len"].zero_()
        options["ring"].zero_()
        y = []
        for token in x:
            y.append(conv_step(**options | {"x": token}))
            commit(torch.ones(1, dtype=I32), capacity=options["ring"].shape[1], **cursors)
        outputs.append(torch.cat(y))
    assert torch.equal(*outputs)


def test_nobody_there() -> None:
    nobody: list[dict[str, Any]] = [
        {"slot_index": torch.full((3,), -1)},
        {"query_start": torch.zeros(4, dtype=I32)},
        {"slot_index": torch.empty(0, dtype=I32), "query_start": torch.zeros(1, dtype=I32)},
    ]
    for changes in nobody:
        options = arguments(**changes)
        before = options["ring"].clone()
        out = torch.full_like(options["x"], float("nan"))
        assert not bool(conv_step(**options, out=out).any())
        assert same_bits(options["ring"], before)
    assert conv_step(**arguments(rows=0)).shape == (0, CHANNELS)
    conv_seed(torch.empty(0, 3, CHANNELS), **seeding(slots=torch.empty(0, dtype=I32)))


# ---- the room in a ring ----


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """window, num_tokens, width, capacity, start of a legal ring."""
    window = draw(st.integers(1, 16))
    num_tokens, width = draw(st.integers(1, window)), draw(st.sampled_from(conv.WIDTHS))
    capacity = window + num_tokens + width - 1 + draw(st.integers(0, 4))
    return window, num_tokens, width, capacity, draw(st.integers(0, capacity - 1))


EVENTS = st.tuples(st.integers(0, 16), st.integers(0, 16), st.sampled_from(["step"] * 6 + ["drain", "chunk"]))


@settings(deadline=None, max_examples=100)
@given(rings(), st.lists(EVENTS, min_size=1, max_size=40))
def test_appends_never_meet_inputs_still_needed(
    ring: tuple[int, int, int, int, int], events: list[tuple[int, int, str]]
) -> None:
    """Each position is followed under the cursor ops: tokens of the ring, and width - 1 behind them."""
    window, num_tokens, width, capacity, first = ring
    start, length = torch.tensor([first], dtype=I32), torch.zeros(1, dtype=I32)
    slot = torch.zeros(1, dtype=I32)
    held: list[int | None] = [None] * capacity
    numbers = itertools.count()
    # What the sequence has kept, oldest first; the ring begins as a prompt's end has seeded it.
    stream = [next(numbers) for _ in range(width - 1)]

    def seed() -> None:
        for back in range(1, width):
            held[(int(start) - back) % capacity] = stream[-back]

    def needed() -> bool:
        last = range(1, int(length) + width)
        end = int(start) + int(length)
        return all(held[(end - back) % capacity] == stream[-back] for back in last)

    seed()
    for tokens, accepted, event in events:
        assert needed()
        if event != "step":
            drained(slot, ring_start=start, ring_len=length, capacity=capacity)
            if event == "chunk":
                stream += [next(numbers) for _ in range(tokens)]
                seed()
            continue
        # A row may have fewer tokens than the op's constant; none at all is padding.
        new = [next(numbers) for _ in range(min(max(tokens, 1), num_tokens))]
        for i, number in enumerate(new):
            held[(int(start) + int(length) + i) % capacity] = number
        assert needed()
        kept = min(accepted, len(new))
        commit(
            torch.tensor([kept]), ring_start=start, ring_len=length, slot_index=slot, window=window,
            num_tokens=num_tokens, capacity=capacity,
        )  # fmt: skip
        stream += new[:kept]
    assert needed()


@pytest.mark.parametrize("width", conv.WIDTHS)
@pytest.mark.parametrize(("window", "num_tokens"), [(1, 1), (4, 1), (4, 4), (16, 3)])
def test_no_smaller_ring_would_do(window: int, num_tokens: int, width: int) -> None:
    def meet(capacity: int) -> bool:
        history = {-back % capacity for back in range(1, width)}
        return bool(history & {(window + i) % capacity for i in range(num_tokens)})

    least = window + num_tokens + width - 1
    assert not meet(least)
    assert meet(least - 1)
    options: dict[str, Any] = {"window": window, "num_tokens": num_tokens, "weight": torch.zeros(8, width)}
    conv_step(**arguments(**options, capacity=least))
    with pytest.raises(ArgumentError, match=f"needs window .* = {least}; allocate longer rings"):
        conv_step(**arguments(**options, capacity=least - 1))


def test_mutation_lists_are_exact() -> None:
    assert written("conv_step") == {"ring", "out"}
    assert written("conv_seed") == {"ring"}


@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(optional: bool) -> None:
    extra: dict[str, Any] = {
        "bias": torch.randn(CHANNELS),
        "query_start": torch.tensor([0, 1, 1, 2], dtype=I32),
    }
    torch.library.opcheck(overload("conv_step"), positional(arguments(**extra if optional else {})))
    given = seeding()
    torch.library.opcheck(
        overload("conv_seed"),
        (torch.randn(2, 3, CHANNELS), given["ring"], given["ring_start"], given["slots"], -1),
    )


def step_and_commit(given: dict[str, Any]) -> torch.Tensor:
    y = conv_step(**given) * 2
    cursors = {name: given[name] for name in ("ring_start", "ring_len", "slot_index", "window")}
    commit(torch.ones_like(given["slot_index"]), capacity=given["ring"].shape[1], **cursors)
    return y


def test_compiled_as_one_graph() -> None:
    given = arguments(bias=torch.ones(CHANNELS))
    other = copy.deepcopy(given)

    def whole(given: dict[str, Any]) -> torch.Tensor:
        reset(given["slot_index"], ring_start=given["ring_start"], ring_len=given["ring_len"])
        history = given["x"][:, None].repeat(1, 3, 1)
        conv_seed(history, ring=given["ring"], ring_start=given["ring_start"], slots=given["slot_index"])
        return step_and_commit(given) + step_and_commit(given)

    torch._dynamo.reset()
    y = torch.compile(whole, fullgraph=True, backend="aot_eager")(other)
    assert torch.equal(y, whole(given))
    for name in ("ring", "ring_start", "ring_len"):
        assert torch.equal(given[name], other[name]), name


def test_fake_tensors_are_checked() -> None:
    with FakeTensorMode() as mode:
        given = arguments()
        given |= {k: mode.from_tensor(v) for k, v in given.items() if isinstance(v, torch.Tensor)}
        assert conv_step(**given).shape == (ROWS, CHANNELS)
        with pytest.raises(ArgumentError, match="x has 2 tokens"):
            conv_step(**given | {"x": given["x"][:2]})


def test_an_output_of_the_callers_is_returned() -> None:
    given = arguments()
    wide = torch.full((ROWS, CHANNELS + 8), float("nan"))
    out = wide[:, 4 : CHANNELS + 4]
    y = conv_step(**copy.deepcopy(given), out=out)
    assert y is out
    assert torch.equal(y, conv_step(**given))
    assert bool(wide[:, :4].isnan().all())
    assert bool(wide[:, CHANNELS + 4 :].isnan().all())


def test_a_signature_is_checked_in_full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, full = arguments(rows=2), []

    def check(*args: Any) -> Any:
        full.append(args)
        return known(*args)

    known = checks.described
    monkeypatch.setattr(conv, "described", check)
    monkeypatch.setattr(signatures, "_known", {})
    out = torch.empty_like(given["x"])
    for _ in range(3):
        conv_step(**copy.deepcopy(given), out=out)
    assert len(full) == 1
    conv_step(**given, activation=None, out=out)
    assert len(full) == 2
    for name, value in (("window", 4.0), ("num_tokens", 1.0), ("num_tokens", True)):
        with pytest.raises(ArgumentError, match=f"{name} is {value}; expected a whole number"):
            conv_step(**given | {name: value}, out=out)


def test_an_fp32_ring_takes_any_history() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        history = torch.randn(2, 3, CHANNELS).to(dtype)
        given = seeding()
        conv_seed(history, **given)
        assert torch.equal(given["ring"][[1, 4], -3:], history.float())
