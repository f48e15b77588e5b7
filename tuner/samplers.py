"""Optuna samplers over a *listed* space: each legal point is proposed once, and nothing else.

Spaces of kernels are lists, not boxes: most combinations of axes do not exist. Samplers that
propose axes one by one meet illegal points and repeats; these choose among the points themselves.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from ..runtime.plan import Structure, Variant
from .records import axes

_Floats = npt.NDArray[np.float64]

_STRUCTURAL: Final = frozenset(field.name for field in dataclasses.fields(Structure))
_STARTUP_TRIALS: Final = 16


class SpaceSampler(BaseSampler):
    """Proposes the points of a space in their order. The other samplers override the choice.

    Args:
        variants: The points, of one role.
        seed: Of all random choices.

    Attributes:
        distributions: Categorical axes of the space, those with a single value left out; to be
            given to ``study.ask``.
    """

    def __init__(self, variants: Sequence[Variant], seed: int = 0) -> None:
        self._variants = tuple(variants)
        self._random = np.random.default_rng(seed)
        rows = [axes((variant,)) for variant in variants]
        names = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
        values = {name: tuple(sorted({row[name] for row in rows})) for name in names}
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values[name]) for name in names
        }
        self._rank = {name: {value: i for i, value in enumerate(values[name])} for name in names}
        self._codes = np.array([[self._rank[n][row[n]] for n in names] for row in rows], dtype=np.int32)
        # Another structure is another kernel, a tile's next value a small step.
        self._weights = np.array([4.0 if n.rpartition(".")[2] in _STRUCTURAL else 1.0 for n in names])
        self._parameters = [{n: row[n] for n in names} for row in rows]
        self._position = {variant: i for i, variant in enumerate(self._variants)}
        self._by_values = {tuple(p.values()): i for i, p in enumerate(self._parameters)}
        self._untried = np.ones(len(rows), dtype=bool)

    @property
    def exhausted(self) -> bool:
        """Whether every point has been proposed."""
        return not self._untried.any()

    def parameters(self, variant: Variant) -> dict[str, Any]:
        """Parameters of a point, which from now on counts as tried."""
        index = self._position[variant]
        self._untried[index] = False
        return dict(self._parameters[index])

    def variant(self, trial: optuna.Trial) -> Variant:
        """The point that a trial of this sampler stands for."""
        return self._variants[self._index(trial.params)]

    def nearest(self, variant: Variant) -> Variant:
        """The point with the most in common with a variant of another space."""
        if variant in self._position:
            return variant
        everything = np.ones(len(self._variants), dtype=bool)
        return self._variants[self._closest(axes((variant,)), everything)]

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All axes."""
        return self.distributions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Parameters of an untried point; Optuna calls this when it is asked.

        Raises:
            RuntimeError: Every point has been proposed (:attr:`exhausted`).
        """
        if self.exhausted:
            raise RuntimeError("every point of the space has been proposed; ask no more")
        return self.parameters(self._variants[self._choose(study, trial)])

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Never asked: the axes of a point belong together."""
        raise NotImplementedError(f"'{param_name}' is not an axis of this space")

    def _choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        return int(np.argmax(self._untried))

    def _index(self, parameters: Mapping[str, Any]) -> int:
        return self._by_values[tuple(parameters[name] for name in self._rank)]

    def _closest(self, values: Mapping[str, Any], among: npt.NDArray[np.bool_]) -> int:
        distance = np.zeros(len(self._variants))
        for column, (name, rank) in enumerate(self._rank.items()):
            code = rank.get(values[name]) if name in values else None
            if code is not None:
                steps = np.abs(self._codes[:, column] - code)
                distance += np.where(steps > 0, self._weights[column] + 0.25 * (steps - 1), 0.0)
        distance[~among] = np.inf
        return int(self._random.choice(np.flatnonzero(distance == distance.min())))


class SnappingSampler(SpaceSampler):
    """Takes another sampler's proposal to the nearest untried point.

    A repeat thereby becomes a step to a neighbour.

    Args:
        base: Proposes axes, not knowing which combinations exist.
    """

    def __init__(self, variants: Sequence[Variant], seed: int, base: BaseSampler) -> None:
        super().__init__(variants, seed)
        self._base = base

    def _choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        proposal = self._base.sample_relative(study, trial, self.distributions)
        if not proposal:  # too few trials for the base sampler
            return int(self._random.choice(np.flatnonzero(self._untried)))
        return self._closest(proposal, self._untried)


class ModelSampler(SpaceSampler):
    """Proposes the point of the largest expected improvement under a Gaussian process.

    The process is over the logarithm of time, its kernel exp(-sum of weighted axis distances)
    (ordinal axes, one weight each, fitted by likelihood). Since the points are listed, the
    improvement is computed for every candidate instead of searched for. Slow points are clipped:
    by how much they lose does not matter. Needs numpy only.
    """

    _CANDIDATES: Final = 2000
    _FIT_EVERY: Final = 8
    _FIT_STEPS: Final = 24

    def __init__(self, variants: Sequence[Variant], seed: int = 0) -> None:
        super().__init__(variants, seed)
        span = np.maximum(self._codes.max(axis=0), 1) if self._codes.size else 1
        self._points: _Floats = self._codes / span
        self._scales: _Floats = np.full(self._codes.shape[1], 0.5)
        self._noise = 0.01
        self._fitted_at = 0

    def _choose(self, study: optuna.Study, trial: FrozenTrial) -> int:
        candidates = np.flatnonzero(self._untried)
        told = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(told) < _STARTUP_TRIALS:
            return int(self._random.choice(candidates))
        if len(candidates) > self._CANDIDATES:
            candidates = self._random.choice(candidates, self._CANDIDATES, replace=False)
        seen = self._points[[self._index(t.params) for t in told]]
        values = np.array([t.value for t in told], dtype=np.float64)
        middle = float(np.median(values))
        values = np.minimum(values, 2 * middle - values.min())
        values = (values - values.mean()) / (values.std() + 1e-9)
        if len(told) - self._fitted_at >= self._FIT_EVERY:
            self._fit(seen, values)
            self._fitted_at = len(told)
        return int(candidates[np.argmax(self._improvement(self._points[candidates], seen, values))])

    def _improvement(self, points: _Floats, seen: _Floats, values: _Floats) -> _Floats:
        """Expected improvement over the best value, per point."""
        inverse = np.linalg.inv(_kernel(seen, seen, self._scales) + self._noise * np.eye(len(seen)))
        cross = _kernel(points, seen, self._scales)
        mean = cross @ (inverse @ values)
        variance = 1.0 - np.einsum("ij,ij->i", cross @ inverse, cross)
        deviation = np.sqrt(np.maximum(variance, 1e-9))
        gain = (values.min() - mean) / deviation
        density = np.exp(-gain * gain / 2) / np.sqrt(2 * np.pi)
        # Logistic approximation of the normal distribution function, good to 2e-4.
        exponent = np.clip(1.5976 * gain + 0.07056 * gain**3, -500, 500)
        improvement: _Floats = deviation * (gain / (1 + np.exp(-exponent)) + density)
        return improvement

    def _fit(self, seen: _Floats, values: _Floats) -> None:
        """Improve scales and noise by a short random walk on the likelihood."""
        best = _misfit(seen, values, self._scales, self._noise)
        for _ in range(self._FIT_STEPS):
            moved = self._random.random(len(self._scales)) < 0.4
            steps = np.where(moved, self._random.normal(0, 0.7, len(self._scales)), 0.0)
            scales = np.clip(self._scales * np.exp(steps), 0.01, 10)
            noise = float(np.clip(self._noise * np.exp(self._random.normal(0, 0.5)), 1e-4, 0.5))
            misfit = _misfit(seen, values, scales, noise)
            if misfit < best:
                best, self._scales, self._noise = misfit, scales, noise


def _kernel(a: _Floats, b: _Floats, scales: _Floats) -> _Floats:
    distance = np.zeros((len(a), len(b)))
    for column, scale in enumerate(scales):
        distance += scale * np.abs(a[:, column, None] - b[None, :, column])
    return np.exp(-distance)


def _misfit(seen: _Floats, values: _Floats, scales: _Floats, noise: float) -> float:
    """Negative log likelihood, the amplitude fitted, up to a constant."""
    factor = np.linalg.cholesky(_kernel(seen, seen, scales) + noise * np.eye(len(seen)))
    amplitude = float(np.square(np.linalg.solve(factor, values)).mean())
    return 0.5 * len(values) * float(np.log(amplitude)) + float(np.log(np.diag(factor)).sum())


def _tpe(variants: Sequence[Variant], seed: int) -> SpaceSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        base = TPESampler(multivariate=True, n_startup_trials=_STARTUP_TRIALS, seed=seed)
    return SnappingSampler(variants, seed, base)


SAMPLERS: Final[dict[str, Callable[[Sequence[Variant], int], SpaceSampler]]] = {
    "enumerate": SpaceSampler,
    "model": ModelSampler,
    "tpe": _tpe,
    "random": lambda variants, seed: SnappingSampler(variants, seed, RandomSampler(seed)),
}
"""Samplers by name: ``model`` finds the most per point; ``tpe`` and ``random`` are there to compare."""
