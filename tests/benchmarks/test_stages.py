"""Leaving one stage out of a generated module."""

import ast

import pytest

from benchmarks import stages
from replayssm_tune.codegen.render import render
from replayssm_tune.runtime.plan import STRUCTURE_VALUES, Structure
from tests.specs import GDN, drafts
from tests.specs import P64 as SPEC

STRUCTURES = (
    Structure("both", load="early"),
    Structure("both"),
    Structure("both", readout="dot"),
    Structure("both", "precomputed"),
)
VERIFY, GDN_VERIFY = drafts(SPEC), drafts(GDN)
KERNELS = (
    *((SPEC, structure) for structure in STRUCTURES),
    *((GDN, structure) for structure in STRUCTURES[:3]),
    (GDN, Structure("both", readout="dot", loop="tiles")),
    *(
        (spec, Structure("both", coefficients, readout="dot", scores="dot"))
        for spec in (VERIFY, GDN_VERIFY)
        for coefficients in STRUCTURE_VALUES["coefficients"]
    ),
)
by_kernel = pytest.mark.parametrize(
    ("spec", "structure"), KERNELS, ids=[f"{spec.family} {structure.key}" for spec, structure in KERNELS]
)


def calls(source, name):
    """Calls of ``tl.<name>`` whose mask is never true, by their first argument's text."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            mask = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("mask", "")
            found[ast.unparse(node.args[0])] = "ring_capacity < 0" in mask
    return found


@by_kernel
def test_every_stage_is_found_in_every_kernel_that_has_it(spec, structure):
    source = render(spec, structure)
    for name, stage in stages.stages_of(spec).items():
        assert stages.without(source, stage, 8, 16) != source, name


@by_kernel
def test_what_is_left_out_is_masked_and_nothing_else(spec, structure):
    source = render(spec, structure)
    stores = calls(stages.without(source, stages.STAGES["output and appends"], 8, 16), "store")
    state = {pointer for pointer in stores if "state" in pointer or pointer == "fold_ptrs"}
    padding = {pointer for pointer in stores if "pad_ptr" in pointer or "zero_ptrs" in pointer}
    scratch = {p for p in stores if any(name in p for name in ("scratch", "score_ptrs", "matrices_ptrs"))}
    for pointer, masked in stores.items():
        assert masked != (pointer in state | padding | scratch), pointer
    loads = calls(stages.without(source, stages.STAGES["ring reads"], 8, 16), "load")
    lines = {"ring_b_ptrs", "ring_x_ptrs"}
    named = {p for p in loads if "token" in p and not any(name in p for name in ("token64", "first_token"))}
    ring = named | (lines & loads.keys())
    assert {pointer for pointer, masked in loads.items() if masked} == ring


def test_known_cursors_are_those_of_the_timed_rows():
    source = render(SPEC, STRUCTURES[0])
    text = stages.without(source, stages.STAGES["reading the cursors"], 8, 16)
    namespace = {"ring_capacity": 17, "NUM_TOKENS": 1, "WINDOW": 16}
    values = {
        target.id: eval(ast.unparse(node.value), namespace)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("ring_len", "ring_start")
    }
    assert values == {"ring_len": 8, "ring_start": 1}


def test_a_module_without_the_stage_stays_as_it_is():
    source = render(SPEC.native, Structure("native"))
    assert stages.without(source, stages.STAGES["ring reads"], 8, 16) == source
