"""Who was off: from what shard owners see of each worker's row to one suspicion a worker. Pure.

In a step each owner scores the rows of its shard from 0 (as the others) to 1 (``score_rows``) and
adds the scores up (``Evidence``). Every few steps the owners' scores are joined by their median, so
that one owner alone cannot frame a worker, and smoothed over steps (``SuspicionTracker``). A worker
stands out whose suspicion stays above the others'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose
from loft_hvd.aggregation.rules import Custom, Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.suspicion.report import FEWEST_WATCHED

__all__ = [
    "Evidence",
    "Floats",
    "Suspicion",
    "SuspicionTracker",
    "WorkerState",
    "score_copies",
    "score_rows",
    "without_copies",
]

# A step counts 1/20 in the smoothed numbers. A worker that is wrong in every step from now on has
# a suspicion of 0.6, the default threshold, after 18 steps: 1 - (1 - 1/20)**18 = 0.603.
_MEMORY_STEPS = 20.0
# Doublings of the squared distance that make a score of 1. Bound from the default threshold: a
# worker twice as noisy as the rest is 2 doublings away, which must stay below 0.6 (it is 2/4).
_DISTANCE_DOUBLINGS = 4.0
# Coordinates that honest rows are drawn with; a share of them is right within 0.5/sqrt(2048) = 1 %.
_DRAWS = 2048
_MOST_SQUARED = 1e290  # a choice: sums of it over buckets and steps stay finite
# In place of a distance of 0, below anything that a gradient's square can be: log2 stays finite.
_TINY = 1e-300
# The columns in which evidence travels, each [num_rows].
_SCORE, _STEPS, _SEEN, _OUTSIDE, _NON_FINITE, _SQUARED, _LEFT_OUT, _CLIPPED, _COPIED = range(9)
_FAULT = 9  # as _SCORE, but for copies
_NUM_COLUMNS = 10
_SHARES = (_OUTSIDE, _LEFT_OUT, _CLIPPED, _COPIED)
# Most that being left out or clipped says by itself, and being far away where ranks draw from
# different data; and below the threshold, whatever it is, by this factor. An honest one may there
# be the longest, and farthest from all, in every step. Measured: on digits sorted by class, at 67
# times the usual squared distance; on Dirichlet(0.1) shares of them, at 142 times.
_MOST_BY_NEIGHBOURS = 0.5
_BELOW_THRESHOLD = 1.2  # of the default threshold, 0.6, that is 0.5 as well

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspicion:
    """How closely rows are watched; equal on every rank.

    Attributes:
        every: look at one block of 16,384 coordinates of a shard in so many; 1 looks at all.
        interval: optimizer steps between two exchanges of what owners saw.
        threshold: a worker stands out while its suspicion is so far above the median of the
            others'; above 0, below 1.
        patience: steps that a worker must stand out in a row before it is named; the next
            warnings follow after twice, four times, ... as many.
    """

    every: int = 32
    interval: int = 10
    threshold: float = 0.6
    patience: int = 20

    def __post_init__(self) -> None:
        for what in ("every", "interval", "patience"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"Suspicion: {what}={value!r} must be a whole number")
            if value < 1:
                raise ArgumentError(f"Suspicion: {what}={value} must be >= 1")
        if not 0 < self.threshold < 1:
            raise ArgumentError(f"Suspicion: threshold={self.threshold} must be > 0 and < 1")


def score_rows(
    found: Diagnostics,
    rule: Rule,
    *,
    compared: Diagnostics | None = None,
    weights: Sequence[int] | None = None,
    are_apart: bool = False,
    threshold: float = Suspicion.threshold,
) -> tuple[float, ...] | None:
    """Score how far each row was off in one step of one shard, from 0 (as the others) to 1.

    The score is the largest of: the share outside the window, from the others' median, or what is
    usual (0), to always (1); the squared distance to the result, from what the others reach (0) to
    16 times that (1); non-finite values (1); how often others left it out, and it was clipped, from
    the others' median (0) to always (0.5). Rows that come from fewer samples may be off by what
    that explains. Where workers ``are_apart`` for good, as they draw from different data, being
    outside or far says 0.5 at most. Instead of 0.5 it is 5/6 of ``threshold`` where that is less:
    neither names anybody.

    The others are taken from ``compared``, the sum of what ``without_copies`` made of each bucket;
    without it ``found`` is one bucket. A row itself is judged by all of its values, copied or not.

    Absent rows have ``num_seen`` 0, and get a score of 0. ``weights`` are the samples behind each
    row, where they differ, [world_size]. Returns None where nothing can be said.
    """
    seen = np.array(found.num_seen)
    rows = np.flatnonzero(seen)  # the present ones; what follows is [rows] but for ``others``
    non_finite = np.array(found.num_non_finite)[rows] > 0
    # As many as half of the rows non-finite is an overflow, such as a loss scale that has grown
    # too far, and nobody's fault.
    if len(rows) < FEWEST_WATCHED or 2 * non_finite.sum() >= len(rows):
        return None
    outside, distances = np.array(found.num_outside), np.array(found.squared_distance)
    aside = _aside(found)[rows]
    if not (non_finite.any() or outside.any() or distances.any()):
        return None  # rows that are equal everywhere
    compared = without_copies(found, rule) if compared is None else compared
    others = _others(len(rows))  # [rows, rows - 1]
    shares, log2 = outside[rows] / seen[rows], _log2(distances[rows])
    base, explained = _medians(shares[others]), np.zeros(len(rows))
    aside_base = _medians(_aside(compared)[rows][others])
    if not isinstance(rule, Custom):
        counts = (1,) * len(rows) if weights is None else tuple(weights[int(row)] for row in rows)
        usual_shares, usual_aside, usual_log2 = _expected(rule, counts)
        # With equal weights too: where a row is copied, the others' median is below what is usual,
        # and honest rows would seem to be outside too often.
        base = np.maximum(base, usual_shares)
        if weights is not None:
            aside_base = np.maximum(aside_base, usual_aside)
            explained = np.maximum(0.0, usual_log2 - _medians(usual_log2[others]))
    outsides = _above(shares, base)
    most_by_neighbours = min(_MOST_BY_NEIGHBOURS, threshold / _BELOW_THRESHOLD)
    asides = most_by_neighbours * _above(aside, aside_base)
    others_log2 = _log2(np.array(compared.squared_distance)[rows])[others]
    aways = (log2 - _reach(others_log2, rule) - explained) / _DISTANCE_DOUBLINGS
    away = np.maximum(outsides, aways)
    if are_apart:
        away = np.minimum(away, most_by_neighbours)
    most = np.maximum(away, asides)
    scores = np.zeros(len(seen))
    scores[rows] = np.where(non_finite, 1.0, np.clip(most, 0.0, 1.0))
    return tuple(scores.tolist())


def without_copies(found: Diagnostics, rule: Rule) -> Diagnostics:
    """Put what is usual among the rows that equal no other in place of copies, in one bucket.

    Copies are no measure: where they and the row that they copy are the majority, the result is
    that row, and all others lie far from it. Of c rows that equal others, half at least are wrong
    where right ones differ. So of the others, n - c of n >= 2f + 1, most are right, however few.
    Over several buckets that fails: a worker may copy in some of them and be far off in the rest.
    """
    if not any(found.copied):
        return found
    is_copy = score_copies(found, rule) > 0
    is_measure = (np.array(found.num_seen) > 0) & ~is_copy

    def replaced(values: tuple[float, ...]) -> tuple[float, ...]:
        usual = np.median(np.array(values)[is_measure])
        return tuple(np.where(is_copy, usual, values).tolist())

    # No rule that finds copies has a window.
    return replace(
        found,
        squared_distance=replaced(found.squared_distance),
        left_out=replaced(found.left_out),
        clipped=replaced(found.clipped),
    )


def score_copies(found: Diagnostics, rule: Rule) -> Floats:
    """Score the share of each row that equals another one in a step of one shard, [world_size].

    From what 2f + 1 rows reach (0) to all of it (1): f wrong rows can copy f others, so where more
    rows are equal, right ones are. Apart from ``score_rows``, as it accuses the row that is copied
    as well as the one that copies: nobody can know who was first.
    """
    seen = np.array(found.num_seen)
    scores = np.zeros(len(seen))
    rows = np.flatnonzero(seen)
    if len(rows) >= FEWEST_WATCHED:
        copied = np.array(found.copied)[rows] / seen[rows]
        usual = np.sort(copied)[max(len(rows) - 1 - 2 * max(rule.f, 1), 0)]
        scores[rows] = np.clip(_above(copied, usual), 0.0, 1.0)
    return scores


def _reach(others_log2: Floats, rule: Rule) -> Floats:
    """Return the log2 of the squared distance that each row's others reach, [rows]."""
    middle = _medians(others_log2)
    # Of their spread the widest f - 1 are left out: they may be Byzantine as well.
    spread = np.sort(np.abs(others_log2 - middle[:, None]))[:, -max(rule.f, 1)]
    reach: Floats = middle + spread
    return reach


def _aside(found: Diagnostics) -> Floats:
    """Return how far each row was put aside, [world_size]: left out, or left out and clipped."""
    seen = np.maximum(found.num_seen, 1)
    left_out, clipped = np.array(found.left_out) / seen, np.array(found.clipped) / seen
    # Not clipped alone: some rows are the longest in each step, whoever they are.
    aside: Floats = np.maximum(left_out, (left_out + clipped) / 2)
    return aside


def _above(shares: Floats, base: Floats | np.float64) -> Floats:
    """Return how far shares are on the way from ``base`` to 1; below 0 where they are below it."""
    way: Floats = (shares - base) / np.maximum(1 - base, 1e-12)
    return way


@functools.lru_cache(maxsize=64)
def _expected(rule: Rule, weights: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
    """Return what honest rows look like that differ in their batch sizes only.

    A mean over fewer samples is noisier: its row is outside more often, and farther away. Returns
    the share outside, that left out or clipped, and log2 of the squared distance of each row.
    """
    rows = torch.randn(len(weights), _DRAWS, generator=torch.Generator().manual_seed(0))
    # The mean of k samples has 1/sqrt(k) of one sample's noise.
    rows *= torch.tensor(weights).rsqrt().unsqueeze(1)
    used = None if rule.counts_weight else weights  # in training it takes none
    _, found = diagnose(rows, rule, weights=used, every=1)
    # A row that is clipped for its few samples may be left out as well: that is explained with it.
    aside = np.maximum(found.left_out, found.clipped) / np.maximum(found.num_seen, 1)
    return np.array(found.share_outside), aside, _log2(np.array(found.squared_distance))


@functools.lru_cache(maxsize=64)
def _others(num_rows: int) -> npt.NDArray[np.int64]:
    """Return for each row the indices of all other rows, [num_rows, num_rows - 1]."""
    return np.array([[o for o in range(num_rows) if o != row] for row in range(num_rows)])


def _log2(values: Floats) -> Floats:
    logarithms: Floats = np.log2(np.maximum(values, _TINY))
    return logarithms


def _medians(lines: Floats) -> Floats:
    """Return the median of each line; np.median is several times slower on a few values."""
    ordered = np.sort(lines, axis=1)
    last = lines.shape[1] - 1
    middle: Floats = (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2
    return middle


class Evidence:
    """What one owner saw of every row, of ``num_rows``, since the last exchange."""

    def __init__(self, num_rows: int, settings: Suspicion) -> None:
        self._num_rows = num_rows
        self._settings = settings
        self._buckets: list[Diagnostics] = []  # of this step
        self._unscored: Callable[[], None] | None = None  # scores the step before
        self._clear()

    def _clear(self) -> None:
        self._num_steps = np.zeros(self._num_rows)  # in which a row was there
        self._scores = np.zeros(self._num_rows)
        self._faults = np.zeros(self._num_rows)
        self._sum = Diagnostics.empty(self._num_rows)

    def add(self, found: Diagnostics) -> None:
        """Take what was found in a shard of one bucket in this step."""
        # Rows of float64 may overflow when squared.
        squared = tuple(min(each, _MOST_SQUARED) for each in found.squared_distance)
        self._buckets.append(replace(found, squared_distance=squared))

    def step_reduced(
        self, rule: Rule, *, weights: Sequence[int] | None = None, are_apart: bool = False
    ) -> None:
        """Close a step, to be scored over all buckets; arguments are those of ``score_rows``."""
        self.score()
        buckets, self._buckets = self._buckets, []
        self._unscored = functools.partial(
            self._score, buckets, rule, weights=weights, are_apart=are_apart
        )

    def score(self) -> None:
        """Score the step that was closed last, if it was not; best where there is time for it.

        Other threads may ``add`` meanwhile.
        """
        # Some 60 small operations, whose code is in no cache after a step: 0.9 to 1.3 ms of a
        # step of 4 ranks on 2 cores, 0.2 when repeated (2026-11-27). So not where all wait for it.
        unscored, self._unscored = self._unscored, None
        if unscored is not None:
            unscored()

    def _score(
        self,
        buckets: Sequence[Diagnostics],
        rule: Rule,
        *,
        weights: Sequence[int] | None,
        are_apart: bool,
    ) -> None:
        none = Diagnostics.empty(self._num_rows)
        found = sum(buckets, none)
        scores = score_rows(
            found,
            rule,
            compared=sum((without_copies(each, rule) for each in buckets), none),
            weights=weights,
            are_apart=are_apart,
            threshold=self._settings.threshold,
        )
        if scores is not None:
            self._num_steps += np.array(found.num_seen) > 0
            self._scores += np.maximum(scores, score_copies(found, rule))
            self._faults += np.array(scores)
            self._sum += found

    def take(self) -> Floats:
        """Return what was seen since the last call, float64, [num_columns * num_rows]."""
        self.score()
        columns: list[npt.ArrayLike] = [()] * _NUM_COLUMNS
        columns[_SCORE], columns[_STEPS] = self._scores, self._num_steps
        columns[_SEEN], columns[_OUTSIDE] = self._sum.num_seen, self._sum.num_outside
        columns[_NON_FINITE] = self._sum.num_non_finite
        columns[_SQUARED], columns[_LEFT_OUT] = self._sum.squared_distance, self._sum.left_out
        columns[_CLIPPED], columns[_COPIED] = self._sum.clipped, self._sum.copied
        columns[_FAULT] = self._faults
        wire = np.concatenate(columns).astype(np.float64)
        self._clear()
        return wire


@dataclass
class WorkerState:
    """What is known of one worker, as in ``WorkerReport``, and for how long it has stood out."""

    suspicion: float = 0.0
    fault: float = 0.0  # the suspicion but for copies: what the worker itself must answer for
    share_outside: float = 0.0
    distance: float = 1.0
    num_non_finite: int = 0
    num_steps: int = 0
    share_left_out: float = 0.0
    share_clipped: float = 0.0
    share_copied: float = 0.0
    steps_out: int = 0  # in a row, up to now, in which it stood out
    steps_at_fault: int = 0  # the same, by its fault
    next_warning: int = 0  # so many of them bring the next warning

    def blend(
        self,
        score: float,
        distance: float,
        *,
        fault: float,
        outside: float,
        left_out: float,
        clipped: float,
        copied: float,
        num_steps: int,
    ) -> None:
        """Let the averages of some steps into the smoothed numbers."""
        kept = 1.0
        for _ in range(num_steps):  # not a power: libraries differ in the last bit of one
            kept *= 1 - 1 / _MEMORY_STEPS
        part = 1 - kept
        # From 0, so that a worker is not named by its first steps alone.
        self.suspicion += part * (score - self.suspicion)
        self.fault += part * (fault - self.fault)
        # The others are shown, not judged by: a plain average at first.
        part = max(part, num_steps / (self.num_steps + num_steps))
        self.share_outside += part * (outside - self.share_outside)
        self.share_left_out += part * (left_out - self.share_left_out)
        self.share_clipped += part * (clipped - self.share_clipped)
        self.share_copied += part * (copied - self.share_copied)
        self.distance += part * (distance - self.distance)
        self.num_steps += num_steps


class SuspicionTracker:
    """One suspicion a worker, of ``num_rows``, from the owners' evidence; equal on every rank."""

    def __init__(self, num_rows: int, settings: Suspicion) -> None:
        self.workers = [WorkerState() for _ in range(num_rows)]
        self._settings = settings

    def observe(self, table: Floats) -> list[int]:
        """Take all owners' ``Evidence.take``, and return the workers to warn of now.

        The table is [num_owners, num_columns * num_rows]. Owners that saw nothing, or claim what
        cannot be, abstain.
        """
        num_rows = len(self.workers)
        cells = np.asarray(table, dtype=np.float64).reshape(len(table), _NUM_COLUMNS, num_rows)
        cells = _believable(cells)
        if len(cells) == 0:
            return []
        # Each of these is [num_owners, num_rows].
        steps, seen, squared = cells[:, _STEPS], cells[:, _SEEN], cells[:, _SQUARED]
        scores = np.minimum(1.0, cells[:, _SCORE] / np.maximum(steps, 1.0))
        faults = np.minimum(1.0, cells[:, _FAULT] / np.maximum(steps, 1.0))
        # [num_owners, num_columns, num_rows]
        shares = cells / np.maximum(seen, 1.0)[:, None]
        usual = [_low_median(line[was > 0]) for line, was in zip(squared, seen, strict=True)]
        with np.errstate(over="ignore"):
            distances = squared / np.maximum(np.array(usual), _TINY)[:, None]
        distances = np.minimum(distances, _MOST_SQUARED)
        present = np.flatnonzero((seen > 0).any(axis=0)).tolist()
        num_steps = {row: int(_low_median(steps[seen[:, row] > 0, row])) for row in present}
        for row in present:
            sees = seen[:, row] > 0  # the owners that have met the row, [num_owners]
            middle = [_low_median(shares[sees, column, row]) for column in _SHARES]
            outside, left_out, clipped, copied = middle
            self.workers[row].num_non_finite += int(cells[:, _NON_FINITE, row].sum())
            self.workers[row].blend(
                _low_median(scores[sees, row]),
                _low_median(distances[sees, row]),
                fault=_low_median(faults[sees, row]),
                outside=outside,
                left_out=left_out,
                clipped=clipped,
                copied=copied,
                num_steps=num_steps[row],
            )
        return [row for row in present if self._should_warn(row, num_steps[row])]

    def excess_fault(self, row: int) -> float:
        """Return how far a worker's fault is above the median of the others'."""
        return self._above_others(self.workers[row].fault, row)

    def named(self) -> list[int]:
        """Return the workers that have stood out for ``patience`` steps in a row."""
        patience = self._settings.patience
        return [row for row, worker in enumerate(self.workers) if worker.steps_out >= patience]

    def at_fault(self) -> list[int]:
        """Return the workers that have stood out for ``patience`` steps by more than copies."""
        patience = self._settings.patience
        return [row for row, worker in enumerate(self.workers) if worker.steps_at_fault >= patience]

    def forgive(self, row: int) -> None:
        """Start a worker's suspicion afresh; its counts stay."""
        worker = self.workers[row]
        worker.suspicion = worker.fault = 0.0
        worker.steps_out = worker.steps_at_fault = 0

    def _above_others(self, value: float, row: int) -> float:
        """Return how far a worker's value is above the median of the others' faults.

        Their copies are no measure: of 2f + 1 rows most may be equal.
        """
        faults = [worker.fault for other, worker in enumerate(self.workers) if other != row]
        return value - float(np.median(faults)) if faults else 0.0

    def _should_warn(self, row: int, num_steps: int) -> bool:
        worker = self.workers[row]
        is_at_fault = self.excess_fault(row) >= self._settings.threshold
        worker.steps_at_fault = worker.steps_at_fault + num_steps if is_at_fault else 0
        if self._above_others(worker.suspicion, row) < self._settings.threshold:
            worker.steps_out = 0
            return False
        worker.steps_out += num_steps
        due = max(self._settings.patience, worker.next_warning)
        if worker.steps_out < due:
            return False
        worker.next_warning = 2 * due
        return True


def _believable(cells: Floats) -> Floats:
    """Return the cells of owners that have something to say and claim nothing that cannot be."""
    with np.errstate(invalid="ignore"):
        fits = np.isfinite(cells).all(axis=(1, 2)) & (cells >= 0).all(axis=(1, 2))
        # No more coordinates are outside, or non-finite, than were looked at.
        fits &= (cells[:, [*_SHARES, _NON_FINITE]] <= cells[:, [_SEEN]]).all(axis=(1, 2))
        fits &= (cells[:, _STEPS] > 0).any(axis=1)
    chosen: Floats = cells[fits]
    return chosen


def _low_median(values: Floats) -> float:
    """Return the middle value, the lower one of two: half of the owners cannot accuse alone."""
    return float(np.sort(values)[(len(values) - 1) // 2]) if len(values) else 0.0
