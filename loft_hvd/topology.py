"""What this process may use of its machine, read from the operating system."""

from __future__ import annotations

import functools
import math
import os
import platform
import threading
import time
from contextlib import suppress
from pathlib import Path

__all__ = [
    "LoadMeter",
    "QueueMeter",
    "allowed_cpus",
    "cpu_flags",
    "cpu_name",
    "first_cpu",
    "run_queue_s",
    "vector_levels",
]

_SCHEDSTAT = "/proc/thread-self/schedstat"  # cpu ns, ns runnable but not running, slices
_TASKS = Path("/proc/self/task")  # a folder for each thread
_CARRIERS = ("gloo_tcp_loop", "pt_gloo_runloop")  # Gloo's threads, as torch 2.13 names them
_COMPUTES = 0.25  # of the main thread's CPU time: a thread that has so much computes with it
_STAT = Path("/proc/stat")  # first line: cpu user nice system idle iowait irq softirq steal ...
_MEMINFO = Path("/proc/meminfo")  # first lines: MemTotal, MemFree, MemAvailable
_CPUINFO = Path("/proc/cpuinfo")
# What each level of the CPU kernels needs beside the level before; csrc/levels.cpp has the same.
_LEVELS = {
    "avx2": {"avx2", "popcnt", "bmi2", "f16c", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


def allowed_cpus() -> int:
    """Return how many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def first_cpu() -> int:
    """Return the lowest number of the CPUs that this process may run on; 0 where not known."""
    return min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def cpu_name() -> str:
    """Return the model of this machine's CPU; empty where the system does not tell."""
    with suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def cpu_flags() -> frozenset[str]:
    """Return the CPU's features as Linux names them; empty elsewhere."""
    with suppress(OSError):
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            label, _, names = line.partition(":")
            if label.strip() in ("flags", "Features"):  # x86, ARM
                return frozenset(names.split())
    return frozenset()


def vector_levels(flags: frozenset[str]) -> list[str]:
    """Return the levels of the CPU kernels that run with these features, the best last."""
    levels = ["baseline"]
    for level, needs in _LEVELS.items():
        if not needs <= flags:  # each level needs those before it
            break
        levels.append(level)
    return levels


class _QueueFile:
    """The file of a thread in /proc, open: reading takes 4 us, where opening it takes 60."""

    def __init__(self) -> None:
        self.number = os.open(_SCHEDSTAT, os.O_RDONLY)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError, TypeError):  # at the interpreter's end os is empty
            os.close(self.number)


class _OwnFile(threading.local):
    """Each thread's own."""

    def __init__(self) -> None:
        self.file = _QueueFile()  # closed with the thread


@functools.cache
def _own_file(pid: int) -> _OwnFile:
    """Return the files of this process; a fork's threads are others than those of its parent."""
    del pid
    return _OwnFile()


def run_queue_s() -> float:
    """Return the seconds that the calling thread was ready to run while others held its CPU.

    Counts from the thread's start; 0 where the system does not tell (it is not Linux).
    """
    try:
        return int(os.pread(_own_file(os.getpid()).file.number, 64, 0).split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def thread_times() -> dict[int, tuple[float, float]]:
    """Return what each thread of this process has had of CPUs, and queued for them, in seconds.

    By the system's number of the thread; the main one's is that of the process. {} where the system
    does not tell (it is not Linux).
    """
    found = {}
    with suppress(OSError):
        for thread in os.listdir(_TASKS):
            with suppress(OSError, IndexError, ValueError):  # it may have ended
                had, queued = _begin(_TASKS / thread / "schedstat").split()[:2]
                found[int(thread)] = int(had) * 1e-9, int(queued) * 1e-9
    return found


def thread_name(thread: int) -> str:
    """Return the system's name of a thread of this process, "" where it has ended."""
    with suppress(OSError):
        return _begin(_TASKS / str(thread) / "comm").rstrip()
    return ""


class QueueMeter:
    """How long threads beside the main one queued for a CPU, between two readings.

    They were ready to run while others held it. 0 where the system does not tell (not Linux).
    """

    def __init__(self) -> None:
        self._last = thread_times()

    def longest_s(self) -> tuple[float, float]:
        """Return the longest queues since the last call, of two kinds of threads.

        Of those that compute, such as OpenMP's, for which the main one waits in its own steps; and
        of Gloo's, as torch names them, which carry what ranks exchange.
        """
        now, before = thread_times(), self._last
        self._last = now
        spent = {
            thread: (had - before[thread][0], queued - before[thread][1])
            for thread, (had, queued) in now.items()
            if thread in before
        }
        main_s, _ = spent.pop(os.getpid(), (math.inf, 0.0))
        computing_s = carrying_s = 0.0
        for thread, (had, queued) in spent.items():
            if queued > 0 and thread_name(thread) in _CARRIERS:
                carrying_s = max(carrying_s, queued)
            elif had > _COMPUTES * main_s:
                computing_s = max(computing_s, queued)
        return computing_s, carrying_s


def _begin(path: Path) -> str:
    """Return the first kilobyte of a file, without the layers that cost more than it does."""
    with path.open("rb", buffering=0) as file:
        # The kernel cuts names after 15 bytes, also inside a character of UTF-8.
        return (file.read(1024) or b"").decode(errors="replace")


class LoadMeter:
    """How much of this machine's CPUs others use, between two readings, and of its memory.

    0 where the system does not tell (it is not Linux).
    """

    def __init__(self) -> None:
        self._last = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return seconds that all CPUs were busy, that they had in all, and this process's own."""
        try:
            ticks = [int(word) for word in _begin(_STAT).split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            ticks = [0] * 8
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        # Waiting for a disk (4) leaves a CPU free. Guests' time, from 9 on, is in user (0) already.
        idle = (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
        return total - idle, total, time.process_time()

    def cpu_use(self) -> float:
        """Return the share of all CPUs that others used since the last call, 0 to 1."""
        now = self._read()
        busy, total, own = (after - before for after, before in zip(now, self._last, strict=True))
        self._last = now
        return min(1.0, max(0.0, (busy - own) / total)) if total > 0 else 0.0

    @staticmethod
    def memory_use() -> float:
        """Return the share of the machine's memory that is not available, 0 to 1."""
        try:
            lines = (line.split() for line in _begin(_MEMINFO).splitlines()[:3])
            sizes = {line[0]: int(line[1]) for line in lines}
            return min(1.0, max(0.0, 1.0 - sizes["MemAvailable:"] / sizes["MemTotal:"]))
        except (OSError, ValueError, LookupError, ZeroDivisionError):
            return 0.0
