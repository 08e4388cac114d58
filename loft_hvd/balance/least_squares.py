"""Robust non-negative least squares for every rank at once: seconds from a few features.

Residuals are relative (noise on a time grows with the time). Huber's weights keep rows that stand
alone from bending the fit, and a weak pull towards prior coefficients decides what the data leave
open.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LinearFit", "fit_times", "solve_nonnegative"]

Floats = npt.NDArray[np.float64]

_HUBER = 2.5  # standard deviations from both neighbours beyond which a row counts less
_ROUNDS = 3
_LEAST_NOISE = 0.002
_GUESSED_NOISE = 0.02  # before any rank has three rows
_TINY_S = 1e-7


@dataclass(frozen=True)
class LinearFit:
    """Coefficients of every rank.

    Attributes:
        coefficients: seconds for one of each feature, [world_size, num_features], >= 0.
        covariance: of the coefficients, [world_size, num_features, num_features].
        noise: relative scatter of the times about the fit, [world_size].
        loss: weighted sum of squared relative residuals, [world_size].
        num_rows: rows the fit could use, [world_size].
    """

    coefficients: Floats
    covariance: Floats
    noise: Floats
    loss: Floats
    num_rows: npt.NDArray[np.int64]

    def predict(self, features: Floats) -> Floats:
        """Return seconds for features [..., world_size, num_features]."""
        seconds: Floats = (features * self.coefficients).sum(axis=-1)
        return seconds

    def stderr(self, features: Floats) -> Floats:
        """Return the standard error of ``predict`` for features [world_size, num_features]."""
        variance = np.einsum("ni,nij,nj->n", features, self.covariance, features)
        error: Floats = np.sqrt(np.maximum(variance, 0.0))
        return error

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients and how well they are known, JSON-able."""
        return {item.name: getattr(self, item.name).tolist() for item in fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LinearFit:
        """Return the fit that ``state_dict`` was taken of."""
        return cls(**{name: np.array(values) for name, values in state.items()})


def solve_nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Minimise ``c' gram c / 2 - moment' c`` over c >= 0 for every rank, by trying all supports.

    Args:
        gram: positive definite, [world_size, k, k].
        moment: [world_size, k].

    Returns:
        c, [world_size, k].
    """
    k = moment.shape[1]
    best, least = np.zeros_like(moment), np.zeros(len(moment))
    used = np.abs(moment).max(axis=0, initial=0.0) > 0
    for size in range(k, 0, -1):
        for support in itertools.combinations(np.flatnonzero(used), size):
            chosen = np.array(support)
            part = np.linalg.solve(gram[:, chosen[:, None], chosen], moment[:, chosen, None])
            value = -0.5 * (part[..., 0] * moment[:, chosen]).sum(axis=1)
            better = (part[..., 0] >= 0).all(axis=1) & (value < least)
            if better.any():
                full = np.zeros_like(moment)
                full[:, chosen] = part[..., 0]
                best = np.where(better[:, None], full, best)
                least = np.where(better, value, least)
        if (best[:, used] > 0).all():
            break  # the free optimum is inside everywhere
    return best


def fit_times(
    features: Floats,
    seconds: Floats,
    *,
    sizes: Floats,
    weights: Floats,
    prior: Floats,
    prior_spread: Floats,
) -> LinearFit:
    """Fit ``seconds = features @ coefficients`` for every rank.

    Args:
        features: >= 0, [num_rows, world_size, k].
        seconds: measured, [num_rows, world_size].
        sizes: samples of the batch, [num_rows, world_size]; only rows of like size can show that
            one of them stands alone.
        weights: how much each measurement counts, 0 to leave it out, [num_rows, world_size].
        prior: coefficients to stay near where the data say little, [world_size, k].
        prior_spread: standard deviation of what each prior term adds, as a share of the time,
            [world_size].

    Returns:
        The fit; ranks without a row get the prior.
    """
    scale = np.maximum(seconds, _TINY_S)
    relative = features / scale[..., None]
    total = np.maximum(weights.sum(axis=0), 1e-12)
    # What one unit of a coefficient is worth in relative time: the metric of the prior.
    metric = np.square(np.einsum("wn,wnk->nk", weights, relative) / total[:, None])
    metric = np.maximum(metric, 1e-18)
    noise = np.full(len(total), 0.02)
    trust = weights
    neighbours = _neighbours(weights > 0)
    coefficients, residuals, gram = prior, np.zeros_like(seconds), np.zeros(0)
    for _ in range(_ROUNDS):
        pull = np.square(noise / prior_spread)[:, None] * metric
        weighted = trust[..., None] * relative
        gram = np.einsum("wni,wnj->nij", weighted, relative)
        gram[:, np.arange(prior.shape[1]), np.arange(prior.shape[1])] += pull
        moment = weighted.sum(axis=0) + pull * prior
        coefficients = solve_nonnegative(gram, moment)
        residuals = np.where(weights > 0, 1.0 - (relative * coefficients).sum(axis=-1), 0.0)
        noise, alone = _scatter(residuals, sizes, weights, neighbours)
        trust = weights * np.minimum(1.0, _HUBER * noise / np.maximum(alone, 1e-12))
    covariance = np.square(noise)[:, None, None] * np.linalg.inv(gram)
    return LinearFit(
        coefficients=coefficients,
        covariance=covariance,
        noise=noise,
        loss=(trust * np.square(residuals)).sum(axis=0),
        num_rows=(weights > 0).sum(axis=0),
    )


def _neighbours(counts: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the last counting row before each row and the first after it; -1 for none."""
    row = np.arange(len(counts))[:, None]
    upto = np.maximum.accumulate(np.where(counts, row, -1), axis=0)
    beyond = np.minimum.accumulate(np.where(counts, row, len(counts))[::-1], axis=0)[::-1]
    edge = np.full((1, counts.shape[1]), -1)
    before = np.concatenate([edge, upto[:-1]])
    after = np.concatenate([beyond[1:], edge])
    return before, np.where(after == len(counts), -1, after)


def _scatter(
    residuals: Floats,
    sizes: Floats,
    weights: Floats,
    neighbours: tuple[npt.NDArray[np.int64], ...],
) -> tuple[Floats, Floats]:
    """Return the noise of each rank [world_size], and how far each row stands alone.

    Both come from differences between neighbouring rows, so that a drift is not taken for noise
    and the first rows after a change are not taken for outliers.
    """
    gaps = []
    for neighbour in neighbours:
        index = np.maximum(neighbour, 0)
        other = np.take_along_axis(residuals, index, axis=0)
        is_alike = np.abs(np.take_along_axis(sizes, index, axis=0) - sizes) <= 0.05 * sizes
        known = (neighbour >= 0) & (weights > 0) & is_alike
        gaps.append(np.where(known, np.abs(residuals - other), np.nan))
    alone = np.fmin(*gaps)
    alone = np.where(np.isnan(alone), 0.0, alone)
    before = gaps[0]
    order = np.argsort(before, axis=0)  # NaN last
    ordered = np.take_along_axis(before, order, axis=0)
    mass = np.where(np.isnan(before), 0.0, weights)
    reached = np.cumsum(np.take_along_axis(mass, order, axis=0), axis=0)
    middle = np.minimum((reached < 0.5 * reached[-1]).sum(axis=0), len(before) - 1)
    num_gaps = (mass > 0).sum(axis=0)
    median = np.where(num_gaps > 0, ordered[middle, np.arange(before.shape[1])], 0.0)
    own = np.square(1.4826 * median) / 2.0
    told = num_gaps >= 2
    common = float(np.median(own[told])) if told.any() else _GUESSED_NOISE**2
    noise = np.sqrt((num_gaps * own + 2.0 * common) / (num_gaps + 2.0))
    return np.maximum(noise, _LEAST_NOISE), alone
