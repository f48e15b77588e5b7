"""What the verbs hand to the tuner and what they make of its answers; the tuner is a stand-in."""

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from replayssm_tune.codegen import targets
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.lookup import STEPS
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import save
from replayssm_tune.tuner import device, report
from replayssm_tune.tuner.cli import main, pipeline
from replayssm_tune.tuner.errors import GateError, InterruptedTune, StoreError
from replayssm_tune.tuner.progress import Event
from replayssm_tune.tuner.report import Checked, Emitted, Finding, Planned
from replayssm_tune.tuner.request import Budget
from tests.tuner import samples


class Tuner:
    """Remembers its calls; answers from samples, or raises."""

    def __init__(self):
        self.calls = []
        self.tuned = samples.tuned()
        self.checked = Checked({"rows": 2})
        self.error = None

    def _called(self, name, argument, report):
        report(Event(name, 1, 2))
        self.calls.append((name, argument))
        if self.error is not None:
            raise self.error

    def plan(self, job, report):
        self._called("plan", job, report)
        return Planned(job.target.gpu.name, not job.target.measured, samples.tuned().specs)

    def tune(self, job, report, results=None):
        self._called("tune", job, report)
        return self.tuned

    def generate(self, folder, report):
        self._called("generate", folder, report)
        return Emitted("t.json", 2, ("a.py",))

    def check(self, folders, report):
        self._called("check", folders, report)
        return self.checked

    def bench(self, job, results, report):
        self._called("bench", (job, results), report)
        return self.tuned


@pytest.fixture
def tuner(monkeypatch):
    stand_in = Tuner()
    monkeypatch.setattr(pipeline, "load", lambda: stand_in)
    return stand_in


@pytest.fixture
def present(monkeypatch):
    """Puts a GPU, or none, into the machine."""

    def put(name):
        gpu = targets.find(name) if name else None
        monkeypatch.setattr(device, "probe", lambda: gpu)

    put(None)
    return put


@pytest.fixture
def call(tuner, present, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


def test_bare_options_are_those_of_tune(call, tuner):
    assert call("--gpu", "H100", "--budget", "5")[0] == 0
    assert call("tune", "--gpu", "H100", "--budget", "5")[0] == 0
    assert tuner.calls[0] == tuner.calls[1]
    name, job = tuner.calls[0]
    assert name == "tune"
    assert job.target.gpu == targets.find("H100")
    assert job.budget == Budget(minutes=5.0)
    assert (job.store, job.output) == (Path(".replayssm/store"), Path(".replayssm/generated"))


def test_batch_invariance_is_asked_for_and_its_cost_shown(call, tuner):
    assert call("--gpu", "H100")[0] == 0
    assert not tuner.calls[0][1].batch_invariant
    early, late = samples.TWO_LAUNCHES, default_plan(samples.SPEC)
    cells = ((128, early, 10.0, late, 8.0, 0.25), (32768, early, 100.0, early, 100.0, 0.0))
    costs = tuple(report.Invariant(samples.SPEC, *cell) for cell in cells)
    tuner.tuned = dataclasses.replace(tuner.tuned, invariant=costs)
    code, out, _ = call("--gpu", "H100", "--batch-invariant")
    assert code == 0
    assert tuner.calls[1][1].batch_invariant
    assert f"one numerics class for all batches of {samples.SPEC.key}: {early.numerics}" in out
    assert "it costs 11.8% in the geometric mean over the batches, at most 25.0% (batch 128)" in out
    code, out, _ = call("--gpu", "H100", "--batch-invariant", "--json")
    (found,) = json.loads(out)["batch_invariant"]
    assert found["worst_regret"] == 0.25
    assert found["mean_regret"] == pytest.approx(0.118, abs=1e-3)
    assert [cell["best"] for cell in found["cells"]] == [late.key, early.key]


def test_nothing_at_all_tunes_for_the_gpu_that_is_there(call, tuner, present):
    present("H200")
    assert call()[0] == 0
    assert tuner.calls[0][1].target.measured


def test_what_materialises_states_is_tuned_where_it_can_be_timed(call, tuner, present):
    given = ("--model", "nemotron-3-nano-4b", "--tp", "1", "--state-dtype", "fp32", "--drafts", "0,3")
    assert call("--gpu", "H200", *given)[0] == 0
    present("H200")
    for verb in ("tune", "plan"):
        assert call(verb, *given)[0] == 0
    static, *measured = (job.work for _, job in tuner.calls)
    assert [work.spec.op for work in static] == ["step", "verify"]
    for step, verify, folds in measured:
        assert (step, verify) == static
        assert folds.spec == step.spec.materialize == verify.spec.materialize
        assert folds.effective_batches == step.effective_batches


def test_static_mode_is_announced_on_stderr(call):
    code, out, err = call("--gpu", "H100")
    assert code == 0
    assert "static mode for H100" in err
    assert "static mode" not in out


def test_another_gpu_ends_before_any_work(call, tuner, present):
    present("H200")
    code, out, err = call("--gpu", "H100")
    assert code == 3
    assert out == ""
    assert "claims H100" in err
    assert "hint:" in err
    assert tuner.calls == []


def test_the_whole_request(call, tuner, tmp_path):
    config = tmp_path / "mine" / "config.json"
    config.parent.mkdir()
    sizes = {"num_heads": 32, "head_dim": 64, "state_size": 256, "n_groups": 2}
    config.write_text(json.dumps({"model_type": "mamba2", **sizes}))
    code, _, err = call(
        "plan", "--gpu", "b200", "--model", "falcon-h1-34b", "--hf-config", str(config), "--tp", "1,4",
        "--state-dtype", "bf16,bf16", "--buffer-len", "8", "--batch", "4,4,1", "--store", str(tmp_path / "s"),
    )  # fmt: skip
    assert code == 0
    assert "replicated 2x" in err
    job = tuner.calls[0][1]
    assert job.store == tmp_path / "s"
    assert {work.spec for work in job.work} == {
        Spec("mamba2", "step", 128, 256, 16, 8, state_dtype="bf16"),
        Spec("mamba2", "step", 128, 256, 8, 8, state_dtype="bf16"),
        Spec("mamba2", "step", 64, 256, 16, 8, state_dtype="bf16"),
        Spec("mamba2", "step", 64, 256, 8, 8, state_dtype="bf16"),
    }
    assert {work.effective_batches for work in job.work} == {(32, 128), (8, 32)}


def test_layers_of_gdn_by_name_and_by_shape(call, tuner):
    shape = ("--heads", "64", "--head-dim", "128", "--state-size", "128", "--groups", "16")
    common = ("--tp", "1,8", "--state-dtype", "fp32", "--batch", "2")
    for layer in (("--model", "qwen3.5-122b-a10b"), ("--family", "gdn", *shape)):
        assert call("plan", "--gpu", "H200", *layer, *common)[0] == 0
    named, shaped = (job.work for _, job in tuner.calls)
    assert named[0].spec == Spec("gdn", "step", 128, 128, 4, 16, has_d=False, qk_l2norm=True)
    assert [(w.spec, w.effective_batches) for w in named] == [(w.spec, w.effective_batches) for w in shaped]
    assert named[0].effective_batches == (16, 128)
    assert shaped[0].layers == ("gdn 64x128x128 tp1", "gdn 64x128x128 tp8")


@pytest.mark.parametrize("verb", ["tune", "plan", "bench"])
def test_rings_of_another_dtype_are_asked_for(call, tuner, present, verb):
    present("H200")
    given = ("--model", "qwen3.5-4b", "--tp", "1", "--state-dtype", "fp32", "--batch", "2")
    assert call(verb, *given)[0] == 0
    assert call(verb, *given, "--ring-dtype", "FP32")[0] == 0
    assert call(verb, *given, "--ring-dtype", "bf16,fp32,fp32")[0] == 0
    jobs = (given[0] if verb == "bench" else given for _, given in tuner.calls)
    default, wide, both = ([work.spec for work in job.work] for job in jobs)
    step = Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True)
    assert default == [step, step.materialize]
    step_of_wide = dataclasses.replace(step, ring_dtype="fp32")
    assert wide == [step_of_wide, step_of_wide.materialize]
    assert both == [step, step_of_wide, step.materialize, step_of_wide.materialize]


@pytest.mark.parametrize("verb", ["tune", "plan", "bench"])
def test_activations_of_another_dtype_are_asked_for(call, tuner, present, verb):
    present("H200")
    given = ("--model", "qwen3.5-4b", "--tp", "1", "--state-dtype", "fp32", "--batch", "2")
    assert call(verb, *given, "--activation-dtype", "FP16")[0] == 0
    assert call(verb, *given, "--activation-dtype", "bf16,fp16,bf16", "--ring-dtype", "fp32")[0] == 0
    half, both = (given[0] if verb == "bench" else given for _, given in tuner.calls)
    step = Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True)
    of_half = dataclasses.replace(step, activation_dtype="fp16", ring_dtype="fp16")
    assert [work.spec for work in half.work] == [of_half, of_half.materialize]
    assert [work.spec.key for work in half.convolutions] == ["conv-w4-t1-fp16-fp16-fp16"]
    step, of_half = (dataclasses.replace(spec, ring_dtype="fp32") for spec in (step, of_half))
    assert [work.spec for work in both.work] == [step, of_half, step.materialize]
    assert [work.spec.activation_dtype for work in both.convolutions] == ["bf16", "fp16"]


@pytest.mark.parametrize(
    ("activation", "ring"),
    [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")],
)
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_command_that_tunes_a_layer_does(call, tuner, present, activation, ring, drafts):
    present("H200")
    step = Spec(
        "gdn", "step", 64, 32, 2, 8, has_d=False, qk_l2norm=True, activation_dtype=activation,
        state_dtype="bf16", ring_dtype=ring,
    )  # fmt: skip
    if drafts:
        step = dataclasses.replace(step, op="verify", num_tokens=1 + drafts)
    program, *arguments = step.tune_command.split()
    assert program == "replayssm-tune"
    assert call(*arguments)[0] == 0
    assert [work.spec for work in tuner.calls[-1][1].work] == [step, step.materialize]
    assert call(*step.materialize.tune_command.split()[1:])[0] == 0
    assert step.materialize in [work.spec for work in tuner.calls[-1][1].work]


def test_cells_without_a_row_are_explained_with_the_command_that_tunes_them(call, tmp_path):
    save(samples.table(samples.measured_row(128), gpu=targets.find("H200").info), tmp_path / "h200.json")
    layer = ("--model", "nemotron-3-super-120b-a12b", "--tp", "1", "--state-dtype", "fp32")
    given = ("table", "explain", str(tmp_path), "--gpu", "H200", *layer)
    wide = dataclasses.replace(samples.SPEC, ring_dtype="fp32").tune_command
    assert "--ring-dtype fp32" in wide
    for batches in ("1", "1,64"):
        out = call(*given, "--batch", batches, "--ring-dtype", "fp32")[1]
        assert out.count(f"where no table has a row: {wide} --gpu H200\n") == 1
    assert "where no table has a row" not in call(*given, "--batch", "1")[1]
    out = call(*given, "--batch", "1,64")[1]
    assert out.count(f"where no table has a row: {samples.SPEC.tune_command} --gpu H200\n") == 1
    half = dataclasses.replace(samples.SPEC, activation_dtype="fp16", ring_dtype="fp16")
    assert "--activation-dtype fp16" in half.tune_command
    out = call(*given, "--batch", "1,64", "--activation-dtype", "fp16")[1]
    assert out.count(f"where no table has a row: {half.tune_command} --gpu H200\n") == 1
    assert "conv-w4-t1-fp16-fp16-fp16" in out


@pytest.mark.parametrize("verb", ["tune", "plan", "generate", "check"])
def test_json_is_one_document_and_the_only_thing_on_stdout(call, verb):
    arguments = (verb,) if verb in ("check", "generate") else (verb, "--gpu", "H100")
    code, out, err = call(*arguments, "--json")
    assert code == 0
    assert json.loads(out)
    assert "1/2" in err


def test_a_person_gets_a_report(call):
    _, out, _ = call("--gpu", "H100")
    assert "of roof" in out
    assert "dispatch serves" in out
    assert "30 same binary" in out


def test_a_store_may_be_a_database(call, tuner):
    for location, store in (("sqlite:///x/s.db", "sqlite:///x/s.db"), ("x/s", Path("x/s"))):
        assert call("--gpu", "H100", "--store", location)[0] == 0
        assert tuner.calls[-1][1].store == store
    assert call("--gpu", "H100", "--store", "")[0] == 2


def test_missing_cells_end_with_their_own_code_after_the_result(call, tuner):
    tuner.tuned = samples.tuned(missing=("cell@1", "cell@2"))
    code, out, err = call("--gpu", "H100", "--json")
    assert code == 7
    assert json.loads(out)["missing"] == ["cell@1", "cell@2"]
    assert "2 cells have no row" in err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            GateError("wrong", where="row 1", hint="report it"),
            5,
            ["error: wrong", "row 1", "hint: report it"],
        ),
        (StoreError("the store belongs to an H200", hint="name another --store"), 8, ["belongs to an H200"]),
        (OSError(28, "No space left on device", "x/store"), 8, ["No space left", "x/store", "--store"]),
        (KeyboardInterrupt(), 130, ["interrupted", "the same command resumes"]),
        (
            InterruptedTune(4, Path("x/h200.json")),
            130,
            ["the 4 rows that were whole", "x/h200.json", "resumes"],
        ),
        (ModuleNotFoundError("No module named 'triton'", name="triton"), 10, ["triton is not installed"]),
        (ZeroDivisionError("division by zero"), 1, ["internal: ZeroDivisionError", "--debug"]),
    ],
)
def test_whatever_goes_wrong_is_a_message_and_a_code(call, tuner, error, code, words):
    tuner.error = error
    ended, out, err = call("--gpu", "H100")
    assert ended == code
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_check_hands_over_folders_and_ends_as_its_worst_finding(call, tuner):
    assert call("check", "a", "b")[0] == 0
    assert tuner.calls[0] == ("check", (Path("a"), Path("b")))
    tuner.checked = Checked({"rows": 2}, (Finding("compile", "row 1", "no such instruction"),))
    code, out, _ = call("check")
    assert code == 10
    assert "FAILED compile: row 1" in out


def test_a_check_is_also_written_for_machines_and_pages(call, tuner, tmp_path):
    tuner.checked = Checked({"rows": 2}, (Finding("compile", "row 1", "no such instruction"),))
    junit, page = tmp_path / "out" / "check.xml", tmp_path / "out" / "check.md"
    code, out, _ = call("check", "--junit", str(junit), "--markdown", str(page), "--json")
    assert code == 10
    assert json.loads(out)["exit"] == "TOOLCHAIN"
    assert ElementTree.parse(junit).getroot().get("failures") == "1"
    assert "no such instruction" in page.read_text()
    (tmp_path / "file").touch()
    code, out, err = call("check", "--junit", str(tmp_path / "file" / "check.xml"))
    assert code == 8
    assert "FAILED compile" in out
    assert "cannot write" in err


def test_generate_takes_a_folder_and_needs_no_gpu(call, tuner, tmp_path):
    assert call("generate")[0] == 0
    code, out, _ = call("generate", "--output", str(tmp_path))
    assert code == 0
    assert "wrote a.py" in out
    assert tuner.calls == [("generate", None), ("generate", tmp_path)]


def test_bench_needs_the_gpu(call, tuner, present, tmp_path):
    assert call("bench", "--gpu", "H200")[0] == 4
    assert tuner.calls == []
    present("H200")
    assert call("bench", "--results", str(tmp_path))[0] == 0
    job, results = tuner.calls[0][1]
    assert job.target.measured
    assert results == tmp_path


def test_tables_are_shown_and_explained(call, tuner, tmp_path):
    gpu = targets.find("H200").info
    path = tmp_path / "h200.json"
    save(samples.table(samples.measured_row(128), samples.measured_row(32768), gpu=gpu), path)
    code, out, _ = call("table", "show", str(path), "--json")
    assert code == 0
    assert json.loads(out)["tables"][0]["gpu"] == "H200"
    assert call("table", "show", str(path), "--gpu", "B200")[0] == 9
    code, out, _ = call("table", "show", str(path), "--model", "nemotron-3-super-120b-a12b", "--json")
    assert (code, len(json.loads(out)["tables"][0]["specs"])) == (0, 1)
    assert call("table", "show", str(path), "--model", "qwen3.5-4b")[0] == 9
    assert call("table", "show", str(path), "--model", "qwen")[0] == 2
    code, out, _ = call(
        "table", "explain", str(path), "--gpu", "H100", "--model", "nemotron-3-super-120b-a12b", "--tp", "1",
        "--state-dtype", "fp32", "--batch", "1",
    )  # fmt: skip
    assert code == 0
    assert "measured on H200" in out
    assert tuner.calls == []


def test_names_are_shown_as_they_are_and_not_as_markup(call, tmp_path):
    strange = "H200 [/bold] [red]x :smile:"
    path = tmp_path / "h200.json"
    gpu = dataclasses.replace(targets.find("H200").info, name=strange)
    save(samples.table(samples.measured_row(128), gpu=gpu), path)
    for words in (("show",), ("explain", "--gpu", "H200", "--batch", "1", "--tp", "1")):
        code, out, _ = call("table", *words, str(path))
        assert code == 0
        assert strange in out


def test_the_whole_chain_is_explained_for_the_users_and_the_packaged_tables(call, tmp_path, monkeypatch):
    layer = ("--gpu", "H100", "--model", "nemotron-3-super-120b-a12b", "--tp", "1", "--state-dtype", "fp32")
    shipped = samples.table(
        samples.measured_row(128),
        samples.measured_row(4096),
        samples.static_row(2048),
        gpu=targets.find("H200").info,
    )
    monkeypatch.setattr("replayssm_tune.tuner.tables.shipped_tables", lambda strict: (shipped,))
    old = samples.measured_row(128, module_digests=("a" * 16, "b" * 16))
    save(samples.table(old, gpu=targets.find("H100").info), tmp_path / "mine.json")
    monkeypatch.setenv("REPLAYSSM_TABLE_DIR", str(tmp_path))
    code, out, _ = call("table", "explain", *layer, "--batch", "1,32", "--chain")
    assert code == 0
    lines = out.splitlines()
    assert "user's table for H100 SXM: 1 rows, measured" in lines
    assert "package's table for H200: 3 rows, measured, 1 of them static" in lines
    steps = [line.split()[0].rstrip(":") for line in lines if line.startswith("    ")]
    serving = [line for line in lines if line.startswith("  * ")]
    assert [line.split()[1] for line in serving] == ["user", "sister"]
    assert set(steps) | {"user", "sister"} == set(STEPS)
    assert "stale: its kernel has changed since" in out
    assert "user's table: H100 SXM" in out
    unwrapped = " ".join(out.split())
    assert "passed over: effective batch 4096 is beyond the reach of its end row" in unwrapped
    assert "not needed: an earlier step serves" in unwrapped
    assert "--chain" not in out


def test_cells_are_explained_in_a_line_each(call, tmp_path):
    layer = ("--gpu", "H100", "--model", "nemotron-3-super-120b-a12b", "--tp", "1", "--state-dtype", "fp32")
    table = samples.table(
        samples.measured_row(128), samples.measured_row(1024), gpu=targets.find("H200").info
    )
    save(table, tmp_path / "h200.json")
    code, out, _ = call("table", "explain", str(tmp_path), *layer)
    assert code == 0
    cells = json.loads(call("table", "explain", str(tmp_path), *layer, "--json")[1])["cells"]
    lines = [line.split() for line in out.splitlines() if line[:8].strip().isdigit()]
    assert [int(line[0]) for line in lines] == [cell["effective_batch"] for cell in cells]
    by_batch = {line[0]: " ".join(line) for line in lines}
    plan = report.short(samples.TWO_LAUNCHES)
    assert by_batch["128"].startswith(f"128 {plan} measured on H200, of the same capability")
    assert "row of batch" not in by_batch["128"]
    assert by_batch["192"].endswith("; row of batch 128")
    assert by_batch["65536"].endswith("no table has a row: computed default plan")
    assert "  * " not in out
    assert "--chain" in out.splitlines()[-1]
    # With the flag, and for a single cell, the places are shown.
    assert call("table", "explain", str(tmp_path), *layer, "--chain")[1].count("  * ") == len(cells)
    assert call("table", "explain", str(tmp_path), *layer, "--batch", "1")[1].count("  * ") == 1
