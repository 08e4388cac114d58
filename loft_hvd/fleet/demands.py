"""Jobs of a file as demands: machines, numbers of workers, and how long each choice takes.

A machine is one device class of a host. CPUs and memory of a host with several are shared out among
them by their slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loft_hvd.balance.plan import Floats
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import Fleet, Host, Job
from loft_hvd.fleet.rate import rough_s
from loft_hvd.fleet.solvers import Packing, evenly
from loft_hvd.fleet.speeds import ParameterServers, Ring
from loft_hvd.fleet.timeline import Bools, Demand, Ints, Value
from loft_hvd.fleet.traffic import HostRanks, Layout

__all__ = [
    "RESOURCES",
    "SPEEDS",
    "Machines",
    "TotalSeconds",
    "demand_of",
    "in_slots",
    "value_of",
    "ways_of",
]

RESOURCES = ("slots", "cpus", "memory_bytes")
_MOST_TIERS, _MOST_RATES = 12, 3  # sets of machines that a job chooses from, of them by link
_MOST_EVEN = 6  # numbers of workers, as many on each host, that are tried
# Seconds of a whole job on a layout; infinite where it cannot run so.
TotalSeconds = Callable[[Fleet, Job, Layout], float]


@dataclass(frozen=True)
class Machines:
    """The machines of a cluster, in an order of names: that of the file changes nothing."""

    fleet: Fleet
    places: tuple[tuple[Host, str], ...]  # host and device class, [H]
    capacity: Floats  # [H, R]

    @classmethod
    def of(cls, fleet: Fleet) -> Machines:
        """Return the machines of a cluster."""
        places, rows = [], []
        for host in sorted(fleet.hosts, key=lambda host: host.name):
            total = sum(host.slots.values())
            for device, slots in sorted(host.slots.items()):
                share = slots / total
                places.append((host, device))
                rows.append((slots, share * (host.cpus or 0), share * (host.memory_bytes or 0.0)))
        return cls(fleet, tuple(places), np.array(rows, dtype=np.float64))

    def layout(self, workers: Ints, *, over: str = "ranks") -> Layout:
        """Return where workers, [H], are."""
        return Layout.of(
            [
                HostRanks(host, device, int(count))
                for (host, device), count in zip(self.places, workers, strict=True)
            ],
            over=over,
        )

    def workers(self, hosts: dict[str, int], job: Job) -> Ints:
        """Return how many workers of a job machines have, [H], by how many hosts have.

        Raises:
            PlanError: there is no such host, or it has no room for so many.
        """
        found = np.zeros(len(self.places), dtype=np.int64)
        for name, count in hosts.items():
            mine = [at for at, (host, _) in enumerate(self.places) if host.name == name]
            left = count
            for at in sorted(mine, key=lambda at: self.pace(job, at)):
                found[at] = min(left, int(self.capacity[at, 0]))
                left -= int(found[at])
            if left:
                room = sum(int(self.capacity[at, 0]) for at in mine)
                raise PlanError(
                    f"job {job.name!r} runs with {count} ranks on host {name!r}, which has "
                    f"{room} slots in the cluster's file; correct one of these"
                )
        return found

    def pace(self, job: Job, at: int) -> float:
        """Return a job's seconds of a sample on a machine; infinite where it has no model."""
        model = job.models.get(self.places[at][1])
        return math.inf if model is None else model.compute_s


def ways_of(job: Job) -> tuple[str, ...]:
    """Return what a job's rule may be over."""
    if job.is_mean:
        return ("ranks",)
    return ("ranks", "nodes") if job.over == "auto" else (job.over,)


def ours_s(fleet: Fleet, job: Job, layout: Layout) -> float:
    """Return seconds by the models of ``rate``: fetch, compute, balanced sizes, exchange."""
    steps = []
    for over in ways_of(job):
        tried = replace(layout, over=over)
        try:
            tried.check(job)
            steps.append(rough_s(fleet, job, tried))
        except PlanError:
            continue
    return min(steps, default=math.inf) * job.num_steps(fleet.data_of(job))


def ps_s(fleet: Fleet, job: Job, layout: Layout) -> float:
    """Return seconds with one parameter server a worker, after PD-ORS."""
    model = ParameterServers(_slowest(job, layout), job.model_bytes, float(job.global_batch_size))
    total = job.num_steps(fleet.data_of(job)) * job.global_batch_size
    return total / model.samples_per_s(layout.world_size, _bandwidth(fleet, layout))


def ring_s(fleet: Fleet, job: Job, layout: Layout) -> float:
    """Return seconds on a ring, after GADGET; reading data and reduction take no time."""
    fixed = max(job.models[part.device].compute_fixed_s for part in layout.parts)
    ring = Ring(_slowest(job, layout), fixed, job.model_bytes, fleet.latency_s)
    batch = job.global_batch_size / layout.world_size
    step_s = ring.step_s(layout.world_size, batch, _bandwidth(fleet, layout))
    return job.num_steps(fleet.data_of(job)) * step_s


SPEEDS: dict[str, TotalSeconds] = {"ours": ours_s, "ps": ps_s, "ring": ring_s}


def _slowest(job: Job, layout: Layout) -> float:
    return max(job.models[part.device].compute_s for part in layout.parts)


def _bandwidth(fleet: Fleet, layout: Layout) -> float:
    """Return bytes a second inside the only host, else of the slowest link."""
    hosts = [host for host, _ in layout.hosts]
    if len(hosts) == 1:
        return hosts[0].internal_bytes_per_s or math.inf
    racks = {host.rack for host in hosts}
    uplinks = [fleet.rack_link(rack) for rack in racks] if len(racks) > 1 else []
    return min([host.link_bytes_per_s for host in hosts] + uplinks)


def demand_of(machines: Machines, job: Job, *, speed: TotalSeconds) -> Demand:
    """Return a job as a demand for machines and time, in slots of a second.

    Raises:
        PlanError: it fits nowhere, had it all machines for itself.
    """
    known = np.array([device in job.models for _, device in machines.places])
    needs = np.array([[1.0, float(job.needs.cpus), job.needs.memory_bytes]])
    each = np.min(
        [machines.capacity[:, at] // need for at, need in enumerate(needs[0]) if need > 0], axis=0
    )
    room = np.where(known, each, 0).astype(np.int64)
    kinds = _kinds(machines, job)
    slots = _paced(machines, job, kinds, room, speed)
    tiers, even = _tiers(machines, job, room), tuple[int, ...]((0,))
    if "nodes" in ways_of(job):
        even = _some(np.unique([1, *room[room > 0]]), _MOST_EVEN)
    if ways_of(job) == ("nodes",):
        tiers = _one_machine_a_host(machines, job, room, tiers)
    elif "nodes" in ways_of(job):
        even = (0, *even)
    counts = _counts(job, max((int(room[tier].sum()) for tier in tiers), default=0), even)
    draft = Demand(
        job.name,
        job.arrival_s,
        value_of(job),
        needs,
        counts,
        max(counts, default=1),
        slots,
        tiers,
        kinds,
        (),
        tuple(job.after),
        even=even,
        is_elastic=job.elastic,
        restart=job.restart_s,
    )
    least = [_least(draft, room, count) for count in counts]
    runs = [(count, each) for count, each in zip(counts, least, strict=True) if each < math.inf]
    if not runs:
        raise PlanError(
            f"job {job.name!r} fits nowhere, had it all machines for itself: hosts with models "
            f"{sorted(job.models)} take {room.sum()} ranks; it needs {job.min_workers} to "
            f"{job.max_workers} workers, {job.parsed_rule.min_rows} for rule {job.rule!r}, and "
            f"global_batch_size={job.global_batch_size} samples of room; `--job {job.name}` says "
            "more"
        )
    return replace(
        draft,
        counts=tuple(count for count, _ in runs),
        least_slots=tuple(each for _, each in runs),
        wanted=min(runs, key=lambda run: run[1])[0],
    )


def in_slots(demand: Demand, slot_s: float, *, now_s: float = 0.0) -> Demand:
    """Return a demand whose slots are of a second as one of longer slots, which begin now."""
    value, seconds = demand.value, demand.slots
    return replace(
        demand,
        asked=(demand.asked - now_s) / slot_s,
        value=Value(
            value.top, value.urgency * slot_s, value.wished / slot_s, value.deadline / slot_s
        ),
        slots=lambda placement: seconds(placement) / slot_s,
        least_slots=tuple(each / slot_s for each in demand.least_slots),
        restart=demand.restart / slot_s,
    )


def value_of(job: Job) -> Value:
    """Return what a job's end is worth, in slots of a second."""
    deadline = math.inf if job.deadline_s is None else job.deadline_s - job.arrival_s
    if job.wished_s is None:
        return Value(job.worth, deadline=deadline)
    return Value(job.worth, job.urgency / job.wished_s, job.wished_s, deadline)


def _one_machine_a_host(
    machines: Machines, job: Job, room: Ints, tiers: tuple[Bools, ...]
) -> tuple[Bools, ...]:
    """Return sets in which no host is twice, as workers would not be as many on each.

    Of a host with several device classes a set keeps the fastest; sets of one class have theirs.
    """
    order = sorted(range(len(room)), key=lambda at: (room[at] == 0, machines.pace(job, at)))
    names = np.array([host.name for host, _ in machines.places])
    _, first = np.unique(names[order], return_index=True)
    is_first = np.zeros(len(room), dtype=bool)
    is_first[np.array(order)[first]] = True
    found: dict[bytes, Bools] = {}
    for tier in tiers:
        is_twice = len(set(names[tier])) < tier.sum()
        each = tier & is_first if is_twice else tier
        found.setdefault(each.tobytes(), each)
    return tuple(found.values())


def _counts(job: Job, room: int, even: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers of workers to choose from, up to ``room``; of ``even`` ones multiples.

    Each is taken up to 8, then in steps of about a quarter.
    """
    least = max(job.min_workers, 1 if job.over != "ranks" else job.parsed_rule.min_rows)
    most = min(job.max_workers, room, job.global_batch_size // job.min_batch)
    found = {least, most}
    for each in even:
        unit = max(each, 1)
        found |= {unit * count for count in range(1, 9)}
        size = 8
        while unit * size < most:
            found |= {unit * (size * step // 4) for step in (5, 6, 7, 8)}
            size *= 2
        found.add(most // unit * unit)
    return tuple(sorted(count for count in found if least <= count <= most))


def _kinds(machines: Machines, job: Job) -> Ints:
    """Return a number for each machine, the same for those that are as good as each other."""
    numbers: dict[object, int] = {}
    found = []
    for host, device in machines.places:
        key = machines.fleet.kind_of(replace(host, price_per_hour=None), job), device
        found.append(numbers.setdefault(key, len(numbers)))
    return np.array(found, dtype=np.int64)


def _paced(
    machines: Machines,
    job: Job,
    kinds: Ints,
    room: Ints,
    speed: TotalSeconds,
) -> Callable[[Ints], float]:
    """Return how long the job takes where; places of the same kinds are worked out once."""
    known: dict[tuple[tuple[str, ...], ...], float] = {}
    hosts: dict[str, int] = {}
    host_of = [hosts.setdefault(host.name, len(hosts)) for host, _ in machines.places]

    def slots(placement: Ints) -> float:
        workers = placement[0]
        if np.any(workers > room):
            return math.inf
        by_host: dict[int, list[str]] = {}
        for at in np.flatnonzero(workers).tolist():
            by_host.setdefault(host_of[at], []).append(f"{kinds[at]}:{workers[at]}")
        key = tuple(sorted(tuple(sorted(parts)) for parts in by_host.values()))
        if key not in known:
            known[key] = speed(machines.fleet, job, machines.layout(workers))
        return known[key]

    return slots


def _some(values: Floats | Ints, most: int) -> tuple[Any, ...]:
    """Return some of ascending values, the first and the last among them."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return tuple(values[places].tolist())


def _tiers(machines: Machines, job: Job, room: Ints) -> tuple[Bools, ...]:
    """Return sets of machines to choose from: all, those with data, by link, device and rack."""
    has_room = room > 0
    hosts = [host for host, _ in machines.places]
    link = np.array([host.link_bytes_per_s for host in hosts])
    sets = [has_room & (link >= rate) for rate in _some(np.unique(link[has_room]), _MOST_RATES)]
    data = machines.fleet.data_of(job)
    if data is not None and data.homes:
        sets.insert(1, has_room & np.array([data.share(host.name) > 0 for host in hosts]))
    devices = np.array([device for _, device in machines.places])
    sets += [has_room & (devices == each) for each in sorted(set(devices[has_room]))]
    racks = np.array([host.rack for host in hosts])
    sets += [has_room & (racks == each) for each in sorted(set(racks[has_room]))]
    found: dict[bytes, Bools] = {}
    for each in sets:
        if each.any():
            found.setdefault(each.tobytes(), each)
    return tuple(found.values())[:_MOST_TIERS]


def _least(demand: Demand, room: Ints, count: int) -> float:
    """Return the least slots of so many workers, on any set of machines, all of them free."""
    found = []
    for tier in demand.tiers:
        free = np.where(tier, room, 0).astype(np.float64)[:, None]
        # The largest machines first: fewer links.
        for each in demand.even:
            placement = evenly(Packing(free, -free, np.ones((1, 1)), (count,)), each=each)
            if placement is not None:
                found.append(demand.slots(placement))
    return min(found, default=math.inf)
