"""Who gets which machines when: our policy, and those that others are known by.

``price``, ``oasis`` and ``fifo`` plan a job when it arrives and keep to it: it has its machines
from start to end; by ``price`` and ``oasis`` elastic jobs may change them. ``drf``, ``dorm`` and
``las`` share machines out anew in each slot among the jobs that are there. Whoever changes a job's
machines pays for its restart.

``oasis`` is ``price`` for one who does not see places: no choice of fast links, of racks, of one
machine for all workers (after arXiv 1801.00936). ``fifo`` takes a fixed number of workers, first
come, first served, and a later job goes ahead where it delays none. ``drf`` gives a worker to the
job with the smallest dominant share, again and again. ``dorm`` uses as much as it can, but changes
few jobs and keeps all near their fair share. ``las`` runs those first that have had least.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.fleet.elastic import admit_schedule
from loft_hvd.fleet.prices import RESERVE, Market, PriceRange, best_window, price_range
from loft_hvd.fleet.refusals import refuse
from loft_hvd.fleet.solvers import Packing, Program, Solver, evenly, fill, solve
from loft_hvd.fleet.timeline import (
    Demand,
    Ints,
    Outcome,
    Refusal,
    Stretch,
    Workload,
    in_order,
)

__all__ = ["POLICIES", "Options", "plan_all"]


# Of Dorm: how far below its fair share a job may be, and the share of jobs that may be changed.
_UNFAIR, _CHANGED = 0.1, 0.2
_LAS_UNIT = 8.0  # workers times slots, that the first of queues takes


@dataclass(frozen=True)
class Options:
    """What a user may choose beside a policy."""

    solver: Solver = fill
    prices: PriceRange | None = None  # None: by the demands
    reserve: float = RESERVE  # as ``price_range`` has it
    scale: float = 1.0
    explains: bool = True  # whether refusals come with the least change


def plan_all(policy: str, workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Plan all demands by a policy; outcomes come in their order."""
    return POLICIES[policy](workload, options)


def _priced(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Admit jobs that are worth the price of what they take."""
    prices = options.prices
    if prices is None:
        prices = price_range(workload, reserve=options.reserve, scale=options.scale)
    market = Market(workload.timeline(), prices)

    def place(demand: Demand, earliest: float) -> Outcome:
        schedule = admit_schedule(market, demand, earliest=earliest, solver=options.solver)
        if schedule is None:
            found = None
            if options.explains:
                found = refuse(
                    market, demand, workload.resources, earliest=earliest, solver=options.solver
                )
            return Outcome(demand, refusal=found)
        for stretch in schedule.stretches:
            market.take(demand, stretch)
        return Outcome(demand, schedule.stretches, schedule.end)

    return _one_by_one(workload, place)


def _oasis(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Admit by price without a look at places."""
    blind = tuple(_blind(demand) for demand in workload.demands)
    found = _priced(replace(workload, demands=blind), options)
    return tuple(
        replace(outcome, demand=demand)
        for outcome, demand in zip(found, workload.demands, strict=True)
    )


def _blind(demand: Demand) -> Demand:
    return replace(demand, tiers=demand.tiers[:1], has_singles=False)


def _fifo(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Give each job the earliest end that delays none before it, with its fixed workers."""
    market = Market(workload.timeline())

    def soonest(ends: Floats, costs: Floats) -> Floats:
        return np.where(np.isfinite(costs), -ends, -np.inf)

    def place(demand: Demand, earliest: float) -> Outcome:
        window = best_window(
            market,
            demand,
            soonest,
            earliest=earliest,
            counts=[demand.wanted],
            solver=options.solver,
        )
        if window is None:
            return Outcome(demand)
        market.take(demand, window.stretch)
        return Outcome(demand, (window.stretch,), window.end)

    return _one_by_one(workload, place)


def _one_by_one(
    workload: Workload, place: Callable[[Demand, float], Outcome]
) -> tuple[Outcome, ...]:
    """Place jobs in order of arrival; those that wait for others start after these."""
    found: dict[int, Outcome] = {}
    ends: dict[str, float | None] = {
        demand.name: float(stretch.last) for demand, stretch in workload.running
    }
    for at in in_order(workload.demands):
        demand = workload.demands[at]
        missing = [name for name in demand.after if ends.get(name, 0.0) is None]
        if missing:
            found[at] = Outcome(
                demand, refusal=Refusal(why=f"it is after {missing[0]}, which does not end")
            )
        else:
            before = (ends.get(name) or 0.0 for name in demand.after)
            found[at] = place(demand, max([demand.asked, *before]))
        ends[demand.name] = found[at].end
    return tuple(found[at] for at in range(len(workload.demands)))


# Slot by slot.


class _Running:
    """A job, while slots go by."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.done = 0.0  # share of it
        self.had = 0.0  # workers times slots
        self.stretches: list[Stretch] = []
        self.end: float | None = None
        self._restarts = 0.0  # slots that are left of a restart

    def last_placement(self, slot: int) -> Ints | None:
        """Return where it ran in the slot before."""
        if self.stretches and self.stretches[-1].last == slot:
            return self.stretches[-1].placement
        return None

    def run(self, slot: int, placement: Ints) -> None:
        """Work for a slot."""
        slots = self.demand.slots(placement)
        self.had += float(placement[0].sum())
        before = self.last_placement(slot)
        if before is not None and np.array_equal(before, placement):
            self.stretches[-1] = replace(self.stretches[-1], last=slot + 1)
        else:
            self._restarts = self.demand.restart if self.stretches else 0.0
            self.stretches.append(Stretch(slot, slot + 1, placement))
        self.done += max(1.0 - self._restarts, 0.0) / slots
        self._restarts = max(self._restarts - 1.0, 0.0)
        if self.done >= 1.0 - 1e-9:
            self.end = slot + 1.0 - max(self.done - 1.0, 0.0) * slots


# Takes the jobs that are there and what is free, [H, R]; returns workers of each.
Sharing = Callable[[Sequence[_Running], Floats], Sequence[int]]


def _slot_by_slot(workload: Workload, share_out: Sharing) -> tuple[Outcome, ...]:
    timeline = workload.timeline()
    jobs = {demand.name: _Running(demand) for demand in workload.demands}
    fixed = {demand.name: stretch.last for demand, stretch in workload.running}
    for slot in range(workload.num_slots):
        there = [
            job for job in jobs.values() if job.end is None and _is_due(job, slot, jobs, fixed)
        ]
        if not there:
            continue
        free = timeline.free(slot, slot + 1)
        for job, placement in _placed(there, share_out(there, free), slot, free):
            timeline.take(job.demand, Stretch(slot, slot + 1, placement))
            job.run(slot, placement)
    return tuple(
        Outcome(job.demand, tuple(job.stretches), job.end)
        if job.end is not None
        else Outcome(job.demand)
        for job in jobs.values()
    )


def _is_due(job: _Running, slot: int, jobs: dict[str, _Running], fixed: dict[str, int]) -> bool:
    """Say whether a job has arrived, and those that it waits for are done."""
    ends = [
        jobs[name].end if name in jobs else float(fixed.get(name, 0)) for name in job.demand.after
    ]
    return job.demand.asked <= slot and all(end is not None and end <= slot for end in ends)


def _placed(
    there: Sequence[_Running], counts: Sequence[int], slot: int, free: Floats
) -> Iterator[tuple[_Running, Ints]]:
    """Yield places of jobs: where they were, else the machines with most room first."""
    left = free.copy()
    for job, count in zip(there, counts, strict=True):
        if not count:
            continue
        demand = job.demand
        bundle = demand.bundle
        asked = bundle > 0
        usable = np.where(demand.tiers[0][:, None], left, 0.0)
        room = np.floor(np.min(usable[:, asked] / bundle[asked] + 1e-9, axis=1))
        before = job.last_placement(slot)
        stays = np.zeros(len(left)) if before is None else before[0]
        # Cheap are machines that it is on, then those that hold more of it.
        prices = np.tile((1.0 / (1.0 + room + 1e3 * stays))[:, None], (1, left.shape[1]))
        fitting = [each for each in demand.counts if each <= count]
        for workers, each in product(reversed(fitting), demand.even):
            packing = Packing(usable, prices, demand.needs, demand.processes(workers))
            placement = evenly(packing, each=each)
            if placement is not None and math.isfinite(demand.slots(placement)):
                left = left - placement.T @ demand.needs
                yield job, placement
                break


def _drf(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Raise the job with the smallest dominant share."""
    return _slot_by_slot(workload, lambda there, free: _fair_counts(there, free.sum(axis=0)))


def _fair_counts(there: Sequence[_Running], total: Floats) -> list[int]:
    """Return workers of jobs, raised one by one, as long as any is left."""
    left, counts = total.copy(), [0] * len(there)
    scale = np.maximum(total, 1e-300)
    steps = [iter(job.demand.counts) for job in there]
    shares = [(0.0, job) for job in range(len(there))]  # a heap: of the scarcest resource, and who
    while shares:
        _, job = heapq.heappop(shares)
        count = next(steps[job], None)
        if count is None:
            continue
        bundle = there[job].demand.bundle
        needed = bundle * (count - counts[job])
        if np.all(needed <= left + 1e-9):
            left, counts[job] = left - needed, count
            heapq.heappush(shares, (float(np.max(bundle * count / scale)), job))
    return counts


def _las(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Run the jobs first that have had least, with their fixed workers.

    Jobs that have had about as much, up to twice, come in order of arrival: else all of them would
    take turns in each slot, and none would end. The idea is that of Tiresias' queues.
    """

    def queue(job: _Running) -> tuple[int, float]:
        return math.floor(math.log2(1.0 + job.had / _LAS_UNIT)), job.demand.asked

    def share_out(there: Sequence[_Running], free: Floats) -> list[int]:
        left = free.sum(axis=0)
        counts = [0] * len(there)
        for job in sorted(range(len(there)), key=lambda j: (queue(there[j]), j)):
            needed = there[job].demand.bundle * there[job].demand.wanted
            if np.all(needed <= left + 1e-9):
                left = left - needed
                counts[job] = there[job].demand.wanted
        return counts

    return _slot_by_slot(workload, share_out)


def _dorm(workload: Workload, options: Options) -> tuple[Outcome, ...]:
    """Use as much as can be, near the fair shares, and change few jobs at a time.

    A whole-number program over the number of workers of each job, whenever a job comes or ends.
    Its idea is Dorm's, use under limits of fairness and of changes; the program and its limits are
    ours, and borders of machines are dropped in it.
    """
    kept: dict[str, int] = {}

    def share_out(there: Sequence[_Running], free: Floats) -> Sequence[int]:
        names = {job.demand.name for job in there}
        if names != set(kept):
            before = [kept.get(job.demand.name) for job in there]
            counts = _used_most(there, free.sum(axis=0), before)
            kept.clear()
            kept.update(zip((job.demand.name for job in there), counts, strict=True))
        return [kept[job.demand.name] for job in there]

    return _slot_by_slot(workload, share_out)


def _used_most(
    there: Sequence[_Running], total: Floats, before: Sequence[int | None]
) -> Sequence[int]:
    """Return workers of jobs that use most, by HiGHS; the fair ones where it finds none.

    Variables are workers of each job, whether it has any, and whether it is changed.
    """
    num, fair = len(there), _fair_counts(there, total)
    scale = np.maximum(total, 1e-300)
    bundles = np.array([job.demand.bundle for job in there])  # [num, R]
    dominant = (bundles / scale).max(axis=1)
    most = np.array([float(job.demand.counts[-1]) for job in there])
    least = np.array([float(job.demand.counts[0]) for job in there])
    eye, none = np.eye(num), np.zeros((num, num))
    old = np.array([math.nan if each is None else float(each) for each in before])
    known = np.isfinite(old)
    changes = max(math.ceil(_CHANGED * known.sum()), 1)
    rows = [
        (np.hstack([bundles.T, np.zeros((len(total), 2 * num))]), -np.inf, total),
        (np.hstack([eye, -np.diag(most), none]), -np.inf, np.zeros(num)),
        (np.hstack([eye, -np.diag(least), none]), np.zeros(num), np.inf),
        # Far from its fair share by this much at most.
        (
            np.hstack([np.diag(dominant), none, none]),
            dominant * np.array(fair) - _UNFAIR,
            np.inf,
        ),
        (np.hstack([eye, none, -np.diag(most)])[known], -np.inf, old[known]),
        (np.hstack([eye, none, np.diag(most)])[known], old[known], np.inf),
        (np.hstack([np.zeros((1, 2 * num)), known[None, :]]), -np.inf, np.array([changes])),
    ]
    program = Program(
        np.concatenate([-dominant, np.zeros(2 * num)]),
        np.vstack([row for row, _, _ in rows]),
        np.concatenate([np.broadcast_to(low, len(row)) for row, low, _ in rows]),
        np.concatenate([np.broadcast_to(high, len(row)) for row, _, high in rows]),
        np.concatenate([most, np.ones(2 * num)]),
    )
    what = "--policy dorm, alone of all policies,"
    _, x = solve(program, what=what, is_whole=True, limit_s=2.0)
    if x is None:
        return fair
    counts = [round(each) for each in x[:num]]
    fits = np.all(bundles.T @ np.array(counts) <= total * (1.0 + 1e-6))
    return counts if fits else fair


POLICIES: dict[str, Callable[[Workload, Options], tuple[Outcome, ...]]] = {
    "price": _priced,
    "fifo": _fifo,
    "drf": _drf,
    "dorm": _dorm,
    "oasis": _oasis,
    "las": _las,
}
