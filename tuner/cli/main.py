"""The command group: a bare ``replayssm-tune --gpu NAME`` is ``replayssm-tune tune --gpu NAME``."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

import click

from ... import __version__
from .bench import bench
from .check import check
from .exit_codes import ExitCode
from .generate import generate
from .output import show_error
from .plan import plan
from .table import table
from .tune import tune

CLEAN_UP_S: Final = 10.0
"""How long a run that was told to end may take to put things away; far longer than it does."""

_OWN_OPTIONS = ("--help", "-h", "--version")


class TuneByDefault(click.Group):
    """A group whose options, where no verb precedes them, are those of ``tune``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``tune`` in front of options that stand without a verb."""
        if not args or (args[0].startswith("-") and args[0] not in _OWN_OPTIONS):
            verb = next((word for word in args if word in self.commands), None)
            if verb is not None:
                ctx.fail(f"the verb comes first: replayssm-tune {verb} [OPTIONS]")
            args = ["tune", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or say which one may have been meant."""
        if self.get_command(ctx, args[0]) is None:
            similar = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=0.5)
            suggestion = f"; did you mean {similar[0]}?" if similar else ""
            ctx.fail(f"no such verb '{args[0]}'{suggestion}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The group's own options, then those of ``tune``, then the verbs."""
        with formatter.section("Options without a verb (those of tune)"):
            formatter.write_dl([r for p in tune.params if (r := p.get_help_record(ctx))])
        super().format_options(ctx, formatter)


@click.group(
    cls=TuneByDefault,
    subcommand_metavar="[VERB] [OPTIONS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="replayssm-tune")
def cli() -> None:
    """Tune replay kernels of state space models for a GPU.

    Without a verb the whole job is done: plan, compile, gate, search, emit, report.
    Progress goes to stderr, the result to stdout.
    """


for _verb in (tune, plan, generate, check, bench, table):
    cli.add_command(_verb)


def _prepare_streams() -> None:
    """Make stdout and stderr take any text: they may be closed, or of an encoding that lacks a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Terminated:
    """Handler of SIGTERM, with which batch systems and containers end a run: it ends as by Ctrl-C.

    The signal often comes twice (``timeout`` sends it to a process and to its group). The second one
    must not end the clean-up that the first one has begun, nor change the code with which the interpreter,
    which restores what signals do by default, goes.
    """

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s > CLEAN_UP_S:
            self._last_s = now_s
            raise KeyboardInterrupt


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a documented code; never returns."""
    words = list(sys.argv[1:] if args is None else args)
    _prepare_streams()
    try:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, _Terminated())
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        result = cli.main(words, prog_name="replayssm-tune", standalone_mode=False)
        code = int(result) if isinstance(result, int) else int(ExitCode.OK)
    except SystemExit:
        # click's answer to a reader of stdout that has left, e.g. `| head`: nothing is wrong.
        code = int(ExitCode.OK)
    except BaseException as error:  # the last frame: whatever it is, the user gets a message and a code
        code = int(show_error(error, debug="--debug" in words))
    sys.exit(code)
