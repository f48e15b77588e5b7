"""Rows and tables for tests, and hypothesis strategies that make any of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from replayssm_tune.codegen.render import module_digest, render
from replayssm_tune.runtime.conv_tiles import ConvRow, ConvSpec, ConvTile
from replayssm_tune.runtime.plan import STRUCTURE_VALUES, Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import DTYPE_BYTES, FAMILIES, Spec
from replayssm_tune.runtime.table import Binary, GpuInfo, Row, Table, Toolchain
from tests.specs import P64

SPEC = P64
CONV = ConvSpec(4, 1, "bf16", "bf16", "bf16")
H200 = GpuInfo("H200", "nvidia", (9, 0), 132, 150110011392, 62914560)
H100 = GpuInfo("NVIDIA H100 80GB HBM3", "nvidia", (9, 0), 132, 85029486592, 52428800)
H20 = GpuInfo("NVIDIA H20", "nvidia", (9, 0), 78, 102010716160, 62914560)
A100 = GpuInfo("NVIDIA A100-SXM4-80GB", "nvidia", (8, 0), 108, 85899345920, 41943040)
TOOLCHAIN = Toolchain("3.6.0", "2.11.0", "580.95")


def plan(registers: int = 32) -> Plan:
    """Plans of one numerics class, told apart by a number."""
    return Plan((Variant(Structure("both"), Tile(32, 128, 128, max_registers=registers)),))


OTHER_CLASS = Plan((Variant(Structure("both"), Tile(16, 128, 128)),))
"""Of another numerics class than those of :func:`plan`."""


def row(batch: int = 128, spec: Spec = SPEC, **changes: Any) -> Row:
    """A measured row; its plan tells the batch it was made for."""
    values: dict[str, Any] = {
        "spec": spec,
        "effective_batch": batch,
        "plan": plan(batch),
        "source": "measured",
        "module_digests": ("d" * 16,),
        "binaries": ((Binary("3.6.0", 64, 0, 1024, 9000, "b" * 16),),),
        "time_us": 3.5,
        "native_time_us": 4.4,
        "default_time_us": 6.6,
        "roof_time_us": 3.1,
        "noise_floor": 0.004,
        "nonflush_time_us": 3.3,
        "flush_time_us": 6.2,
        "nonflush_roof_us": 2.9,
        "flush_roof_us": 6.0,
        "samples_us": (3.4, 3.5, 3.6),
        "verdict": "faster than the default by 0.47",
        "origin": "",
        "numerics": "fp32.elementwise",
    }
    values.update(changes)
    return Row(**values)


def rendered_row(batch: int, made: Plan, spec: Spec, binaries: Any = None, **changes: Any) -> Row:
    """A row of a plan whose modules are what is rendered now; no binaries are known but those given."""
    digests = tuple(module_digest(render(spec, v.structure)) for v in made.variants)
    binaries = ((),) * len(digests) if binaries is None else binaries
    return row(batch, spec, **{"plan": made, "module_digests": digests, "binaries": binaries, **changes})


def static_row(batch: int = 128, spec: Spec = SPEC, **changes: Any) -> Row:
    empty = [f.name for f in dataclasses.fields(Row) if f.name.endswith("_us") and f.name != "samples_us"]
    values: dict[str, Any] = dict.fromkeys([*empty, "noise_floor"])
    return row(batch, spec, **{**values, "source": "static", "samples_us": (), "verdict": "", **changes})


def conv_row(rows: int = 64, block: int = 1024, spec: ConvSpec = CONV, **changes: Any) -> ConvRow:
    """A tile for 1,000 channels, which count as 8 blocks; it may tell where the row is from."""
    values: dict[str, Any] = {
        "spec": spec, "rows": rows, "channels": 1000, "tile": ConvTile(block, 4), "module_digest": "d" * 16,
        "time_us": 3.5, "default_time_us": 4.25, "roof_time_us": 3.0, "noise_floor": 0.004,
        "samples_us": (3.4, 3.5, 3.6), "verdict": "faster", "triton": "3.9.0", "date": "2026-11-30",
    }  # fmt: skip
    return ConvRow(**{**values, **changes})


def table(*rows: Row, gpu: GpuInfo = H200, **changes: Any) -> Table:
    source = "measured" if any(r.source != "static" for r in rows) else "static"
    values: dict[str, Any] = {
        "gpu": gpu,
        "toolchain": TOOLCHAIN,
        "source": source,
        "generator": "replayssm-tune 0.1.0",
        "date": "2026-11-29T18:00:00+00:00",
        "rows": rows,
    }
    return Table(**{**values, **changes})


def step_specs() -> st.SearchStrategy[Spec]:
    dtypes = st.sampled_from(sorted(DTYPE_BYTES))
    activations_and_rings = dtypes.flatmap(lambda a: st.tuples(st.just(a), st.sampled_from([a, "fp32"])))
    return st.builds(
        lambda dtypes, family, flags, **fields: Spec(
            family, "step", activation_dtype=dtypes[0], ring_dtype=dtypes[1], **fields, **flags[family]
        ),
        activations_and_rings,
        head_dim=st.integers(1, 256),
        state_size=st.integers(1, 256),
        heads_per_group=st.integers(1, 300),
        window=st.integers(1, 64),
        state_dtype=dtypes,
        has_dt_bias=st.booleans(),
        family=st.sampled_from(FAMILIES),
        flags=st.fixed_dictionaries(
            {
                "mamba2": st.fixed_dictionaries(
                    {name: st.booleans() for name in ("has_d", "has_z", "dt_softplus")}
                ),
                "gdn": st.fixed_dictionaries({"has_d": st.just(False), "qk_l2norm": st.booleans()}),
            }
        ),
    )


def specs() -> st.SearchStrategy[Spec]:
    return st.builds(lambda spec, native: spec.native if native else spec, step_specs(), st.booleans())


def variants(role: str) -> st.SearchStrategy[Variant]:
    axes = {name: st.sampled_from(values) for name, values in STRUCTURE_VALUES.items() if name != "role"}
    tiles = st.builds(
        Tile,
        block_p=st.sampled_from([1, 16, 64]),
        block_n=st.sampled_from([16, 128]),
        fold_block_n=st.sampled_from([0, 64]),
        heads_per_program=st.integers(1, 16),
        num_warps=st.sampled_from([1, 2, 4, 8]),
        num_stages=st.integers(1, 4),
        max_registers=st.sampled_from([0, 128]),
        evict_first=st.booleans(),
    )
    return st.builds(Variant, st.builds(Structure, role=st.just(role), **axes), tiles)


def plans(native: bool = False) -> st.SearchStrategy[Plan]:
    if native:
        return st.builds(lambda v: Plan((v,)), variants("native"))
    split = st.tuples(variants("nonflush"), variants("flush"))
    return st.builds(Plan, st.one_of(st.tuples(variants("both")), split))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    spec = draw(specs())
    chosen = draw(plans(spec.op == "native_step"))
    times = st.one_of(st.none(), st.floats(1e-3, 1e9))
    positive = st.integers(0, 2**40)
    binary = st.builds(
        Binary, st.text(max_size=8), positive, positive, positive, positive, st.text(max_size=20)
    )
    binaries = st.lists(binary, max_size=2).map(tuple)
    count = len(chosen.variants)
    source = draw(st.sampled_from(["measured", "static", "transferred"]))
    names = [f.name for f in dataclasses.fields(Row) if f.name.endswith("_us") and f.name != "samples_us"]
    values: dict[str, Any] = {name: draw(times) for name in names}
    if source == "measured":
        values["time_us"] = draw(st.floats(1e-3, 1e9))
    return row(
        draw(st.integers(1, 2**20)),
        spec,
        plan=chosen,
        source=source,
        module_digests=tuple(draw(st.text(min_size=1, max_size=16)) for _ in range(count)),
        binaries=tuple(draw(binaries) for _ in range(count)),
        noise_floor=draw(st.one_of(st.none(), st.floats(0, 1))),
        samples_us=tuple(draw(st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=3))),
        verdict=draw(st.text(max_size=20)),
        origin=draw(st.text(min_size=1, max_size=20)),
        numerics=draw(st.text(max_size=20)),
        toolchain=draw(st.one_of(st.none(), st.just(Toolchain("3.9.0", "2.13.0", "")))),
        date=draw(st.sampled_from(["", "2026-11-29"])),
        **values,
    )


def tables() -> st.SearchStrategy[Table]:
    unique = st.lists(rows(), max_size=4, unique_by=lambda r: (r.spec, r.effective_batch))
    return unique.map(lambda rows: table(*rows, source="measured"))
