"""Runs in the interpreter's process: gate and buffers of the convolution, by its kernel or by a wrong one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.render import render_conv
from replayssm_tune.runtime import conv_launch, launch
from replayssm_tune.runtime.conv import eager_conv_step
from replayssm_tune.runtime.conv_tiles import ConvSpec, ConvTile
from replayssm_tune.tuner import conv_bench
from replayssm_tune.tuner.records import ConvCell

CPU = torch.device("cpu")


@contextlib.contextmanager
def _module(wrong: tuple[str, str] | None) -> Iterator[pytest.MonkeyPatch]:
    """The convolution's module, with a text of it (and what stands in its place) changed."""
    torch.set_num_threads(1)
    source = render_conv()
    if wrong is not None:
        assert wrong[0] in source
        source = source.replace(*wrong)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "conv_step.py"
        path.write_text(source)
        patch.setattr(conv_launch, "shared_path", lambda name: path)
        patch.setattr(launch, "_raw_stream", int)
        yield patch


def gate(
    spec_key: str, tile: tuple[int, int], wrong: tuple[str, str] | None = None, packed: bool = False
) -> str:
    """What the gate says.

    Args:
        spec_key: Of fp32 or fp16.
        tile: Block and warps.
        wrong: See :func:`_module`.
        packed: See :func:`.conv_bench.gate`.
    """
    with _module(wrong):
        return conv_bench.gate(ConvSpec.parse(spec_key), ConvTile(*tile), CPU, packed)


class _Graph:
    """Stands in for a CUDA graph: what is captured runs once."""

    launches: Sequence[Callable[[], object]] = ()

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        type(self).launches = calls
        for call in calls:
            call()

    def time_us(self, repeats: int) -> list[float]:
        return [1.0] * repeats


def timed(spec_key: str, rows: int, channels: int, wrong: tuple[str, str] | None = None) -> dict[str, Any]:
    """What a stack launches, and whether outputs and rings of every layer are those of the eager op.

    ``roof`` is what the roof reads and writes, in values of 2 bytes a row and channel.
    """
    spec = ConvSpec.parse(spec_key)
    cell = ConvCell(spec, rows, channels)
    moved: list[tuple[int, int]] = []

    def movers(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> list[list[Callable[[], object]]]:
        moved.append((sources[0].nbytes, targets[0].nbytes))
        return [[lambda: None]]

    with _module(wrong) as patch:
        patch.setattr(conv_bench, "Graph", _Graph)
        patch.setattr(conv_bench, "move_launches", movers)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1))
        stack = conv_bench.ConvStack(cell, CPU)
        wanted = [[None if t is None else t.clone() for t in tensors] for tensors in stack._tensors]
        stack.graph(ConvTile(32, 1))
        launches = len(_Graph.launches)
        stack.roof_us(3)
    same = {"out": True, "ring": True}
    for tensors, expected in zip(stack._tensors, wanted, strict=True):
        eager: Any = (*expected, max(conv_bench.WINDOW, spec.num_tokens), spec.num_tokens, True, -1)
        eager_conv_step(*eager)
        for name, index in (("out", 8), ("ring", 3)):
            found, right = tensors[index], expected[index]
            assert found is not None
            assert right is not None
            same[name] &= torch.allclose(found, right, rtol=1e-3, atol=1e-3)
    (read, written) = (count // (2 * rows * channels) for count in moved[0])
    return {"layers": stack.layers, "launches": launches, **same, "roof": (read, written)}
