"""From what every rank measured to who is slow and why: pure arithmetic and plain words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["TIME_FIELDS", "RankTimes", "SlowRank", "describe", "find_slow", "read_times"]

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
)
_SLOW_RATIO = 1.10  # a rank is slow when its own work takes this many times the median rank's


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

    @property
    def busy_s(self) -> float:
        """Seconds of the rank's own work: computing, and what of the fetch it waited for."""
        return self.stall_s + self.compute_s

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
    """Turn the sums that ranks exchanged into averages a batch.

    Args:
        rows: sums over an interval in the order of ``TIME_FIELDS``, [world_size, 11].

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
    measured = [time for time in times if time.samples > 0]
    if len(measured) < 2:
        return ()
    busy = statistics.median(time.busy_s for time in measured)
    stall = statistics.median(time.stall_s for time in measured)
    compute = statistics.median(time.compute_s for time in measured)
    slow = [
        SlowRank(
            time.rank,
            time.busy_s / busy if busy > 0 else 1.0,
            "fetch" if time.stall_s - stall > time.compute_s - compute else "compute",
        )
        for time in measured
        if busy > 0 and time.busy_s > _SLOW_RATIO * busy
    ]
    return tuple(sorted(slow, key=lambda entry: -entry.ratio))


def describe(times: Sequence[RankTimes]) -> str:
    """Say what each rank spent its steps on, and in plain words which is slow and why.

    ``stall`` is the part of ``fetch`` that the script waited for; a rank's own work is its stall
    and its computing.
    """
    columns = ("fetch", "stall", "compute", "queued", "wait", "other")
    titles = "".join(f"{column + ' ms':>12s}" for column in columns)
    lines = [f"rank  samples{titles}   samples/s"]
    for time in times:
        values = (time.fetch_s, time.stall_s, time.compute_s, time.queued_s, time.wait_s)
        cells = "".join(f"{1e3 * value:12.2f}" for value in (*values, time.other_s))
        lines.append(f"{time.rank:4d}  {time.samples:7.1f}{cells}{time.samples_per_s:12.0f}")
    slow = find_slow(times)
    lines += [
        f"rank {entry.rank} is slow: {entry.cause} (its own work takes {entry.ratio:.2f}x the "
        "median rank's)"
        for entry in slow
    ]
    if not slow:
        lines.append("no rank is slow")
    return "\n".join(lines)
