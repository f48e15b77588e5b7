"""Autotuning and code generation for replay kernels of state space models."""

import os.path

__version__ = "0.1.0"

# Where symbolic links do not survive (some archives, some file systems), the rooms are text files.
for _room in ("codegen", "templates", "tuner", "runtime", "generated"):
    _path = os.path.join(os.path.dirname(__file__), _room)
    if os.path.isfile(_path):
        raise ImportError(
            f"{_path} is a text file where a symbolic link to the top-level folder '{_room}' belongs: this "
            "copy of the repository lost its links. Clone it with git (on Windows with "
            "core.symlinks=true), or install a wheel or source distribution."
        )
del _room, _path
