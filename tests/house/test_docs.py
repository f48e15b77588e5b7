"""README and docs: snippets run, links resolve, commands exist, figures stand in generated regions."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from replayssm_tune.codegen import catalogue
from replayssm_tune.runtime import checks, signatures
from replayssm_tune.runtime.abi import launch_structure, tensor_arguments
from replayssm_tune.tuner.cli.main import cli
from tests.paths import ROOT

DOCUMENTS = [path for place in ("*.md", "docs/*.md", "examples/*.md") for path in sorted(ROOT.glob(place))]

BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (\w+):begin [^>]*-->.*?<!-- \1:end -->", re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FIGURE = re.compile(r"\d\s?(µs|us\b|×|x faster|[GT]B/s|%|times (as )?fast)")

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def blocks(document: Path, *infos: str) -> list[tuple[int, str]]:
    """Line and text of the code blocks with one of these info strings."""
    text = document.read_text(encoding="utf-8")
    found = (match for match in BLOCK.finditer(text) if match["info"].strip() in infos)
    return [(text.count("\n", 0, match.start("body")), match["body"]) for match in found]


def prose(document: Path) -> str:
    return CODE.sub("", BLOCK.sub("", document.read_text(encoding="utf-8")))


def anchors(document: Path) -> set[str]:
    """Anchors of the headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def execute(document: Path, *infos: str) -> dict[str, Any]:
    """Run a document's blocks one after the other in one namespace, which is returned."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for line, body in blocks(document, *infos):
        # Blank lines in front, so that a traceback names the document's own lines.
        exec(compile("\n" * line + body, str(document), "exec"), namespace)
    return namespace


def with_snippets(*infos: str) -> pytest.MarkDecorator:
    chosen = [document for document in DOCUMENTS if blocks(document, *infos)]
    return pytest.mark.parametrize("document", chosen, ids=lambda path: path.name)


@with_snippets("python")
def test_python_snippets_run_on_a_cpu(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch._dynamo.reset()
    execute(document, "python")


def test_steps_of_snippets_are_what_they_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec passed to `warmup` names the kernel of the steps, dtypes included."""
    met: list[checks.Signature] = []

    def check(*arguments: Any) -> checks.Signature:
        met.append(checks.check_step(*arguments))
        return met[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signatures, "_known", {})
    monkeypatch.setattr(signatures, "check_step", check)
    torch._dynamo.reset()
    names = execute(ROOT / "docs" / "runtime.md", "python")
    spec = names["spec"]
    assert {signature.spec for signature in met} == {spec, spec.materialize, names["gdn"], names["verify"]}
    for signature in met:
        for tensor in tensor_arguments(signature.spec, launch_structure(signature.spec)):
            assert signature.dtypes[tensor.name] == tensor.dtype, tensor.name


@pytest.mark.gpu
@with_snippets("python gpu")
def test_python_snippets_run_on_a_gpu(document: Path) -> None:
    torch._dynamo.reset()
    execute(document, "python", "python gpu")
    torch.cuda.synchronize()


@documents
def test_links_resolve(document: Path) -> None:
    missing = []
    for match in LINK.finditer(prose(document)):
        target, _, anchor = match["target"].partition("#")
        if "://" in target:
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(match["target"])
    assert not missing


@documents
def test_commands_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+)(?: [^:=]*)?:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for _, body in blocks(document, "console"):
        for line in body.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            elif words[:1] == ["python"]:
                assert (ROOT / words[1]).is_file(), line
            elif words[:1] == ["replayssm-tune"]:
                assert options_known(words[1:]), line


def options_known(words: list[str]) -> bool:
    command: click.Command = cli
    while isinstance(command, click.Group):
        # Without a verb the command line tunes.
        named = words[0] if words and words[0] in command.commands else "tune"
        words = words[words[:1] == [named] :]
        command = command.commands[named]
    known = {option for parameter in command.params for option in parameter.opts}
    return all(word.partition("=")[0] in known for word in words if word.startswith("--"))


@documents
def test_figures_stand_in_generated_regions(document: Path) -> None:
    assert not FIGURE.findall(GENERATED.sub("", prose(document)))


@documents
def test_the_catalogue_is_up_to_date(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert catalogue.render(text) == text, "run: make docs"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {match["target"].partition("#")[0] for match in LINK.finditer(index)}
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} <= linked


def test_an_unknown_region_of_the_catalogue_is_refused() -> None:
    with pytest.raises(KeyError):
        catalogue.render("<!-- catalogue:begin nothing -->\n<!-- catalogue:end -->")
