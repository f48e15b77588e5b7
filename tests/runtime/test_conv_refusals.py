"""What bad arguments of the convolution's ops are told, and that nothing is written then."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from replayssm_tune.runtime import ArgumentError, conv_seed, conv_step
from tests.runtime.conv_calls import CHANNELS, I32, arguments, seeding

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x is no tensor": ({"x": np.zeros((3, 8))}, "x is of type numpy.ndarray; expected a tensor"),
    "bias is no tensor": ({"bias": [0.0] * 8}, "bias is of type list"),
    "query_start is no tensor": ({"query_start": [0, 1, 2, 3]}, "query_start is of type list"),
    "weight is missing": ({"weight": None}, "weight is None"),
    "x rank": ({"x": torch.zeros(3, 2, 4)}, r"x has shape \(3, 2, 4\); expected 2 .*\(tokens, channels\)"),
    "x dtype": ({"x": torch.zeros(3, 8).double()}, "x is float64; expected fp32 or bf16 or fp16"),
    "x without channels": (
        {"x": torch.zeros(3, 0), "weight": torch.zeros(0, 4), "ring": torch.zeros(6, 8, 0)},
        "x has no channels",
    ),
    "x stride": ({"x": torch.zeros(8, 3).T}, "innermost dimension of x has stride 3"),
    "tokens": ({"x": torch.zeros(4, 8)}, "x has 4 tokens .*; expected 3 rows of 1, 3; pass query_start"),
    "weight rank": ({"weight": torch.zeros(8, 1, 4)}, "weight has shape"),
    "weight width 1": ({"weight": torch.zeros(8, 1)}, r"width 1 .* expected 2 to 4\. A weight of torch's"),
    "weight width 5": ({"weight": torch.zeros(8, 5)}, "width 5"),
    "weight channels": ({"weight": torch.zeros(7, 4)}, r"weight has shape \(7, 4\); expected \(8, 4\)"),
    "weight dtype": ({"weight": torch.zeros(8, 4).half()}, "weight is fp16; expected fp32"),
    "bias shape": ({"bias": torch.zeros(1, 8)}, r"bias has shape \(1, 8\); expected \(8,\)"),
    "bias dtype": ({"bias": torch.zeros(8).bfloat16()}, "bias is bf16; expected fp32"),
    "ring rank": ({"ring": torch.zeros(6, 8)}, r"ring has shape .*\(slots, capacity, channels\)"),
    "ring channels": ({"ring": torch.zeros(6, 8, 9)}, r"ring has shape \(6, 8, 9\); expected \(6, 8, 8\)"),
    "ring dtype": ({"ring": torch.zeros(6, 8, 8).half()}, "ring is fp16; expected fp32"),
    "ring expanded": ({"ring": torch.zeros(1, 8, 8).expand(6, 8, 8)}, "ring is written, but an expanded"),
    "ring too short": (
        {"ring": torch.zeros(6, 7, 8)},
        r"ring has room for 7 tokens .* too few for window 4: .* = 4 \+ 1 \+ 3 = 8",
    ),
    "ring_start shape": ({"ring_start": torch.zeros(5, dtype=I32)}, r"ring_start has shape \(5,\)"),
    "ring_start dtype": ({"ring_start": torch.zeros(6).long()}, "ring_start is i64; expected i32"),
    "ring_len shape": ({"ring_len": torch.zeros(5, dtype=I32)}, r"ring_len has shape \(5,\)"),
    "slot_index rank": ({"slot_index": torch.zeros(3, 1, dtype=I32)}, "slot_index has shape"),
    "slot_index dtype": ({"slot_index": torch.zeros(3).short()}, "slot_index is int16; expected i32 or i64"),
    "query_start shape": ({"query_start": torch.zeros(3, dtype=I32)}, r"query_start .*expected \(4,\)"),
    "query_start dtype": ({"query_start": torch.zeros(4).long()}, "query_start is i64; expected i32"),
    "window": ({"window": 4.0}, r"window is 4\.0; expected a whole number"),
    "window 65": ({"window": 65}, "a window is 1 to 64 tokens"),
    "num_tokens": ({"num_tokens": True}, "num_tokens is True; expected a whole number"),
    "num_tokens 0": ({"num_tokens": 0}, "num_tokens is 0 and window 4"),
    "num_tokens 5": ({"num_tokens": 5}, "num_tokens is 5 and window 4; .* a row has 1 to window"),
    "activation": ({"activation": "relu"}, "activation is 'relu'; expected 'silu' or None"),
    "null_slot": ({"null_slot": 1.5}, r"null_slot is 1\.5"),
    "null_slot beyond": ({"null_slot": 2**31}, "beyond 32 bits"),
    "device": ({"weight": torch.zeros(8, 4, device="meta")}, "weight is on meta"),
    "rows": (
        {"slot_index": torch.zeros(70_000, dtype=I32), "x": torch.zeros(70_000, 8)},
        "slot_index has 70000 rows, a launch takes at most 65535; split the batch",
    ),
    "out shape": ({"out": torch.zeros(4, 8)}, r"out has shape \(4, 8\); expected \(3, 8\)"),
    "out dtype": ({"out": torch.zeros(3, 8).half()}, "out is fp16; expected fp32"),
    "out expanded": ({"out": torch.zeros(1, 8).expand(3, 8)}, "out is written, but an expanded"),
    "slot": ({"slot_index": torch.tensor([0, 6, 1])}, "row 1 names slot 6, but there are 6 slots"),
    "start": ({"ring_start": torch.full((6,), 8, dtype=I32)}, "ring_start 8 .* outside of 0 to 7"),
    "length": ({"ring_len": torch.full((6,), 5, dtype=I32)}, "ring_len 5, outside of .* 0 to 4"),
    "query_start ends late": (
        {"query_start": torch.tensor([0, 1, 2, 3], dtype=I32), "x": torch.zeros(2, 8)},
        "query_start begins at 0 and ends at 3, of 2 tokens; query_start goes from 0 to at most 2",
    ),
    "query_start begins late": (
        {"query_start": torch.tensor([1, 1, 2, 3], dtype=I32)},
        "query_start begins at 1 and ends at 3",
    ),
    "query_start falls": (
        {"query_start": torch.tensor([0, 1, 0, 1], dtype=I32)},
        "row 1 is given -1 tokens, of 3 tokens;",
    ),
    "too many tokens": (
        {"query_start": torch.tensor([0, 1, 3, 3], dtype=I32)},
        "row 1 is given 2 tokens, .* in steps of 0 to num_tokens = 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    given = arguments(**{k: v for k, v in changes.items() if k not in ("num_tokens", "window")}) | changes
    ring = given["ring"].clone()
    with pytest.raises(ArgumentError, match=message):
        conv_step(**given)
    assert torch.equal(given["ring"], ring), "something was written"


REFUSED_SEEDS: dict[str, tuple[dict[str, Any], str]] = {
    "history is no tensor": ({"history": [0.0]}, "history is of type list"),
    "history rank": ({"history": torch.zeros(2, 8)}, r"\(rows, width - 1, channels\)"),
    "history length": ({"history": torch.zeros(2, 4, 8)}, "history has 4 inputs a row .* 1 to 3"),
    "history rows": ({"history": torch.zeros(3, 3, 8)}, r"slots has shape \(2,\); expected \(3,\)"),
    "ring narrower": ({"ring": torch.zeros(6, 8, 8).half()}, "ring is fp16; expected fp32"),
    "history dtype": ({"history": torch.zeros(2, 3, 8).double()}, "history is float64; expected fp32 or"),
    "history without channels": (
        {"history": torch.zeros(2, 3, 0), "ring": torch.zeros(6, 8, 0)},
        "history has no channels",
    ),
    "ring rank": ({"ring": torch.zeros(6, 8)}, "ring has shape"),
    "ring channels": ({"ring": torch.zeros(6, 8, 9)}, r"expected \(6, 8, 8\)"),
    "ring dtype": ({"ring": torch.zeros(6, 8, 8).double()}, "ring is float64"),
    "ring too short": ({"ring": torch.zeros(6, 4, 8)}, "ring has room for 4 tokens .* at least 5"),
    "ring_start": ({"ring_start": torch.zeros(5, dtype=I32)}, r"ring_start has shape \(5,\)"),
    "slots dtype": ({"slots": torch.zeros(2)}, "slots is fp32; expected i32 or i64"),
    "rows": (
        {"history": torch.zeros(1, 1, 8).expand(70_000, 1, 8), "slots": torch.zeros(70_000, dtype=I32)},
        "history has 70000 rows",
    ),
    "slot": ({"slots": torch.tensor([1, 6])}, "row 1 names slot 6"),
    "start": ({"ring_start": torch.full((6,), 8, dtype=I32)}, "ring_start 8"),
    "null_slot": ({"null_slot": "0"}, "null_slot is '0'"),
}


@pytest.mark.parametrize("name", REFUSED_SEEDS)
def test_seeds_refused(name: str) -> None:
    changes, message = REFUSED_SEEDS[name]
    given = {"history": torch.ones(2, 3, CHANNELS)} | seeding() | changes
    with pytest.raises(ArgumentError, match=message):
        conv_seed(**given)
    assert not bool(given["ring"].any()), "something was written"


@pytest.mark.parametrize("where", ["x", "ring"])
def test_an_overlapping_output_is_refused(where: str) -> None:
    given = arguments(rows=2)
    out = {"x": given["x"], "ring": given["ring"][5, 6:]}[where]
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"out overlaps the memory of {where}"):
            conv_step(**given, out=out)
    # Side by side in one buffer: only rows that interleave are told apart by nobody.
    both = torch.zeros(4, CHANNELS)
    both[:2] = given["x"]
    expected = conv_step(**copy.deepcopy(given))
    assert torch.equal(conv_step(**given | {"x": both[:2]}, out=both[2:]), expected)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "ring"])
def test_gradients_are_refused(name: str) -> None:
    given = arguments(bias=torch.zeros(CHANNELS))
    given[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name} requires a gradient"):
        conv_step(**given)
    with torch.no_grad():
        assert conv_step(**given).shape == given["x"].shape


@pytest.mark.parametrize("name", ["history", "ring"])
def test_gradients_of_seeds_are_refused(name: str) -> None:
    given = {"history": torch.zeros(2, 3, CHANNELS)} | seeding()
    given[name].requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name} requires a gradient"):
        conv_seed(**given)
