"""Wheel and sdist are whole, and a tree that would give half a package is refused with a way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

ROOMS = ("codegen", "generated", "runtime", "templates", "tuner")
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "benchmarks", "docs", "tests"
)

# Builds are made once per process.
pytestmark = pytest.mark.xdist_group("packaging")


def python(
    *arguments: str, cwd: Path, path: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(kind: str, tree: Path, out: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Build ``wheel`` or ``sdist`` of ``tree`` as a front end does, without fetching the back end."""
    return python(
        "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(tree), cwd=out, check=check
    )


def the_one(pattern: str, folder: Path) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=NOT_SOURCE)


@pytest.fixture
def without_links(tree: Path) -> Path:
    """What an archive or file system without symbolic links leaves of a checkout."""
    for room in ROOMS:
        link = tree / "src" / "replayssm_tune" / room
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    return tree


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCE)
    build("wheel", tree, folder)
    build("sdist", tree, folder)
    return folder


@pytest.fixture(scope="module")
def site(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    wheel = the_one("*.whl", dist)
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel), cwd=folder)
    return folder


def sources(*suffixes: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_wheel_holds_all_rooms_and_their_data(dist: Path):
    with zipfile.ZipFile(the_one("*.whl", dist)) as wheel:
        names = set(wheel.namelist())
    expected = {f"replayssm_tune/{name}" for name in sources(".py", ".jinja", ".json")}
    assert expected, "the rooms are empty"
    assert expected | {"replayssm_tune/__init__.py", "replayssm_tune/py.typed"} == {
        name for name in names if name.startswith("replayssm_tune/")
    }
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path):
    with tarfile.open(the_one("*.tar.gz", dist)) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    build("wheel", the_one("replayssm_tune-*", tmp_path), tmp_path)
    original, rebuilt = the_one("*.whl", dist), the_one("*.whl", tmp_path)
    assert original.name == rebuilt.name
    with zipfile.ZipFile(original) as one, zipfile.ZipFile(rebuilt) as other:
        assert {entry.filename: entry.CRC for entry in one.infolist()} == {
            entry.filename: entry.CRC for entry in other.infolist()
        }


def test_installed_package_reads_its_own_files(site: Path):
    code = (
        "import importlib.metadata as metadata, importlib.resources as resources, replayssm_tune\n"
        "print(replayssm_tune.__file__)\n"
        "print(metadata.version('replayssm-tune') == replayssm_tune.__version__)\n"
        "import replayssm_tune.templates\n"
        "for entry in resources.files('replayssm_tune.templates').iterdir():\n"
        "    if entry.name.endswith('.jinja'):\n"
        "        print(entry.name, len(entry.read_text(encoding='utf-8')) > 0)\n"
    )
    where, version, *templates = python("-c", code, cwd=site, path=site).stdout.splitlines()
    assert Path(where) == site / "replayssm_tune" / "__init__.py"
    assert version == "True"
    assert sorted(templates) == sorted(f"{Path(name).name} True" for name in sources(".jinja"))


def test_wheel_has_the_console_script(dist: Path):
    with zipfile.ZipFile(the_one("*.whl", dist)) as wheel:
        (entry_points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        text = wheel.read(entry_points).decode()
    assert "replayssm-tune = replayssm_tune.tuner.cli:main" in text
    assert "[replayssm.renderers]\ndefault = replayssm_tune.codegen.cache:render_to_cache" in text


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_tree_without_its_links_is_not_built(kind: str, without_links: Path, tmp_path: Path):
    done = build(kind, without_links, tmp_path, check=False)
    assert done.returncode != 0
    assert "src/replayssm_tune/codegen is not a folder" in done.stdout + done.stderr
    assert "Clone with git" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_a_tree_without_its_links_is_not_imported(without_links: Path):
    done = python(
        "-c", "import replayssm_tune.runtime", cwd=without_links, path=without_links / "src", check=False
    )
    assert done.returncode != 0
    assert "lost its links" in done.stderr
    assert "Clone it with git" in done.stderr


def leave_a_module(tree: Path) -> None:
    stale = tree / "build" / "lib" / "replayssm_tune" / "tuner" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")


def leave_a_template(tree: Path) -> None:
    stale = tree / "build" / "lib" / "replayssm_tune" / "templates" / "gone.jinja"
    stale.parent.mkdir(parents=True)
    stale.write_text("")


@pytest.mark.parametrize("leave", [leave_a_module, leave_a_template])
def test_leftovers_of_an_earlier_build_are_refused(leave: Callable[[Path], None], tree: Path, tmp_path: Path):
    leave(tree)
    done = build("wheel", tree, tmp_path, check=False)
    assert done.returncode != 0
    assert "was left by an earlier build" in done.stdout + done.stderr
    assert "make clean" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_building_twice_in_one_tree_is_fine(dist: Path, tmp_path: Path):
    assert (dist / "tree" / "build").is_dir()
    build("wheel", dist / "tree", tmp_path)
    assert the_one("*.whl", tmp_path).read_bytes()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_not_a_package_of_its_own(room: str):
    done = python("-c", f"import {room}", cwd=ROOT, check=False)
    assert done.returncode != 0
    assert f"import replayssm_tune.{room}" in done.stderr
