"""A plan's numerics class: plans of one class give equal bits, whatever their loops and pipelines.

In Triton's interpreter sums have the order of the arrays, not of threads: there it is shown that what a
program loops over changes no operand. What the compiler is asked to add up in which order is read off its
own representation of kernels compiled for a GPU. ``tests/runtime/test_gpu_classes.py`` compares bits there.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.space import broken_constraint, points
from replayssm_tune.runtime.abi import next_power_of_two
from replayssm_tune.runtime.build import compile_kernel
from replayssm_tune.runtime.modules import load_module
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.measured import gate_plan
from tests.interpreter import run_interpreted

STEP = Spec("mamba2", "step", 32, 32, 4, 4, activation_dtype="fp16", ring_dtype="fp16")
GDN = dataclasses.replace(STEP, family="gdn", has_d=False, qk_l2norm=True)
DOTS = {"readout": "dot", "scores": "dot"}


def drafts(spec: Spec) -> Spec:
    return dataclasses.replace(spec, op="verify", num_tokens=3)


FOLDING, READING = Tile(16, 32, 16), Tile(16, 32)
CASES: dict[str, tuple[Spec, Structure, Tile]] = {
    "inline": (STEP, Structure("both"), FOLDING),
    "precomputed": (STEP, Structure("both", "precomputed"), FOLDING),
    "dot": (STEP, Structure("both", readout="dot"), FOLDING),
    "flush": (STEP, Structure("flush", readout="dot"), FOLDING),
    "gdn": (GDN, Structure("both"), FOLDING),
    "gdn-rebuild": (GDN, Structure("both", route="rebuild"), FOLDING),
    "drafts": (drafts(STEP), Structure("both", "precomputed", **DOTS), FOLDING),
    "gdn-drafts": (drafts(GDN), Structure("both", **DOTS), FOLDING),
    "gdn-drafts-inverse": (
        drafts(GDN),
        Structure("nonflush", "precomputed", **DOTS, solve="inverse"),
        READING,
    ),
}


def of_one_class(spec: Spec, structure: Structure, tile: Tile) -> list[Variant]:
    """Legal kernels that differ in loop, heads, depth of the pipeline, register cap and cache policy."""
    found = []
    # The interpreter knows no pipelines: two depths of one are enough.
    shallow = itertools.product(("heads", "tiles"), (1, 4), (1,))
    for loop, heads, stages in (*shallow, ("heads", 2, 2), ("heads", 4, 3)):
        variant = Variant(
            dataclasses.replace(structure, loop=loop),
            dataclasses.replace(
                tile,
                heads_per_program=heads,
                num_stages=stages,
                max_registers=168 if stages == 3 else 0,
                evict_first=heads == 2,
            ),
        )
        if not broken_constraint(spec, variant):
            found.append(variant)
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CASES)
def test_loops_and_pipelines_change_no_bits_in_the_interpreter(name: str, tmp_path: Path) -> None:
    spec, structure, tile = CASES[name]
    plans = [gate_plan(spec, variant) for variant in of_one_class(spec, structure, tile)]
    assert len({variant.tile.heads_per_program for plan in plans for variant in plan.variants}) > 1
    found = run_interpreted(
        "tests.codegen.interpreted_gate:bits", spec.key, [plan.key for plan in plans], str(tmp_path)
    )
    by_class: dict[str, set[str]] = collections.defaultdict(set)
    for plan in plans:
        by_class[plan.numerics].add(found[plan.key])
    assert len(by_class) == 2, "with and without a pipeline"
    assert all(len(digests) == 1 for digests in by_class.values())


@pytest.mark.interpreter
def test_bits_tell_other_classes_apart_in_the_interpreter(tmp_path: Path) -> None:
    """The comparison above can fail: other cuts of a sum give other bits."""
    tiles = (Tile(16, 32, 32), Tile(16, 16, 32))
    plans = [Plan((Variant(Structure("both"), tile),)) for tile in tiles]
    found = run_interpreted(
        "tests.codegen.interpreted_gate:bits", STEP.key, [plan.key for plan in plans], str(tmp_path)
    )
    assert len(set(found.values())) == len({plan.numerics for plan in plans}) == 2


@pytest.mark.interpreter
@pytest.mark.parametrize("spec", [STEP, GDN], ids=["mamba2", "gdn"])
def test_a_row_has_the_same_bits_in_any_batch(spec: Spec, tmp_path: Path) -> None:
    plan = Plan((Variant(Structure("both"), dataclasses.replace(FOLDING, heads_per_program=2)),))
    target = "tests.codegen.interpreted_gate:rows_that_differ"
    assert run_interpreted(target, spec.key, plan.key, str(tmp_path)) == []


SERVED = Spec("mamba2", "step", 64, 128, 16, 16)
SERVED_GDN = Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True)
HOPPER = GPUTarget("cuda", 90, 32)
WORTH = {
    "inline": (SERVED, "both", Structure("both"), Tile(32, 64, 32)),
    "precomputed": (SERVED, "both", Structure("both", "precomputed"), Tile(32, 64, 32, num_warps=2)),
    "dot": (SERVED, "both", Structure("both", readout="dot"), Tile(32, 128, 64, num_warps=2)),
    "gdn-tiles": (SERVED_GDN, "both", Structure("both"), Tile(32, 64, 64, num_warps=2)),
    "gdn-drafts": (
        dataclasses.replace(SERVED_GDN, op="verify", num_tokens=4),
        "both",
        Structure("both", "precomputed", **DOTS),
        Tile(32, 128, 64, num_warps=2),
    ),
}


@pytest.mark.parametrize("name", WORTH)
def test_sums_of_one_class_lie_alike_on_threads(name: str, tmp_path: Path) -> None:
    spec, role, structure, tile = WORTH[name]
    shallow, deep = (Variant(structure, dataclasses.replace(tile, num_stages=n)).numerics for n in (1, 2))
    found: dict[str, dict[str, collections.Counter[str]]] = {shallow: {}, deep: {}}
    for variant in points(spec, role).variants:
        if variant.numerics in found and not (variant.tile.max_registers or variant.tile.evict_first):
            found[variant.numerics][variant.key] = sums(spec, variant, tmp_path)
    assert max(map(len, found.values())) > 1
    for kernels in found.values():
        first = next(iter(kernels.values()), None)
        for key, counts in kernels.items():
            assert counts == first, key


def sums(spec: Spec, variant: Variant, folder: Path) -> collections.Counter[str]:
    """Sums, scans and dots of a kernel with the layouts of their operands, as the compiler has them.

    What merely picks a head or round out of those of a program (a sum in which one term is not zero, over an
    axis as long as their number) is left out. Heads that lie side by side are not counted.
    """
    kernel = load_module(rendered(folder)(spec, variant.structure)).step
    text = str(compile_kernel(kernel, spec, variant, HOPPER).asm["ttgir"])
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.M))

    def resolved(part: str) -> str:
        for _ in range(4):  # layouts name others
            part = re.sub(r"#(?!ttg|ttng)\w+\b", lambda match: layouts.get(match[0], match[0]), part)
        return part

    heads = next_power_of_two(variant.tile.heads_per_program)
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if (head := re.search(r'"tt\.(reduce|scan)".*axis = (\d)', line)) is not None:
            closing = (re.search(r"\}\) : \((.*?)\) -> ", later) for later in lines[number:])
            kind = next(match[1] for match in closing if match)
            sizes = [int(n) for n in re.findall(r"(\d+)x", kind.partition(",")[0])]
            axis, rounds = int(head[2]), variant.rounds(spec.head_dim)
            picks_head = axis == 0 and sizes[0] == heads
            picks_round = variant.structure.loop == "tiles" and sizes[0] == rounds
            if len(sizes) < 3 and (picks_head or picks_round):
                continue
            side_by_side = head[2] == "1" and sizes[0] == heads
            kind = re.sub(r"tensor<\d+x", "tensor<heads x ", kind) if side_by_side else kind
            found.append(f"{head[1]} {head[2]} {resolved(kind)}")
        elif re.search(r"tt\.dot |warp_group_dot ", line):
            found.append(
                "tf32 " * ("tf32" in line) + resolved(line.rpartition(" : ")[2].partition(" loc")[0])
            )
    assert found
    return collections.Counter(found)
