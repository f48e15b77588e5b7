"""Adapters in CUDA graphs: nothing waits for values, and a replayed graph does what a call on a CPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from replayssm_tune.runtime import ArgumentError
from replayssm_tune.runtime.compat import flashinfer, vllm
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import captured

ROWS, SLOTS, HEADS, GROUPS, HEAD_DIM, STATE_SIZE = 4, 6, 4, 2, 16, 32
WINDOW, TOKENS = 5, 3
"""Ring tokens, and most tokens of a row."""


def whole(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def over(value: Tensor, *sizes: int) -> Tensor:
    """Expanded behind its dimensions."""
    return value.view(*value.shape, *[1] * len(sizes)).expand(*value.shape, *sizes)


def mamba2_inputs(*tokens: int) -> dict[str, Any]:
    return {
        "x": torch.randn(*tokens, HEADS, HEAD_DIM),
        "dt": over(torch.randn(*tokens, HEADS), HEAD_DIM),
        "A": over(-torch.rand(HEADS) - 0.5, HEAD_DIM, STATE_SIZE),
        "B": torch.randn(*tokens, GROUPS, STATE_SIZE),
        "C": torch.randn(*tokens, GROUPS, STATE_SIZE),
        "D": over(torch.randn(HEADS), HEAD_DIM),
        "z": torch.randn(*tokens, HEADS, HEAD_DIM),
        "dt_bias": over(torch.randn(HEADS), HEAD_DIM),
        "dt_softplus": True,
        "out": torch.full((*tokens, HEADS, HEAD_DIM), 42.0),
    }


def gdn_inputs(tokens: int) -> dict[str, Any]:
    return {
        "mixed_qkv": torch.randn(tokens, 2 * GROUPS * STATE_SIZE + HEADS * HEAD_DIM),
        "a": torch.randn(tokens, HEADS),
        "b": torch.randn(tokens, HEADS),
        "A_log": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
        "scale": 0.3,
        "out": torch.full((tokens, HEADS, HEAD_DIM), 42.0),
    }


def caches(capacity: int, *names: str) -> dict[str, Tensor]:
    """State and rings, under these names, with something in all of them."""
    shapes = [(HEADS, HEAD_DIM, STATE_SIZE), (HEADS, capacity, HEAD_DIM), (GROUPS, capacity, STATE_SIZE)]
    given = [0.3 * torch.randn(SLOTS, *shape) for shape in shapes]
    return dict(zip(names, [*given, -torch.rand(SLOTS, HEADS, capacity)], strict=True))


def mamba2_caches(capacity: int, state: str = "state") -> dict[str, Tensor]:
    given = caches(capacity, state, "x_cache", "B_cache", "dt_cache")
    return given | {"dt_cache": -given["dt_cache"]}


def standard(**more: Any) -> dict[str, Any]:
    """One row flushes at the end of its ring, one before, one not; one is padding."""
    return mamba2_inputs(ROWS) | mamba2_caches(WINDOW) | more | {
        "write_pos": whole(4, 2, 3, 9), "is_flush": whole(1, 1, 0, 1, dtype=torch.int8),
        "max_cache_len": WINDOW, "state_batch_indices": whole(3, 1, 5, 0),
    }  # fmt: skip


def gdn_standard() -> dict[str, Any]:
    return gdn_inputs(ROWS) | caches(WINDOW, "initial_state", "d_cache", "k_cache", "g_cache") | {
        "ssm_state_indices": whole(3, 1, 5, -1), "write_pos": whole(4, 2, 3, 9),
    }  # fmt: skip


def cursors(start: str) -> dict[str, Any]:
    """Of slots 1 to 5 every other one folds in the next step."""
    return {
        "write_pos": whole(9, 5, 2, 4, 0, 3), start: whole(9, 7, 6, 0, 3, 5),
        "is_flush": whole(7, 1, 0, 1, 0, 1, dtype=torch.int8),
    }  # fmt: skip


PACKED = {"query_start_loc": whole(0, 3, 4, 4, 6), "max_cache_len": WINDOW + TOKENS, "max_spec_len": TOKENS}
"""Six tokens, of rows of 3, 1, 0 and 2."""


def drafts() -> dict[str, Any]:
    given = mamba2_inputs(7)
    x, B, C = (given.pop(name).flatten(1) for name in ("x", "B", "C"))
    dt = given.pop("dt")[..., 0]
    return cursors("post_conv_state_pos") | given | PACKED | {
        "state_checkpoint": torch.randn(SLOTS, HEADS, HEAD_DIM, STATE_SIZE),
        "post_conv_cache": torch.randn(SLOTS, 8, x.shape[1] + B.shape[1]),
        "dt_cache": torch.randn(SLOTS, HEADS, 8), "conv_out": torch.cat([x, B, C], 1),
        "dt_spec": dt, "state_batch_indices": whole(3, 2, 5, 0),
        "d_inner": HEADS * HEAD_DIM, "ngroups": GROUPS, "dstate": STATE_SIZE,
    }  # fmt: skip


def gdn_drafts() -> dict[str, Any]:
    rings = caches(8, "checkpoint_state", "d_cache", "k_cache", "g_cache")
    return cursors("cache_base") | rings | gdn_inputs(7) | PACKED | {"ssm_state_indices": whole(3, 2, 5, 0)}


def commits(start: str, accepted: str) -> dict[str, Any]:
    limits = {"max_cache_len": WINDOW + TOKENS, "max_spec_len": TOKENS}
    return cursors(start) | limits | {accepted: whole(2, 0, 3, 1), "state_batch_indices": whole(3, 2, 5, 0)}


def checkpointing(*tokens: int, **more: Any) -> dict[str, Any]:
    capacity = WINDOW + more.get("max_seqlen", tokens[1])
    return mamba2_inputs(*tokens) | mamba2_caches(capacity) | more | {
        "ring_start": whole(0, 5, 2, 4, 3, 1), "prev_num_accepted_tokens": whole(9, 5, 2, 4, 0, 3),
        "state_batch_indices": whole(3, 2, 5, -1),
    }  # fmt: skip


VARYING = {"cu_seqlens": whole(0, 1, 4, 6, 6), "max_seqlen": TOKENS}
"""Seven tokens; the first row flushes only with all the tokens it might have."""

CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "output only": (
        vllm.selective_state_update_replayssm_output_only,
        lambda: standard(bc_pre=torch.zeros(ROWS, GROUPS, WINDOW)),
    ),
    "state and output": (vllm.selective_state_update_replayssm_state_and_output, standard),
    "D of elements": (
        vllm.selective_state_update_replayssm_state_and_output,
        lambda: standard(D=torch.randn(HEADS, HEAD_DIM)),
    ),
    "gdn": (vllm.fused_recurrent_gated_delta_rule_replayssm, gdn_standard),
    "commit": (vllm.commit_replayssm_spec, lambda: commits("post_conv_state_pos", "num_accepted_tokens")),
    "commit gdn": (vllm.commit_gdn_replayssm_spec, lambda: commits("cache_base", "num_accepted")),
    "reset": (
        vllm.reset_replayssm_spec_cursors, lambda: commits("post_conv_state_pos", "first_decode_mask")
    ),
    "reset gdn": (vllm.reset_gdn_replayssm_spec_cursors, lambda: commits("cache_base", "do_reset")),
    "checkpointing, one token": (flashinfer.checkpointing_ssu, lambda: checkpointing(ROWS, 1)),
}  # fmt: skip
DRAFTS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "drafts": (vllm.selective_state_update_replayssm_spec, drafts),
    "gdn drafts": (vllm.gdn_replayssm_spec_decode, gdn_drafts),
    "checkpointing": (flashinfer.checkpointing_ssu, lambda: checkpointing(ROWS, TOKENS)),
    "checkpointing, rows that vary": (flashinfer.checkpointing_ssu, lambda: checkpointing(1, 7, **VARYING)),
}
ALL = CALLS | DRAFTS


def prepared(name: str, device: str = "cpu") -> tuple[Callable[[], None], dict[str, Any]]:
    """A call and its arguments; the same at every time."""
    function, arguments = ALL[name]
    torch.manual_seed(0)
    given = tree_map_only(Tensor, lambda value: moved(value, device), arguments())
    return lambda: function(**given), given


def moved(value: Tensor, device: str) -> Tensor:
    """A copy elsewhere that is expanded as it was."""
    base = value[tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())]
    return base.clone().to(device).expand(value.shape)


@pytest.mark.parametrize("name", ALL)
def test_nothing_waits_for_values(name: str) -> None:
    """Tensors without values: whatever asks for one raises, and so do shapes that depend on them."""
    function, arguments = ALL[name]
    mode = FakeTensorMode()
    given = tree_map_only(Tensor, mode.from_tensor, arguments())
    with mode:
        function(**given)
        with pytest.raises(DataDependentOutputException):
            bool(next(value for value in given.values() if isinstance(value, Tensor)).any())


@pytest.mark.parametrize("name", ALL)
def test_a_replayed_graph_does_what_a_call_on_a_cpu_does(device: str, renders: None, name: str) -> None:
    reference, expected = prepared(name)
    before = {key: value.clone() for key, value in expected.items() if isinstance(value, Tensor)}
    reference()
    warm, _ = prepared(name, device)
    warm()
    body, given = prepared(name, device)
    captured(device, body)()
    written = 0
    for key, value in before.items():
        got = given[key].cpu()
        if torch.equal(expected[key], value):
            assert torch.equal(got, value), key
        else:
            written += 1
            assert relative_rms(got, expected[key].double()) < 1e-5, key
    assert written > 1


@pytest.mark.gpu
def test_tables_of_addresses_are_not_read_in_a_capture() -> None:
    nothing = torch.zeros(1, dtype=torch.int64, device="cuda")
    slots, one = (
        torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    given: list[Any] = [nothing] * 11 + [slots, slots, one, one, one]

    def body() -> None:
        nothing.add_(1)  # for a graph that is not empty
        with pytest.raises(ArgumentError, match="a CUDA graph is being captured"):
            flashinfer.replayssm_materialize(
                *given, state_dtype=torch.float32, input_dtype=torch.float32, matrixA_dtype=torch.float32,
                dim=HEAD_DIM, dstate=STATE_SIZE, num_heads=1, heads_per_group=1, max_window=2,
                ring_buffer_len=3,
            )  # fmt: skip

    captured("cuda", body)


def test_states_at_addresses(device: str, renders: None) -> None:
    """Of memory of each device: what is written is what the same call on a CPU writes."""

    def folded(where: str) -> Tensor:
        torch.manual_seed(0)
        given = {name: value.to(where) for name, value in mamba2_caches(WINDOW + 1).items()}
        rates = (-torch.rand(HEADS)).to(where)
        tables: list[Tensor] = []
        for cache in (given["state"], given["x_cache"], given["B_cache"], given["dt_cache"]):
            tables += [whole(cache.data_ptr(), dtype=torch.int64), whole(cache.stride(0), dtype=torch.int64)]
        tables += [whole(value, dtype=torch.int64) for value in (rates.data_ptr(), 0, 0)]
        requests = (whole(1, 2)[None], whole(3, 5)[None], whole(4, 0), whole(5, 2), whole(1, 0))
        flashinfer.replayssm_materialize(
            *(table.to(where) for table in (*tables, *requests)),
            state_dtype=torch.float32, input_dtype=torch.float32, matrixA_dtype=torch.float32, dim=HEAD_DIM,
            dstate=STATE_SIZE, num_heads=HEADS, heads_per_group=HEADS // GROUPS, max_window=WINDOW,
            ring_buffer_len=WINDOW + 1,
        )  # fmt: skip
        return given["state"].cpu()

    torch.manual_seed(0)
    before, expected = mamba2_caches(WINDOW + 1)["state"], folded("cpu")
    assert [not torch.equal(*pair) for pair in zip(before, expected, strict=True)] == [
        slot in (3, 5) for slot in range(SLOTS)
    ]
    assert relative_rms(folded(device), expected.double()) < 1e-5
