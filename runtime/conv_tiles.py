"""Tiles of the convolution's kernel: which are legal, which serves unmeasured, and rows of tables.

What a kernel of the convolution computes hangs on more than its best tile does. The key of a tile,
:class:`ConvSpec`, is what decides how many bytes a thread has in flight and how many taps it loads ahead of
its sum: width, tokens and dtypes. Not in it are SiLU and bias (a few instructions, and a load that the
caches serve, beside memory that everything waits for) and whether rows are packed (two loads ahead of the
same work). Channels are not in it either: like a step's heads they count with the rows, in the effective
batch.

Records are frozen and know nothing of torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Final

from .errors import SpecError, require, require_date
from .spec import DTYPE_BYTES, MAX_WINDOW

WIDTHS: Final = (2, 3, 4)
"""Inputs that an output is made of, itself included."""

CHANNELS: Final = 128
"""Channels that count as one in an effective batch."""

BLOCKS: Final = (16, 32, 64, 128, 256, 512, 1024)
"""Channels of a program."""
WARPS: Final = (1, 2, 4, 8)
"""Warps of a program."""
VALUES_PER_THREAD: Final = (4, 32)
"""Fewest and most tokens x channels of a thread: fewer make narrow loads, more spill.

A program of one warp may have fewer: at small batches more programs are what counts.
"""

_DEFAULTS: Final = ((4096, 512, 4, 16), (1024, 256, 2, 16), (0, 128, 1, 4))
"""The rule where nothing is timed: least effective batch, channels of a program at most, warps, values of a
thread at most. By hand, after what won with 1, 4 and 8 tokens on an H200."""


@dataclass(frozen=True, order=True)
class ConvSpec:
    """What decides the best tile of a convolution, beside the effective batch.

    Args:
        width: Inputs that an output is made of, 2 to 4.
        num_tokens: Most tokens of a row, T, 1 to 64.
        activation_dtype: Of inputs and outputs.
        ring_dtype: Of the ring of raw inputs: the activation dtype or fp32.
        weight_dtype: Of weights and bias: the activation dtype or fp32.

    Raises:
        SpecError: A field is outside the range above.
    """

    width: int
    num_tokens: int
    activation_dtype: str
    ring_dtype: str
    weight_dtype: str

    def __post_init__(self) -> None:
        numbers = (self.width, self.num_tokens)
        whole = all(type(number) is int for number in numbers)
        if not whole or self.width not in WIDTHS or not 1 <= self.num_tokens <= MAX_WINDOW:
            raise SpecError(
                f"a convolution of width {self.width} and {self.num_tokens} tokens a row: widths are "
                f"{WIDTHS[0]} to {WIDTHS[-1]}, tokens 1 to {MAX_WINDOW}"
            )
        for name in ("activation_dtype", "ring_dtype", "weight_dtype"):
            value = getattr(self, name)
            if value not in DTYPE_BYTES or value not in (self.activation_dtype, "fp32"):
                raise SpecError(f"{name} '{value}' is not the activation dtype or fp32, of {[*DTYPE_BYTES]}")

    @property
    def token_block(self) -> int:
        """Tokens of a program: T, rounded up to a power of two."""
        return 1 << (self.num_tokens - 1).bit_length()

    @property
    def key(self) -> str:
        """Canonical string, e.g. ``conv-w4-t1-bf16-bf16-bf16``: width, tokens, and dtypes as above."""
        dtypes = (self.activation_dtype, self.ring_dtype, self.weight_dtype)
        return "-".join((f"conv-w{self.width}-t{self.num_tokens}", *dtypes))

    @classmethod
    def parse(cls, key: str) -> ConvSpec:
        """Inverse of :attr:`key`.

        Raises:
            SpecError: ``key`` is no such string.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise SpecError(f"'{key}' is not a key of a convolution")
        width, tokens, *dtypes = match.groups()
        return cls(int(width), int(tokens), *dtypes)


_KEY: Final = re.compile(r"conv-w([1-9]\d*)-t([1-9]\d*)-([a-z0-9]+)-([a-z0-9]+)-([a-z0-9]+)", re.ASCII)


@dataclass(frozen=True, order=True)
class ConvTile:
    """Tile of the convolution's kernel."""

    block: int
    """Channels of a program; a power of two."""
    num_warps: int

    @property
    def key(self) -> str:
        """Canonical string, e.g. ``b128.w1``."""
        return f"b{self.block}.w{self.num_warps}"


def effective_batch(rows: int, channels: int) -> int:
    """Rows x blocks of :data:`CHANNELS` channels of this GPU, the last one counted whole."""
    return rows * -(-channels // CHANNELS)


def tiles(token_block: int) -> tuple[ConvTile, ...]:
    """Every legal tile of programs of ``token_block`` tokens, a power of two: the space of the tuner."""
    least, most = VALUES_PER_THREAD
    return tuple(
        ConvTile(block, warps)
        for block in BLOCKS
        for warps in WARPS
        if (least if warps > 1 else 1) <= block * token_block / (32 * warps) <= most
    )


def default_tile(effective_batch: int, token_block: int) -> ConvTile:
    """The rule: what serves where nothing was timed. One of :func:`tiles`.

    Args:
        effective_batch: See :func:`effective_batch`.
        token_block: Tokens of a program, a power of two up to 64.
    """
    block, warps, values = next(rule for least, *rule in _DEFAULTS if effective_batch >= least)
    return ConvTile(max(BLOCKS[0], min(block, values * 32 * warps // token_block)), warps)


@dataclass(frozen=True)
class ConvRow:
    """The tile that serves one convolution at one effective batch, timed on the table's GPU.

    Times are medians in microseconds of one launch.

    Raises:
        TableError: A number is out of range, or evidence is missing.
    """

    spec: ConvSpec
    rows: int
    """Sequences it was timed with."""
    channels: int
    """Channels on this GPU it was timed with."""
    tile: ConvTile
    module_digest: str
    """Digest of the module's syntax tree."""
    time_us: float
    default_time_us: float
    """The rule's tile in the same run."""
    roof_time_us: float
    """Only the bytes of inputs, outputs, appends and taps are moved."""
    noise_floor: float
    """Relative spread of the default against itself, e.g. 0.01."""
    samples_us: tuple[float, ...]
    """Samples behind time_us."""
    verdict: str
    """Why this tile was chosen."""
    triton: str
    """Version of Triton."""
    date: str
    """ISO date."""

    @property
    def effective_batch(self) -> int:
        """See :func:`effective_batch`."""
        return effective_batch(self.rows, self.channels)

    @property
    def key(self) -> tuple[ConvSpec, int]:
        """What it is found by: one row a table."""
        return (self.spec, self.effective_batch)

    def __post_init__(self) -> None:
        require(min(self.rows, self.channels) >= 1, f"rows {self.rows} and channels {self.channels}: below 1")
        for name in ("block", "num_warps"):
            value = getattr(self.tile, name)
            require(value >= 1 and value & (value - 1) == 0, f"tile: {name} {value} is not a power of two")
        for name in ("module_digest", "triton", "verdict"):
            require(bool(getattr(self, name)), f"provenance is missing: {name} is empty")
        require_date(self.date)
        require(bool(self.samples_us), "samples_us is empty")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if field.name == "samples_us" else (value,) if isinstance(value, float) else ()
            for number in numbers:
                positive = number >= 0 if field.name == "noise_floor" else number > 0
                require(math.isfinite(number) and positive, f"{field.name} {number} is not a positive number")
