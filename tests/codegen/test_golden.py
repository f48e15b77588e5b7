"""Generated code as people read it, and its form over the whole space.

``REPLAYSSM_UPDATE_GOLDEN=1 pytest tests/codegen/test_golden.py`` writes the golden files anew.
"""

from __future__ import annotations

import ast
import difflib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from replayssm_tune.codegen.render import render
from replayssm_tune.codegen.space import legal_structures
from replayssm_tune.runtime.abi import constexprs, parameters
from replayssm_tune.runtime.modules import module_name
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from tests.paths import ROOT
from tests.specs import GDN, drafts
from tests.specs import P64 as SPEC

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "REPLAYSSM_UPDATE_GOLDEN"

ODD = Spec(
    "mamba2", "step", 80, 96, 12, 16,
    activation_dtype="fp16", ring_dtype="fp16", state_dtype="fp16", has_z=True,
)  # fmt: skip

GDN_ODD = Spec(
    "gdn", "step", 80, 96, 3, 5,
    activation_dtype="fp16", ring_dtype="fp32", state_dtype="fp16", has_d=False, has_dt_bias=False,
)  # fmt: skip

VERIFY, VERIFY_ODD = drafts(SPEC), drafts(ODD, 9)
GDN_VERIFY, GDN_VERIFY_ODD = drafts(GDN), drafts(GDN_ODD, 3)

CASES = {
    "both_early": (SPEC, Structure("both", load="early")),
    "both_dot": (SPEC, Structure("both", readout="dot")),
    "both_precomputed": (SPEC, Structure("both", "precomputed")),
    "nonflush_late_odd": (ODD, Structure("nonflush")),
    "flush_dot_odd": (ODD, Structure("flush", readout="dot")),
    "native_odd": (ODD.native, Structure("native")),
    "gdn_both_dot_tiles": (GDN, Structure("both", readout="dot", loop="tiles")),
    "gdn_both_early_odd": (GDN_ODD, Structure("both", load="early")),
    "gdn_nonflush_rebuild_odd": (GDN_ODD, Structure("nonflush", route="rebuild")),
    "gdn_native": (GDN.native, Structure("native")),
    "native_verify_odd": (replace(ODD.native, op="native_verify", num_tokens=4), Structure("native")),
    "gdn_native_verify": (replace(GDN.native, op="native_verify", num_tokens=4), Structure("native")),
    "gdn_materialize": (GDN.materialize, Structure("materialize")),
    "gdn_both_prologue_tiles": (
        GDN,
        Structure("both", "prologue", readout="dot", scores="dot", loop="tiles"),
    ),
    "verify_both_early": (VERIFY, Structure("both", readout="dot", scores="dot", load="early")),
    "verify_both_prologue": (VERIFY, Structure("both", "prologue", readout="dot", scores="dot")),
    "verify_both": (VERIFY, Structure("both", readout="dot", scores="dot")),
    "verify_flush_ahead_odd": (VERIFY_ODD, Structure("flush", "precomputed", readout="dot", scores="dot")),
    "gdn_verify_both_ahead_tiles": (
        GDN_VERIFY,
        Structure("both", "precomputed", readout="dot", scores="dot", loop="tiles"),
    ),
    "gdn_verify_nonflush_odd": (
        GDN_VERIFY_ODD,
        Structure("nonflush", readout="dot", scores="dot", solve="inverse"),
    ),
    "materialize_odd": (ODD.materialize, Structure("materialize")),
}

SPECS = (
    SPEC,
    ODD,
    Spec("mamba2", "step", 80, 128, 12, 16, has_z=True, has_d=False),
    Spec("mamba2", "step", 64, 96, 5, 16, ring_dtype="fp32", has_dt_bias=False),
    Spec(
        "mamba2", "step", 20, 24, 2, 4,
        activation_dtype="fp32", ring_dtype="fp32", has_d=False, dt_softplus=False,
    ),
    Spec("mamba2", "step", 256, 256, 1, 64, state_dtype="bf16", has_z=True),
    Spec("mamba2", "step", 64, 64, 3, 16),
    GDN,
    GDN_ODD,
    VERIFY,
    VERIFY_ODD,
    GDN_VERIFY,
    GDN_VERIFY_ODD,
    replace(GDN_VERIFY, activation_dtype="fp32", ring_dtype="fp32", num_tokens=16),
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_generated_code_is_the_golden_code(name):
    path = GOLDEN / f"{name}.py"
    actual = render(*CASES[name])
    if os.environ.get(UPDATE):
        path.write_text(actual, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if actual != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), f"golden/{path.name}", "rendered", lineterm="", n=2
        )
        pytest.fail(
            "\n".join(diff) + f"\nif this is meant: {UPDATE}=1 pytest tests/codegen/test_golden.py",
            pytrace=False,
        )


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(CASES)


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Files of all legal structures of a few specs, by (spec, structure)."""
    folder = tmp_path_factory.mktemp("modules")
    found = {}
    for spec in dict.fromkeys(s for pair in SPECS for s in (pair, pair.native)):
        for structure in legal_structures(spec):
            path = folder / f"{module_name(spec, structure)}.py"
            path.write_text(render(spec, structure), encoding="utf-8")
            found[spec, structure] = path
    assert len(found) > 150
    return found


def test_every_module_defines_the_kernels_of_its_structure(modules):
    for (spec, structure), path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert "step" in functions
        assert ("coefficients" in functions) == (structure.coefficients == "precomputed")
        names = [argument.arg for argument in functions["step"].args.args]
        assert names == [*parameters(spec, structure), *constexprs(structure)]


def test_loops_over_tiles_mask_what_lies_beyond_the_head(modules):
    """Blocks that divide the head still go beyond it where it is not a power of two."""
    tiled = [path for (_, structure), path in modules.items() if structure.loop == "tiles"]
    assert tiled
    for path in tiled:
        text = path.read_text(encoding="utf-8")
        assert "HEAD_DIM % BLOCK_P" not in text, path.name
        masks = {text.count(part) for part in ("x_p = ", "x_p < HEAD_DIM", "if HEAD_DIM != HEAD_DIM_BLOCK")}
        assert len(masks) == 1, path.name


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--config", str(ROOT / "pyproject.toml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_module_is_formatted(modules):
    folder = str(next(iter(modules.values())).parent)
    result = ruff("format", "--diff", folder)
    assert result.returncode == 0, result.stdout[:4000] + result.stderr[-500:]


def test_no_module_has_unused_names(modules):
    folder = str(next(iter(modules.values())).parent)
    result = ruff("check", "--select", "F,E9", folder)
    assert result.returncode == 0, result.stdout[:4000] + result.stderr[-500:]


def test_rendering_gives_the_same_bytes_again(modules):
    render.cache_clear()
    for spec, structure in list(modules)[:20]:
        assert render(spec, structure) == modules[spec, structure].read_text(encoding="utf-8")


@pytest.mark.parametrize(("spec", "precision"), [
    (SPEC, "tf32"),
    (replace(SPEC, activation_dtype="fp16", ring_dtype="fp16"), "tf32x3"),
    (GDN, "tf32"),
    (replace(GDN, ring_dtype="fp32"), "tf32x3"),
])  # fmt: skip
def test_fp32_states_are_read_as_exactly_as_what_comes_of_it(spec, precision):
    for structure in (Structure("both", readout="dot"), Structure("nonflush", readout="dot")):
        assert f'tl.dot(s, c_matrix, input_precision="{precision}")' in render(spec, structure)
