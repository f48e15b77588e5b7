"""The staggered mix: ring lengths and the share of rows that flush."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from replayssm_tune.runtime.spec import MAX_TOKENS, MAX_WINDOW, Spec
from replayssm_tune.tuner.mix import accepted_tokens, cycle, flush_share, ring_length


def spec_of(window: int, num_tokens: int) -> Spec:
    op = "step" if num_tokens == 1 else "verify"
    return Spec("mamba2", op, 64, 128, 16, window, num_tokens)


legal = st.integers(1, MAX_WINDOW).flatmap(
    lambda window: st.builds(spec_of, st.just(window), st.integers(1, min(window, MAX_TOKENS)))
)


def flushes(spec: Spec, length: int) -> bool:
    return length + spec.num_tokens > spec.window


@pytest.mark.parametrize("window", [1, 2, 5, 16, 64])
def test_a_step_of_one_token_flushes_once_in_a_window(window: int) -> None:
    spec = spec_of(window, 1)
    assert accepted_tokens(spec) == 1
    assert flush_share(spec) == 1 / window


@pytest.mark.parametrize(
    ("window", "num_tokens", "kept", "share"), [(16, 4, 3, 3 / 15), (18, 8, 5, 5 / 15), (4, 2, 2, 2 / 4)]
)
def test_rows_flush_as_often_as_those_that_keep_the_mean_at_every_step(
    window: int, num_tokens: int, kept: int, share: float
) -> None:
    spec = spec_of(window, num_tokens)
    assert accepted_tokens(spec) == kept
    length = found = 0
    steps = 600
    for _ in range(steps):
        found += flushes(spec, length)
        length = kept if flushes(spec, length) else length + kept
    assert flush_share(spec) == share == pytest.approx(found / steps, abs=2 / steps)


@hypothesis.given(legal)
def test_lengths_of_the_mix_are_those_that_occur_and_flush_in_their_share(spec: Spec) -> None:
    lengths = range(1, cycle(spec) + 1)
    assert 1 <= accepted_tokens(spec) <= spec.num_tokens
    assert len(lengths) > 0
    assert lengths[-1] <= spec.window
    assert sum(flushes(spec, n) for n in lengths) / len(lengths) == pytest.approx(flush_share(spec))


@hypothesis.given(legal)
def test_no_row_flushes_in_nonflush_and_every_row_in_flush(spec: Spec) -> None:
    assert 0 <= ring_length(spec, "nonflush") <= spec.window // 2
    assert not flushes(spec, ring_length(spec, "nonflush"))
    assert flushes(spec, ring_length(spec, "flush"))


def test_native_steps_always_write() -> None:
    assert flush_share(spec_of(16, 4).native) == 1.0
