"""The names that ``replayssm_tune.runtime`` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from replayssm_tune import runtime
from replayssm_tune.runtime import ops


def test_every_public_name_is_there() -> None:
    for name in runtime.__all__:
        assert getattr(runtime, name).__name__ == name
    assert runtime.mamba2_step is ops.mamba2_step


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'mamba3_step'"):
        runtime.mamba3_step  # type: ignore[attr-defined]  # noqa: B018


def printed(code: str) -> str:
    """By a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_loads_neither_torch_nor_triton() -> None:
    code = "import sys, replayssm_tune.runtime; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    assert printed(code) == "[]"


def test_specs_and_errors_need_no_torch() -> None:
    code = "import sys; from replayssm_tune.runtime import Spec, SpecError; print('torch' in sys.modules)"
    assert printed(code) == "False"


def test_the_convolution_needs_no_triton() -> None:
    code = (
        "import sys; from replayssm_tune.runtime import conv_step, conv_seed; print('triton' in sys.modules)"
    )
    assert printed(code) == "False"
