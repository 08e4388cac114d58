"""When an elastic job should change its machines: a schedule of stretches, at the market's prices.

Time is cut where what is promised changes; between two borders nothing does, so a job that changes
its machines does it there. In each part the job may have one of many placements, the cheapest of
each number of workers and set of machines. A dynamic program over the parts finds the placements
that do most work for their price, if work is worth so much. The worth of work is varied, and of all
schedules found that do the whole job the one counts that gains most. A change costs a restart:
slots that are paid for, in which no work is done. A change keeps a machine: Horovod ends a training
none of whose hosts stays (0.28.1, runner/elastic/driver.py), as nobody would have its state.

PD-ORS (arXiv 2108.02917) lets workers change in each slot, for nothing. The restart, and the search
by the worth of work in place of one over quanta of it, are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.fleet.prices import Market, admit, gain, learning
from loft_hvd.fleet.solvers import Packing, Solver, evenly, fill
from loft_hvd.fleet.timeline import Bools, Demand, Ints, Stretch

__all__ = ["MachineSchedule", "admit_schedule"]

_PARTS = 10  # of time, that a job may change at
_REACH = 2.0  # times as long as on machines that it keeps, that a schedule is looked for
_WORTHS, _SPAN = 24, 16.0  # of all of the work, that are tried, up to so often the job's worth
_CONFIRMED = 4  # schedules that are worked out at length


@dataclass(frozen=True)
class MachineSchedule:
    """The machines of a job over time, without pauses, and how good that is."""

    stretches: tuple[Stretch, ...]
    end: float  # in slots
    score: float


def admit_schedule(
    market: Market, demand: Demand, *, earliest: float | None = None, solver: Solver = fill
) -> MachineSchedule | None:
    """Return where a job gains most, an elastic one also with changes; None where it gains nowhere.

    It never gains less than on the machines that ``admit`` finds for it to keep.
    """
    window = admit(market, demand, earliest=earliest, solver=solver)
    kept = None if window is None else MachineSchedule((window.stretch,), window.end, window.score)
    if not demand.is_elastic:
        return kept
    first = max(math.ceil((demand.asked if earliest is None else earliest) - 1e-9), 0)
    if first >= market.timeline.num_slots:
        return kept
    found = _Changing(market, demand, _borders(market, demand, first, kept), solver).best(kept)
    if found is None or (kept is not None and found.score <= kept.score):
        return kept
    return found


def _borders(market: Market, demand: Demand, first: int, kept: MachineSchedule | None) -> list[int]:
    """Return the slots at which parts of time begin, and the end of the last one."""
    timeline, last = market.timeline, market.timeline.num_slots
    if math.isfinite(demand.value.deadline):
        last = min(last, max(math.ceil(demand.asked + demand.value.deadline), first + 1))
    if kept is not None:
        last = min(last, first + math.ceil(_REACH * (kept.end - first)) + 1)
    share = timeline.used[:, :, first:last] / np.maximum(timeline.capacity, 1e-300)[:, :, None]
    changes = np.abs(np.diff(share, axis=2)).sum(axis=(0, 1))  # [last - first - 1]
    largest = np.argsort(-changes, kind="stable")[: _PARTS - 1]
    inner = first + 1 + np.sort(largest[changes[largest] > 0])
    return [first, *inner.tolist(), last]


class _Changing:
    """All schedules of a job that changes its machines at given borders."""

    def __init__(
        self, market: Market, demand: Demand, borders: Sequence[int], solver: Solver
    ) -> None:
        self._market, self._demand = market, learning(demand)
        self._parts = list(pairwise(borders))
        self._lengths = np.diff(borders)
        free = [market.timeline.free(*part) for part in self._parts]
        prices = [market.prices[:, :, start:end].sum(axis=2) for start, end in self._parts]
        self._placements = self._choose(free, prices, solver)
        if not self._placements:
            return
        # What each placement takes, [P, H, R]; whether there is room, and what it costs, [P, B].
        uses = np.einsum("pkh,kr->phr", np.array(self._placements), demand.needs)
        self._costs = np.einsum("phr,bhr->pb", uses, np.array(prices))
        workers = np.array([each[0] > 0 for each in self._placements], dtype=np.float32)  # [P, H]
        self._shares = workers @ workers.T > 0  # a machine, [P, P]
        room = np.array(free) * (1.0 + 1e-9)
        self._fits = np.stack([(uses <= each).all(axis=(1, 2)) for each in room], axis=1)

    def _choose(
        self, free: Sequence[Floats], prices: Sequence[Floats], solver: Solver
    ) -> list[Ints]:
        """Return the cheapest placements of each part, number of workers and set of machines."""
        demand, found = self._demand, dict[bytes, Ints]()
        for room, price in zip(free, prices, strict=True):
            for tier, count, each in product(demand.tiers, demand.counts, demand.even):
                there = np.where(tier[:, None], room, 0.0)
                packing = Packing(there, price, demand.needs, demand.processes(count))
                placement = evenly(packing, each=each, solver=solver)
                if placement is not None:
                    found.setdefault(placement.tobytes(), placement)
        return list(found.values())

    def best(self, kept: MachineSchedule | None) -> MachineSchedule | None:
        """Return the schedule that gains most, worked out at length, if it is above ``kept``."""
        demand, confirmed = self._demand, dict[int, float]()
        least = -math.inf if kept is None else kept.score
        for _ in range(_CONFIRMED if self._placements else 0):
            slots = np.array([demand.slots(each) for each in self._placements])
            for at, known in confirmed.items():
                slots[at] = known
            top = max(
                (found for path in self._paths(slots) if (found := self._schedule(path, slots))),
                key=lambda pair: pair[0].score,
                default=None,
            )
            if top is None or top[0].score <= least:
                return None
            schedule, taken = top
            new = [at for at in taken if at not in confirmed]
            if demand.confirm is None or not new:
                return schedule
            for at in new:
                confirmed[at] = demand.confirm(self._placements[at])
        return None

    def _paths(self, slots: Floats) -> Iterator[tuple[int, ...]]:
        """Yield what does most work for its price: placements by part, -1 before the start."""
        rates = np.where(np.isfinite(slots), 1.0 / slots, 0.0)
        usable = self._fits & (rates > 0)[:, None]
        if not usable.any():
            return
        work = rates[:, None] * self._lengths
        with np.errstate(divide="ignore", invalid="ignore"):
            cheapest = float(np.where(usable, self._costs / work, np.inf).min())
        most = _SPAN * max(self._demand.value.top, cheapest)
        seen: set[tuple[int, ...]] = set()
        for worth in np.geomspace(max(cheapest, 1e-9 * most), most, _WORTHS):
            gains = np.where(usable, worth * work - self._costs, -np.inf)
            for path in _most_gain(gains, worth * rates * self._demand.restart, self._shares):
                if path not in seen:
                    seen.add(path)
                    yield path

    def _schedule(
        self, path: Sequence[int], slots: Floats
    ) -> tuple[MachineSchedule, tuple[int, ...]] | None:
        """Return a path as stretches that end with the job, and their placements.

        None where the job does not end, or gains nothing.
        """
        demand, left = self._demand, 1.0
        stretches: list[Stretch] = []
        taken: list[int] = []
        lost = 0.0  # slots that are left of a restart
        end = math.inf
        for (start, last), at in zip(self._parts, path, strict=False):
            if at < 0:
                continue
            if taken and taken[-1] == at:
                stretches[-1] = replace(stretches[-1], last=last)
            else:
                lost = demand.restart if taken else 0.0
                stretches.append(Stretch(start, last, self._placements[at]))
                taken.append(at)
            end = start + lost + left * slots[at]
            if end <= last:
                stretches[-1] = replace(
                    stretches[-1], last=max(math.ceil(end), stretches[-1].first + 1)
                )
                break
            left -= max(last - start - lost, 0.0) / slots[at]
            lost = max(lost - (last - start), 0.0)
        else:
            return None
        cost = sum(self._cost(stretch) for stretch in stretches)
        score = float(gain(demand)(np.array([end]), np.array([cost]))[0])
        return (
            (MachineSchedule(tuple(stretches), end, score), tuple(taken))
            if score > -np.inf
            else None
        )

    def _cost(self, stretch: Stretch) -> float:
        prices = self._market.prices[:, :, stretch.first : stretch.last].sum(axis=2)
        return float(((stretch.placement.T @ self._demand.needs) * prices).sum())


def _most_gain(gains: Floats, restarts: Floats, shares: Bools) -> Iterator[tuple[int, ...]]:
    """Yield the path of most gain that ends with each part.

    Args:
        gains: of each placement in each part, -inf where it has no room, [P, B].
        restarts: what a change to each placement costs, [P].
        shares: whether there may be a change between two placements, [P, P].
    """
    num_placements, num_parts = gains.shape
    everyone = np.arange(num_placements)
    came = np.empty((num_parts, num_placements), dtype=np.int64)  # from; -1: it starts there
    best = np.full(num_placements, -np.inf)
    for part in range(num_parts):
        order = np.argsort(-best, kind="stable")
        other = order[np.argmax(shares[order], axis=0)]  # the best to change from: the first, [P]
        changed = np.where(shares[other, everyone], best[other] - restarts, -np.inf)
        choices = np.stack([np.zeros(num_placements), best, changed])
        chosen = np.argmax(choices, axis=0)
        came[part] = np.choose(chosen, [np.full(num_placements, -1), everyone, other])
        best = choices[chosen, everyone] + gains[:, part]
        at = int(np.argmax(best))
        if best[at] == -np.inf:
            continue
        path = []
        for earlier in range(part, -1, -1):
            path.append(at)
            at = int(came[earlier, at])
            if at < 0:
                path += [-1] * earlier
                break
        yield tuple(reversed(path))
