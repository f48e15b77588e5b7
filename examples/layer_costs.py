"""What a decoding layer moves and holds in memory, natively and with replay: from its shape and the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @property
    def state_bytes(self) -> int:
        """Of one state."""
        return bytes_per_slot(self.spec.native, self.heads, self.groups)

    @property
    def input_bytes(self) -> int:
        """Of one token's inputs to the convolution."""
        return self.channels * DTYPE_BYTES[self.spec.activation_dtype]


def mamba2_shape(config: Any, window: int, num_tokens: int = 1, dtype: str = "fp32") -> LayerShape:
    """The layers of a ``Mamba2Config``: activations and rings of ``dtype``, states of fp32."""
    if tuple(config.time_step_limit) != (0.0, float("inf")):
        raise ValueError(f"time_step_limit is {config.time_step_limit}; mamba2_step clamps no step size")
    heads, groups = config.num_heads, config.n_groups
    sizes = (config.head_dim, config.state_size, heads // groups, window, num_tokens)
    spec = Spec("mamba2", op_of(num_tokens), *sizes, activation_dtype=dtype, ring_dtype=dtype)
    channels = heads * config.head_dim + 2 * groups * config.state_size
    return LayerShape(spec, heads, groups, channels, config.conv_kernel)


def gdn_shape(config: Any, window: int, num_tokens: int = 1, dtype: str = "fp32") -> LayerShape:
    """The Gated DeltaNet layers of a ``Qwen3NextConfig``, as :func:`mamba2_shape`."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    value_dim, key_dim = config.linear_value_head_dim, config.linear_key_head_dim
    spec = Spec(
        "gdn", op_of(num_tokens), value_dim, key_dim, heads // groups, window, num_tokens,
        activation_dtype=dtype, ring_dtype=dtype, has_d=False, qk_l2norm=True,
    )  # fmt: skip
    channels = heads * value_dim + 2 * groups * key_dim
    return LayerShape(spec, heads, groups, channels, config.linear_conv_kernel_dim)


def op_of(num_tokens: int) -> str:
    """The op that takes so many tokens of a row at once."""
    return "step" if num_tokens == 1 else "verify"


class Turn(NamedTuple):
    """A sequence's part in one step of its batch."""

    step: int
    slot: int
    ring_len: int
    """Tokens in its ring before."""
    fed: int
    """New ones: its last token, and drafts."""
    kept: int
    """Of those; as many tokens are generated, the one after the last kept draft for the first of them."""


def acceptance(turns: Sequence[Turn]) -> str:
    """How many drafts were right."""
    drafted, right = sum(turn.fed - 1 for turn in turns), sum(turn.kept - 1 for turn in turns)
    generated = sum(turn.kept for turn in turns)
    rate = f" ({right / drafted:.0%})" if drafted else ""
    return f"{right} of {drafted} drafts accepted{rate}, {generated / len(turns):.2f} tokens a step"


class Costs(NamedTuple):
    """Bytes of one layer and sequence."""

    state_read: float
    """A generated token, as all but the last."""
    state_written: float
    ring: float
    """Of ring entries, read and written."""
    convolution: float
    """Of raw inputs, read and written."""
    held: int

    @property
    def moved(self) -> float:
        """All that is moved for a generated token, at the least."""
        return self.state_read + self.state_written + self.ring + self.convolution


def native_costs(shape: LayerShape, turns: Sequence[Turn]) -> Costs:
    """A state is read each turn and one written for each token; with drafts each has a slot of its own.

    The inputs that the convolution may still need are shifted each turn, as the library does it.
    """
    state, num_tokens = shape.state_bytes, shape.spec.num_tokens
    inputs = (shape.width - 1 + num_tokens) * shape.input_bytes
    generated = sum(turn.kept for turn in turns)
    return Costs(
        state_read=len(turns) * state / generated,
        state_written=sum(turn.fed for turn in turns) * state / generated,
        ring=0,
        convolution=len(turns) * 2 * inputs / generated,
        held=num_tokens * state + inputs,
    )


def replay_costs(shape: LayerShape, turns: Sequence[Turn]) -> Costs:
    """The state is read each turn, and written by those that flush: whose tokens might not fit the window.

    A turn reads the ring and appends its tokens, rejected ones too; the convolution reads ``width - 1``
    inputs and appends those of the tokens.
    """
    spec, state = shape.spec, shape.state_bytes
    layer = bytes_per_slot(spec, shape.heads, shape.groups, shape.capacity)
    entry = (layer - state) // shape.capacity
    flushes = sum(turn.ring_len + spec.num_tokens > spec.window for turn in turns)
    fed, generated = sum(turn.fed for turn in turns), sum(turn.kept for turn in turns)
    return Costs(
        state_read=len(turns) * state / generated,
        state_written=flushes * state / generated,
        ring=(sum(turn.ring_len for turn in turns) + fed) * entry / generated,
        convolution=(len(turns) * (shape.width - 1) + fed) * shape.input_bytes / generated,
        held=layer + shape.capacity * shape.input_bytes,
    )


def cost_table(ways: Mapping[str, Costs], layers: int) -> str:
    """Each way's costs, in KiB of a sequence for ``layers`` such layers."""
    names = ("state read", "written", "ring", "convolution", "a token", "held")
    lines = [" " * 16 + "".join(f"{name:>13}" for name in names)]
    for way, cost in ways.items():
        numbers = (*cost[:-1], cost.moved, cost.held)
        lines.append(f"{way:>16}" + "".join(f"{number * layers / 1024:13,.1f}" for number in numbers))
    return "\n".join(lines)
