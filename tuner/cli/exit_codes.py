"""Exit codes of the command line, and which error ends in which."""

from __future__ import annotations

import enum
from typing import Final

import click

from ...codegen.files import DISK_ERRORS, EmitError
from ...codegen.targets import GpuError
from ...runtime.errors import ArgumentError, CompileError, DispatchError, ReplayError, SpecError, TableError
from ..errors import (
    CoverageError,
    GateError,
    GpuMismatchError,
    NoGpuError,
    RegressionError,
    StoreError,
    ToolchainError,
    UsageError,
)


class ExitCode(enum.IntEnum):
    """How a command ended; the values are part of the public interface."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    GPU_MISMATCH = 3
    NO_GPU = 4
    GATE = 5
    REGRESSION = 6
    COVERAGE = 7
    STORE = 8
    TABLE = 9
    TOOLCHAIN = 10
    INTERRUPTED = 130


MEANING: Final = {
    ExitCode.OK: "done",
    ExitCode.INTERNAL: "a fault of the program itself; `--debug` shows where",
    ExitCode.USAGE: "a bad option: unknown GPU or model, a shape, window or drafts that no kernel can serve",
    ExitCode.GPU_MISMATCH: "`--gpu` claims one GPU and another one is present",
    ExitCode.NO_GPU: "a GPU is needed, and none is present or named",
    ExitCode.GATE: "a kernel is numerically wrong",
    ExitCode.REGRESSION: "a shipped file or row is not what was recorded, or is slower",
    ExitCode.COVERAGE: "cells that were asked for have no row; what there is has been written",
    ExitCode.STORE: "the store or the output cannot be used: of another GPU, read-only, or a full disk",
    ExitCode.TABLE: "a dispatch table that cannot be read, or a look-up that found nothing",
    ExitCode.TOOLCHAIN: "triton, torch or the C compiler is missing or failed",
    ExitCode.INTERRUPTED: "interrupted, by Ctrl-C or SIGTERM; what was measured is kept, "
    "and the same command resumes",
}
"""One line per code, shown in the documentation."""

BY_ERROR: Final[dict[type[ReplayError], ExitCode]] = {
    UsageError: ExitCode.USAGE,
    GpuError: ExitCode.USAGE,
    SpecError: ExitCode.USAGE,
    ArgumentError: ExitCode.USAGE,
    GpuMismatchError: ExitCode.GPU_MISMATCH,
    NoGpuError: ExitCode.NO_GPU,
    GateError: ExitCode.GATE,
    RegressionError: ExitCode.REGRESSION,
    CoverageError: ExitCode.COVERAGE,
    StoreError: ExitCode.STORE,
    EmitError: ExitCode.STORE,
    TableError: ExitCode.TABLE,
    DispatchError: ExitCode.TABLE,
    CompileError: ExitCode.TOOLCHAIN,
    ToolchainError: ExitCode.TOOLCHAIN,
}
"""A subclass that is not listed ends as its nearest listed base."""


def exit_code(error: BaseException) -> ExitCode:
    """The code a command ends with when ``error`` reaches the top."""
    for kind in type(error).__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    if isinstance(error, click.UsageError):
        return ExitCode.USAGE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return ExitCode.INTERRUPTED
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return ExitCode.STORE
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("triton", "torch"):
        return ExitCode.TOOLCHAIN
    return ExitCode.INTERNAL
