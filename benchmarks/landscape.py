"""Recorded landscapes: every point of a few cells timed on a real GPU, to score choosers on a CPU.

    python benchmarks/landscape.py               score the model's picks and the search's samplers
    python benchmarks/landscape.py --calibrate   fit the model's constants to them

A landscape is ``landscapes/<date>-<gpu>-<what>.json.gz``: ``gpu``, ``toolchain``, ``date`` and
``protocol`` of the run; ``cells``, each a spec, an effective batch, a mode and its ``points`` with
their times; ``kernels``, what the compiler (``binaries_triton``) made of each point. The *share* of a
choice is the best time of the cell over the time of what was chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna

from replayssm_tune.codegen import targets
from replayssm_tune.codegen.compile import Compiled, KernelBinary
from replayssm_tune.codegen.targets import Gpu
from replayssm_tune.runtime.plan import Variant
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.samplers import SAMPLERS
from replayssm_tune.tuner.static import CONSTANTS, Constants, estimate_us, promising

FOLDER = Path(__file__).resolve().parent / "landscapes"


@dataclass(frozen=True)
class LandscapeCell:
    """One cell: the points with their times in µs and what they compile to."""

    gpu: Gpu
    spec: Spec
    effective_batch: int
    mode: str
    times_us: dict[Variant, float]
    compiled: dict[Variant, Compiled]

    @property
    def name(self) -> str:
        return f"{self.mode} {self.spec.state_dtype} @{self.effective_batch}"

    def share(self, variant: Variant) -> float:
        return min(self.times_us.values()) / self.times_us[variant]


def load(path: Path) -> list[LandscapeCell]:
    document = json.loads(gzip.decompress(path.read_bytes()))
    gpu = targets.find(document["gpu"])
    compiled: dict[tuple[str, str], Compiled] = {}
    for entry in document["kernels"]:
        spec, variant = Spec.parse(entry["spec"]), Variant.parse(entry["variant"])
        kernels = tuple(KernelBinary(**kernel, digest="") for kernel in entry["kernels"])
        compiled[entry["spec"], entry["variant"]] = Compiled(spec, variant, kernels)
    cells = []
    for cell in document["cells"]:
        times = {Variant.parse(p["variant"]): float(p["time_us"]) for p in cell["points"]}
        cells.append(
            LandscapeCell(
                gpu,
                Spec.parse(cell["spec"]),
                cell["effective_batch"],
                cell["mode"],
                times,
                {variant: compiled[cell["spec"], variant.key] for variant in times},
            )
        )
    return cells


def load_all() -> list[LandscapeCell]:
    return [cell for path in sorted(FOLDER.glob("*.json.gz")) for cell in load(path)]


def model_pick(cell: LandscapeCell, constants: Constants = CONSTANTS) -> Variant:
    """What a static tune would take of the recorded points."""
    return min(
        cell.times_us.keys() & set(promising(cell.spec, "native" if cell.mode == "native" else "both")),
        key=lambda v: (estimate_us(cell.gpu, cell.compiled[v], cell.effective_batch, constants), v),
    )


def search_share(cell: LandscapeCell, sampler_name: str, points: int, seed: int) -> float:
    """Share of the best of ``points`` unique measurements that a sampler asks for."""
    sampler = SAMPLERS[sampler_name](tuple(cell.times_us), seed)
    study = optuna.create_study(sampler=sampler)
    best = math.inf
    for _ in range(points):
        if sampler.exhausted:
            break
        trial = study.ask(sampler.distributions)
        time_us = cell.times_us[sampler.variant(trial)]
        best = min(best, time_us)
        study.tell(trial, math.log(time_us))
    return min(cell.times_us.values()) / best


def quantiles(shares: Sequence[float]) -> dict[str, float]:
    """Median and 10th percentile, three digits."""
    tenth = statistics.quantiles(shares, n=10, method="inclusive")[0]
    return {"median": round(statistics.median(shares), 3), "p10": round(tenth, 3)}


def _misfit(cells: Iterable[LandscapeCell], constants: Constants) -> float:
    """Mean squared log error, near-optimal points weighing most, and what the picks lose."""
    total, count = 0.0, 0
    for cell in cells:
        best = min(cell.times_us.values())
        weighted = weights = 0.0
        estimates: dict[Variant, float] = {}
        for variant, time_us in cell.times_us.items():
            estimate = estimate_us(cell.gpu, cell.compiled[variant], cell.effective_batch, constants)
            estimates[variant] = estimate
            weight = (best / time_us) ** 2
            weighted += weight * math.log(estimate / time_us) ** 2
            weights += weight
        pick = min(estimates, key=lambda v: estimates[v])
        total += weighted / weights + 0.3 * (1 - best / cell.times_us[pick])
        count += 1
    return total / count


_START = Constants(
    launch_us=2.0,
    second_launch_us=2.0,
    issue_rate=1.0,
    instruction_cycles=4.0,
    early_cycles=1000.0,
    late_cycles=1000.0,
    native_cycles=1000.0,
    head_cycles=1000.0,
    score_cycles=500.0,
    barrier_cycles=100.0,
    fixed_share=0.2,
    head_share=0.2,
    native_share=0.4,
    spill_instructions=0.5,
)


def calibrate(cells: Sequence[LandscapeCell], steps: int = 1500, seed: int = 0) -> Constants:
    """Constants that fit ``cells``, by a random walk from round numbers."""
    draw = random.Random(seed)
    best, least = _START, _misfit(cells, _START)
    for step in range(steps):
        width = 0.3 * (1 - step / steps) + 0.02
        moved = {
            field.name: getattr(best, field.name) * math.exp(draw.gauss(0, width))
            for field in dataclasses.fields(Constants)
            if draw.random() < 0.3 and field.name != "evict_gain"
        }
        candidate = dataclasses.replace(best, **moved)
        misfit = _misfit(cells, candidate)
        if misfit < least:
            best, least = candidate, misfit
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibrate", action="store_true")
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    cells = load_all()
    if options.calibrate:
        print(calibrate(cells))
        for dtype in ("fp32", "bf16"):
            kept = [cell for cell in cells if cell.spec.state_dtype == dtype]
            others = [cell for cell in cells if cell.spec.state_dtype != dtype]
            fitted = calibrate(kept)
            shares = [cell.share(model_pick(cell, fitted)) for cell in others]
            print(f"fitted to {dtype} state, picks for the others: {quantiles(shares)}")
        return
    picks = {cell.name: cell.share(model_pick(cell)) for cell in cells}
    for name, share in picks.items():
        print(f"{name:20s} model's pick {share:.3f}")
    print(f"model: {quantiles(list(picks.values()))}")
    large = [cell for cell in cells if len(cell.times_us) >= 80]
    for name in ("model", "tpe", "random"):
        for points in (20, 50):
            found = [search_share(cell, name, points, seed) for cell in large for seed in range(10)]
            print(f"sampler {name:7s} {points:3d} points: {quantiles(found)}")


if __name__ == "__main__":
    main()
