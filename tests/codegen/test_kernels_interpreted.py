"""The kernels' contract over structures, dtypes, odd sizes and pools, in Triton's interpreter.

Scenes (shape, dtypes, optional inputs, pool) cover all pairs of their factors. Every legal structure
runs on at least two scenes, so that each meets both dtypes, both head dims and both state sizes; the
gate checks outputs, stored states, ring entries, untouched bytes, padded rows and equal repeats.
bf16 and long trajectories need a GPU.
"""

from __future__ import annotations

import functools
import itertools

import pytest

from replayssm_tune.codegen.space import broken_constraint, legal_structures
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.interpreted import small_variant
from tests.interpreter import run_interpreted

COMMON = {
    "dtype": ("fp32", "fp16", "mixed"),
    "head_dim": (16, 20),
    "state_size": (32, 24),
    "has_dt_bias": (True, False),
    "index_dtype": ("int32", "int64"),
    "gap_bytes": (16, 4),
    "spare": (0, 2),
}
OPTIONS = {
    "mamba2": {"has_z": (False, True), "has_d": (True, False), "dt_softplus": (True, False)},
    "gdn": {"qk_l2norm": (True, False)},
}
DRAFTS = {"num_tokens": (3, 4, 1)}
KINDS = {
    f"{family}{suffix}": COMMON | options | more
    for suffix, more in (("", {}), ("-verify", DRAFTS))
    for family, options in OPTIONS.items()
}
"""Factors of scenes. ``mixed``: fp16 inputs and ring, an fp32 state. ``gap_bytes`` 4: nothing is aligned."""

DTYPES = {"fp32": ("fp32", "fp32"), "fp16": ("fp16", "fp16"), "mixed": ("fp16", "fp32")}

Scene = dict[str, object]


def all_pairs(kind: str) -> set[frozenset[tuple[str, object]]]:
    factors = KINDS[kind]
    return {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    }


def pairs_of(scene: Scene) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for pair in itertools.combinations(scene.items(), 2)}


@functools.cache
def scenes(kind: str) -> list[Scene]:
    """Few scenes that cover every pair of values: each is the best extension of an open pair."""
    open_pairs = all_pairs(kind)
    found: list[Scene] = []
    while open_pairs:
        first = dict(min(open_pairs, key=lambda pair: sorted(map(str, pair))))
        scene: Scene = {}
        for name, values in KINDS[kind].items():
            if name in first:
                scene[name] = first[name]
                continue
            known = [(n, v) for n, v in {**first, **scene}.items() if n != name]
            scene[name] = max(
                values,
                key=lambda value: sum(frozenset(((name, value), other)) in open_pairs for other in known),
            )
        open_pairs -= pairs_of(scene)
        found.append(scene)
    return found


def spec_of(kind: str, scene: Scene) -> Spec:
    activation, state = DTYPES[str(scene["dtype"])]
    family, _, verifies = kind.partition("-")
    flags = {"has_d": False} | {name: scene[name] for name in ("has_dt_bias", *OPTIONS[family])}
    flags |= {name: scene[name] for name in DRAFTS if verifies}
    op = "verify" if verifies else "step"
    return Spec(
        family, op, int(str(scene["head_dim"])), int(str(scene["state_size"])), 2, 4,
        activation_dtype=activation, state_dtype=state, ring_dtype=activation, **flags,  # type: ignore[arg-type]
    )  # fmt: skip


def structures(kind: str) -> list[Structure]:
    everywhere = dict.fromkeys(s for scene in scenes(kind) for s in legal_structures(spec_of(kind, scene)))
    return sorted(everywhere)


def plain(spec: Spec, role: str) -> Structure:
    """The first legal structure of a role."""
    return next(structure for structure in legal_structures(spec) if structure.role == role)


def plans_of(spec: Spec, chosen: list[Structure]) -> list[Plan]:
    """Plans that run the chosen structures; those of half a step meet each other in turn."""
    both = [s for s in chosen if s.role == "both"]
    nonflush = [s for s in chosen if s.role == "nonflush"]
    flush = [s for s in chosen if s.role == "flush"]
    plans = [Plan((small_variant(spec, s),)) for s in both]
    for i in range(max(len(nonflush), len(flush))):
        first = nonflush[i % len(nonflush)] if nonflush else plain(spec, "nonflush")
        second = flush[i % len(flush)] if flush else plain(spec, "flush")
        plans.append(Plan((small_variant(spec, first), small_variant(spec, second))))
    return plans


@functools.cache
def assignment(kind: str) -> dict[int, list[Structure]]:
    """Structures by scene: each on two scenes that differ in head dim and state size."""
    all_scenes = scenes(kind)
    legal = [set(legal_structures(spec_of(kind, scene))) for scene in all_scenes]
    load = [0] * len(all_scenes)
    chosen: dict[int, list[Structure]] = {i: [] for i in range(len(all_scenes))}
    for structure in structures(kind):
        possible = [i for i in range(len(all_scenes)) if structure in legal[i]]

        def cost(pair: tuple[int, int]) -> tuple[int, int, bool]:
            one, other = (all_scenes[i] for i in pair)
            alike = sum(one[name] == other[name] for name in ("head_dim", "state_size"))
            return alike, sum(load[i] ** 2 for i in pair), one["dtype"] == other["dtype"]

        first, second = min(itertools.combinations(possible, 2), key=cost)
        for i in (first, second):
            load[i] += 1
            chosen[i].append(structure)
    return chosen


CASES = [(kind, index) for kind in KINDS for index in range(len(scenes(kind)))]


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_cover_all_pairs_of_values(kind):
    found = scenes(kind)
    assert set().union(*map(pairs_of, found)) == all_pairs(kind)
    assert len(found) <= 14


@pytest.mark.parametrize("kind", KINDS)
def test_every_structure_meets_other_dtypes_and_sizes(kind):
    all_scenes = scenes(kind)
    met: dict[Structure, list[Scene]] = {}
    for i, chosen in assignment(kind).items():
        for structure in chosen:
            met.setdefault(structure, []).append(all_scenes[i])
    assert set(met) == set(structures(kind))
    for structure, seen in met.items():
        for name in ("head_dim", "state_size"):
            assert len({scene[name] for scene in seen}) == 2, structure.key


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_rings_wrap_in_these_scenes(kind):
    wrapping = [
        run_interpreted("tests.codegen.interpreted_gate:wraps", spec_of(kind, scene).key, scene["spare"])
        for scene in scenes(kind)
    ]
    assert sum(wrapping) > len(wrapping) / 2


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "index"), CASES)
def test_structures_pass_the_gate(kind, index, tmp_path):
    scene = scenes(kind)[index]
    spec = spec_of(kind, scene)
    plans = plans_of(spec, assignment(kind)[index])
    found = run_interpreted(
        "tests.codegen.interpreted_gate:verdicts",
        spec.key,
        [plan.key for plan in plans],
        scene["index_dtype"],
        scene["gap_bytes"],
        scene["spare"],
        str(tmp_path),
    )
    assert len(found) == len({plan.key for plan in plans})
    assert {key: reason for key, reason in found.items() if reason} == {}


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "index"), CASES[::3])
def test_the_native_baseline_passes_the_gate(kind, index, tmp_path):
    scene = scenes(kind)[index]
    spec = spec_of(kind, scene).native
    plan = Plan((small_variant(spec, Structure("native")),))
    found = run_interpreted(
        "tests.codegen.interpreted_gate:verdicts",
        spec.key, [plan.key], scene["index_dtype"], scene["gap_bytes"], 0, str(tmp_path),
    )  # fmt: skip
    assert found == {plan.key: ""}


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loop_over_tiles_ends_where_the_head_does(kind, tmp_path):
    # Blocks of 8 fill a head of 24 rows, but are no power of two of them.
    spec = spec_of(kind, scenes(kind)[0] | {"dtype": "fp32", "head_dim": 24})
    tiled = [s for s in legal_structures(spec) if s.loop == "tiles" and s.readout == "elementwise"]
    plans = plans_of(spec, tiled)
    assert {s.role for s in tiled} == {"both", "nonflush", "flush"}
    found = run_interpreted(
        "tests.codegen.interpreted_gate:verdicts",
        spec.key, [plan.key for plan in plans], "int32", 16, 0, str(tmp_path),
    )  # fmt: skip
    assert found == {plan.key: "" for plan in plans}


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", OPTIONS)
def test_blocks_of_one_and_of_two_rows_pass_the_gate(kind, tmp_path):
    # A line of ring x is two rows of a token, or the only one; the last blocks of this head are cut.
    spec = spec_of(kind, scenes(kind)[0] | {"dtype": "mixed", "head_dim": 5, "state_size": 48})
    tiles = {"late": (Tile(1, 16, 16), Tile(2, 32, 64)), "early": (Tile(2, 32, 64), Tile(4, 64, 64))}
    plans = [Plan((Variant(Structure("both", load=load), tile),)) for load in tiles for tile in tiles[load]]
    assert [broken_constraint(spec, plan.variants[0]) for plan in plans] == [""] * len(plans)
    found = run_interpreted(
        "tests.codegen.interpreted_gate:verdicts",
        spec.key, [plan.key for plan in plans], "int32", 16, 0, str(tmp_path),
    )  # fmt: skip
    assert found == {plan.key: "" for plan in plans}
