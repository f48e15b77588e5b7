"""Driving a trajectory through the public ops on a poisoned pool, checking memory at every launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from replayssm_tune.codegen.render import render
from replayssm_tune.runtime import compiled, modules, ops
from replayssm_tune.runtime.compiled import ModuleSource
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.appends import expected_append
from replayssm_tune.tuner.pool import Pool
from replayssm_tune.tuner.trajectory import Step, Trajectory, relative_rms
from tests.runtime.calls import cache_of
from tests.specs import drafts, small


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


def make_spec(op: str = "step", family: str = "mamba2", **changes: object) -> Spec:
    """A small spec of any op; ``changes`` as :func:`tests.specs.small` takes them."""
    spec = small(family, **changes)
    if op.endswith("verify"):
        spec = drafts(spec, min(3, spec.window))
    return spec.native if op.startswith("native") else spec


STEPS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "mamba2": {
        "step": ops.mamba2_step,
        "native_step": ops.mamba2_native_step,
        "verify": ops.mamba2_step,
        "native_verify": ops.mamba2_native_verify,
    },
    "gdn": {
        "step": ops.gdn_step,
        "native_step": ops.gdn_native_step,
        "verify": ops.gdn_step,
        "native_verify": ops.gdn_native_verify,
    },
}


def launch(trajectory: Trajectory, pool: Pool, step: Step, out: Tensor | None = None) -> Tensor:
    spec = trajectory.spec
    given: dict[str, Any] = {
        "dt_bias": trajectory.dt_bias,
        "null_slot": trajectory.null_slot,
        "out": out,
        "slot_index": step.slot_index,
    }
    if spec.family == "gdn":
        given |= {"q": step.C, "k": step.B, "v": step.x, "a": step.dt, "b": step.beta}
        given |= {"A_log": trajectory.A, "qk_l2norm": spec.qk_l2norm}
    else:
        given |= {"x": step.x, "dt": step.dt, "B": step.B, "C": step.C, "z": step.z}
        given |= {"A": trajectory.A, "D": trajectory.D, "dt_softplus": spec.dt_softplus}
    if spec.verifies:
        given["query_start"] = step.query_start
    if spec.is_native:
        given |= {"state": pool.state} | ({"accepted": step.previous} if spec.verifies else {})
    else:
        given |= {"window": spec.window, **cache_of(pool, spec).tensors()}
        given |= {"num_tokens": spec.num_tokens} if spec.verifies else {}
    return STEPS[spec.family][spec.op](**given)


def commit(trajectory: Trajectory, pool: Pool, step: Step) -> None:
    if not trajectory.spec.is_native:
        ops.commit(
            step.accepted,
            ring_start=pool.ring_start,
            ring_len=pool.ring_len,
            slot_index=step.slot_index,
            window=trajectory.spec.window,
            num_tokens=trajectory.spec.num_tokens,
            query_start=step.query_start,
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
        append = None
        if pool.capacity:
            append = expected_append(trajectory.spec, trajectory.recurrence, pool, step)
            if trajectory.spec.family == "gdn" and trajectory.spec.ring_dtype == "fp32":
                # What is recalled is a sum of terms that cancel: it may be larger than u and its error too.
                bounds = append.tolerance
                append = replace(append, tolerance=bounds._replace(x=4 * bounds.x))
        out = torch.full_like(step.x, float("nan"))
        launch(trajectory, pool, step, out)

        nobodys = torch.ones(len(out), dtype=torch.bool, device=out.device)
        nobodys[step.new] = False
        assert torch.equal(out[nobodys], torch.zeros_like(out[nobodys]))
        changed = pool.storage != before
        assert not (changed & ~pool.writable(step.targets, step.stores[step.row], step.append)).any()
        assert torch.equal(pool.ring_start, start)
        assert torch.equal(pool.ring_len, length)
        if append is not None:
            # Copied inputs to the bit, computed entries as exactly as their dtype allows.
            assert not any(append.wrong(pool.entry(step.targets, step.append)))
        commit(trajectory, pool, step)
        stored = pool.state[step.stored_slots].double()
        if len(stored):
            by_launch.append(relative_rms(stored, step.stored))
        y = out[step.new].double()
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


@pytest.fixture(scope="session", params=STEPS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(family: str) -> Driver:
    """Made anew for each test: modules that name another family must not leave theirs behind."""
    torch.set_num_threads(1)
    return Driver(make_spec=functools.partial(make_spec, family=family))


@pytest.fixture(params=["step", "native_step", "verify", "native_verify"])
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


@pytest.fixture
def forbid_compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after whose call every compilation of this process raises."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a kernel was compiled where everything should have been")

    def forbid() -> None:
        monkeypatch.setattr(compiled, "compile_kernel", refuse)
        monkeypatch.setattr(triton, "compile", refuse)
        # Cursor ops go through the just-in-time path.
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", refuse, raising=False)

    return forbid
