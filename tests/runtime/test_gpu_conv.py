"""The convolution's kernels on a GPU: bf16, graphs, compilations, large pools, torch.compile.

Tests with a device run on CPUs too, through the eager ops, so that they are known to be right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import commit, compiled, conv_seed, conv_step, reset, warmup, warmup_conv
from tests.runtime import conv_scenes
from tests.runtime.calls import captured, same_bits
from tests.runtime.conv_scenes import Scene
from tests.specs import P64_BF16

WINDOW, WIDTH = 16, 4


def random_call(
    rows: int,
    device: str,
    channels: int = 1152,
    num_tokens: int = 1,
    slots: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Keyword arguments of a legal call on contiguous memory; rows lie in shuffled slots."""
    g = torch.Generator(device).manual_seed(rows)
    slots = rows if slots is None else slots
    capacity = WINDOW + num_tokens + WIDTH - 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    def integers(end: int) -> torch.Tensor:
        return torch.randint(0, end, (slots,), generator=g, device=device, dtype=torch.int32)

    return {
        "x": normal(rows * num_tokens, channels),
        "weight": normal(channels, WIDTH),
        "bias": normal(channels),
        "ring": normal(slots, capacity, channels),
        "ring_start": integers(capacity),
        "ring_len": integers(WINDOW + 1),
        "slot_index": torch.randperm(slots, generator=g, device=device)[:rows].int(),
        "window": WINDOW,
        "num_tokens": num_tokens,
    }


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(
    ("packed", "num_tokens", "channels"), [(False, 1, 20), (False, 4, 160), (True, 5, 300)]
)
@pytest.mark.parametrize("dtypes", [("bf16",) * 3, ("bf16", "fp32", "fp32"), ("fp16",) * 3, ("fp32",) * 3])
def test_random_accepts(
    device: str, dtypes: tuple[str, str, str], packed: bool, num_tokens: int, channels: int, width: int
) -> None:
    """Aligned and not: a gap of 16 elements between tokens keeps what channels allow."""
    activation, ring, weight = dtypes
    scene = Scene(
        activation_dtype=activation, ring_dtype=ring, weight_dtype=weight, width=width, channels=channels,
        packed=packed, num_tokens=num_tokens, window=5, steps=25, recycle=0.02, device=device,
    )  # fmt: skip
    for gap in (3, 16):
        met = conv_scenes.run(replace(scene, gap=gap))
        assert met["rejected"]
        assert met["flushed"]


@pytest.mark.parametrize("rows", [1, 33, 700])
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_rows_of_every_tile_are_those_of_the_cpu(device: str, num_tokens: int, rows: int) -> None:
    given = random_call(rows, device, num_tokens=num_tokens)
    host: dict[str, Any] = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    y = conv_step(**given)
    torch.testing.assert_close(y.cpu(), conv_step(**host), rtol=8e-3, atol=8e-3)
    assert same_bits(given["ring"].cpu(), host["ring"])


def test_launches_are_equal_bit_by_bit(device: str) -> None:
    """Before its commit a call may be repeated: twenty launches from the same memory."""
    given = random_call(512, device, num_tokens=4)
    first = conv_step(**given)
    ring = given["ring"].clone()
    for _ in range(19):
        assert same_bits(conv_step(**given, out=torch.full_like(first, float("nan"))), first)
    assert same_bits(given["ring"], ring)


def test_graph_replays_any_number_of_live_rows(device: str, forbid_compiling: Callable[[], None]) -> None:
    """Captured at 64 rows; rows beyond the live ones keep stale inputs, and stale slots where empty."""
    rows, num_tokens = (64, 3) if device == "cuda" else (8, 3)
    given = random_call(rows, device, num_tokens=num_tokens, slots=rows + 2)
    query_start = torch.arange(rows + 1, device=device, dtype=torch.int32) * num_tokens
    out = torch.empty_like(given["x"])
    options = given | {"query_start": query_start, "out": out, "null_slot": rows + 1}
    indices = given["slot_index"].clamp(max=rows)
    # No slot twice: what the clamp moved is padding.
    indices[given["slot_index"] > rows] = -1
    accepted = torch.ones(rows, dtype=torch.int32, device=device)
    cursors = {name: given[name] for name in ("ring_start", "ring_len")}
    held = {name: given[name].clone() for name in ("ring", *cursors)}

    def body(caches: dict[str, Any], y: torch.Tensor) -> None:
        conv_step(**options | caches | {"out": y})
        commit(
            accepted, ring_start=caches["ring_start"], ring_len=caches["ring_len"],
            slot_index=given["slot_index"], window=WINDOW, num_tokens=num_tokens,
            capacity=caches["ring"].shape[1], query_start=query_start, null_slot=rows + 1,
        )  # fmt: skip

    mine = {name: given[name] for name in held}
    if device == "cuda":
        warmup(P64_BF16, [1])  # the cursor ops of the group
        assert warmup_conv(1152, WIDTH, [rows], num_tokens=num_tokens, packed=True, has_bias=True) == 2
    forbid_compiling()
    replay = captured(device, lambda: body(mine, out))
    for live in (1, 7, rows - 1, rows):
        other = {name: tensor.clone() for name, tensor in held.items()}
        for name, tensor in held.items():
            given[name].copy_(tensor)
        # Rows beyond the live ones have no tokens; every other one keeps its slot.
        given["slot_index"].copy_(indices)
        given["slot_index"][live::2] = -1
        counts = torch.where(torch.arange(rows) < live, num_tokens, 0)
        query_start[1:] = counts.cumsum(0).int().to(device)
        out.fill_(float("nan"))
        replay()
        expected = torch.full_like(out, float("nan"))
        body(other, expected)
        assert same_bits(out, expected)
        assert bool(out[: live * num_tokens].isfinite().all())
        assert not bool(out[live * num_tokens :].any())
        for name, tensor in other.items():
            assert same_bits(given[name], tensor), name
        for name in cursors:
            moved = (given[name] != held[name]).nonzero()[:, 0].tolist()
            assert set(moved) <= set(indices[:live].tolist()), name
        touched = (given["ring"] != held["ring"]).any(2).any(1).nonzero()[:, 0].tolist()
        assert set(touched) <= set(indices[:live].tolist())
        assert touched or indices[:live].max() < 0


def test_empty_rows_keep_stale_slots(device: str) -> None:
    """A row without tokens is padding, whatever its slot: it shares one with a live row here."""
    given = random_call(4, device, num_tokens=2)
    given["slot_index"][3] = given["slot_index"][0]
    query_start = torch.tensor([0, 2, 3, 5, 5], dtype=torch.int32, device=device)
    given["x"][5:] = float("nan")
    before = given["ring"].clone()
    alone: dict[str, Any] = {**given, "ring": before.clone(), "slot_index": given["slot_index"][:3]}
    y = conv_step(**given, query_start=query_start)
    assert bool(y[:5].isfinite().all())
    assert not bool(y[5:].any())
    assert same_bits(conv_step(**alone, query_start=query_start[:4].contiguous()), y)
    assert same_bits(given["ring"], alone["ring"])


def test_pool_layouts_compile_nothing_again(device: str, forbid_compiling: Callable[[], None]) -> None:
    """One compilation for what is aligned, one for the rest, whatever the strides, slots and capacity."""
    rows, channels = 7, 1152
    given = random_call(rows, device, channels)
    expected = conv_step(**{**given, "ring": given["ring"].clone()})

    def outputs(slots: int, gap: int, spare: int) -> torch.Tensor:
        held = given["ring"]
        capacity = held.shape[1] + spare
        pool = torch.full((slots, capacity, channels + gap), float("nan"), dtype=held.dtype, device=device)[
            ..., :channels
        ]
        # In a longer ring the same inputs lie from position 0 on.
        order = torch.arange(held.shape[1], device=device) + given["ring_start"][:, None] - WIDTH
        source = (order % held.shape[1]).long()[:, :, None].expand_as(held)
        pool[slots - rows :, : held.shape[1]] = held.gather(1, source)
        wide = torch.empty(rows, channels + gap, dtype=held.dtype, device=device)
        wide[:, :channels] = given["x"]
        start = torch.full((slots,), WIDTH, dtype=torch.int32, device=device)
        length = torch.zeros_like(start)
        length[slots - rows :] = given["ring_len"]
        changes = {"ring": pool, "ring_start": start, "ring_len": length, "x": wide[:, :channels]}
        y = conv_step(**given | changes | {"slot_index": given["slot_index"] + (slots - rows)})
        assert bool(pool[: slots - rows].isnan().all())
        return y

    # A ring that is read from position 4 on holds what is needed unless it would have wrapped.
    assert same_bits(outputs(9, 3, WINDOW), expected)
    known = compiled.compilations
    forbid_compiling()
    for slots in (8, 40, 200):
        for gap in (0, 3, 16, 128):
            assert same_bits(outputs(slots, gap, WINDOW + gap % 5), expected)
    assert compiled.compilations == known


@pytest.mark.gpu
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ring_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_warm_up_compiles_everything(
    num_tokens: int, ring_dtype: torch.dtype, aligned: bool, forbid_compiling: Callable[[], None]
) -> None:
    """Both ops in a capture, at every batch that was named, and nothing is compiled any more."""
    batches, channels = (1, 33, 700), 1152
    warmup_conv(
        channels, WIDTH, batches, num_tokens=num_tokens, ring_dtype=ring_dtype, has_bias=True, aligned=aligned
    )
    known = compiled.compilations
    forbid_compiling()
    for rows in batches:
        given = random_call(rows, "cuda", channels, num_tokens=num_tokens)
        given["ring"] = given["ring"].to(ring_dtype)
        history = torch.randn(rows, WIDTH - 1, channels, device="cuda").bfloat16()
        if not aligned:
            given["x"], history = shifted(given["x"]), shifted(history)
        out = torch.empty_like(given["x"], memory_format=torch.contiguous_format)
        ring, expected = given["ring"].clone(), given["ring"].clone()

        def body(given: dict[str, Any], ring: Any, out: Any, history: Any) -> None:
            conv_seed(history, ring=ring, ring_start=given["ring_start"], slots=given["slot_index"])
            conv_step(**given | {"ring": ring, "out": out})

        replay = captured("cuda", functools.partial(body, given, ring, out, history))
        replay()
        y = torch.full_like(out, float("nan"))
        body(given, expected, y, history)
        assert same_bits(out, y)
        assert same_bits(ring, expected)
        assert bool(y.isfinite().all())
    assert compiled.compilations == known


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at an address that is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.gpu
def test_batches_share_few_compilations() -> None:
    known = compiled.compilations
    for rows in (1, 2, 5, 64, 300, 1000, 3000):
        for channels in (1024, 1152, 8192):
            conv_step(**random_call(rows, "cuda", channels, num_tokens=2, dtype=torch.float16))
    assert 1 <= compiled.compilations - known <= 3


def test_offsets_beyond_32_bits(device: str) -> None:
    """The last slots of a pool above 2**31 elements; all others keep their bits."""
    rows, channels = 6, 8192
    small = random_call(rows, device, channels)
    capacity = small["ring"].shape[1]
    slots = 2**31 // (capacity * channels) + 8 if device == "cuda" else 20
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("less than 10 GiB of GPU memory are free")
    ring = torch.zeros(slots, capacity, channels, dtype=torch.bfloat16, device=device)
    cursors = {n: torch.zeros(slots, dtype=torch.int32, device=device) for n in ("ring_start", "ring_len")}
    large = small | cursors | {"ring": ring, "slot_index": small["slot_index"] + (slots - rows)}
    for name in ("ring", *cursors):
        large[name][slots - rows :] = small[name]
    assert same_bits(conv_step(**large), conv_step(**small))
    assert same_bits(ring[slots - rows :], small["ring"])
    for part in ring[: slots - rows].split(1024):
        assert not bool(part.count_nonzero())


@pytest.mark.filterwarnings("ignore")  # Of the compiler, about its own configuration.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph(device: str, backend: str) -> None:
    if device == "cpu" and backend == "inductor":
        pytest.skip("would compile C++ to no end: the ops are opaque to it")
    from torch._inductor import config as inductor_config  # costs seconds

    def whole(given: dict[str, Any]) -> torch.Tensor:
        cursors = {name: given[name] for name in ("ring_start", "ring_len")}
        reset(given["slot_index"], **cursors)
        conv_seed(
            given["x"][:, None].repeat(1, WIDTH - 1, 1), ring=given["ring"], slots=given["slot_index"],
            ring_start=given["ring_start"],
        )  # fmt: skip
        y = conv_step(**given) * 2
        commit(
            torch.ones_like(given["slot_index"]), **cursors, slot_index=given["slot_index"], window=WINDOW,
            capacity=given["ring"].shape[1],
        )  # fmt: skip
        return y + conv_step(**given)

    given, eager = random_call(7, device), random_call(7, device)
    expected = whole(eager)
    torch._dynamo.reset()
    with inductor_config.patch(compile_threads=1):
        y = torch.compile(whole, fullgraph=True, backend=backend)(given)
    torch.testing.assert_close(y, expected, rtol=8e-3, atol=8e-3)
    for name in ("ring", "ring_start", "ring_len"):
        assert same_bits(given[name], eager[name]), name
