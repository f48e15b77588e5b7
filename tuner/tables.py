"""Looking into dispatch tables: what they hold, and why a row serves a call."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..codegen import emit
from ..codegen.targets import Gpu
from ..runtime.conv_lookup import find_tile
from ..runtime.conv_tiles import ConvSpec, effective_batch
from ..runtime.errors import TableError
from ..runtime.kinship import relation_of
from ..runtime.lookup import Lookup, read_folder, shipped_tables, user_tables
from ..runtime.spec import Spec
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
            held = (emit.folder_of(path) or path) / "tables"
            hint = f"name {held}" if held.is_dir() else "name a table or its folder"
            raise TableError("the folder holds no table", where=str(path), hint=hint)
        tables += found
    return tuple(tables)


def installed() -> tuple[Table, ...]:
    """The user's tables and the shipped ones, in the order dispatch looks at them.

    Raises:
        TableError: One of them cannot be read.
    """
    return (*user_tables(strict=True), *shipped_tables(strict=True))


def of_gpu(tables: Iterable[Table], gpu: Gpu) -> tuple[tuple[Table, ...], tuple[str, ...]]:
    """Tables of ``gpu``, and the other GPUs whose rows dispatch on it may serve.

    A table is its own where dispatch takes it for that: unless its name tells another model.

    Returns:
        Tables, those of its very name first, and names of GPUs, the closest first.

    Raises:
        TableError: It has no table; the message names those that exist, and those that serve it.
    """
    tables = tuple(tables)
    own: list[Table] = []
    others: dict[str, tuple[object, ...]] = {}
    for table in tables:
        relation = relation_of(table.gpu, gpu.info)
        if relation.alike and not relation.other_model:
            own.append(table)
        elif relation.alike or (relation.same_architecture and _timed(table)):
            others[table.gpu.name] = (not relation.alike, relation.preference)
    related = tuple(sorted(others, key=lambda name: others[name]))
    if not own:
        names = ", ".join(sorted({t.gpu.name for t in tables})) or "none"
        served = f"; until then rows of {', '.join(related)} may serve: leave out --gpu to see them"
        raise TableError(
            f"no table for {gpu.name}",
            where=f"tables at hand: {names}",
            hint=f"make one: replayssm-tune --gpu '{gpu.name}'{served if related else ''}",
        )
    return tuple(sorted(own, key=lambda table: table.gpu.name != gpu.name)), related


def _timed(table: Table) -> bool:
    """Whether it has what GPUs of its architecture take over: estimates they do not."""
    return bool(table.convolutions) or any(row.source != "static" for row in table.rows)


def shown_info(tables: Sequence[Table], models: Sequence[Model] = (), related: Sequence[str] = ()) -> Data:
    """Tables as data.

    Args:
        tables: What is shown.
        models: Only the rows of their layers, of any op, window and dtypes, and the tiles of the convolutions
            in front of them, of any tokens and dtypes; of all layers where none is named.
        related: See :func:`of_gpu`.

    Raises:
        TableError: No table has such a row.
        SpecError: A model's heads cannot be divided among its groups.
    """
    layers = {
        (model.family, model.head_dim, model.state_size, split(model, gpus).heads_per_group)
        for model in models
        for gpus in possible_splits(model)
    }
    widths = {model.conv_width for model in models}
    shown = tables
    if models:
        shown = [
            dataclasses.replace(
                table,
                rows=tuple(row for row in table.rows if _layer(row.spec) in layers),
                convolutions=tuple(row for row in table.convolutions if row.spec.width in widths),
            )
            for table in tables
        ]
        shown = [table for table in shown if table.rows]
    if models and not shown:
        gpus_at_hand = ", ".join(sorted({table.gpu.name for table in tables})) or "none"
        raise TableError(
            f"no row of {', '.join(model.name for model in models)}",
            where=f"tables at hand: {gpus_at_hand}",
            hint=f"make some: replayssm-tune --gpu NAME --model {models[0].name}",
        )
    infos = [table_info(table) for table in shown]
    return {"tables": infos, "related": list(related)}


def _layer(spec: Spec) -> tuple[str, int, int, int]:
    return spec.family, spec.head_dim, spec.state_size, spec.heads_per_group


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
