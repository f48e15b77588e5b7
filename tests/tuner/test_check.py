"""What a check finds in folders that were tampered with; compiling is a stand-in but for one row."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from replayssm_tune.codegen import emit, targets
from replayssm_tune.codegen.render import render
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import TableError
from replayssm_tune.runtime.modules import module_name
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import Binary, Toolchain
from replayssm_tune.tuner import check as checking
from replayssm_tune.tuner import formats, generate, report, tables
from replayssm_tune.tuner.errors import UsageError
from replayssm_tune.tuner.progress import Event, silent
from replayssm_tune.tuner.report import Finding
from tests.runtime import table_samples as samples

SMALL = Spec("mamba2", "step", head_dim=16, state_size=16, heads_per_group=2, window=4)
PLAN = Plan((Variant(Structure("both"), Tile(16, 16, 16)),))
NOW = Binary("3.9.0", 80, 0, 1024, 9000, "b" * 16)


def row(batch=128, plan=PLAN, spec=SMALL, binaries=((NOW,),), **changes):
    return samples.rendered_row(batch, plan, spec, binaries, **changes)


class Compiler:
    """Makes the same binary of every kernel, but for those it was told about."""

    def __init__(self, **outcomes):
        self.outcomes = outcomes
        self.calls = []

    def __call__(self, gpu, kernels, told):
        self.calls.append((gpu.name, kernels))
        told(len(kernels))
        return {kernel: self.outcomes.get(kernel[1].structure.role, NOW) for kernel in kernels}


@pytest.fixture
def folder(tmp_path):
    emit.emit(tmp_path / "generated", samples.table(row(128), row(256)))
    return tmp_path / "generated"


def check(folder, compiler=None, promise=None):
    return checking.check([folder], silent, compiler=compiler or Compiler(), promise=promise)


def found(checked, kind):
    return [f for f in checked.findings if f.kind == kind]


def failures(checked):
    return {f.kind for f in checked.findings if f.failed}


def test_a_sound_folder(folder):
    checked = check(folder)
    assert failures(checked) == set()
    assert checked.counts == {
        "tables": 1, "rows": 2, "files": 5, "kernels": 3, "binaries": 1, "defaults": 2,
        "cells": checked.counts["cells"],
    }  # fmt: skip
    assert report.checked_info(checked)["exit"] == "OK"


def test_files_that_were_edited_lost_or_left_over(folder):
    name = module_name(SMALL, PLAN.variants[0].structure)
    kernels = folder / "kernels"
    edited = kernels / f"{name}.py"
    edited.write_text(edited.read_text().replace("tl.exp", "tl.exp2"))
    (kernels / "cursors.py").unlink()
    left = kernels / "old.py"
    left.write_text(render(SMALL, Structure("flush")))
    (kernels / "mine.py").write_text("x = 1\n")
    checked = check(folder)
    messages = {f.subject: f.message for f in found(checked, "generated")}
    assert set(messages) == {str(edited), str(kernels / "cursors.py"), str(left)}
    assert "differs" in messages[str(edited)]
    assert "missing" in messages[str(kernels / "cursors.py")]
    assert "no table names" in messages[str(left)]
    assert all(f"generate --output {folder}" in message for message in messages.values())
    assert report.checked_info(checked)["exit"] == "REGRESSION"
    # What the message says to do helps.
    emitted = generate.generate(folder, silent)
    assert set(emitted.written) == {f"kernels/{name}.py", "kernels/cursors.py"}
    assert emitted.removed == ("kernels/old.py",)
    assert failures(check(folder)) == set()


@pytest.mark.parametrize("field", checking.RESOURCES)
def test_resources_that_differ_from_the_record(folder, field):
    other = dataclasses.replace(NOW, **{field: getattr(NOW, field) + 8})
    emit.emit(folder, samples.table(row(256, binaries=((other,),))))
    (finding,) = found(check(folder), "resources")
    assert finding.failed
    assert f"{SMALL.key}@256" in finding.subject
    assert f"{field} {getattr(other, field)} recorded, {getattr(NOW, field)} now" in finding.message


def test_records_of_other_versions_are_only_reported(folder):
    old = dataclasses.replace(NOW, triton="3.6.0", registers=96)
    rows = (row(128, binaries=((old,),)), row(256, binaries=((old, NOW),)))
    emit.emit(folder, samples.table(*rows))
    checked = check(folder)
    (finding,) = found(checked, "resources")
    assert not finding.failed
    assert "1 kernels are recorded under triton 3.6.0 only" in finding.message
    assert "registers in 1" in finding.message
    assert checked.counts["binaries"] == 1
    assert report.checked_info(checked)["exit"] == "OK"


def test_a_row_that_no_longer_compiles(folder):
    split = Plan(
        (Variant(Structure("nonflush"), Tile(16, 16)), Variant(Structure("flush"), Tile(16, 16, 16)))
    )
    emit.emit(folder, samples.table(row(512, split, binaries=((), ())), row(1024, split, binaries=((), ()))))
    checked = check(folder, Compiler(flush="no such instruction"))
    (finding,) = found(checked, "compile")
    assert finding.subject == f"h200.json: {SMALL.key}@512"
    assert split.variants[1].key in finding.message
    assert "no such instruction (2 rows use it)" in finding.message
    assert report.checked_info(checked)["exit"] == "TOOLCHAIN"


def test_a_default_that_does_not_compile_is_found_though_no_row_has_it(folder):
    class Fussy(Compiler):
        def __call__(self, gpu, kernels, told):
            default = default_plan(SMALL).variants[0]
            return {k: "too large" if k[1] == default else NOW for k in kernels}

    (finding,) = found(check(folder, Fussy()), "compile")
    assert finding.subject == f"default plan of {SMALL.key}"


def test_kernels_are_compiled_once_for_all_gpus_of_a_target(folder):
    emit.emit(folder, samples.table(row(128), gpu=samples.H100))
    emit.emit(folder, samples.table(row(128), gpu=samples.A100))
    compiler = Compiler()
    events: list[Event] = []
    checked = checking.check([folder], events.append, compiler=compiler)
    assert [len(kernels) for _, kernels in compiler.calls] == [3, 3]
    assert checked.counts["kernels"] == 6
    compiled = [event for event in events if event.phase == "compile"]
    assert [event.done for event in compiled] == [0, 3, 3, 6]
    assert {event.total for event in compiled} == {6}
    assert [event.phase for event in events[:4]] == ["render"] * 4


def test_an_unknown_schema_is_found_and_the_rest_is_still_checked(folder):
    (folder / "tables" / "a.json").write_text(json.dumps({"schema_version": 99, "rows": []}))
    (folder / "kernels" / "old.py").write_text(render(SMALL, Structure("flush")))
    checked = check(folder)
    (finding,) = found(checked, "schema")
    assert finding.subject == str(folder / "tables" / "a.json")
    assert "99" in finding.message
    assert checked.counts["rows"] == 2
    # Nobody knows what the unreadable table needs.
    assert found(checked, "generated") == []
    assert report.checked_info(checked)["exit"] == "TABLE"


def test_stale_rows_are_listed_and_their_records_not_compared(folder):
    old = dataclasses.replace(NOW, registers=200)
    emit.emit(folder, samples.table(row(256, module_digests=("0" * 16,), binaries=((old,),))))
    checked = check(folder)
    (finding,) = found(checked, "stale")
    assert "effective batch 256 " in finding.message
    assert found(checked, "resources") == []
    data = report.checked_info(checked)
    assert data["exit"] == "OK"


def test_a_table_of_an_unknown_vendor(folder):
    gpu = dataclasses.replace(samples.H200, vendor="else", name="Other")
    emit.emit(folder, samples.table(row(), gpu=gpu))
    (finding,) = found(check(folder), "compile")
    assert finding.subject == "other.json"
    assert "else" in finding.message


def test_a_default_outside_of_its_space(folder, monkeypatch):
    monkeypatch.setattr(checking, "broken_constraint", lambda spec, variant: "block_p")
    findings = found(check(folder), "default")
    assert [(f.subject, f.failed) for f in findings] == [(SMALL.key, True), (SMALL.materialize.key, True)]


def test_cells_are_promised_by_the_package_and_reported_elsewhere(folder):
    (note,) = found(check(folder), "coverage")
    assert not note.failed
    checked = check(folder, promise=folder)
    missing = found(checked, "coverage")
    gpu = targets.find("H200")
    cells = list(checking.promised_cells(gpu))
    assert {f.subject for f in missing} == {f"h200.json: {spec.key}" for spec, _ in cells}
    assert all(f.failed for f in missing)
    assert f"{len(cells)} of {len(cells)} cells" in note.message
    assert checked.counts["cells"] == len(cells)
    assert report.checked_info(checked)["exit"] == "COVERAGE"


def test_promised_cells_have_their_native_beside_them():
    cells = set(checking.promised_cells(targets.find("H100")))
    steps = {(spec, batch) for spec, batch in cells if spec.op == "step"}
    assert {(spec.native, batch) for spec, batch in steps} == cells - steps
    assert steps


def test_a_folder_without_tables(tmp_path):
    checked = checking.check([tmp_path], silent, compiler=Compiler())
    assert [(f.kind, f.message) for f in checked.findings] == [
        ("coverage", "there is no table: tune for a GPU first")
    ]
    with pytest.raises(UsageError, match="no such folder"):
        checking.check([tmp_path / "absent"], silent)


@pytest.mark.parametrize("part", ["generated/tables", "generated/kernels", "generated/tables/h200.json", "."])
def test_a_folder_beside_the_one_that_is_meant_is_told_which_it_is(folder, part, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (named,) = (path for path in (folder / "tables").iterdir())
    named.rename(folder / "tables" / "h200.json")
    with pytest.raises(UsageError, match="near one") as refused:
        checking.check([Path(part)], silent)
    assert refused.value.hint == f"name that folder: replayssm-tune check {folder}"
    with pytest.raises(TableError, match="there is no table") as unread:
        generate.generate(Path(part), silent)
    assert unread.value.hint.endswith(f"such as {folder}")
    if part in ("generated/kernels", "."):
        with pytest.raises(TableError, match="holds no table") as unread:
            tables.read([Path(part)])
        assert unread.value.hint == f"name {folder / 'tables'}"
    # From inside, where a name says nothing.
    monkeypatch.chdir(folder / "tables")
    with pytest.raises(UsageError, match="near one"):
        checking.check([Path(".")], silent)
    assert failures(check(folder)) == set()


def test_tables_alone_are_told_what_they_lack(folder, tmp_path):
    (folder / "tables").rename(tmp_path / "mine")
    with pytest.raises(UsageError, match="tables without a folder of kernels") as refused:
        checking.check([tmp_path / "mine"], silent)
    assert "generate --output" in refused.value.hint


def test_real_compilation_gives_what_was_recorded(folder):
    kernel = (SMALL, PLAN.variants[0])
    told: list[int] = []
    made = checking.compile_all(targets.find("H200"), [kernel], told.append)
    assert told == [1]
    binary = made[kernel]
    assert isinstance(binary, Binary)
    toolchain = Toolchain(binary.triton, "2.13.0", "580")
    emit.emit(folder, samples.table(row(512, binaries=((binary,),)), toolchain=toolchain), keep=False)
    checked = checking.check([folder], silent)
    assert failures(checked) == set()
    assert checked.counts["binaries"] == 1


FINDINGS = (
    Finding("compile", "h200.json: a|b@1", "error: `x` < 1 & \x1b[31mred\x1b[0m"),
    Finding("stale", "h200.json: c", "made before"),
    Finding("resources", "h200.json", "others", failed=False),
)


def test_junit():
    data = report.checked_info(report.Checked({"rows": 3}, FINDINGS))
    root = ElementTree.fromstring(formats.junit(data))
    assert root.attrib == {"name": "replayssm-tune check", "tests": str(len(root) + 2), "failures": "1"}
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == list(report.FINDING_EXITS)
    (case,) = suites["compile"]
    failure = case.find("failure")
    assert failure is not None
    assert "< 1 &" in failure.get("message", "")
    for name in ("stale", "resources"):
        assert suites[name].get("skipped") == "1"
        assert suites[name].get("failures") == "0"
    assert all(suite.get("tests") == str(len(suite)) for suite in suites.values())


def test_markdown():
    text = formats.markdown(report.checked_info(report.Checked({"rows": 3}, FINDINGS)))
    assert text.startswith("## replayssm-tune check: 1 failed\n")
    assert "Checked 3 rows." in text
    lines = [line for line in text.splitlines() if line.startswith("| **failed**")]
    assert len(lines) == 1
    assert "a\\|b@1" in lines[0]
    assert "&lt; 1" in lines[0]
    # Every line of a table has as many cells as its head.
    rows = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {4, 5}
    assert "all well" in formats.markdown(report.checked_info(report.Checked({"rows": 3})))


def test_markdown_stays_readable():
    many = tuple(Finding("generated", f"file {i}", "differs") for i in range(60))
    text = formats.markdown(report.checked_info(report.Checked({"files": 60}, many)))
    assert "60 failed" in text
    assert "10 more findings are not shown" in text
