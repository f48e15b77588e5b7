"""Looking into dispatch tables: what they hold, and why a row serves a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codegen import emit
from ..codegen.targets import Gpu
from ..runtime.errors import TableError
from ..runtime.lookup import Lookup, read_folder, shipped_tables, user_tables
from ..runtime.table import Table, load
from .report import short
from .request import Work

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]


def read(paths: Sequence[Path]) -> tuple[Table, ...]:
    """The tables at ``paths``: files, or folders of them.

    Raises:
        TableError: A table cannot be read, or a folder holds none.
    """
    tables: list[Table] = []
    for path in paths:
        found = read_folder(path, strict=True) if path.is_dir() else (load(path),)
        if not found:
            raise TableError("the folder holds no table", where=str(path), hint="name a table or its folder")
        tables += found
    return tuple(tables)


def installed() -> tuple[Table, ...]:
    """The user's tables and the shipped ones, in the order dispatch looks at them.

    Raises:
        TableError: One of them cannot be read.
    """
    return (*user_tables(strict=True), *shipped_tables(strict=True))


def for_gpu(tables: Iterable[Table], gpu: Gpu) -> tuple[Table, ...]:
    """Tables of GPUs with the capability and SM count of ``gpu``.

    Raises:
        TableError: There are none; the message names those that exist.
    """
    tables = tuple(tables)
    key = (gpu.capability, gpu.sm_count)
    found = tuple(t for t in tables if (t.gpu.capability, t.gpu.sm_count) == key)
    if not found:
        names = ", ".join(sorted({t.gpu.name for t in tables})) or "none"
        raise TableError(
            f"no table for {gpu.name}",
            where=f"tables at hand: {names}",
            hint=f"make one: replayssm-tune --gpu '{gpu.name}'",
        )
    return found


def explained_info(paths: Sequence[Path], work: Iterable[Work], gpu: Gpu, whole: bool = True) -> Data:
    """For every cell of ``work``: what dispatch serves on ``gpu``, and every place it looked in.

    Args:
        paths: Looked at as a user's tables are; none means the user's and the installed ones.
        work: The cells.
        gpu: The device that asks.
        whole: The places are to be drawn, not only what serves.

    Raises:
        TableError: A table cannot be read.
    """
    shipped, own = ((), read(paths)) if paths else (shipped_tables(strict=True), user_tables(strict=True))
    lookup = Lookup(shipped, own, is_stale=emit.stale)
    info = gpu.info
    cells = []
    for item in work:
        for batch in item.effective_batches:
            found = lookup.find(item.spec, batch, info)
            cells.append(
                {
                    "spec": item.spec.key,
                    "effective_batch": batch,
                    "plan": found.plan.key,
                    "plan_short": short(found.plan),
                    "step": found.step,
                    "reason": found.reason,
                    "candidates": [
                        {
                            "step": c.step,
                            "table": c.table,
                            "had": c.had,
                            "outcome": c.outcome,
                            "served": c.served,
                        }
                        for c in lookup.explain(item.spec, batch, info)
                    ],
                }
            )
    return {"gpu": gpu.name, "tables": _places(own, shipped), "whole": whole, "cells": cells}


def _places(own: Sequence[Table], shipped: Sequence[Table]) -> list[Data]:
    return [
        {"of": of, "gpu": table.gpu.name, "source": table.source, "rows": len(table.rows)}
        for of, tables in (("user", own), ("package", shipped))
        for table in tables
    ]


def draw_explained(data: Data, console: Console) -> None:
    """Draw :func:`explained_info`: what each cell is served; ``*`` marks the place that serves it."""
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
