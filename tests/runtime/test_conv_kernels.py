"""The convolution's kernels without a GPU: interpreted, compiled across, and what a warm-up compiles."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from replayssm_tune.codegen.render import render_conv
from replayssm_tune.runtime import (
    ArgumentError,
    CompileError,
    ToolchainError,
    conv,
    conv_launch,
    launch,
    warmup_conv,
)
from replayssm_tune.runtime.contracts import CONV_STEP
from replayssm_tune.runtime.conv_tiles import ConvSpec, default_tile
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from replayssm_tune.runtime.modules import CONVOLUTION, load_module, shared_path
from tests.interpreter import run_interpreted
from tests.runtime.conv_calls import I32
from tests.runtime.conv_scenes import DTYPES, Scene, scene_of

INTERPRETED = {
    "decode": Scene(),
    "decode, fp16": scene_of("fp16", window=2, has_bias=False, channels=40, index_dtype=torch.int64),
    "two taps": Scene(width=2, silu=False, num_tokens=2, window=3),
    "drafts": Scene(num_tokens=3, width=3, accept=0.8, spare=2),
    "packed": scene_of("fp16 in fp32", num_tokens=4, packed=True, padded_rows=2, recycle=0.3),
    "packed, wide": scene_of("fp16", num_tokens=5, window=6, packed=True, null_slot=None, gap=0, channels=32),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_are_the_eager_ops(name: str) -> None:
    met = run_interpreted("tests.runtime.conv_scenes:run_kernels", INTERPRETED[name], 16)
    assert met["rejected"]
    assert met["flushed"]


def test_rendering_is_deterministic_and_what_is_packaged() -> None:
    source = render_conv()
    render_conv.cache_clear()
    assert render_conv() == source
    assert shared_path(CONVOLUTION).read_text() == source


TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90, 100)]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: str(target.arch))
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_kernels_compile_and_load_vectors_where_aligned(
    num_tokens: int, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = load_module(shared_path(CONVOLUTION))
    spec = ConvSpec(4, num_tokens, "bf16", "bf16", "bf16")
    step = conv_launch.step_choice(spec, default_tile(256 * 64, num_tokens), silu=True)
    for packed, aligned in itertools.product((None, "i32"), (True, False)):
        dtypes = ("bf16", "i32", "i32", "i64", "bf16", "bf16", None, packed, "bf16")
        binary = conv_launch.compile_kernel(conv_launch.STEP, step, dtypes, target, aligned=aligned)
        assert ("ld.global.v" in binary.asm["ptx"]) == aligned
        # The order in which launchers give arguments.
        assert list(binary.src.signature) == module.conv_step.arg_names
    seeds = ("fp32", "i32", "i32", "bf16")
    kernel, choice = conv_launch.SEED, conv_launch.Choice((3, 128), 1)
    binary = conv_launch.compile_kernel(kernel, choice, seeds, target, aligned=True)
    assert binary.asm["cubin"]
    assert list(binary.src.signature) == module.conv_seed.arg_names
    with pytest.raises(CompileError, match="conv_seed does not compile for cuda"):
        conv_launch.compile_kernel(kernel, conv_launch.Choice((3, 100), 1), seeds, target, aligned=True)


@pytest.mark.parametrize("kernel", [conv_launch.STEP, conv_launch.SEED], ids=lambda k: k.contract.name)
def test_contracts_and_kernels_name_the_same_arguments(kernel: conv_launch.Kernel) -> None:
    by_name = {argument.name: argument for argument in kernel.contract.arguments}
    assert {tensor.name for tensor in kernel.tensors} == {*by_name}
    for tensor in kernel.tensors:
        assert len(tensor.stride_dims) == len(by_name[tensor.name].dims) - 1


ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "channels": ({"channels": 0}, "channels is 0; expected a whole number of at least 1"),
    "channels, no number": ({"channels": 64.0}, r"channels is 64\.0"),
    "width": ({"width": 5}, "weight has width 5"),
    "batch": ({"batches": [8, 0]}, "a batch is 0"),
    "rows": ({"batches": [70_000]}, "has 70000 rows"),
    "num_tokens": ({"num_tokens": 65}, "a window is 1 to 64 tokens"),
    "dtype": ({"dtype": torch.float64}, "x is float64"),
    "ring": ({"ring_dtype": torch.float16}, "ring is fp16; expected bf16 or fp32"),
    "weight": ({"weight_dtype": torch.float16}, "weight is fp16; expected bf16 or fp32"),
    "index": ({"index_dtype": torch.int16}, "slot_index is int16; expected i32 or i64"),
    "activation": ({"activation": "relu"}, "activation is 'relu'"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_warm_up_of_what_is_not_legal_is_refused(name: str) -> None:
    changes, message = ILLEGAL[name]
    given: dict[str, Any] = {"channels": 64, "width": 4, "batches": [8]} | changes
    with pytest.raises(ArgumentError, match=message):
        warmup_conv(**given)


def test_a_warm_up_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no CUDA device to warm up"):
        warmup_conv(64, 4, [8])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_warm_up_compiles_what_calls_will_ask_for(
    dtypes: str, has_bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernel, constants, dtypes and alignment, without a GPU: what would be compiled is recorded."""
    asked: list[Any] = []

    def record(*arguments: Any) -> Any:
        asked.append(arguments)
        return lambda *ignored: None

    monkeypatch.setattr(conv_launch, "_launch_of", record)
    monkeypatch.setattr(
        conv_launch, "tile_for", lambda spec, batch, index: default_tile(batch, spec.token_block)
    )
    monkeypatch.setattr(launch, "_raw_stream", int)
    monkeypatch.setattr(conv, "cuda_index", lambda device: -1)
    x, ring, weight = (TORCH_DTYPES[name] for name in DTYPES[dtypes])
    for channels, rows, num_tokens in ((64, 2, 1), (24, 3, 3), (1024, 600, 2)):
        del asked[:]
        count = warmup_conv(
            channels, 3, [rows], num_tokens=num_tokens, packed=packed, dtype=x, ring_dtype=ring,
            weight_dtype=weight, has_bias=has_bias, index_dtype=torch.int64,
        )  # fmt: skip
        warmed = {*asked}
        assert len(warmed) == count == 2
        del asked[:]
        cache = torch.zeros(rows, 8, channels, dtype=ring)
        cursor, slots = torch.zeros(rows, dtype=I32), torch.arange(rows)
        inputs = torch.zeros(rows * num_tokens, channels, dtype=x)
        bias = torch.zeros(channels, dtype=weight) if has_bias else None
        starts = torch.arange(rows + 1, dtype=I32) * num_tokens if packed else None
        tensors = (
            inputs, torch.zeros(channels, 3, dtype=weight), bias, cache, cursor, cursor, slots, starts,
            torch.empty_like(inputs),
        )  # fmt: skip
        signature = conv.check_conv_step(CONV_STEP, tensors, (3, num_tokens, True))
        conv_launch.prepare(signature, -1).launch(tensors, -1)
        history = torch.zeros(rows, 2, channels, dtype=x)
        conv_launch.launch_conv_seed(history, cache, cursor, slots, -1)
        assert {*asked} == warmed
