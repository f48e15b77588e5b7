"""What holds for every tracked file."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

# A letter of each in brackets, so that this file passes its own test.
ELSEWHERE = re.compile(
    r"(?<![\w.}])/(wor[k]|op[t]|roo[t]|hom[e])/|\.\./share[d]\b|\.org/(simpl[e]|wh[l])\b|nvidia-h20[0]\b"
)


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_speaks_of_the_project_only(tracked: list[Path]):
    host = socket.gethostname()
    found = []
    for path in tracked:
        data = path.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode().splitlines(), 1):
            if ELSEWHERE.search(line) or (len(host) > 8 and host in line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "paths, hosts or names of someone's machine:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_traces_of_a_machine_are_recognised(folder: str):
    assert ELSEWHERE.search(f"see /{folder}/x")


@pytest.mark.parametrize("text", ["framework/x", "src/home/x", "${HOME}/x", "tests/work/x"])
def test_paths_of_the_project_are_not(text: str):
    assert not ELSEWHERE.search(text)


def test_emitted_kernels_pass_the_formatter():
    kernels = ROOT / "generated" / "kernels"
    if not any(kernels.glob("*.py")):
        pytest.skip("no emitted kernels")
    check = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "--no-cache", str(kernels)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_rooms_are_links_to_the_top_level(tracked: list[Path]):
    package = ROOT / "src" / "replayssm_tune"
    links = {entry.name: entry.readlink() for entry in package.iterdir() if entry.is_symlink()}
    rooms = ("codegen", "generated", "runtime", "templates", "tuner")
    assert links == {room: Path("..", "..", room) for room in rooms}
