"""Gated DeltaNet's ops against golden trajectories and a recurrence of this file's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ops, reference
from replayssm_tune.runtime.errors import ArgumentError
from replayssm_tune.runtime.spec import Spec
from tests.runtime.golden import vectors


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return vectors("gdn")


class Rings:
    """Poisoned rings of two slots in shuffled order, starting at different places."""

    def __init__(self, golden: dict[str, Tensor], window: int, dtype: torch.dtype) -> None:
        slots, heads, value_dim, key_dim = golden["state0"].shape
        self.window, self.capacity = window, window + 1
        self.state = golden["state0"].flip(0).to(dtype)
        self.u = torch.full((slots, heads, self.capacity, value_dim), math.nan, dtype=dtype)
        self.k = torch.full((slots, golden["k"].shape[3], self.capacity, key_dim), math.nan, dtype=dtype)
        self.g = torch.full((slots, heads, self.capacity), math.nan, dtype=dtype)
        self.start = torch.tensor([window, 0], dtype=torch.int32)
        self.length = torch.zeros(2, dtype=torch.int32)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.state, self.u, self.k, self.g, self.start, self.length

    def commit(self, accepted: Tensor, slot_index: Tensor) -> None:
        cursors = (self.start, self.length, slot_index, None, self.window, 1, self.capacity, -1)
        reference.commit(accepted, *cursors)

    def folded(self, slot: int) -> Tensor:
        """State and ring of a slot, token by token in fp64."""
        state = self.state[slot].double()
        for j in range(int(self.length[slot])):
            at = (int(self.start[slot]) + j) % self.capacity
            u, k, g = (ring[slot, :, at].double() for ring in (self.u, self.k, self.g))
            k_heads = k.repeat_interleave(len(u) // len(k), 0)
            state = g.exp()[:, None, None] * state + u[:, :, None] * k_heads[:, None]
        return state


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_reference_agrees_with_golden_trajectory(
    golden: dict[str, Tensor], dtype: torch.dtype, bound: float, window: int
) -> None:
    """Drafts go through one at a time; the first that is rejected is taken back by the cursors."""
    g = {name: value.to(dtype) if value.is_floating_point() else value for name, value in golden.items()}
    rings, rejected = Rings(golden, window, dtype), 0
    for step, (lengths, accepted) in enumerate(zip(g["n_tokens"], g["accepted"], strict=True)):
        for token in range(int(lengths.max())):
            # The golden outputs of later drafts attend to the rejected one.
            rows = ((token < lengths) & (token <= accepted)).nonzero()[:, 0]
            slot_index = torch.full((2,), -1)
            slot_index[rows] = 1 - rows
            q, k, v, a, b = (g[name][step, :, token] for name in "qkvab")
            out = torch.full_like(v, math.nan)
            reference.gdn_step(
                q, k, v, a, b, g["A_log"], g["dt_bias"], *rings.tensors(), slot_index, out, window, True, -1
            )
            torch.testing.assert_close(
                out[rows].double(), golden["y"][step, rows, token], rtol=bound, atol=bound
            )
            kept = (token < accepted).int()
            rejected += int((kept[rows] == 0).sum())
            rings.commit(kept, slot_index)
    assert rejected >= 5
    for row in range(2):
        torch.testing.assert_close(rings.folded(1 - row), golden["state_final"][row], rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_native_reference_agrees_with_golden_trajectory(
    golden: dict[str, Tensor], dtype: torch.dtype, bound: float
) -> None:
    g = {name: value.to(dtype) if value.is_floating_point() else value for name, value in golden.items()}
    state = g["state0"].clone()
    for step, accepted in enumerate(g["accepted"]):
        for token in range(int(accepted.max())):
            rows = (token < accepted).nonzero()[:, 0]
            slot_index = torch.full((2,), -1)
            slot_index[rows] = rows
            q, k, v, a, b = (g[name][step, :, token] for name in "qkvab")
            out = torch.full_like(v, math.nan)
            reference.gdn_native_step(
                q, k, v, a, b, g["A_log"], g["dt_bias"], state, slot_index, out, True, -1
            )
            torch.testing.assert_close(
                out[rows].double(), golden["y"][step, rows, token], rtol=bound, atol=bound
            )
    torch.testing.assert_close(state.double(), golden["state_final"], rtol=bound, atol=bound)


ROWS, KEY_HEADS, VALUE_HEADS, K, V, WINDOW = 3, 2, 4, 16, 8, 4


def spec_of(**changes: Any) -> Spec:
    fields: dict[str, Any] = {"activation_dtype": "fp32", "ring_dtype": "fp32", "has_d": False}
    return Spec("gdn", "step", V, K, VALUE_HEADS // KEY_HEADS, WINDOW, **(fields | changes))


def inputs(g: torch.Generator, cosine: float = 0.0) -> dict[str, Any]:
    """q, k, v, a and b of one token; keys of all tokens have this cosine with the first axis."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    q, k = normal(ROWS, KEY_HEADS, K), normal(ROWS, KEY_HEADS, K)
    for value in (q, k):
        value[..., 0] = 0.0
        value *= math.sqrt(1 - cosine**2) / value.norm(dim=-1, keepdim=True)
        value[..., 0] = cosine
    values = {"v": normal(ROWS, VALUE_HEADS, V), "a": normal(ROWS, VALUE_HEADS) - 4.0}
    return {"q": q * 3.0, "k": k * 5.0, "b": normal(ROWS, VALUE_HEADS) + 1.0} | values


class Recurrence:
    """S = e^g S + u k^T with u = beta (v - e^g S k) in fp64, one head at a time."""

    def __init__(self, state: Tensor, A_log: Tensor, corrects: bool = True) -> None:
        self.state, self.A_log, self.corrects = state.double().clone(), A_log.double(), corrects
        self.pending = self.state.clone()

    def step(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = torch.zeros(v.shape, dtype=torch.float64)
        for row in range(len(v)):
            for head in range(v.shape[1]):
                group = head * q.shape[1] // v.shape[1]
                query, key = q[row, group].double(), k[row, group].double()
                query = query / math.sqrt(float(query @ query) + 1e-6) / math.sqrt(len(query))
                key = key / math.sqrt(float(key @ key) + 1e-6)
                rate = math.exp(float(self.A_log[head])) * math.log1p(math.exp(float(a[row, head])))
                old = math.exp(-rate) * self.state[row, head]
                beta = 1 / (1 + math.exp(-float(b[row, head])))
                recalled = old @ key if self.corrects else 0.0
                new = old + torch.outer(beta * (v[row, head].double() - recalled), key)
                self.pending[row, head] = new
                y[row, head] = new @ query
        return y

    def commit(self, accepted: Tensor) -> None:
        keep = accepted.bool()
        self.state[keep] = self.pending[keep]


@pytest.mark.parametrize("cosine", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("native", [False, True])
def test_correlated_keys_correct_each_other(cosine: float, native: bool) -> None:
    """Without the correction of what is recalled already, outputs are far off where keys correlate."""
    g = torch.Generator().manual_seed(3)
    cache = ops.make_cache(spec_of(), ROWS, VALUE_HEADS, KEY_HEADS, "cpu")
    for ring in (cache.ring_x, cache.ring_b, cache.ring_decay):
        ring.fill_(math.nan)
    A_log = torch.rand(VALUE_HEADS, generator=g)
    exact, naive = (Recurrence(cache.state, A_log, corrects) for corrects in (True, False))
    slot_index = torch.tensor([2, 0, 1], dtype=torch.int32)
    found, expected, uncorrected = [], [], []
    for _ in range(40):
        token = inputs(g, cosine)
        accepted = torch.ones(ROWS).int() if native else (torch.rand(ROWS, generator=g) < 0.8).int()
        if native:
            y = ops.gdn_native_step(**token, A_log=A_log, state=cache.state, slot_index=slot_index)
        else:
            y = ops.gdn_step(**token, A_log=A_log, slot_index=slot_index, window=WINDOW, **cache.tensors())
            ops.commit(
                accepted, ring_start=cache.ring_start, ring_len=cache.ring_len, slot_index=slot_index,
                window=WINDOW, capacity=cache.capacity,
            )  # fmt: skip
        found.append(y.double())
        expected.append(exact.step(**token))
        uncorrected.append(naive.step(**token))
        exact.commit(accepted)
        naive.commit(accepted)
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)
    if cosine:
        off = (torch.stack(uncorrected) - torch.stack(expected)).norm() / torch.stack(expected).norm()
        assert off > 1.0


def test_a_ring_holds_what_the_recurrence_uses(golden: dict[str, Tensor]) -> None:
    """Unit keys, gates that do not grow, and u where v was given."""
    rings = Rings(golden, 8, torch.float64)
    slot_index = torch.tensor([1, 0])
    for step in range(6):
        q, k, v, a, b = (golden[name][step, :, 0] for name in "qkvab")
        reference.gdn_step(
            q, k, v, a, b, golden["A_log"], golden["dt_bias"], *rings.tensors(), slot_index,
            torch.empty_like(v), 8, True, -1,
        )  # fmt: skip
        at = (int(rings.start[0]) + step) % rings.capacity
        torch.testing.assert_close(
            rings.k[1, :, (step) % rings.capacity].norm(dim=-1), torch.ones(2).double(), rtol=1e-5, atol=0
        )
        assert bool((rings.g[0, :, at] <= 0).all())
        assert not torch.equal(rings.u[0, :, at], v[1])
        rings.commit(torch.ones(2).int(), slot_index)


def packed(token: dict[str, Any], spare: int) -> tuple[Tensor, dict[str, Any]]:
    """q, k and v as views of one (rows, 2 H K + HV V) tensor, the order in which engines project them."""
    parts = [token[name].flatten(1) for name in "qkv"]
    mixed = torch.full((ROWS, sum(part.shape[1] for part in parts) + spare), math.nan)
    views, at = {}, spare
    for name, part in zip("qkv", parts, strict=True):
        mixed[:, at : at + part.shape[1]] = part
        views[name] = mixed[:, at : at + part.shape[1]].view(token[name].shape)
        at += part.shape[1]
    return mixed, token | views


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("native", [False, True])
def test_views_of_one_packed_tensor(native: bool, spare: int, compiles: bool) -> None:
    g = torch.Generator().manual_seed(5)
    A_log = torch.rand(VALUE_HEADS, generator=g)
    slot_index = torch.tensor([2, -1, 1], dtype=torch.int32)
    apart, mixed = (ops.make_cache(spec_of(), ROWS, VALUE_HEADS, KEY_HEADS, "cpu") for _ in range(2))

    def step(token: dict[str, Any], cache: ops.Cache, out: Tensor | None = None) -> Tensor:
        common: dict[str, Any] = {"A_log": A_log, "slot_index": slot_index, "out": out}
        if native:
            return ops.gdn_native_step(**token, state=cache.state, **common)
        return ops.gdn_step(**token, window=WINDOW, **cache.tensors(), **common)

    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
    for length in range(WINDOW + 1):
        for cache in (apart, mixed):
            cache.ring_len.fill_(length)
        token = inputs(g)
        storage, views = packed(token, spare)
        before = storage.clone()
        y = run(views, mixed)
        assert torch.equal(y, step(token, apart))
        assert y.is_contiguous()
        assert torch.equal(storage.nan_to_num(-7.0), before.nan_to_num(-7.0))
    for name, value in apart.tensors().items():
        assert torch.equal(mixed.tensors()[name], value), name
    with pytest.raises(ArgumentError, match=r"out overlaps the memory of [kqv],"):
        step(views, mixed, views["v"])


@pytest.mark.parametrize("cosine", [0.0, 0.9])
def test_large_gates_forget_and_stay_finite(cosine: float) -> None:
    """exp(A_log) softplus(a) up to 1e6 beside gates of nearly nothing, in random order."""
    g = torch.Generator().manual_seed(7)
    cache = ops.make_cache(spec_of(), ROWS, VALUE_HEADS, KEY_HEADS, "cpu")
    A_log = torch.full((VALUE_HEADS,), math.log(16.0))
    exact = Recurrence(cache.state, A_log)
    slot_index = torch.arange(ROWS)
    ones = torch.ones(ROWS).int()
    for _ in range(40):
        token = inputs(g, cosine)
        exponent = torch.rand(ROWS, VALUE_HEADS, generator=g) * 12.0 - 8.0
        token["a"] = torch.where(exponent > 0, 10.0**exponent * 6.0, exponent)
        y = ops.gdn_step(**token, A_log=A_log, slot_index=slot_index, window=WINDOW, **cache.tensors())
        # The fp64 recurrence takes the exponential of a: beyond 700, softplus is its argument.
        expected = exact.step(**(token | {"a": token["a"].clamp(max=700.0)}))
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
        ops.commit(
            ones, ring_start=cache.ring_start, ring_len=cache.ring_len, slot_index=slot_index,
            window=WINDOW, capacity=cache.capacity,
        )  # fmt: skip
        exact.commit(ones)
    assert cache.state.isfinite().all()


def test_keys_of_zeros_and_of_large_values_are_normalised() -> None:
    """The epsilon lies inside the root: a key of zeros writes and reads nothing, a large one has norm 1."""
    g = torch.Generator().manual_seed(9)
    for scale, norm in ((0.0, 0.0), (1e-3, math.sqrt(0.5)), (1e15, 1.0)):
        cache = ops.make_cache(spec_of(), ROWS, VALUE_HEADS, KEY_HEADS, "cpu")
        token = inputs(g)
        for name in ("q", "k"):
            token[name] = token[name] / token[name].norm(dim=-1, keepdim=True) * scale
        y = ops.gdn_step(
            **token, A_log=torch.zeros(VALUE_HEADS), slot_index=torch.arange(ROWS), window=WINDOW,
            **cache.tensors(),
        )  # fmt: skip
        norms = cache.ring_b[:, :, 0].norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, norm), rtol=1e-5, atol=0)
        assert bool((y == 0).all()) == (scale == 0.0)
