"""Dispatch: from (spec, effective batch, GPU) to a plan, with the reason.

The first of these that has a row wins:

=============  ==================================================================
``user``       rows of the user's tables for this GPU, static ones only where batch-invariant
``measured``   rows measured on this GPU
``sister``     rows measured on another GPU of this capability and SM count
``architecture``  rows measured on the same architecture, nearest SM count first
``static``     rows for this GPU that analysis chose without one
``default``    the computed default plan
=============  ==================================================================

A spec that none of the first five serves takes the row of a neighbouring spec, one that differs in
the optional inputs only, before the default. Looking up is a pure function of the tables and the
arguments: it never tunes, never compiles, and all ranks agree.

Batch-invariant rows of a spec are of one numerics class and serve every batch, however far from their
own. Where they come first, nothing else serves their spec; where they do not, the reason says so.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib.resources
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .defaults import default_plan
from .errors import DispatchError, TableError
from .kinship import Relation, relation_of
from .plan import Plan
from .spec import Spec
from .table import GpuInfo, Row, Table, loads

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

TABLE_DIR_VARIABLE: Final = "REPLAYSSM_TABLE_DIR"
"""Environment variable that names the user's folder of tables."""

STEPS: Final = ("user", "measured", "sister", "architecture", "static", "default")
"""Steps of the look-up, in order."""

FINE_LIMIT: Final = 4096
"""Up to here the grid has two points an octave; beyond, where GPUs are full, one."""

GRID: Final = tuple(sorted([1 << k for k in range(3, 18)] + [3 << k for k in range(2, 11)]))
"""The canonical effective batches of all GPUs, 8 to 131072."""

REACH: Final = 4
"""How many times its own batch the end row of a table serves beyond it, below ``FINE_LIMIT``."""

_OPTIONAL_INPUTS: Final = ("has_d", "has_z", "has_dt_bias", "dt_softplus", "qk_l2norm")


def batch_grid(heads_min: int = GRID[0], maximum: int = GRID[-1]) -> tuple[int, ...]:
    """Effective batches to tune, from one sequence of ``heads_min`` heads up to ``maximum``.

    Every batch in between has its nearest canonical point in the grid, unless that lies above
    ``maximum``.

    Raises:
        ValueError: ``maximum`` is below ``heads_min``, or ``heads_min`` below 1.
    """
    if not 1 <= heads_min <= maximum:
        raise ValueError(f"no batch lies between {heads_min} and {maximum}; give 1 <= heads_min <= maximum")
    first = nearest(heads_min, GRID)
    return tuple(batch for batch in GRID if first <= batch <= max(maximum, first))


def nearest(effective_batch: int, candidates: Sequence[int]) -> int:
    """The candidate nearest to ``effective_batch`` in log space; ties go to the smaller.

    ``candidates`` ascend. Beyond the ends it is the end. Exact: no logarithm is taken.
    """
    above = bisect.bisect_left(candidates, effective_batch)
    if above == 0:
        return candidates[0]
    if above == len(candidates):
        return candidates[-1]
    low, high = candidates[above - 1], candidates[above]
    return low if effective_batch * effective_batch <= low * high else high


def within_reach(effective_batch: int, batches: Sequence[int], timed: bool) -> bool:
    """Whether the row of the nearest of ``batches``, which ascend, serves ``effective_batch``.

    Beyond the ends only a ``timed`` row does, and the winner of a small batch only nearby.
    """
    first, last = batches[0], batches[-1]
    if first <= effective_batch <= last:
        return True
    if _cell(effective_batch) == _cell(nearest(effective_batch, batches)):
        return True
    if effective_batch > last:
        return timed and (last >= FINE_LIMIT or effective_batch <= REACH * last)
    return timed and effective_batch * REACH >= first


@dataclass(frozen=True)
class Found:
    """What a look-up serves."""

    plan: Plan
    row: Row | None
    """The row behind the plan; None for the computed default."""
    reason: str
    """One sentence: whose row, and why it serves this call."""
    step: str
    """One of :data:`STEPS`."""
    batch_invariant: bool = False
    """Whether every batch of the spec is served by plans of this one's numerics class, on this GPU."""


@dataclass(frozen=True)
class Candidate:
    """One line of :meth:`Lookup.explain`: a place that was looked in."""

    step: str
    """One of :data:`STEPS`."""
    table: str
    """GPU of the table, ``""`` where there was none."""
    had: str
    """What it had for the spec."""
    outcome: str
    """Why it served, or why it was passed over."""
    served: bool


@dataclass(frozen=True)
class _Series:
    """The rows of one spec in one table: the static ones, or the others. Ascending batches."""

    gpu: GpuInfo
    rows: tuple[Row, ...]
    batches: tuple[int, ...]
    static: bool
    user: bool
    invariant: bool
    """The rows are of one numerics class, and promise it for every batch."""

    def pick(self, effective_batch: int) -> Row | None:
        """The nearest row, or None where it does not reach."""
        row = self.rows[bisect.bisect_left(self.batches, nearest(effective_batch, self.batches))]
        near = self.invariant or within_reach(effective_batch, self.batches, row.source == "measured")
        return row if near else None


@dataclass(frozen=True)
class _Link:
    """A series where the chain reaches it."""

    step: str
    series: _Series
    spec: Spec
    first: bool = False
    """Nothing comes before it."""


class Lookup:
    """Look-up in a fixed set of tables.

    Args:
        tables: Tables of the package.
        user_tables: Tables of the user's folder; they come first.
        default_plan: The computed default of a spec.
        is_stale: Whether a row's module has changed since the row was made. Such a row still serves,
            and its reason says so. None: not asked.
    """

    def __init__(
        self,
        tables: Iterable[Table],
        user_tables: Iterable[Table] = (),
        default_plan: Callable[[Spec], Plan] = default_plan,
        is_stale: Callable[[Row], bool] | None = None,
    ) -> None:
        groups = ((user_tables, True), (tables, False))
        self.tables = tuple((table, user) for group, user in groups for table in group)
        """Every table with whether it is the user's, in the order they are looked at."""
        self._default_plan = default_plan
        self._is_stale = is_stale
        self._series: dict[Spec, list[_Series]] = {}
        self._neighbours: dict[Spec, list[Spec]] = {}
        self._chains: dict[tuple[Spec, GpuInfo], tuple[_Link, ...]] = {}
        for table, user in self.tables:
            self._add(table, user)

    def find(self, spec: Spec, effective_batch: int, gpu: GpuInfo, strict: bool = False) -> Found:
        """The plan for ``effective_batch`` (sequences x heads) of ``spec`` on ``gpu``.

        Raises:
            DispatchError: ``strict``, and no row serves the call.
        """
        hit = self._serve(spec, effective_batch, gpu)
        if hit is not None:
            link, row = hit
            reason = self._reason(link, row, spec, effective_batch, gpu)
            return Found(row.plan, row, reason, link.step, link.series.invariant and link.first)
        reason = f"no table has a row for {spec.key} at effective batch {effective_batch} on {_gpu(gpu)}"
        if strict:
            raise DispatchError(
                f"{reason}; tune it with '{spec.tune_command}', point {TABLE_DIR_VARIABLE} to a table "
                "that has it, or leave strict mode to run the default plan"
            )
        alone = not self._chain(spec, gpu)
        return Found(self._default_plan(spec), None, f"{reason}: computed default plan", "default", alone)

    def explain(self, spec: Spec, effective_batch: int, gpu: GpuInfo) -> tuple[Candidate, ...]:
        """Every place :meth:`find` looks in, in order; the one that serves is marked."""
        found = self.find(spec, effective_batch, gpu)
        hit = self._serve(spec, effective_batch, gpu)
        chain = self._chain(spec, gpu)
        serving = hit[0] if hit else None
        lines = []
        for step in STEPS[:-1]:
            links = [link for link in chain if link.step == step and link.spec == spec]
            lines += [self._line(link, spec, effective_batch, link is serving, found) for link in links]
            if not links:
                own = step == "user" and any(link.series.user and link.spec == spec for link in chain)
                had = "rows that do not come first, see below" if own else "nothing for this spec"
                lines.append(Candidate(step, "", had, "passed over", False))
        for link in chain:
            if link.spec != spec:
                lines.append(self._line(link, spec, effective_batch, link is serving, found))
        plan = self._default_plan(spec).key
        lines.append(Candidate("default", "", plan, "not needed" if hit else found.reason, not hit))
        return tuple(lines)

    def _serve(self, spec: Spec, effective_batch: int, gpu: GpuInfo) -> tuple[_Link, Row] | None:
        for link in self._chain(spec, gpu):
            row = link.series.pick(effective_batch)
            if row is not None:
                return link, row
        return None

    @staticmethod
    def _line(link: _Link, spec: Spec, effective_batch: int, served: bool, found: Found) -> Candidate:
        series = link.series
        had = f"{len(series.rows)} rows, effective batch {series.batches[0]} to {series.batches[-1]}"
        if link.spec != spec:
            had = f"neighbouring spec {link.spec.key}: {had}"
        if served:
            outcome = found.reason
        elif series.pick(effective_batch) is not None:
            outcome = "not needed: an earlier step serves"
        else:
            outcome = f"passed over: effective batch {effective_batch} is beyond the reach of its end row"
        table = f"user's table: {_gpu(series.gpu)}" if series.user else _gpu(series.gpu)
        return Candidate(link.step, table, had, outcome, served)

    def _add(self, table: Table, user: bool) -> None:
        grouped: dict[tuple[Spec, bool], list[Row]] = {}
        for row in table.rows:
            grouped.setdefault((row.spec, row.source == "static"), []).append(row)
        for (spec, static), rows in grouped.items():
            batches = tuple(row.effective_batch for row in rows)
            if spec not in self._series:
                self._neighbours.setdefault(_without_options(spec), []).append(spec)
            invariant = all(row.batch_invariant for row in rows)
            series = _Series(table.gpu, tuple(rows), batches, static, user, invariant)
            self._series.setdefault(spec, []).append(series)

    def _chain(self, spec: Spec, gpu: GpuInfo) -> tuple[_Link, ...]:
        chain = self._chains.get((spec, gpu))
        if chain is None:
            ranked = []
            for other in self._neighbours.get(_without_options(spec), ()):
                distance = sum(getattr(spec, name) != getattr(other, name) for name in _OPTIONAL_INPUTS)
                for series in self._series[other]:
                    relation = relation_of(series.gpu, gpu)
                    step = _step(series, relation)
                    if step:
                        # Whose own GPU it is comes first; of other GPUs the closest does.
                        promise = series.invariant and step in ("user", "measured")
                        place = (distance > 0, STEPS.index(step), distance)
                        own = (*place, not promise, series.static, not series.user)
                        ranked.append((own + relation.preference, _Link(step, series, other)))
            ordered = [link for _, link in sorted(ranked, key=lambda item: item[0])]
            chain = tuple(dataclasses.replace(link, first=not i) for i, link in enumerate(ordered))
            self._chains[spec, gpu] = chain
        return chain

    def _reason(self, link: _Link, row: Row, spec: Spec, effective_batch: int, gpu: GpuInfo) -> str:
        made = {"measured": "measured on", "static": "chosen by analysis for"}.get(
            row.source, "transferred to"
        )
        parts = [whose(made, link.step, link.series.gpu, gpu)]
        if row.source == "transferred":
            parts.append(f"not timed, from {row.origin}")
        if row.effective_batch != effective_batch:
            parts.append(f"nearest effective batch {row.effective_batch} to {effective_batch}")
        if link.spec != spec:
            changed = (n for n in _OPTIONAL_INPUTS if getattr(spec, n) != getattr(link.spec, n))
            parts.append(f"neighbouring spec {link.spec.key}, which differs in {', '.join(changed)}")
        if link.series.invariant and link.first:
            parts.append("batch-invariant: one numerics class at every batch")
        elif link.series.invariant:
            parts.append("batch-invariant rows, but others come first: not so at every batch")
        if self._is_stale is not None and self._is_stale(row):
            parts.append("stale: its kernel has changed since")
        return "; ".join(parts)


def read_folder(folder: Traversable | Path, strict: bool = False) -> tuple[Table, ...]:
    """All tables (``*.json``) of a folder, by file name.

    Args:
        folder: The folder.
        strict: For tools: the first unreadable table raises. Serving goes on instead: each is
            warned of once and counts as absent.

    Raises:
        TableError: ``strict``, and a table or the folder cannot be read.
    """
    tables = []
    try:
        files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    except OSError as error:
        hint = f"{TABLE_DIR_VARIABLE} names a folder of tables, such as the one that a tune has written"
        why = f"cannot read the folder of tables: {error.strerror}"
        _refuse(TableError(why, where=str(folder), hint=hint), strict)
        return ()
    for file in files:
        try:
            tables.append(loads(file.read_text(encoding="utf-8"), str(file)))
        except (OSError, UnicodeDecodeError) as error:
            _refuse(TableError(f"{file}: cannot read the table: {error}"), strict)
        except TableError as error:
            _refuse(error, strict)
    return tuple(tables)


def shipped_tables(strict: bool = False) -> tuple[Table, ...]:
    """Tables in ``generated/tables`` of the package this module belongs to."""
    package = __name__.rpartition(".runtime.")[0]
    folder = importlib.resources.files(package) / "generated" / "tables"
    return read_folder(folder, strict) if folder.is_dir() else ()


def user_tables(strict: bool = False) -> tuple[Table, ...]:
    """Tables in the folder that the environment variable ``REPLAYSSM_TABLE_DIR`` names, if set."""
    folder = os.environ.get(TABLE_DIR_VARIABLE, "")
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:  # of a user that does not exist
        _refuse(TableError(f"{TABLE_DIR_VARIABLE}={folder}: {error}"), strict)
        return ()
    return read_folder(path, strict) if folder else ()


@functools.cache
def default_lookup() -> Lookup:
    """The look-up of this process: the user's and the package's tables, read once."""
    return Lookup(shipped_tables(), user_tables())


@functools.cache
def announce(reason: str) -> None:
    """Log why a plan serves, once a process for each reason."""
    logging.getLogger(__name__).info("%s", reason)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"{message}; served as if it were absent", RuntimeWarning, stacklevel=2)


def _refuse(error: TableError, strict: bool) -> None:
    if strict:
        raise error
    _warn_once(str(error))


def _cell(effective_batch: int) -> int:
    """The canonical point a batch is tuned at."""
    return nearest(effective_batch, GRID)


@functools.lru_cache(maxsize=4096)
def _without_options(spec: Spec) -> Spec:
    # GDN's softplus is no option.
    softplus = spec.family == "gdn"
    return dataclasses.replace(
        spec, has_d=False, has_z=False, has_dt_bias=False, dt_softplus=softplus, qk_l2norm=False
    )


def whose(made: str, step: str, theirs: GpuInfo, gpu: GpuInfo) -> str:
    """What a reason begins with: how a row was ``made`` and on which GPU, seen from ``gpu``, which asks."""
    if step == "user":
        return f"user's table: {made} {theirs.name}"
    if step == "sister":
        return f"{made} {theirs.name}, of the same capability and SM count ({theirs.sm_count}) as {gpu.name}"
    if step == "architecture":
        counts = f"({theirs.sm_count} SMs against {gpu.sm_count})"
        return f"{made} {theirs.name}, of the same architecture as {gpu.name} {counts}"
    return f"{made} {theirs.name}"


def _step(series: _Series, relation: Relation) -> str | None:
    """The step at which a GPU reaches the series, or None."""
    # Analysis does not hide what was measured, unless the user asked for one class at all batches.
    step = measured_step(relation, series.user)
    if not series.static or (step == "user" and series.invariant):
        return step
    return "static" if relation.alike else None


def measured_step(relation: Relation, user: bool) -> str | None:
    """The step at which a GPU reaches measured rows of a table that is the ``user``'s or not, or None."""
    if relation.alike and user and not relation.other_model:
        return "user"
    if relation.alike:
        return "sister" if relation.other_model else "measured"
    return "architecture" if relation.same_architecture else None


def _gpu(gpu: GpuInfo) -> str:
    return f"{gpu.name} (capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.sm_count} SMs)"
