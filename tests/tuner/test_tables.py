"""Reading tables from files and folders, and explaining a look-up."""

import dataclasses

import pytest

from replayssm_tune.codegen import targets
from replayssm_tune.codegen.render import module_digest, render_conv
from replayssm_tune.runtime.conv_tiles import ConvSpec
from replayssm_tune.runtime.errors import TableError
from replayssm_tune.runtime.lookup import Lookup
from replayssm_tune.runtime.table import save
from replayssm_tune.tuner import drawing, models, tables
from replayssm_tune.tuner.models import Model
from replayssm_tune.tuner.request import Work
from tests.runtime.table_samples import conv_row
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
    assert tables.of_gpu(found, targets.find("H200")) == (found, ())
    with pytest.raises(TableError, match="no table for B200") as error:
        tables.of_gpu(found, targets.find("B200"))
    assert "H200" in error.value.where
    assert "replayssm-tune --gpu" in error.value.hint
    assert "may serve" not in error.value.hint
    with pytest.raises(TableError, match="no table for GH200") as error:
        tables.of_gpu(found, targets.find("GH200"))
    assert "rows of H200 may serve: leave out --gpu" in error.value.hint


def test_tables_of_a_gpu_are_its_own_and_others_that_serve_it_are_named():
    timed, estimated = (samples.measured_row(128),), (samples.static_row(128),)
    h200, oem = (samples.table(*timed, gpu=dataclasses.replace(H200, name=n)) for n in ("H200", "H200 OEM"))
    h100 = samples.table(*estimated, gpu=targets.find("H100").info)
    h20, pcie = (
        samples.table(*rows, gpu=targets.find(name).info)
        for name, rows in (("H20", timed), ("H100 PCIe", estimated))
    )
    b200 = samples.table(*timed, gpu=targets.find("B200").info)
    everything = (h20, pcie, b200, h100, oem, h200)
    # Of the same architecture measured rows alone serve, of an equal GPU static ones too.
    assert tables.of_gpu(everything, targets.find("H200")) == ((h200, oem), ("H100 SXM", "H20"))
    assert tables.of_gpu(everything, targets.find("H100")) == ((h100,), ("H200 OEM", "H200", "H20"))
    assert tables.of_gpu(everything, targets.find("B200")) == ((b200,), ())
    # What is named is what dispatch looks at.
    lookup = Lookup(everything)
    for gpu in map(targets.find, ("H200", "H100", "B200", "H20")):
        own, related = tables.of_gpu(everything, gpu)
        places = {c.table.partition(" (")[0] for c in lookup.explain(samples.SPEC, 128, gpu.info) if c.table}
        assert places == {*related, *(table.gpu.name for table in own)}
    data = tables.shown_info(*tables.of_gpu(everything, targets.find("H200"))[:1], (), ("H100 SXM", "H20"))
    text = samples.drawn(drawing.draw_tables, data, 60)
    (line,) = [line for line in text.splitlines() if "H100" in line]
    assert "rows of H100 SXM, H20 here too: table show without --gpu shows them" in line


def test_what_has_changed_since_it_was_timed_is_told():
    rows = samples.measured_row(128), samples.measured_row(256, module_digests=("a" * 16, "b" * 16))
    tiles = conv_row(module_digest=module_digest(render_conv())), conv_row(rows=8)
    (data,) = tables.shown_info([dataclasses.replace(samples.table(*rows), convolutions=tiles)])["tables"]
    (group,) = data["specs"]
    assert [row["stale"] for row in group["rows"]] == [False, True]
    assert {row["rows"]: row["stale"] for row in data["convolutions"]} == {64: False, 8: True}
    assert "2 rows or tiles are stale (*)" in samples.drawn(
        drawing.draw_tables, {"tables": [data], "related": []}
    )


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
    assert tables.shown_info(()) == {"tables": [], "related": []}


def test_only_tiles_of_a_models_convolution_are_shown():
    wide = conv_row(spec=ConvSpec(4, 1, "bf16", "bf16", "bf16"))
    others = [conv_row(spec=dataclasses.replace(wide.spec, num_tokens=4)), conv_row(spec=wide.spec, rows=8)]
    narrow = conv_row(spec=dataclasses.replace(wide.spec, width=3))
    found = samples.table(samples.measured_row(128), gpu=H200)
    found = (dataclasses.replace(found, convolutions=(wide, *others, narrow)),)
    of_four = Model("a", heads=32, head_dim=64, state_size=128, groups=2)
    of_three = dataclasses.replace(of_four, name="b", conv_width=3)

    def shown(*models):
        (data,) = tables.shown_info(found, models)["tables"]
        return [row["spec"] for row in data["convolutions"]]

    assert len(shown()) == len(shown(of_four, of_three)) == 4
    assert set(shown(of_four)) == {wide.spec.key, others[0].spec.key}
    assert shown(of_three) == [narrow.spec.key]


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
    text = samples.drawn(drawing.draw_explained, data)
    assert "measured on H200" in text
    assert "default" in text
