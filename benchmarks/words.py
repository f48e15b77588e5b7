"""How documents name layers and write figures and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.summary import Cell, Record
from replayssm_tune.tuner.rounding import decimals, significant

FAMILY_NAMES = {"mamba2": "Mamba-2", "gdn": "GDN"}
_GROUPS = {"mamba2": "heads/group", "gdn": "value heads/key head"}


def layer_name(cell: Cell) -> str:
    """A layer in words, e.g. ``Mamba-2 64 x 128, 16 heads/group``: family, head dim, state size, group."""
    family = cell["family"]
    sizes = f"{cell['head_dim']} x {cell['state_size']}"
    return f"{FAMILY_NAMES[family]} {sizes}, {cell['heads_per_group']} {_GROUPS[family]}"


def short_name(cell: Cell) -> str:
    """A layer by family, head dim and state size alone, e.g. ``Mamba-2 64 x 128``."""
    return f"{FAMILY_NAMES[cell['family']]} {cell['head_dim']} x {cell['state_size']}"


def figure(value: float, digits: int) -> str:
    """A figure to so many significant digits, rounded from what was recorded and never twice."""
    return f"{significant(value, digits):.{digits}g}"


def fixed(value: float) -> str:
    """The same to two decimals."""
    return f"{decimals(value, 2):.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def unit(record: Record) -> str:
    """What stands behind a record's figures; nothing behind shares and ratios."""
    return "" if record["unit"] == "1" else f" {record['unit']}"


def goal(record: Record, asked: float) -> str:
    """What is ``asked`` of a record, e.g. ``≥ 0.87``."""
    return f"{'≥' if record['higher_is_better'] else '≤'} {figure(asked, 3)}{unit(record)}"
