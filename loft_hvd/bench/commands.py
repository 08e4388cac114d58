"""What ``loft-hvd bench`` runs: measured, judged, shown and recorded; printing is the caller's."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from loft_hvd.aggregation.rules import RULES
from loft_hvd.bench.collectives import AllreduceBench
from loft_hvd.bench.cuda import describe_device, judge_cuda, measure_cuda, require_cuda
from loft_hvd.bench.gate import Goal, exit_status, goal_rows, judge_kernels, timing_rows
from loft_hvd.bench.kernels import KernelBench, Timing, measure_kernels
from loft_hvd.bench.peers import PEER_PACKAGES, Untimed, peer_rows, peers
from loft_hvd.bench.ranks import (
    BenchJob,
    allreduce_goal,
    goals_of,
    judge,
    judge_peer,
    ratio_goal,
    run_bench,
    step_goal,
    table,
)
from loft_hvd.bench.record import check_writable, write_record
from loft_hvd.bench.robustness import (
    KeptRuns,
    RobustnessBench,
    cell_rows,
    judge_robustness,
    matrix_rows,
    measure_robustness,
)
from loft_hvd.bench.scopes import SHARDS_EXPOSED, ScopeCost, cost_of
from loft_hvd.bench.steps import StepBench
from loft_hvd.bench.traces import (
    TraceBench,
    measure_traces,
    summarise_traces,
    trace_rows,
    traces_page,
    warnings_of,
)
from loft_hvd.errors import DataError, MissingDependencyError
from loft_hvd.files import write_whole

__all__ = [
    "Show",
    "bench_allreduce",
    "bench_kernels",
    "bench_plan",
    "bench_robustness",
    "bench_step",
    "lines_of",
    "plot_kernels",
]

Show = Callable[[Sequence[Sequence[str]]], None]  # takes a header and rows
_STYLES = {"avx512": "-", "avx2": "--", "baseline": ":", "": "-."}


def _tell(text: str) -> None:
    """Say how far a bench is; on stderr, so that what is piped or kept is the tables alone."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def bench_allreduce(
    bench: AllreduceBench, *, job: BenchJob, json_file: str | None, show: Show
) -> int:
    """Time robust all-reduces against Horovod's; return the exit status."""
    check_writable(json_file)
    sizes = ", ".join(f"{size:g}" for size in bench.megabytes)
    _tell(f"{job}, {sizes} MB, {bench.rounds} rounds; tables come at the end")
    found = run_bench("allreduce", asdict(bench), job, progress=_tell)
    judged = {}
    for size, samples in found.items():
        goals = {name: allreduce_goal(name, float(size), job) for name in samples}
        judged[f"{size} MB"] = judge(samples, goals)
        show(table(f"{size} MB, {job}", judged[f"{size} MB"]))
        if bench.has_peer:
            found_peer = judged[f"{size} MB"]["against_peer"] = judge_peer(samples, job)
            cells = [f"{found_peer['ratio']:.1f}", str(found_peer["goal"]), found_peer["verdict"]]
            show(
                [["Median against a blocking exchange", "times as fast", "goal", ""], ["", *cells]]
            )
    return _write({**_described(job, bench.device), "allreduce": judged}, json_file)


def bench_step(
    bench: StepBench, *, job: BenchJob, json_file: str | None, gate: bool = False, show: Show
) -> int:
    """Time whole training steps against another way's; return the exit status (``exit_status``)."""
    check_writable(json_file)
    _tell(f"{job}, steps of {bench.model}, {bench.rounds} rounds; tables come at the end")
    found = run_bench("step", asdict(bench), job, progress=_tell)
    samples = found.pop(bench.model)
    limits = {name: step_goal(name, bench) for name in samples}
    judged = judge(samples, limits, baseline=bench.engine)
    goals = goals_of(judged)
    show(table(f"{bench.model}, {job}", judged, baseline=bench.engine))
    if SHARDS_EXPOSED in samples:
        cost = cost_of(samples, next(name for name in samples if name.startswith("trimmed_mean")))
        # As above, by how far Horovod's step was from itself.
        noise = judged["noise"]
        step = ratio_goal("over_trimmed_mean", 1.10, cost.over_trimmed_mean, noise=noise)
        exposed = ratio_goal("exposed", 1.15, cost.exposed_ratio, noise=noise)
        goals += [step, exposed]
        judgements = {goal.what: _with_verdict(goal) for goal in (step, exposed)}
        found["scopes"] = asdict(cost) | {"goals": judgements}
        show(_scope_rows(cost, step, exposed))
    if "stages" in found:
        stages = [[name, f"{1e3 * spent:.2f}"] for name, spent in found["stages"].items()]
        show([["stage, TrimmedMean, rank 0", "ms a step"], *stages])
    _write({**_described(job, bench.device), **found, bench.model: judged}, json_file)
    return exit_status(goals) if gate else 0


def _described(job: BenchJob, device: str) -> dict[str, object]:
    """Return what a record says of the ranks, and of the first of the GPUs that they are on."""
    on_gpu = {} if device == "cpu" else {"device": describe_device(torch.device(device, 0))}
    return {"ranks": job.num_ranks, **on_gpu}


def _with_verdict(goal: Goal) -> dict[str, object]:
    return {**asdict(goal), "verdict": goal.verdict}


def _scope_rows(cost: ScopeCost, step: Goal, exposed: Goal) -> list[list[str]]:
    """Return what ``Robust`` costs as a table with a header."""

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.1f}"

    def judged(goal: Goal) -> list[str]:
        return [f"{goal.found:.2f}", f"{goal.limit:.2f}", goal.verdict]

    formula = ms(cost.exposed_formula_s)
    return [
        ["Robust", "ms", "by formula, ms", "ratio", "goal", ""],
        ["in shards: step, over TrimmedMean's", ms(cost.shards_step_s), "", *judged(step)],
        ["in shards: left after the backward pass", ms(cost.shards_exposed_s), "", "", "", ""],
        ["whole model: left after it", ms(cost.exposed_s), formula, *judged(exposed)],
        ["whole model: step", ms(cost.step_s), ms(cost.step_formula_s), "", "", ""],
    ]


def bench_kernels(
    bench: KernelBench,
    device: str,
    *,
    files: tuple[str | None, str | None],
    gate: bool,
    show: Show,
) -> int:
    """Time the kernels, print, judge; return the exit status (``exit_status``)."""
    check_writable(*files)
    if files[1] is not None:
        _check_plots()
    on_cuda = device == "cuda"
    judge_all = judge_cuda if on_cuda else judge_kernels
    timings, goals = [], []
    untimed: list[Untimed] = []
    on_what: dict[str, object] = {}
    if on_cuda:
        # Packages in host memory, and rows in device memory: their times have nothing in common.
        cuda = require_cuda("bench kernels")
        on_what = {"device": describe_device(cuda)}
        steps = measure_cuda(bench, cuda)
        reason = "takes rows in host memory here; timed without --device cuda"
        untimed += [Untimed(f"{name} {version}", None, reason) for name, version in peers().items()]
    else:
        steps = measure_kernels(bench, report=untimed.append)
    counts = ", ".join(map(str, bench.rows))
    _tell(f"checking and timing {counts} rows of {bench.numel:,} values, in this order")
    for number, found in enumerate(steps, start=1):
        _tell(f"{number} of {len(bench.rows)} row counts done")
        show(timing_rows(found))
        timings += found
        goals += judge_all(found)
    show(peer_rows(untimed))
    show(goal_rows(goals))
    results: dict[str, object] = {
        **on_what,
        "peers": peers(),
        "untimed": [asdict(one) for one in untimed],
        "timings": [asdict(timing) for timing in timings],
        "goals": [_with_verdict(goal) for goal in goals],
    }
    _write(results, files[0])  # first: a picture in the repository would make its commit "dirty"
    if files[1] is not None:
        plot_kernels(timings, files[1])
    return exit_status(goals) if gate else 0


def bench_robustness(
    bench: RobustnessBench,
    *,
    files: tuple[str | None, str | None],
    show: Show,
    progress: Callable[[int, int], None],
) -> int:
    """Train under attack, print a matrix of accuracies, judge; return the exit status."""
    check_writable(*files)
    left_out: list[Untimed] = []
    kept = KeptRuns(files[1])
    cells = measure_robustness(bench, report=left_out.append, progress=progress, kept=kept)
    goals = judge_robustness(cells)
    for rows in matrix_rows(cells):
        show(rows)
    for first in cells[:1]:
        show(cell_rows(cells, first.defence))
    if left_out:
        reasons = [[f"{one.contestant}, n={one.rows}: {one.reason}"] for one in left_out]
        show([["left out"], *reasons])
    if goals:
        show(goal_rows(goals, digits=1))
    results: dict[str, object] = {
        "bench": asdict(bench),
        "peers": peers(),
        "left_out": [asdict(one) for one in left_out],
        "cells": [asdict(cell) for cell in cells],
        "goals": [_with_verdict(goal) for goal in goals],
    }
    return _write(results, files[0])


def bench_plan(bench: TraceBench, *, files: tuple[str | None, str | None], show: Show) -> int:
    """Plan made-up jobs by all policies, show what each comes to; return the exit status.

    Args:
        bench: what is measured.
        files: for the results as JSON, and for a page with plots; None: not written.
        show: prints a table.
    """
    json_file, page_file = files
    check_writable(*files)
    found = measure_traces(bench, progress=_tell)
    for name, rows in found.items():
        show(trace_rows(name, rows))
        for text, number in warnings_of(rows).items():
            _tell(f"{name}, {number} times: {text}")
    summaries = {name: summarise_traces(rows) for name, rows in found.items()}
    if page_file is not None:
        write_whole(page_file, traces_page(found), what="--page")
    return _write({"bench": asdict(bench), "summary": summaries, "runs": found}, json_file)


def _write(results: dict[str, object], json_file: str | None) -> int:
    if json_file is not None:
        write_record(json_file, results, command=["loft-hvd", *sys.argv[1:]])
    return 0


def lines_of(timings: Sequence[Timing]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return what is drawn, row counts and passes of every line, by contestant and level.

    A line is one of our rules in float32 without weights, or another way to a rule, at level "".
    """
    theirs = ("torch.median", "numpy.median", *(f"{package} " for package in PEER_PACKAGES))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for timing in timings:
        name = timing.contestant.partition(" f=")[0]
        if name in RULES or (name.startswith(theirs) and not name.endswith(" again")):
            lines.setdefault((name, timing.level), []).append((timing.rows, timing.passes))
    return lines


def _check_plots() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "plots need matplotlib: pip install '.[plots]' in its checkout"
        )


def plot_kernels(timings: Sequence[Timing], path: str | os.PathLike[str]) -> None:
    """Draw passes over row counts, a colour for a contestant, a dash for a level; write a PNG."""
    _check_plots()
    from matplotlib.figure import Figure

    lines = lines_of(timings)
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(n for n, _ in lines))}
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots()
    for (name, level), points in lines.items():
        style, colour = _STYLES.get(level, "-"), colours[name]
        label = f"{name} {level}".strip()
        marker = "." if level or name in RULES else "x"
        rows, passes = zip(*sorted(points), strict=True)
        axes.plot(rows, passes, style, color=colour, marker=marker, label=label)
    # Row counts double and passes span two decades: both axes are logarithmic.
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("rows")
    axes.set_ylabel("time, passes over the same memory")
    figure.legend(loc="outside right upper", fontsize="small")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise DataError(f"bench: {os.fspath(path)!r} cannot be written ({error})") from error
