"""From recorded runs to one flat list of figures: ``results/summary.json``.

    python benchmarks/summary.py

``benchmarks/documents.py`` and ``benchmarks/figure.py`` draw on the same list (:func:`recorded`), before its
figures are rounded for the file: they are rounded once. A run file is
``results/<date>-<gpu>-<what>.json``:

    {"environment": {...}, "protocol": {...},
     "what": "tune", "gpu": "H200", "date": "2026-11-30", "time": "18:30:05",
     "cells": [{"spec": key, "effective_batch": n, "plan": key,
                "time_us": {"mix": .., "nonflush": .., "flush": ..},
                "roof_us": {"read": .., "scale": .., "mix": ..},
                "native_us": .., "native_name": "..", "native_steps_us": .., "default_us": {"mix": ..},
                "noise_floor": .., "samples_us": {...}}],
     "stages": [{"spec": key, "effective_batch": n, "mode": "nonflush", "plan": key, "roof_us": ..,
                 "time_us": .., "without_us": {"output": .., ...}}],
     "errors": [{"spec": key, "sequences": n, "heads": n, "kernel": "plan, or eager reference",
                 "tokens": [..], "folds": [..], "output": {"found": [..], "ideal": [..], "rounding": [..]},
                 "state": {"found": [..], "ideal": [..]}}],
     "convolutions": [{"spec": key, "rows": n, "channels": n, "tile": key, "default": key, "time_us": ..,
                       "default_us": .., "roof_us": .., "noise_floor": .., "samples_us": [..]}],
     "totals": {"tune_minutes": .., "resumed": false, "scope": ".."},
     "records": [{"claim": .., "cell": {...}, "value": .., "unit": .., ...}]}

Only ``gpu``, ``date`` and ``what`` are required; ``time`` is the time of day (UTC) when it was written. Of
two runs that say the same of one cell the newer one counts. ``resumed`` says that a run found measurements
or binaries of an earlier one: how long it took is then no claim. The roof of the mix may be left out of
runs of one token a step, where it follows from the others. Of errors only some points make a record
(:data:`ERROR_TOKENS`); their bound is in the run's protocol. ``native_steps_us`` is of drafts: T native
steps in turn.
Cells of what materialises states have ``materialize`` in place of the modes of a step, and no native.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from replayssm_tune.runtime.conv_tiles import ConvSpec
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.rounding import known

Record = dict[str, Any]
Cell = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "summary.json"
DIGITS = 4
"""Significant digits of a figure in the summary's file."""

ASKED_OF = {"mamba2": {"head_dim": 64, "effective_batch": 32768}, "gdn": {"effective_batch": 8192}}
"""The cells of which shares of the roof are asked, by family."""

ASKED_SHARES = {
    ("nonflush_roof_share", "mamba2", 1): {"fp32": 0.87, "bf16": 0.79},
    ("nonflush_roof_share", "mamba2", 4): {"fp32": 0.80, "bf16": 0.74},
    ("nonflush_roof_share", "mamba2", 8): {"fp32": 0.78, "bf16": 0.74},
    ("nonflush_roof_share", "gdn", 1): {"fp32": 0.79, "bf16": 0.70},
    ("nonflush_roof_share", "gdn", 4): {"fp32": 0.66},
    ("nonflush_roof_share", "gdn", 8): {"fp32": 0.55},
    ("flush_roof_share", "mamba2", 1): {"fp32": 0.93, "bf16": 0.80},
    ("mix_roof_share", "mamba2", 1): {"fp32": 0.87},
}
"""Shares of the roof that are asked, by claim, family and tokens a step, and by state dtype."""

ASKED_TUNE_MINUTES = 6.0
"""Asked of a cold tune of the model below, both state dtypes, 16 cores, one token a step."""
ASKED_TUNE_SCOPE = "nemotron-3-super-120b-a12b"

OPS = {"verify": "step", "native_verify": "native_step"}
"""A cell's ``op`` where it is not the spec's own: what verifies drafts is a step of ``T`` tokens."""

CELL_KEYS = (
    "family", "op", "T", "window", "head_dim", "state_size", "heads_per_group", "state_dtype", "ring_dtype",
    "effective_batch", "gpu", "kernel", "tokens", "mode", "without", "scope",
    "width", "activation_dtype", "weight_dtype", "rows", "channels",
)  # fmt: skip
"""Keys of a record's cell, in the order they are written."""


ERROR_CLAIMS = ("output_error", "state_error", "state_error_growth")
"""What is claimed of errors against fp64; bounds differ from cell to cell."""
ASKED_GROWTH = 1.1
"""Asked of :func:`_growth`: that it is no more than what two samples differ by."""
ERROR_TOKENS = (1, 16, 64, 256, 1024, 2048)
"""After how many tokens of a run errors are recorded."""


def derive(runs: Iterable[tuple[str, dict[str, Any]]]) -> list[Record]:
    """Records of all ``(file name, content)`` runs, one per claim and cell, sorted."""
    newest: dict[str, Record] = {}
    for name, run in sorted(runs, key=_age):
        for record in _records(run):
            newest[_identity(record)] = {**record, "run": name}
    return sorted(newest.values(), key=_order)


def _records(run: dict[str, Any]) -> Iterable[Record]:
    gpu = run["gpu"]
    for cell in run.get("cells", ()):
        yield from _cell_records(cell, gpu)
    for cell in run.get("stages", ()):
        yield from _stage_records(cell, gpu)
    for cell in run.get("convolutions", ()):
        yield from _conv_records(cell, gpu)
    for cell in run.get("errors", ()):
        yield from _error_records(cell, gpu, run["protocol"])
    totals = dict(run.get("totals", {}))
    scope = totals.pop("scope", run["what"])
    if totals.pop("resumed", False):
        totals.pop("tune_minutes", None)
    for claim, value in totals.items():
        timed = claim == "tune_minutes" and scope == ASKED_TUNE_SCOPE
        asked = ASKED_TUNE_MINUTES if timed else None
        unit = "min" if claim.endswith("_minutes") else "s" if claim.endswith("_s") else "1"
        yield _record(claim, {"gpu": gpu, "scope": scope}, value, asked, unit, False)
    for record in run.get("records", ()):
        yield {
            "claim": record["claim"],
            "cell": record.get("cell", {}),
            "value": record["value"],
            "asked": record.get("asked"),
            "unit": record.get("unit", "1"),
            "higher_is_better": record.get("higher_is_better", True),
        }


def _age(named: tuple[str, dict[str, Any]]) -> tuple[str, str, int, str]:
    """Sort key of runs, oldest first.

    Of one day by the time of day; older files have none, and of those ``x-2`` comes after ``x`` and ``x-y``,
    and before ``x-10``.
    """
    name, run = named
    stem = name.removesuffix(".json")
    number = stem.rpartition(run["what"])[2].removeprefix("-")
    return run["date"], run.get("time", ""), int(number) if number.isdigit() else 1, stem


def _cell_records(cell: dict[str, Any], gpu: str) -> Iterable[Record]:
    spec = Spec.parse(cell["spec"])
    batch = cell["effective_batch"]
    cell = _finite(cell)
    key = _key(spec, batch, gpu)
    if spec.op == "materialize":
        yield from _materialize_records(cell, key)
        return
    time_us, roof_us = cell.get("time_us", {}), cell.get("roof_us", {})
    roofs_us = {
        "nonflush": roof_us.get("read"),
        "flush": roof_us.get("scale"),
        "mix": mix_roof_us(spec, roof_us),
    }
    for branch, roof in roofs_us.items():
        if roof is None or time_us.get(branch) is None:
            continue
        claim = f"{branch}_roof_share"
        asked = None
        unasked_dtypes = {"activation_dtype", "ring_dtype"} & set(key)
        if not unasked_dtypes and all(key[name] == wanted for name, wanted in ASKED_OF[spec.family].items()):
            asked = ASKED_SHARES.get((claim, spec.family, spec.num_tokens), {}).get(spec.state_dtype)
        yield _record(claim, key, roof / time_us[branch], asked, "1", True)
        launch = cell.get("launch_us", {}).get(branch)
        if launch is not None:
            yield _record(f"{branch}_launch_roof_share", key, roof / launch, None, "1", True)
    mix = time_us.get("mix")
    native, default = cell.get("native_us"), cell.get("default_us", {}).get("mix")
    native_steps = cell.get("native_steps_us")
    if mix is not None:
        if native is not None:
            asked = 1.0 - cell.get("noise_floor", 0.0)
            yield _record("mix_vs_native", key, native / mix, asked, "1", True)
        if native_steps is not None:
            yield _record("mix_vs_native_steps", key, native_steps / mix, None, "1", True)
        if default is not None:
            yield _record("mix_vs_default", key, default / mix, None, "1", True)
    steps = {"roof": roofs_us["mix"], "replay": mix, "native": native, "native steps": native_steps}
    steps["default"] = default
    for kernel, value in steps.items():
        if value is not None:
            yield _record("step_time_us", {**key, "kernel": kernel}, value, None, "us", False)


def _materialize_records(cell: dict[str, Any], key: Cell) -> Iterable[Record]:
    """What materialises states has no native kernel to be compared with: its roof and its default are all."""
    time_us, roof_us, default_us = (
        cell.get(name, {}).get("materialize") for name in ("time_us", "roof_us", "default_us")
    )
    for kernel, value in (("roof", roof_us), ("replay", time_us), ("default", default_us)):
        if value is not None:
            yield _record("materialize_time_us", {**key, "kernel": kernel}, value, None, "us", False)
    if time_us is not None:
        if roof_us is not None:
            yield _record("materialize_roof_share", key, roof_us / time_us, None, "1", True)
        if default_us is not None:
            yield _record("materialize_vs_default", key, default_us / time_us, None, "1", True)


def _conv_records(cell: dict[str, Any], gpu: str) -> Iterable[Record]:
    """What a launch of the convolution takes by the tuned tile and by the rule's."""
    spec = ConvSpec.parse(cell["spec"])
    key = {
        **{name: getattr(spec, name) for name in CELL_KEYS if hasattr(spec, name)},
        "T": spec.num_tokens,
        "rows": cell["rows"],
        "channels": cell["channels"],
        "gpu": gpu,
    }
    tuned, roof, default = (cell[f"{name}_us"] for name in ("time", "roof", "default"))
    for kernel, value in (("roof", roof), ("tuned", tuned), ("default", default)):
        yield _record("conv_time_us", {**key, "kernel": kernel}, value, None, "us", False)
    yield _record("conv_roof_share", key, roof / tuned, None, "1", True)
    yield _record("conv_vs_default", key, default / tuned, None, "1", True)


def _stage_records(cell: dict[str, Any], gpu: str) -> Iterable[Record]:
    """What a step takes as it is, without one of its stages, and its roof."""
    key = {**_key(Spec.parse(cell["spec"]), cell["effective_batch"], gpu), "mode": cell["mode"]}
    times_us = {"nothing": cell["time_us"], **cell["without_us"]}
    for left_out, value in times_us.items():
        yield _record("stage_time_us", {**key, "without": left_out}, value, None, "us", False)
    yield _record("stage_time_us", {**key, "kernel": "roof"}, cell["roof_us"], None, "us", False)


def _error_records(cell: dict[str, Any], gpu: str, protocol: dict[str, Any]) -> Iterable[Record]:
    """Errors of a kernel, of its ideal and of rounding alone, and whether they grow with the tokens."""
    spec = Spec.parse(cell["spec"])
    key = _key(spec, cell["sequences"] * cell["heads"], gpu)
    kernel = "native" if spec.is_native else "replay"
    if not spec.is_native:
        key["ring_dtype"] = spec.ring_dtype
    for index, tokens in enumerate(cell["tokens"]):
        if tokens not in ERROR_TOKENS:
            continue
        at = {**key, "tokens": tokens}
        for what in ("output", "state"):
            found, ideal = (cell[what][name][index] for name in ("found", "ideal"))
            bound = protocol["error_factor"] * ideal + protocol["error_floor"]
            yield _record(f"{what}_error", {**at, "kernel": kernel}, found, bound, "1", False)
            yield _record(f"{what}_error", {**at, "kernel": "ideal"}, ideal, None, "1", False)
        layer = {name: at[name] for name in _LAYER_KEYS}
        rounding = cell["output"]["rounding"][index]
        yield _record("output_error", {**layer, "kernel": "rounding"}, rounding, None, "1", False)
    for name, found in (("ideal", cell["state"]["ideal"]), (kernel, cell["state"]["found"])):
        growth = _growth(cell["tokens"], found)
        if growth is not None:
            # What GDN writes depends on what it recalls: a 16-bit ring feeds its rounding back.
            bounded = name == "replay" and (spec.family != "gdn" or spec.ring_dtype == "fp32")
            asked = ASKED_GROWTH if bounded else None
            yield _record("state_error_growth", {**key, "kernel": name}, growth, asked, "1", False)
    if "folds" in cell:
        yield _record("folds", {**key, "kernel": kernel}, cell["folds"][-1], None, "1", False)


_LAYER_KEYS = ("family", "head_dim", "state_size", "heads_per_group", "effective_batch", "gpu", "tokens")
"""What tells apart errors of rounding alone, whatever kernel the output is of."""


def _growth(tokens: Sequence[int], found: Sequence[float]) -> float | None:
    """Mean error over the last quarter of a run over that of its second quarter; None of a short run.

    By the second quarter states that started at zero hold as much as they ever will.
    """
    end = tokens[-1]
    early = [error for at, error in zip(tokens, found, strict=True) if end / 4 < at <= end / 2]
    late = [error for at, error in zip(tokens, found, strict=True) if end * 3 / 4 < at]
    if len(early) < 2 or not sum(early):
        return None
    return (sum(late) / len(late)) / (sum(early) / len(early))


def _key(spec: Spec, effective_batch: int, gpu: str) -> Cell:
    """What tells a cell apart; dtypes of activations and ring only where they are not tuned unasked."""
    # What materialises states has no activations, and its spec says the ring's dtype for them.
    activation = Spec.activation_dtype if spec.op == "materialize" else spec.activation_dtype
    dtypes = {"activation_dtype": activation} if activation != Spec.activation_dtype else {}
    if not spec.is_native and spec.ring_dtype != activation:
        dtypes["ring_dtype"] = spec.ring_dtype
    return {
        "family": spec.family,
        "op": OPS.get(spec.op, spec.op),
        "T": spec.num_tokens,
        "window": spec.window,
        "head_dim": spec.head_dim,
        "state_size": spec.state_size,
        "heads_per_group": spec.heads_per_group,
        "state_dtype": spec.state_dtype,
        **dtypes,
        "effective_batch": effective_batch,
        "gpu": gpu,
    }


def _finite(value: Any) -> Any:
    """``value`` without the infinite times of what did not run."""
    if isinstance(value, dict):
        return {
            key: _finite(item)
            for key, item in value.items()
            if not isinstance(item, float) or math.isfinite(item)
        }
    return value


def mix_roof_us(spec: Spec, roof_us: dict[str, float]) -> float | None:
    """Roof of the staggered mix: what the run says, else of one token a step: 1/W of the rows flush.

    With more tokens a step that share depends on how many of them are kept, which the run alone knows.
    """
    if "mix" in roof_us:
        return roof_us["mix"]
    read, scale = roof_us.get("read"), roof_us.get("scale")
    if read is None or scale is None or not spec.window or spec.num_tokens > 1:
        return None
    return read + (scale - read) / spec.window


def _record(
    claim: str, cell: Cell, value: float, asked: float | None, unit: str, higher_is_better: bool
) -> Record:
    return {
        "claim": claim,
        "cell": {k: cell[k] for k in CELL_KEYS if k in cell},
        "value": value,
        "asked": asked,
        "unit": unit,
        "higher_is_better": higher_is_better,
    }


def _identity(record: Record) -> str:
    return json.dumps([record["claim"], record["cell"]], sort_keys=True)


def _order(record: Record) -> tuple[Any, ...]:
    cell = record["cell"]
    return (
        record["claim"],
        str(cell.get("activation_dtype")),  # so that curves stay together
        *((0, v, "") if isinstance(v, int) else (1, 0, str(v)) for v in map(cell.get, CELL_KEYS)),
    )


def dumps(records: Sequence[Record]) -> str:
    """The summary's text: one record a line, figures to :data:`DIGITS`."""
    lines = ",\n".join("  " + json.dumps({**r, **_rounded(r)}) for r in records)
    return f"[\n{lines}\n]\n" if records else "[]\n"


def _rounded(record: Record) -> dict[str, float | None]:
    return {name: known(record[name], DIGITS) for name in ("value", "asked")}


def load_runs(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """All run files of a folder with their names."""
    paths = sorted(path for path in folder.glob("*.json") if path.name != SUMMARY.name)
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def recorded() -> list[Record]:
    """Every recorded figure; none where nothing has been recorded."""
    return derive(load_runs())


def select(records: Iterable[Record], claim: str, **cell: Any) -> list[Record]:
    """Records of a claim whose cell has these values."""
    return [r for r in records if r["claim"] == claim and all(r["cell"].get(k) == v for k, v in cell.items())]


def reached(record: Record) -> bool:
    """Whether a figure is at least as good as what is asked of it."""
    better = (
        record["value"] >= record["asked"]
        if record["higher_is_better"]
        else record["value"] <= record["asked"]
    )
    return bool(better)


def main() -> int:
    records = recorded()
    SUMMARY.write_text(dumps(records), encoding="utf-8")
    missed = [r for r in records if r["asked"] is not None and not reached(r)]
    for record in missed:
        value, asked = _rounded(record).values()
        print(f"{record['claim']} {record['cell']}: {value}, asked {asked}")
    print(f"{len(records)} records, {len(missed)} below what is asked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
