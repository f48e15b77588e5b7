"""The convolution's op: against fp64 token by token, its room in a ring, its surface, what it refuses."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from replayssm_tune.codegen.render import render_conv
from replayssm_tune.runtime import (
    ArgumentError,
    CompileError,
    ToolchainError,
    checks,
    commit,
    conv,
    conv_launch,
    conv_seed,
    conv_step,
    drained,
    launch,
    ops,
    reset,
    signatures,
    warmup_conv,
)
from replayssm_tune.runtime.contracts import CONV_STEP
from replayssm_tune.runtime.conv_tiles import ConvSpec, default_tile
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from replayssm_tune.runtime.modules import CONVOLUTION, load_module, shared_path
from tests.interpreter import run_interpreted
from tests.runtime import conv_scenes
from tests.runtime.conv_scenes import Scene, same

DTYPES = {
    "fp32": ("fp32", "fp32", "fp32"),
    "fp16": ("fp16", "fp16", "fp16"),
    "bf16": ("bf16", "bf16", "bf16"),
    "bf16 in fp32": ("bf16", "fp32", "fp32"),
    "fp16 in fp32": ("fp16", "fp32", "fp16"),
}
"""dtypes of activations, ring and weights."""

I32 = torch.int32


def scene(dtypes: str = "fp32", **changes: Any) -> Scene:
    activation, ring, weight = DTYPES[dtypes]
    return Scene(activation_dtype=activation, ring_dtype=ring, weight_dtype=weight, **changes)


# ---- outputs and rings ----


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", conv.WIDTHS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_random_accepts(dtypes: str, width: int, packed: bool, num_tokens: int) -> None:
    met = conv_scenes.run(
        scene(dtypes, width=width, packed=packed, num_tokens=num_tokens, steps=60, recycle=0.02)
    )
    assert met["wrapped"]
    assert met["flushed"]
    assert met["rejected"]
    assert bool(met["empty"]) == packed


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_bias_and_activation(num_tokens: int, silu: bool, has_bias: bool) -> None:
    conv_scenes.run(scene(num_tokens=num_tokens, silu=silu, has_bias=has_bias))


@pytest.mark.parametrize("accept", [0.0, 1.0])
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize(("window", "num_tokens"), [(1, 1), (2, 2), (16, 5)])
def test_windows_and_rings(window: int, num_tokens: int, spare: int, accept: float) -> None:
    conv_scenes.run(
        scene(window=window, num_tokens=num_tokens, spare=spare, accept=accept, recycle=0.0, steps=30)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_recycled_slots_and_chunks_of_a_prefill(packed: bool) -> None:
    """Whatever the last tenant or the last chunk left, at any fill."""
    conv_scenes.run(scene(num_tokens=2, packed=packed, recycle=0.5, steps=60))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("null_slot", [None, 0, 6])
@pytest.mark.parametrize("gap", [0, 5])
def test_padding_and_pools(gap: int, null_slot: int | None, index_dtype: torch.dtype) -> None:
    conv_scenes.run(
        scene(gap=gap, null_slot=null_slot, index_dtype=index_dtype, padded_rows=3, packed=True, num_tokens=2)
    )


def test_a_scene_notices_a_wrong_tap() -> None:
    def wrong(**options: Any) -> torch.Tensor:
        return conv_step(**options | {"weight": options["weight"].roll(1, 1)})

    with pytest.raises(AssertionError, match="not close"):
        conv_scenes.run(scene(), wrong)


def test_a_scene_notices_a_ring_that_is_not_seeded() -> None:
    with pytest.raises(AssertionError, match="not close"):
        conv_scenes.run(scene(), seed=lambda *args, **options: None)


def test_a_scene_notices_a_missing_append() -> None:
    def reading(**options: Any) -> torch.Tensor:
        return conv_step(**options | {"ring": options["ring"].clone()})

    with pytest.raises(AssertionError):
        conv_scenes.run(scene(), reading)


def test_a_step_may_be_repeated_before_its_commit() -> None:
    run = conv_scenes.Run(scene(num_tokens=3))
    for _ in range(20):
        call = run.call()
        first = conv_step(**run.options(call))
        storage = run.storage.clone()
        assert same(conv_step(**run.options(call)), first)
        assert same(run.storage, storage)
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
        assert same(options["ring"], before)
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


# ---- the surface ----

ROWS, SLOTS, CHANNELS, WINDOW = 3, 6, 8, 4


def arguments(rows: int = ROWS, capacity: int | None = None, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call of one token a row, of another where the changes say so."""
    g = torch.Generator().manual_seed(5)
    window, num_tokens = changes.get("window", WINDOW), changes.get("num_tokens", 1)
    width = changes["weight"].shape[1] if isinstance(changes.get("weight"), torch.Tensor) else 4
    capacity = window + num_tokens + width - 1 if capacity is None else capacity
    given: dict[str, Any] = {
        "x": torch.randn(rows * num_tokens, CHANNELS, generator=g),
        "weight": torch.randn(CHANNELS, 4, generator=g),
        "ring": torch.randn(SLOTS, capacity, CHANNELS, generator=g),
        "ring_start": torch.randint(0, capacity, (SLOTS,), generator=g, dtype=I32),
        "ring_len": torch.full((SLOTS,), min(2, window), dtype=I32),
        "slot_index": torch.randperm(SLOTS, generator=g)[:rows].int(),
        "window": window,
    }
    return given | changes


def seeding(**changes: Any) -> dict[str, Any]:
    """All of a legal call of :func:`conv_seed` but the history."""
    start = torch.zeros(SLOTS, dtype=I32)
    slots = torch.tensor([1, 4], dtype=I32)
    return {"ring": torch.zeros(SLOTS, 8, CHANNELS), "ring_start": start, "slots": slots} | changes


def operator(name: str) -> Any:
    return getattr(getattr(torch.ops, ops.NAMESPACE), name).default


def positional(given: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the order of the operator's schema."""
    defaults = {"bias": None, "query_start": None, "num_tokens": 1, "silu": True, "null_slot": -1}
    full = defaults | {"out": torch.empty_like(given["x"])} | given
    return tuple(full[argument.name] for argument in operator("conv_step")._schema.arguments)


def test_mutation_lists_are_exact() -> None:
    def written(name: str) -> set[str]:
        arguments = operator(name)._schema.arguments
        return {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}

    assert written("conv_step") == {"ring", "out"}
    assert written("conv_seed") == {"ring"}


@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(optional: bool) -> None:
    extra: dict[str, Any] = {
        "bias": torch.randn(CHANNELS),
        "query_start": torch.tensor([0, 1, 1, 2], dtype=I32),
    }
    torch.library.opcheck(operator("conv_step"), positional(arguments(**extra)))
    given = seeding()
    torch.library.opcheck(
        operator("conv_seed"),
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


def test_importing_needs_no_triton() -> None:
    code = (
        "import sys; from replayssm_tune.runtime import conv_step, conv_seed; print('triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- what is refused ----

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x is no tensor": ({"x": np.zeros((3, 8))}, "x is of type numpy.ndarray; expected a tensor"),
    "bias is no tensor": ({"bias": [0.0] * 8}, "bias is of type list"),
    "query_start is no tensor": ({"query_start": [0, 1, 2, 3]}, "query_start is of type list"),
    "weight is missing": ({"weight": None}, "weight is None"),
    "x rank": ({"x": torch.zeros(3, 2, 4)}, r"x has shape \(3, 2, 4\); expected 2 .*\(tokens, channels\)"),
    "x dtype": ({"x": torch.zeros(3, 8).double()}, "x is float64; expected fp32 or bf16 or fp16"),
    "x without channels": (
        {"x": torch.zeros(3, 0), "weight": torch.zeros(0, 4), "ring": torch.zeros(6, 8, 0)},
        "x has no channels",
    ),
    "x stride": ({"x": torch.zeros(8, 3).T}, "innermost dimension of x has stride 3"),
    "tokens": ({"x": torch.zeros(4, 8)}, "x has 4 tokens .*; expected 3 rows of 1, 3; pass query_start"),
    "weight rank": ({"weight": torch.zeros(8, 1, 4)}, "weight has shape"),
    "weight width 1": ({"weight": torch.zeros(8, 1)}, r"width 1 .* expected 2 to 4\. A weight of torch's"),
    "weight width 5": ({"weight": torch.zeros(8, 5)}, "width 5"),
    "weight channels": ({"weight": torch.zeros(7, 4)}, r"weight has shape \(7, 4\); expected \(8, 4\)"),
    "weight dtype": ({"weight": torch.zeros(8, 4).half()}, "weight is fp16; expected fp32"),
    "bias shape": ({"bias": torch.zeros(1, 8)}, r"bias has shape \(1, 8\); expected \(8,\)"),
    "bias dtype": ({"bias": torch.zeros(8).bfloat16()}, "bias is bf16; expected fp32"),
    "ring rank": ({"ring": torch.zeros(6, 8)}, r"ring has shape .*\(slots, capacity, channels\)"),
    "ring channels": ({"ring": torch.zeros(6, 8, 9)}, r"ring has shape \(6, 8, 9\); expected \(6, 8, 8\)"),
    "ring dtype": ({"ring": torch.zeros(6, 8, 8).half()}, "ring is fp16; expected fp32"),
    "ring expanded": ({"ring": torch.zeros(1, 8, 8).expand(6, 8, 8)}, "ring is written, but an expanded"),
    "ring too short": (
        {"ring": torch.zeros(6, 7, 8)},
        r"ring has room for 7 tokens .* too few for window 4: .* = 4 \+ 1 \+ 3 = 8",
    ),
    "ring_start shape": ({"ring_start": torch.zeros(5, dtype=I32)}, r"ring_start has shape \(5,\)"),
    "ring_start dtype": ({"ring_start": torch.zeros(6).long()}, "ring_start is i64; expected i32"),
    "ring_len shape": ({"ring_len": torch.zeros(5, dtype=I32)}, r"ring_len has shape \(5,\)"),
    "slot_index rank": ({"slot_index": torch.zeros(3, 1, dtype=I32)}, "slot_index has shape"),
    "slot_index dtype": ({"slot_index": torch.zeros(3).short()}, "slot_index is int16; expected i32 or i64"),
    "query_start shape": ({"query_start": torch.zeros(3, dtype=I32)}, r"query_start .*expected \(4,\)"),
    "query_start dtype": ({"query_start": torch.zeros(4).long()}, "query_start is i64; expected i32"),
    "window": ({"window": 4.0}, r"window is 4\.0; expected a whole number"),
    "window 65": ({"window": 65}, "a window is 1 to 64 tokens"),
    "num_tokens": ({"num_tokens": True}, "num_tokens is True; expected a whole number"),
    "num_tokens 0": ({"num_tokens": 0}, "num_tokens is 0 and window 4"),
    "num_tokens 5": ({"num_tokens": 5}, "num_tokens is 5 and window 4; .* a row has 1 to window"),
    "activation": ({"activation": "relu"}, "activation is 'relu'; expected 'silu' or None"),
    "null_slot": ({"null_slot": 1.5}, r"null_slot is 1\.5"),
    "null_slot beyond": ({"null_slot": 2**31}, "beyond 32 bits"),
    "device": ({"weight": torch.zeros(8, 4, device="meta")}, "weight is on meta"),
    "rows": (
        {"slot_index": torch.zeros(70_000, dtype=I32), "x": torch.zeros(70_000, 8)},
        "slot_index has 70000 rows, a launch takes at most 65535; split the batch",
    ),
    "out shape": ({"out": torch.zeros(4, 8)}, r"out has shape \(4, 8\); expected \(3, 8\)"),
    "out dtype": ({"out": torch.zeros(3, 8).half()}, "out is fp16; expected fp32"),
    "out expanded": ({"out": torch.zeros(1, 8).expand(3, 8)}, "out is written, but an expanded"),
    "slot": ({"slot_index": torch.tensor([0, 6, 1])}, "row 1 names slot 6, but there are 6 slots"),
    "start": ({"ring_start": torch.full((6,), 8, dtype=I32)}, "ring_start 8 .* outside of 0 to 7"),
    "length": ({"ring_len": torch.full((6,), 5, dtype=I32)}, "ring_len 5, outside of .* 0 to 4"),
    "query_start ends late": (
        {"query_start": torch.tensor([0, 1, 2, 3], dtype=I32), "x": torch.zeros(2, 8)},
        "query_start begins at 0 and ends at 3, of 2 tokens; query_start goes from 0 to at most 2",
    ),
    "query_start begins late": (
        {"query_start": torch.tensor([1, 1, 2, 3], dtype=I32)},
        "query_start begins at 1 and ends at 3",
    ),
    "query_start falls": (
        {"query_start": torch.tensor([0, 1, 0, 1], dtype=I32)},
        "row 1 is given -1 tokens, of 3 tokens;",
    ),
    "too many tokens": (
        {"query_start": torch.tensor([0, 1, 3, 3], dtype=I32)},
        "row 1 is given 2 tokens, .* in steps of 0 to num_tokens = 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    given = arguments(**{k: v for k, v in changes.items() if k not in ("num_tokens", "window")}) | changes
    ring = given["ring"].clone()
    with pytest.raises(ArgumentError, match=message):
        conv_step(**given)
    assert torch.equal(given["ring"], ring), "something was written"


REFUSED_SEEDS: dict[str, tuple[dict[str, Any], str]] = {
    "history is no tensor": ({"history": [0.0]}, "history is of type list"),
    "history rank": ({"history": torch.zeros(2, 8)}, r"\(rows, width - 1, channels\)"),
    "history length": ({"history": torch.zeros(2, 4, 8)}, "history has 4 inputs a row .* 1 to 3"),
    "history rows": ({"history": torch.zeros(3, 3, 8)}, r"slots has shape \(2,\); expected \(3,\)"),
    "ring narrower": ({"ring": torch.zeros(6, 8, 8).half()}, "ring is fp16; expected fp32"),
    "history dtype": ({"history": torch.zeros(2, 3, 8).double()}, "history is float64; expected fp32 or"),
    "history without channels": (
        {"history": torch.zeros(2, 3, 0), "ring": torch.zeros(6, 8, 0)},
        "history has no channels",
    ),
    "ring rank": ({"ring": torch.zeros(6, 8)}, "ring has shape"),
    "ring channels": ({"ring": torch.zeros(6, 8, 9)}, r"expected \(6, 8, 8\)"),
    "ring dtype": ({"ring": torch.zeros(6, 8, 8).double()}, "ring is float64"),
    "ring too short": ({"ring": torch.zeros(6, 4, 8)}, "ring has room for 4 tokens .* at least 5"),
    "ring_start": ({"ring_start": torch.zeros(5, dtype=I32)}, r"ring_start has shape \(5,\)"),
    "slots dtype": ({"slots": torch.zeros(2)}, "slots is fp32; expected i32 or i64"),
    "rows": (
        {"history": torch.zeros(1, 1, 8).expand(70_000, 1, 8), "slots": torch.zeros(70_000, dtype=I32)},
        "history has 70000 rows",
    ),
    "slot": ({"slots": torch.tensor([1, 6])}, "row 1 names slot 6"),
    "start": ({"ring_start": torch.full((6,), 8, dtype=I32)}, "ring_start 8"),
    "null_slot": ({"null_slot": "0"}, "null_slot is '0'"),
}


@pytest.mark.parametrize("name", REFUSED_SEEDS)
def test_seeds_refused(name: str) -> None:
    changes, message = REFUSED_SEEDS[name]
    given = {"history": torch.ones(2, 3, CHANNELS)} | seeding() | changes
    with pytest.raises(ArgumentError, match=message):
        conv_seed(**given)
    assert not bool(given["ring"].any()), "something was written"


def test_an_fp32_ring_takes_any_history() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        history = torch.randn(2, 3, CHANNELS).to(dtype)
        given = seeding()
        conv_seed(history, **given)
        assert torch.equal(given["ring"][[1, 4], -3:], history.float())


@pytest.mark.parametrize("where", ["x", "ring"])
def test_an_overlapping_output_is_refused(where: str) -> None:
    given = arguments(rows=2)
    out = {"x": given["x"], "ring": given["ring"][5, 6:]}[where]
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"out overlaps the memory of {where}"):
            conv_step(**given, out=out)
    # Side by side in one buffer: only rows that interleave are told apart by nobody.
    both = torch.zeros(4, CHANNELS)
    both[:2] = given["x"]
    expected = conv_step(**copy.deepcopy(given))
    assert torch.equal(conv_step(**given | {"x": both[:2]}, out=both[2:]), expected)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "ring"])
def test_gradients_are_refused(name: str) -> None:
    given = arguments(bias=torch.zeros(CHANNELS))
    given[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name} requires a gradient"):
        conv_step(**given)
    with torch.no_grad():
        assert conv_step(**given).shape == given["x"].shape


@pytest.mark.parametrize("name", ["history", "ring"])
def test_gradients_of_seeds_are_refused(name: str) -> None:
    given = {"history": torch.zeros(2, 3, CHANNELS)} | seeding()
    given[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name} requires a gradient"):
        conv_seed(**given)


# ---- the kernels ----

INTERPRETED = {
    "decode": scene(),
    "decode, fp16": scene("fp16", window=2, has_bias=False, channels=40, index_dtype=torch.int64),
    "two taps": scene(width=2, silu=False, num_tokens=2, window=3),
    "drafts": scene(num_tokens=3, width=3, accept=0.8, spare=2),
    "packed": scene("fp16 in fp32", num_tokens=4, packed=True, padded_rows=2, recycle=0.3),
    "packed, wide": scene("fp16", num_tokens=5, window=6, packed=True, null_slot=None, gap=0, channels=32),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_are_the_eager_ops(name: str) -> None:
    met = run_interpreted("tests.runtime.conv_scenes:run_kernels", INTERPRETED[name], 16)
    assert met["rejected"]
    assert met["flushed"]


def test_rendering_is_deterministic_and_what_is_packaged() -> None:
    source = render_conv()
    render_conv.cache_clear()
    assert render_conv() == source
    assert shared_path(CONVOLUTION).read_text() == source


TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_kernels_compile_and_load_vectors_where_aligned(
    num_tokens: int, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = load_module(shared_path(CONVOLUTION))
    spec = ConvSpec(4, num_tokens, "bf16", "bf16", "bf16")
    step = conv_launch.step_choice(spec, default_tile(256 * 64, num_tokens), silu=True)
    for packed, aligned in itertools.product((None, "i32"), (True, False)):
        dtypes = ("bf16", "i32", "i32", "i64", "bf16", "bf16", None, packed, "bf16")
        binary = conv_launch.compile_kernel(conv_launch.STEP, step, dtypes, target, aligned=aligned)
        assert ("ld.global.v" in binary.asm["ptx"]) == aligned
        # The order in which launchers give arguments.
        assert list(binary.src.signature) == module.conv_step.arg_names
    seeds = ("fp32", "i32", "i32", "bf16")
    kernel, choice = conv_launch.SEED, conv_launch.Choice((3, 128), 1)
    binary = conv_launch.compile_kernel(kernel, choice, seeds, target, aligned=True)
    assert binary.asm["cubin"]
    assert list(binary.src.signature) == module.conv_seed.arg_names
    with pytest.raises(CompileError, match="conv_seed does not compile for cuda"):
        conv_launch.compile_kernel(kernel, conv_launch.Choice((3, 100), 1), seeds, target, aligned=True)


@pytest.mark.parametrize("kernel", [conv_launch.STEP, conv_launch.SEED], ids=lambda k: k.contract.name)
def test_contracts_and_kernels_name_the_same_arguments(kernel: conv_launch.Kernel) -> None:
    by_name = {argument.name: argument for argument in kernel.contract.arguments}
    assert {tensor.name for tensor in kernel.tensors} == {*by_name}
    for tensor in kernel.tensors:
        assert len(tensor.stride_dims) == len(by_name[tensor.name].dims) - 1


# ---- warming up ----

ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "channels": ({"channels": 0}, "channels is 0; expected a whole number of at least 1"),
    "channels, no number": ({"channels": 64.0}, r"channels is 64\.0"),
    "width": ({"width": 5}, "weight has width 5"),
    "batch": ({"batches": [8, 0]}, "a batch is 0"),
    "rows": ({"batches": [70_000]}, "has 70000 rows"),
    "num_tokens": ({"num_tokens": 65}, "a window is 1 to 64 tokens"),
    "dtype": ({"dtype": torch.float64}, "x is float64"),
    "ring": ({"ring_dtype": torch.float16}, "ring is fp16; expected bf16 or fp32"),
    "weight": ({"weight_dtype": torch.float16}, "weight is fp16; expected bf16 or fp32"),
    "index": ({"index_dtype": torch.int16}, "slot_index is int16; expected i32 or i64"),
    "activation": ({"activation": "relu"}, "activation is 'relu'"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_warm_up_of_what_is_not_legal_is_refused(name: str) -> None:
    changes, message = ILLEGAL[name]
    given: dict[str, Any] = {"channels": 64, "width": 4, "batches": [8]} | changes
    with pytest.raises(ArgumentError, match=message):
        warmup_conv(**given)


def test_a_warm_up_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no CUDA device to warm up"):
        warmup_conv(64, 4, [8])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_warm_up_compiles_what_calls_will_ask_for(
    dtypes: str, has_bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernel, constants, dtypes and alignment, without a GPU: what would be compiled is recorded."""
    asked: list[Any] = []

    def record(*arguments: Any) -> Any:
        asked.append(arguments)
        return lambda *ignored: None

    monkeypatch.setattr(conv_launch, "_launch_of", record)
    monkeypatch.setattr(
        conv_launch, "tile_for", lambda spec, batch, index: default_tile(batch, spec.token_block)
    )
    monkeypatch.setattr(launch, "_raw_stream", int)
    monkeypatch.setattr(conv, "cuda_index", lambda device: -1)
    x, ring, weight = (TORCH_DTYPES[name] for name in DTYPES[dtypes])
    for channels, rows, num_tokens in ((64, 2, 1), (24, 3, 3), (1024, 600, 2)):
        del asked[:]
        count = warmup_conv(
            channels, 3, [rows], num_tokens=num_tokens, packed=packed, dtype=x, ring_dtype=ring,
            weight_dtype=weight, has_bias=has_bias, index_dtype=torch.int64,
        )  # fmt: skip
        warmed = {*asked}
        assert len(warmed) == count == 2
        del asked[:]
        cache = torch.zeros(rows, 8, channels, dtype=ring)
        cursor, slots = torch.zeros(rows, dtype=I32), torch.arange(rows)
        inputs = torch.zeros(rows * num_tokens, channels, dtype=x)
        bias = torch.zeros(channels, dtype=weight) if has_bias else None
        starts = torch.arange(rows + 1, dtype=I32) * num_tokens if packed else None
        tensors = (
            inputs, torch.zeros(channels, 3, dtype=weight), bias, cache, cursor, cursor, slots, starts,
            torch.empty_like(inputs),
        )  # fmt: skip
        signature = conv.check_conv_step(CONV_STEP, tensors, (3, num_tokens, True))
        conv_launch.prepare(signature, -1).launch(tensors, -1)
        history = torch.zeros(rows, 2, channels, dtype=x)
        conv_launch.launch_conv_seed(history, cache, cursor, slots, -1)
        assert {*asked} == warmed
