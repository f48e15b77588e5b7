"""Searching, measuring, gating and choosing kernels on the GPU at hand; the command line."""

if "." not in __name__:
    raise ImportError(
        f"'{__name__}' is a room of the package replayssm_tune, not a package: use "
        f"'import replayssm_tune.{__name__}' (from a checkout: `make .venv`, then .venv/bin/python)"
    )
