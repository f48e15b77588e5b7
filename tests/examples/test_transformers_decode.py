"""The example is a client of the ops: its tokens are the library's, its figures those of real tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24", reason="needs the extra 'examples'")

from transformers import Mamba2Config
from transformers.utils import logging

from examples import transformers_decode as example
from examples.layer_costs import mamba2_shape, native_costs, replay_costs

NEW_TOKENS, SLOTS = 48, 3

families = pytest.mark.parametrize("family", ["mamba2", "gdn"])
windows = pytest.mark.parametrize("window", [4, 16])


@pytest.fixture(autouse=True)
def quiet_and_exact():
    logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors so small take many times longer with more on a busy machine
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield
    torch.set_num_threads(threads)


class Watched(example.Decoder):
    """Notes the ring length of each live row's slot before each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.steps: list[dict[int, int]] = []

    def step(self, tokens):
        live = [slot for slot in self.slots.tolist() if slot >= 0]
        self.steps.append({slot: int(self.group.ring_len[slot]) for slot in live})
        return super().step(tokens)


def library_logits(model, prompt):
    """(new tokens, vocabulary), of the library's own greedy generation."""
    out = model.generate(
        torch.tensor([prompt], device=model.device),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.cat(out.logits)


def decode(family, window, device="cpu"):
    model = example.small_model(family).to(device)
    decoder = Watched(model, window, SLOTS)
    return decoder, example.generate(decoder, example.PROMPTS, NEW_TOKENS)


def check_against_the_library(decoder, found):
    expected = [library_logits(decoder.model, prompt) for prompt in example.PROMPTS]
    assert [ours.tokens for ours in found] == [theirs.argmax(-1).tolist() for theirs in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours.logits), theirs, rtol=0, atol=1e-4)
    # Weights for which rounding could decide a token would test nothing else.
    best, second = torch.cat(expected).topk(2).values.unbind(-1)
    assert float((best - second).min()) > 4e-4


@families
@windows
def test_tokens_are_the_librarys(family, window):
    decoder, found = decode(family, window)
    check_against_the_library(decoder, found)
    # A loop of few tokens could hide much.
    assert all(len(set(ours.tokens)) > NEW_TOKENS // 2 for ours in found)
    # Each slot flushed again and again, and not all at once.
    flushing = [{slot for slot, length in step.items() if length == window} for step in decoder.steps]
    for slot in range(SLOTS):
        assert sum(slot in step for step in flushing) >= NEW_TOKENS // window - 1
    assert any(0 < len(some) < len(step) for some, step in zip(flushing, decoder.steps, strict=True))


@pytest.mark.gpu
@families
@windows
def test_tokens_are_the_librarys_on_a_gpu(family, window):
    check_against_the_library(*decode(family, window, "cuda"))


@families
@pytest.mark.parametrize("op", ["conv_seed", "reset", "commit"])
def test_no_op_of_the_contract_can_be_left_out(family, op, monkeypatch):
    monkeypatch.setattr(example, op, lambda *_, **__: None)
    decoder, found = decode(family, 4)
    with pytest.raises(AssertionError):
        check_against_the_library(decoder, found)


@families
def test_a_decoder_leaves_the_library_its_layers(family):
    decoder, _ = decode(family, 4)
    fresh = example.small_model(family)
    prompt = example.PROMPTS[2]
    torch.testing.assert_close(
        library_logits(decoder.model, prompt), library_logits(fresh, prompt), rtol=0, atol=0
    )


@families
@windows
def test_costs_are_those_of_the_tensors(family, window):
    decoder, _ = decode(family, window)
    layer = decoder.layers[0]
    cache = layer.cache
    state, *rings = (t.nbytes // SLOTS for t in (cache.state, cache.ring_x, cache.ring_b, cache.ring_decay))
    inputs = layer.conv_ring.nbytes // SLOTS
    # The first prompt's slot, when its ring goes from one flush to the next.
    first = max(decoder.steps[0])
    lengths = [step[first] for step in decoder.steps[window : 2 * window]]
    flushes = sum(length == window for length in lengths)
    assert flushes == 1

    costs = replay_costs(layer.shape)
    assert costs.held == state + sum(rings) + inputs
    assert costs.state == state + flushes * state / window
    assert costs.ring == sum(rings) / cache.capacity * (sum(lengths) / window + 1)
    assert costs.convolution == inputs / cache.capacity * layer.shape.width

    with torch.no_grad():
        prefilled = decoder.model(torch.tensor([[1, 2, 3]]), use_cache=True).cache
    theirs = prefilled.layers[layer.mixer.layer_idx]
    kept = theirs.recurrent_states[0].nbytes, theirs.conv_states[0].nbytes
    assert native_costs(layer.shape) == (2 * kept[0], 0, 2 * kept[1], sum(kept))


def test_main_prints_tokens_and_costs_of_both_models(capsys):
    assert example.main(["--window", "4", "--new-tokens", "6", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("5 of 5 sequences have the library's 6 tokens") == 2
    assert printed.count("native") == printed.count("replay") == 4


def test_main_fails_if_a_token_differs(capsys, monkeypatch):
    monkeypatch.setattr(example, "generate_by_library", lambda model, prompt, count: [-1] * count)
    assert example.main(["--window", "4", "--new-tokens", "2", "--device", "cpu"]) == 1
    assert "0 of 5" in capsys.readouterr().out


def test_clamped_step_sizes_are_refused():
    config = Mamba2Config(time_step_limit=(0.0, 0.1))
    with pytest.raises(ValueError, match="time_step_limit"):
        mamba2_shape(config, window=4)


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_short_continuations_give_their_slots_on(new_tokens):
    model = example.small_model("mamba2")
    found = example.generate(example.Decoder(model, 4, 1), example.PROMPTS, new_tokens)
    expected = [example.generate_by_library(model, prompt, new_tokens) for prompt in example.PROMPTS]
    assert [ours.tokens for ours in found] == expected
