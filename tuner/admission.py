"""What may be timed: points that compile and pass the gate, each asked once and remembered."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

from ..codegen import space
from ..codegen.compile import Drop, select
from ..codegen.emit import digest_of
from ..codegen.pool import CompilePool
from ..codegen.targets import Gpu
from ..runtime.abi import state_block
from ..runtime.defaults import default_plan
from ..runtime.plan import PLAN_ROLES, Plan, Structure, Tile, Variant
from ..runtime.spec import Spec
from .candidates import Candidates, compile_candidates
from .errors import GateError
from .gpu_bench import GpuBench
from .progress import Report
from .records import ROLE_MODES, Cell, Timing
from .store import Store


class Admission:
    """Takes points through compiler and gate.

    Args:
        bench: Gates.
        store: Remembers what it said.
    """

    def __init__(self, bench: GpuBench, store: Store) -> None:
        self._bench, self._store = bench, store

    def candidates(
        self,
        jobs: Sequence[tuple[Spec, Variant]],
        pool: CompilePool,
        gpu: Gpu,
        report: Report,
        until_s: float = math.inf,
    ) -> dict[Spec, Candidates]:
        """Compile and gate points; the pool's caches are those of the bench.

        Args:
            jobs: The points, likeliest first.
            pool: Compiles.
            gpu: Whose limits hold.
            report: Is told of progress.
            until_s: See :func:`.compile_candidates`.

        Raises:
            GateError: A default plan is numerically wrong: nothing can be compared with it.
        """
        found: dict[Spec, Candidates] = {}
        refused: dict[tuple[Spec, Variant], str] = {}
        # The GPU gates what is compiled while the processors compile what is not.
        for result in compile_candidates(jobs, pool, gpu, found, report, until_s):
            keep = space.points(result.spec, result.variant.structure.role).default
            kept, _ = select([result], gpu.limits, keep)
            if kept:
                refused[result.spec, result.variant] = self.refusal(result.spec, [result.variant])
        for candidates in found.values():
            for role, variants in candidates.by_role.items():
                good = []
                for variant in variants:
                    reason = refused[candidates.spec, variant]
                    if reason:
                        candidates.dropped.append(Drop(variant, "gate", reason))
                        candidates.gate_failures.append(f"{candidates.spec.key} {variant.key}: {reason}")
                    else:
                        good.append(variant)
                candidates.by_role[role] = good
            for default in default_plan(candidates.spec).variants:
                if default in candidates.by_role[default.structure.role]:
                    continue
                why = next(
                    (d.detail or d.reason for d in candidates.dropped if d.variant == default), "dropped"
                )
                raise GateError(
                    f"the default plan of {candidates.spec.key} cannot run here: {why}",
                    hint="this is a fault of the default or of the compiler; report it with `plan --json`",
                )
        return found

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
