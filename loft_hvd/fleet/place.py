"""Which hosts a job should take: those whose step is shortest, and what each is worth.

A slow host may cost more than it gives, as all gradients go over its link, too. So hosts are not
simply all taken: first those above each link rate, in several orders, as many as pay; then hosts
are added, dropped and exchanged, and ranks taken off single hosts, while that makes the step
shorter. Places are compared by ``rough_s``, and the best of them by ``predict``. docs/plan.md has
how near the best of all sets that comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import Fleet, Host, Job
from loft_hvd.fleet.rate import Prediction, predict, reads_of, rough_s
from loft_hvd.fleet.traffic import HostRanks, Layout

__all__ = ["Choice", "Worth", "choose_hosts", "show_rate"]

# Bounds of the search, in steps worked out, of some 0.5 ms each, or 1.5 ms of a hundred hosts: half
# as many found a place there whose step was 3.5 % longer.
_MOST_TRIES, _MOST_STARTS, _MOST_SWAPPED = 2000, 5, 8
_APART = 1.4  # hosts of a start over those of another
_MOST_PAIRED = 16  # hosts, of which pairs are tried
_MOST_RATES = 6  # of links, from which on hosts are taken
_EXACT = 24  # of the best places found, that are compared by ``predict``
_OTHERS = 3  # runners-up


@dataclass(frozen=True)
class Worth:
    """What a host, or a rack's link, is worth to a job."""

    name: str  # a host's, or "rack" and its name
    is_taken: bool
    # How much longer the job takes without it where it is taken (infinite: it cannot do without),
    # and with it where it is not; as a share, below 0 where it would be shorter.
    change: float
    why: str  # in plain words
    doubled: float  # share of the time that its link saves at twice the rate


@dataclass(frozen=True)
class Choice:
    """Where a job should run."""

    best: Prediction
    others: tuple[Prediction, ...]  # the next best, of other hosts or in another arrangement
    worths: tuple[Worth, ...]
    left_out: dict[str, str]  # hosts that cannot take a rank, and why


@dataclass(frozen=True)
class _HostOffer:
    """What a host can take of a job."""

    host: Host
    devices: tuple[tuple[str, int], ...]  # the fastest first, and how many ranks of each
    most: int  # ranks

    def take(self, count: int) -> Iterator[HostRanks]:
        """Yield ``count`` ranks on the fastest devices."""
        for device, slots in self.devices:
            taken = min(count, slots)
            if taken:
                yield HostRanks(self.host, device, taken)
            count -= taken


def choose_hosts(fleet: Fleet, job: Job) -> Choice:
    """Choose hosts, ranks and sizes for one job that has the machines to itself.

    Raises:
        PlanError: the job fits nowhere; says why for each host.
    """
    offers, left_out = _offers(fleet, job)
    search = _Search(fleet, job, offers)
    found = search.run()
    if not found:
        raise PlanError(_say_no_room(job, offers, left_out))
    best, *others = found
    worths = _Worths(fleet, job, offers, best, kinds=search.kinds)
    return Choice(best, tuple(others[:_OTHERS]), worths.all(), left_out)


def _offers(fleet: Fleet, job: Job) -> tuple[list[_HostOffer], dict[str, str]]:
    """Return what hosts can take, and why others can take nothing."""
    offers, left_out = [], {}
    for host in fleet.hosts:
        known = [(device, count) for device, count in host.slots.items() if device in job.models]
        known.sort(key=lambda each: job.models[each[0]].compute_s)
        limits = [sum(count for _, count in known)]
        why = f"no model of {', '.join(sorted(host.slots))}" if not known else ""
        for what, needed, there in (
            ("cpus", job.needs.cpus, host.cpus),
            ("memory_bytes", job.needs.memory_bytes, host.memory_bytes),
        ):
            if needed and there is None:
                why = why or f"needs.{what} is asked for, and the host's {what} is not known"
            elif needed and there is not None:
                limits.append(int(there // needed))
                why = why or (f"{what}={there:g} of {needed:g} a worker" if there < needed else "")
        if why:
            left_out[host.name] = why
        else:
            offers.append(_HostOffer(host, tuple(known), min(limits)))
    return offers, left_out


def _say_no_room(job: Job, offers: Sequence[_HostOffer], left_out: dict[str, str]) -> str:
    room = sum(offer.most for offer in offers)
    caps = sum(
        slots * (job.models[device].max_batch or job.global_batch_size)
        for offer in offers
        for device, slots in offer.devices
    )
    out = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:5])
    return (
        f"job {job.name!r} fits nowhere: hosts take {room} of its ranks and {caps} samples; it "
        f"needs {max(job.min_workers, job.parsed_rule.min_rows)} to {job.max_workers} workers for "
        f"rule {job.rule!r}, global_batch_size={job.global_batch_size} and min_batch="
        f"{job.min_batch}. Give more slots or models, a smaller f, or a batch that fits"
        + (f" (left out: {out})" if out else "")
    )


_State = tuple[int, ...]  # ranks on each offer's host


class _Search:
    """A search for places, and all that it has tried."""

    def __init__(self, fleet: Fleet, job: Job, offers: Sequence[_HostOffer]) -> None:
        self._fleet, self._job, self._offers = fleet, job, offers
        self._tried: dict[tuple[str, _State], float] = {}
        self._tries_left = 0
        self.kinds = [fleet.kind_of(offer.host, job) for offer in offers]

    def run(self) -> list[Prediction]:
        """Return the best places, best first, no two of the same kinds of hosts."""
        job, most = self._job, tuple(offer.most for offer in self._offers)
        ways: list[tuple[str, _State]] = []
        if job.over != "nodes" or job.is_mean:
            ways.append(("ranks", most))
        if job.over != "ranks" and not job.is_mean:  # as many ranks on each host that is taken
            for count in sorted({1, *most}):
                ways.append(("nodes", tuple(count * (each >= count) for each in most)))
        for over, most in ways:
            self._tries_left = _MOST_TRIES // len(ways)
            self._search(over, most)
        return self._best()

    def layout(self, over: str, state: _State) -> Layout:
        """Return a place with so many ranks on each host."""
        pairs = zip(self._offers, state, strict=True)
        return Layout.of([part for offer, count in pairs for part in offer.take(count)], over=over)

    def value(self, over: str, state: _State) -> float:
        """Return about the seconds of a step; infinite where the job cannot run so."""
        known = self._tried.get((over, state))
        if known is None:
            known = self._tried[over, state] = self._rough(over, state)
            self._tries_left -= 1
        return known

    def _rough(self, over: str, state: _State) -> float:
        job, world_size = self._job, sum(state)
        if not job.min_workers <= world_size <= job.max_workers or not world_size:
            return math.inf
        layout = self.layout(over, state)
        if layout.num_workers(job) < job.parsed_rule.min_rows:
            return math.inf
        return rough_s(self._fleet, job, layout)

    def _search(self, over: str, most: _State) -> None:
        """Climb from the best start, and from the best ones of fewer and of more hosts."""
        starts = sorted(set(self._starts(most)), key=lambda state: self.value(over, state))
        climbed: list[int] = []  # hosts of the starts
        for state in starts:
            count = sum(each > 0 for each in state)
            if all(max(count, other) >= _APART * min(count, other) for other in climbed):
                climbed.append(count)
                self._climb(over, most, state)
            if len(climbed) == _MOST_STARTS:
                break

    def _starts(self, most: _State) -> Iterator[_State]:
        """Yield single hosts and pairs, and the first of several orders above each link rate.

        Orders are of all hosts, and of each rack's.
        """
        places = [at for at, count in enumerate(most) if count]
        for few in range(1, 3 if len(places) <= _MOST_PAIRED else 2):
            for taken in combinations(places, few):
                yield tuple(count * (at in taken) for at, count in enumerate(most))
        domains = [places]
        racks = sorted({self._offers[at].host.rack for at in places})
        if len(racks) > 1:
            domains += [[a for a in places if self._offers[a].host.rack == rack] for rack in racks]
        for domain in domains:
            rates = sorted({self._offers[at].host.link_bytes_per_s for at in domain})
            for rate in rates[:: max(-(-len(rates) // _MOST_RATES), 1)]:
                fast = [at for at in domain if self._offers[at].host.link_bytes_per_s >= rate]
                for order in self._orders(fast, most):
                    yield from _prefixes(order, most, self._job.max_workers)

    def _orders(self, places: Sequence[int], most: _State) -> Iterator[list[int]]:
        job = self._job
        data = self._fleet.data_of(job)

        def share(at: int) -> float:
            return 0.0 if data is None else data.share(self._offers[at].host.name)

        def pace(at: int, fetched: float) -> float:
            """Return samples a second of a host that fetches so much of each over its link."""
            offer, count = self._offers[at], most[at]
            model = job.models[offer.devices[0][0]]
            link_s = 0.0 if data is None else data.sample_bytes / offer.host.link_bytes_per_s
            return 1.0 / max(model.compute_s / count + fetched * link_s, 1e-12)

        yield sorted(places, key=lambda at: (-pace(at, 0.0), at))
        yield sorted(places, key=lambda at: (-pace(at, 1.0 - share(at)), at))
        if data is not None and data.homes:
            yield sorted(places, key=lambda at: (-share(at), -pace(at, 0.0), at))

    def _climb(self, over: str, most: _State, state: _State) -> None:
        """Take moves that make the step shorter until none does."""
        now, moved = self.value(over, state), True
        while moved and self._tries_left > 0:
            moved = False
            for changes in self._moves(over, most, state):
                after = list(state)
                for at, count in changes:
                    after[at] = count
                then = self.value(over, tuple(after))
                if then < now * (1 - 1e-9):
                    state, now, moved = tuple(after), then, True
                if self._tries_left <= 0:
                    break

    def _moves(
        self, over: str, most: _State, state: _State
    ) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield changes of a state: hosts, and how many ranks each should have.

        Of hosts that are as good as each other, and have as many ranks, one is moved.
        """
        first = dict[tuple[tuple[str, float], int], int]()
        for at, count in enumerate(state):
            if most[at]:
                first.setdefault((self.kinds[at], count), at)
        places = list(first.values())
        for at in places:
            yield ((at, 0 if state[at] else most[at]),)
            wanted = {state[at] - 1, state[at] + 1, state[at] // 2, 1, most[at]} - {state[at]}
            for count in sorted(wanted):
                if over == "ranks" and 0 < count <= most[at]:
                    yield ((at, count),)
        inside = [at for at in places if state[at]]
        outside = [at for at in places if not state[at]]
        few = None if len(places) <= 2 * _MOST_SWAPPED else _MOST_SWAPPED
        for gone in inside[:few]:
            for come in outside[:few]:
                yield (gone, 0), (come, most[come])

    def _best(self) -> list[Prediction]:
        """Return the best places found as ``predict`` has them, one for each set of hosts."""
        # Of equals the first hosts, by turning counts round.
        ranked = sorted(
            (value, over, tuple(-count for count in state))
            for (over, state), value in self._tried.items()
            if value < math.inf
        )
        places: set[object] = set()  # those that are as good as each other are one
        by_hosts: dict[object, Prediction] = {}
        for _, over, turned in ranked:
            state = tuple(-count for count in turned)
            taken = [(kind, count) for kind, count in zip(self.kinds, state, strict=True) if count]
            place = over, tuple(sorted(taken))
            hosts = over, tuple(sorted(kind for kind, _ in taken))
            is_due = len(places) < _EXACT or (hosts not in by_hosts and len(by_hosts) <= _OTHERS)
            if place in places or not is_due:
                continue
            places.add(place)
            found = predict(self._fleet, self._job, self.layout(over, state))
            if hosts not in by_hosts or found.total_s < by_hosts[hosts].total_s:
                by_hosts[hosts] = found
            if len(places) >= _EXACT and len(by_hosts) > _OTHERS:
                break
        return sorted(by_hosts.values(), key=lambda each: each.total_s)


def _prefixes(order: Sequence[int], most: _State, max_workers: int) -> Iterator[_State]:
    """Yield the first hosts of an order: each number of them up to 16, then a seventh more."""
    state, room, due = [0] * len(most), max_workers, 1
    for number, at in enumerate(order, start=1):
        state[at] = min(most[at], room)
        room -= state[at]
        if number == due or number == len(order) or not room:
            yield tuple(state)
            due = max(due + 1, due * 8 // 7)
        if not room:
            return


class _Worths:
    """What hosts and links are worth, beside the best place."""

    def __init__(
        self,
        fleet: Fleet,
        job: Job,
        offers: Sequence[_HostOffer],
        best: Prediction,
        *,
        kinds: Sequence[object],
    ) -> None:
        self._kinds = kinds
        self._fleet, self._job, self._best = fleet, job, best
        self._offers = {offer.host.name: offer for offer in offers}
        self._reads = reads_of(fleet, job, best.layout)
        self._counts = {host.name: count for host, count in best.layout.hosts}

    def all(self) -> tuple[Worth, ...]:
        """Return those of all hosts, and of the racks whose links are used."""
        # Of hosts that are as good as each other, and have as many ranks, one is tried.
        known: dict[object, Worth] = {}
        found = []
        for offer, kind in zip(self._offers.values(), self._kinds, strict=True):
            name = offer.host.name
            place = kind, self._counts.get(name, 0)
            if place not in known:
                known[place] = self._of_host(offer)
            found.append(replace(known[place], name=name))
        racks = {host.rack for host, _ in self._best.layout.hosts}
        if len(racks) > 1:
            found += [self._of_rack(rack.name) for rack in self._fleet.racks if rack.name in racks]
        return tuple(found)

    def _try(self, counts: dict[str, int], fleet: Fleet | None = None) -> Prediction | None:
        """Predict the job on so many ranks of each host; None where it cannot run so."""
        fleet = self._fleet if fleet is None else fleet
        hosts = {host.name: host for host in fleet.hosts}
        parts = [
            replace(part, host=hosts[name])
            for name, count in counts.items()
            for part in self._offers[name].take(count)
        ]
        if not self._job.min_workers <= sum(counts.values()) <= self._job.max_workers:
            return None
        try:
            return predict(fleet, self._job, Layout.of(parts, over=self._best.layout.over))
        except PlanError:
            return None

    def _change(self, other: Prediction | None) -> float:
        """Return how much longer another place takes, as a share."""
        return math.inf if other is None else other.total_s / self._best.total_s - 1.0

    def _of_host(self, offer: _HostOffer) -> Worth:
        name, counts = offer.host.name, dict(self._counts)
        is_taken = name in counts
        if is_taken:
            del counts[name]
            other = self._try(counts) if counts else None
            why = self._say_share(name)
        else:
            each = max(counts.values()) if self._best.layout.over == "nodes" else offer.most
            counts[name] = min(each, offer.most)
            other = self._try(counts)
            why = self._say_cost(offer, other)
        wide, doubled = _with_host(self._fleet, name, 2.0), 0.0
        if self._waits_for(name):
            doubled = self._change(self._try(self._counts, wide))
        # Twice the rate halves a step at most.
        if not is_taken and self._change(other) < 1.0:
            doubled = min(doubled, self._change(self._try(counts, wide)))
        return Worth(name, is_taken, self._change(other), why, max(-doubled, 0.0))

    def _waits_for(self, name: str) -> bool:
        """Say whether a step may wait for a host's link: no other would be worth anything."""
        reads = self._reads
        if name == self._best.exchange.link or reads.server == f"host {name}":
            return True
        # Once a sample store is full, ranks read over their own links.
        return name in reads.links and (self._job.store or not reads.is_at_server)

    def _of_rack(self, name: str) -> Worth:
        racks = [
            replace(rack, link_bytes_per_s=2.0 * rack.link_bytes_per_s)
            if rack.name == name
            else rack
            for rack in self._fleet.racks
        ]
        doubled = self._change(self._try(self._counts, replace(self._fleet, racks=racks)))
        left = {host.name: count for host, count in self._best.layout.hosts if host.rack != name}
        other = self._try(left) if left else None
        why = f"its link of {show_rate(self._fleet.rack_link(name))}"
        return Worth(f"rack {name}", True, self._change(other), why, max(-doubled, 0.0))

    def _say_share(self, name: str) -> str:
        pairs = zip(self._best.devices, self._best.sizes, strict=True)
        samples = sum(size for part, size in pairs if part.host.name == name)
        return f"computes {samples / sum(self._best.sizes):.0%} of the samples"

    def _say_cost(self, offer: _HostOffer, other: Prediction | None) -> str:
        """Say what a host that is not taken would cost."""
        if other is None:
            return "it does not fit beside the others"
        link, best = offer.host.link_bytes_per_s, self._best
        more_sent = other.exchange.exposed_s - best.exchange.exposed_s
        more_work = other.longest_s - best.longest_s
        if more_sent >= more_work:
            if other.exchange.link == offer.host.name:
                return f"its {show_rate(link)} link carries the gradients"
            return f"more gradients cross the link of {other.exchange.link or offer.host.name}"
        ranks = [at for at, part in enumerate(other.devices) if part.host.name == offer.host.name]
        if sum(other.fetch_s[at] for at in ranks) > sum(other.compute_s[at] for at in ranks):
            return f"its samples come over its {show_rate(link)} link"
        return f"its {offer.devices[0][0]} is too slow to be waited for"


def _with_host(fleet: Fleet, name: str, factor: float) -> Fleet:
    """Return the machines with one host's link so many times as fast."""
    hosts = [
        replace(host, link_bytes_per_s=factor * host.link_bytes_per_s)
        if host.name == name
        else host
        for host in fleet.hosts
    ]
    return replace(fleet, hosts=hosts)


def show_rate(bytes_per_s: float) -> str:
    """Write a link's rate as its label does, in bits: 1 Gb/s."""
    bits = 8.0 * bytes_per_s
    for size, unit in ((1e12, "Tb/s"), (1e9, "Gb/s"), (1e6, "Mb/s")):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kb/s"
