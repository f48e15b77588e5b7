"""The convolution's tiles on a GPU: all of them pass the gate and can be timed."""

from __future__ import annotations

import statistics

import pytest
import torch

from replayssm_tune.runtime.conv_tiles import ConvSpec, default_tile, tiles
from replayssm_tune.tuner.conv_bench import ConvStack, gate
from replayssm_tune.tuner.records import ConvCell

SPECS = [
    ConvSpec(4, 1, "bf16", "bf16", "bf16"),
    ConvSpec(4, 4, "bf16", "bf16", "bf16"),
    ConvSpec(3, 2, "fp16", "fp32", "fp32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_every_tile_passes_its_gate(spec: ConvSpec, packed: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = {tile.key: gate(spec, tile, device, packed) for tile in tiles(spec.token_block)}
    assert set(found.values()) == {""}, found


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "channels"), [(1, 1280), (100, 10240)])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_tiles_are_timed_and_none_is_faster_than_the_bytes_it_moves(
    spec: ConvSpec, rows: int, channels: int
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cell = ConvCell(spec, rows, channels)
    stack = ConvStack(cell, device)
    tile = default_tile(cell.effective_batch, spec.token_block)
    time_us, roof_us = map(statistics.median, (stack.graph(tile).time_us(5), stack.roof_us(5)))
    assert 0.1 < time_us < 1e4
    assert roof_us < 1.1 * time_us
