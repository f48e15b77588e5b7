"""``check``: are the shipped kernels and tables what they say they are?"""

from __future__ import annotations

from pathlib import Path

import click

from . import options, output, pipeline
from .exit_codes import ExitCode


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[FOLDER]...")
@options.result_options
def check(folders: tuple[Path, ...], as_json: bool) -> int:
    """Check generated folders without a GPU; no FOLDER means the installed one.

    Files against fresh renderings, every row compiled for its target, registers, spills and
    shared memory against those recorded, schema, coverage, and the default in its space.
    """
    from .. import progress, report

    with progress.progress() as notify:
        checked = pipeline.load().check(folders, notify)
    data = report.checked_info(checked)
    output.emit(data, report.draw_checked, as_json)
    return ExitCode[data["exit"]]
