"""Python cost of a public call above a bare Triton launch: ``python benchmarks/overhead.py [--output FILE]``.

On a CUDA device and under ``torch.no_grad()``. Three ways of launching the very same kernel with the
same tensors take turns: the public op, the compiled kernel's own ``run`` with prepared arguments, and
Triton's just-in-time ``kernel[grid](...)``. A sample is the host time of 100 calls; the device is
synchronised between samples and the shape is tiny, so that no call waits for room in the launch queue.
Figures are differences of medians, in ``results/<date>-<gpu>-overhead.json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch
import triton
from torch import Tensor

from benchmarks.summary import RESULTS
from replayssm_tune.runtime import launch, ops
from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.build import compile_kernel, constants, options
from replayssm_tune.runtime.compiled import is_aligned, tensor_strides
from replayssm_tune.runtime.dtypes import DTYPE_NAMES
from replayssm_tune.runtime.modules import load_module, module_path
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import gpu_slug
from replayssm_tune.tuner.runfile import today

SPEC = Spec("mamba2", "step", 64, 128, 16, 16)
"""A spec that ships, at one sequence of one group: its plan there is one kernel."""

ASKED_OVERHEAD_US = 5.0
CALLS = 100
WARM_CALLS = 1000

Call = Callable[[], object]


def arguments(spec: Spec, rows: int = 1) -> dict[str, Any]:
    """Keyword arguments of the public op, with its output; half a window in every ring."""
    heads, activation = spec.heads_per_group, torch.bfloat16

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    cache = ops.make_cache(spec, rows, heads, 1, "cuda")
    given: dict[str, Any] = {
        "x": normal(rows, heads, spec.head_dim, dtype=activation),
        "dt": normal(rows, heads, dtype=activation),
        "A": -1.0 - torch.rand(heads, device="cuda"),
        "B": normal(rows, 1, spec.state_size, dtype=activation),
        "C": normal(rows, 1, spec.state_size, dtype=activation),
        "D": normal(heads),
        "dt_bias": normal(heads),
        "state": cache.state,
        "slot_index": torch.arange(rows, dtype=torch.int32, device="cuda"),
        "out": torch.empty(rows, heads, spec.head_dim, dtype=activation, device="cuda"),
    }
    if not spec.is_native:
        cache.ring_len.fill_(spec.window // 2)
        given |= {**cache.tensors(), "window": spec.window}
    return given


def launches(spec: Spec) -> dict[str, Call]:
    """The ways of launching the step of ``spec``."""
    given = arguments(spec)
    public = ops.mamba2_native_step if spec.is_native else ops.mamba2_step
    allocating = {name: value for name, value in given.items() if name != "out"}

    rows, heads = given["x"].shape[:2]
    plan = launch.plan_for(spec, rows * heads, torch.cuda.current_device())
    (variant,) = plan.variants
    structure, tile = variant.structure, variant.tile
    if structure.coefficients == "precomputed":
        raise SystemExit(f"{plan.key} is more than one kernel: there is no bare launch to compare it with")
    names = {"a": "A", "b": "B", "c": "C", "d": "D"}
    tensors = tuple(given[names.get(a.name, a.name)] for a in tensor_arguments(spec, structure))
    scalars: tuple[int, ...] = (-1,) if spec.is_native else (given["ring_x"].shape[2], -1)
    values = (*tensors, *tensor_strides(spec, structure, tensors), *scalars, *constants(variant))
    blocks = variant.programs_per_row(spec.head_dim, heads)

    kernel = load_module(module_path(spec, structure)).step
    target = triton.runtime.driver.active.get_current_target()
    dtypes = tuple(DTYPE_NAMES[t.dtype] for t in tensors)
    assert is_aligned(spec, structure, tensors)
    binary: Any = compile_kernel(kernel, spec, variant, target, dtypes, aligned=True)
    binary._init_handles()
    run, function, metadata = binary.run, binary.function, binary.packed_metadata
    stream = torch.cuda.current_stream().cuda_stream
    grid, compiler = (blocks, rows), options(tile)
    return {
        "public": lambda: public(**given),
        "public_allocating": lambda: public(**allocating),
        "bare": lambda: run(blocks, rows, 1, stream, function, metadata, None, None, None, *values),
        "jit": lambda: kernel[grid](*values, **compiler),
    }


def call_us(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median host time per call, in us; the ways take turns within each round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_CALLS // CALLS):
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                begin = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                end = time.perf_counter_ns()
                torch.cuda.synchronize()
                samples[name].append((end - begin) / CALLS / 1e3)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}


def measure(rounds: int) -> dict[str, Any]:
    """The run file's content."""
    properties = torch.cuda.get_device_properties(0)
    # One word of the name tells the GPU in results: H200 of "NVIDIA H200".
    gpu = properties.name.removeprefix("NVIDIA ")
    records, times = [], {}

    def record(claim: str, scope: str, value: float, asked: float | None, unit: str) -> None:
        records.append(
            {
                "claim": claim,
                "cell": {"gpu": gpu, "scope": scope},
                "value": round(value, 3),
                "asked": asked,
                "unit": unit,
                "higher_is_better": False,
            }
        )

    with torch.no_grad():
        for spec in (SPEC, SPEC.native):
            found = times[spec.op] = call_us(launches(spec), rounds)
            ways = {
                "bare": "a prepared launch",
                "jit": "Triton's own kernel[grid] launch; negative is cheaper",
            }
            for way, what in ways.items():
                scope = f"mamba2 {spec.op} above {what}"
                record("python_overhead_us", scope, found["public"] - found[way], ASKED_OVERHEAD_US, "us")
            allocated = found["public_allocating"] - found["bare"]
            scope = f"mamba2 {spec.op} above a prepared launch, output allocated"
            record("python_overhead_us", scope, allocated, None, "us")
    return {
        "what": "overhead",
        "gpu": gpu,
        "date": today(),
        "environment": {
            "gpu": properties.name,
            "capability": [properties.major, properties.minor],
            "triton": triton.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
        },
        "protocol": {
            "calls_per_sample": CALLS,
            "samples": rounds,
            "statistic": "difference of medians",
            "rows": 1,
            "heads": SPEC.heads_per_group,
            "spec": SPEC.key,
        },
        "call_us": {op: {way: round(us, 3) for way, us in found.items()} for op, found in times.items()},
        "records": records,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="samples of each way (default 200)")
    parser.add_argument("--output", type=Path, help="run file instead of the one in benchmarks/results")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the cost of a launch can only be measured on one")
    run = measure(chosen.rounds)
    path = chosen.output or RESULTS / f"{run['date']}-{gpu_slug(run['gpu'])}-overhead.json"
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    for record in run["records"]:
        print(f"{record['claim']} {record['cell']['scope']}: {record['value']} {record['unit']}")
    print(path)


if __name__ == "__main__":
    main()
