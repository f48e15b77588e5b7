"""``check``: are the shipped kernels and tables what they say they are?"""

from __future__ import annotations

from pathlib import Path

import click

from . import options, output, pipeline
from .exit_codes import ExitCode


@click.command()
@click.argument("folders", nargs=-1, type=options.PATH, metavar="[FOLDER]...")
@click.option(
    "--junit",
    type=options.FILE,
    metavar="FILE",
    help="Also write the result as JUnit XML.",
)
@click.option(
    "--markdown",
    type=options.FILE,
    metavar="FILE",
    help="Also write a Markdown summary, e.g. for the page of a CI run.",
)
@options.result_options
def check(folders: tuple[Path, ...], junit: Path | None, markdown: Path | None, as_json: bool) -> int:
    """Check generated folders without a GPU; no FOLDER means the installed one.

    Files against fresh renderings, every row compiled for its target, registers, spills, shared
    memory and size against those recorded, schema, coverage, and the default in its space.
    """
    from ...codegen import files
    from .. import drawing, formats, progress, report

    with progress.progress() as notify:
        checked = pipeline.load().check(folders, notify)
    data = report.checked_info(checked)
    output.emit(data, drawing.draw_checked, as_json)
    for path, text in ((junit, formats.junit), (markdown, formats.markdown)):
        if path is not None:
            files.write(path, text(data))
    return ExitCode[data["exit"]]
