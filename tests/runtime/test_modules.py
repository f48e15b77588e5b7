"""Where modules are found: in the package, by a renderer, or nowhere with a way out."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from replayssm_tune.codegen import cache, emit
from replayssm_tune.codegen.files import EmitError
from replayssm_tune.codegen.render import render, render_conv, render_cursors
from replayssm_tune.runtime import modules
from replayssm_tune.runtime.abi import constexprs, parameters
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import DispatchError, SpecError
from replayssm_tune.runtime.plan import Structure
from tests.paths import ROOT
from tests.runtime import table_samples as samples

STRUCTURE = default_plan(samples.SPEC).variants[0].structure
OTHER = dataclasses.replace(samples.SPEC, head_dim=80)
ASK = """
import sys
from slim.runtime import modules
from slim.runtime.errors import DispatchError
from slim.runtime.plan import Structure
from slim.runtime.spec import Spec
for name in sys.argv[1:]:
    try:
        spec, structure = name.split("/")
        print(modules.module_path(Spec.parse(spec), Structure(*structure.split("."))))
    except DispatchError as error:
        print("refused:", error)
for name in (modules.CURSORS, modules.CONVOLUTION):
    try:
        print(modules.shared_path(name))
    except DispatchError as error:
        print("refused:", error)
"""


@given(samples.specs(), samples.specs(), samples.variants("both"), samples.variants("both"))
def test_names_are_identifiers_and_tell_modules_apart(one, other, first, second):
    name = modules.module_name(one, first.structure)
    assert name.isidentifier()
    same = (one, first.structure) == (other, second.structure)
    assert (name == modules.module_name(other, second.structure)) == same


@pytest.fixture
def package(tmp_path):
    """A slim package: the runtime and the modules of one shape, under another name."""
    root = tmp_path / "site" / "slim"
    shutil.copytree(ROOT / "runtime", root / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "__init__.py").touch()
    row = samples.row(plan=default_plan(samples.SPEC))
    emit.emit(root / "generated", samples.table(row))
    return root


def ask(package, *keys, path=(), options=(), **variables):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (package.parent, *path)))
    done = subprocess.run(
        [sys.executable, *options, "-c", ASK, *keys],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_slim_package_serves_its_own_and_refuses_the_rest(package):
    # -S: no installed distribution is seen, so neither torch nor a renderer.
    own, refused, cursors, convolution = ask(
        package,
        modules.module_key(samples.SPEC, STRUCTURE),
        modules.module_key(OTHER, STRUCTURE),
        options=["-S"],
    )
    kernels = package / "generated" / "kernels"
    assert Path(own) == kernels / f"{modules.module_name(samples.SPEC, STRUCTURE)}.py"
    assert Path(cursors) == kernels / "cursors.py"
    assert Path(convolution) == kernels / "conv_step.py"
    assert refused.startswith("refused: this package has no kernel for mamba2-step-p80-")
    assert "install replayssm-tune" in refused
    assert (
        "replayssm-tune tune --heads 16 --head-dim 80 --state-size 128 --groups 1 --tp 1 "
        "--state-dtype fp32 --buffer-len 16" in refused
    )


def test_a_slim_package_materialises_the_states_of_its_steps(package):
    spec = samples.SPEC.materialize
    (variant,) = default_plan(spec).variants
    found, *_ = ask(package, modules.module_key(spec, variant.structure), options=["-S"])
    assert Path(found).read_text() == render(spec, variant.structure)


def test_the_tool_beside_a_slim_package_renders_for_it(package, tmp_path):
    announced = tmp_path / "announced"
    info = announced / "tool-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[{modules.RENDERERS}]\na = replayssm_tune.codegen.cache:render_to_cache\n"
    )
    shutil.rmtree(package / "generated")
    folder = tmp_path / "cache"
    found, cursors, convolution = ask(
        package,
        modules.module_key(OTHER, STRUCTURE),
        path=(announced, ROOT / "src"),
        REPLAYSSM_CACHE_DIR=str(folder),
    )
    assert Path(found).parent == folder
    assert Path(found).read_text() == render(OTHER, STRUCTURE)
    assert Path(cursors).read_text() == render_cursors()
    assert Path(convolution).read_text() == render_conv()


@pytest.fixture
def renderer(monkeypatch):
    """Puts a renderer, or none, in the place of the installed one."""

    def put(render):
        monkeypatch.setattr(modules, "_renderer", lambda: render)

    return put


def test_a_module_of_the_folder_comes_before_the_renderer(tmp_path, renderer):
    asked = []

    def render_elsewhere(key, names):
        asked.append((key, names))
        return str(tmp_path / "rendered.py")

    renderer(render_elsewhere)
    emit.emit(tmp_path, samples.table(samples.row(plan=default_plan(samples.SPEC))))
    find = modules.packaged(tmp_path)
    assert find(samples.SPEC, STRUCTURE).parent == tmp_path / "kernels"
    assert asked == []
    assert find(OTHER, STRUCTURE) == tmp_path / "rendered.py"
    names = (*parameters(OTHER, STRUCTURE), *constexprs(STRUCTURE))
    assert asked == [(modules.module_key(OTHER, STRUCTURE), names)]


def test_a_renderer_that_fails_is_a_dispatch_error(tmp_path, renderer):
    def broken(key, names):
        raise EmitError("cannot write", where="cache", hint="make room")

    renderer(broken)
    with pytest.raises(DispatchError, match=r"rendering it failed: cannot write \(cache\); make room"):
        modules.packaged(tmp_path)(OTHER, STRUCTURE)


def test_the_cache_holds_what_is_rendered(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    key = modules.module_key(OTHER, STRUCTURE)
    names = (*parameters(OTHER, STRUCTURE), *constexprs(STRUCTURE))
    path = cache.render_to_cache(key, names)
    assert path.parent == tmp_path
    assert path.read_text() == render(OTHER, STRUCTURE)
    time = path.stat().st_mtime_ns
    assert cache.render_to_cache(key, names) == path
    assert path.stat().st_mtime_ns == time
    path.write_text("tampered")
    assert cache.render_to_cache(key, names).read_text() == render(OTHER, STRUCTURE)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("nothing", ()),
        (f"{OTHER.key}/both.sideways", ()),
        (f"{OTHER.key}/{STRUCTURE.key}.newer_axis", ()),
        (f"{OTHER.key}/{STRUCTURE.key}", ("state_ptr", "another_ptr")),
    ],
)
def test_a_caller_of_another_version_is_refused(tmp_path, monkeypatch, key, names):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(SpecError):
        cache.render_to_cache(key, names)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_the_users_where_no_variable_names_one(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in cache.cache_folder().parents


def test_native_shapes_are_refused_without_a_window(tmp_path, renderer):
    renderer(None)
    with pytest.raises(DispatchError) as error:
        modules.packaged(tmp_path)(OTHER.native, Structure("native"))
    assert "--state-dtype fp32" in error.value.hint
    assert "--buffer-len" not in error.value.hint
