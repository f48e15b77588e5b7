"""Kernels that verify drafts, through the public ops: whole lives of sequences, graphs, and other packings.

Tests with a device run on CPUs too, through the eager reference, so that they are known to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.trajectory import relative_rms
from tests.runtime.calls import call, captured, commit, copied, random_call
from tests.runtime.drafts import Scene, lives
from tests.specs import GDN, GDN_BF16, P64, P64_BF16, drafts

families = pytest.mark.parametrize("spec", [P64, GDN], ids=["mamba2", "gdn"])
small_states = pytest.mark.parametrize("spec", [P64_BF16, GDN_BF16], ids=["mamba2", "gdn"])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("head_dim", "state_size"), [(4, 6), (16, 32), (80, 96)])
@families
def test_whole_lives_of_sequences(
    device: str, renders: None, spec: Spec, head_dim: int, state_size: int, packed: bool
) -> None:
    """As on a CPU, by the kernels of all ops: of one token, of several, native, and of what folds rings."""
    scene = Scene(
        spec.family, packed=packed, head_dim=head_dim, state_size=state_size, sequences=16, slots=90,
        events=0.05, seed=5, device=device,
    )  # fmt: skip
    run = lives(scene, 150 if device == "cuda" else 10)
    assert min(run.met["ring"], run.met["rejected"]) >= (500 if device == "cuda" else 20)
    # What a kernel may do with fp32 is not worse than fp32.
    assert relative_rms(torch.cat(run.found), torch.cat(run.wanted)) < 1e-5


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 16])
@small_states
def test_rows_are_those_of_the_reference(
    device: str, renders: None, spec: Spec, num_tokens: int, packed: bool, native: bool
) -> None:
    """Outputs, rings and states of bf16, for every number of tokens."""
    spec = drafts(spec, num_tokens).native if native else drafts(spec, num_tokens)
    given = random_call(spec, 6, 32, "cpu", packed=packed, seed=num_tokens)
    expected = copied(given)
    expected["out"] = call(expected)
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    moved["out"] = torch.full_like(expected["out"], float("nan"), device=device)
    call(moved)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            error = relative_rms(moved[name].cpu().double(), value.double())
            assert error < 1e-2, name
    assert not moved["out"].cpu()[(expected["out"] == 0).all(-1)].any()


@pytest.mark.parametrize("native", [False, True])
@families
def test_graph_replays_any_packing(
    device: str, renders: None, forbid_compiling: Callable[[], None], spec: Spec, native: bool
) -> None:
    """Captured once after a warm-up: any number of live rows, of any lengths, stale slots behind them."""
    spec = drafts(spec).native if native else drafts(spec)
    rows, heads = (64, 16) if device == "cuda" else (6, 16)
    g = torch.Generator().manual_seed(3)
    given = random_call(spec, rows, heads, device, packed=True)
    given["out"] = torch.empty_like(given["v" if spec.family == "gdn" else "x"])
    accepted = torch.randint(0, 5, (rows,), generator=g, dtype=torch.int32).to(device)
    before = copied(given)

    def body(caches: dict[str, Any]) -> None:
        call(caches)
        if not native:
            commit(caches, torch.minimum(accepted, caches["query_start"].diff()))

    if device == "cuda":
        assert ops.warmup(spec, [rows * heads], device) == 1
    forbid_compiling()
    replay = captured(device, lambda: body(given))
    for live in (1, rows // 2, rows - 1, rows):
        for name, value in before.items():
            if isinstance(value, torch.Tensor):
                given[name].copy_(value)
        counts = torch.randint(0, 5, (rows,), generator=g)
        counts[0], counts[live:] = 4, 0
        given["query_start"][1:] = counts.cumsum(0).int().to(device)
        given["out"].fill_(float("nan"))
        expected = copied(given)
        body(expected)
        replay()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(given[name], value), name
        tokens = int(counts.sum())
        assert bool(given["out"][:tokens].isfinite().all())
        assert bool(given["out"][:tokens].any())
        assert not bool(given["out"][tokens:].any())
        if not native:
            moved = (given["ring_len"] != before["ring_len"]) | (given["ring_start"] != before["ring_start"])
            slots = given["slot_index"][counts.to(device) > 0]
            assert set(moved.nonzero()[:, 0].tolist()) <= set(slots.tolist())


@small_states
def test_packings_compile_nothing_again(
    device: str, renders: None, forbid_compiling: Callable[[], None], spec: Spec
) -> None:
    """One compilation serves rows of any lengths, full ones too."""
    spec = drafts(spec)
    given = random_call(spec, 5, 32, device)
    full, starts = copied(given), torch.arange(6, dtype=torch.int32, device=device) * 4
    expected = call(full)
    packed = copied(given) | {"query_start": starts}
    y = call(packed)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)

    def of_fewer(rows: int) -> torch.Tensor:
        fewer = copied(given) | {"query_start": starts[: rows + 1]}
        fewer["slot_index"] = given["slot_index"][:rows]
        return call(fewer)

    of_fewer(2)  # Another batch may have another kernel.
    forbid_compiling()
    for counts in ([4, 0, 1, 3, 2], [0, 0, 0, 0, 4], [1, 1, 1, 1, 1]):
        some = copied(given) | {"query_start": torch.tensor([0, *counts], device=device).cumsum(0).int()}
        found = call(some)
        assert bool(found[: sum(counts)].isfinite().all())
        assert not bool(found[sum(counts) :].any())
    for rows in (2, 5):
        # As many tokens for fewer rows: what the last row does not own is nobody's.
        found = of_fewer(rows)
        torch.testing.assert_close(found[: 4 * rows], y[: 4 * rows], rtol=1e-2, atol=1e-2)
        assert not bool(found[4 * rows :].any())
