"""Sequences that decode by vLLM's functions of one token a row, and calls that they must refuse."""

from __future__ import annotations

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
    Gdn,
    Mamba2,
    Pool,
    bound,
    softplus,
)
from tests.runtime.draws import Draws

SLOTS, ROWS = 7, 5

OUTPUT_ONLY = vllm.selective_state_update_replayssm_output_only
STATE_AND_OUTPUT = vllm.selective_state_update_replayssm_state_and_output
GDN = vllm.fused_recurrent_gated_delta_rule_replayssm


class Decoding(Draws):
    """Sequences that decode by vLLM's Mamba-2 functions, one fp64 recurrence each."""

    def __init__(
        self,
        length: int,
        state_dtype: torch.dtype = F32,
        dtype: torch.dtype = F32,
        tied_d: bool = True,
        seed: int = 0,
    ) -> None:
        self.length, self.dtype, self.state_dtype = length, dtype, state_dtype
        self.g = torch.Generator().manual_seed(seed)
        first = self.normal(SLOTS, HEADS, HEAD_DIM, STATE_SIZE).to(state_dtype)
        self.state = Pool(*first.shape, dtype=state_dtype, fill=first)
        self.x = Pool(SLOTS, HEADS, length, HEAD_DIM, dtype=dtype)
        self.b = Pool(SLOTS, GROUPS, length, STATE_SIZE, dtype=dtype)
        self.dt = Pool(SLOTS, HEADS, length, dtype=F32)
        self.rate = -torch.rand(HEADS, generator=self.g) - 1.0
        self.bias = self.normal(HEADS) - 1.0
        self.D = self.normal(HEADS) if tied_d else self.normal(HEADS, HEAD_DIM)
        self.sequences = [Mamba2(state, self.rate, self.D) for state in first]
        self.filled = [0] * SLOTS

    def caches(self) -> dict[str, Any]:
        return {"x_cache": self.x.view, "dt_cache": self.dt.view, "B_cache": self.b.view}

    def inputs(self, rows: int) -> dict[str, Tensor]:
        """By vLLM's names, as vLLM expands them."""
        wide = self.normal(rows, HEADS * HEAD_DIM + 2 * GROUPS * STATE_SIZE).to(self.dtype)
        x, B, C = wide.split([HEADS * HEAD_DIM, GROUPS * STATE_SIZE, GROUPS * STATE_SIZE], 1)
        D = self.D if self.D.dim() == 2 else self.D[:, None].expand(-1, HEAD_DIM)
        return {
            "x": x.unflatten(1, (HEADS, HEAD_DIM)),
            "dt": self.normal(rows, HEADS).to(self.dtype)[:, :, None].expand(-1, -1, HEAD_DIM),
            "A": self.rate[:, None, None].expand(-1, HEAD_DIM, STATE_SIZE),
            "B": B.unflatten(1, (GROUPS, STATE_SIZE)),
            "C": C.unflatten(1, (GROUPS, STATE_SIZE)),
            "D": D,
            "dt_bias": self.bias[:, None].expand(-1, HEAD_DIM),
            "z": self.normal(rows, HEADS, HEAD_DIM).to(self.dtype),
        }

    def step(
        self, function: Any, slots: list[int], null: int | None, columns: bool = False, **more: Any
    ) -> int:
        """One step with the rows' slots, ``null`` for those without; returns how many rows flushed."""
        rows = len(slots)
        live = [row for row in range(rows) if null is None or slots[row] not in (null, -1)]
        given = self.inputs(rows)
        position, flush = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
        for row in live:
            position[row] = self.filled[slots[row]]
            full = self.filled[slots[row]] == self.length - 1
            flush[row] = full or self.uniform() < 0.2
        indices = torch.tensor(slots, dtype=torch.int32)
        indices = indices[:, None].expand(-1, 3) if columns else indices
        pools = {"state": self.state, "x": self.x, "b": self.b, "dt": self.dt}
        after = {name: pool.copied() for name, pool in pools.items()}
        out = torch.full((rows, HEADS, HEAD_DIM), 42.0, dtype=self.dtype)
        done = function(
            self.state.view, *given.values(), dt_softplus=True, **self.caches(),
            # Of another length than the batch, as engines keep them.
            write_pos=torch.cat([position, position.new_full((2,), 9)]),
            is_flush=torch.cat([flush, flush.new_ones(2)]).to(torch.int8 if columns else torch.bool),
            max_cache_len=self.length, out=out,
            state_batch_indices=None if null is None else indices,
            **({} if null is None else {"null_block_id": null}), **more,
        )  # fmt: skip
        assert done.data_ptr() == out.data_ptr()

        shape = (HEADS, HEAD_DIM)
        expected = torch.full((rows, *shape), 42.0, dtype=torch.float64)
        for row in live:
            slot, delta = slots[row], softplus(given["dt"][row, :, 0].float() + self.bias)
            sequence = self.sequences[slot]
            expected[row] = sequence.token(
                given["x"][row], delta, given["B"][row], given["C"][row], given["z"][row]
            )
            if flush[row]:
                got = self.state.view[slot]
                assert relative_rms(got, sequence.state) < 1.5 * bound(self.state_dtype, self.dtype)
                after["state"].view[slot] = got
                self.filled[slot] = 0
            else:
                place = self.filled[slot]
                after["x"].view[slot, :, place] = given["x"][row]
                after["b"].view[slot, :, place] = given["B"][row]
                got = self.dt.view[slot, :, place]
                torch.testing.assert_close(got.double(), delta, rtol=1e-6, atol=1e-9)
                after["dt"].view[slot, :, place] = got
                self.filled[slot] += 1
        padded = [row for row in range(rows) if row not in live]
        assert torch.equal(out[padded], torch.full_like(out[padded], 42.0))
        if live:
            assert relative_rms(out[live], expected[live]) < bound(self.state_dtype, self.dtype)
        for name, pool in pools.items():
            assert same_bits(pool.memory, after[name].memory), f"memory of {name}"
        return int(flush.sum())

    def draw(self, null: int) -> list[int]:
        """Slots of a batch in which some rows are padding."""
        free = [slot for slot in range(SLOTS) if slot != null]
        chosen = [free[i] for i in torch.randperm(len(free), generator=self.g)[:ROWS].tolist()]
        for row in torch.randperm(ROWS, generator=self.g)[: self.below(3)].tolist():
            chosen[row] = null if row % 2 else -1
        return chosen


class Refusal:
    """A legal call of vLLM's first function with one thing changed."""

    def __init__(self) -> None:
        self.decoding = Decoding(4)
        self.given: dict[str, Any] = {
            "state": self.decoding.state.view,
            **self.decoding.inputs(2),
            **self.decoding.caches(),
            "write_pos": torch.tensor([0, 2], dtype=torch.int32),
            "is_flush": torch.zeros(2, dtype=torch.bool),
            "max_cache_len": 4,
            "state_batch_indices": torch.tensor([1, 2], dtype=torch.int32),
            "out": torch.empty(2, HEADS, HEAD_DIM),
        }

    def call(self, **changes: Any) -> None:
        state, x = self.decoding.state.copied(), self.decoding.x.copied()
        with torch.no_grad():
            try:
                OUTPUT_ONLY(**self.given | changes)
            finally:
                assert same_bits(self.decoding.state.memory, state.memory)
                if changes:
                    assert same_bits(self.decoding.x.memory, x.memory)


class GdnDecoding(Draws):
    """Sequences that decode by vLLM's Gated DeltaNet function, one fp64 recurrence each."""

    def __init__(
        self,
        length: int,
        state_dtype: torch.dtype = F32,
        dtype: torch.dtype = F32,
        normalise: bool = True,
        scale: float = STATE_SIZE**-0.5,
        seed: int = 0,
    ) -> None:
        self.length, self.dtype, self.state_dtype = length, dtype, state_dtype
        self.normalise, self.scale = normalise, scale
        self.g = torch.Generator().manual_seed(seed)
        first = self.normal(SLOTS, HEADS, HEAD_DIM, STATE_SIZE).to(state_dtype)
        self.state = Pool(*first.shape, dtype=state_dtype, fill=first)
        self.d = Pool(SLOTS, HEADS, length, HEAD_DIM, dtype=dtype)
        self.k = Pool(SLOTS, GROUPS, length, STATE_SIZE, dtype=dtype)
        self.gates = Pool(SLOTS, HEADS, length, dtype=F32)
        self.A_log, self.bias = self.normal(HEADS).to(dtype), self.normal(HEADS).to(dtype)
        self.sequences = [Gdn(state, self.A_log, self.bias, scale, normalise) for state in first]
        self.filled = [0] * SLOTS

    def step(self, slots: list[int], shape: tuple[int, ...] = (), **changes: Any) -> int:
        """One step with the rows' slots, 0 or negative for padding; returns how many rows flushed.

        ``shape`` is that of ``out``.
        """
        rows = len(slots)
        width = 2 * GROUPS * STATE_SIZE + HEADS * HEAD_DIM
        # Keys are small where nothing normalises them, for a recurrence that does not blow up.
        mixed = (self.normal(rows, width + 8) * (1.0 if self.normalise else 0.25)).to(self.dtype)[:, :width]
        a, b = (self.normal(rows, HEADS).to(self.dtype) for _ in range(2))
        position = torch.tensor([self.filled[max(slot, 0)] for slot in slots], dtype=torch.int32)
        out = torch.full(shape or (rows, 1, HEADS, HEAD_DIM), torch.nan, dtype=self.dtype)
        pools = {"state": self.state, "d": self.d, "k": self.k, "g": self.gates}
        after = {name: pool.copied() for name, pool in pools.items()}
        given: dict[str, Any] = {
            "mixed_qkv": mixed, "a": a, "b": b, "A_log": self.A_log, "dt_bias": self.bias,
            "scale": self.scale, "initial_state": self.state.view, "d_cache": self.d.view,
            "k_cache": self.k.view, "g_cache": self.gates.view, "out": out,
            "ssm_state_indices": torch.tensor([[slot, 99] for slot in slots], dtype=torch.int32)[:, 0],
            "write_pos": position, "use_qk_l2norm_in_kernel": self.normalise,
        }  # fmt: skip
        done, state = GDN(**given | changes)
        assert done is out
        assert state is self.state.view

        expected = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.float64)
        near = 8 * bound(self.dtype, self.state_dtype)
        flushed = 0
        for row, slot in enumerate(slots):
            if slot <= 0:
                continue
            sequence, place = self.sequences[slot], self.filled[slot]
            expected[row] = sequence.token(mixed[row], a[row], b[row], GROUPS)
            if place == self.length - 1:
                assert relative_rms(self.state.view[slot], sequence.state) < 2 * bound(
                    self.dtype, self.state_dtype
                )
                after["state"].view[slot] = self.state.view[slot]
                self.filled[slot], flushed = 0, flushed + 1
                continue
            assert sequence.entry is not None
            for name, value in zip(("d", "k", "g"), sequence.entry, strict=True):
                got = pools[name].view[slot, :, place]
                torch.testing.assert_close(got.double(), value, rtol=0.1, atol=near)
                after[name].view[slot, :, place] = got
            self.filled[slot] += 1
        live = [row for row, slot in enumerate(slots) if slot > 0]
        y = out.view(rows, HEADS, HEAD_DIM)
        assert not y[[row for row in range(rows) if row not in live]].any()
        assert relative_rms(y[live], expected[live]) < 2 * bound(self.dtype, self.state_dtype)
        for name, pool in pools.items():
            assert same_bits(pool.memory, after[name].memory), f"memory of {name}"
        return flushed

    def draw(self) -> list[int]:
        chosen = (torch.randperm(SLOTS - 1, generator=self.g)[:ROWS] + 1).tolist()
        chosen[1] = [0, -1, chosen[1]][self.below(3)]
        return [int(slot) for slot in chosen]
