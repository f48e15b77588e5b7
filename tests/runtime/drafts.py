"""Sequences whose drafts are verified by the public ops, beside a recurrence in fp64.

A run takes sequences through steps of rows of random lengths, of which a random number of tokens is kept,
and through what happens to sequences in a server between two steps. Every step is compared with the
recurrence, token by token, and with what it may write.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.oracle import Token, recurrence
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner.draws import KEY_COSINE
from replayssm_tune.tuner.pool import make_pool
from tests import specs
from tests.runtime.calls import cache_of
from tests.runtime.draws import Draws
from tests.runtime.folds import MATERIALIZE

STEPS: dict[str, Callable[..., Tensor]] = {"mamba2": ops.mamba2_step, "gdn": ops.gdn_step}
NATIVE: dict[str, Callable[..., Tensor]] = {
    "mamba2": ops.mamba2_native_verify,
    "gdn": ops.gdn_native_verify,
}


def spec_of(family: str, window: int = 4, num_tokens: int = 2, dtype: str = "fp32", **changes: Any) -> Spec:
    """A small spec with all optional inputs of its family; ``dtype`` is that of activations and ring."""
    fields = {"window": window, "activation_dtype": dtype, "ring_dtype": dtype, "has_z": True}
    return specs.drafts(specs.small(family, **fields | changes), num_tokens)


@dataclass(frozen=True)
class Scene:
    """What is run; rows of packed scenes vary in their tokens."""

    family: str
    window: int = 6
    num_tokens: int = 4
    packed: bool = True
    spare: int = 0
    """Tokens that a ring holds beyond the least."""
    heads: int = 4
    head_dim: int = 4
    state_size: int = 6
    sequences: int = 6
    padded_rows: int = 2
    slots: int = 40
    null_slot: int | None = 0
    index_dtype: torch.dtype = torch.int32
    events: float = 0.0
    """Probability that something happens to a sequence after a step."""
    rates: tuple[float, float] = (0.5, 4.0)
    """Range of -A, of GDN of exp(A_log)."""
    large: float = -2.0
    """Mean of every fifth raw step size, or gate: what may forget everything; the others' is -2."""
    seed: int = 0
    device: str = "cpu"

    @property
    def spec(self) -> Spec:
        return spec_of(
            self.family, self.window, self.num_tokens, head_dim=self.head_dim, state_size=self.state_size
        )


@dataclass
class Sequence:
    """One of a run's, on a slot of the ring's ops or on one per token of the native op."""

    states: list[Tensor]
    """fp64, after 0, 1, … of its ring's tokens; the last is that of all it has kept."""
    slots: list[int]
    """Where it lies: one slot; of the native op one for each token."""
    kept: int = 0
    """Of the native op: tokens kept of its last step, which say in which slot the state is. Else 0."""
    parked: ops.Snapshot | None = None
    """What there is of it while it has no slot."""


@dataclass
class Run(Draws):
    """A scene under way."""

    scene: Scene
    alive: list[Sequence] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)
    """How often what a scene is about has happened."""
    found: list[Tensor] = field(default_factory=list)
    """Outputs of live tokens, step after step."""
    wanted: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # tensors are tiny
        scene, spec = self.scene, self.scene.spec
        self.g = torch.Generator().manual_seed(scene.seed)
        self.pool = make_pool(
            spec, scene.slots, scene.heads, scene.heads // 2, spec.ring_capacity + scene.spare, scene.device,
            generator=self.g, gap_bytes=4,
        )  # fmt: skip
        self.cache = cache_of(self.pool, spec)
        self.free: list[int] = torch.randperm(scene.slots, generator=self.g).tolist()
        if scene.null_slot is not None:
            self.free.remove(scene.null_slot)
        rate = torch.empty(scene.heads).uniform_(*scene.rates, generator=self.g)
        given = {"A": rate.log() if scene.family == "gdn" else -rate, "dt_bias": self.normal(scene.heads)}
        if spec.has_d:
            given["D"] = self.normal(scene.heads)
        self.rule = recurrence(spec, **given)
        self.fixed: dict[str, Any] = {name: value.to(scene.device) for name, value in given.items()}
        if scene.family == "gdn":
            self.fixed["A_log"] = self.fixed.pop("A")
        common = self.normal(scene.heads // 2, scene.state_size)
        self._key = common / common.square().mean(-1, keepdim=True).sqrt()
        for _ in range(scene.sequences):
            slot = self.free.pop()
            self.alive.append(Sequence([], [slot]))
            self.begin(self.alive[-1])

    def tokens(self, count: int) -> Token:
        """(count, ...) inputs; keys of GDN resemble one another."""
        scene, groups = self.scene, self.scene.heads // 2
        key = self.normal(count, groups, scene.state_size)
        gdn = scene.family == "gdn"
        if gdn:
            key = math.sqrt(KEY_COSINE) * self._key + math.sqrt(1 - KEY_COSINE) * key
        return Token(
            x=self.normal(count, scene.heads, scene.head_dim),
            dt=torch.where(torch.rand(count, scene.heads, generator=self.g) < 0.2, scene.large, -2.0)
            + self.normal(count, scene.heads),
            B=key,
            C=self.normal(count, groups, scene.state_size),
            z=None if gdn else self.normal(count, scene.heads, scene.head_dim),
            beta=self.normal(count, scene.heads) if gdn else None,
        )

    # ---- calls ----

    def indices(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=self.scene.index_dtype, device=self.scene.device)

    def inputs(self, token: Token) -> dict[str, Any]:
        """Keyword arguments of the family's ops."""
        token = token.to(torch.float32, torch.device(self.scene.device))
        names = {"x": "x", "dt": "dt", "B": "B", "C": "C", "z": "z"}
        if self.scene.family == "gdn":
            names = {"x": "v", "dt": "a", "B": "k", "C": "q", "beta": "b"}
        return self.fixed | {public: getattr(token, name) for name, public in names.items()}

    @property
    def cursors(self) -> dict[str, Any]:
        return {"ring_start": self.pool.ring_start, "ring_len": self.pool.ring_len}

    def length(self, sequence: Sequence) -> int:
        return len(sequence.states) - 1

    def materialize(self, sequence: Sequence, destination: int, prefix: int | None = None) -> None:
        fixed = {"A": self.fixed["A"]} if self.scene.family == "mamba2" else {}
        MATERIALIZE[self.scene.family](
            **fixed, **self.cache.tensors(), window=self.scene.window,
            source=self.indices([-1, sequence.slots[0]]), destination=self.indices([5, destination]),
            prefix=None if prefix is None else self.indices([1, prefix]),
        )  # fmt: skip

    def reset(self, slot: int) -> None:
        ops.reset(self.indices([slot, -1]), **self.cursors)

    def release(self, slots: list[int]) -> None:
        """What is left in slots is no longer anybody's: poison."""
        for part in (self.pool.state, self.pool.ring_x, self.pool.ring_b, self.pool.ring_decay):
            part[slots] = math.nan
        self.free[:0] = slots

    def expected(self, old: Tensor, token: Token, begin: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (tokens, ...) and states (rows, num_tokens + 1, ...) after 0, 1, … tokens, in fp64.

        Args:
            old: (rows, heads, head_dim, state_size), before them.
            token: (tokens, ...).
            begin: (rows,), first token of each row.
            count: (rows,), its tokens.
        """
        y, now = torch.zeros_like(token.x, dtype=torch.float64), old
        after = [now]
        for i in range(self.scene.num_tokens):
            has = (count > i).nonzero()[:, 0]
            one = token.at(begin[has] + i)
            new = self.rule.advance(now[has], self.rule.entry(now[has], one))
            y[begin[has] + i] = self.rule.read(new, one)
            now = now.index_copy(0, has, new)
            after.append(now)
        return y, torch.stack(after, 1)

    # ---- steps ----

    def step(self, most: int | None = None, native: bool = False) -> None:
        """One step of some sequences of one kind, with rows of padding of all sorts.

        Args:
            most: Tokens of a row where the scene is not of packed rows, and at most as many where it is;
                None for the scene's. 1 is the op of one token, unless rows are packed.
            native: By the op that writes a state for every token.
        """
        scene, pool = self.scene, self.pool
        most = scene.num_tokens if most is None else most
        here = [s for s in self.alive if s.parked is None and bool(s.kept) == native]
        taken = [s for s in here if self.uniform() < 0.85]
        rows: list[Sequence | None] = [*taken, *[None] * scene.padded_rows]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=self.g).tolist()]
        count = torch.full((len(rows),), most)
        if scene.packed:
            count = torch.randint(0, most + 1, (len(rows),), generator=self.g)
        begin = count.cumsum(0) - count
        live = torch.tensor([r for r, s in enumerate(rows) if s is not None and count[r]], dtype=torch.long)
        owners = [sequence for r in live.tolist() if (sequence := rows[r]) is not None]

        total = int(count.sum())
        token = self.tokens(total + (self.below(5) if scene.packed else 0))
        mine = torch.zeros(len(token.x), dtype=torch.bool)
        for r in live.tolist():
            mine[begin[r] : begin[r] + count[r]] = True
        for value in token:
            if value is not None:
                value[~mine] = math.nan  # of padding, or nobody's
        padding = [-1, -9] + ([] if scene.null_slot is None else [scene.null_slot])
        places = most if native else 1
        slots = [
            [padding[self.below(len(padding))], *[2**30] * (places - 1)] if owner is None
            else owner.slots if count[r] else [2**30] * places  # of an empty row nothing is looked at
            for r, owner in enumerate(rows)
        ]  # fmt: skip
        starts = torch.cat([torch.zeros(1), count.cumsum(0)]).int().to(scene.device)
        given: dict[str, Any] = self.inputs(token) | {
            "slot_index": self.indices(slots if native else [slot for slot, *_ in slots]),
            "query_start": starts if scene.packed else None,
            "null_slot": scene.null_slot,
            "out": torch.full(token.x.shape, math.nan, device=scene.device),
        }
        before, cursors = pool.storage.clone(), {name: v.clone() for name, v in self.cursors.items()}
        if native:
            kept = self.indices([-7 if s is None or not count[r] else s.kept for r, s in enumerate(rows)])
            y = NATIVE[scene.family](**given, state=pool.state, accepted=kept)
        else:
            given |= self.cache.tensors() | {"window": scene.window, "num_tokens": most}
            y = STEPS[scene.family](**given)
        assert y is given["out"]

        old = torch.stack([s.states[-1] for s in owners]) if owners else torch.zeros(0, *pool.state.shape[1:])
        wanted, after = self.expected(old.double(), token, begin[live], count[live])
        agree(y, wanted)
        assert not y.cpu()[~mine].any()
        self.found.append(y.cpu()[mine].double())
        self.wanted.append(wanted[mine])
        assert all(torch.equal(value, self.cursors[name]) for name, value in cursors.items())
        flushes = [not native and self.length(s) + most > scene.window for s in owners]
        self._check_writes(before, owners, flushes, count[live].tolist(), native)

        self.met["empty"] += int((count == 0).sum())
        self.met["tokens"] += int(mine.sum())
        self._keep(rows, count.tolist(), owners, flushes, after, given, most, native)

    def _check_writes(
        self, before: Tensor, owners: list[Sequence], flushes: list[bool], count: list[int], native: bool
    ) -> None:
        """Nothing has changed but states of flushing rows, or of each token, and the ends of rings."""
        pool, places = self.pool, []
        for sequence, flush, n in zip(owners, flushes, count, strict=True):
            slot = sequence.slots[0]
            at = int(pool.ring_start[slot]) + self.length(sequence)
            self.met["wrapped"] += not native and at < pool.capacity < at + n
            places += [(slot, flush, (at + i) % pool.capacity) for i in range(n)]
        allowed = torch.zeros_like(before, dtype=torch.bool)
        if native:
            states = [slot for s, n in zip(owners, count, strict=True) for slot in s.slots[:n]]
            mask = torch.zeros_like(before)
            pool.fields["state"].bytes_of(mask)[states] = 1
            allowed = mask.bool()
        elif places:
            slots, stores, append = (torch.tensor(part) for part in zip(*places, strict=True))
            allowed = pool.writable(slots, stores, append)
        assert not ((pool.storage != before) & ~allowed).any()

    def _keep(
        self,
        rows: list[Sequence | None],
        count: list[int],
        owners: list[Sequence],
        flushes: list[bool],
        after: Tensor,
        given: dict[str, Any],
        most: int,
        native: bool,
    ) -> None:
        """Keep some tokens of each row: by the cursors, or by what the next native step is told."""
        accepted = [self.below(10) - 3 for _ in rows]  # of padding it is not looked at
        at = 0
        for r, sequence in enumerate(rows):
            if sequence is None or not count[r]:
                continue
            n = accepted[r] = self.below(count[r] + 1)
            if native:
                n = sequence.kept = max(1, n)
                sequence.states = [after[at, n]]
            else:
                if flushes[at]:
                    sequence.states = sequence.states[-1:]
                sequence.states += [after[at, i] for i in range(1, n + 1)]
            self.met["native" if native else "ring"] += n
            self.met["rejected"] += count[r] - n
            self.met["flushed"] += flushes[at]
            at += 1
        assert at == len(owners)
        if not native:
            ops.commit(
                self.indices(accepted), **self.cursors, slot_index=given["slot_index"], num_tokens=most,
                window=self.scene.window, capacity=self.pool.capacity, query_start=given["query_start"],
                null_slot=self.scene.null_slot,
            )  # fmt: skip
            for sequence in owners:
                assert int(self.pool.ring_len[sequence.slots[0]]) == self.length(sequence)

    # ---- what happens between steps ----

    def begin(self, sequence: Sequence) -> None:
        """Another sequence takes over the slot; a prefill has written its state."""
        (slot,) = sequence.slots
        state = self.normal(*self.pool.state.shape[1:])
        self.reset(slot)
        self.pool.state[slot] = state.to(self.scene.device)
        sequence.states = [state.double()]

    def park(self, sequence: Sequence) -> None:
        """Preemption: the slot goes to others, and what was in it comes back later, elsewhere."""
        sequence.parked = self.cache.snapshot(self.indices(sequence.slots))
        self.release(sequence.slots)

    def resume(self, sequence: Sequence) -> None:
        assert sequence.parked is not None
        sequence.slots = [self.free.pop()]
        self.cache.restore(sequence.parked, self.indices(sequence.slots))
        sequence.parked = None

    def move(self, sequence: Sequence, prefix: int | None = None) -> None:
        """Go on from what the ring's first tokens have left, in another slot."""
        target = self.free.pop()
        self.materialize(sequence, target, prefix)
        self.reset(target)
        sequence.states = [sequence.states[-1 if prefix is None else min(prefix, self.length(sequence))]]
        self.release(sequence.slots)
        sequence.slots = [target]
        self.check(sequence)

    def drain(self, sequence: Sequence) -> None:
        """Fold the ring into the slot's own state."""
        (slot,) = sequence.slots
        self.materialize(sequence, slot)
        ops.drained(self.indices([slot]), **self.cursors, capacity=self.pool.capacity)
        sequence.states = sequence.states[-1:]
        self.check(sequence)

    def hand_over(self, sequence: Sequence) -> None:
        """From the ring to the native op."""
        self.move(sequence)
        others = [self.free.pop() for _ in range(self.scene.num_tokens - 1)]
        sequence.slots, sequence.kept = [*sequence.slots, *others], 1

    def hand_back(self, sequence: Sequence) -> None:
        """From the native op to the ring."""
        slot = sequence.slots.pop(sequence.kept - 1)
        self.release(sequence.slots)
        sequence.slots, sequence.kept = [slot], 0
        self.reset(slot)
        self.check(sequence)

    def happen(self) -> None:
        """Something, now and then, to each sequence."""
        for sequence in self.alive:
            if self.uniform() >= self.scene.events:
                continue
            if sequence.parked is not None:
                what = "resume"
            elif sequence.kept:
                what = "hand_back"
            else:
                what = ("begin", "park", "move", "roll_back", "drain", "hand_over", "hand_over")[
                    self.below(7)
                ]
            self.met[what] += 1
            if what == "roll_back":
                self.move(sequence, self.below(self.scene.window + 2))
            else:
                getattr(self, what)(sequence)

    def check(self, sequence: Sequence) -> None:
        """The state of a sequence with an empty ring is that of the recurrence."""
        slot = sequence.slots[max(0, sequence.kept - 1)]
        agree(self.pool.state[slot], sequence.states[-1])


def lives(scene: Scene, steps: int, native: float = 0.25) -> Run:
    """A run through so many steps of all kinds, and what there is of each sequence in the end.

    Args:
        scene: What is run.
        steps: Of rows of several tokens; between them are some of one token.
        native: Which part of them is by the native op.
    """
    run = Run(scene)
    for step in range(steps):
        run.step(native=run.uniform() < native)
        if step % 5 == 4:
            run.step(most=1)
        run.happen()
    for sequence in run.alive:
        if sequence.parked is not None:
            run.resume(sequence)
        if not sequence.kept:
            run.drain(sequence)
        run.check(sequence)
    return run


def agree(found: Tensor, wanted: Tensor) -> None:
    """Values (..., n) of fp32, as exact as the largest of their last dimension is."""
    scale = 1.0 + wanted.abs().amax(-1, keepdim=True) if wanted.numel() else 1.0
    torch.testing.assert_close(found.cpu().double() / scale, wanted / scale, rtol=0.0, atol=3e-5)
