"""A plan for many jobs: which run when and where, which are not admitted and why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from loft_hvd.codec import encode
from loft_hvd.errors import ArgumentError, PlanError
from loft_hvd.fleet.demands import (
    RESOURCES,
    SPEEDS,
    Machines,
    demand_of,
    in_slots,
    value_of,
    ways_of,
)
from loft_hvd.fleet.jobs import MOST_WORTH, Fleet, Job
from loft_hvd.fleet.measured import Origin, with_logs
from loft_hvd.fleet.misfits import misfit
from loft_hvd.fleet.now import NowState, RunningJob
from loft_hvd.fleet.place import Choice
from loft_hvd.fleet.policies import POLICIES, Options, plan_all
from loft_hvd.fleet.prices import PriceRange, price_range
from loft_hvd.fleet.rate import predict
from loft_hvd.fleet.run import JobPlan, say_changes, scenario_of, show_ranks, show_time
from loft_hvd.fleet.solvers import noting
from loft_hvd.fleet.timeline import (
    Demand,
    Ints,
    Outcome,
    PlannedJob,
    PlannedStretch,
    Refusal,
    Stretch,
    Workload,
)
from loft_hvd.simulate.simulation import simulate

__all__ = [
    "ManyOptions",
    "ManyPlan",
    "describe_many",
    "many_table",
    "many_to_dict",
    "plan_many",
    "read_prices",
]

_SLOTS, _MOST_SLOTS = 200, 2000
_SIGMAS = 1.645  # a normal value is below so many standard errors in 19 of 20 cases
_HOUR_S = 3600.0
Span = tuple[float, float]  # a low and a high price
_LEAST_PRICE = 1e-30  # prices are low (high / low) ** share
_HASTE = 1.0  # of its worth, that a job without urgency would give to end now, not at the horizon


@dataclass(frozen=True)
class ManyOptions:
    """How many jobs are planned."""

    policy: str = "price"
    model: str = "ours"
    slot_s: float | None = None  # None: a part of the time looked at
    horizon_s: float | None = None  # None: by what the jobs take
    simulates: bool = True
    assume: bool = False  # what run logs do not tell apart
    # Of a unit of each resource in an hour, all free and all taken; others follow from the jobs.
    prices: Mapping[str, Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value, known in (
            ("policy", self.policy, POLICIES),
            ("model", self.model, SPEEDS),
        ):
            if value not in known:
                raise ArgumentError(f"--{what} {value!r} must be one of {', '.join(known)}")
        for what, seconds in (("slot", self.slot_s), ("horizon", self.horizon_s)):
            if seconds is not None and not 1e-3 <= seconds <= 1e9:
                raise ArgumentError(f"--{what} {seconds:g} must be 0.001 to 1e9 seconds")
        for name, (low, high) in self.prices.items():
            if name not in RESOURCES or not _LEAST_PRICE <= low <= high <= MOST_WORTH:
                raise ArgumentError(
                    f"--prices {name}={low:g}:{high:g} must be one of {', '.join(RESOURCES)} with "
                    f"{_LEAST_PRICE:g} <= low <= high <= {MOST_WORTH:g} an hour"
                )
        if self.prices and self.policy not in ("price", "oasis"):
            raise ArgumentError(
                f"--prices are those of price and oasis; --policy {self.policy} has none"
            )


def read_prices(text: str) -> dict[str, Span]:
    """Read ``slots=0.1:4.7,cpus=0.01:1``: prices by the hour, all free and all taken."""
    found: dict[str, Span] = {}
    for part in text.split(","):
        name, _, span = part.partition("=")
        low, _, high = span.partition(":")
        if name.strip() in found:
            raise ArgumentError(f"--prices {text!r} has {name.strip()} twice; give it once")
        try:
            found[name.strip()] = float(low), float(high)
        except ValueError:
            raise ArgumentError(
                f"--prices {text!r} must be such as slots=0.1:4.7, a low and a high price of a "
                f"unit in an hour; several of {', '.join(RESOURCES)} with commas between"
            ) from None
    return found


@dataclass(frozen=True)
class ManyPlan:
    """What becomes of each job."""

    fleet: Fleet
    machines: Machines
    order: tuple[str, ...]  # names of all jobs that do not run yet, as in the file
    jobs: tuple[Job, ...]  # of these, those that fit somewhere
    unfit: Mapping[str, tuple[Job, Refusal]]  # the others, by name
    options: ManyOptions
    slot_s: float
    num_slots: int
    outcomes: tuple[Outcome, ...]  # of each job
    tried: Mapping[tuple[str, bytes], JobPlan]  # by name and placement
    prices: PriceRange | None  # of a unit in a slot; None: the policy has none
    now_s: float = 0.0
    running: tuple[PlannedJob, ...] = ()
    warnings: tuple[str, ...] = ()  # of solvers

    def plan_of(self, outcome: Outcome, stretch: Stretch) -> JobPlan | None:
        """Return a job's place, worked out at length; None where it was not."""
        return self.tried.get((outcome.demand.name, stretch.placement.tobytes()))

    def plans_of(self, outcome: Outcome) -> list[JobPlan]:
        """Return a job's places one after another; none where they were not worked out."""
        found = [self.plan_of(outcome, stretch) for stretch in outcome.stretches]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else []

    def place_of(self, name: str) -> tuple[JobPlan, PlannedJob]:
        """Return an admitted job's first place, and when it takes which hosts.

        Raises:
            PlanError: it has none that was worked out.
        """
        (planned,) = (each for each in self.planned if each.name == name)
        if not planned.is_admitted:
            raise PlanError(f"plan: {name!r} is not admitted: {planned.reason}")
        if planned in self.running:
            raise PlanError(f"plan: {name!r} runs already, as --now says")
        (outcome,) = (each for each in self.outcomes if each.demand.name == name)
        places = self.plans_of(outcome)
        if not places:
            raise PlanError(
                f"plan: {name!r} has no place that was worked out at length by --policy "
                f"{self.options.policy} and --model {self.options.model}; take price, fifo or "
                "oasis, and ours"
            )
        return places[0], planned

    @property
    def planned(self) -> tuple[PlannedJob, ...]:
        """All jobs: those that run already, then the others in the order of the file."""
        pairs = zip(self.jobs, self.outcomes, strict=True)
        found = {job.name: self._planned(job, outcome) for job, outcome in pairs}
        found |= {name: _refused(job, refusal.why) for name, (job, refusal) in self.unfit.items()}
        return (*self.running, *(found[name] for name in self.order))

    def at_s(self, slot: float) -> float:
        """Return the instant of a slot, on the clock of ``arrival_s``."""
        return self.now_s + slot * self.slot_s

    def _planned(self, job: Job, outcome: Outcome) -> PlannedJob:
        if outcome.end is None:
            return _refused(job, self._why(job, outcome))
        start_s, end_s = self.at_s(outcome.stretches[0].first), self.at_s(outcome.end)
        errors = [plan.error for plan in self.plans_of(outcome)]
        known = [error for error in errors if error is not None]
        spread_s = None
        if known and len(known) == len(errors):
            spread_s = _SIGMAS * max(known) * (end_s - start_s)
        return PlannedJob(
            job.name,
            True,
            "",
            job.arrival_s,
            start_s,
            end_s,
            None if spread_s is None else max(end_s - spread_s, start_s),
            None if spread_s is None else end_s + spread_s,
            outcome.worth,
            tuple(
                PlannedStretch(
                    self.at_s(each.first),
                    min(self.at_s(each.last), end_s),
                    self._hosts(each.placement[0]),
                )
                for each in outcome.stretches
            ),
        )

    def _hosts(self, workers: Ints) -> tuple[tuple[str, int], ...]:
        """Return how many ranks hosts have, by workers on machines, [H]."""
        counts: dict[str, int] = {}
        for at in np.flatnonzero(workers).tolist():
            name = self.machines.places[at][0].name
            counts[name] = counts.get(name, 0) + int(workers[at])
        return tuple(counts.items())

    def _why(self, job: Job, outcome: Outcome) -> str:
        refusal = outcome.refusal
        if refusal is None:
            until = show_time(self.at_s(self.num_slots))
            return f"it has not ended by {until}; look further ahead with --horizon"
        if refusal.why:
            return refusal.why
        change, end_s = refusal.change, None
        if change is not None and change.end is not None:
            end_s = self.at_s(change.end)
            text = f"it would end at {show_time(end_s)} at the soonest that it can pay, too late"
        elif change is not None and change.num_slots is not None:
            text = f"there is no room for it in the {show_time(self.slot_s * self.num_slots)} ahead"
        else:
            hourly = refusal.price * _HOUR_S / self.slot_s
            text = (
                f"{refusal.resource} cost {hourly:.4g} an hour where it would best run, "
                f"{refusal.cost:.4g} in all, and it is worth {refusal.worth:.4g} there"
            )
        if change is None:
            return text
        if change.worth > MOST_WORTH:
            return f"{text}; later than it was wished for, it is worth next to nothing"
        needed = [] if change.worth <= job.worth else [f"worth = {_up(change.worth)}"]
        if end_s is not None:
            needed.append(f"deadline_s = {math.ceil(end_s)}")
        if change.num_slots is not None:
            horizon_s = math.ceil(change.num_slots * self.slot_s)
            needed.append(f"--slot {self.slot_s:g} --horizon {horizon_s}")
        return f"{text}; {' and '.join(needed)} would admit it"


def _refused(job: Job, why: str) -> PlannedJob:
    return PlannedJob(job.name, False, why, job.arrival_s, None, None, None, None, 0.0)


def _up(value: float) -> str:
    """Return a value > 0 in six digits, not rounded down: so much would admit a job."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 5)
    return f"{math.ceil(value / unit) * unit:.6g}"


def plan_many(
    fleet: Fleet,
    jobs: Mapping[str, Job],
    options: ManyOptions,
    *,
    now: NowState | None = None,
) -> ManyPlan:
    """Plan all jobs of a file beside each other.

    Args:
        fleet: the machines.
        jobs: all jobs, by name.
        options: how.
        now: what runs already, and from when on the others are planned; None: nothing, from 0.

    Raises:
        ArgumentError: prices are of what no job needs, or no host has.
        PlanError: those that run have not the room that they are said to have.
    """
    now = NowState() if now is None else now
    now.check(jobs)
    today_s, machines = time.time(), Machines.of(fleet)
    known = {
        name: with_logs(fleet, job, now_s=today_s, assume=options.assume)
        for name, job in jobs.items()
        if name not in now.finished
    }
    pinned_names = {each.job for each in now.running}
    _check_prices(machines, [job for job, _ in known.values()], options.prices)
    seconds, unfit = _demands(machines, known, options, now.now_s, pinned_names)
    pinned = {
        each.job: _pinned(machines, known[each.job][0], each, seconds) for each in now.running
    }
    slot_s, num_slots = _slots(options, seconds, pinned, machines)
    tried: dict[tuple[str, bytes], JobPlan] = {}
    demands = []
    for name in (name for name in seconds if name not in pinned):
        job, origins = known[name]
        demand = in_slots(seconds[name], slot_s)
        if options.model == "ours":
            confirm = _confirming(machines, job, origins, options, slot_s, tried)
            demand = replace(demand, confirm=confirm)
        if not job.urgency:
            demand = replace(demand, haste=_HASTE / num_slots)
        demands.append(demand)
    running = tuple(
        (seconds[name], Stretch(0, max(math.ceil(left_s / slot_s), 1), placement))
        for name, (placement, left_s) in pinned.items()
    )
    workload = Workload(machines.capacity, RESOURCES, num_slots, tuple(demands), running)
    _check_room(workload)
    prices = None
    if options.policy in ("price", "oasis"):
        prices = _with_given(price_range(workload), options.prices, slot_s)
    with noting() as warned:
        outcomes = plan_all(options.policy, workload, Options(prices=prices))
    return ManyPlan(
        fleet,
        machines,
        tuple(name for name in known if name not in pinned),
        tuple(known[demand.name][0] for demand in demands),
        unfit,
        options,
        slot_s,
        num_slots,
        outcomes,
        tried,
        prices,
        now.now_s,
        tuple(
            _still_running(jobs[each.job], each, now, pinned[each.job][1]) for each in now.running
        ),
        tuple(warned),
    )


def _check_prices(machines: Machines, jobs: Collection[Job], given: Collection[str]) -> None:
    """Raise where a price that is given would count for nothing."""
    needed = {"slots"}
    needed |= {"cpus" for job in jobs if job.needs.cpus}
    needed |= {"memory_bytes" for job in jobs if job.needs.memory_bytes}
    there = dict(zip(RESOURCES, machines.capacity.sum(axis=0), strict=True))
    known = [name for name in RESOURCES if name in needed and there[name]]
    for name in given:
        if name not in known:
            why = f"no host has {name}" if name in needed else f"no job needs {name}"
            raise ArgumentError(f"--prices {name}: {why}; give prices of {', '.join(known)}")


def _with_given(prices: PriceRange, given: Mapping[str, Span], slot_s: float) -> PriceRange:
    """Return prices with those that a user gives by the hour in place."""
    low, high = prices.low.copy(), prices.high.copy()
    for name, span in given.items():
        at = RESOURCES.index(name)
        low[at], high[at] = np.array(span) * slot_s / _HOUR_S
    return PriceRange(low, high)


def _demands(
    machines: Machines,
    known: Mapping[str, tuple[Job, Mapping[str, Origin]]],
    options: ManyOptions,
    now_s: float,
    running: Collection[str],
) -> tuple[dict[str, Demand], dict[str, tuple[Job, Refusal]]]:
    """Return demands in slots of a second, and the jobs that fit nowhere or wait for such.

    Raises:
        PlanError: a job that runs fits nowhere.
    """
    speed = SPEEDS[options.model]
    seconds: dict[str, Demand] = {}
    unfit: dict[str, tuple[Job, Refusal]] = {}
    for name, (job, _) in known.items():
        try:
            seconds[name] = in_slots(demand_of(machines, job, speed=speed), 1.0, now_s=now_s)
        except PlanError:
            if name in running:
                raise
            unfit[name] = job, misfit(machines, job, speed=speed)
    gone = list(unfit)
    for lost in gone:
        for name in [each for each in seconds if lost in known[each][0].after]:
            if name not in running:
                del seconds[name]
                unfit[name] = known[name][0], Refusal(why=f"it is after {lost}, which does not end")
                gone.append(name)
    return seconds, unfit


def _pinned(
    machines: Machines, job: Job, running: RunningJob, seconds: Mapping[str, Demand]
) -> tuple[Ints, float]:
    """Return where a job runs, [1, H], and for how many more seconds."""
    count = sum(running.hosts.values())
    if not job.min_workers <= count <= job.max_workers:
        raise PlanError(
            f"job {job.name!r} cannot run on {running.hosts}, as --now says: these are {count} "
            f"workers, and it has {job.min_workers} to {job.max_workers}; correct one of these"
        )
    placement = machines.workers(running.hosts, job)[None, :]
    total_s = seconds[job.name].slots(placement)
    if math.isinf(total_s):
        raise PlanError(
            f"job {job.name!r} cannot run on {running.hosts}, as --now says: it has no model of "
            "a device there, too few workers for its rule or its batch, or for over='nodes' not as "
            "many on each host; correct one of these"
        )
    return placement, (1.0 - running.done) * total_s


def _check_room(workload: Workload) -> None:
    """Raise where jobs that run take more than there is."""
    used = np.zeros_like(workload.capacity)
    for demand, stretch in workload.running:
        used += stretch.placement.T @ demand.needs
        over = np.argwhere(used > workload.capacity * (1.0 + 1e-9))
        if len(over):
            what = workload.resources[over[0][1]]
            raise PlanError(
                f"job {demand.name!r} runs where others do, and together they take more {what} "
                "than the host has; correct --now, or the cluster's file"
            )


def _still_running(job: Job, running: RunningJob, now: NowState, left_s: float) -> PlannedJob:
    end_s = now.now_s + left_s
    value = value_of(job)
    worth = float(value.at(np.array(end_s - job.arrival_s)))
    kept = PlannedStretch(now.now_s, end_s, tuple(running.hosts.items()))
    none = (None, None)
    return PlannedJob(job.name, True, "", job.arrival_s, now.now_s, end_s, *none, worth, (kept,))


def _slots(
    options: ManyOptions,
    seconds: Mapping[str, Demand],
    pinned: Mapping[str, tuple[Ints, float]],
    machines: Machines,
) -> tuple[float, int]:
    """Return the length of a slot and how many there are.

    Without a word from the user, time for all jobs four times over, had each the workers that use
    slots best, and twice the longest one after the last has come.
    """
    horizon_s = options.horizon_s
    if horizon_s is None:
        total = sum(
            min(count * each for count, each in zip(one.counts, one.least_slots, strict=True))
            for one in seconds.values()
        )
        longest = max((min(each.least_slots) for each in seconds.values()), default=1.0)
        last = max(
            [*(each.asked for each in seconds.values()), *(s for _, s in pinned.values()), 0]
        )
        horizon_s = last + 4.0 * total / machines.capacity[:, 0].sum() + 2.0 * longest
    slot_s = horizon_s / _SLOTS if options.slot_s is None else options.slot_s
    num_slots = max(math.ceil(horizon_s / slot_s - 1e-9), 1)
    if num_slots > _MOST_SLOTS:
        raise PlanError(
            f"plan: {horizon_s:.4g} s in slots of {slot_s:.4g} s are {num_slots} slots, over "
            f"{_MOST_SLOTS}; give a longer --slot, or a shorter --horizon"
        )
    return slot_s, num_slots


def _confirming(
    machines: Machines,
    job: Job,
    origins: Mapping[str, Origin],
    options: ManyOptions,
    slot_s: float,
    tried: dict[tuple[str, bytes], JobPlan],
) -> Callable[[Ints], float]:
    """Return what works a place out at length, and tries it in the simulator."""

    def confirm(placement: Ints) -> float:
        key = (job.name, placement.tobytes())
        if key not in tried:
            best = None
            for over in ways_of(job):
                try:
                    found = predict(machines.fleet, job, machines.layout(placement[0], over=over))
                except PlanError:
                    continue
                if best is None or found.total_s < best.total_s:
                    best = found
            if best is None:
                return math.inf
            simulated_s = None
            if options.simulates:
                run = simulate(scenario_of(machines.fleet, job, best)).run("loft")
                simulated_s = run.settled_s
            choice = Choice(best, (), (), {})
            tried[key] = JobPlan(machines.fleet, job, choice, simulated_s, origins)
        return tried[key].total_s / slot_s

    return confirm


# In words.


def many_table(plan: ManyPlan) -> list[list[str]]:
    """Return a header, then a row for each job."""
    table = [["job", "arrives", "starts", "ends", "19 of 20 by", "ranks", "hosts", "worth"]]
    for each in plan.planned:
        if each.start_s is None or each.end_s is None:
            table.append([each.name, show_time(each.arrival_s), "-", "-", "-", "-", "-", "0"])
            continue
        table.append(
            [
                each.name,
                show_time(each.arrival_s),
                "runs" if each in plan.running else show_time(each.start_s),
                show_time(each.end_s),
                "-" if each.end_high_s is None else show_time(each.end_high_s),
                str(sum(count for _, count in each.hosts)),
                show_ranks(each.hosts),
                f"{each.worth:.4g}",
            ]
        )
    return table


def describe_many(plan: ManyPlan) -> tuple[str, list[str]]:
    """Return the line above the table, and those below: what is not admitted, and why."""
    planned = plan.planned
    admitted = [each for each in planned if each.is_admitted]
    options = plan.options
    worth = sum(each.worth for each in planned)
    head = (
        f"{len(admitted)} of {len(planned)} jobs admitted, worth {worth:.4g}; "
        f"policy {options.policy}, speeds {options.model}, {plan.num_slots} time slots of "
        f"{show_time(plan.slot_s)}"
    )
    lines = [f"{each.name} is not admitted: {each.reason}" for each in planned if each.reason]
    lines += [
        f"{each.name} ends after its deadline, and is worth nothing then"
        for each in admitted
        if not each.worth
    ]
    lines += [
        f"{each.name} changes its hosts: {say_changes(each)}" for each in admitted if each.changes
    ]
    lines += [
        f"{outcome.demand.name}: predicted {1e3 * found.best.step_s:.4g} ms a step, "
        f"simulated {1e3 * found.simulated_s:.4g} ms: MORE THAN 10 % APART"
        for outcome in plan.outcomes
        for found in plan.plans_of(outcome)
        if found.is_apart and found.simulated_s is not None
    ]
    lines += [f"warning: {each}" for each in plan.warnings]
    if plan.prices is not None and plan.outcomes:
        hourly = plan.prices.times(_HOUR_S / plan.slot_s)
        lines.append(
            f"a rank's place costs {hourly.low[0]:.4g} an hour where all of a host's are free, "
            f"{hourly.high[0]:.4g} where none is"
        )
    return head, lines


def many_to_dict(plan: ManyPlan) -> dict[str, Any]:
    """Return a plan as JSON values; docs/plan.md has the schema."""
    found = []
    outcomes = {outcome.demand.name: outcome for outcome in plan.outcomes}
    for each in plan.planned:
        outcome = outcomes.get(each.name)
        places = [] if outcome is None else plan.plans_of(outcome)
        tried = places[0] if len(places) == 1 else None
        refusal = None if outcome is None else outcome.refusal
        if each.name in plan.unfit:
            _, refusal = plan.unfit[each.name]
        found.append(
            {
                **encode(each),
                "hosts": dict(each.hosts),
                "stretches": [
                    {
                        **encode(stretch),
                        "hosts": dict(stretch.hosts),
                        "step_s": place.best.step_s if place else None,
                        "simulated_step_s": place.simulated_s if place else None,
                    }
                    for stretch, place in zip_longest(each.stretches, places)
                ],
                "step_s": None if tried is None else tried.best.step_s,
                "simulated_step_s": None if tried is None else tried.simulated_s,
                "is_apart": None if tried is None else tried.is_apart,
                "is_running": each in plan.running,
                "refusal": None if refusal is None else encode(refusal),
            }
        )
    hourly = None if plan.prices is None else plan.prices.times(_HOUR_S / plan.slot_s)
    return {
        "policy": plan.options.policy,
        "model": plan.options.model,
        "now_s": plan.now_s,
        "slot_s": plan.slot_s,
        "num_slots": plan.num_slots,
        "hourly_prices": None
        if hourly is None
        else {
            name: [float(hourly.low[at]), float(hourly.high[at])]
            for at, name in enumerate(RESOURCES)
            if any(outcome.demand.needs[:, at].any() for outcome in plan.outcomes)
        },
        "worth": sum(each.worth for each in plan.planned),
        "warnings": list(plan.warnings),
        "jobs": found,
    }
