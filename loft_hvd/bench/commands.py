"""What ``loft-hvd bench`` runs: measured, judged, shown and recorded; printing is the caller's."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence

from loft_hvd.bench.cuda import judge_cuda, measure_cuda, require_cuda
from loft_hvd.bench.gate import goal_rows, judge_kernels, timing_rows
from loft_hvd.bench.kernels import KernelBench, measure_kernels
from loft_hvd.bench.peers import Untimed, peer_rows, peers
from loft_hvd.bench.ranks import (
    Job,
    allreduce_goal,
    judge,
    judge_peer,
    run_bench,
    step_goal,
    table,
)
from loft_hvd.bench.record import write_record
from loft_hvd.bench.steps import StepBench

__all__ = ["Ranks", "Show", "bench_allreduce", "bench_kernels", "bench_step"]

Show = Callable[[Sequence[Sequence[str]]], None]  # takes a header and rows


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Who takes part in a benchmark, and how many samples each contestant gives."""

    job: Job
    rounds: int


def bench_allreduce(
    megabytes: Sequence[float], *, ranks: Ranks, peer: bool, json_file: str | None, show: Show
) -> int:
    """Time robust all-reduces against Horovod's; return the exit status."""
    options = {"megabytes": list(megabytes), "rounds": ranks.rounds, "has_peer": peer}
    found = run_bench("allreduce", options, ranks.job)
    judged = {}
    for size, samples in found.items():
        goals = {name: allreduce_goal(name, float(size), ranks.job) for name in samples}
        judged[f"{size} MB"] = judge(samples, goals)
        show(table(f"{size} MB, {ranks.job}", judged[f"{size} MB"]))
        if peer:
            found_peer = judged[f"{size} MB"]["against_peer"] = judge_peer(samples, ranks.job)
            cells = [f"{found_peer['ratio']:.1f}", str(found_peer["goal"]), found_peer["verdict"]]
            show(
                [["Median against a blocking exchange", "times as fast", "goal", ""], ["", *cells]]
            )
    return _write({"ranks": ranks.job.num_ranks, "allreduce": judged}, json_file)


def bench_step(bench: StepBench, *, job: Job, json_file: str | None, show: Show) -> int:
    """Time whole training steps against Horovod's optimizer; return the exit status."""
    found = run_bench("step", dataclasses.asdict(bench), job)
    samples = found.pop(bench.model)
    judged = judge(samples, {name: step_goal(name) for name in samples})
    show(table(f"{bench.model}, {job}", judged))
    if "stages" in found:
        stages = [[name, f"{1e3 * spent:.2f}"] for name, spent in found["stages"].items()]
        show([["stage, TrimmedMean, rank 0", "ms a step"], *stages])
    return _write({"ranks": job.num_ranks, **found, bench.model: judged}, json_file)


def bench_kernels(
    bench: KernelBench,
    device: str,
    *,
    files: tuple[str | None, str | None],
    gate: bool,
    show: Show,
) -> int:
    """Time the kernels, print, judge; return 1 for a goal far missed, 2 for too much noise."""
    on_cuda = device == "cuda"
    judge_all = judge_cuda if on_cuda else judge_kernels
    timings, goals = [], []
    untimed: list[Untimed] = []
    if on_cuda:
        steps = measure_cuda(bench, require_cuda())
        reason = "takes rows in host memory here; timed without --device cuda"
        untimed += [Untimed(f"{name} {version}", None, reason) for name, version in peers().items()]
    else:
        steps = measure_kernels(bench, report=untimed.append)
    for found in steps:
        show(timing_rows(found))
        timings += found
        goals += judge_all(found)
    show(peer_rows(untimed))
    show(goal_rows(goals))
    results: dict[str, object] = {
        "peers": peers(),
        "untimed": [dataclasses.asdict(one) for one in untimed],
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "goals": [{**dataclasses.asdict(goal), "verdict": goal.verdict} for goal in goals],
    }
    _write(results, files[0])  # first: a picture in the repository would make its commit "dirty"
    if files[1] is not None:
        importlib.import_module("loft_hvd.bench.plots").plot_kernels(timings, files[1])
    if gate and any(goal.is_far for goal in goals):
        return 1
    return 2 if gate and not all(goal.is_judged for goal in goals) else 0


def _write(results: dict[str, object], json_file: str | None) -> int:
    if json_file is not None:
        write_record(json_file, results, command=["loft-hvd", *sys.argv[1:]])
    return 0
