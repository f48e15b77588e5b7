"""Calls of every op of layers, small enough to be made thousands of times: on a CPU, of fp32.

Ops that verify have as many tokens as rows, so that per-token tensors of all ops have the same shapes:
rows of two tokens, of none and of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm_tune.runtime import contracts, ops
from replayssm_tune.runtime.spec import Spec
from tests.specs import drafts, small

HEADS, GROUPS, ROWS, SLOTS, WINDOW, NUM_TOKENS = 4, 2, 3, 6, 4, 2

VERIFIES = {"mamba2_verify": "mamba2_step", "gdn_verify": "gdn_step"}
"""Public functions of operators that do not bear their name."""
ONE_TOKEN = ("mamba2_step", "gdn_step")
STEPS = (*ONE_TOKEN, *VERIFIES)
"""Those with a ring."""
CONTRACTS = {
    contract.name: contract
    for contract in (
        contracts.MAMBA2_STEP,
        contracts.MAMBA2_NATIVE_STEP,
        contracts.MAMBA2_VERIFY,
        contracts.MAMBA2_NATIVE_VERIFY,
        contracts.GDN_STEP,
        contracts.GDN_NATIVE_STEP,
        contracts.GDN_VERIFY,
        contracts.GDN_NATIVE_VERIFY,
    )
}
FOLDS = {contract.name: contract for contract in (contracts.MAMBA2_MATERIALIZE, contracts.GDN_MATERIALIZE)}
"""Those that materialise states have no output."""


NO_TENSORS = [
    (None, "None"),
    (2.5, "of type float"),
    (np.ones(3), r"of type numpy\.ndarray"),
    ([1], "of type list"),
]
"""What is given in the place of a tensor, and how messages name it."""


@pytest.fixture(params=CONTRACTS)
def op(request: pytest.FixtureRequest) -> str:
    """Every op of layers that has an output, by the name of its operator."""
    return str(request.param)


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> str:
    """Every one of them with a ring."""
    return str(request.param)


def named(op: str, kernel: str) -> str:
    """What the public function calls a kernel's argument."""
    contract = (CONTRACTS | FOLDS)[op]
    return contract.names[contract.kernel_names.index(kernel)]


def spec_of(op: str, **changes: Any) -> Spec:
    sizes = {"heads_per_group": HEADS // GROUPS, "window": WINDOW}
    spec = small(CONTRACTS[op].family, **sizes | changes)
    return drafts(spec, NUM_TOKENS) if "verify" in op else spec


def packing(rows: int) -> torch.Tensor:
    """Where rows of 2, 0, 1, 2, … tokens start: of 2, 3 or 5 rows as many tokens as rows."""
    counts = torch.tensor([2, 0, 1] * rows)[:rows]
    return torch.cat([torch.zeros(1), counts.cumsum(0)]).int()


def inputs_of(op: str, rows: int, heads: int, groups: int, p: int, n: int, draw: Any) -> dict[str, Any]:
    """Inputs of a step, all optional ones given; ``draw(*shape)`` draws each."""
    shapes: dict[str, tuple[int, ...]]
    if CONTRACTS[op].family == "gdn":
        shapes = {"q": (rows, groups, n), "k": (rows, groups, n), "v": (rows, heads, p)}
        shapes |= {"a": (rows, heads), "b": (rows, heads), "A_log": (heads,), "dt_bias": (heads,)}
        return {name: draw(*shape) for name, shape in shapes.items()}
    shapes = {"x": (rows, heads, p), "dt": (rows, heads), "A": (heads,), "B": (rows, groups, n)}
    shapes |= {"C": (rows, groups, n), "D": (heads,), "z": (rows, heads, p), "dt_bias": (heads,)}
    given = {name: draw(*shape) for name, shape in shapes.items()}
    return given | {"A": -given["A"].exp()}


def arguments(op: str = "mamba2_step", seed: int = 0, rows: int = ROWS, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a legal call, all optional inputs given."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    native_verify = op.endswith("native_verify")
    slots = max(SLOTS, NUM_TOKENS * rows if native_verify else 0)
    cache = ops.make_cache(spec_of(op), slots, HEADS, GROUPS, "cpu")
    cache.state.copy_(randn(*cache.state.shape))
    given: dict[str, Any] = inputs_of(op, rows, HEADS, GROUPS, 8, 16, randn) | {
        "state": cache.state,
        "slot_index": torch.randperm(slots, generator=g)[:rows].int(),
    }
    if "verify" in op:
        given["query_start"] = packing(rows)
    if native_verify:
        given["slot_index"] = torch.randperm(slots, generator=g)[: NUM_TOKENS * rows].view(rows, -1).int()
        given["accepted"] = torch.tensor([2, 1] * rows)[:rows].int()
    if op in VERIFIES:
        given["num_tokens"] = NUM_TOKENS
    if op in STEPS:
        given |= cache.tensors() | {"window": WINDOW}
        cache.ring_len.copy_(torch.tensor([0, 4, 0, 4, 0, 4]))
    return given | changes


def call(op: str, given: dict[str, Any]) -> torch.Tensor:
    y: torch.Tensor = getattr(ops, VERIFIES.get(op, op))(**given)
    return y


def overload(op: str) -> Any:
    return getattr(getattr(torch.ops, ops.NAMESPACE), op).default


def written(op: str) -> set[str]:
    """What an operator's schema says that it writes."""
    return {
        a.name for a in overload(op)._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    }


def ordered(op: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the order of an operator's schema."""
    return tuple(given[argument.name] for argument in overload(op)._schema.arguments)


def output_like(op: str, given: dict[str, Any]) -> torch.Tensor:
    return torch.empty_like(given[named(op, "x")])


def positional(op: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema."""
    full = {"dt_softplus": True, "qk_l2norm": True, "null_slot": -1, "out": output_like(op, given)} | given
    return ordered(op, full)


@contextlib.contextmanager
def dispatched() -> Iterator[list[str]]:
    """The ops of this package that the dispatcher is asked for meanwhile, by the names of their operators."""
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, name, *_ = str(function).split(".")
            seen.extend([name] * (namespace == ops.NAMESPACE))
            return function(*args, **(kwargs or {}))

    with Record():
        yield seen
