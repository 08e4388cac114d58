"""What averages of ranks do not show: ranks that are slow by turns, and cores that ranks share.

A rank that is slow in every fourth step is, on average, as fast as the three others that are slow
in the steps between; and yet in every step somebody is waited for. Steps one by one show that.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loft_hvd.balance.interval import PARTS, Floats, Place, RankTimes, Report

__all__ = ["Crowd", "Turns", "find_crowd", "find_turns", "look_beside"]

# A step of a rank is long when it takes so many times more than its shorter steps are spread, a
# tenth more than them, and 3 % of a whole step: as what makes a rank slow (``explain.py``).
_LONG_SPREADS, _LONG_RATIO, _LONG_SHARE = 5.0, 0.10, 0.03
_FEWEST = 8  # steps that say it
_MOST_STEPS_OF_ONE = 0.75  # of the long ones; with more it is that rank's matter
_LEAST_STEPS = 0.25  # of all, that one rank alone makes long
_QUEUED = 0.10  # of a step, that makes cores scarce


@dataclass(frozen=True)
class Turns:
    """Ranks that are slow by turns."""

    ranks: list[int]
    cause: str  # what takes longest in long steps, one of ``CAUSES`` of ``explain.py``
    share: float  # of a step that the others wait for them
    steps: int  # of the newest ones, in which one of them alone took long
    num_steps: int  # that were looked at


@dataclass(frozen=True)
class Crowd:
    """Ranks of a host that share too few cores."""

    num_ranks: int  # on the host
    cpus: int  # that each may run on
    queued_s: float  # of a step, of the median rank: ready to run while others had the cores
    share: float  # the same of a step


def find_turns(recent: Floats, *, step_s: float) -> Turns | None:
    """Return the ranks that are slow by turns, or None.

    Args:
        recent: seconds of the newest steps, [world_size, steps, len(PARTS)]; NaN where a rank has
            not counted one.
        step_s: seconds of a whole step.
    """
    known = recent[:, np.isfinite(recent).all(axis=(0, 2))]  # [world_size, steps, parts]
    num_ranks, num_steps, _ = known.shape
    if num_ranks < 2 or num_steps < _FEWEST or not step_s > 0:
        return None
    # Queueing is nobody's own work: where cores are scarce it goes by turns, too.
    own = known[..., : PARTS.index("queue")].sum(axis=2)  # [world_size, steps]
    # By the shorter half of a rank's steps: of two ranks that take turns, half of each one's are
    # long. The spread from the 10th to the 40th percentile is about a standard deviation.
    low, usual, high = np.quantile(own, (0.1, 0.25, 0.4), axis=1)[..., None]  # [world_size, 1] each
    over = own - usual
    least = np.maximum(_LONG_SPREADS * (high - low), _LONG_RATIO * usual)
    is_long = over > np.maximum(least, _LONG_SHARE * step_s)  # [world_size, steps]
    is_alone = is_long.sum(axis=0) == 1  # [steps]
    counts = (is_long & is_alone).sum(axis=1)  # [world_size]
    if counts.sum() < _LEAST_STEPS * num_steps or counts.max() > _MOST_STEPS_OF_ONE * counts.sum():
        return None
    lost_s = float((over * (is_long & is_alone)).sum()) / num_steps
    if lost_s < _LONG_SHARE * step_s:
        return None
    by_part = known - np.quantile(known, 0.25, axis=1)[:, None]
    parts = by_part[is_long & is_alone].sum(axis=0)[: PARTS.index("queue")]
    cause = PARTS[int(parts.argmax())]
    if cause == "backward" and not known[..., PARTS.index("forward")].any():
        cause = "compute"  # it is not known in which pass
    return Turns(
        ranks=np.flatnonzero(counts).tolist(),
        cause=cause,
        share=min(1.0, lost_s / step_s),
        steps=int(counts.sum()),
        num_steps=num_steps,
    )


def find_crowd(times: Sequence[RankTimes], places: Sequence[Place]) -> Crowd | None:
    """Return the host whose ranks queue longest for too few cores, or None.

    Args:
        times: of all ranks.
        places: of each; [] where not known.
    """
    hosts: dict[tuple[float, ...], list[tuple[RankTimes, Place]]] = {}
    for time, place in zip(times, places, strict=False):
        hosts.setdefault(place[:3], []).append((time, place))
    found = []
    for (num_ranks, cpus, _), ranks in hosts.items():
        # Of ranks that are bound to CPUs of their own none shares them with all.
        if not (num_ranks > cpus > 0 and len(ranks) >= num_ranks):
            continue
        step_s = max(time.wall_s for time, _ in ranks)
        queued_s = statistics.median(
            max(time.queued_s, place.threads_queued_s) for time, place in ranks
        )
        if queued_s > _QUEUED * step_s > 0:
            share = min(1.0, queued_s / step_s)
            found.append(Crowd(int(num_ranks), int(cpus), queued_s, share))
    return max(found, key=lambda crowd: crowd.share, default=None)


def look_beside(report: Report) -> tuple[Crowd | None, Turns | None]:
    """Return what an interval's report shows beside the averages."""
    times = report.times
    step_s = max((time.wall_s for time in times), default=0.0)
    return find_crowd(times, report.places), find_turns(report.recent, step_s=step_s)
