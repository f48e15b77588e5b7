"""Sequences that decode by FlashInfer's function, and caches of layers that it materialises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm_tune.runtime.compat.flashinfer import checkpointing_ssu, replayssm_materialize
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import same_bits
from tests.runtime.compat_scenes import (
    F32,
    GROUPS,
    HEAD_DIM,
    HEADS,
    STATE_SIZE,
    UNTOUCHED,
    Mamba2,
    Pool,
    bound,
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
