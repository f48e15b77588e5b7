"""The bench on a real GPU: a worker process that is replaced when a candidate kills it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codegen.pool import start_apart
from ..runtime.conv_tiles import ConvSpec, ConvTile
from ..runtime.plan import Plan, Variant
from ..runtime.spec import Spec
from . import gpu_worker
from .errors import ToolchainError
from .records import Cell, ConvCell, Environment, Timing

if TYPE_CHECKING:
    from .gate import Verdict

START_TIMEOUT_S = 180.0
GATE_TIMEOUT_S = 60.0
TIME_TIMEOUT_S = 60.0


class WorkerDiedError(Exception):
    """The worker crashed or hung in a request; a new one serves the next."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class GpuBench:
    """Gates and times candidates on the machine's GPU (see :class:`.records.Bench`).

    Args:
        modules: Folder of rendered modules.
        triton_cache: Triton's cache, filled by the compile pool.
    """

    def __init__(self, modules: Path, triton_cache: Path) -> None:
        self._paths = (modules, triton_cache)
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self.company = 0
        """Most other processes that have been seen to compute on the GPU while it gated or timed."""
        self.environment: Environment = self._ask("environment", START_TIMEOUT_S)

    def __enter__(self) -> GpuBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        self._pipe = self._process = None

    def gate(self, spec: Spec, plan: Plan) -> Verdict | Timing:
        """The gate's verdict, or a failed timing if the candidate crashed, hung or did not compile."""
        try:
            return self._ask("gate", GATE_TIMEOUT_S, spec, plan)  # type: ignore[no-any-return]
        except WorkerDiedError as died:
            return Timing(status=died.status, reason=died.reason)

    def time(self, cell: Cell, variants: tuple[Variant, ...], mode: str, repeats: int) -> Timing:
        """As :meth:`.records.Bench.time`."""
        return self._timing("time", cell, variants, mode, repeats)

    def roof(self, cell: Cell, kind: str, repeats: int) -> Timing:
        """Samples of the roof kernel ``read`` or ``scale`` on the states of ``cell``."""
        return self._timing("roof", cell, kind, repeats)

    def conv_gate(self, spec: ConvSpec, tile: ConvTile, packed: bool) -> str | Timing:
        """As :meth:`.convolution.Bench.conv_gate`."""
        try:
            return self._ask("conv_gate", GATE_TIMEOUT_S, spec, tile, packed)  # type: ignore[no-any-return]
        except WorkerDiedError as died:
            return Timing(status=died.status, reason=died.reason)

    def conv_time(self, cell: ConvCell, tile: ConvTile, repeats: int) -> Timing:
        """As :meth:`.convolution.Bench.conv_time`."""
        return self._timing("conv_time", cell, tile, repeats)

    def conv_roof(self, cell: ConvCell, repeats: int) -> Timing:
        """As :meth:`.convolution.Bench.conv_roof`."""
        return self._timing("conv_roof", cell, repeats)

    def _timing(self, method: str, *arguments: object) -> Timing:
        try:
            return self._ask(method, TIME_TIMEOUT_S, *arguments)  # type: ignore[no-any-return]
        except WorkerDiedError as died:
            return Timing(status=died.status, reason=died.reason)

    def _ask(self, method: str, timeout_s: float, *arguments: object) -> Any:
        if self._pipe is None:
            self._start()
            timeout_s += START_TIMEOUT_S
        assert self._pipe is not None
        try:
            self._pipe.send((method, *arguments))
            if not self._pipe.poll(timeout_s):
                self.close()
                raise WorkerDiedError("timeout", f"no answer in {timeout_s:.0f} s")
            status, result, company = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._exit_code()
            if method == "environment":
                raise ToolchainError(
                    f"the GPU worker ended while it started (exit code {code})",
                    hint="run `python -c 'import torch; torch.zeros(1).cuda()'` to see what is wrong",
                ) from error
            raise WorkerDiedError("crash", f"the GPU worker died (exit code {code})") from error
        self.company = max(self.company, company)
        if status == "ok":
            return result
        if "out of memory" in result or "OutOfMemory" in result:
            raise WorkerDiedError("resources", result)
        raise WorkerDiedError("compile" if result.startswith("CompileError") else "crash", result)

    def _exit_code(self) -> int | None:
        process = self._process
        if process is not None:
            process.join(5.0)
        code = None if process is None else process.exitcode
        self.close()
        return code

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, *self._paths), daemon=True)
        start_apart(self._process)
        theirs.close()
        self._pipe = ours


def _run(pipe: Connection, modules: Path, triton_cache: Path) -> None:
    # A group of its own: a Ctrl-C reaches only the caller, who then ends this process.
    os.setsid()
    gpu_worker.serve(pipe, modules, triton_cache)
