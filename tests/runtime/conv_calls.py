"""Legal calls of the convolution's ops, small ones."""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.small_calls import ordered

I32 = torch.int32
ROWS, SLOTS, CHANNELS, WINDOW = 3, 6, 8, 4


def arguments(rows: int = ROWS, capacity: int | None = None, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call of one token a row, of another where the changes say so."""
    g = torch.Generator().manual_seed(5)
    window, num_tokens = changes.get("window", WINDOW), changes.get("num_tokens", 1)
    width = changes["weight"].shape[1] if isinstance(changes.get("weight"), torch.Tensor) else 4
    capacity = window + num_tokens + width - 1 if capacity is None else capacity
    given: dict[str, Any] = {
        "x": torch.randn(rows * num_tokens, CHANNELS, generator=g),
        "weight": torch.randn(CHANNELS, 4, generator=g),
        "ring": torch.randn(SLOTS, capacity, CHANNELS, generator=g),
        "ring_start": torch.randint(0, capacity, (SLOTS,), generator=g, dtype=I32),
        "ring_len": torch.full((SLOTS,), min(2, window), dtype=I32),
        "slot_index": torch.randperm(SLOTS, generator=g)[:rows].int(),
        "window": window,
    }
    return given | changes


def seeding(**changes: Any) -> dict[str, Any]:
    """All of a legal call of :func:`conv_seed` but the history."""
    start = torch.zeros(SLOTS, dtype=I32)
    slots = torch.tensor([1, 4], dtype=I32)
    return {"ring": torch.zeros(SLOTS, 8, CHANNELS), "ring_start": start, "slots": slots} | changes


def positional(given: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the order of the operator's schema."""
    defaults = {"bias": None, "query_start": None, "num_tokens": 1, "silu": True, "null_slot": -1}
    full = defaults | {"out": torch.empty_like(given["x"])} | given
    return ordered("conv_step", full)
