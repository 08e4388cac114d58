"""The terms of one part of a rank's time (its fetch, or its compute) over a run.

A fit looks at recent rows only. What older rows taught about the *shape* of the time (how much of
it is fixed, how much comes with each sample) is kept as an anchor, taken whenever the sizes varied
enough to show it; the recent rows set the level. Before any such evidence the anchor is "all of it
comes with the samples". Two rows in a row that leave the prediction on the same side, at an
unchanged size, mean that the rank has changed: older rows are dropped, and the shape is trusted
while the level follows, until no row has been a surprise for a while.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.least_squares import LinearFit, fit_times

__all__ = ["TermFitter"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_FORGETTING, _FRESH_FORGETTING = 0.95, 0.5  # a rank that changes may go on changing
_FRESH = 8  # rows after a change
# What a term of the anchor may be wrong by, as a share of the time: [seen no evidence, seen some]
_SPREAD, _FRESH_SPREAD = (0.5, 0.2), (0.2, 0.05)
_SHOWS_SHAPE = 0.05  # relative standard deviation of the sizes
_CHANGE_SIGMAS, _LEAST_CHANGE = 3.0, 0.04
_OBVIOUS = 0.22  # log ratio at which the step's slowest rank has changed without a second row
_UNSET = -1.0  # stands for NaN in a state


class TermFitter:
    """Fits one part for all ranks and watches for changes.

    Args:
        world_size: number of ranks.
        num_terms: features of the part.
    """

    def __init__(self, world_size: int, num_terms: int) -> None:
        self._since = np.zeros(world_size, np.int64)  # first row that counts
        self._streak = np.zeros(world_size)  # log ratio of the last row, if it was surprising
        self._missteps = np.zeros(world_size, np.int64)  # surprises in a row at a new size
        self._last_size = np.zeros(world_size)
        self._anchor = np.full((world_size, num_terms), np.nan)
        self._noise = np.full(world_size, np.nan)  # slow average, not disturbed by a change
        self._fitted: LinearFit | None = None

    def watch(
        self,
        features: Floats,
        seconds: Floats,
        *,
        sizes: Floats,
        valid: Bools,
        is_slowest: Bools,
        row: int,
    ) -> Bools:
        """Compare a new row with what was expected of it; returns the ranks that have changed.

        Args:
            features: of the row, [world_size, num_terms].
            seconds: measured, [world_size].
            sizes: samples, [world_size].
            valid: ranks with a measurement, [world_size].
            is_slowest: ranks that held the step up, [world_size].
            row: number of the row.
        """
        changed = np.zeros(len(seconds), bool)
        if self._fitted is not None:
            fitted = self._fitted
            expected = np.maximum(fitted.predict(features), 1e-9)
            ratio = np.log(np.maximum(seconds, 1e-9) / expected)
            noise = np.fmin(self._noise, fitted.noise)
            error = fitted.stderr(features) / expected * noise / fitted.noise
            limit = np.maximum(_CHANGE_SIGMAS * np.hypot(noise, error), _LEAST_CHANGE)
            is_same_size = np.abs(sizes - self._last_size) <= 0.05 * sizes
            counts = valid & (seconds > 1e-6)
            surprise = np.where(counts & (np.abs(ratio) > limit), ratio, 0.0)
            is_fresh = self.is_fresh(row)
            twice = (surprise * self._streak > 0) & is_same_size
            # A step to another size that keeps missing says that the shape is wrong, not the level.
            missed = np.where(surprise != 0, self._missteps + 1, 0)
            self._missteps = np.where(counts & ~is_same_size, missed, self._missteps)
            at_once = (surprise > _OBVIOUS) & is_slowest & is_same_size
            at_once |= is_fresh & (surprise != 0) & (is_same_size | (self._missteps < 2))
            at_once &= ~twice
            self._since = np.where(twice, row - 1, np.where(at_once, row, self._since))
            changed = twice | at_once
            watched = counts & is_same_size
            self._streak = np.where(watched, np.where(changed, 0.0, surprise), self._streak)
        self._last_size = np.where(valid, sizes, self._last_size)
        return changed

    def is_fresh(self, rows: int) -> Bools:
        """Return the ranks that changed within the last rows; ``rows`` were added so far."""
        fresh: Bools = (self._since > 0) & (rows - self._since <= _FRESH)
        return fresh

    def weights(self, valid: Bools, rows: int) -> Floats:
        """Return how much each row counts, [num_rows, world_size], as ``valid``.

        Args:
            valid: rows with a measurement.
            rows: number of rows added so far; the last of ``valid`` is the newest.
        """
        index = np.arange(rows - len(valid), rows)[:, None]
        fade = np.where(self.is_fresh(rows), _FRESH_FORGETTING, _FORGETTING)
        weights: Floats = np.where(valid & (index >= self._since), fade ** (rows - 1 - index), 0.0)
        return weights

    def forget_shape(self, ranks: Bools) -> None:
        """Drop the anchor of ranks whose form has changed."""
        self._anchor[ranks] = np.nan

    def fit(
        self,
        features: Floats,
        seconds: Floats,
        *,
        sizes: Floats,
        weights: Floats,
        start: Floats,
        rows: int,
    ) -> LinearFit:
        """Fit the terms of every rank.

        Args:
            features: [num_rows, world_size, num_terms].
            seconds: [num_rows, world_size].
            sizes: samples, [num_rows, world_size].
            weights: as from ``weights``.
            start: anchor of ranks without evidence, [world_size, num_terms].
            rows: number of rows added so far.
        """
        has_shape = ~np.isnan(self._anchor[:, 0])
        anchor = np.where(has_shape[:, None], self._anchor, start)
        total = np.maximum(weights.sum(axis=0), 1e-12)
        level = (weights * seconds).sum(axis=0)
        expected = (weights * (features * anchor).sum(axis=-1)).sum(axis=0)
        anchor = anchor * np.where(expected > 0, level / np.maximum(expected, 1e-12), 1.0)[:, None]
        spread = np.where(has_shape, _SPREAD[1], _SPREAD[0])
        fresh = np.where(has_shape, _FRESH_SPREAD[1], _FRESH_SPREAD[0])
        is_doubted = self._missteps >= 2
        spread, fresh = (np.where(is_doubted, _SPREAD[0], known) for known in (spread, fresh))
        fitted = fit_times(
            features,
            seconds,
            sizes=sizes,
            weights=weights,
            prior=anchor,
            prior_spread=np.where(self.is_fresh(rows), fresh, spread),
        )
        slow = self._noise + 0.1 * (np.fmin(fitted.noise, 0.2) - self._noise)
        self._noise = np.where(np.isnan(slow), fitted.noise, slow)
        mean = (weights * sizes).sum(axis=0) / total
        variance = (weights * np.square(sizes - mean)).sum(axis=0) / total
        shows = (np.sqrt(variance) > _SHOWS_SHAPE * mean) & (fitted.num_rows >= 3)
        shows &= ~self.is_fresh(rows) | is_doubted
        self._anchor = np.where(shows[:, None], fitted.coefficients, self._anchor)
        self._fitted = fitted
        return fitted

    def state_dict(self) -> dict[str, Any]:
        """Return anchor, noise and watch, JSON-able."""
        return {
            "since": self._since.tolist(),
            "streak": self._streak.tolist(),
            "missteps": self._missteps.tolist(),
            "last_size": self._last_size.tolist(),
            "anchor": np.where(np.isnan(self._anchor), _UNSET, self._anchor).tolist(),
            "noise": np.where(np.isnan(self._noise), _UNSET, self._noise).tolist(),
            "fitted": None if self._fitted is None else self._fitted.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._since, self._streak = np.array(state["since"]), np.array(state["streak"])
        self._missteps = np.array(state["missteps"])
        self._last_size = np.array(state["last_size"])
        anchor, noise = np.array(state["anchor"]), np.array(state["noise"])
        self._anchor = np.where(anchor < 0, np.nan, anchor)
        self._noise = np.where(noise < 0, np.nan, noise)
        fitted = state.get("fitted")
        self._fitted = None if fitted is None else LinearFit.from_state_dict(fitted)
