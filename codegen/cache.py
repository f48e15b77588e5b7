"""Rendered modules as files: Triton reads a kernel's source from disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..runtime.plan import Structure
from ..runtime.spec import Spec
from .render import module_digest, module_name, render


def rendered(folder: Path) -> Callable[[Spec, Structure], Path]:
    """A module source (see :mod:`..runtime.compiled`) that renders into ``folder`` on demand."""

    def find(spec: Spec, structure: Structure) -> Path:
        source = render(spec, structure)
        path = folder / f"{module_name(spec, structure)}_{module_digest(source)}.py"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(source)
            os.replace(temporary, path)
        return path

    return find
