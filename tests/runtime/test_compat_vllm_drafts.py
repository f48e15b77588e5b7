"""vLLM's functions of speculative decoding: drafts of sequences, cursors, what is refused, signatures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ArgumentError, SpecError, ops
from replayssm_tune.runtime.compat import vllm
from tests.runtime.calls import same_bits
from tests.runtime.compat_scenes import (
    BF16,
    F32,
    HEAD_DIM,
    HEADS,
    UNTOUCHED,
    parameters,
)
from tests.runtime.vllm_drafts import (
    INNER,
    KEYS,
    ROWS,
    SLOTS,
    Drafting,
    GdnDrafting,
    Mamba2Drafting,
)

shapes = pytest.mark.parametrize(("window", "num_tokens"), [(5, 3), (4, 4), (3, 1), (12, 5)])
dtypes = pytest.mark.parametrize(("state_dtype", "dtype"), [(F32, F32), (F32, BF16), (BF16, BF16)], ids=str)


@shapes
@dtypes
def test_mamba2_drafts(window: int, num_tokens: int, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    drafting = Mamba2Drafting(window=window, num_tokens=num_tokens, state_dtype=state_dtype, dtype=dtype)
    for _ in range(16):
        drafting.step(padding=0)
    assert drafting.flushed > 4


@pytest.mark.parametrize("padding", [0, -1])
@pytest.mark.parametrize("tied_d", [False, True], ids=["D of elements", "D of heads"])
@pytest.mark.parametrize("wide_bias", [False, True])
def test_mamba2_drafts_with_other_parameters(padding: int, tied_d: bool, wide_bias: bool) -> None:
    drafting = Mamba2Drafting(tied_d=tied_d, wide_bias=wide_bias, seed=1)
    for _ in range(8):
        drafting.step(padding)


def test_mamba2_raw_dt_is_rounded_to_the_dtype_of_its_cache() -> None:
    drafting = Mamba2Drafting(dt_dtype=BF16, seed=2)
    for _ in range(12):
        drafting.step(padding=0)
    assert drafting.flushed > 2


@shapes
@dtypes
def test_gdn_drafts(window: int, num_tokens: int, state_dtype: torch.dtype, dtype: torch.dtype) -> None:
    drafting = GdnDrafting(window=window, num_tokens=num_tokens, state_dtype=state_dtype, dtype=dtype)
    for _ in range(16):
        drafting.step(padding=0)
    assert drafting.flushed > 4


@pytest.mark.parametrize("padding", [0, -1])
@pytest.mark.parametrize("normalise", [False, True])
def test_gdn_drafts_with_a_scale_of_their_own(padding: int, normalise: bool) -> None:
    drafting = GdnDrafting(scale=0.3, normalise=normalise, seed=1)
    for _ in range(8):
        drafting.step(padding)


def test_gdn_padding_are_all_slots_up_to_the_null_block() -> None:
    drafting = GdnDrafting()
    inputs, out = drafting.inputs(2), torch.full((2, HEADS, HEAD_DIM), UNTOUCHED)
    before = drafting.state.memory.clone()
    common: dict[str, Any] = {"indices": torch.tensor([2, 3]), "query_start_loc": torch.tensor([0, 1, 2])}
    drafting.verify(inputs, out=out, null_block_id=3, **common, **drafting.limits)
    assert not out.any()
    assert same_bits(drafting.state.memory, before)


@pytest.mark.parametrize("drafting", [Mamba2Drafting, GdnDrafting])
@pytest.mark.parametrize("rows", [0, 2])
def test_batches_without_tokens(drafting: type[Drafting], rows: int) -> None:
    scene = drafting()
    before = {name: pool.copied() for name, pool in scene.pools.items()}
    bounds, indices = torch.zeros(rows + 1, dtype=torch.int32), torch.arange(1, rows + 1)
    out = torch.full((1, HEADS, HEAD_DIM), UNTOUCHED)
    scene.verify(scene.inputs(1), out=out, indices=indices, query_start_loc=bounds, **scene.limits)
    assert bool((out == UNTOUCHED).all())
    for name, pool in scene.pools.items():
        assert same_bits(pool.memory, before[name].memory)


def test_mamba2_out_of_its_own_has_zeros_where_nothing_is_written() -> None:
    drafting = Mamba2Drafting()
    common: dict[str, Any] = {"indices": torch.tensor([0, 3]), "query_start_loc": torch.tensor([0, 1, 2])}
    out = drafting.verify(drafting.inputs(3), **common, **drafting.limits)
    assert [bool(token.any()) for token in out] == [False, True, False]


class Cursors:
    """Random cursors of a cache of 12 tokens: 9 of history, 3 of a step."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.write_pos = torch.randint(0, 10, (SLOTS,), generator=g, dtype=torch.int32)
        self.start = torch.randint(0, 16, (SLOTS,), generator=g, dtype=torch.int32)
        self.is_flush = (self.write_pos + 6 > 12).to(torch.int8)
        self.indices = torch.randperm(SLOTS, generator=g).int()[:ROWS]
        self.accepted = torch.randint(0, 4, (ROWS,), generator=g)

    def rows(self) -> list[list[int]]:
        """Slot, accepted, write_pos, start and flag of each row."""
        lists = (value[self.indices.long()] for value in (self.write_pos, self.start, self.is_flush))
        columns = (self.indices.tolist(), self.accepted.tolist(), *(value.tolist() for value in lists))
        return [list(row) for row in zip(*columns, strict=True)]

    def copied(self) -> Cursors:
        other = Cursors(0)
        for name, value in vars(self).items():
            setattr(other, name, value.clone())
        return other


LIMITS = {"max_cache_len": 12, "max_spec_len": 3}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("null", [0, 3])
def test_commits_move_cursors_as_theirs(seed: int, family: str, null: int) -> None:
    commits: dict[str, Any] = {"mamba2": vllm.commit_replayssm_spec}
    commit = commits.get(family, vllm.commit_gdn_replayssm_spec)
    cursors, moved = Cursors(seed), Cursors(seed)
    commit(
        moved.write_pos, moved.start, moved.is_flush, moved.accepted, moved.indices, **LIMITS,
        null_block_id=null,
    )  # fmt: skip
    for slot, kept, length, start, flush in cursors.rows():
        skipped = slot == null if family == "mamba2" else slot <= null
        if skipped or (kept == 0 and family == "mamba2"):
            after = length, start
        elif flush:
            after = kept, (start + length) % 16 if kept else start
        else:
            after = length + kept, start
        assert (int(moved.write_pos[slot]), int(moved.start[slot])) == after
        assert bool(moved.is_flush[slot]) == (bool(flush) if skipped else after[0] + 6 > 12)
    others = [slot for slot in range(SLOTS) if slot not in cursors.indices]
    for name in ("write_pos", "start", "is_flush"):
        assert torch.equal(getattr(moved, name)[others], getattr(cursors, name)[others])


@pytest.mark.parametrize("seed", range(4))
def test_commits_are_ours_where_a_token_is_kept(seed: int) -> None:
    theirs, ours = Cursors(seed), Cursors(seed)
    accepted = theirs.accepted.clamp(min=1)
    vllm.commit_replayssm_spec(
        theirs.write_pos, theirs.start, theirs.is_flush, accepted, theirs.indices, **LIMITS, null_block_id=-1
    )
    ops.commit(
        accepted, ring_start=ours.start, ring_len=ours.write_pos, slot_index=ours.indices, window=9,
        num_tokens=3, capacity=16,
    )  # fmt: skip
    assert torch.equal(theirs.write_pos, ours.write_pos)
    assert torch.equal(theirs.start, ours.start)


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
@pytest.mark.parametrize("limit", [5, 6])
def test_resets_empty_rings_of_chosen_rows(family: str, limit: int) -> None:
    resets: dict[str, Any] = {"mamba2": vllm.reset_replayssm_spec_cursors}
    reset = resets.get(family, vllm.reset_gdn_replayssm_spec_cursors)
    cursors = Cursors(1)
    before = cursors.copied()
    indices = torch.tensor([[4], [0], [6], [5], [-1]])[:, 0]
    reset(
        cursors.write_pos, cursors.start, cursors.is_flush, torch.tensor([1, 1, 0, 7, 1]), indices, limit, 3
    )
    for slot in range(SLOTS):
        values = int(cursors.write_pos[slot]), int(cursors.start[slot]), int(cursors.is_flush[slot])
        kept = int(before.write_pos[slot]), int(before.start[slot]), int(before.is_flush[slot])
        assert values == ((0, 0, int(limit < 6)) if slot in (4, 5) else kept)


def test_cursors_without_rows_and_slots_beyond_the_last() -> None:
    cursors, empty = Cursors(0), torch.zeros(0, dtype=torch.int32)
    three = cursors.write_pos, cursors.start, cursors.is_flush
    vllm.commit_replayssm_spec(*three, empty, empty, 12, 3)
    assert torch.equal(cursors.write_pos, Cursors(0).write_pos)
    with pytest.raises(ArgumentError, match="names slot 8, but there are 8 slots"):
        vllm.commit_gdn_replayssm_spec(*three, torch.ones(1), torch.tensor([8]), 12, 3)


@pytest.mark.parametrize("drafting", [Mamba2Drafting, GdnDrafting])
def test_flags_that_cursors_do_not_bear_out_are_refused_on_a_cpu(drafting: type[Drafting]) -> None:
    scene = drafting()
    common: dict[str, Any] = {"indices": torch.tensor([3]), "query_start_loc": torch.tensor([0, 1])}
    scene.is_flush[3] = 1
    with pytest.raises(ArgumentError, match="is_flush of slot 3 is 1 with write_pos 0"):
        scene.verify(scene.inputs(1), out=torch.empty(1, HEADS, HEAD_DIM), **common, **scene.limits)


@pytest.mark.parametrize("drafting", [Mamba2Drafting, GdnDrafting])
def test_history_shorter_than_a_step_is_refused(drafting: type[Drafting]) -> None:
    scene = drafting()
    scene.is_flush[3] = 1
    common: dict[str, Any] = {"indices": torch.tensor([3]), "query_start_loc": torch.tensor([0, 1])}
    with pytest.raises(SpecError, match="2 drafts make 3 tokens a step, beyond the window of 2"):
        scene.verify(
            scene.inputs(1), out=torch.empty(1, HEADS, HEAD_DIM), **common, max_cache_len=5, max_spec_len=3
        )


def test_gdn_halves_of_a_step_are_refused() -> None:
    scene = GdnDrafting()
    common: dict[str, Any] = {"indices": torch.tensor([3]), "query_start_loc": torch.tensor([0, 1])}
    with pytest.raises(ArgumentError, match="launch_mode is 'flush'"):
        scene.verify(
            scene.inputs(1),
            out=torch.empty(1, HEADS, HEAD_DIM),
            **common,
            **scene.limits,
            launch_mode="flush",
        )


def test_mamba2_shapes_are_measured() -> None:
    scene = Mamba2Drafting()
    common: dict[str, Any] = {"indices": torch.tensor([3]), "query_start_loc": torch.tensor([0, 1])}
    common |= scene.limits
    wide = scene.inputs(1) | {"conv_out": torch.zeros(1, INNER + KEYS)}
    with pytest.raises(ArgumentError, match=r"conv_out has shape \(1, 64\); expected \(1, 96\)"):
        scene.verify(wide, **common)
    with pytest.raises(ArgumentError, match=r"query_start_loc has shape \(3,\); expected \(2,\)"):
        scene.verify(scene.inputs(1), **common | {"query_start_loc": torch.tensor([0, 1, 1])})
    with pytest.raises(ArgumentError, match=r"out has shape \(2, 4, 8\)"):
        scene.verify(scene.inputs(1), **common, out=torch.empty(2, HEADS, HEAD_DIM))


def test_signatures_are_theirs() -> None:
    """As they stand in Johnny-Liou/ReplaySSM."""
    assert parameters(vllm.selective_state_update_replayssm_spec) == [
        "state_checkpoint", "post_conv_cache", "dt_cache", "conv_out", "dt_spec", "A", "write_pos",
        "post_conv_state_pos", "is_flush", "query_start_loc", "state_batch_indices", "max_cache_len",
        "max_spec_len", "d_inner", "ngroups", "dstate", "D=None", "z=None", "dt_bias=None",
        "dt_softplus=True", "out=None", "bc_pre=None", "null_block_id=0",
    ]  # fmt: skip
    assert parameters(vllm.commit_replayssm_spec) == [
        "write_pos", "post_conv_state_pos", "is_flush", "num_accepted_tokens", "state_batch_indices",
        "max_cache_len", "max_spec_len", "cache_buf_len=None", "null_block_id=0",
    ]  # fmt: skip
    assert parameters(vllm.reset_replayssm_spec_cursors) == [
        "write_pos", "post_conv_state_pos", "is_flush", "first_decode_mask", "state_batch_indices",
        "max_cache_len", "max_spec_len", "null_block_id=0",
    ]  # fmt: skip
    assert parameters(vllm.gdn_replayssm_spec_decode) == [
        "mixed_qkv", "a", "b", "A_log", "dt_bias", "checkpoint_state", "d_cache", "k_cache", "g_cache", "out",
        "query_start_loc", "ssm_state_indices", "write_pos", "cache_base", "is_flush", "max_cache_len",
        "max_spec_len", "scale=None", "use_qk_l2norm_in_kernel=True", "null_block_id=0", "launch_mode='both'",
    ]  # fmt: skip
    assert parameters(vllm.commit_gdn_replayssm_spec) == [
        "write_pos", "cache_base", "is_flush", "num_accepted", "state_batch_indices", "max_cache_len",
        "max_spec_len", "cache_buf_len=None", "null_block_id=0",
    ]  # fmt: skip
    assert parameters(vllm.reset_gdn_replayssm_spec_cursors) == [
        "write_pos", "cache_base", "is_flush", "do_reset", "state_batch_indices", "max_cache_len",
        "max_spec_len", "null_block_id=0",
    ]  # fmt: skip
