"""What a kernel is: the space of its variants, rendering, cross-compiling, emitting; the known GPUs."""

if "." not in __name__:
    raise ImportError(
        f"'{__name__}' is a room of the package replayssm_tune, not a package: use "
        f"'import replayssm_tune.{__name__}' (from a checkout: `make .venv`, then .venv/bin/python)"
    )
