"""Every error of the package has a documented exit code."""

import errno
import importlib
import pkgutil

import click
import pytest

import replayssm_tune
from replayssm_tune.runtime.errors import ReplayError, SpecError
from replayssm_tune.tuner.cli.exit_codes import BY_ERROR, MEANING, ExitCode, exit_code


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_of_the_package_has_a_code():
    for module in pkgutil.walk_packages(replayssm_tune.__path__, "replayssm_tune."):
        name = module.name
        if "__main__" not in name and ".generated.kernels" not in name and not name.endswith(".tuner.run"):
            importlib.import_module(name)
    ours = [kind for kind in subclasses(ReplayError) if kind.__module__.startswith("replayssm_tune.")]
    assert SpecError in ours
    for kind in ours:
        assert exit_code(kind("what")) is not ExitCode.INTERNAL, kind


def test_codes_are_distinct_and_documented():
    assert set(MEANING) == set(ExitCode)
    assert set(BY_ERROR.values()) <= set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (click.UsageError("x"), ExitCode.USAGE),
        (click.Abort(), ExitCode.INTERRUPTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (OSError(errno.ENOSPC, "No space left on device", "store"), ExitCode.STORE),
        (PermissionError(errno.EACCES, "Permission denied", "store"), ExitCode.STORE),
        (OSError(errno.EROFS, "Read-only file system"), ExitCode.STORE),
        (ModuleNotFoundError("No module named 'triton'", name="triton.language"), ExitCode.TOOLCHAIN),
        (ModuleNotFoundError("No module named 'x'", name="x"), ExitCode.INTERNAL),
        (FileNotFoundError(errno.ENOENT, "No such file"), ExitCode.INTERNAL),
        (KeyError("x"), ExitCode.INTERNAL),
    ],
)
def test_errors_of_others(error, code):
    assert exit_code(error) is code
