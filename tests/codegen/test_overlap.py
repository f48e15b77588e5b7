"""Launches of one plan that run beside each other: who waits for whom, and on which GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.render import render
from replayssm_tune.codegen.space import legal_structures
from replayssm_tune.runtime.build import compile_kernel
from replayssm_tune.runtime.compiled import begins_early
from replayssm_tune.runtime.modules import load_module
from replayssm_tune.runtime.plan import LEADING_ROLE, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from tests.specs import GDN, P64, P64_BF16, drafts, searched_plan

WAIT, BEGIN = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
LAST_PROGRAM = [f"(tl.program_id({axis}) == tl.num_programs({axis}) - 1)" for axis in (0, 1)]

STRUCTURES = [(s, structure) for spec in (P64, GDN) for s in (spec, drafts(spec))
              for structure in legal_structures(s)]  # fmt: skip


def bodies(spec: Spec, structure: Structure) -> dict[str, str]:
    """Source of each kernel, by name."""
    parts = render(spec, structure).split("\ndef ")[1:]
    return {part[: part.index("(")]: part for part in parts}


@pytest.mark.parametrize(
    ("spec", "structure"),
    STRUCTURES,
    ids=[f"{s.family}-{s.op}-{structure.key}" for s, structure in STRUCTURES],
)
def test_who_waits_for_whom(spec: Spec, structure: Structure) -> None:
    kernels = bodies(spec, structure)
    step = kernels["step"]
    code = step[step.index("):") :]
    variant = Variant(structure, Tile(32, 32))
    other = Variant(Structure("flush"), Tile(32, 32))
    beside = begins_early(variant, (variant,)) or begins_early(variant, (variant, other))
    # All that may begin early has a program that waits, before anything that could make it leave.
    first = code.find(WAIT)
    if beside:
        assert 0 < first < code.find("return")
        assert "if " + " & ".join(LAST_PROGRAM) + ":" in code[:first]
    else:
        assert first == -1
    alone = begins_early(variant, (variant,))
    # Coefficients in memory are another launch's: every program waits, before it reads what that has written.
    assert code.count(WAIT) == beside + alone
    if alone:
        wait = code.index(WAIT, first + 1)
        for written in ("scratch_ptr", "ring_x_ptr", "ring_b_ptr", "ring_decay_ptr"):
            assert code.find(written) in (-1, *range(wait, len(code))), written
    # What lets the next launch begin has nothing left to wait for.
    assert (BEGIN in code) == (structure.role == LEADING_ROLE)
    if BEGIN in code:
        assert code.rfind(WAIT) < code.index(BEGIN)
    assert ("coefficients" in kernels) == (structure.coefficients == "precomputed")
    if "coefficients" in kernels:
        assert BEGIN in kernels["coefficients"]
        assert WAIT not in kernels["coefficients"]


@pytest.mark.parametrize(
    "coefficients", [{"both": "precomputed"}, {"nonflush": "precomputed", "flush": "inline"}], ids=str
)
def test_gpus_that_cannot_overlap_have_none_of_it(coefficients: dict[str, str], tmp_path: Path) -> None:
    for variant in searched_plan(P64_BF16, coefficients).variants:
        module = load_module(rendered(tmp_path)(P64_BF16, variant.structure))
        for name in variant.structure.kernels:
            for arch, overlaps in ((80, False), (90, True)):
                target = GPUTarget("cuda", arch, 32)
                tiled = name == "step"
                compiled = compile_kernel(getattr(module, name), P64_BF16, variant, target, tiled=tiled)
                assert ("griddepcontrol" in compiled.asm["ptx"]) == overlaps, (name, arch)


def test_a_launch_by_itself_waits_for_everything_before_it() -> None:
    pair = searched_plan(P64_BF16, {"nonflush": "inline", "flush": "inline"}).variants
    assert [begins_early(v, pair) for v in pair] == [v.structure.role != LEADING_ROLE for v in pair]
    assert not any(begins_early(v, (v,)) for v in pair)
    # A branch that waits for nothing begins when the coefficients of both have ended.
    coefficients = {"nonflush": "precomputed", "flush": "precomputed"}
    nonflush, flush = searched_plan(drafts(P64), coefficients).variants
    assert begins_early(flush, (flush,))
    assert not begins_early(flush, (nonflush, flush))
    assert begins_early(nonflush, (nonflush, flush))
    both = dataclasses.replace(pair[0].structure, role="both")
    for how in ("inline", "precomputed"):
        variant = Variant(dataclasses.replace(both, coefficients=how), pair[0].tile)
        assert begins_early(variant, (variant,)) == (how == "precomputed")
