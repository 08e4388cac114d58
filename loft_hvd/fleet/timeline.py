"""When many jobs run, and what is promised of each machine in each slot of time.

Time is cut into slots of equal length. A job is a ``Demand``: what a worker needs, how many workers
it may have, how long it takes where, and what its end is worth. A machine is one device class of a
host, with its share of the host's CPUs and memory. Arrays have the shapes of ``H`` machines, ``R``
resources, ``T`` slots, and ``K`` kinds of processes of a job: workers, and servers if it has any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.plan import Floats

__all__ = [
    "ROUNDING",
    "Bools",
    "Change",
    "Demand",
    "Ints",
    "Outcome",
    "PlannedJob",
    "PlannedStretch",
    "Refusal",
    "Stretch",
    "Timeline",
    "Value",
    "Workload",
    "in_order",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
ROUNDING = 1e-9  # relative: sums of needs against capacities, wherever these are compared


@dataclass(frozen=True)
class PlannedStretch:
    """Hosts of a job from one instant to another."""

    start_s: float
    end_s: float
    hosts: tuple[tuple[str, int], ...]  # names, and ranks on each

    @property
    def num_ranks(self) -> int:
        """On all hosts."""
        return sum(count for _, count in self.hosts)


@dataclass(frozen=True)
class PlannedJob:
    """What a plan of many jobs says of one of them; times are None where it is not admitted."""

    name: str
    is_admitted: bool
    reason: str  # why it is not admitted; "" where it is
    arrival_s: float
    start_s: float | None
    end_s: float | None
    end_low_s: float | None  # its end by the models' errors, between these in 9 of 10 cases
    end_high_s: float | None
    worth: float  # of its end; 0 where it is not admitted
    # One where it keeps its hosts; none where it is not admitted.
    stretches: tuple[PlannedStretch, ...] = ()

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Its hosts; of one that changes them, where it has most ranks."""
        most = max(self.stretches, key=lambda each: each.num_ranks, default=None)
        return () if most is None else most.hosts

    @property
    def changes(self) -> tuple[PlannedStretch, ...]:
        """What comes after its first hosts."""
        return self.stretches[1:]


@dataclass(frozen=True)
class Value:
    """What the end of a job is worth, by how long after its arrival that is, in slots.

    ``top / (1 + exp(urgency * (duration - wished)))``, and nothing after the deadline; ``top`` at
    any time where ``urgency`` is 0.
    """

    top: float
    urgency: float = 0.0  # a slot
    wished: float = 0.0
    deadline: float = math.inf  # after arrival
    is_whole: bool = False  # whether durations count in whole slots, as in the papers

    def at(self, duration: Floats) -> Floats:
        """Return the worth of each duration, in the array's shape."""
        if self.is_whole:
            duration = np.ceil(duration - ROUNDING)
        share: Floats = np.ones_like(duration, dtype=np.float64)
        if self.urgency:
            share = 1.0 / (1.0 + np.exp(np.clip(self.urgency * (duration - self.wished), -60, 60)))
        late: Floats = np.where(duration <= self.deadline * (1.0 + ROUNDING), share, 0.0)
        return self.top * late


@dataclass(frozen=True)
class Demand:
    """A job, as those see it who share out machines and time."""

    name: str
    asked: float  # when it arrived, in slots; durations count from here
    value: Value
    needs: Floats  # of a process, [K, R]
    counts: tuple[int, ...]  # workers that it may have, ascending
    wanted: int  # of them, for policies that choose none
    # Slots of the whole job on machines, [K, H]; infinite where it cannot run so.
    slots: Callable[[Ints], float]
    tiers: tuple[Bools, ...]  # sets of machines to choose from, [H]; the first is the widest
    kinds: Ints  # machines that are as good as each other have one number, [H]
    least_slots: tuple[float, ...]  # on the best machines, of each of ``counts``
    after: tuple[str, ...] = ()
    servers: float = 0.0  # of each worker; 0: it has none
    # Slots of the whole job, worked out at length for machines that are chosen; None: as ``slots``.
    confirm: Callable[[Ints], float] | None = None
    # Share of its worth that a slot of time counts for among windows: sooner is better even where
    # its worth stays.
    haste: float = 0.0
    has_singles: bool = True  # whether single machines are looked at beside ``tiers``
    # Workers of each machine that is taken, to choose from; 0: as many as are cheapest there.
    even: tuple[int, ...] = (0,)
    is_elastic: bool = False  # whether it may change its machines while it runs
    restart: float = 0.0  # slots without progress, wherever it changes its machines

    def processes(self, count: int) -> tuple[int, ...]:
        """Return how many of each kind, [K], ``count`` workers come with."""
        return (count, math.ceil(self.servers * count)) if len(self.needs) > 1 else (count,)

    @property
    def bundle(self) -> Floats:
        """What a worker and its share of a server need, [R]."""
        shares = np.array([1.0, self.servers][: len(self.needs)])
        bundle: Floats = shares @ self.needs
        return bundle

    def worth(self, ends: Floats) -> Floats:
        """Return what it is worth to end at the end of slots, whose numbers are given."""
        return self.value.at(ends - self.asked)


@dataclass(frozen=True)
class Stretch:
    """Machines of a job in ``first <= slot < last``; all but its first begin with a restart."""

    first: int
    last: int
    placement: Ints  # processes of each kind on each machine, [K, H]


@dataclass(frozen=True)
class Change:
    """The least change found that admits a job, all prices as they are now."""

    worth: float  # at the end that is wished for, ``Value.top``
    end: float | None = None  # by which it must be allowed to end; None: as it is
    num_slots: int | None = None  # that the plan must look ahead; None: as it does


@dataclass(frozen=True)
class Refusal:
    """Why a job is not admitted."""

    resource: str = ""  # that costs it most; "" where prices are not what is in the way
    price: float = 0.0  # of a unit of it in a slot, where the job would best run
    cost: float = 0.0  # of all that it needs there
    worth: float = 0.0  # that it would have there
    change: Change | None = None
    why: str = ""  # where prices are not what is in the way


@dataclass(frozen=True)
class Outcome:
    """What became of a demand."""

    demand: Demand
    stretches: tuple[Stretch, ...] = ()
    end: float | None = None  # in slots; None: it does not end, or does not start
    refusal: Refusal | None = None

    @property
    def worth(self) -> float:
        """What it is worth."""
        return 0.0 if self.end is None else float(self.demand.worth(np.array(self.end)))


class Timeline:
    """What is promised of each machine in each slot; never more than there is."""

    def __init__(self, capacity: Floats, num_slots: int) -> None:
        self.capacity = capacity  # [H, R]
        self.used: Floats = np.zeros((*capacity.shape, num_slots))
        self._beyond: list[tuple[Demand, Stretch]] = []  # those that end after the last slot

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return int(self.used.shape[2])

    def longer(self, more: int) -> Timeline:
        """Return a copy with so many more slots, promised to those alone that last into them."""
        copy = Timeline(self.capacity, self.num_slots + more)
        copy.used[:, :, : self.num_slots] = self.used
        for demand, stretch in self._beyond:
            copy.take(demand, replace(stretch, first=max(stretch.first, self.num_slots)))
        return copy

    def room(self, needs: Floats) -> Floats:
        """Return how many processes with such needs, [R], find room, [H, T]."""
        rooms = [
            (self.capacity[:, at, None] * (1.0 + ROUNDING) - self.used[:, at]) / need
            for at, need in enumerate(needs)
            if need > 0
        ]
        if not rooms:
            raise AssertionError("a process needs something of a machine")
        least: Floats = np.maximum(np.floor(np.min(rooms, axis=0)), 0.0)
        return least

    def free(self, first: int, last: int) -> Floats:
        """Return what is free in all of ``first <= slot < last``, [H, R]."""
        free: Floats = np.maximum(self.capacity - self.used[:, :, first:last].max(axis=2), 0.0)
        return free

    def take(self, demand: Demand, stretch: Stretch) -> None:
        """Promise machines to a job.

        Raises:
            AssertionError: there is less: who chooses is at fault.
        """
        uses = np.einsum("kh,kr->hr", stretch.placement, demand.needs)
        after = self.used[:, :, stretch.first : stretch.last] + uses[:, :, None]
        assert np.all(after <= self.capacity[:, :, None] * (1.0 + 2 * ROUNDING)), demand.name
        self.used[:, :, stretch.first : stretch.last] = after
        if stretch.last > self.num_slots:
            self._beyond.append((demand, stretch))


@dataclass(frozen=True)
class Workload:
    """Machines, time and demands, to be brought together."""

    capacity: Floats  # [H, R]
    resources: tuple[str, ...]  # names, [R]
    num_slots: int
    demands: tuple[Demand, ...]
    # Jobs that run already, which are not moved.
    running: tuple[tuple[Demand, Stretch], ...] = field(default=())

    def timeline(self) -> Timeline:
        """Return what is promised before anything is planned."""
        timeline = Timeline(self.capacity, self.num_slots)
        for demand, stretch in self.running:
            timeline.take(demand, stretch)
        return timeline


def in_order(demands: Sequence[Demand]) -> list[int]:
    """Return places of demands by arrival, each after those that it waits for."""
    places = {demand.name: at for at, demand in enumerate(demands)}
    order: list[int] = []
    left = sorted(range(len(demands)), key=lambda at: (demands[at].asked, at))
    while left:
        at = next(at for at in left if not {places.get(n) for n in demands[at].after} & set(left))
        order.append(at)
        left.remove(at)
    return order
