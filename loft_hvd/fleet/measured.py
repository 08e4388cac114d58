"""Models of devices from run logs: what ranks took in earlier runs of a job, by device class.

The newest ``fit`` and ``times`` of a log's last run tell; of several ranks of a class the median
counts. Terms that no rank of a class tells apart, and ranks whose times fit no model, are refused
by name, unless a user takes them as they are.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.latency import typical_longest
from loft_hvd.codec import Count, decode
from loft_hvd.errors import PlanError
from loft_hvd.fleet.jobs import LEAST_S, DataSet, DeviceModel, Fleet, Job
from loft_hvd.fleet.rate import typical_unit
from loft_hvd.fleet.traffic import HostRanks, Layout, exchange
from loft_hvd.runlog import newest_log, read_run_log

__all__ = [
    "LoggedExchange",
    "LoggedRun",
    "Origin",
    "layout_of",
    "read_log",
    "usual_longest",
    "with_logs",
]

T = TypeVar("T")
_NORMAL_FIFTH = 0.8416  # as in balance/fit.py
_MOST_SKEW = 2.0
_TELLING = 0.02  # share of a step from which on its exchange tells what backward passes hide
_DAY_S = 86400.0


@dataclass(frozen=True)
class Origin:
    """Where a model comes from."""

    text: str  # in plain words
    error: float | None = None  # standard error of a step's time, as a share; None: not known
    samples: float = 0.0  # of the batches that were measured
    slope_s: float = 0.0  # standard error of what one sample more takes

    def error_at(self, samples: float, busy_s: float) -> float | None:
        """Return the standard error of a rank's time with another batch, as a share.

        What is known best is the time of the batch that was measured: the further off, the more
        it counts how well the cost of a sample is known.
        """
        if self.error is None or busy_s <= 0:
            return self.error
        return math.hypot(self.error, self.slope_s * (samples - self.samples) / busy_s)


@dataclass(frozen=True)
class _LoggedWorld:
    """A line ``run``."""

    world_size: int
    global_batch_size: int
    devices: list[str]  # "host/number name" of each rank
    caps: list[int | None]
    nodes: list[int] | None = None  # number of each rank's; None in logs of an earlier version


@dataclass(frozen=True)
class LoggedExchange:
    """A line ``exchange``."""

    lane: str
    num_steps: Count
    whole_s: float
    waited_s: float
    bytes_per_s: float | None = None  # that the slowest rank can send; None where nobody tried


@dataclass(frozen=True)
class _LoggedFit:
    """What a line ``fit`` says of a rank; what is not finite is NaN."""

    rank: int
    predicted_s: float
    fetch_fixed_s: float
    local_s: float
    remote_s: float
    shared_s: float
    compute_fixed_s: float
    compute_s: float
    overlap: float
    is_poor: bool
    unclear: list[str]
    knee: float = 0.0  # samples of a pass below which computing takes no less
    error_s: float = math.nan  # standard error of ``predicted_s``
    errors: dict[str, float] = field(default_factory=dict)  # of the terms; none in older logs


@dataclass(frozen=True)
class _LoggedFits:
    """A line ``fit``."""

    ranks: list[_LoggedFit]


@dataclass(frozen=True)
class _LoggedTimes:
    """A line ``times``."""

    time_s: float
    step: Count
    ranks: list[RankTimes]
    num_ranks: Count = 0  # 0 in logs of an earlier version: all of them


@dataclass(frozen=True)
class _CapOfRank:
    """A line ``cap``."""

    rank: Count
    cap: Count


@dataclass(frozen=True)
class _LoggedPlan:
    """A line ``plan``."""

    sizes: list[int]


@dataclass(frozen=True)
class LoggedRun:
    """The last run of a log."""

    path: Path
    time_s: float  # since 1970, of its newest times
    world: _LoggedWorld
    fits: dict[int, _LoggedFit]  # by rank
    times: dict[int, RankTimes]  # likewise
    num_ranks: int
    steps: int
    caps: dict[int, int]  # known of each rank
    planned: list[int]  # sizes of the newest plan, [world_size]
    exchange: LoggedExchange | None = None  # the newest; None in older logs

    def num_beside(self, rank: int) -> int:
        """Return how many ranks share a rank's link."""
        places: Sequence[object] = self.world.nodes or self.hosts
        return places.count(places[rank])

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [device.rpartition("/")[0] for device in self._keys]

    @property
    def _keys(self) -> list[str]:
        return [device.partition(" ")[0] for device in self.world.devices]

    @property
    def sizes(self) -> list[int]:
        """Samples of each rank: as measured, and as planned of ranks that a log leaves out."""
        return [
            round(self.times[rank].samples) if rank in self.times else size
            for rank, size in enumerate(self.planned)
        ]

    @property
    def names(self) -> list[str]:
        """The name of each rank's device."""
        return [device.partition(" ")[2] for device in self.world.devices]


def read_log(path: str | Path) -> LoggedRun:
    """Read the last run of a log, or of the newest of a folder.

    Raises:
        DataError: it cannot be read.
        PlanError: it has no times or no fit, which a policy other than sizes given makes.
    """
    path = newest_log(path)
    entries = read_run_log(path)
    last = max((at for at, each in enumerate(entries) if each["kind"] == "run"), default=None)
    entries = entries[last:] if last is not None else []
    newest = {str(each["kind"]): each for each in entries}
    missing = [kind for kind in ("run", "times", "fit") if kind not in newest]
    if missing or "devices" not in newest["run"]:
        raise PlanError(
            f"run log {path}: its last run has no {' or '.join(missing) or 'devices'}, from which "
            "models come; log a run of some intervals with a Balancer whose policy fits times"
        )

    def read(kind: type[T], entry: Mapping[str, object]) -> T:
        advice, what = "give a run log of this version", str(entry["kind"])
        return decode(kind, entry, what=what, call=f"run log {path}", is_open=True, advice=advice)

    world, measured = read(_LoggedWorld, newest["run"]), read(_LoggedTimes, newest["times"])
    found = [read(_CapOfRank, each) for each in entries if each["kind"] == "cap"]
    size = len(world.devices)
    fits = {each.rank: each for each in read(_LoggedFits, newest["fit"]).ranks}
    times = {each.rank: each for each in measured.ranks}
    planned = read(_LoggedPlan, newest["plan"]).sizes if "plan" in newest else []
    nodes = world.nodes or [0] * size
    is_whole = size == world.world_size == len(nodes)
    if not (times and is_whole and max({*fits, *times}) < size):
        raise PlanError(
            f"run log {path}: {size} devices for world_size={world.world_size}, with times of "
            f"ranks {sorted(times)} and fits of {sorted(fits)}; it is damaged: give another"
        )
    caps = {rank: cap for rank, cap in enumerate(world.caps) if cap is not None}
    return LoggedRun(
        path,
        measured.time_s,
        world,
        fits,
        times,
        measured.num_ranks or len(times),
        measured.step,
        caps | {each.rank: each.cap for each in found},
        planned if len(planned) == size else [0] * size,
        read(LoggedExchange, newest["exchange"]) if "exchange" in newest else None,
    )


def with_logs(
    fleet: Fleet, job: Job, *, now_s: float, assume: bool = False
) -> tuple[Job, dict[str, Origin]]:
    """Return a job with the models that its logs tell, and where each model comes from.

    Models that are typed go before those of logs; of several logs the last one that knows a class.

    Args:
        fleet: the machines; a log's ranks get their classes from them.
        job: its ``logs`` are read.
        now_s: seconds since 1970, from which a log's age counts.
        assume: take terms that a log does not tell apart, and poor fits, as they are.

    Raises:
        PlanError: a log does not tell a term, or what class a device is of; names them.
    """
    models: dict[str, DeviceModel] = {}
    origins: dict[str, Origin] = {}
    hidden, rest_s = job.hidden_share or 0.0, job.rest_s
    for path in job.logs:
        run = read_log(path)
        found = _models_of(fleet, job, run, now_s=now_s, assume=assume)
        models |= {device: model for device, (model, _) in found.items()}
        origins |= {device: origin for device, (_, origin) in found.items()}
        beside = _beside(fleet, job, run, hidden)
        if beside is not None:
            hidden, rest_s = beside[0], beside[1] if job.rest_s is None else job.rest_s
    origins |= dict.fromkeys(job.models, Origin("typed in the file of jobs"))
    models |= job.models
    return replace(job, models=models, hidden_share=hidden, rest_s=rest_s), origins


def _class_of(fleet: Fleet, run: LoggedRun, rank: int) -> str:
    """Return the device class of a log's rank: the one of its host, or that of its name."""
    name, device = run.hosts[rank], run.names[rank]
    host = next((each for each in fleet.hosts if _is_same(each.name, name)), None)
    slots = [each.slots for each in (fleet.hosts if host is None else [host])]
    known = sorted({device for each in slots for device in each})
    is_sure = host is not None and len(known) == 1
    fitting = [each for each in known if is_sure or each.lower() in device.lower()]
    if not fitting:
        raise PlanError(
            f"run log {run.path}: rank {rank} ran on {name!r} with the device {device!r}, which is "
            f"none of the classes {known}; call a class of the cluster by a part of that name"
        )
    return max(fitting, key=len)


def _is_same(one: str, other: str) -> bool:
    return one == other or one == other.split(".")[0] or one.split(".")[0] == other


def _models_of(
    fleet: Fleet, job: Job, run: LoggedRun, *, now_s: float, assume: bool
) -> dict[str, tuple[DeviceModel, Origin]]:
    by_class: dict[str, list[int]] = {}
    for rank in sorted(run.fits.keys() & run.times.keys()):
        by_class.setdefault(_class_of(fleet, run, rank), []).append(rank)
    data = fleet.data_of(job)
    return {
        device: (
            _model(fleet, run, device, ranks, data, assume=assume),
            _origin(run, ranks, now_s=now_s),
        )
        for device, ranks in by_class.items()
        if device not in job.models
    }


def _model(
    fleet: Fleet,
    run: LoggedRun,
    device: str,
    ranks: Sequence[int],
    data: DataSet | None,
    *,
    assume: bool,
) -> DeviceModel:
    """Return the model of a class: the median of its ranks, of each term those who tell it."""
    fits = [run.fits[rank] for rank in ranks if assume or not run.fits[rank].is_poor]
    if not fits:
        raise PlanError(
            f"run log {run.path}: the times of ranks {list(ranks)}, of class {device!r}, fit no "
            "model; log a longer run, type the model, or take it as it is with --assume"
        )

    def term(name: str, values: Mapping[int, float]) -> float:
        clear = [fit.rank for fit in fits if assume or name not in fit.unclear]
        if not clear:
            raise PlanError(
                f"run log {run.path}: {name} of class {device!r} cannot be told apart on ranks "
                f"{[fit.rank for fit in fits]}; let sizes vary (policy='loft'), type the model, or "
                "take it as it is with --assume"
            )
        return max(statistics.median(values[rank] for rank in clear), 0.0)

    values = {
        name: {fit.rank: float(getattr(fit, name)) for fit in fits}
        for name in ("compute_s", "compute_fixed_s", "fetch_fixed_s", "local_s")
    }
    terms = {name: term(name, by_rank) for name, by_rank in values.items()}
    terms["compute_s"] = max(terms["compute_s"], LEAST_S)
    if data is not None and any(run.times[fit.rank].remote > 0 for fit in fits):
        own = {fit.rank: _own_remote_s(fleet, run, fit, data) for fit in fits}
        terms["remote_s"] = term("remote_s", own)
    caps = [run.caps[rank] for rank in ranks if rank in run.caps]
    times = [run.times[fit.rank] for fit in fits]
    return DeviceModel(
        **terms,
        knee=max(statistics.median_low(fit.knee for fit in fits), 0.0),
        overlap=statistics.median(fit.overlap for fit in fits),
        noise=min(statistics.median(map(_noise, times)), 1.0),
        skew=_skew(times),
        max_batch=min(caps, default=None),
    )


def _own_remote_s(fleet: Fleet, run: LoggedRun, fit: _LoggedFit, data: DataSet) -> float:
    """Return what a remote sample took beside its bytes on the host's link."""
    name = run.hosts[fit.rank]
    host = next((each for each in fleet.hosts if _is_same(each.name, name)), None)
    if fit.shared_s > 0 or host is None:  # the link is the shared source, or is not known
        return fit.remote_s
    on_link_s = data.sample_bytes * run.num_beside(fit.rank) / host.link_bytes_per_s
    return max(fit.remote_s - on_link_s, 0.0)


def _noise(times: RankTimes) -> float:
    """Return the relative deviation of a rank's single steps, of the longer of its two parts."""
    parts = (
        (times.typical_fetch_s, times.fetch_spread_s2),
        (times.typical_compute_s, times.compute_spread_s2),
    )
    usual_s, variance = max(parts)
    return math.sqrt(variance) / usual_s / typical_unit() if usual_s > 0 else 0.0


def _skew(times: Iterable[RankTimes]) -> float:
    """Return the skew of single steps, as ``Fit`` has it."""
    known = [each.busy_skew for each in times if each.busy_skew > 0]
    if not known:
        return 0.0
    return min(max(math.log(statistics.median(known)) / _NORMAL_FIFTH, 0.0), _MOST_SKEW)


def _origin(run: LoggedRun, ranks: Sequence[int], *, now_s: float) -> Origin:
    errors = [
        run.fits[rank].error_s / run.fits[rank].predicted_s
        for rank in ranks
        if run.fits[rank].error_s >= 0 and run.fits[rank].predicted_s > 0  # NaN is neither
    ]
    error = statistics.median(errors) if errors else None
    steps = sum(run.times[rank].steps for rank in ranks)
    days = max(now_s - run.time_s, 0.0) / _DAY_S
    age = f"{days:.0f} days" if days >= 2 else f"{24 * days:.0f} h"
    shown = f", of {run.num_ranks} of which it has {len(run.times)}"
    text = (
        f"measured {age} ago on ranks {' '.join(map(str, ranks))}"
        f"{shown if run.num_ranks > len(run.times) else ''}, {steps} batches in the newest "
        f"interval of {run.path.name}" + (f", +-{error:.1%}" if error is not None else "")
    )
    samples = statistics.median(run.times[rank].samples for rank in ranks)
    slope_s = statistics.median(_slope_error_s(run.fits[rank], run.times[rank]) for rank in ranks)
    return Origin(text, error, samples, slope_s)


def _slope_error_s(fit: _LoggedFit, times: RankTimes) -> float:
    """Return the standard error of what one sample more takes a rank; 0 where a log lacks it."""
    counts = {"compute_s": times.samples, "local_s": times.local, "remote_s": times.remote}
    errors = [fit.errors.get(name, 0.0) for name, count in counts.items() if count > 0]
    return math.hypot(*(error for error in errors if math.isfinite(error)))


def layout_of(fleet: Fleet, job: Job, run: LoggedRun) -> tuple[Layout, list[int]]:
    """Return where a log's ranks were, and the log's rank of each rank of that layout.

    Raises:
        PlanError: a host is none of the cluster's.
    """
    places = []
    for rank, name in enumerate(run.hosts):
        host = next((each for each in fleet.hosts if _is_same(each.name, name)), None)
        if host is None:
            raise PlanError(
                f"run log {run.path}: host {name!r} is none of the cluster's "
                f"{sorted(each.name for each in fleet.hosts)}"
            )
        places.append((host, _class_of(fleet, run, rank)))
    counts = Counter((host.name, device) for host, device in places)
    hosts = {host.name: host for host, _ in places}
    parts = [HostRanks(hosts[name], device, count) for (name, device), count in counts.items()]
    layout = Layout.of(parts, over="nodes" if job.over == "nodes" else "ranks")
    order = [
        rank
        for part in layout.parts
        for rank, (host, device) in enumerate(places)
        if (host.name, device) == (part.host.name, part.device)
    ]
    return layout, order


def _beside(fleet: Fleet, job: Job, run: LoggedRun, hidden: float) -> tuple[float, float] | None:
    """Return the share of the exchange that backward passes hid, and what a step took beside it.

    What a step took beyond the usual longest of the ranks' own work was not hidden, and what it
    took beyond the exchange that is left is the engine's, the optimizer's and the script's: with
    both a plan for the log's ranks takes as long as they took.

    Args:
        hidden: the share that counts where it is typed, or the exchange is too short to tell one.

    Returns:
        None where a log does not tell.
    """
    if len(run.times) < run.num_ranks:
        return None
    try:
        layout = layout_of(fleet, job, run)[0]
        sent = exchange(fleet, replace(job, hidden_share=1.0, rest_s=0.0), layout)
    except PlanError:
        return None
    wall_s = statistics.median(each.typical_wall_s for each in run.times.values())
    beyond_s = max(wall_s - usual_longest(run), 0.0)
    least_s = sent.exposed_s  # where all is hidden that can be
    if job.hidden_share is None and sent.seconds >= _TELLING * wall_s:
        share = 1.0 - (beyond_s - least_s) / (sent.seconds - least_s)
        hidden = min(max(share, 0.0), 1.0)
    exposed_s = least_s + (1.0 - hidden) * (sent.seconds - least_s)
    return hidden, max(beyond_s - exposed_s, 0.0)


def usual_longest(run: LoggedRun) -> float:
    """Return the usual longest of a log's ranks' own work."""
    times = run.times.values()
    busy = np.array([each.busy_s for each in times])
    variance = np.array([max(each.busy_s2 - each.busy_s**2, 0.0) for each in times])
    if not variance.any():
        return float(busy.max())
    return float(typical_longest(busy, np.sqrt(variance), _skew(times))[0])
