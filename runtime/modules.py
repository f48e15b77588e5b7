"""Generated modules as files: where the module of a spec and structure lies.

A package finds its own modules by name. For any other shape a renderer is asked, which the installed
tool announces as an entry point; a slim package without one refuses the shape.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from .abi import constexprs, parameters
from .errors import DispatchError
from .plan import Structure
from .spec import Spec

if TYPE_CHECKING:
    from .compiled import ModuleSource

CURSORS: Final = "cursors"
"""Name and key of the module of the cursor ops, one for every spec."""

CONVOLUTION: Final = "conv_step"
"""Name and key of the module of the short convolution, one for every spec."""

RENDERERS: Final = "replayssm.renderers"
"""Entry point group of renderers: functions of (module key, parameter names) that return a file's path.

Key and names are plain strings, since the renderer's package and this one need not be the same. A
renderer refuses a key it does not know and names that are not those of the kernel it would render."""


def module_name(spec: Spec, structure: Structure) -> str:
    """File stem of the module in ``generated/kernels``: readable, unique, an identifier."""
    return re.sub(r"[^a-z0-9]+", "_", f"{spec.key}__{structure.key}".lower())


def module_key(spec: Spec, structure: Structure) -> str:
    """What a renderer is asked for: the canonical strings of spec and structure, joined by ``/``."""
    return f"{spec.key}/{structure.key}"


@functools.cache
def load_module(path: Path) -> ModuleType:
    """Import a generated module from its file (Triton reads the source again from there)."""
    name = f"{__package__}._generated.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def packaged(folder: Path) -> ModuleSource:
    """A module source: the modules emitted into ``folder``, then those of a renderer.

    Args:
        folder: A ``generated`` folder; its modules are ``kernels/*.py``.
    """
    kernels = folder / "kernels"

    def find(spec: Spec, structure: Structure) -> Path:
        path = kernels / f"{module_name(spec, structure)}.py"
        if path.is_file():
            return path
        names = (*parameters(spec, structure), *constexprs(structure))
        missing = f"this package has no kernel for {spec.key} ({structure.key})"
        return _rendered(module_key(spec, structure), names, missing, f"add the shape: {spec.tune_command}")

    return find


def package_folder() -> Path:
    """The ``generated`` folder of the package this module belongs to."""
    package = __name__.rpartition(".runtime.")[0]
    # Triton reads a kernel's source from disk, so a package is always a folder.
    return Path(str(importlib.resources.files(package))) / "generated"


@functools.cache
def module_path(spec: Spec, structure: Structure) -> Path:
    """File of the module of ``structure`` for ``spec``: this package's, or rendered on first use.

    Raises:
        DispatchError: The package lacks the module and no renderer is installed, or it failed.
    """
    return packaged(package_folder())(spec, structure)


@functools.cache
def shared_path(name: str) -> Path:
    """File of a module that is the same for every spec: this package's, or rendered on first use.

    Args:
        name: :data:`CURSORS` or :data:`CONVOLUTION`.

    Raises:
        DispatchError: As :func:`module_path`.
    """
    path = package_folder() / "kernels" / f"{name}.py"
    if path.is_file():
        return path
    return _rendered(name, (), f"this package lacks {path}", "install the package again")


def _rendered(key: str, names: tuple[str, ...], missing: str, advice: str) -> Path:
    render = _renderer()
    if render is None:
        raise DispatchError(missing, hint=f"install replayssm-tune to render it on first use, or {advice}")
    try:
        return Path(render(key, names))
    except Exception as error:
        # The renderer may be of another package: its errors are not of this family.
        raise DispatchError(f"{missing}, and rendering it failed: {error}", hint=advice) from error


@functools.cache
def _renderer() -> Callable[[str, tuple[str, ...]], str | Path] | None:
    found = sorted(importlib.metadata.entry_points(group=RENDERERS), key=lambda entry: entry.name)
    if not found:
        return None
    try:
        render: Callable[[str, tuple[str, ...]], str | Path] = found[0].load()
    except (ImportError, AttributeError) as error:
        raise DispatchError(
            f"the renderer {found[0].value} cannot be loaded: {error}",
            where=f"entry point group {RENDERERS}",
            hint="repair or remove the installation of replayssm-tune",
        ) from error
    return render
