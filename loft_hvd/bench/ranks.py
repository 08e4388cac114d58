"""Benchmarks over several ranks of this machine: start them, judge what they say."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from loft_hvd.bench.collectives import BASELINE, BASELINE_AGAIN, PEER
from loft_hvd.bench.timing import Judgement, paired_ratios
from loft_hvd.bench.worker import MARK
from loft_hvd.doctor.inspect import horovod_build
from loft_hvd.doctor.launch import CONTROLLERS, launch_command, run_limited
from loft_hvd.errors import ArgumentError, LoftError

__all__ = [
    "Job",
    "allreduce_goal",
    "judge",
    "judge_peer",
    "run_bench",
    "step_goal",
    "table",
]

_PEER_GOALS = {"gloo": 2.5, "mpi": 5.0}  # times as fast as a blocking exchange

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Job:
    """Who takes part.

    Attributes:
        num_ranks: ranks on this machine.
        controller: "gloo" (horovodrun) or "mpi" (mpirun).
        timeout_s: longest run in seconds; the job is ended then.
    """

    num_ranks: int = 4
    controller: str = "gloo"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.num_ranks < 2 or self.controller not in CONTROLLERS:
            raise ArgumentError(
                f"bench: num_ranks={self.num_ranks} must be >= 2 and controller="
                f"{self.controller!r} one of {', '.join(CONTROLLERS)}"
            )

    def __str__(self) -> str:
        return f"{self.num_ranks} ranks, {self.controller}"


def allreduce_goal(contestant: str, megabytes: float, job: Job) -> float | None:
    """Return the largest ratio to Horovod's all-reduce that we accept, or None without a goal."""
    rule = contestant.split()[0]
    if (rule, job.num_ranks) not in (("trimmed_mean", 4), ("median", 2)):
        return None
    if megabytes == 4:
        return 1.4
    if megabytes not in (25, 100):
        return None
    return 1.3 if (rule, job.controller) == ("median", "mpi") else 1.10


def step_goal(contestant: str) -> float | None:
    """Return the largest ratio to a step with Horovod's optimizer that we accept, or None."""
    return {"mean": 1.03, "trimmed_mean": 1.10}.get(contestant.split()[0])


def run_bench(what: str, options: dict[str, Any], job: Job) -> dict[str, Any]:
    """Start the ranks and return what they measured.

    Args:
        what: "allreduce" or "step".
        options: fields of ``AllreduceBench`` or ``StepBench``.
        job: who takes part.

    Raises:
        LoftError: the job did not end well; carries the end of its output.
    """
    script = ("-m", "loft_hvd.bench.worker", what, json.dumps(options))
    command = launch_command(
        horovod_build(), script, num_ranks=job.num_ranks, controller=job.controller
    )
    done = run_limited(command, timeout_s=job.timeout_s)
    lines = [line.split(MARK, 1)[1] for line in done.output.splitlines() if MARK in line]
    if not done.is_over or len(lines) != 1:
        lines = done.output.splitlines()
        said = [line for line in lines if line.startswith("[")] or lines  # ranks, not the launcher
        last = "\n".join(said[-20:])
        raise LoftError(f"bench {what}: the job of {job} did not end well:\n{last}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def judge(samples: Samples, goals: dict[str, float | None]) -> dict[str, Any]:
    """Return ratios, noise and verdicts of one group of contestants, JSON-able.

    Args:
        samples: seconds of every round of each contestant.
        goals: largest ratio wanted of each, or None.
    """
    ratios = paired_ratios(samples, baseline=BASELINE, again=BASELINE_AGAIN)
    noise = abs(ratios[BASELINE_AGAIN].ratio - 1.0)
    judged: dict[str, Any] = {"noise": noise, "rounds": len(samples[BASELINE]), "contestants": {}}
    for name, ratio in ratios.items():
        goal = goals.get(name)
        entry: dict[str, Any] = asdict(ratio)
        if goal is not None:
            entry |= {"goal": goal, "verdict": Judgement(goal, ratio.ratio, noise).verdict}
        judged["contestants"][name] = entry
    return judged


def judge_peer(samples: Samples, job: Job) -> dict[str, Any]:
    """Return how many times faster than a blocking exchange ours is, with the same rule.

    Args:
        samples: seconds of every round of each contestant, the blocking exchange among them.
        job: who took part; it says what is wanted.
    """
    rounds = zip(samples[PEER], samples["median"], strict=True)
    ratio = statistics.median(peer / ours for peer, ours in rounds)
    goal = _PEER_GOALS[job.controller]
    return {"ratio": ratio, "goal": goal, "verdict": "met" if ratio >= goal else "missed"}


def table(title: str, judged: dict[str, Any]) -> list[list[str]]:
    """Return rows to print: contestant, milliseconds, ratio, spread, goal, verdict."""
    rows = [[title, "ms", "x Horovod", "spread", "goal", "verdict"]]
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
