"""The README's figure: step time of a layer of each family against batch, for roof, replay and native kernel.

    python benchmarks/figure.py

:func:`info` picks the data from the recorded figures, :func:`draw` makes a plain SVG of them: no
plotting library, and the same records give the same bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.documents import FAMILY_NAMES
from benchmarks.summary import ROOT, Record, load_summary, select

FIGURE = ROOT / "docs" / "figures" / "step_time.svg"

KERNELS = ("native", "replay", "roof")
STATE_DTYPES = ("fp32", "bf16")
COLOURS = {"native": "#c2410c", "replay": "#1d4ed8", "roof": "#6b7280"}
LABELS = {
    "native": "native: state written every step",
    "replay": "replay: this package",
    "roof": "roof: the state's bytes alone",
}


@dataclass(frozen=True)
class Panel:
    """One layer and state dtype: per kernel its points (effective batch, µs), ascending."""

    layer: str
    state_dtype: str
    series: dict[str, tuple[tuple[int, float], ...]]


def info(records: Iterable[Record], gpu: str = "", **layer: Any) -> tuple[Panel, ...]:
    """Panels of one layer, those without points left out; their ``layer`` is family, head dim and state size.

    Args:
        records: Recorded figures; claims ``step_time_us`` count.
        gpu: The GPU; empty takes the one with most points.
        layer: Values of the cell that only one layer has, e.g. ``family="gdn", heads_per_group=2, T=1``.
    """
    chosen = select(records, "step_time_us", **layer)
    if not gpu and chosen:
        names = [record["cell"]["gpu"] for record in chosen]
        gpu = max(sorted(set(names)), key=names.count)
    panels = []
    for state_dtype in STATE_DTYPES:
        series = {}
        for kernel in KERNELS:
            found = select(chosen, "step_time_us", gpu=gpu, state_dtype=state_dtype, kernel=kernel)
            points = sorted((r["cell"]["effective_batch"], r["value"]) for r in found)
            if points:
                series[kernel] = tuple(points)
        if series:
            cell = chosen[0]["cell"]
            name = f"{FAMILY_NAMES[cell['family']]} {cell['head_dim']} x {cell['state_size']}"
            panels.append(Panel(name, state_dtype, series))
    return tuple(panels)


WIDTH, ROW_HEIGHT = 900, 300
_TOP, _BOTTOM, _LEFT, _RIGHT, _GAP = 64, 52, 64, 20, 36
_ROW_GAP = 36


def draw(rows: Sequence[Sequence[Panel]], title: str) -> str:
    """The figure as SVG text: panels of a row side by side, all on common logarithmic axes.

    Raises:
        ValueError: No panel has a point.
    """
    rows = [panels for panels in rows if panels]
    points = [p for panels in rows for panel in panels for series in panel.series.values() for p in series]
    if not points:
        raise ValueError("nothing to draw: no step_time_us records; derive summary.json from a run first")
    x_range = (min(p[0] for p in points), max(p[0] for p in points))
    y_range = (min(p[1] for p in points) / 1.25, max(p[1] for p in points) * 1.25)
    height = _TOP + _BOTTOM + len(rows) * (ROW_HEIGHT + _ROW_GAP) - _ROW_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15, weight=600),
    ]
    for row, panels in enumerate(rows):
        width = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
        top = _TOP + row * (ROW_HEIGHT + _ROW_GAP)
        for column, panel in enumerate(panels):
            box = _Box(_LEFT + column * (width + _GAP), top, width, ROW_HEIGHT)
            parts += _panel(panel, box, x_range, y_range, first=column == 0, last=row == len(rows) - 1)
            if (row, column) == (0, 0):
                parts += _legend(panel, box.left + 12, box.top + 12)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class _Box:
    """Where a panel's axes lie."""

    left: float
    top: float
    width: float
    height: float


def _panel(
    panel: Panel,
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

    parts = [_text(left, box.top - 10, f"{panel.layer}, {panel.state_dtype} state", weight=600)]
    for tick in ticks(*y_range):
        parts.append(_line(left, y(tick), right, y(tick)))
        if first:
            parts.append(_text(left - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    for tick in _octaves(*x_range):
        parts.append(_line(x(tick), box.top, x(tick), bottom))
        if last:
            parts.append(_text(x(tick), bottom + 18, str(tick), anchor="middle"))
    if last:
        middle = (left + right) / 2
        parts.append(_text(middle, bottom + 40, "effective batch (sequences x heads)", anchor="middle"))
    if first:
        middle = (box.top + bottom) / 2
        parts.append(
            f'<text x="18" y="{middle:.1f}" text-anchor="middle" fill="#374151" '
            f'transform="rotate(-90 18 {middle:.1f})">step of a layer, µs</text>'
        )
    for kernel, points in panel.series.items():
        path = " ".join(f"{x(batch):.1f},{y(time):.1f}" for batch, time in points)
        dash = ' stroke-dasharray="5 4"' if kernel == "roof" else ""
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[kernel]}" stroke-width="2"{dash}/>'
        )
        if kernel != "roof":
            parts += [
                f'<circle cx="{x(b):.1f}" cy="{y(t):.1f}" r="2.5" fill="{COLOURS[kernel]}"/>'
                for b, t in points
            ]
    return parts


def _legend(panel: Panel, left: float, top: float) -> list[str]:
    parts = [f'<rect x="{left - 6:.1f}" y="{top - 12:.1f}" width="226" height="{18 * len(panel.series) + 8}" '
             'fill="#ffffff"/>']  # fmt: skip
    for row, kernel in enumerate(panel.series):
        y = top + 18 * row
        dash = ' stroke-dasharray="5 4"' if kernel == "roof" else ""
        parts.append(
            f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + 24:.1f}" y2="{y:.1f}" '
            f'stroke="{COLOURS[kernel]}" stroke-width="2"{dash}/>'
        )
        parts.append(_text(left + 32, y + 4, LABELS[kernel]))
    return parts


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
    return draw(rows, f"Decode on {gpu}, a token a step: bf16 activations, window 16")


if __name__ == "__main__":
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(figure(load_summary()), encoding="utf-8")
    print(f"wrote {FIGURE.relative_to(ROOT)}")
