"""Specs that tests of several rooms use, and plans of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from replayssm_tune.codegen.space import points
from replayssm_tune.runtime.plan import Plan, Variant
from replayssm_tune.runtime.spec import Spec

P64 = Spec("mamba2", "step", 64, 128, 16, 16)
P64_BF16 = replace(P64, state_dtype="bf16")
P80 = Spec("mamba2", "step", 80, 128, 12, 16)
"""Specs whose kernels and table rows ship."""

GDN = Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True)
GDN_BF16 = replace(GDN, state_dtype="bf16")

ODD = Spec("mamba2", "step", 80, 96, 12, 8, activation_dtype="fp16", state_dtype="fp16", ring_dtype="fp16")
"""No size of it is a power of two."""

STEP_DTYPES = [
    ("fp32", "fp32", "fp32"),
    ("bf16", "fp32", "bf16"),
    ("bf16", "bf16", "bf16"),
    ("fp16", "fp32", "fp32"),
    ("fp16", "fp16", "fp16"),
]
"""Of activations, state and ring."""

FOLD_DTYPES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp16")]
"""Of ring and state."""


def small(family: str = "mamba2", **changes: Any) -> Spec:
    """A small step of fp32; of ``changes``, inputs that Mamba-2 alone has do nothing to GDN."""
    fields: dict[str, Any] = {"head_dim": 8, "state_size": 16, "heads_per_group": 2, "window": 4}
    fields |= {"activation_dtype": "fp32", "ring_dtype": "fp32"}
    if family == "gdn":
        changes = {"qk_l2norm": True} | changes | {"has_d": False, "has_z": False}
    return Spec(family, "step", **(fields | changes))


def drafts(spec: Spec, num_tokens: int = 4, **changes: Any) -> Spec:
    """The spec of the same layer where rows have up to so many tokens."""
    return replace(spec, op="verify", num_tokens=num_tokens, **changes)


def searched_plan(spec: Spec, coefficients: dict[str, str]) -> Plan:
    """A plan of these roles with these coefficients, of points that are searched."""

    def point(role: str, how: str) -> Variant:
        return next(v for v in points(spec, role).variants if v.structure.coefficients == how)

    return Plan(tuple(point(role, how) for role, how in coefficients.items()))
