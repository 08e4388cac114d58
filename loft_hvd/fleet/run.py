"""A plan for one job: hosts and sizes, tried in the simulator, as words and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loft_hvd.codec import encode
from loft_hvd.fleet.jobs import Fleet, Job
from loft_hvd.fleet.measured import Origin, with_logs
from loft_hvd.fleet.place import Choice, Worth, choose_hosts, show_rate
from loft_hvd.fleet.rate import Prediction, reads_of
from loft_hvd.fleet.timeline import PlannedJob
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate

__all__ = [
    "JobPlan",
    "describe",
    "plan_job",
    "plan_table",
    "say_changes",
    "scenario_of",
    "show_hosts",
    "show_ranks",
    "show_time",
    "to_dict",
]

# Steps of a trial in the simulator: ten intervals to find sizes, and ten with them.
_STEPS, _INTERVAL = 400, 20
_SAMPLES, _MOST_SAMPLES = 200_000, 10_000_000  # of its data set: their order takes time
_APART = 0.10  # of the predicted step, from which on the simulated one is told as another
_SIGMAS = 1.645  # a normal value is below so many standard errors in 19 of 20 cases
_WORTH_WORDS = 0.01  # of the time: what links and hosts change by less is not told
_MOST_HOSTS = 12  # that are named of those not taken
_MOST_CHANGES = 6  # of a job's hosts, that are told


@dataclass(frozen=True)
class JobPlan:
    """Where a job runs, and what came of it in the simulator."""

    fleet: Fleet
    job: Job
    choice: Choice
    simulated_s: float | None  # a step, once sizes have settled; None where it was not tried
    origins: Mapping[str, Origin] = field(default_factory=dict)  # of each class's model

    @property
    def best(self) -> Prediction:
        """The place that it takes."""
        return self.choice.best

    @property
    def is_apart(self) -> bool:
        """Whether the simulated step is another than the predicted one."""
        if self.simulated_s is None:
            return False
        return abs(self.simulated_s / self.best.step_s - 1.0) > _APART

    @property
    def error(self) -> float | None:
        """Standard error of the time, as a share, by those of the models; None if one is typed."""
        best, errors = self.best, []
        for part, size, busy_s in zip(best.devices, best.sizes, best.busy_s, strict=True):
            origin = self.origins.get(part.device)
            errors.append(None if origin is None else origin.error_at(size, busy_s))
        known = [error for error in errors if error is not None]
        return max(known) if len(known) == len(errors) else None

    @property
    def p95_s(self) -> float:
        """Seconds that the training should take no longer than in 19 of 20 cases."""
        return self.total_s * (1.0 + _SIGMAS * (self.error or 0.0))

    @property
    def p05_s(self) -> float:
        """Seconds that it should take at least in 19 of 20 cases."""
        return self.total_s * max(1.0 - _SIGMAS * (self.error or 0.0), 0.0)

    @property
    def total_s(self) -> float:
        """Seconds of the whole training; the simulator's word counts where there is one."""
        scale = 1.0 if self.simulated_s is None else self.simulated_s / self.best.step_s
        return self.best.total_s * scale


def plan_job(fleet: Fleet, job: Job, *, simulates: bool = True, assume: bool = False) -> JobPlan:
    """Choose hosts for one job that has the machines to itself, and try them.

    Args:
        fleet: the machines.
        job: the job; models that it does not have come from its run logs.
        simulates: whether it is tried.
        assume: take what logs do not tell apart as it is.

    Raises:
        PlanError: it fits nowhere, or a log does not tell what is asked of it.
    """
    job, origins = with_logs(fleet, job, now_s=time.time(), assume=assume)
    choice = choose_hosts(fleet, job)
    simulated_s = None
    if simulates:
        run = simulate(scenario_of(fleet, job, choice.best)).run("loft")
        simulated_s = run.settled_s
    return JobPlan(fleet, job, choice, simulated_s, origins)


def scenario_of(fleet: Fleet, job: Job, found: Prediction, *, seed: int = 0) -> Scenario:
    """Return a job on its hosts as the simulator takes it.

    Here ranks of a host queue for its link one by one, and noise is drawn for each step; what
    ``predict`` simplifies shows in the difference.
    """
    layout, total = found.layout, job.global_batch_size
    parts, world_size = found.devices, layout.world_size
    models = [job.models[part.device] for part in parts]
    ranks = {host.name: count for host, count in layout.hosts}
    reads = reads_of(fleet, job, layout)
    data = reads.data
    # Only ratios to the data set matter; several epochs of it where a store is to fill.
    wanted = (_STEPS // 4) * total if job.store else max(_SAMPLES, 20 * total)
    most = min(wanted, _MOST_SAMPLES)
    num_samples = max(most if data is None else min(data.num_samples, most), total)
    size = 1.0 if data is None else data.sample_bytes
    share, remote_bytes_per_s, latency_s, source, kept = [], [], [], [], []
    rates: dict[str, float] = {}
    for part, model in zip(parts, models, strict=True):
        held = 1.0 if data is None else data.share(part.host.name)
        name, rate, budget = "", size / max(model.local_s, 1e-15), 0.0
        if data is not None and held < 1.0:
            link = reads.links[part.host.name]
            name, rate = (link.name if link.ranks > 1 else ""), link.bytes_per_s
            if reads.is_at_server:
                name, rate = reads.server, reads.bytes_per_s
            rates |= {name: rate} if name else {}
            budget = part.host.store_bytes / data.num_bytes / ranks[part.host.name]
        # A whole copy beside parts is read as what is elsewhere, at the pace of the host's own.
        is_whole = held == 1.0 and data is not None
        share.append(0.0 if is_whole else held / ranks[part.host.name] if data else 1.0)
        remote_bytes_per_s.append(rate)
        latency_s.append(model.remote_s if held < 1.0 else 0.0)
        source.append(name)
        kept.append(budget * num_samples if job.store else 0.0)
    return Scenario(
        name=job.name,
        world_size=world_size,
        global_batch_size=total,
        seed=seed,
        steps=_STEPS,
        interval=_INTERVAL,
        num_samples=num_samples,
        sample_bytes=size,
        aggregate_s=found.exchange.exposed_s,
        min_batch=job.min_batch,
        max_batch=[model.max_batch or 0 for model in models],
        noise=float(np.mean([model.noise for model in models])),
        policies=("loft",),
        store=job.store,
        ranks=RankTraits(
            compute_s=[model.compute_s for model in models],
            compute_fixed_s=[model.compute_fixed_s for model in models],
            saturation=[model.knee for model in models],
            fetch_fixed_s=[model.fetch_fixed_s for model in models],
            local_bytes_per_s=[size / max(model.local_s, 1e-15) for model in models],
            remote_bytes_per_s=remote_bytes_per_s,
            remote_latency_s=latency_s,
            overlap=[model.overlap for model in models],
            local_share=share,
            cache_samples=kept,
            source=source,
        ),
        sources=rates,
    )


# In words.


def show_time(seconds: float) -> str:
    """Write a duration with its most fitting unit."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def show_ranks(hosts: Iterable[tuple[str, int]]) -> str:
    """Write names of hosts and their ranks, as launchers take them."""
    return ",".join(f"{name}:{count}" for name, count in hosts)


def show_hosts(found: Prediction) -> str:
    """Write a place likewise."""
    return show_ranks((host.name, count) for host, count in found.layout.hosts)


def say_changes(job: PlannedJob) -> str:
    """Say which hosts a job has from when on."""
    told = [f"{show_ranks(job.stretches[0].hosts)} first"]
    told += [
        f"{show_ranks(each.hosts)} from {show_time(each.start_s)}"
        for each in job.changes[:_MOST_CHANGES]
    ]
    more = len(job.changes) - _MOST_CHANGES
    return ", ".join(told) + (f", and {more} more changes" if more > 0 else "")


def plan_table(plan: JobPlan) -> list[list[str]]:
    """Return a header, then a row for each device class of each host."""
    best, table = (
        plan.best,
        [["host", "rack", "device", "ranks", "samples each", "fetch ms", "compute ms", "MB out"]],
    )
    names = [host.name for host, _ in best.layout.hosts]
    sent = dict(zip(names, best.exchange.host_bytes, strict=True))
    first = 0
    for part in best.layout.parts:
        ranks = slice(first, first + part.count)
        first += part.count
        sizes = sorted(set(best.sizes[ranks]))
        table.append(
            [
                part.host.name,
                part.host.rack or "-",
                part.device,
                str(part.count),
                str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}",
                f"{1e3 * max(best.fetch_s[ranks]):.1f}",
                f"{1e3 * max(best.compute_s[ranks]):.1f}",
                f"{1e-6 * sent.pop(part.host.name, 0.0):.1f}",
            ]
        )
    return table


def describe(plan: JobPlan) -> list[str]:
    """Say what a step takes and why, what each host and link is worth, and what else there is."""
    best, job = plan.best, plan.job
    over = f" over {best.layout.over}" if not job.is_mean else ""
    rest = f" and all else, {1e3 * job.rest_s:.4g} ms of it as measured" if job.rest_s else ""
    lines = [
        f"job {job.name}: {best.layout.world_size} ranks on {len(best.layout.hosts)} of "
        f"{len(plan.fleet.hosts)} hosts, {job.rule}{over}",
        f"a step takes {1e3 * best.step_s:.4g} ms: {1e3 * best.longest_s:.4g} ms of the ranks' own "
        f"work, {1e3 * best.exchange.exposed_s:.4g} ms of exchange{rest} ({_say_exchange(plan)})",
    ]
    if plan.simulated_s is not None:
        ratio = plan.simulated_s / best.step_s - 1.0
        lines.append(
            f"simulated, with sizes that follow the ranks: {1e3 * plan.simulated_s:.4g} ms "
            f"({ratio:+.1%})"
            + ("; MORE THAN 10 % APART: trust the simulated one" if plan.is_apart else "")
        )
    if job.store and best.first_epoch_step_s > best.step_s * (1 + _WORTH_WORDS):
        lines.append(
            f"in the first epoch, before samples are kept: {1e3 * best.first_epoch_step_s:.4g} ms"
        )
    cost = "" if best.price is None else f", {best.price * plan.total_s / best.total_s:.4g} to pay"
    within = f"{show_time(plan.p05_s)} to {show_time(plan.p95_s)}"
    until = "" if plan.error is None else f" ({within} in 9 of 10 cases)"
    lines.append(
        f"the whole training: {best.num_steps:.0f} steps, {show_time(plan.total_s)}{until}{cost}"
    )
    lines += _say_worths(plan)
    lines += [
        f"next best: {show_hosts(other)}"
        + (f" over {other.layout.over}" if not job.is_mean else "")
        + f", {other.total_s / best.total_s - 1:+.1%}"
        for other in plan.choice.others
    ]
    lines += [f"model of {name}: {origin.text}" for name, origin in plan.origins.items()]
    lines += [f"{name} is left out: {why}" for name, why in plan.choice.left_out.items()]
    return lines


def _say_exchange(plan: JobPlan) -> str:
    sent = plan.best.exchange
    if not sent.link:
        return sent.way
    hosts = {host.name: host.link_bytes_per_s for host in plan.fleet.hosts}
    rate = hosts.get(sent.link) or plan.fleet.rack_link(sent.link.removeprefix("rack "))
    return f"{sent.way}; the busiest link is that of {sent.link}, {show_rate(rate)}"


def _say_worths(plan: JobPlan) -> list[str]:
    """Say what hosts and links are worth: those taken first, then those that would cost least."""
    worths = plan.choice.worths
    taken = [each for each in worths if each.is_taken]
    others = sorted((each for each in worths if not each.is_taken), key=lambda each: each.change)
    lines = [
        f"without {each.name}: {_say_change(each)}; it {each.why}"
        if not each.name.startswith("rack ")
        else f"without {each.name}: {_say_change(each)}"
        for each in taken
        if each.change > _WORTH_WORDS
    ]
    lines += [
        f"with {each.name} too: {_say_change(each)}: {each.why}" for each in others[:_MOST_HOSTS]
    ]
    if len(others) > _MOST_HOSTS:
        lines.append(f"and {len(others) - _MOST_HOSTS} other hosts, none of which would help")
    lines += [
        f"{each.name} with a link of twice the rate: {each.doubled:.1%} shorter"
        for each in sorted(worths, key=lambda each: -each.doubled)
        if each.doubled > _WORTH_WORDS
    ]
    return lines


def _say_change(worth: Worth) -> str:
    if math.isinf(worth.change):
        return "it cannot run so"
    if worth.change > 1.0:
        return f"{1.0 + worth.change:.1f} times as long"
    return f"{worth.change:.1%} longer" if worth.change >= 0 else f"{-worth.change:.1%} shorter"


def to_dict(plan: JobPlan) -> dict[str, Any]:
    """Return a plan as JSON values; docs/plan.md has the schema."""
    best = plan.best
    return {
        "job": plan.job.name,
        "command": plan.job.command,
        **_place(best),
        "simulated_step_s": plan.simulated_s,
        "is_apart": plan.is_apart,
        "total_s": plan.total_s,
        "p05_s": plan.p05_s,
        "p95_s": plan.p95_s,
        "num_steps": best.num_steps,
        "price": None if best.price is None else best.price * plan.total_s / best.total_s,
        "worths": [
            {**encode(each), "change": None if math.isinf(each.change) else each.change}
            for each in plan.choice.worths
        ],
        "others": [_place(other) for other in plan.choice.others],
        "left_out": plan.choice.left_out,
        "models": {
            name: {
                **encode(model),
                "origin": plan.origins[name].text,
                "error": plan.origins[name].error,
            }
            for name, model in plan.job.models.items()
        },
    }


def _place(found: Prediction) -> dict[str, Any]:
    parts = found.devices
    return {
        "over": found.layout.over,
        "ranks": [
            {
                "rank": rank,
                "host": part.host.name,
                "device": part.device,
                "samples": found.sizes[rank],
                "fetch_s": found.fetch_s[rank],
                "compute_s": found.compute_s[rank],
                "busy_s": found.busy_s[rank],
            }
            for rank, part in enumerate(parts)
        ],
        "step_s": found.step_s,
        "first_epoch_step_s": found.first_epoch_step_s,
        "longest_s": found.longest_s,
        "exchange": encode(found.exchange),
    }
