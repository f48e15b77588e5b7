"""The command line's reference in Markdown, made from the commands themselves.

``python -m replayssm_tune.tuner.cli.reference docs/cli.md`` rewrites the generated regions of a
document: each stands between ``<!-- cli:begin VERB -->`` (or ``exit-codes``) and ``<!-- cli:end -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from .exit_codes import MEANING
from .main import cli

_REGION = re.compile(
    r"(?P<begin><!-- cli:begin (?P<name>[a-z -]+) -->\n).*?(?P<end><!-- cli:end -->)", re.DOTALL
)


def options_table(command: click.Command) -> str:
    """Usage line and option table of a command."""
    context = click.Context(command)
    lines = ["| option | meaning |", "|---|---|"]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            names, meaning = (text.replace("|", "\\|") for text in record)
            lines.append(f"| `{names}` | {meaning} |")
    return "\n".join(lines)


def exit_codes_table() -> str:
    """The documented exit codes."""
    rows = (f"| {int(code)} | {meaning} |" for code, meaning in MEANING.items())
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def section(name: str) -> str:
    """Body of the region ``name``: ``exit-codes``, or a verb such as ``tune`` or ``table show``.

    Raises:
        KeyError: No such verb.
    """
    if name == "exit-codes":
        return exit_codes_table()
    command: click.Command = cli
    for word in name.split():
        if not isinstance(command, click.Group):
            raise KeyError(name)
        command = command.commands[word]
    return f"{(command.help or '').strip()}\n\n{options_table(command)}"


def render(text: str) -> str:
    """A document's text with its generated regions written anew."""
    return _REGION.sub(lambda m: f"{m['begin']}\n{section(m['name'])}\n\n{m['end']}", text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        document = Path(argument)
        document.write_text(render(document.read_text(encoding="utf-8")), encoding="utf-8")
