"""The README's figure: step time of a layer against batch for roof, replay and native kernel.

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
    """One state dtype: per kernel its points (effective batch, µs), ascending."""

    state_dtype: str
    series: dict[str, tuple[tuple[int, float], ...]]


def info(records: Iterable[Record], gpu: str = "", **layer: Any) -> tuple[Panel, ...]:
    """Panels of one layer, those without points left out.

    Args:
        records: Recorded figures; claims ``step_time_us`` count.
        gpu: The GPU; empty takes the one with most points.
        layer: Values of the cell, e.g. ``head_dim=64, heads_per_group=16``.
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
            panels.append(Panel(state_dtype, series))
    return tuple(panels)


WIDTH, HEIGHT = 900, 400
_TOP, _BOTTOM, _LEFT, _RIGHT, _GAP = 64, 52, 64, 20, 36


def draw(panels: Sequence[Panel], title: str) -> str:
    """The figure as SVG text: panels side by side on common logarithmic axes."""
    points = [point for panel in panels for series in panel.series.values() for point in series]
    if not points:
        raise ValueError("nothing to draw: no step_time_us records; derive summary.json from a run first")
    x_range = (min(p[0] for p in points), max(p[0] for p in points))
    y_range = (min(p[1] for p in points) / 1.25, max(p[1] for p in points) * 1.25)
    panel_width = (WIDTH - _LEFT - _RIGHT - _GAP * (len(panels) - 1)) / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15, weight=600),
    ]
    for index, panel in enumerate(panels):
        left = _LEFT + index * (panel_width + _GAP)
        parts += _panel(panel, left, panel_width, x_range, y_range, first=index == 0)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(
    panel: Panel,
    left: float,
    width: float,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    first: bool,
) -> list[str]:
    bottom = HEIGHT - _BOTTOM

    def x(value: float) -> float:
        return left + width * _place(value, x_range)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * _place(value, y_range)

    parts = [_text(left, _TOP - 12, f"{panel.state_dtype} state", weight=600)]
    for tick in ticks(*y_range):
        parts.append(_line(left, y(tick), left + width, y(tick)))
        if first:
            parts.append(_text(left - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    for tick in _octaves(*x_range):
        parts.append(_line(x(tick), _TOP, x(tick), bottom))
        parts.append(_text(x(tick), bottom + 18, str(tick), anchor="middle"))
    parts.append(_text(left + width / 2, bottom + 40, "effective batch (sequences x heads)", anchor="middle"))
    if first:
        middle = (_TOP + bottom) / 2
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
    if first:
        parts += _legend(panel, left + 12, _TOP + 12)
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


def figure(records: Sequence[Record]) -> str:
    """The README's figure: the layer of Nemotron-3 Super, 16 heads a group of 64 x 128."""
    layer = {
        "family": "mamba2",
        "head_dim": 64,
        "state_size": 128,
        "heads_per_group": 16,
        "window": 16,
        "T": 1,
    }
    gpus = sorted({r["cell"]["gpu"] for r in select(records, "step_time_us", **layer)})
    gpu = "H200" if "H200" in gpus or not gpus else gpus[0]
    panels = info(records, gpu, **layer)
    return draw(panels, f"Mamba-2 decode on {gpu}: head dim 64, state size 128, bf16 activations, window 16")


if __name__ == "__main__":
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(figure(load_summary()), encoding="utf-8")
    print(f"wrote {FIGURE.relative_to(ROOT)}")
