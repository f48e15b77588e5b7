"""How calls reach kernels: the order of their arguments, by kernels run in the interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.targets import find
from replayssm_tune.runtime import launch
from replayssm_tune.runtime.abi import TensorArgument, launch_structure, parameters, tensor_arguments
from replayssm_tune.runtime.checks import check_step
from replayssm_tune.runtime.defaults import default_plan
from replayssm_tune.runtime.errors import DispatchError
from replayssm_tune.runtime.lookup import Lookup
from replayssm_tune.runtime.plan import Plan, Structure, Tile, Variant
from replayssm_tune.runtime.spec import Spec
from tests.interpreter import run_interpreted
from tests.runtime.calls import random_call
from tests.runtime.small_calls import CONTRACTS, FOLDS
from tests.runtime.table_samples import row, table
from tests.specs import drafts, small

SPECS = {
    "mamba2": small(),
    "mamba2-gated": small(has_z=True),
    "mamba2-bare": small(has_d=False, has_dt_bias=False),
    "gdn": small("gdn"),
    "gdn-bare": small("gdn", has_dt_bias=False, qk_l2norm=False),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_launches_agree_with_the_reference(name: str, native: bool, tmp_path: Path) -> None:
    """Every argument arrives where the kernel expects it: any two in the wrong order would show."""
    spec = SPECS[name].native if native else SPECS[name]
    found = run_interpreted("tests.runtime.launched:largest_differences", spec.key, str(tmp_path))
    assert {"out", "state"} <= {*found}
    assert max(found.values()) < 1e-4, found


@pytest.mark.interpreter
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("num_tokens", "packed"), [(2, False), (1, True), (3, True)])
@pytest.mark.parametrize("name", SPECS)
def test_launches_of_drafts_agree_with_the_reference(
    name: str, num_tokens: int, packed: bool, native: bool, tmp_path: Path
) -> None:
    """As those of one token; rows of padding, without tokens, and tokens that no row owns."""
    spec = drafts(SPECS[name], num_tokens)
    spec = spec.native if native else spec
    found = run_interpreted("tests.runtime.launched:largest_differences", spec.key, str(tmp_path), packed)
    assert {"out", "state"} <= {*found}
    assert max(found.values()) < 1e-4, found


@pytest.mark.interpreter
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_lives_of_sequences_by_kernels(family: str, packed: bool, tmp_path: Path) -> None:
    """Every op of a server's step, one after the other on the same caches, beside the recurrence."""
    met = run_interpreted("tests.runtime.launched:lives_of_drafts", family, str(tmp_path), packed, packed)
    assert min(met["ring"], met["rejected"]) >= 15
    assert min(met["flushed"], met["native"]) >= 1


RINGS = [
    {"activation_dtype": "fp32", "ring_dtype": "fp32", "state_dtype": "fp32"},
    {"activation_dtype": "fp16", "ring_dtype": "fp16", "state_dtype": "fp32"},
    {"activation_dtype": "fp16", "ring_dtype": "fp16", "state_dtype": "fp16"},
    {"activation_dtype": "fp32", "ring_dtype": "fp32", "state_dtype": "fp16"},
]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", RINGS, ids=lambda dtypes: "-".join(dtypes.values()))
@pytest.mark.parametrize(("head_dim", "state_size"), [(16, 32), (20, 24)])
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_folds_agree_with_the_reference(
    family: str, head_dim: int, state_size: int, dtypes: dict[str, str], tmp_path: Path
) -> None:
    """Wrapped rings of every fill on a poisoned pool, any prefix, padded rows, rows in place."""
    spec = Spec(family, "step", head_dim, state_size, 2, 4, has_d=False, **dtypes)  # type: ignore[arg-type]
    for index_dtype, gap_bytes, split in (("int32", 16, False), ("int64", 4, True)):
        found = run_interpreted(
            "tests.runtime.launched:folds", spec.key, index_dtype, gap_bytes, split, str(tmp_path)
        )
        assert found["state"] < (1e-6 if spec.state_dtype == "fp32" else 1e-3), found
        assert found["elsewhere"] == 0


@pytest.mark.parametrize("contract", (CONTRACTS | FOLDS).values(), ids=lambda contract: contract.name)
def test_contracts_and_kernels_name_the_same_arguments(contract: Any) -> None:
    by_kernel = {argument.kernel: argument for argument in contract.arguments}
    assert len(by_kernel) == len(contract.arguments)
    met = set()
    for has_d, has_z, has_dt_bias in itertools.product((False, True), repeat=3):
        if contract.family == "gdn" and (has_d or has_z):
            continue
        inputs: dict[str, Any] = {"has_d": has_d, "has_z": has_z, "has_dt_bias": has_dt_bias}
        step = Spec(contract.family, "step", 8, 16, 2, 4, **inputs)
        verify = drafts(step, 3)
        specs = {spec.op: spec for spec in (step, verify, step.native, verify.native, step.materialize)}
        spec = specs[contract.op]
        for argument in tensor_arguments(spec, launch_structure(spec)):
            met.add(argument.name)
            # One stride per leading dimension of those tensors whose strides a kernel is given.
            assert len(argument.stride_dims) in (0, len(by_kernel[argument.name].dims) - 1)
    assert met == {*by_kernel}


class _Counted(launch.Launcher):
    def prepare(self, aligned: bool) -> Any:
        return lambda tensors, null_slot, stream: self.devices.append(launch._current_device())

    devices: list[int]


def test_launches_are_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(launch, "_current_device", lambda: current[0])
    monkeypatch.setattr(launch, "_raw_stream", lambda index: index)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        launcher = _Counted(
            ("x", "y"), (TensorArgument("x", "fp32"), TensorArgument("y", "fp32")), {}, {}, index
        )
        launcher.devices = []
        launcher.launch((None, None), -1)
        assert launcher.devices == [index]
    assert current == [0]


class _Recorder:
    """In the place of a compiled plan: what it is bound to, and launched on."""

    def __init__(self) -> None:
        self.bound: tuple[Any, ...] = ()
        self.tensors: tuple[Any, ...] = ()

    def bind(self, *arguments: Any) -> Any:
        self.bound = arguments

        def run(tensors: tuple[Any, ...], null_slot: int, stream: int) -> None:
            self.tensors = tensors

        return run


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("family", ["mamba2", "gdn"])
def test_a_warm_up_compiles_what_calls_of_drafts_will_ask_for(
    family: str, native: bool, index_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One binary per alignment, with and without query_start; no GPU: what would be compiled is recorded."""
    asked: dict[tuple[Any, ...], _Recorder] = {}
    plan = object()
    monkeypatch.setattr(launch, "_compiled", lambda *key: asked.setdefault(key, _Recorder()))
    monkeypatch.setattr(launch, "_compile_cursors", lambda index, dtype: None)
    monkeypatch.setattr(launch, "plan_for", lambda spec, batch, index: plan)
    monkeypatch.setattr(launch, "_raw_stream", int)
    spec = drafts(SPECS[family], 3, activation_dtype="fp16", ring_dtype="fp16")
    spec = spec.native if native else spec
    for aligned in (True, False):
        assert launch.compile_ahead(spec, [8, 40], -1, index_dtype, aligned) == 1
    warmed = {*asked}
    assert len(warmed) == 2
    for packed, aligned in itertools.product((False, True), repeat=2):
        given = random_call(spec, 5, 4, "cpu", index_dtype=index_dtype, packed=packed)
        value = given["v" if family == "gdn" else "x"]
        if not aligned:
            room = torch.zeros(value.numel() + 1, dtype=value.dtype)
            given["v" if family == "gdn" else "x"] = room[1:].view(value.shape)
        given["out"] = torch.empty_like(value)
        for name in ("A_log", "A", "D", "dt_bias"):
            if name in given:
                given[name] = given[name].float()
        contract = next(c for c in CONTRACTS.values() if c.family == family and c.op == spec.op)
        tensors = tuple(given.get(name) for name in contract.names)
        scalars = (True,) if native else (spec.window, spec.num_tokens, True)
        signature = check_step(contract, tensors, scalars)
        assert signature.spec == spec
        launch.prepare(signature, -1).launch(tensors, -1)
        assert {*asked} == warmed
        (record,) = (record for (_, _, _, how, _), record in asked.items() if how == aligned)
        rows, heads, strides, numbers = record.bound
        assert (rows, heads) == (5, 4)
        assert record.tensors[-1] is given["out"]
        arguments = [argument.name for argument in tensor_arguments(spec, launch_structure(spec))]
        starts = record.tensors[arguments.index("query_start")]
        assert starts.tolist() == (given["query_start"].tolist() if packed else [0, 3, 6, 9, 12, 15])
        named = parameters(spec, launch_structure(spec))
        assert len(record.tensors) + len(strides) + len(numbers) + 1 == len(named)
        sizes = {"ring_capacity": spec.ring_capacity, "tokens": 15}
        assert numbers == tuple(sizes[name] for name in named if name in sizes)
        if native:
            assert strides[named.index("slot_index_stride_row") - len(record.tensors)] == 3


def test_rows_of_what_materialises_states_serve_and_strict_mode_is_about_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = SPECS["mamba2"].materialize
    tuned = Plan((Variant(Structure("materialize"), Tile(8, 16, 16, 2)),))
    assert tuned != default_plan(spec)
    tables = [table(row(64, spec, plan=tuned, native_time_us=None))]
    monkeypatch.setattr(launch, "gpu_info", lambda index: find("H200").info)
    monkeypatch.setattr(launch, "default_lookup", lambda: Lookup(tables))
    plan_for = launch.plan_for.__wrapped__
    for strict in ("1", "0"):
        monkeypatch.setenv(launch.STRICT_VARIABLE, strict)
        assert plan_for(spec, 40, 0) == tuned
        # The row was timed at another batch, of another window.
        for other, batch in ((spec, 4096), (replace(spec, window=5), 64)):
            assert plan_for(other, batch, 0) == default_plan(other)
    monkeypatch.setenv(launch.STRICT_VARIABLE, "1")
    with pytest.raises(DispatchError):
        plan_for(SPECS["mamba2"], 64, 0)
