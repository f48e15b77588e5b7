"""From recorded runs to one flat list of figures, and from that to the documents' tables.

    python benchmarks/summary.py                derive results/summary.json from the run files
    python benchmarks/summary.py --write-docs   and rewrite the generated regions of the documents

A run file is ``results/<date>-<gpu>-<what>.json``:

    {"environment": {...}, "protocol": {...}, "what": "tune", "gpu": "H200", "date": "2026-11-30",
     "cells": [{"spec": key, "effective_batch": n, "plan": key,
                "time_us": {"mix": .., "nonflush": .., "flush": ..}, "roof_us": {"read": .., "scale": ..},
                "native_us": .., "native_name": "..", "default_us": {"mix": ..}, "noise_floor": ..,
                "samples_us": {...}}],
     "stages": [{"spec": key, "effective_batch": n, "mode": "nonflush", "plan": key, "roof_us": ..,
                 "time_us": .., "without_us": {"output": .., ...}}],
     "totals": {"tune_minutes": .., "scope": ".."},
     "records": [{"claim": .., "cell": {...}, "value": .., "unit": .., ...}]}

Only ``gpu``, ``date`` and ``what`` are required. Of two runs that say the same of one cell the newer
one counts. A generated region of a document stands between ``<!-- figures:begin NAME -->`` and
``<!-- figures:end -->``, NAME being one of :data:`REGIONS`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from replayssm_tune.runtime.spec import Spec

Record = dict[str, Any]
Cell = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SUMMARY = RESULTS / "summary.json"

ASKED_BATCH = 32768
ASKED_SHARES = {
    ("nonflush_roof_share", "fp32"): 0.87,
    ("nonflush_roof_share", "bf16"): 0.79,
    ("flush_roof_share", "fp32"): 0.93,
    ("flush_roof_share", "bf16"): 0.80,
    ("mix_roof_share", "fp32"): 0.87,
}
"""What is asked of Mamba-2 at effective batch 32768, head dim 64, by claim and state dtype."""

ASKED_TUNE_MINUTES = 6.0
"""Asked of a cold tune of the model below, both state dtypes, 16 cores: a scope that begins with it."""
ASKED_TUNE_SCOPE = "nemotron-3-super-120b-a12b"

CELL_KEYS = (
    "family", "op", "T", "window", "head_dim", "state_size", "heads_per_group", "state_dtype",
    "effective_batch", "gpu", "kernel", "mode", "without", "scope",
)  # fmt: skip
"""Keys of a record's cell, in the order they are written."""


def derive(runs: Iterable[tuple[str, dict[str, Any]]]) -> list[Record]:
    """Records of all ``(file name, content)`` runs, one per claim and cell, sorted."""
    newest: dict[str, Record] = {}
    for name, run in sorted(runs, key=lambda item: (item[1]["date"], item[0])):
        for record in _records(run):
            newest[_identity(record)] = {**record, "run": name}
    return sorted(newest.values(), key=_order)


def _records(run: dict[str, Any]) -> Iterable[Record]:
    gpu = run["gpu"]
    for cell in run.get("cells", ()):
        yield from _cell_records(cell, gpu)
    for cell in run.get("stages", ()):
        yield from _stage_records(cell, gpu)
    totals = dict(run.get("totals", {}))
    scope = totals.pop("scope", run["what"])
    for claim, value in totals.items():
        timed = claim == "tune_minutes" and str(scope).startswith(ASKED_TUNE_SCOPE)
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


def _cell_records(cell: dict[str, Any], gpu: str) -> Iterable[Record]:
    spec = Spec.parse(cell["spec"])
    batch = cell["effective_batch"]
    cell = _finite(cell)
    key = _key(spec, batch, gpu)
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
        if batch == ASKED_BATCH and (spec.family, spec.head_dim) == ("mamba2", 64):
            asked = ASKED_SHARES.get((claim, spec.state_dtype))
        yield _record(claim, key, roof / time_us[branch], asked, "1", True)
    mix = time_us.get("mix")
    native, default = cell.get("native_us"), cell.get("default_us", {}).get("mix")
    if mix is not None:
        if native is not None:
            asked = 1.0 - cell.get("noise_floor", 0.0)
            yield _record("mix_vs_native", key, native / mix, asked, "1", True)
        if default is not None:
            yield _record("mix_vs_default", key, default / mix, None, "1", True)
    steps = {"roof": roofs_us["mix"], "replay": mix, "native": native, "default": default}
    for kernel, value in steps.items():
        if value is not None:
            yield _record("step_time_us", {**key, "kernel": kernel}, value, None, "us", False)


def _stage_records(cell: dict[str, Any], gpu: str) -> Iterable[Record]:
    """What a step takes as it is, without one of its stages, and its roof."""
    key = {**_key(Spec.parse(cell["spec"]), cell["effective_batch"], gpu), "mode": cell["mode"]}
    times_us = {"nothing": cell["time_us"], **cell["without_us"]}
    for left_out, value in times_us.items():
        yield _record("stage_time_us", {**key, "without": left_out}, value, None, "us", False)
    yield _record("stage_time_us", {**key, "kernel": "roof"}, cell["roof_us"], None, "us", False)


def _key(spec: Spec, effective_batch: int, gpu: str) -> Cell:
    return {
        "family": spec.family,
        "op": spec.op,
        "T": spec.num_tokens,
        "window": spec.window,
        "head_dim": spec.head_dim,
        "state_size": spec.state_size,
        "heads_per_group": spec.heads_per_group,
        "state_dtype": spec.state_dtype,
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
    """Roof of the staggered mix: every row reads, a share 1/W of them also writes."""
    read, scale = roof_us.get("read"), roof_us.get("scale")
    if read is None or scale is None or not spec.window:
        return None
    return read + (scale - read) / spec.window


def _record(
    claim: str, cell: Cell, value: float, asked: float | None, unit: str, higher_is_better: bool
) -> Record:
    return {
        "claim": claim,
        "cell": {k: cell[k] for k in CELL_KEYS if k in cell},
        "value": _rounded(value),
        "asked": None if asked is None else _rounded(asked),
        "unit": unit,
        "higher_is_better": higher_is_better,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _identity(record: Record) -> str:
    return json.dumps([record["claim"], record["cell"]], sort_keys=True)


def _order(record: Record) -> tuple[Any, ...]:
    cell = record["cell"]
    return (
        record["claim"],
        *((0, v, "") if isinstance(v, int) else (1, 0, str(v)) for v in map(cell.get, CELL_KEYS)),
    )


def dumps(records: Sequence[Record]) -> str:
    """The summary's text: one record a line."""
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    return f"[\n{lines}\n]\n" if records else "[]\n"


def load_runs(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """All run files of a folder with their names."""
    paths = sorted(path for path in folder.glob("*.json") if path.name != SUMMARY.name)
    return [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def load_summary(path: Path = SUMMARY) -> list[Record]:
    """The recorded figures; none where nothing has been recorded."""
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def select(records: Iterable[Record], claim: str, **cell: Any) -> list[Record]:
    """Records of a claim whose cell has these values."""
    return [r for r in records if r["claim"] == claim and all(r["cell"].get(k) == v for k, v in cell.items())]


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _layer(cell: Cell) -> str:
    if cell.get("family") == "gdn":
        sizes = f"{cell['head_dim']} x {cell['state_size']}"
        return f"GDN {sizes}, {cell['heads_per_group']} value heads/key head"
    return f"{cell['head_dim']} x {cell['state_size']}, {cell['heads_per_group']} heads/group"


Steps = list[tuple[Cell, dict[str, float]]]
"""Timed cells in order, each with its step times in µs by kernel."""

STEPS_HEADER = ("GPU", "head dim x state", "state", "effective batch", "roof, µs", "replay, µs", "native, µs",
                "default, µs", "of roof", "vs native")  # fmt: skip

OVERVIEW_BATCHES = (1, 128, 1024, 8192, 32768)
"""Of each curve the overview shows the batches nearest to these."""


def _steps(records: Sequence[Record]) -> Steps:
    cells: dict[str, tuple[Cell, dict[str, float]]] = {}
    for record in select(records, "step_time_us"):
        cell = {k: v for k, v in record["cell"].items() if k != "kernel"}
        values = cells.setdefault(json.dumps(cell), (cell, {}))[1]
        values[record["cell"]["kernel"]] = record["value"]
    return list(cells.values())


def _curves(records: Sequence[Record]) -> list[Steps]:
    """Timed cells that differ in their batch alone, together."""
    curves: dict[str, Steps] = {}
    for cell, values in _steps(records):
        curve = json.dumps({k: v for k, v in cell.items() if k != "effective_batch"})
        curves.setdefault(curve, []).append((cell, values))
    return list(curves.values())


def _steps_table(steps: Steps) -> str:
    rows = []
    for cell, values in steps:
        replay = values.get("replay")
        rows.append(
            [
                cell["gpu"],
                _layer(cell),
                cell["state_dtype"],
                str(cell["effective_batch"]),
                *(f"{values[k]:.4g}" if k in values else "" for k in ("roof", "replay", "native", "default")),
                f"{values['roof'] / replay:.2f}" if replay and "roof" in values else "",
                f"{values['native'] / replay:.2f}" if replay and "native" in values else "",
            ]
        )
    return _markdown(STEPS_HEADER, rows)


def steps_region(records: Sequence[Record]) -> str:
    """Step time of every timed cell: roof, replay, native, and what they mean for each other."""
    return _steps_table(_steps(records))


def overview_region(records: Sequence[Record]) -> str:
    """A few batches of every curve, the smallest one included."""
    chosen: Steps = []
    for curve in _curves(records):
        batches = [cell["effective_batch"] for cell, _ in curve]
        shown = {min(batches, key=lambda b: abs(math.log(b / near))) for near in OVERVIEW_BATCHES}
        chosen += [step for step in curve if step[0]["effective_batch"] in shown]
    return _steps_table(chosen)


def losses_region(records: Sequence[Record]) -> str:
    """Per curve: where the native kernel is faster than replay, and where nothing beat the default."""
    rows = []
    for curve in _curves(records):
        ratios = {
            c["effective_batch"]: v["native"] / v["replay"] for c, v in curve if {"native", "replay"} <= {*v}
        }
        if not ratios:
            continue
        lost = [batch for batch, ratio in ratios.items() if ratio < 1]
        default = sum("default" in v and v["default"] <= v.get("replay", 0.0) for _, v in curve)
        cell = curve[0][0]
        rows.append(
            [
                cell["gpu"],
                _layer(cell),
                cell["state_dtype"],
                str(len(curve)),
                str(len(lost)),
                str(max(lost)) if lost else "",
                f"{min(ratios.values()):.2f}",
                f"{max(ratios.values()):.2f}",
                str(default),
            ]
        )
    measured = ["batches timed", "native faster at", "up to effective batch", "worst vs native"]
    header = ["GPU", "head dim x state", "state", *measured, "best vs native", "default unbeaten at"]
    return _markdown(header, rows)


def asked_region(records: Sequence[Record]) -> str:
    """Every figure with a goal other than "not slower than native", and the goal."""
    rows = []
    for record in records:
        if record["asked"] is None or record["claim"] == "mix_vs_native":
            continue
        cell = record["cell"]
        what = cell.get("scope") or f"{_layer(cell)}, {cell['state_dtype']}, batch {cell['effective_batch']}"
        sign = "≥" if record["higher_is_better"] else "≤"
        unit = "" if record["unit"] == "1" else f" {record['unit']}"
        rows.append(
            [
                record["claim"],
                cell.get("gpu", ""),
                what,
                f"{record['value']:.3g}{unit}",
                f"{sign} {record['asked']:.3g}{unit}",
                "yes" if reached(record) else "no",
            ]
        )
    return _markdown(["figure", "GPU", "of", "value", "asked", "reached"], rows)


def stages_region(records: Sequence[Record]) -> str:
    """Step time with one stage left out at a time, a row per cell and mode."""
    found = select(records, "stage_time_us")
    columns = list(dict.fromkeys(r["cell"]["without"] for r in found if "without" in r["cell"]))
    # As it is first, combinations last.
    columns.sort(key=lambda name: (name != "nothing", len(name)))
    cells: dict[str, tuple[Cell, dict[str, float]]] = {}
    for record in found:
        cell = {k: v for k, v in record["cell"].items() if k not in ("without", "kernel")}
        values = cells.setdefault(json.dumps(cell), (cell, {}))[1]
        values[record["cell"].get("without", "roof")] = record["value"]
    rows = [
        [
            cell["gpu"],
            cell["state_dtype"],
            str(cell["effective_batch"]),
            cell["mode"],
            *(f"{values[name]:.4g}" if name in values else "" for name in ("roof", *columns)),
        ]
        for cell, values in cells.values()
    ]
    return _markdown(["GPU", "state", "effective batch", "mode", "roof, µs", *columns], rows)


REGIONS: dict[str, Callable[[Sequence[Record]], str]] = {
    "steps": steps_region,
    "overview": overview_region,
    "losses": losses_region,
    "asked": asked_region,
    "stages": stages_region,
}
"""Generated regions of documents by name."""

_REGION = re.compile(
    r"(?P<begin><!-- figures:begin (?P<name>[a-z-]+) -->\n).*?(?P<end><!-- figures:end -->)", re.DOTALL
)


def render(text: str, records: Sequence[Record]) -> str:
    """A document's text with its generated regions written anew.

    Raises:
        KeyError: A region has a name nobody knows.
    """
    return _REGION.sub(lambda m: f"{m['begin']}\n{REGIONS[m['name']](records)}\n\n{m['end']}", text)


def documents(root: Path = ROOT) -> list[Path]:
    """Documents that may have generated regions."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Derive the recorded figures and what is drawn from them.")
    parser.add_argument("--write-docs", action="store_true", help="rewrite the documents' generated regions")
    options = parser.parse_args(arguments)
    records = derive(load_runs())
    SUMMARY.write_text(dumps(records), encoding="utf-8")
    if options.write_docs:
        for path in documents():
            text = path.read_text(encoding="utf-8")
            rendered = render(text, records)
            if rendered != text:
                path.write_text(rendered, encoding="utf-8")
                print(f"rewrote {path.relative_to(ROOT)}")
    missed = [r for r in records if r["asked"] is not None and not reached(r)]
    for record in missed:
        print(f"{record['claim']} {record['cell']}: {record['value']}, asked {record['asked']}")
    print(f"{len(records)} records, {len(missed)} below what is asked")
    return 0


def reached(record: Record) -> bool:
    """Whether a figure is at least as good as what is asked of it."""
    better = (
        record["value"] >= record["asked"]
        if record["higher_is_better"]
        else record["value"] <= record["asked"]
    )
    return bool(better)


if __name__ == "__main__":
    sys.exit(main())
