"""Models of the transformers library whose state space layers decode with the replay ops.

The library prefills each prompt. From then on its Mamba-2 or Gated DeltaNet layers, their short convolution
included, are replaced by ``conv_step`` and ``mamba2_step`` or ``gdn_step``; norms, projections, attention and
feed-forward layers stay the library's. Prompts join a running batch one after the other and leave their slots
to later ones, as in an engine. Tokens are compared with those of the library's own ``generate``.

Run: python examples/transformers_decode.py [--window 16] [--new-tokens 48] [--device cuda]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging

from examples.layer_costs import LayerShape, cost_table, gdn_shape, mamba2_shape
from replayssm_tune.runtime import commit, conv_seed, conv_step, gdn_step, make_cache, mamba2_step, reset


class CacheGroup:
    """What all replayed layers of a model share: the two cursors, and which slot each row of a step owns."""

    def __init__(self, slots: int, shape: LayerShape, device: torch.device) -> None:
        self.slots, self.window, self.capacity = slots, shape.spec.window, shape.capacity
        self.num_tokens = shape.spec.num_tokens  # 1 + drafts, once the ops verify drafts
        self.ring_start = torch.zeros(slots, dtype=torch.int32, device=device)
        self.ring_len = torch.zeros(slots, dtype=torch.int32, device=device)
        self.rows: Tensor | None = None
        """Slots of the step under way; None outside of steps, when layers are the library's."""

    @property
    def cursors(self) -> dict[str, Any]:
        """The cursors by the ops' names."""
        return {"ring_start": self.ring_start, "ring_len": self.ring_len}

    @property
    def step(self) -> dict[str, Any]:
        """What all ops of the step under way take, beside caches and cursors."""
        return {"slot_index": self.rows, "window": self.window}


class ReplayedLayer(ABC):
    """A layer of the library that decodes with our ops; a class for each family says how.

    It takes the place of ``mixer.forward``. Outside of a :class:`Decoder`'s step that is still the library's.
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
        """In a step ours, else the library's; hidden states are (rows, tokens, hidden size)."""
        if self.group.rows is None:
            return type(self.mixer).forward(self.mixer, hidden_states, **arguments)
        return self._decode(hidden_states.flatten(0, 1)).view_as(hidden_states)

    def seed(self, prefilled: Any, slot: Tensor) -> None:
        """Move what the library's prefill left in its cache of this layer to a slot whose ring is empty."""
        self.cache.state[slot] = self._state_of(prefilled.recurrent_states[0])
        # The library keeps (rows, channels, width) inputs, zeros in front; a next output needs width - 1.
        history = prefilled.conv_states[0][..., 1 - self.shape.width :].transpose(1, 2).contiguous()
        conv_seed(history, ring=self.conv_ring, ring_start=self.group.ring_start, slots=slot)

    def _convolve(self, inputs: Tensor) -> Tensor:
        """The short convolution: (tokens, channels) to the same."""
        conv, group = self.mixer.conv1d, self.group
        return conv_step(
            inputs, conv.weight.squeeze(1), bias=conv.bias, ring=self.conv_ring, num_tokens=group.num_tokens,
            **group.cursors, **group.step,
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
            D=mixer.D, dt_bias=mixer.dt_bias, **self.cache.tensors(), **self.group.step,
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
            dt_bias=mixer.dt_bias, **self.cache.tensors(), **self.group.step,
        )  # fmt: skip
        output: Tensor = mixer.out_proj(mixer.norm(y.flatten(0, 1), z.flatten(0, 1)).view_as(y).flatten(1))
        return output


class Family(NamedTuple):
    """How layers of a family are replayed."""

    adapter: type[ReplayedLayer]
    shape_of: Callable[..., LayerShape]
    """From a config, the window and a dtype."""


FAMILIES = {
    "Mamba2Mixer": Family(ReplayedMamba2, mamba2_shape),
    "Qwen3NextGatedDeltaNet": Family(ReplayedGatedDeltaNet, gdn_shape),
}
"""By the class of the library's layer."""


def replayable(model: Any) -> tuple[list[Any], Family]:
    """The layers of a model that can be replayed, and how."""
    mixers = [module for module in model.modules() if type(module).__name__ in FAMILIES]
    return mixers, FAMILIES[type(mixers[0]).__name__]


class Decoder:
    """A batch of sequences of a model of the library, which grows row by row.

    A step is :meth:`step`, then :meth:`accept`. With drafts, ``step`` would take (rows, 1 + drafts) tokens
    and ``accept`` the kept counts; the library's attention caches would need a rollback of their own.
    """

    def __init__(self, model: Any, window: int, slots: int) -> None:
        self.model = model
        mixers, family = replayable(model)
        shape = family.shape_of(model.config, window)
        self.group = CacheGroup(slots, shape, model.device)
        self.layers = [family.adapter(mixer, shape, self.group) for mixer in mixers]
        self.slots = torch.empty(0, dtype=torch.int32, device=model.device)
        """(rows,): each row's slot, -1 once its sequence is over."""
        # Keys and values of attention layers, padded in front, and which of them are tokens. What the library
        # would keep for the replayed layers is never allocated.
        self.attention = DynamicCache(config=model.config)
        self.mask = torch.empty(0, 0, dtype=torch.long, device=model.device)

    @torch.no_grad()
    def admit(self, prompt: Sequence[int], slot: int) -> Tensor:
        """Prefill a prompt into a free slot, as a new last row; logits (vocabulary,) of its next token."""
        tokens = torch.tensor([prompt], device=self.model.device)
        prefilled = self.model(tokens, use_cache=True)
        new = torch.tensor([slot], dtype=torch.int32, device=tokens.device)
        reset(new, **self.group.cursors)
        for layer in self.layers:
            layer.seed(prefilled.cache.layers[layer.mixer.layer_idx], new)
        for ours, theirs in zip(self.attention.layers, prefilled.cache.layers, strict=True):
            if not hasattr(theirs, "keys"):
                continue
            if ours.is_initialized:
                ours.keys = with_row(ours.keys, theirs.keys, -2)
                ours.values = with_row(ours.values, theirs.values, -2)
            else:
                ours.update(theirs.keys, theirs.values)
        self.mask = with_row(self.mask, torch.ones_like(tokens), -1)
        self.slots = torch.cat([self.slots, new])
        logits: Tensor = prefilled.logits[0, -1]
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """One forward pass of all rows: (rows, tokens of a step) to logits (rows, tokens, vocabulary)."""
        self.mask = torch.cat([self.mask, torch.ones_like(tokens)], -1)
        positions = (self.mask.cumsum(-1) - 1)[:, -tokens.shape[1] :]
        self.group.rows = self.slots
        try:
            outputs = self.model(
                tokens, cache=self.attention, attention_mask=self.mask, position_ids=positions, use_cache=True
            )
        finally:
            self.group.rows = None
        logits: Tensor = outputs.logits
        return logits

    def accept(self, accepted: Tensor) -> None:
        """Commit the step: (rows,) tokens kept of each row's."""
        group = self.group
        commit(
            accepted, slot_index=self.slots, window=group.window, num_tokens=group.num_tokens,
            capacity=group.capacity, **group.cursors,
        )  # fmt: skip

    def retire(self, row: int) -> int:
        """Turn a row into padding; returns its slot, which is free now."""
        slot = int(self.slots[row])
        self.slots[row] = -1
        return slot


def with_row(rows: Tensor, row: Tensor, dim: int) -> Tensor:
    """``row`` below ``rows``, both padded with zeros in front of dimension ``dim`` (counted from the end)."""
    length = max(rows.shape[dim], row.shape[dim])
    behind = [0, 0] * (-1 - dim)
    return torch.cat([functional.pad(part, [*behind, length - part.shape[dim], 0]) for part in (rows, row)])


class Generated:
    """What a prompt is continued with, and the logits (vocabulary,) that each token was chosen by."""

    def __init__(self, logits: Tensor) -> None:
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        self.choose(logits)

    def choose(self, logits: Tensor) -> None:
        """The next token, greedily."""
        self.tokens.append(int(logits.argmax()))
        self.logits.append(logits)


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, every: int = 3
) -> list[Generated]:
    """Continue prompts greedily; one joins each ``every`` steps if a slot is free, so rows flush apart."""
    free, sequences, steps = list(range(decoder.group.slots)), list[Generated](), 0
    while len(sequences) < len(prompts) or any(len(s.tokens) < new_tokens for s in sequences):
        if len(sequences) < len(prompts) and free and steps % every == 0:
            sequences.append(Generated(decoder.admit(prompts[len(sequences)], free.pop())))
        logits = decoder.step(torch.tensor([s.tokens[-1:] for s in sequences], device=decoder.model.device))
        decoder.accept(torch.ones_like(decoder.slots))
        for row, sequence in enumerate(sequences):
            if len(sequence.tokens) < new_tokens:
                sequence.choose(logits[row, -1])
            if len(sequence.tokens) == new_tokens and decoder.slots[row] >= 0:
                free.append(decoder.retire(row))
        steps += 1
    return sequences


def generate_by_library(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The same by the library alone."""
    tokens = torch.tensor([prompt], device=model.device)
    out = model.generate(tokens, max_new_tokens=new_tokens, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def small_model(family: str) -> Any:
    """A random model of a few layers in fp32; its weights are large enough that its text is no loop."""
    torch.manual_seed(0)
    if family == "mamba2":
        sizes = {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "hidden_size": 64}
        return Mamba2ForCausalLM(
            Mamba2Config(vocab_size=128, num_hidden_layers=3, eos_token_id=None, **sizes)
        ).eval()
    config = Qwen3NextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_experts=0,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_value_head_dim=24, linear_key_head_dim=16, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


PROMPTS: tuple[Sequence[int], ...] = ([5], [17, 3], [9, 80, 41, 7, 66, 23, 101], range(20, 39), [50, 2, 31])
"""Shorter and longer than the convolution, and more than :func:`main` has slots for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode with both models in both ways; 1 if any token differs."""
    parser = argparse.ArgumentParser(description="Decode models of transformers with the replay ops.")
    parser.add_argument("--window", type=int, default=16, help="tokens in a ring before it is folded")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = False  # the library's convolutions, on a GPU
    logging.set_verbosity_error()  # of kernels that the library would like to have

    differing = 0
    for family, published in (("mamba2", Mamba2Config()), ("gdn", Qwen3NextConfig())):
        model = small_model(family).to(args.device)
        expected = [generate_by_library(model, prompt, args.new_tokens) for prompt in PROMPTS]
        found = generate(Decoder(model, args.window, slots=3), PROMPTS, args.new_tokens)
        equal = sum(ours.tokens == theirs for ours, theirs in zip(found, expected, strict=True))
        differing += len(PROMPTS) - equal
        print(f"{type(model).__name__} on {args.device}, window {args.window}")
        print(f"{equal} of {len(PROMPTS)} sequences have the library's {args.new_tokens} tokens")
        print("KiB of a sequence, moved a token and held:")
        mixers, how = replayable(model)
        print(f"the small model's {len(mixers)} layers, fp32")
        print(cost_table(how.shape_of(model.config, args.window), len(mixers)))
        layers = published.layer_types.count("linear_attention")
        print(f"{layers} layers of the library's default sizes, bf16, states in fp32")
        print(cost_table(how.shape_of(published, args.window, "bf16"), layers), end="\n\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
