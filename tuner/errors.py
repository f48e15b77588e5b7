"""Errors of the tuner and its command line; each kind has an exit code of its own."""

from __future__ import annotations

from pathlib import Path

from ..runtime.errors import ReplayError
from ..runtime.errors import ToolchainError as ToolchainError


class UsageError(ReplayError, ValueError):
    """Options that do not fit together, or a name (GPU, model) that nobody knows."""


class GpuMismatchError(ReplayError, RuntimeError):
    """``--gpu`` claims one GPU and another one is present."""


class NoGpuError(ReplayError, RuntimeError):
    """A GPU is needed and none is present."""


class GateError(ReplayError, RuntimeError):
    """A kernel that was about to be written or shipped is numerically wrong."""


class RegressionError(ReplayError, RuntimeError):
    """A shipped row is slower than what it was measured against."""


class CoverageError(ReplayError, RuntimeError):
    """A table lacks cells that were asked for."""


class StoreError(ReplayError, RuntimeError):
    """The store of measurements, or a file of results, cannot be used or written."""


class InterruptedTune(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a tune; rows of the specs and convolutions that were whole are written."""

    def __init__(self, rows: int, table: Path, recorded: Path | None = None) -> None:
        super().__init__(rows, table, recorded)
        self.rows, self.table, self.recorded = rows, table, recorded
