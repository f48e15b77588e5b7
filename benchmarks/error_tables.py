"""Tables of the accuracy page: errors against fp64, kernel by kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.summary import ERROR_CLAIMS, ERROR_TOKENS, Cell, Record, reached, select
from benchmarks.words import FAMILY_NAMES, figure, fixed, goal, markdown, short_name
from replayssm_tune.runtime.spec import DTYPE_BYTES
from replayssm_tune.tuner.rounding import significant


def error_places(records: Sequence[Record]) -> dict[str, list[str]]:
    """Where the errors that are shown were recorded, by family: GPUs, or the CPU while there is none."""
    found: dict[str, set[str]] = {}
    for record in select(records, "state_error"):
        found.setdefault(record["cell"]["family"], set()).add(record["cell"]["gpu"])
    return {family: sorted(places - {"cpu"}) or ["cpu"] for family, places in found.items()}


def _shown(records: Sequence[Record]) -> list[Record]:
    """The errors that are shown."""
    places = error_places(records)
    return [
        record
        for record in records
        if record["claim"] in (*ERROR_CLAIMS, "folds")
        and record["cell"]["gpu"] in places.get(record["cell"]["family"], ())
    ]


def error_source_region(records: Sequence[Record]) -> str:
    """What the errors are of: the eager reference or a GPU's kernels."""
    places = error_places(records)
    if not places:
        return "No errors have been recorded yet: run `python benchmarks/accuracy.py`."
    runs = sorted({r["run"] for r in _shown(records) if r["claim"] in ERROR_CLAIMS})
    files = ", ".join(f"[{run}](../benchmarks/results/{run})" for run in runs)
    gpus = sorted({place for found in places.values() for place in found} - {"cpu"})
    eager = [FAMILY_NAMES[family] for family, found in places.items() if found == ["cpu"]]
    source = (
        f"Recorded on {', '.join(gpus)}, with the kernels that dispatch served there that day. "
        if gpus
        else ""
    )
    if eager:
        figures, run = (
            (f"Figures of {' and '.join(eager)}", "run of it")
            if gpus
            else ("All figures of this page", "run")
        )
        source += (
            f"**{figures} are of the eager reference**, which is what the ops run on a CPU: no {run} on a "
            "GPU has been recorded yet. Kernels are held to the same bound by the gate. "
        )
    return f"{source}({files})"


ERROR_HEADER = ("on", "layer", "T", "kernel", "state", "ring")
"""What tells the kernels apart whose errors are compared."""


def _variants(records: Sequence[Record], claim: str) -> list[tuple[Cell, list[Record]]]:
    """Records of a claim by their cells without tokens: native, and behind it replay of the same layer."""
    found: dict[str, tuple[Cell, list[Record]]] = {}
    for record in select(_shown(records), claim):
        cell = {k: v for k, v in record["cell"].items() if k != "tokens"}
        if cell["kernel"] in ("native", "replay"):
            found.setdefault(json.dumps(cell), (cell, []))[1].append(record)
    families, dtypes = list(FAMILY_NAMES), list(DTYPE_BYTES)

    def place(item: tuple[Cell, list[Record]]) -> tuple[Any, ...]:
        cell = item[0]
        family, state = families.index(cell["family"]), dtypes.index(cell["state_dtype"])
        return family, cell["gpu"], cell["T"], state, cell["kernel"], cell.get("ring_dtype", "")

    return sorted(found.values(), key=place)


def _variant_row(cell: Cell) -> tuple[str, ...]:
    ring = cell.get("ring_dtype", "")
    return cell["gpu"], short_name(cell), str(cell["T"]), cell["kernel"], cell["state_dtype"], ring


def _error(value: float) -> str:
    return f"{significant(value, 3):.2e}"


def _errors_region(records: Sequence[Record], claim: str) -> str:
    """Errors of every kernel after so many tokens, the ideal after the last, and how many keep the bound."""
    rows = []
    for cell, found in _variants(records, claim):
        by_tokens = {record["cell"]["tokens"]: record for record in found}
        at = {**cell, "kernel": "ideal", "tokens": max(by_tokens)}
        (ideal,) = select(records, claim, **at)
        met = sum(map(reached, found))
        errors = (_error(by_tokens[n]["value"]) if n in by_tokens else "" for n in ERROR_TOKENS)
        rows.append([*_variant_row(cell), *errors, _error(ideal["value"]), f"{met} of {len(found)}"])
    first, *others = (str(n) for n in ERROR_TOKENS)
    last = others[-1]
    return markdown([*ERROR_HEADER, f"after {first}", *others, f"ideal at {last}", "within bound"], rows)


def output_errors_region(records: Sequence[Record]) -> str:
    """Errors of outputs, kernel by kernel."""
    return _errors_region(records, "output_error")


def state_errors_region(records: Sequence[Record]) -> str:
    """Errors of states, kernel by kernel."""
    return _errors_region(records, "state_error")


def rounding_region(records: Sequence[Record]) -> str:
    """What rounding the outputs alone would give."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for record in select(_shown(records), "output_error", kernel="rounding"):
        cell = record["cell"]
        values = rows.setdefault((cell["gpu"], short_name(cell)), {})
        values[str(cell["tokens"])] = record["value"]
    first, *others = (str(n) for n in ERROR_TOKENS)
    table = [
        [*key, *(_error(values[n]) if n in values else "" for n in (first, *others))]
        for key, values in rows.items()
    ]
    return markdown([*ERROR_HEADER[:2], f"after {first}", *others], table)


def folds_region(records: Sequence[Record]) -> str:
    """Whether errors of states grow with the folds, kernel by kernel of replay."""
    rows = []
    for cell, found in _variants(records, "state_error_growth"):
        if cell["kernel"] != "replay":
            continue
        (growth,) = found
        (folds,) = select(records, "folds", **cell)
        (ideal,) = select(records, "state_error_growth", **{**cell, "kernel": "ideal"})
        native = {**cell, "kernel": "native", "op": "native_step", "window": 0}
        native.pop("ring_dtype")
        (beside,) = select(records, "state_error_growth", **native)
        asked, met = ("", "") if growth["asked"] is None else (goal(growth, growth["asked"]), "no")
        if met and reached(growth):
            met = "yes"
        gpu, layer, tokens, _, state, ring = _variant_row(cell)
        values = (fixed(record["value"]) for record in (growth, ideal, beside))
        rows.append([gpu, layer, tokens, state, ring, figure(folds["value"], 4), *values, asked, met])
    keys = [name for name in ERROR_HEADER if name != "kernel"]
    return markdown(
        [*keys, "folds", "late over early", "of the ideal", "of native", "asked", "reached"], rows
    )
