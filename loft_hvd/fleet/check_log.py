"""What a run took, beside what was predicted for its hosts and sizes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from loft_hvd.fleet.jobs import Fleet, Job
from loft_hvd.fleet.measured import LoggedRun, layout_of, read_log, usual_longest
from loft_hvd.fleet.place import show_rate
from loft_hvd.fleet.rate import Prediction, predict

__all__ = ["LogCheck", "check_log", "check_table", "describe_check"]

_APART = 0.10  # as of a simulated step


@dataclass(frozen=True)
class LogCheck:
    """A log's newest interval, and what its job should take on the same hosts with its sizes."""

    run: LoggedRun
    predicted: Prediction
    order: list[int]  # the log's rank of each predicted one
    step_s: float  # measured: what a step usually took
    longest_s: float  # of it, the usual longest of the ranks' own work

    @property
    def is_apart(self) -> bool:
        """Whether a step took another time than predicted."""
        return abs(self.predicted.step_s / self.step_s - 1.0) > _APART


def check_log(fleet: Fleet, job: Job, path: str | Path) -> LogCheck:
    """Compare a run with the models of its job, typed or from other logs.

    Raises:
        PlanError: the log has no times, its hosts are none of the cluster's, or a model is missing.
    """
    run = read_log(path)
    # A run's own global batch: a script may have been given another one since.
    job = replace(job, global_batch_size=run.world.global_batch_size)
    layout, order = layout_of(fleet, job, run)
    sizes = tuple(run.sizes[rank] for rank in order)
    predicted = predict(fleet, job, layout, sizes=sizes)
    step_s = statistics.median(each.typical_wall_s or each.wall_s for each in run.times.values())
    return LogCheck(run, predicted, order, step_s, usual_longest(run))


def describe_check(check: LogCheck) -> list[str]:
    """Say what a step took and should have taken, and of what."""
    predicted, rest_s = check.predicted, check.step_s - check.longest_s
    ratio = predicted.step_s / check.step_s - 1.0
    lines = [
        f"{check.run.path.name}: a step took {1e3 * check.step_s:.4g} ms, predicted "
        f"{1e3 * predicted.step_s:.4g} ms ({ratio:+.1%})"
        + ("; MORE THAN 10 % APART" if check.is_apart else ""),
        f"the ranks' own work: {1e3 * check.longest_s:.4g} ms, predicted "
        f"{1e3 * predicted.longest_s:.4g} ms",
        f"exchange and all else: {1e3 * rest_s:.4g} ms, predicted "
        f"{1e3 * predicted.exchange.exposed_s:.4g} ms ({predicted.exchange.way})",
    ]
    if (sent := check.run.exchange) is not None:
        lines.append(
            f"from the first bucket's start to the last one's end: {1e3 * sent.whole_s:.4g} ms on "
            f"rank 0, waits for later ranks included, predicted "
            f"{1e3 * predicted.exchange.seconds:.4g} ms without ({sent.lane})"
        )
        if sent.bytes_per_s is not None:
            slowest = min(host.link_bytes_per_s for host, _ in predicted.layout.hosts)
            lines.append(
                f"the slowest rank sent {show_rate(sent.bytes_per_s)} in the mesh's own trial; the "
                f"slowest link of these hosts is said to carry {show_rate(slowest)}"
            )
    return lines


def check_table(check: LogCheck) -> list[list[str]]:
    """Return a header, then a row a rank that the log has: measured beside predicted."""
    table = [
        ["rank", "host", "samples", "fetch ms", "predicted", "compute ms", "predicted"],
    ]
    for at, rank in sorted(enumerate(check.order), key=lambda pair: pair[1]):
        if rank not in check.run.times:
            continue
        times = check.run.times[rank]
        table.append(
            [
                str(rank),
                check.run.hosts[rank],
                f"{times.samples:.4g}",
                f"{1e3 * times.fetch_s:.1f}",
                f"{1e3 * check.predicted.fetch_s[at]:.1f}",
                f"{1e3 * times.compute_s:.1f}",
                f"{1e3 * check.predicted.compute_s[at]:.1f}",
            ]
        )
    return table
