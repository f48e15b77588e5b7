"""Runs test code in Triton's interpreter, in a process of its own.

``TRITON_INTERPRET`` must be set before triton is imported, and it changes every kernel of a process.
The test process therefore never has it; a worker process does. It starts on first use, lives until
the test process ends, and serves one call after another.

Two ways in::

    run_interpreted("tests.codegen.cases:outputs_of", spec, seed=3)   # returns what the function returns

    @interpreted                     # the whole test runs in the worker
    def test_step(spec): ...

Arguments and results travel by pickle: records, numpy arrays and CPU tensors do, closures don't. The
function is looked up by name in the worker, in a module that imports there (``tests`` is a package).
What the function raises is raised here, with the worker's traceback as its cause. The interpreter's
bfloat16 arithmetic is wrong by design: use float32 and float16.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin one only from 3.11 on
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])


def run_interpreted(target: str, *args: Any, timeout_s: float = 240.0, **kwargs: Any) -> Any:
    """Call ``module:function`` with the arguments in the worker and return its result.

    Args:
        target: Importable module and (qualified) function name, e.g. ``tests.codegen.cases:outputs_of``.
        *args: Positional arguments, picklable.
        timeout_s: Seconds after which the worker is killed; the next call starts a new one.
        **kwargs: Keyword arguments, picklable.

    Raises:
        TimeoutError: The call took longer than ``timeout_s``.
        RuntimeError: The worker died (a crash, ``os._exit``); the next call starts a new one.
        Exception: Whatever the function raised.
    """
    pool, pid = _worker()
    try:
        future = pool.submit(_call, target, args, kwargs)
        return future.result(timeout_s)
    except BrokenProcessPool as error:
        _worker.cache_clear()
        raise RuntimeError(f"the interpreter process died in {target}; its stderr may say why") from error
    except FutureTimeoutError as error:
        if future.done():
            raise
        os.kill(pid, signal.SIGKILL)
        _worker.cache_clear()
        raise TimeoutError(f"{target} took longer than {timeout_s} s in the interpreter") from error


def interpreted(test: Test) -> Test:
    """Run a test (its fixtures and parameters picklable) in the worker; marks it ``interpreter``."""

    @functools.wraps(test)
    def in_worker(**kwargs: Any) -> None:
        run_interpreted(f"{test.__module__}:{test.__qualname__}", **kwargs)

    return pytest.mark.interpreter(in_worker)  # type: ignore[no-any-return]


@functools.cache
def _worker() -> tuple[ProcessPoolExecutor, int]:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_become_interpreter)
    return pool, pool.submit(os.getpid).result()


def _become_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from replayssm_tune.tuner.interpreted import lighten_interpreter

    lighten_interpreter()


def _call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, _, name = target.partition(":")
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return inspect.unwrap(function)(*args, **kwargs)  # type: ignore[arg-type]
