"""vLLM's functions of speculative decoding, against recurrences in fp64 and the memory they may write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ArgumentError, SpecError, ops
from replayssm_tune.runtime.compat import vllm
from tests.runtime.compat_scenes import (
    GROUPS,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    Gdn,
    Mamba2,
    Pool,
    bound,
    parameters,
    relative,
    same_bits,
    softplus,
)

SLOTS, ROWS = 8, 5
F32, BF16 = torch.float32, torch.bfloat16
INNER, KEYS = HEADS * HEAD_DIM, GROUPS * STATE_SIZE
UNTOUCHED = 42.0


class Drafting(ABC):
    """Sequences whose drafts are verified, with one fp64 recurrence each."""

    reset: Any
    commit: Any
    decode: Any
    of_padding: float
    """What is found in the outputs of padded rows."""
    folds_without_tokens: bool
    """A live row without tokens flushes too."""
    sequences: list[Any]
    pools: dict[str, Pool]
    """The state and the rings."""
    errors: dict[str, float]
    """Of what a ring gains, by pool; 0 for copies."""

    def __init__(
        self,
        window: int = 5,
        num_tokens: int = 3,
        state_dtype: torch.dtype = F32,
        dtype: torch.dtype = F32,
        seed: int = 0,
    ) -> None:
        self.num_tokens, self.state_dtype, self.dtype = num_tokens, state_dtype, dtype
        self.limits = {"max_cache_len": window + num_tokens, "max_spec_len": num_tokens}
        self.capacity = 1 << (window + num_tokens - 1).bit_length()
        self.flushed = 0
        self.g = torch.Generator().manual_seed(seed)
        self.first = self.randn(SLOTS, HEADS, HEAD_DIM, STATE_SIZE).to(state_dtype)
        self.state = Pool(*self.first.shape, dtype=state_dtype, fill=self.first)
        # Left by another use of the slots.
        self.write_pos, self.start = torch.full((2, SLOTS), 77, dtype=torch.int32)
        self.is_flush = torch.full((SLOTS,), 7, dtype=torch.int8)
        self.cursors = self.write_pos, self.start, self.is_flush
        mask, everyone = torch.ones(SLOTS, dtype=torch.int8), torch.arange(SLOTS, dtype=torch.int32)
        self.reset(*self.cursors, mask, everyone, **self.limits)

    def randn(self, *shape: int) -> Tensor:
        drawn: Tensor = torch.randn(shape, generator=self.g)
        return drawn

    def randint(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    @abstractmethod
    def inputs(self, tokens: int) -> dict[str, Any]:
        """Draw inputs; each has a token dimension."""

    @abstractmethod
    def verify(self, inputs: dict[str, Any], **common: Any) -> Tensor:
        """Call the function that is tested."""

    @abstractmethod
    def advance(self, sequence: Any, token: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """One token's output, and what each ring gains."""

    def entry(self, name: str, pool: Pool, slot: int, place: int) -> Tensor:
        """The place of a ring."""
        found: Tensor = pool.view[slot, :, place]
        return found

    def step(self, padding: int) -> None:
        """Verify and commit a batch of rows with 0 to num_tokens tokens, one of them padding."""
        slots = [slot + 1 for slot in torch.randperm(SLOTS - 1, generator=self.g)[:ROWS].tolist()]
        counts = [self.randint(1, self.num_tokens) for _ in slots]
        slots[self.randint(0, ROWS - 1)] = padding
        counts[self.randint(0, ROWS - 1)] = 0
        bounds = torch.tensor([0, *counts]).cumsum(0).int()
        used = int(bounds[-1])
        inputs = self.inputs(used + 2)
        out = torch.full((used + 2, HEADS, HEAD_DIM), UNTOUCHED, dtype=self.dtype)
        # Indices are a column, as engines have them.
        indices = torch.tensor([[slot, 55] for slot in slots], dtype=torch.int32)[:, 0]
        before = [cursor.clone() for cursor in self.cursors]
        expected = {name: pool.copied() for name, pool in self.pools.items()}
        assert self.verify(inputs, out=out, indices=indices, query_start_loc=bounds, **self.limits) is out
        for cursor, was in zip(self.cursors, before, strict=True):
            assert torch.equal(cursor, was)

        accepted = torch.zeros(ROWS + 2, dtype=torch.int32)
        want = torch.full_like(out, UNTOUCHED, dtype=torch.float64)
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            mine = range(int(bounds[row]), int(bounds[row + 1]))
            if slot == padding:
                want[mine.start : mine.stop] = self.of_padding
            elif count or self.folds_without_tokens:
                accepted[row] = self.randint(min(1, count), count)
                want[mine.start : mine.stop] = self.row(slot, mine, int(accepted[row]), inputs, expected)
        assert relative(out[:used], want[:used]) < bound(self.state_dtype, self.dtype)
        for row, slot in enumerate(slots):
            if slot == padding:
                same = want[bounds[row] : bounds[row + 1]]
                assert torch.equal(out[bounds[row] : bounds[row + 1]].double(), same)
        assert bool((out[used:] == UNTOUCHED).all())
        for name, pool in self.pools.items():
            assert same_bits(pool.memory, expected[name].memory), f"memory of {name}"
        self.commit(*self.cursors, accepted, indices, **self.limits, cache_buf_len=self.capacity)

    def row(
        self, slot: int, mine: range, kept: int, inputs: dict[str, Any], expected: dict[str, Pool]
    ) -> Tensor:
        """Outputs that a row should have; ``expected`` memory gets what the row wrote, if it is right."""
        sequence = self.sequences[slot]
        if self.is_flush[slot]:
            got = self.pools["state"].view[slot]
            assert relative(got, sequence.state) < bound(self.state_dtype, self.dtype)
            expected["state"].view[slot] = got
            self.flushed += 1
        outputs, after_kept = [torch.empty(0, HEADS, HEAD_DIM)], sequence.state
        for i, token in enumerate(mine):
            y, gained = self.advance(sequence, {name: value[token] for name, value in inputs.items()})
            outputs.append(y[None])
            after_kept = sequence.state if i + 1 == kept else after_kept
            place = int(self.start[slot] + self.write_pos[slot] + i) % self.capacity
            for name, value in gained.items():
                got = self.entry(name, self.pools[name], slot, place)
                error = self.errors[name]
                torch.testing.assert_close(got.double(), value.double(), rtol=error, atol=error)
                self.entry(name, expected[name], slot, place).copy_(got)
        sequence.state = after_kept
        return torch.cat(outputs)


class Mamba2Drafting(Drafting):
    reset = staticmethod(vllm.reset_replayssm_spec_cursors)
    commit = staticmethod(vllm.commit_replayssm_spec)
    decode: Any = staticmethod(vllm.selective_state_update_replayssm_spec)
    of_padding = UNTOUCHED
    folds_without_tokens = False

    def __init__(
        self, dt_dtype: torch.dtype = F32, tied_d: bool = True, wide_bias: bool = False, **more: Any
    ) -> None:
        super().__init__(**more)
        conv = Pool(SLOTS, self.capacity, INNER + KEYS, dtype=self.dtype)
        dt = Pool(SLOTS, HEADS, self.capacity, dtype=dt_dtype)
        self.pools = {"state": self.state, "conv": conv, "dt": dt}
        self.errors = {"conv": 0.0, "dt": 0.0}
        self.rate, self.bias = -torch.rand(HEADS, generator=self.g) - 1.0, self.randn(HEADS) - 1.0
        D = self.randn(HEADS) if tied_d else self.randn(HEADS, HEAD_DIM)
        self.sequences = [Mamba2(state, self.rate, D) for state in self.first]
        self.parameters = {
            "D": D[:, None].expand(-1, HEAD_DIM) if tied_d else D,
            "dt_bias": self.bias[:, None].expand(-1, HEAD_DIM) if wide_bias else self.bias,
        }

    def inputs(self, tokens: int) -> dict[str, Any]:
        return {
            "conv_out": self.randn(tokens, 8 + INNER + 2 * KEYS).to(self.dtype)[:, 8:],
            "dt_spec": self.randn(tokens, HEADS).to(self.dtype),
            "z": self.randn(tokens, HEADS, HEAD_DIM).to(self.dtype),
        }

    def verify(self, inputs: dict[str, Any], **common: Any) -> Tensor:
        done: Tensor = self.decode(
            self.state.view, self.pools["conv"].view, self.pools["dt"].view, inputs["conv_out"],
            inputs["dt_spec"], self.rate[:, None, None].expand(-1, HEAD_DIM, STATE_SIZE), *self.cursors,
            state_batch_indices=common.pop("indices"), d_inner=INNER, ngroups=GROUPS, dstate=STATE_SIZE,
            z=inputs["z"], bc_pre=torch.full((ROWS, 2), torch.nan), **self.parameters, **common,
        )  # fmt: skip
        return done

    def advance(self, sequence: Any, token: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        x, B, C = token["conv_out"].split([INNER, KEYS, KEYS])
        raw = token["dt_spec"].to(self.pools["dt"].view.dtype)
        y = sequence.token(
            x.view(HEADS, HEAD_DIM), softplus(raw.double() + self.bias), B.view(GROUPS, -1),
            C.view(GROUPS, -1), token["z"],
        )  # fmt: skip
        return y, {"conv": token["conv_out"][: INNER + KEYS], "dt": raw}

    def entry(self, name: str, pool: Pool, slot: int, place: int) -> Tensor:
        return pool.view[slot, place] if name == "conv" else super().entry(name, pool, slot, place)


class GdnDrafting(Drafting):
    reset = staticmethod(vllm.reset_gdn_replayssm_spec_cursors)
    commit = staticmethod(vllm.commit_gdn_replayssm_spec)
    decode: Any = staticmethod(vllm.gdn_replayssm_spec_decode)
    of_padding = 0.0
    folds_without_tokens = True

    def __init__(self, scale: float | None = None, normalise: bool = True, **more: Any) -> None:
        super().__init__(**more)
        self.pools = {
            "state": self.state,
            "d": Pool(SLOTS, HEADS, self.capacity, HEAD_DIM, dtype=self.dtype),
            "k": Pool(SLOTS, GROUPS, self.capacity, STATE_SIZE, dtype=self.dtype),
            "g": Pool(SLOTS, HEADS, self.capacity, dtype=F32),
        }
        near = 8 * bound(self.dtype, self.state_dtype)
        self.errors = {"d": near, "k": near, "g": 1e-5}
        self.A_log, self.bias = self.randn(HEADS), self.randn(HEADS)
        self.scale, self.normalise = scale, normalise
        factor = STATE_SIZE**-0.5 if scale is None else scale
        self.sequences = [Gdn(state, self.A_log, self.bias, factor, normalise) for state in self.first]

    def inputs(self, tokens: int) -> dict[str, Any]:
        # Keys are small where nothing normalises them, for a recurrence that does not blow up.
        mixed = self.randn(tokens, 2 * KEYS + INNER + 8) * (1.0 if self.normalise else 0.25)
        a, b = self.randn(2, tokens, HEADS).to(self.dtype)
        return {"mixed_qkv": mixed.to(self.dtype)[:, :-8], "a": a, "b": b}

    def verify(self, inputs: dict[str, Any], **common: Any) -> Tensor:
        done: Tensor = self.decode(
            *inputs.values(), self.A_log, self.bias, *(pool.view for pool in self.pools.values()),
            ssm_state_indices=common.pop("indices"), write_pos=self.write_pos, cache_base=self.start,
            is_flush=self.is_flush, scale=self.scale, use_qk_l2norm_in_kernel=self.normalise, **common,
        )  # fmt: skip
        return done

    def advance(self, sequence: Any, token: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        y = sequence.token(token["mixed_qkv"], token["a"], token["b"], GROUPS)
        return y, dict(zip(("d", "k", "g"), sequence.entry, strict=True))


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
