"""FlashInfer's functions, against recurrences in fp64 and the memory they may write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ArgumentError, SpecError
from replayssm_tune.runtime.compat.flashinfer import checkpointing_ssu, replayssm_materialize
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import same_bits
from tests.runtime.compat_scenes import (
    BF16,
    F16,
    F32,
    GROUPS,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    UNTOUCHED,
    Mamba2,
    Pool,
    bound,
    parameters,
    softplus,
)
from tests.runtime.draws import Draws

SLOTS, ROWS = 8, 5


class Checkpointing(Draws):
    """Sequences that decode by FlashInfer's function, one fp64 recurrence each; cursors are the host's."""

    function: Any = staticmethod(checkpointing_ssu)

    def __init__(
        self, window: int = 5, num_tokens: int = 3, state_dtype: torch.dtype = F32, dtype: torch.dtype = F32
    ) -> None:
        self.window, self.num_tokens = window, num_tokens
        self.capacity = window + num_tokens
        self.state_dtype, self.dtype = state_dtype, dtype
        self.g = torch.Generator().manual_seed(0)
        first = self.normal(SLOTS, HEADS, HEAD_DIM, STATE_SIZE).to(state_dtype)
        self.pools = {
            "state": Pool(*first.shape, dtype=state_dtype, fill=first),
            "x": Pool(SLOTS, HEADS, self.capacity, HEAD_DIM, dtype=dtype),
            "B": Pool(SLOTS, GROUPS, self.capacity, STATE_SIZE, dtype=dtype),
            "dt": Pool(SLOTS, HEADS, self.capacity, dtype=F32),
        }
        self.rate, self.bias = -torch.rand(HEADS, generator=self.g) - 1.0, self.normal(HEADS) - 1.0
        self.D = self.normal(HEADS)
        self.sequences = [Mamba2(state, self.rate, self.D) for state in first]
        self.start = torch.randint(0, self.capacity, (SLOTS,), generator=self.g, dtype=torch.int32)
        self.length = torch.zeros(SLOTS, dtype=torch.int32)
        self.flushed = self.early = 0

    def inputs(self, *tokens: int) -> dict[str, Any]:
        """Of so many rows and tokens."""
        wide = self.normal(*tokens, HEADS * HEAD_DIM + 2 * GROUPS * STATE_SIZE + 8).to(self.dtype)
        keys, inner = GROUPS * STATE_SIZE, HEADS * HEAD_DIM
        x, B, C, _ = wide.split([inner, keys, keys, 8], -1)
        return {
            "x": x.unflatten(-1, (HEADS, HEAD_DIM)),
            "dt": self.normal(*tokens, HEADS).to(self.dtype)[..., None].expand(-1, -1, -1, HEAD_DIM),
            "A": self.rate[:, None, None].expand(-1, HEAD_DIM, STATE_SIZE),
            "B": B.unflatten(-1, (GROUPS, STATE_SIZE)),
            "C": C.unflatten(-1, (GROUPS, STATE_SIZE)),
            "D": self.D[:, None].expand(-1, HEAD_DIM),
            "z": self.normal(*tokens, HEADS, HEAD_DIM).to(self.dtype),
            "dt_bias": self.bias[:, None].expand(-1, HEAD_DIM),
        }

    def call(self, out: Tensor, inputs: dict[str, Any], **more: Any) -> None:
        caches = (self.pools[name].view for name in ("state", "x", "B", "dt"))
        inputs = {"dt_softplus": True, "out": out} | inputs | more
        done = self.function(*caches, self.start, self.length, **inputs)
        assert done is out

    def step(self, slots: list[int] | None, padding: int = -1, varying: bool = False) -> None:
        """One step of rows in slots (None: in those of their own number), of which ``padding`` are none."""
        named = list(range(ROWS)) if slots is None else slots
        rows = len(named)
        counts = [self.between(0, self.num_tokens) if varying else self.num_tokens for _ in named]
        bounds = torch.tensor([0, *counts]).cumsum(0).int()
        shape = (1, int(bounds[-1]) + 2) if varying else (rows, self.num_tokens)
        inputs, out = self.inputs(*shape), torch.full((*shape, HEADS, HEAD_DIM), UNTOUCHED, dtype=self.dtype)
        expected = {name: pool.copied() for name, pool in self.pools.items()}
        cursors = self.start.clone(), self.length.clone()
        more: dict[str, Any] = {"cu_seqlens": bounds, "max_seqlen": self.num_tokens} if varying else {}
        if slots is not None:
            more |= {"state_batch_indices": torch.tensor(slots, dtype=torch.int64), "pad_slot_id": padding}
        self.call(out, inputs, **more)
        assert torch.equal(self.start, cursors[0])
        assert torch.equal(self.length, cursors[1])

        per_token = {name: inputs[name].flatten(0, 1) for name in ("x", "dt", "B", "C", "z")}
        want = torch.full_like(out, UNTOUCHED, dtype=torch.float64).flatten(0, 1)
        for row, (slot, count) in enumerate(zip(named, counts, strict=True)):
            if slot not in (padding, -1) and count:
                begin = int(bounds[row])
                tokens = [{n: v[begin + i] for n, v in per_token.items()} for i in range(count)]
                want[begin : begin + count] = self.row(slot, tokens, expected)
        live = (want != UNTOUCHED).flatten(1).any(1)
        assert bool((out.flatten(0, 1)[~live] == UNTOUCHED).all())
        if bool(live.any()):
            error = relative_rms(out.flatten(0, 1)[live], want[live])
            assert error < bound(self.state_dtype, self.dtype)
        for name, pool in self.pools.items():
            assert same_bits(pool.memory, expected[name].memory), f"memory of {name}"

    def row(self, slot: int, tokens: list[dict[str, Tensor]], expected: dict[str, Pool]) -> Tensor:
        """Outputs that a row should have; memory and cursors are taken on if they are right."""
        sequence, length, start = self.sequences[slot], int(self.length[slot]), int(self.start[slot])
        flushes = length + len(tokens) > self.window
        if flushes:
            got = self.pools["state"].view[slot]
            assert relative_rms(got, sequence.state) < bound(self.state_dtype, self.dtype)
            expected["state"].view[slot] = got
        self.flushed += flushes
        self.early += not flushes and length + self.num_tokens > self.window
        kept, outputs = self.between(0, len(tokens)), []
        after_kept = sequence.state
        for i, token in enumerate(tokens):
            delta = softplus(token["dt"][:, 0].double() + self.bias)
            outputs.append(sequence.token(token["x"], delta, token["B"], token["C"], token["z"]))
            after_kept = sequence.state if i + 1 == kept else after_kept
            place = (start + length + i) % self.capacity
            got = self.pools["dt"].view[slot, :, place]
            torch.testing.assert_close(got.double(), delta, rtol=1e-6, atol=1e-9)
            expected["dt"].view[slot, :, place] = got
            expected["x"].view[slot, :, place] = token["x"]
            expected["B"].view[slot, :, place] = token["B"]
        sequence.state = after_kept
        # As FlashInfer's callers do it.
        self.start[slot] = (start + length) % self.capacity if flushes else start
        self.length[slot] = kept if flushes else length + kept
        return torch.stack(outputs)

    def draw(self, padding: int) -> list[int]:
        free = [slot for slot in range(SLOTS) if slot != padding]
        chosen = [free[i] for i in torch.randperm(len(free), generator=self.g)[:ROWS].tolist()]
        chosen[self.between(0, ROWS - 1)] = padding
        return chosen


shapes = pytest.mark.parametrize(("window", "num_tokens"), [(5, 3), (4, 4), (2, 1), (12, 5)])


@shapes
@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize(("state_dtype", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
def test_tokens_as_the_recurrence(
    window: int, num_tokens: int, varying: bool, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    scene = Checkpointing(window, num_tokens, state_dtype, dtype)
    for _ in range(24):
        scene.step(scene.draw(padding=-1), varying=varying)
    assert scene.flushed > 4
    assert (scene.early > 2) == (varying and num_tokens > 1)


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("padding", [0, 6])
def test_padding_names_any_slot(varying: bool, padding: int) -> None:
    scene = Checkpointing()
    for _ in range(10):
        scene.step(scene.draw(padding), padding, varying)


@pytest.mark.parametrize("varying", [False, True])
def test_rows_are_slots_without_indices(varying: bool) -> None:
    scene = Checkpointing()
    for _ in range(10):
        scene.step(None, varying=varying)


def test_batches_without_live_rows() -> None:
    scene = Checkpointing()
    scene.step([-1, -1])
    scene.step([-1, -1], varying=True)
    scene.step([], varying=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_scale": torch.ones(1)}, "state_scale is a tensor"),
        ({"rand_seed": torch.ones(1)}, "rand_seed is a tensor"),
        ({"d_split": 1}, "d_split is 1, which is not served here"),
        ({"cb_scaled": torch.ones(1)}, "cb_scaled is a tensor"),
        ({"cumAdt_vec": torch.ones(1)}, "cumAdt_vec is a tensor"),
        ({"cb_old": torch.ones(1)}, "cb_old is a tensor"),
        ({"precompute_heads_per_cta": 2}, "precompute_heads_per_cta is 2"),
        ({"algorithm": "monolith"}, "algorithm is 'monolith'"),
        ({"max_seqlen": 3}, "cu_seqlens and max_seqlen go together"),
        (
            {"cu_seqlens": torch.tensor([0, 1, 2]), "max_seqlen": 3},
            r"x has shape \(2, 3, 4, 8\); expected \(1, 3",
        ),
        ({"dt": torch.zeros(2, 3, HEADS, HEAD_DIM)}, "dt has a value for every element"),
        ({"D": torch.zeros(HEADS, HEAD_DIM)}, "D has a value for every element"),
        ({"A": -torch.ones(HEADS)}, r"A has shape \(4,\); expected \(4, 8, 16\)"),
        ({"state_batch_indices": torch.tensor([1, 8])}, "slot 8, but there are 8 slots"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    scene = Checkpointing()
    before = {name: pool.copied() for name, pool in scene.pools.items()}
    out = torch.full((2, 3, HEADS, HEAD_DIM), UNTOUCHED)
    with pytest.raises(ArgumentError, match=message):
        scene.call(out, scene.inputs(2, 3) | changes)
    assert bool((out == UNTOUCHED).all())
    for name, pool in scene.pools.items():
        assert same_bits(pool.memory, before[name].memory)


def test_a_launch_attribute_and_rounds_without_a_seed_are_taken() -> None:
    scene = Checkpointing()
    out = torch.empty(2, 3, HEADS, HEAD_DIM)
    scene.call(out, scene.inputs(2, 3), enable_pdl=True, philox_rounds=5)
    assert bool(out.isfinite().all())


def test_states_of_8_bits_and_windows_shorter_than_a_step_are_refused() -> None:
    scene = Checkpointing()
    given: dict[str, Any] = scene.inputs(2, 3)
    caches: list[Any] = [scene.pools[name].view for name in ("x", "B", "dt")]
    state = torch.zeros(SLOTS, HEADS, HEAD_DIM, STATE_SIZE, dtype=torch.int8)
    with pytest.raises(SpecError, match="state_dtype 'int8' is not one of fp32, bf16, fp16"):
        scene.function(
            state, *caches, scene.start, scene.length, **given, out=torch.empty(2, 3, HEADS, HEAD_DIM)
        )
    short = Checkpointing(window=2, num_tokens=3)
    with pytest.raises(SpecError, match="2 drafts make 3 tokens a step, beyond the window of 2"):
        short.call(torch.empty_like(given["x"]), given)


class Layers(Draws):
    """Caches of layers, by their addresses."""

    def __init__(self, dtype: torch.dtype = F32, layers: int = 2, slots: int = 6, capacity: int = 7) -> None:
        self.g = torch.Generator().manual_seed(0)
        self.dtype, self.capacity, self.slots = dtype, capacity, slots
        shapes: dict[str, tuple[int, ...]] = {
            "state": (HEADS, HEAD_DIM, STATE_SIZE),
            "x": (HEADS, capacity, HEAD_DIM),
        }
        shapes |= {"B": (GROUPS, capacity, STATE_SIZE), "dt": (HEADS, capacity)}
        self.pools: dict[str, list[Pool]] = {}
        for name, shape in shapes.items():
            of = F32 if name == "dt" else dtype
            fill = [self.normal(slots, *shape) for _ in range(layers)]
            fill = [value.abs() for value in fill] if name == "dt" else fill
            self.pools[name] = [Pool(slots, *shape, dtype=of, fill=value.to(of)) for value in fill]
        self.rates = [-torch.rand(HEADS, generator=self.g) - 0.5 for _ in range(layers)]

    def tables(self) -> list[Tensor]:
        listed = []
        for name in ("state", "x", "B", "dt"):
            views = [pool.view for pool in self.pools[name]]
            listed += [torch.tensor([view.data_ptr() for view in views])]
            listed += [torch.tensor([view.stride(0) for view in views])]
        nothing = torch.zeros(len(self.rates), dtype=torch.int64)
        return [*listed, torch.tensor([rate.data_ptr() for rate in self.rates]), nothing, nothing]

    def call(self, src: list[list[int]], dst: list[list[int]], *requests: list[int], **changes: Any) -> None:
        constants: dict[str, Any] = {
            "state_dtype": self.dtype, "input_dtype": self.dtype, "matrixA_dtype": F32, "dim": HEAD_DIM,
            "dstate": STATE_SIZE, "num_heads": HEADS, "heads_per_group": HEADS // GROUPS, "max_window": 5,
            "ring_buffer_len": self.capacity,
        }  # fmt: skip
        slots = (torch.tensor(value, dtype=torch.int32) for value in (src, dst))
        metadata = (torch.tensor(value, dtype=torch.int32) for value in requests)
        replayssm_materialize(*self.tables(), *slots, *metadata, **constants | changes)

    def fold(self, layer: int, slot: int, start: int, count: int) -> Tensor:
        sequence = Mamba2(self.pools["state"][layer].view[slot], self.rates[layer])
        x, B, dt = (self.pools[name][layer].view[slot] for name in ("x", "B", "dt"))
        for i in range(count):
            place = (start + i) % self.capacity
            sequence.token(x[:, place], dt[:, place], B[:, place], torch.zeros(GROUPS, STATE_SIZE))
        return sequence.state


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_states_after_a_prefix_in_all_layers(dtype: torch.dtype) -> None:
    """Requests 0 and 1 share a source, 3 copies; 4 is skipped by its count, 5 as it is not listed."""
    layers = Layers(dtype, slots=10)
    src, dst = [[0, 0, 1, 2, 1, 1], [4, 4, 5, 0, 1, 1]], [[3, 4, 5, 6, 7, 8], [6, 7, 8, 9, 2, 3]]
    src[1][2] = -1
    start, count = [5, 5, 2, 6, 1, 1], [3, 5, 4, 0, -1, 2]
    before = {name: [pool.copied() for pool in pools] for name, pools in layers.pools.items()}
    states = [
        [layers.fold(layer, src[layer][i], start[i], max(count[i], 0)) for i in range(6)]
        for layer in range(2)
    ]
    layers.call(src, dst, start, count, [3, 0, 2, 1, -1, 5])
    for layer in range(2):
        expected = before["state"][layer]
        for i in range(4):
            if src[layer][i] < 0:
                continue
            got = layers.pools["state"][layer].view[dst[layer][i]]
            assert relative_rms(got, states[layer][i]) < bound(dtype)
            expected.view[dst[layer][i]] = got if count[i] else expected.view[src[layer][i]].clone()
    for name, pools in layers.pools.items():
        for layer, pool in enumerate(pools):
            assert same_bits(pool.memory, before[name][layer].memory), f"memory of {name} in layer {layer}"


def test_slots_are_exchanged_between_layers_and_padding_names_any() -> None:
    layers = Layers()
    states = layers.fold(0, 1, 6, 3), layers.fold(1, 2, 6, 3)
    untouched = layers.pools["state"][1].view[0].clone()
    layers.call([[1, 0], [2, 1]], [[2, 3], [1, 0]], [6, 0], [3, 3], [0, 1], pad_slot_id=0)
    assert relative_rms(layers.pools["state"][0].view[2], states[0]) < 2e-6
    assert relative_rms(layers.pools["state"][1].view[1], states[1]) < 2e-6
    assert torch.equal(layers.pools["state"][1].view[0], untouched)


def test_a_slot_may_be_folded_into_itself() -> None:
    layers = Layers(layers=1)
    state = layers.fold(0, 2, 3, 4)
    layers.call([[2]], [[2]], [3], [4], [0])
    assert relative_rms(layers.pools["state"][0].view[2], state) < 2e-6


@pytest.mark.parametrize("active", [[-1, 0], [-1, -1]])
def test_nothing_is_done_for_requests_that_are_not_listed(active: list[int]) -> None:
    layers = Layers()
    before = layers.pools["state"][0].copied()
    layers.call([[0, 1], [0, 1]], [[2, 3], [2, 3]], [0, 0], [3, 3], active)
    assert same_bits(layers.pools["state"][0].memory, before.memory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rand_seed": torch.ones(1)}, "rand_seed is a tensor"),
        ({"philox_rounds": 10}, "philox_rounds is 10"),
        ({"state_dtype": torch.int8}, r"state_dtype is torch.int8, which is not served here"),
        ({"heads_per_group": 3}, "4 heads cannot share B in groups of 3"),
        ({"max_window": 7}, "room for 7 tokens"),
    ],
)
def test_materialize_refusals(changes: dict[str, Any], message: str) -> None:
    layers = Layers()
    with pytest.raises(ArgumentError, match=message):
        layers.call([[0], [0]], [[2], [2]], [0], [3], [0], **changes)


def test_materialize_measures_slots_and_tables() -> None:
    layers = Layers()
    with pytest.raises(ArgumentError, match=r"dst_slots has shape \(1, 1\); expected \(2, 1\)"):
        layers.call([[0], [0]], [[2]], [0], [3], [0])
    with pytest.raises(ArgumentError, match=r"ring_start has shape \(2,\); expected \(1,\)"):
        layers.call([[0], [0]], [[2], [2]], [0, 0], [3], [0])
    with pytest.raises(ArgumentError, match=r"addresses of state has shape \(2,\); expected \(1,\)"):
        layers.call([[0]], [[2]], [0], [3], [0])


def test_signatures_are_theirs() -> None:
    """As they stand in flashinfer-ai/flashinfer."""
    assert parameters(checkpointing_ssu) == [
        "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A",
        "B", "C", "out", "D=None", "z=None", "dt_bias=None", "dt_softplus=False", "state_batch_indices=None",
        "pad_slot_id=-1", "state_scale=None", "rand_seed=None", "philox_rounds=10", "d_split=None",
        "cu_seqlens=None", "max_seqlen=None", "enable_pdl=False", "cb_scaled=None", "cumAdt_vec=None",
        "cb_old=None", "precompute_heads_per_cta=0", "algorithm='auto'",
    ]  # fmt: skip
    assert parameters(replayssm_materialize) == [
        "state_ptrs", "state_slot_strides", "x_cache_ptrs", "x_cache_slot_strides", "B_cache_ptrs",
        "B_cache_slot_strides", "dt_cache_ptrs", "dt_cache_slot_strides", "A_ptrs", "state_scale_ptrs",
        "state_scale_slot_strides", "src_slots", "dst_slots", "ring_start", "replay_prefix_len",
        "active_request_indices", "*", "state_dtype", "input_dtype", "matrixA_dtype", "dim", "dstate",
        "num_heads", "heads_per_group", "max_window", "ring_buffer_len", "pad_slot_id=-1", "rand_seed=None",
        "philox_rounds=0",
    ]  # fmt: skip
