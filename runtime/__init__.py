"""What ships: the ops, dispatch, cursors and the eager reference. Needs torch and triton alone.

The public names are here; importing this package is cheap, each name is loaded when it is first asked
for, and on a machine without a GPU nothing needs Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if "." not in __name__:
    raise ImportError(
        f"'{__name__}' is a room of the package replayssm_tune, not a package: use "
        f"'import replayssm_tune.{__name__}' (from a checkout: `make .venv`, then .venv/bin/python)"
    )

if TYPE_CHECKING:
    from .conv import conv_seed, conv_step, warmup_conv
    from .errors import (
        ArgumentError,
        CompileError,
        DispatchError,
        ReplayError,
        SpecError,
        TableError,
        ToolchainError,
    )
    from .ops import (
        Cache,
        Snapshot,
        bytes_per_slot,
        commit,
        drained,
        gdn_materialize,
        gdn_native_step,
        gdn_native_verify,
        gdn_step,
        make_cache,
        mamba2_materialize,
        mamba2_native_step,
        mamba2_native_verify,
        mamba2_step,
        reset,
        ring_capacity,
        warmup,
    )
    from .spec import Spec
else:
    _ERRORS = (
        "ArgumentError", "CompileError", "DispatchError", "ReplayError", "SpecError", "TableError",
        "ToolchainError",
    )  # fmt: skip
    _OPS = (
        "Cache", "Snapshot", "bytes_per_slot", "commit", "drained", "gdn_materialize", "gdn_native_step",
        "gdn_native_verify", "gdn_step", "make_cache", "mamba2_materialize", "mamba2_native_step",
        "mamba2_native_verify", "mamba2_step", "reset", "ring_capacity", "warmup",
    )  # fmt: skip
    _HOMES = {
        **dict.fromkeys(_ERRORS, "errors"),
        **dict.fromkeys(_OPS, "ops"),
        **dict.fromkeys(("conv_seed", "conv_step", "warmup_conv"), "conv"),
        "Spec": "spec",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value


__all__ = [
    "ArgumentError",
    "Cache",
    "CompileError",
    "DispatchError",
    "ReplayError",
    "Snapshot",
    "Spec",
    "SpecError",
    "TableError",
    "ToolchainError",
    "bytes_per_slot",
    "commit",
    "conv_seed",
    "conv_step",
    "drained",
    "gdn_materialize",
    "gdn_native_step",
    "gdn_native_verify",
    "gdn_step",
    "make_cache",
    "mamba2_materialize",
    "mamba2_native_step",
    "mamba2_native_verify",
    "mamba2_step",
    "reset",
    "ring_capacity",
    "warmup",
    "warmup_conv",
]
