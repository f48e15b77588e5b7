"""What a decoding layer moves and holds in memory, natively and with replay, computed from its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from replayssm_tune.runtime import Spec, bytes_per_slot, ring_capacity

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class LayerShape:
    """A state space layer and the short convolution in front of it."""

    spec: Spec
    heads: int
    groups: int
    channels: int
    """Of the convolution."""
    width: int
    """Inputs that an output of the convolution is made of."""

    @property
    def capacity(self) -> int:
        """Tokens of each ring: ``width - 1`` folded ones stay behind for the convolution."""
        return ring_capacity(self.spec, self.width)


def mamba2_shape(config: Any, window: int, dtype: str = "fp32") -> LayerShape:
    """The layers of a ``Mamba2Config``: activations and rings of ``dtype``, states of fp32."""
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        raise ValueError(f"time_step_limit is {config.time_step_limit}; mamba2_step clamps no step size")
    heads, groups = config.num_heads, config.n_groups
    sizes = (config.head_dim, config.state_size, heads // groups, window)
    spec = Spec("mamba2", "step", *sizes, activation_dtype=dtype, ring_dtype=dtype)
    channels = heads * config.head_dim + 2 * groups * config.state_size
    return LayerShape(spec, heads, groups, channels, config.conv_kernel)


def gdn_shape(config: Any, window: int, dtype: str = "fp32") -> LayerShape:
    """The Gated DeltaNet layers of a ``Qwen3NextConfig``, as :func:`mamba2_shape`."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    value_dim, key_dim = config.linear_value_head_dim, config.linear_key_head_dim
    spec = Spec(
        "gdn", "step", value_dim, key_dim, heads // groups, window,
        activation_dtype=dtype, ring_dtype=dtype, has_d=False, qk_l2norm=True,
    )  # fmt: skip
    channels = heads * value_dim + 2 * groups * key_dim
    return LayerShape(spec, heads, groups, channels, config.linear_conv_kernel_dim)


class Costs(NamedTuple):
    """Bytes of one layer and sequence."""

    state: float
    """Of the state, moved a token."""
    ring: float
    """Of ring entries, moved a token."""
    convolution: float
    """Of raw inputs, moved a token."""
    held: int

    @property
    def moved(self) -> float:
        """All that is moved a token, at the least."""
        return self.state + self.ring + self.convolution


def native_costs(shape: LayerShape) -> Costs:
    """The state is read and written each step, and so are the last ``width`` inputs of the convolution."""
    state = bytes_per_slot(shape.spec.native, shape.heads, shape.groups)
    inputs = shape.width * shape.channels * DTYPE_BYTES[shape.spec.activation_dtype]
    return Costs(2 * state, 0, 2 * inputs, state + inputs)


def replay_costs(shape: LayerShape) -> Costs:
    """The state is read each step and written by every ``window``-th, which flushes.

    In between the ring grows from 1 token to ``window``. A step reads what is there and appends one; the
    convolution reads ``width - 1`` inputs and appends one.
    """
    spec, window = shape.spec, shape.spec.window
    state = bytes_per_slot(spec.native, shape.heads, shape.groups)
    layer = bytes_per_slot(spec, shape.heads, shape.groups, shape.capacity)
    entry = (layer - state) // shape.capacity
    inputs = shape.channels * DTYPE_BYTES[spec.activation_dtype]
    ring = entry * ((1 + window) / 2 + 1)
    return Costs(state + state / window, ring, shape.width * inputs, layer + shape.capacity * inputs)


def cost_table(shape: LayerShape, layers: int) -> str:
    """Both ways, in KiB a sequence for ``layers`` such layers."""
    names = ("state", "ring", "convolution", "a token", "held")
    lines = [" " * 8 + "".join(f"{name:>14}" for name in names)]
    for way, cost in (("native", native_costs(shape)), ("replay", replay_costs(shape))):
        numbers = (cost.state, cost.ring, cost.convolution, cost.moved, cost.held)
        lines.append(f"{way:>8}" + "".join(f"{number * layers / 1024:14,.1f}" for number in numbers))
    return "\n".join(lines)
