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
from tests.runtime.small_calls import (
    CONTRACTS,
)


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


def test_sizes_of_caches_may_be_integers_of_numpy() -> None:
    spec, four = Spec("mamba2", "step", 8, 16, 2, 4), np.int32(4)
    cache = ops.make_cache(spec, four, four, np.int32(2), "cpu", np.int64(7))
    assert cache.ring_x.shape == (4, 4, 7, 8)
    # Too much for 32 bits.
    many = np.int32(2**28)
    assert ops.bytes_per_slot(spec, many, many // 2) == ops.bytes_per_slot(spec, 2**28, 2**27)
