"""What a plan is made of: the machines of a cluster, its data, and a job with models of its times.

The fields are the keys of ``cluster.toml`` and ``jobs.toml`` (docs/plan.md), and their types are
the limits: ``loft_hvd.codec`` reads the files by them. What types cannot say is checked here. One
file describes many jobs; a plan is made for one of them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.plan import MIN_BATCH
from loft_hvd.codec import Within
from loft_hvd.errors import ArgumentError

__all__ = [
    "LEAST_S",
    "MOST_WORTH",
    "DataSet",
    "DeviceModel",
    "Fleet",
    "Host",
    "Job",
    "JobList",
    "Rack",
    "WorkerNeeds",
]

# Limits of what one machine can work out, and of numbers whose products stay finite.
_MOST_HOSTS, _MOST_JOBS, _MOST_RANKS = 1000, 1000, 4096
_INEXACT = 0.01  # of a data set: bytes are written with few digits
Rate = Annotated[float, Within(1.0, 1e15)]  # bytes a second
Bytes = Annotated[float, Within(0.0, 1e18)]
LEAST_S = 1e-12  # a step takes some time: times are divided by it
MOST_WORTH = 1e12  # of a job, in any unit
Seconds = Annotated[float, Within(0.0, 1e6)]
Instant = Annotated[float, Within(0.0, 1e9)]  # seconds, up to 30 years
Share = Annotated[float, Within(0.0, 1.0)]
Samples = Annotated[int, Within(1, 1e12)]
Batch = Annotated[int, Within(1, 1e7)]

# RFC 1123: names of hosts are labels with dots between them. They enter shells and manifests.
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.IGNORECASE)
_JOB = re.compile(_LABEL)
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,63}")
_MOST_LETTERS = 253  # of a host's name, RFC 1123


def _check_one_of(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ArgumentError(f"{what}={value!r} must be one of {list(known)}")


def _check_names(what: str, names: Iterable[str], pattern: re.Pattern[str], takes: str) -> None:
    """Raise where a name is not of a form, or stands twice."""
    seen: set[str] = set()
    for name in names:
        if len(name) > _MOST_LETTERS or not pattern.fullmatch(name):
            raise ArgumentError(f"{what} {name!r} must be {takes}")
        if name in seen:
            raise ArgumentError(f"{what} {name!r} stands twice; give each a name of its own")
        seen.add(name)


_HOSTS_TAKE = "a host's name: letters, digits, dots and inner dashes (RFC 1123)"
_DEVICES_TAKE = "a device class: a letter or digit, then up to 63 of letters, digits and ' ._+-'"
_JOBS_TAKE = "small letters, digits and inner dashes, 63 at most: manifests and shells hold it"


@dataclass(frozen=True)
class Host:
    """A machine that jobs may take."""

    name: str
    slots: dict[str, Annotated[int, Within(1, _MOST_RANKS)]]  # ranks it has room for, by device
    link_bytes_per_s: Rate  # of its network interface, each way
    internal_bytes_per_s: Rate | None = None  # of a rank to others there; None: no time at all
    rack: str = ""
    cpus: Annotated[int, Within(1, 1e6)] | None = None  # None: nobody asks for any
    memory_bytes: Bytes | None = None  # likewise
    store_bytes: Bytes = 0.0  # that a sample store of a job may keep on it
    price_per_hour: Annotated[float, Within(0.0, 1e9)] | None = None

    def __post_init__(self) -> None:
        if not self.slots:
            raise ArgumentError("slots must name a device class, such as { A100 = 4 }")
        _check_names("slots:", self.slots, _DEVICE, _DEVICES_TAKE)


@dataclass(frozen=True)
class Rack:
    """Hosts that share a link to the others."""

    name: str
    link_bytes_per_s: Rate


@dataclass(frozen=True)
class DataSet:
    """Samples, and which hosts hold them."""

    name: str
    num_samples: Samples
    sample_bytes: Annotated[float, Within(1.0, 1e12)]
    homes: dict[str, Bytes] = field(default_factory=dict)  # bytes that each host holds
    # Of the server that serves what no home holds, to all ranks together; None: no limit but the
    # hosts' own links.
    source_bytes_per_s: Rate | None = None

    def __post_init__(self) -> None:
        if self._parts > 1.0 + _INEXACT:
            raise ArgumentError(
                f"homes hold {self._parts:.2f} times the {self.num_bytes:.4g} bytes of the data in "
                "parts; parts must not overlap, and a copy must be whole: give a host all bytes, "
                "or a part that no other host has"
            )

    @property
    def num_bytes(self) -> float:
        """Of all samples."""
        return self.num_samples * self.sample_bytes

    @functools.cached_property
    def _parts(self) -> float:
        """The share of the data that hosts hold who do not hold all."""
        shares = [held / self.num_bytes for held in self.homes.values()]
        return sum(share for share in shares if share < 1.0 - _INEXACT)

    @functools.cached_property
    def _shares(self) -> dict[str, float]:
        known = {host: held / self.num_bytes for host, held in self.homes.items()}
        whole, parts = 1.0 - _INEXACT, max(self._parts, 1.0)
        return {host: 1.0 if each >= whole else each / parts for host, each in known.items()}

    def share(self, host: str) -> float:
        """Return the share of the samples that a host holds; 1 for a whole copy."""
        return self._shares.get(host, 0.0)


@dataclass(frozen=True)
class Fleet:
    """The machines, and the data on them."""

    hosts: list[Host]
    racks: list[Rack] = field(default_factory=list)
    data: list[DataSet] = field(default_factory=list)
    latency_s: Seconds = 0.0  # of a message between two hosts

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= _MOST_HOSTS:
            raise ArgumentError(f"{len(self.hosts)} hosts: give 1 to {_MOST_HOSTS}, [[hosts]]")
        _check_names("host", (host.name for host in self.hosts), _HOST, _HOSTS_TAKE)
        _check_names("rack", (rack.name for rack in self.racks), _DEVICE, "a name")
        _check_names("data", (each.name for each in self.data), _DEVICE, "a name")
        known, racks = {host.name for host in self.hosts}, {rack.name for rack in self.racks}
        for host in self.hosts:
            if self.racks and host.rack not in racks:
                raise ArgumentError(
                    f"host {host.name!r} is in rack {host.rack!r}, but [[racks]] has "
                    f"{sorted(racks)}; name one of these"
                )
        for each in self.data:
            for name in each.homes:
                if name not in known:
                    raise ArgumentError(
                        f"data {each.name!r} has a home on host {name!r}, which is none of "
                        f"[[hosts]] {sorted(known)}; add it there, or take the home out"
                    )

    def data_of(self, job: Job) -> DataSet | None:
        """Return what a job reads; None where every rank has it.

        Raises:
            ArgumentError: it is none of the data here.
        """
        found = next((each for each in self.data if each.name == job.data), None)
        if found is None and job.data is not None:
            raise ArgumentError(
                f"job {job.name!r} reads data={job.data!r}, but the cluster's [[data]] has "
                f"{sorted(each.name for each in self.data)}; name one of these, or add it there"
            )
        return found

    def kind_of(self, host: Host, job: Job) -> tuple[str, float]:
        """Return what two hosts have in common that are as good as each other to a job."""
        data = self.data_of(job)
        share = 0.0 if data is None else data.share(host.name)
        return repr(replace(host, name="")), share

    def rack_link(self, name: str) -> float:
        """Return the bytes a second of a rack's link; infinite where none is given."""
        rates = (rack.link_bytes_per_s for rack in self.racks if rack.name == name)
        return next(rates, math.inf)


@dataclass(frozen=True)
class DeviceModel:
    """What a step costs a rank on a device of a class, as ``StepModel`` has it."""

    compute_s: Annotated[float, Within(LEAST_S, 1e6)]  # a sample
    compute_fixed_s: Seconds = 0.0  # and a step
    knee: Annotated[float, Within(0.0, 1e9)] = 0.0  # samples below which compute gets no cheaper
    fetch_fixed_s: Seconds = 0.0  # a step
    local_s: Seconds = 0.0  # a sample from the rank's own host
    remote_s: Seconds = 0.0  # a sample from elsewhere, beside its bytes on the link
    overlap: Share = 0.0  # of the shorter of fetch and compute that is hidden
    noise: Share = 0.0  # relative standard deviation of each fetch and compute
    skew: Annotated[float, Within(0.0, 3.0)] = 0.0  # of single steps, as ``typical_longest`` has it
    max_batch: Batch | None = None  # what its memory holds

    @property
    def plateau_s(self) -> float:
        """The least that computing takes; 0 for a device that is linear."""
        return self.compute_fixed_s + self.compute_s * self.knee if self.knee else 0.0


@dataclass(frozen=True)
class WorkerNeeds:
    """What each worker needs of its host beside a slot."""

    cpus: Annotated[int, Within(0, 1e6)] = 0
    memory_bytes: Bytes = 0.0


@dataclass(frozen=True)
class Job:
    """A training, as its script is written, and the models of its times by device class."""

    name: str
    command: list[str]
    model_bytes: Annotated[float, Within(4.0, 1e13)]  # of all gradients in float32
    global_batch_size: Batch
    models: dict[str, DeviceModel] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)  # run logs that have models of other classes
    steps: Samples | None = None
    epochs: Annotated[float, Within(1e-6, 1e9)] | None = None
    data: str | None = None  # None: every rank has all that it reads
    rule: str = "mean"
    over: str = "auto"  # "ranks", "nodes", or whichever is faster
    compression: str = "none"
    scope: str = "shard"
    audit: Share = 0.0
    engine: str = "gloo"
    elastic: bool = False
    restart_s: Seconds = 30.0  # without progress, when its hosts change while it runs
    store: bool = False  # a sample store keeps what ranks have read, in their hosts' budgets
    # Share of the exchange that backward passes hide, and what a step takes beside the ranks' own
    # work and the exchange's bytes, as measured. None: as run logs tell, else 0.
    hidden_share: Share | None = None
    rest_s: Seconds | None = None
    min_batch: Batch = MIN_BATCH
    min_workers: Annotated[int, Within(1, _MOST_RANKS)] = 1
    max_workers: Annotated[int, Within(1, _MOST_RANKS)] = _MOST_RANKS
    needs: WorkerNeeds = field(default_factory=WorkerNeeds)
    # Beside other jobs: all instants count from one start, as that of the plan.
    arrival_s: Instant = 0.0  # before which it does not start
    after: list[str] = field(default_factory=list)  # jobs that must have ended
    worth: Annotated[float, Within(1e-9, MOST_WORTH)] = 1.0  # in any unit that is one for all jobs
    deadline_s: Instant | None = None  # from which on its end is worth nothing
    wished_s: Instant | None = None  # after arrival, when half of its worth is gone
    urgency: Annotated[float, Within(0.0, 1e3)] = 0.0  # how steep that is; 0: its worth stays

    def __post_init__(self) -> None:
        if (self.urgency > 0) != (self.wished_s is not None) or self.wished_s == 0:
            raise ArgumentError(
                f"urgency={self.urgency:g} and wished_s={self.wished_s} belong together: give both "
                "above 0, or none where its worth stays"
            )
        if self.deadline_s is not None and self.deadline_s <= self.arrival_s:
            raise ArgumentError(
                f"deadline_s={self.deadline_s:g} must be after arrival_s={self.arrival_s:g}; both "
                "count from the start of the plan"
            )
        if not self.command or not all(self.command):
            raise ArgumentError(f'command={self.command} must be words, as ["python", "train.py"]')
        if not all(word.isprintable() for word in self.command):  # a terminal shows them, too
            raise ArgumentError(
                f"command={self.command} must be words without line ends and control characters"
            )
        _check_names("models:", self.models, _DEVICE, _DEVICES_TAKE)
        _check_one_of("over", self.over, ("auto", "ranks", "nodes"))
        _check_one_of("compression", self.compression, ("none", "fp16", "bf16"))
        _check_one_of("scope", self.scope, ("shard", "model"))
        _check_one_of("engine", self.engine, ("gloo", "mpi"))
        if self.min_workers > self.max_workers:
            raise ArgumentError(
                f"min_workers={self.min_workers} must be <= max_workers={self.max_workers}"
            )
        if (self.steps is None) == (self.epochs is None):
            raise ArgumentError(
                f"steps={self.steps} and epochs={self.epochs}: give one of them, how long it trains"
            )
        if (self.epochs is not None or self.store) and self.data is None:
            raise ArgumentError("epochs and store are of data=, which names one of [[data]]")
        rule = self.parsed_rule  # before anybody asks for it: the text may be none
        if self.scope == "model" and not rule.sees_rows:
            raise ArgumentError(f"scope='model' needs a rule that sees rows, not {self.rule!r}")

    @functools.cached_property
    def parsed_rule(self) -> Rule:
        """The rule itself; an ArgumentError where the text is none."""
        return parse_rule(self.rule)

    @functools.cached_property
    def is_mean(self) -> bool:
        """Whether gradients are summed by the engine."""
        rule = self.parsed_rule
        return isinstance(rule, Mean) and not rule.reproducible

    def num_steps(self, data: DataSet | None) -> float:
        """Return how many steps it trains."""
        if self.steps is not None or data is None or self.epochs is None:
            return float(self.steps or 0)
        return self.epochs * max(data.num_samples // self.global_batch_size, 1)


@dataclass(frozen=True)
class JobList:
    """All jobs of a file."""

    jobs: list[Job]

    def __post_init__(self) -> None:
        if not 1 <= len(self.jobs) <= _MOST_JOBS:
            raise ArgumentError(f"{len(self.jobs)} jobs: give 1 to {_MOST_JOBS}, [[jobs]]")
        _check_names("job", (job.name for job in self.jobs), _JOB, _JOBS_TAKE)
        self._check_after()

    def _check_after(self) -> None:
        """Raise where a job waits for one that is not there, or for itself."""
        known = {job.name: set(job.after) for job in self.jobs}
        for name, before in known.items():
            if missing := sorted(before - set(known)):
                raise ArgumentError(
                    f"job {name!r} is after={missing}, none of [[jobs]] {sorted(known)}; name one "
                    "of these, or add it"
                )
        left = dict(known)
        while free := [name for name, before in left.items() if not before & set(left)]:
            for name in free:
                del left[name]
        if left:
            raise ArgumentError(
                f"jobs {sorted(left)} wait for each other by after=, so none can start; take one "
                "of these out"
            )
