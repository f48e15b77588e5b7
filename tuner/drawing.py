"""Results drawn in the terminal: each ``draw_*`` shows the data that an ``*_info`` has made."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

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

    grid = Grid(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="left" if column in text_columns else "right", overflow="fold")
    return grid


def draw_tables(data: Data, console: Console) -> None:
    """Draw several tables, one after the other; columns that a terminal is too narrow for are named."""
    left_out = [name for table in data["tables"] for name in _draw_table(table, console)]
    _tell_left_out(left_out, console)
    if not data["tables"]:
        console.print("no tables are installed")
    if data["related"]:
        names = ", ".join(data["related"])
        console.print(
            f"dispatch may serve rows of {names} here too: table show without --gpu shows them, "
            "table explain says which serve",
            soft_wrap=True,
        )


def _draw_table(data: Data, console: Console) -> list[str]:
    """Draw :func:`.report.table_info`, a grid per spec and a row per batch; the columns left out."""
    major, minor = data["capability"]
    sources = collections.Counter(row["source"] for group in data["specs"] for row in group["rows"])
    counts = ", ".join(f"{count} rows {source}" for source, count in sources.most_common()) or "no rows"
    static = " (static: times with ~ are estimates)" if "static" in sources else ""
    console.print(
        f"{data['gpu']} (sm_{major}{minor}, {data['sm_count']} SMs), {counts}{static}, {data['date']}, "
        f"triton {data['toolchain']['triton']}"
    )
    rows_and_tiles = [*(row for group in data["specs"] for row in group["rows"]), *data["convolutions"]]
    stale = sum(row["stale"] for row in rows_and_tiles)
    if stale:
        told = f"{stale} rows or tiles are stale ({_STALE}): their kernels have changed since they were made"
        console.print(told, soft_wrap=True)
    groups = {group["spec"]: [_cells(row) for row in group["rows"]] for group in data["specs"]}
    promised = {
        group["spec"]: row["numerics"]
        for group in data["specs"]
        for row in group["rows"][:1]
        if row["batch_invariant"]
    }
    rows = [cells for group in groups.values() for cells in group]
    columns, left_out = _fitting(rows, console)
    for spec, group in groups.items():
        console.print(spec, style="italic")  # as the grid's title it would be broken to the grid's width
        if spec in promised:
            console.print(f"batch-invariant: numerics class {promised[spec]}", soft_wrap=True)
        console.print(_row_grid(columns, group))
    if data["convolutions"]:
        _draw_tiles(data["convolutions"], console)
    return left_out


def _draw_tiles(rows: Iterable[Data], console: Console) -> None:
    """Draw the tiles of the convolution, a row per effective batch."""
    columns = ["convolution", "batch", "tile", "µs", "of roof", "vs default"]
    grid = _grid("", columns, ("convolution", "tile"))
    for row in rows:
        grid.add_row(
            row["spec"],
            str(row["effective_batch"]),
            row["tile"],
            _time(row),
            _share(row["roof_share"]),
            _times(row["vs_default"]),
        )
    console.print(grid)


def _cells(row: Data) -> dict[str, str]:
    """A row's texts by column."""
    sister = row.get("sister")
    return {
        "batch": str(row["effective_batch"]),
        "plan": row["plan_short"],
        "µs": ("~" if row["source"] == "static" and row["time_us"] else "") + _time(row),
        "of roof": _share(row["roof_share"]),
        "vs native": _times(row["vs_native"]),
        "vs default": _times(row["vs_default"]),
        "regs": "+".join(map(str, row["registers"])) or "-",
        "spills": "+".join(map(str, row["spills_bytes"])) or "-",
        "source": f"{row['source']} ({row['origin']})" if row["origin"] else row["source"],
        _SISTER: f"{sister['gpu']}: {sister['plan_short']}" if sister else "-",
    }


def _time(row: Data) -> str:
    return number(row["time_us"]) + (_STALE if row["stale"] else "")


_STALE: Final = "*"
"""Behind the time of a kernel that has changed since."""
_SISTER: Final = "measured on a sister"
_LEAST_FIRST: Final = ("spills", "regs", "source", "of roof", _SISTER, "vs default")
"""Columns that a narrow terminal can do without, the least telling first."""


def _fitting(rows: Sequence[dict[str, str]], console: Console) -> tuple[list[str], list[str]]:
    """The columns that ``rows`` have room for, and those left out.

    Where it gives room, plans of two kernels become two lines in ``rows``.
    """
    columns = list(rows[0]) if rows else []
    empty = [name for name in columns if all(row[name] == "-" for row in rows)]
    if _SISTER in empty:
        columns.remove(_SISTER)  # nobody was asked
    left_out: list[str] = []
    # A column without a figure goes before any that has some.
    candidates = sorted(
        (name for name in _LEAST_FIRST if name in columns), key=lambda name: name not in empty
    )
    while _width(_row_grid(columns, rows), console) > console.width:
        if any(" + " in row["plan"] for row in rows):
            for row in rows:
                row["plan"] = row["plan"].replace(" + ", " +\n")
        elif candidates:
            left_out.append(candidates.pop(0))
            columns.remove(left_out[-1])
        else:
            break
    return columns, left_out


def _row_grid(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Grid:
    grid = _grid("", columns, ("plan", "source", _SISTER))
    for row in rows:
        grid.add_row(*(row[name] for name in columns))
    return grid


def _width(grid: Grid, console: Console) -> int:
    """Characters that a grid takes where it breaks no cell."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=10_000), grid).maximum


def _tell_left_out(columns: Iterable[str], console: Console) -> None:
    names = ", ".join(dict.fromkeys(columns))
    if names:
        console.print(f"left out at this width: {names} (a wider terminal or --json shows them)")


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
    _tell_left_out(_draw_table(data["table"], console), console)
    if data["served"]:
        draw_served(data["served"], console)
    for entry in data["batch_invariant"]:
        _draw_invariance(entry, console)
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


def _draw_invariance(data: Data, console: Console) -> None:
    """Draw what one numerics class costs the batches of a spec."""
    console.print(f"one numerics class for all batches of {data['spec']}: {data['numerics']}", soft_wrap=True)
    columns = ["batch", "plan", "µs", "best of any class", "its µs", "slower by"]
    grid = _grid("", columns, ("plan", "best of any class"))
    for cell in data["cells"]:
        grid.add_row(
            str(cell["effective_batch"]),
            cell["plan_short"],
            number(cell["time_us"]),
            "the same" if cell["best"] == cell["plan"] else cell["best_short"],
            number(cell["best_time_us"]),
            f"{100 * cell['regret']:.1f}%",
        )
    console.print(grid)
    console.print(
        f"it costs {100 * data['mean_regret']:.1f}% in the geometric mean over the batches, at most "
        f"{100 * data['worst_regret']:.1f}% (batch {data['worst_batch']})"
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

    def failed(finding: Data) -> bool:
        return finding["failed"] and FINDING_EXITS[finding["kind"]] != "OK"

    for finding in sorted(data["findings"], key=lambda f: not failed(f)):
        word = "FAILED" if failed(finding) else "note"
        console.print(f"{word} {finding['kind']}: {finding['subject']}: {finding['message']}")
    looked_at = ", ".join(f"{count} {kind}" for kind, count in data["counts"].items())
    failures = sum(map(failed, data["findings"]))
    stale = sum(finding["failed"] for finding in data["findings"]) - failures
    verdict = f"{failures} failed" if failures else f"none failed, {stale} noted" if stale else "all well"
    console.print(f"checked {looked_at}: {verdict}")


def draw_explained(data: Data, console: Console) -> None:
    """Draw :func:`.tables.explained_info`: a line per cell, or each with the places that were looked in."""
    for table in data["tables"]:
        mixed = 0 < table["static_rows"] < table["rows"]
        static = f", {table['static_rows']} of them static" if mixed else ""
        place = f"{table['of']}'s table for {table['gpu']}"
        console.print(f"{place}: {table['rows']} rows, {table['source']}{static}")
    if not data["tables"]:
        console.print("no tables are installed")
    for cell in data["convolutions"]:
        place = f"{cell['rows']} rows of {cell['channels']} channels"
        console.print(f"{place}: tile {cell['tile']}, {cell['reason']}", soft_wrap=True)
    if data["whole"]:
        for cell in data["cells"]:
            _draw_chain(cell, data["gpu"], console)
            _tell_tune_command([cell], console)
        return
    for spec, group in itertools.groupby(data["cells"], lambda cell: cell["spec"]):
        cells = list(group)
        console.print(f"{spec} on {data['gpu']}")
        _draw_answers(cells, console)
        _tell_tune_command(cells, console)
    console.print("every place that was looked in is shown with --chain, for a single cell, and by --json")


def _draw_chain(cell: Data, gpu: str, console: Console) -> None:
    """What a cell is served, and what each place had; ``*`` marks the one that serves it."""
    console.print(f"{cell['spec']} at effective batch {cell['effective_batch']} on {gpu}")
    console.print(f"  serves {cell['plan_short']}: {cell['reason']}")
    console.print(f"  numerics class {cell['numerics']}", soft_wrap=True)
    for candidate in cell["candidates"]:
        mark = "*" if candidate["served"] else " "
        place = f" {candidate['table']}" if candidate["table"] else ""
        console.print(f"  {mark} {candidate['step']}{place}: {candidate['had']}; {candidate['outcome']}")


def _tell_tune_command(cells: Iterable[Data], console: Console) -> None:
    """Name the command that gives rows to cells of one spec that have none."""
    for command in dict.fromkeys(cell["tune_command"] for cell in cells if cell["tune_command"]):
        console.print(f"  where no table has a row: {command}", soft_wrap=True)


_PLAN_WIDTH: Final = 48
"""Characters up to which plans are aligned: what most of one kernel take."""


def _draw_answers(cells: Sequence[Data], console: Console) -> None:
    """A line per cell: effective batch, plan, and why. Never broken, so that a line can be searched for."""
    # A plan of two kernels would push all reasons out of sight.
    width = min(_PLAN_WIDTH, max(len(cell["plan_short"]) for cell in cells))
    console.print(f"  {'batch':>6}  {'plan':{width}}  because", soft_wrap=True)
    for cell in cells:
        batch, plan = cell["effective_batch"], cell["plan_short"]
        console.print(f"  {batch:>6}  {plan:{width}}  {_why(cell)}", soft_wrap=True)


def _why(cell: Data) -> str:
    """The reason without what the lines around it say: spec, batch and GPU."""
    if cell["step"] == "default":
        return "no table has a row: computed default plan"
    row = cell["row_batch"]
    return _because(cell) if row == cell["effective_batch"] else f"{_because(cell)}; row of batch {row}"
