"""How an effective batch is laid out in sequences and heads, and which batches can be."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.spec import Spec


@dataclass(frozen=True)
class Shape:
    """How an effective batch is laid out: sequences x heads of this GPU."""

    rows: int
    heads: int

    @property
    def effective_batch(self) -> int:
        """Sequences x heads."""
        return self.rows * self.heads


MAX_GROUPS = 8
"""Groups of one sequence at most, as models have them; beyond, sequences are added."""


def shape_for(spec: Spec, effective_batch: int) -> Shape:
    """Layout of about ``effective_batch`` heads: whole groups of heads, in as few sequences as can be."""
    groups = max(1, round(effective_batch / spec.heads_per_group))
    rows = -(-groups // MAX_GROUPS)
    return Shape(rows, spec.heads_per_group * max(1, round(groups / rows)))
