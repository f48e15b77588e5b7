"""Tables of the documents, drawn from the recorded figures.

    python benchmarks/documents.py

A generated region of a document stands between ``<!-- figures:begin NAME -->`` and
``<!-- figures:end -->``, NAME being one of :data:`REGIONS`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.error_tables import (
    error_source_region,
    folds_region,
    output_errors_region,
    rounding_region,
    state_errors_region,
)
from benchmarks.summary import ERROR_CLAIMS, ROOT, Cell, Record, reached, recorded, select
from benchmarks.words import FAMILY_NAMES, figure, fixed, goal, layer_name, markdown, unit

CURVE_HEADER = ("GPU", "layer", "T", "state")
"""What tells curves apart: their first columns in every table."""


def _curve_row(cell: Cell) -> tuple[str, ...]:
    return cell["gpu"], layer_name(cell), str(cell["T"]), _stored(cell)


def _stored(cell: Cell) -> str:
    """The state's dtype, and those of activations and ring where they are not tuned unasked."""
    others = {"activations": cell.get("activation_dtype"), "ring": cell.get("ring_dtype")}
    return ", ".join([cell["state_dtype"], *(f"{dtype} {of}" for of, dtype in others.items() if dtype)])


Times = dict[str, float]
"""Step times in µs by kernel: roof, replay, native, default."""
Steps = list[tuple[Cell, Times]]
"""Timed cells in order, each with its step times."""


def _steps(records: Sequence[Record], claim: str = "step_time_us") -> Steps:
    cells: dict[str, tuple[Cell, Times]] = {}
    for record in select(records, claim):
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


def _ratio(times: Times, of: str, to: str = "replay") -> str:
    return fixed(times[of] / times[to]) if {of, to} <= set(times) else ""


def _time(times: Times, kernel: str) -> str:
    return figure(times[kernel], 4) if kernel in times else ""


def steps_region(records: Sequence[Record]) -> str:
    """Step time of every timed cell: roof, replay, native, and what they mean for each other."""
    steps = _steps(records)
    beside = ["native", "native steps"] if any("native steps" in times for _, times in steps) else ["native"]
    kernels = ["roof", "replay", *beside, "default"]
    rows = [
        [
            *_curve_row(cell),
            str(cell["effective_batch"]),
            *(_time(times, kernel) for kernel in kernels),
            *(_ratio(times, kernel) for kernel in ("roof", *beside)),
        ]
        for cell, times in steps
    ]
    header = [*CURVE_HEADER, "effective batch", *(f"{kernel}, µs" for kernel in kernels)]
    return markdown([*header, "of roof", *(f"vs {kernel}" for kernel in beside)], rows)


def materialize_region(records: Sequence[Record]) -> str:
    """What folding whole rings into states of other slots takes, of every timed cell."""
    kernels = ("roof", "replay", "default")
    rows = [
        [
            cell["gpu"],
            layer_name(cell),
            _stored(cell),
            str(cell["effective_batch"]),
            *(_time(times, kernel) for kernel in kernels),
            _ratio(times, "roof"),
            _ratio(times, "default"),
        ]
        for cell, times in _steps(records, "materialize_time_us")
    ]
    header = ["GPU", "layer", "state", "effective batch", "roof, µs", "materialise, µs", "default, µs"]
    return markdown([*header, "of roof", "vs default"], rows)


def convolution_region(records: Sequence[Record]) -> str:
    """What a launch of the convolution takes by the tuned tile, of every timed cell."""
    kernels = ("roof", "tuned", "default")
    rows = [
        [
            cell["gpu"],
            str(cell["T"]),
            "/".join(cell[f"{name}_dtype"] for name in ("activation", "ring", "weight")),
            str(cell["rows"]),
            str(cell["channels"]),
            *(_time(times, kernel) for kernel in kernels),
            *(_ratio(times, kernel, "tuned") for kernel in ("roof", "default")),
        ]
        for cell, times in _steps(records, "conv_time_us")
    ]
    if not rows:
        return "No recorded run has timed it yet."
    header = ["GPU", "T", "x/ring/weights", "rows", "channels", *(f"{kernel}, µs" for kernel in kernels)]
    return markdown([*header, "of roof", "vs default"], rows)


OVERVIEW_BATCHES = (16, 128, 1024, 8192, 32768)
"""Of each curve the overview shows the batches nearest to these, where one is as near as a half octave."""


def overview_region(records: Sequence[Record]) -> str:
    """A row per curve: how replay compares with native at a few batches, and all kernels at the largest."""
    rows = []
    for curve in _curves(records):
        times = {cell["effective_batch"]: values for cell, values in curve}
        shown = [_near(times, batch) for batch in OVERVIEW_BATCHES]
        lost = _native_faster(curve)
        rows.append(
            [
                *_curve_row(curve[0][0]),
                str(max(lost)) if lost else "nowhere",
                *(_ratio(values, "native") for values in shown),
                _time(shown[-1], "replay"),
                _ratio(shown[-1], "roof"),
                _ratio(shown[-1], "default"),
            ]
        )
    first, *others = (str(batch) for batch in OVERVIEW_BATCHES)
    compared = ["native faster up to", f"vs native at {first}", *others]
    header = [*CURVE_HEADER, *compared, f"at {others[-1]}: replay, µs", "of roof", "vs default"]
    return markdown(header, rows)


def _near(times: dict[int, Times], batch: int) -> Times:
    """Times at the batch nearest to ``batch``; none where it is more than a half octave away."""
    nearest = min(times, key=lambda timed: abs(math.log2(timed / batch)))
    return times[nearest] if abs(math.log2(nearest / batch)) <= 0.5 else {}


def _native_faster(curve: Steps) -> list[int]:
    """Batches at which the native kernel takes less time than replay."""
    return [
        cell["effective_batch"]
        for cell, times in curve
        if {"native", "replay"} <= set(times) and times["native"] < times["replay"]
    ]


def losses_region(records: Sequence[Record]) -> str:
    """Per curve: where the native kernel is faster than replay, and where nothing beat the default."""
    rows = []
    for curve in _curves(records):
        ratios = [t["native"] / t["replay"] for _, t in curve if {"native", "replay"} <= set(t)]
        if not ratios:
            continue
        lost = _native_faster(curve)
        unbeaten = sum("default" in t and t["default"] <= t.get("replay", 0.0) for _, t in curve)
        rows.append(
            [
                *_curve_row(curve[0][0]),
                str(len(curve)),
                str(len(lost)),
                str(max(lost)) if lost else "",
                fixed(min(ratios)),
                fixed(max(ratios)),
                str(unbeaten),
            ]
        )
    measured = ["batches timed", "native faster at", "up to effective batch", "worst vs native"]
    return markdown([*CURVE_HEADER, *measured, "best vs native", "default unbeaten at"], rows)


ASKED_HEADER = ("figure", "GPU", "of", "value", "asked", "reached")


def _cells_in_words(cell: Cell, layer: str, batch: str = "") -> str:
    batch = batch or f"batch {cell['effective_batch']}"
    return f"{layer}, T {cell['T']}, {_stored(cell)}, {batch}"


def asked_region(records: Sequence[Record]) -> str:
    """Every figure with a goal other than "not slower than native", and the goal; errors have a page."""
    rows = []
    for record in records:
        if record["asked"] is None or record["claim"] in ("mix_vs_native", *ERROR_CLAIMS):
            continue
        cell, claim = record["cell"], record["claim"]
        of = cell["scope"] if "scope" in cell else _cells_in_words(cell, layer_name(cell))
        value = figure(record["value"], 3) + unit(record)
        met = "yes" if reached(record) else "no"
        rows.append([claim, cell.get("gpu", ""), of, value, goal(record, record["asked"]), met])
    return markdown(ASKED_HEADER, rows)


def goals_region(records: Sequence[Record]) -> str:
    """A row per goal, over all layers of a family that it is asked of: the range reached, and by how many.

    Errors have a page of their own.
    """
    goals: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record["asked"] is None or record["claim"] in ERROR_CLAIMS:
            continue
        cell, claim = record["cell"], record["claim"]
        if "scope" in cell:
            of = cell["scope"]
        else:
            every = "every batch" if claim == "mix_vs_native" else ""
            of = _cells_in_words(cell, FAMILY_NAMES[cell["family"]], every)
        goals.setdefault((claim, cell.get("gpu", ""), of), []).append(record)
    rows = []
    for key, found in goals.items():
        least, most = (figure(pick(r["value"] for r in found), 3) for pick in (min, max))
        span = least if least == most else f"{least} to {most}"
        met = sum(map(reached, found))
        word = f"{met} of {len(found)}" if len(found) > 1 else "yes" if met else "no"
        # Beside native the noise floor of a cell comes off what is asked.
        asked = 1.0 if key[0] == "mix_vs_native" else found[0]["asked"]
        rows.append([*key, span + unit(found[0]), goal(found[0], asked), word])
    return markdown(ASKED_HEADER, rows)


def stages_region(records: Sequence[Record]) -> str:
    """Step time with one stage left out at a time, a row per cell and mode."""
    found = select(records, "stage_time_us")
    columns = list(dict.fromkeys(r["cell"]["without"] for r in found if "without" in r["cell"]))
    # As it is first, combinations last.
    columns.sort(key=lambda name: (name != "nothing", len(name)))
    cells: dict[str, tuple[Cell, Times]] = {}
    for record in found:
        cell = {k: v for k, v in record["cell"].items() if k not in ("without", "kernel")}
        values = cells.setdefault(json.dumps(cell), (cell, {}))[1]
        values[record["cell"].get("without", "roof")] = record["value"]
    rows = [
        [
            *_curve_row(cell),
            str(cell["effective_batch"]),
            cell["mode"],
            *(_time(values, name) for name in ("roof", *columns)),
        ]
        for cell, values in cells.values()
    ]
    return markdown([*CURVE_HEADER, "effective batch", "mode", "roof, µs", *columns], rows)


REGIONS: dict[str, Callable[[Sequence[Record]], str]] = {
    "steps": steps_region,
    "materialize": materialize_region,
    "convolution": convolution_region,
    "overview": overview_region,
    "losses": losses_region,
    "asked": asked_region,
    "goals": goals_region,
    "stages": stages_region,
    "error-source": error_source_region,
    "output-errors": output_errors_region,
    "state-errors": state_errors_region,
    "rounding": rounding_region,
    "folds": folds_region,
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


def main() -> int:
    records = recorded()
    for path in documents():
        text = path.read_text(encoding="utf-8")
        rendered = render(text, records)
        if rendered != text:
            path.write_text(rendered, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
