"""``bench kernels --device cuda``: every rule against a copy in the same device memory.

Calls are queued while the device sleeps, so what is timed is the device's work alone: Python takes
10 us and more to queue a call, and 4 rows of ten million values some 50 us to be read. Of rules
that see rows, which wait for the device between their table and their mix, both are timed apart.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.compute import aggregate_rows, decide, measure_rows, queue_distances
from loft_hvd.aggregation.row_rules import NNM
from loft_hvd.aggregation.rules import Median, TrimmedMean
from loft_hvd.bench.contestants import DISTANCES, MIXED, check_rules, hard_rows, rules_of
from loft_hvd.bench.gate import Goal, is_quiet
from loft_hvd.bench.kernels import KernelBench, Timing
from loft_hvd.bench.peers import TORCH_MEDIAN, TORCH_MEDIAN_AGAIN
from loft_hvd.errors import AggregationError, MissingDependencyError

__all__ = [
    "COPY",
    "COPY_AGAIN",
    "describe_device",
    "device_seconds",
    "judge_cuda",
    "measure_cuda",
    "require_cuda",
]

COPY, COPY_AGAIN = "device copy", "device copy again"
_SLEEP_CYCLES = 4_000_000  # some 2 ms, in which a call is queued many times over
_PEER_NUMEL = 1_000_000  # torch.median takes many passes, and copies
# Least share of the copy's bandwidth that median and trimmed mean reach, by row count: goals.
_SHARES = ((16, 0.90), (32, 0.85), (64, 0.75))
_TIMES_TORCH = 50.0


def require_cuda(what: str) -> torch.device:
    """Return the current CUDA device; raise where there is none, or no CUDA kernels to time.

    ``what`` is the bench that was asked for.
    """
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            f"{what} --device cuda needs a CUDA device, but torch finds none here; run it on a "
            "machine with a GPU, or without --device for the CPU kernels"
        )
    module = extension()
    if module is None or not module.has_cuda:
        raise MissingDependencyError(
            f"{what} --device cuda times the CUDA kernels, which this extension lacks: "
            "build it with LOFT_HVD_CUDA=1 and nvcc"
        )
    return torch.device("cuda", torch.cuda.current_device())


def describe_device(device: torch.device) -> dict[str, str]:
    """Return the name of a CUDA device, and the CUDA that torch was built with."""
    return {"name": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}


def measure_cuda(bench: KernelBench, device: torch.device) -> Iterator[list[Timing]]:
    """Check and time every rule on a device; yield the timings of one row count after the other.

    ``passes`` are times over what a copy of as many bytes takes. Of ``bench`` row counts,
    coordinates, repeats and memory apply.
    """
    for rows in bench.rows:
        check_rules(rows, device=device)
        _check_row_rules(rows, device)
        # Rows of whole 64 bytes: each begins where a load of 16 bytes may.
        numel = min(bench.numel, bench.most_bytes // (4 * rows)) // 16 * 16
        pool = torch.randn(rows, numel, device=device)
        calls = list(_calls(pool))
        for call in calls:
            call.run()  # loads its kernels
        best = {call.name: _seconds(call.run, device) for call in calls}
        for _ in range(bench.repeats):
            for call in calls:
                best[call.name] = min(best[call.name], _seconds(call.run, device))
        yield _timings(calls, best, rows)


@dataclass(frozen=True)
class _TimedCall:
    """What is timed: its name, the call, coordinates of the result and bytes moved."""

    name: str
    run: Callable[[], object]
    numel: int
    moved: int


def _calls(pool: Tensor) -> Iterator[_TimedCall]:
    rows, numel = pool.shape
    few = pool[:, : min(numel, _PEER_NUMEL)].contiguous()
    target = torch.empty_like(pool)
    out = torch.empty(numel, device=pool.device)
    copy = functools.partial(target.copy_, pool)
    yield _TimedCall(COPY, copy, rows * numel, 8 * rows * numel)
    for name, rule in rules_of(rows).items():
        run = functools.partial(aggregate, pool, rule, out=out)
        yield _TimedCall(name, run, numel, 4 * numel * (rows + 1))
    yield _TimedCall(DISTANCES, functools.partial(_measure, list(pool)), numel, 4 * numel * rows)
    yield _TimedCall(
        MIXED, functools.partial(_mixed_call(pool), out), numel, 4 * numel * (rows + 1)
    )
    for dtype in (torch.bfloat16, torch.float16):
        name = f"median {str(dtype).removeprefix('torch.')}"
        run = functools.partial(aggregate, pool.to(dtype), Median(), out=out.to(dtype))
        yield _TimedCall(name, run, numel, 2 * numel * (rows + 1))
    torch_median = functools.partial(torch.median, few, dim=0)
    for name in (TORCH_MEDIAN, TORCH_MEDIAN_AGAIN):
        yield _TimedCall(name, torch_median, few.shape[1], 4 * few.shape[1] * (rows + 1))
    yield _TimedCall(COPY_AGAIN, copy, rows * numel, 8 * rows * numel)


def _measure(rows: Sequence[Tensor]) -> object:
    """Find the table of distances, where there is a device without waiting for it."""
    if not rows[0].is_cuda:
        return measure_rows(rows)
    module = extension()
    assert module is not None  # require_cuda has asked
    return queue_distances(module, rows, rows[0].device)


def _mixed_call(pool: Tensor) -> Callable[[Tensor], object]:
    """Return the call that mixes rows as NNM does and takes their trimmed mean."""
    rows = list(pool)
    f = max(1, len(rows) // 4) if len(rows) >= 3 else 0
    decided = decide(NNM(TrimmedMean(f)), measure_rows(rows), None, precision=torch.float32)
    return lambda out: aggregate_rows(rows, decided, weights=None, out=out)


def _check_row_rules(rows: int, device: torch.device) -> None:
    """Compare distances and mixes on a device with those of the CPU, bit by bit."""
    pool = hard_rows(rows)
    pool[1:, 3000:] = 1.0  # rows that can be measured, but for the first and, of three, the last
    given = pool.to(device)
    if not np.array_equal(measure_rows(list(given)), measure_rows(list(pool)), equal_nan=True):
        raise AggregationError(f"bench kernels: distances of {rows} rows differ from the CPU's")
    found, wanted = torch.empty_like(given[0]), torch.empty_like(pool[0])
    _mixed_call(given)(found)
    _mixed_call(pool)(wanted)
    if not torch.equal(found.cpu().view(torch.int32), wanted.view(torch.int32)):
        raise AggregationError(f"bench kernels: mixes of {rows} rows differ from the CPU's")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def event() -> Any:
        return torch.cuda.Event(enable_timing=True)

    return device_seconds(run, event=event, sleep=torch.cuda._sleep)


def device_seconds(
    run: Callable[[], object], *, event: Callable[[], Any], sleep: Callable[[int], None]
) -> float:
    """Return the seconds of a call on the device, without those in which the host queued it.

    Args:
        run: queues work.
        event: makes an event as ``torch.cuda.Event(enable_timing=True)`` is.
        sleep: queues a sleep of so many cycles of the device.

    Raises:
        AggregationError: the device woke up before all was queued, however long it slept.
    """
    cycles = _SLEEP_CYCLES
    for _ in range(3):
        first, last = event(), event()
        sleep(cycles)
        first.record()
        run()
        last.record()
        was_asleep = not first.query()
        last.synchronize()
        if was_asleep:
            return 1e-3 * float(first.elapsed_time(last))
        cycles *= 10  # the host was held up
    raise AggregationError(
        f"bench kernels: a call took longer to queue than the device sleeps, {cycles // 10:,} "
        "cycles; calls that wait for the device cannot be timed"
    )


def _timings(calls: Sequence[_TimedCall], best: dict[str, float], rows: int) -> list[Timing]:
    copy = next(call for call in calls if call.name == COPY)
    seconds_a_byte = best[COPY] / copy.moved
    return [
        Timing(
            call.name,
            "",
            rows,
            call.numel,
            best[call.name],
            best[call.name] / (seconds_a_byte * call.moved),
            call.moved,
        )
        for call in calls
    ]


def judge_cuda(timings: Sequence[Timing]) -> list[Goal]:
    """Return every goal that these timings, of one row count, speak of."""
    # Not judged where the copy, or torch.median, took another time when timed again.
    by_name = {timing.contestant: timing for timing in timings}
    rows = timings[0].rows
    share = next((share for most, share in _SHARES if rows <= most), None)
    goals = []
    is_judged = is_quiet(by_name[COPY].seconds, by_name[COPY_AGAIN].seconds)
    for name, timing in by_name.items():
        if share is not None and (name == "median" or name.startswith("trimmed_mean")):
            text = f"{name} by a copy's bandwidth, {rows} rows"
            goals.append(Goal(text, share, 1 / timing.passes, is_floor=True, is_judged=is_judged))
    if rows >= 3:
        speedup = by_name[TORCH_MEDIAN].ns_a_coordinate / by_name["median"].ns_a_coordinate
        text = f"torch.median / median, {rows} rows"
        is_judged = is_quiet(by_name[TORCH_MEDIAN].seconds, by_name[TORCH_MEDIAN_AGAIN].seconds)
        goals.append(Goal(text, _TIMES_TORCH, speedup, is_floor=True, is_judged=is_judged))
    return goals
