"""What a step should compute: the fp64 recurrence, and the best that the stored dtypes allow.

:class:`Oracle` goes token by token and knows nothing of rings; what a family computes per token is its
:class:`Recurrence`. :class:`Ideal` is the same with ring, state and output rounded where they are
stored, so that the error of a kernel can be compared with the error that its dtypes alone cause.

Inputs bear the names of kernel arguments (:mod:`.abi`): in Gated DeltaNet x is v, B is k, C is q, dt is
the raw gate a, A is A_log and beta the raw b.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .dtypes import TORCH_DTYPES
from .spec import Spec

_NORM_EPSILON = 1e-6
"""Added to the sum of squares under the root of an L2 norm."""


def softplus(value: Tensor) -> Tensor:
    """``log(1 + exp(value))``, accurate for small results, finite for large arguments."""
    return value.clamp(min=0) + torch.log1p(torch.exp(-value.abs()))


class Token(NamedTuple):
    """Inputs of some tokens."""

    x: Tensor
    """(tokens, heads, head_dim)."""
    dt: Tensor
    """(tokens, heads), raw."""
    B: Tensor
    """(tokens, groups, state_size)."""
    C: Tensor
    """(tokens, groups, state_size)."""
    z: Tensor | None = None
    """(tokens, heads, head_dim) or None; Mamba-2 alone."""
    beta: Tensor | None = None
    """(tokens, heads), raw; GDN alone."""

    def at(self, tokens: Tensor) -> Token:
        """The inputs of ``tokens`` (indices or mask)."""
        return self._map(lambda value: value[tokens])

    def to(self, dtype: torch.dtype, device: torch.device) -> Token:
        """The inputs in another dtype, on another device."""
        return self._map(lambda value: value.to(dtype).to(device))

    def _map(self, apply: Callable[[Tensor], Tensor]) -> Token:
        values = {name: value for name, value in self._asdict().items() if value is not None}
        return Token(**{name: apply(value) for name, value in values.items()})


class Entry(NamedTuple):
    """What rings hold of some tokens; in fp64, rounded or not."""

    x: Tensor
    """(tokens, heads, head_dim): x, or u of GDN."""
    b: Tensor
    """(tokens, groups, state_size): B, or k of GDN as the recurrence uses it."""
    decay: Tensor
    """(tokens, heads): the step size of Mamba-2, or the log decay g of GDN."""

    def at(self, tokens: Tensor) -> Entry:
        """The entries of ``tokens`` (indices or mask)."""
        return Entry(*(value[tokens] for value in self))

    def rounded(self, ring_dtype: str) -> Entry:
        """The entry as a ring of that dtype holds it: x and b in it, decay in fp32."""
        return Entry(round_to(self.x, ring_dtype), round_to(self.b, ring_dtype), round_to(self.decay, "fp32"))


def round_to(value: Tensor, dtype: str) -> Tensor:
    """``value`` rounded to a short dtype name, in fp64."""
    return value.to(TORCH_DTYPES[dtype]).double()


class Recurrence(ABC):
    """What a family computes per token, in fp64; ``state`` is (rows, heads, head_dim, state_size)."""

    def __init__(self, A: Tensor, dt_bias: Tensor | None) -> None:
        self._a = A.double()
        self._bias = None if dt_bias is None else dt_bias.double()

    @abstractmethod
    def decay(self, dt: Tensor) -> Tensor:
        """What the ring's decay holds (rows, heads) for raw ``dt``."""

    @abstractmethod
    def entry(self, state: Tensor, token: Token) -> Entry:
        """What ``token`` adds to ``state``, not rounded."""

    @abstractmethod
    def advance(self, state: Tensor, entry: Entry) -> Tensor:
        """The state after one more token."""

    @abstractmethod
    def read(self, state: Tensor, token: Token) -> Tensor:
        """Outputs (rows, heads, head_dim) of ``token`` from the state after it."""

    def _biased(self, dt: Tensor) -> Tensor:
        return dt.double() if self._bias is None else dt.double() + self._bias


class Mamba2(Recurrence):
    """``S = exp(A delta) S + delta x B^T``, ``y = S C (+ D x) (silu(z))``.

    Args:
        A: (heads,), negative.
        D: (heads,) or None.
        dt_bias: (heads,) or None; added to dt.
        dt_softplus: dt (after the bias) passes through softplus.
    """

    def __init__(
        self, A: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = True
    ) -> None:
        super().__init__(A, dt_bias)
        self._skip = None if D is None else D.double()
        self._dt_softplus = dt_softplus

    def decay(self, dt: Tensor) -> Tensor:
        """Step sizes."""
        return softplus(self._biased(dt)) if self._dt_softplus else self._biased(dt)

    def entry(self, state: Tensor, token: Token) -> Entry:
        """x, B and the step size: the state does not matter."""
        return Entry(token.x.double(), token.B.double(), self.decay(token.dt))

    def advance(self, state: Tensor, entry: Entry) -> Tensor:
        """As in :class:`Recurrence`."""
        update = _outer(entry.decay[..., None] * entry.x, entry.b)
        return torch.exp(self._a * entry.decay)[..., None, None] * state + update

    def read(self, state: Tensor, token: Token) -> Tensor:
        """As in :class:`Recurrence`."""
        y = _apply(state, token.C.double())
        if self._skip is not None:
            y = y + self._skip[:, None] * token.x.double()
        if token.z is not None:
            y = y * token.z.double() * torch.sigmoid(token.z.double())
        return y


class GatedDeltaNet(Recurrence):
    """``u = sigmoid(b) (v - e^g S k)``, ``S = e^g S + u k^T``, ``y = S q K^(-1/2)``.

    ``g = -exp(A_log) softplus(a + dt_bias)``.

    Args:
        A_log: (heads,).
        dt_bias: (heads,) or None; added to the raw gate.
        qk_l2norm: q and k are divided by ``sqrt(sum of squares + 1e-6)``.
    """

    def __init__(self, A_log: Tensor, *, dt_bias: Tensor | None = None, qk_l2norm: bool = True) -> None:
        super().__init__(A_log, dt_bias)
        self._normalises = qk_l2norm

    def decay(self, dt: Tensor) -> Tensor:
        """Log decays g."""
        return -torch.exp(self._a) * softplus(self._biased(dt))

    def entry(self, state: Tensor, token: Token) -> Entry:
        """u, k and g."""
        assert token.beta is not None
        k, g = self._direction(token.B), self.decay(token.dt)
        expected = torch.exp(g)[..., None] * _apply(state, k)
        u = torch.sigmoid(token.beta.double())[..., None] * (token.x.double() - expected)
        return Entry(u, k, g)

    def advance(self, state: Tensor, entry: Entry) -> Tensor:
        """As in :class:`Recurrence`."""
        return torch.exp(entry.decay)[..., None, None] * state + _outer(entry.x, entry.b)

    def read(self, state: Tensor, token: Token) -> Tensor:
        """As in :class:`Recurrence`."""
        scale: float = token.C.shape[-1] ** -0.5
        return _apply(state, self._direction(token.C)) * scale

    def _direction(self, value: Tensor) -> Tensor:
        value = value.double()
        if not self._normalises:
            return value
        norm: Tensor = (value.square().sum(-1, keepdim=True) + _NORM_EPSILON).sqrt()
        return value / norm


def recurrence(
    spec: Spec, A: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None
) -> Recurrence:
    """The recurrence of ``spec``'s family; ``A`` is the kernel argument ``a``."""
    if spec.family == "gdn":
        return GatedDeltaNet(A, dt_bias=dt_bias, qk_l2norm=spec.qk_l2norm)
    return Mamba2(A, D=D, dt_bias=dt_bias, dt_softplus=spec.dt_softplus)


class Oracle:
    """A recurrence token by token in fp64.

    Args:
        state: (sequences, heads, head_dim, state_size), any floating dtype; copied.
        recurrence: What is computed per token.

    Attributes:
        state: The committed state of every sequence, fp64.
        entry: What the last step's tokens added to a ring; of an :class:`Ideal`, as stored.
        after: (tokens, heads, head_dim, state_size) fp64, the states after each of the last step's tokens,
            pending; of an :class:`Ideal`, what a row would commit.
    """

    def __init__(self, state: Tensor, recurrence: Recurrence) -> None:
        self.state = state.double().clone()
        self.recurrence = recurrence
        self.entry: Entry | None = None
        self.after = self.state[:0]
        self._sequence = self._count = torch.empty(0, dtype=torch.long)

    def step(
        self,
        sequence: Tensor,
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        z: Tensor | None = None,
        beta: Tensor | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """Outputs (tokens, heads, head_dim) in fp64 of new tokens of distinct sequences.

        The new states are pending until :meth:`commit`.

        Args:
            sequence: (rows,) int64, distinct.
            x: (tokens, heads, head_dim), a row's tokens one after the other, behind those of the row before.
            dt: (tokens, heads), raw.
            B: (tokens, groups, state_size).
            C: (tokens, groups, state_size).
            z: (tokens, heads, head_dim) or None.
            beta: (tokens, heads), raw; of GDN alone.
            count: (rows,) int64, tokens of each row, which sum to ``tokens``; None is one each.
        """
        self._sequence = sequence
        self._count = torch.ones_like(sequence) if count is None else count
        return self._step(self.state[sequence], Token(x, dt, B, C, z, beta))

    def commit(self, accepted: Tensor) -> None:
        """Keep the first ``accepted`` (rows,) pending tokens of each row, 0 to all of them; drop the rest."""
        accepted = accepted.long()
        kept = accepted > 0
        last = _first(self._count) + accepted - 1
        self.state[self._sequence[kept]] = self.after[last[kept]]

    def _step(self, old: Tensor, token: Token) -> Tensor:
        """Outputs of ``token``; sets what is pending."""
        state, y = old.clone(), torch.empty_like(token.x, dtype=torch.float64)
        self.after = old.new_empty((len(y), *old.shape[1:]))
        self.entry = Entry(*(torch.empty_like(v, dtype=torch.float64) for v in (token.x, token.B, token.dt)))
        for rows, at in _in_turn(self._count):
            now = token.at(at)
            added = self.recurrence.entry(state[rows], now)
            state[rows] = self.after[at] = self.recurrence.advance(state[rows], added)
            y[at] = self.recurrence.read(state[rows], now)
            for held, value in zip(self.entry, added, strict=True):
                held[at] = value
        return y


class Ideal(Oracle):
    """The oracle with ring, state and output rounded to the dtypes of ``spec`` where they are stored.

    A replay spec rounds the state when a row flushes, a native one after every token. Within a step
    nothing is rounded: its outputs, its entries and what they owe to earlier tokens of the step are
    computed before any of it is stored. Only the number of tokens in each ring matters for that, not
    where they lie.

    Args:
        spec: Gives op, window and dtypes.
        ring_len: (sequences,) tokens that count as being in the ring at the start; None is none.

    Attributes:
        ring_len: (sequences,) int64.
    """

    def __init__(
        self, state: Tensor, recurrence: Recurrence, *, spec: Spec, ring_len: Tensor | None = None
    ) -> None:
        super().__init__(state, recurrence)
        self._spec = spec
        empty = torch.zeros(state.shape[0], dtype=torch.long, device=state.device)
        self.ring_len = empty if ring_len is None else ring_len.long().clone()

    def commit(self, accepted: Tensor) -> None:
        """As :meth:`Oracle.commit`; accepted tokens also lengthen the ring."""
        super().commit(accepted)
        self.ring_len[self._sequence] += accepted.long()

    def _step(self, old: Tensor, token: Token) -> Tensor:
        """As in :class:`Oracle`; the output is rounded, and flushing rows store a rounded state."""
        spec, sequence = self._spec, self._sequence
        y = super()._step(old, token)
        assert self.entry is not None
        if spec.is_native:
            self.after = round_to(self.after, spec.state_dtype)
        else:
            flushes = (self.ring_len[sequence] + spec.num_tokens > spec.window) & (self._count > 0)
            state = torch.where(flushes[:, None, None, None], round_to(old, spec.state_dtype), old)
            self.state[sequence] = state
            self.ring_len[sequence] = torch.where(flushes, 0, self.ring_len[sequence])
            self.entry = self.entry.rounded(spec.ring_dtype)
            for rows, at in _in_turn(self._count):
                state[rows] = self.after[at] = self.recurrence.advance(state[rows], self.entry.at(at))
        return round_to(y, spec.activation_dtype)


def _first(count: Tensor) -> Tensor:
    """Where the tokens of each row begin, for rows of ``count`` (rows,) packed tokens."""
    return count.cumsum(0) - count


def _in_turn(count: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """One token of each row at a time: the rows that have an i-th one, and where those tokens lie."""
    first = _first(count)
    for i in range(int(count.max()) if len(count) else 0):
        rows = (count > i).nonzero()[:, 0]
        yield rows, first[rows] + i


def _by_head(value: Tensor, heads: int) -> Tensor:
    """(rows, groups, n) repeated to (rows, heads, n)."""
    return value.repeat_interleave(heads // value.shape[1], 1)


def _apply(state: Tensor, vector: Tensor) -> Tensor:
    """``S r`` (rows, heads, head_dim) of a vector (rows, groups, state_size) per group."""
    return torch.einsum("rhpn,rhn->rhp", state, _by_head(vector, state.shape[1]))


def _outer(x: Tensor, b: Tensor) -> Tensor:
    """``x b^T`` per head of (rows, heads, head_dim) and (rows, groups, state_size)."""
    return x[..., None] * _by_head(b, x.shape[1])[:, :, None, :]
