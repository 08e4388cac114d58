"""What this process may use of its machine, read from the operating system."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["allowed_cpus", "run_queue_s"]

_SCHEDSTAT = Path("/proc/thread-self/schedstat")  # cpu ns, ns runnable but not running, slices


def allowed_cpus() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_queue_s() -> float:
    """Return the seconds that the calling thread was ready to run while others held its CPU.

    Counts from the thread's start; 0 where the system does not tell (it is not Linux).
    """
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
