"""Points that took too long to compile, kept beside the compiler's cache: no later run waits for them."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Final

from ..runtime.defaults import default_plan
from .compile import Compiled, Job
from .emit import digest_of
from .files import write
from .targets import Gpu, triton_target

TIMEOUT_S: Final = 60.0
"""Wall time in which a point of a plan, a tune or a bench must compile. Most take a second of a processor;
those that take a minute spill thousands of bytes."""


class TimeOuts:
    """What timed out in earlier runs, one small file each.

    A point is known by target, Triton version, spec, variant and the digest of its module. Nothing is
    remembered of default plans: without them there is no row, and a busy machine may have been to blame.

    Args:
        folder: Where the files lie; made where there is something to keep.
        gpu: The target.
        timeout_s: What a point gets now: one that had less before is tried again.
    """

    def __init__(self, folder: Path, gpu: Gpu, timeout_s: float) -> None:
        self._folder, self._gpu, self._timeout_s = folder, gpu, timeout_s

    def find(self, job: Job) -> Compiled | None:
        """The result of ``job`` if it has timed out before; None where it is to be compiled."""
        if not self._folder.is_dir():
            return None
        try:
            had_s = float(json.loads(self._path(job).read_text(encoding="utf-8"))["timeout_s"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None  # none, or one that nobody has written whole
        if not self._timeout_s <= had_s < math.inf or _is_default(job):
            return None  # a NaN is spoilt too
        return Compiled(*job, (), "timeout", f"compiling took more than {had_s:g} s in an earlier run")

    def add(self, job: Job) -> None:
        """Remember that ``job`` has timed out.

        Raises:
            EmitError: The file cannot be written.
        """
        spec, variant = job
        if not _is_default(job):
            said = {"spec": spec.key, "point": variant.key, "timeout_s": self._timeout_s}
            write(self._path(job), json.dumps(said) + "\n")

    def _path(self, job: Job) -> Path:
        import triton

        spec, variant = job
        target = triton_target(self._gpu)
        words = (target.backend, str(target.arch), triton.__version__, spec.key, variant.key)
        key = "/".join((*words, digest_of(spec, variant.structure)))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _is_default(job: Job) -> bool:
    spec, variant = job
    return variant in default_plan(spec).variants
