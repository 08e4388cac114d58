"""What ranks report of an interval: its columns, its sums and its screening, defined once.

A report is one row of float64 a rank: where the rank is (``Head``), what it spent (``SUMS``, added
up over the interval's batches) and how much of its machine others use (``USES``). Where sizes stay
as they are it ends with the CPUs that ranks share and with the newest steps one by one (``RECENT``
of ``PARTS``), which show what no sum does. The live plan, the policies, ``explain``, the run log
and the simulator all read rows through this file. Nothing that a rank sends is trusted to be a
time.

A rank works out itself what a step usually takes (``typical``), so that a garbage collection or a
page-cache miss in one step in fifty is no pace of the rank, and sends how well it knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from loft_hvd.codec import Count, Within
from loft_hvd.errors import ArgumentError

__all__ = [
    "COLUMNS",
    "PARTS",
    "RECENT",
    "SUM",
    "SUMS",
    "TYPICAL",
    "USES",
    "Head",
    "Interval",
    "Place",
    "RankTimes",
    "Report",
    "read_times",
    "screen",
    "skewness",
    "typical",
    "usual_stall",
]

Floats = npt.NDArray[np.float64]

_LONGEST_S = 3600.0  # nobody trains with steps of an hour: a longer time is a broken clock
_SLACK = 1.25  # a rank cannot have been busy for longer than the step took on rank 0's clock
_FARTHEST_STEPS = 1_000_000  # that a rank can have drawn beyond rank 0; it would be epochs ahead
_TRIMMED = 0.2  # of the steps, at either end: what Yuen (1974) and Wilcox use most
# Steps between a rank's word on what it has drawn and the plan's arrival, beside those that rank 0
# takes to decide, and one more.
_SLACK_STEPS = 3
# Seconds that deciding may take on rank 0 beside training, for any world and for each rank: more
# than the dearest policy takes alone (NARX of 1,000 ranks 0.34 s, docs/balance.md, "Cost"), and
# little beside the 30 seconds of an interval.
_DECIDES_S = (0.05, 5e-4)
_MOST = 1e15  # of a sum: 30 million years, or as many samples; a state is refused beyond it

Amount = Annotated[float, Within(0, _MOST)]


# What an interval's steps usually take.


def typical(values: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the trimmed means of steps, and the variances of one step about them.

    A fifth of the steps is dropped at either end, so that less than a fifth of them, however long,
    moves the mean by no more than the rest are spread. The variance is Tukey and McLaughlin's
    (1963), from the values with the dropped ones drawn in to the nearest kept: divided by the
    number of steps it is the squared standard error of the mean.

    Args:
        values: of each step, [num_steps, ...], at least one; fewer than five are averaged.

    Returns:
        Means and variances, each [...]; the variance of a single step is 0.
    """
    steps = np.asarray(values, dtype=np.float64)
    num = len(steps)
    dropped = int(_TRIMMED * num)  # at either end
    ordered = np.partition(steps, (dropped, num - dropped - 1), axis=0)
    kept = ordered[dropped : num - dropped]
    mean: Floats = kept.mean(axis=0)
    if num < 2:
        return mean, np.zeros_like(mean)
    drawn_in = np.clip(ordered, kept[0], kept[-1])
    # s_w^2 (n - 1) / (h (h - 1)) is the squared error of a mean of h kept out of n steps.
    variance: Floats = (
        drawn_in.var(axis=0, ddof=1) * num * (num - 1) / (len(kept) * (len(kept) - 1))
    )
    return mean, variance


def skewness(values: npt.ArrayLike) -> Floats:
    """Return by how much long steps are farther from the median than short ones.

    Args:
        values: of each step, [num_steps, ...].

    Returns:
        The distance from the median to the upper fifth over that to the lower, [...]: about 1 where
        steps are normal, 2.6 where they have the tails of a Pareto distribution of index 2.5; 0
        where fewer than five steps, or steps that are all alike, do not tell.
    """
    steps = np.asarray(values, dtype=np.float64)
    num = len(steps)
    if num < 5:
        return np.zeros(steps.shape[1:])
    # Quantiles that are right in the median whatever the distribution (Hyndman and Fan, 1996, their
    # eighth). ``np.quantile`` takes four times as long for a column, on the thread that trains.
    places = [(num + 1 / 3) * end - 2 / 3 for end in (_TRIMMED, 0.5, 1.0 - _TRIMMED)]  # from 0
    nearest = [int(place) for place in places]
    ordered = np.partition(steps, [*nearest, *(place + 1 for place in nearest)], axis=0)
    low, middle, high = (
        ordered[at] + (place - at) * (ordered[at + 1] - ordered[at])
        for at, place in zip(nearest, places, strict=True)
    )
    below = middle - low
    return np.where(below > 0, (high - middle) / np.where(below > 0, below, 1.0), 0.0)


# The columns of a report.


class Head(NamedTuple):
    """Where a rank is when it reports."""

    num_steps: int  # optimizer steps taken
    plan_id: int  # of the newest plan
    trail: int  # of every batch trained, equal on all ranks (``BatchQueue.trail``)
    drawn_ahead: int  # deepest step that its loaders may have drawn (``BatchQueue.may_be_drawn``)
    next_interval: int  # steps to the next exchange, as this rank would have it


class Place(NamedTuple):
    """What a rank has to share on its host."""

    local_ranks: float  # ranks on its host
    cpus: float  # that it may run on,
    first_cpu: float  # and the lowest of them: ranks that are bound to others have others
    threads_queued_s: float  # of a step, of the thread beside the main one that queues longest


@dataclass(frozen=True)
class RankTimes:
    """What one rank spent on an average batch of the last interval."""

    rank: Count
    # Batches measured, but for last ones of an epoch and the first with a new size; of more than
    # 4,096 steps, those of so many drawn at random.
    steps: Count
    samples: Amount  # of a batch; 0 for a rank that computes dummy batches only
    local: Amount  # of them from the rank's own node
    remote: Amount  # of them from elsewhere
    fetch_s: Amount  # to read and prepare a batch, where that happens, by all loader processes
    stall_s: Amount  # of it that the script waited for; the rest ran beside the computing
    compute_s: Amount  # from the batch's arrival to its last gradient, without ``queued_s``
    # The CPU was another's; measured where a node has more ranks than CPUs. In a script that is
    # only watched, also the longest queue of Gloo's threads, as far as the rank waited.
    queued_s: Amount
    wait_s: Amount  # for the other ranks and the wire
    other_s: Amount  # everything else, the optimizer and the script's own code
    wall_s: Amount  # from the end of the step before to the end of this one
    cached: Amount = 0.0  # of ``local``, samples that belong elsewhere but were in a cache
    # Checkpoints, evaluation, whose steps are left out of the rest: all of the interval's, over
    # ``steps``.
    paused_s: Amount = 0.0
    busy_s2: Amount = 0.0  # mean square of ``busy_s`` over the batches
    # What batches usually take, and the variance of one batch about it (``typical``).
    typical_fetch_s: Amount = 0.0
    typical_compute_s: Amount = 0.0
    typical_wall_s: Amount = 0.0
    fetch_spread_s2: Amount = 0.0
    compute_spread_s2: Amount = 0.0
    wall_spread_s2: Amount = 0.0
    busy_skew: Amount = 0.0  # of ``busy_s`` (``skewness``)
    forward_s: Amount = 0.0  # of ``compute_s``, before the backward pass began; 0 where unknown
    typical_queued_s: Amount = 0.0  # this and the next as those above
    typical_other_s: Amount = 0.0
    queued_spread_s2: Amount = 0.0
    other_spread_s2: Amount = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of the rank's own work: computing, and what of the fetch it waited for."""
        return self.stall_s + self.compute_s

    @property
    def accident_s(self) -> float:
        """Seconds that a few long batches add to an average one, above what batches usually take.

        Of the computing, and of the fetch as far as the script waited for it.
        """
        if not self.typical_compute_s + self.typical_fetch_s > 0:
            return 0.0
        fetch_s = min(max(self.fetch_s - self.typical_fetch_s, 0.0), self.stall_s)
        return max(self.compute_s - self.typical_compute_s, 0.0) + fetch_s

    @property
    def busy_error_s(self) -> float:
        """Standard error of ``busy_s``, from its variation over the batches."""
        variance = max(0.0, self.busy_s2 - self.busy_s**2)
        return math.sqrt(variance / (self.steps - 1)) if self.steps > 1 else 0.0

    @property
    def overlap(self) -> float:
        """Share of the shorter of fetch and computing that ran beside the other, 0 to 1."""
        shorter = min(self.fetch_s, self.compute_s)
        hidden = max(0.0, self.fetch_s - self.stall_s)
        return min(1.0, hidden / shorter) if shorter > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples that the rank could do in a second without waiting for others."""
        return self.samples / self.busy_s if self.busy_s > 0 else 0.0


SUMS = tuple(each.name for each in fields(RankTimes))[1:]  # [26]: all but the rank's number
TYPICAL = (
    "fetch_s",
    "compute_s",
    "wall_s",
    "queued_s",
    "other_s",
)  # what a rank works out itself, of its own steps
SUM = {name: at for at, name in enumerate(SUMS)}  # column by name, of a row of sums alone
USES = ("cpu_use", "memory_use")  # by others, as a share of what the rank could use, 0 to 1
_AT = {name: at for at, name in enumerate((*Head._fields, *SUMS, *USES))}  # of a row, [33]
PARTS = ("fetch", "forward", "backward", "other", "queue")  # of a step: what its seconds went to
RECENT = 32  # steps that are told one by one: 1.3 kB a rank

# What policies see of it: averages a step, of fetch, stall and compute as a step usually has it.
COLUMNS = (
    "samples",
    "local",
    "remote",
    "fetch_s",
    "stall_s",
    "compute_s",
    "wait_s",
    "other_s",  # never fitted
    "cpu_use",  # 0 when unknown, as memory_use
    "memory_use",
    "fetch_error_s",  # the standard error of fetch_s, 0 when unknown; likewise
    "compute_error_s",
    "steps",  # behind them; 0 when unknown
    "busy_skew",  # of stall and compute together, 0 when unknown
)
SIZE, LOCAL, REMOTE, FETCH, STALL, COMPUTE, WAIT, OTHER, CPU, MEMORY = range(10)
FETCH_ERROR, COMPUTE_ERROR, STEPS, SKEW = range(10, len(COLUMNS))
# The most that a row may say, beside what limits a step. A fetch that runs beside the computing may
# take longer than one, and so may a standard error; a share is at most 1, and rounding.
_LIMITS = {
    FETCH: 10 * _LONGEST_S,
    FETCH_ERROR: 10 * _LONGEST_S,
    COMPUTE_ERROR: _LONGEST_S,
    CPU: 1.01,
    MEMORY: 1.01,
}
_MOST_OF = tuple(_LIMITS.get(column, _MOST) for column in range(len(COLUMNS)))  # in their order


def usual_stall(fetch_s: Floats, mean_fetch_s: Floats, mean_stall_s: Floats) -> Floats:
    """Return the stall of a batch that takes the usual ``fetch_s``, all [world_size].

    What overlap hides, fetch less stall, is bounded by the computing: its plain mean is safe from
    a single long fetch, which stalls for as long. A loader with eight processes may stall in every
    eighth step alone, so stalls themselves must not be trimmed.
    """
    hidden = mean_fetch_s - mean_stall_s
    # A negative stall is no time: it stays what it is, for ``screen`` to see.
    return np.where(mean_stall_s < 0, mean_stall_s, np.maximum(fetch_s - np.maximum(hidden, 0), 0))


# From sums to averages.


def _means(sums: Floats) -> Floats:
    """Turn sums [world_size, 26] into averages a batch, as they are: not all are times.

    A rank without batches has 0 everywhere, one whose number of batches is none has NaN.
    """
    steps = sums[:, :1]  # [world_size, 1]: the first of SUMS, and no average
    is_count = np.isfinite(steps) & (steps >= 0) & (steps == np.floor(steps))
    averages = np.where(steps > 0, sums, 0.0) / np.where(is_count & (steps > 0), steps, 1.0)
    averages[:, :1] = steps
    return np.where(is_count, averages, np.nan)


def read_times(sums: Floats) -> tuple[RankTimes, ...]:
    """Turn the sums of all ranks, in the order of ``SUMS``, [world_size, 26], into averages.

    Sums that no clock can have measured (not finite, negative, beyond 1e15) count as 0.
    """
    known = _means(sums)
    known = np.where((known >= 0) & (known <= _MOST), known, 0.0)  # NaN is neither
    return tuple(RankTimes(rank, int(row[0]), *row[1:]) for rank, row in enumerate(known.tolist()))


# What may be believed.


@dataclass(frozen=True)
class Interval:
    """What one interval showed: averages over its counted steps."""

    step: int  # its last one, whose plan is the one that was measured
    sizes: npt.NDArray[np.int64]  # that plan's, [world_size]
    rows: Floats  # of each rank, [world_size, len(COLUMNS)], 0 where its report was discarded
    valid: npt.NDArray[np.bool_]  # which rows may be used, [world_size]
    step_s: float  # by rank 0's own clock, wait and aggregation included; NaN when not known
    discarded: Mapping[str, list[int]] = field(default_factory=dict)  # ranks by reason
    step_error_s: float = 0.0  # the standard error of ``step_s``; 0 when not known
    # Seconds that ranks without samples took to fetch and to compute a batch that did not count,
    # [2, world_size]; 0 of all others.
    idle_s: Floats = field(default_factory=lambda: np.zeros((2, 0)))

    @property
    def busy_s(self) -> Floats:
        """Seconds each rank says it was busy, [world_size]."""
        busy: Floats = self.rows[:, STALL] + self.rows[:, COMPUTE]
        return busy


def screen(
    rows: npt.ArrayLike,
    *,
    step: int,
    sizes: Sequence[int],
    step_s: float = float("nan"),
    step_error_s: float = 0.0,
) -> Interval:
    """Check what ranks reported.

    Args:
        rows: averages a step in the order of ``COLUMNS``, [world_size, 14]; a rank that computed
            no samples sends size 0 and is left out without being counted.
        step: the interval's last step.
        sizes: the plan in force, [world_size].
        step_s: seconds of a step by rank 0's clock; without it the median of what ranks claim
            stands in, and only the longest possible time is checked.
        step_error_s: its standard error; 0 when not known.

    Raises:
        ArgumentError: the array is not of that shape.
    """
    given: Floats = np.array(rows, dtype=np.float64)
    if given.shape != (len(sizes), len(COLUMNS)):
        raise ArgumentError(
            f"observe: rows must have shape ({len(sizes)}, {len(COLUMNS)}), one row a rank with "
            f"{', '.join(COLUMNS)}, but it is {given.shape}"
        )
    finite = np.all(np.isfinite(given), axis=1)  # [world_size], as all masks below
    known = np.where(finite[:, None], given, 0.0)
    positive = np.all(known >= 0, axis=1)
    idle = finite & (known[:, SIZE] == 0)
    planned = np.array(sizes, dtype=np.float64)
    counts = np.abs(known[:, LOCAL] + known[:, REMOTE] - known[:, SIZE]) > 0.01 * planned + 0.01
    limit_s = min(_LONGEST_S, step_s * _SLACK) if step_s > 0 else _LONGEST_S
    busy = known[:, STALL] + known[:, COMPUTE]
    out_of_range = counts | (busy > limit_s) | np.any(known > _MOST_OF, axis=1)
    wrong_size = np.abs(known[:, SIZE] - planned) > 0.1 * planned + 0.5
    # A rank has one reason at most: each one looks only at ranks that passed those before it.
    reasons = {
        "not finite": ~finite,
        "negative": finite & ~positive,
        "out of range": finite & positive & ~idle & out_of_range,
        "not the planned size": finite & positive & ~idle & ~out_of_range & wrong_size,
    }
    valid = ~np.any(list(reasons.values()), axis=0) & ~idle
    if not step_s > 0 and valid.any():
        step_s = float(np.median((busy + known[:, WAIT])[valid]))
    return Interval(
        step,
        np.array(sizes),
        np.where(valid[:, None], known, 0.0),
        valid,
        float(step_s),
        {why: np.flatnonzero(which).tolist() for why, which in reasons.items() if which.any()},
        step_error_s,
        # Longer than usual steps, as it may be.
        np.where(idle & positive & (busy <= _LONGEST_S), known[:, [FETCH, COMPUTE]].T, 0.0),
    )


def _root(squares: Floats) -> Floats:
    """Return square roots; what is negative is no square and stays what it is, to be seen."""
    return np.where(squares < 0, squares, np.sqrt(np.abs(squares)))


class Report:
    """What all ranks sent: rows of ``Head``, ``SUMS`` and ``USES``, float64, [world_size, 33].

    Where sizes stay as they are ``Place`` follows, and seconds of the newest steps, [RECENT,
    len(PARTS)] of each rank.
    """

    def __init__(self, rows: Floats) -> None:
        self._rows, self._beside = rows[:, : len(_AT)], rows[:, len(_AT) :]

    def column(self, name: str) -> Floats:
        """Return what every rank sent under a name, as it was sent, [world_size]."""
        return self._rows[:, _AT[name]]

    @property
    def _heads(self) -> Floats:
        return self._rows[:, : len(Head._fields)]

    @property
    def _sums(self) -> Floats:
        return self._rows[:, len(Head._fields) : -len(USES)]

    @cached_property
    def times(self) -> tuple[RankTimes, ...]:
        """Average times of every rank, [world_size]."""
        return read_times(self._sums)

    @property
    def places(self) -> list[Place]:
        """Where ranks run, [world_size]; [] where that is not told."""
        told = np.nan_to_num(np.clip(self._beside[:, : len(Place._fields)], 0, _MOST))
        return [Place(*row) for row in told.tolist()] if self._beside.size else []

    @property
    def recent(self) -> Floats:
        """Seconds of the newest steps, [world_size, RECENT, len(PARTS)]; NaN where unknown."""
        if not self._beside.size:
            return np.full((len(self._rows), RECENT, len(PARTS)), np.nan)
        steps = self._beside[:, len(Place._fields) :].reshape(-1, RECENT, len(PARTS))
        return np.where((steps >= 0) & (steps <= _LONGEST_S), steps, np.nan)

    @cached_property
    def _first(self) -> RankTimes:
        """Average times of rank 0; those of all ranks are dear where there are thousands."""
        return read_times(self._sums[:1])[0]

    @property
    def is_measured(self) -> bool:
        """Whether some rank has counted a step."""
        steps = self.column("steps")
        return bool(((steps >= 1) & (steps <= _MOST) & (steps == np.floor(steps))).any())

    def screened(self, *, step: int, sizes: Sequence[int]) -> Interval | None:
        """Return what may be believed of it; None where rank 0 has counted no step.

        Rows are screened as they were sent, so that ``screen`` sees what no clock can have
        measured. Where the head of a report cannot be, the number that cannot be stands for all.
        """
        first = self._first
        if first.steps == 0:
            return None
        uses = self._rows[:, -len(USES) :]
        means = _means(self._sums)
        averages = dict(zip((*SUMS, *USES), np.concatenate([means, uses], axis=1).T, strict=True))
        steps = np.maximum(averages["steps"], 1.0)
        fetch_s = averages["typical_fetch_s"]
        averages |= {
            "fetch_s": fetch_s,
            "stall_s": usual_stall(fetch_s, averages["fetch_s"], averages["stall_s"]),
            "compute_s": averages["typical_compute_s"],
            "fetch_error_s": _root(averages["fetch_spread_s2"] / steps),
            "compute_error_s": _root(averages["compute_spread_s2"] / steps),
        }
        observed = np.stack([averages[name] for name in COLUMNS], axis=1)  # [world_size, 14]
        is_finite = np.isfinite(self._heads).all(axis=1)
        wrong = np.where(is_finite, self.column("drawn_ahead"), np.nan)[:, None]
        observed = np.where(self._has_head[:, None], observed, wrong)
        return screen(
            observed,
            step=step,
            sizes=sizes,
            step_s=first.typical_wall_s,
            step_error_s=math.sqrt(first.wall_spread_s2 / first.steps),
        )

    @property
    def _has_head(self) -> npt.NDArray[np.bool_]:
        """Which reports begin with numbers that can be, [world_size]; rank 0's always does."""
        drawn = self.column("drawn_ahead")
        fits: npt.NDArray[np.bool_] = (drawn >= -1) & (drawn <= drawn[0] + _FARTHEST_STEPS)
        fits &= np.isfinite(self._heads).all(axis=1)
        fits[0] = True
        return fits

    def steps_to_decide(self, num_passes: int) -> int:
        """Return after how many optimizer steps rank 0's plan leaves, >= 1: so many hide its work.

        Every rank works it out alike, from what rank 0 says that its own steps take. A plan must
        have arrived when the next times leave.
        """
        step_s = self._first.wall_s * num_passes
        fixed_s, rank_s = _DECIDES_S
        decides_s = fixed_s + rank_s * len(self._rows)
        most = max(self.next_interval - 2, 1)
        return min(math.ceil(decides_s / step_s), most) if step_s * most > decides_s else most

    def first_free_step(self, num_passes: int, *, next_batch: int, deciding: int) -> int:
        """Return a step that no rank will have drawn when a plan made from this report arrives.

        Rank 0 has ``deciding`` optimizer steps to make it, and ``next_batch`` begins the next one.

        What a rank cannot have drawn does not count: nobody can put a plan off for ever. The step
        is the first of the ``num_passes`` backward passes of an optimizer step.
        """
        drawn = int(self.column("drawn_ahead")[self._has_head].max())
        first = drawn + 1 + (_SLACK_STEPS + deciding) * num_passes
        # Up to the next first pass: next_batch=41 of 4 passes a step, first=57 starts at 57.
        return next_batch + -(-(first - next_batch) // num_passes) * num_passes

    @property
    def next_interval(self) -> int:
        """Steps from this exchange to the next, as rank 0 says: its clock decides for all."""
        return max(1, int(self.column("next_interval")[0]))
