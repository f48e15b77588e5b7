"""Specification of a kernel: everything that is baked into a generated module.

A :class:`Spec` is frozen, hashable and has one canonical string (:attr:`Spec.key`). It knows
nothing of torch, of GPUs or of how a kernel is written; it is the first half of every key in
the dispatch table (the second is the effective batch).
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Final

from .errors import SpecError

DTYPE_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Canonical short dtype names and their size in bytes."""

MAX_HEAD_DIM: Final = 256
MAX_STATE_SIZE: Final = 256
MAX_WINDOW: Final = 64
MAX_TOKENS: Final = 16
"""Tokens of a row that one step takes, drafts and the one before them."""

FAMILIES: Final = ("mamba2", "gdn")
OPS: Final = ("step", "verify", "native_step", "native_verify", "materialize")


@dataclass(frozen=True, order=True)
class Spec:
    """What a kernel computes, and for which shape and dtypes.

    Args:
        family: Recurrence family, one of :data:`FAMILIES`: Mamba-2, or Gated DeltaNet (``gdn``).
        op: ``step`` (replay decode with a ring, one token a row), ``verify`` (the same for rows of up to
            ``num_tokens`` tokens), ``native_step`` (state written every step), ``native_verify`` (a state
            written for every token) or ``materialize`` (ring tokens folded into a state of another slot).
        head_dim: Values per head, P, 1 to 256; of GDN the value dim, V.
        state_size: State columns per value, N, 1 to 256; of GDN the key dim, K.
        heads_per_group: Heads that share one B and one C; of GDN value heads that share a key head.
        window: Ring tokens held before a flush, W, 1 to 64; 0 for the native ops.
        num_tokens: Most tokens of a row, T = 1 + drafts, 1 to 16 and at most ``window``; 1 where the op
            takes one.
        activation_dtype: dtype of x, B, C, z, dt and of the output; of GDN of v, k, q, a, b.
        state_dtype: dtype the state is stored in.
        ring_dtype: dtype of the ring's x and B (GDN: u and k): the activation dtype or fp32.
        has_d: The skip connection ``D x`` is added.
        has_z: The output is gated by ``silu(z)``.
        has_dt_bias: A bias is added to dt.
        dt_softplus: dt passes through softplus (after the bias); always in GDN.
        qk_l2norm: q and k are L2-normalised by the kernel (GDN alone).

    Raises:
        SpecError: A field is outside the range above.
    """

    family: str
    op: str
    head_dim: int
    state_size: int
    heads_per_group: int
    window: int
    num_tokens: int = 1
    activation_dtype: str = "bf16"
    state_dtype: str = "fp32"
    ring_dtype: str = "bf16"
    has_d: bool = True
    has_z: bool = False
    has_dt_bias: bool = True
    dt_softplus: bool = True
    qk_l2norm: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            _require(type(value) is int, f"{name} {value!r} is not an integer")
        for name in _FLAGS:
            value = getattr(self, name)
            _require(type(value) is bool, f"{name} {value!r} is neither True nor False")
        _require(self.family in FAMILIES, f"family '{self.family}' is not one of {', '.join(FAMILIES)}")
        _require(self.op in OPS, f"op '{self.op}' is not one of {', '.join(OPS)}")
        _require(
            1 <= self.head_dim <= MAX_HEAD_DIM,
            f"head_dim {self.head_dim} is outside 1..{MAX_HEAD_DIM}; other heads are not supported",
        )
        _require(
            1 <= self.state_size <= MAX_STATE_SIZE,
            f"state_size {self.state_size} is outside 1..{MAX_STATE_SIZE}; other states are not supported",
        )
        _require(self.heads_per_group >= 1, f"heads_per_group {self.heads_per_group} must be at least 1")
        for name in ("activation_dtype", "state_dtype", "ring_dtype"):
            value = getattr(self, name)
            _require(value in DTYPE_BYTES, f"{name} '{value}' is not one of {', '.join(DTYPE_BYTES)}")
        _require(
            self.ring_dtype in (self.activation_dtype, "fp32"),
            f"ring_dtype '{self.ring_dtype}' must be the activation dtype "
            f"('{self.activation_dtype}') or fp32",
        )
        if self.family == "gdn":
            _require(
                not self.has_d and not self.has_z,
                "GDN has neither a skip nor a gate: pass has_d=False, has_z=False",
            )
            _require(self.dt_softplus, "GDN's gate always passes through softplus: dt_softplus must be True")
        else:
            _require(not self.qk_l2norm, f"qk_l2norm belongs to GDN, not to {self.family}")
        most = MAX_TOKENS if self.verifies else 1
        _require(
            1 <= self.num_tokens <= most,
            f"{self.num_tokens - 1} drafts make {self.num_tokens} tokens a row, {self.op} takes 1 to {most}; "
            + ("use fewer drafts" if self.verifies else "drafts belong to the ops that verify"),
        )
        if self.is_native:
            _require(self.window == 0, f"{self.op} has no ring: window must be 0, not {self.window}")
            return
        if self.op == "materialize":
            _require(
                all(getattr(self, name) == value for name, value in self._without_step.items()),
                "materialize has neither tokens nor optional inputs: take `materialize` of a step's spec",
            )
        _require(
            1 <= self.window <= MAX_WINDOW,
            f"window {self.window} is outside 1..{MAX_WINDOW}; choose a buffer length in that range",
        )
        _require(
            self.num_tokens <= self.window,
            f"{self.num_tokens - 1} drafts make {self.num_tokens} tokens a step, beyond the window of "
            f"{self.window}; use fewer drafts or a longer buffer",
        )

    @property
    def key(self) -> str:
        """Canonical string: equal for equal specs, different for different ones."""
        flags = "".join(
            letter
            for letter, present in (
                ("d", self.has_d),
                ("z", self.has_z),
                ("b", self.has_dt_bias),
                ("s", self.dt_softplus),
                ("l", self.qk_l2norm),
            )
            if present
        )
        return (
            f"{self.family}-{self.op}-p{self.head_dim}-n{self.state_size}-g{self.heads_per_group}"
            f"-w{self.window}-t{self.num_tokens}-x{self.activation_dtype}-s{self.state_dtype}"
            f"-r{self.ring_dtype}-f{flags or '0'}"
        )

    @classmethod
    def parse(cls, key: str) -> Spec:
        """Inverse of :attr:`key`.

        Raises:
            SpecError: ``key`` is not a canonical spec string.
        """
        match = _KEY.fullmatch(key)
        _require(match is not None, f"'{key}' is not a spec key")
        assert match is not None
        flags = match["flags"]
        spec = cls(
            family=match["family"],
            op=match["op"],
            head_dim=int(match["p"]),
            state_size=int(match["n"]),
            heads_per_group=int(match["g"]),
            window=int(match["w"]),
            num_tokens=int(match["t"]),
            activation_dtype=match["x"],
            state_dtype=match["s"],
            ring_dtype=match["r"],
            has_d="d" in flags,
            has_z="z" in flags,
            has_dt_bias="b" in flags,
            dt_softplus="s" in flags,
            qk_l2norm="l" in flags,
        )
        _require(spec.key == key, f"'{key}' is not a spec key; did you mean '{spec.key}'?")
        return spec

    @property
    def is_native(self) -> bool:
        """Whether every step writes the state: such a spec has no ring, and kernels of its own."""
        return self.op in ("native_step", "native_verify")

    @property
    def verifies(self) -> bool:
        """Whether rows have up to ``num_tokens`` tokens each, packed one after the other."""
        return self.op in ("verify", "native_verify")

    @property
    def ring_capacity(self) -> int:
        """The least tokens per ring, without a convolution under the same cursors; 0 for the native ops."""
        return 0 if self.is_native else self.window + self.num_tokens

    @property
    def native(self) -> Spec:
        """The spec of the same layer without a ring: ``native_step``, or ``native_verify`` for drafts."""
        op = "native_verify" if self.verifies else "native_step"
        return dataclasses.replace(self, op=op, window=0, ring_dtype=self.activation_dtype)

    @property
    def tune_command(self) -> str:
        """The command that tunes such a layer; heads of one group on one GPU stand for all that share it."""
        family = f"--family {self.family} " if self.family != "mamba2" else ""
        window = f" --buffer-len {self.window}" if self.window else ""
        drafts = f" --drafts {self.num_tokens - 1}" if self.verifies else ""
        # Rings of fp32 are materialised in one way, whatever the activations of their steps are.
        of_any = self.op == "materialize" and self.ring_dtype == "fp32"
        activation = Spec.activation_dtype if of_any else self.activation_dtype
        inputs = f" --activation-dtype {activation}" if activation != Spec.activation_dtype else ""
        ring = f" --ring-dtype {self.ring_dtype}" if self.window and self.ring_dtype != activation else ""
        return (
            f"replayssm-tune tune {family}--heads {self.heads_per_group} --head-dim {self.head_dim} "
            f"--state-size {self.state_size} --groups 1 --tp 1{inputs} --state-dtype {self.state_dtype}"
            f"{ring}{window}{drafts}"
        )

    @property
    def native_step(self) -> Spec:
        """The ``native_step`` spec of the same layer: one token a step, whatever this one takes."""
        return dataclasses.replace(self.native, op="native_step", num_tokens=1)

    @property
    def materialize(self) -> Spec:
        """The ``materialize`` spec of the same ring: what its kernel does not depend on is left out."""
        fields: dict[str, Any] = self._without_step
        return dataclasses.replace(self, op="materialize", **fields)

    @property
    def _without_step(self) -> dict[str, object]:
        """What every spec says that no step's input changes."""
        return {
            "num_tokens": 1,
            "activation_dtype": self.ring_dtype,
            "has_d": False,
            "has_z": False,
            "has_dt_bias": False,
            "dt_softplus": self.family == "gdn",
            "qk_l2norm": False,
        }

    def state_bytes(self, effective_batch: int) -> int:
        """Bytes of state that ``effective_batch`` (sequences x heads) heads hold."""
        return effective_batch * self.head_dim * self.state_size * DTYPE_BYTES[self.state_dtype]


# A float or a 1 for True would equal the right spec, or name a kernel that nobody else finds.
_NUMBERS: Final = ("head_dim", "state_size", "heads_per_group", "window", "num_tokens")
_FLAGS: Final = ("has_d", "has_z", "has_dt_bias", "dt_softplus", "qk_l2norm")
_KEY: Final = re.compile(
    r"(?P<family>[a-z0-9]+)-(?P<op>[a-z_]+)-p(?P<p>\d+)-n(?P<n>\d+)-g(?P<g>\d+)-w(?P<w>\d+)-t(?P<t>\d+)"
    r"-x(?P<x>[a-z0-9]+)-s(?P<s>[a-z0-9]+)-r(?P<r>[a-z0-9]+)-f(?P<flags>[dzbsl]+|0)"
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)
