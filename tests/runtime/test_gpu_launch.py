"""How kernels are launched: graphs, compilations, large pools, torch.compile, fresh processes, cursors.

Tests with a device run on CPUs too, through the eager reference, so that they are known to be right.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.targets import find
from replayssm_tune.runtime import compiled, launch, lookup, ops, reference
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import DispatchError
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.pool import make_pool
from replayssm_tune.tuner.trajectory import Trajectory
from tests.runtime import calls
from tests.runtime.calls import caches_of, call, captured, commit, copied, random_call, same_bits
from tests.specs import GDN, GDN_BF16, P64, P64_BF16, drafts

family = calls.family

# Kernels of GDN are rendered where none ship: tests with a spec take the fixture `renders`.
small_states = pytest.mark.parametrize(
    "spec",
    [P64_BF16, GDN_BF16, drafts(P64_BF16, 3), drafts(GDN_BF16, 3)],
    ids=["mamba2", "gdn", "mamba2-drafts", "gdn-drafts"],
)


@pytest.mark.parametrize(("spec", "seed"), [(P64, 11), (GDN, 15)], ids=["mamba2", "gdn"])
def test_graph_replays_any_number_of_live_rows(
    driver: Any, device: str, renders: None, forbid_compiling: Callable[[], None], spec: Spec, seed: int
) -> None:
    """Captured at 64 rows after a warm-up; rows beyond the live ones keep stale inputs."""
    heads, index_dtype = 16, torch.int64
    rows = 64 if device == "cuda" else 8
    scene = Trajectory(
        spec, heads=heads, sequences=rows, padded_rows=0, attend=1.0, steps=1, null_slot=0, seed=seed,
        device=device, index_dtype=index_dtype,
    )  # fmt: skip
    pool, other = scene.pool(), scene.pool()
    storage, start, length = pool.storage.clone(), pool.ring_start.clone(), pool.ring_len.clone()
    (step,) = scene
    assert bool(step.stores.any())
    assert not bool(step.stores.all())
    indices = step.slot_index.clone()
    padding = torch.tensor([-1, 0], dtype=index_dtype, device=device).repeat(rows // 2)
    accepted = step.accepted.to(index_dtype)
    out = torch.empty_like(step.x)

    def body(caches: Any, y: torch.Tensor) -> None:
        driver.launch(scene, caches, step, y)
        driver.commit(scene, caches, dataclasses.replace(step, accepted=accepted))

    if device == "cuda":
        assert ops.warmup(spec, [rows * heads], device, index_dtype) == 1
    forbid_compiling()
    replay = captured(device, lambda: body(pool, out))
    for live in (1, 7, rows - 1, rows):
        for caches in (pool, other):
            caches.storage.copy_(storage)
            caches.ring_start.copy_(start)
            caches.ring_len.copy_(length)
        step.slot_index.copy_(indices)
        step.slot_index[live:] = padding[live:]
        out.fill_(float("nan"))
        replay()
        expected = torch.full_like(out, float("nan"))
        body(other, expected)

        assert same_bits(out, expected)
        assert bool(out[:live].isfinite().all())
        assert not bool(out[live:].any())
        assert torch.equal(pool.storage, other.storage)
        changed = pool.storage != storage
        allowed = pool.writable(step.slots[:live], step.stores[:live], step.append[:live])
        assert bool(changed.any())
        assert not bool((changed & ~allowed).any())
        assert torch.equal(pool.ring_start, other.ring_start)
        assert torch.equal(pool.ring_len, other.ring_len)
        moved = ((pool.ring_len != length) | (pool.ring_start != start)).nonzero()[:, 0].tolist()
        assert set(moved) <= set(step.slots[:live].tolist())


@small_states
def test_pool_layouts_compile_nothing_again(
    device: str, renders: None, forbid_compiling: Callable[[], None], spec: Spec
) -> None:
    rows, heads, groups = 7, 32, 32 // spec.heads_per_group
    given = random_call(spec, rows, heads, device)
    expected = call(copied(given))

    def outputs(slots: int, gap_bytes: int | None) -> torch.Tensor:
        """The same call on a pool of another size: contiguous, or interleaved with gaps."""
        if gap_bytes is None:
            cache: Any = ops.make_cache(spec, slots, heads, groups, device)
        else:
            cache = make_pool(spec, slots, heads, groups, device=device, gap_bytes=gap_bytes)
        changes = {}
        for name, field in caches_of(given).items():
            changes[name] = getattr(cache, field)
            changes[name][slots - rows :] = given[name]
        return call(given | changes | {"slot_index": given["slot_index"] + (slots - rows)})

    torch.testing.assert_close(outputs(9, 4), expected, rtol=2e-2, atol=2e-2)
    known = compiled.compilations
    forbid_compiling()
    for slots in (8, 40, 200):
        for gap_bytes in (None, 16):
            assert torch.equal(outputs(slots, gap_bytes), expected)
        torch.testing.assert_close(outputs(slots, 4), expected, rtol=2e-2, atol=2e-2)
    assert compiled.compilations == known


@pytest.mark.gpu
@small_states
def test_a_first_call_compiles_its_plan_alone(renders: None, spec: Spec) -> None:
    """Nothing is tuned or compiled beside the kernels of the plan that serves."""
    spec = dataclasses.replace(spec, window=3)
    known = compiled.compilations
    given = random_call(spec, 1, 16, "cuda")
    call(given)
    plan = launch.plan_for(spec, 16, torch.cuda.current_device())
    kernels = sum(1 + (v.structure.coefficients == "precomputed") for v in plan.variants)
    assert compiled.compilations - known == kernels
    call(given)
    assert compiled.compilations - known == kernels


@small_states
def test_offsets_beyond_32_bits(device: str, renders: None, spec: Spec) -> None:
    """The last slots of a pool above 2**31 elements; all others keep their bits."""
    rows, heads = 14, 16
    slots = 2**31 // (heads * spec.head_dim * spec.state_size) + 8 if device == "cuda" else 40
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("less than 12 GiB of GPU memory are free")
    small = random_call(spec, rows, heads, device)
    cache = ops.make_cache(spec, slots, heads, heads // spec.heads_per_group, device)
    large = small | cache.tensors()
    large["slot_index"] = small["slot_index"] + (slots - rows)
    for name in caches_of(small):
        large[name][slots - rows :] = small[name]
    for given in (small, large):
        given["out"] = call(given)
        commit(given)
    assert torch.equal(large["out"], small["out"])
    assert bool(small["out"].isfinite().all())
    for name in caches_of(small):
        assert torch.equal(large[name][slots - rows :], small[name]), name
        # In parts: a comparison needs memory of its own.
        for part in large[name][: slots - rows].split(4096):
            assert not bool(part.count_nonzero()), name


def step_and_commit(given: dict[str, Any]) -> torch.Tensor:
    y = call(given) * 2
    commit(given)
    return y


@pytest.mark.filterwarnings("ignore")  # Of the compiler, about its own configuration.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@small_states
def test_compiled_as_one_graph(device: str, renders: None, backend: str, spec: Spec) -> None:
    if device == "cpu" and backend == "inductor":
        pytest.skip("would compile C++ to no end: the ops are opaque to it")
    from torch._inductor import config as inductor_config  # costs seconds

    given = random_call(spec, 7, 32, device)
    eager = copied(given)
    expected = step_and_commit(eager)
    torch._dynamo.reset()
    # Worker processes for one small kernel would cost more than they save.
    with inductor_config.patch(compile_threads=1):
        y = torch.compile(step_and_commit, fullgraph=True, backend=backend)(given)
    assert torch.equal(y, expected)
    for name in caches_of(given):
        assert torch.equal(given[name], eager[name]), name


FRESH = """
import sys, torch
from tests.runtime.calls import call, random_call
from tests.specs import P64, P64_BF16
device = sys.argv[1]
for spec in (P64_BF16, P64, P64.native):
    given = random_call(spec, 14, 16, device)
    given["out"] = torch.full_like(given["x"], float("nan"))
    assert call(given).isfinite().all(), spec.key
    assert given["state"].isfinite().all(), spec.key
print("finite")
"""


def test_first_launch_of_a_process_is_finite(device: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, device], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "finite"


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_cursor_ops_are_those_of_the_reference(device: str, index_dtype: torch.dtype, rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    slots = rows + 9
    for window, num_tokens, null_slot in ((16, 1, None), (4, 3, 2), (1, 1, 0)):
        capacity = window + num_tokens + 2
        null = -1 if null_slot is None else null_slot
        start = torch.randint(0, capacity, (slots,), generator=g, dtype=torch.int32)
        length = torch.randint(0, window + 1, (slots,), generator=g, dtype=torch.int32)
        index = torch.randperm(slots, generator=g)[:rows].to(index_dtype)
        index[torch.rand(rows, generator=g) < 0.2] = -1
        accepted = torch.randint(-1, num_tokens + 2, (rows,), generator=g).to(index_dtype)

        def cursors(where: str, start: Any = start, length: Any = length) -> dict[str, Any]:
            return {"ring_start": start.clone().to(where), "ring_len": length.clone().to(where)}

        # Kernels clamp what a CPU refuses.
        kept = accepted.clamp(0, num_tokens)
        given = accepted if device == "cuda" else kept
        found, wanted = cursors(device), cursors("cpu")
        ops.commit(
            given.to(device), **found, slot_index=index.to(device), window=window,
            num_tokens=num_tokens, capacity=capacity, null_slot=null_slot,
        )  # fmt: skip
        reference.commit(
            kept, **wanted, slot_index=index, query_start=None, window=window, num_tokens=num_tokens,
            capacity=capacity, null_slot=null,
        )  # fmt: skip
        same(found, wanted)

        count = torch.randint(0, num_tokens + 1, (rows,), generator=g)
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)]).int()
        stale = torch.where(count == 0, 2**30, index)
        kept = torch.minimum(accepted.clamp(min=0), count)
        given = accepted if device == "cuda" else kept
        found, wanted = cursors(device), cursors("cpu")
        ops.commit(
            given.to(device), **found, slot_index=stale.to(device), query_start=query_start.to(device),
            window=window, num_tokens=num_tokens, capacity=capacity, null_slot=null_slot,
        )  # fmt: skip
        reference.commit(
            kept, **wanted, slot_index=stale, query_start=query_start, window=window,
            num_tokens=num_tokens, capacity=capacity, null_slot=null,
        )  # fmt: skip
        same(found, wanted)

        found, wanted = cursors(device), cursors("cpu")
        ops.reset(index.to(device), **found, null_slot=null_slot)
        reference.reset(index, **wanted, null_slot=null)
        same(found, wanted)

        found, wanted = cursors(device), cursors("cpu")
        ops.drained(index.to(device), **found, capacity=capacity, null_slot=null_slot)
        reference.drained(index, **wanted, capacity=capacity, null_slot=null)
        same(found, wanted)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name].cpu(), value), name


def test_strict_mode_refuses_and_served_plans_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    # Batches and a window that nothing else asks for: plans and reasons are kept for the process.
    untabled = dataclasses.replace(P64, window=5)
    if device == "cpu":
        monkeypatch.setattr(launch, "gpu_info", lambda index: find("H200").info)
    index = torch.cuda.current_device() if device == "cuda" else 0
    monkeypatch.setenv(launch.STRICT_VARIABLE, "1")
    with pytest.raises(DispatchError, match=r"no table has a row for .*-w5-"):
        ask(untabled, device, index)
    # Strict mode is about steps.
    assert launch.plan_for(untabled.materialize, 16, index) == default_plan(untabled.materialize)
    monkeypatch.setenv(launch.STRICT_VARIABLE, "0")
    batch = 16 * (37 if device == "cuda" else 41)
    expected = lookup.default_lookup().find(P64, batch, launch.gpu_info(index))
    with caplog.at_level(logging.INFO, logger=lookup.__name__):
        plan = launch.plan_for(P64, batch, index)
        launch.plan_for(P64, batch, index)
    assert plan == expected.plan
    assert [record.message for record in caplog.records].count(expected.reason) == 1


def ask(spec: Spec, device: str, index: int) -> None:
    """The public op on a GPU; on a CPU, where it needs no plan, the question it would ask."""
    if device == "cuda":
        call(random_call(spec, 1, 16, device))
    else:
        launch.plan_for(spec, 16, index)
