"""Why a job is not admitted, and the least change that admits it.

A change is tried before it is told: with it, and all prices as they are, the job is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.fleet.prices import Market, Window, admit, best_window
from loft_hvd.fleet.solvers import Solver
from loft_hvd.fleet.timeline import Change, Demand, Refusal

__all__ = ["changed", "refuse"]

_OVER = 1e-6  # over what it must be worth, relative: it must gain
_STEP, _STEPS = 1.1, 40  # by which a worth is raised until it is enough, where windows differ
_LONGER = 6  # times that the time looked at is made longer


def changed(demand: Demand, change: Change) -> Demand:
    """Return a job with a change."""
    value = replace(demand.value, top=change.worth)
    if change.end is not None:
        value = replace(value, deadline=max(change.end - demand.asked, value.deadline))
    return replace(demand, value=value)


def refuse(
    market: Market,
    demand: Demand,
    resources: Sequence[str],
    *,
    earliest: float,
    solver: Solver,
) -> Refusal:
    """Say why a job is not admitted to a market that did not admit it."""
    late = replace(demand, value=replace(demand.value, deadline=math.inf))
    now, window = market, _least_worth(market, demand, earliest, solver)
    if window is None:  # no end before the deadline has room; the soonest after it
        window = _soonest(market, late, earliest, solver)
    more = max(math.ceil(earliest) - market.timeline.num_slots, 0) + _usual_slots(demand)
    for _ in range(_LONGER):
        if window is not None:
            break
        now = market.longer(more)
        window = _soonest(now, late, earliest, solver)
        more *= 2
    if window is None:
        return Refusal(
            why="no place was found that has room for it, and where it can run, however long the "
            "plan looks ahead"
        )
    is_late = window.end - demand.asked > demand.value.deadline
    share = float(late.worth(np.array(window.end))) / demand.value.top
    change = Change(
        max(demand.value.top, window.cost / share * (1.0 + _OVER)),
        window.end if is_late else None,
        None if now is market else now.timeline.num_slots,
    )
    for _ in range(_STEPS):
        if admit(now, changed(demand, change), earliest=earliest, solver=solver) is not None:
            break
        change = replace(change, worth=_STEP * change.worth)
    else:
        return Refusal(
            why="it is worth too little where it would best run, whatever it is raised to"
        )
    resource, price = _binding(now, demand, window, resources)
    there = float(demand.worth(np.array(window.end)))
    return Refusal(resource, price, window.cost, there, change)


def _usual_slots(demand: Demand) -> int:
    known = [slots for slots in demand.least_slots if math.isfinite(slots)]
    return max(math.ceil(max(known, default=1.0)), 1)


def _least_worth(market: Market, demand: Demand, earliest: float, solver: Solver) -> Window | None:
    """Return the window where the job would have to be worth least to be admitted."""

    def score(ends: Floats, costs: Floats) -> Floats:
        share = demand.worth(ends) / demand.value.top
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where((share > 0) & np.isfinite(costs), -costs / share, -np.inf)

    return best_window(market, demand, score, earliest=earliest, solver=solver)


def _soonest(market: Market, demand: Demand, earliest: float, solver: Solver) -> Window | None:
    """Return the soonest end that the job is worth; else where it would have to be worth least."""

    def score(ends: Floats, costs: Floats) -> Floats:
        return np.where(demand.worth(ends) > costs, -ends, -np.inf)

    found = best_window(market, demand, score, earliest=earliest, solver=solver)
    return _least_worth(market, demand, earliest, solver) if found is None else found


def _binding(
    market: Market, demand: Demand, window: Window, resources: Sequence[str]
) -> tuple[str, float]:
    """Return the resource that costs most in a window, and the price of a unit in a slot."""
    stretch = window.stretch
    prices = market.prices[:, :, stretch.first : stretch.last]  # [H, R, T]
    uses = stretch.placement.T @ demand.needs  # [H, R]
    costs = np.einsum("hrt,hr->r", prices, uses)
    units = uses.sum(axis=0) * (stretch.last - stretch.first)
    most = int(np.argmax(costs))
    return resources[most], float(costs[most] / max(units[most], 1e-300))
