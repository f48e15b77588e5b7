"""Where every measurement stands at once: an Optuna storage, by default one journal file.

One study per (cell, mode), one finished trial per measurement: the axes of its kernels are
categorical parameters, so that Optuna's dashboard is useful; all else is in user attributes. The
many visits of a race are stored too, without parameters: there is nothing to learn from them.

Writing. A measurement is told as one ``add_trial`` of a finished trial: one appended line, well
under a millisecond. Asking a study on the journal instead costs a line per parameter (13 ms), so
samplers are asked on a study in memory that mirrors the results (see ``search``); nothing
half-done is ever in the store, and a killed run leaves no running trials behind. Enumerated points
go in as they are measured: with one write each, a bulk would save nothing and could lose much.

Reading. The store is read once at opening, into a dictionary; :meth:`Store.refresh` takes in what
other processes have added since.

Failures are results: they are stored (as failed trials, with status and reason) and not retried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ..runtime.errors import SpecError
from .errors import StoreError
from .records import Cell, ConvCell, Environment, Measurement, Timing, axes, parse_cell, parse_subject

_PREFIX: Final = "replayssm2"
_ENVIRONMENTS: Final = f"{_PREFIX}|environments"
_SYNC_INTERVAL_S: Final = 1.0

_OTHER: Final = "other"
_POWERS: Final = (0, *(2**i for i in range(11)))
_CHOICES: Final[dict[str, tuple[str | int | bool, ...]]] = {
    "coefficients": ("inline", "precomputed", "prologue"),
    "route": ("output_only", "rebuild"),
    "readout": ("elementwise", "dot"),
    "scores": ("elementwise", "dot"),
    "load": ("late", "early"),
    "loop": ("heads", "tiles"),
    "solve": ("columns", "inverse"),
    "num_stages": tuple(range(1, 9)),
    "max_registers": (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 168, 192, 224, 240, 255),
    "evict_first": (False, True),
}
"""Values of an axis as the dashboard shows them (others as "other"; the subject has the truth).
They do not follow the space of the day: Optuna refuses a parameter whose choices change."""


class Store:
    """Measurements of one GPU, kept across runs.

    Args:
        location: Path of a journal file (made if missing), or a database URL that Optuna knows,
            such as ``postgresql://...``, to share a store between machines.
        environment: Where measurements are made from now on. Only measurements of an equal
            environment are found again.

    Raises:
        StoreError: The store belongs to another GPU, is damaged, or cannot be written.
    """

    def __init__(self, location: str | os.PathLike[str], environment: Environment) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.location = os.fspath(location)
        self.environment = environment
        self.environments: dict[str, Environment] = {}
        self._journal: _Journal | None = None
        self._studies: dict[str, optuna.Study] = {}
        self._seen: dict[str, int] = {}
        self._index: dict[tuple[str, ...], Measurement] = {}
        self._storage = self._open()
        try:
            with self._guard("read"):
                self._check_environment()
                self.refresh()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged(error) from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Force what was written to the disk. The store may be used and closed again."""
        if self._journal is not None:
            with self._guard("written"):
                self._journal.sync()

    def find(
        self, cell: Cell | ConvCell, mode: str, subject: str, tag: str = "", digest: str = ""
    ) -> Measurement | None:
        """The measurement of this point in this environment, if there is one."""
        return self._index.get((self.environment.id, cell.key, mode, subject, tag, digest))

    def add(self, measurement: Measurement) -> Measurement:
        """Store a measurement, stamped with this store's environment; on return it is in the file.

        Raises:
            StoreError: The disk is full, read-only, or the database cannot be reached.
        """
        measurement = dataclasses.replace(measurement, environment=self.environment.id)
        name = f"{_PREFIX}|{measurement.cell.key}|{measurement.mode}"
        with self._guard("written"):
            self._study(name).add_trial(_to_trial(measurement))
        self._remember(measurement)
        return measurement

    def recall(
        self,
        cell: Cell | ConvCell,
        mode: str,
        subject: str,
        tag: str,
        digest: str,
        ask: Callable[[], Timing],
    ) -> Measurement:
        """The measurement of this point: what is remembered, or what ``ask`` says now, and then stored.

        Raises:
            StoreError: As :meth:`add`.
        """
        known = self.find(cell, mode, subject, tag, digest)
        if known is not None:
            return known
        said = ask()
        return self.add(
            Measurement(cell, mode, subject, said.samples_us, said.status, said.reason, tag, digest)
        )

    def measurements(
        self, cell: Cell | ConvCell | None = None, mode: str | None = None, every_environment: bool = False
    ) -> list[Measurement]:
        """Measurements in the order of their cells' first appearance, then of time."""
        return [
            m
            for m in self._index.values()
            if (every_environment or m.environment == self.environment.id)
            and cell in (None, m.cell)
            and mode in (None, m.mode)
        ]

    def refresh(self) -> int:
        """Take in measurements that other processes have added; their number is returned."""
        before = len(self._index)
        for study in self._storage.get_all_studies():
            parts = study.study_name.split("|")
            if len(parts) != 3 or parts[0] != _PREFIX:
                continue
            try:
                cell = parse_cell(parts[1])
            except SpecError:
                continue  # a cell of another version of this package: nobody here can ask for it
            trials = self._storage.get_all_trials(study._study_id, deepcopy=False)
            for trial in trials[self._seen.get(study.study_name, 0) :]:
                self._remember(_from_trial(cell, parts[2], trial))
            self._seen[study.study_name] = len(trials)
        return len(self._index) - before

    def _remember(self, m: Measurement) -> None:
        key = (m.environment, m.cell.key, m.mode, m.subject, m.tag, m.digest)
        self._index.setdefault(key, m)

    def _open(self) -> BaseStorage:
        if "://" in self.location:
            try:
                return optuna.storages.get_storage(self.location)
            except Exception as error:
                raise StoreError(
                    f"store {_without_password(self.location)}: cannot be opened "
                    f"({type(error).__name__}: {error}); check the URL, that the server runs and that "
                    "its Python driver is installed, or give the path of a journal file instead"
                ) from error
        with self._guard("opened"):
            Path(self.location).parent.mkdir(parents=True, exist_ok=True)
            self._journal = _Journal(self.location)
            try:
                return JournalStorage(self._journal)
            except (KeyError, TypeError, ValueError, AssertionError, RecursionError) as error:
                raise self._damaged(error) from error

    def _check_environment(self) -> None:
        study = self._study(_ENVIRONMENTS)
        for key, fields in study.user_attrs.items():
            fields = {**fields, "capability": tuple(fields["capability"])}
            self.environments[key] = known = Environment(**fields)
            if known.device != self.environment.device:
                raise StoreError(
                    f"store {_without_password(self.location)}: holds measurements of {known.device}, "
                    f"but this GPU is {self.environment.device}; times of two GPUs do not mix: "
                    "choose another store for this GPU"
                )
        if self.environment.id not in self.environments:
            study.set_user_attr(self.environment.id, dataclasses.asdict(self.environment))
            self.environments[self.environment.id] = self.environment

    def _study(self, name: str) -> optuna.Study:
        if name not in self._studies:
            self._studies[name] = optuna.create_study(
                storage=self._storage, study_name=name, load_if_exists=True
            )
        return self._studies[name]

    def _damaged(self, error: Exception) -> StoreError:
        where = _first_bad_line(self.location) if self._journal is not None else ""
        return StoreError(
            f"store {_without_password(self.location)}: {where or 'a record'} cannot be read "
            f"({type(error).__name__}: {error}); remove that line, or move the file away and start a "
            "new store"
        )

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turn what disks and databases raise into a StoreError that says what to do."""
        try:
            yield
        except OSError as error:
            advice = "choose another place for the store"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                advice = "make room on the disk and run the same command again: it resumes"
            elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                advice = "it is read-only: choose a writable place for the store"
            elif error.errno in (errno.ENOLCK, errno.ENOTSUP):
                advice = "its file system has no locks: choose a local disk, or a database URL"
            raise StoreError(
                f"store {self.location}: cannot be {what} ({error.strerror or error}); {advice}"
            ) from error
        except optuna.exceptions.OptunaError as error:
            raise StoreError(
                f"store {_without_password(self.location)}: cannot be {what} ({error}); check that the "
                "database can be reached and run the same command again: it resumes"
            ) from error


class _Journal(JournalFileBackend):
    """Optuna's journal file, made to survive a kill at any moment.

    Optuna's own lock is a file that a killed process leaves behind, for which the next one waits
    30 s; a lock of the kernel goes with its owner. A torn last line, which Optuna would append to
    and then never read past, is cut off, and so is a line that did not fit on the disk. The file is
    synchronised once a second, not per line: a killed process loses nothing by that, a power cut
    at most a second.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._synced_at = 0.0
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644))
        super().__init__(path)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = _cut_torn_line(file)
            try:
                written = 0
                while written < len(data):
                    written += os.write(file, data[written:])
            except BaseException:
                os.ftruncate(file, end)
                raise
            if time.monotonic() - self._synced_at > _SYNC_INTERVAL_S:
                os.fsync(file)
                self._synced_at = time.monotonic()
        finally:
            os.close(file)

    def sync(self) -> None:
        file = os.open(self._path, os.O_RDWR)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _cut_torn_line(file: int) -> int:
    """Cut what follows the last line end of an open file; the size is returned, in bytes."""
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return size
    start = size
    while start > 0:
        chunk_start = max(0, start - 65536)
        position = os.pread(file, start - chunk_start, chunk_start).rfind(b"\n")
        if position >= 0:
            start = chunk_start + position + 1
            break
        start = chunk_start
    os.ftruncate(file, start)
    return start


def _first_bad_line(path: str) -> str:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if "op_code" not in json.loads(line):
                    return f"line {number}"
            except (ValueError, TypeError, RecursionError):
                return f"line {number}"
    return ""


def _without_password(location: str) -> str:
    scheme, separator, rest = location.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else location


@functools.cache
def _distribution(axis: str) -> CategoricalDistribution:
    return CategoricalDistribution((*_CHOICES.get(axis.rpartition(".")[2], _POWERS), _OTHER))


@functools.lru_cache(maxsize=65536)
def _parameters(subject: str) -> dict[str, str | int | bool]:
    try:
        values = axes(parse_subject(subject))
    except SpecError:
        return {}  # a roof: no kernel of a space
    return {name: value if value in _distribution(name).choices else _OTHER for name, value in values.items()}


def _to_trial(m: Measurement) -> FrozenTrial:
    parameters = {} if m.tag else _parameters(m.subject)
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE if m.ok else TrialState.FAIL,
        value=m.time_us if m.ok else None,
        params=dict(parameters),
        distributions={name: _distribution(name) for name in parameters},
        user_attrs={
            "subject": m.subject,
            "mode": m.mode,
            "samples_us": list(m.samples_us),
            "status": m.status,
            "reason": m.reason,
            "tag": m.tag,
            "digest": m.digest,
            "environment": m.environment,
        },
    )


def _from_trial(cell: Cell | ConvCell, mode: str, trial: FrozenTrial) -> Measurement:
    attributes = trial.user_attrs
    return Measurement(
        cell=cell,
        mode=mode,
        samples_us=tuple(attributes["samples_us"]),
        **{
            name: attributes[name] for name in ("subject", "status", "reason", "tag", "digest", "environment")
        },
    )
