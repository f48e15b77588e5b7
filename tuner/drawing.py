"""Results drawn in the terminal: each ``draw_*`` shows the data that an ``*_info`` has made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report import FINDING_EXITS, Data

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent; a dash for nothing."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _grid(title: str, columns: Sequence[str], text_columns: Sequence[str] = ()) -> Grid:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as Grid

    grid = Grid(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="left" if column in text_columns else "right", overflow="fold")
    return grid


def draw_table(data: Data, console: Console) -> None:
    """Draw :func:`.report.table_info`: one grid per spec, a row per effective batch."""
    major, minor = data["capability"]
    console.print(
        f"{data['gpu']} (sm_{major}{minor}, {data['sm_count']} SMs), {data['source']}, {data['date']}, "
        f"triton {data['toolchain']['triton']}"
    )
    for group in data["specs"]:
        _draw_rows(group["spec"], group["rows"], console)


def draw_tables(data: Data, console: Console) -> None:
    """Draw several tables, one after the other."""
    for table in data["tables"]:
        draw_table(table, console)
    if not data["tables"]:
        console.print("no tables are installed")


def _draw_rows(title: str, rows: Sequence[Data], console: Console) -> None:
    columns = ["batch", "plan", "µs", "of roof", "vs native", "vs default", "regs", "spills", "source"]
    sisters = any(row.get("sister") for row in rows)
    grid = _grid(title, [*columns, "measured on a sister"] if sisters else columns, ("plan", "source"))
    for row in rows:
        cells = [
            str(row["effective_batch"]),
            row["plan_short"],
            ("~" if row["source"] == "static" and row["time_us"] else "") + number(row["time_us"]),
            _share(row["roof_share"]),
            _times(row["vs_native"]),
            _times(row["vs_default"]),
            "+".join(map(str, row["registers"])) or "-",
            "+".join(map(str, row["spills_bytes"])) or "-",
            f"{row['source']} ({row['origin']})" if row["origin"] else row["source"],
        ]
        if sisters:
            sister = row.get("sister")
            cells.append(f"{sister['gpu']}: {sister['plan_short']}" if sister else "-")
        grid.add_row(*cells)
    console.print(grid)


def _draw_tried(tried: Sequence[Data], console: Console) -> None:
    grid = _grid("tried", ["spec", "batches", "points", "kept", "fell out"], ("spec", "fell out"))
    for entry in tried:
        reasons = ", ".join(f"{d['count']} {d['reason']}" for d in entry["dropped"])
        grid.add_row(
            entry["spec"],
            str(len(entry["effective_batches"])),
            str(entry["points"]),
            str(entry["kept"]),
            reasons or "-",
        )
    console.print(grid)


def draw_planned(data: Data, console: Console) -> None:
    """Draw :func:`.report.planned_info`."""
    mode = "static" if data["static"] else "measured"
    console.print(f"{data['gpu']} ({mode}): {data['cells']} cells, {data['kept']} of {data['points']} points")
    _draw_tried(data["specs"], console)
    if data["estimate_s"] is not None:
        console.print(f"estimated time of a tune: {data['estimate_s'] / 60:.1f} minutes")
    for note in data["notes"]:
        console.print(f"note: {note}")


def draw_served(served: Sequence[Data], console: Console) -> None:
    """Draw what dispatch serves; neighbouring batches with one answer share a line."""
    grid = _grid("dispatch serves", ["spec", "batches", "plan", "because"], ("spec", "plan", "because"))
    for answer, cells in itertools.groupby(served, lambda s: (s["spec"], s["plan_short"], _because(s))):
        batches = [cell["effective_batch"] for cell in cells]
        span = str(batches[0]) if len(batches) == 1 else f"{batches[0]}-{batches[-1]}"
        spec, plan, because = answer
        grid.add_row(spec, span, plan, because)
    console.print(grid)


def _because(served: Data) -> str:
    """The reason without what differs from batch to batch."""
    parts = str(served["reason"]).split("; ")
    return "; ".join(part for part in parts if not part.startswith("nearest effective batch"))


def draw_tuned(data: Data, console: Console) -> None:
    """Draw :func:`.report.tuned_info`: what fell out, the rows, what dispatch serves, where everything is."""
    if data["tried"]:
        _draw_tried(data["tried"], console)
    draw_table(data["table"], console)
    if data["served"]:
        draw_served(data["served"], console)
    if data["static_share"]:
        median, p10 = (_share(data["static_share"].get(name)) for name in ("median", "p10"))
        console.print(
            f"the analytical model's picks reach {median} of the optimum on the landscapes that "
            f"it was calibrated on (median; 10th percentile {p10})"
        )
    for failure in data["gate_failures"]:
        console.print(f"numerically wrong, left out: {failure}")
    for note in data["notes"]:
        console.print(f"note: {note}")
    if data["missing"]:
        console.print(f"{len(data['missing'])} cells without a row: {', '.join(data['missing'][:4])} ...")
    rows = sum(len(group["rows"]) for group in data["table"]["specs"])
    console.print(
        f"{rows} rows in {data['table_path']}, {data['modules']} kernels, {data['minutes']:.1f} minutes; "
        f"measurements in {data['store']}"
        if data["store"]
        else f"{rows} rows in {data['table_path']}, {data['modules']} kernels, {data['minutes']:.1f} minutes"
    )


def draw_emitted(data: Data, console: Console) -> None:
    """Draw :func:`.report.emitted_info`."""
    for path in data["written"]:
        console.print(f"wrote {path}")
    for path in data["removed"]:
        console.print(f"removed {path}: no table names it")
    for note in data["notes"]:
        console.print(f"note: {note}")
    console.print(f"{data['rows']} rows in {data['table_path']}; {data['unchanged']} files were up to date")


def draw_checked(data: Data, console: Console) -> None:
    """Draw :func:`.report.checked_info`: failures first."""
    for finding in sorted(data["findings"], key=lambda f: not f["failed"]):
        failed = finding["failed"] and FINDING_EXITS[finding["kind"]] != "OK"
        word = "FAILED" if failed else "note"
        console.print(f"{word} {finding['kind']}: {finding['subject']}: {finding['message']}")
    looked_at = ", ".join(f"{count} {kind}" for kind, count in data["counts"].items())
    failures = sum(f["failed"] for f in data["findings"])
    console.print(f"checked {looked_at}: {failures} failed" if failures else f"checked {looked_at}: all well")


def draw_explained(data: Data, console: Console) -> None:
    """Draw :func:`.tables.explained_info`: what each cell is served; ``*`` marks the place that serves it."""
    for table in data["tables"]:
        console.print(f"{table['of']}'s table for {table['gpu']}: {table['rows']} rows, {table['source']}")
    if not data["tables"]:
        console.print("no tables are installed")
    for cell in data["cells"]:
        console.print(f"{cell['spec']} at effective batch {cell['effective_batch']} on {data['gpu']}")
        console.print(f"  serves {cell['plan_short']}: {cell['reason']}")
        if data["whole"] or len(data["cells"]) == 1:
            for candidate in cell["candidates"]:
                mark = "*" if candidate["served"] else " "
                place = f" {candidate['table']}" if candidate["table"] else ""
                console.print(
                    f"  {mark} {candidate['step']}{place}: {candidate['had']}; {candidate['outcome']}"
                )
