"""What no policy can beat: the most that jobs can be worth together, all known beforehand.

Borders of machines are dropped, and each job is as fast as on the best machines.
"""

from __future__ import annotations

import math

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.errors import PlanError
from loft_hvd.fleet.solvers import Program, solve, sparse_rows
from loft_hvd.fleet.timeline import Demand, Workload

__all__ = ["fluid_bound", "gang_optimum"]

_WHAT = "a bound on worth"


def fluid_bound(workload: Workload) -> float:
    """Return a bound for all policies, also those that change workers in each slot.

    A linear program over the share of each job that is done in each slot, which is worth what the
    job would be if it ended with it.

    Raises:
        PlanError: HiGHS finds none.
    """
    demands = [demand for demand in workload.demands if math.isfinite(min(demand.least_slots))]
    costs, cells, most = [], [], []
    num_jobs, num_slots = len(demands), workload.num_slots
    total = _total(workload)
    at = 0
    for job, demand in enumerate(demands):
        first = math.ceil(demand.asked - 1e-9)
        if first >= num_slots:
            continue
        slots = np.arange(first, num_slots)
        fastest = min(demand.least_slots)
        ends = np.maximum(slots + (1.0 if demand.value.is_whole else 0.0), demand.asked + fastest)
        places = np.arange(at, at + len(slots))
        costs.append(-demand.worth(ends))
        most.append(np.full(len(slots), min(1.0 / fastest, 1.0)))
        cells.append((np.full(len(slots), job), places, np.ones(len(slots))))
        for resource, units in enumerate(_least_units(demand)):
            if units > 0:
                rows = num_jobs + resource * num_slots + slots
                cells.append((rows, places, np.full(len(slots), units)))
        at += len(slots)
    if not at:
        return 0.0
    low = np.full(num_jobs + len(total) * num_slots, -np.inf)
    high = np.concatenate([np.ones(num_jobs), np.repeat(total, num_slots)])
    rows = sparse_rows(cells, (len(low), at), what=_WHAT)
    program = Program(np.concatenate(costs), rows, low, high, np.concatenate(most))
    found, x = solve(program, what=_WHAT)
    if x is None:
        raise PlanError(f"HiGHS found no bound for {num_jobs} jobs in {num_slots} slots in time")
    return -found


def _total(workload: Workload) -> Floats:
    total: Floats = workload.capacity.sum(axis=0)
    return total


def _least_units(demand: Demand) -> Floats:
    """Return the least units of each resource times slots that the whole job takes, [R]."""
    pairs = zip(demand.counts, demand.least_slots, strict=True)
    found: Floats = np.min(
        [
            demand.needs.T @ np.array(demand.processes(count)) * slots
            for count, slots in pairs
            if math.isfinite(slots)
        ],
        axis=0,
    )
    return found


def gang_optimum(workload: Workload, *, limit_s: float, is_whole: bool = True) -> float | None:
    """Return the most worth of jobs that keep their workers from start to end.

    A program over each job's start and number of workers. None where HiGHS proves none in time.
    """
    costs, cells = [], []
    num_jobs, num_slots, total = len(workload.demands), workload.num_slots, _total(workload)
    at = 0
    for job, demand in enumerate(workload.demands):
        for count, slots in zip(demand.counts, demand.least_slots, strict=True):
            if not math.isfinite(slots):
                continue
            length = max(math.ceil(slots), 1)
            starts = np.arange(math.ceil(demand.asked - 1e-9), num_slots - length + 1.0)
            worth = demand.worth(starts + slots)
            starts, worth = starts[worth > 1e-6], worth[worth > 1e-6]
            if not len(starts):
                continue
            places = np.arange(at, at + len(starts))
            costs.append(-worth)
            cells.append((np.full(len(starts), job), places, np.ones(len(starts))))
            units = demand.needs.T @ np.array(demand.processes(count))
            for resource in np.flatnonzero(units > 0):
                taken = starts[:, None].astype(np.int64) + np.arange(length)
                rows = num_jobs + resource * num_slots + taken
                columns = np.repeat(places, length)
                cells.append((rows.ravel(), columns, np.full(rows.size, units[resource])))
            at += len(starts)
    if not at:
        return 0.0
    high = np.concatenate([np.ones(num_jobs), np.repeat(total, num_slots)])
    rows = sparse_rows(cells, (len(high), at), what=_WHAT)
    program = Program(np.concatenate(costs), rows, np.full(len(high), -np.inf), high, np.ones(at))
    found, x = solve(program, what=_WHAT, is_whole=is_whole, limit_s=limit_s)
    return None if x is None else -found
