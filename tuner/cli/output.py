"""What a command writes: the result on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ...codegen.files import EmitError
from ...runtime.errors import ReplayError
from ..errors import InterruptedTune
from .exit_codes import ExitCode, exit_code

if TYPE_CHECKING:
    from rich.console import Console

    from ..request import Job


def emit(data: dict[str, Any], draw: Callable[[dict[str, Any], Console], None], as_json: bool) -> None:
    """Write a result to stdout: one JSON document, or as ``draw`` shows it."""
    try:
        if as_json:
            click.echo(json.dumps(data, indent=2, sort_keys=True))
            return
        from rich.console import Console

        width = None if sys.stdout.isatty() else 160
        # Names and reasons are shown as they are: brackets and colons in them mean nothing.
        draw(data, Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False))
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise EmitError(
            f"cannot write the result: {error.strerror or error}",
            where="standard output",
            hint="make room where it goes, or send it elsewhere",
        ) from error


def announce(job: Job) -> None:
    """Say on stderr what is going to be done, and for what."""
    click.echo(job.target.note, err=True)
    for note in job.notes:
        click.echo(f"note: {note}", err=True)


def show_error(error: BaseException, debug: bool) -> ExitCode:
    """Write ``error`` to stderr as what, where and what to do; returns the exit code."""
    code = exit_code(error)
    if debug and code is not ExitCode.INTERRUPTED:
        traceback.print_exception(error)
    what, where, hint = _parts(error, code)
    click.echo(f"error: {what}", err=True)
    if where:
        click.echo(f"  {where}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return code


def _parts(error: BaseException, code: ExitCode) -> tuple[str, str, str]:
    if isinstance(error, ReplayError):
        if error.hint or "; " not in error.what:
            return error.what, error.where, error.hint
        # Short messages put the advice after the last semicolon.
        what, _, hint = error.what.rpartition("; ")
        return what, error.where, hint
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        verb = context.command_path if context is not None else "replayssm-tune"
        return error.format_message().rstrip("."), "", f"see {verb} --help"
    # click has put its own exception around it
    if isinstance(error, click.Abort) and isinstance(error.__cause__, InterruptedTune):
        error = error.__cause__
    if isinstance(error, InterruptedTune):
        what = f"interrupted; the {error.rows} rows that were whole are written"
        where = " and ".join(map(str, filter(None, (error.table, error.recorded))))
        return what, where, "what was measured is kept; the same command resumes"
    if code is ExitCode.INTERRUPTED:
        return "interrupted", "", "what was measured is kept; the same command resumes"
    if isinstance(error, OSError) and code is ExitCode.STORE:
        return (
            error.strerror or str(error),
            str(error.filename or ""),
            "free some space there, or choose another place with --store and --output",
        )
    if isinstance(error, ModuleNotFoundError) and code is ExitCode.TOOLCHAIN:
        return f"{error.name} is not installed", "", f"install it: pip install {error.name}"
    return (
        f"internal: {type(error).__name__}: {error}",
        "",
        "this is a fault of the program; run again with --debug and report what it shows",
    )
