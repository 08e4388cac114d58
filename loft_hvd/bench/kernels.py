"""``loft-hvd bench kernels``: every rule against one pass over the same memory, and against peers.

"pass" is our own vertical sum over the same rows at the same instruction set, row after row or in
the bursts in which the kernels read, whichever is faster: what reading the memory costs. All
contestants of a row count run in turn in one process, and each one's fastest round counts. Every
rule is compared with its definition on poisoned rows first.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import MeanAroundMedian, Median, Phocas, Rule, TrimmedMean
from loft_hvd.bench.timing import WALL, Clock, choose_clock, interleaved_minimum
from loft_hvd.errors import AggregationError, ArgumentError, MissingDependencyError
from loft_hvd.topology import allowed_cpus

__all__ = ["KernelBench", "Timing", "check_rules", "measure_kernels", "peers", "rules_of"]

PASS, PASS_AGAIN, PASS_BURSTS = "pass", "pass again", "pass in bursts"
ONE_THREAD, TWO_THREADS = "one thread:", "two threads:"
_PEER_NUMEL = 200_000  # peers take 50 passes and more
_PEERS = ("byzfl", "krum", "flwr")
_RULE_CODES = {Median: 0, TrimmedMean: 1, MeanAroundMedian: 2, Phocas: 3}
_DTYPE_CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass(frozen=True)
class KernelBench:
    """What is measured.

    Attributes:
        rows: row counts.
        numel: coordinates of a row; fewer where all rows together would take over ``most_bytes``.
        threads: CPU threads.
        repeats: rounds; the fastest counts.
        levels: instruction sets; empty for the best one here.
        most_bytes: memory for rows.
    """

    rows: tuple[int, ...] = (3, 4, 8, 16, 32, 33, 64, 128)
    numel: int = 10_000_000
    threads: int = 1
    repeats: int = 5
    levels: tuple[str, ...] = ()
    most_bytes: int = 6_000_000_000


@dataclass(frozen=True)
class Timing:
    """One contestant at one row count.

    Attributes:
        contestant: its name.
        level: instruction set, "" for what is not ours.
        rows: row count.
        numel: coordinates that were timed.
        seconds: of the fastest round.
        passes: its time for a coordinate over the pass's at the same level.
        bytes_moved: read and written once, whatever it really does.
    """

    contestant: str
    level: str
    rows: int
    numel: int
    seconds: float
    passes: float
    bytes_moved: int

    @property
    def ns_a_coordinate(self) -> float:
        """Nanoseconds for one coordinate."""
        return 1e9 * self.seconds / self.numel

    @property
    def gb_per_s(self) -> float:
        """Useful bytes by time, in GB/s."""
        return 1e-9 * self.bytes_moved / self.seconds


def peers() -> dict[str, str]:
    """Return the installed packages with robust aggregation of their own, and their versions."""
    found = {}
    for name in _PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_rules(rows: int, *, device: torch.device | None = None) -> None:
    """Compare every rule with its definition on rows with NaN, infinities and 1e30.

    Raises:
        AggregationError: a result differs by more than its rounding.
    """
    values = np.random.default_rng(rows).standard_normal((rows, 4099)).astype(np.float32)
    if rows >= 3:  # fewer tolerate none
        values[-1, ::3], values[-1, 1::3], values[-1, 2::3] = np.nan, np.inf, 1e30
    gradients = torch.from_numpy(values).to(device or "cpu")
    for name, rule in rules_of(rows).items():
        wanted = torch.from_numpy(reference(values.astype(np.float64), rule))
        out = torch.full((4099,), torch.nan, device=gradients.device)
        aggregate(gradients, rule, out=out)
        error = (out.cpu().double() - wanted).abs() / wanted.abs().clamp(min=1.0)
        worst = float(error.nan_to_num(nan=torch.inf).max())
        if not worst <= 1e-5:
            raise AggregationError(
                f"bench kernels: {name} of {rows} rows differs from its definition by {worst:g}"
            )


def measure_kernels(bench: KernelBench) -> Iterator[list[Timing]]:
    """Check and time everything, one row count after the other.

    Yields:
        The timings of a row count.

    Raises:
        MissingDependencyError: the extension is not built.
        ArgumentError: a level that this CPU does not run, or no rows.
        AggregationError: a result is wrong.
    """
    module = extension()
    if module is None:
        raise MissingDependencyError("bench kernels times the extension: run `make setup` first")
    here = module.isa_levels()
    if unknown := [level for level in bench.levels if level not in here]:
        raise ArgumentError(f"bench kernels: level {unknown[0]!r}; this CPU runs {', '.join(here)}")
    if min(bench.rows) < 1:
        raise ArgumentError(f"bench kernels: {min(bench.rows)} rows; row counts are >= 1")
    levels = bench.levels or (here[-1],)
    most = max(bench.rows)
    numel = min(bench.numel, bench.most_bytes // (4 * most)) // 16 * 16
    pool = _noise(most * numel).view(most, numel)
    wide = torch.empty(numel)
    for rows in bench.rows:
        check_rules(rows)
        yield _measure_rows(module, bench, pool[:rows], wide, levels)


def _noise(count: int) -> Tensor:
    """Return normal values; a short stretch is repeated, because speed depends on order alone."""
    stretch = torch.randn(min(count, 5_000_011), generator=torch.Generator().manual_seed(0))
    values = torch.empty(count)
    for first in range(0, count, len(stretch)):
        part = values[first : first + len(stretch)]
        part.copy_(stretch[: len(part)])
    return values


def rules_of(rows: int) -> dict[str, Rule]:
    """Return the rules that are timed, by name; f is a quarter of the rows, at least 1."""
    f = max(1, rows // 4) if rows >= 3 else 0
    return {
        "median": Median(),
        f"trimmed_mean f={f}": TrimmedMean(f),
        f"mean_around_median f={f}": MeanAroundMedian(f),
        f"phocas f={f}": Phocas(f),
    }


def _measure_rows(
    module: Any, bench: KernelBench, pool: Tensor, out: Tensor, levels: tuple[str, ...]
) -> list[Timing]:
    rows, numel = pool.shape
    clock = choose_clock(threads=bench.threads)
    timings = []
    for level in levels:
        calls = dict(_kernel_calls(module, bench, pool, out, level))
        timings += _time(calls, clock, bench.repeats, shape=(rows, numel), level=level)
    base = min(t.ns_a_coordinate for t in timings if t.contestant.startswith(PASS))
    if bench.threads == 1 and allowed_cpus() > 1:
        best = levels[-1]  # in wall time: CPU time is that of both threads together
        calls = _thread_calls(module, bench, pool, out, best)
        timings += _time(calls, WALL, bench.repeats, shape=(rows, numel), level=best, base=base)
    few = pool[:, : min(numel, _PEER_NUMEL)].contiguous()
    for calls, shape in (
        (_memory_calls(pool, out), (rows, numel)),
        (_peer_calls(few), (rows, few.shape[1])),
    ):
        timings += _time(calls, clock, bench.repeats, shape=shape, base=base)
    return timings


def _thread_calls(
    module: Any, bench: KernelBench, pool: Tensor, out: Tensor, level: str
) -> dict[str, Callable[[], object]]:
    """Return the pass and the rules that are most used, by one thread and by two."""
    calls = {}
    for threads, words in ((1, ONE_THREAD), (2, TWO_THREADS)):
        for name, call in _kernel_calls(module, replace(bench, threads=threads), pool, out, level):
            if name in (PASS, "median") or name.startswith("trimmed_mean f="):
                calls[f"{words} {name}"] = call
    return calls


def _kernel_calls(
    module: Any, bench: KernelBench, pool: Tensor, out: Tensor, level: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what runs in the extension, with the pass first and last."""
    rows, numel = pool.shape
    pointers = [row.data_ptr() for row in pool]

    def sweep(*, in_bursts: bool = False) -> object:
        return module.pass_cpu(pointers, numel, out.data_ptr(), bench.threads, level, in_bursts)

    def kernel(
        rule: Rule,
        *,
        dtype: torch.dtype = torch.float32,
        weights: list[int] | None = None,
        chosen: list[int] | None = None,
        every: int = 0,
    ) -> Callable[[], object]:
        kept = pointers if chosen is None else chosen
        code, f = _RULE_CODES[type(rule)], getattr(rule, "f", 0)
        job = (kept, numel, _DTYPE_CODES[dtype], code, 0, f, weights or [], out.data_ptr())
        return lambda: module.aggregate_cpu(*job, bench.threads, level, every)

    rules = rules_of(rows)
    trimmed = next(rule for rule in rules.values() if isinstance(rule, TrimmedMean))
    yield PASS, sweep
    yield PASS_BURSTS, functools.partial(sweep, in_bursts=True)
    for name, rule in rules.items():
        yield name, kernel(rule)
    # The first halves of the float32 rows, read as 16-bit values: noise of every exponent.
    for dtype in (torch.bfloat16, torch.float16):
        yield f"median {str(dtype).removeprefix('torch.')}", kernel(Median(), dtype=dtype)
    weights = [1 + place % 3 for place in range(rows)]
    yield "trimmed_mean weighted", kernel(trimmed, weights=weights)
    yield "trimmed_mean diagnosed 1/16", kernel(trimmed, every=16)
    if rows > 4:  # the fewest rows that stay are as many as another kernel has
        yield "median, one row masked", kernel(Median(), chosen=pointers[:-1])
    yield PASS_AGAIN, sweep


def _memory_calls(pool: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "memcpy of one row": lambda: out.copy_(pool[0]),
        "torch.sum": lambda: torch.sum(pool, dim=0, out=out),
    }


def _peer_calls(few: Tensor) -> dict[str, Callable[[], object]]:
    """Return other ways to a median, on fewer coordinates."""
    as_array = few.numpy()
    calls: dict[str, Callable[[], object]] = {
        "torch.median": lambda: few.median(dim=0),
        "torch.sort": lambda: few.sort(dim=0),
        "numpy.median": lambda: np.median(as_array, axis=0),
    }
    found = peers()
    if "byzfl" in found:
        from importlib import import_module

        median = import_module("byzfl").Median()
        calls[f"byzfl {found['byzfl']} Median"] = lambda: median(few)
    return calls


def _time(
    calls: dict[str, Callable[[], object]],
    clock: Clock,
    repeats: int,
    *,
    shape: tuple[int, int],
    level: str = "",
    base: float | None = None,
) -> list[Timing]:
    """Time contestants in turn; ``base`` is the pass's nanoseconds, None to find it among them."""
    rows, numel = shape
    best = interleaved_minimum(calls, clock=clock, repeats=repeats)
    if base is None:
        base = 1e9 * min(best[PASS], best[PASS_AGAIN], best[PASS_BURSTS]) / numel
    timings = []
    for name, seconds in best.items():
        width = 2 if name.endswith("float16") else 4
        moved = width * numel * (2 if name.startswith("memcpy") else rows + 1)
        passes = 1e9 * seconds / numel / base
        timings.append(Timing(name, level, rows, numel, seconds, passes, moved))
    return timings
