"""From reported times to latency models: robust, forgetting, and open about what it cannot tell.

Each interval adds one row a rank; ``terms`` fits fetch and compute, ``forms`` says what shape they
have. Terms that the rows do not tell apart (a fixed and a per-sample part when all batches had one
size) are named, and keep the last shape that the times showed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance import forms
from loft_hvd.balance.interval import (
    COMPUTE,
    FETCH,
    LOCAL,
    REMOTE,
    SIZE,
    STALL,
    Interval,
)
from loft_hvd.balance.latency import StepModel, queued_samples
from loft_hvd.balance.least_squares import LinearFit
from loft_hvd.balance.terms import TermFitter

__all__ = ["Fit", "Fitter"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_ROWS = 48
_POOR_NOISE = 0.30
_UNCLEAR = 0.10  # a term known no better than 10 % of the time cannot be told apart
_FETCH_TERMS = ("fetch_fixed_s", "local_s", "remote_s", "shared_s")
_COMPUTE_TERMS = ("compute_fixed_s", "compute_s")


@dataclass(frozen=True)
class Fit:
    """The models of all ranks and how well they are known.

    Attributes:
        model: the fitted times.
        fetch: fit of the fetch terms (fixed, local, remote, shared).
        compute: fit of the compute terms (fixed, sample), above the knee for saturating ranks.
        knee: samples below which compute does not get cheaper, 0 for a linear rank, [world_size].
        num_rows: rows of each rank that still count, [world_size].
        is_poor: ranks whose times no model explains, [world_size], bool.
        unclear: for each rank the terms that its rows do not tell apart.
    """

    model: StepModel
    fetch: LinearFit
    compute: LinearFit
    knee: Floats
    num_rows: Ints
    is_poor: npt.NDArray[np.bool_]
    unclear: tuple[tuple[str, ...], ...]

    def stderr(self, sizes: npt.ArrayLike) -> Floats:
        """Return the standard error of each rank's time at ``sizes``, seconds, [world_size]."""
        batch = np.asarray(sizes, dtype=np.float64)
        local = self.model.local(batch)
        fetch = self.fetch.stderr(_fetch_features(local, batch - local, self.model.source))
        compute = self.compute.stderr(forms.compute_features(batch, self.knee))
        is_hidden = self.model.fetch(local, batch - local) < self.model.compute(batch)
        overlap = self.model.overlap
        error: Floats = np.hypot(
            np.where(is_hidden, 1.0 - overlap, 1.0) * fetch,
            np.where(is_hidden, 1.0, 1.0 - overlap) * compute,
        )
        return error


class Fitter:
    """Rows of the last intervals and what was learnt from those before.

    Args:
        world_size: number of ranks.
        source: number of the shared source each rank fetches from, -1 for none, [world_size].
        hits: samples of a global batch that each rank is known to hold; NaN to learn them.
    """

    def __init__(
        self, world_size: int, *, source: npt.ArrayLike = -1, hits: npt.ArrayLike = np.nan
    ) -> None:
        self.source: Ints = np.broadcast_to(np.asarray(source, np.int64), world_size).copy()
        self._hits: Floats = np.broadcast_to(np.asarray(hits, np.float64), world_size).copy()
        self._rows: deque[Floats] = deque(maxlen=_NUM_ROWS)
        self._valid: deque[npt.NDArray[np.bool_]] = deque(maxlen=_NUM_ROWS)
        self._added = 0
        self._fetch, self._compute = TermFitter(world_size, 4), TermFitter(world_size, 2)
        self._knee = np.zeros(world_size)
        self.num_changes = np.zeros(world_size, np.int64)

    def add(self, interval: Interval) -> npt.NDArray[np.bool_]:
        """Take in an interval; returns the ranks that changed for good, [world_size], bool."""
        rows, valid = interval.rows, interval.valid
        is_slowest = interval.busy_s > 0.95 * interval.busy_s.max()
        changed = np.zeros(len(valid), bool)
        for fitter, features, column in (
            (self._fetch, _fetch_features(rows[:, LOCAL], rows[:, REMOTE], self.source), FETCH),
            (self._compute, forms.compute_features(rows[:, SIZE], self._knee), COMPUTE),
        ):
            changed |= fitter.watch(
                features,
                rows[:, column],
                sizes=rows[:, SIZE],
                valid=valid,
                is_slowest=is_slowest,
                row=self._added,
            )
        self._rows.append(rows)
        self._valid.append(valid)
        self._added += 1
        self.num_changes += changed
        return changed

    def fit(self) -> Fit | None:
        """Return the models, or None before any row."""
        if not self._rows:
            return None
        rows: Floats = np.stack(self._rows)  # [num_rows, world_size, 10]
        valid = np.stack(self._valid)
        weights = [part.weights(valid, self._added) for part in (self._fetch, self._compute)]
        seen: npt.NDArray[np.bool_] = np.any(valid, axis=0)
        fetch = self._fit_fetch(rows, weights[0])
        compute = self._fit_compute(rows, weights[1])
        num_rows = np.minimum(fetch.num_rows, compute.num_rows)
        shares = _seconds(rows, weights)
        is_poor = ~seen | (
            np.hypot(shares[0] * fetch.noise, shares[1] * compute.noise) > _POOR_NOISE
        )
        model = self._model(rows, weights, fetch, compute)
        unclear = self._unclear(rows[-1], fetch, compute, shares)
        return Fit(model, fetch, compute, self._knee.copy(), num_rows, is_poor, unclear)

    def _fit_fetch(self, rows: Floats, weights: Floats) -> LinearFit:
        features = _fetch_features(rows[..., LOCAL], rows[..., REMOTE], self.source)
        seconds = rows[..., FETCH]
        per_sample = _mean(seconds, weights) / np.maximum(_mean(rows[..., SIZE], weights), 1.0)
        start = np.stack([per_sample] * 4, axis=1) * (0.0, 1.0, 1.0, 0.0)
        shared = self.source >= 0
        if shared.any():  # what the source takes is taken to be queueing
            queued = _mean(features[..., 3], weights)
            waiting = per_sample * _mean(rows[..., REMOTE], weights) / np.maximum(queued, 1e-9)
            start[:, 3] = np.where(shared, waiting, 0.0)
            start[:, 2] = np.where(shared, 0.0, start[:, 2])
        return self._fetch.fit(
            features,
            seconds,
            sizes=rows[..., SIZE],
            weights=weights,
            start=start,
            rows=self._added,
        )

    def _fit_compute(self, rows: Floats, weights: Floats) -> LinearFit:
        size, seconds = rows[..., SIZE], rows[..., COMPUTE]
        steady = np.where(self._compute.is_fresh(self._added), 0.0, weights)
        knee = forms.choose_knee(size, seconds, steady, self._knee)  # a drift can look like a bend
        self._compute.forget_shape((knee > 0) != (self._knee > 0))
        self._knee = knee
        features = forms.compute_features(size, self._knee)
        per_sample = _mean(seconds, weights) / np.maximum(_mean(size, weights), 1.0)
        start = np.stack([np.zeros_like(per_sample), per_sample], axis=1)
        return self._compute.fit(
            features, seconds, sizes=size, weights=weights, start=start, rows=self._added
        )

    def _model(
        self, rows: Floats, weights: list[Floats], fetch: LinearFit, compute: LinearFit
    ) -> StepModel:
        share, hits = forms.fit_hits(rows[..., SIZE], rows[..., LOCAL], weights[0], self._hits)
        fixed, slope = compute.coefficients.T
        terms = dict(zip(_FETCH_TERMS, fetch.coefficients.T, strict=True))
        return StepModel(
            **terms,
            hit_share=share,
            hits=hits,
            compute_fixed_s=fixed - slope * self._knee,
            compute_s=slope,
            plateau_s=np.where(self._knee > 0, fixed, 0.0),
            overlap=forms.fit_overlap(
                rows[..., FETCH], rows[..., STALL], rows[..., COMPUTE], np.minimum(*weights)
            ),
            source=self.source,
        )

    def _unclear(
        self, row: Floats, fetch: LinearFit, compute: LinearFit, shares: tuple[Floats, Floats]
    ) -> tuple[tuple[str, ...], ...]:
        """Name the terms whose standard error is a tenth of the rank's time or more."""
        features = (
            _fetch_features(row[:, LOCAL], row[:, REMOTE], self.source),
            forms.compute_features(row[:, SIZE], self._knee),
        )
        names: list[list[str]] = [[] for _ in self.source]
        parts = ((fetch, _FETCH_TERMS), (compute, _COMPUTE_TERMS))
        for part, (terms, labels) in enumerate(parts):
            worth = np.maximum(terms.predict(features[part]), 1e-9)
            for k, label in enumerate(labels):
                error = np.sqrt(terms.covariance[:, k, k]) * features[part][:, k] / worth
                for rank in np.flatnonzero(error * shares[part] > _UNCLEAR):
                    names[rank].append(label)
        return tuple(tuple(of_rank) for of_rank in names)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and what was learnt from older ones, JSON-able."""
        return {
            "rows": [row.tolist() for row in self._rows],
            "valid": [valid.tolist() for valid in self._valid],
            "added": self._added,
            "fetch": self._fetch.state_dict(),
            "compute": self._compute.state_dict(),
            "knee": self._knee.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._rows = deque((np.array(row) for row in state["rows"]), maxlen=_NUM_ROWS)
        self._valid = deque((np.array(v, bool) for v in state["valid"]), maxlen=_NUM_ROWS)
        self._added = int(state["added"])
        self._fetch.load_state_dict(state["fetch"])
        self._compute.load_state_dict(state["compute"])
        self._knee = np.array(state["knee"])


def _fetch_features(local: Floats, remote: Floats, source: Ints) -> Floats:
    """Return (1, local, remote, queued) for counts [..., world_size], on a new last axis."""
    queued = queued_samples(remote, source)[0] if (source >= 0).any() else np.zeros_like(remote)
    return np.stack([np.ones_like(local), local, remote, queued], axis=-1)


def _mean(values: Floats, weights: Floats) -> Floats:
    mean: Floats = (weights * values).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-12)
    return mean


def _seconds(rows: Floats, weights: list[Floats]) -> tuple[Floats, Floats]:
    """Return the shares of fetch and compute in each rank's own work, [world_size] each."""
    fetch = _mean(rows[..., FETCH], weights[0])
    compute = _mean(rows[..., COMPUTE], weights[1])
    total = np.maximum(fetch + compute, 1e-12)
    return fetch / total, compute / total
