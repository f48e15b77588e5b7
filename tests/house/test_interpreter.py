from __future__ import annotations

import os

import numpy as np
import pytest

from tests.interpreter import interpreted, run_interpreted

CASES = "tests.house.interpreted_cases"


def test_one_worker_serves_all_calls_and_only_it_interprets():
    pid, variable = run_interpreted(f"{CASES}:process")
    assert variable == "1"
    assert pid != os.getpid()
    assert run_interpreted(f"{CASES}:process") == (pid, "1")
    assert "TRITON_INTERPRET" not in os.environ


def test_a_kernel_runs_on_cpu_memory():
    values = np.arange(5, dtype=np.float32)
    result = run_interpreted(f"{CASES}:doubled", values, offset=1.0)
    np.testing.assert_array_equal(result, 2 * values + 1)


def test_the_language_is_replaced_for_a_launch_and_put_back():
    values = np.arange(5, dtype=np.float32)
    results, itself, patches = run_interpreted(f"{CASES}:halved_twice", values)
    for result in results:
        np.testing.assert_array_equal(result, values / 2)
    assert itself == [True] * 3
    assert patches <= 2 * len(results), "not at every call of a function from a kernel: those are more"


@pytest.fixture
def offset() -> float:
    return 3.0


@interpreted
@pytest.mark.parametrize("count", [1, 16])
def test_a_whole_test_runs_in_the_worker(count: int, offset: float):
    from tests.house.interpreted_cases import doubled

    assert os.environ["TRITON_INTERPRET"] == "1"
    values = np.ones(count, dtype=np.float32)
    np.testing.assert_array_equal(doubled(values, offset=offset), 2 * values + offset)


def test_an_exception_arrives_with_the_workers_traceback():
    with pytest.raises(ArithmeticError, match="the worker's own message") as caught:
        run_interpreted(f"{CASES}:fails")
    assert "interpreted_cases.py" in str(caught.value.__cause__)


def test_an_assertion_in_the_worker_fails_the_test():
    with pytest.raises(AssertionError):
        interpreted_failure()


@interpreted
def interpreted_failure() -> None:
    np.testing.assert_equal(os.environ["TRITON_INTERPRET"], "0")


@pytest.mark.parametrize(
    ("target", "timeout_s", "error"), [("dies", 60.0, RuntimeError), ("hangs", 0.5, TimeoutError)]
)
def test_a_lost_worker_is_named_and_replaced(target: str, timeout_s: float, error: type[Exception]):
    pid, _ = run_interpreted(f"{CASES}:process")
    with pytest.raises(error, match=target):
        run_interpreted(f"{CASES}:{target}", timeout_s=timeout_s)
    assert run_interpreted(f"{CASES}:process")[0] != pid
