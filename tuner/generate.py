"""``generate``: the kernels that tables name, rendered again."""

from __future__ import annotations

from pathlib import Path

from ..codegen.emit import Emission, regenerate
from ..runtime.modules import package_folder
from .progress import Event, Report
from .report import Emitted


def generate(folder: Path | None, report: Report) -> Emitted:
    """Render every module that the tables of ``folder`` name; nothing is timed, tables stay.

    Args:
        folder: A folder with ``tables``, as ``--output`` of a tune; None is the installed one.
        report: Told of every module.

    Raises:
        TableError: The folder has no table, or one that cannot be read.
        EmitError: The folder cannot be written.
    """
    return emitted(
        regenerate(
            package_folder() if folder is None else folder,
            lambda done, total, name: report(Event("render", done, total, name)),
        )
    )


def emitted(emission: Emission) -> Emitted:
    """What was emitted, as a report."""
    return Emitted(
        table_path=str(emission.table_path),
        rows=emission.rows,
        written=emission.written,
        unchanged=emission.unchanged,
        removed=emission.removed,
        notes=emission.notes,
    )
