"""Calls of what materialises states through the public ops, on the scenes of the gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from replayssm_tune.runtime import ops
from replayssm_tune.runtime.spec import Spec
from replayssm_tune.tuner import folds
from tests.runtime.calls import cache_of

MATERIALIZE: dict[str, Callable[..., None]] = {"mamba2": ops.mamba2_materialize, "gdn": ops.gdn_materialize}


@dataclass
class Fold(folds.Fold):
    """A call that can be made."""

    def given(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of the call."""
        given: dict[str, Any] = {"source": self.source, "destination": self.destination}
        given |= {"prefix": self.prefix, "window": self.spec.window}
        given |= cache_of(self.pool, self.spec).tensors()
        if self.spec.family == "mamba2":
            given["A"] = self.A
        return given | changes

    def call(self, **changes: Any) -> None:
        """Call the public op of the family."""
        MATERIALIZE[self.spec.family](**self.given(**changes))


def fold(spec: Spec, rows: int, heads: int, device: str = "cpu", **options: Any) -> Fold:
    """A legal call; see :func:`replayssm_tune.tuner.folds.fold`."""
    return Fold(**vars(folds.fold(spec, rows, heads, device, **options)))
