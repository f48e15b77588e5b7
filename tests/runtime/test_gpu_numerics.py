"""Numbers of the compiled kernels: the gate's bounds through the public ops, structures, long runs.

Tests with a device run on CPUs too, through the eager reference, so that they are known to be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.space import broken_constraint
from replayssm_tune.runtime.compiled import ModuleSource
from replayssm_tune.runtime.oracle import Oracle, recurrence
from replayssm_tune.runtime.plan import STRUCTURE_VALUES, Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.gate import ERROR_FACTOR, ERROR_FLOOR, Gate
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms
from tests.runtime import calls
from tests.runtime.calls import CURSORS, caches_of, call, commit, copied, random_call
from tests.specs import GDN, GDN_BF16, ODD, P64, P64_BF16, P80, drafts

family = calls.family

GATED_BF16 = dataclasses.replace(P64_BF16, has_z=True)
EXACT = dataclasses.replace(P64, activation_dtype="fp32", ring_dtype="fp32")
GDN_EXACT = dataclasses.replace(GDN, activation_dtype="fp32", ring_dtype="fp32")
GDN_ODD = Spec(
    "gdn", "step", 48, 96, 3, 8, activation_dtype="fp16", ring_dtype="fp32", has_d=False, has_dt_bias=False
)

SCENES: dict[str, tuple[Spec, dict[str, Any]]] = {
    "p64-fp32": (P64, {}),
    "p64-bf16": (P64_BF16, {}),
    "p80-fp32": (P80, {}),
    "native-p64-fp32": (P64.native, {}),
    "native-p64-bf16": (P64_BF16.native, {}),
    "native-p80-fp32": (P80.native, {}),
    "int64-null-slot": (P64_BF16, {"index_dtype": torch.int64, "null_slot": 3}),
    "unaligned-bf16": (P64_BF16, {"gap_bytes": 4}),
    "unaligned-fp32": (P64, {"gap_bytes": 4}),
    "gated": (GATED_BF16, {"null_slot": 0}),
    "gated-native": (GATED_BF16.native, {}),
    "gdn-fp32": (GDN, {}),
    "gdn-bf16": (GDN_BF16, {"index_dtype": torch.int64, "null_slot": 3}),
    "gdn-native-fp32": (GDN.native, {}),
    "gdn-native-bf16": (GDN_BF16.native, {"null_slot": 0}),
    "gdn-unaligned": (GDN_BF16, {"gap_bytes": 4}),
    "gdn-fp32-ring": (dataclasses.replace(GDN, ring_dtype="fp32"), {}),
    "gdn-odd": (GDN_ODD, {}),
    "gdn-odd-native": (GDN_ODD.native, {}),
    "drafts-fp32": (drafts(P64), {}),
    "drafts-bf16": (drafts(P64_BF16, 8), {"index_dtype": torch.int64, "null_slot": 3}),
    "drafts-unaligned": (drafts(P64_BF16), {"gap_bytes": 4}),
    "drafts-gated": (drafts(GATED_BF16, 2), {"null_slot": 0}),
    "drafts-p80": (drafts(P80, 3), {}),
    "drafts-native": (drafts(P64).native, {}),
    "drafts-native-bf16": (drafts(GATED_BF16, 3).native, {"null_slot": 0, "index_dtype": torch.int64}),
    "gdn-drafts-fp32": (drafts(GDN), {}),
    "gdn-drafts-bf16": (drafts(GDN_BF16, 16), {"index_dtype": torch.int64, "null_slot": 3}),
    "gdn-drafts-unaligned": (drafts(GDN_BF16), {"gap_bytes": 4}),
    "gdn-drafts-odd": (drafts(GDN_ODD, 5), {}),
    "gdn-drafts-native": (drafts(GDN).native, {"null_slot": 0}),
    "gdn-drafts-odd-native": (drafts(GDN_ODD, 5).native, {}),
}


def scene_of(spec: Spec, device: str, **options: Any) -> Trajectory:
    """A trajectory with two groups of heads (one on a CPU) in which some rows flush."""
    large = device == "cuda"
    heads, steps = (2, 28) if large else (1, 16)
    options = {"accept": 0.9, "attend": 0.9} | options
    return Trajectory(spec, heads=heads * spec.heads_per_group, steps=steps, device=device, **options)


@pytest.mark.parametrize("name", SCENES)
def test_public_ops_pass_the_gate(driver: Any, device: str, renders: None, name: str) -> None:
    spec, options = SCENES[name]
    scene = scene_of(spec, device, **options)
    state = scene.pool().state
    unaligned = bool(state.stride(2) * state.element_size() % 16)
    assert unaligned == ("gap_bytes" in options)
    errors = driver.run(scene)
    assert driver.passes_gate(errors), errors
    assert errors.state_by_launch


@pytest.mark.parametrize(
    "spec",
    [
        EXACT,
        EXACT.native,
        drafts(EXACT),
        drafts(EXACT).native,
        GDN_EXACT,
        GDN_EXACT.native,
        drafts(GDN_EXACT),
        drafts(GDN_EXACT).native,
    ],
    ids=[
        "step",
        "native",
        "drafts",
        "drafts-native",
        "gdn-step",
        "gdn-native",
        "gdn-drafts",
        "gdn-drafts-native",
    ],
)
def test_fp32_is_exact_and_tf32_would_fail(driver: Any, device: str, renders: None, spec: Spec) -> None:
    scene = scene_of(spec, device)
    errors = driver.run(scene)
    assert driver.passes_gate(errors), errors
    # The same trajectory with inputs as a TF32 product would see them.
    pool, outputs = scene.pool(), []
    for step in scene:
        rounded = dataclasses.replace(step, x=tf32(step.x), B=tf32(step.B), C=tf32(step.C))
        outputs.append(driver.launch(scene, pool, rounded)[step.new])
        driver.commit(scene, pool, step)
    error = relative_rms(torch.cat(outputs), errors.expected)
    assert error > ERROR_FACTOR * errors.ideal_y + ERROR_FLOOR
    assert error < 1e-2


def tf32(value: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to the ten mantissa bits of TF32."""
    return ((value.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


SMALL = Spec("mamba2", "step", 48, 64, 4, 8, state_dtype="bf16")
SMALL_GDN = Spec("gdn", "step", 48, 64, 2, 8, state_dtype="bf16", has_d=False, qk_l2norm=True)


def plan(*launches: tuple[Structure, Tile]) -> Plan:
    return Plan(tuple(Variant(*launch) for launch in launches))


def both(tile: Tile, **choices: str) -> Plan:
    return plan((Structure("both", **choices), tile))


BY_DOTS = {"readout": "dot", "scores": "dot"}
PLANS: dict[str, tuple[Spec, Plan]] = {
    "precomputed": (SMALL, both(Tile(16, 64, 64), coefficients="precomputed")),
    "masked-rows": (SMALL, both(Tile(64, 32, 32, heads_per_program=2))),
    "early": (SMALL, both(Tile(16, 32, 64, num_warps=2, evict_first=True), load="early")),
    "dot": (
        SMALL,
        both(Tile(16, 64, 32, heads_per_program=4, num_warps=2, num_stages=2), readout="dot"),
    ),
    "scores-by-dot": (SMALL, both(Tile(16, 64, 64), scores="dot")),
    "rebuild": (SMALL, both(Tile(16, 64, 32, heads_per_program=2), route="rebuild")),
    "two-launches": (
        SMALL,
        plan(
            (Structure("nonflush", load="early"), Tile(16, 32)),
            (
                Structure("flush", readout="dot"),
                Tile(16, 64, 32, heads_per_program=4, num_warps=2, num_stages=2),
            ),
        ),
    ),
    "two-launches-precomputed": (
        SMALL,
        plan(
            (
                Structure("nonflush", coefficients="precomputed", readout="dot"),
                Tile(16, 64, heads_per_program=4, num_stages=2),
            ),
            (Structure("flush", load="early"), Tile(16, 32, 64)),
        ),
    ),
    "native": (SMALL.native, plan((Structure("native"), Tile(16, 32)))),
    "odd-fp16": (ODD, both(Tile(32, 64, 64, heads_per_program=4))),
    "odd-fp16-dot": (
        ODD,
        both(Tile(16, 128, 64, heads_per_program=4, num_warps=2, num_stages=2), readout="dot"),
    ),
    "fp16-of-fp32-dot": (
        dataclasses.replace(ODD, state_dtype="fp32"),
        both(Tile(16, 128, 64, heads_per_program=4, num_warps=2, num_stages=2), readout="dot"),
    ),
    "gdn-fp32-ring-dot": (
        dataclasses.replace(SMALL_GDN, ring_dtype="fp32"),
        both(Tile(16, 64, 32, heads_per_program=2, num_warps=2, num_stages=2), readout="dot"),
    ),
    "gdn-rebuild": (SMALL_GDN, both(Tile(16, 64, 32), route="rebuild")),
    "gdn-dot": (
        SMALL_GDN,
        both(Tile(16, 64, 32, heads_per_program=2, num_warps=2, num_stages=2), readout="dot"),
    ),
    "gdn-tiles": (SMALL_GDN, both(Tile(16, 64, 32, heads_per_program=2), loop="tiles")),
    "prologue": (
        SMALL,
        both(Tile(64, 64, 32, heads_per_program=2, num_stages=2), coefficients="prologue", **BY_DOTS),
    ),
    "gdn-prologue": (
        SMALL_GDN,
        both(
            Tile(16, 64, 32, heads_per_program=2, num_stages=2, max_registers=168),
            coefficients="prologue",
            loop="tiles",
            **BY_DOTS,
        ),
    ),
    "gdn-precomputed": (
        SMALL_GDN,
        both(
            Tile(16, 64, 32, heads_per_program=2, num_stages=2),
            coefficients="precomputed",
            loop="tiles",
            **BY_DOTS,
        ),
    ),
    "gdn-two-launches": (
        SMALL_GDN,
        plan((Structure("nonflush"), Tile(16, 32)), (Structure("flush", readout="dot"), Tile(16, 64, 32))),
    ),
    "gdn-native": (SMALL_GDN.native, plan((Structure("native"), Tile(16, 32)))),
    "gdn-odd": (GDN_ODD, both(Tile(16, 128, 64))),
    "drafts": (drafts(SMALL), both(Tile(64, 64, 32, num_warps=2), **BY_DOTS)),
    "drafts-early": (drafts(SMALL), both(Tile(32, 64, 64), load="early", **BY_DOTS)),
    "gdn-drafts-early": (drafts(SMALL_GDN, 8), both(Tile(16, 64, 64, num_warps=2), load="early", **BY_DOTS)),
    "drafts-precomputed": (
        drafts(SMALL),
        both(Tile(16, 64, 64, heads_per_program=2, num_warps=2), coefficients="precomputed", **BY_DOTS),
    ),
    "drafts-prologue": (
        drafts(SMALL),
        both(Tile(64, 64, 64, heads_per_program=2, num_warps=4), coefficients="prologue", **BY_DOTS),
    ),
    "gdn-drafts-prologue": (
        drafts(SMALL_GDN, 8),
        both(
            Tile(16, 64, 32, heads_per_program=2, num_warps=2, num_stages=2),
            coefficients="prologue",
            loop="tiles",
            **BY_DOTS,
        ),
    ),
    "drafts-native": (drafts(SMALL).native, plan((Structure("native"), Tile(16, 64)))),
    "gdn-drafts-inverse": (
        drafts(SMALL_GDN),
        plan(
            (
                Structure("nonflush", coefficients="precomputed", solve="inverse", **BY_DOTS),
                Tile(32, 64, heads_per_program=2, num_warps=2),
            ),
            (Structure("flush", **BY_DOTS), Tile(16, 64, 32, num_warps=2)),
        ),
    ),
    "gdn-drafts-tiles": (drafts(SMALL_GDN), both(Tile(16, 64, 32, num_warps=2), loop="tiles", **BY_DOTS)),
    "gdn-drafts-odd": (drafts(GDN_ODD, 5), both(Tile(32, 128, 64, num_warps=2), **BY_DOTS)),
    "gdn-drafts-native": (drafts(SMALL_GDN).native, plan((Structure("native"), Tile(16, 64)))),
}


def test_the_gated_plans_are_legal_and_cover_every_choice() -> None:
    seen: dict[str, set[str]] = {name: set() for name in STRUCTURE_VALUES}
    for spec, candidate in PLANS.values():
        for variant in candidate.variants:
            assert not broken_constraint(spec, variant), variant.key
            for name, values in seen.items():
                values.add(getattr(variant.structure, name))
    # A fold into another slot is no step.
    assert seen == {name: {*values} - {"materialize"} for name, values in STRUCTURE_VALUES.items()}


@pytest.fixture(scope="module")
def gates() -> Iterator[dict[Spec, Gate]]:
    """Gates by spec, made on first use."""
    kept: dict[Spec, Gate] = {}
    yield kept
    kept.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANS)
def test_structures_pass_the_gate(name: str, gates: dict[Spec, Gate], module_source: ModuleSource) -> None:
    spec, candidate = PLANS[name]
    if spec not in gates:
        gates[spec] = Gate(
            Trajectory(spec, heads=2 * spec.heads_per_group, sequences=7, steps=20, device="cuda")
        )
    verdict = gates[spec].check(candidate, module_source)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "spec",
    [
        P64,
        P64_BF16,
        P64_BF16.native,
        drafts(P64),
        drafts(P64_BF16).native,
        GDN,
        GDN_BF16,
        GDN.native,
        drafts(GDN_BF16),
        drafts(GDN).native,
    ],
    ids=[
        "fp32",
        "bf16",
        "native",
        "drafts",
        "drafts-native",
        "gdn-fp32",
        "gdn-bf16",
        "gdn-native",
        "gdn-drafts",
        "gdn-drafts-native",
    ],
)
def test_launches_from_the_same_memory_agree(device: str, renders: None, spec: Spec) -> None:
    """At a batch that fills the GPU, with rows of both branches in one launch."""
    rows, launches = (512, 20) if device == "cuda" else (4, 3)
    given = random_call(spec, rows, 16, device)
    written = [name for name, field in caches_of(given).items() if field not in CURSORS]
    saved = copied(given)
    first: list[torch.Tensor] = []
    for _ in range(launches):
        for name in written:
            given[name].copy_(saved[name])
        found = [call(given), *(given[name] for name in written)]
        if not first:
            first = [tensor.clone() for tensor in found]
        for tensor, expected in zip(found, first, strict=True):
            assert torch.equal(tensor, expected)
    assert all(bool(tensor.isfinite().all()) for tensor in first)
    stored = (first[1] != saved["state"]).flatten(1).any(1)
    assert int(stored.sum()) == (rows * spec.num_tokens if spec.is_native else rows // 2)


LONG = Spec("mamba2", "step", 16, 32, 2, 8)
# A 16-bit ring would add errors of its own: what GDN writes depends on what it recalls.
LONG_GDN = Spec("gdn", "step", 16, 32, 2, 8, ring_dtype="fp32", has_d=False, qk_l2norm=True)


@pytest.mark.parametrize("spec", [LONG, LONG_GDN], ids=["mamba2", "gdn"])
def test_error_does_not_grow_over_a_long_run(device: str, renders: None, spec: Spec) -> None:
    """2,000 tokens with random accepts: the stored states late in the run are as good as early ones."""
    tokens, rows, heads = (2000 if device == "cuda" else 400), 3, 4
    g = torch.Generator().manual_seed(5)
    given = random_call(spec, rows, heads, device, slots=5)
    slots, state, ring_len = given["slot_index"].long(), given["state"], given["ring_len"]
    ring_len.zero_()
    sequences = torch.arange(rows, device=device)
    per_token = ("q", "k", "v", "a", "b") if spec.family == "gdn" else ("x", "dt", "B", "C")
    names = {"x": "v", "dt": "a", "B": "k", "C": "q", "beta": "b"} if spec.family == "gdn" else {}
    rule = recurrence(
        spec, given["A_log" if spec.family == "gdn" else "A"], D=given.get("D"), dt_bias=given["dt_bias"]
    )
    oracle = Oracle(state[slots], rule)
    errors = []
    length = torch.zeros(rows, dtype=torch.int32)
    for _ in range(tokens):
        for name in per_token:
            given[name].copy_(torch.randn(given[name].shape, generator=g))
        accepted = (torch.rand(rows, generator=g) < 0.8).int()
        flushes = length + 1 > spec.window
        call(given)
        if bool(flushes.any()):
            # What a flush stores is the committed state before this token.
            row = flushes.nonzero()[:, 0].to(device)
            errors.append(relative_rms(state[slots[row]], oracle.state[row]))
        names_of_token = ("x", "dt", "B", "C", "beta")
        token: dict[str, Any] = {name: given.get(names.get(name, name)) for name in names_of_token}
        oracle.step(sequences, **token)
        oracle.commit(accepted.to(device))
        commit(given, accepted.to(device))
        length = torch.where(flushes, 0, length) + accepted
    assert torch.equal(ring_len[slots].cpu(), length)
    assert len(errors) > tokens // 10
    assert max(errors) < 1e-5
    early, late = errors[: len(errors) // 4], errors[-len(errors) // 4 :]
    assert rms(late) < 1.5 * rms(early) + 1e-7


def rms(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).square().mean().sqrt())
