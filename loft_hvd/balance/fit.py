"""From reported times to latency models: what the contests of all ranks foretell.

Each interval adds one row a rank. Two contests foretell what fetching and computing take
(``contest``). What counts tell at once, counts tell: do local samples run out or make up a share of
any batch, how much does overlap hide, how do single steps vary, how often does a rank that is as
fast as now shift to another pace, and below which batch does a device compute no faster?
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.contest import Contest, Outlook
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
from loft_hvd.balance.plan import Bools, Floats, Ints, RankBools, RankFloats, RankInts
from loft_hvd.codec import Shape, Size

__all__ = ["Fit", "Fitter", "Gain", "Past"]

_FETCH_TERMS = ("fetch_fixed_s", "local_s", "remote_s", "shared_s")
_COMPUTE_TERMS = ("compute_fixed_s", "compute_s")

_NUM_ROWS = 16  # kept, of which the oldest counts a third
_FADE = 0.93  # of a row's weight, an interval
_UNCLEAR = 0.10  # a term known no better than 10 % of the time cannot be told apart
_SNAP = 0.03  # so near to 0 or 1, overlap is taken for it: noise alone does as much
_NORMAL_FIFTH = 0.8416  # standard deviations beyond which a fifth of normal times lies
_MOST_SKEW = 2.0  # beyond it a step has no usual length
_MOST_GAIN = 0.9  # of a step: no more is promised by what plans before have kept
_COUNTS_FADE = 0.65  # a row: counts are exact, so three rows will do; measured

# Cuts that save nothing show a knee. Times are the same within so much, or two standard errors; a
# cut is of so much of the batch, and of twice that. Measured: docs/balance.md.
_CUTS, _SAME, _CUT = 2, 0.025, 0.12
_MOVED = 0.1  # a rank that takes so much more or less than then may have no knee there any more
_FADING = 0.99  # of a knee is left after an interval: what is believed for long is tried again

# Intervals in which shifts of pace are counted. A rank that was as fast as now, within so much of
# the logarithm of its level, has shifted where it is farther off the next time.
_TRACKED, _NEAR = 64, 0.2
_ALIKE = 0.2  # likewise of two batches: at others the model may be wrong of the size
_UNSEEN = 12  # intervals more in which it stayed: one shift in a short run is an accident
_MOST_CHANCE = 0.9  # that some rank shifts
# Of shifts those that come most often count, each of which takes a forecast of all ranks.
_MOST_SHIFTS, _MOST_FORECASTS = 16, 1024

_Rows = Annotated[Floats, Shape("world_size", len(COLUMNS))]
_Passes = tuple[Floats, Floats, Floats]  # samples, seconds and their errors, [world_size] each
_Track = Annotated[Floats, Shape("world_size", 2)]  # samples, and busy seconds: 0 where not known


@dataclass(frozen=True)
class Fit:
    """The models of all ranks and how well they are known; arrays are [world_size]."""

    model: StepModel  # the fitted times
    fetch: Outlook  # of the fetch terms: fixed, local, remote, shared
    compute: Outlook  # of the compute terms: fixed, sample
    knee: Floats  # samples of a pass below which computing takes no less; 0 where none is known
    is_poor: Bools  # nothing is known of the rank's times
    unclear: tuple[tuple[str, ...], ...]  # for each rank the terms that its rows do not tell apart

    # Standard deviations of a single step about the usual one, as shares of the time, and the
    # seconds that they were.
    fetch_spread: tuple[Floats, Floats]
    compute_spread: tuple[Floats, Floats]
    skew: float  # of single steps, of all ranks alike (``typical_longest``)

    # Chances that the next interval finds a rank faster, or slower, and its times there over those
    # here, [2, world_size] each: as often, and as far, as it has shifted so far from where it is.
    shifts: tuple[Floats, Floats]

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
            passes[:, None] * _compute_features(np.maximum(batch / passes, self.knee)),
            np.where(is_hidden, shown, 1.0),
            np.where(is_hidden, 1.0, shown),
        )

    def stderr(self, sizes: npt.ArrayLike) -> Floats:
        """Return the standard error of each rank's time at ``sizes``, seconds, [world_size].

        That of the level alone: how a time depends on the batch is trusted as far as sizes may go.
        """
        fetch, compute, fetch_shown, compute_shown = self._shown(sizes)
        fetch_s = fetch_shown * self.fetch.level_error * self.fetch.predict(fetch)
        compute_s = compute_shown * self.compute.level_error * self.compute.predict(compute)
        return np.hypot(fetch_s, compute_s)

    def term_errors(self, rank: int) -> dict[str, float]:
        """Return the standard errors of a rank's terms, seconds, by the terms' names."""
        parts = ((self.fetch, _FETCH_TERMS), (self.compute, _COMPUTE_TERMS))
        return {
            name: math.sqrt(max(float(variance), 0.0))
            for part, names in parts
            for name, variance in zip(names, part.covariance[rank].diagonal(), strict=True)
        }

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

    def promise(self, sizes: npt.ArrayLike, *, with_errors: bool = True) -> tuple[float, Floats]:
        """Return the mean step with ``sizes`` [world_size], less aggregation, and chances.

        A step waits for the rank that happens to be longest in it, so its mean is above the
        longest mean, by more where more ranks are about as long. And a rank may shift to another
        pace, as it did before: one at a time, as if they never did so together. Who chooses sizes
        counts ``with_errors``: times are estimates, and their errors are part of what ranks may
        differ by. The chances, [world_size], are those of each rank to be the longest.
        """
        error = self.stderr(sizes) if with_errors else 0.0
        times, deviation = self.model.times(sizes), np.hypot(self.deviation(sizes), error)
        stays_s, first = typical_longest(times, deviation, self.skew)
        step_s, (chances, factors) = stays_s, self.shifts
        for way, rank in np.argwhere(chances).tolist():
            then = np.ones_like(times)
            then[rank] = factors[way, rank]
            shifted_s, _ = typical_longest(times * then, deviation * then, self.skew)
            step_s += chances[way, rank] * (shifted_s - stays_s)
        return step_s, first

    def gain(self, now: npt.ArrayLike, then: npt.ArrayLike, *, with_errors: bool = True) -> Gain:
        """Return what a step should take with sizes ``now`` and ``then`` [world_size]."""
        (now_s, before), (then_s, after) = (
            (step_s, chance * self.stderr(sizes))
            for sizes in (now, then)
            for step_s, chance in [self.promise(sizes, with_errors=with_errors)]
        )
        # A rank's level is wrong by one factor on both sides.
        error_s = float(np.sqrt(np.square(before - after).sum()))
        aggregate_s = self.model.aggregate_s
        return Gain(now_s + aggregate_s, then_s + aggregate_s, error_s)

    def saved(self, interval: Interval, before: npt.ArrayLike) -> float:
        """Return the share of a step that an interval's sizes saved, against those ``before``.

        Not against the interval before, in which ranks were as fast as they were then: each rank
        would have been as much faster or slower than its model with other sizes, too.
        """
        sizes, busy_s, times = interval.sizes, interval.busy_s, self.model.times
        is_known = interval.valid & (busy_s > 0)
        level = np.where(is_known, busy_s / np.maximum(times(sizes), 1e-9), 1.0)
        (now_s, _), (then_s, _) = (
            typical_longest(level * times(each), level * self.deviation(each), self.skew)
            for each in (sizes, before)
        )
        # What a step takes beyond its longest rank is as it was.
        instead_s = interval.step_s - now_s + then_s
        return 1.0 - interval.step_s / instead_s if min(instead_s, interval.step_s) > 0 else 0.0


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

    def scaled(self, kept: float) -> Gain:
        """Return the gain of which so much is kept, but never nearly all of the step."""
        share = min(kept * self.share, max(self.share, _MOST_GAIN))
        return replace(self, then_s=(1.0 - share) * self.now_s)


@dataclass
class Knees:
    """Batches below which ranks compute no faster, told from cuts that saved nothing.

    A rank that gets slower while its batch is cut looks alike, but hardly to a few per cent, twice.
    One whose time is nearly all fixed is taken to have a knee: a cut saves next to nothing there.
    """

    samples: RankFloats  # of a pass; 0 where no knee is known
    seconds: RankFloats  # that it took when it was found
    cut_from: RankFloats  # samples before the first of the last cuts that saved nothing
    cut_from_s: RankFloats  # seconds that these took
    num_cuts: RankInts  # such cuts since

    @classmethod
    def of(cls, world_size: int) -> Knees:
        """Return those of a run that begins."""
        samples, seconds, cut_from, cut_from_s = np.zeros((4, world_size))
        return cls(samples, seconds, cut_from, cut_from_s, np.zeros(world_size, np.int64))

    def observe(self, before: _Passes, now: _Passes, *, known: Bools) -> None:
        """Compare two intervals; ``known`` says whose times are, [world_size]."""
        (samples, seconds, error), (old, old_s, old_error) = now, before
        near_s = np.maximum(_SAME * old_s, 2.0 * np.hypot(old_error, error))
        cut_s = old_s * (1.0 - samples / np.maximum(old, 1.0))
        is_cut = known & (samples > 0) & (cut_s > np.maximum(_CUT * old_s, 2.0 * near_s))
        is_first = is_cut & (self.num_cuts == 0)
        self.cut_from = np.where(is_first, old, self.cut_from)
        self.cut_from_s = np.where(is_first, old_s, self.cut_from_s)
        in_vain = is_cut & (np.abs(seconds - self.cut_from_s) < near_s)
        # What was seen of cuts says nothing after one that saved, above them, or at another pace.
        is_other = (is_cut & ~in_vain) | (samples > self.cut_from)
        is_other |= _has_moved(seconds, self.cut_from_s)
        num_cuts = np.where(is_other, 0, self.num_cuts + in_vain)
        self.num_cuts = np.where(known, num_cuts, self.num_cuts)
        is_over = (samples <= self.samples) & _has_moved(seconds, self.seconds)
        fading = np.where(is_over | (self.samples < 1.0), 0.0, _FADING * self.samples)
        is_knee = in_vain & (self.num_cuts >= _CUTS) & (self.cut_from > fading)
        self.seconds = np.where(is_knee, self.cut_from_s, self.seconds)
        self.samples = np.where(known, np.where(is_knee, self.cut_from, fading), self.samples)


def _has_moved(seconds: Floats, before: Floats) -> Bools:
    """Say which ranks take much more, or less, than before."""
    moved: Bools = np.abs(seconds - before) > _MOVED * before
    return moved


@dataclass
class Past:
    """What a fitter knows: rows of the last intervals, and what was learnt from those before."""

    fetch: Annotated[Contest, Size(num_terms=len(_FETCH_TERMS), num_states=len(_FETCH_TERMS) + 1)]
    compute: Annotated[
        Contest, Size(num_terms=len(_COMPUTE_TERMS), num_states=len(_COMPUTE_TERMS) + 1)
    ]
    rows: Annotated[list[_Rows], Shape("num_rows")]
    valid: Annotated[list[RankBools], Shape("num_rows")]  # usable
    # Of the last ``_TRACKED`` intervals.
    tracks: Annotated[list[_Track], Shape("num_tracks")] = field(default_factory=list)
    knees: Knees = field(default_factory=lambda: Knees.of(0))

    def __post_init__(self) -> None:
        """Begin with none in a state from before they were kept."""
        if not len(self.knees.samples):
            self.knees = Knees.of(len(self.fetch.samples))

    @classmethod
    def of(cls, world_size: int) -> Past:
        """Return the past of a run that begins."""
        fetch, compute = (
            Contest.of(world_size, len(terms)) for terms in (_FETCH_TERMS, _COMPUTE_TERMS)
        )
        return cls(fetch, compute, [], [])


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

    def add(self, interval: Interval) -> None:
        """Take in an interval."""
        past, rows, valid = self.past, interval.rows, interval.valid
        remote, fetch_s, size = rows[:, REMOTE], rows[:, FETCH], rows[:, SIZE]
        features = _fetch_features(rows[:, LOCAL], remote, self.source)
        # All of the time comes with the samples; what a source takes is queueing.
        start = np.outer(fetch_s / np.maximum(size, 1.0), (0.0, 1.0, 1.0, 0.0))
        queues = self.source >= 0
        start[:, 3] = np.where(queues, start[:, 2] * remote / np.maximum(features[:, 3], 1e-9), 0.0)
        start[:, 2] = np.where(queues, 0.0, start[:, 2])
        errors = rows[:, FETCH_ERROR]
        past.fetch.observe(features, fetch_s, errors=errors, valid=valid, start=start)
        now = size, seconds, errors = self._of_a_pass(rows)
        if past.rows:
            before = self._of_a_pass(past.rows[-1])
            past.knees.observe(before, now, known=valid & past.valid[-1])
        features = _compute_features(np.maximum(size, past.knees.samples))
        start = np.outer(seconds / np.maximum(size, 1.0), (0.0, 1.0))
        past.compute.observe(features, seconds, errors=errors, valid=valid, start=start)
        past.rows = [*past.rows, rows][-_NUM_ROWS:]
        past.valid = [*past.valid, valid][-_NUM_ROWS:]
        track = np.stack([rows[:, SIZE], np.where(valid, interval.busy_s, 0.0)], axis=1)
        past.tracks = [*past.tracks, track][-_TRACKED:]

    def _of_a_pass(self, rows: Floats) -> _Passes:
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
        valid = np.stack(past.valid)  # [num_rows, world_size], as the weights
        weights = np.where(valid, _FADE ** np.arange(len(valid))[::-1, None], 0.0)
        fetch, compute = past.fetch.foretell(), past.compute.foretell()
        is_poor: Bools = ~np.any(valid, axis=0)
        skew = _skew(rows[..., SKEW], weights)
        model = self._model(rows, weights, valid, fetch, compute)
        return Fit(
            model=model,
            fetch=fetch,
            compute=compute,
            knee=past.knees.samples,
            is_poor=is_poor,
            unclear=self._unclear(rows, weights, fetch, compute),
            fetch_spread=_spread(rows, weights, (FETCH, FETCH_ERROR), skew),
            compute_spread=_spread(rows, weights, (COMPUTE, COMPUTE_ERROR), skew),
            skew=skew,
            shifts=_shifts(model, past.tracks),
        )

    def _model(
        self, rows: Floats, weights: Floats, valid: Bools, fetch: Outlook, compute: Outlook
    ) -> StepModel:
        # Counts stay true when a rank's speed changes.
        share, hits = _fit_hits(rows[..., SIZE], rows[..., LOCAL], valid.astype(np.float64))
        fixed, slope = compute.terms.T
        knee = self.past.knees.samples
        fetch_s, stall_s, compute_s = (rows[..., column] for column in (FETCH, STALL, COMPUTE))
        return StepModel(
            **dict(zip(_FETCH_TERMS, fetch.terms.T, strict=True)),
            hit_share=share,
            hits=hits,
            compute_fixed_s=fixed,
            compute_s=slope,
            plateau_s=np.where(knee > 0, fixed + slope * knee, 0.0),
            overlap=_fit_overlap(fetch_s, stall_s, compute_s, weights),
            source=self.source,
            pass_size=self.pass_size,
        )

    def _unclear(
        self, rows: Floats, weights: Floats, fetch: Outlook, compute: Outlook
    ) -> tuple[tuple[str, ...], ...]:
        """Name the terms whose standard error is a tenth of the rank's time or more."""
        row, shares = rows[-1], _shares(rows, weights)
        features = (
            _fetch_features(row[:, LOCAL], row[:, REMOTE], self.source),
            _compute_features(np.maximum(self._of_a_pass(row)[0], self.past.knees.samples)),
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


def _shifts(model: StepModel, tracks: list[Floats]) -> tuple[Floats, Floats]:
    """Return chances that ranks shift to a faster, or a slower, pace, and their times then.

    ``tracks`` are [world_size, 2] each. What a rank took over what the model says of that batch is
    its level then. Counted are the intervals that found it near today's level, and about as many
    samples in the next one; or other samples, where a larger batch was fast, or a smaller one slow.
    """
    chance, factor = np.zeros((2, model.world_size)), np.ones((2, model.world_size))
    if len(tracks) < 2:
        return chance, factor
    size, busy_s = np.moveaxis(np.stack(tracks), 2, 0)  # [num_tracks, world_size] each
    due_s = model.times(size)
    is_known = (busy_s > 0) & (due_s > 0)
    level = np.log(np.where(is_known, busy_s, 1.0) / np.where(is_known, due_s, 1.0))
    off, batches = level - level[-1], np.log(np.maximum(size, 1.0))
    change, grew = off[1:] - off[:-1], batches[1:] - batches[:-1]
    is_alike = (np.abs(grew) < _ALIKE) | (grew * change < 0)
    was_here = is_known[-1] & is_known[:-1] & (np.abs(off[:-1]) < _NEAR)
    counts = is_known[1:] & is_alike & was_here
    seen = counts.sum(axis=0) + _UNSEEN
    for way, sign in enumerate((-1.0, 1.0)):
        shifted = counts & (sign * off[1:] > _NEAR)
        number = shifted.sum(axis=0)
        chance[way] = number / seen
        factor[way] = np.exp((shifted * change).sum(axis=0) / np.maximum(number, 1))
    most = min(_MOST_SHIFTS, max(1, _MOST_FORECASTS // model.world_size))
    chance.ravel()[np.argsort(-chance.ravel(), kind="stable")[most:]] = 0.0
    return chance * min(1.0, _MOST_CHANCE / max(float(chance.sum()), 1e-9)), factor


def _compute_features(size: Floats) -> Floats:
    """Return (1, samples) on a new last axis."""
    return np.stack([np.ones_like(size), size], axis=-1)


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


def _shares(rows: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return the shares of fetch and compute in each rank's own work, [world_size] each."""
    fetch = _mean(rows[..., FETCH], weights)
    compute = _mean(rows[..., COMPUTE], weights)
    total = np.maximum(fetch + compute, 1e-12)
    return fetch / total, compute / total
