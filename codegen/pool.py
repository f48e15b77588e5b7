"""A pool of compiler processes that can be killed: one point a job, whatever it does to its process."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, cast

from ..runtime.errors import ReplayError, ToolchainError
from .compile import Compiled, Job, TileJob, check_toolchain, compile_tile, compile_variant
from .files import emit_error
from .targets import Gpu
from .timeouts import TimeOuts

NICENESS: Final = 5
"""Of compiler processes: what times kernels beside them goes first."""
START_TIMEOUT_S: Final = 180.0
"""How long a compiler process may take to start: on a cold disk the imports alone take long."""


class CompilePool:
    """Worker processes that compile points; each can be killed without harm to the others.

    Workers are spawned at the first job and serve until :meth:`close`. Each leads a process group of
    its own, so that a time-out also ends the assembler it started and a Ctrl-C reaches only the
    caller, who then ends them all.

    Args:
        gpu: The target.
        workers: Number of processes.
        timeout_s: Wall time of one job, after which its worker is killed.
        cache_dir: Where rendered modules and Triton's cache lie, and what has timed out: whoever launches the
            points sets ``TRITON_CACHE_DIR`` to :attr:`triton_cache`.
    """

    def __init__(self, gpu: Gpu, workers: int, timeout_s: float, cache_dir: Path) -> None:
        self.gpu = gpu
        self.cache_dir = Path(cache_dir)
        self._count = max(1, workers)
        self._timeout_s = timeout_s
        self._timed_out = TimeOuts(self.cache_dir / "timeouts", gpu, timeout_s)
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def modules(self) -> Path:
        """Folder of the rendered modules."""
        return self.cache_dir / "modules"

    @property
    def triton_cache(self) -> Path:
        """Triton's cache of the workers."""
        return self.cache_dir / "triton"

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers now, busy or not, and remove the temporary files they leave."""
        for worker in (*self._idle, *self._busy):
            worker.kill()
        self._idle.clear()
        self._busy.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def run(self, jobs: Iterable[Job]) -> Iterator[Compiled]:
        """Compile all jobs; results come as they are ready, in no order.

        ``jobs`` is read as workers get free. A time-out or a crash of the compiler is a result, and what has
        timed out in an earlier run of this cache times out at once. Leaving the iterator, by an exception
        too, ends the workers that are busy.

        Raises:
            ToolchainError: The toolchain does not work, or the cache cannot be written.
            EmitError: A module, or a temporary file, cannot be written.
        """
        return cast("Iterator[Compiled]", self._run(jobs))

    def begin(self, jobs: Iterable[Job]) -> CompileRun:
        """The same for a caller who has other work meanwhile; one run of a pool at a time."""
        return CompileRun(self, jobs)

    def run_tiles(self, jobs: Iterable[TileJob]) -> Iterator[tuple[TileJob, str]]:
        """The same of tiles of the convolution: each with why it does not compile, or ""."""
        return cast("Iterator[tuple[TileJob, str]]", self._run(jobs))

    def _run(self, jobs: Iterable[Job | TileJob]) -> Iterator[_Result]:
        run = CompileRun(self, jobs)
        try:
            while not run.done:
                yield from run.collect()
        finally:
            for worker in self._busy:
                worker.kill()
            self._busy.clear()

    def _feed(self, source: Iterator[Job | TileJob]) -> list[_Result]:
        """Give jobs to workers until all are busy; results of those that are known to time out."""
        known: list[_Result] = []
        while len(self._busy) < self._count:
            job = next(source, None)
            if job is None:
                break
            timed_out = None if isinstance(job, TileJob) else self._timed_out.find(job)
            if timed_out is not None:
                known.append(timed_out)
                continue
            self._busy.append(self._worker())
            self._busy[-1].submit(job)
        return known

    def _poll(self, block: bool) -> list[_Result]:
        """Results that are ready; with ``block`` the wait is until one is, or may have timed out."""
        left_s = min(worker.deadline_s for worker in self._busy) - time.monotonic()
        ready = set(wait([worker.pipe for worker in self._busy], max(0.0, left_s) if block else 0.0))
        results = []
        for worker in tuple(self._busy):
            result = worker.poll(worker.pipe in ready)
            if result is None:
                continue
            self._busy.remove(worker)
            if worker.alive:
                self._idle.append(worker)
            if worker.serves and isinstance(result, Compiled) and result.status == "timeout":
                self._timed_out.add((result.spec, result.variant))
            results.append(result)
        return results

    def _worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        return _Worker(self.gpu, self.modules, self.triton_cache, self._scratch_folder(), self._timeout_s)

    def _scratch_folder(self) -> str:
        """Where workers put temporary files: one that is killed cannot remove the compiler's."""
        if self._scratch is None:
            try:
                self.cache_dir.mkdir(parents=True, exist_ok=True)
                # A killed assembler may write its last while the folder goes.
                self._scratch = tempfile.TemporaryDirectory(
                    prefix="compile-", dir=self.cache_dir, ignore_cleanup_errors=True
                )
            except OSError as error:
                raise emit_error(self.cache_dir, error) from error
        return self._scratch.name


_Result = Compiled | tuple[TileJob, str]


class CompileRun:
    """Jobs on their way through a pool. Workers get the next ones as results are collected."""

    def __init__(self, pool: CompilePool, jobs: Iterable[Job | TileJob]) -> None:
        self._pool = pool
        self._source = iter(jobs)
        self.done = False
        """Whether all results have been collected."""

    def collect(self, block: bool = True) -> list[Compiled]:
        """Results since the last call; none if none is ready, or all have been collected.

        Args:
            block: Wait for one. It may be none yet all the same: where a worker has started, not finished.

        Raises:
            ToolchainError: As :meth:`CompilePool.run`.
            EmitError: As there.
        """
        results = self._pool._feed(self._source)
        if self._pool._busy:
            results += self._pool._poll(block and not results)
            results += self._pool._feed(self._source)
        self.done = not results and not self._pool._busy
        return cast("list[Compiled]", results)


def start_apart(process: BaseProcess) -> None:
    """Start a process that no Ctrl-C reaches, not even before it has made a group of its own."""
    resource_tracker.ensure_running()  # a start would do it, and unblock the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Worker:
    """One process and the pipe to it. A job's time does not include the process's start."""

    def __init__(self, gpu: Gpu, modules: Path, triton_cache: Path, scratch: str, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, gpu, modules, triton_cache, scratch), name="compile", daemon=True
        )
        start_apart(self._process)
        theirs.close()
        self._timeout_s = timeout_s
        self._job: Job | TileJob | None = None
        self.serves = False
        """Whether it has started: until then it is not the job that takes time."""
        self._started_s = 0.0

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return not self.pipe.closed and self._process.is_alive()

    @property
    def deadline_s(self) -> float:
        """When to give up on what it does now (monotonic clock)."""
        return self._started_s + (self._timeout_s if self.serves else START_TIMEOUT_S)

    def submit(self, job: Job | TileJob) -> None:
        """Hand it a job; it need not have started yet."""
        self._job, self._started_s = job, time.monotonic()
        # If it died while idle, its pipe is at an end, which poll() reports.
        with contextlib.suppress(OSError):
            self.pipe.send(job)

    def poll(self, readable: bool) -> _Result | None:
        """The result of its job, a failure's included; None while it works."""
        if not readable:
            if time.monotonic() < self.deadline_s:
                return None
            self.kill()
            what = "compiling" if self.serves else "starting a compiler process"
            return self._failed("timeout", f"{what} took more than {self.deadline_s - self._started_s:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.kill()
            return self._failed("crash", f"the compiler's process died (exit code {code})")
        if answer is None:
            self.serves, self._started_s = True, time.monotonic()
            return None
        if isinstance(answer, ReplayError):
            raise answer
        assert isinstance(answer, Compiled | tuple)
        return answer

    def _failed(self, status: str, reason: str) -> _Result:
        assert self._job is not None
        return _failure(self._job, status, reason, self._started_s)

    def kill(self) -> None:
        """End the process and whatever it started, and reap it."""
        if self._process.is_alive() and self._process.pid is not None:
            # The group exists once the worker has made it; until then there is only the process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join()
        self.pipe.close()


def _failure(job: Job | TileJob, status: str, reason: str, started_s: float) -> _Result:
    if isinstance(job, TileJob):
        return job, reason
    return Compiled(*job, (), status, reason, time.monotonic() - started_s)


def _serve(pipe: Connection, gpu: Gpu, modules: Path, triton_cache: Path, scratch: str) -> None:
    """Body of a worker: jobs until the pipe closes, which it also does if the caller dies."""
    os.setpgid(0, 0)
    os.nice(NICENESS)
    # Triton prints a program that the assembler refuses, and the caller's standard output is for results.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch  # the assembler's, and Python's
    os.environ["TRITON_CACHE_DIR"] = str(triton_cache)
    # One job is one core's work; what torch and the assembler could add is the pool's to decide.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        check_toolchain()
        importlib.import_module("..runtime.build", __package__)
        pipe.send(None)
    except ToolchainError as error:
        pipe.send(error)
        return
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        start = time.monotonic()
        answer: _Result | ReplayError
        try:
            if isinstance(job, TileJob):
                answer = job, compile_tile(job, gpu)
            else:
                spec, variant = job
                answer = compile_variant(spec, variant, gpu, modules)
        except ReplayError as error:
            answer = error
        except Exception as error:
            answer = _failure(job, "crash", f"{type(error).__name__}: {error}", start)
        try:
            pipe.send(answer)
        except OSError:
            return
