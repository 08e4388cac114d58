"""Scenarios: a cluster, a data set and what happens to them, read from TOML and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.policies import POLICIES
from loft_hvd.errors import ArgumentError

__all__ = ["Event", "Ranks", "Scenario"]

Floats = npt.NDArray[np.float64]
Value = float | Sequence[float] | Mapping[str, Sequence[float]]

_PARTS = ("fetch", "compute", "both")
_REPORTS = ("half", "double", "constant", "nan", "drift")
_KINDS = ("change", "wave", "interference", "lie")


@dataclass(frozen=True)
class Ranks:
    """What each rank is like: a number for all, a list, or {cycle, uniform, loguniform = [...]}.

    Attributes:
        compute_s: seconds of compute a sample.
        compute_fixed_s: seconds of compute a step beside it.
        saturation: samples below which compute gets no cheaper; 0 for a CPU.
        fetch_fixed_s: seconds of fetch a step that do not depend on the batch.
        local_bytes_per_s: rate of the rank's own store.
        remote_bytes_per_s: rate of the rank's own link.
        remote_latency_s: seconds a remote sample takes beside its bytes.
        overlap: share of the shorter of fetch and compute that is hidden, 0 serial, 1 prefetched.
        local_share: share of the data set that the rank holds; the rest of 1 is on no rank.
        cache_samples: samples that the rank keeps once it has fetched them.
        source: name of the shared source behind the rank's remote samples, "" for none.
    """

    compute_s: Value = 1e-3
    compute_fixed_s: Value = 0.0
    saturation: Value = 0.0
    fetch_fixed_s: Value = 0.0
    local_bytes_per_s: Value = 500e6
    remote_bytes_per_s: Value = 125e6
    remote_latency_s: Value = 0.0
    overlap: Value = 0.0
    local_share: Value | None = None
    cache_samples: Value = 0.0
    source: str | Sequence[str] = ""


@dataclass(frozen=True)
class Event:
    """Something that happens to some ranks.

    Attributes:
        kind: "change" (for good or until ``to_step``), "wave" (a sine), "interference" (random
            bursts), or "lie" (wrong reports, right work).
        ranks: which ranks.
        part: "fetch", "compute" or "both".
        factor: time is multiplied by this; a wave swings between 1 and it.
        from_step: first step of it.
        to_step: step after the last one; 0 for the end of the run.
        ramp_steps: steps over which a change sets in.
        period_steps: length of a wave.
        busy_steps: average length of a burst.
        quiet_steps: average length of the pause between bursts.
        is_visible: bursts show in the CPU use that ranks report.
        report: what a liar reports: "half", "double", "constant", "nan", or "drift" (ever less).
    """

    kind: str
    ranks: tuple[int, ...]
    part: str = "both"
    factor: float = 2.0
    from_step: int = 0
    to_step: int = 0
    ramp_steps: int = 0
    period_steps: int = 400
    busy_steps: int = 40
    quiet_steps: int = 80
    is_visible: bool = True
    report: str = "half"


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Attributes:
        name: of the scenario.
        world_size: number of ranks.
        global_batch_size: samples of all ranks in a step.
        description: what it shows.
        seed: of noise, events, drawn values and the sampler.
        steps: steps to run.
        interval: steps between two exchanges of times.
        num_samples: samples of the data set.
        sample_bytes: bytes of a sample.
        aggregate_s: seconds that aggregation adds to the slowest rank.
        min_batch: least samples of a rank.
        max_batch: most samples of a rank, a number or one a rank; 0 for no limit.
        grain: sizes are multiples of it.
        noise: relative standard deviation of each fetch and compute time.
        sampler: "locality" (home first) or "blind" (slices of the global batch).
        draws: "sampled" (the real sampler's counts) or "expected" (each rank's average share).
        policies: names, or lists of every rank's samples.
        knows_sources: LOFT is told which ranks share a source.
        first_steps: steps at new sizes that are slower.
        first_steps_factor: compute time of those steps is multiplied by this.
        ranks: what each rank is like.
        sources: bytes a second of each shared source.
        events: what happens.
    """

    name: str
    world_size: int
    global_batch_size: int
    description: str = ""
    seed: int = 0
    steps: int = 1000
    interval: int = 20
    num_samples: int = 51_200
    sample_bytes: float = 110e3
    aggregate_s: float = 0.0
    min_batch: int = 2
    max_batch: int | Sequence[int] = 0
    grain: int = 1
    noise: float = 0.0
    sampler: str = "locality"
    draws: str = "sampled"
    policies: tuple[str | tuple[int, ...], ...] = ("uniform", "lbbsp-cpu", "lbbsp-gpu", "loft")
    knows_sources: bool = True
    first_steps: int = 0
    first_steps_factor: float = 1.0
    ranks: Ranks = field(default_factory=Ranks)
    sources: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        for what, least in (
            ("world_size", 1),
            ("global_batch_size", self.world_size),
            ("seed", 0),
            ("steps", 1),
            ("interval", 1),
            ("num_samples", self.global_batch_size),
            ("min_batch", 1),
            ("grain", 1),
            ("first_steps", 0),
        ):
            self._check_number(what, getattr(self, what), least, kind=Integral)
        for what in ("noise", "sample_bytes", "aggregate_s", "first_steps_factor"):
            self._check_number(what, getattr(self, what), 0)
        limits = self.max_batch if isinstance(self.max_batch, list | tuple) else [self.max_batch]
        for limit in limits:
            self._check_number("max_batch", limit, 0, kind=Integral)
        self._check_ranks()
        _check_choice(self, "sampler", ("locality", "blind"))
        _check_choice(self, "draws", ("sampled", "expected"))
        for policy in self.policies:
            if isinstance(policy, str) and policy not in POLICIES:
                raise ArgumentError(
                    f"scenario {self.name!r}: policy {policy!r} is not one of {list(POLICIES)}"
                )
        for event in self.events:
            self._check_event(event)

    def _check_number(
        self, what: str, value: object, least: float, *, kind: type = Real, is_open: bool = False
    ) -> None:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not least <= value < math.inf or (is_open and value == least):  # type: ignore[operator] # a number by now
            noun = "whole number" if kind is Integral else "number"
            sign = ">" if is_open else ">="
            raise ArgumentError(
                f"scenario {self.name!r}: {what}={value!r} must be a {noun} {sign} {least}"
            )

    def _check_ranks(self) -> None:
        where = f"scenario {self.name!r}: ranks"
        for item in fields(Ranks):
            if item.name == "source":
                continue
            values = self.values(item.name)
            if item.name.endswith("_bytes_per_s") and not (values > 0).all():
                raise ArgumentError(f"{where}.{item.name} must be > 0, but is {values}")
            if item.name == "overlap" and not (values <= 1).all():
                raise ArgumentError(f"{where}.overlap must be in [0, 1], but is {values}")
        for name, rate in self.sources.items():
            self._check_number(f"bytes_per_s of source {name!r}", rate, 0, is_open=True)
        if not isinstance(self.ranks.source, Sequence):
            raise ArgumentError(f"{where}.source={self.ranks.source!r} must be a name or names")
        names = self.source_names()
        if len(names) != self.world_size:
            raise ArgumentError(
                f"{where}.source has {len(names)} names for world_size={self.world_size}"
            )
        for rank, name in enumerate(names):
            if name and name not in self.sources:
                raise ArgumentError(
                    f"scenario {self.name!r}: rank {rank} reads from source {name!r}, but "
                    f"[[sources]] has {sorted(self.sources)}"
                )

    def _check_event(self, event: Event) -> None:
        for rank in event.ranks:
            self._check_number("event ranks: rank", rank, 0, kind=Integral)
        for item in fields(Event):
            if item.name.endswith("_step") or item.name.endswith("_steps"):
                what = f"event {item.name}"
                self._check_number(what, getattr(event, item.name), 0, kind=Integral)
        self._check_number("event factor", event.factor, 0)
        outside = [rank for rank in event.ranks if not 0 <= rank < self.world_size]
        wrong = [
            f"{what}={value!r} is not one of {list(known)}"
            for what, value, known in (
                ("kind", event.kind, _KINDS),
                ("part", event.part, _PARTS),
                ("report", event.report, _REPORTS),
            )
            if value not in known
        ]
        if outside:
            wrong.append(f"ranks {outside} are not in 0..{self.world_size - 1}")
        if event.factor <= 0 or min(event.period_steps, event.busy_steps, event.quiet_steps) < 1:
            wrong.append("factor must be > 0, and period, busy and quiet steps >= 1")
        if wrong:
            raise ArgumentError(f"scenario {self.name!r}: event {event}: {'; '.join(wrong)}")

    def source_names(self) -> tuple[str, ...]:
        """Return the name of each rank's shared source, [world_size], "" for none."""
        names = self.ranks.source
        return (names,) * self.world_size if isinstance(names, str) else tuple(names)

    def values(self, what: str) -> Floats:
        """Return a field of ``ranks`` for every rank, [world_size]; random ones from the seed."""
        value = getattr(self.ranks, what)
        if value is None:
            return np.full(self.world_size, 1.0 / self.world_size)
        place = [item.name for item in fields(Ranks)].index(what)
        rng = np.random.default_rng([self.seed, place])
        where = f"scenario {self.name!r}: ranks.{what}"
        try:
            with np.errstate(all="ignore"):
                drawn = _spread(value, self.world_size, rng, where)
        except ArgumentError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{where}={value!r}: {error}; give numbers") from error
        if not np.isfinite(drawn).all() or (drawn < 0).any():
            raise ArgumentError(
                f"scenario {self.name!r}: ranks.{what} must be finite and >= 0, but is {drawn}"
            )
        return drawn


def _check_choice(scenario: Scenario, what: str, known: tuple[str, ...]) -> None:
    if getattr(scenario, what) not in known:
        raise ArgumentError(
            f"scenario {scenario.name!r}: {what}={getattr(scenario, what)!r} must be one of "
            f"{list(known)}"
        )


def _spread(value: Value, world_size: int, rng: np.random.Generator, where: str) -> Floats:
    if isinstance(value, Mapping):
        kind, numbers = next(iter(value.items())) if len(value) == 1 else ("", ())
        if kind == "cycle" and len(numbers):
            cycled: Floats = np.resize(np.asarray(numbers, dtype=np.float64), world_size)
            return cycled
        if kind in ("uniform", "loguniform") and len(numbers) == 2:
            low, high = numbers
            if kind == "uniform":
                return rng.uniform(low, high, world_size)
            logs: Floats = np.exp(rng.uniform(np.log(low), np.log(high), world_size))
            return logs
        raise ArgumentError(
            f"{where}={dict(value)} must be a number, a list of {world_size}, {{cycle = [...]}}, "
            "{uniform = [low, high]} or {loguniform = [low, high]}"
        )
    array = np.asarray(value, dtype=np.float64)
    if array.shape not in ((), (world_size,)):
        raise ArgumentError(f"{where} has {array.size} values for world_size={world_size}")
    given: Floats = np.broadcast_to(array, world_size).copy()
    return given
