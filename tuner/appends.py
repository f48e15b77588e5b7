"""What a launch must append to the rings, worked out from the memory that it starts from.

The ring of Mamba-2 gets copies of inputs and a step size. Of Gated DeltaNet, u depends on the state and
on the ring's rounded entries before it. Neither the oracle's u nor the ideal's is an expectation for
single values: where one u lies next to the middle between two numbers of the ring's dtype, a correct
kernel and the ideal round it apart, and every later u of that state row inherits the difference. So the
expectation starts from what lies in the candidate's own pool: its state and ring, taken in token by
token in fp64. Nothing but the arithmetic of this launch then stands between the two. What builds up
over launches is for the bounds on outputs and stored states to find.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.dtypes import TORCH_DTYPES
from ..runtime.oracle import Entry, Oracle, Recurrence
from ..runtime.spec import Spec
from .pool import Pool
from .trajectory import Step

COMPUTED_TOLERANCE = 1e-6
"""Relative error of computed fp32 entries; 16-bit ones may be off by a unit in the last place."""
DOT_FACTOR = 4
"""An fp32 u of drafts may be this many times as far off: it comes of dots, which add up products one after
the other, and what they add up may cancel."""


@dataclass(frozen=True)
class Append:
    """The entries of a launch's new tokens, and how far a kernel's may be from them."""

    entry: Entry
    """fp64: of copies the value as stored, of computed values the exact one."""
    tolerance: Entry
    """Absolute errors allowed, broadcastable to ``entry``; 0 for copies, which are bit-identical."""

    def wrong(self, found: Entry) -> tuple[Tensor, Tensor, Tensor]:
        """Counts of values of b, decay and x that are not as expected; scalars on the device.

        In this order, since a u of GDN that is made with a wrong k or gate is wrong as well.
        """
        triples = zip(found, self.entry, self.tolerance, strict=True)
        x, b, decay = ((~((value - exact).abs() <= bound)).sum() for value, exact, bound in triples)
        return b, decay, x


def expected_append(spec: Spec, recurrence: Recurrence, pool: Pool, step: Step) -> Append:
    """What ``step`` must append to ``pool``, as it is before the launch; not for native specs.

    A u of GDN is a difference, of v and of what is recalled for k, by the old tokens and by the row's new
    ones before it, and as exact as these three are: its unit is that of their RMS over the head's values
    where u itself is smaller. The state of a row that flushes may be read before or after it is rounded:
    such a u may be off by a unit of that dtype more. Tokens of one row meet the u of those before them as
    they are, not as the ring rounds them.
    """
    token = step.token
    if spec.family != "gdn":
        exact = recurrence.entry(pool.state, token)
        none = torch.zeros_like(exact.decay)
        bounds = Entry(none[..., None], none[:, :1, None], COMPUTED_TOLERANCE * exact.decay.abs())
        return Append(exact.rounded(spec.ring_dtype)._replace(decay=exact.decay), bounds)
    exact, by_old, by_new = _recalled(recurrence, _taken_in(spec, recurrence, pool, step.slots), step)
    terms = (exact.x - by_old - by_new).abs() + by_old.abs() + by_new.abs()
    scale = terms.square().mean(-1, keepdim=True).sqrt()
    x_bound = unit(torch.maximum(exact.x.abs(), scale), spec.ring_dtype)
    if spec.verifies and spec.ring_dtype == "fp32":
        x_bound = DOT_FACTOR * x_bound
    x_bound = x_bound + step.stores[step.row, None, None] * unit(scale, spec.state_dtype)
    decay_bound = COMPUTED_TOLERANCE * exact.decay.abs()
    if spec.qk_l2norm:
        return Append(exact, Entry(x_bound, unit(exact.b.abs(), spec.ring_dtype), decay_bound))
    copied = exact.rounded(spec.ring_dtype).b
    return Append(exact._replace(b=copied), Entry(x_bound, torch.zeros_like(copied), decay_bound))


def unit(magnitude: Tensor, dtype: str) -> Tensor:
    """Error (fp64) that a computed value of that magnitude may have when it is stored in ``dtype``."""
    if dtype == "fp32":
        return COMPUTED_TOLERANCE * magnitude
    info = torch.finfo(TORCH_DTYPES[dtype])
    exponent = torch.frexp(magnitude.clamp(min=info.smallest_normal)).exponent - 1
    return info.eps * torch.exp2(exponent.double())


def _recalled(recurrence: Recurrence, old: Tensor, step: Step) -> tuple[Entry, Tensor, Tensor]:
    """Exact entries of the new tokens, and what in their u is of old tokens and of new ones, (new, ...).

    Args:
        old: (live, heads, head_dim, state_size) fp64, states before the step.
    """
    model, token = Oracle(old, recurrence), step.token
    model.step(torch.arange(len(old), device=old.device), *token, count=step.count)
    exact = model.entry
    assert exact is not None
    begin = (step.count.cumsum(0) - step.count)[step.row]
    sums = exact.decay.cumsum(0) - exact.decay
    before = torch.exp(sums - sums[begin])[..., None, None] * old[step.row]
    blank = token._replace(x=torch.zeros_like(token.x))
    by_old = recurrence.entry(before, blank).x
    follows = (step.row[1:] == step.row[:-1]).nonzero()[:, 0]
    before[follows + 1] = model.after[follows]
    return exact, by_old, recurrence.entry(before, blank).x - by_old


def _taken_in(spec: Spec, recurrence: Recurrence, pool: Pool, slots: Tensor) -> Tensor:
    """States (slots, ...) in fp64 after all tokens of their rings."""
    start, length = pool.ring_start[slots].long(), pool.ring_len[slots]
    state = pool.state[slots].double()
    for j in range(spec.window):
        # Entries beyond the length are NaN: chosen away, not multiplied.
        after = recurrence.advance(state, pool.entry(slots, (start + j) % pool.capacity))
        state = torch.where((length > j)[:, None, None, None], after, state)
    return state
