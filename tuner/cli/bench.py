"""``bench``: the served rows timed beside the roof, the native kernel and the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import NoGpuError
from . import options, output, pipeline


@click.command()
@options.gpu_option
@options.workload_options
@options.store_option
@click.option(
    "--results",
    type=options.PATH,
    default=Path("benchmarks/results"),
    show_default=True,
    metavar="DIR",
    help="Folder for the run file with environment, protocol and samples.",
)
@options.result_options
def bench(as_json: bool, results: Path, **values: Any) -> None:
    """Time what dispatch serves beside the roof, the native kernel and the default config."""
    from .. import drawing, progress, report

    try:
        job = options.build_job(**values)
    except NoGpuError:  # its hint, to name a GPU, leads no further here
        job = None
    if job is None or not job.target.measured:
        raise NoGpuError(
            "bench times kernels, and no GPU is here",
            where="replayssm-tune bench",
            hint="run it on the GPU's machine; `plan` and `tune` work without one",
        )
    output.announce(job)
    with progress.progress() as notify:
        tuned = pipeline.load().bench(job, results, notify)
    output.emit(report.tuned_info(tuned), drawing.draw_tuned, as_json)
