"""What may be timed: points that compile and pass the gate, each asked once and remembered."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable

from ..codegen import space
from ..codegen.compile import Compiled, Drop, select
from ..codegen.emit import digest_of
from ..runtime.abi import state_block
from ..runtime.defaults import default_plan
from ..runtime.plan import PLAN_ROLES, Plan, Structure, Tile, Variant
from ..runtime.spec import Spec
from .candidates import Candidates, Compilation
from .errors import GateError
from .gpu_bench import GpuBench
from .progress import Event, Report
from .records import ROLE_MODES, Cell, Timing
from .store import Store


class Admission:
    """Takes points through the gate.

    Args:
        bench: Gates.
        store: Remembers what it said.
    """

    def __init__(self, bench: GpuBench, store: Store) -> None:
        self._bench, self._store = bench, store

    def refusal(self, spec: Spec, variants: Iterable[Variant]) -> str:
        """Why kernels may not be timed; empty if all have passed the gate."""
        return "; ".join(filter(None, (self._refusal(spec, variant) for variant in variants)))

    def _refusal(self, spec: Spec, variant: Variant) -> str:
        def ask() -> Timing:
            verdict = self._bench.gate(spec, gate_plan(spec, variant))
            if isinstance(verdict, Timing):
                return verdict
            return Timing(status="ok" if verdict.passed else "gate", reason=verdict.reason)

        cell, mode = Cell(spec, 1), ROLE_MODES[variant.structure.role]
        known = self._store.recall(cell, mode, variant.key, "gate", digests(cell, (variant,)), ask)
        return "" if known.status == "ok" else known.reason or known.status


class Preparation:
    """Points on their way through compiler and gate: those of one spec are timed while others compile.

    The GPU gates what is compiled while the processors compile what is not.

    Args:
        admission: Gates.
        compilation: Compiles.
        report: Is told of progress.
    """

    def __init__(self, admission: Admission, compilation: Compilation, report: Report) -> None:
        self._admission, self._compilation, self._report = admission, compilation, report
        self._waiting: collections.deque[Compiled] = collections.deque()
        self._refused: dict[tuple[Spec, Variant], str] = {}
        self._found: dict[Spec, Candidates] = {}

    def go_on(self) -> None:
        """Hand further points to compilers that have nothing to do; to be called often, it does not wait."""
        self._waiting += self._compilation.collect(block=False)

    def beside(self, report: Report) -> Report:
        """The same report, and compilers are kept busy by whoever reports."""

        def told(event: Event) -> None:
            report(event)
            self.go_on()

        return told

    def of(self, specs: Iterable[Spec]) -> dict[Spec, Candidates]:
        """Compiled and gated points of some specs; waits until all are there, and the default plans of all.

        Raises:
            GateError: A default plan, of whichever spec, does not run or is wrong: nothing can be compared
                with it, and no spec is timed before that is known.
        """
        wanted = tuple(specs)
        compilation = self._compilation
        # What is of other specs is gated only while there is nothing better to do.
        while (
            not compilation.defaults_back
            or not all(map(compilation.whole, wanted))
            or any(r.spec in wanted or r.variant in default_plan(r.spec).variants for r in self._waiting)
        ):
            if self._waiting:
                self._gate(self._waiting.popleft())
                self.go_on()
            else:
                self._waiting += compilation.collect()
            self._report(self._event())
        for spec in wanted:
            if spec not in self._found:
                self._found[spec] = self._passed(compilation.candidates(spec))
        return {spec: self._found[spec] for spec in wanted}

    def _event(self) -> Event:
        compilation = self._compilation
        if not compilation.done:
            return compilation.event()
        return Event("gate", compilation.back - len(self._waiting), compilation.total)

    def _gate(self, result: Compiled) -> None:
        spec, variant = result.spec, result.variant
        default = space.points(spec, variant.structure.role).default
        kept, dropped = select([result], self._compilation.gpu.limits, default)
        refusal = self._admission.refusal(spec, [variant]) if kept else dropped[0].detail or dropped[0].reason
        if kept:
            self._refused[spec, variant] = refusal
        if refusal and variant in default_plan(spec).variants:
            raise GateError(
                f"the default plan of {spec.key} cannot run here: {refusal}",
                hint="this is a fault of the default or of the compiler; report it with `plan --json`",
            )

    def _passed(self, candidates: Candidates) -> Candidates:
        """The same without what the gate has refused."""
        for role, variants in candidates.by_role.items():
            good = []
            for variant in variants:
                reason = self._refused[candidates.spec, variant]
                if reason:
                    candidates.dropped.append(Drop(variant, "gate", reason))
                    candidates.gate_failures.append(f"{candidates.spec.key} {variant.key}: {reason}")
                else:
                    good.append(variant)
            candidates.by_role[role] = good
        return candidates


def gate_plan(spec: Spec, variant: Variant) -> Plan:
    """The plan that takes one kernel through the gate: a branch needs a partner for the other one."""
    role = variant.structure.role
    if (role,) in PLAN_ROLES[spec.op]:
        return Plan((variant,))
    block = state_block(spec)
    branches = {
        "nonflush": Variant(Structure("nonflush"), Tile(16, min(64, block))),
        "flush": Variant(Structure("flush"), Tile(16, block, min(64, block))),
    }
    if spec.verifies:
        branches = {v.structure.role: v for v in default_plan(spec).variants}
    branches[role] = variant
    return Plan(tuple(branches.values()))


@functools.lru_cache(maxsize=16384)
def digests(cell: Cell, variants: tuple[Variant, ...]) -> str:
    """Of the modules of some kernels: what was measured of other ones is not known of them."""
    return "+".join(digest_of(cell.spec, variant.structure) for variant in variants)
