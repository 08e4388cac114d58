"""Small random workloads: machines with few slots, jobs with few workers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from loft_hvd.fleet.prices import Market, PriceRange
from loft_hvd.fleet.timeline import Demand, Ints, Outcome, Value, Workload, in_order

RESOURCES = ("slots", "memory")


def random_workload(seed: int, *, num_jobs: int = 5, has_servers: bool | None = None) -> Workload:
    """Return 1 to 5 machines, 3 to 20 slots of time and a few jobs, one in three with servers."""
    rng = np.random.default_rng(seed)
    count, num_slots = int(rng.integers(1, 6)), int(rng.integers(3, 21))
    slots = rng.integers(1, 5, count).astype(float)
    capacity = np.stack([slots, slots * 4.0], axis=1)
    demands = [_demand(rng, f"j{at}", capacity, num_slots, has_servers) for at in range(num_jobs)]
    return Workload(capacity, RESOURCES, num_slots, tuple(demands))


def _demand(
    rng: np.random.Generator,
    name: str,
    capacity: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    num_slots: int,
    has_servers: bool | None,
) -> Demand:
    work, outside = float(rng.uniform(0.5, 2.0 * num_slots)), float(rng.uniform(1.0, 2.0))
    asks = bool(rng.random() < 0.3) if has_servers is None else has_servers
    needs = [[1.0, float(rng.integers(1, 5))]] + [[0.0, float(rng.integers(1, 5))]] * asks

    def slots(placement: Ints) -> float:
        is_one = np.count_nonzero(placement.any(axis=0)) == 1
        return work * (1.0 if is_one else outside) / float(placement[0].sum())

    most = int(rng.integers(1, 5))
    counts = tuple(range(int(rng.integers(1, most + 1)), most + 1))
    urgent = rng.random() < 0.5
    value = Value(
        float(rng.uniform(1, 10)),
        float(rng.uniform(0.1, 3.0)) if urgent else 0.0,
        float(rng.uniform(1, num_slots)),
        float(rng.uniform(1, num_slots)) if rng.random() < 0.3 else math.inf,
    )
    return Demand(
        name,
        float(rng.integers(0, num_slots)),
        value,
        np.array(needs),
        counts,
        int(rng.choice(counts)),
        slots,
        (np.ones(len(capacity), dtype=bool),),
        np.unique(capacity, axis=0, return_inverse=True)[1].ravel(),
        tuple(work / each for each in counts),
        servers=0.5 if asks else 0.0,
    )


def elastic_workload(seed: int, *, restart: float | None = None) -> Workload:
    """Return a random workload whose jobs may change their machines, at a cost in slots."""
    workload = random_workload(seed)
    drawn = float(np.random.default_rng(seed).choice([0.0, 0.1, 0.7, 2.5]))
    lost = drawn if restart is None else restart
    demands = tuple(replace(each, is_elastic=True, restart=lost) for each in workload.demands)
    return replace(workload, demands=demands)


def confirmed_workload(seed: int) -> Workload:
    """Return a random workload whose jobs take up to twice as long on some kinds of machines."""
    workload = random_workload(seed)
    rng = np.random.default_rng(seed)
    factors = rng.choice([0.9, 1.0, 1.3, 2.0], len(workload.capacity))

    def confirmed(demand: Demand) -> Demand:
        def confirm(placement: Ints) -> float:
            kinds = demand.kinds[placement.any(axis=0)]
            return demand.slots(placement) * float(factors[kinds].max())

        return replace(demand, confirm=confirm)

    return replace(workload, demands=tuple(confirmed(each) for each in workload.demands))


def check_outcomes(
    workload: Workload,
    outcomes: tuple[Outcome, ...],
    *,
    gangs: bool,
    prices: PriceRange | None = None,
) -> None:
    """Raise where a machine is over its capacity in a slot, or a job lacks workers or time.

    With prices also where one that is admitted is worth less than what it takes costs. ``gangs``
    says that jobs are planned as a whole: those that are not elastic keep their machines, and
    others have no pauses.
    """
    if prices is not None:
        _check_paid(workload, outcomes, prices)
    used = np.zeros((*workload.capacity.shape, workload.num_slots))
    for outcome in outcomes:
        demand, done = outcome.demand, 0.0
        lost, last = 0.0, 0
        for stretch in outcome.stretches:
            assert 0 <= demand.asked <= stretch.first < stretch.last <= workload.num_slots
            counts = stretch.placement.sum(axis=1)
            assert tuple(counts) == demand.processes(int(counts[0]))
            assert int(counts[0]) in demand.counts
            uses = stretch.placement.T @ demand.needs
            used[:, :, stretch.first : stretch.last] += uses[:, :, None]
            takes = demand.slots if demand.confirm is None or not gangs else demand.confirm
            length = stretch.last - stretch.first
            if last:
                lost = demand.restart
                assert stretch.first == last or not gangs
            done += max(length - lost, 0.0) / takes(stretch.placement)
            last = stretch.last
        if outcome.end is not None:
            assert done >= 1.0 - 1e-9
            assert outcome.end <= outcome.stretches[-1].last + 1e-9
            assert len(outcome.stretches) == 1 or not gangs or demand.is_elastic
    assert np.all(used <= workload.capacity[:, :, None] * (1.0 + 2e-9))


def _check_paid(workload: Workload, outcomes: tuple[Outcome, ...], prices: PriceRange) -> None:
    market = Market(workload.timeline(), prices)
    for at in in_order(workload.demands):
        outcome, cost = outcomes[at], 0.0
        for stretch in outcome.stretches:
            there = market.prices[:, :, stretch.first : stretch.last].sum(axis=2)  # [H, R]
            cost += float((stretch.placement.T @ outcome.demand.needs * there).sum())
        assert outcome.worth >= cost * (1.0 - 1e-9), outcome.demand.name
        for stretch in outcome.stretches:
            market.take(outcome.demand, stretch)
