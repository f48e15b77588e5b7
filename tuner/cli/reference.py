"""The command line's reference in Markdown, made from the commands themselves.

``python -m replayssm_tune.tuner.cli.reference docs/cli.md`` rewrites the generated regions of a
document: each stands between ``<!-- cli:begin VERB -->`` (or ``exit-codes``, ``models``) and
``<!-- cli:end -->``.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import click

from .. import models
from .exit_codes import MEANING
from .main import cli
from .tune import tune

_REGION = re.compile(
    r"(?P<begin><!-- cli:begin (?P<name>[a-z -]+) -->\n).*?(?P<end><!-- cli:end -->)", re.DOTALL
)


def option_rows(command: click.Command) -> dict[str, str]:
    """Meaning of each option of a command, by its names."""
    context = click.Context(command)
    rows = {}
    for option in (p for p in command.params if isinstance(p, click.Option)):
        record = option.get_help_record(context)
        if record is not None:
            names, meaning = (text.replace("|", "\\|").replace("  [", " [") for text in record)
            rows[names] = meaning
    return rows


def options_table(command: click.Command) -> str:
    """Options of a command; those it shares with ``tune`` are only named."""
    rows = option_rows(command)
    common = option_rows(tune) if command is not tune else {}
    shared = [names for names, meaning in rows.items() if common.get(names) == meaning]
    own = {names: meaning for names, meaning in rows.items() if names not in shared}
    parts = []
    if shared:
        names = ", ".join(f"`{names.split()[0]}`" for names in shared)
        parts.append(f"Options as for `tune`: {names}.")
    if own:
        table = [f"| `{names}` | {meaning} |" for names, meaning in own.items()]
        parts.append("\n".join(["| option | meaning |", "|---|---|", *table]))
    return "\n\n".join(parts)


def usage_line(command: click.Command, name: str) -> str:
    """How a verb is called, in one line."""
    context = click.Context(command)
    return f"`replayssm-tune {name} {' '.join(command.collect_usage_pieces(context))}`"


def exit_codes_table() -> str:
    """The documented exit codes."""
    rows = (f"| {int(code)} | {meaning} |" for code, meaning in MEANING.items())
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def models_table() -> str:
    """The models that ``--model`` knows."""
    rows = (
        f"| `{m.name}` | {m.family} | {m.heads} | {m.head_dim} | {m.state_size} | {m.groups} "
        f"| {m.state_dtype} | {'yes' if m.verified else 'no'} |"
        for m in models.known()
    )
    header = "| model | family | heads | head dim | state size | groups | state | verified |"
    return "\n".join([header, "|---|---|---|---|---|---|---|---|", *rows])


def section(name: str) -> str:
    """Body of the region ``name``: ``exit-codes``, ``models``, or a verb such as ``tune`` or ``table show``.

    Raises:
        KeyError: No such verb.
    """
    if name == "exit-codes":
        return exit_codes_table()
    if name == "models":
        return models_table()
    command: click.Command = cli
    for word in name.split():
        if not isinstance(command, click.Group):
            raise KeyError(name)
        command = command.commands[word]
    text = inspect.cleandoc(command.help or "")
    return f"{usage_line(command, name)}\n\n{text}\n\n{options_table(command)}"


def render(text: str) -> str:
    """A document's text with its generated regions written anew."""
    return _REGION.sub(lambda m: f"{m['begin']}\n{section(m['name'])}\n\n{m['end']}", text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        document = Path(argument)
        document.write_text(render(document.read_text(encoding="utf-8")), encoding="utf-8")
