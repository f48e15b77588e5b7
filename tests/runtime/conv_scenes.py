"""Sequences through the convolution with random accepts, against a token-by-token fp64 convolution.

Numbers are drawn on the CPU, so that a scene is the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm_tune.runtime import commit, conv_seed, conv_step, drained, reset
from replayssm_tune.runtime.contracts import CONV_STEP
from replayssm_tune.runtime.conv_tiles import ConvTile
from replayssm_tune.runtime.dtypes import TORCH_DTYPES
from tests.runtime.calls import same_bits
from tests.runtime.draws import Draws

DTYPES = {
    "fp32": ("fp32", "fp32", "fp32"),
    "fp16": ("fp16", "fp16", "fp16"),
    "bf16": ("bf16", "bf16", "bf16"),
    "bf16 in fp32": ("bf16", "fp32", "fp32"),
    "fp16 in fp32": ("fp16", "fp32", "fp16"),
}
"""dtypes of activations, ring and weights."""

TOLERANCE = {"fp32": 3e-6, "fp16": 1e-3, "bf16": 8e-3}
"""Of an output: half a unit in the last place of its dtype, or a few of fp32."""


@dataclass(frozen=True)
class Scene:
    """What is run; rows of packed scenes vary in their tokens."""

    width: int = 4
    window: int = 4
    num_tokens: int = 1
    channels: int = 20
    activation_dtype: str = "fp32"
    ring_dtype: str = "fp32"
    weight_dtype: str = "fp32"
    has_bias: bool = True
    silu: bool = True
    packed: bool = False
    spare: int = 0
    """Tokens that a ring holds beyond the least."""
    gap: int = 3
    """Elements between the tokens of the pool, of inputs and of outputs; as many again between slots."""
    index_dtype: torch.dtype = torch.int32
    null_slot: int | None = 0
    sequences: int = 3
    padded_rows: int = 1
    slots: int = 7
    steps: int = 12
    accept: float = 0.6
    recycle: float = 0.1
    """Probability that a sequence ends after a step, and of a chunk of prefill behind one."""
    seed: int = 0
    device: str = "cpu"

    @property
    def capacity(self) -> int:
        return self.window + self.num_tokens + self.width - 1 + self.spare


def scene_of(dtypes: str, **changes: Any) -> Scene:
    """A scene of some :data:`DTYPES`."""
    activation, ring, weight = DTYPES[dtypes]
    return Scene(activation_dtype=activation, ring_dtype=ring, weight_dtype=weight, **changes)


def convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """(channels,) fp64: the last output of a sequence (tokens, channels), token by token from nothing."""
    width = weight.shape[1]
    total = torch.zeros(inputs.shape[1], dtype=torch.float64)
    if bias is not None:
        total += bias.double()
    for back in range(min(width, len(inputs))):
        total += weight[:, width - 1 - back].double() * inputs[len(inputs) - 1 - back].double()
    return total * torch.sigmoid(total) if silu else total


@dataclass
class Run(Draws):
    """A scene under way: its pool, its cursors, and what each sequence has been given so far."""

    scene: Scene
    streams: list[Tensor] = field(default_factory=list)
    """(tokens, channels) raw inputs of each sequence that are kept."""
    write_history: Callable[..., None] = conv_seed

    def __post_init__(self) -> None:
        scene = self.scene
        self.g = torch.Generator().manual_seed(scene.seed)
        self.dtype = TORCH_DTYPES[scene.activation_dtype]
        weights = TORCH_DTYPES[scene.weight_dtype]
        self.weight = self.normal(scene.channels, scene.width).to(weights)
        self.bias = self.normal(scene.channels).to(weights) if scene.has_bias else None
        token_stride = scene.channels + scene.gap
        slot_stride = scene.capacity * token_stride + scene.gap
        self.storage = torch.full(
            (scene.slots * slot_stride,), float("nan"), dtype=TORCH_DTYPES[scene.ring_dtype]
        ).to(scene.device)
        self.strides = (slot_stride, token_stride, 1)
        self.ring = self.view(self.storage)
        first = torch.randint(0, scene.capacity, (scene.slots,), generator=self.g, dtype=torch.int32)
        self.start = first.to(scene.device)
        self.length = torch.zeros_like(self.start)
        order = torch.randperm(scene.slots, generator=self.g).tolist()
        self.slot_of = [slot for slot in order if slot != scene.null_slot][: scene.sequences]
        self.streams = [torch.empty(0)] * scene.sequences
        for sequence in range(scene.sequences):
            self.begin(sequence)

    def view(self, storage: Tensor) -> Tensor:
        return storage.as_strided((self.scene.slots, self.scene.capacity, self.scene.channels), self.strides)

    def normal(self, *shape: int) -> Tensor:
        return super().normal(*shape).to(self.dtype)

    @property
    def cursors(self) -> dict[str, Any]:
        return {"ring_start": self.start, "ring_len": self.length}

    def begin(self, sequence: int) -> None:
        """Give the sequence's slot to a new one with a prompt of 0 to 5 tokens."""
        self.streams[sequence] = self.normal(self.below(6), self.scene.channels)
        slot = self.slot_of[sequence]
        reset(self.indices([slot, -1]), **self.cursors)
        self.prefilled(sequence)

    def prefill(self, sequence: int) -> None:
        """A chunk behind what the sequence has; what its ring holds is drained first."""
        chunk = self.normal(self.below(6), self.scene.channels)
        self.streams[sequence] = torch.cat([self.streams[sequence], chunk])
        drained(self.indices([self.slot_of[sequence]]), **self.cursors, capacity=self.scene.capacity)
        self.prefilled(sequence)

    def prefilled(self, sequence: int) -> None:
        """Seed the ring with the last inputs; a row of padding beside it brings NaN."""
        kept = self.scene.width - 1
        stream = self.streams[sequence]
        zeros = torch.zeros(kept, self.scene.channels, dtype=self.dtype)
        history = torch.cat([zeros, stream])[len(stream) :]
        rows = torch.stack([torch.full_like(history, float("nan")), history])
        padding = -1 if self.scene.null_slot is None else self.scene.null_slot
        self.write_history(
            rows.to(self.scene.device), ring=self.ring, ring_start=self.start,
            slots=self.indices([padding, self.slot_of[sequence]]), null_slot=self.scene.null_slot,
        )  # fmt: skip

    def indices(self, slots: list[int]) -> Tensor:
        return torch.tensor(slots, dtype=self.scene.index_dtype, device=self.scene.device)

    def call(self) -> Call:
        scene = self.scene
        rows = scene.sequences + scene.padded_rows
        owner: list[int | None] = [None] * rows
        places = torch.randperm(rows, generator=self.g).tolist()
        for taken in range(scene.sequences):
            if self.uniform() < 0.85:
                owner[places[taken]] = taken
        count = [self.below(scene.num_tokens + 1) if scene.packed else scene.num_tokens for _ in range(rows)]
        tail = self.below(3 * rows) if scene.packed else 0
        # Part of a wider projection; what nobody may read is NaN.
        wide = torch.full((sum(count) + tail, scene.channels + scene.gap), float("nan"), dtype=self.dtype)
        x = wide[:, : scene.channels]
        expected = torch.zeros(len(x), scene.channels, dtype=torch.float64)
        slots, first, appended = [], 0, []
        for row, sequence in enumerate(owner):
            if sequence is None:
                padding = [-1, -9] + ([] if scene.null_slot is None else [scene.null_slot])
                slots.append(padding[self.below(len(padding))])
            else:
                # Whatever an empty row names is not looked at.
                slots.append(self.slot_of[sequence] if count[row] else 2**30)
                stream = self.streams[sequence]
                for i in range(first, first + count[row]):
                    x[i] = self.normal(scene.channels)
                    stream = torch.cat([stream, x[i : i + 1]])
                    expected[i] = convolved(stream, self.weight, self.bias, scene.silu)
                slot = self.slot_of[sequence]
                at = int(self.start[slot]) + int(self.length[slot])
                appended += [
                    (slot, (at + i) % scene.capacity, first + i, at + i >= scene.capacity)
                    for i in range(count[row])
                ]
            first += count[row]
        starts = torch.tensor([0, *count], dtype=torch.int32).cumsum(0).int()
        wide = wide.to(scene.device)
        return Call(
            x=wide[:, : scene.channels],
            slot_index=self.indices(slots),
            query_start=starts.to(scene.device) if scene.packed else None,
            expected=expected,
            owner=owner,
            count=count,
            appended=appended,
        )

    def options(self, call: Call) -> dict[str, Any]:
        """Keyword arguments of :func:`conv_step`."""
        device = self.scene.device
        return {
            "x": call.x,
            "weight": self.weight.to(device),
            "bias": None if self.bias is None else self.bias.to(device),
            "ring": self.ring,
            **self.cursors,
            "slot_index": call.slot_index,
            "query_start": call.query_start,
            "window": self.scene.window,
            "num_tokens": self.scene.num_tokens,
            "activation": "silu" if self.scene.silu else None,
            "null_slot": self.scene.null_slot,
        }

    def advance(self, call: Call) -> int:
        """Keep some tokens of a step, move the cursors, end or prolong a sequence; returns how many."""
        scene, accepted, first = self.scene, [], 0
        for sequence, count in zip(call.owner, call.count, strict=True):
            kept = 0
            while kept < count and self.uniform() < scene.accept:
                kept += 1
            accepted.append(kept)
            if sequence is not None:
                new = call.x[first : first + kept].cpu()
                self.streams[sequence] = torch.cat([self.streams[sequence], new])
            first += count
        commit(
            self.indices(accepted), **self.cursors, slot_index=call.slot_index, window=scene.window,
            num_tokens=scene.num_tokens, capacity=scene.capacity, query_start=call.query_start,
            null_slot=scene.null_slot,
        )  # fmt: skip
        for sequence in range(scene.sequences):
            if self.uniform() < scene.recycle:
                self.begin(sequence)
            elif self.uniform() < scene.recycle:
                self.prefill(sequence)
        return sum(n for n, sequence in zip(accepted, call.owner, strict=True) if sequence is not None)


@dataclass(frozen=True)
class Call:
    """One step of a scene."""

    x: Tensor
    """(tokens, channels)."""
    slot_index: Tensor
    query_start: Tensor | None
    expected: Tensor
    """(tokens, channels) fp64; zeros where padding or nobody owns a token."""
    owner: list[int | None]
    """Sequence of each row, None for padding."""
    count: list[int]
    """Tokens of each row."""
    appended: list[tuple[int, int, int, bool]]
    """Slot, position in its ring, token, and whether the ring has wrapped, of each live token."""


def run(
    scene: Scene, step: Callable[..., Tensor] = conv_step, seed: Callable[..., None] = conv_seed
) -> dict[str, int]:
    """Run a scene and check outputs, appended inputs, untouched memory and cursors at every step.

    Args:
        scene: What to run.
        step: In the place of :func:`conv_step`.
        seed: In the place of :func:`conv_seed`.

    Returns:
        How often what the scene is about has happened: ``wrapped``, ``flushed``, ``rejected``, ``empty``.
    """
    state = Run(scene, write_history=seed)
    met = dict.fromkeys(("wrapped", "flushed", "rejected", "empty"), 0)
    tolerance = TOLERANCE[scene.activation_dtype]
    for _ in range(scene.steps):
        call = state.call()
        before, start, length = state.storage.clone(), state.start.clone(), state.length.clone()
        out = torch.full((len(call.x), scene.channels + scene.gap), float("nan"), dtype=state.dtype)
        out = out.to(scene.device)[:, : scene.channels]
        assert step(**state.options(call), out=out) is out
        torch.testing.assert_close(out.cpu().double(), call.expected, rtol=tolerance, atol=tolerance)
        # Zeros of padding are exact.
        assert not bool(out.cpu()[(call.expected == 0).all(1)].any())

        expected = before.clone()
        ring = state.view(expected)
        for slot, position, token, _ in call.appended:
            ring[slot, position] = call.x[token].to(ring.dtype)
        assert same_bits(state.storage, expected)
        assert torch.equal(state.start, start)
        assert torch.equal(state.length, length)

        rows = zip(call.owner, call.count, strict=True)
        owned = [(state.slot_of[s], n) for s, n in rows if s is not None]
        live = [slot for slot, n in owned if n]
        met["wrapped"] += sum(wrapped for *_, wrapped in call.appended)
        met["flushed"] += int((length[live] + scene.num_tokens > scene.window).sum())
        met["empty"] += len(owned) - len(live)
        met["rejected"] += len(call.appended) - state.advance(call)
    return met


def run_kernels(scene: Scene, block: int) -> dict[str, int]:
    """As :func:`run`, in Triton's interpreter: by the kernels, and each call by the eager ops beside them.

    Args:
        scene: What to run, on CPU tensors.
        block: Channels of a program.
    """
    from replayssm_tune.runtime import conv, conv_launch, launch

    torch.set_num_threads(1)
    tile = ConvTile(block, 1)
    for name in ("tile_for", "default_tile"):
        setattr(conv_launch, name, lambda *of, tile=tile: tile)
    launch._raw_stream = int

    def null(slot: int | None) -> int:
        return -1 if slot is None else slot

    def step(
        *, x: Tensor, ring: Tensor, out: Tensor, activation: str | None, null_slot: int | None, **given: Any
    ) -> Tensor:
        names = ("ring_start", "ring_len", "slot_index", "query_start")
        # The pool with its gaps: a copy of the view alone would lose them.
        copied = torch.empty_strided(ring.shape, ring.stride(), dtype=ring.dtype).copy_(ring)
        tails: Any = given["window"], given["num_tokens"], activation == "silu", null(null_slot)
        wanted = torch.full_like(out, float("nan"))
        for kernel, caches, y in ((False, copied, wanted), (True, ring, out)):
            tensors: Any = (x, given["weight"], given["bias"], caches, *(given[name] for name in names), y)
            if kernel:
                signature = conv.check_conv_step(CONV_STEP, tensors, tails[:-1])
                conv_launch.prepare(signature, -1).launch(tensors, tails[-1])
            else:
                conv.eager_conv_step(*tensors, *tails)
        assert same_bits(ring, copied)
        tolerance = TOLERANCE[scene.activation_dtype]
        torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
        return out

    def seed(
        history: Tensor, *, ring: Tensor, ring_start: Tensor, slots: Tensor, null_slot: int | None
    ) -> None:
        copied = torch.empty_strided(ring.shape, ring.stride(), dtype=ring.dtype).copy_(ring)
        conv.eager_conv_seed(history, copied, ring_start, slots, null(null_slot))
        conv_launch.launch_conv_seed(history, ring, ring_start, slots, null(null_slot))
        assert same_bits(ring, copied)

    return run(scene, step, seed)
