"""What the verbs do: the pipeline behind the command line (see ``cli/pipeline.py``)."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import triton

from .. import __version__
from ..codegen.compile import Compiled, check_toolchain
from ..codegen.emit import check_writable, emit, table_path
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..codegen.timeouts import TIMEOUT_S
from ..runtime.conv_lookup import find_tile
from ..runtime.defaults import default_plan
from ..runtime.lookup import Lookup, read_folder, shipped_tables, user_tables
from ..runtime.plan import Variant
from ..runtime.spec import Spec
from ..runtime.table import Row, Table, Toolchain, load
from . import runfile
from .candidates import Candidates, Compilation, by_promise, left_notes, spec_jobs
from .check import check
from .convolution import ConvResult, ConvTune
from .errors import InterruptedTune, UsageError
from .generate import generate
from .gpu_bench import GpuBench
from .measured import MeasuredTune, budget_share, cache_folder, workers
from .progress import Report
from .records import Environment
from .report import Invariant, Planned, Served, SpecPlan, Tuned
from .request import Job, Work, curves
from .rows import CellResult, native_row, step_row
from .static import static_jobs, static_tune
from .store import Store

__all__ = ["bench", "check", "generate", "plan", "tune"]

SECONDS_PER_COMPILE = 0.9
"""CPU time of one point, for estimates: read off recorded runs."""
SECONDS_PER_CELL = 4.0
"""Time of one cell's search and race on the GPU, for estimates: read off recorded runs."""
SECONDS_PER_CONV_CELL = 1.5
"""The same of a cell of the convolution, its share of compiling included; by hand."""
CONV_STATIC = "tiles of the convolution follow a rule: without a GPU none is timed"


def plan(job: Job, report: Report) -> Planned:
    """Enumerate and cross-compile; drop what cannot run, with reasons. Times nothing.

    A time budget ends compiling, but for default plans.

    Raises:
        CompileError: Nothing compiles.
        ToolchainError: Triton, its assembler or a C compiler is missing.
    """
    until_s = job.budget.until_s(time.monotonic())
    check_toolchain()
    gpu = job.target.gpu
    jobs = by_promise(spec_jobs(job.work), {}) if job.target.measured else static_jobs(job)
    with CompilePool(gpu, workers(timing=False), TIMEOUT_S, cache_folder(job.store)) as pool:
        compilation = Compilation(jobs, pool, gpu, until_s)
        while not compilation.done:
            for _ in compilation.collect():
                report(compilation.event())
    found = {spec: compilation.candidates(spec) for spec in compilation.specs}
    estimate_s = len(jobs) * SECONDS_PER_COMPILE / workers(job.target.measured)
    if job.target.measured:
        timing_s = SECONDS_PER_CELL * sum(len(w.effective_batches) * budget_share(w) for w in job.work)
        timing_s += SECONDS_PER_CONV_CELL * sum(len(w.shapes) for w in job.convolutions)
        # The first work waits for its points, the others compile beside what is timed.
        first_s = estimate_s / max(1, len(job.work))
        estimate_s = first_s + max(estimate_s - first_s, timing_s)
    if job.budget.minutes is not None:
        estimate_s = min(estimate_s, 60 * job.budget.minutes)
    return Planned(
        gpu=gpu.name,
        static=not job.target.measured,
        specs=_spec_plans(job.work, found),
        estimate_s=estimate_s,
        notes=(job.target.note, *job.notes, *_left_notes(found)),
    )


def _left_notes(found: Mapping[Spec, Candidates]) -> tuple[str, ...]:
    return left_notes(*(sum(getattr(c, name) for c in found.values()) for name in ("asked", "left")))


def tune(job: Job, report: Report, results: Path | None = None) -> Tuned:
    """The whole job: compile, gate, search or rank, choose, write kernels and table.

    Args:
        results: Where a measured run also records its figures, an interrupted one those of the rows that it
            writes; None records none.

    Raises:
        CompileError: Nothing compiles.
        GateError: A default plan is numerically wrong here.
        StoreError: The store belongs to another GPU, or cannot be written.
        ToolchainError: Triton, its assembler or a C compiler is missing.
        EmitError: The output folder cannot be written.
        TableError: The output folder has a table of this GPU that cannot be read.
        UsageError: A static tune is to be batch-invariant beside measured rows that are not.
        InterruptedTune: A Ctrl-C, once some specs or convolutions were whole: their rows have been written.
    """
    check_toolchain(launching=job.target.measured)
    check_writable(job.output, job.target.gpu.info)
    if not job.target.measured:
        return _static(job, report, results)
    began = time.monotonic()
    gpu = job.target.gpu
    cells: list[CellResult] = []
    found: dict[Spec, Candidates] = {}
    stopped: KeyboardInterrupt | None = None
    with (
        CompilePool(gpu, workers(timing=True), TIMEOUT_S, cache_folder(job.store)) as pool,
        GpuBench(pool.modules, pool.triton_cache) as gpu_bench,
        Store(job.store, gpu_bench.environment) as store,
    ):
        environment = gpu_bench.environment
        resumed = bool(store.measurements()) or any(pool.triton_cache.glob("*"))
        tuning = MeasuredTune(job, gpu_bench, store, report, _known_rows(job))
        preparation = tuning.prepare(pool)
        convolving = ConvTune(gpu_bench, store, preparation.beside(report))
        convolved: list[ConvResult] = []
        shares = [budget_share(work) for work in job.work]
        try:
            for convolution in job.convolutions:
                convolved += convolving.results(convolution)
            for i, work in enumerate(job.work):
                found |= preparation.of(work.specs)
                cells += tuning.cells(work, found, shares[i] / sum(shares[i:]))
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
    tiles = [result.row(convolving.digest, environment.triton, runfile.today()) for result in convolved]
    rows = _rows(cells, found, environment.triton)
    if stopped is not None and not (rows or tiles):
        raise stopped
    table = dataclasses.replace(_table(gpu, environment, rows), convolutions=tuple(tiles))
    before = _held(job)
    emission = emit(job.output, table)
    minutes = (time.monotonic() - began) / 60
    recorded: Path | None = None
    try:
        if results is not None:
            what = "tune-batch-invariant" if job.batch_invariant else "tune"
            totals = {} if stopped else {"tune_minutes": minutes, "resumed": resumed}
            company, interrupted = gpu_bench.company, stopped is not None
            recorded = _record(
                what, job, environment, cells, totals, results, company, convolved, interrupted=interrupted
            )
    finally:
        # Whatever becomes of the run file, the rows are written.
        if stopped is not None:
            raise InterruptedTune(len(rows) + len(tiles), emission.table_path, recorded) from stopped
    written = load(emission.table_path)
    notes = [job.target.note, *job.notes, *_left_notes(found), *emission.notes]
    notes += _promise_notes(job, before, written)
    notes += (*convolving.notes, *_company_notes(gpu_bench.company))
    if recorded is not None:
        notes.append(f"recorded in {recorded}")
    return Tuned(
        table=written,
        table_path=str(emission.table_path),
        modules=_modules(job.output),
        specs=_spec_plans(job.work, found),
        served=_served(job, gpu, written),
        invariant=tuple(filter(None, map(_invariant, cells))),
        missing=tuple(f"{c.spec.key}@{c.effective_batch}" for c in cells if c.verdict.winner is None),
        gate_failures=(*(f for c in found.values() for f in c.gate_failures), *convolving.failures),
        minutes=minutes,
        store=str(job.store),
        notes=tuple(notes),
    )


def bench(job: Job, results: Path, report: Report) -> Tuned:
    """Time the served rows beside roof, native and default; write a run file into ``results``.

    Nothing is remembered: every figure of the run file comes from this run.

    Raises:
        GateError: A served kernel is numerically wrong here.
        ToolchainError: Triton, its assembler or a C compiler is missing.
        EmitError: The folder of results cannot be written.
    """
    check_toolchain(launching=True)
    began = time.monotonic()
    gpu = job.target.gpu
    lookup = Lookup(shipped_tables(), user_tables())
    served = {
        (spec, batch): lookup.find(spec, batch, gpu.info).plan
        for work in job.work
        for spec in work.specs
        for batch in work.effective_batches
    }
    kernels = {
        (spec, v) for (spec, _), p in served.items() for v in (*p.variants, *default_plan(spec).variants)
    }
    cells: list[CellResult] = []
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="replayssm-bench-") as folder,
        CompilePool(gpu, workers(timing=True), TIMEOUT_S, cache_folder(job.store)) as pool,
        GpuBench(pool.modules, pool.triton_cache) as gpu_bench,
        Store(Path(folder) / "store", gpu_bench.environment) as store,
    ):
        environment = gpu_bench.environment
        compiled = {(result.spec, result.variant): result for result in pool.run(sorted(kernels))}
        pool.close()
        tuning = MeasuredTune(job, gpu_bench, store, report)
        for work in job.work:
            cells += tuning.served_cells(work, served)
        convolving = ConvTune(gpu_bench, store, report)
        convolved = [
            result
            for work in job.convolutions
            for result in convolving.served(
                work, lambda cell: find_tile(lookup, cell.spec, cell.effective_batch, gpu.info).tile
            )
        ]
        for cell in cells:
            of_step = functools.partial(_compiled, compiled, cell.spec)
            rows += filter(None, [step_row(cell, of_step, environment.triton)])
    path = _record("bench", job, environment, cells, {}, results, gpu_bench.company, convolved)
    tiles = [result.row(convolving.digest, environment.triton, runfile.today()) for result in convolved]
    return Tuned(
        table=dataclasses.replace(_table(gpu, environment, rows), convolutions=tuple(tiles)),
        table_path=str(path),
        modules=0,
        specs=(),
        minutes=(time.monotonic() - began) / 60,
        notes=(
            *(job.target.note, *job.notes, *convolving.notes, *_company_notes(gpu_bench.company)),
            f"recorded in {path}",
        ),
    )


def _company_notes(company: int) -> list[str]:
    if not company:
        return []
    who = "another process" if company == 1 else f"{company} other processes"
    return [f"{who} computed on this GPU meanwhile, which disturbs times: measure again with nothing beside"]


def _compiled(found: Mapping[tuple[Spec, Variant], Compiled], spec: Spec, variant: Variant) -> Compiled:
    return found[spec, variant]


def _record(
    what: str,
    job: Job,
    environment: Environment,
    cells: Sequence[CellResult],
    totals: Mapping[str, float],
    folder: Path,
    company: int,
    convolved: Iterable[ConvResult] = (),
    *,
    interrupted: bool = False,
) -> Path:
    models = dict.fromkeys(layer.rpartition(" ")[0] for work in job.work for layer in work.layers)
    steps = [work.spec for work in job.work if work.spec.op in ("step", "verify")]
    tokens = sorted({spec.num_tokens for spec in steps})
    scope, name = ", ".join(models), f"{what}-{'-'.join(models)}"
    if tokens not in ([], [1]):
        scope += f", T {', '.join(map(str, tokens))}"
        name += "".join(f"-t{number}" for number in tokens)
    activations = sorted({spec.activation_dtype for spec in steps})
    if activations not in ([], [Spec.activation_dtype]):
        scope += f", {' and '.join(activations)} activations"
        name += "".join(f"-x{dtype}" for dtype in activations)
    states = {work.spec.state_dtype for work in job.work}
    if len(states) == 1:  # a run of all that a model is tuned for has more
        (state,) = states
        scope, name = f"{scope}, {state} state", f"{name}-{state}"
    rings = sorted({spec.ring_dtype for spec in steps})
    if any(spec.ring_dtype != spec.activation_dtype for spec in steps):
        scope += f", {' and '.join(rings)} ring"
        name += "".join(f"-r{dtype}" for dtype in rings)
    if job.partial:  # its minutes are not those of a whole run
        scope += ", in part"
    if interrupted:
        scope += ", interrupted"
    name = re.sub(r"[^\w.]+", "-", name)  # a config's model may be named by a path, a shape has a space
    of_run = {**totals, "scope": scope}
    gpu = job.target.gpu.name
    data = runfile.run_data(name, gpu, environment, cells, of_run, job.budget, company, convolved)
    return runfile.write_run(folder, data)


def _static(job: Job, report: Report, results: Path | None) -> Tuned:
    began = time.monotonic()
    gpu = job.target.gpu
    before = _held(job)
    timed = {row.spec for row in before if row.source != "static" and not row.batch_invariant}
    if job.batch_invariant and not timed.isdisjoint(work.spec for work in job.work):
        raise UsageError(
            "measured rows stay where estimates come, and these are not batch-invariant",
            where=f"--output {job.output}",
            hint="choose another --output, and let REPLAYSSM_TABLE_DIR name that folder's tables alone",
        )
    result = static_tune(job, cache_folder(job.store), workers(timing=False), report)
    toolchain = Toolchain(triton=triton.__version__, torch=torch.__version__, driver="")
    table = Table(gpu.info, toolchain, "static", __version__, runfile.today(), tuple(result.rows))
    emission = emit(job.output, table)
    written = load(emission.table_path)
    wanted = {(row.spec, row.effective_batch) for row in written.rows}
    return Tuned(
        table=written,
        table_path=str(emission.table_path),
        modules=_modules(job.output),
        specs=result.specs,
        served=_served(job, gpu, written),
        sisters=_sisters(written),
        invariant=result.invariant,
        missing=tuple(
            f"{w.spec.key}@{b}" for w in job.work for b in w.effective_batches if (w.spec, b) not in wanted
        ),
        gate_failures=result.gate_failures,
        minutes=(time.monotonic() - began) / 60,
        static_share=result.share,
        notes=(
            *(job.target.note, *job.notes, *result.notes, *emission.notes),
            *([CONV_STATIC] if job.convolutions else ()),
            *([] if results is None else [f"no run file in {results}: nothing was timed"]),
            *_promise_notes(job, before, written),
        ),
    )


def _invariant(cell: CellResult) -> Invariant | None:
    """What one numerics class costs the cell; None where it has no plan, or any class could win."""
    found = cell.verdict
    if found.winner is None or found.best is None or found.best_time_us is None or found.regret is None:
        return None
    times = (found.time_us, found.best, found.best_time_us, found.regret)
    return Invariant(cell.spec, cell.effective_batch, found.winner, *times)


def _held(job: Job) -> tuple[Row, ...]:
    """Rows of the table that the output folder has of the job's GPU."""
    path = table_path(job.output, job.target.gpu.info)
    return load(path).rows if path.is_file() else ()


def _promise_notes(job: Job, before: Iterable[Row], written: Table) -> list[str]:
    """What became of rows beside which others promise one numerics class at all batches, or no longer do."""
    now = {row.key: row for row in written.rows}
    notes = []
    for work in job.work:
        held = [row for row in before if row.spec == work.spec]
        lost = sum(row.key not in now for row in held)
        kept = any(row.batch_invariant for row in now.values() if row.spec == work.spec)
        if lost:
            notes.append(f"{work.spec.key}: {lost} rows of other numerics classes were left out")
        if not job.batch_invariant and not kept and any(row.batch_invariant for row in held):
            notes.append(f"{work.spec.key}: no longer batch-invariant: this tune was not")
    return notes


def _known_rows(job: Job) -> tuple[Row, ...]:
    """Rows of all tables at hand, those of the output folder first."""
    folder = job.output / "tables"
    own = read_folder(folder) if folder.is_dir() else ()
    return tuple(row for table in (*own, *user_tables(), *shipped_tables()) for row in table.rows)


def _rows(cells: Iterable[CellResult], found: Mapping[Spec, Candidates], version: str) -> list[Row]:
    """Rows of the cells and of their baselines; of one that several cells share, that of the first."""
    rows: dict[tuple[Spec, int], Row] = {}
    for cell in cells:
        made = [step_row(cell, found[cell.spec].compiled.__getitem__, version)]
        if cell.native is not None:
            made.append(native_row(cell, found[cell.spec.native].compiled.__getitem__, version))
        for row in filter(None, made):
            rows.setdefault(row.key, row)
    return list(rows.values())


def _table(gpu: Gpu, environment: Environment, rows: Sequence[Row]) -> Table:
    toolchain = Toolchain(environment.triton, environment.torch, environment.driver)
    return Table(gpu.info, toolchain, "measured", __version__, runfile.today(), tuple(rows))


def _spec_plans(work: Iterable[Work], found: Mapping[Spec, Candidates]) -> tuple[SpecPlan, ...]:
    return tuple(found[spec].plan(curve) for spec, curve in curves(work).items() if spec in found)


def _served(job: Job, gpu: Gpu, written: Table) -> tuple[Served, ...]:
    """What dispatch serves once ``written`` stands in the user's folder."""
    lookup = Lookup(shipped_tables(), (written,))
    served = []
    for work in job.work:
        for batch in work.effective_batches:
            found = lookup.find(work.spec, batch, gpu.info)
            served.append(Served(work.spec, batch, found.plan, found.step, found.reason))
    return tuple(served)


def _sisters(table: Table) -> dict[tuple[str, int], tuple[str, Row]]:
    """For static rows: the measured row that another GPU's table would serve."""
    lookup = Lookup(shipped_tables())
    found = {}
    for row in table.rows:
        hit = lookup.find(row.spec, row.effective_batch, table.gpu)
        if hit.row is not None and hit.row.source == "measured":
            found[row.spec.key, row.effective_batch] = (hit.reason, hit.row)
    return found


def _modules(output: Path) -> int:
    return len(list((output / "kernels").glob("*.py")))
