"""From reported times to latency models: robust, forgetting, and open about what it cannot tell.

Each interval adds one row a rank. Evidence chooses the form of a rank's times: does its device
saturate, do its local samples run out or make up a share of any batch, how much does overlap hide?
``regression`` fits fetch and compute in that form. Terms that the rows do not tell apart (a fixed
and a per-sample part when all batches had one size) are named, and keep the last shape that the
times showed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import (
    COLUMNS,
    COMPUTE,
    COMPUTE_ERROR,
    FETCH,
    FETCH_ERROR,
    LOCAL,
    REMOTE,
    SIZE,
    SKEW,
    STALL,
    STEPS,
    Interval,
)
from loft_hvd.balance.latency import StepModel, count_passes, queued_samples, typical_longest
from loft_hvd.balance.plan import Bools, Floats, Ints, RankBools, RankFloats
from loft_hvd.balance.regression import SPREAD, LinearFit, TermFitter, TimedRows, fit_times
from loft_hvd.codec import Count, Shape, Size

__all__ = ["Fit", "Fitter", "Gain", "Past"]

_FETCH_TERMS = ("fetch_fixed_s", "local_s", "remote_s", "shared_s")
_COMPUTE_TERMS = ("compute_fixed_s", "compute_s")

# "Measured" as in regression.py: docs/balance.md, "The constants".
_NUM_ROWS = 48  # the oldest counts 0.95 ** 48 = 9 %; measured: twice as many make the same plans
_POOR_NOISE = 0.30  # of a rank's time: what no model explains; measured
_UNCLEAR = 0.10  # a term known no better than 10 % of the time cannot be told apart
_KNEES = 12  # tried between the least and the largest batch, 11 % apart at 4:1; measured
_EVIDENCE = 6.0  # gain in -2 log likelihood: chance alone brings it once in 70 times; measured
_SPAN = 1.2  # sizes must span this ratio before a form can be told; measured: p95 +4.1 % with 1.05
_SNAP = 0.03  # so near to 0 or 1, overlap is taken for it: noise alone does as much; measured
_NORMAL_FIFTH = 0.8416  # standard deviations beyond which a fifth of normal times lies
_MOST_SKEW = 2.0  # beyond it a step has no usual length
_COUNTS_FADE = 0.65  # a row: counts are exact, so three rows will do; measured

_Rows = Annotated[Floats, Shape("world_size", len(COLUMNS))]


@dataclass(frozen=True)
class Fit:
    """The models of all ranks and how well they are known; arrays are [world_size]."""

    model: StepModel  # the fitted times
    fetch: LinearFit  # of the fetch terms: fixed, local, remote, shared
    compute: LinearFit  # of the compute terms: fixed, sample; above the knee where there is one
    knee: Floats  # samples below which compute does not get cheaper, 0 for a linear rank
    num_rows: Ints  # that still count
    is_poor: Bools  # no model explains the rank's times
    unclear: tuple[tuple[str, ...], ...]  # for each rank the terms that its rows do not tell apart

    # Standard deviations of a single step about the usual one, as shares of the time, and the
    # seconds that they were.
    fetch_spread: tuple[Floats, Floats]
    compute_spread: tuple[Floats, Floats]
    skew: float  # of single steps, of all ranks alike (``typical_longest``)

    def _shown(self, sizes: npt.ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
        """Return features of fetch and compute [world_size, k], and what of each part shows.

        The longer part counts in full, the shorter by what overlap does not hide of it.
        """
        batch = np.asarray(sizes, dtype=np.float64)
        local = self.model.local(batch)
        passes = count_passes(batch, self.model.pass_size)
        is_hidden = self.model.fetch(local, batch - local) < self.model.compute(batch)
        shown = 1.0 - self.model.overlap
        return (
            _fetch_features(local, batch - local, self.model.source),
            passes[:, None] * _compute_features(batch / passes, self.knee),
            np.where(is_hidden, shown, 1.0),
            np.where(is_hidden, 1.0, shown),
        )

    def stderr(self, sizes: npt.ArrayLike) -> Floats:
        """Return the standard error of each rank's time at ``sizes``, seconds, [world_size].

        Only noise is counted. How a time depends on the batch may be wrong too, but likely in the
        same way for all ranks.
        """
        fetch, compute, fetch_shown, compute_shown = self._shown(sizes)
        fetch_s = fetch_shown * self.fetch.noise_error(fetch)
        return np.hypot(fetch_s, compute_shown * self.compute.noise_error(compute))

    def deviation(self, sizes: npt.ArrayLike) -> Floats:
        """Return the standard deviation of each rank's single steps, seconds, [world_size]."""
        fetch, compute, fetch_shown, compute_shown = self._shown(sizes)
        # Fetching varies with how many samples happen to be local: the smaller the batch the less,
        # but the larger not the more. Computing varies in proportion.
        share, seconds = self.fetch_spread
        fetch_s = np.minimum(share * self.fetch.predict(fetch), seconds)
        compute_s = self.compute_spread[0] * self.compute.predict(compute)
        spread: Floats = np.hypot(fetch_shown * fetch_s, compute_shown * compute_s)
        return spread

    def promise(self, sizes: npt.ArrayLike, *, are_new: bool = True) -> tuple[float, Floats]:
        """Return the mean step with ``sizes`` [world_size], less aggregation, and chances.

        A step waits for the rank that happens to be longest in it, so its mean is above the
        longest mean, by more where more ranks are about as long. Sizes that ``are_new`` are chosen
        for times that are estimates: there the errors are part of what ranks differ by.
        The chances, [world_size], are those of each rank to be the longest.
        """
        error = self.stderr(sizes) if are_new else 0.0
        deviation = np.hypot(self.deviation(sizes), error)
        return typical_longest(self.model.times(sizes), deviation, self.skew)

    def gain(self, now: npt.ArrayLike, then: npt.ArrayLike) -> Gain:
        """Return what a step should take with sizes ``now`` and ``then`` [world_size]."""
        sides = []
        for sizes, are_new in ((now, False), (then, True)):
            step_s, chance = self.promise(sizes, are_new=are_new)
            fetch, compute, fetch_shown, compute_shown = self._shown(sizes)
            slopes = [
                (chance * shown)[:, None] * features  # [world_size, k]
                for shown, features in ((fetch_shown, fetch), (compute_shown, compute))
            ]
            sides.append((step_s, slopes))
        (now_s, now_slopes), (then_s, then_slopes) = sides
        # By how much the gain is wrong when a coefficient is: errors that both sides share cancel.
        # Again only noise counts: what no row tells before sizes change, waiting does not tell.
        variance = 0.0
        for part, before, after in zip(
            (self.fetch, self.compute), now_slopes, then_slopes, strict=True
        ):
            slope = before - after
            variance += float(np.einsum("ni,nij,nj->", slope, part.sampling, slope))
        aggregate_s = self.model.aggregate_s
        return Gain(now_s + aggregate_s, then_s + aggregate_s, float(np.sqrt(max(variance, 0.0))))


@dataclass(frozen=True)
class Gain:
    """What a change of sizes should bring, in seconds of a step."""

    now_s: float
    then_s: float
    error_s: float  # the standard error of ``now_s - then_s``

    @property
    def share(self) -> float:
        """Share of the step that the change should save; below 0 where it should cost."""
        return 1.0 - self.then_s / self.now_s

    @property
    def error(self) -> float:
        """The standard error of ``share``."""
        return self.error_s / self.now_s


@dataclass
class Past:
    """What a fitter knows: rows of the last intervals, and what was learnt from those before."""

    fetch: Annotated[TermFitter, Size(num_terms=len(_FETCH_TERMS))]
    compute: Annotated[TermFitter, Size(num_terms=len(_COMPUTE_TERMS))]
    knee: RankFloats  # as in the newest ``Fit``
    rows: Annotated[list[_Rows], Shape("num_rows")]
    valid: Annotated[list[RankBools], Shape("num_rows")]  # usable
    added: Count  # rows so far

    @classmethod
    def of(cls, world_size: int) -> Past:
        """Return the past of a run that begins."""
        fetch, compute = (
            TermFitter.of(world_size, len(terms)) for terms in (_FETCH_TERMS, _COMPUTE_TERMS)
        )
        return cls(fetch, compute, np.zeros(world_size), [], [], 0)


class Fitter:
    """Fits the models of all ranks to what it has seen, going on from ``past``, if any.

    ``source`` is the shared source each rank fetches from, -1 for none, [world_size]. What
    computing takes is fitted by the backward pass, of ``pass_size`` samples at most, [world_size].
    """

    def __init__(
        self,
        world_size: int,
        *,
        source: npt.ArrayLike = -1,
        pass_size: npt.ArrayLike = np.inf,
        past: Past | None = None,
    ) -> None:
        self.source: Ints = np.broadcast_to(np.asarray(source, np.int64), world_size).copy()
        self.pass_size: Floats = np.broadcast_to(np.asarray(pass_size, np.float64), world_size)
        self.past = Past.of(world_size) if past is None else past

    def add(self, interval: Interval) -> Bools:
        """Take in an interval; returns the ranks that changed for good, [world_size], bool."""
        past, rows, valid = self.past, interval.rows, interval.valid
        changed = np.zeros(len(valid), bool)
        fetch = _fetch_features(rows[:, LOCAL], rows[:, REMOTE], self.source)
        size, compute_s, compute_error_s = self._of_a_pass(rows)
        for fitter, features, seconds, errors, sizes in (
            (past.fetch, fetch, rows[:, FETCH], rows[:, FETCH_ERROR], rows[:, SIZE]),
            (past.compute, _compute_features(size, past.knee), compute_s, compute_error_s, size),
        ):
            changed |= fitter.watch(
                features,
                seconds,
                errors=errors,
                sizes=sizes,
                valid=valid,
                step_s=float(interval.busy_s.max()),
                row=past.added,
            )
        past.rows = [*past.rows, rows][-_NUM_ROWS:]
        past.valid = [*past.valid, valid][-_NUM_ROWS:]
        past.added += 1
        return changed

    def _of_a_pass(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        """Return samples, compute seconds and their error of a pass, [..., world_size] each."""
        passes = count_passes(rows[..., SIZE], self.pass_size)
        size, seconds, error = (rows[..., at] / passes for at in (SIZE, COMPUTE, COMPUTE_ERROR))
        return size, seconds, error

    def fit(self) -> Fit | None:
        """Return the models, or None before any row."""
        past = self.past
        if not past.rows:
            return None
        rows: Floats = np.stack(past.rows)  # [num_rows, world_size, len(COLUMNS)]
        valid = np.stack(past.valid)  # [num_rows, world_size], as the weights of either part
        weights = [part.weights(valid, past.added) for part in (past.fetch, past.compute)]
        seen: Bools = np.any(valid, axis=0)
        fetch = self._fit_fetch(rows, weights[0])
        compute = self._fit_compute(rows, weights[1])
        num_rows = np.minimum(fetch.num_rows, compute.num_rows)
        shares = _seconds(rows, weights)
        noise = np.hypot(shares[0] * fetch.noise, shares[1] * compute.noise)
        # Of fewer rows only their own errors are known, and those are weighed with each gain.
        is_poor = ~seen | ((num_rows >= 3) & (noise > _POOR_NOISE))
        model = self._model(rows, weights, valid, fetch, compute)
        unclear = self._unclear(rows[-1], fetch, compute, shares)
        skew = _skew(rows[..., SKEW], np.minimum(*weights))
        spreads = (
            _spread(rows, weights[0], (FETCH, FETCH_ERROR), skew),
            _spread(rows, weights[1], (COMPUTE, COMPUTE_ERROR), skew),
        )
        return Fit(
            model, fetch, compute, past.knee.copy(), num_rows, is_poor, unclear, *spreads, skew
        )

    def _fit_fetch(self, rows: Floats, weights: Floats) -> LinearFit:
        features = _fetch_features(rows[..., LOCAL], rows[..., REMOTE], self.source)
        seconds = rows[..., FETCH]
        per_sample = _mean(seconds, weights) / np.maximum(_mean(rows[..., SIZE], weights), 1.0)
        start = np.stack([per_sample] * 4, axis=1) * (0.0, 1.0, 1.0, 0.0)  # [world_size, terms]
        shared = self.source >= 0
        if shared.any():  # what the source takes is taken to be queueing
            queued = _mean(features[..., 3], weights)
            waiting = per_sample * _mean(rows[..., REMOTE], weights) / np.maximum(queued, 1e-9)
            start[:, 3] = np.where(shared, waiting, 0.0)
            start[:, 2] = np.where(shared, 0.0, start[:, 2])
        measured = TimedRows(features, seconds, rows[..., FETCH_ERROR], rows[..., SIZE], weights)
        start = np.where(start > 0, _in_common(measured, start), 0.0)
        return self.past.fetch.fit(measured, start=start, added=self.past.added)

    def _fit_compute(self, rows: Floats, weights: Floats) -> LinearFit:
        past = self.past
        size, seconds, errors = self._of_a_pass(rows)
        steady = np.where(past.compute.is_fresh(past.added), 0.0, weights)
        knee = _choose_knee(size, seconds, steady, past.knee)  # a drift can look like a bend
        past.compute.forget_shape((knee > 0) != (past.knee > 0))
        past.knee = knee
        features = _compute_features(size, knee)
        per_sample = _mean(seconds, weights) / np.maximum(_mean(size, weights), 1.0)
        start = np.stack([np.zeros_like(per_sample), per_sample], axis=1)
        measured = TimedRows(features, seconds, errors, size, weights)
        return past.compute.fit(measured, start=start, added=past.added)

    def _model(
        self,
        rows: Floats,
        weights: list[Floats],
        valid: Bools,
        fetch: LinearFit,
        compute: LinearFit,
    ) -> StepModel:
        knee = self.past.knee
        # Counts stay true when a rank's speed changes.
        share, hits = _fit_hits(rows[..., SIZE], rows[..., LOCAL], valid.astype(np.float64))
        fixed, slope = compute.coefficients.T
        terms = dict(zip(_FETCH_TERMS, fetch.coefficients.T, strict=True))
        return StepModel(
            **terms,
            hit_share=share,
            hits=hits,
            compute_fixed_s=fixed - slope * knee,  # of the straight line: fitted above the knee
            compute_s=slope,
            plateau_s=np.where(knee > 0, fixed, 0.0),
            overlap=_fit_overlap(
                rows[..., FETCH], rows[..., STALL], rows[..., COMPUTE], np.minimum(*weights)
            ),
            source=self.source,
            pass_size=self.pass_size,
        )

    def _unclear(
        self, row: Floats, fetch: LinearFit, compute: LinearFit, shares: tuple[Floats, Floats]
    ) -> tuple[tuple[str, ...], ...]:
        """Name the terms whose standard error is a tenth of the rank's time or more."""
        features = (
            _fetch_features(row[:, LOCAL], row[:, REMOTE], self.source),
            _compute_features(self._of_a_pass(row)[0], self.past.knee),
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


def _in_common(rows: TimedRows, start: Floats) -> Floats:
    """Return the terms that explain the times of all ranks together best, [num_terms].

    A rank's rows at one size do not tell what a sample from elsewhere costs; ranks that have other
    shares of such samples do. A term that is 0 in ``start``, [world_size, num_terms], is not the
    rank's; what no rank tells stays what it is there for the median rank.
    """
    weights = rows.weights
    means = np.stack([_mean(values, weights) for values in np.moveaxis(rows.features, -1, 0)])
    error = np.sqrt(_mean(np.square(rows.errors), weights))
    seconds = _mean(rows.seconds, weights)
    ranks = TimedRows(  # each rank is a row of one that stands for all
        np.where(start > 0, means.T, 0.0)[:, None],
        seconds[:, None],
        error[:, None],
        _mean(rows.sizes, weights)[:, None],
        (seconds > 0)[:, None].astype(np.float64),  # a rank that fetches nothing has no share in it
    )
    known = np.where(start > 0, start, np.nan)
    prior = np.array([np.nanmedian(term) if (term > 0).any() else 0.0 for term in known.T])
    fitted = fit_times(ranks, prior=prior[None], prior_spread=np.array([SPREAD]))
    common: Floats = fitted.coefficients[0]
    return common


def _compute_features(size: Floats, knee: Floats) -> Floats:
    """Return (1, samples above the knee) on a new last axis; a knee of 0 is the linear form."""
    return np.stack([np.ones_like(size), np.maximum(size - knee, 0.0)], axis=-1)


def _choose_knee(size: Floats, seconds: Floats, weights: Floats, now: Floats) -> Floats:
    """Choose where each rank's device saturates, or 0 where a straight line explains as much.

    ``size``, compute ``seconds`` and ``weights`` are [num_rows, world_size]; the knees returned and
    those of ``now``, kept where the sizes do not span enough to tell, [world_size].
    """
    counts = weights > 0
    most = np.where(counts, size, 0.0).max(axis=0)
    least = np.where(counts, size, np.inf).min(axis=0)
    can_tell = (counts.sum(axis=0) >= 4) & (most > _SPAN * least)
    if not can_tell.any():
        return now
    low = np.where(can_tell, least, 1.0)
    ratio = np.where(can_tell, most / low, 1.0)
    steps = np.linspace(0.0, 1.0, _KNEES + 2)[1:-1, None]  # neither end: no row lies beyond it
    knees = np.concatenate([np.zeros((1, len(now))), low * ratio**steps])  # [1 + knees, world_size]
    loss = np.stack([_line_loss(np.maximum(size - knee, 0.0), seconds, weights) for knee in knees])
    best = loss.argmin(axis=0)
    rows = np.maximum(weights.sum(axis=0), 1.0)
    floor = 1e-6 * rows  # what no measurement resolves is no evidence
    # Twice the log likelihood ratio of two forms with normal noise: rows * log(loss / loss).
    gain = rows * np.log((loss[0] + floor) / (loss.min(axis=0) + floor))
    bends = gain > np.where(now > 0, 0.5, 1.0) * _EVIDENCE  # leaving a form takes evidence too
    chosen = np.where(bends, knees[best, np.arange(len(now))], 0.0)
    return np.where(can_tell, chosen, now)


def _line_loss(feature: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the weighted squared relative residuals of a line with slope >= 0, [world_size]."""
    scale = weights / np.square(np.maximum(seconds, 1e-9))
    total = np.maximum(scale.sum(axis=0), 1e-300)
    mean_x, mean_y = (scale * feature).sum(axis=0) / total, (scale * seconds).sum(axis=0) / total
    dx, dy = feature - mean_x, seconds - mean_y
    variance = (scale * dx * dx).sum(axis=0)
    slope = np.maximum((scale * dx * dy).sum(axis=0) / np.maximum(variance, 1e-300), 0.0)
    loss: Floats = (scale * np.square(dy - slope * dx)).sum(axis=0)
    return loss


def _fit_hits(size: Floats, local: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Fit ``local = min(hit_share * size, hits)``: home-first reading, or a share of any batch.

    ``size``, ``local`` and ``weights`` are [num_rows, world_size], ``hit_share`` and ``hits``
    [world_size]; ``hits`` is infinite where nothing was remote so far.
    """
    ran_out = np.where(local < 0.995 * size, weights, 0.0)  # rows whose local samples ran out
    ran_out = ran_out * _COUNTS_FADE ** np.arange(len(size))[::-1, None]  # a cache may be filling
    rows = ran_out.sum(axis=0)
    mean = (ran_out * local).sum(axis=0) / np.maximum(rows, 1e-300)
    share = (ran_out * local).sum(axis=0) / np.maximum((ran_out * size).sum(axis=0), 1e-300)
    # Which is steadier over the sizes seen: the count, or its share of the batch?
    miss_fixed = (ran_out * np.square(local - mean)).sum(axis=0)
    miss_share = (ran_out * np.square(local - share * size)).sum(axis=0)
    is_share = (rows > 0) & (miss_share < 0.5 * miss_fixed)
    hits = np.where(rows > 0, mean, np.inf)
    return np.where(is_share, share, 1.0), np.where(is_share, np.inf, hits)


def _fit_overlap(fetch: Floats, stall: Floats, compute: Floats, weights: Floats) -> Floats:
    """Return the share of the shorter of fetch and compute that was hidden, [world_size].

    ``fetch - stall`` is what overlap hid; a rank with nothing to hide counts as serial.
    """
    shorter = (weights * np.minimum(fetch, compute)).sum(axis=0)
    hidden = (weights * np.clip(fetch - stall, 0.0, None)).sum(axis=0)
    overlap = np.clip(hidden / np.maximum(shorter, 1e-9), 0.0, 1.0)
    overlap = np.where(overlap < _SNAP, 0.0, overlap)
    return np.where(overlap > 1.0 - _SNAP, 1.0, overlap)


def _fetch_features(local: Floats, remote: Floats, source: Ints) -> Floats:
    """Return (1, local, remote, queued) for counts [..., world_size], on a new last axis."""
    queued = queued_samples(remote, source)[0] if (source >= 0).any() else np.zeros_like(remote)
    return np.stack([np.ones_like(local), local, remote, queued], axis=-1)


def _spread(
    rows: Floats, weights: Floats, columns: tuple[int, int], skew: float
) -> tuple[Floats, Floats]:
    """Return standard deviations of a single step, as a share and in seconds, [world_size] each.

    ``columns`` are those of the times and of their standard errors.
    """
    times, errors = (rows[..., column] for column in columns)
    # The error of an interval's mean is that of a step over the root of its steps.
    variance = _mean(np.square(errors) * rows[..., STEPS], weights)  # [world_size]
    num_steps = (weights * rows[..., STEPS]).sum(axis=0)
    share = variance / np.square(np.maximum(_mean(times, weights), 1e-9))
    shrunk, seconds = (_shrink(known, num_steps, skew) for known in (share, variance))
    return np.sqrt(shrunk), np.sqrt(seconds)


def _shrink(variance: Floats, num_steps: Floats, skew: float) -> Floats:
    """Draw variances of ranks together as far as chance explains that they differ.

    Where the longest rank counts, the largest of many estimates would be taken for a noisy rank
    (the moderated variances of Smyth, 2004). ``variance`` and ``num_steps`` are [world_size].
    """
    known = (variance > 0) & (num_steps > 0)
    if known.sum() < 2:
        return variance
    logs = np.log(np.where(known, variance, 1.0))
    # That of the logarithm of a variance as ``typical`` has it, measured over 20 and 60 steps.
    chance = (4.6 + 7.3 * skew**2) / np.maximum(num_steps, 1.0)
    differ = max(float(logs[known].var(ddof=1) - chance[known].mean()), 0.0)
    middle = float(np.median(logs[known]))
    drawn = middle + (logs - middle) * differ / (differ + chance)
    return np.where(known, np.exp(drawn), variance)


def _skew(skewness: Floats, weights: Floats) -> float:
    """Return the skew of all ranks' single steps; both arguments are [num_rows, world_size].

    An interval of 20 steps tells a rank's only to a half. So the median of all that is known is
    taken, which a few ranks, or intervals with many long steps, do not move.
    """
    known = skewness[(weights > 0) & (skewness > 0)]
    if not known.size:
        return 0.0
    # Bent by g, a normal quantile z lies at (exp(g z) - 1) / g: two at z and -z are exp(g z) apart.
    return float(np.clip(np.log(np.median(known)) / _NORMAL_FIFTH, 0.0, _MOST_SKEW))


def _mean(values: Floats, weights: Floats) -> Floats:
    mean: Floats = (weights * values).sum(axis=0) / np.maximum(weights.sum(axis=0), 1e-12)
    return mean


def _seconds(rows: Floats, weights: list[Floats]) -> tuple[Floats, Floats]:
    """Return the shares of fetch and compute in each rank's own work, [world_size] each."""
    fetch = _mean(rows[..., FETCH], weights[0])
    compute = _mean(rows[..., COMPUTE], weights[1])
    total = np.maximum(fetch + compute, 1e-12)
    return fetch / total, compute / total
