"""Recorded runs: what a run measured, with where and how, as one JSON file."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ..codegen.files import write
from ..runtime.table import gpu_slug
from .convolution import ConvResult
from .measure import GRAPH_LAUNCHES, L2_MULTIPLE
from .measured import FINAL_REPEATS, RULES, SETTINGS
from .mix import flush_share
from .records import Environment
from .request import Budget
from .rounding import significant
from .rows import CellResult

DIGITS: Final = 6
"""Significant digits of all figures."""


def today() -> str:
    """ISO date."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def run_data(
    what: str,
    gpu: str,
    environment: Environment,
    cells: Iterable[CellResult],
    totals: dict[str, Any],
    budget: Budget,
    company: int,
    convolved: Iterable[ConvResult],
) -> dict[str, Any]:
    """Content of a run file (see ``benchmarks/summary.py`` for the format)."""
    return {
        "what": what,
        "gpu": gpu,
        "date": today(),
        "environment": {
            **asdict(environment),
            "python": platform.python_version(),
            "processors": len(os.sched_getaffinity(0)),
            "other_processes": company,
        },
        "protocol": {
            "version": environment.protocol,
            "state_bytes_over_l2": L2_MULTIPLE,
            "launches_per_graph_at_least": GRAPH_LAUNCHES,
            "repeats_final": FINAL_REPEATS,
            "repeats_screening": SETTINGS.repeats,
            "budget": asdict(budget),
            "race": asdict(RULES),
            "mix": "ring lengths of the flush cycle in turn over rows and layers; of a step's tokens the "
            "first and half of the others (rounded up) are kept",
            "materialize": "whole rings of all rows into states of other slots",
            "nonflush": "window // 2 live ring tokens, or as many as leave room for a step's",
        },
        "cells": [_cell_data(cell) for cell in cells],
        "totals": totals,
        "convolutions": [result.data() for result in convolved],
    }


def _cell_data(cell: CellResult) -> dict[str, Any]:
    verdict, native, mode = cell.verdict, cell.native, cell.mode
    return {
        "spec": cell.spec.key,
        "effective_batch": cell.effective_batch,
        "rows": cell.rows,
        "heads": cell.heads,
        "flush_share": flush_share(cell.spec),
        "plan": verdict.winner.key if verdict.winner else "",
        "verdict": verdict.kind,
        "time_us": {
            mode: verdict.time_us,
            **{branch: found.time_us for branch, found in cell.branches.items()},
        },
        "launch_us": {branch: found.time_us for branch, found in cell.launches.items()},
        "launch_names": {branch: found.subject for branch, found in cell.launches.items()},
        "roof_us": {"read": cell.read_us, "scale": cell.scale_us, mode: cell.roof_us},
        "native_us": native and native.time_us,
        "native_name": native.winner.key if native and native.winner else "",
        **({"native_steps_us": cell.native_steps_us} if cell.spec.verifies else {}),
        "default_us": {
            mode: verdict.default_time_us,
            **{branch: found.time_us for branch, found in cell.default_branches.items()},
        },
        "noise_floor": verdict.noise_floor,
        "samples_us": {
            mode: list(verdict.samples_us),
            **{branch: list(found.samples_us) for branch, found in cell.branches.items()},
            **({"native": list(native.samples_us)} if native else {}),
        },
    }


def write_run(folder: Path, data: dict[str, Any]) -> Path:
    """Write ``<date>-<gpu>-<what>.json``, or ``...-2.json`` beside one of that name; the path.

    The file also says at what time of that day (UTC) it was written: of two runs the later one counts.

    Raises:
        StoreError: The folder cannot be written.
    """
    name = f"{data['date']}-{gpu_slug(data['gpu'])}-{data['what']}"
    names = itertools.chain((name,), (f"{name}-{n}" for n in itertools.count(2)))
    path = next(p for p in (folder / f"{name}.json" for name in names) if not p.exists())
    now = datetime.datetime.now(datetime.timezone.utc)
    write(path, json.dumps(_rounded({**data, "time": f"{now:%H:%M:%S}"}), indent=1) + "\n")
    return path


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return significant(value, DIGITS)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
