"""The figure of step times: its points, its drawing."""

import xml.etree.ElementTree as ET

import pytest

from benchmarks import figure, summary
from tests.benchmarks.step_runs import cell, run


def curve(state_dtype):
    return [
        cell(batch, state_dtype, time_us={"mix": 3.0 + batch / 100}, native_us=4.0 + batch / 50)
        for batch in (16, 128, 1024, 8192)
    ]


def test_figure_data():
    records = summary.derive([("a.json", run(*curve("fp32"), *curve("bf16")))])
    panels = figure.info(records, head_dim=64)
    assert [panel.state_dtype for panel in panels] == ["fp32", "bf16"]
    assert {panel.layer for panel in panels} == {"Mamba-2 64 x 128"}
    assert list(panels[0].series) == ["native", "replay", "roof"]
    assert panels[0].series["replay"] == ((16, 3.16), (128, 4.28), (1024, 13.24), (8192, 84.92))
    assert figure.info(records, head_dim=80) == ()


def test_figure_takes_the_gpu_with_most_points():
    other = {**run(cell(16)), "gpu": "H20"}
    records = summary.derive([("a.json", run(*curve("fp32"))), ("b.json", other)])
    assert len(figure.info(records)[0].series["replay"]) == 4
    assert len(figure.info(records, gpu="H20")[0].series["replay"]) == 1


def test_the_figure_is_well_formed_and_the_same_every_time():
    gdn = [{**c, "spec": "gdn-step-p128-n128-g2-w16-t1-xbf16-sfp32-rbf16-fbsl"} for c in curve("fp32")]
    records = summary.derive([("a.json", run(*curve("fp32"), *curve("bf16"), *gdn))])
    text = figure.figure(records)
    assert text == figure.figure(records)
    svg = ET.fromstring(text)
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 9
    height = float(svg.attrib["viewBox"].split()[3])
    texts = [element.text for element in svg.findall("{http://www.w3.org/2000/svg}text")]
    assert {"Mamba-2 64 x 128, fp32 state", "Mamba-2 64 x 128, bf16 state"} <= set(texts)
    assert "GDN 128 x 128, fp32 state" in texts
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert all(0 <= x <= figure.WIDTH and 0 <= y <= height for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="record a run first"):
        figure.figure([])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(2.5, 60.0, [5, 10, 20, 50]), (1.0, 1e5, [1, 10, 100, 1000, 10000, 100000])],
)
def test_ticks(low, high, expected):
    assert figure.ticks(low, high) == expected


def test_the_published_figure_is_the_recorded_one():
    records = summary.recorded()
    if not summary.select(records, "step_time_us"):
        assert not figure.FIGURE.exists()
        return
    assert figure.FIGURE.read_text(encoding="utf-8") == figure.figure(records), (
        "run: python benchmarks/figure.py"
    )
