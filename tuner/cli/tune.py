"""``tune``: the whole job; also what runs when no verb is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import options, output, pipeline
from .exit_codes import ExitCode


@click.command()
@options.gpu_option
@options.static_option
@options.workload_options
@options.budget_option
@options.batch_invariant_option
@options.store_option
@options.output_option
@click.option(
    "--results",
    type=options.PATH,
    metavar="DIR",
    help="Also record what was measured as a run file in this folder.",
)
@options.result_options
def tune(as_json: bool, results: Path | None, **values: Any) -> int:
    """Plan, compile, gate, search and emit: kernels and a dispatch table for one GPU.

    Without the GPU the table is static: compiled, analysed and ranked, not timed, and written at
    the end. An interrupted run loses nothing that was compiled or measured; one that measures has
    rows of what was whole. The same command resumes.
    """
    from .. import drawing, progress, report

    job = options.build_job(**values)
    output.announce(job)
    with progress.progress() as notify:
        tuned = pipeline.load().tune(job, notify, results)
    data = report.tuned_info(tuned)
    output.emit(data, drawing.draw_tuned, as_json)
    if tuned.missing:
        click.echo(
            f"error: {len(tuned.missing)} cells have no row\n"
            "hint: the same command with a larger --budget goes on where this one stopped",
            err=True,
        )
        return ExitCode.COVERAGE
    return ExitCode.OK
