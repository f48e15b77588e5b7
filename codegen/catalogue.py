"""Tables of the documents that say what the code declares: GPUs, axes, constraints, regions.

``python -m replayssm_tune.codegen.catalogue docs/*.md`` rewrites the generated regions of documents:
each stands between ``<!-- catalogue:begin NAME -->`` and ``<!-- catalogue:end -->``, NAME being one of
:data:`SECTIONS`.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from ..runtime.plan import PLAN_ROLES
from .regions import REGIONS
from .space import AXES, CONSTRAINTS
from .targets import GPUS, KIB, LIMITS, MIB

_REGION = re.compile(
    r"(?P<begin><!-- catalogue:begin (?P<name>[a-z-]+) -->\n).*?(?P<end><!-- catalogue:end -->)", re.DOTALL
)


def gpus_table() -> str:
    """Every known GPU with its figures and where they come from."""
    header = ("GPU", "capability", "SMs", "memory, MiB", "GB/s", "L2, MiB", "MHz", "source")
    return _table(
        header,
        (
            (
                gpu.name,
                _capability(gpu.capability),
                gpu.sm_count,
                gpu.memory_bytes // MIB,
                gpu.memory_gbps,
                gpu.l2_bytes // MIB,
                gpu.clock_mhz,
                gpu.source,
            )
            for gpu in GPUS
        ),
    )


def limits_table() -> str:
    """Limits of a multiprocessor by compute capability."""
    header = ("vendor", "capability", "shared memory, KiB", "of one program, KiB", "registers", "warps")
    table = _table(
        header,
        (
            (
                vendor,
                _capability(capability),
                limits.shared_bytes_per_sm // KIB,
                limits.shared_bytes_per_block // KIB,
                limits.registers_per_sm,
                limits.max_warps_per_sm,
            )
            for (vendor, capability), limits in LIMITS.items()
        ),
    )
    sources = dict.fromkeys(limits.source for limits in LIMITS.values())
    return f"{table}\n\nSource: {'; '.join(sources)}."


def axes_table() -> str:
    """Every axis with its values and what it decides."""
    return _table(
        ("axis", "values", "decides"),
        ((f"`{axis.name}`", ", ".join(map(_value, axis.values)), axis.doc) for axis in AXES),
    )


def constraints_list() -> str:
    """The names under which impossible points are counted."""
    return "\n".join(f"- {constraint.name}" for constraint in CONSTRAINTS)


def regions_table() -> str:
    """The boxes in which roles are searched."""
    rows = []
    for region in REGIONS:
        structure = ", ".join(f"{name} {value}" for name, value in region.structure.items())
        ops = (op for op in region.ops if set(region.roles) & set(itertools.chain(*PLAN_ROLES[op])))
        roles = ", ".join(region.roles)
        rows.append((", ".join(ops), roles, structure or "late load, inline", region.doc))
    return _table(("ops", "roles", "structure", "why"), rows)


SECTIONS: Final[dict[str, Callable[[], str]]] = {
    "gpus": gpus_table,
    "limits": limits_table,
    "axes": axes_table,
    "constraints": constraints_list,
    "regions": regions_table,
}
"""Generated regions by name."""


def render(text: str) -> str:
    """A document's text with its generated regions written anew.

    Raises:
        KeyError: A region has a name nobody knows.
    """
    return _REGION.sub(lambda m: f"{m['begin']}\n{SECTIONS[m['name']]()}\n\n{m['end']}", text)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _capability(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        document = Path(argument)
        before = document.read_text(encoding="utf-8")
        if (after := render(before)) != before:
            document.write_text(after, encoding="utf-8")
