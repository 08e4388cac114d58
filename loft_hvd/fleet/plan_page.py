"""A plan as one self-contained page: what runs where and when, why, and what would change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from loft_hvd.fleet.run import (
    JobPlan,
    describe,
    plan_table,
    say_changes,
    show_ranks,
    show_time,
)
from loft_hvd.fleet.timeline import PlannedJob
from loft_hvd.report.html import table, whole_page
from loft_hvd.report.svg import GanttRow, GanttSpan, gantt

__all__ = ["jobs_page", "plan_page"]

_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plan_page(plan: JobPlan) -> str:
    """Return a page on one job: hosts, times, what each host and link is worth, all in words."""
    head, *rest = describe(plan)
    titles, *rows = plan_table(plan)
    worths = [
        [
            each.name,
            "taken" if each.is_taken else "not taken",
            "cannot do without" if math.isinf(each.change) else f"{each.change:+.1%}",
            f"{-each.doubled:.1%}" if each.doubled else "-",
            each.why,
        ]
        for each in plan.choice.worths
    ]
    parts = [
        f"<h1>{escape(head)}</h1>",
        *([] if not plan.is_apart else [f'<p class="bad">{escape(_say_apart(plan))}</p>']),
        table(titles, rows),
        "<h2>When</h2>",
        _chart_of_hosts(plan),
        "<h2>What hosts and links are worth</h2>",
        "<p>How much longer the job takes without a host that it takes, or with one that it does "
        "not, and with a link of twice the rate.</p>",
        table(["", "", "time", "twice the rate", "why"], worths),
        f"<h2>In words</h2><pre>{escape(chr(10).join(rest))}</pre>",
    ]
    return whole_page("\n".join(parts), title=f"plan of {plan.job.name}")


def _say_apart(plan: JobPlan) -> str:
    return (
        f"A step takes {1e3 * (plan.simulated_s or 0.0):.4g} ms in the simulator, and "
        f"{1e3 * plan.best.step_s:.4g} ms as predicted: times below are the simulator's."
    )


def _chart_of_hosts(plan: JobPlan) -> str:
    """Draw the first epoch, where it is another, and the later ones of each host."""
    best, scale = plan.best, plan.total_s / plan.best.total_s
    first_s = 0.0
    if plan.job.store:
        first_s = min(best.steps_per_epoch, best.num_steps) * best.first_epoch_step_s * scale
    size, unit = _unit(plan.p95_s)
    names = ["first epoch, as stores fill", "later epochs"] if first_s else ["training"]
    between = None if plan.error is None else (plan.p05_s / size, plan.p95_s / size)
    rows = []
    for host, count in best.layout.hosts:
        told = f"{count} ranks"
        spans = [GanttSpan(first_s / size, plan.total_s / size, len(names) - 1, told)]
        if first_s:
            spans.insert(0, GanttSpan(0.0, first_s / size, 0, told))
        rows.append(GanttRow(host.name, spans, between))
    return gantt(rows, names, unit=unit)


def jobs_page(jobs: Sequence[PlannedJob], *, title: str) -> str:
    """Return a page on many jobs: when each waits and runs, where, and why others do not.

    Args:
        jobs: in the order in which they are shown.
        title: plain text.
    """
    admitted = [job for job in jobs if job.is_admitted]
    ends = [end for job in admitted for end in (job.end_high_s, job.end_s) if end is not None]
    size, unit = _unit(max(ends, default=0.0))
    rows = []
    for job in admitted:
        start = job.start_s or 0.0
        spans = [
            GanttSpan(each.start_s / size, each.end_s / size, 1, show_ranks(each.hosts))
            for each in job.stretches
        ]
        if job.arrival_s < start:
            spans.insert(0, GanttSpan(job.arrival_s / size, start / size, 0))
        between = None
        if job.end_low_s is not None and job.end_high_s is not None:
            between = job.end_low_s / size, job.end_high_s / size
        rows.append(GanttRow(job.name, spans, between))
    cells = [
        [
            job.name,
            show_time(job.start_s or 0.0),
            _say_end(job),
            say_changes(job) if job.changes else show_ranks(job.hosts),
            f"{job.worth:.4g}",
        ]
        for job in admitted
    ]
    refused = [[job.name, job.reason] for job in jobs if not job.is_admitted]
    head = f"{len(admitted)} of {len(jobs)} jobs are admitted"
    parts = [f"<h1>{escape(head)}</h1>"]
    if admitted:
        parts += [
            gantt(rows, ["waits", "runs"], unit=unit),
            table(["job", "start", "end", "hosts", "worth"], cells),
        ]
    if refused:
        parts += ["<h2>Not admitted</h2>", table(["job", "why"], refused)]
    return whole_page("\n".join(parts), title=title)


def _say_end(job: PlannedJob) -> str:
    end = show_time(job.end_s or 0.0)
    if job.end_low_s is None or job.end_high_s is None or job.end_low_s == job.end_high_s:
        return end
    return f"{end} ({show_time(job.end_low_s)} to {show_time(job.end_high_s)})"


def _unit(last_s: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit in which a chart of so long is read best."""
    return next(((size, name) for size, name in _UNITS if last_s >= 2.0 * size), _UNITS[-1])
