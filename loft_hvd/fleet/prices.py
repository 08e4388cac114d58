"""Prices of machines by what is promised of them, and the jobs that are worth theirs.

A unit of a resource of a machine in a slot costs ``low (high / low) ** (used / there)``: next to
nothing where all is free, and at full use so much that no job gains. A job is admitted if its worth
is above the price of what it takes; it takes the start, the number of workers and the machines
where it gains most. After PD-ORS (arXiv 2108.02917) and OASiS (arXiv 1801.00936), whose
method this follows for jobs that keep their machines from start to end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.fleet.solvers import Packing, Solver, evenly, fill
from loft_hvd.fleet.timeline import Bools, Demand, Ints, Stretch, Timeline, Workload

__all__ = [
    "RESERVE",
    "Market",
    "PriceRange",
    "Score",
    "Window",
    "admit",
    "best_window",
    "gain",
    "learning",
    "price_range",
]

# Of a job's windows: their ends and costs, [S], in; scores out, -inf where one is not to be had.
Score = Callable[[Floats, Floats], Floats]
# Exponent of the spread of prices, that came to most on made-up jobs (docs/plan.md).
RESERVE = 0.55
_LEAST_GAIN = 1e-9  # of its worth: more than sums round by
_LEAST_SHARE = 0.1  # of its worth, that the poorest job pays on free machines
_RETRIES = 4  # of a window whose length turns out another than was thought
_STARTS = 4  # that are tried, where processes of two kinds find no room at the best one
# Places that are worked out at length before all others are taken to be longer than thought, too,
# and the most in all.
_LEARNED, _CONFIRMED = 6, 12


@dataclass(frozen=True)
class PriceRange:
    """Prices of a unit of each resource in a slot, all free and all taken, [R]."""

    low: Floats
    high: Floats

    def of(self, timeline: Timeline, first: int = 0, last: int | None = None) -> Floats:
        """Return what a unit costs, [H, R, T]."""
        there = np.maximum(timeline.capacity, 1e-300)[:, :, None]
        share = np.clip(timeline.used[:, :, first:last] / there, 0.0, 1.0)
        prices: Floats = self.low[:, None] * np.exp(share * np.log(self.high / self.low)[:, None])
        return prices

    def times(self, factor: float) -> PriceRange:
        """Return prices that are so many times as high."""
        return PriceRange(factor * self.low, factor * self.high)


def price_range(workload: Workload, *, reserve: float = RESERVE, scale: float = 1.0) -> PriceRange:
    """Return prices for jobs that are known: by what a unit is worth to them, and how many ask.

    ``high`` is the most that a unit is worth to a job, ``low`` a tenth of what the poorest can pay
    for the workers that use units best, so machines which nobody else wants are cheap enough for
    all. Where jobs ask for more than a quarter of what there is, ``low`` is higher: units are kept
    for those that are worth more, even while they are free.

    Args:
        workload: machines and jobs.
        reserve: exponent of the spread of units' worth, at three quarters and above.
        scale: of both, for those who would see what wrong prices do.
    """
    total = workload.capacity.sum(axis=0) * workload.num_slots
    low, high = np.full(len(total), np.inf), np.zeros(len(total))
    asked = np.zeros(len(total))
    for demand in workload.demands:
        runs = [
            demand.needs.T @ np.array(demand.processes(count)) * slots
            for count, slots in zip(demand.counts, demand.least_slots, strict=True)
            if math.isfinite(slots)
        ]
        if not runs:
            continue
        units = np.array(runs)  # [num_counts, R]
        with np.errstate(divide="ignore"):
            worth = np.where(units > 0, demand.value.top / units, 0.0).max(axis=0)
        used = units.min(axis=0) > 0
        asked += np.where(used, units.min(axis=0), 0.0)
        high = np.maximum(high, worth)
        low[used] = np.minimum(low[used], _LEAST_SHARE * worth[used] / used.sum())
    high = np.where(high > 0, high, 1.0)
    low = np.where(np.isfinite(low) & (low > 0), low, high)
    load = np.clip((asked / np.maximum(total, 1e-300) - 0.25) / 0.5, 0.0, 1.0)
    low = low * (high / low) ** (reserve * load)
    return PriceRange(scale * low, scale * np.maximum(high, low))


class Market:
    """A timeline, and what it costs."""

    def __init__(self, timeline: Timeline, prices: PriceRange | None = None) -> None:
        self.timeline = timeline
        self._range = prices
        self.prices = (
            np.zeros_like(timeline.used) if prices is None else prices.of(timeline)
        )  # [H, R, T]

    def take(self, demand: Demand, stretch: Stretch) -> None:
        """Promise machines to a job; prices follow."""
        self.timeline.take(demand, stretch)
        if self._range is not None:
            slots = slice(stretch.first, stretch.last)
            self.prices[:, :, slots] = self._range.of(self.timeline, stretch.first, stretch.last)

    def longer(self, more: int) -> Market:
        """Return a copy with so many more slots."""
        return Market(self.timeline.longer(more), self._range)


@dataclass(frozen=True)
class Window:
    """Machines from a first slot on, and how good that is."""

    stretch: Stretch
    slots: float  # that the job takes, not rounded up
    cost: float
    score: float

    @property
    def end(self) -> float:
        """When it ends, in slots."""
        return self.stretch.first + self.slots


def best_window(
    market: Market,
    demand: Demand,
    score: Score,
    *,
    earliest: float | None = None,
    counts: Sequence[int] | None = None,
    solver: Solver = fill,
) -> Window | None:
    """Return the best start, number of workers and machines; None where there is no room.

    For each number of workers and each of the job's sets of machines all starts are looked at at
    once, with the cheapest machines of each; of single machines likewise. How long the job takes
    depends on the machines, so the best start is looked for again with what they take.

    Where the job has ``confirm``, the best window is worked out at length. One that is too short
    then, or not to be had for its later end, is given up, and the best one looked for with what is
    known now (``learning``).
    """
    first = max(math.ceil((demand.asked if earliest is None else earliest) - 1e-9), 0)
    demand = learning(demand)
    for _ in range(_CONFIRMED):
        scan = _Scan(market, demand, first, score, solver)
        window = scan.best(demand.counts if counts is None else counts)
        if window is None or demand.confirm is None:
            return window
        stretch, slots = window.stretch, demand.confirm(window.stretch.placement)
        if math.isfinite(slots) and math.ceil(slots) <= stretch.last - stretch.first:
            ends, costs = np.array([stretch.first + slots]), np.array([window.cost])
            if (found := float(score(ends, costs)[0])) > -np.inf:
                return replace(window, slots=slots, score=found)
    return None


def learning(demand: Demand) -> Demand:
    """Return a job whose ``slots`` follow what ``confirm`` finds for the same kinds of machines.

    Other places are taken as they were: one place's cold store says nothing of them. Only where
    several were all longer, the others are taken to be longer by the least of these factors.
    """
    rough, confirm = demand.slots, demand.confirm
    if confirm is None:
        return demand
    factors: dict[object, float] = {}

    def key(placement: Ints) -> object:
        taken = np.flatnonzero(placement.any(axis=0))
        return tuple(sorted((int(demand.kinds[at]), *placement[:, at].tolist()) for at in taken))

    def slots(placement: Ints) -> float:
        if not factors:
            return rough(placement)
        others = 1.0
        if len(factors) >= _LEARNED:
            known = (each for each in factors.values() if each < math.inf)
            others = max(min(known, default=1.0), 1.0)
        return rough(placement) * factors.get(key(placement), others)

    def confirmed(placement: Ints) -> float:
        found = confirm(placement)
        factors[key(placement)] = found / rough(placement)
        return found

    return replace(demand, slots=slots, confirm=confirmed)


class _Scan:
    """All windows of a job."""

    def __init__(
        self, market: Market, demand: Demand, first: int, score: Score, solver: Solver
    ) -> None:
        self._market, self._demand = market, demand
        self._first, self._score, self._solver = first, score, solver
        bundle = demand.bundle
        self._room = market.timeline.room(bundle)[:, first:]  # bundles, [H, T - first]
        costs = np.einsum("hrt,r->ht", market.prices[:, :, first:], bundle)
        self._sums = np.concatenate([np.zeros((len(costs), 1)), np.cumsum(costs, axis=1)], axis=1)
        self._rooms: dict[int, Floats] = {1: self._room}

    def best(self, counts: Sequence[int]) -> Window | None:
        """Return the best window of some numbers of workers."""
        best: Window | None = None
        for count in counts:
            for found in self._windows(count):
                if best is None or found.score > best.score + 1e-12 * abs(best.score):
                    best = found
        return best

    def _windows(self, count: int) -> Iterator[Window]:
        """Yield the best window of each set of machines, and of single machines."""
        if self._demand.has_singles:
            yield from self._singles(count)
        for tier, each in product(self._demand.tiers, self._demand.even):
            found = self._of_tier(count, tier, each)
            if found is not None:
                yield found

    def _least_room(self, length: int) -> Floats:
        """Return the room in all of a window's slots, by its start, [H, T - first - length + 1]."""
        if length not in self._rooms:
            half = self._least_room((length + 1) // 2)
            shift = length // 2
            self._rooms[length] = np.minimum(half[:, : half.shape[1] - shift], half[:, shift:])
        return self._rooms[length]

    def _costs(self, length: int) -> Floats:
        """Return what a bundle costs for a window, by its start."""
        costs: Floats = self._sums[:, length:] - self._sums[:, :-length]
        return costs

    def _fits(self, length: int) -> bool:
        return 1 <= length <= int(self._room.shape[1])

    def _scores(self, length: int, slots: float, costs: Floats) -> Floats:
        starts = np.arange(costs.shape[-1], dtype=np.float64)
        ends = np.broadcast_to(self._first + starts + slots, costs.shape)
        return self._score(ends, costs)

    def _singles(self, count: int) -> Iterator[Window]:
        """Yield the best window of machines that take all workers by themselves, kind by kind."""
        kinds = self._demand.kinds
        for kind in np.unique(kinds):
            places = np.flatnonzero(kinds == kind)
            if self._market.timeline.room(self._demand.bundle)[places].max() < count:
                continue
            one = self._placement(count, int(places[0]))
            slots = self._demand.slots(one)
            if not math.isfinite(slots) or not self._fits(length := max(math.ceil(slots), 1)):
                continue
            room = self._least_room(length)[places]
            costs = np.where(room >= count, self._costs(length)[places] * count, np.inf)
            scores = self._scores(length, slots, costs)
            best = np.unravel_index(int(np.argmax(scores)), scores.shape)
            if scores[best] > -np.inf:
                at, start = int(places[best[0]]), self._first + int(best[1])
                found = self._window(start, self._placement(count, at), slots)
                if found is not None:
                    yield found

    def _placement(self, count: int, at: int) -> Ints:
        """Return all processes on one machine."""
        placement = np.zeros((len(self._demand.needs), len(self._room)), dtype=np.int64)
        placement[:, at] = self._demand.processes(count)
        return placement

    def _of_tier(self, count: int, tier: Bools, each: int) -> Window | None:
        """Return the best window on a set of machines, ``each`` workers on those it takes, or 0."""
        slots = self._guess(count, tier, each)
        best: Window | None = None
        tried: set[int] = set()
        for _ in range(_RETRIES):
            length = max(math.ceil(slots), 1) if math.isfinite(slots) else 0
            if length in tried or not self._fits(length):
                break
            tried.add(length)
            found, slots = self._at_length(count, tier, each, length, slots)
            if found is not None and (best is None or found.score > best.score):
                best = found
        return best

    def _guess(self, count: int, tier: Bools, each: int) -> float:
        """Return slots on the set's first machines, all of them free."""
        capacity = np.where(tier[:, None], self._market.timeline.capacity, 0.0)
        packing = Packing(
            capacity, np.zeros_like(capacity), self._demand.needs, self._demand.processes(count)
        )
        placement = evenly(packing, each=each)
        return math.inf if placement is None else self._demand.slots(placement)

    def _at_length(
        self, count: int, tier: Bools, each: int, length: int, slots: float
    ) -> tuple[Window | None, float]:
        """Return the best window of a length, and the slots that its machines take."""
        room, costs = self._least_room(length)[tier], self._costs(length)[tier]
        if each:
            room = np.where(room >= each, float(each), 0.0)
        order = np.argsort(costs, axis=0, kind="stable")
        room, costs = np.take_along_axis(room, order, 0), np.take_along_axis(costs, order, 0)
        below = np.cumsum(room, axis=0)
        taken = np.clip(count - (below - room), 0.0, room)
        total = np.where(below[-1] >= count, (taken * costs).sum(axis=0), np.inf)
        scores = self._scores(length, slots, total)
        tries = 1 if len(self._demand.needs) == 1 else _STARTS
        for at in np.argsort(-scores, kind="stable")[:tries]:
            if scores[at] == -np.inf:
                break
            start = self._first + int(at)
            placement = self._place(count, tier, each, start, length)
            if placement is None:
                continue
            true = self._demand.slots(placement)
            if math.isinf(true) or math.ceil(true) > length:
                return None, true
            return self._window(start, placement, true), true
        return None, math.inf

    def _place(self, count: int, tier: Bools, each: int, start: int, length: int) -> Ints | None:
        """Place processes in a window, by the solver."""
        timeline = self._market.timeline
        free = np.where(tier[:, None], timeline.free(start, start + length), 0.0)
        prices = self._market.prices[:, :, start : start + length].sum(axis=2)
        packing = Packing(free, prices, self._demand.needs, self._demand.processes(count))
        return evenly(packing, each=each, solver=self._solver)

    def _window(self, start: int, placement: Ints, slots: float) -> Window | None:
        """Return a window as it is, if there is room for it and it is to be had for its cost."""
        last = start + max(math.ceil(slots), 1)
        prices = self._market.prices[:, :, start:last].sum(axis=2)
        packing = Packing(
            self._market.timeline.free(start, last),
            prices,
            self._demand.needs,
            tuple(int(each) for each in placement.sum(axis=1)),
        )
        if not packing.fits(placement):
            return None
        cost = packing.cost(placement)
        score = float(self._score(np.array([start + slots]), np.array([cost]))[0])
        if score == -np.inf:
            return None
        return Window(Stretch(start, last, placement), slots, cost, score)


# Admission.


def gain(demand: Demand) -> Score:
    """Return the score of a job that pays for what it takes: what it gains."""

    def score(ends: Floats, costs: Floats) -> Floats:
        worth = demand.worth(ends)
        gains: Floats = worth - costs
        waits = demand.haste * demand.value.top * (ends - demand.asked)
        return np.where(gains > _LEAST_GAIN * worth, gains - waits, -np.inf)

    return score


def admit(
    market: Market, demand: Demand, *, earliest: float | None = None, solver: Solver = fill
) -> Window | None:
    """Return where a job gains most; None where it gains nowhere, and is not admitted."""
    return best_window(market, demand, gain(demand), earliest=earliest, solver=solver)
