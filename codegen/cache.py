"""Rendered modules as files: Triton reads a kernel's source from disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import platformdirs

from ..runtime.abi import constexprs, parameters
from ..runtime.errors import SpecError
from ..runtime.modules import module_name
from ..runtime.plan import Structure
from ..runtime.spec import Spec
from .files import write
from .render import SHARED, render

CACHE_DIR_VARIABLE: Final = "REPLAYSSM_CACHE_DIR"
"""Environment variable that names the folder of rendered modules."""


def cache_folder() -> Path:
    """Folder of modules rendered on first use: ``REPLAYSSM_CACHE_DIR``, else the user's cache."""
    named = os.environ.get(CACHE_DIR_VARIABLE, "")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("replayssm") / "kernels"


def rendered(folder: Path) -> Callable[[Spec, Structure], Path]:
    """A module source (see :mod:`..runtime.compiled`) that renders into ``folder`` on demand."""
    return lambda spec, structure: _store(folder, module_name(spec, structure), render(spec, structure))


def render_to_cache(key: str, names: Sequence[str]) -> Path:
    """The tool's renderer (see :data:`..runtime.modules.RENDERERS`): into the user's cache.

    Args:
        key: A name of :data:`.render.SHARED`, or the canonical strings of spec and structure, joined by
            ``/``.
        names: Parameters that the caller will pass, in order; empty for a shared module.

    Raises:
        SpecError: No such module, or its parameters are others: the caller is of another version.
        EmitError: The cache cannot be written.
    """
    folder = cache_folder()
    if key in SHARED:
        return _store(folder, key, SHARED[key]())
    spec_key, _, structure_key = key.partition("/")
    spec = Spec.parse(spec_key)
    try:
        structure = Structure(*structure_key.split("."))
    except TypeError as error:
        raise SpecError(
            f"'{structure_key}' is not a structure of this version; upgrade replayssm-tune"
        ) from error
    if tuple(names) != (*parameters(spec, structure), *constexprs(structure)):
        raise SpecError(
            f"the kernel of {key} takes other parameters in this version of replayssm-tune than the caller "
            "passes; install one version of both"
        )
    return rendered(folder)(spec, structure)


def _store(folder: Path, name: str, source: str) -> Path:
    # Named by content: several versions share the folder, and none rewrites what another has loaded.
    path = folder / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    write(path, source)
    return path
