"""``loft-hvd bench kernels``: every rule against one pass over the same memory, and against peers.

"pass" is our own vertical sum over the same rows at the same instruction set, row after row or in
the bursts in which the kernels read, whichever is faster: what reading the memory costs. All
contestants of a row count run in turn in one process, and each one's fastest round counts. Every
one of them is compared with its definition first.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.aggregation.rules import MAX_ROWS
from loft_hvd.bench.contestants import (
    PASS,
    PASS_AGAIN,
    PASS_BURSTS,
    KernelRun,
    called_level,
    check_contestants,
    check_threads,
    contestants,
    pass_calls,
    row_calls,
)
from loft_hvd.bench.peers import Call, Untimed, find_ways, peer_calls
from loft_hvd.errors import ArgumentError, MissingDependencyError
from loft_hvd.topology import allowed_cpus

__all__ = [
    "ONE_THREAD",
    "TWO_THREADS",
    "WALL",
    "Clock",
    "KernelBench",
    "Rounds",
    "Timing",
    "choose_clock",
    "interleaved_minimum",
    "measure_kernels",
]

ONE_THREAD, TWO_THREADS = "one thread:", "two threads:"


@dataclass(frozen=True)
class Clock:
    """A way to read time."""

    name: str  # "wall" or "process CPU"
    read_s: Callable[[], float]  # returns seconds since some start


WALL = Clock("wall", time.perf_counter)


def choose_clock(*, threads: int = 1) -> Clock:
    """Return wall time, or the process's CPU time where other work keeps the machine busy."""
    # CPU time counts all threads together, so it serves only for one thread.
    # Measured wall times then hold other work's turns on the core; CPU time does not. A quarter of
    # the machine free, beside what we add, is what we take for quiet: a rule of thumb.
    cpus = os.cpu_count() or 1
    is_busy = os.getloadavg()[0] + threads > cpus * 0.75
    if is_busy and threads == 1:
        return Clock("process CPU", time.process_time)
    return WALL


@dataclass(frozen=True)
class Rounds:
    """How often contestants take their turns."""

    least: int = 5  # rounds at least
    least_s: float = 0.0  # rounds go on until all calls together have taken so many seconds


def interleaved_minimum(
    calls: Mapping[str, Call], *, clock: Clock, rounds: Rounds
) -> dict[str, float]:
    """Time every call once a round, in turn, and return the seconds of each one's fastest round."""
    # In turn, slow and fast moments of the machine fall on all calls alike, and their ratios hold.
    # The least of many rounds is one in which nothing else used the memory.
    best = dict.fromkeys(calls, float("inf"))
    if not calls:
        return best
    # The first call of each faults in the pages of its output: not counted.
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
class KernelBench:
    """What is measured."""

    rows: tuple[int, ...] = (3, 4, 8, 16, 32, 33, 64, 128)
    # Coordinates of a row; fewer where all rows together would take over `most_bytes`.
    numel: int = 10_000_000
    threads: int = 1
    repeats: int = 5  # rounds at least; the fastest counts
    # Rounds go on for so many seconds, for each row count and level, two threads, the memory and
    # peers; a round of few rows is over in a tenth of one.
    least_s: float = 0.0
    levels: tuple[str, ...] = ()  # instruction sets; empty for all that this CPU runs
    most_bytes: int = 6_000_000_000  # memory for rows


@dataclass(frozen=True)
class Timing:
    """One contestant at one row count."""

    contestant: str
    level: str  # instruction set, "" for what is not ours
    rows: int  # row count
    numel: int  # coordinates that were timed
    seconds: float  # of the fastest round
    passes: float  # its time for a coordinate over the pass's at the same level
    bytes_moved: int  # read and written once, whatever it really does

    @property
    def ns_a_coordinate(self) -> float:
        return 1e9 * self.seconds / self.numel

    @property
    def gb_per_s(self) -> float:
        """Useful bytes by time, in GB/s."""
        return 1e-9 * self.bytes_moved / self.seconds


def measure_kernels(
    bench: KernelBench, *, report: Callable[[Untimed], None]
) -> Iterator[list[Timing]]:
    """Check and time everything, and yield the timings of one row count after the other.

    ``report`` takes peers that are not timed, with the reason.
    """
    # Everything is refused before the rows are made, which takes seconds and gigabytes.
    module = extension()
    if module is None:
        raise MissingDependencyError("bench kernels times the extension: run `make setup` first")
    here = module.isa_levels()
    if unknown := [level for level in bench.levels if level not in here]:
        raise ArgumentError(f"bench kernels: level {unknown[0]!r}; this CPU runs {', '.join(here)}")
    if wrong := [rows for rows in bench.rows if not 1 <= rows <= MAX_ROWS]:
        raise ArgumentError(f"bench kernels: {wrong[0]} rows; row counts are from 1 to {MAX_ROWS}")
    levels = bench.levels or tuple(here)
    ways = find_ways(report)
    most = max(bench.rows)
    # Whole AVX-512 vectors of float32, so that no tail is timed; the same for all row counts, which
    # share one block of memory.
    numel = min(bench.numel, bench.most_bytes // (4 * most)) // 16 * 16
    pool = _noise(most * numel).view(most, numel)
    wide = torch.empty(numel)
    for rows in bench.rows:
        check_contestants(module, rows, levels)
        runs = [KernelRun(module, pool[:rows], wide, level, bench.threads) for level in levels]
        with _torch_threads(bench.threads):
            peer, few = peer_calls(ways, pool[:rows], report)
            timings = _measure_rows(runs, bench, peer, few)
        yield timings


def _noise(count: int) -> Tensor:
    """Return normal values, the same ones at every run."""
    # A short stretch is repeated, because speed depends on the order of a column's values alone.
    stretch = torch.randn(min(count, 5_000_011), generator=torch.Generator().manual_seed(0))
    # The stretch is no multiple of a power of two, so that rows, which have such lengths, differ.
    values = torch.empty(count)
    for first in range(0, count, len(stretch)):
        part = values[first : first + len(stretch)]
        part.copy_(stretch[: len(part)])
    return values


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    """Let torch, and what asks it, use as many threads as the kernels do."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure_rows(
    runs: Sequence[KernelRun], bench: KernelBench, peer: Mapping[str, Call], few: int
) -> list[Timing]:
    """Time all contestants of a row count; runs differ in their level, the best one last."""
    best = runs[-1]
    rows, numel = best.pool.shape
    # One clock for all contestants of a row count: ratios of two clocks mean nothing.
    clock = choose_clock(threads=best.threads)
    rounds = Rounds(bench.repeats, bench.least_s)
    timings = []
    for run in runs:
        if run.threads > 1:
            check_threads(replace(run, threads=1), run)
        calls = _kernel_calls(run)
        timings += _time(calls, clock, rounds, shape=(rows, numel), level=run.level)
    # Peers, which have no level, are compared with the fastest pass of any level.
    base = min(t.ns_a_coordinate for t in timings if t.contestant.startswith(PASS))
    if best.threads == 1 and allowed_cpus() > 1:
        check_threads(best, replace(best, threads=2))
        calls = _thread_calls(best)  # in wall time: CPU time is that of both threads together
        timings += _time(calls, WALL, rounds, shape=(rows, numel), level=best.level, base=base)
    memory = {
        "memcpy of one row": lambda: best.out.copy_(best.pool[0]),
        "torch.sum": lambda: torch.sum(best.pool, dim=0, out=best.out),
    }
    timings += _time(memory, clock, rounds, shape=(rows, numel), base=base)
    return timings + _time(peer, clock, rounds, shape=(rows, few), base=base)


def _kernel_calls(run: KernelRun) -> dict[str, Call]:
    """Return what of ours is timed at this run, with the pass first and last."""
    calls = pass_calls(run)
    is_called = run.level == called_level(run.module)
    for contestant in contestants(len(run.pool), is_called=is_called):
        calls[contestant.name] = contestant.call(run)
    calls |= row_calls(run)
    calls[PASS_AGAIN] = calls[PASS]  # how far it is from the first says how noisy the rounds were
    return calls


def _thread_calls(run: KernelRun) -> dict[str, Call]:
    """Return the pass and the rules that are most used, by one thread and by two."""
    # All of them in the same rounds: a gain is a ratio, and the pass says what could be gained.
    calls = {}
    for threads, words in ((1, ONE_THREAD), (2, TWO_THREADS)):
        for name, call in _kernel_calls(replace(run, threads=threads)).items():
            if name in (PASS, PASS_AGAIN, "median") or name.startswith("trimmed_mean f="):
                calls[f"{words} {name}"] = call
    return calls


def _time(
    calls: Mapping[str, Call],
    clock: Clock,
    rounds: Rounds,
    *,
    shape: tuple[int, int],
    level: str = "",
    base: float | None = None,
) -> list[Timing]:
    """Time contestants in turn; ``base`` is the pass's nanoseconds, None to find it among them."""
    rows, numel = shape
    best = interleaved_minimum(calls, clock=clock, rounds=rounds)
    if base is None:
        base = 1e9 * min(best[PASS], best[PASS_AGAIN], best[PASS_BURSTS]) / numel
    timings = []
    for name, seconds in best.items():
        # n rows read and one result written; a copy reads and writes one row.
        width = 2 if name.endswith("float16") else 4
        moved = width * numel * (2 if name.startswith("memcpy") else rows + 1)
        passes = 1e9 * seconds / numel / base
        timings.append(Timing(name, level, rows, numel, seconds, passes, moved))
    return timings
