"""Plain records of tuning: a cell, an environment, a measurement, and what measures it.

Nothing here knows torch or a GPU; search, choosing and the store work on these alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ..runtime import conv_tiles
from ..runtime.conv_tiles import ConvSpec
from ..runtime.errors import SpecError
from ..runtime.plan import PLAN_ROLES, Variant
from ..runtime.spec import DTYPE_BYTES, Spec

MODES: Final = ("mix", "nonflush", "flush", "native", "materialize", "convolve")
"""What the rows of a timed batch do: a staggered mix, all one branch, the native step, fold whole rings
into states of other slots, or the convolution in front of a layer."""

ROLE_MODES: Final = {
    "both": "mix",
    "nonflush": "nonflush",
    "flush": "flush",
    "native": "native",
    "materialize": "materialize",
}
"""Mode in which variants of a role are searched."""


def score_mode(spec: Spec) -> str:
    """Mode whose time is the score of plans of ``spec``: that of the role which serves all rows."""
    return ROLE_MODES[PLAN_ROLES[spec.op][0][0]]


STATUSES: Final = ("ok", "gate", "crash", "timeout", "resources", "compile")
"""``ok``, or why a candidate has no time. All are results: none is tried again."""


@dataclass(frozen=True, order=True)
class Cell:
    """What one row of a table is about.

    Args:
        spec: The kernel's specification (``spec.native`` for the baseline, ``spec.materialize``).
        effective_batch: Sequences x heads on this GPU.
    """

    spec: Spec
    effective_batch: int

    @functools.cached_property
    def key(self) -> str:
        """Canonical string, e.g. ``mamba2-step-...@128``."""
        return f"{self.spec.key}@{self.effective_batch}"


@dataclass(frozen=True, order=True)
class ConvCell:
    """What one row of a table's convolutions is about.

    Args:
        spec: The convolution; rows have all their ``num_tokens`` tokens.
        rows: Sequences.
        channels: Channels on this GPU.
    """

    spec: ConvSpec
    rows: int
    channels: int

    @functools.cached_property
    def key(self) -> str:
        """Canonical string, e.g. ``conv-w4-t1-bf16-bf16-bf16@64x8192``."""
        return f"{self.spec.key}@{self.rows}x{self.channels}"

    @property
    def effective_batch(self) -> int:
        """Rows x blocks of channels; see :func:`..runtime.conv_tiles.effective_batch`."""
        return conv_tiles.effective_batch(self.rows, self.channels)

    @property
    def read_bytes(self) -> int:
        """Bytes that a launch must at least read: the new inputs, and the ``width - 1`` before them.

        Weights are not counted: a row more does not move them again.
        """
        spec = self.spec
        tokens = spec.num_tokens * DTYPE_BYTES[spec.activation_dtype]
        return self.rows * self.channels * (tokens + (spec.width - 1) * DTYPE_BYTES[spec.ring_dtype])

    @property
    def written_bytes(self) -> int:
        """Bytes that it must write: the outputs, and the new inputs to the ring."""
        sizes = DTYPE_BYTES[self.spec.activation_dtype] + DTYPE_BYTES[self.spec.ring_dtype]
        return self.rows * self.channels * self.spec.num_tokens * sizes


def parse_cell(key: str) -> Cell | ConvCell:
    """Inverse of the ``key`` of a cell.

    Raises:
        SpecError: Not a key of this version.
    """
    spec_key, _, batch = key.rpartition("@")
    try:
        if "x" not in batch:
            return Cell(Spec.parse(spec_key), int(batch))
        rows, channels = map(int, batch.split("x"))
    except ValueError as error:  # a SpecError is one too
        raise SpecError(f"'{key}' is not the key of a cell: {error}") from error
    return ConvCell(ConvSpec.parse(spec_key), rows, channels)


@dataclass(frozen=True)
class Environment:
    """Where and how something was measured; times of different environments are not compared.

    Args:
        gpu: Device name as the driver gives it.
        capability: Compute capability.
        sm_count: Streaming multiprocessors.
        triton, torch, driver: Versions; "" where not applicable.
        protocol: Version of the measurement protocol.
    """

    gpu: str
    capability: tuple[int, int]
    sm_count: int
    triton: str = ""
    torch: str = ""
    driver: str = ""
    protocol: int = 1

    @functools.cached_property
    def id(self) -> str:
        """Short digest of all fields."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def device(self) -> str:
        """The GPU in words."""
        return f"{self.gpu} (sm_{self.capability[0]}{self.capability[1]}, {self.sm_count} SMs)"


@dataclass(frozen=True)
class Timing:
    """What a bench says of one candidate.

    Args:
        samples_us: Time per launch (of a step, all launches of its plan), one per repeat, in µs.
        status: One of :data:`STATUSES`.
        reason: Why there is no time; "" when ``ok``.
    """

    samples_us: tuple[float, ...] = ()
    status: str = "ok"
    reason: str = ""


@dataclass(frozen=True)
class Measurement:
    """One stored result.

    Args:
        cell: What was measured.
        mode: One of :data:`MODES`.
        subject: Key of the variants (``Plan.key``, ``Variant.key``) or of the convolution's tile, or a name
            like ``roof.read``.
        samples_us: As in :class:`Timing`.
        status: As in :class:`Timing`.
        reason: As in :class:`Timing`.
        tag: "" for the search's own measurement of a point; a race names round and position.
        digest: Digest of the measured modules: a point whose module changed is another point.
        environment: :attr:`Environment.id`.
    """

    cell: Cell | ConvCell
    mode: str
    subject: str
    samples_us: tuple[float, ...] = ()
    status: str = "ok"
    reason: str = ""
    tag: str = ""
    digest: str = ""
    environment: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is a time."""
        return self.status == "ok" and bool(self.samples_us)

    @property
    def time_us(self) -> float:
        """Median of the samples in µs; infinite for a failure."""
        return statistics.median(self.samples_us) if self.ok else math.inf


class Bench(Protocol):
    """What measures candidates; the only thing that knows a GPU."""

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        """Time one step made of ``variants`` (one, or nonflush and flush) in ``mode``.

        Whatever is wrong with the candidate comes back as a status. An exception means that the
        bench itself cannot go on, and ends the run (everything measured is in the store).
        """
        ...


@dataclass(frozen=True)
class Event:
    """Progress: sent after every measurement, and after every one the store already had.

    Args:
        stage: ``search`` or ``race``.
        measurement: The result.
        new: False if it came from the store.
        done: Measurements of this stage so far, remembered ones included.
        total: Estimate of ``done`` at the end of this stage.
    """

    stage: str
    measurement: Measurement
    new: bool
    done: int
    total: int


Progress = Callable[[Event], None]


def subject_key(variants: Sequence[Variant]) -> str:
    """Key of the variants timed together: ``Plan.key`` for a plan, ``Variant.key`` for one."""
    return "+".join(variant.key for variant in variants)


def parse_subject(subject: str) -> tuple[Variant, ...]:
    """Inverse of :func:`subject_key`.

    Raises:
        SpecError: ``subject`` names no variants (a roof, say).
    """
    return tuple(Variant.parse(part) for part in subject.split("+"))


def axes(variants: Sequence[Variant]) -> dict[str, str | int | bool]:
    """Axes of variants timed together by name, e.g. ``nonflush.block_p``; roles are no axis."""
    values: dict[str, str | int | bool] = {}
    for variant in variants:
        role = variant.structure.role
        for record in (variant.structure, variant.tile):
            for field in dataclasses.fields(record):
                if field.name != "role":
                    values[f"{role}.{field.name}"] = getattr(record, field.name)
    return values
