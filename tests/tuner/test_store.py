from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_tune.runtime.plan import STRUCTURE_VALUES
from replayssm_tune.tuner import store as store_module
from replayssm_tune.tuner.errors import StoreError
from replayssm_tune.tuner.records import Cell, Measurement, axes, parse_subject, subject_key
from replayssm_tune.tuner.store import Store
from tests.tuner.fake_bench import GPU, SPEC, default, variants

CELL = Cell(SPEC, 128)
POINT = Measurement(CELL, "nonflush", default("nonflush").key, (2.0, 1.0, 3.0))


def test_a_measurement_survives_reopening(tmp_path: Path) -> None:
    failed = Measurement(CELL, "mix", "roof.read", status="crash", reason="illegal memory access")
    raced = dataclasses.replace(POINT, tag="race0.1", samples_us=(9.0,))
    with Store(tmp_path / "store.journal", GPU) as store:
        stamped = [store.add(m) for m in (POINT, failed, raced)]
    assert all(m.environment == GPU.id for m in stamped)
    again = Store(tmp_path / "store.journal", GPU)
    assert again.measurements() == [POINT_ := stamped[0], stamped[2], stamped[1]]
    assert POINT_.time_us == 2.0
    assert again.find(CELL, "nonflush", POINT.subject) == stamped[0]
    assert again.find(CELL, "nonflush", POINT.subject, tag="race0.1") == stamped[2]
    assert again.find(CELL, "mix", "roof.read") == stamped[1]
    assert again.find(CELL, "mix", POINT.subject) is None
    assert again.find(CELL, "nonflush", POINT.subject, digest="changed") is None


@pytest.mark.parametrize("location", ["{}/a/b/store.journal", "sqlite:///{}/store.db"])
def test_trials_are_useful_to_a_dashboard(tmp_path: Path, location: str) -> None:
    location = location.format(tmp_path)
    store = Store(location, GPU)
    store.add(POINT)
    store.add(Measurement(CELL, "nonflush", variants("nonflush")[3].key, status="gate", reason="1e-2"))
    assert len(Store(location, GPU).measurements()) == 2
    study = optuna.load_study(
        study_name=f"replayssm2|{CELL.key}|nonflush",
        storage=location if "://" in location else store._storage,
    )
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL"]
    assert study.best_trial.value == 2.0
    assert study.best_trial.params == axes((default("nonflush"),))
    assert study.trials[1].user_attrs["reason"] == "1e-2"


def test_another_environment_remembers_nothing_but_keeps_everything(tmp_path: Path) -> None:
    Store(tmp_path / "s", GPU).add(POINT)
    newer = Store(tmp_path / "s", dataclasses.replace(GPU, triton="3.10.0"))
    assert newer.find(CELL, "nonflush", POINT.subject) is None
    assert len(newer.measurements(every_environment=True)) == 1
    assert len(newer.environments) == 2
    assert Store(tmp_path / "s", GPU).find(CELL, "nonflush", POINT.subject) is not None


@pytest.mark.parametrize(
    "change", [{"gpu": "NVIDIA Other"}, {"sm_count": 114}, {"capability": (10, 0)}], ids=str
)
def test_another_gpu_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    Store(tmp_path / "s", GPU)
    other = dataclasses.replace(GPU, **change)
    with pytest.raises(StoreError, match="choose another store") as error:
        Store(tmp_path / "s", other)
    assert GPU.device in str(error.value)
    assert other.device in str(error.value)


@given(tail=st.binary(min_size=1, max_size=80).map(lambda b: b.replace(b"\n", b"")))
@settings(deadline=None, max_examples=20)
def test_a_torn_last_line_is_cut(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.mktemp("torn") / "s"
    Store(path, GPU).add(POINT)
    with path.open("ab") as file:
        file.write(tail)
    for sample in (5.0, 6.0):
        store = Store(path, GPU)
        assert store.find(CELL, "nonflush", POINT.subject) is not None
        store.add(dataclasses.replace(POINT, mode="mix", tag=str(sample), samples_us=(sample,)))
    assert len(Store(path, GPU).measurements()) == 3
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_every_truncation_of_the_file_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store(path, GPU) as store:
        for i in range(3):
            store.add(dataclasses.replace(POINT, tag=str(i)))
    whole = path.read_bytes()
    for size in random.Random(0).sample(range(len(whole)), 40):
        path.write_bytes(whole[:size])
        store = Store(path, GPU)
        complete = [line for line in whole[:size].split(b"\n")[:-1] if b'"tag"' in line]
        assert len(store.measurements()) == len(complete)
        store.add(dataclasses.replace(POINT, tag="new"))
        assert len(Store(path, GPU).measurements()) == len(complete) + 1


@pytest.mark.parametrize(
    "garbage",
    [b"{]\n", b"[1]\n", b'{"op_code": 99, "worker_id": ""}\n', b'{"a": 1}\n', b"[" * 100_000 + b"\n"],
    ids=["torn", "list", "code", "field", "nested"],
)
def test_a_damaged_line_is_named(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "s"
    Store(path, GPU).add(POINT)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], garbage, *lines[1:]]))
    with pytest.raises(StoreError, match="remove that line") as error:
        Store(path, GPU)
    assert str(path) in str(error.value)
    assert "line 2" in str(error.value) or b"99" in garbage


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = Store(path, GPU)
    store.add(POINT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
        with pytest.raises(StoreError, match="make room"):
            store.add(dataclasses.replace(POINT, tag="1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes().endswith(b"\n")
    store.add(dataclasses.replace(POINT, tag="2"))
    assert {m.tag for m in Store(path, GPU).measurements()} == {"", "2"}


def test_a_read_only_place_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="writable place"):
            Store(tmp_path / "s", GPU)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="choose another place"):
        Store(tmp_path / "file" / "s", GPU)


def test_a_bad_url_is_refused_without_its_password() -> None:
    with pytest.raises(StoreError, match="check the URL") as error:
        Store("nosuchdb://user:secret@host/db", GPU)
    assert "user:secret" not in str(error.value).split("(")[0]


def test_another_process_is_seen_after_refresh(tmp_path: Path) -> None:
    one, two = Store(tmp_path / "s", GPU), Store(tmp_path / "s", GPU)
    two.add(POINT)
    assert one.find(CELL, "nonflush", POINT.subject) is None
    assert one.refresh() == 1
    assert one.find(CELL, "nonflush", POINT.subject) is not None
    one.add(dataclasses.replace(POINT, tag="1"))
    assert two.refresh() == 1
    assert one.refresh() == 0


def test_unlisted_values_do_not_stop_a_store(tmp_path: Path) -> None:
    point = default("flush")
    odd = dataclasses.replace(point, tile=dataclasses.replace(point.tile, heads_per_program=3))
    store = Store(tmp_path / "s", GPU)
    store.add(Measurement(CELL, "flush", odd.key, (1.0,)))
    assert Store(tmp_path / "s", GPU).find(CELL, "flush", odd.key) is not None


def test_subjects_round_trip() -> None:
    for pair in itertools.pairwise(variants("nonflush")[:5]):
        assert parse_subject(subject_key(pair)) == pair


TUNE = """
import sys
sys.path[:0] = [sys.argv[2]]
from tests.tuner.fake_bench import *
from replayssm_tune.tuner.meter import Meter
from replayssm_tune.tuner.search import Space, search
from replayssm_tune.tuner.store import Store
with Store(sys.argv[1], GPU) as store:
    bench = FakeBench(noise=0.0, drift=0.0)
    meter = Meter(bench, store, progress=lambda event: print(event.done, flush=True))
    search(Space(SPEC, variants("nonflush"), default("nonflush")), (16, 64, 256, 1024, 4096), meter)
print("measured", meter.measured, len(store.measurements()))
"""


def test_kill_9_at_random_moments_then_resume(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-c", TUNE, str(path), str(Path(__file__).parent)]
    chance = random.Random(3)
    reported = 0
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            goal = reported + chance.randrange(5, 60)
            for line in process.stdout:
                reported = max(reported, int(line))
                if reported >= goal:
                    process.send_signal(signal.SIGKILL)
                    break
        stored = len(Store(path, GPU).measurements())
        assert stored >= reported, "a reported measurement was lost"
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured, total = map(int, result.stdout.split()[-2:])
    assert measured == total - stored

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    subjects = [(log["study_id"], log["user_attrs"]["subject"]) for log in lines if "user_attrs" in log]
    assert len(subjects) == len(set(subjects)) == total, "a point was measured twice"
    fresh = Store(tmp_path / "fresh", GPU)
    subprocess.run([*command[:3], str(tmp_path / "fresh"), command[4]], capture_output=True, check=True)
    fresh.refresh()
    assert set(fresh.measurements()) == set(Store(path, GPU).measurements())


def test_the_dashboard_knows_every_structural_value() -> None:
    for name, values in STRUCTURE_VALUES.items():
        if name != "role":
            assert {*values} <= {*store_module._CHOICES[name]}, name
