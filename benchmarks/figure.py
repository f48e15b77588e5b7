"""Figures of the documents: step time of a layer of each family against batch; errors against tokens.

    python benchmarks/figure.py

:func:`info` and :func:`error_panels` pick the data from the recorded figures, :func:`draw` makes a plain SVG
of them: no plotting library, and the same records give the same bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from xml.sax.saxutils import escape

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.error_tables import error_places
from benchmarks.summary import ROOT, Record, recorded, select
from benchmarks.words import FAMILY_NAMES, short_name

FIGURE = ROOT / "docs" / "figures" / "step_time.svg"

ERRORS = ROOT / "docs" / "figures" / "errors.svg"

STATE_DTYPES = ("fp32", "bf16")
_ORANGE, _BLUE, _GREEN, _GREY = "#c2410c", "#1d4ed8", "#15803d", "#6b7280"


@dataclass(frozen=True)
class Style:
    """How a series is drawn: dashed ones have no marks, hollow ones rings for marks."""

    label: str
    colour: str
    dashed: bool = False
    hollow: bool = False


class Drawn(Protocol):
    """A panel: per series its points (x, y), ascending."""

    @property
    def title(self) -> str: ...

    @property
    def series(self) -> Mapping[str, tuple[tuple[int, float], ...]]: ...


@dataclass(frozen=True)
class Chart:
    """What the panels of a figure have in common."""

    title: str
    x_label: str
    y_label: str
    styles: Mapping[str, Style]
    nothing: str
    """What is said where there is nothing to draw."""
    legend_columns: int = 0
    """Above all panels, in so many columns; 0 is inside of the first one."""
    own_axes: bool = False
    """Each column of panels has its own vertical axis."""


STEP_STYLES = {
    "native": Style("native: state written every step", _ORANGE),
    "replay": Style("replay: this package", _BLUE),
    "roof": Style("roof: the state's bytes alone", _GREY, dashed=True),
}


@dataclass(frozen=True)
class Panel:
    """One layer and state dtype: per kernel its points (effective batch, µs), ascending."""

    layer: str
    state_dtype: str
    series: dict[str, tuple[tuple[int, float], ...]]

    @property
    def title(self) -> str:
        return f"{self.layer}, {self.state_dtype} state"


def info(records: Iterable[Record], gpu: str = "", **layer: Any) -> tuple[Panel, ...]:
    """Panels of one layer, those without points left out; their ``layer`` is family, head dim and state size.

    Of activations and rings those in the dtypes that are tuned unasked are drawn.

    Args:
        records: Recorded figures; claims ``step_time_us`` count.
        gpu: The GPU; empty takes the one with most points.
        layer: Values of the cell that only one layer has, e.g. ``family="gdn", heads_per_group=2, T=1``.
    """
    chosen = select(records, "step_time_us", **{"activation_dtype": None, "ring_dtype": None, **layer})
    if not gpu and chosen:
        names = [record["cell"]["gpu"] for record in chosen]
        gpu = max(sorted(set(names)), key=names.count)
    panels = []
    for state_dtype in STATE_DTYPES:
        series = {}
        for kernel in STEP_STYLES:
            found = select(chosen, "step_time_us", gpu=gpu, state_dtype=state_dtype, kernel=kernel)
            points = sorted((r["cell"]["effective_batch"], r["value"]) for r in found)
            if points:
                series[kernel] = tuple(points)
        if series:
            panels.append(Panel(short_name(chosen[0]["cell"]), state_dtype, series))
    return tuple(panels)


ERROR_STYLES = {
    "native fp32": Style("native, fp32 state", _ORANGE, hollow=True),
    "native bf16": Style("native, bf16 state", _ORANGE),
    "replay fp32 bf16": Style("replay, fp32 state, bf16 ring", _BLUE, hollow=True),
    "replay bf16 bf16": Style("replay, bf16 state, bf16 ring", _BLUE),
    "replay fp32 fp32": Style("replay, fp32 state, fp32 ring", _GREEN, hollow=True),
    "replay bf16 fp32": Style("replay, bf16 state, fp32 ring", _GREEN),
    "ideal": Style("the ideal of each", _GREY, dashed=True),
    "rounding": Style("outputs rounded, nothing else", "#111827", dashed=True),
}
"""Kernels, their state and ring dtypes; a series of an ideal is named after what it is the ideal of."""
ERROR_NAMES = {"state_error": "states", "output_error": "outputs"}


@dataclass(frozen=True)
class ErrorPanel:
    """Errors of states or outputs of a layer: per kernel its points (tokens, error), ascending."""

    layer: str
    claim: str
    series: dict[str, tuple[tuple[int, float], ...]]

    @property
    def title(self) -> str:
        return f"{self.layer}: {ERROR_NAMES[self.claim]}"


def error_panels(records: Sequence[Record], num_tokens: int = 1) -> list[list[ErrorPanel]]:
    """A row of panels per layer; ideals come last, so that they show on what they are of."""
    rows = []
    places = _places(records)
    for family in FAMILY_NAMES:
        row = []
        for claim in ERROR_NAMES:
            found = select(records, claim, gpu=places.get(family, ""), family=family)
            points: dict[str, list[tuple[int, float]]] = {}
            for record in found:
                cell = record["cell"]
                if cell["kernel"] == "rounding":
                    name = "rounding"
                elif cell["T"] != num_tokens:
                    continue
                else:
                    kernel = "native" if cell["op"] == "native_step" else "replay"
                    name = " ".join(filter(None, (kernel, cell["state_dtype"], cell.get("ring_dtype"))))
                    if name not in ERROR_STYLES:
                        continue
                    name = f"ideal {name}" if cell["kernel"] == "ideal" else name
                points.setdefault(name, []).append((cell["tokens"], record["value"]))
            if points:
                order = [*ERROR_STYLES, *(f"ideal {name}" for name in ERROR_STYLES)]
                names = sorted(points, key=order.index)
                series = {name: tuple(sorted(points[name])) for name in names}
                row.append(ErrorPanel(short_name(found[0]["cell"]), claim, series))
        rows.append(row)
    return rows


def _places(records: Sequence[Record]) -> dict[str, str]:
    """Where the errors that are drawn were recorded, by family: on one GPU, an H200 if there is one."""
    found = error_places(records)
    return {f: "H200" if "H200" in found[f] else found[f][0] for f in FAMILY_NAMES if f in found}


WIDTH, ROW_HEIGHT = 900, 300
_TOP, _BOTTOM, _LEFT, _RIGHT, _GAP = 64, 52, 64, 20, 36
_ROW_GAP = 36
_LEGEND_LINE = 18


def draw(rows: Sequence[Sequence[Drawn]], chart: Chart) -> str:
    """The figure as SVG text: panels of a row side by side, on common logarithmic axes.

    Raises:
        ValueError: No panel has a point.
    """
    rows = [panels for panels in rows if panels]
    every = [panel for panels in rows for panel in panels]
    if not every:
        raise ValueError(f"nothing to draw: {chart.nothing}")
    x_range = _range(every, 0)
    gap = _LEFT if chart.own_axes else _GAP
    first_top = _TOP
    if chart.legend_columns:
        first_top += _LEGEND_LINE * math.ceil(len(chart.styles) / chart.legend_columns) + 12
    height = first_top + _BOTTOM + len(rows) * (ROW_HEIGHT + _ROW_GAP) - _ROW_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(chart.title, {chr(34): "&quot;"})}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, chart.title, size=15, weight=600),
    ]
    if chart.legend_columns:
        lines = math.ceil(len(chart.styles) / chart.legend_columns)
        width = (WIDTH - _LEFT - _RIGHT) / chart.legend_columns
        for index, style in enumerate(chart.styles.values()):
            column, line = divmod(index, lines)
            parts += _legend_line(style, _LEFT + column * width, 46 + _LEGEND_LINE * line, marked=True)
    for row, panels in enumerate(rows):
        width = (WIDTH - _LEFT - _RIGHT - gap * (len(panels) - 1)) / len(panels)
        top = first_top + row * (ROW_HEIGHT + _ROW_GAP)
        for column, panel in enumerate(panels):
            box = _Box(_LEFT + column * (width + gap), top, width, ROW_HEIGHT)
            sharing = [panels[column] for panels in rows if column < len(panels)] if chart.own_axes else every
            low, high = _range(sharing, 1)
            y_range = (low / 1.25, high * 1.25)
            parts += _panel(panel, chart, box, x_range, y_range, first=column == 0, last=row == len(rows) - 1)
            if (row, column) == (0, 0) and not chart.legend_columns:
                parts += _legend([chart.styles[name] for name in panel.series], box.left + 12, box.top + 12)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _range(panels: Sequence[Drawn], axis: int) -> tuple[float, float]:
    values = [point[axis] for panel in panels for series in panel.series.values() for point in series]
    return min(values), max(values)


@dataclass(frozen=True)
class _Box:
    """Where a panel's axes lie."""

    left: float
    top: float
    width: float
    height: float


def _panel(
    panel: Drawn,
    chart: Chart,
    box: _Box,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    first: bool,
    last: bool,
) -> list[str]:
    left, right, bottom = box.left, box.left + box.width, box.top + box.height

    def x(value: float) -> float:
        return left + box.width * _place(value, x_range)

    def y(value: float) -> float:
        return bottom - box.height * _place(value, y_range)

    parts = [_text(left, box.top - 10, panel.title, weight=600)]
    for tick in ticks(*y_range):
        parts.append(_line(left, y(tick), right, y(tick)))
        if first or chart.own_axes:
            label = f"{tick:g}" if tick >= 1e-3 else f"{tick:.0e}".replace("e-0", "e-")
            parts.append(_text(left - 8, y(tick) + 4, label, anchor="end"))
    for tick in _octaves(*x_range):
        parts.append(_line(x(tick), box.top, x(tick), bottom))
        if last:
            parts.append(_text(x(tick), bottom + 18, str(tick), anchor="middle"))
    if last:
        middle = (left + right) / 2
        parts.append(_text(middle, bottom + 40, chart.x_label, anchor="middle"))
    if first:
        middle = (box.top + bottom) / 2
        parts.append(
            f'<text x="18" y="{middle:.1f}" text-anchor="middle" fill="#374151" '
            f'transform="rotate(-90 18 {middle:.1f})">{escape(chart.y_label)}</text>'
        )
    for name, points in panel.series.items():
        style = chart.styles[name] if name in chart.styles else chart.styles[name.split()[0]]
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in points)
        parts.append(f'<polyline points="{path}" fill="none" {_stroke(style)}/>')
        if not style.dashed:
            parts += [_mark(style, x(at), y(value)) for at, value in points]
    return parts


def _legend(styles: Sequence[Style], left: float, top: float) -> list[str]:
    parts = [f'<rect x="{left - 6:.1f}" y="{top - 12:.1f}" width="226" '
             f'height="{_LEGEND_LINE * len(styles) + 8}" fill="#ffffff"/>']  # fmt: skip
    for row, style in enumerate(styles):
        parts += _legend_line(style, left, top + _LEGEND_LINE * row, marked=False)
    return parts


def _legend_line(style: Style, left: float, y: float, marked: bool) -> list[str]:
    line = f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + 24:.1f}" y2="{y:.1f}" {_stroke(style)}/>'
    mark = [_mark(style, left + 12, y)] if marked and not style.dashed else []
    return [line, *mark, _text(left + 32, y + 4, style.label)]


def _mark(style: Style, x: float, y: float) -> str:
    fill = f'fill="#ffffff" stroke="{style.colour}"' if style.hollow else f'fill="{style.colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" {fill}/>'


def _stroke(style: Style) -> str:
    dash = ' stroke-dasharray="5 4"' if style.dashed else ""
    return f'stroke="{style.colour}" stroke-width="2"{dash}'


def _place(value: float, span: tuple[float, float]) -> float:
    """Where a value lies on a logarithmic axis, 0 to 1."""
    low, high = span
    return 0.5 if low == high else math.log(value / low) / math.log(high / low)


def ticks(low: float, high: float) -> list[float]:
    """Values 1, 2 and 5 times a power of ten within a range; only powers where there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**d for d in decades for step in (1, 2, 5) if low <= step * 10.0**d <= high]
    if len(found) <= 9:
        return found
    return [10.0**d for d in decades if low <= 10.0**d <= high]


def _octaves(low: float, high: float) -> list[int]:
    """Powers of two within a range, at most six of them."""
    powers = list(range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1))
    step = max(1, math.ceil(len(powers) / 6))
    return [2**power for power in powers[::-1][::step][::-1]]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="#374151">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e5e7eb"/>'


LAYERS = (
    {"family": "mamba2", "head_dim": 64, "state_size": 128, "heads_per_group": 16},
    {"family": "gdn", "head_dim": 128, "state_size": 128, "heads_per_group": 2},
)
"""What the README shows, a row each: the layers of Nemotron-3 Super and of Qwen3.5 4B."""


def figure(records: Sequence[Record]) -> str:
    """The README's figure: a layer of each family that was timed, one token a step."""
    step = {"op": "step", "window": 16, "T": 1}
    gpus = sorted({r["cell"]["gpu"] for r in select(records, "step_time_us", **step)})
    gpu = "H200" if "H200" in gpus or not gpus else gpus[0]
    rows = [info(records, gpu, **layer, **step) for layer in LAYERS]
    chart = Chart(
        f"Decode on {gpu}, a token a step: bf16 activations, window 16",
        "effective batch (sequences x heads)",
        "step of a layer, µs",
        STEP_STYLES,
        "no step_time_us records; record a run first",
    )
    return draw(rows, chart)


def errors_figure(records: Sequence[Record]) -> str:
    """The figure of the accuracy page: errors of states and of outputs against tokens, one token a step."""
    names: dict[str, list[str]] = {}
    for family, place in _places(records).items():
        what = "the eager reference on a CPU" if place == "cpu" else f"kernels on {place}"
        names.setdefault(what, []).append(FAMILY_NAMES[family])
    alone = len(names) == 1
    where = ", ".join(what if alone else f"{' and '.join(of)} {what}" for what, of in names.items())
    chart = Chart(
        f"Errors against fp64, {where}: bf16 activations, a token a step, window 16",
        "tokens",
        "relative RMS error",
        ERROR_STYLES,
        "no error records; run benchmarks/accuracy.py first",
        legend_columns=3,
        own_axes=True,
    )
    return draw(error_panels(records), chart)


if __name__ == "__main__":
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    records = recorded()
    for path, drawn in ((FIGURE, figure), (ERRORS, errors_figure)):
        path.write_text(drawn(records), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
