"""How long a step takes: the ranks' own work on the best sizes, then the exchange of gradients.

A step takes the usual longest of its ranks, since it waits for whichever rank is longest in it, and
what of the exchange no backward pass hides. Samples that a rank's host does not hold come over its
link, or its rack's, or as fast as those serve them who hold them, whichever is slowest: locality is
time, not a preference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from loft_hvd.balance.interval import typical
from loft_hvd.balance.latency import Curves, StepModel, typical_longest
from loft_hvd.balance.plan import Bounds, Floats, Ints, Sizes
from loft_hvd.balance.search import exact
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.traffic import HostRanks, Layout, Traffic, exchange

__all__ = [
    "Prediction",
    "ReadLink",
    "Reads",
    "predict",
    "reads_of",
    "rough_s",
    "typical_unit",
]

# Steps that are drawn, whose usual longest is known to some 0.3 %: of many ranks it varies less, so
# fewer will do.
_DRAWS, _LEAST_DRAWS, _DRAWN_RANKS = 64, 24, 2**14


@dataclass(frozen=True)
class ReadLink:
    """The link that a host's ranks read samples over which are elsewhere."""

    name: str
    ranks: int  # that share it
    bytes_per_s: float  # of such samples

    @property
    def byte_s(self) -> float:
        """Seconds of a byte, while all of them read."""
        return self.ranks / self.bytes_per_s


@dataclass(frozen=True)
class Reads:
    """Where a job's samples come from that its ranks do not hold."""

    data: DataSet | None
    links: Mapping[str, ReadLink] = field(default_factory=dict)  # of each host of the layout
    server: str = ""  # the slowest of those that serve them
    bytes_per_s: float = math.inf  # that all of them serve together, none waiting for another
    # Whether ranks wait for it rather than for their own links: a step model has one queue a rank.
    is_at_server: bool = False

    @property
    def queue_s(self) -> float:
        """Seconds of a sample at the server; 0 where ranks do not wait there."""
        if self.data is None or not self.is_at_server:
            return 0.0
        return self.data.sample_bytes / self.bytes_per_s


def reads_of(fleet: Fleet, job: Job, layout: Layout) -> Reads:
    """Return where samples come from: homes, over their links and racks', and the source.

    The queue is taken where ranks that fetch alike would wait longest.
    """
    data = fleet.data_of(job)
    if data is None:
        return Reads(None)
    server, rate = _slowest_server(fleet, job, layout, data)
    links = _read_links(fleet, data, layout)
    at_links = max(link.byte_s for link in links.values())
    return Reads(data, links, server, rate, layout.world_size / rate > at_links)


def _slowest_server(fleet: Fleet, job: Job, layout: Layout, data: DataSet) -> tuple[str, float]:
    """Return who serves samples slowest, and the bytes a second that all serve at that pace.

    Each host computes about as its devices are fast. Who holds more serves the rest to those who
    hold less: a host with 50 % of the data and 20 % of the pace serves 30 % of a step's samples
    over its link, and over its rack's to hosts beyond. Whole copies serve alike.
    """
    pace: dict[str, float] = {}
    for part in layout.parts:
        each_s = max(_model_of(job, part).compute_s, 1e-9)
        pace[part.host.name] = pace.get(part.host.name, 0.0) + part.count / each_s
    whole_pace = sum(pace.values())
    computed = {name: each / whole_pace for name, each in pace.items()}
    held = {name: data.share(name) for name in data.homes}
    lacks = {name: max(each - held.get(name, 0.0), 0.0) for name, each in computed.items()}
    lack, copies = sum(lacks.values()), sum(each == 1.0 for each in held.values())
    if lack <= 0.0:
        return "", math.inf
    if copies:
        served = {name: (each == 1.0) * lack / copies for name, each in held.items()}
    else:
        served = {name: max(each - computed.get(name, 0.0), 0.0) for name, each in held.items()}
    from_source = max(lack - sum(served.values()), 0.0)
    ways = [("the source", from_source, data.source_bytes_per_s or math.inf)]
    out_of: dict[str, float] = {}
    lack_in: dict[str, float] = {}
    for host in fleet.hosts:
        if share := served.get(host.name, 0.0):
            ways.append((f"host {host.name}", share, host.link_bytes_per_s))
            out_of[host.rack] = out_of.get(host.rack, 0.0) + share
        if share := lacks.get(host.name, 0.0):
            lack_in[host.rack] = lack_in.get(host.rack, 0.0) + share
    for rack in fleet.racks:
        beyond = 1.0 - lack_in.get(rack.name, 0.0) / lack
        served_out = out_of.get(rack.name, 0.0) * beyond
        ways.append((f"rack {rack.name}", served_out, rack.link_bytes_per_s))
    rates = [(name, rate * lack / share if share > 0 else math.inf) for name, share, rate in ways]
    return min(rates, key=lambda each: each[1])


def _read_links(fleet: Fleet, data: DataSet, layout: Layout) -> dict[str, ReadLink]:
    """Return the slower of each host's own link and its rack's, for what is beyond the rack."""
    held: dict[str, float] = {}  # of each rack
    for each in fleet.hosts:
        held[each.rack] = held.get(each.rack, 0.0) + data.share(each.name)
    inside: dict[str, int] = {}  # ranks likewise
    for host, count in layout.hosts:
        inside[host.rack] = inside.get(host.rack, 0) + count
    links, uplinks = {}, {name: fleet.rack_link(name) for name in inside}
    for host, count in layout.hosts:
        name, ranks, rate = f"link of {host.name}", count, host.link_bytes_per_s
        elsewhere = 1.0 - data.share(host.name)
        if held[host.rack] < 1.0 and elsewhere:
            beyond = uplinks[host.rack] * elsewhere / (1.0 - held[host.rack])
            if inside[host.rack] / beyond > ranks / rate:
                name, ranks, rate = f"link of rack {host.rack}", inside[host.rack], beyond
        links[host.name] = ReadLink(name, ranks, rate)
    return links


@dataclass(frozen=True)
class _OwnWork:
    """What a step costs a rank of each part; arrays are [num_parts]."""

    model: StepModel  # ranks of a host are taken to fetch alike over its link
    queue_s: float  # a sample takes at a server that all ranks wait for; 0 without one
    link_s: Floats  # of the model's ``remote_s``, what the link takes
    link_ranks: Floats  # ranks that read over it at once
    link: Ints  # its number
    noise: Floats  # relative standard deviation of each fetch and compute
    skew: float  # of single steps, of all ranks alike
    low: Floats  # least and most samples of a rank
    high: Floats
    count: Floats  # ranks

    def queueing(self, model: StepModel) -> StepModel:
        """Return every rank's model with queues at the links, in which ranks do not fetch alike."""
        count = self.count.astype(np.int64)
        link_s = np.repeat(self.link_s, count)
        shared_s = link_s / np.repeat(self.link_ranks, count)
        own_s = np.maximum(model.remote_s - link_s, 0.0)
        return replace(model, remote_s=own_s, shared_s=shared_s, source=np.repeat(self.link, count))


def _work_of(fleet: Fleet, job: Job, layout: Layout, *, is_warm: bool) -> _OwnWork:
    """Return the ranks' work; ``is_warm`` once a sample store has kept what it has room for."""
    models = [_model_of(job, part) for part in layout.parts]
    ranks = {host.name: count for host, count in layout.hosts}
    reads = reads_of(fleet, job, layout)
    data, is_at_server = reads.data, reads.is_at_server
    total = float(job.global_batch_size)
    hits, link_s = [math.inf] * len(models), [0.0] * len(models)
    link_ranks, link = [1] * len(models), list(range(len(models)))
    if data is not None:
        kept = {
            host.name: min(data.share(host.name) + _kept_share(job, data, host) * is_warm, 1.0)
            for host, _ in layout.hosts
        }
        # Once all of it is at some host, what is not at hand comes from peers.
        is_at_server = is_at_server and not (is_warm and sum(kept.values()) > 1.0 - 1e-6)
        names = sorted({each.name for each in reads.links.values()})
        for at, part in enumerate(layout.parts):
            share = kept[part.host.name]
            hits[at] = math.inf if share == 1.0 else total * share / ranks[part.host.name]
            if not is_at_server:
                way = reads.links[part.host.name]
                link_s[at], link_ranks[at] = data.sample_bytes * way.byte_s, way.ranks
                link[at] = names.index(way.name)
    count = np.array([part.count for part in layout.parts], dtype=np.float64)
    skews = np.array([model.skew for model in models])
    terms: dict[str, Any] = {
        name: np.array([getattr(model, name) for model in models]) for name in _TERMS
    }
    terms |= {"hits": hits, "remote_s": terms["remote_s"] + np.array(link_s)}
    model = StepModel.build(len(models), **terms)
    caps = [min(model.max_batch or total, total) for model in models]
    return _OwnWork(
        model,
        reads.queue_s if is_at_server else 0.0,
        np.array(link_s),
        np.array(link_ranks, dtype=np.float64),
        np.array(link),
        np.array([model.noise for model in models]),
        float(skews @ count / count.sum()),
        np.full(len(models), float(job.min_batch)),
        np.array(caps, dtype=np.float64),
        count,
    )


# Of a device's model, those that a step model has too.
_TERMS = (
    "compute_s",
    "compute_fixed_s",
    "plateau_s",
    "fetch_fixed_s",
    "local_s",
    "remote_s",
    "overlap",
)


def _model_of(job: Job, part: HostRanks) -> DeviceModel:
    if part.device not in job.models:
        raise PlanError(
            f"job {job.name!r} has no model of a {part.device!r}, which host {part.host.name!r} "
            f"has; it has those of {sorted(job.models)}: add it, or leave the host out"
        )
    return job.models[part.device]


def _kept_share(job: Job, data: DataSet, host: Host) -> float:
    """Return the share of the data that a host's sample stores have room for."""
    return host.store_bytes / data.num_bytes if job.store else 0.0


def _deviations(model: StepModel, noise: Floats, sizes: Floats) -> Floats:
    """Return how far single steps lie from their times, as ``interval.typical`` measures it."""
    local = model.local(sizes)
    fetch, compute = model.fetch(local, sizes - local), model.compute(sizes)
    longer, shorter = np.maximum(fetch, compute), np.minimum(fetch, compute)
    deviation: Floats = noise * np.hypot(longer, (1.0 - model.overlap) * shorter) * typical_unit()
    return deviation


@functools.lru_cache(maxsize=16)
def _chances(world_size: int) -> Floats:
    """Return what is left to chance in some steps: standard normal, [3, num_steps, world_size].

    It is the same each time, and of the first ranks the same in every world: so places, links and
    sizes are compared by the same steps.
    """
    drawn = np.random.default_rng(0).standard_normal((world_size, 3, _DRAWS))
    num_steps = max(min(_DRAWS, _DRAWN_RANKS // world_size), _LEAST_DRAWS)
    return np.ascontiguousarray(drawn.transpose(1, 2, 0)[:, :num_steps])


def _drawn_longest(
    model: StepModel, noise: Floats, skew: float, *, total: float, sizes: Floats
) -> float:
    """Return the usual longest of the ranks' own work where they have data in part.

    Then a step is as long as chance has it: a global batch has ``model.hits`` samples of those
    that a rank holds on average, a binomial count. Too few for one rank's batch also make a queue
    longer for others. No formula is near enough, so steps are drawn.
    """
    counts, *others = _chances(len(sizes))  # [num_steps, world_size]
    share = np.minimum(np.where(np.isfinite(model.hits), model.hits, total) / total, 1.0)
    held = total * share + np.sqrt(total * share * (1.0 - share)) * counts
    local = np.clip(np.where(share < 1.0, held, sizes), 0.0, sizes)
    # As ``typical_longest`` has it, normal times bent by ``skew``.
    bent = [np.expm1(skew * each) / skew if skew > 0 else each for each in others]
    by_fetch, by_compute = (np.maximum(1.0 + noise * each, 0.0) for each in bent)
    fetch = model.fetch(local, sizes - local) * by_fetch
    busy = model.combine(fetch, model.compute(sizes) * by_compute)
    return float(typical(busy.max(axis=1))[0])


@functools.cache
def typical_unit() -> float:
    """Return the deviation that ``interval.typical`` finds in normal times of deviation 1."""
    normal = [NormalDist().inv_cdf((i + 0.5) / 1000) for i in range(1000)]
    return float(np.sqrt(typical(np.array(normal))[1]))


@functools.lru_cache(maxsize=4096)
def _longest_of_equals(world_size: int, deviation: float, skew: float) -> float:
    """Return the usual longest of so many times of mean 1."""
    if deviation == 0.0:
        return 1.0
    ones = np.ones(world_size)
    return float(typical_longest(ones, deviation * ones, skew)[0])


def rough_s(fleet: Fleet, job: Job, layout: Layout) -> float:
    """Return about what ``predict`` does, fast: for sizes of any fraction, and ranks alike.

    It is infinite where no sizes are within the limits.
    """
    work = _work_of(fleet, job, layout, is_warm=job.store)
    total, count = float(job.global_batch_size), work.count
    if not work.low @ count <= total <= work.high @ count:
        return math.inf
    touching, sizes = work.model, np.full(len(count), total / count.sum())
    for _ in range(4 if work.queue_s else 1):
        if work.queue_s:
            touching = _with_queue(work, sizes)
        curves = touching.curves(work.low, work.high)
        together = Curves(curves.knot_sizes * count[:, None], curves.knot_times)
        sizes = together.level(total) / count
    times = touching.times(sizes)
    longest = int(np.argmax(times))
    deviation = _deviations(touching, work.noise, sizes)[longest] / max(times[longest], 1e-12)
    factor = _longest_of_equals(int(count.sum()), round(float(deviation), 3), work.skew)
    return float(times[longest]) * factor + exchange(fleet, job, layout).exposed_s


def _with_queue(work: _OwnWork, sizes: Floats) -> StepModel:
    """Return the separable model that touches that of a queue at a server at ``sizes``.

    As ``StepModel.without_sharing``, for parts of several ranks each.
    """
    remote = sizes - work.model.local(sizes)
    queued = np.minimum(remote[:, None], remote) @ work.count  # [num_parts]
    sharing = (remote[:, None] <= remote) @ work.count
    rest = np.maximum(queued - sharing * remote, 0.0)
    return replace(
        work.model,
        fetch_fixed_s=work.model.fetch_fixed_s + work.queue_s * rest,
        remote_s=work.model.remote_s + work.queue_s * sharing,
    )


@dataclass(frozen=True)
class Prediction:
    """What a job's steps should take on a layout, with the best sizes."""

    layout: Layout
    sizes: Sizes  # of each rank, [world_size]
    fetch_s: tuple[float, ...]  # of each rank
    compute_s: tuple[float, ...]
    busy_s: tuple[float, ...]  # both, as far as they do not overlap
    longest_s: float  # the usual longest of the ranks' own work
    exchange: Traffic
    first_epoch_step_s: float  # as ``step_s``; longer where a sample store is still empty
    num_steps: float
    steps_per_epoch: float

    @property
    def step_s(self) -> float:
        """Seconds of a usual step."""
        return self.longest_s + self.exchange.exposed_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole training."""
        first = min(self.steps_per_epoch, self.num_steps)
        return first * self.first_epoch_step_s + (self.num_steps - first) * self.step_s

    @property
    def price(self) -> float | None:
        """What the hosts cost for so long; None where one has no price."""
        prices = [host.price_per_hour for host, _ in self.layout.hosts]
        known = [price for price in prices if price is not None]
        return sum(known) * self.total_s / 3600.0 if len(known) == len(prices) else None

    @property
    def devices(self) -> tuple[HostRanks, ...]:
        """The part of each rank, [world_size]."""
        return tuple(part for part in self.layout.parts for _ in range(part.count))


def predict(fleet: Fleet, job: Job, layout: Layout, *, sizes: Sizes | None = None) -> Prediction:
    """Say what a step takes on a layout, with the best sizes or those given, [world_size].

    Raises:
        PlanError: the job cannot run so: its rule needs more workers, no sizes are within its
            limits, or it has no model of a device.
    """
    layout.check(job)
    sent = exchange(fleet, job, layout)
    warm = _work_of(fleet, job, layout, is_warm=job.store)
    sizes, model, longest_s = _longest(warm, job, sizes)
    first_s = longest_s
    if job.store:
        first_s = _longest(_work_of(fleet, job, layout, is_warm=False), job, None)[2]
    batch = np.array(sizes, dtype=np.float64)
    local = model.local(batch)
    fetch, compute = model.fetch(local, batch - local), model.compute(batch)
    data = fleet.data_of(job)
    num_steps = job.num_steps(data)
    return Prediction(
        layout,
        sizes,
        tuple(fetch.tolist()),
        tuple(compute.tolist()),
        tuple(model.combine(fetch, compute).tolist()),
        longest_s,
        sent,
        first_s + sent.exposed_s,
        num_steps,
        num_steps if data is None else max(data.num_samples // job.global_batch_size, 1),
    )


def _longest(work: _OwnWork, job: Job, sizes: Sizes | None) -> tuple[Sizes, StepModel, float]:
    """Return sizes, the best if none are given, every rank's model, and the usual longest."""
    count = work.count.astype(np.int64)
    world_size, total = int(count.sum()), job.global_batch_size
    terms: dict[str, Any] = {
        name: np.repeat(getattr(work.model, name), count) for name in (*_TERMS, "hits")
    }
    source = 0 if work.queue_s else -1
    model = StepModel.build(world_size, source=source, shared_s=work.queue_s, **terms)
    caps = np.repeat(work.high, count)
    bounds = Bounds.of(world_size, floor=job.min_batch, cap=caps)
    sizes = exact(model, total, bounds) if sizes is None else sizes
    batch, noise = np.array(sizes, dtype=np.float64), np.repeat(work.noise, count)
    if ((model.hits > 0) & (model.hits < total)).any():
        queues = model if work.queue_s else work.queueing(model)
        longest_s = _drawn_longest(queues, noise, work.skew, total=float(total), sizes=batch)
        return sizes, model, longest_s
    deviation = _deviations(model, noise, batch)
    times = model.times(sizes)
    if not deviation.any():
        return sizes, model, float(times.max())
    return sizes, model, float(typical_longest(times, deviation, work.skew)[0])
