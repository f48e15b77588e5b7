"""``generate``: the kernels that tables name, rendered again."""

from __future__ import annotations

from pathlib import Path

import click

from . import options, output, pipeline


@click.command()
@click.option(
    "--output",
    "folder",
    type=options.PATH,
    metavar="DIR",
    help="Folder with the dispatch tables, as --output of tune. Default: the installed one.",
)
@options.result_options
def generate(folder: Path | None, as_json: bool) -> None:
    """Render every kernel that the dispatch tables name, exactly; nothing is timed.

    Kernels that no table names any more are removed; files that are up to date are not touched.
    """
    from .. import drawing, progress, report

    with progress.progress() as notify:
        emitted = pipeline.load().generate(folder, notify)
    output.emit(report.emitted_info(emitted), drawing.draw_emitted, as_json)
