"""Time functions against each other in one process: interleaved, smallest of several repeats."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "NOISE_LIMIT",
    "WALL",
    "Clock",
    "Judgement",
    "Ratio",
    "Rounds",
    "choose_clock",
    "interleaved_minimum",
    "paired_ratios",
]

NOISE_LIMIT = 0.05


@dataclass(frozen=True)
class Clock:
    """A way to read time.

    Attributes:
        name: "wall" or "process CPU".
        read_s: returns seconds since some start.
    """

    name: str
    read_s: Callable[[], float]


WALL = Clock("wall", time.perf_counter)


def choose_clock(*, threads: int = 1) -> Clock:
    """Return wall time, or the process's CPU time where other work keeps the machine busy.

    CPU time counts all threads together, so it serves only for one thread.
    """
    cpus = os.cpu_count() or 1
    is_busy = os.getloadavg()[0] + threads > cpus * 0.75
    if is_busy and threads == 1:
        return Clock("process CPU", time.process_time)
    return WALL


@dataclass(frozen=True)
class Rounds:
    """How often contestants take their turns.

    Attributes:
        least: rounds at least.
        least_s: rounds go on until all calls together have taken so many seconds.
    """

    least: int = 5
    least_s: float = 0.0


def interleaved_minimum(
    calls: Mapping[str, Callable[[], object]], *, clock: Clock, rounds: Rounds
) -> dict[str, float]:
    """Time every call once a round, in turn, and keep each one's smallest time.

    Slow and fast moments of the machine then fall on all calls alike, and their ratios hold.

    Args:
        calls: what to time, by name.
        clock: what to read.
        rounds: over all calls, after one that is not counted.

    Returns:
        Seconds of the fastest round of each call.
    """
    best = dict.fromkeys(calls, float("inf"))
    if not calls:
        return best
    for call in calls.values():
        call()
    done, spent_s = 0, 0.0
    while done < rounds.least or spent_s < rounds.least_s:
        for name, call in calls.items():
            begin = clock.read_s()
            call()
            seconds = clock.read_s() - begin
            best[name] = min(best[name], seconds)
            spent_s += seconds
        done += 1
    return best


@dataclass(frozen=True)
class Ratio:
    """One contestant against the baseline of the same rounds.

    Attributes:
        seconds: its median.
        ratio: median over rounds of its time by the baseline's.
        spread: interquartile range of these ratios.
    """

    seconds: float
    ratio: float
    spread: float


def paired_ratios(
    samples: Mapping[str, Sequence[float]], *, baseline: str, again: str
) -> dict[str, Ratio]:
    """Compare contestants round by round, so that a slow moment of the machine falls on all alike.

    Args:
        samples: seconds of every round of each contestant, all of one length.
        baseline: name of the contestant that the others are divided by.
        again: name of the same thing, timed once more in every round; the baseline of a round is
            the mean of both, and ``again`` itself is divided by ``baseline`` alone.
    """
    first, second = samples[baseline], samples[again]
    found = {}
    for name, seconds in samples.items():
        divisors = first if name in (baseline, again) else _means(first, second)
        ratios = sorted(value / by for value, by in zip(seconds, divisors, strict=True))
        quarter = len(ratios) // 4
        spread = ratios[-1 - quarter] - ratios[quarter]
        found[name] = Ratio(statistics.median(seconds), statistics.median(ratios), spread)
    return found


def _means(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [0.5 * (one + two) for one, two in zip(first, second, strict=True)]


@dataclass(frozen=True)
class Judgement:
    """Whether a goal is met: the ratio is at most the goal and half the noise.

    Attributes:
        goal: largest ratio wanted.
        ratio: the one found.
        noise: by how much the baseline differs from itself; above ``NOISE_LIMIT`` nothing is shown.
    """

    goal: float
    ratio: float
    noise: float

    @property
    def verdict(self) -> str:
        """Return "met", "missed", or "too noisy" when the machine was not quiet enough to say."""
        if self.noise > NOISE_LIMIT:
            return "too noisy"
        return "met" if self.ratio <= self.goal + 0.5 * self.noise else "missed"
