"""What the GPU of a dispatch table is to the GPU that asks: itself, a sister, or of one architecture."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .table import GpuInfo, gpu_slug


@dataclass(frozen=True)
class Relation:
    """What the GPU of a table is to the GPU that asks."""

    alike: bool
    """Same capability and SM count."""
    other_model: bool
    """Alike, but by its name another model."""
    same_architecture: bool
    preference: tuple[float, ...]
    """Smaller is closer: SM count, then words of the name, then memory and cache."""


@functools.lru_cache(maxsize=4096)
def relation_of(theirs: GpuInfo, gpu: GpuInfo) -> Relation:
    """What the GPU of a table, ``theirs``, is to ``gpu``, which asks."""
    alike = (theirs.vendor, theirs.capability, theirs.sm_count) == (
        gpu.vendor, gpu.capability, gpu.sm_count,
    )  # fmt: skip
    shared = len(set(_words(theirs.name)) & set(_words(gpu.name)))
    return Relation(
        alike=alike,
        other_model=alike and _other_model(theirs.name, gpu.name),
        same_architecture=_architecture(theirs) == _architecture(gpu),
        preference=(
            abs(theirs.sm_count - gpu.sm_count),
            -shared,
            abs(theirs.memory_bytes - gpu.memory_bytes),
            abs(theirs.l2_bytes - gpu.l2_bytes),
        ),
    )


def _architecture(gpu: GpuInfo) -> tuple[object, ...]:
    """GPUs whose plans run on each other: of one major capability.

    Within 8.x shared memory and caches differ too much (A100 164 KB, GA10x and L40S 100 KB an SM):
    there each capability stands alone.
    """
    major, minor = gpu.capability
    return (gpu.vendor, major, minor if major == 8 else None)


_MODEL = re.compile(r"[a-z]{1,2}\d{2,3}[a-z]?|\d{4}")


def _words(name: str) -> list[str]:
    return gpu_slug(name).split("-")


def _other_model(one: str, other: str) -> bool:
    """Whether both names tell a model (``h200``, ``l40s``, ``6000``) and not the same one."""
    models = [{word for word in _words(name) if _MODEL.fullmatch(word)} for name in (one, other)]
    return all(models) and not models[0] & models[1]
