"""Refuses to build from a tree that would give half a package; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "replayssm_tune"
ROOMS = ("codegen", "templates", "tuner", "runtime", "generated")


def refuse(message: str) -> None:
    raise SystemExit(f"replayssm-tune cannot be built from {ROOT}: {message}")


def require_rooms() -> None:
    for room in ROOMS:
        if not (PACKAGE / room / "__init__.py").is_file():
            refuse(
                f"src/replayssm_tune/{room} is not a folder with an __init__.py. In a checkout it is a "
                "symbolic link to the top-level folder of that name; archives and file systems without "
                "symbolic links lose it. Clone with git (on Windows with core.symlinks=true), or unpack "
                "a source distribution instead."
            )


class build_py_without_leftovers(build_py):
    """Files that an earlier build left in build/lib would silently get into the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            built = Path(self.build_lib)
            for path in sorted(built.rglob("*")):
                source = PACKAGE.parent / path.relative_to(built)
                if path.is_file() and "__pycache__" not in path.parts and not source.is_file():
                    refuse(
                        f"{path} was left by an earlier build and has no source any more. "
                        "Remove the folder build/ (`make clean`) and build again."
                    )
        super().run()


require_rooms()
setup(cmdclass={"build_py": build_py_without_leftovers})
