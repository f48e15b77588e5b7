"""Joining the rows of several dispatch tables of one GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from .errors import require
from .spec import Spec
from .table import GpuInfo, Row, Table, gpu_slug

_RANK: Final = {"static": 0, "transferred": 1, "measured": 2}
"""What wins over what, by the source of a row."""


def merge(tables: Iterable[Table]) -> Table:
    """One table of the rows of several tables of one GPU.

    Where two tables have a row for the same key, a measured row wins over a transferred one and
    that over a static one; among equals the later table wins, and so for tiles of the convolution. The row
    of a spec that wins over all others of it decides whether its rows are batch-invariant: if they are, rows
    of other numerics classes and those that did not promise one are left out; if not, the others promise
    nothing any more. The last measured
    table (the last one if none is measured) gives the header; rows made with other versions or on another
    day say so.

    Raises:
        TableError: No tables, or tables of different GPUs.
    """
    tables = tuple(tables)
    require(bool(tables), "nothing to merge: name at least one table")
    source = "measured" if any(t.source == "measured" for t in tables) else "static"
    header = next(t for t in reversed(tables) if t.source == source)
    header = replace(header, date=max(t.date for t in tables))
    deciding: dict[Spec, Row] = {}
    for row in (row for table in tables for row in table.rows):
        first = deciding.get(row.spec)
        if first is None or _RANK[row.source] >= _RANK[first.source]:
            deciding[row.spec] = row
    rows: dict[tuple[Spec, int], Row] = {}
    for table in tables:
        require(
            _identity(table.gpu) == _identity(header.gpu),
            f"tables of different GPUs cannot be merged: {table.gpu.name} ({table.gpu.sm_count} SMs) and "
            f"{header.gpu.name} ({header.gpu.sm_count} SMs); keep a file for each",
        )
        for row in table.rows:
            promised = deciding[row.spec]
            if not promised.batch_invariant:
                row = replace(row, batch_invariant=False)
            elif not row.batch_invariant or row.plan.numerics != promised.plan.numerics:
                continue
            held = rows.get(row.key)
            if held is None or _RANK[row.source] >= _RANK[held.source]:
                rows[row.key] = _with_provenance(row, table, header)
    convolutions = {row.key: row for table in tables for row in table.convolutions}
    return replace(header, rows=tuple(rows.values()), convolutions=tuple(convolutions.values()))


def _identity(gpu: GpuInfo) -> tuple[object, ...]:
    return (gpu.vendor, gpu.capability, gpu.sm_count, gpu_slug(gpu.name))


def _with_provenance(row: Row, of: Table, under: Table) -> Row:
    """``row`` of table ``of`` as it stands under the header of ``under``: what differs is written out."""
    toolchain, date = row.toolchain or of.toolchain, row.date or of.date
    return replace(
        row,
        toolchain=None if toolchain == under.toolchain else toolchain,
        date="" if date == under.date else date,
    )
