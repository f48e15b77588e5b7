"""Reading tables from files and folders, and explaining a look-up."""

import dataclasses
import io

import pytest
from rich.console import Console

from replayssm_tune.codegen import targets
from replayssm_tune.runtime.errors import TableError
from replayssm_tune.runtime.table import save
from replayssm_tune.tuner import drawing, models, tables
from replayssm_tune.tuner.models import Model
from replayssm_tune.tuner.request import Work
from tests.tuner import samples

H200 = targets.find("H200").info


@pytest.fixture
def folder(tmp_path):
    save(
        samples.table(samples.measured_row(128), samples.measured_row(32768), gpu=H200),
        tmp_path / "h200.json",
    )
    return tmp_path


def test_files_and_folders(folder):
    assert tables.read([folder]) == tables.read([folder / "h200.json"])


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(TableError, match="holds no table"):
        tables.read([tmp_path])


def test_a_gpu_without_a_table_names_those_that_have_one(folder):
    found = tables.read([folder])
    assert tables.for_gpu(found, targets.find("H200")) == found
    with pytest.raises(TableError, match="no table for B200") as error:
        tables.for_gpu(found, targets.find("B200"))
    assert "H200" in error.value.where
    assert "replayssm-tune --gpu" in error.value.hint


def test_only_rows_of_a_models_layers_are_shown():
    model = Model("a", heads=32, head_dim=64, state_size=128, groups=2)
    replicated = dataclasses.replace(samples.SPEC, heads_per_group=4)  # tp 8: four heads and a group a GPU
    mine = (samples.SPEC, dataclasses.replace(samples.SPEC, window=8, state_dtype="bf16"))
    others = (
        dataclasses.replace(samples.SPEC, heads_per_group=2),
        dataclasses.replace(samples.SPEC, head_dim=80),
        dataclasses.replace(samples.SPEC, family="gdn", has_d=False),
    )
    rows = [samples.measured_row(128, spec=spec) for spec in (*mine, replicated, *others)]
    found = samples.table(*rows), samples.table(samples.measured_row(128, spec=others[0]))
    (shown,) = tables.shown_info(found, [model])["tables"]
    assert {group["spec"] for group in shown["specs"]} == {spec.key for spec in (*mine, replicated)}
    assert [len(data["specs"]) for data in tables.shown_info(found)["tables"]] == [len(rows), 1]
    assert tables.shown_info(()) == {"tables": []}


def test_a_model_without_a_row_says_where_none_is(folder):
    with pytest.raises(TableError, match=r"no row of qwen3\.5-4b") as error:
        tables.shown_info(tables.read([folder]), [models.find("qwen3.5-4b")])
    assert "H200" in error.value.where
    assert "--model qwen3.5-4b" in error.value.hint


def test_explanation_of_a_sister_gpu(folder):
    work = [Work(samples.SPEC, (128,), ("layer tp1",))]
    data = tables.explained_info([folder], work, targets.find("H100"))
    (cell,) = data["cells"]
    assert cell["step"] in ("sister", "architecture")
    assert cell["plan"] == samples.TWO_LAUNCHES.key
    assert sum(candidate["served"] for candidate in cell["candidates"]) == 1
    stream = io.StringIO()
    drawing.draw_explained(data, Console(file=stream, width=200))
    assert "measured on H200" in stream.getvalue()
    assert "default" in stream.getvalue()
