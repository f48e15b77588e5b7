"""What the interpreter's worker is asked to do in test_interpreter.py."""

from __future__ import annotations

import os
import time

import numpy as np
import numpy.typing as npt


def process() -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("TRITON_INTERPRET")


def doubled(values: npt.NDArray[np.float32], *, offset: float = 0.0) -> npt.NDArray[np.float32]:
    """``2 x + offset`` by a Triton kernel; loaded here since triton reads the variable when imported."""
    import torch

    from tests.house import interpreted_kernels

    source = torch.from_numpy(values)
    out = torch.empty_like(source)
    interpreted_kernels.double[(1,)](source, out, offset, source.numel(), BLOCK=16)
    result: npt.NDArray[np.float32] = out.numpy()
    return result


def halved_twice(values: npt.NDArray[np.float32]) -> tuple[list[npt.NDArray[np.float32]], list[bool], int]:
    """Results of two launches; whether ``tl.load`` is itself around them; patches of the language."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    from tests.house import interpreted_kernels

    load, patches = tl.load, 0
    patch = interpreter._patch_builtin

    def counted(*args: object) -> None:
        nonlocal patches
        patches += args[0] is tl
        patch(*args)

    interpreter._patch_builtin = counted
    try:
        results, itself = [], [tl.load is load]
        for _ in range(2):
            source = torch.from_numpy(values)
            out = torch.empty_like(source)
            interpreted_kernels.halve_and_fill[(3,)](source, out, source.numel(), BLOCK=16)
            results.append(out.numpy())
            itself.append(tl.load is load)
    finally:
        interpreter._patch_builtin = patch
    return results, itself, patches


def fails() -> None:
    raise ArithmeticError("the worker's own message")


def dies() -> None:
    os._exit(3)


def hangs() -> None:
    time.sleep(60)
