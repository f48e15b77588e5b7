"""Errors against fp64: what is run, what is derived from it, and what documents show of it."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from benchmarks import accuracy, documents, error_tables, figure, summary
from replayssm_tune.runtime.oracle import Oracle
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import ERROR_FACTOR, ERROR_FLOOR

MAMBA2 = Spec("mamba2", "step", 4, 8, 2, 8)
GDN = Spec("gdn", "step", 6, 8, 2, 8, has_d=False, qk_l2norm=True)
LAYERS = {"mamba2": MAMBA2, "gdn": GDN}
TOKENS = 280
by_family = pytest.mark.parametrize("family", LAYERS)


@pytest.fixture(scope="module")
def streams():
    torch.set_num_threads(1)  # tensors are tiny
    return {name: accuracy.stream(layer, TOKENS, "cpu") for name, layer in LAYERS.items()}


@pytest.fixture(scope="module")
def recorded():
    """A run of small layers."""
    torch.set_num_threads(1)
    return accuracy.run(TOKENS, "cpu", tuple(LAYERS.values()))


def test_every_kernel_of_a_layer_is_compared():
    found = accuracy.variants(MAMBA2)
    assert len(found) == len(set(found)) == 18
    assert {(s.op, s.num_tokens) for s in found} == {
        ("step", 1), ("native_step", 1), ("verify", 4), ("native_verify", 4)
    }  # fmt: skip
    for spec in found:
        assert spec.state_dtype in ("fp32", "bf16", "fp16")
    assert {s.ring_dtype for s in found if not s.is_native} == {"bf16", "fp32"}


@by_family
def test_a_stream_is_what_the_recurrence_makes_of_its_tokens(streams, family):
    given = streams[family]
    sequence = torch.arange(given.sequences)
    oracle = Oracle(torch.zeros_like(given.states[1]), given.recurrence)
    for t in range(given.tokens):
        y = oracle.step(sequence, *given.token.at(t * given.sequences + sequence))
        oracle.commit(torch.ones_like(sequence))
        assert torch.equal(y, given.y[t])
        if t + 1 in given.states:
            assert torch.equal(oracle.state, given.states[t + 1])
    assert list(given.states) == accuracy.points(TOKENS)


def test_points_end_with_the_last_token():
    assert accuracy.points(2048)[:5] == [1, 4, 16, 64, 128]
    assert accuracy.points(300) == [1, 4, 16, 64, 128, 256, 300]
    assert accuracy.points(4) == [1, 4]
    assert set(summary.ERROR_TOKENS) <= set(accuracy.points(accuracy.TOKENS))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_steps_keep_every_token_once_and_in_order(streams, num_tokens):
    given = streams["gdn"]
    kept: list[list[int]] = [[] for _ in range(given.sequences)]
    rejected = 0
    for end, steps in accuracy._steps(given, num_tokens, accuracy.points(TOKENS)):
        for step in steps:
            assert set(step.count.tolist()) <= {0, num_tokens}
            assert bool((step.kept <= step.count).all())
            assert bool(((step.kept > 0) == (step.count > 0)).all())
            for index, is_kept in zip(step.index.tolist(), step.is_kept.tolist(), strict=True):
                at, row = divmod(index, given.sequences)
                if is_kept:
                    kept[row].append(at)
                else:
                    # Another token than that which comes next.
                    assert at != len(kept[row])
                    rejected += 1
        assert [len(row) for row in kept] == [end] * given.sequences
    assert kept == [list(range(TOKENS))] * given.sequences
    assert (rejected > TOKENS // 4) == (num_tokens > 1)


def test_errors_of_the_reference_keep_the_bound(recorded):
    assert recorded["gpu"] == "cpu"
    assert len(recorded["errors"]) == 36
    for cell in recorded["errors"]:
        assert cell["kernel"] == "eager reference"
        assert cell["tokens"] == accuracy.points(TOKENS)
        spec = Spec.parse(cell["spec"])
        for what in ("output", "state"):
            for found, ideal in zip(cell[what]["found"], cell[what]["ideal"], strict=True):
                assert 0 < found <= ERROR_FACTOR * ideal + ERROR_FLOOR, (cell["spec"], what)
        exact = spec.is_native or spec.family == "mamba2" or spec.ring_dtype == "fp32"
        if spec.state_dtype == "fp32":
            assert (cell["state"]["found"][-1] < 1e-5) == exact
        if not spec.is_native:
            # Rows hold 8 tokens; with drafts they flush before they are full.
            assert cell["folds"][-1] >= TOKENS // 8 - 1


def test_a_state_of_16_bits_is_nearer_where_it_is_rounded_less_often(recorded):
    last = {cell["spec"]: cell["state"]["found"][-1] for cell in recorded["errors"]}
    for layer in LAYERS.values():
        bf16 = replace(layer, state_dtype="bf16", ring_dtype="fp32")
        assert last[bf16.key] < 0.7 * last[bf16.native.key]


@by_family
@pytest.mark.parametrize("op", ["verify", "native_verify"])
def test_a_draft_that_is_kept_though_rejected_shows(streams, monkeypatch, family, op):
    spec = next(s for s in accuracy.variants(LAYERS[family]) if s.op == op)
    keep = accuracy.Layer.keep
    monkeypatch.setattr(accuracy.Layer, "keep", lambda layer, kept: keep(layer, torch.where(kept > 0, 4, 0)))
    found = accuracy.errors(spec, streams[family])
    assert min(found["output"]["found"][-3:]) > 0.1
    assert min(found["state"]["found"][-3:]) > 0.1
    assert max(found["output"]["ideal"]) < 0.02


@by_family
def test_an_output_that_is_rounded_twice_shows(streams, monkeypatch, family):
    step = accuracy.Layer.step
    monkeypatch.setattr(
        accuracy.Layer,
        "step",
        lambda layer, token, count: step(layer, token, count).to(torch.float8_e4m3fn).to(torch.bfloat16),
    )
    found = accuracy.errors(LAYERS[family], streams[family])["output"]
    assert all(
        f > ERROR_FACTOR * i + ERROR_FLOOR for f, i in zip(found["found"], found["ideal"], strict=True)
    )


# ---- what is derived ----


def cell(spec=MAMBA2, state=2e-3, ideal=1.9e-3, late=None, tokens=None):
    tokens = tokens or accuracy.points(2048)
    found = [late if late and at > 1536 else state for at in tokens]
    return {
        "spec": spec.key, "sequences": 2, "heads": 2, "kernel": "k", "tokens": tokens,
        "output": {"found": [3e-3] * len(tokens), "ideal": [2.9e-3] * len(tokens),
                   "rounding": [1.65e-3] * len(tokens)},
        "state": {"found": found, "ideal": [ideal] * len(tokens)},
        **({} if spec.is_native else {"folds": [float(at // 8) for at in tokens]}),
    }  # fmt: skip


def run(*cells, gpu="cpu", date="2026-11-30"):
    protocol = {"error_factor": 1.25, "error_floor": 1e-5}
    return {"what": "accuracy", "gpu": gpu, "date": date, "protocol": protocol, "errors": list(cells)}


def derive(*cells, **more):
    return summary.derive([("a.json", run(*cells, **more))])


def both(spec=MAMBA2, **values):
    return cell(spec, **values), cell(spec.native, **values)


def test_claims_of_a_cell():
    records = derive(*both())
    replay = summary.select(records, "state_error", kernel="replay")
    assert [r["cell"]["tokens"] for r in replay] == list(summary.ERROR_TOKENS)
    assert {r["cell"]["ring_dtype"] for r in replay} == {"bf16"}
    assert {(r["value"], r["asked"], r["unit"], r["higher_is_better"]) for r in replay} == {
        (2e-3, 1.25 * 1.9e-3 + 1e-5, "1", False)
    }
    native = summary.select(records, "output_error", kernel="native", op="native_step")
    assert len(native) == len(summary.ERROR_TOKENS)
    assert all("ring_dtype" not in r["cell"] for r in native)
    assert {r["asked"] for r in summary.select(records, "output_error", kernel="ideal")} == {None}
    # One for both kernels.
    assert len(summary.select(records, "output_error", kernel="rounding")) == len(summary.ERROR_TOKENS)
    (folds,) = summary.select(records, "folds")
    assert folds["value"] == 256.0


@pytest.mark.parametrize(
    ("spec", "asked"),
    [
        (MAMBA2, 1.1),
        (replace(MAMBA2, ring_dtype="fp32"), 1.1),
        (replace(GDN, ring_dtype="fp32"), 1.1),
        (GDN, None),
        (GDN.native, None),
    ],
)
def test_growth_is_asked_of_rings_that_add_no_error(spec, asked):
    records = derive(cell(spec, late=3e-3))
    kernel = "native" if spec.is_native else "replay"
    (growth,) = summary.select(records, "state_error_growth", kernel=kernel)
    assert (growth["value"], growth["asked"]) == (1.5, asked)
    (ideal,) = summary.select(records, "state_error_growth", kernel="ideal")
    assert (ideal["value"], ideal["asked"]) == (1.0, None)


def test_a_short_run_says_nothing_of_growth():
    assert summary.select(derive(cell(tokens=[1, 4, 16, 64])), "state_error_growth") == []


def test_tables_have_errors_and_say_which_are_beyond_the_bound():
    records = derive(*both(state=2e-3), *both(GDN, state=9e-3, ideal=1e-3))
    region = error_tables.state_errors_region(records)
    errors = " | ".join(["2.00e-03"] * 6)
    assert f"| cpu | Mamba-2 4 x 8 | 1 | replay | fp32 | bf16 | {errors} | 1.90e-03 | 6 of 6 |" in region
    assert f"| cpu | Mamba-2 4 x 8 | 1 | native | fp32 |  | {errors} | 1.90e-03 | 6 of 6 |" in region
    assert "| 1.00e-03 | 0 of 6 |" in region
    assert "| cpu | GDN 6 x 8 | " + " | ".join(["1.65e-03"] * 6) + " |" in error_tables.rounding_region(
        records
    )
    assert error_tables.output_errors_region(records).count("3.00e-03 | 2.90e-03 | 6 of 6 |") == 4


def test_folds_stand_beside_the_growth():
    records = derive(cell(late=3e-3), cell(MAMBA2.native, late=4e-3), *both(GDN))
    region = error_tables.folds_region(records)
    assert "| cpu | Mamba-2 4 x 8 | 1 | fp32 | bf16 | 256 | 1.50 | 1.00 | 2.00 | ≤ 1.1 | no |" in region
    assert "| cpu | GDN 6 x 8 | 1 | fp32 | bf16 | 256 | 1.00 | 1.00 | 1.00 |  |  |" in region


def test_runs_of_gpus_replace_that_of_a_cpu():
    cpu, gpu = run(*both()), run(*both(state=2.1e-3), gpu="H200")
    only = summary.derive([("2026-cpu.json", cpu)])
    assert "eager reference" in error_tables.error_source_region(only)
    assert "2026-cpu.json" in error_tables.error_source_region(only)
    records = summary.derive([("2026-cpu.json", cpu), ("2026-h200.json", gpu)])
    source = error_tables.error_source_region(records)
    assert "H200" in source
    assert "eager" not in source
    assert "cpu" not in source
    for region in ("state-errors", "output-errors", "rounding", "folds"):
        text = documents.REGIONS[region](records)
        assert "| H200 |" in text
        assert "cpu" not in text
    assert "kernels on H200" in figure.errors_figure(records)
    assert "eager reference" in figure.errors_figure(only)


def test_the_run_of_a_cpu_stands_for_families_that_no_gpu_has_run():
    cpu, gpu = run(*both(), *both(GDN)), run(*both(state=2.1e-3), gpu="H200")
    records = summary.derive([("2026-cpu.json", cpu), ("2026-h200.json", gpu)])
    source = error_tables.error_source_region(records)
    assert source.startswith("Recorded on H200")
    assert "Figures of GDN are of the eager reference" in source
    assert "2026-cpu.json" in source
    assert "2026-h200.json" in source
    text = documents.REGIONS["state-errors"](records)
    assert "| H200 | Mamba-2" in text
    assert "| cpu | GDN" in text
    assert "| cpu | Mamba-2" not in text
    drawn = figure.errors_figure(records)
    assert "Mamba-2 kernels on H200, GDN the eager reference on a CPU" in drawn
    assert len(figure.error_panels(records)[1]) == 2


def test_errors_have_a_page_of_their_own():
    records = derive(*both())
    assert documents.asked_region(records) == documents.asked_region([])
    assert documents.goals_region(records) == documents.goals_region([])


def test_the_figure_of_errors_is_well_formed():
    drafts = replace(MAMBA2, op="verify", num_tokens=4)
    records = derive(*both(), *both(GDN), *both(replace(GDN, state_dtype="fp16")), cell(drafts, state=0.5))
    panels = figure.error_panels(records)
    assert [[p.title for p in row] for row in panels] == [
        ["Mamba-2 4 x 8: states", "Mamba-2 4 x 8: outputs"],
        ["GDN 6 x 8: states", "GDN 6 x 8: outputs"],
    ]
    kernels = ["native fp32", "replay fp32 bf16"]
    ideals = [f"ideal {name}" for name in kernels]
    assert list(panels[0][0].series) == [*kernels, *ideals]
    assert list(panels[0][1].series) == [*kernels, "rounding", *ideals]
    assert panels[0][0].series["replay fp32 bf16"] == tuple((n, 2e-3) for n in summary.ERROR_TOKENS)
    text = figure.errors_figure(records)
    assert text == figure.errors_figure(records)
    svg = ET.fromstring(text)
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * (4 + 5)
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert len(points) == len(summary.ERROR_TOKENS)
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points)
    labels = {element.text for element in svg.findall("{http://www.w3.org/2000/svg}text")}
    assert {style.label for style in figure.ERROR_STYLES.values()} <= labels


def test_no_errors_to_draw_is_said():
    with pytest.raises(ValueError, match=r"accuracy\.py"):
        figure.errors_figure([])
    assert "No errors have been recorded" in error_tables.error_source_region([])


# ---- what is recorded ----


def test_the_published_figure_is_the_recorded_one():
    drawn = figure.errors_figure(summary.recorded())
    assert figure.ERRORS.read_text(encoding="utf-8") == drawn, "run: python benchmarks/figure.py"


def test_recorded_errors_are_within_what_is_asked():
    records = [r for r in summary.recorded() if r["claim"] in summary.ERROR_CLAIMS]
    asked = [r for r in records if r["asked"] is not None]
    assert len(asked) >= 2 * 36 * len(summary.ERROR_TOKENS)
    assert all(math.isfinite(r["value"]) for r in records)
    assert [r for r in asked if not summary.reached(r)] == []
