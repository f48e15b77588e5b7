"""Small tables and results for tests of what is shown of them."""

from __future__ import annotations

import dataclasses
import io
import json

from rich.console import Console

from replayssm_tune.codegen import emit
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.table import Binary, GpuInfo, Row, Table, Toolchain
from replayssm_tune.tuner.report import Dropped, Served, SpecPlan, Tuned
from tests.specs import P64

SPEC = P64
GPU = GpuInfo("H200", "nvidia", (9, 0), 132, 150_754_820_096, 62_914_560)
TWO_LAUNCHES = Plan(
    (
        Variant(Structure("nonflush"), Tile(32, 128, num_warps=2)),
        Variant(Structure("flush", readout="dot"), Tile(64, 64, 64, max_registers=128, evict_first=True)),
    )
)


def binary(triton, registers, spills=0):
    return Binary(triton, registers, spills, 1024, 20_000, "b" * 16)


def digests(plan):
    """Of today's modules: rows with them are not stale."""
    return tuple(emit.digest_of(SPEC, variant.structure) for variant in plan.variants)


def measured_row(batch, **changes):
    row = Row(
        spec=SPEC,
        effective_batch=batch,
        plan=TWO_LAUNCHES,
        source="measured",
        module_digests=digests(TWO_LAUNCHES),
        binaries=((binary("3.6.0", 90), binary("3.10.0", 80)), (binary("3.6.0", 255, 16),)),
        time_us=10.0,
        native_time_us=21.0,
        default_time_us=13.0,
        roof_time_us=9.0,
        noise_floor=0.004,
        nonflush_time_us=9.5,
        flush_time_us=20.0,
        nonflush_roof_us=8.5,
        flush_roof_us=18.0,
        samples_us=(9.9, 10.0, 10.1),
        verdict="won",
        origin="",
        numerics="elementwise",
    )
    return dataclasses.replace(row, **changes)


def static_row(batch):
    plan = default_plan(SPEC)
    return measured_row(
        batch,
        plan=plan,
        source="static",
        module_digests=digests(plan),
        binaries=((),) * len(plan.variants),
        time_us=None,
        native_time_us=None,
        default_time_us=None,
        roof_time_us=None,
        noise_floor=None,
        samples_us=(),
        verdict="first by analysis",
    )


def table(*rows, source="measured", gpu=GPU):
    toolchain = Toolchain("3.6.0", "2.11.0", "580.1") if source == "measured" else Toolchain("3.6.0", "", "")
    return Table(gpu, toolchain, source, "0.1.0", "2026-11-30", rows)


def tuned(**changes):
    result = Tuned(
        table=table(measured_row(128), measured_row(32768)),
        table_path="generated/tables/h200.json",
        modules=2,
        specs=(
            SpecPlan(
                SPEC, (128, 32768), 100, 60,
                (Dropped("spills", 10, "p1"), Dropped("same binary", 30, "p2")),
            ),
        ),
        served=(
            Served(SPEC, 96, TWO_LAUNCHES, "measured", "measured on H200; nearest effective batch 128 to 96"),
            Served(SPEC, 128, TWO_LAUNCHES, "measured", "measured on H200"),
            Served(SPEC, 32768, default_plan(SPEC), "static", "chosen by analysis for H200"),
        ),
        minutes=4.25,
        store=".replayssm/store",
    )  # fmt: skip
    return dataclasses.replace(result, **changes)


def drawn(draw, data, width=200):
    """What a terminal of that width shows of data that were printed as JSON."""
    stream = io.StringIO()
    draw(json.loads(json.dumps(data)), Console(file=stream, width=width))
    return stream.getvalue()
