"""``generate``: kernels and table from what is already measured."""

from __future__ import annotations

from typing import Any

import click

from . import options, output, pipeline


@click.command()
@options.gpu_option
@options.static_option
@options.workload_options
@options.store_option
@options.output_option
@options.result_options
def generate(as_json: bool, **values: Any) -> None:
    """Write kernels and the dispatch table from the store, without timing anything."""
    from .. import progress, report

    job = options.build_job(**values)
    output.announce(job)
    with progress.progress() as notify:
        emitted = pipeline.load().generate(job, notify)
    output.emit(report.emitted_info(emitted), report.draw_emitted, as_json)
