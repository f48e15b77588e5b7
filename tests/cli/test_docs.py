"""The reference in the documentation is what the commands say of themselves."""

import re
from pathlib import Path

import click
import pytest

from replayssm_tune.tuner.cli import reference
from replayssm_tune.tuner.cli.main import cli
from replayssm_tune.tuner.cli.table import table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_reference_is_up_to_date():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert reference.render(text) == text, "run: python -m replayssm_tune.tuner.cli.reference docs/cli.md"


def test_every_verb_is_in_the_reference():
    described = set(re.findall(r"<!-- cli:begin ([a-z -]+) -->", DOCUMENT.read_text(encoding="utf-8")))
    verbs = set()
    for name, command in cli.commands.items():
        verbs |= {f"{name} {sub}" for sub in command.commands} if isinstance(command, click.Group) else {name}
    assert described == verbs | {"exit-codes", "models"}


def test_every_option_says_what_it_does():
    for command in (*cli.commands.values(), *table.commands.values()):
        assert command.help
        assert all(reference.option_rows(command).values()), command.name


def test_an_unknown_region_is_refused():
    with pytest.raises(KeyError):
        reference.render("<!-- cli:begin nothing -->\n<!-- cli:end -->")
