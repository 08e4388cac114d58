"""``bench kernels --device cuda``: every rule against a copy in the same device memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loft_hvd._native import extension
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.rules import Median
from loft_hvd.bench.contestants import check_rules, rules_of
from loft_hvd.bench.gate import Goal, is_quiet
from loft_hvd.bench.kernels import KernelBench, Timing
from loft_hvd.bench.peers import TORCH_MEDIAN, TORCH_MEDIAN_AGAIN
from loft_hvd.errors import MissingDependencyError

__all__ = ["COPY", "COPY_AGAIN", "judge_cuda", "measure_cuda", "require_cuda"]

COPY, COPY_AGAIN = "device copy", "device copy again"
_PEER_NUMEL = 1_000_000  # torch.median takes many passes, and copies
# Least share of the copy's bandwidth that median and trimmed mean reach, by row count. Goals that
# nobody has measured yet: no GPU has run them.
_SHARES = ((16, 0.90), (32, 0.85), (64, 0.75))
_TIMES_TORCH = 50.0


def require_cuda() -> torch.device:
    """Return the current CUDA device; raise where there is none, or no CUDA kernels to time."""
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "bench kernels --device cuda needs a CUDA device, but torch finds none here; "
            "run it on a machine with a GPU, or without --device for the CPU kernels"
        )
    module = extension()
    if module is None or not module.has_cuda:
        raise MissingDependencyError(
            "bench kernels --device cuda times the CUDA kernels, which this extension lacks: "
            "build it with LOFT_HVD_CUDA=1 and nvcc"
        )
    return torch.device("cuda", torch.cuda.current_device())


def measure_cuda(bench: KernelBench, device: torch.device) -> Iterator[list[Timing]]:
    """Check and time every rule on a device; yield the timings of one row count after the other.

    ``passes`` are times over what a copy of as many bytes takes. Of ``bench`` row counts,
    coordinates, repeats and memory apply.
    """
    for rows in bench.rows:
        check_rules(rows, device=device)
        # Rows of whole 64 bytes: each begins where a load of 16 bytes may.
        numel = min(bench.numel, bench.most_bytes // (4 * rows)) // 16 * 16
        pool = torch.randn(rows, numel, device=device)
        calls = list(_calls(pool))
        # The least of repeats + 1 rounds: the first one loads kernels, so it is rarely the least.
        best = {call.name: _seconds(call.run, device) for call in calls}
        for _ in range(bench.repeats):
            for call in calls:
                best[call.name] = min(best[call.name], _seconds(call.run, device))
        yield _timings(calls, best, rows)


@dataclass(frozen=True)
class _Call:
    """What is timed: its name, the call, coordinates of the result and bytes moved."""

    name: str
    run: Callable[[], object]
    numel: int
    moved: int


def _calls(pool: Tensor) -> Iterator[_Call]:
    rows, numel = pool.shape
    few = pool[:, : min(numel, _PEER_NUMEL)].contiguous()
    target = torch.empty_like(pool)
    out = torch.empty(numel, device=pool.device)
    copy = functools.partial(target.copy_, pool)
    yield _Call(COPY, copy, rows * numel, 8 * rows * numel)
    for name, rule in rules_of(rows).items():
        run = functools.partial(aggregate, pool, rule, out=out)
        yield _Call(name, run, numel, 4 * numel * (rows + 1))
    for dtype in (torch.bfloat16, torch.float16):
        name = f"median {str(dtype).removeprefix('torch.')}"
        run = functools.partial(aggregate, pool.to(dtype), Median(), out=out.to(dtype))
        yield _Call(name, run, numel, 2 * numel * (rows + 1))
    torch_median = functools.partial(torch.median, few, dim=0)
    for name in (TORCH_MEDIAN, TORCH_MEDIAN_AGAIN):
        yield _Call(name, torch_median, few.shape[1], 4 * few.shape[1] * (rows + 1))
    yield _Call(COPY_AGAIN, copy, rows * numel, 8 * rows * numel)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    # The device's own clock: the host only queues, and would time the queue.
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return 1e-3 * float(first.elapsed_time(last))


def _timings(calls: Sequence[_Call], best: dict[str, float], rows: int) -> list[Timing]:
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
