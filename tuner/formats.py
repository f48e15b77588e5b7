"""A check's result for machines and pages: JUnit XML and Markdown.

Both are made from the data of :func:`.report.checked_info`.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any, Final

from .report import FINDING_EXITS

Data = dict[str, Any]

_TITLES: Final = {
    "schema": "tables can be read",
    "compile": "every row compiles for its target",
    "generated": "files equal a fresh rendering",
    "resources": "registers, spills, shared memory and size are those recorded",
    "default": "the computed default lies in the space",
    "stale": "rows were made with today's kernels",
    "coverage": "promised cells have a row",
}


def junit(data: Data) -> str:
    """JUnit XML: a suite per kind, a case per finding, one passed case for a kind without failures.

    What is only reported, ``stale`` included, is a skipped case.
    """
    root = ElementTree.Element("testsuites", name="replayssm-tune check")
    for kind in FINDING_EXITS:
        findings = [f for f in data["findings"] if f["kind"] == kind]
        suite = ElementTree.SubElement(root, "testsuite", name=kind)
        failures = 0
        for finding in findings:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"check.{kind}", name=_plain(finding["subject"])
            )
            failed = _failed(finding)
            failures += failed
            outcome = ElementTree.SubElement(case, "failure" if failed else "skipped")
            outcome.set("message", _plain(finding["message"]))
        if not failures:
            ElementTree.SubElement(suite, "testcase", classname=f"check.{kind}", name=_TITLES[kind])
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(failures))
        suite.set("skipped", str(len(findings) - failures))
    root.set("tests", str(sum(len(suite) for suite in root)))
    root.set("failures", str(sum(int(suite.get("failures", "0")) for suite in root)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def markdown(data: Data, limit: int = 50) -> str:
    """A Markdown summary for the page of a CI run; findings beyond ``limit`` are counted only."""
    failed = [f for f in data["findings"] if _failed(f)]
    notes = [f for f in data["findings"] if not _failed(f)]
    looked_at = ", ".join(f"{count} {kind}" for kind, count in data["counts"].items())
    lines = [
        f"## replayssm-tune check: {f'{len(failed)} failed' if failed else 'all well'}",
        "",
        f"Checked {looked_at}." if looked_at else "Nothing was there to check.",
        "",
        "| what | failed | noted |",
        "|---|---:|---:|",
    ]
    for kind, title in _TITLES.items():
        counts = [sum(f["kind"] == kind for f in group) for group in (failed, notes)]
        lines.append(f"| {title} | {counts[0] or '-'} | {counts[1] or '-'} |")
    if failed or notes:
        lines += ["", "| | kind | subject | what |", "|---|---|---|---|"]
        for finding in (failed + notes)[:limit]:
            word = "**failed**" if _failed(finding) else "note"
            cells = (_cell(finding[name]) for name in ("kind", "subject", "message"))
            lines.append(f"| {word} | {' | '.join(cells)} |")
        if len(failed + notes) > limit:
            lines += ["", f"{len(failed + notes) - limit} more findings are not shown."]
    return "\n".join(lines) + "\n"


def _failed(finding: Data) -> bool:
    return bool(finding["failed"]) and FINDING_EXITS[finding["kind"]] != "OK"


def _plain(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def _cell(text: str) -> str:
    return _plain(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
