"""How long a step takes: the ranks' own work on the best sizes, then the exchange of gradients.

A layout says which hosts a job takes, with how many ranks of each device class. Its step is the
usual longest of its ranks, since each step waits for whichever rank is longest in it, and what of
the exchange no backward pass hides.

**Exchange.** A link carries what leaves a domain: a host, or a rack of several. With ``k`` of
``n`` senders inside it and ``v`` bytes of values on the wire, an all-to-all sends
``k (n - k) / n * v`` out of it. An all-gather sends as much on the mesh, where each sends to each,
and ``(n - 1) / n * v`` on an engine's ring, which leaves a domain once if its hosts follow each
other. So a step sends::

    engine's ring (a plain mean)            2 (n - 1) / n * v
    rule over ranks or groups, on the mesh  2 k (n - k) / n * v
    rule over ranks or groups, no mesh      (k (n - k) / n + (n - 1) / n) * v
    all ranks on one host                   0

Groups are the hosts of ``over="nodes"``: a host is one sender of ``n`` hosts. The busiest link,
bytes over rate, tells how long it takes, and each round of messages adds the latency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import NormalDist
from typing import Any

import numpy as np

from loft_hvd.balance.interval import typical
from loft_hvd.balance.latency import Curves, StepModel, typical_longest
from loft_hvd.balance.plan import Bounds, Floats, Sizes
from loft_hvd.balance.search import exact
from loft_hvd.config import Config
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job
from loft_hvd.transport.compact import SLOW_BYTES_PER_S

__all__ = [
    "HostRanks",
    "Layout",
    "Prediction",
    "ReadLink",
    "Reads",
    "Traffic",
    "exchange",
    "predict",
    "read_link",
    "reads_of",
    "rough_s",
    "typical_unit",
]

# Bytes of a full Ethernet frame over those of values in it.
FRAMES = 1514 / 1448
# Messages of compact floats over their values' bytes: between those of normal values and those of
# a network's gradients (docs/benchmarks.md, "Links").
COMPACT = {"none": 0.86, "bf16": 0.71, "fp16": 0.88}
_COMPACT_EXCHANGE_BYTES = 1e6  # the least of a rank, as in transport/mesh.py


@dataclass(frozen=True)
class HostRanks:
    """Ranks of one device class on one host."""

    host: Host
    device: str
    count: int

    @property
    def is_cpu(self) -> bool:
        """Whether gradients lie in the host's memory."""
        return self.device.upper().startswith("CPU")


@dataclass(frozen=True)
class Layout:
    """Where the ranks of a job are, in the order of ranks: rack by rack, host by host."""

    parts: tuple[HostRanks, ...]
    over: str = "ranks"  # what a rule sees a row of: "ranks" or "nodes"

    @classmethod
    def of(cls, parts: Sequence[HostRanks], *, over: str = "ranks") -> Layout:
        """Put parts into the order of ranks; engines' rings then leave each rack once."""
        ordered = sorted(parts, key=lambda part: (part.host.rack, part.host.name, part.device))
        return cls(tuple(part for part in ordered if part.count), over)

    @functools.cached_property
    def hosts(self) -> tuple[tuple[Host, int], ...]:
        """The hosts and how many ranks each has."""
        groups = groupby(self.parts, key=lambda part: part.host.name)
        runs = [list(group) for _, group in groups]
        return tuple((run[0].host, sum(part.count for part in run)) for run in runs)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(part.count for part in self.parts)

    @property
    def is_cpu(self) -> bool:
        """Whether all gradients lie in hosts' memory."""
        return all(part.is_cpu for part in self.parts)

    def num_workers(self, job: Job) -> int:
        """Return how many rows the job's rule sees."""
        is_over_nodes = self.over == "nodes" and not job.is_mean
        return len(self.hosts) if is_over_nodes else self.world_size

    def check(self, job: Job) -> None:
        """Raise where a job cannot run so."""
        workers, rule = self.num_workers(job), job.parsed_rule
        if workers < rule.min_rows:
            raise PlanError(
                f"job {job.name!r}: rule {job.rule!r} needs {rule.min_rows} workers, but there are "
                f"{workers} over {self.over!r}; take more hosts, or a smaller f"
            )
        counts = {count for _, count in self.hosts}
        if self.over == "nodes" and not job.is_mean and len(counts) > 1:
            raise PlanError(
                f"job {job.name!r}: over='nodes' needs as many ranks on each host, not "
                f"{sorted(counts)}; take over='ranks', or the same number everywhere"
            )


# The exchange.


@dataclass(frozen=True)
class Traffic:
    """What a step's exchange of gradients sends, and how long it takes."""

    way: str  # in plain words
    host_bytes: tuple[float, ...]  # values' bytes that leave each host of the layout
    seconds: float
    exposed_s: float  # of them, those that no backward pass hides
    link: str  # the busiest: a host's name, "rack" and its name, or "" where none is used
    is_compact: bool = False


@dataclass(frozen=True)
class _Domain:
    """Senders behind one link."""

    name: str
    bytes_per_s: float
    ranks: int
    groups: int  # hosts


def exchange(fleet: Fleet, job: Job, layout: Layout) -> Traffic:
    """Work out a step's exchange among the ranks of a layout."""
    world_size, num_hosts = layout.world_size, len(layout.hosts)
    narrow = 4.0 if job.compression == "none" else 2.0
    wire = job.model_bytes * narrow / 4.0
    is_over_nodes = layout.over == "nodes" and not job.is_mean
    if num_hosts == 1:
        share = 2.0 * (world_size - 1) / world_size
        inside_s = share * wire / _inside_rate(layout.hosts[0][0])
        return Traffic("shared memory", (0.0,), inside_s, _exposed_s(job, inside_s), "")
    has_mesh = layout.is_cpu and job.engine == "gloo" and not job.elastic and not job.is_mean
    senders = num_hosts if is_over_nodes else world_size
    is_compact = has_mesh and _is_compact(layout, wire * (senders - 1) / senders)
    if is_compact:
        wire *= COMPACT[job.compression]

    def leaving(domain: _Domain) -> float:
        """Return the bytes that leave a domain in a step."""
        inside = domain.groups if is_over_nodes else domain.ranks
        if inside == senders:
            return 0.0
        scattered, passed_on = inside * (senders - inside) / senders, (senders - 1) / senders
        if job.is_mean:
            return 2.0 * passed_on * wire
        gathered = scattered if has_mesh else passed_on
        rows = (scattered + gathered) * wire * (1.0 + job.audit / (32.0 * world_size))
        return rows + _table_bytes(job, world_size, domain.ranks, has_mesh=has_mesh)

    domains = [_Domain(host.name, host.link_bytes_per_s, count, 1) for host, count in layout.hosts]
    racks = [
        _Domain(f"rack {name}", fleet.rack_link(name), sum(counts), len(counts))
        for name, counts in _by_rack(layout).items()
    ]
    times = [FRAMES * leaving(each) / each.bytes_per_s for each in (*domains, *racks)]
    busiest = int(np.argmax(times))
    rounds = 2 if has_mesh else 2 * (senders - 1) * math.ceil(job.model_bytes / Config.bucket_bytes)
    if is_over_nodes:
        rounds += 2 * (world_size - 1)  # all ranks meet at the end, on the engine's ring
    seconds = times[busiest] + rounds * fleet.latency_s
    # Inside a host ranks send at the same time as outside, but for two levels: one after the other.
    inside_s = max(
        2.0 * (count - 1) / (count if is_over_nodes else world_size) * wire / _inside_rate(host)
        for host, count in layout.hosts
    )
    seconds = seconds + inside_s if is_over_nodes else max(seconds, inside_s)
    way = "engine's ring" if job.is_mean else "two levels" if is_over_nodes else "shard owners"
    return Traffic(
        f"{way}{', on the mesh' if has_mesh else ''}{', compact' if is_compact else ''}",
        tuple(leaving(each) for each in domains),
        seconds,
        _exposed_s(job, seconds),
        (*domains, *racks)[busiest].name,
        is_compact,
    )


def _inside_rate(host: Host) -> float:
    return math.inf if host.internal_bytes_per_s is None else host.internal_bytes_per_s


def _by_rack(layout: Layout) -> dict[str, list[int]]:
    """Return how many ranks the hosts of each rack have."""
    found: dict[str, list[int]] = {}
    for host, count in layout.hosts:
        found.setdefault(host.rack, []).append(count)
    return found


def _is_compact(layout: Layout, rank_bytes: float) -> bool:
    """Say whether floats travel compact: links are slow, by the mesh's own trial, and it pays."""
    world_size = layout.world_size
    # Each rank sends to all others at once: of a host with r of n ranks r (n - r) / (n - 1) of the
    # bytes that one rank sends cross the link.
    slowest = min(
        host.link_bytes_per_s * (world_size - 1) / (count * (world_size - count))
        for host, count in layout.hosts
    )
    return slowest <= SLOW_BYTES_PER_S and rank_bytes >= _COMPACT_EXCHANGE_BYTES


def _table_bytes(job: Job, world_size: int, ranks: int, *, has_mesh: bool) -> float:
    """Return bytes of tables that leave a domain of ``ranks``, on average over steps."""
    pairs = world_size * (world_size + 1)
    outside = world_size - ranks
    tables = 0.0
    if job.scope == "model":  # one all-gather of a table of each owner
        tables += 4.0 * pairs * (ranks * outside if has_mesh else world_size - 1)
    if job.audit and job.parsed_rule.sees_rows:
        buckets = math.ceil(job.model_bytes / Config.bucket_bytes)
        tables += job.audit * 64.0 * pairs * ranks * outside * buckets
    return tables


def _exposed_s(job: Job, seconds: float) -> float:
    """Return what of an exchange no backward pass hides."""
    # With the scope "model" results travel after the last bucket has come: half of the bytes.
    free = 0.5 * seconds if job.scope == "model" else 0.0
    return free + (1.0 - job.hidden_share) * (seconds - free)


# The ranks' own work.


@dataclass(frozen=True)
class Reads:
    """Where a job's samples come from that its ranks do not hold."""

    data: DataSet | None
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
    data = next((each for each in fleet.data if each.name == job.data), None)
    if data is None:
        return Reads(None)
    server, rate = _slowest_server(fleet, job, layout, data)
    at_links = max(read_link(fleet, data, layout, host).byte_s for host, _ in layout.hosts)
    return Reads(data, server, rate, layout.world_size / rate > at_links)


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
        ways.append((f"host {host.name}", served.get(host.name, 0.0), host.link_bytes_per_s))
        out_of[host.rack] = out_of.get(host.rack, 0.0) + served.get(host.name, 0.0)
        lack_in[host.rack] = lack_in.get(host.rack, 0.0) + lacks.get(host.name, 0.0)
    for rack in fleet.racks:
        beyond = 1.0 - lack_in.get(rack.name, 0.0) / lack
        served_out = out_of.get(rack.name, 0.0) * beyond
        ways.append((f"rack {rack.name}", served_out, rack.link_bytes_per_s))
    rates = [(name, rate * lack / share if share > 0 else math.inf) for name, share, rate in ways]
    return min(rates, key=lambda each: each[1])


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


def read_link(fleet: Fleet, data: DataSet, layout: Layout, host: Host) -> ReadLink:
    """Return the slower of a host's own link and its rack's, for what is beyond the rack."""
    ranks = {each.name: count for each, count in layout.hosts}
    own = ReadLink(f"link of {host.name}", ranks[host.name], host.link_bytes_per_s)
    uplink = fleet.rack_link(host.rack)
    held = sum(data.share(each.name) for each in fleet.hosts if each.rack == host.rack)
    elsewhere = 1.0 - data.share(host.name)
    if math.isinf(uplink) or held >= 1.0 or not elsewhere:
        return own
    inside = sum(count for each, count in layout.hosts if each.rack == host.rack)
    rack = ReadLink(f"link of rack {host.rack}", inside, uplink * elsewhere / (1.0 - held))
    return max(own, rack, key=lambda each: each.byte_s)


@dataclass(frozen=True)
class _OwnWork:
    """What a step costs a rank of each part; arrays are [num_parts]."""

    model: StepModel  # ranks of a host are taken to fetch alike over its link
    queue_s: float  # a sample takes at a server that all ranks wait for; 0 without one
    noise: Floats  # relative standard deviation of each fetch and compute
    skew: float  # of single steps, of all ranks alike
    low: Floats  # least and most samples of a rank
    high: Floats
    count: Floats  # ranks


def _work_of(fleet: Fleet, job: Job, layout: Layout, *, is_warm: bool) -> _OwnWork:
    """Return the ranks' work; ``is_warm`` once a sample store has kept what it has room for."""
    models = [_model_of(job, part) for part in layout.parts]
    ranks = {host.name: count for host, count in layout.hosts}
    reads = reads_of(fleet, job, layout)
    data, is_at_server = reads.data, reads.is_at_server
    total = float(job.global_batch_size)
    hits, link_s = [math.inf] * len(models), [0.0] * len(models)
    if data is not None:
        kept = {
            host.name: min(data.share(host.name) + _kept_share(job, data, host) * is_warm, 1.0)
            for host, _ in layout.hosts
        }
        # Once all of it is at some host, what is not at hand comes from peers.
        is_at_server = is_at_server and not (is_warm and sum(kept.values()) > 1.0 - 1e-6)
        links = {host.name: read_link(fleet, data, layout, host) for host, _ in layout.hosts}
        for at, part in enumerate(layout.parts):
            share = kept[part.host.name]
            hits[at] = math.inf if share == 1.0 else total * share / ranks[part.host.name]
            if not is_at_server:
                link_s[at] = data.sample_bytes * links[part.host.name].byte_s
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
    data = reads_of(fleet, job, layout).data
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
    world_size = int(count.sum())
    terms: dict[str, Any] = {
        name: np.repeat(getattr(work.model, name), count) for name in (*_TERMS, "hits")
    }
    source = 0 if work.queue_s else -1
    model = StepModel.build(world_size, source=source, shared_s=work.queue_s, **terms)
    caps = np.repeat(work.high, count)
    bounds = Bounds.of(world_size, floor=job.min_batch, cap=caps)
    sizes = exact(model, job.global_batch_size, bounds) if sizes is None else sizes
    batch = np.array(sizes, dtype=np.float64)
    deviation = _deviations(model, np.repeat(work.noise, count), batch)
    times = model.times(sizes)
    if not deviation.any():
        return sizes, model, float(times.max())
    return sizes, model, float(typical_longest(times, deviation, work.skew)[0])
