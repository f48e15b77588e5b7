"""The golden trajectories: steps with drafts of both families, kept as files."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.paths import DATA


def vectors(family: str) -> dict[str, Tensor]:
    """Inputs, states and outputs of a family's trajectory, by name."""
    with np.load(DATA / f"{family}.npz") as data:
        return {name: torch.from_numpy(data[name]) for name in data}
