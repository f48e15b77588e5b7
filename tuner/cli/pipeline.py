"""The tuner as the verbs call it, loaded on demand: a usage error must not wait for torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ..errors import ToolchainError

if TYPE_CHECKING:
    from ..progress import Report
    from ..report import Checked, Emitted, Planned, Tuned
    from ..request import Job


class Pipeline(Protocol):
    """What :mod:`replayssm_tune.tuner.run` provides."""

    def plan(self, job: Job, report: Report) -> Planned:
        """Enumerate and cross-compile; drop what cannot run, with reasons. Times nothing."""

    def tune(self, job: Job, report: Report, results: Path | None = None) -> Tuned:
        """The whole job: plan, gate, search or rank, choose, write kernels, table and run file."""

    def generate(self, folder: Path | None, report: Report) -> Emitted:
        """Render the kernels that a folder's tables name (None: the installed one's). Times nothing."""

    def check(self, folders: Sequence[Path], report: Report) -> Checked:
        """Compare generated folders (none: the installed one) with fresh renderings and binaries."""

    def bench(self, job: Job, results: Path, report: Report) -> Tuned:
        """Time the served rows beside roof, native and default; write a run file into ``results``."""


def load() -> Pipeline:
    """Import the tuner.

    Raises:
        ModuleNotFoundError: torch or triton is not installed.
        ToolchainError: One of them is, and cannot be imported.
    """
    try:
        return cast("Pipeline", importlib.import_module("replayssm_tune.tuner.run"))
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise ToolchainError(
            f"a library cannot be imported: {error}",
            where=error.path or error.name or "",
            hint="repair the installation of torch and triton; --debug shows which import fails",
        ) from error
