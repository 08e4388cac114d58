"""What leaves each link in a step's exchange of gradients, and how long that takes.

A layout says which hosts a job takes, with how many ranks of each device class.

A link carries what leaves a domain: a host, or a rack of several. With ``k`` of
``n`` senders inside it and ``v`` bytes of values on the wire, an all-to-all sends
``k (n - k) / n * v`` out of it. An all-gather sends as much on the mesh, where each sends to each,
and ``(n - 1) / n * v`` on an engine's ring, which leaves a domain once if its hosts follow each
other. So a step sends::

    engine's ring (a plain mean)            2 (n - 1) / n * v
    rule over ranks or groups, on the mesh  2 k (n - k) / n * v
    rule over ranks or groups, no mesh      (k (n - k) / n + (n - 1) / n) * v
    all ranks on one host                   0

times ``FRAMES``, for headers. Groups are the hosts of ``over="nodes"``: a host is one sender of
``n`` hosts. The busiest link, bytes over rate, tells how long it takes, and each round of messages
adds the latency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from loft_hvd.config import Config
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import Fleet, Host, Job
from loft_hvd.transport.compact import SLOW_BYTES_PER_S

__all__ = ["HostRanks", "Layout", "Traffic", "exchange"]

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
    host_bytes: tuple[float, ...]  # that leave each host of the layout, headers included
    seconds: float
    exposed_s: float  # of them, those that no backward pass hides; and the job's ``rest_s``
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
        """Return the bytes of the frames that leave a domain in a step."""
        return FRAMES * values_leaving(domain)

    def values_leaving(domain: _Domain) -> float:
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
    times = [leaving(each) / each.bytes_per_s for each in (*domains, *racks)]
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
    """Return what of an exchange no backward pass hides, and what else a step takes."""
    # With the scope "model" results travel after the last bucket has come: half of the bytes.
    free = 0.5 * seconds if job.scope == "model" else 0.0
    return free + (1.0 - (job.hidden_share or 0.0)) * (seconds - free) + (job.rest_s or 0.0)
