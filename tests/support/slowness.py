"""How much slower this machine is just now than a quiet one, for tests that limit times.

What others do on the same cores and caches makes the same work take more CPU time, too, and on the
clock it also waits for its turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

__all__ = ["slowness"]

# The median of 900 repeats on two cores of an AMD EPYC with AVX-512, 2026-11-24.
_QUIET_S = 0.0096
_REPEATS = 100


def _work() -> float:
    """Do what simulations do: small arrays in NumPy, and some Python around them."""
    values = np.random.default_rng(0).random(1024)
    total = 0.0
    for _ in range(400):
        values = np.minimum(values[np.argsort(values)] * 1.01, 2.0)[::-1]
        total += sum(float(each) for each in values[:16]) + float(np.cumsum(values)[-1])
    return total


def slowness(clock: Callable[[], float] = time.process_time) -> float:
    """Return how many times the time of a quiet machine work takes now: 1.0 at the least.

    It takes a second of CPU time. ``clock`` gives seconds, of CPU time or of any other.
    """
    taken = []
    for _ in range(_REPEATS):
        began = clock()
        _work()
        taken.append(clock() - began)
    return max(1.0, statistics.median(taken) / _QUIET_S)
