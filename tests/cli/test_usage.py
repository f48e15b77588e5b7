"""Bad input through the installed command: each kind its own message and exit code, and no torch."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "replayssm_tune.tuner.cli"]


def run(*arguments, cwd=None, **environment):
    """The command in a process of its own, without any GPU."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, env=variables, timeout=60
    )


SHAPE = ("--head-dim", "64", "--state-size", "128")

BAD_INPUT = {
    "unknown gpu": (("--gpu", "H1000"), 2, "'H1000' is not known", "H100"),
    "unknown model": (
        ("--gpu", "H100", "--model", "nemotron-3-nano"), 2,
        "unknown model 'nemotron-3-nano'", "did you mean nemotron-3-nano-4b",
    ),
    "no gpu": ((), 4, "no GPU found", "--gpu H100"),
    "heads and groups": (
        ("--gpu", "H100", "--heads", "100", "--groups", "8", *SHAPE), 2,
        "100 heads are not divisible by 8 groups", "--groups",
    ),
    "heads and tp": (
        ("--gpu", "H100", "--model", "nemotron-3-nano-4b", "--tp", "5"), 2,
        "96 heads are not divisible by 5 GPUs", "--tp",
    ),
    "no heads": (("--gpu", "H100", "--heads", "0", *SHAPE), 2, "0 heads", "positive"),
    "window 0": (("--gpu", "H100", "--buffer-len", "0"), 2, "window 0 is outside 1..64", "buffer length"),
    "window 65": (("--gpu", "H100", "--buffer-len", "65"), 2, "window 65 is outside 1..64", "buffer length"),
    "drafts beyond the window": (
        ("--gpu", "H100", "--buffer-len", "4", "--drafts", "4"), 2,
        "beyond the window of 4", "fewer drafts",
    ),
    "head dim": (
        ("--gpu", "H100", "--heads", "8", "--head-dim", "512", "--state-size", "128"), 2,
        "head_dim 512 is outside 1..256", "not supported",
    ),
    "half a shape": (("--gpu", "H100", "--heads", "8"), 2, "--head-dim, --state-size missing", "--model"),
    "groups alone": (
        ("--gpu", "H100", "--groups", "8"), 2, "--heads, --head-dim, --state-size missing", "of --groups",
    ),
    "family without heads": (
        ("--gpu", "H100", "--family", "gdn", *SHAPE), 2, "incomplete: --heads missing", "add --heads, or",
    ),
    "shape beside a model": (
        ("--gpu", "H100", "--model", "nemotron-3-nano-4b", "--heads", "8", *SHAPE), 2,
        "--heads, --head-dim, --state-size beside --model", "leave out --heads, --head-dim, --state-size;",
    ),
    "part of a shape beside a model": (
        ("table", "explain", "--gpu", "H100", "--model", "nemotron-3-nano-4b", "--groups", "8"), 2,
        "--groups beside --model", "leave out --model",
    ),
    "shape beside a config": (
        ("plan", "--gpu", "H100", "--hf-config", "absent.json", "--head-dim", "64"), 2,
        "--head-dim beside --hf-config", "leave out --hf-config",
    ),
    "unknown family": (("--gpu", "H100", "--family", "kda"), 2, "'kda' is not one of", "--help"),
    "key heads": (
        ("--gpu", "H100", "--family", "gdn", "--heads", "30", "--groups", "16", *SHAPE), 2,
        "30 value heads are not divisible by 16 key heads", "--groups",
    ),
    "hf config": (("--gpu", "H100", "--hf-config", "absent.json"), 2, "No such file", "config.json"),
    "list": (("--gpu", "H100", "--batch", "1;2"), 2, "not a list of integers", "--help"),
    "negative batch": (("--gpu", "H100", "--batch", "-1"), 2, "-1 is below 1", "--help"),
    "dtype": (("--gpu", "H100", "--state-dtype", "fp8"), 2, "'fp8' is not one of", "--help"),
    "activation dtype": (
        ("--gpu", "H100", "--activation-dtype", "fp8"), 2, "'fp8' is not one of fp32, bf16, fp16", "--help",
    ),
    "ring dtype": (("--gpu", "H100", "--ring-dtype", "fp8"), 2, "'fp8' is not one of fp32, bf16", "--help"),
    "ring of other activations": (
        ("--gpu", "H100", "--ring-dtype", "fp16"), 2, "rings of fp16 do not go with activations of bf16",
        "without --ring-dtype it has the first",
    ),
    "budget": (("--gpu", "H100", "--budget", "soon"), 2, "'soon' is not a budget", "trials"),
    "batch beyond memory": (
        ("--gpu", "H100", "--batch", "9999999", "--tp", "1"), 2, "do not fit", "smaller batch",
    ),
    "unknown verb": (("tunee",), 2, "did you mean tune", "--help"),
    "verb after options": (("--gpu", "H100", "plan"), 2, "the verb comes first", "--help"),
    "unknown option": (("plan", "--gpus", "H100"), 2, "--gpus", "plan --help"),
    "bench without a gpu": (("bench", "--gpu", "H100"), 4, "no GPU is here", "plan"),
    "empty path": (
        ("--gpu", "H100", "--output", ""), 2, "'--output': an empty path names nothing", "--help",
    ),
    "empty argument": (("check", ""), 2, "'[FOLDER]...': an empty path names nothing", "--help"),
    "table that is not there": (
        ("table", "show", "absent.json"), 9, "cannot read the table", "check the path",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_INPUT)
def test_bad_input(kind, tmp_path):
    arguments, code, what, hint = BAD_INPUT[kind]
    ended = run(*arguments, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert what in lines[0]
    assert lines[-1].startswith("hint: ")
    assert hint in lines[-1]
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_bad_input_has_a_message_of_its_own():
    messages = [what for _, _, what, _ in BAD_INPUT.values()]
    assert len(set(messages)) == len(messages)


def test_table_of_an_unknown_schema(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"schema_version": 99, "rows": []}))
    ended = run("table", "show", str(path))
    assert ended.returncode == 9
    assert "99" in ended.stderr
    assert str(path) in ended.stderr


def test_debug_shows_the_traceback_and_the_message():
    ended = run("--gpu", "H1000", "--debug")
    assert ended.returncode == 2
    assert "Traceback" in ended.stderr
    assert "error: " in ended.stderr


def test_help_and_version_need_nothing():
    for arguments in (("--help",), ("tune", "--help"), ("table", "explain", "--help"), ("--version",)):
        ended = run(*arguments)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout
        assert ended.stderr == ""


def test_bench_without_a_gpu_does_not_advise_to_name_one():
    result = run("bench")
    assert result.returncode == 4
    assert "run it on the GPU's machine" in result.stderr
    assert "--gpu" not in result.stderr


def test_a_group_alone_shows_its_help():
    result = run("table")
    assert (result.returncode, result.stderr) == (0, "")
    assert "explain" in result.stdout


def test_usage_errors_do_not_wait_for_torch():
    probe = textwrap.dedent(
        """
        import sys
        from replayssm_tune.tuner.cli import main
        try:
            main(["--gpu", "H100", "--model", "nobody"])
        except SystemExit as end:
            assert end.code == 2, end.code
        heavy = {"torch", "triton", "optuna", "rich", "jinja2"} & set(sys.modules)
        assert not heavy, heavy
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [*COMMAND, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, env=environment, timeout=60
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_full_standard_output_is_told():
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with full.open("w") as stdout:
        for words in (("table", "show"), ("table", "show", "--json")):
            ended = subprocess.run(
                [*COMMAND, *words],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                timeout=60,
            )
            assert ended.returncode == 8
            assert "No space left" in ended.stderr
            assert "standard output" in ended.stderr


def test_a_closed_standard_output_or_a_poor_encoding_is_no_error():
    command = " ".join([*COMMAND, "table", "show"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for line in (f"{command} >&-", command):
        ended = subprocess.run(["sh", "-c", line], capture_output=True, env=environment, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()
    assert rb"\xb5s" in ended.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_with_its_code(number):
    program = (
        "import os, signal, sys, time\n"
        "from replayssm_tune.tuner.cli import main, plan\n"
        "def work(*_, **__):\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(30)\n"
        "plan.options.build_job = work\n"
        "main(['plan', '--gpu', 'H100'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == 130, ended.stderr
    assert "error: interrupted" in ended.stderr


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["plan", "--gpu", "H100"], 130)])
def test_a_signal_to_the_interpreter_that_goes_does_not_change_the_code(arguments, code):
    program = (
        "import os, signal, time\n"
        "from replayssm_tune.tuner.cli import main, plan\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):\n"
        "        kill(process, number)\n"
        "late = Late()\n"  # goes with this module, after signals do again what they do by default
        "def work(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(30)\n"
        "plan.options.build_job = work\n"
        f"main({arguments})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60
    )
    assert ended.returncode == code, ended.stderr


def test_a_check_that_is_terminated_leaves_no_temporary_files(tmp_path):
    """``timeout`` sends the signal twice: here when the pool is at work, and when the folder is removed."""
    program = (
        "import os, shutil, signal, time\n"
        "from replayssm_tune.codegen.pool import CompilePool\n"
        "from replayssm_tune.tuner.cli import main\n"
        "remove = shutil.rmtree\n"
        "def terminate():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "def work(pool, jobs):\n"
        "    (pool.cache_dir / 'file').touch()\n"
        "    terminate()\n"
        "    time.sleep(30)\n"
        "def removed(*arguments, **options):\n"
        "    terminate()\n"
        "    remove(*arguments, **options)\n"
        "CompilePool.run, shutil.rmtree = work, removed\n"
        "main(['check'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**environment, "TMPDIR": str(tmp_path)}, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 130, ended.stderr
    assert "error: interrupted" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["triton", "torch"])
@pytest.mark.parametrize("kind", ["ImportError", "ModuleNotFoundError"])
def test_a_missing_or_broken_library_is_of_the_toolchain(tmp_path, library, kind):
    (tmp_path / f"{library}.py").write_text(f"raise {kind}('cannot be had', name='{library}')\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    ended = subprocess.run(
        [*COMMAND, "plan", "--gpu", "H100", "--batch", "1"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 10, ended.stderr
    assert "internal" not in ended.stderr
    assert "install" in ended.stderr.splitlines()[-1]


def test_the_console_script_is_the_same_command():
    script = Path(sys.executable).with_name("replayssm-tune")
    if not script.exists():
        pytest.skip("the package is not installed into this environment")
    text = script.read_text(encoding="utf-8")
    assert "replayssm_tune.tuner.cli" in text
