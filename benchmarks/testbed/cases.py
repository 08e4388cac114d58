"""What is compared on the testbed, and what must come of it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.testbed.clusters import FAST, Cluster, Job, run_job, unequal, wait_for_epochs
from benchmarks.testbed.contest import GLOBAL_BATCH, Contest, Contestant
from tests.testbed.hosts import Testbed

__all__ = ["CASES", "Goal", "Options", "later_s", "print_table"]

Result = Mapping[str, Any]  # of a contestant, as ``Training.result`` has it
_POLICIES = ("uniform", "lbbsp-cpu", "lbbsp-cpu:busy", "lbbsp-gpu", "loft")
_STORE = Contestant("loft + store", "loft", budget=1.0)
_EVERYONE = [*(Contestant(name, name) for name in _POLICIES), _STORE]
_EQUAL = Cluster((0.35,) * 4, (FAST,) * 4, (0.25,) * 4)


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    epochs: int | None  # in ``cold`` jobs of one each; None: as many as the case takes
    ratio: float  # worst fetch over worst computing, where hosts are unequal


@dataclass(frozen=True)
class Goal:
    """Something that must not be above a limit."""

    what: str
    value: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it is not; what is no number is not met."""
        return self.value <= self.limit


# What contestants have shown.


def cold_s(result: Result) -> float:
    """Return the seconds of a mean step of the first epoch."""
    return float(statistics.mean(result["epochs"][0]["step_s"]))


def later_s(result: Result) -> float:
    """Return the seconds of the median step of all epochs but the first."""
    return float(statistics.median(s for epoch in result["epochs"][1:] for s in epoch["step_s"]))


def paired_ratio(result: Result, other: Result) -> float:
    """Return the median over later epochs of one's median step over the other's in that epoch."""
    by_epoch = [
        [statistics.median(epoch["step_s"]) for epoch in each["epochs"][1:]]
        for each in (result, other)
    ]
    return float(statistics.median(a / b for a, b in zip(*by_epoch, strict=True)))


def last_s(result: Result) -> float:
    """Return the seconds of the median step of the last epoch."""
    return float(statistics.median(result["epochs"][-1]["step_s"]))


def fetch_over_compute(result: Result) -> float:
    """Return the worst fetch of a batch over the worst computing, at the end."""
    last = result["epochs"][-1]
    return float(max(last["fetch_s"]) / max(last["compute_s"]))


def print_table(results: Sequence[Result]) -> None:
    """Print a row a contestant: milliseconds of the median step by epoch, and what became of it."""
    write, width = sys.stdout.write, max(len(result["name"]) for result in results)
    count = len(results[0]["epochs"])
    epochs = "".join(f"{f'epoch {number + 1}':>9}" for number in range(count))
    write(f"{'':{width}}{epochs}{'cold mean':>11}{'later':>7}")
    write(f"{'at hand':>9}{'accuracy':>10}  sizes\n")
    for result in results:
        last = result["epochs"][-1]
        steps = [1e3 * statistics.median(epoch["step_s"]) for epoch in result["epochs"]]
        write(f"{result['name']:{width}}" + "".join(f"{ms:9.0f}" for ms in steps))
        write(f"{1e3 * cold_s(result):11.0f}{1e3 * later_s(result):7.0f}")
        write(f"{sum(last['local']) / GLOBAL_BATCH:9.0%}{result['accuracy']:10.3f}")
        write(f"  {last['sizes']}\n")
    sys.stdout.flush()


def _record(
    cluster: Cluster, contest: Contest, results: Sequence[Result], goals: Sequence[Goal]
) -> dict[str, Any]:
    """Print a contest's table; return all of it, for JSON."""
    print_table(results)
    return {
        "cluster": asdict(cluster),
        "contest": asdict(contest),
        "results": list(results),
        "goals": list(goals),
    }


def _by_name(results: Sequence[Result]) -> dict[str, Result]:
    return {result["name"]: result for result in results}


def _same_accuracy(results: Sequence[Result]) -> Goal:
    found = [result["accuracy"] for result in results]
    return Goal("test accuracies apart, points", 100 * (max(found) - min(found)), 1.0)


# Cases.


def _compare(testbed: Testbed, options: Options, *, num_workers: int) -> dict[str, Any]:
    cluster = unequal(testbed, options.ratio)
    epochs = options.epochs or 6
    contest = Contest(_EVERYONE, list(cluster.shares), epochs, num_workers=num_workers)
    results = run_job(testbed, Job(contest))["contestants"]
    by_name = _by_name(results)
    goals = [_same_accuracy(results)]
    own, busy = by_name["loft + store"], by_name["lbbsp-cpu:busy"]
    if num_workers == 0:
        goals += [
            Goal(f"later steps over those of {name}", later_s(own) / later_s(by_name[name]), limit)
            for name, limit in (("uniform", 0.65), ("lbbsp-cpu", 0.65), ("lbbsp-cpu:busy", 0.8))
        ]
    for result in (by_name["loft"], own):
        ratio = cold_s(result) / cold_s(busy)
        goals.append(Goal(f"cold epoch of {result['name']} over lbbsp-cpu:busy", ratio, 1.02))
    record = _record(cluster, contest, results, goals)
    ratio = fetch_over_compute(by_name["lbbsp-cpu"])
    sys.stdout.write(f"worst fetch over worst computing under lbbsp-cpu: {ratio:.2f}\n")
    return record | {"fetch_over_compute": ratio}


def serial(testbed: Testbed, options: Options) -> dict[str, Any]:
    """All policies, without and with a store; each batch is fetched, then computed."""
    return _compare(testbed, options, num_workers=0)


def prefetch(testbed: Testbed, options: Options) -> dict[str, Any]:
    """The same with a loader process on each rank, which fetches beside the computing."""
    return _compare(testbed, options, num_workers=1)


def cold(testbed: Testbed, options: Options) -> dict[str, Any]:
    """First epochs of many jobs: what a store costs while it has nothing yet."""
    # The mean of an epoch's 14 steps changes by 3 % where nothing differs: many, by turns.
    cluster = unequal(testbed, options.ratio)
    busy = Contestant("lbbsp-cpu:busy", "lbbsp-cpu:busy")
    contestants = [busy, Contestant("loft", "loft"), _STORE]
    steps_s: dict[str, list[float]] = {each.name: [] for each in contestants}
    for job in range(options.epochs or 8):
        in_turn = contestants[::-1] if job % 2 else contestants
        contest = Contest(in_turn, list(cluster.shares), epochs=1)
        for result in run_job(testbed, Job(contest))["contestants"]:
            steps_s[result["name"]].append(cold_s(result))
    goals = []
    for name, means_s in steps_s.items():
        times = " ".join(f"{1e3 * each:.0f}" for each in means_s)
        sys.stdout.write(
            f"{name}: {1e3 * statistics.mean(means_s):.0f} ms a step, by job {times}\n"
        )
        if name != busy.name:
            ratio = statistics.mean(means_s) / statistics.mean(steps_s[busy.name])
            goals.append(Goal(f"first epochs of {name} over those of {busy.name}", ratio, 1.02))
    return {"cluster": asdict(cluster), "step_s": steps_s, "goals": goals}


def control(testbed: Testbed, options: Options) -> dict[str, Any]:
    """Equal hosts that have all samples: nothing to win, and nothing to lose."""
    _EQUAL.up(testbed)
    everywhere = len(_EQUAL.cpus)
    # Two per cent are less than what the machine's speed changes by from epoch to epoch: few
    # contestants, many epochs, each compared with equal sizes in that epoch.
    equal = Contestant("uniform", "uniform")
    contestants = [equal, Contestant("loft", "loft"), _STORE]
    contest = Contest(contestants, list(_EQUAL.shares), options.epochs or 20, copies=everywhere)
    results = run_job(testbed, Job(contest))["contestants"]
    goals = [
        Goal(
            f"later steps of {result['name']} over equal sizes",
            paired_ratio(result, results[0]),
            1.02,
        )
        for result in results[1:]
    ]
    return _record(_EQUAL, contest, results, [*goals, _same_accuracy(results)])


def unseen(testbed: Testbed, options: Options) -> dict[str, Any]:
    """What the models of one run say of steps at sizes and budgets that it never had."""
    cluster = unequal(testbed, options.ratio)
    others = [
        Contestant("equal, no store", [24, 24, 24, 24]),
        Contestant("28 24 24 20, no store", [28, 24, 24, 20]),
        Contestant("20 28 28 20, budget 1/8", [20, 28, 28, 20], budget=0.125),
        Contestant("36 24 16 20, budget 1/4", [36, 24, 16, 20], budget=0.25),
    ]
    contest = Contest([_STORE, *others], list(cluster.shares), options.epochs or 3)
    results = run_job(testbed, Job(contest))["contestants"]
    goals = []
    for result in results[1:]:
        ratio = result["predicted_s"] / last_s(result)
        sys.stdout.write(
            f"{result['name']}: predicted {1e3 * result['predicted_s']:.0f} ms, measured "
            f"{1e3 * last_s(result):.0f} ms\n"
        )
        goals.append(Goal(f"{result['name']}: prediction off, %", 100 * abs(ratio - 1), 10.0))
    return _record(cluster, contest, results, goals)


def faulty(testbed: Testbed, options: Options) -> dict[str, Any]:
    """A worker that sends its gradients turned round: the mean against a robust rule."""
    cluster = Cluster((0.5, 0.5, 0.25, 0.25), (FAST,) * 4, (0.25,) * 4)
    cluster.up(testbed)
    robust = "trimmed_mean:f=1"
    contestants = [
        Contestant("mean, all honest", "loft"),
        Contestant("mean, one faulty", "loft", is_attacked=True),
        Contestant("trimmed mean, one faulty", "loft", rule=robust, is_attacked=True),
        Contestant("the same + store", "loft", budget=1.0, rule=robust, is_attacked=True),
    ]
    contest = Contest(contestants, list(cluster.shares), options.epochs or 10)
    results = run_job(testbed, Job(contest))["contestants"]
    honest, spoilt, *defended = (result["accuracy"] for result in results)
    goals = [Goal("accuracy of the mean under attack, of that without", spoilt / honest, 0.5)]
    goals += [
        Goal(f"{each.name}: points of accuracy lost", 100 * (honest - found), 1.0)
        for each, found in zip(contestants[2:], defended, strict=True)
    ]
    return _record(cluster, contest, results, goals)


def degrading(testbed: Testbed, options: Options) -> dict[str, Any]:
    """The link of a fast host becomes slow half-way."""
    slow = unequal(testbed, options.ratio)
    before = Cluster(slow.cpus, (FAST,) * 4, slow.shares)
    before.up(testbed)
    epochs = options.epochs or 6
    contest = Contest(_EVERYONE, list(before.shares), epochs)

    def degrade(folder: Path) -> None:
        wait_for_epochs(folder, epochs // 2)
        testbed.tell("link", "host0", "--rate", f"{slow.bits_per_s[0]:.0f}")

    results = run_job(testbed, Job(contest, during=degrade))["contestants"]
    by_name = _by_name(results)
    best = min(last_s(by_name[name]) for name in _POLICIES)
    without, own = last_s(by_name["loft"]), last_s(by_name["loft + store"])
    goals = [
        Goal("last epoch of loft over the best without a store", without / best, 1.1),
        Goal("last epoch of loft + store over loft", own / without, 1.0),
        _same_accuracy(results),
    ]
    return _record(before, contest, results, goals)


def dying(testbed: Testbed, options: Options) -> dict[str, Any]:
    """A host dies in the second epoch, and the others go on; against a run in which none does."""
    contestants = [Contestant("loft", "loft")]
    contest = Contest(contestants, list(_EQUAL.shares), options.epochs or 6, copies=2)

    def crash(folder: Path) -> None:
        wait_for_epochs(folder, 1)
        time.sleep(1.0)
        testbed.tell("crash", "host3")

    runs: dict[str, Any] = {}
    during: Callable[[Path], None] | None
    for name, during in (("undisturbed", None), ("a host dies", crash)):
        _EQUAL.up(testbed, "--ssh-alive", "3")
        job = Job(
            contest,
            module="survivors",
            options=("--min-np", "3", "--np", "4", "--max-np", "4"),
            env={"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
            during=during,
        )
        runs[name] = run_job(testbed, job)
    ends = runs["a host dies"]["ends"]
    lost_s = max(after[0] - before[0] for before, after in pairwise(ends))
    accuracies = {name: run["accuracy"] for name, run in runs.items()}
    sys.stdout.write(f"accuracies {accuracies}; the longest pause between steps {lost_s:.1f} s\n")
    lost_points = 100 * (accuracies["undisturbed"] - accuracies["a host dies"])
    goals = [
        Goal("ranks at the end", ends[-1][1], 3),
        Goal("seconds without a step", lost_s, 30.0),
        Goal("points of accuracy lost", lost_points, 1.0),
    ]
    return {
        "cluster": asdict(_EQUAL),
        "contest": asdict(contest),
        "results": runs,
        "goals": goals,
    }


CASES: dict[str, Callable[[Testbed, Options], dict[str, Any]]] = {
    case.__name__: case
    for case in (serial, prefetch, cold, control, unseen, faulty, degrading, dying)
}
