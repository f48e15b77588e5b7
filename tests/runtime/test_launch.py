"""How calls reach kernels: the order of their arguments, by kernels run in the interpreter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from replayssm_tune.runtime.abi import tensor_arguments
from replayssm_tune.runtime.contracts import GDN_NATIVE_STEP, GDN_STEP, MAMBA2_NATIVE_STEP, MAMBA2_STEP
from replayssm_tune.runtime.plan import Structure
from replayssm_tune.runtime.spec import Spec
from tests.interpreter import run_interpreted

FIELDS: dict[str, Any] = {"head_dim": 8, "state_size": 16, "heads_per_group": 2, "window": 4}
FIELDS |= {"activation_dtype": "fp32", "ring_dtype": "fp32"}
SPECS = {
    "mamba2": Spec("mamba2", "step", **FIELDS),
    "mamba2-gated": Spec("mamba2", "step", **FIELDS, has_z=True),
    "mamba2-bare": Spec("mamba2", "step", **FIELDS, has_d=False, has_dt_bias=False),
    "gdn": Spec("gdn", "step", **FIELDS, has_d=False, qk_l2norm=True),
    "gdn-bare": Spec("gdn", "step", **FIELDS, has_d=False, has_dt_bias=False),
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


@pytest.mark.parametrize("contract", [MAMBA2_STEP, MAMBA2_NATIVE_STEP, GDN_STEP, GDN_NATIVE_STEP])
def test_contracts_and_kernels_name_the_same_arguments(contract: Any) -> None:
    window = 4 if contract.op == "step" else 0
    structure = Structure("both" if contract.op == "step" else "native")
    by_kernel = {argument.kernel: argument for argument in contract.arguments}
    assert len(by_kernel) == len(contract.arguments)
    met = set()
    for has_d, has_z, has_dt_bias in itertools.product((False, True), repeat=3):
        if contract.family == "gdn" and (has_d or has_z):
            continue
        spec = Spec(
            contract.family, contract.op, 8, 16, 2, window, has_d=has_d, has_z=has_z, has_dt_bias=has_dt_bias
        )
        for argument in tensor_arguments(spec, structure):
            met.add(argument.name)
            # One stride per leading dimension of those tensors whose strides a kernel is given.
            assert len(argument.stride_dims) in (0, len(by_kernel[argument.name].dims) - 1)
    assert met == {*by_kernel}
