"""Looking into dispatch tables: what they hold, and why a row serves a call."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..codegen import emit
from ..codegen.targets import Gpu
from ..runtime.conv_lookup import find_tile
from ..runtime.conv_tiles import ConvSpec, effective_batch
from ..runtime.errors import TableError
from ..runtime.lookup import Lookup, read_folder, shipped_tables, user_tables
from ..runtime.table import GpuInfo, Table, load
from .models import Model, split
from .report import Data, short, table_info
from .request import ConvWork, Work, possible_splits


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
    """Tables of GPUs with the capability and SM count of ``gpu``, those of its own name first.

    Raises:
        TableError: There are none; the message names those that exist.
    """
    tables = tuple(tables)
    key = (gpu.capability, gpu.sm_count)
    alike = (t for t in tables if (t.gpu.capability, t.gpu.sm_count) == key)
    found = tuple(sorted(alike, key=lambda table: table.gpu.name != gpu.name))
    if not found:
        names = ", ".join(sorted({t.gpu.name for t in tables})) or "none"
        raise TableError(
            f"no table for {gpu.name}",
            where=f"tables at hand: {names}",
            hint=f"make one: replayssm-tune --gpu '{gpu.name}'",
        )
    return found


def shown_info(tables: Sequence[Table], models: Sequence[Model] = ()) -> Data:
    """Tables as data, with ``models`` only the rows of their layers, of any op, window and dtypes.

    Raises:
        TableError: No table has such a row.
        SpecError: A model's heads cannot be divided among its groups.
    """
    layers = {
        (model.family, model.head_dim, model.state_size, split(model, gpus).heads_per_group)
        for model in models
        for gpus in possible_splits(model)
    }
    wanted = {
        row.spec.key
        for table in tables
        for row in table.rows
        if (row.spec.family, row.spec.head_dim, row.spec.state_size, row.spec.heads_per_group) in layers
    }
    if models and not wanted:
        gpus_at_hand = ", ".join(sorted({table.gpu.name for table in tables})) or "none"
        raise TableError(
            f"no row of {', '.join(model.name for model in models)}",
            where=f"tables at hand: {gpus_at_hand}",
            hint=f"make some: replayssm-tune --gpu NAME --model {models[0].name}",
        )
    shown = [table_info(table, wanted) for table in tables]
    return {"tables": [data for data in shown if data["specs"] or not models]}


def explained_info(
    paths: Sequence[Path],
    work: Iterable[Work],
    gpu: Gpu,
    whole: bool = False,
    convolutions: Iterable[ConvWork] = (),
) -> Data:
    """For every cell of ``work``: what dispatch serves on ``gpu``, and every place it looked in.

    Args:
        paths: Looked at as a user's tables are; none means the user's and the installed ones.
        work: The cells.
        gpu: The device that asks.
        whole: The places are to be drawn even for several cells, not only what serves.
        convolutions: Those in front of the cells' layers.

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
                    "tune_command": ""
                    if found.row
                    else f"{item.spec.tune_command} --gpu {shlex.quote(gpu.name)}",
                    "row_batch": None if found.row is None else found.row.effective_batch,
                    "numerics": found.plan.numerics,
                    "batch_invariant": found.batch_invariant,
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
    return {
        "gpu": gpu.name,
        "tables": _places(own, shipped),
        "whole": whole or len(cells) == 1,
        "cells": cells,
        "convolutions": [
            _tile_info(lookup, of.spec, rows, channels, info)
            for of in convolutions
            for rows, channels in of.shapes
        ],
    }


def _tile_info(lookup: Lookup, spec: ConvSpec, rows: int, channels: int, gpu: GpuInfo) -> Data:
    batch = effective_batch(rows, channels)
    found = find_tile(lookup, spec, batch, gpu, emit.stale_tile)
    return {
        "spec": spec.key,
        "rows": rows,
        "channels": channels,
        "effective_batch": batch,
        "tile": found.tile.key,
        "step": found.step,
        "reason": found.reason,
    }


def _places(own: Sequence[Table], shipped: Sequence[Table]) -> list[Data]:
    return [
        {
            "of": of,
            "gpu": table.gpu.name,
            "source": table.source,
            "rows": len(table.rows),
            "static_rows": sum(row.source == "static" for row in table.rows),
        }
        for of, tables in (("user", own), ("package", shipped))
        for table in tables
    ]
