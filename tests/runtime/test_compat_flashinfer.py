"""FlashInfer's functions, against recurrences in fp64 and the memory they may write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ArgumentError, SpecError
from replayssm_tune.runtime.compat.flashinfer import checkpointing_ssu, replayssm_materialize
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import same_bits
from tests.runtime.compat_scenes import (
    BF16,
    F16,
    F32,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    UNTOUCHED,
    bound,
    parameters,
)
from tests.runtime.flashinfer_scenes import SLOTS, Checkpointing, Layers

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
