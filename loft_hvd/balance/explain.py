"""From what every rank measured to who is slow and why: pure arithmetic and plain words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TIME_FIELDS", "RankTimes", "SlowRank", "describe", "find_slow", "read_times"]

TIME_FIELDS = ("steps", "samples", "fetch_s", "compute_s", "queued_s", "wait_s", "other_s")
_SLOW_RATIO = 1.10  # a rank is slow when its own work takes this many times the median rank's


@dataclass(frozen=True)
class RankTimes:
    """What one rank spent on an average step of the last interval.

    Attributes:
        rank: the rank.
        steps: steps measured; steps in which the rank had no samples are left out.
        samples: samples a step.
        fetch_s: seconds a step to read and prepare the batch.
        compute_s: seconds a step from the batch's arrival to its last gradient, without
            ``queued_s``.
        queued_s: seconds a step that the computing stood still because another process held the
            CPU; measured where a node has more ranks than CPUs.
        wait_s: seconds a step spent waiting for the other ranks and the wire.
        other_s: seconds a step for everything else, the optimizer and the script's own code.
    """

    rank: int
    steps: int
    samples: float
    fetch_s: float
    compute_s: float
    queued_s: float
    wait_s: float
    other_s: float

    @property
    def busy_s(self) -> float:
        """Seconds a step of work that depends on the batch: fetch and compute."""
        return self.fetch_s + self.compute_s

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


def read_times(rows: npt.NDArray[np.float64]) -> tuple[RankTimes, ...]:
    """Turn the sums that ranks exchanged into averages a step.

    Args:
        rows: sums over an interval in the order of ``TIME_FIELDS``, [world_size, 7].

    Returns:
        One entry a rank. Sums that no clock can have measured (not finite, negative) count as 0.
    """
    times = []
    for rank, row in enumerate(np.where(np.isfinite(rows) & (rows >= 0), rows, 0.0)):
        steps = int(row[0])
        means = [float(value) / steps if steps else 0.0 for value in row[1:]]
        times.append(RankTimes(rank, steps, *means))
    return tuple(times)


def find_slow(times: Sequence[RankTimes]) -> tuple[SlowRank, ...]:
    """Return the ranks whose own work takes well over the median rank's, slowest first."""
    measured = [time for time in times if time.steps > 0]
    if len(measured) < 2:
        return ()
    busy = statistics.median(time.busy_s for time in measured)
    fetch = statistics.median(time.fetch_s for time in measured)
    compute = statistics.median(time.compute_s for time in measured)
    slow = [
        SlowRank(
            time.rank,
            time.busy_s / busy if busy > 0 else 1.0,
            "fetch" if time.fetch_s - fetch > time.compute_s - compute else "compute",
        )
        for time in measured
        if busy > 0 and time.busy_s > _SLOW_RATIO * busy
    ]
    return tuple(sorted(slow, key=lambda entry: -entry.ratio))


def describe(times: Sequence[RankTimes]) -> str:
    """Say in plain words what each rank spent its steps on, and which is slow and why."""
    lines = ["rank  samples  fetch ms  compute ms  queued ms  wait ms  other ms  samples/s"]
    lines += [
        f"{time.rank:4d}  {time.samples:7.1f}  {time.fetch_s * 1e3:8.2f}  "
        f"{time.compute_s * 1e3:10.2f}  {time.queued_s * 1e3:9.2f}  {time.wait_s * 1e3:7.2f}  {time.other_s * 1e3:8.2f}  "
        f"{time.samples_per_s:9.0f}"
        for time in times
    ]
    slow = find_slow(times)
    lines += [
        f"rank {entry.rank} is slow: {entry.cause} (its own work takes {entry.ratio:.2f}x the "
        "median rank's)"
        for entry in slow
    ]
    if not slow:
        lines.append("no rank is slow")
    return "\n".join(lines)
