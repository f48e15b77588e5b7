"""Errors of outputs and states against fp64 over thousands of tokens: ``python benchmarks/accuracy.py``.

Runs through the public ops on the device at hand: with CUDA the kernels that dispatch serves, else the eager
reference; the run file (``results/<date>-<gpu or cpu>-accuracy.json``) says which. All kernels of a family
see the same tokens of the same sequences, drawn as the gate draws them (keys of GDN resemble one another),
with slower decays: its heads forget within tens of tokens, some of these remember hundreds, so that errors
have the time to add up. States start at zero, which every dtype holds exactly. The fp64 recurrence is
:class:`.oracle.Oracle`, what a kernel can at best reach is :class:`.oracle.Ideal`.

With drafts a row is given ``num_tokens`` tokens a step, of which the first and a random number of those after
it are the sequence's own and are kept; the others are tokens from elsewhere in the stream, and are rejected.
Errors of outputs are of kept tokens. ``benchmarks/summary.py`` derives figures from the run file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import torch
from torch import Tensor

from benchmarks.summary import RESULTS
from replayssm_tune.runtime import ops
from replayssm_tune.runtime.oracle import Ideal, Recurrence, Token, round_to
from replayssm_tune.runtime.spec import DTYPE_BYTES, Spec
from replayssm_tune.tuner.draws import KEY_COSINE
from replayssm_tune.tuner.gate import ERROR_FACTOR, ERROR_FLOOR
from replayssm_tune.tuner.runfile import today, write_run
from replayssm_tune.tuner.trajectory import Trajectory, relative_rms

LAYERS = (
    Spec("mamba2", "step", 64, 128, 8, 16),
    Spec("gdn", "step", 128, 128, 2, 16, has_d=False, qk_l2norm=True),
)
"""Layers of real models, one group of each: one token a step, 16-bit activations."""
NUM_TOKENS = (1, 4)
TOKENS = 2048
SEQUENCES = 2
ACCEPT = 0.8
"""Probability that a draft is kept, if those before it are."""
RATES = (0.1, 1.0)
"""Range of -A, of GDN of exp(A_log): by decay alone a state is down to 1/e within 50 to 500 tokens."""
SEED = 0

POINTS = (1, 4, 16, 64)
"""Tokens after which errors are taken at first; later they are taken every ``EVERY``."""
EVERY = 128


def points(tokens: int) -> list[int]:
    """After how many of a run's ``tokens`` errors are taken; the last one is among them."""
    return sorted({*(p for p in POINTS if p < tokens), *range(EVERY, tokens, EVERY), tokens})


def variants(layer: Spec) -> list[Spec]:
    """All kernels of a layer that are compared: native and replay, every dtype of state and ring."""
    found = []
    for num_tokens in NUM_TOKENS:
        step = layer if num_tokens == 1 else replace(layer, op="verify", num_tokens=num_tokens)
        for state_dtype in DTYPE_BYTES:
            stored = replace(step, state_dtype=state_dtype)
            rings = dict.fromkeys((layer.activation_dtype, "fp32"))
            found += [stored.native, *(replace(stored, ring_dtype=ring) for ring in rings)]
    return found


@dataclass(frozen=True)
class Stream:
    """Tokens of some sequences, and what becomes of them in fp64."""

    token: Token
    """(tokens x sequences, ...): token t of sequence s at ``t sequences + s``."""
    y: Tensor
    """(tokens, sequences, heads, head_dim) fp64."""
    states: dict[int, Tensor]
    """(sequences, heads, head_dim, state_size) fp64 after so many tokens."""
    fixed: dict[str, Tensor | None]
    """A, D and dt_bias."""
    recurrence: Recurrence

    @property
    def tokens(self) -> int:
        return self.y.shape[0]

    @property
    def sequences(self) -> int:
        return self.y.shape[1]

    @property
    def heads(self) -> int:
        return self.y.shape[2]


def stream(layer: Spec, tokens: int, device: str, sequences: int = SEQUENCES) -> Stream:
    """Tokens for all variants of a layer: a native step's trajectory, in which every token is kept."""
    scene = Trajectory(
        replace(layer, state_dtype="fp32").native, heads=layer.heads_per_group, sequences=sequences,
        steps=tokens, padded_rows=0, attend=1.0, rates=RATES, state_scale=0.0, seed=SEED, device=device,
    )  # fmt: skip
    taken, wanted = set(points(tokens)), []
    drawn: list[Token] = []
    states = {}
    for number, step in enumerate(scene, 1):
        # Rows are shuffled anew at every step.
        row = (scene.slot_of[:, None] == step.slots).int().argmax(1)
        drawn.append(step.token.at(row))
        wanted.append(step.y[row])
        if number in taken:
            states[number] = step.stored[row]
    columns = zip(*drawn, strict=True)
    token = Token._make(None if column[0] is None else torch.cat(column) for column in columns)
    fixed = {"A": scene.A, "D": scene.D, "dt_bias": scene.dt_bias}
    return Stream(token, torch.stack(wanted), states, fixed, scene.recurrence)


STEPS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "mamba2": (ops.mamba2_step, ops.mamba2_native_step, ops.mamba2_native_verify),
    "gdn": (ops.gdn_step, ops.gdn_native_step, ops.gdn_native_verify),
}
"""Public ops by family: replay, native of one token a row, native of drafts."""


class Layer:
    """The caches of a layer and the public ops that a server would call on them.

    Args:
        spec: Of what is called.
        given: The layer's parameters, and how many sequences and heads there are.
    """

    def __init__(self, spec: Spec, given: Stream) -> None:
        self._spec, self._device = spec, given.y.device
        rows, each = given.sequences, spec.num_tokens if spec.op == "native_verify" else 1
        self._replay, self._native_step, self._native_verify = STEPS[spec.family]
        # Behind the slots of the sequences are those that states are materialised to.
        slots = rows * (each if spec.is_native else 2)
        self._cache = ops.make_cache(spec, slots, given.heads, 1, self._device)
        index = torch.arange(slots, dtype=torch.int32, device=self._device)
        self._copies = index[rows : 2 * rows]
        self._slot_index = index.reshape(rows, each) if spec.op == "native_verify" else index[:rows]
        self._previous = torch.ones_like(index[:rows])
        self._fixed = {name: value for name, value in given.fixed.items() if value is not None}
        if spec.family == "gdn":
            self._fixed["A_log"] = self._fixed.pop("A")
        self._starts: dict[str, Any] = {}
        self.folds = torch.zeros_like(index[:rows])
        """(rows,) int32: how often each row has flushed."""

    def step(self, token: Token, count: Tensor) -> Tensor:
        """Outputs (tokens, heads, head_dim) of new tokens, ``count`` (rows,) of each row, packed."""
        spec = self._spec
        if spec.verifies:
            starts = torch.zeros(len(count) + 1, dtype=torch.int32, device=self._device)
            starts[1:] = count.cumsum(0)
            self._starts = {"query_start": starts}
        given: dict[str, Any] = {**self._fixed, **self._starts, "slot_index": self._slot_index}
        if spec.family == "gdn":
            given |= {"q": token.C, "k": token.B, "v": token.x, "a": token.dt, "b": token.beta}
            given["qk_l2norm"] = spec.qk_l2norm
        else:
            given |= {"x": token.x, "dt": token.dt, "B": token.B, "C": token.C}
        if spec.op == "native_step":
            return self._native_step(**given, state=self._cache.state)
        if spec.op == "native_verify":
            return self._native_verify(**given, state=self._cache.state, accepted=self._previous)
        flushes = self._cache.ring_len[: len(count)] + spec.num_tokens > spec.window
        self.folds += flushes & (count > 0)
        return self._replay(**given, **self._cache.tensors(), window=spec.window, num_tokens=spec.num_tokens)

    def keep(self, kept: Tensor) -> None:
        """Keep the first ``kept`` (rows,) tokens of the step; none of rows that had none."""
        spec, cache = self._spec, self._cache
        if spec.is_native:
            self._previous = torch.where(kept > 0, kept.int(), self._previous)
            return
        ops.commit(
            kept.int(), ring_start=cache.ring_start, ring_len=cache.ring_len, slot_index=self._slot_index,
            window=spec.window, num_tokens=spec.num_tokens, capacity=cache.capacity, **self._starts,
        )  # fmt: skip

    def states(self) -> Tensor:
        """(rows, heads, head_dim, state_size) of the sequences; with rings the ones materialised."""
        spec, cache = self._spec, self._cache
        if spec.op == "native_verify":
            places = (self._previous.long() - 1)[:, None]
            return cache.state[self._slot_index.long().gather(1, places)[:, 0].long()]
        if spec.is_native:
            return cache.state
        given: dict[str, Any] = {"source": self._slot_index, "destination": self._copies}
        given["window"] = spec.window
        if spec.family == "gdn":
            ops.gdn_materialize(**given, **cache.tensors())
        else:
            ops.mamba2_materialize(self._fixed["A"], **given, **cache.tensors())
        return cache.state[self._copies.long()]


@dataclass(frozen=True)
class _Step:
    """Who takes which tokens in a step."""

    count: Tensor
    """(rows,) int64: tokens of each row."""
    kept: Tensor
    """(rows,) int64: the first of them that are kept."""
    index: Tensor
    """(tokens,) int64: which of the stream's tokens."""
    is_kept: Tensor
    """(tokens,) bool."""


def _steps(given: Stream, num_tokens: int, until: Sequence[int]) -> Iterator[tuple[int, list[_Step]]]:
    """Steps up to each of ``until`` tokens, at which all rows meet; the same for every spec of T tokens."""
    g = torch.Generator().manual_seed(SEED)
    rows, total = given.sequences, given.tokens
    row, place = torch.arange(rows), torch.arange(num_tokens)
    position = torch.zeros(rows, dtype=torch.long)
    for end in until:
        steps = []
        while bool((position < end).any()):
            drafts = (torch.rand(rows, num_tokens - 1, generator=g) < ACCEPT).int().cumprod(1).sum(1)
            kept = torch.minimum(1 + drafts, end - position)
            count = torch.where(kept > 0, num_tokens, 0)
            own = place < kept[:, None]
            # A draft that is rejected is some other token of the stream.
            at = (position[:, None] + place + torch.where(own, 0, total // 2)) % total
            index, takes = at * rows + row[:, None], count > 0
            steps.append(_Step(count, kept, index[takes].flatten(), own[takes].flatten()))
            position += kept
        yield end, steps


def errors(spec: Spec, given: Stream) -> dict[str, Any]:
    """Errors of a kernel and of its ideal over a stream.

    Returns:
        ``tokens``, and for each of them ``folds`` (the mean over the sequences, of a replay spec alone),
        ``output`` (of the tokens since the one before) and ``state``: relative RMS errors ``found``,
        ``ideal`` and, of outputs, that of rounding them (``rounding``).
    """
    device = given.y.device
    sequence = torch.arange(given.sequences, device=device)
    shape = next(iter(given.states.values())).shape
    layer = Layer(spec, given)
    ideal = Ideal(torch.zeros(shape, device=device), given.recurrence, spec=spec)
    exact = given.y.flatten(0, 1)
    output: dict[str, list[float]] = {"found": [], "ideal": [], "rounding": []}
    state: dict[str, list[float]] = {"found": [], "ideal": []}
    tokens, folds = [], []
    for end, steps in _steps(given, spec.num_tokens, points(given.tokens)):
        found, best, wanted = [], [], []
        for step in steps:
            count, kept, index = (value.to(device) for value in (step.count, step.kept, step.index))
            token, is_kept = given.token.at(index), step.is_kept.to(device)
            found.append(layer.step(token, count)[is_kept])
            best.append(ideal.step(sequence, *token, count=count)[is_kept])
            wanted.append(exact[index[is_kept]])
            layer.keep(kept)
            ideal.commit(kept)
        y = torch.cat(wanted)
        output["found"].append(relative_rms(torch.cat(found), y))
        output["ideal"].append(relative_rms(torch.cat(best), y))
        output["rounding"].append(relative_rms(round_to(y, spec.activation_dtype), y))
        state["found"].append(relative_rms(layer.states(), given.states[end]))
        # A state that is read off is one that is stored.
        state["ideal"].append(relative_rms(round_to(ideal.state, spec.state_dtype), given.states[end]))
        tokens.append(end)
        folds.append(float(layer.folds.float().mean()))
    return {
        "tokens": tokens,
        **({} if spec.is_native else {"folds": folds}),
        "output": output,
        "state": state,
    }


def kernel(spec: Spec, rows: int, heads: int, device: str) -> str:
    """What the public op runs: the plan that dispatch serves, or the eager reference."""
    if device == "cpu":
        return "eager reference"
    from replayssm_tune.runtime.launch import plan_for

    return plan_for(spec, rows * heads, torch.cuda.current_device()).key


def run(tokens: int, device: str, layers: Sequence[Spec] = LAYERS) -> dict[str, Any]:
    """The run file's content."""
    found = []
    with torch.no_grad():
        for base in layers:
            given = stream(base, tokens, device)
            for spec in variants(base):
                begin = time.perf_counter()
                served = kernel(spec, given.sequences, given.heads, device)
                found.append(
                    {
                        "spec": spec.key,
                        "sequences": given.sequences,
                        "heads": given.heads,
                        "kernel": served,
                        **errors(spec, given),
                    }
                )
                seconds = time.perf_counter() - begin
                output, state = found[-1]["output"]["found"][-1], found[-1]["state"]["found"][-1]
                print(f"{spec.key}: output {output:.3g}, state {state:.3g} ({seconds:.1f} s)", flush=True)
    return {
        "what": "accuracy",
        "gpu": "cpu" if device == "cpu" else torch.cuda.get_device_name().removeprefix("NVIDIA "),
        "date": today(),
        "environment": environment(device),
        "protocol": {
            "tokens": tokens,
            "seed": SEED,
            "rates": list(RATES),
            "accept": ACCEPT,
            "key_cosine": KEY_COSINE,
            "error_factor": ERROR_FACTOR,
            "error_floor": ERROR_FLOOR,
            "state": "zeros at first",
            "output": "relative RMS error against fp64 of the kept tokens since the point before",
            "state_error": "relative RMS error against fp64 of the states, with rings of those materialised",
        },
        "errors": found,
    }


def environment(device: str) -> dict[str, Any]:
    """Where a run took place, and with which toolchain."""
    gpu = {}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        gpu = {"gpu": properties.name, "capability": [properties.major, properties.minor]}
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {
        **gpu,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"tokens a sequence (default {TOKENS})")
    parser.add_argument("--family", choices=sorted(STEPS), help="the layers of this family alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the run file")
    chosen = parser.parse_args()
    torch.set_num_threads(1)  # tensors are small
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [layer for layer in LAYERS if chosen.family in (None, layer.family)]
    print(write_run(chosen.results, run(chosen.tokens, device, layers)))


if __name__ == "__main__":
    main()
