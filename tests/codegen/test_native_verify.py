"""The baseline that verifies drafts, beside the plain recurrence, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_tune.codegen.cache import rendered
from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.compiled import CompiledPlan
from replayssm_tune.runtime.dtypes import DTYPE_NAMES, TORCH_DTYPES
from replayssm_tune.runtime.oracle import Oracle, recurrence
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.interpreted import small_variant
from tests.interpreter import interpreted

Arguments = dict[str, Any]
"""Tensors by the names of kernel arguments; None for one that is left out."""

T, SLOTS, HEADS, GROUPS = 3, 14, 4, 2
MAMBA2 = Spec(
    "mamba2", "native_verify", 16, 32, 2, 0, T, activation_dtype="fp32", ring_dtype="fp32", has_z=True
)
GDN = dataclasses.replace(
    MAMBA2, family="gdn", head_dim=20, state_size=24, has_d=False, has_z=False, qk_l2norm=True
)
SPECS = (
    MAMBA2,
    dataclasses.replace(
        MAMBA2, head_dim=20, has_d=False, has_z=False, has_dt_bias=False, dt_softplus=False,
        state_dtype="fp16", activation_dtype="fp16", ring_dtype="fp16",
    ),
    GDN,
    dataclasses.replace(GDN, head_dim=16, state_size=32, has_dt_bias=False, qk_l2norm=False),
)  # fmt: skip
PACKED = (0, 2, 5, 5, 8, 9, 12)
"""Rows of 2, 3, 0, 3 (padding), 1 and 3 tokens; more tokens than there are rows belong to nobody."""
NULL_SLOT = 0
ROWS = len(PACKED) - 1
SOURCES = (2, 1, 1, 1, 0, T + 4)
"""Accepted tokens; what is outside of 1 to T counts as the nearest of them."""


def inputs(spec: Spec) -> Arguments:
    """Arguments of a call by name; whatever nobody may read is NaN."""
    draw = torch.Generator().manual_seed(3)
    activation = TORCH_DTYPES[spec.activation_dtype]
    tokens = PACKED[-1] + ROWS + 2

    def normal(*size: int, dtype: torch.dtype = activation) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(dtype)

    def of_tokens(*size: int) -> torch.Tensor:
        value = normal(tokens, *size)
        value[PACKED[3] : PACKED[4]] = torch.nan
        value[PACKED[-1] :] = torch.nan
        return value

    slots = 1 + torch.randperm(SLOTS - 1, generator=draw)[: 4 * T].view(4, T)
    slot_index = torch.full((ROWS, T + 2), 10**6, dtype=torch.int64)[:, :T]
    slot_index[torch.tensor([0, 1, 4, 5])] = slots
    slot_index[3] = torch.tensor([NULL_SLOT, 10**6, 10**6])
    return {
        "state": normal(SLOTS, HEADS, spec.head_dim, spec.state_size, dtype=TORCH_DTYPES[spec.state_dtype]),
        "slot_index": slot_index,
        "accepted": torch.tensor(SOURCES, dtype=torch.int32),
        "query_start": torch.tensor(PACKED, dtype=torch.int32),
        "x": of_tokens(HEADS, spec.head_dim),
        "dt": of_tokens(HEADS).abs() * 0.1,
        "a": -torch.rand(HEADS, generator=draw) - 0.1,
        "b": of_tokens(GROUPS, spec.state_size) * spec.state_size**-0.5,
        "c": of_tokens(GROUPS, spec.state_size),
        "beta": of_tokens(HEADS),
        "d": normal(HEADS, dtype=torch.float32),
        "z": of_tokens(HEADS, spec.head_dim),
        "dt_bias": normal(HEADS, dtype=torch.float32),
        "out": torch.full((tokens, HEADS, spec.head_dim), torch.nan, dtype=activation),
    }


def launch(spec: Spec, given: Arguments, folder: Path) -> None:
    arguments = tensor_arguments(spec, Structure("native"))
    tensors = [given[a.name] for a in arguments]
    dtypes = tuple(DTYPE_NAMES[t.dtype] for t in tensors if t is not None)
    strides = [
        t.stride(i) for a, t in zip(arguments, tensors, strict=True) if t is not None
        for i in range(len(a.stride_dims))
    ]  # fmt: skip
    plan = CompiledPlan(
        spec, [small_variant(spec, Structure("native"))], rendered(folder), dtypes, aligned=False
    )
    scalars = (len(given["out"]),)
    plan.bind(len(given["accepted"]), HEADS, tuple(strides), scalars)(tensors, NULL_SLOT, 0)


def expected(spec: Spec, named: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and states of all slots, in fp64."""
    oracle = Oracle(
        named["state"],
        recurrence(
            spec, named["a"], D=named["d"] if spec.has_d else None,
            dt_bias=named["dt_bias"] if spec.has_dt_bias else None,
        ),
    )  # fmt: skip
    out, state = torch.zeros_like(named["out"]).double(), oracle.state.clone()
    for row, (first, last) in enumerate(itertools.pairwise(PACKED)):
        slots = named["slot_index"][row].tolist()
        if slots[0] == NULL_SLOT:
            continue
        sequence = torch.tensor([slots[min(max(SOURCES[row], 1), T) - 1]])
        for i in range(first, last):
            token = {name: named[name][i : i + 1] for name in ("x", "dt", "b", "c")}
            out[i] = oracle.step(
                sequence, token["x"], token["dt"], token["b"], token["c"],
                z=named["z"][i : i + 1] if spec.has_z else None,
                beta=named["beta"][i : i + 1] if spec.family == "gdn" else None,
            )[0]  # fmt: skip
            oracle.commit(torch.ones(1))
            state[slots[i - first]] = oracle.state[sequence[0]]
    return out, state


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
@interpreted
def test_states_of_all_tokens_are_stored_and_nothing_else(spec: Spec, tmp_path: Path) -> None:
    given = inputs(spec)
    y, states = expected(spec, given)
    before = given["state"].clone()
    launch(spec, given, tmp_path)
    bound = 2e-5 if spec.activation_dtype == "fp32" else 4e-3
    torch.testing.assert_close(given["out"].double(), y, rtol=bound, atol=bound)
    torch.testing.assert_close(given["state"].double(), states, rtol=bound, atol=bound)
    same = (states == before.double()).flatten(1).all(1)
    assert int(same.sum()) == SLOTS - 9
    assert torch.equal(given["state"][same], before[same])
