"""From what every rank measured to who is slow and why: pure arithmetic and plain words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "TIME_FIELDS",
    "RankTimes",
    "SlowRank",
    "describe",
    "find_slow",
    "means",
    "read_times",
    "unpaused_step_s",
]

TIME_FIELDS = (
    "steps",  # batches counted
    "samples",
    "local",  # samples from the rank's own node
    "remote",  # samples from elsewhere
    "fetch_s",
    "stall_s",
    "compute_s",
    "queued_s",
    "wait_s",
    "other_s",
    "wall_s",
    "cached",  # of the local samples, those that belong elsewhere
    "paused_s",  # in steps that are left out: checkpoints, evaluation
    "busy_s2",  # the square of a step's own work: how much it varies
    "held_s",  # of wait_s, what is far beyond the usual: others may have paused
)
_SLOW_RATIO = 1.10  # a rank is slow when its own work takes this many times the median rank's
_SLOW_SHARE = 0.03  # and when a step would be shorter by this share without the difference
_SLOW_ERRORS = 3.0  # and when the difference is so many of its standard errors


@dataclass(frozen=True)
class RankTimes:
    """What one rank spent on an average batch of the last interval.

    Attributes:
        rank: the rank.
        steps: batches measured; last ones of an epoch and the first with a new size are left out.
        samples: samples a batch; 0 for a rank that computes dummy batches only.
        local: of them from the rank's own node.
        remote: of them from elsewhere.
        fetch_s: seconds to read and prepare the batch, where that happens.
        stall_s: seconds of it that the script waited for; the rest ran beside the computing.
        compute_s: seconds from the batch's arrival to its last gradient, without ``queued_s``.
        queued_s: seconds that the computing stood still because another process held the CPU;
            measured where a node has more ranks than CPUs.
        wait_s: seconds spent waiting for the other ranks and the wire.
        other_s: seconds for everything else, the optimizer and the script's own code.
        wall_s: seconds from the end of the step before to the end of this one.
        cached: of ``local``, samples that belong elsewhere but were in a cache.
        paused_s: seconds of pauses (checkpoints, evaluation), whose steps are left out of the rest.
        busy_s2: mean square of ``busy_s`` over the batches.
        held_s: seconds of ``wait_s`` far beyond what is usual: other ranks may have paused.
    """

    rank: int
    steps: int
    samples: float
    local: float
    remote: float
    fetch_s: float
    stall_s: float
    compute_s: float
    queued_s: float
    wait_s: float
    other_s: float
    wall_s: float
    cached: float = 0.0
    paused_s: float = 0.0
    busy_s2: float = 0.0
    held_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of the rank's own work: computing, and what of the fetch it waited for."""
        return self.stall_s + self.compute_s

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


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    Attributes:
        rank: the rank.
        ratio: its own work a step over the median rank's.
        cause: "fetch" or "compute", whichever is further above the median rank's.
    """

    rank: int
    ratio: float
    cause: str


def means(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Turn the sums that ranks exchanged into averages a batch, as they are: not all are times.

    Args:
        rows: sums over an interval in the order of ``TIME_FIELDS``, [world_size, 15].

    Returns:
        The same shape, with the number of batches in front; 0 for a rank without batches, NaN for
        one whose number of batches is none.
    """
    steps = rows[:, :1]
    is_count = np.isfinite(steps) & (steps >= 0) & (steps == np.floor(steps))
    averages = np.where(steps > 0, rows, 0.0) / np.where(is_count & (steps > 0), steps, 1.0)
    averages[:, :1] = steps
    return np.where(is_count, averages, np.nan)


def read_times(rows: npt.NDArray[np.float64]) -> tuple[RankTimes, ...]:
    """Turn the sums that ranks exchanged into averages a batch.

    Args:
        rows: sums over an interval in the order of ``TIME_FIELDS``, [world_size, 15].

    Returns:
        One entry a rank. Sums that no clock can have measured (not finite, negative) count as 0.
    """
    known = means(rows)
    known = np.where(np.isfinite(known) & (known >= 0), known, 0.0)
    return tuple(RankTimes(rank, int(row[0]), *row[1:]) for rank, row in enumerate(known.tolist()))


def unpaused_step_s(times: Sequence[RankTimes]) -> float:
    """Return the seconds of a step by rank 0's clock, without its waiting for others' pauses.

    What others say only tells pauses from slow steps: no more is taken off than rank 0 has waited
    beyond the usual, so that nobody can talk a bad plan's steps short.
    """
    first = times[0]
    if not first.steps:
        return first.wall_s
    longest = max(entry.paused_s * entry.steps for entry in times)
    held_s = min(longest / first.steps, first.held_s)
    return max(first.busy_s, first.wall_s - held_s)


def find_slow(times: Sequence[RankTimes]) -> tuple[SlowRank, ...]:
    """Return the ranks whose own work takes well over the median rank's, slowest first.

    "Well over" is a tenth more, a share of the step worth speaking of, and more than the two
    ranks' own variation explains.
    """
    measured = [time for time in times if time.samples > 0]
    if len(measured) < 2:
        return ()
    busy = statistics.median(time.busy_s for time in measured)
    stall = statistics.median(time.stall_s for time in measured)
    compute = statistics.median(time.compute_s for time in measured)
    error = statistics.median(time.busy_error_s for time in measured)
    step_s = max(time.wall_s for time in measured)
    slow = [
        SlowRank(
            time.rank,
            time.busy_s / busy if busy > 0 else 1.0,
            "fetch" if time.stall_s - stall > time.compute_s - compute else "compute",
        )
        for time in measured
        if busy > 0
        and time.busy_s - busy > max((_SLOW_RATIO - 1.0) * busy, _SLOW_SHARE * step_s)
        and time.busy_s - busy > _SLOW_ERRORS * math.hypot(time.busy_error_s, error)
    ]
    return tuple(sorted(slow, key=lambda entry: -entry.ratio))


def describe(times: Sequence[RankTimes]) -> str:
    """Say what each rank spent its steps on, and in plain words which is slow and why.

    ``stall`` is the part of ``fetch`` that the script waited for; a rank's own work is its stall
    and its computing. ``overlap`` is how much of the shorter of fetch and computing was hidden.
    """
    columns = ("fetch", "stall", "compute", "queued", "wait", "other")
    titles = "".join(f"{column + ' ms':>12s}" for column in columns)
    lines = [f"rank  samples{titles}   samples/s  overlap"]
    for time in times:
        values = (time.fetch_s, time.stall_s, time.compute_s, time.queued_s, time.wait_s)
        cells = "".join(f"{1e3 * value:12.2f}" for value in (*values, time.other_s))
        ends = f"{time.samples_per_s:12.0f}{time.overlap:9.0%}"
        lines.append(f"{time.rank:4d}  {time.samples:7.1f}{cells}{ends}")
    slow = find_slow(times)
    by_rank = {time.rank: time for time in times}
    for entry in slow:
        why = f"its own work takes {entry.ratio:.2f}x the median rank's"
        if entry.cause == "fetch" and by_rank[entry.rank].remote > 0:
            why += f"; {by_rank[entry.rank].remote:.1f} samples a batch come from elsewhere"
        lines.append(f"rank {entry.rank} is slow: {entry.cause} ({why})")
    if not slow:
        lines.append("no rank is slow")
    lines += [
        f"rank {time.rank}: {time.paused_s * time.steps:.2f} s of pauses are left out"
        for time in times
        if time.paused_s > 0
    ]
    return "\n".join(lines)
