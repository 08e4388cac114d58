"""From a scenario to the cluster and the local samples of its every step."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.latency import StepModel
from loft_hvd.data.assign import count_local, count_rows
from loft_hvd.data.draws import EpochSettings
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.errors import ArgumentError
from loft_hvd.simulate.cluster import Chance, Cluster, Disturbance
from loft_hvd.simulate.curves import MeasuredModel, read_table
from loft_hvd.simulate.scenario import Event, Scenario

__all__ = ["Draws", "build_cluster", "build_placement"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def build_placement(scenario: Scenario) -> Placement:
    """Cut the data set by ``local_share``; what is left of it is on no rank."""
    # Rank 0 holds samples 0..edges[0]-1, rank 1 those up to edges[1]-1, the store what is left.
    edges = np.cumsum(scenario.values("local_share")) * scenario.num_samples  # [world_size]
    if edges[-1] > scenario.num_samples * (1 + 1e-9):  # replicated shares: every rank holds all
        return Placement.replicated(scenario.num_samples)
    edges = np.rint(edges).astype(np.int64)
    homes = np.searchsorted(edges, np.arange(scenario.num_samples), side="right")
    sets = [HomeSet.parse(rank) for rank in range(scenario.world_size)]
    return Placement(homes.astype(np.int32), (*sets, HomeSet.parse("shared:store")))


class Draws:
    """Local samples of each step, from the real sampler's order and assignment.

    With ``draws = "expected"`` each step holds every rank's average share.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        placement = build_placement(scenario)
        self._homes = placement.at(scenario.world_size)
        self._settings = EpochSettings(
            placement, shuffle=True, seed=scenario.seed, drop_last=True, relaxed=False
        )
        self._per_epoch = scenario.num_samples // scenario.global_batch_size
        self._counts: dict[int, Ints] = {}  # of each epoch; every policy goes through all again
        self._newest: tuple[int, npt.NDArray[np.int32]] | None = None  # an epoch and its rows
        self.average_hits = self._average_hits()

    def _average_hits(self) -> Floats:
        holders = self._homes.local.holders  # [kinds of homes, world_size]: who holds their samples
        if holders.all():
            return np.full(self._scenario.world_size, np.inf)
        share = np.bincount(self._homes.rows, minlength=len(holders)) / len(self._homes.rows)
        hits: Floats = self._scenario.global_batch_size * (share @ holders)
        return hits

    def _rows(self, epoch: int) -> npt.NDArray[np.int32]:
        """Return the rows of the epoch's samples in order, [num_samples]."""
        return self._homes.rows[self._settings.order(epoch)]

    def _count(self, epoch: int) -> Ints:
        """Return how many samples of each row every step of an epoch has, [num_steps, num_rows]."""
        if epoch not in self._counts:
            num_rows = len(self._homes.local.holders)
            total = self._scenario.global_batch_size
            self._counts[epoch] = count_rows(self._rows(epoch), num_rows, batch_size=total)
        return self._counts[epoch]

    def _blind_rows(self, epoch: int) -> npt.NDArray[np.int32]:
        """Return what ``_rows`` does; only the newest epoch is kept, as it is large."""
        if self._newest is None or self._newest[0] != epoch:
            self._newest = epoch, self._rows(epoch)
        return self._newest[1]

    def local(self, first: int, last: int, sizes: Ints) -> Floats:
        """Return local samples of steps first..last-1 with a plan, [steps, world_size]."""
        if self._scenario.draws == "expected":
            share = self.average_hits / self._scenario.global_batch_size
            blind = np.minimum(share, 1.0) * sizes
            home = np.minimum(sizes, self.average_hits)
            expected = home if self._scenario.sampler == "locality" else blind
            return np.broadcast_to(expected, (last - first, len(sizes)))
        parts = []  # a part an epoch: each has an order of samples of its own
        step = first
        while step < last:
            epoch, at = divmod(step, self._per_epoch)
            until = min(self._per_epoch, at + last - step)
            if self._scenario.sampler == "locality":
                parts.append(count_local(self._count(epoch)[at:until], sizes, self._homes))
            else:
                parts.append(self._count_blind(self._blind_rows(epoch), at, until, sizes))
            step += until - at
        return np.concatenate(parts).astype(np.float64)

    def _count_blind(self, rows: npt.NDArray[np.int32], at: int, until: int, sizes: Ints) -> Ints:
        """Count what happens to be local when ranks take slices of the global batch."""
        total = self._scenario.global_batch_size
        batches = rows[at * total : until * total].reshape(until - at, total)  # [steps, samples]
        # Sizes (2, 0, 3) make owners (0, 0, 2, 2, 2) and slices that start at (0, 2, 2). Between
        # equal starts reduceat gives one value instead of an empty sum: those are set to 0.
        owners = np.repeat(np.arange(len(sizes)), sizes)  # [samples]
        is_local = self._homes.local.holders[batches, owners]  # [steps, samples]
        starts = np.minimum(np.cumsum(sizes) - sizes, total - 1)  # [world_size]
        counts: Ints = np.add.reduceat(is_local.astype(np.int64), starts, axis=1)
        return np.where(sizes > 0, counts, 0)


def build_cluster(scenario: Scenario, average_hits: Floats) -> Cluster:
    """Make the cluster of a scenario; ``average_hits`` [world_size] as ``Draws`` knows them."""
    size_bytes, value = scenario.sample_bytes, scenario.values
    names = scenario.names("source")
    known = sorted(scenario.sources)
    source = np.array([known.index(name) if name else -1 for name in names])
    shared_s = [size_bytes / scenario.sources[name] if name else 0.0 for name in names]
    is_blind = scenario.sampler == "blind"
    share = np.minimum(average_hits / scenario.global_batch_size, 1.0)
    fixed, per_sample = value("compute_fixed_s"), value("compute_s")
    # A shared source's rate takes the place of the rank's own link.
    own_s = size_bytes / value("remote_bytes_per_s")
    model = StepModel.build(
        scenario.world_size,
        aggregate_s=scenario.aggregate_s,
        fetch_fixed_s=value("fetch_fixed_s"),
        local_s=size_bytes / value("local_bytes_per_s"),
        remote_s=value("remote_latency_s") + np.where(source >= 0, 0.0, own_s),
        shared_s=shared_s,
        hit_share=share if is_blind else 1.0,
        hits=np.inf if is_blind else average_hits,
        compute_fixed_s=fixed,
        compute_s=per_sample,
        plateau_s=np.where(value("saturation") > 0, fixed + per_sample * value("saturation"), 0.0),
        overlap=value("overlap"),
        source=source,
    )
    if any(scenario.names("curve")):
        model = _measured(model, scenario)
    return Cluster(
        model,
        _disturb(scenario),
        Chance(
            noise=scenario.noise,
            tail=scenario.noise_tail,
            hiccups=(value("hiccup_probability"), value("hiccup_factor")),
            stalls=(value("stall_probability"), value("stall_s")),
            seed=scenario.seed,
        ),
        slow_start=(scenario.first_steps, scenario.first_steps_factor),
    )


def _measured(model: StepModel, scenario: Scenario) -> MeasuredModel:
    """Return the model of ranks that all compute as tables say."""
    names = scenario.names("curve")
    if not all(names):
        raise ArgumentError(
            f"scenario {scenario.name!r}: ranks.curve={names!r} must name a table for every rank, "
            "or for none"
        )
    tables = {name: read_table(name) for name in set(names)}
    terms = {item.name: getattr(model, item.name) for item in fields(model) if item.init}
    terms["compute_s"] = np.ones(scenario.world_size)
    return MeasuredModel(**terms, tables=tuple(tables[name] for name in names))


def _disturb(scenario: Scenario) -> Disturbance:
    shape = (scenario.steps, scenario.world_size)
    one, zero = np.broadcast_to(1.0, shape), np.broadcast_to(0.0, shape)  # take no memory
    plain = Disturbance(one, one, zero, one)
    for number, event in enumerate(scenario.events):
        # A generator an event: one more at the end leaves the others as they were.
        rng = np.random.default_rng([scenario.seed, 1000 + number])
        plain = _lie(plain, event) if event.kind == "lie" else _slow(plain, event, rng)
    return plain


def _slow(plain: Disturbance, event: Event, rng: np.random.Generator) -> Disturbance:
    factors = np.stack([_course(event, len(plain.fetch), rng) for _ in event.ranks], axis=1)
    ranks = list(event.ranks)
    changed = {}
    for part, course in (("fetch", plain.fetch), ("compute", plain.compute)):
        if event.part in (part, "both"):
            changed[part] = course.copy()
            changed[part][:, ranks] *= factors
    if event.kind == "interference" and event.is_visible:
        changed["use"] = plain.use.copy()
        used = np.clip(1.0 - 1.0 / np.maximum(factors, 1.0), 0.0, 1.0)
        changed["use"][:, ranks] = np.maximum(changed["use"][:, ranks], used)
    return replace(plain, **changed)


def _course(event: Event, num_steps: int, rng: np.random.Generator) -> Floats:
    """Return the factor of one rank at each step, [num_steps]."""
    step = np.arange(num_steps, dtype=np.float64)
    if event.kind == "wave":
        swing = 0.5 - 0.5 * np.cos(2 * np.pi * (step - event.from_step) / event.period_steps)
        course = event.factor**swing
    elif event.kind == "interference":
        # Quiet and busy spells in turn, more than enough: busy after an odd number of switches.
        lengths = rng.exponential(np.resize([event.quiet_steps, event.busy_steps], 2 * num_steps))
        switches = np.cumsum(np.maximum(lengths, 1.0))
        busy = np.searchsorted(switches, step - event.from_step, side="right") % 2 == 1
        course = np.where(busy, event.factor, 1.0)
    else:
        ramp = np.clip((step - event.from_step) / max(event.ramp_steps, 1), 0.0, 1.0)
        ramp = ramp if event.ramp_steps else (step >= event.from_step).astype(np.float64)
        course = event.factor**ramp
    is_on = (step >= event.from_step) & ((event.to_step == 0) | (step < event.to_step))
    return np.where(is_on, course, 1.0)


def _lie(plain: Disturbance, event: Event) -> Disturbance:
    step = np.arange(len(plain.report), dtype=np.float64)
    length = max((event.to_step or len(step)) - event.from_step, 1)
    # What reported times are multiplied by; 0 stands for the very first report, repeated.
    drifting: Floats = 0.25 ** np.clip((step - event.from_step) / length, 0.0, 1.0)
    fixed = {"half": 0.5, "double": 2.0, "constant": 0.0, "nan": np.nan}
    told = np.full_like(step, fixed[event.report]) if event.report in fixed else drifting
    is_on = (step >= event.from_step) & ((event.to_step == 0) | (step < event.to_step))
    report, ranks = plain.report.copy(), list(event.ranks)
    report[:, ranks] = np.where(is_on[:, None], told[:, None], report[:, ranks])
    return replace(plain, report=report)
