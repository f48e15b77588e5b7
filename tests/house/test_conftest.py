from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT


@pytest.mark.gpu
def test_gpu_tests_see_a_device():
    import torch

    assert torch.cuda.is_available()


def test_an_interpreting_test_process_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "tests/house"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TRITON_INTERPRET is set" in done.stderr
