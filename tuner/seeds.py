"""What is known before a search begins: kernels that won elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..runtime.plan import Variant
from ..runtime.spec import Spec
from ..runtime.table import Row


def seeds(spec: Spec, effective_batch: int, rows: Iterable[Row]) -> tuple[Variant, ...]:
    """Kernels of measured rows of specs with the same family, op and tokens, likeliest first.

    What counts first is how near the row's batch is (in half octaves), then how near its shape and
    dtypes are.
    """
    akin = (spec.family, spec.op, spec.num_tokens)

    def distance(row: Row) -> tuple[object, ...]:
        of = row.spec
        return (
            round(2 * abs(math.log2(effective_batch / row.effective_batch))),
            of.state_dtype != spec.state_dtype,
            of.ring_dtype != spec.ring_dtype,
            of.activation_dtype != spec.activation_dtype,
            (of.head_dim, of.state_size) != (spec.head_dim, spec.state_size),
            of.window != spec.window,
            abs(of.heads_per_group - spec.heads_per_group),
            of,
            row.effective_batch,
        )

    found = (
        r for r in rows if r.source == "measured" and (r.spec.family, r.spec.op, r.spec.num_tokens) == akin
    )
    return tuple(dict.fromkeys(v for row in sorted(found, key=distance) for v in row.plan.variants))
