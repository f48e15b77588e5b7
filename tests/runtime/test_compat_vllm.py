"""vLLM's functions for one token a row, against recurrences in fp64 and the memory they may write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ArgumentError
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.compat_scenes import (
    BF16,
    F16,
    F32,
    GROUPS,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    Mamba2,
    parameters,
    softplus,
)
from tests.runtime.vllm_decoding import (
    GDN,
    OUTPUT_ONLY,
    ROWS,
    SLOTS,
    STATE_AND_OUTPUT,
    Decoding,
    GdnDecoding,
    Refusal,
)


@pytest.mark.parametrize("function", [OUTPUT_ONLY, STATE_AND_OUTPUT])
@pytest.mark.parametrize(
    ("state_dtype", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, BF16), (F32, F16)], ids=str
)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_mamba2_decodes_as_the_recurrence(
    function: Any, state_dtype: torch.dtype, dtype: torch.dtype, length: int
) -> None:
    decoding = Decoding(length, state_dtype, dtype)
    flushed = sum(decoding.step(function, decoding.draw(null=0), null=0) for _ in range(12))
    assert flushed > 4


@pytest.mark.parametrize("null", [0, -1, 3])
@pytest.mark.parametrize("columns", [False, True], ids=["row", "columns"])
def test_mamba2_padding_and_indices(null: int, columns: bool) -> None:
    decoding = Decoding(4, seed=1)
    for _ in range(10):
        decoding.step(OUTPUT_ONLY, decoding.draw(null), null, columns)


def test_mamba2_rows_are_slots_without_indices() -> None:
    decoding = Decoding(4, seed=2)
    for _ in range(9):
        decoding.step(STATE_AND_OUTPUT, list(range(ROWS)), None)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_mamba2_skip_with_a_value_for_every_element(dtype: torch.dtype) -> None:
    decoding = Decoding(4, F32, dtype, tied_d=False, seed=3)
    for _ in range(9):
        decoding.step(
            OUTPUT_ONLY, decoding.draw(null=0), null=0, bc_pre=torch.full((ROWS, GROUPS, 4), torch.nan)
        )


def test_mamba2_a_batch_of_padding_touches_nothing() -> None:
    decoding = Decoding(4)
    decoding.step(OUTPUT_ONLY, [0, -1, 0], null=0)
    assert not sum(decoding.filled)


def test_mamba2_of_one_head() -> None:
    """State (slots, head_dim, state_size): inputs have no head dimension, caches have."""
    g = torch.Generator().manual_seed(0)
    state = torch.randn(3, HEAD_DIM, STATE_SIZE, generator=g)
    rate, bias, D = -torch.rand(1, generator=g) - 1, torch.randn(1, generator=g), torch.randn(1, generator=g)
    sequences = [Mamba2(one[None], rate, D) for one in state.clone()]
    caches: dict[str, Any] = {
        "x_cache": torch.zeros(3, 1, 2, HEAD_DIM),
        "B_cache": torch.zeros(3, 1, 2, STATE_SIZE),
    }
    caches["dt_cache"] = torch.zeros(3, 1, 2)
    for step in range(5):
        caches["write_pos"] = torch.full((3,), step % 2, dtype=torch.int32)
        caches["is_flush"] = caches["write_pos"] == 1
        x, dt = torch.randn(3, HEAD_DIM, generator=g), torch.randn(3, 1, generator=g)
        B, C = torch.randn(2, 3, STATE_SIZE, generator=g)
        out = torch.empty(3, HEAD_DIM)
        done = OUTPUT_ONLY(
            state, x, dt.expand(-1, HEAD_DIM), rate[:, None].expand(HEAD_DIM, STATE_SIZE), B, C,
            D.expand(HEAD_DIM), bias.expand(HEAD_DIM), dt_softplus=True, max_cache_len=2, out=out, **caches,
        )  # fmt: skip
        assert done.shape == out.shape
        for row, sequence in enumerate(sequences):
            y = sequence.token(x[row : row + 1], softplus(dt[row] + bias), B[row : row + 1], C[row : row + 1])
            assert relative_rms(done[row], y[0]) < 2e-6


def test_mamba2_allocates_out_if_it_is_left_out() -> None:
    decoding = Decoding(4)
    given: dict[str, Any] = decoding.inputs(2)
    out = OUTPUT_ONLY(
        decoding.state.view, **given, dt_softplus=True, **decoding.caches(), max_cache_len=4,
        write_pos=torch.zeros(2, dtype=torch.int32), is_flush=torch.zeros(2, dtype=torch.int8),
        state_batch_indices=torch.tensor([0, 2]),
    )  # fmt: skip
    assert out.shape == (2, HEADS, HEAD_DIM)
    assert not out[0].any()
    assert out[1].all()


def test_mamba2_the_call_that_refusals_change_is_legal() -> None:
    Refusal().call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"enable_stochastic_rounding": True},
            "enable_stochastic_rounding is True, which is not served here",
        ),
        ({"x_cache": None}, "x_cache is None"),
        ({"write_pos": None}, "write_pos is None"),
        ({"is_flush": None}, "is_flush is None"),
        ({"max_cache_len": 5}, r"x_cache has shape \(7, 4, 4, 8\); expected \(7, 4, 5, 8\)"),
        ({"dt": torch.zeros(2, HEADS, HEAD_DIM)}, "dt has a value for every element"),
        ({"A": -torch.ones(HEADS, HEAD_DIM, STATE_SIZE)}, "A has a value for every element"),
        ({"dt_bias": torch.zeros(HEADS, HEAD_DIM)}, "dt_bias has a value for every element"),
        ({"out": torch.empty(3, HEADS, HEAD_DIM)}, r"out has shape \(3, 4, 8\)"),
        ({"D": torch.zeros(HEADS)}, r"D has shape \(4,\); expected \(4, 8\)"),
        ({"z": torch.zeros(2, HEADS)}, r"z has shape \(2, 4\); expected \(2, 4, 8\)"),
        ({"write_pos": torch.tensor([0, 3], dtype=torch.int32)}, "row 1 has write_pos 3 of 4 and does not"),
        ({"state_batch_indices": torch.tensor([1, 7])}, "names slot 7, but there are 7 slots"),
        ({"dt_cache": torch.zeros(SLOTS, HEADS, 4, dtype=BF16)}, "ring_decay is bf16"),
    ],
)
def test_mamba2_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Refusal().call(**changes)


def test_gdn_refuses_how_to_launch_and_what_does_not_fit() -> None:
    scene = GdnDecoding(4)
    for name in ("block_v", "num_warps", "num_stages", "nk"):
        with pytest.raises(ArgumentError, match=f"{name} is 1, which is not served here"):
            scene.step([1, 2], (), **{name: 1})
    with pytest.raises(ArgumentError, match="mixed_qkv has shape"):
        scene.step([1, 2], mixed_qkv=torch.zeros(2, 95))


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize(("state_dtype", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)
def test_gdn_decodes_as_the_recurrence(length: int, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    decoding = GdnDecoding(length, state_dtype, dtype)
    assert sum(decoding.step(decoding.draw()) for _ in range(12)) > 4


@pytest.mark.parametrize("normalise", [False, True])
def test_gdn_with_a_scale_of_its_own(normalise: bool) -> None:
    decoding = GdnDecoding(4, normalise=normalise, scale=0.7)
    for _ in range(6):
        decoding.step(decoding.draw())


def test_gdn_out_without_a_token_dimension() -> None:
    decoding = GdnDecoding(4)
    for _ in range(6):
        decoding.step([1, 0], (2, HEADS, HEAD_DIM))


def test_signatures_are_theirs() -> None:
    """As they stand in vllm-project/vllm and, for the rest, in Johnny-Liou/ReplaySSM."""
    shared = ["state", "x", "dt", "A", "B", "C", "D=None", "dt_bias=None", "z=None", "dt_softplus=False"]
    shared += ["x_cache=None", "dt_cache=None", "B_cache=None"]
    rest = ["write_pos=None", "is_flush=None", "max_cache_len=16", "state_batch_indices=None"]
    rest += ["null_block_id=0", "out=None"]
    rounding = ["enable_stochastic_rounding=False", "cache_philox_rounds=0"]
    assert parameters(OUTPUT_ONLY) == [*shared, "bc_pre=None", *rest, *rounding]
    assert parameters(STATE_AND_OUTPUT) == [*shared, *rest]
    assert parameters(GDN) == [
        "mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "d_cache", "k_cache", "g_cache",
        "out", "ssm_state_indices", "write_pos", "use_qk_l2norm_in_kernel=False", "block_v=None",
        "num_warps=None", "num_stages=None", "nk=None",
    ]  # fmt: skip
