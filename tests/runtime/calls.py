"""Calls of the public ops with random contents, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool

CACHES = ("state", "ring_x", "ring_b", "ring_decay")
CURSORS = ("ring_start", "ring_len")
GDN_CACHES = {"ring_u": "ring_x", "ring_k": "ring_b", "ring_g": "ring_decay"}
"""Fields of a cache by the names that GDN's ops have for them."""


def caches_of(given: dict[str, Any]) -> dict[str, str]:
    """The caches and cursors of a call: their names as fields of a cache, by their names in the call."""
    names = {GDN_CACHES.get(name, name): name for name in given}
    return {names[field]: field for field in (*CACHES, *CURSORS) if field in names}


def cache_of(pool: Pool, spec: Spec) -> ops.Cache:
    """The views of a pool as a cache."""
    return ops.Cache(
        pool.state, pool.ring_x, pool.ring_b, pool.ring_decay, pool.ring_start, pool.ring_len, spec.family
    )


def random_call(
    spec: Spec,
    rows: int,
    heads: int,
    device: str,
    slots: int | None = None,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
    packed: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a legal call; every other row flushes, the others hold half a window at most.

    Rows lie in shuffled slots; caches are contiguous. Where tokens are verified, rows have as many as they
    may; ``packed`` ones any number of them, and tokens are left over.
    """
    g = torch.Generator(device).manual_seed(seed)
    activation = TORCH_DTYPES[spec.activation_dtype]
    groups = heads // spec.heads_per_group
    count = spec.num_tokens
    tokens, places = rows * count, rows * count if spec.op == "native_verify" else rows
    slots = places if slots is None else slots

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    cache = ops.make_cache(spec, slots, heads, groups, device)
    cache.state.copy_(normal(*cache.state.shape))
    slot = torch.randperm(slots, generator=g, device=device)[:places]
    rate = 1.0 + 15.0 * torch.rand(heads, generator=g, device=device)
    value = normal(tokens, heads, spec.head_dim, dtype=activation)
    gate = normal(tokens, heads, dtype=activation)
    key, query = (normal(tokens, groups, spec.state_size, dtype=activation) for _ in range(2))
    given: dict[str, Any] = {"state": cache.state, "slot_index": slot.to(index_dtype)}
    if spec.has_dt_bias:
        given["dt_bias"] = normal(heads) - 4.0
    if spec.family == "gdn":
        given |= {"q": query, "k": key, "v": value, "a": gate, "b": normal(tokens, heads, dtype=activation)}
        given |= {"A_log": rate.log(), "qk_l2norm": spec.qk_l2norm}
    else:
        given |= {"x": value, "dt": gate, "A": -rate, "B": key, "C": query}
        if spec.has_z:
            given["z"] = normal(tokens, heads, spec.head_dim, dtype=activation)
        if spec.has_d:
            given["D"] = normal(heads)
    if packed:
        counts = torch.randint(0, count + 1, (rows,), generator=g, device=device)
        given["query_start"] = torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)]).int()
    if spec.op == "native_verify":
        kept = torch.randint(1, count + 1, (rows,), generator=g, device=device)
        given |= {"slot_index": given["slot_index"].view(rows, count), "accepted": kept.to(index_dtype)}
    if spec.is_native:
        return given
    cache.ring_x.copy_(normal(*cache.ring_x.shape))
    cache.ring_b.copy_(normal(*cache.ring_b.shape))
    cache.ring_decay.uniform_(0.001, 0.1, generator=g)
    if spec.family == "gdn":
        cache.ring_b.div_(cache.ring_b.norm(dim=-1, keepdim=True))
        cache.ring_decay.neg_()
    cache.ring_start.random_(0, cache.capacity, generator=g)
    cache.ring_len.fill_(min(spec.window // 2, spec.window - count))
    cache.ring_len[slot[::2]] = spec.window
    if spec.verifies:
        given["num_tokens"] = count
    return given | cache.tensors() | {"window": spec.window}


def call(given: dict[str, Any]) -> Tensor:
    """The op of the family whose arguments these are, a native one where no window is given."""
    name = "step" if "window" in given else "native_verify" if "accepted" in given else "native_step"
    y: Tensor = getattr(ops, f"{'gdn' if 'q' in given else 'mamba2'}_{name}")(**given)
    return y


def commit(given: dict[str, Any], accepted: Tensor | None = None) -> None:
    """Move the cursors after a call; None accepts every token."""
    count, starts = given.get("num_tokens", 1), given.get("query_start")
    every = torch.full_like(given["slot_index"], count) if starts is None else starts.diff()
    ops.commit(
        every if accepted is None else accepted,
        ring_start=given["ring_start"],
        ring_len=given["ring_len"],
        slot_index=given["slot_index"],
        window=given["window"],
        num_tokens=count,
        query_start=starts,
        capacity=given["ring_u" if "q" in given else "ring_x"].shape[2],
    )


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same call on memory of its own."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN and all."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def captured(device: str, body: Callable[[], None]) -> Callable[[], None]:
    """What replays ``body``: a CUDA graph, on a CPU the body itself."""
    if device == "cpu":
        return body
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


@pytest.fixture(scope="session")
def family() -> str:
    """For modules whose scenes name their specs, and by them their families: the driver runs them once."""
    return "mamba2"
