"""The convolution's tiles on a GPU: all of them pass the gate and can be timed."""

from __future__ import annotations

import statistics

import pytest
import torch

from replayssm_tune.runtime.contracts import CONV_STEP
from replayssm_tune.runtime.conv import check_conv_step
from replayssm_tune.runtime.conv_launch import tiled_launcher
from replayssm_tune.runtime.conv_tiles import ConvSpec, ConvTile, default_tile, tiles
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from replayssm_tune.tuner.conv_bench import WINDOW, ConvStack, gate
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


def convolved(spec: ConvSpec, tile: ConvTile, device: torch.device) -> torch.Tensor:
    """Outputs of one call, the same for every tile but for what the tile does to them."""
    torch.manual_seed(1)
    rows, channels, capacity = 5, 1040, WINDOW + spec.num_tokens + spec.width - 1
    activation, stored, weights = (
        TORCH_DTYPES[name] for name in (spec.activation_dtype, spec.ring_dtype, spec.weight_dtype)
    )
    x = torch.randn(rows * spec.num_tokens, channels).to(activation)
    cursors = torch.arange(2 * rows, dtype=torch.int32).split(rows)
    tensors = (
        x, torch.randn(channels, spec.width).to(weights), torch.randn(channels).to(weights),
        torch.randn(rows, capacity, channels).to(stored), *cursors, torch.arange(rows, dtype=torch.int32),
        None, torch.empty_like(x),
    )  # fmt: skip
    given = tuple(tensor if tensor is None else tensor.to(device) for tensor in tensors)
    signature = check_conv_step(CONV_STEP, given, (WINDOW, spec.num_tokens, True))
    index = -1 if device.index is None else device.index
    tiled_launcher(signature, tile, index).launch(given, -1)
    out: torch.Tensor | None = given[-1]
    assert out is not None
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_a_tile_changes_no_bits(spec: ConvSpec) -> None:
    """A channel's sum is of the same terms in the same order, whoever works it out."""
    device = torch.device("cuda", torch.cuda.current_device())
    outputs = {tile.key: convolved(spec, tile, device) for tile in tiles(spec.token_block)}
    first = next(iter(outputs.values()))
    assert all(torch.equal(found, first) for found in outputs.values())
