"""What every test gets: markers that act, one hypothesis profile, no interpreter in this process."""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    max_examples=50,
    # The same examples in every run where someone else has to read the failure.
    derandomize=bool(os.environ.get("CI")),
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise pytest.UsageError(
            "TRITON_INTERPRET is set: it would have every kernel of the test process interpreted. "
            "Unset it; tests that need the interpreter start it themselves (tests/interpreter.py)."
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # costs seconds, so only where a test needs it

    missing = not torch.cuda.is_available()
    for item in gpu_items:
        # One worker process at a time on the device.
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if missing:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
