"""Caches: their tensors, bytes and sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.errors import ArgumentError
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool, make_pool
from tests.runtime.calls import CACHES, CURSORS, cache_of, same_bits
from tests.runtime.small_calls import CONTRACTS

PARTS = (*CACHES, *CURSORS)


@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_cache_and_its_bytes(family: str) -> None:
    spec = Spec(family, "step", 80, 128, 12, 16, has_d=family == "mamba2")
    cache = ops.make_cache(spec, 3, 96, 8, "cpu")
    tensors = [cache.state, cache.ring_x, cache.ring_b, cache.ring_decay]
    assert sum(t.numel() * t.element_size() for t in tensors) == 3 * ops.bytes_per_slot(spec, 96, 8)
    assert cache.capacity == 17
    assert ops.make_cache(spec.native, 3, 96, 8, "cpu").capacity == 0
    assert ops.bytes_per_slot(spec.native, 96, 8) == 96 * 80 * 128 * 4
    assert ops.bytes_per_slot(spec, 96, 8, capacity=18) > ops.bytes_per_slot(spec, 96, 8)
    with pytest.raises(ArgumentError, match="95 heads in 8 groups do not fit"):
        ops.bytes_per_slot(spec, 95, 8)
    with pytest.raises(ArgumentError, match="capacity 16 is too small for window 16: rings need at least 17"):
        ops.make_cache(spec, 3, 96, 8, "cpu", capacity=16)
    tied = dataclasses.replace(cache, ring_len=cache.ring_start)
    assert tied.ring_len is cache.ring_start
    names = {argument.name for argument in CONTRACTS[f"{family}_step"].arguments}
    assert {*tied.tensors()} == {n for n in names if n == "state" or n.startswith("ring_")}


@pytest.mark.parametrize("size", [0, -8, 8.0, 2.5, None, "8", True, torch.ones(1)], ids=repr)
@pytest.mark.parametrize("name", ["slots", "heads", "groups", "capacity"])
@pytest.mark.parametrize("native", [False, True])
def test_odd_sizes_of_caches_are_refused(name: str, size: Any, native: bool) -> None:
    spec = Spec("mamba2", "step", 8, 16, 2, 4)
    given: dict[str, Any] = {"spec": spec.native if native else spec, "heads": 4, "groups": 2}
    caches: dict[str, Any] = given | {"slots": 3, "device": "cpu"}
    message = rf"{name} is .*; pass a whole number of at least \d"
    if name == "capacity" and (size is None or (native and size == 0)):
        return  # These are legal.
    if name == "capacity" and size == 0:
        message = "capacity 0 is too small for window 4: rings need at least 5"
    with pytest.raises(ArgumentError, match=message):
        ops.make_cache(**(caches | {name: size}))
    if name != "slots":
        with pytest.raises(ArgumentError, match=message):
            ops.bytes_per_slot(**(given | {name: size}))


def test_a_convolution_asks_for_longer_rings() -> None:
    spec = Spec("mamba2", "step", 64, 128, 16, 16)
    assert ops.ring_capacity(spec) == ops.make_cache(spec, 1, 16, 1, "cpu").capacity == 17
    assert ops.ring_capacity(spec, conv_width=4) == 20
    assert ops.ring_capacity(spec.native, 4) == 0
    with pytest.raises(ArgumentError, match="conv_width is 0"):
        ops.ring_capacity(spec, 0)


def test_sizes_of_caches_may_be_integers_of_numpy() -> None:
    spec, four = Spec("mamba2", "step", 8, 16, 2, 4), np.int32(4)
    cache = ops.make_cache(spec, four, four, np.int32(2), "cpu", np.int64(7))
    assert cache.ring_x.shape == (4, 4, 7, 8)
    # Too much for 32 bits.
    many = np.int32(2**28)
    assert ops.bytes_per_slot(spec, many, many // 2) == ops.bytes_per_slot(spec, 2**28, 2**27)


SMALL = Spec("mamba2", "step", 8, 16, 2, 4, state_dtype="bf16")


def filled(spec: Spec = SMALL, slots: int = 5, seed: int = 0, **sizes: Any) -> tuple[ops.Cache, Pool]:
    """Strided views of a pool whose every byte is random, NaN of all kinds among them."""
    g = torch.Generator().manual_seed(seed)
    pool = make_pool(spec, slots, **({"heads": 4, "groups": 2} | sizes), generator=g, gap_bytes=4)
    pool.storage.random_(0, 256, generator=g)
    pool.ring_len.random_(0, 5, generator=g)
    return cache_of(pool, spec), pool


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spec", [SMALL, SMALL.native], ids=["ring", "native"])
def test_snapshots_are_exact_and_in_memory_of_their_own(spec: Spec, index_dtype: torch.dtype) -> None:
    (here, source), (there, target) = filled(spec, seed=1), filled(spec, slots=8, seed=2)
    taken = torch.tensor([3, 0, 4], dtype=index_dtype)
    given = torch.tensor([1, 7, 5], dtype=index_dtype)
    kept = {name: getattr(here, name)[taken.long()] for name in PARTS}
    before, cursors = target.storage.clone(), (target.ring_start.clone(), target.ring_len.clone())
    snapshot = here.snapshot(taken)
    for pool in (source.storage, source.ring_start, source.ring_len):
        pool.zero_()
    for _ in range(2):  # a snapshot may serve again
        there.restore(snapshot, given)
        for name in PARTS:
            assert same_bits(getattr(there, name)[given.long()], kept[name]), name
    assert {getattr(snapshot.held, name).shape[0] for name in PARTS} == {3}
    # Other slots and the gaps between rows keep their bytes.
    mask = torch.zeros_like(target.storage)
    for field in target.fields.values():
        field.bytes_of(mask)[given.long()] = 1
    assert not ((target.storage != before) & ~mask.bool()).any()
    others = torch.tensor([0, 2, 3, 4, 6])
    assert torch.equal(target.ring_start[others], cursors[0][others])
    assert torch.equal(target.ring_len[others], cursors[1][others])


def test_layers_with_shared_cursors_are_restored_one_by_one() -> None:
    layers = [filled(seed=seed)[0] for seed in range(3)]
    shared = {name: getattr(layers[0], name) for name in ("ring_start", "ring_len")}
    layers = [dataclasses.replace(layer, **shared) for layer in layers]
    slots, others = torch.tensor([2, 4]), torch.tensor([1, 3])
    expected = [{name: getattr(layer, name)[slots] for name in PARTS} for layer in layers]
    snapshots = [layer.snapshot(slots) for layer in layers]
    ops.reset(torch.arange(5), **shared)
    for layer, snapshot in zip(layers, snapshots, strict=True):
        layer.restore(snapshot, others)
    for layer, parts in zip(layers, expected, strict=True):
        assert all(same_bits(getattr(layer, name)[others], value) for name, value in parts.items())
    assert not shared["ring_len"][slots].any()


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([1, 2], r"slots is \[1, 2\]; pass a tensor"),
        (torch.tensor([[1, 2]]), r"slots is \(1, 2\) int64 on cpu; pass one dimension of int32 or int64"),
        (torch.tensor([1.0, 2.0]), r"slots is \(2,\) float32 on cpu; pass one dimension"),
        (torch.tensor([1, 2]).short(), r"slots is \(2,\) int16"),
        (torch.tensor([1, -1]), "slots names -1, but there are 5 slots; name slots of live sequences alone"),
        (torch.tensor([5, 1]), "slots names 5, but there are 5 slots"),
        (torch.tensor([1, 2]).to("meta"), "slots is on meta, the cache on cpu; move slots there"),
    ],
)
def test_odd_slots_of_snapshots_are_refused(slots: Any, message: str) -> None:
    cache, pool = filled()
    snapshot, before = cache.snapshot(torch.tensor([0, 1])), pool.storage.clone()
    for call in (lambda: cache.snapshot(slots), lambda: cache.restore(snapshot, slots)):
        with pytest.raises(ArgumentError, match=message):
            call()
    assert torch.equal(pool.storage, before)


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (
            dataclasses.replace(SMALL, state_dtype="fp32"),
            {},
            r"state of .* \(4, 8, 16\) float32 .* bfloat16 on",
        ),
        (
            dataclasses.replace(SMALL, ring_dtype="fp32"),
            {},
            r"ring_x of .* \(4, 5, 8\) float32 .* bfloat16 on",
        ),
        (SMALL, {"heads": 8, "groups": 4}, r"state of .* \(8, 8, 16\) .* \(4, 8, 16\)"),
        (SMALL, {"capacity": 6}, r"ring_x of .* \(4, 6, 8\) .* \(4, 5, 8\) .*; restore it into a cache"),
        (SMALL.native, {}, r"ring_x of .* \(4, 0, 8\)"),
        (
            Spec("gdn", "step", 8, 16, 2, 4, state_dtype="bf16", has_d=False),
            {},
            "a snapshot of gdn does not fit a cache of mamba2; restore it into a cache made with",
        ),
    ],
)
def test_snapshots_that_do_not_fit_are_refused(spec: Spec, sizes: dict[str, int], message: str) -> None:
    cache, pool = filled()
    snapshot, before = filled(spec, **sizes)[0].snapshot(torch.tensor([0, 1])), pool.storage.clone()
    with pytest.raises(ArgumentError, match=message):
        cache.restore(snapshot, torch.tensor([2, 3]))
    assert torch.equal(pool.storage, before)


def test_every_sequence_of_a_snapshot_gets_one_slot() -> None:
    cache, pool = filled()
    snapshot, before = cache.snapshot(torch.tensor([0, 1])), pool.storage.clone()
    with pytest.raises(ArgumentError, match="3 slots are named for a snapshot of 2; name one for each"):
        cache.restore(snapshot, torch.tensor([2, 3, 4]))
    with pytest.raises(ArgumentError, match=r"slots \[3, 3\] name a slot twice; .* its own slot"):
        cache.restore(snapshot, torch.tensor([3, 3]))
    assert torch.equal(pool.storage, before)
    # None at all is fine.
    cache.restore(cache.snapshot(torch.tensor([], dtype=torch.int32)), torch.tensor([], dtype=torch.int64))
    assert torch.equal(pool.storage, before)
