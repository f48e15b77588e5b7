"""The gate: what a candidate must pass before it may be timed.

A candidate runs a trajectory on poisoned, paged memory beside the fp64 oracle (see
:mod:`.trajectory`): its outputs, stored states and ring entries are compared, every byte it must not
touch is checked, and repeated launches from the same memory must agree bit for bit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..runtime.abi import scalar_arguments, tensor_arguments
from ..runtime.compiled import CompiledPlan, ModuleSource, is_aligned, tensor_strides
from ..runtime.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ..runtime.plan import Plan, Structure
from ..runtime.spec import Spec
from .appends import Append, expected_append
from .pool import Pool
from .trajectory import Step, Trajectory

ERROR_FACTOR = 1.25
"""A candidate's relative RMS error may be this many times the ideal's ..."""
ERROR_FLOOR = 1e-5
"""... plus this."""
REPEATS = 20
"""Launches from the same memory that must agree bit for bit."""


@dataclass(frozen=True)
class Verdict:
    """What the gate found. ``reason`` is empty iff the candidate passed."""

    reason: str
    output_error: float = math.nan
    """Relative RMS error of the outputs against fp64."""
    output_bound: float = math.nan
    state_error: float = math.nan
    """Relative RMS error of the stored states against fp64."""
    state_bound: float = math.nan

    @property
    def passed(self) -> bool:
        """Whether the candidate may be timed."""
        return not self.reason


class Gate:
    """A trajectory with its expectations, ready for any number of candidates of one spec.

    Args:
        trajectory: The scene; its steps are computed once, here.
        repeats: See :data:`REPEATS`.
    """

    def __init__(self, trajectory: Trajectory, repeats: int = REPEATS) -> None:
        self.trajectory, self.spec = trajectory, trajectory.spec
        self._steps: list[Step] = []
        self._repeats = repeats
        output, state = RelativeError(), RelativeError()
        for step in trajectory:
            output.add(step.ideal_y, step.y)
            state.add(step.ideal_stored, step.stored)
            # A state of every token fills a GPU: what is not needed again is not kept.
            none = step.y.new_empty(0)
            self._steps.append(replace(step, ideal_y=none, ideal_stored=none))
        self.output_bound = ERROR_FACTOR * output.value() + ERROR_FLOOR
        self.state_bound = ERROR_FACTOR * state.value() + ERROR_FLOOR
        # Repeats start where both branches run, if there is such a step.
        mixed = [i for i, s in enumerate(self._steps) if bool(s.stores.any()) and not bool(s.stores.all())]
        self._repeated = mixed[len(mixed) // 2] if mixed else 0

    def check(self, plan: Plan, module_source: ModuleSource) -> Verdict:
        """Run ``plan`` through the trajectory.

        Raises:
            CompileError: The plan does not compile.
        """
        return self.judge(PlanRunner(self.spec, plan, module_source, self.trajectory).launch)

    def judge(self, launch: Callable[[Pool, Step], Tensor]) -> Verdict:
        """Run a candidate through the trajectory.

        Args:
            launch: Takes one step on a pool and returns its outputs (tokens, heads, head_dim).
        """
        pool = self.trajectory.pool()
        output, state, faults = RelativeError(), RelativeError(), []
        for index, step in enumerate(self._steps):
            if index == self._repeated and self._repeats and not self._repeatable(launch, pool, step):
                return Verdict("launches from the same memory differ")
            before = pool.storage.clone()
            append = None
            if not self.spec.is_native:
                append = expected_append(self.spec, self.trajectory.recurrence, pool, step)
            out = launch(pool, step)
            output.add(out[step.new], step.y)
            state.add(pool.state[step.stored_slots], step.stored)
            faults.append(self._faults(pool, before, append, step, out))
            commit(self.spec, pool, step)
        found = torch.stack(faults).sum(0).tolist()
        for count, what in zip(found, fault_names(self.spec), strict=True):
            if count:
                return Verdict(f"{what} ({int(count)} values over the trajectory)")
        output_error, state_error = output.value(), state.value()
        reason = ""
        if not output_error <= self.output_bound:
            reason = f"output error {output_error:.3g} exceeds {self.output_bound:.3g}"
        elif not state_error <= self.state_bound:
            reason = f"state error {state_error:.3g} exceeds {self.state_bound:.3g}"
        return Verdict(reason, output_error, self.output_bound, state_error, self.state_bound)

    def _faults(self, pool: Pool, before: Tensor, append: Append | None, step: Step, out: Tensor) -> Tensor:
        """Counts of wrong values after one launch, by :func:`fault_names`; stays on the device."""
        allowed = pool.writable(step.targets, step.stores[step.row], step.append)
        touched = ((pool.storage != before) & ~allowed).sum()
        others = torch.ones(len(out), dtype=torch.bool, device=out.device)
        others[step.new] = False
        nonzero = (out[others] != 0).sum()
        infinite = (~torch.isfinite(out[step.new])).sum()
        rings = () if append is None else append.wrong(pool.entry(step.targets, step.append))
        return torch.stack([touched, nonzero, infinite, *rings])

    def _repeatable(self, launch: Callable[[Pool, Step], Tensor], pool: Pool, step: Step) -> bool:
        saved = pool.storage.clone()
        first_out = launch(pool, step)
        first_storage = pool.storage.clone()
        same = torch.ones((), dtype=torch.bool, device=saved.device)
        for _ in range(self._repeats - 1):
            pool.storage.copy_(saved)
            out = launch(pool, step)
            same &= (out.view(torch.uint8) == first_out.view(torch.uint8)).all()
            same &= (pool.storage == first_storage).all()
        pool.storage.copy_(saved)
        return bool(same)


def fault_names(spec: Spec) -> tuple[str, ...]:
    """What the gate counts wrong values of, launch by launch, for specs like ``spec``."""
    everywhere = (
        "bytes outside of state and ring changed",
        "outputs of padded rows or beyond the last row are not zero",
        "outputs are not finite",
    )
    if spec.is_native:
        return everywhere
    if spec.family == "gdn":
        k = "ring k is inexact" if spec.qk_l2norm else "ring k differs from the inputs"
        return (*everywhere, k, "ring gates are inexact", "ring u is inexact")
    b, decay, x = (
        "ring B differs from the inputs",
        "ring step sizes are inexact",
        "ring x differs from the inputs",
    )
    return (*everywhere, b, decay, x)


class RelativeError:
    """Relative RMS error over the tensors of many steps, none of which is kept; as ``relative_rms``."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Take values and what they should be, fp64; waits for no device."""
        difference = (actual.double() - expected).square().sum()
        self._squares.append(torch.stack([difference, expected.square().sum()]))

    def value(self) -> float:
        """RMS of the differences over the RMS of the expected values; 0 for nothing to compare."""
        difference, scale = torch.stack(self._squares).sum(0).tolist()
        return math.sqrt(difference / max(scale, sys.float_info.min))


class Kernels:
    """A plan's kernels, compiled for the dtypes and the alignment of what they are given.

    Args:
        spec: What they compute.
        plan: Which they are.
        module_source: Finds the modules' files.
    """

    def __init__(self, spec: Spec, plan: Plan, module_source: ModuleSource) -> None:
        self._spec, self._plan, self._source = spec, plan, module_source
        self._structure = Structure(plan.variants[0].structure.role)
        self._compiled: dict[tuple[bool, tuple[str, ...]], CompiledPlan] = {}

    def launch(
        self, named: Mapping[str, Tensor | None], rows: int, heads: int, numbers: Mapping[str, int]
    ) -> None:
        """Launch once on the current stream.

        Args:
            named: Tensors by the name of the argument; there may be more.
            rows: Of the call.
            heads: Of a row.
            numbers: Scalar arguments by name; there may be more.

        Raises:
            CompileError: A kernel does not compile.
        """
        spec, tensors = self._spec, list[Tensor]()
        for argument in tensor_arguments(spec, self._structure):
            tensor = named[argument.name]
            assert tensor is not None
            tensors.append(tensor)
        aligned = is_aligned(spec, self._structure, tensors)
        dtypes = tuple(DTYPE_NAMES[t.dtype] for t in tensors)
        compiled = self._compiled.get((aligned, dtypes))
        if compiled is None:
            compiled = CompiledPlan(spec, self._plan.variants, self._source, dtypes, aligned=aligned)
            self._compiled[aligned, dtypes] = compiled
        stream = torch.cuda.current_stream().cuda_stream if tensors[0].is_cuda else 0
        *scalars, null_slot = (numbers[name] for name in scalar_arguments(spec, self._structure))
        strides = tensor_strides(spec, self._structure, tensors)
        compiled.bind(rows, heads, strides, tuple(scalars))(tuple(tensors), null_slot, stream)


class PlanRunner:
    """Launches a plan on pools of one trajectory's layout."""

    def __init__(self, spec: Spec, plan: Plan, module_source: ModuleSource, trajectory: Trajectory) -> None:
        self._spec, self._trajectory = spec, trajectory
        self._kernels = Kernels(spec, plan, module_source)

    def launch(self, pool: Pool, step: Step) -> Tensor:
        """Outputs (tokens, heads, head_dim) of one launch; the buffer is pre-filled with NaN."""
        spec, trajectory = self._spec, self._trajectory
        dtype = TORCH_DTYPES[spec.activation_dtype]
        out = torch.full(step.x.shape, math.nan, dtype=dtype, device=trajectory.device)
        rows = step.slot_index.shape[0]
        query_start = step.query_start
        if query_start is None:
            starts = torch.arange(rows + 1, dtype=torch.int32, device=trajectory.device)
            query_start = starts * spec.num_tokens
        named = {
            "state": pool.state,
            "ring_x": pool.ring_x,
            "ring_b": pool.ring_b,
            "ring_decay": pool.ring_decay,
            "ring_start": pool.ring_start,
            "ring_len": pool.ring_len,
            "slot_index": step.slot_index,
            "accepted": step.previous,
            "query_start": query_start,
            "x": step.x,
            "dt": step.dt,
            "a": trajectory.A,
            "b": step.B,
            "c": step.C,
            "d": trajectory.D,
            "z": step.z,
            "beta": step.beta,
            "dt_bias": trajectory.dt_bias,
            "out": out,
        }
        null_slot = -1 if trajectory.null_slot is None else trajectory.null_slot
        numbers = {"ring_capacity": pool.capacity, "tokens": len(step.x), "null_slot": null_slot}
        self._kernels.launch(named, rows, trajectory.heads, numbers)
        return out


def commit(spec: Spec, pool: Pool, step: Step) -> None:
    """Move the pool's cursors as the trajectory does (in plain torch, on any device)."""
    if not pool.capacity:
        return
    slots, kept = step.slots, step.accepted[step.live].to(torch.int32)
    start, length = pool.ring_start[slots], pool.ring_len[slots]
    pool.ring_start[slots] = torch.where(step.stores, (start + length) % pool.capacity, start)
    pool.ring_len[slots] = torch.where(step.stores, kept, length + kept)
