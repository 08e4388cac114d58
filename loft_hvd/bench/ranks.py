"""Benchmarks over several ranks of this machine: start them, measure on each, judge the times.

``run_bench`` starts this module on every rank; its arguments are then WHAT and JSON options.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from loft_hvd.bench.collectives import (
    HOROVOD,
    PEER,
    AllreduceBench,
    Progress,
    again,
    measure_allreduce,
)
from loft_hvd.bench.gate import Goal
from loft_hvd.bench.steps import DDP, FSDP, StepBench, measure_step
from loft_hvd.config import config
from loft_hvd.doctor.inspect import HorovodBuild, horovod_build
from loft_hvd.doctor.launch import CONTROLLERS, launch_command, run_limited
from loft_hvd.errors import ArgumentError, LoftError
from loft_hvd.transport.horovod import horovod_module

__all__ = [
    "MARK",
    "NOISE_LIMIT",
    "BenchJob",
    "Ratio",
    "allreduce_goal",
    "goals_of",
    "judge",
    "judge_peer",
    "main",
    "paired_ratios",
    "ratio_goal",
    "run_bench",
    "step_goal",
    "table",
]

MARK = "loft_hvd bench: "  # before the line of results, among what launchers print
_PROGRESS = "loft_hvd bench has done "  # before each line of progress
# After such a line, while all ranks wait for rank 0: launchers take CPU time to hand it on, which
# would fall on the next sample. Horovodrun takes some milliseconds.
_HANDED_ON_S = 0.05
# Goals are 1.00 to 1.15: a baseline 5 % off itself says nothing about them. Gloo needs many rounds
# to come below it (docs/benchmarks.md).
NOISE_LIMIT = 0.05
_AGAINST_HOROVOD = {"mean": 1.03, "trimmed_mean": 1.10}
# Largest ratios of a step to the baseline's that we accept, by what that is and the device.
_STEP_GOALS = {
    (HOROVOD, "cpu"): _AGAINST_HOROVOD,
    (HOROVOD, "cuda"): _AGAINST_HOROVOD,
    # DDP's own all-reduce is the mean, so that ours may cost what a hook's calls do.
    (DDP, "cpu"): {
        "hook mean": 1.01,
        "hook trimmed_mean": 1.00,
        "hook robust": 1.15,
        "optimizer mean": 1.00,
    },
    (DDP, "cuda"): {"hook trimmed_mean": 1.10},
    (FSDP, "cpu"): {"hook mean": 1.01, "hook trimmed_mean": 1.10, "hook robust": 1.15},
    (FSDP, "cuda"): {"hook trimmed_mean": 1.10},
}
# Times as fast as a blocking exchange; measured 6.7 and 8.6 with 120 MB on 2 ranks
# (docs/benchmarks.md).
_PEER_GOALS = {"gloo": 2.5, "mpi": 5.0}

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class BenchJob:
    """Who takes part."""

    num_ranks: int = 4  # ranks on this machine
    controller: str = "gloo"  # "gloo" (horovodrun), "mpi" (mpirun), or "torchrun" without Horovod
    # Longest run in seconds; the job is ended then. Ranks that hang end by limits of their own.
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.num_ranks < 2 or self.controller not in CONTROLLERS:
            raise ArgumentError(
                f"bench: num_ranks={self.num_ranks} must be >= 2 and controller="
                f"{self.controller!r} one of {', '.join(CONTROLLERS)}"
            )

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.controller}"


def allreduce_goal(contestant: str, megabytes: float, job: BenchJob) -> float | None:
    """Return the largest ratio to Horovod's all-reduce that we accept, or None without a goal."""
    # Of two ranks none may be wrong, so there the median is judged; four bear f = 1.
    rule = contestant.split()[0]
    if (rule, job.num_ranks) not in (("trimmed_mean", 4), ("median", 2)):
        return None
    # 4 MB take so few cycles of the engine that one more, for two exchanges in place of one, shows.
    if megabytes == 4:
        return 1.4
    if megabytes not in (25, 100):
        return None
    return 1.3 if (rule, job.controller) == ("median", "mpi") else 1.10


def step_goal(contestant: str, bench: StepBench) -> float | None:
    """Return the largest ratio to a step of the baseline that we accept, or None without a goal."""
    return _STEP_GOALS[bench.engine, bench.device].get(contestant.partition(" f=")[0])


def run_bench(
    what: str, options: dict[str, Any], job: BenchJob, *, progress: Progress = lambda text: None
) -> dict[str, Any]:
    """Start the ranks and return what they measured: of "allreduce" or "step", by their options.

    ``progress`` is told how far rank 0 is, each tenth of the rounds.
    """
    if job.controller == "torchrun" and options.get("engine") not in (DDP, FSDP):
        raise ArgumentError(
            f"bench {what}: controller={job.controller!r} starts no Horovod, which is measured; it "
            f"goes with bench step, engine={DDP!r} or {FSDP!r}"
        )

    def on_line(line: str) -> None:
        if _PROGRESS in line:
            progress(line.split(_PROGRESS, 1)[1])

    script = ("-m", "loft_hvd.bench.ranks", what, json.dumps(options))
    # Horovod takes seconds to say what it was built with; torchrun does not ask.
    build = HorovodBuild() if job.controller == "torchrun" else horovod_build()
    command = launch_command(build, script, num_ranks=job.num_ranks, controller=job.controller)
    done = run_limited(command, timeout_s=job.timeout_s, on_line=on_line)
    # Launchers put "[0]<stdout>:" before a line, and may write their own between ours.
    lines = [line.split(MARK, 1)[1] for line in done.output.splitlines() if MARK in line]
    if not done.is_over or len(lines) != 1:
        lines = [line for line in done.output.splitlines() if _PROGRESS not in line]
        said = [line for line in lines if line.startswith("[")] or lines  # ranks, not the launcher
        last = "\n".join(said[-20:])
        raise LoftError(f"bench {what}: the job of {job} did not end well:\n{last}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def main(arguments: list[str]) -> int:
    """Measure what the arguments ask for; rank 0 prints its progress and a line of JSON."""
    torch.set_num_threads(1)  # ranks share the cores; threads of theirs would only wait
    hvd = None if config().is_torchrun else horovod_module()
    if hvd is not None:
        hvd.init()
    rank = config().rank if hvd is None else hvd.rank()

    def say(line: str) -> None:
        if rank == 0:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def progress(text: str) -> None:
        say(f"{_PROGRESS}{text}")
        time.sleep(_HANDED_ON_S)

    what, options = arguments[0], json.loads(arguments[1])
    if what == "allreduce":
        sizes = tuple(float(size) for size in options.pop("megabytes"))
        bench = AllreduceBench(megabytes=sizes, **options)
        found = measure_allreduce(bench, progress=progress)
    else:
        found = measure_step(StepBench(**options), progress=progress)
    say(f"{MARK}{json.dumps(found)}")
    if hvd is not None:
        hvd.shutdown()
    return 0


@dataclass(frozen=True)
class Ratio:
    """One contestant against the baseline of the same rounds."""

    seconds: float  # its median
    ratio: float  # median over rounds of its time by the baseline's
    spread: float  # interquartile range of these ratios


def paired_ratios(
    samples: Mapping[str, Sequence[float]], *, baseline: str, again: str
) -> dict[str, Ratio]:
    """Compare the seconds of every round of each contestant with the baseline's.

    ``again`` is the baseline, timed once more in every round. The baseline of a round is the mean
    of both; ``again`` itself is divided by ``baseline`` alone.
    """
    # Ratios within a round: a slow moment of the machine falls on all contestants of it alike.
    first, second = samples[baseline], samples[again]
    found = {}
    for name, seconds in samples.items():
        # Dividing by the mean of both samples halves the variance that the baseline brings.
        divisors = first if name in (baseline, again) else _means(first, second)
        ratios = sorted(value / by for value, by in zip(seconds, divisors, strict=True))
        quarter = len(ratios) // 4  # 15 rounds: ratios 3 to 11 are the middle half
        spread = ratios[-1 - quarter] - ratios[quarter]
        found[name] = Ratio(statistics.median(seconds), statistics.median(ratios), spread)
    return found


def _means(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [0.5 * (one + two) for one, two in zip(first, second, strict=True)]


def ratio_goal(what: str, limit: float, ratio: float, *, noise: float) -> Goal:
    """Return the goal that a ratio is at most a limit and half the noise.

    ``noise`` is by how much the baseline differs from itself; above `NOISE_LIMIT` nothing is shown.
    """
    return Goal(what, limit, ratio, is_judged=noise <= NOISE_LIMIT, margin=0.5 * noise)


def judge(
    samples: Samples, goals: dict[str, float | None], *, baseline: str = HOROVOD
) -> dict[str, Any]:
    """Return ratios, noise and verdicts of contestants, JSON-able; a goal of None is not judged."""
    # The baseline is timed twice a round; how far the two are apart is noise, and nothing else.
    ratios = paired_ratios(samples, baseline=baseline, again=again(baseline))
    noise = abs(ratios[again(baseline)].ratio - 1.0)
    judged: dict[str, Any] = {"noise": noise, "rounds": len(samples[baseline]), "contestants": {}}
    for name, ratio in ratios.items():
        limit = goals.get(name)
        entry: dict[str, Any] = asdict(ratio)
        if limit is not None:
            goal = ratio_goal(name, limit, ratio.ratio, noise=noise)
            entry |= {"goal": limit, "verdict": goal.verdict}
        judged["contestants"][name] = entry
    return judged


def goals_of(judged: dict[str, Any]) -> list[Goal]:
    """Return the goals of what ``judge`` has returned."""
    return [
        ratio_goal(name, entry["goal"], entry["ratio"], noise=judged["noise"])
        for name, entry in judged["contestants"].items()
        if "goal" in entry
    ]


def judge_peer(samples: Samples, job: BenchJob) -> dict[str, Any]:
    """Return how many times faster than a blocking exchange ours is, with the same rule."""
    # Both use the median, so the difference is the exchange, its overlap and the kernel.
    rounds = zip(samples[PEER], samples["median"], strict=True)
    ratio = statistics.median(peer / ours for peer, ours in rounds)
    goal = _PEER_GOALS[job.controller]
    return {"ratio": ratio, "goal": goal, "verdict": "met" if ratio >= goal else "missed"}


def table(title: str, judged: dict[str, Any], *, baseline: str = HOROVOD) -> list[list[str]]:
    """Return rows to print: contestant, milliseconds, ratio, spread, goal, verdict."""
    rows = [[title, "ms", f"x {baseline}", "spread", "goal", "verdict"]]
    for name, entry in judged["contestants"].items():
        goal = entry.get("goal")
        rows.append(
            [
                name,
                f"{1e3 * entry['seconds']:.1f}",
                f"{entry['ratio']:.2f}",
                f"{entry['spread']:.2f}",
                "" if goal is None else f"{goal:.2f}",
                entry.get("verdict", ""),
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
