"""Models of the transformers library whose state space layers decode with the replay ops.

The library prefills each prompt. From then on its Mamba-2 or Gated DeltaNet layers, their short convolution
included, are replaced by ``conv_step`` and ``mamba2_step`` or ``gdn_step``; norms, projections, attention and
feed-forward layers stay the library's. Prompts join a running batch one after the other and leave their slots
to later ones, as in an engine. Steps take one token of each sequence, or drafts too, of which those that
greedy decoding would not have chosen are rolled back. Tokens are compared with those of the library's own
``generate``.

Run: python examples/transformers_decode.py [--window 16] [--drafts 3] [--new-tokens 48] [--device cuda]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.utils import logging

from examples.layer_costs import Costs, Turn, acceptance, cost_table, native_costs, replay_costs
from examples.replayed_layers import CacheGroup, Step, replayable
from replayssm_tune.runtime import commit, reset


class Decoder:
    """A batch of sequences of a model of the library, which grows row by row.

    A step is :meth:`step`, then :meth:`accept`.

    Args:
        model: Of the library.
        window: Tokens in a ring before it is folded.
        slots: Sequences there is room for.
        drafts: The most that a row may have in a step.
    """

    def __init__(self, model: Any, window: int, slots: int, drafts: int = 0) -> None:
        self.model = model
        mixers, family = replayable(model)
        shape = family.shape_of(model.config, window, 1 + drafts)
        self.group = CacheGroup(slots, shape, model.device)
        self.layers = [family.adapter(mixer, shape, self.group) for mixer in mixers]
        self.slots = torch.empty(0, dtype=torch.int32, device=model.device)
        """(rows,): each row's slot, -1 once its sequence is over."""
        # Keys and values of attention layers, padded in front, and which of them are tokens. What the library
        # would keep for the replayed layers is never allocated.
        self.attention = DynamicCache(config=model.config)
        self.mask = torch.empty(0, 0, dtype=torch.long, device=model.device)
        self.taken: Step | None = None
        """The last step, which is to be committed."""

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
    def step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """One forward pass of all rows.

        Args:
            tokens: Of each row: its sequence's last token, then drafts of those behind it; none in padding.

        Returns:
            (rows, columns, vocabulary), the logits of what follows each token; undefined where there is none.
        """
        device, drafting = self.model.device, self.group.num_tokens > 1
        if not drafting:
            tokens = [row or [0] for row in tokens]  # one a row, in padding whichever
        columns = max(map(len, tokens))
        rectangle = torch.tensor([[*row, *[0] * (columns - len(row))] for row in tokens], device=device)
        counts = torch.tensor([len(row) for row in tokens], device=device)
        owned = torch.arange(columns, device=device) < counts[:, None]
        query_start = functional.pad(counts.cumsum(0), (1, 0)).int() if drafting else None
        self.mask = torch.cat([self.mask, owned.long()], -1)
        positions = (self.mask.cumsum(-1) - 1)[:, -columns:]
        self.taken = self.group.step = Step(self.slots, owned, query_start)
        try:
            outputs = self.model(
                rectangle,
                cache=self.attention,
                attention_mask=self.mask,
                position_ids=positions,
                use_cache=True,
            )
        finally:
            self.group.step = None
        logits: Tensor = outputs.logits
        return logits

    def accept(self, kept: Sequence[int]) -> None:
        """Commit the step: of each row the first so many tokens are kept."""
        taken, group = self.taken, self.group
        assert taken is not None, "a step comes first"
        accepted = torch.tensor(kept, device=self.model.device)
        # All it takes to roll back state space layers and convolutions: rejected tokens lie behind the rings'
        # ends now, where the next step's overwrite them.
        commit(accepted, capacity=group.capacity, **group.cursors, **group.arguments(taken))
        if group.num_tokens > 1:
            self._crop_attention(taken.owned.shape[1] - accepted)
        self.taken = None

    def _crop_attention(self, surplus: Tensor) -> None:
        """Drop the last ``surplus`` (rows,) columns of each row: rejected tokens, and what filled rows up."""
        source = torch.arange(self.mask.shape[1], device=surplus.device) - surplus[:, None]
        mask = self.mask.gather(1, source.clamp(min=0)) * (source >= 0)
        first = int(mask.any(0).int().argmax())  # in front of it there is only padding
        self.mask, source = mask[:, first:], source[:, first:].clamp(min=0)
        for layer in self.attention.layers:
            if hasattr(layer, "keys"):
                layer.keys = layer.keys.take_along_dim(source[:, None, :, None], 2)
                layer.values = layer.values.take_along_dim(source[:, None, :, None], 2)

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

    def __init__(self, prompt: Sequence[int], logits: Tensor, new_tokens: int) -> None:
        self.prompt, self.new_tokens = list(prompt), new_tokens
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        self._choose(logits)

    @property
    def left(self) -> int:
        """Tokens that are to come."""
        return self.new_tokens - len(self.tokens)

    def feed(self, drafts: int) -> list[int]:
        """What the next step takes of it: the last token and up to ``drafts`` drafts; nothing at the end."""
        if self.left == 0:
            return []
        return [self.tokens[-1], *lookup(self.prompt + self.tokens, min(drafts, self.left - 1))]

    def take(self, fed: Sequence[int], logits: Tensor) -> int:
        """Choose what follows fed tokens as long as they are the chosen ones; returns how many were."""
        kept = 0
        for token, following in zip(fed, logits, strict=False):
            if token != self.tokens[-1]:
                break
            self._choose(following)
            kept += 1
        return kept

    def _choose(self, logits: Tensor) -> None:
        self.tokens.append(int(logits.argmax()))
        self.logits.append(logits)


def lookup(text: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` drafts: what followed the text's last tokens where they occurred before.

    As many tokens as possible are looked for, of several places the last one counts. At most one draft more
    than tokens were found: a text that has repeated itself for long is likely to go on so. (An n-gram look-up
    as in prompt lookup decoding, Saxena 2023.)
    """
    text = list(text)
    for length in range(min(most, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                drafted = list(text)  # the place may be so close to the end that drafts repeat drafts
                for source in range(end, end + min(most, length + 1)):
                    drafted.append(drafted[source])
                return drafted[len(text) :]
    return []


def generate(
    decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, every: int = 3
) -> tuple[list[Generated], list[Turn]]:
    """Continue prompts greedily, with drafts if the decoder takes any.

    One joins each ``every`` steps if a slot is free, so that rows flush apart.
    """
    group, waiting = decoder.group, list(prompts)
    free, sequences, turns, step = list(range(group.slots)), list[Generated](), list[Turn](), 0
    while waiting or any(sequence.left for sequence in sequences):
        if waiting and free and (step % every == 0 or len(free) == group.slots):
            prompt = waiting.pop(0)
            sequences.append(Generated(prompt, decoder.admit(prompt, free.pop()), new_tokens))
        fed = [sequence.feed(group.num_tokens - 1) for sequence in sequences]
        if any(fed):
            slots, lengths = decoder.slots.tolist(), group.ring_len.tolist()
            logits = decoder.step(fed)
            kept = [sequence.take(fed[row], logits[row]) for row, sequence in enumerate(sequences)]
            decoder.accept(kept)
            turns += [
                Turn(step, slot, lengths[slot], len(tokens), count)
                for slot, tokens, count in zip(slots, fed, kept, strict=True)
                if tokens
            ]
        for row, sequence in enumerate(sequences):
            if sequence.left == 0 and decoder.slots[row] >= 0:
                free.append(decoder.retire(row))
        step += 1
    return sequences, turns


def generate_by_library(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The same by the library alone."""
    tokens = torch.tensor([prompt], device=model.device)
    out = model.generate(tokens, max_new_tokens=new_tokens, do_sample=False)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def small_model(family: str) -> Any:
    """A random model of a few layers in fp32.

    Its embeddings are so large beside its layers that its text half repeats itself: drafts from what was
    said before are right now and then.
    """
    torch.manual_seed(0)
    model: Any
    if family == "mamba2":
        sizes = {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "hidden_size": 64}
        model = Mamba2ForCausalLM(
            Mamba2Config(vocab_size=48, num_hidden_layers=3, eos_token_id=None, **sizes)
        ).eval()
    else:
        config = Qwen3NextConfig(
            vocab_size=48, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_experts=0,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_value_heads=4,
            linear_num_key_heads=2, linear_value_head_dim=24, linear_key_head_dim=16, initializer_range=0.1,
        )  # fmt: skip
        model = Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(16)
    return model


PROMPTS: tuple[Sequence[int], ...] = ([5], [17, 3], [9, 30, 41, 7, 9, 30, 41], range(20, 39), [46, 2, 31])
"""Shorter and longer than the convolution, and more than :func:`main` has slots for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Decode with both models in all ways; 1 if any token differs."""
    parser = argparse.ArgumentParser(description="Decode models of transformers with the replay ops.")
    parser.add_argument("--window", type=int, default=16, help="tokens in a ring before it is folded")
    parser.add_argument("--drafts", type=int, default=3, help="most drafts in a step; fewer than the window")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    torch.backends.cudnn.allow_tf32 = False  # the library's convolutions, on a GPU
    logging.set_verbosity_error()  # of kernels that the library would like to have

    differing = 0
    for family, published in (("mamba2", Mamba2Config()), ("gdn", Qwen3NextConfig())):
        model = small_model(family).to(args.device)
        expected = [generate_by_library(model, prompt, args.new_tokens) for prompt in PROMPTS]
        print(f"{type(model).__name__} on {args.device}, window {args.window}")
        runs: dict[int, list[Turn]] = {}
        for drafts in sorted({0, args.drafts}):
            decoder = Decoder(model, args.window, slots=3, drafts=drafts)
            found, runs[drafts] = generate(decoder, PROMPTS, args.new_tokens)
            equal = sum(ours.tokens == theirs for ours, theirs in zip(found, expected, strict=True))
            differing += len(PROMPTS) - equal
            print(
                f"up to {drafts} drafts a step: {equal} of {len(PROMPTS)} sequences have the library's ",
                end="",
            )
            print(f"{args.new_tokens} tokens; {acceptance(runs[drafts])}")
        print("KiB of a sequence, moved for a generated token, and held. Native is the library's way; with")
        print("drafts, which engines would verify so, a state for each token of a step (figures alone):")
        mixers, _ = replayable(model)
        print(f"the small model's {len(mixers)} layers, fp32")
        print(cost_table(costs(model, model.config, args.window, "fp32", runs), len(mixers)))
        layers = published.layer_types.count("linear_attention")
        print(f"{layers} layers of the library's default sizes, bf16, states in fp32, the same drafts kept")
        print(cost_table(costs(model, published, args.window, "bf16", runs), layers), end="\n\n")
    return 1 if differing else 0


def costs(
    model: Any, config: Any, window: int, dtype: str, runs: Mapping[int, Sequence[Turn]]
) -> dict[str, Costs]:
    """What a layer of a config costs in each way, by names; turns of ``runs`` are by the most drafts."""
    ways, (_, family) = {}, replayable(model)
    for drafts, turns in runs.items():
        shape = family.shape_of(config, window, 1 + drafts, dtype)
        suffix = ", drafts" if drafts else ""
        ways[f"native{suffix}"] = native_costs(shape, turns)
        ways[f"replay{suffix}"] = replay_costs(shape, turns)
    return ways


if __name__ == "__main__":
    sys.exit(main())
