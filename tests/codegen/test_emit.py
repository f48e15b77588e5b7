"""Emitting into a folder: what is written, what is left alone, what goes, and what a failure leaves."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayssm_tune.codegen import emit, files
from replayssm_tune.codegen.render import SHARED, render
from replayssm_tune.runtime.defaults import default_plan, defaults_beside
from replayssm_tune.runtime.errors import TableError
from replayssm_tune.runtime.modules import module_name
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.table import load, save
from tests.paths import ROOT
from tests.runtime import table_samples as samples

SPLIT = Plan(
    (
        Variant(Structure("nonflush"), Tile(32, 128)),
        Variant(Structure("flush", readout="dot"), Tile(64, 64, 64)),
    )
)


def row(batch=128, plan=SPLIT, spec=samples.SPEC, **changes):
    return samples.rendered_row(batch, plan, spec, **changes)


def names(*plans, spec=samples.SPEC):
    return {module_name(spec, v.structure) for plan in plans for v in plan.variants}


def beside(spec=samples.SPEC):
    """Modules that serve beside the rows of a spec."""
    return set().union(*(names(plan, spec=one) for one, plan in defaults_beside(spec).items()))


def modules_in(folder):
    return {path.stem for path in (folder / "kernels").iterdir()}


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_rows_of_steps_and_native_steps_get_their_modules_and_defaults(tmp_path):
    native = samples.SPEC.native
    table = samples.table(row(), row(spec=native, plan=default_plan(native)))
    done = emit.emit(tmp_path, table)
    expected = names(SPLIT, default_plan(samples.SPEC)) | names(default_plan(native), spec=native)
    folds = samples.SPEC.materialize
    expected |= names(default_plan(folds), spec=folds)
    assert modules_in(tmp_path) == expected | set(SHARED)
    assert done.table_path == tmp_path / "tables" / "h200.json"
    assert load(done.table_path) == table
    assert set(done.written) == {f"kernels/{name}.py" for name in (*expected, *SHARED)} | {"tables/h200.json"}
    assert (done.rows, done.unchanged, done.removed) == (2, 0, ())


def test_specs_of_one_ring_share_what_materialises_it():
    gated = dataclasses.replace(samples.SPEC, has_z=True, has_d=False)
    one, both = (emit.modules([samples.table(*rows)]) for rows in ([row()], [row(), row(spec=gated)]))
    specific = [module for module in both.values() if not isinstance(module, str)]
    folds = {spec for spec, structure in specific if structure.role == "materialize"}
    assert folds == {samples.SPEC.materialize}
    assert len(both) == len(one) + len(names(SPLIT, default_plan(gated), spec=gated))


def test_files_are_the_renderings_byte_for_byte(tmp_path):
    emit.emit(tmp_path, samples.table(row()))
    for variant in SPLIT.variants:
        path = tmp_path / "kernels" / f"{module_name(samples.SPEC, variant.structure)}.py"
        assert path.read_bytes() == render(samples.SPEC, variant.structure).encode()
    for name, shared in SHARED.items():
        assert (tmp_path / "kernels" / f"{name}.py").read_bytes() == shared().encode()


def test_files_follow_the_umask(tmp_path):
    emit.emit(tmp_path, samples.table(row()))
    plain = tmp_path / "plain"
    plain.touch()
    assert {path.stat().st_mode for path in tmp_path.rglob("*.*")} == {plain.stat().st_mode}


def test_emitted_files_pass_the_linter(tmp_path):
    emit.emit(tmp_path / "generated", samples.table(row()))
    for verb in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *verb, "--no-cache", "--config", ROOT / "pyproject.toml", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_emitting_again_touches_nothing(tmp_path):
    table = samples.table(row())
    first = emit.emit(tmp_path, table)
    before = times(tmp_path)
    again = emit.emit(tmp_path, table)
    assert (again.written, again.removed, again.unchanged) == ((), (), len(first.written))
    assert times(tmp_path) == before
    assert emit.regenerate(tmp_path).written == ()
    assert times(tmp_path) == before


def test_modules_that_no_table_names_go_and_others_stay(tmp_path):
    plan = Plan((Variant(Structure("both"), Tile(32, 128, 128)),))
    emit.emit(tmp_path, samples.table(row()))
    emit.emit(tmp_path, samples.table(row(plan=plan), gpu=samples.H100))
    mine = tmp_path / "kernels" / "mine.py"
    mine.write_text("x = 1\n")
    (tmp_path / "tables" / "h200.json").unlink()
    done = emit.regenerate(tmp_path)
    assert {Path(path).stem for path in done.removed} == names(SPLIT)
    assert modules_in(tmp_path) == names(plan) | beside() | {*SHARED, "mine"}


def test_nothing_goes_while_a_table_cannot_be_read(tmp_path):
    emit.emit(tmp_path, samples.table(row()))
    (tmp_path / "tables" / "h200.json").write_text("{")
    done = emit.emit(tmp_path, samples.table(row(plan=default_plan(samples.SPEC)), gpu=samples.H100))
    assert done.removed == ()
    assert "h200.json" in done.notes[0]
    assert names(SPLIT) <= modules_in(tmp_path)
    with pytest.raises(TableError):
        emit.regenerate(tmp_path)


def test_rows_of_an_earlier_tune_stay(tmp_path):
    emit.emit(tmp_path, samples.table(row(128), row(256)))
    done = emit.emit(tmp_path, samples.table(row(256, verdict="newer"), row(512)))
    rows = load(done.table_path).rows
    assert [(r.effective_batch, r.verdict == "newer") for r in rows] == [
        (128, False), (256, True), (512, False),
    ]  # fmt: skip
    assert done.rows == 3
    assert emit.emit(tmp_path, samples.table(row(512)), keep=False).rows == 1


def test_an_unreadable_table_of_the_gpu_is_not_overwritten(tmp_path):
    path = tmp_path / "tables" / "h200.json"
    path.parent.mkdir()
    path.write_text('{"schema_version": 99}')
    with pytest.raises(TableError, match="99"):
        emit.emit(tmp_path, samples.table(row()))
    assert path.read_text() == '{"schema_version": 99}'
    assert not (tmp_path / "kernels").exists()


def test_regenerating_repairs_modules_and_leaves_tables(tmp_path):
    table = samples.table(row(), row(256, module_digests=("0" * 16,) * 2))
    emit.emit(tmp_path, table)
    before = times(tmp_path / "tables")
    victim = tmp_path / "kernels" / f"{module_name(samples.SPEC, SPLIT.variants[0].structure)}.py"
    victim.write_text("raise SystemExit\n")
    for name in SHARED:
        (tmp_path / "kernels" / f"{name}.py").unlink()
    seen = []
    done = emit.regenerate(tmp_path, lambda *event: seen.append(event))
    assert set(done.written) == {f"kernels/{victim.name}", *(f"kernels/{name}.py" for name in SHARED)}
    assert victim.read_text() == render(samples.SPEC, SPLIT.variants[0].structure)
    assert times(tmp_path / "tables") == before
    assert done.rows == 2
    assert "1 rows are stale" in done.notes[0]
    assert [event[:2] for event in seen] == [(i, 6) for i in range(1, 7)]


def test_there_must_be_a_table_to_regenerate_from(tmp_path):
    with pytest.raises(TableError, match="no table"):
        emit.regenerate(tmp_path)


def test_a_full_disk_leaves_the_old_state_and_no_parts(tmp_path, monkeypatch):
    emit.emit(tmp_path, samples.table(row()))
    old = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}

    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    other = dataclasses.replace(samples.SPEC, head_dim=80)
    with pytest.raises(files.EmitError, match="No space left") as error:
        emit.emit(tmp_path, samples.table(row(spec=other)))
    assert "make room" in error.value.hint
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == old


def test_an_output_that_cannot_take_the_table_is_refused_before_any_work(tmp_path):
    emit.check_writable(tmp_path / "new", samples.H200)
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["tables"]
    emit.emit(tmp_path / "new", samples.table(row()))
    emit.check_writable(tmp_path / "new", samples.H200)
    path = tmp_path / "old" / "tables" / "h200.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"schema_version": 99}')
    with pytest.raises(TableError, match="99"):
        emit.check_writable(tmp_path / "old", samples.H200)
    save(samples.table(gpu=samples.H100), path)
    with pytest.raises(TableError, match=r"different GPUs .*h200\.json"):
        emit.check_writable(tmp_path / "old", samples.H200)
    (tmp_path / "file").write_text("")
    with pytest.raises(files.EmitError, match=r"File exists|Not a directory"):
        emit.check_writable(tmp_path / "file", samples.H200)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(files.EmitError, match="Permission denied"):
        emit.emit(tmp_path / "generated", samples.table(row()))


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "kernels").write_text("")
    with pytest.raises(files.EmitError) as error:
        emit.emit(tmp_path, samples.table(row()))
    assert str(tmp_path / "kernels") in error.value.where


def test_whatever_is_interrupted_every_table_finds_its_modules(tmp_path, monkeypatch):
    """Stop after each write in turn."""
    other = Plan((Variant(Structure("both", route="rebuild"), Tile(32, 128, 128)),))
    for stop_after in range(6):
        folder = tmp_path / str(stop_after)
        emit.emit(folder, samples.table(row()))
        count = 0

        def stopping(path, text, stop_after=stop_after):
            nonlocal count
            if count == stop_after:
                raise KeyboardInterrupt
            count += 1
            return files.write(path, text)

        def stop(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(emit, "write", stopping)
            patch.setattr(emit, "_prune", stop)
            with pytest.raises(KeyboardInterrupt):
                emit.emit(folder, samples.table(row(plan=other)), keep=False)
        table = load(folder / "tables" / "h200.json")
        assert set(emit.modules([table])) <= modules_in(folder)


def test_stale_rows_are_told():
    assert not emit.stale(row())
    assert emit.stale(row(module_digests=("0" * 16,) * 2))


def test_a_saved_table_and_an_emitted_one_are_the_same_bytes(tmp_path):
    table = samples.table(row())
    save(table, tmp_path / "saved.json")
    done = emit.emit(tmp_path / "generated", table)
    assert done.table_path.read_bytes() == (tmp_path / "saved.json").read_bytes()
