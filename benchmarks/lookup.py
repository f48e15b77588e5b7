"""Time of 1,000 look-ups of mixed keys: ``python benchmarks/lookup.py [--output FILE]``.

The tables are synthetic, of the size a release has: every shape of the known models, three state
dtypes, step and native step, the whole grid, three GPUs. ``cold_ms`` is the first pass over a fresh
look-up (the best of several fresh ones), ``warm_ms`` the best of further passes. Needs no GPU; the run
file is ``results/<date>-cpu-lookup.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from benchmarks.summary import RESULTS
from replayssm_tune.codegen.targets import find
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.lookup import GRID, Lookup
from replayssm_tune.runtime.spec import DTYPE_BYTES, Spec
from replayssm_tune.runtime.table import Row, Table, Toolchain
from replayssm_tune.tuner.runfile import today

SHAPES = ((64, 128, 16), (64, 128, 8), (80, 128, 12), (64, 256, 32), (128, 256, 24), (64, 64, 56))
"""(head_dim, state_size, heads per group)."""

ASKED_LOOKUP_MS = 10.0


def layer_specs() -> list[Spec]:
    steps = [
        Spec("mamba2", "step", *shape, window=window, state_dtype=dtype)
        for shape in SHAPES
        for window in (8, 16, 32)
        for dtype in DTYPE_BYTES
    ]
    return [*steps, *dict.fromkeys(step.native for step in steps)]


def synthetic_row(spec: Spec, effective_batch: int) -> Row:
    plan = default_plan(spec)
    return Row(
        spec=spec,
        effective_batch=effective_batch,
        plan=plan,
        source="measured",
        module_digests=("0" * 16,) * len(plan.variants),
        binaries=((),) * len(plan.variants),
        time_us=1.0,
        native_time_us=None,
        default_time_us=None,
        roof_time_us=None,
        noise_floor=None,
        nonflush_time_us=None,
        flush_time_us=None,
        nonflush_roof_us=None,
        flush_roof_us=None,
        samples_us=(1.0,),
        verdict="",
        origin="",
        numerics="",
    )


def measure(keys: int = 1000, repeats: int = 10) -> dict[str, float | int | str]:
    specs = layer_specs()
    rows = tuple(synthetic_row(spec, batch) for spec in specs for batch in GRID)
    toolchain = Toolchain("3.9.0", "2.13.0", "1")
    gpus = [find(name).info for name in ("H200", "A100", "B200")]
    tables = [Table(gpu, toolchain, "measured", "benchmark", "2026-01-01", rows) for gpu in gpus]
    devices = [*gpus, find("H100").info, find("H20").info]
    chooser = random.Random(0)
    calls = [
        (chooser.choice(specs), round(2 ** chooser.uniform(2, 18)), chooser.choice(devices))
        for _ in range(keys)
    ]

    def pass_ms(lookup: Lookup) -> float:
        start = time.perf_counter()
        for spec, batch, gpu in calls:
            lookup.find(spec, batch, gpu)
        return (time.perf_counter() - start) * 1e3

    fresh = [Lookup(tables) for _ in range(repeats)]
    return {
        "keys": keys,
        "rows": len(rows) * len(tables),
        "cold_ms": round(min(pass_ms(lookup) for lookup in fresh), 3),
        "warm_ms": round(min(pass_ms(lookup) for lookup in fresh), 3),
        "repeats": repeats,
    }


def run() -> dict[str, object]:
    """The run file's content."""
    measured = measure()
    return {
        "what": "lookup",
        "gpu": "cpu",
        "date": today(),
        "environment": {"python": platform.python_version(), "machine": platform.machine()},
        "lookup": measured,
        "records": [
            {
                "claim": "lookup_1000_ms",
                "cell": {"scope": f"1,000 mixed keys, {name}"},
                "value": measured[f"{name}_ms"],
                "asked": ASKED_LOOKUP_MS,
                "unit": "ms",
                "higher_is_better": False,
            }
            for name in ("cold", "warm")
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="run file instead of the one in benchmarks/results")
    arguments = parser.parse_args()
    result = run()
    path = arguments.output or RESULTS / f"{result['date']}-cpu-lookup.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["lookup"], indent=1))
    print(path)


if __name__ == "__main__":
    main()
