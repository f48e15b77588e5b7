"""Dispatch of the convolution's tiles: the rows that tables have of them, else the rule.

The steps are those of :mod:`.lookup`, but that nothing is chosen by analysis. A pure function of tables and
arguments: all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .conv_tiles import ConvRow, ConvSpec, ConvTile, default_tile
from .kinship import relation_of
from .lookup import STEPS, Lookup, measured_step, nearest, whose, within_reach
from .table import GpuInfo


@dataclass(frozen=True)
class FoundTile:
    """What a look-up serves."""

    tile: ConvTile
    row: ConvRow | None
    """The row behind the tile; None for the rule's."""
    reason: str
    """One sentence: whose row, and why it serves this call."""
    step: str
    """One of :data:`.lookup.STEPS`."""


def find_tile(
    lookup: Lookup,
    spec: ConvSpec,
    effective_batch: int,
    gpu: GpuInfo,
    is_stale: Callable[[ConvRow], bool] | None = None,
) -> FoundTile:
    """The tile for ``effective_batch`` (rows x blocks of channels) of ``spec`` on ``gpu``.

    Args:
        lookup: Its tables are looked at.
        spec: What is called.
        effective_batch: Of :func:`.conv_tiles.effective_batch`.
        gpu: The device that asks.
        is_stale: Whether the kernel has changed since a row was made; it serves all the same, and the reason
            says so. None: not asked.
    """
    for step, theirs, rows in _series(lookup, spec, gpu):
        batches = [row.effective_batch for row in rows]
        if not within_reach(effective_batch, batches, timed=True):
            continue
        row = rows[batches.index(nearest(effective_batch, batches))]
        parts = [f"{spec.key}: {whose('measured on', step, theirs, gpu)}"]
        if row.effective_batch != effective_batch:
            parts.append(f"nearest effective batch {row.effective_batch} to {effective_batch}")
        if is_stale is not None and is_stale(row):
            parts.append("stale: its kernel has changed since")
        return FoundTile(row.tile, row, "; ".join(parts), step)
    reason = f"no table has a row for {spec.key} at effective batch {effective_batch} on {gpu.name}"
    tile = default_tile(effective_batch, spec.token_block)
    return FoundTile(tile, None, f"{reason}: tile by rule", "default")


def _series(lookup: Lookup, spec: ConvSpec, gpu: GpuInfo) -> Iterator[tuple[str, GpuInfo, list[ConvRow]]]:
    """Step, GPU and rows, ascending, of every table that has some of ``spec`` within reach of ``gpu``."""
    ranked = []
    for table, user in lookup.tables:
        relation = relation_of(table.gpu, gpu)
        step = measured_step(relation, user)
        rows = [row for row in table.convolutions if row.spec == spec]
        if step is not None and rows:
            ranked.append(((STEPS.index(step), not user, relation.preference), (step, table.gpu, rows)))
    for _, found in sorted(ranked, key=lambda item: item[0]):
        yield found
