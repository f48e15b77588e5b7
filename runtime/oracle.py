"""What a step should compute: the fp64 recurrence, and the best that the stored dtypes allow.

:class:`Oracle` goes token by token and knows nothing of rings. :class:`Ideal` is the same recurrence
with ring, state and output rounded where they are stored, so that the error of a kernel can be
compared with the error that its dtypes alone cause.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import TORCH_DTYPES
from .spec import Spec


def softplus(value: Tensor) -> Tensor:
    """``log(1 + exp(value))``, accurate for small results, finite for large arguments."""
    return value.clamp(min=0) + torch.log1p(torch.exp(-value.abs()))


class Oracle:
    """Mamba-2 token by token in fp64: ``S = exp(A delta) S + delta x B^T``, ``y = S C (+ D x) (silu(z))``.

    Args:
        state: (sequences, heads, head_dim, state_size), any floating dtype; copied.
        A: (heads,), negative.
        D: (heads,) or None.
        dt_bias: (heads,) or None; added to dt.
        dt_softplus: dt (after the bias) passes through softplus.

    Attributes:
        state: The committed state of every sequence, fp64.
    """

    def __init__(
        self,
        state: Tensor,
        A: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = True,
    ) -> None:
        self.state = state.double().clone()
        self._rate = A.double()
        self._skip = None if D is None else D.double()
        self._bias = None if dt_bias is None else dt_bias.double()
        self._dt_softplus = dt_softplus
        self._sequence = torch.empty(0, dtype=torch.long)
        self._pending = self.state[:0]

    def delta(self, dt: Tensor) -> Tensor:
        """Step sizes (rows, heads) in fp64 of raw ``dt``."""
        value = dt.double() if self._bias is None else dt.double() + self._bias
        return softplus(value) if self._dt_softplus else value

    def step(
        self, sequence: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None
    ) -> Tensor:
        """Outputs (rows, heads, head_dim) in fp64 of one new token each for distinct sequences.

        The new states are pending until :meth:`commit`.

        Args:
            sequence: (rows,) int64, distinct.
            x: (rows, heads, head_dim).
            dt: (rows, heads), raw.
            B: (rows, groups, state_size).
            C: (rows, groups, state_size).
            z: (rows, heads, head_dim) or None.
        """
        delta = self.delta(dt)
        self._sequence = sequence
        self._pending = self._advance(self.state[sequence], delta, x.double(), B.double())
        return self._read(self._pending, x, C, z)

    def commit(self, accepted: Tensor) -> None:
        """Keep the pending token of the rows whose ``accepted`` (rows,) is 1, drop the others'."""
        keep = accepted.bool()
        self.state[self._sequence[keep]] = self._pending[keep]

    def _advance(self, state: Tensor, delta: Tensor, x: Tensor, B: Tensor) -> Tensor:
        b_heads = B.repeat_interleave(x.shape[1] // B.shape[1], 1)
        update = (delta[..., None] * x)[..., None] * b_heads[:, :, None, :]
        return torch.exp(self._rate * delta)[..., None, None] * state + update

    def _read(self, state: Tensor, x: Tensor, C: Tensor, z: Tensor | None) -> Tensor:
        c_heads = C.double().repeat_interleave(x.shape[1] // C.shape[1], 1)
        y = torch.einsum("rhpn,rhn->rhp", state, c_heads)
        if self._skip is not None:
            y = y + self._skip[:, None] * x.double()
        if z is not None:
            y = y * z.double() * torch.sigmoid(z.double())
        return y


class Ideal(Oracle):
    """The oracle with ring, state and output rounded to the dtypes of ``spec`` where they are stored.

    A replay spec rounds the state when a row flushes, a native one at every step. Only the number of
    tokens in each ring matters for that, not where they lie.

    Args:
        spec: Gives op, window and dtypes.
        ring_len: (sequences,) tokens that count as being in the ring at the start; None is none.

    Attributes:
        ring_len: (sequences,) int64.
    """

    def __init__(
        self,
        state: Tensor,
        A: Tensor,
        *,
        spec: Spec,
        ring_len: Tensor | None = None,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> None:
        super().__init__(state, A, D=D, dt_bias=dt_bias, dt_softplus=spec.dt_softplus)
        self._spec = spec
        sequences = state.shape[0]
        empty = torch.zeros(sequences, dtype=torch.long, device=state.device)
        self.ring_len = empty if ring_len is None else ring_len.long().clone()

    def step(
        self, sequence: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None
    ) -> Tensor:
        """As :meth:`Oracle.step`; the output is rounded, and flushing rows store a rounded state."""
        delta = self.delta(dt)
        self._sequence = sequence
        old = self.state[sequence]
        y = self._read(self._advance(old, delta, x.double(), B.double()), x, C, z)
        if not self._spec.is_native:
            flushes = self.ring_len[sequence] + self._spec.num_tokens > self._spec.window
            old = torch.where(flushes[:, None, None, None], self._round(old, self._spec.state_dtype), old)
            self.state[sequence] = old
            self.ring_len[sequence] = torch.where(flushes, 0, self.ring_len[sequence])
            ring = self._spec.ring_dtype
            delta = self._round(delta, "fp32")
            pending = self._advance(old, delta, self._round(x, ring), self._round(B, ring))
        else:
            pending = self._round(self._advance(old, delta, x.double(), B.double()), self._spec.state_dtype)
        self._pending = pending
        return self._round(y, self._spec.activation_dtype)

    def commit(self, accepted: Tensor) -> None:
        """As :meth:`Oracle.commit`; accepted tokens also lengthen the ring."""
        super().commit(accepted)
        self.ring_len[self._sequence] += accepted.long()

    @staticmethod
    def _round(value: Tensor, dtype: str) -> Tensor:
        return value.to(TORCH_DTYPES[dtype]).double()
