"""Whole tunes without a GPU: jobs, a small space, and a bench that stands in for the real one."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import pytest

from replayssm_tune.codegen import space, targets
from replayssm_tune.runtime.plan import Plan, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner import models, run
from replayssm_tune.tuner.gate import Verdict
from replayssm_tune.tuner.records import Cell, Environment, Timing
from replayssm_tune.tuner.request import Budget, Job, Target, materializing, resolve_work

GPU = targets.find("H200")
HERE = Environment("NVIDIA H200", (9, 0), 132, "3.9.0", "2.13.0", "580.1")


class FakeGpu:
    """Stands in for :class:`GpuBench`: early kernels win small batches, others large ones."""

    environment = HERE
    company = 0
    asked: list[tuple[str, Cell, str]]
    wrong: frozenset[str] = frozenset()
    interrupt_after: int | None = None

    def __init__(self, *paths: Path) -> None:
        del paths
        self.noise = random.Random(1)
        type(self).asked = []

    def __enter__(self) -> FakeGpu:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gate(self, spec: Spec, plan: Plan) -> Verdict:
        del spec
        wrong = any(v.key in self.wrong for v in plan.variants)
        return Verdict("output error 1 exceeds 0.1" if wrong else "")

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        self.asked.append((mode, cell, "+".join(v.key for v in variants)))
        if self.interrupt_after is not None and len(self.asked) > self.interrupt_after:
            raise KeyboardInterrupt
        time_us = 3.0 + 0.01 * cell.effective_batch * (2 if mode in ("flush", "native", "materialize") else 1)
        for variant in variants:
            early = variant.structure.load == "early"
            time_us += 1.0 + (0.005 * cell.effective_batch if early else 0.6)
        return Timing(tuple(time_us * self.noise.uniform(0.999, 1.001) for _ in range(repeats)))

    def roof(self, cell: Cell, kind: str, repeats: int) -> Timing:
        time_us = 1.0 + 0.008 * cell.effective_batch * (2 if kind == "scale" else 1)
        return Timing((time_us,) * repeats)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of compiled kernels for all tests of a process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> type[FakeGpu]:
    """A small space and a fake bench, in place of the real ones."""
    everything = space.points

    @functools.cache
    def few(spec: Spec, role: str) -> space.Space:
        points = everything(spec, role)
        late = [v for v in points.variants if v.structure.load == "late"][:2]
        early = [v for v in points.variants if v.structure.load == "early"][:1]
        return dataclasses.replace(points, variants=tuple(dict.fromkeys((*late, *early))))

    bench = type("Bench", (FakeGpu,), {})
    monkeypatch.setattr(space, "points", few)
    monkeypatch.setattr(run, "GpuBench", bench)
    monkeypatch.setattr(run, "check_toolchain", lambda launching=False: "")
    monkeypatch.setattr(run, "cache_folder", lambda store: compiled)
    return bench


def job(
    folder: Path,
    batches: tuple[int, ...] = (1, 64),
    budget: Budget | None = None,
    drafts: int = 0,
    rings: tuple[str, ...] = (),
    activations: tuple[str, ...] = (),
) -> Job:
    work, _ = resolve_work(
        [models.find("nemotron-3-super-120b-a12b")],
        GPU,
        tensor_parallel=(8,),
        activation_dtypes=activations,
        state_dtypes=("fp32",),
        ring_dtypes=rings,
        drafts=(drafts,),
        batches=batches,
    )
    target = Target(GPU, True, "measuring on NVIDIA H200")
    return Job(target, work, budget or Budget(), folder / "store", folder / "generated")


def with_materializing(here: Job) -> tuple[Job, Spec]:
    """The job as the command line makes it, and the spec of what materialises its states."""
    (folds,) = materializing(here.work, GPU)
    return dataclasses.replace(here, work=(*here.work, folds)), folds.spec
