"""What the worker's answers say, without a GPU: a worker of our own behind the same pipe."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.tuner import gpu_worker
from replayssm_tune.tuner.gpu_bench import GpuBench
from replayssm_tune.tuner.records import Cell, Environment, Timing
from tests.specs import P64 as SPEC
from tests.tuner.tunes import HERE


class Worker:
    """Others come to its GPU while it times, and leave."""

    def __init__(self, modules: Path) -> None:
        del modules
        self._others = 0

    def company(self) -> int:
        return self._others

    def environment(self) -> Environment:
        return HERE

    def time(self, cell: Cell, variants: Any, mode: str, repeats: int) -> Timing:
        del variants, repeats
        self._others = cell.effective_batch
        if mode == "flush":
            raise ValueError("out of luck")
        return Timing((1.0,))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[GpuBench]:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr(gpu_worker, "GpuWorker", Worker)
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=gpu_worker.serve, args=(theirs, tmp_path, tmp_path))
    thread.start()
    monkeypatch.setattr(GpuBench, "_start", lambda self: setattr(self, "_pipe", ours))
    with GpuBench(tmp_path, tmp_path) as bench:
        yield bench
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_most_other_processes_seen_are_remembered(bench: GpuBench) -> None:
    variants = default_plan(SPEC).variants
    assert (bench.environment, bench.company) == (HERE, 0)
    for batch in (1, 3, 2):
        assert bench.time(Cell(SPEC, batch), variants, "mix", 1) == Timing((1.0,))
    assert bench.company == 3


def test_an_error_of_the_worker_is_a_failed_timing(bench: GpuBench) -> None:
    timing = bench.time(Cell(SPEC, 1), default_plan(SPEC).variants, "flush", 1)
    assert timing.status == "crash"
    assert timing.reason == "ValueError: out of luck"
