"""The staggered mix: how full rings are in a batch whose rows flush at different steps.

A row flushes where its ring has no room for another T tokens: at lengths above W - T. Of the tokens of a
step it keeps a, so that it flushes once in (W - T) / a + 1 steps. Over many rows, ring lengths 1 to
W - T + a are met equally often; the last a of them flush.
"""

from __future__ import annotations

from ..runtime.spec import Spec


def accepted_tokens(spec: Spec) -> int:
    """Tokens that a row keeps of a step, on average, a: the first, and half of the drafts, rounded up."""
    return spec.num_tokens // 2 + 1


def cycle(spec: Spec) -> int:
    """Ring lengths in the mix, which are 1 to this."""
    return spec.window - spec.num_tokens + accepted_tokens(spec)


def flush_share(spec: Spec) -> float:
    """Share of the rows of the mix that flush, 0 to 1; 1 / W for one token a step.

    Native steps all write, and so does what materialises states.
    """
    return 1.0 if spec.is_native or spec.op == "materialize" else accepted_tokens(spec) / cycle(spec)


def ring_length(spec: Spec, mode: str) -> int:
    """Ring tokens of every row where all do the same.

    In ``flush`` and ``materialize`` a whole window, in ``nonflush`` half of one, or as much as leaves room
    for a step's tokens.
    """
    return (
        spec.window
        if mode in ("flush", "materialize")
        else min(spec.window // 2, spec.window - spec.num_tokens)
    )
