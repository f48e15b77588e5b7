"""The example is a client of the ops: its tokens are the library's, its figures those of real tensors."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24", reason="needs the extra 'examples'")

from transformers import Mamba2Config
from transformers.utils import logging

from examples import replayed_layers
from examples import transformers_decode as example
from examples.layer_costs import Turn, acceptance, mamba2_shape, native_costs, replay_costs
from replayssm_tune.runtime import commit

NEW_TOKENS, SLOTS = 48, 3

families = pytest.mark.parametrize("family", ["mamba2", "gdn"])
ways = pytest.mark.parametrize(("window", "drafts"), [(4, 0), (16, 0), (4, 3), (16, 3), (9, 5)])


@pytest.fixture(autouse=True)
def quiet_and_exact():
    logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors so small take many times longer with more on a busy machine
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield
    torch.set_num_threads(threads)


class Watched(example.Decoder):
    """Notes which states each step wrote, and how many entries of attention caches each row has after it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.written: list[set[int]] = []
        self.attended: list[list[int]] = []

    def step(self, tokens):
        before = [layer.cache.state.clone() for layer in self.layers]
        logits = super().step(tokens)
        layers = [
            {slot for slot in range(SLOTS) if not torch.equal(state[slot], layer.cache.state[slot])}
            for state, layer in zip(before, self.layers, strict=True)
        ]
        assert all(slots == layers[0] for slots in layers)
        self.written.append(layers[0])
        return logits

    def accept(self, kept):
        super().accept(kept)
        assert bool((self.mask.diff() >= 0).all()), "rows are padded in front alone"
        assert bool(self.mask[:, 0].any()), "and no more than the longest needs"
        for layer in self.attention.layers:
            if hasattr(layer, "keys"):
                assert layer.keys.shape[2] == layer.values.shape[2] == self.mask.shape[1]
        self.attended.append(self.mask.sum(1).tolist())


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


def decode(family, window, drafts=0, device="cpu"):
    model = example.small_model(family).to(device)
    decoder = Watched(model, window, SLOTS, drafts)
    return decoder, *example.generate(decoder, example.PROMPTS, NEW_TOKENS)


def check_against_the_library(model, found):
    expected = [library_logits(model, prompt) for prompt in example.PROMPTS]
    assert [ours.tokens for ours in found] == [theirs.argmax(-1).tolist() for theirs in expected]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours.logits), theirs, rtol=0, atol=1e-4)
    # Weights for which rounding could decide a token would test nothing else.
    best, second = torch.cat(expected).topk(2).values.unbind(-1)
    assert float((best - second).min()) > 4e-4


def flushes(turn, window, drafts):
    return turn.ring_len + 1 + drafts > window


def by_step(turns):
    steps = defaultdict(list)
    for turn in turns:
        steps[turn.step].append(turn)
    return steps.values()


@families
@ways
def test_tokens_are_the_librarys(family, window, drafts):
    decoder, found, turns = decode(family, window, drafts)
    check_against_the_library(decoder.model, found)
    # A loop of few tokens could hide much.
    assert all(len(set(ours.tokens)) >= 10 for ours in found)
    # Slots were given to later prompts, and each flushed again and again, not all at once.
    assert sum(turn.ring_len == 0 for turn in turns) == len(example.PROMPTS) > SLOTS
    flushed = Counter(turn.slot for turn in turns if flushes(turn, window, drafts))
    assert min(flushed[slot] for slot in range(SLOTS)) >= NEW_TOKENS // window - 1
    assert any(len({flushes(turn, window, drafts) for turn in step}) == 2 for step in by_step(turns))


@families
@pytest.mark.parametrize(("window", "drafts"), [(16, 3), (9, 5)])
def test_drafts_are_accepted_and_rejected(family, window, drafts):
    decoder, found, turns = decode(family, window, drafts)
    kinds = {
        "no drafts": lambda turn: turn.fed == 1,
        "none kept": lambda turn: turn.kept == 1 < turn.fed,
        "some kept": lambda turn: 1 < turn.kept < turn.fed,
        "all kept": lambda turn: 1 < turn.kept == turn.fed,
    }
    seen = {
        (flushes(turn, window, drafts), kind)
        for turn in turns
        for kind, holds in kinds.items()
        if holds(turn)
    }
    assert seen >= {(False, kind) for kind in kinds} | {(True, kind) for kind in kinds if kind != "some kept"}
    assert max(turn.fed for turn in turns) == 1 + drafts
    # Rows of different lengths share steps.
    assert any(len({turn.fed for turn in step}) == SLOTS for step in by_step(turns))
    # That is where steps are saved.
    generated = sum(len(ours.tokens) - 1 for ours in found)
    assert sum(turn.kept for turn in turns) == generated > 1.2 * len(turns)
    # Attention caches hold what was kept and nothing else: the prompt, and all tokens but the last.
    held = [len(ours.prompt) + NEW_TOKENS - 1 for ours in found]
    assert decoder.attended[-1] == held


@pytest.mark.gpu
@families
@ways
def test_tokens_are_the_librarys_on_a_gpu(family, window, drafts):
    decoder, found, turns = decode(family, window, drafts, "cuda")
    check_against_the_library(decoder.model, found)
    rejected = sum(turn.fed - turn.kept for turn in turns)
    assert (rejected > 0) == (drafts > 0)


@families
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("op", ["conv_seed", "reset", "commit"])
def test_no_op_of_the_contract_can_be_left_out(family, drafts, op, monkeypatch):
    monkeypatch.setattr(replayed_layers if op == "conv_seed" else example, op, lambda *_, **__: None)
    decoder, found, _ = decode(family, 4, drafts)
    with pytest.raises(AssertionError):
        check_against_the_library(decoder.model, found)


@families
def test_drafts_that_are_not_rolled_back_change_tokens(family, monkeypatch):
    def keep_all(accepted, **arguments):
        commit(arguments["query_start"].diff().to(accepted.dtype), **arguments)

    monkeypatch.setattr(example, "commit", keep_all)
    decoder, found, _ = decode(family, 16, 3)
    with pytest.raises(AssertionError):
        check_against_the_library(decoder.model, found)


def test_rejected_tokens_left_in_attention_caches_change_tokens(monkeypatch):
    monkeypatch.setattr(example.Decoder, "_crop_attention", lambda *_: None)
    model = example.small_model("gdn")
    found, _ = example.generate(example.Decoder(model, 16, SLOTS, 3), example.PROMPTS, NEW_TOKENS)
    with pytest.raises(AssertionError):
        check_against_the_library(model, found)


@families
def test_a_decoder_leaves_the_library_its_layers(family):
    decoder, *_ = decode(family, 4, 3)
    fresh = example.small_model(family)
    prompt = example.PROMPTS[2]
    torch.testing.assert_close(
        library_logits(decoder.model, prompt), library_logits(fresh, prompt), rtol=0, atol=0
    )


@families
@ways
def test_costs_are_those_of_the_tensors(family, window, drafts):
    decoder, found, turns = decode(family, window, drafts)
    layer = decoder.layers[0]
    cache = layer.cache
    state, *rings = (t.nbytes // SLOTS for t in (cache.state, cache.ring_x, cache.ring_b, cache.ring_decay))
    inputs = layer.conv_ring.nbytes // SLOTS
    generated = sum(len(ours.tokens) - 1 for ours in found)

    costs = replay_costs(layer.shape, turns)
    assert costs.held == state + sum(rings) + inputs
    assert costs.state_read == state * len(turns) / generated
    assert costs.state_written == state * sum(map(len, decoder.written)) / generated
    fed, replayed = (sum(getattr(turn, name) for turn in turns) for name in ("fed", "ring_len"))
    entry, history = sum(rings) // cache.capacity, layer.shape.width - 1
    assert costs.ring == entry * (replayed + fed) / generated
    assert costs.convolution == inputs // cache.capacity * (history * len(turns) + fed) / generated


@families
def test_native_costs_are_those_of_the_librarys_tensors(family):
    model = example.small_model(family)
    with torch.no_grad():
        caches = model(torch.tensor([[1, 2, 3]]), use_cache=True).cache
    mixers, how = replayed_layers.replayable(model)
    theirs = caches.layers[mixers[0].layer_idx]
    state, inputs = theirs.recurrent_states[0].nbytes, theirs.conv_states[0].nbytes
    one, four = (how.shape_of(model.config, 16, num_tokens) for num_tokens in (1, 4))
    turns = [Turn(step=step, slot=0, ring_len=0, fed=1, kept=1) for step in range(3)]
    assert native_costs(one, turns) == (state, state, 0, 2 * inputs, state + inputs)
    # Two steps with three drafts each, of which two and none were kept: four tokens.
    turns = [Turn(step=step, slot=0, ring_len=0, fed=4, kept=kept) for step, kept in enumerate((3, 1))]
    inputs = inputs // one.width * (one.width + 3)
    assert native_costs(four, turns) == (2 * state / 4, 8 * state / 4, 0, 4 * inputs / 4, 4 * state + inputs)


def test_acceptance_counts_drafts_alone():
    turns = [Turn(0, 0, 0, fed=4, kept=2), Turn(1, 0, 2, fed=3, kept=3)]
    assert acceptance(turns) == "3 of 5 drafts accepted (60%), 2.50 tokens a step"
    assert acceptance([Turn(0, 0, 0, fed=1, kept=1)]) == "0 of 0 drafts accepted, 1.00 tokens a step"


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([1, 2, 3], 4, []),  # nothing occurs twice
        ([7], 4, []),
        ([], 4, []),
        ([1, 2, 3, 1], 0, []),
        ([1, 2, 3, 1], 1, [2]),
        ([1, 2, 3, 1], 4, [2, 3]),  # one token was found again, so there are two drafts
        ([1, 2, 3, 4, 5, 1, 2], 4, [3, 4, 5]),
        (range(3), 4, []),
        ([5, 5], 4, [5, 5]),  # the second draft follows the first
        ([1, 2, 1, 2, 1], 4, [2, 1, 2, 1]),
        ([1, 2, 9, 3, 2, 8, 1, 2], 2, [9, 3]),  # two tokens decide before one does
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, [9, 1]),  # and the latest place
    ],
)
def test_lookup_drafts_what_followed_before(text, most, drafts):
    assert example.lookup(text, most) == drafts


def test_main_prints_tokens_and_costs_of_both_models(capsys):
    assert example.main(["--window", "4", "--drafts", "2", "--new-tokens", "6", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("5 of 5 sequences have the library's 6 tokens") == 4
    assert printed.count("up to 2 drafts a step") == printed.count("up to 0 drafts a step") == 2
    rows = Counter(line[:16].strip() for line in printed.splitlines())
    assert all(rows[way] == 4 for way in ("native", "replay", "native, drafts", "replay, drafts"))


def test_main_decodes_without_drafts_alone(capsys):
    assert example.main(["--drafts", "0", "--new-tokens", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("5 of 5") == 2


def test_main_fails_if_a_token_differs(capsys, monkeypatch):
    monkeypatch.setattr(example, "generate_by_library", lambda model, prompt, count: [-1] * count)
    assert example.main(["--window", "4", "--drafts", "1", "--new-tokens", "2", "--device", "cpu"]) == 1
    assert "0 of 5" in capsys.readouterr().out


def test_clamped_step_sizes_are_refused():
    config = Mamba2Config(time_step_limit=(0.0, 0.1))
    with pytest.raises(ValueError, match="time_step_limit"):
        mamba2_shape(config, window=4)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_short_continuations_give_their_slots_on(new_tokens, drafts):
    model = example.small_model("mamba2")
    found, _ = example.generate(example.Decoder(model, 4, 1, drafts), example.PROMPTS, new_tokens)
    expected = [example.generate_by_library(model, prompt, new_tokens) for prompt in example.PROMPTS]
    assert [ours.tokens for ours in found] == expected
