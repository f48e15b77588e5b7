"""``plan``: what would be tried."""

from __future__ import annotations

from typing import Any

import click

from . import options, output, pipeline


@click.command()
@options.gpu_option
@options.static_option
@options.workload_options
@options.budget_option
@options.store_option
@options.result_options
def plan(as_json: bool, **values: Any) -> None:
    """Show what a tune would try: cells, variants, what falls out and why, and the time it takes.

    Points are compiled, since most of what falls out shows only then; nothing is timed.
    """
    from .. import drawing, progress, report

    job = options.build_job(**values)
    output.announce(job)
    with progress.progress() as notify:
        planned = pipeline.load().plan(job, notify)
    output.emit(report.planned_info(planned), drawing.draw_planned, as_json)
