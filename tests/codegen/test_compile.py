"""Cross-compiling without a GPU: what comes out, what cannot run, and processes that end."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget

from replayssm_tune.codegen import compile as compile_module
from replayssm_tune.codegen import targets
from replayssm_tune.codegen.cache import rendered
from replayssm_tune.codegen.compile import (
    Compiled,
    KernelBinary,
    TileJob,
    check_toolchain,
    compile_variant,
    select,
)
from replayssm_tune.codegen.files import EmitError
from replayssm_tune.codegen.pool import CompilePool
from replayssm_tune.codegen.space import structures
from replayssm_tune.runtime.abi import state_block
from replayssm_tune.runtime.build import compile_kernel
from replayssm_tune.runtime.conv_tiles import ConvSpec, ConvTile
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import CompileError, ToolchainError
from replayssm_tune.runtime.modules import load_module
from replayssm_tune.runtime.plan import Structure, Tile, Variant
from replayssm_tune.tuner.interpreted import small_variant
from tests.paths import ROOT
from tests.specs import GDN, drafts
from tests.specs import P64 as SPEC

H200 = targets.find("H200")
DEFAULT = default_plan(SPEC).variants[0]
SAMPLE = (
    (SPEC, DEFAULT),
    (SPEC, Variant(Structure("both", load="early"), Tile(16, 32, 128, num_warps=4))),
    (SPEC, Variant(Structure("nonflush", readout="dot"), Tile(64, 128, 0, 4, 2, 2))),
    (SPEC.native, Variant(Structure("native"), Tile(16, 64))),
)


def processes():
    return [child for child in multiprocessing.active_children() if child.name == "compile"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("compile")


@pytest.fixture(scope="module")
def compiled(cache_dir):
    """Results by (capability, variant)."""
    found: dict[object, Compiled] = {}
    for gpu in (H200, *(targets.find(name) for name in ("A100", "B200", "RTX PRO 6000"))):
        with CompilePool(gpu, 2, 120.0, cache_dir) as pool:
            found |= {(gpu.capability, result.variant): result for result in pool.run(SAMPLE)}
    assert not processes()
    return found


def test_every_architecture_compiles_on_this_machine(compiled):
    assert len(compiled) == 4 * len(SAMPLE)
    for (capability, variant), result in compiled.items():
        assert result.status == "ok", (capability, variant.key, result.reason)
        names = ["coefficients", "step"] if variant == DEFAULT else ["step"]
        assert [kernel.name for kernel in result.kernels] == names
        for kernel in result.kernels:
            assert 16 <= kernel.registers <= 255
            assert 100 < kernel.instructions < 20_000
            assert kernel.size_bytes == 16 * kernel.instructions
            assert len(kernel.digest) == 16
        assert result.step.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("spec", "structure", "tile", "shuffles"),
    [
        (SPEC, Structure("both", load="early"), Tile(16, 32, 128), 60),
        (GDN, Structure("both", load="early"), Tile(16, 32, 128), 95),
        (GDN, Structure("both", load="early"), Tile(16, 32, 128, num_warps=2), 90),
        (SPEC, Structure("both"), Tile(32, 32, 64), 80),
        (GDN, Structure("both"), Tile(32, 32, 64), 130),
        (GDN.native, Structure("native"), Tile(16, 32), 40),
        (drafts(GDN).native, Structure("native"), Tile(16, 32), 40),
    ],
    ids=lambda value: getattr(value, "key", value),
)
def test_sums_add_within_a_thread_before_they_shuffle(spec, structure, tile, shuffles, tmp_path):
    """Tiles of three axes take up to ten times as many, in one version of Triton or another."""
    kernel = load_module(rendered(tmp_path)(spec, structure)).step
    compiled = compile_kernel(kernel, spec, Variant(structure, tile), GPUTarget("cuda", 90, 32))
    assert 0 < compiled.asm["ptx"].count("shfl.sync") <= shuffles


def test_architectures_have_binaries_of_their_own(compiled):
    for _, variant in SAMPLE:
        digests = {result.step.digest for (_, other), result in compiled.items() if other == variant}
        assert len(digests) == 4


def test_a_pipelined_state_lies_in_shared_memory(compiled):
    """One fp32 tile on its way while another one is read."""
    assert compiled[(9, 0), SAMPLE[2][1]].step.shared_bytes >= 64 * 128 * 4


def test_launching_finds_the_binaries_in_the_cache(compiled, cache_dir, monkeypatch):
    from triton.backends.compiler import GPUTarget

    from replayssm_tune.codegen.cache import rendered
    from replayssm_tune.runtime.build import compile_kernel
    from replayssm_tune.runtime.modules import load_module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_dir / "triton"))
    before = sorted((cache_dir / "triton").rglob("*"))
    for spec, variant in SAMPLE:
        module = load_module(rendered(cache_dir / "modules")(spec, variant.structure))
        kernel = compile_kernel(module.step, spec, variant, GPUTarget("cuda", 90, 32), aligned=True)
        assert kernel.metadata.shared == compiled[(9, 0), variant].step.shared_bytes
    assert sorted((cache_dir / "triton").rglob("*")) == before


def test_the_same_point_gives_the_same_record_in_another_cache(compiled, tmp_path):
    with CompilePool(H200, 1, 120.0, tmp_path) as pool:
        (again,) = pool.run([SAMPLE[1]])
    first = compiled[(9, 0), SAMPLE[1][1]]
    assert dataclasses.replace(again, seconds=0.0) == dataclasses.replace(first, seconds=0.0)
    assert again.binary("3.9.0") == first.binary("3.9.0")


def test_the_record_of_two_kernels_is_the_larger_need(compiled):
    result = compiled[(9, 0), DEFAULT]
    record = result.binary("3.9.0")
    assert record.registers == max(kernel.registers for kernel in result.kernels)
    assert record.size_bytes == sum(kernel.size_bytes for kernel in result.kernels)
    assert record.digest not in {kernel.digest for kernel in result.kernels}


def test_what_the_compiler_refuses_is_a_result(cache_dir):
    odd = Variant(Structure("nonflush"), Tile(24, 128))
    with CompilePool(H200, 1, 120.0, cache_dir) as pool:
        refused, good = pool.run([(SPEC, odd), SAMPLE[1]])
    assert refused.status == "compile"
    assert odd.key in refused.reason
    assert good.status == "ok"


def test_what_the_assembler_refuses_is_not_printed(tmp_path, monkeypatch, capfd):
    # Triton prints it to the standard output, which is for results.
    assembler = tmp_path / "ptxas"
    real = compile_module._tool("ptxas")
    assembler.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) exec {real} "$@";; esac\necho boom >&2\nexit 1\n'
    )
    assembler.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, str(assembler))
    with CompilePool(H200, 1, 120.0, tmp_path / "cache") as pool:
        (refused,) = pool.run([SAMPLE[1]])
    assert refused.status == "compile"
    assert capfd.readouterr().out == ""


def test_a_time_out_is_a_result_and_leaves_no_process(tmp_path):
    with CompilePool(H200, 1, 0.02, tmp_path) as pool:
        (result,) = pool.run([SAMPLE[1]])
        assert not processes()
    assert (result.status, result.kernels) == ("timeout", ())
    assert "more than 0.02 s" in result.reason


def test_what_timed_out_is_not_compiled_again_unless_it_gets_more_time(tmp_path):
    def run(timeout_s, *jobs, gpu=H200, cache=tmp_path):
        with CompilePool(gpu, 1, timeout_s, cache) as pool:
            return [(result.status, result.reason) for result in pool.run(jobs)], len(processes())

    slow, default = SAMPLE[1], SAMPLE[0]
    assert run(0.02, slow, default)[0] == [("timeout", "compiling took more than 0.02 s")] * 2
    # At once, and by no process; another target, point or cache knows nothing of it.
    again = ("timeout", "compiling took more than 0.02 s in an earlier run")
    assert run(0.02, slow) == ([again], 0)
    assert run(0.01, slow) == ([again], 0)
    assert again not in run(0.02, slow, gpu=targets.find("B200"))[0]
    assert again not in run(0.02, SAMPLE[2])[0]
    assert again not in run(0.02, slow, cache=tmp_path / "other")[0]
    # A default plan is tried whatever it took, and so is a point whose file is spoilt.
    assert again not in run(0.02, default)[0]
    assert run(120.0, slow, default)[0] == [("ok", "")] * 2
    assert run(0.02, slow) == ([again], 0)
    for spoilt in ("{", "[" * 100_000, *(f'{{"timeout_s": {n}}}' for n in ("NaN", "1e999", "9" * 400))):
        for kept in (tmp_path / "timeouts").iterdir():
            kept.write_text(spoilt)
        assert "in an earlier run" not in run(0.02, slow)[0][0][1], spoilt[:40]


def test_a_process_that_does_not_start_says_nothing_of_its_point(tmp_path, monkeypatch):
    monkeypatch.setattr("replayssm_tune.codegen.pool.START_TIMEOUT_S", 0.01)
    with CompilePool(H200, 1, 60.0, tmp_path) as pool:
        (result,) = pool.run([SAMPLE[1]])
    assert (result.status, "starting a compiler process" in result.reason) == ("timeout", True)
    assert not (tmp_path / "timeouts").exists()


def test_tiles_of_the_convolution_have_the_same_limit(tmp_path):
    spec = ConvSpec(4, 1, "bf16", "bf16", "bf16")
    good, odd = (TileJob(spec, ConvTile(block, 1)) for block in (128, 24))
    with CompilePool(H200, 1, 120.0, tmp_path) as pool:
        found = dict(pool.run_tiles([good, odd]))
    assert found[good] == ""
    assert "conv_step does not compile" in found[odd]
    with CompilePool(H200, 1, 0.002, tmp_path / "cold") as pool:
        assert dict(pool.run_tiles([good])) == {good: "compiling took more than 0.002 s"}
        assert not processes()


def test_a_killed_worker_leaves_no_temporary_files(tmp_path, monkeypatch):
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    assembler = tmp_path / "ptxas"
    version = f"[ $1 = --version ] && exec {compile_module._tool('ptxas')} --version"
    assembler.write_text(f"#!/bin/sh\n{version}\nmktemp && sleep 100\n")
    assembler.chmod(0o755)
    for name in ("PTXAS", "PTXAS_BLACKWELL"):  # which one is taken depends on triton's version
        monkeypatch.setenv(f"TRITON_{name}_PATH", str(assembler))
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    with CompilePool(H200, 1, 8.0, cache) as pool:
        (result,) = pool.run([SAMPLE[1]])
        assert result.status == "timeout"
        (scratch,) = cache.glob("compile-*")
        assert any(scratch.iterdir())
    assert not scratch.exists()
    assert list(elsewhere.iterdir()) == []


def test_who_begins_a_run_can_do_something_else_meanwhile(cache_dir):
    with CompilePool(H200, 2, 120.0, cache_dir) as pool:
        run = pool.begin(SAMPLE)
        assert run.collect(block=False) == [], "it does not wait for a process to start"
        assert len(processes()) == 2
        found = []
        while not run.done:
            found += run.collect()
        assert {(result.spec, result.variant) for result in found} == set(SAMPLE)
        assert {result.status for result in found} <= {"ok", "resources"}
        assert run.collect() == []
        (again,) = pool.run([SAMPLE[1]])
        assert again.variant == SAMPLE[1][1]


def test_a_crash_is_a_result_and_the_next_job_gets_a_new_process(cache_dir):
    jobs = [SAMPLE[1], SAMPLE[2], SAMPLE[3]]
    with CompilePool(H200, 1, 120.0, cache_dir) as pool:
        results = pool.run(jobs)
        first = next(results)
        (worker,) = processes()
        os.kill(worker.pid, signal.SIGSEGV)
        worker.join()
        others = list(results)
    assert {first.status, *(other.status for other in others)} <= {"ok", "crash"}
    assert [result.variant for result in (first, *others)] == [variant for _, variant in jobs]
    assert others[-1].status == "ok"


def test_leaving_early_ends_the_workers(tmp_path):
    with CompilePool(H200, 1, 120.0, tmp_path) as pool:
        for _ in pool.run(SAMPLE):
            break
    assert not processes()


def test_an_interrupt_leaves_no_process(tmp_path):
    """Ctrl-C reaches the caller alone; workers go with it."""
    script = tmp_path / "run.py"
    script.write_text(
        "import pathlib, sys\n"
        "from tests.codegen.test_compile import H200, SAMPLE, CompilePool, processes\n"
        "if __name__ == '__main__':\n"
        "    with CompilePool(H200, 1, 120.0, pathlib.Path(sys.argv[1])) as pool:\n"
        "        for result in pool.run(SAMPLE * 50):\n"
        "            print(*(child.pid for child in processes()), flush=True)\n"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    caller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert caller.stdout is not None
    worker = int(caller.stdout.readline().split()[0])
    os.killpg(caller.pid, signal.SIGINT)
    assert caller.wait(30) != 0
    caller.stdout.close()
    for _ in range(200):
        if not Path(f"/proc/{worker}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_an_interrupt_does_not_reach_workers_that_start(tmp_path):
    """They are still of the caller's group then."""
    script = tmp_path / "run.py"
    script.write_text(
        "import pathlib, sys\n"
        "from tests.codegen.test_compile import H200, SAMPLE, CompilePool\n"
        "if __name__ == '__main__':\n"
        "    with CompilePool(H200, 2, 120.0, pathlib.Path(sys.argv[1])) as pool:\n"
        "        run = pool.begin(SAMPLE)\n"
        "        run.collect(block=False)\n"
        "        try:\n"
        "            print('started', flush=True)\n"
        "            run.collect()\n"
        "        except KeyboardInterrupt:\n"
        "            results = [*run.collect(), *run.collect(), *run.collect()]\n"  # after two have started
        "            print(*{result.status for result in results}, flush=True)\n"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    caller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "started\n"
    os.killpg(caller.pid, signal.SIGINT)
    assert caller.communicate(timeout=120) == ("ok\n", "")
    assert caller.returncode == 0


def test_a_missing_assembler_is_named(monkeypatch):
    monkeypatch.setattr(compile_module, "_tool", lambda name: f"/nowhere/{name}")
    with pytest.raises(ToolchainError, match=r"ptxas.*install triton again"):
        check_toolchain()


def test_a_missing_c_compiler_matters_only_for_launches(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert check_toolchain()
    with pytest.raises(ToolchainError, match="install gcc or clang"):
        check_toolchain(launching=True)


# ---- what is worth a launch ----


def result(variant, spec=SPEC, status="ok", **changes):
    kernel = KernelBinary("step", 128, 0, 1024, 50_000, 1000, digest=variant.key)
    kernels = (dataclasses.replace(kernel, **changes),) if status == "ok" else ()
    return Compiled(spec, variant, kernels, status, "" if status == "ok" else f"{status} of it")


def point(**tile):
    return Variant(Structure("nonflush"), Tile(**{"block_p": 32, "block_n": 64, **tile}))


def reasons(*results, keep=None):
    kept, dropped = select(results, H200.limits, keep)
    return [r.variant for r in kept], {drop.variant: (drop.reason, drop.detail) for drop in dropped}


@pytest.mark.parametrize("spec", [
    drafts(SPEC, 4), drafts(SPEC, 8), drafts(SPEC, 16),
    drafts(SPEC, 4, head_dim=80, heads_per_group=12), drafts(SPEC, 8, head_dim=128, heads_per_group=3),
    drafts(SPEC, 4, head_dim=128, ring_dtype="fp32"), drafts(SPEC, 4, state_size=256),
    drafts(SPEC, 8, window=64),
    drafts(GDN, 4), drafts(GDN, 8), drafts(GDN, 16), drafts(GDN, 4, ring_dtype="fp32"),
], ids=lambda spec: spec.key)  # fmt: skip
def test_coefficients_of_drafts_fit_in_registers(spec, cache_dir):
    structure = Structure("nonflush", "precomputed", readout="dot", scores="dot")
    variant = Variant(structure, Tile(64, state_block(spec), num_warps=2))
    kernels = compile_variant(spec, variant, H200, cache_dir / "modules").kernels
    (coefficients,) = (kernel for kernel in kernels if kernel.name == "coefficients")
    assert coefficients.spills_bytes <= 128


STRUCTURES = [
    (spec, structure)
    for spec in (SPEC, GDN, drafts(SPEC, 3), drafts(GDN, 3))
    for structure in structures(spec)
]


@pytest.mark.parametrize(
    ("spec", "structure"),
    STRUCTURES,
    ids=[f"{spec.key[:12]}-{structure.key}" for spec, structure in STRUCTURES],
)
def test_every_structure_that_is_searched_compiles(spec, structure, cache_dir):
    """What the interpreter runs a GPU's compiler may refuse: it has types for both branches of an if."""
    small = dataclasses.replace(spec, head_dim=32, state_size=32, heads_per_group=2, window=4)
    result = compile_variant(small, small_variant(small, structure), H200, cache_dir / "modules")
    assert result.status == "ok", result.reason


def test_points_beyond_the_limits_are_dropped_with_their_figures():
    small, large, hungry, spilling = (point(block_n=n) for n in (16, 32, 64, 128))
    eight = point(num_warps=8)
    kept, dropped = reasons(
        result(small),
        result(large, shared_bytes=232_449),
        result(hungry, status="timeout"),
        result(spilling, spills_bytes=520),
        result(eight, registers=255),
    )
    assert kept == [small, eight]
    assert dropped == {
        large: ("shared memory", "232449 of 232448 bytes"),
        hungry: ("timeout", "timeout of it"),
        spilling: ("spills", "520 bytes a thread"),
    }


def test_registers_of_a_whole_program_have_a_limit():
    wide = Variant(Structure("nonflush"), Tile(32, 64, num_warps=16))
    kept, dropped = reasons(result(wide, registers=129))
    assert not kept
    assert dropped[wide] == ("registers", "69632 of 65536")


def test_the_first_of_equal_binaries_stays():
    first, second, other_grid, other_warps = point(), point(block_n=32), point(block_p=16), point(num_warps=2)
    kept, dropped = reasons(*(result(v, digest="same") for v in (first, second, other_grid, other_warps)))
    assert kept == [first, other_grid, other_warps]
    assert dropped == {second: ("same binary", first.key)}


def test_the_default_stays_whatever_it_spills_and_whoever_equals_it():
    first, default = point(), point(block_n=32)
    kept, dropped = reasons(
        result(first, digest="same"), result(default, digest="same", spills_bytes=500), keep=default
    )
    assert kept == [default]
    assert dropped[first] == ("same binary", default.key)


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, EmitError), (errno.EROFS, EmitError), (errno.ENOEXEC, ToolchainError)]
)
def test_a_full_disk_is_told_from_a_broken_compiler(monkeypatch, tmp_path, number, kind):
    def fails(*arguments, **options):
        raise CompileError("no") from OSError(number, os.strerror(number))

    monkeypatch.setattr("replayssm_tune.runtime.build.compile_kernel", fails)
    with pytest.raises(kind, match=os.strerror(number)):
        compile_variant(SPEC, DEFAULT, H200, tmp_path)
