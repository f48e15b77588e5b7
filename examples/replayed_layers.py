"""State space layers of the transformers library, short convolution included, on top of the replay ops."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.layer_costs import LayerShape, gdn_shape, mamba2_shape
from replayssm_tune.runtime import conv_seed, conv_step, gdn_step, make_cache, mamba2_step


class Step(NamedTuple):
    """Which tokens of a forward pass of the model are whose."""

    slot_index: Tensor
    """(rows,) int32: each row's slot, -1 for padding."""
    owned: Tensor
    """(rows, columns) bool: there is a token. The library takes the whole rectangle, our ops these alone."""
    query_start: Tensor | None
    """(rows + 1,) int32: where each row's tokens begin if all are packed; None if each row has one."""


class CacheGroup:
    """What all replayed layers of a model share: the two cursors, and the step under way."""

    def __init__(self, slots: int, shape: LayerShape, device: torch.device) -> None:
        self.slots, self.window, self.capacity = slots, shape.spec.window, shape.capacity
        self.num_tokens = shape.spec.num_tokens  # 1 + drafts
        self.ring_start = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ring_len = torch.zeros(slots, dtype=torch.int32, device=device)
        self.step: Step | None = None
        """None outside of steps, when layers are the library's."""

    @property
    def cursors(self) -> dict[str, Any]:
        """The cursors by the ops' names."""
        return {"ring_start": self.ring_start, "ring_len": self.ring_len}

    def arguments(self, step: Step) -> dict[str, Any]:
        """What all ops of a step and its commit take, beside caches and cursors."""
        return {
            "slot_index": step.slot_index, "query_start": step.query_start,
            "num_tokens": self.num_tokens, "window": self.window,
        }  # fmt: skip


class ReplayedLayer(ABC):
    """A layer of the library that decodes with our ops; a class for each family says how.

    It takes the place of ``mixer.forward``. Outside of steps that is still the library's.
    """

    def __init__(self, mixer: Any, shape: LayerShape, group: CacheGroup) -> None:
        self.mixer, self.shape, self.group = mixer, shape, group
        device = mixer.conv1d.weight.device
        cache = make_cache(shape.spec, group.slots, shape.heads, shape.groups, device, group.capacity)
        self.cache = dataclasses.replace(cache, **group.cursors)
        self.conv_ring = torch.zeros(group.slots, group.capacity, shape.channels, device=device)
        mixer.forward = self.forward

    @abstractmethod
    def _decode(self, hidden: Tensor) -> Tensor:
        """Outputs for new tokens: (tokens, hidden size) to the same."""

    def _state_of(self, recurrent: Tensor) -> Tensor:
        """The library's recurrent state in the layout of ours."""
        return recurrent

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Any:
        """In a step ours, else the library's; hidden states are (rows, columns, hidden size)."""
        step = self.group.step
        if step is None:
            return type(self.mixer).forward(self.mixer, hidden_states, **arguments)
        outputs = torch.zeros_like(hidden_states)
        outputs[step.owned] = self._decode(hidden_states[step.owned])
        return outputs

    def seed(self, prefilled: Any, slot: Tensor) -> None:
        """Move what the library's prefill left in its cache of this layer to a slot whose ring is empty."""
        self.cache.state[slot] = self._state_of(prefilled.recurrent_states[0])
        # The library keeps (rows, channels, width) inputs, zeros in front; a next output needs width - 1.
        history = prefilled.conv_states[0][..., 1 - self.shape.width :].transpose(1, 2).contiguous()
        conv_seed(history, ring=self.conv_ring, ring_start=self.group.ring_start, slots=slot)

    @property
    def _arguments(self) -> dict[str, Any]:
        assert self.group.step is not None, "layers are replayed in a step alone"
        return self.group.arguments(self.group.step)

    def _convolve(self, inputs: Tensor) -> Tensor:
        """The short convolution: (tokens, channels) to the same."""
        conv = self.mixer.conv1d
        return conv_step(
            inputs, conv.weight.squeeze(1), bias=conv.bias, ring=self.conv_ring, **self.group.cursors,
            **self._arguments,
        )  # fmt: skip


class ReplayedMamba2(ReplayedLayer):
    """``Mamba2Mixer``."""

    def _decode(self, hidden: Tensor) -> Tensor:
        mixer, shape = self.mixer, self.shape
        inner, columns = shape.heads * shape.spec.head_dim, shape.groups * shape.spec.state_size
        gate, inputs, dt = mixer.in_proj(hidden).split([inner, shape.channels, shape.heads], -1)
        x, B, C = torch.split(self._convolve(inputs), [inner, columns, columns], -1)
        y = mamba2_step(
            x.view(len(x), shape.heads, -1), dt, -torch.exp(mixer.A_log),
            B.view(len(B), shape.groups, -1), C.view(len(C), shape.groups, -1),
            D=mixer.D, dt_bias=mixer.dt_bias, **self.cache.tensors(), **self._arguments,
        )  # fmt: skip
        output: Tensor = mixer.out_proj(mixer.norm(y.flatten(1), gate))
        return output


class ReplayedGatedDeltaNet(ReplayedLayer):
    """``Qwen3NextGatedDeltaNet``."""

    def _state_of(self, recurrent: Tensor) -> Tensor:
        return recurrent.transpose(-1, -2)  # from (rows, value heads, key dim, value dim)

    def _decode(self, hidden: Tensor) -> Tensor:
        mixer, shape = self.mixer, self.shape
        projected = mixer.in_proj_qkvz(hidden[:, None]), mixer.in_proj_ba(hidden[:, None])
        q, k, v, z, b, a = (part[:, 0] for part in mixer.fix_query_key_value_ordering(*projected))
        parts = [part.flatten(1) for part in (q, k, v)]
        mixed = self._convolve(torch.cat(parts, -1))
        q, k, v = torch.split(mixed, [part.shape[1] for part in parts], -1)
        y = gdn_step(
            q.view(len(q), shape.groups, -1), k.view(len(k), shape.groups, -1),
            v.view(len(v), shape.heads, -1), a, b, mixer.A_log,
            dt_bias=mixer.dt_bias, **self.cache.tensors(), **self._arguments,
        )  # fmt: skip
        output: Tensor = mixer.out_proj(mixer.norm(y.flatten(0, 1), z.flatten(0, 1)).view_as(y).flatten(1))
        return output


class Family(NamedTuple):
    """How layers of a family are replayed."""

    adapter: type[ReplayedLayer]
    shape_of: Callable[..., LayerShape]
    """From a config, the window, the most tokens a step and a dtype."""


FAMILIES = {
    "Mamba2Mixer": Family(ReplayedMamba2, mamba2_shape),
    "Qwen3NextGatedDeltaNet": Family(ReplayedGatedDeltaNet, gdn_shape),
}
"""By the class of the library's layer."""


def replayable(model: Any) -> tuple[list[Any], Family]:
    """The layers of a model that can be replayed, and how."""
    mixers = [module for module in model.modules() if type(module).__name__ in FAMILIES]
    return mixers, FAMILIES[type(mixers[0]).__name__]
