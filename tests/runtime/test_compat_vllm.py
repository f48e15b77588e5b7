"""vLLM's functions for one token a row, against recurrences in fp64 and the memory they may write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ArgumentError
from replayssm_tune.runtime.compat import vllm
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
    Gdn,
    Mamba2,
    Pool,
    bound,
    parameters,
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
