"""Driving a trajectory through the public ops on a poisoned pool, checking memory at every launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replayssm_tune.codegen.render import render
from replayssm_tune.runtime import modules, ops
from replayssm_tune.runtime.compiled import ModuleSource
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Step, Trajectory, relative_rms


@dataclass
class Errors:
    """Relative RMS errors against fp64 over a whole trajectory, and of each launch that stored states."""

    y: float
    ideal_y: float
    state: float
    ideal_state: float
    state_by_launch: list[float]
    outputs: Tensor
    expected: Tensor


def make_spec(op: str = "step", **changes: object) -> Spec:
    fields: dict[str, Any] = {"head_dim": 8, "state_size": 16, "heads_per_group": 2, "window": 4}
    fields |= {"activation_dtype": "fp32", "ring_dtype": "fp32"} | changes
    spec = Spec("mamba2", "step", **fields)
    return spec.native if op == "native_step" else spec


def launch(trajectory: Trajectory, pool: Pool, step: Step, out: Tensor | None = None) -> Tensor:
    arguments = (step.x, step.dt, trajectory.A, step.B, step.C)
    options = {
        "D": trajectory.D,
        "z": step.z,
        "dt_bias": trajectory.dt_bias,
        "dt_softplus": trajectory.spec.dt_softplus,
        "null_slot": trajectory.null_slot,
        "out": out,
        "state": pool.state,
        "slot_index": step.slot_index,
    }
    if trajectory.spec.op == "native_step":
        return ops.mamba2_native_step(*arguments, **options)  # type: ignore[arg-type]
    return ops.mamba2_step(
        *arguments,
        **options,  # type: ignore[arg-type]
        ring_x=pool.ring_x,
        ring_b=pool.ring_b,
        ring_decay=pool.ring_decay,
        ring_start=pool.ring_start,
        ring_len=pool.ring_len,
        window=trajectory.spec.window,
    )


def commit(trajectory: Trajectory, pool: Pool, step: Step) -> None:
    if trajectory.spec.op == "step":
        ops.commit(
            step.accepted,
            ring_start=pool.ring_start,
            ring_len=pool.ring_len,
            slot_index=step.slot_index,
            window=trajectory.spec.window,
            capacity=pool.capacity,
            null_slot=trajectory.null_slot,
        )


def run(trajectory: Trajectory, pool: Pool | None = None) -> Errors:
    pool = trajectory.pool() if pool is None else pool
    collected: list[tuple[Tensor, ...]] = []
    by_launch = []
    for step in trajectory:
        before = pool.storage.clone()
        start, length = pool.ring_start.clone(), pool.ring_len.clone()
        out = torch.full_like(step.x, float("nan"))
        launch(trajectory, pool, step, out)

        padded = torch.ones(trajectory.rows, dtype=torch.bool, device=out.device)
        padded[step.live] = False
        assert torch.equal(out[padded], torch.zeros_like(out[padded]))
        changed = pool.storage != before
        assert not (changed & ~pool.writable(step.slots, step.stores, step.append)).any()
        assert torch.equal(pool.ring_start, start)
        assert torch.equal(pool.ring_len, length)
        if pool.capacity:
            x, B = step.x[step.live], step.B[step.live]
            assert torch.equal(pool.ring_x[step.slots, :, step.append], x.to(pool.ring_x.dtype))
            assert torch.equal(pool.ring_b[step.slots, :, step.append], B.to(pool.ring_b.dtype))
            delta = pool.ring_decay[step.slots, :, step.append].double()
            torch.testing.assert_close(delta, step.delta, rtol=1e-6, atol=1e-30)
        commit(trajectory, pool, step)
        stored = pool.state[step.slots[step.stores]].double()
        if len(stored):
            by_launch.append(relative_rms(stored, step.stored))
        y = out[step.live].double()
        collected.append((y, step.y, step.ideal_y, stored, step.stored, step.ideal_stored))
    y, expected, ideal_y, state, stored, ideal_stored = (
        torch.cat(part) for part in zip(*collected, strict=True)
    )
    return Errors(
        y=relative_rms(y, expected),
        ideal_y=relative_rms(ideal_y, expected),
        state=relative_rms(state, stored),
        ideal_state=relative_rms(ideal_stored, stored),
        state_by_launch=by_launch,
        outputs=y,
        expected=expected,
    )


def passes_gate(errors: Errors) -> bool:
    return (
        bool(errors.outputs.isfinite().all())
        and errors.y <= 1.25 * errors.ideal_y + 1e-5
        and errors.state <= 1.25 * errors.ideal_state + 1e-5
    )


@dataclass(frozen=True)
class Driver:
    """What the tests of this folder share."""

    make_spec: Callable[..., Spec] = make_spec
    launch: Callable[..., Tensor] = launch
    commit: Callable[..., None] = commit
    run: Callable[..., Errors] = run
    passes_gate: Callable[[Errors], bool] = passes_gate


@pytest.fixture(scope="session")
def driver() -> Driver:
    torch.set_num_threads(1)
    return Driver()


@pytest.fixture(params=["step", "native_step"])
def op(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """What runs on both devices: the eager reference on one, kernels on the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def module_source(tmp_path_factory: pytest.TempPathFactory) -> ModuleSource:
    """Renders any module into a folder of this session."""
    folder = tmp_path_factory.mktemp("kernels")

    def find(spec: Spec, structure: Structure) -> Path:
        path = folder / f"{modules.module_name(spec, structure)}.py"
        if not path.exists():
            path.write_text(render(spec, structure), encoding="utf-8")
        return path

    return find


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch, module_source: ModuleSource) -> None:
    """The public ops find modules of any spec, as where the tool is installed."""

    def find(key: str, names: tuple[str, ...]) -> Path:
        del names
        spec, _, structure = key.partition("/")
        return module_source(Spec.parse(spec), Structure(*structure.split(".")))

    monkeypatch.setattr(modules, "_renderer", lambda: find)
