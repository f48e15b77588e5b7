"""What bounds a step: the served kernels with one stage left out at a time.

    python benchmarks/stages.py [--drafts N,...] [--output FILE]

For a few cells, on a CUDA device: the plan that dispatch serves is timed as the tuner times it, beside
copies of its modules in which a stage does nothing. Left-out loads and stores stay in the code under a
mask that is never true, so that what feeds them is still computed. Copies take turns with the original.
The difference to the original is what a stage costs where all the others run; differences need not add
up. Results go into ``results/<date>-<gpu>-stages.json``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from benchmarks.summary import RESULTS
from replayssm_tune.codegen.files import write
from replayssm_tune.runtime.modules import module_path
from replayssm_tune.runtime.plan import Plan, Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.runtime.table import gpu_slug
from replayssm_tune.tuner.mix import ring_length

NEVER = ast.parse("ring_capacity < 0", mode="eval").body
"""A mask that is false for every call, which the compiler does not know."""


@dataclass(frozen=True)
class Stage:
    """What is left out: stores and loads through these pointers, values of these names.

    Args:
        stores: Names of pointers; stores through any of them are masked off.
        loads: Names of variables; the loads they hold are masked off.
        values: Names of variables with the expressions that replace what they are computed from.
    """

    stores: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


_RING = ("ring_x", "ring_b", "fold_b", "ring_delta", "later_delta", "ring_gate", "later_gate")
_OUTPUT = ("out_head_ptr", "out_ptrs")
_APPENDS = (
    "ring_x_head_ptr",
    "ring_x_heads_ptr",
    "ring_x_ptrs",
    "copied_ring_ptrs",
    "ring_b_group_ptr",
    "new_decay_ptr",
    "new_decay_ptrs",
)
_SCORE = "(j + 1).to(tl.float32)"
_SCORES = "(j[:, None] + i[None, :] + 1).to(tl.float32)"
_PAIR_SCORES = "(m[:, None] + i[None, :] + 1).to(tl.float32)"
STAGES = {
    "output": Stage(stores=_OUTPUT),
    "appends": Stage(stores=_APPENDS),
    "output and appends": Stage(stores=(*_OUTPUT, *_APPENDS)),
    "ring reads": Stage(loads=_RING),
    "ring reads, output and appends": Stage(stores=(*_OUTPUT, *_APPENDS), loads=_RING),
    "reading the cursors": Stage(
        values=(
            ("ring_len", "ring_capacity - NUM_TOKENS - {missing}"),
            ("ring_start", "ring_capacity - WINDOW"),
        )
    ),
    "ring scores": Stage(values=(("score", _SCORE), ("score_k", _SCORE))),
}
"""Stages of a step of one token by the name under which documents show them."""

VERIFY_STAGES = STAGES | {
    "ring scores": Stage(values=(("score", _SCORES), ("score_k", _SCORES))),
    "scores of new tokens": Stage(values=(("pair_score", _PAIR_SCORES), ("pair_score_k", _PAIR_SCORES))),
}
"""Stages where drafts are verified."""


def stages_of(spec: Spec) -> dict[str, Stage]:
    """The stages that kernels of ``spec`` have, by name."""
    return VERIFY_STAGES if spec.verifies else STAGES


CELLS = ((16, "nonflush"), (192, "nonflush"), (32768, "nonflush"), (32768, "flush"))
"""Effective batches and modes to look into."""
MODEL = "nemotron-3-super-120b-a12b"
STATE_DTYPES = ("fp32", "bf16")
ROUNDS = 6


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._values = {name: ast.parse(text, mode="eval").body for name, text in stage.values}
        self.changed = 0

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        (target,) = node.targets
        name = target.id if isinstance(target, ast.Name) else ""
        if name in self._stage.loads and _called(node.value) == "load":
            assert isinstance(node.value, ast.Call)
            self._mask(node.value, {"other": ast.Constant(0.0)})
        elif name in self._values:
            node.value = self._values[name]
            self.changed += 1
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        call = node.value
        if isinstance(call, ast.Call) and _called(call) == "store":
            pointers = {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)}
            if pointers & {*self._stage.stores}:
                self._mask(call, {})
        return node

    def _mask(self, call: ast.Call, more: dict[str, ast.expr]) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        given["mask"] = ast.BinOp(given["mask"], ast.BitAnd(), NEVER) if "mask" in given else NEVER
        call.keywords = [ast.keyword(name, value) for name, value in {**more, **given}.items()]
        self.changed += 1


def _called(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else ""


def without(source: str, stage: Stage, live_tokens: int, window: int) -> str:
    """The module ``source`` with ``stage`` left out; the same text where it has no such stage.

    Args:
        live_tokens: What ``ring_len`` is in the rows that will be timed.
        window: Of the spec.
    """
    known = tuple((name, text.format(missing=window - live_tokens)) for name, text in stage.values)
    change = _LeaveOut(Stage(stage.stores, stage.loads, known))
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
    return ast.unparse(tree) if change.changed else source


@dataclass(frozen=True)
class Copy:
    """The plan of one cell with one stage left out ("" is none)."""

    spec: Spec
    effective_batch: int
    mode: str
    plan: Plan
    stage: str
    folder: Path

    def module(self, spec: Spec, structure: Structure) -> Path:
        """File of a module of the copy."""
        source = module_path(spec, structure).read_text(encoding="utf-8")
        if self.stage:
            live = ring_length(spec, self.mode)
            source = without(source, stages_of(spec)[self.stage], live, spec.window)
        path = self.folder / f"m{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
        write(path, source)
        return path

    def compile(self) -> None:
        """Fill Triton's cache, in whatever process this is."""
        from replayssm_tune.runtime.build import default_dtypes
        from replayssm_tune.runtime.compiled import CompiledPlan

        variants = self.plan.variants
        dtypes = default_dtypes(self.spec, Structure(variants[0].structure.role))
        CompiledPlan(self.spec, variants, self.module, dtypes, aligned=True)


def measure_cell(copies: Sequence[Copy], rounds: int) -> dict[str, Any]:
    """Times of the copies of one cell, in µs."""
    import torch

    from replayssm_tune.runtime.compiled import CompiledPlan
    from replayssm_tune.tuner.measure import Graph, LayerStack
    from replayssm_tune.tuner.shapes import shape_for

    cell = copies[0]
    stack = LayerStack(cell.spec, shape_for(cell.spec, cell.effective_batch), torch.device("cuda"))

    def graph(copy: Copy) -> Graph:
        def compiler(spec: Spec, variants: Any, dtypes: tuple[str, ...]) -> CompiledPlan:
            return CompiledPlan(spec, variants, copy.module, dtypes, aligned=True)

        return Graph(stack.calls(cell.plan.variants, cell.mode, compiler))

    graphs = {copy.stage: graph(copy) for copy in copies}
    samples: dict[str, list[float]] = {stage: [] for stage in graphs}
    for _ in range(rounds):
        for stage, one in graphs.items():
            samples[stage] += one.time_us(2)
    median_us = {stage: round(statistics.median(values), 4) for stage, values in samples.items()}
    roof = stack.roof_us("scale" if cell.mode == "flush" else "read", rounds)
    return {
        "spec": cell.spec.key,
        "effective_batch": cell.effective_batch,
        "mode": cell.mode,
        "plan": cell.plan.key,
        "roof_us": round(statistics.median(roof), 4),
        "time_us": median_us.pop(""),
        "without_us": median_us,
    }


def measure(rounds: int, drafts: Sequence[int] = (0,)) -> dict[str, Any]:
    """The run file's content.

    Args:
        rounds: Of all copies of a cell.
        drafts: Draft tokens a step, every number with cells of its own.
    """
    import torch

    from replayssm_tune.codegen import targets
    from replayssm_tune.runtime.lookup import Lookup, shipped_tables
    from replayssm_tune.tuner import models
    from replayssm_tune.tuner.gpu_worker import GpuWorker
    from replayssm_tune.tuner.runfile import today

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: stages can only be timed on one")
    lookup = Lookup(shipped_tables())
    with tempfile.TemporaryDirectory(prefix="replayssm-stages-") as folder:
        here = GpuWorker(Path(folder)).environment()
        gpu = targets.match_device(here.capability, here.sm_count, here.gpu)
        if gpu is None:
            raise SystemExit(f"{here.gpu} is not a known GPU")
        model = models.find(MODEL)
        specs = [spec for n in drafts for spec, _ in models.specs(model, (1,), STATE_DTYPES, 16, n)]
        cells = [
            [
                Copy(spec, batch, mode, lookup.find(spec, batch, gpu.info).plan, stage, Path(folder))
                for stage in ("", *stages_of(spec))
            ]
            for spec in specs
            for batch, mode in CELLS
        ]
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(mp_context=spawn, max_workers=min(8, os.cpu_count() or 1)) as pool:
            for done in [pool.submit(copy.compile) for copies in cells for copy in copies]:
                done.result()
        stages = [measure_cell(copies, rounds) for copies in cells]
    return {
        "what": "stages",
        "gpu": gpu.name,
        "date": today(),
        "environment": vars(here) | {"capability": list(here.capability)},
        "protocol": {"rounds": rounds, "replays_per_round": 2, "statistic": "median"},
        "stages": stages,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of all copies (default {ROUNDS})")
    parser.add_argument("--drafts", default="0", help="draft tokens a step, a list (default 0)")
    parser.add_argument("--output", type=Path, help="run file instead of the one in benchmarks/results")
    chosen = parser.parse_args(arguments)
    run = measure(chosen.rounds, [int(number) for number in chosen.drafts.split(",")])
    path = chosen.output or RESULTS / f"{run['date']}-{gpu_slug(run['gpu'])}-stages.json"
    write(path, json.dumps(run, indent=1) + "\n")
    for cell in run["stages"]:
        print(cell["spec"], cell["effective_batch"], cell["mode"], cell["time_us"], cell["without_us"])
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
