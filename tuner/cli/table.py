"""``table``: what dispatch tables hold, and why a row serves a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .. import models, request
from . import options, output

_PATHS = click.argument("tables", nargs=-1, type=options.PATH, metavar="[TABLE]...")


@click.group(invoke_without_command=True)
@click.pass_context
def table(context: click.Context) -> None:
    """Look into dispatch tables."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@table.command()
@_PATHS
@options.gpu_option
@click.option(
    "--model",
    "model_names",
    multiple=True,
    metavar="NAME",
    help="Only rows of this model's layers, however it is split, and tiles of its convolution; may be "
    "repeated.",
)
@options.result_options
def show(tables: tuple[Path, ...], gpu: str | None, model_names: tuple[str, ...], as_json: bool) -> None:
    """Show the rows of tables; no TABLE means the user's and the installed ones.

    With --gpu those of this GPU; others whose rows dispatch on it may serve are named.
    """
    from ...codegen import targets
    from .. import drawing
    from .. import tables as reader

    wanted = tuple(models.find(name) for name in model_names)

    found = reader.read(tables) if tables else reader.installed()
    related: tuple[str, ...] = ()
    if gpu is not None:
        found, related = reader.of_gpu(found, targets.find(gpu))
    output.emit(reader.shown_info(found, wanted, related), drawing.draw_tables, as_json)


@table.command()
@_PATHS
@options.gpu_option
@options.workload_options
@click.option(
    "--chain", is_flag=True, help="Show every place that was looked in, for more than a single cell too."
)
@options.result_options
def explain(tables: tuple[Path, ...], gpu: str | None, chain: bool, as_json: bool, **values: Any) -> None:
    """Explain what dispatch serves on a GPU, and why; no TABLE means the user's and the installed ones.

    A line per cell: effective batch, plan, and why. For a single cell, every place that was looked in
    is shown: what it had, and why it was passed over.
    """
    from .. import drawing
    from .. import tables as reader

    target = request.resolve_target(gpu, static=True)
    work, _, convolutions = options.resolve_workload(target.gpu, **values)
    data = reader.explained_info(tables, work, target.gpu, chain, convolutions)
    output.emit(data, drawing.draw_explained, as_json)
