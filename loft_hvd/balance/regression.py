"""The terms of one part of a rank's time (its fetch, or its compute), for every rank at once.

``fit_times`` is one fit: non-negative least squares on relative residuals (noise on a time grows
with the time). Huber's weights keep rows that stand alone from bending it, and a weak pull towards
prior coefficients decides what the data leave open. How much noise there is, rows tell by their own
standard errors at first, and by how they scatter later.

``TermFitter`` is the fits of a run. A fit looks at recent rows only. What older rows taught about
the *shape* of the time (how much of it is fixed, how much comes with each sample) is kept as an
anchor, taken whenever the sizes varied enough to show it; the recent rows set the level. Before any
such evidence the anchor is "all of it comes with the samples". One row at an unchanged size that
leaves the prediction by a lot, or two in a row on the same side by less, mean that the rank has
changed: either happens by chance once in 10,000 rows. Older rows are dropped then, and the shape is
trusted while the level follows, until no row has been a surprise for a while.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from loft_hvd.balance.plan import Bools, Floats, Ints, RankBools, RankFloats, RankInts
from loft_hvd.codec import Shape

__all__ = ["SPREAD", "LinearFit", "TermFitter", "TimedRows", "fit_times"]

# "Measured" means: halved and doubled over random clusters. docs/balance.md, "The constants", has
# the figures; where it says nothing else, the mean step moved by less than 0.3 %.

# One fit.
_HUBER = 2.5  # sigmas beyond which a row counts less: 1.2 % of normal noise lies there
_ROUNDS = 3  # of Huber's weights; measured: six rounds make the same plans
_LEAST_NOISE = 0.002  # keeps a run without noise from taking each rounding for a surprise
_GUESSED_NOISE = 0.02  # of rows that come without a standard error; measured
_MODEL_ERROR = 0.03  # no model is nearer to the truth: rows known better than that count alike
_TINY_S = 1e-7  # no clock resolves less: keeps a division by zero out
_ALIKE = 0.05  # sizes that differ by at most this share count as one size

# The fits of a run.
_FORGETTING = 0.95  # a row, so that half the weight lies on the last 14; measured
_FRESH_FORGETTING = 0.5  # a rank that changes may go on changing; measured: with 0.95 p95 +0.6 %
_FRESH = 8  # rows after a change, when the change itself counts 0.5 ** 8; measured
# What a term of the anchor may be wrong by, as a share of the time, without and with evidence for
# its shape. After a change the level follows and the shape is trusted. Measured: p95 +0.4 % with
# twice the fresh ones.
SPREAD, _SHAPED_SPREAD = 0.5, 0.2
_FRESH_SPREAD, _FRESH_SHAPED_SPREAD = 0.2, 0.05
_SHOWS_SHAPE = 0.05  # relative standard deviation of sizes that shows a shape; measured
# Standard deviations that tell a change, by one row and by the second of two on the same side: of
# normal noise either is 1e-4, as 2 * 5e-5 lie beyond 3.89 and 2 * 0.00707**2 = 1e-4 beyond 2.45.
_BY_ONE, _BY_TWO = 3.89, 2.45
_LEAST_CHANGE = 0.04  # of the step, a little more than the dead band: less is worth no plan
_DOUBTS = 2  # surprises in a row at new sizes after which the shape is doubted


@dataclass(frozen=True)
class TimedRows:
    """Measurements of one part; all but the features are [num_rows, world_size]."""

    features: Floats  # >= 0, [num_rows, world_size, k]
    seconds: Floats
    errors: Floats  # the standard errors of the seconds, 0 when unknown
    sizes: Floats  # samples; only rows of like size can show that one of them stands alone
    weights: Floats  # how much each measurement counts, 0 to leave it out


@dataclass(frozen=True)
class LinearFit:
    """Coefficients of every rank."""

    # Seconds for one of each feature, >= 0.
    coefficients: Annotated[Floats, Shape("world_size", "num_terms")]
    covariance: Annotated[Floats, Shape("world_size", "num_terms", "num_terms")]  # of these
    # The part of it that is noise of the rows: more rows make it less.
    sampling: Annotated[Floats, Shape("world_size", "num_terms", "num_terms")]
    noise: RankFloats  # relative scatter of the times about the fit
    num_rows: RankInts  # rows the fit could use

    def predict(self, features: Floats) -> Floats:
        """Return seconds for features [..., world_size, num_features]."""
        seconds: Floats = (features * self.coefficients).sum(axis=-1)
        return seconds

    def stderr(self, features: Floats) -> Floats:
        """Return the standard error of ``predict`` for features [world_size, num_features]."""
        return _error(features, self.covariance)

    def noise_error(self, features: Floats) -> Floats:
        """Return the part of ``stderr`` that comes from noise of the rows, likewise."""
        return _error(features, self.sampling)


def _error(features: Floats, covariance: Floats) -> Floats:
    variance = np.einsum("ni,nij,nj->n", features, covariance, features)
    error: Floats = np.sqrt(np.maximum(variance, 0.0))
    return error


def _solve_nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Minimise ``c' gram c / 2 - moment' c`` over c >= 0 for every rank, by trying all supports.

    ``gram`` [world_size, k, k] is positive definite, ``moment`` and c are [world_size, k]. There
    are at most four terms, so at most fifteen supports.
    """
    k = moment.shape[1]
    best, least = np.zeros_like(moment), np.zeros(len(moment))
    used = np.abs(moment).max(axis=0, initial=0.0) > 0
    for size in range(k, 0, -1):
        for support in itertools.combinations(np.flatnonzero(used), size):
            chosen = np.array(support)
            # Indexing by a column and a row of the support cuts its block out of each rank's gram:
            # [world_size, size, size] x [world_size, size, 1].
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


def fit_times(rows: TimedRows, *, prior: Floats, prior_spread: Floats) -> LinearFit:
    """Fit ``seconds = features @ coefficients`` for every rank; one without a row gets the prior.

    Coefficients stay near the ``prior`` [world_size, k] where the data say little; its
    ``prior_spread`` [world_size] is the standard deviation of what each term adds, as a share of
    the time.
    """
    weights = rows.weights
    relative = rows.features / np.maximum(rows.seconds, _TINY_S)[..., None]
    total = np.maximum(weights.sum(axis=0), 1e-12)
    # What one unit of a coefficient is worth in relative time: the metric of the prior.
    metric = np.square(np.einsum("wn,wnk->nk", weights, relative) / total[:, None])
    metric = np.maximum(metric, 1e-18)
    # What a row may be wrong by, as a share. A row counts by its precision: an interval in which
    # few samples came from elsewhere can be uncertain to a third, and another one to a hundredth.
    error = np.where(rows.errors > 0, rows.errors / np.maximum(rows.seconds, _TINY_S), 0.0)
    error = np.where(error > 0, error, _GUESSED_NOISE)
    precision = 1.0 / (np.square(error) + _MODEL_ERROR**2)
    precision *= total / np.maximum((weights * precision).sum(axis=0), 1e-12)  # 1 on average
    told = np.sqrt((weights * precision * np.square(error)).sum(axis=0) / total)
    told = np.where(weights.any(axis=0), told, _GUESSED_NOISE)  # [world_size], of a row counting 1
    noise = np.maximum(told, _LEAST_NOISE)
    weights = weights * precision
    trust = weights
    neighbours = _neighbours(weights > 0)
    coefficients, residuals, gram = prior, np.zeros_like(weights), np.zeros(0)
    data = np.zeros(0)
    for _ in range(_ROUNDS):
        # A ridge towards the prior: as a Bayesian would weigh a prior of that spread against rows
        # of that noise. [world_size, k]
        pull = np.square(noise / prior_spread)[:, None] * metric
        weighted = trust[..., None] * relative
        data = np.einsum("wni,wnj->nij", weighted, weighted)
        gram = np.einsum("wni,wnj->nij", weighted, relative)
        gram[:, np.arange(prior.shape[1]), np.arange(prior.shape[1])] += pull
        moment = weighted.sum(axis=0) + pull * prior
        coefficients = _solve_nonnegative(gram, moment)
        residuals = np.where(weights > 0, 1.0 - (relative * coefficients).sum(axis=-1), 0.0)
        scaled = residuals * np.sqrt(precision)
        noise, alone = _scatter(scaled, rows.sizes, weights, neighbours, told)
        trust = weights * np.minimum(1.0, _HUBER * noise / np.maximum(alone, 1e-12))
    inverse, variance = np.linalg.inv(gram), np.square(noise)[:, None, None]
    return LinearFit(
        coefficients=coefficients,
        covariance=variance * inverse,
        sampling=variance * inverse @ data @ inverse,
        noise=noise,
        num_rows=(weights > 0).sum(axis=0),
    )


def _neighbours(counts: Bools) -> tuple[Ints, Ints]:
    """Return the last counting row before each row and the first after it; -1 for none.

    For one rank, with rows 0 and 3 that do not count::

        counts   0  1  1  0  1
        upto    -1  1  2  2  4     the last counting row, this one included
        before  -1 -1  1  2  2     so for each row the one above
        after    1  2  4  4 -1     the same from the other end
    """
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
    neighbours: tuple[Ints, Ints],
    told: Floats,
) -> tuple[Floats, Floats]:
    """Return the noise of each rank [world_size], and how far each row stands alone.

    Both come from differences between neighbouring rows, so that a drift is not taken for noise and
    the first rows after a change are not taken for outliers. What rows have ``told`` of their
    noise, [world_size], counts as two differences.
    """
    gaps = []  # to the row before and to the row after, each [num_rows, world_size]
    for neighbour in neighbours:
        index = np.maximum(neighbour, 0)
        other = np.take_along_axis(residuals, index, axis=0)
        is_alike = np.abs(np.take_along_axis(sizes, index, axis=0) - sizes) <= _ALIKE * sizes
        known = (neighbour >= 0) & (weights > 0) & is_alike
        gaps.append(np.where(known, np.abs(residuals - other), np.nan))
    alone = np.fmin(*gaps)
    alone = np.where(np.isnan(alone), 0.0, alone)
    before = gaps[0]
    # The weighted median of the gaps: the first at which the running weight reaches half.
    order = np.argsort(before, axis=0)  # NaN last
    ordered = np.take_along_axis(before, order, axis=0)
    mass = np.where(np.isnan(before), 0.0, weights)
    reached = np.cumsum(np.take_along_axis(mass, order, axis=0), axis=0)
    middle = np.minimum((reached < 0.5 * reached[-1]).sum(axis=0), len(before) - 1)
    num_gaps = (mass > 0).sum(axis=0)
    median = np.where(num_gaps > 0, ordered[middle, np.arange(before.shape[1])], 0.0)
    # 1.4826 median absolute deviations are a standard deviation of normal noise; a difference of
    # two rows has twice the variance of one.
    own = np.square(1.4826 * median) / 2.0
    noise = np.sqrt((num_gaps * own + 2.0 * np.square(told)) / (num_gaps + 2.0))
    return np.maximum(noise, _LEAST_NOISE), alone


@dataclass
class TermFitter:
    """Fits one part for all ranks and watches for changes; arrays but the anchor [world_size]."""

    since: RankInts  # first row that counts
    streak: RankFloats  # log ratio of the last row to what was expected, 0 unless surprising
    missteps: RankInts  # surprises in a row at a new size
    has_misstepped: RankBools  # the last row was one
    last_size: RankFloats  # samples
    # Terms as last shown by the sizes, NaN before.
    anchor: Annotated[Floats, Shape("world_size", "num_terms")]
    noise: RankFloats  # slow average of the relative noise, not disturbed by a change
    fitted: LinearFit | None = None  # the newest fit

    @classmethod
    def of(cls, world_size: int, num_terms: int) -> TermFitter:
        """Return one that knows nothing of ``num_terms`` features."""
        return cls(
            since=np.zeros(world_size, np.int64),
            streak=np.zeros(world_size),
            missteps=np.zeros(world_size, np.int64),
            has_misstepped=np.zeros(world_size, bool),
            last_size=np.zeros(world_size),
            anchor=np.full((world_size, num_terms), np.nan),
            noise=np.full(world_size, np.nan),
        )

    def watch(
        self,
        features: Floats,
        seconds: Floats,
        *,
        errors: Floats,
        sizes: Floats,
        valid: Bools,
        step_s: float,
        row: int,
    ) -> Bools:
        """Compare a new row with what was expected of it; returns the ranks that have changed.

        ``features`` is [world_size, num_terms], all else [world_size]; ``errors`` are those of the
        ``seconds``, ``valid`` ranks have a measurement, the longest rank took ``step_s``, and
        ``row`` is the number of the row.
        """
        is_same_size = np.abs(sizes - self.last_size) <= _ALIKE * sizes
        self.last_size = np.where(valid, sizes, self.last_size)
        fitted = self.fitted
        if fitted is None:
            return np.zeros(len(seconds), bool)
        expected = np.maximum(fitted.predict(features), 1e-9)
        ratio = np.log(np.maximum(seconds, 1e-9) / expected)
        noise = np.fmin(self.noise, fitted.noise)
        error = fitted.stderr(features) / expected * noise / fitted.noise
        own = np.maximum(noise, errors / expected)  # a short interval is less certain than others
        deviation = np.hypot(own, error)
        counts = valid & (seconds > 1e-6)
        counts &= np.abs(seconds - expected) > _LEAST_CHANGE * step_s
        by_one, by_two = (
            counts & (np.abs(ratio) > sigmas * deviation) for sigmas in (_BY_ONE, _BY_TWO)
        )
        surprise = np.where(by_two, ratio, 0.0)  # signed
        twice = (surprise * self.streak > 0) & is_same_size  # on the same side
        # A step to another size that keeps missing says that the shape is wrong, not the level.
        missed = np.where(surprise != 0, self.missteps + 1, 0)
        self.missteps = np.where(counts & ~is_same_size, missed, self.missteps)
        at_once = by_one & is_same_size
        may_go_on = is_same_size | (self.missteps < _DOUBTS)
        at_once |= self.is_fresh(row) & (surprise != 0) & may_go_on
        at_once &= ~twice
        # Of two surprising rows the first already belongs to what the rank is now.
        self.since = np.where(twice, row - 1, np.where(at_once, row, self.since))
        changed: Bools = twice | at_once
        # A run of surprises that began with another size may be the shape's fault as well: a rank
        # whose level drifted while its size was changed has taught a wrong one.
        self.forget_shape(changed & self.has_misstepped)
        self.has_misstepped = np.where(counts & ~is_same_size, surprise != 0, False)
        watched = counts & is_same_size
        self.streak = np.where(watched, np.where(changed, 0.0, surprise), self.streak)
        return changed

    def is_fresh(self, added: int) -> Bools:
        """Return the ranks that changed within the last rows, of which ``added`` came so far."""
        fresh: Bools = (self.since > 0) & (added - self.since <= _FRESH)
        return fresh

    def weights(self, valid: Bools, added: int) -> Floats:
        """Return how much each of the last rows counts; ``valid`` have a measurement.

        Both are [num_rows, world_size]; ``added`` rows came so far, the last of these included.
        """
        index = np.arange(added - len(valid), added)[:, None]  # of each row, from the run's first
        fade = np.where(self.is_fresh(added), _FRESH_FORGETTING, _FORGETTING)
        weights: Floats = np.where(valid & (index >= self.since), fade ** (added - 1 - index), 0.0)
        return weights

    def forget_shape(self, ranks: Bools) -> None:
        """Drop the anchor of ranks whose form has changed."""
        self.anchor[ranks] = np.nan

    def fit(self, rows: TimedRows, *, start: Floats, added: int) -> LinearFit:
        """Fit the terms of every rank to the last ``rows``, as weighted by ``weights``.

        ``start``, [world_size, num_terms], is the anchor of ranks without evidence; ``added`` rows
        came so far.
        """
        weights, sizes = rows.weights, rows.sizes
        has_shape = ~np.isnan(self.anchor[:, 0])
        anchor = np.where(has_shape[:, None], self.anchor, start)
        total = np.maximum(weights.sum(axis=0), 1e-12)
        # The recent rows set the level: the anchor's terms, all multiplied alike.
        level = (weights * rows.seconds).sum(axis=0)
        expected = (weights * (rows.features * anchor).sum(axis=-1)).sum(axis=0)
        anchor = anchor * np.where(expected > 0, level / np.maximum(expected, 1e-12), 1.0)[:, None]
        spread = np.where(has_shape, _SHAPED_SPREAD, SPREAD)
        fresh = np.where(has_shape, _FRESH_SHAPED_SPREAD, _FRESH_SPREAD)
        is_doubted = self.missteps >= _DOUBTS
        spread, fresh = (np.where(is_doubted, SPREAD, known) for known in (spread, fresh))
        is_fresh = self.is_fresh(added)
        fitted = fit_times(rows, prior=anchor, prior_spread=np.where(is_fresh, fresh, spread))
        slow = self.noise + 0.1 * (np.fmin(fitted.noise, 0.2) - self.noise)  # over ten rows
        self.noise = np.where(np.isnan(slow), fitted.noise, slow)
        mean = (weights * sizes).sum(axis=0) / total
        variance = (weights * np.square(sizes - mean)).sum(axis=0) / total
        shows = (np.sqrt(variance) > _SHOWS_SHAPE * mean) & (fitted.num_rows >= 3)
        # While a rank is changing, a drift of its level can look like a shape.
        shows &= ~is_fresh | is_doubted
        self.anchor = np.where(shows[:, None], fitted.coefficients, self.anchor)
        self.fitted = fitted
        return fitted
