"""Sequences whose drafts vLLM's functions verify, beside recurrences in fp64 and what they may write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from replayssm_tune.runtime.compat import vllm
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import same_bits
from tests.runtime.compat_scenes import (
    F32,
    GROUPS,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    UNTOUCHED,
    Gdn,
    Mamba2,
    Pool,
    bound,
    softplus,
)
from tests.runtime.draws import Draws

SLOTS, ROWS = 8, 5
INNER, KEYS = HEADS * HEAD_DIM, GROUPS * STATE_SIZE


class Drafting(Draws, ABC):
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
        self.first = self.normal(SLOTS, HEADS, HEAD_DIM, STATE_SIZE).to(state_dtype)
        self.state = Pool(*self.first.shape, dtype=state_dtype, fill=self.first)
        # Left by another use of the slots.
        self.write_pos, self.start = torch.full((2, SLOTS), 77, dtype=torch.int32)
        self.is_flush = torch.full((SLOTS,), 7, dtype=torch.int8)
        self.cursors = self.write_pos, self.start, self.is_flush
        mask, everyone = torch.ones(SLOTS, dtype=torch.int8), torch.arange(SLOTS, dtype=torch.int32)
        self.reset(*self.cursors, mask, everyone, **self.limits)

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
        counts = [self.between(1, self.num_tokens) for _ in slots]
        slots[self.between(0, ROWS - 1)] = padding
        counts[self.between(0, ROWS - 1)] = 0
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
                accepted[row] = self.between(min(1, count), count)
                want[mine.start : mine.stop] = self.row(slot, mine, int(accepted[row]), inputs, expected)
        assert relative_rms(out[:used], want[:used]) < bound(self.state_dtype, self.dtype)
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
            assert relative_rms(got, sequence.state) < bound(self.state_dtype, self.dtype)
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
        self.rate, self.bias = -torch.rand(HEADS, generator=self.g) - 1.0, self.normal(HEADS) - 1.0
        D = self.normal(HEADS) if tied_d else self.normal(HEADS, HEAD_DIM)
        self.sequences = [Mamba2(state, self.rate, D) for state in self.first]
        self.parameters = {
            "D": D[:, None].expand(-1, HEAD_DIM) if tied_d else D,
            "dt_bias": self.bias[:, None].expand(-1, HEAD_DIM) if wide_bias else self.bias,
        }

    def inputs(self, tokens: int) -> dict[str, Any]:
        return {
            "conv_out": self.normal(tokens, 8 + INNER + 2 * KEYS).to(self.dtype)[:, 8:],
            "dt_spec": self.normal(tokens, HEADS).to(self.dtype),
            "z": self.normal(tokens, HEADS, HEAD_DIM).to(self.dtype),
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
        self.A_log, self.bias = self.normal(HEADS), self.normal(HEADS)
        self.scale, self.normalise = scale, normalise
        factor = STATE_SIZE**-0.5 if scale is None else scale
        self.sequences = [Gdn(state, self.A_log, self.bias, factor, normalise) for state in self.first]

    def inputs(self, tokens: int) -> dict[str, Any]:
        # Keys are small where nothing normalises them, for a recurrence that does not blow up.
        mixed = self.normal(tokens, 2 * KEYS + INNER + 8) * (1.0 if self.normalise else 0.25)
        a, b = self.normal(2, tokens, HEADS).to(self.dtype)
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
