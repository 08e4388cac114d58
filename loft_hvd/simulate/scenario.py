"""Scenarios: a cluster, a data set and what happens to them, read from TOML and checked.

docs/simulate.md has the schema for users; a wrong key, a missing one or a value outside its limits
is an error that names it.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.plan import MIN_BATCH
from loft_hvd.balance.policies import POLICIES
from loft_hvd.errors import ArgumentError
from loft_hvd.toml import read_toml

__all__ = [
    "Event",
    "RankTraits",
    "Scenario",
    "read_scenario",
    "scenario_from_dict",
    "shipped_scenarios",
]

Floats = npt.NDArray[np.float64]
Value = float | Sequence[float] | Mapping[str, Sequence[float]]

# What words may stand in a scenario.
_CHOICES = {"sampler": ("locality", "blind"), "draws": ("sampled", "expected")}
_EVENT_CHOICES = {
    "kind": ("change", "wave", "interference", "lie"),
    "part": ("fetch", "compute", "both"),
    "report": ("half", "double", "constant", "nan", "drift"),
}

# Limits of a run on one machine: arrays of some hundred MB. Real numbers stay below what a product
# of three cannot hold.
_MOST_RANKS, _MOST_STEPS, _MOST_SAMPLES, _MOST = 100_000, 10_000_000, 100_000_000, 1e100


@dataclass(frozen=True)
class RankTraits:
    """What each rank is like: a number for all, a list, or {cycle, uniform, loguniform = [...]}."""

    compute_s: Value = 1e-3  # of compute, a sample
    compute_fixed_s: Value = 0.0  # and a step
    saturation: Value = 0.0  # samples below which compute gets no cheaper; 0 for a CPU
    fetch_fixed_s: Value = 0.0  # of fetch, a step
    local_bytes_per_s: Value = 500e6  # of the rank's own store
    remote_bytes_per_s: Value = 125e6  # of the rank's own link, a gigabit
    remote_latency_s: Value = 0.0  # a remote sample, beside its bytes
    overlap: Value = 0.0  # share of the shorter of fetch and compute that is hidden
    local_share: Value | None = None  # of the data set; the rest of 1 is on no rank
    cache_samples: Value = 0.0  # that the rank keeps once it has fetched them
    source: str | Sequence[str] = ""  # shared, behind the rank's remote samples; "" for none
    hiccup_probability: Value = 0.0  # that a step of the rank is a hiccup: a page-cache miss,
    hiccup_factor: Value = 8.0  # whose fetch and compute take so many times as long
    stall_probability: Value = 0.0  # that the rank stands still in a step,
    stall_s: Value = 1.0  # for so long on average, exponentially distributed; part of its compute
    # A table of seconds by batch in place of the first three, one for all or one a rank: a CSV
    # file, or the name of a shipped one; "" for none.
    curve: str | Sequence[str] = ""


@dataclass(frozen=True)
class Event:
    """Something that happens to some ranks.

    "change" is for good or until ``to_step``, "wave" a sine, "interference" random bursts, and
    "lie" wrong reports of right work.
    """

    kind: str
    ranks: tuple[int, ...]
    part: str = "both"  # of the work: fetch, compute or both
    factor: float = 2.0  # on the time; a wave swings between 1 and it
    from_step: int = 0
    to_step: int = 0  # the step after the last one; 0 for the end of the run
    ramp_steps: int = 0  # over which a change sets in
    period_steps: int = 400  # of a wave
    busy_steps: int = 40  # average length of a burst
    quiet_steps: int = 80  # and of the pause between two
    is_visible: bool = True  # bursts show in the CPU use that ranks report
    report: str = "half"  # what a liar reports of its times; "drift" is ever less


@dataclass(frozen=True)
class Scenario:
    """A run to simulate."""

    name: str
    world_size: int
    global_batch_size: int
    description: str = ""
    seed: int = 0  # of noise, events, drawn values and the sampler
    steps: int = 1000
    interval: int = 20  # steps between two exchanges of times
    num_samples: int = 51_200
    sample_bytes: float = 110e3  # an ImageNet photograph
    aggregate_s: float = 0.0  # added to the slowest rank
    min_batch: int = MIN_BATCH
    max_batch: int | Sequence[int] = 0  # one number or one a rank; 0 for no limit
    grain: int = 1
    max_sizes: int = 0  # distinct sizes that a rank may have; 0 for any number
    noise: float = 0.0  # relative standard deviation of each fetch and compute time
    noise_tail: float = 0.0  # Pareto index of the noise: above 2, heavier if smaller; 0 log-normal
    sampler: str = "locality"  # home first; "blind" takes slices of the global batch
    draws: str = "sampled"  # the real sampler's counts; "expected" is each rank's average
    policies: tuple[str | tuple[int, ...], ...] = ("uniform", "lbbsp-cpu", "lbbsp-gpu", "loft")
    store: bool = False  # ranks keep ``cache_samples`` in a sample store, and owners follow it
    knows_sources: bool = True  # LOFT is told which ranks share a source
    first_steps: int = 0  # at new sizes that are slower
    first_steps_factor: float = 1.0  # and by how much: on their compute time
    ranks: RankTraits = field(default_factory=RankTraits)
    sources: Mapping[str, float] = field(default_factory=dict)  # bytes a second of each
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        self._check_number("world_size", self.world_size, 1, _MOST_RANKS, kind=Integral)
        for what, least, most in (
            ("global_batch_size", self.world_size, _MOST_SAMPLES),
            ("seed", 0, math.inf),
            ("steps", 1, _MOST_STEPS // self.world_size),
            ("interval", 1, _MOST_STEPS),
            ("num_samples", self.global_batch_size, _MOST_SAMPLES),
            ("min_batch", 1, _MOST_SAMPLES),
            ("grain", 1, _MOST_SAMPLES),
            ("max_sizes", 0, _MOST_SAMPLES),
            ("first_steps", 0, _MOST_STEPS),
        ):
            self._check_number(what, getattr(self, what), least, most, kind=Integral)
        for what in ("noise", "sample_bytes", "aggregate_s", "first_steps_factor", "noise_tail"):
            self._check_number(what, getattr(self, what), 0)
        if self.noise_tail and (self.noise_tail <= 2 or self.noise >= 1):
            raise ArgumentError(
                f"scenario {self.name!r}: noise_tail={self.noise_tail} with noise={self.noise} "
                "must be 0 (log-normal), or above 2 with noise below 1: else the noise has no "
                "standard deviation, or times fall below 0"
            )
        is_list = isinstance(self.max_batch, list | tuple)
        limits: Any = self.max_batch if is_list else [self.max_batch]
        for limit in limits:
            self._check_number("max_batch", limit, 0, _MOST_SAMPLES, kind=Integral)
        self._check_ranks()
        for what, known in _CHOICES.items():
            if getattr(self, what) not in known:
                raise ArgumentError(
                    f"scenario {self.name!r}: {what}={getattr(self, what)!r} must be one of "
                    f"{list(known)}"
                )
        if self.store and (self.sampler, self.draws) != ("locality", "sampled"):
            raise ArgumentError(
                f"scenario {self.name!r}: store=true with sampler={self.sampler!r} and "
                f"draws={self.draws!r}: owners follow a store only where sampler is 'locality' "
                "and draws is 'sampled'"
            )
        for policy in self.policies:
            if isinstance(policy, str) and policy not in POLICIES:
                raise ArgumentError(
                    f"scenario {self.name!r}: policy {policy!r} is not one of {list(POLICIES)}"
                )
        for event in self.events:
            self._check_event(event)

    def _check_types(self) -> None:
        """Raise unless words are words and switches are switches, here and in events."""
        parts: tuple[Any, ...] = (self, *self.events)
        for part in parts:
            for item in fields(part):
                # Annotations are text here: they come from __future__.
                kind = {"str": str, "bool": bool}.get(str(item.type), object)
                if not isinstance(getattr(part, item.name), kind):
                    what = f"scenario {reprlib.repr(self.name)}: {item.name}"
                    value = reprlib.repr(getattr(part, item.name))
                    raise ArgumentError(f"{what}={value} must be a {kind.__name__}")

    def _check_number(
        self,
        what: str,
        value: object,
        least: float,
        most: float = _MOST,
        *,
        kind: type = Real,
        is_open: bool = False,
    ) -> None:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (is_open and value == least):  # type: ignore[operator] # a number by now
            noun = "whole number" if kind is Integral else "number"
            sign = ">" if is_open else ">="
            top = f" and <= {most:g}" if is_number and math.isfinite(most) else ""
            raise ArgumentError(
                f"scenario {self.name!r}: {what}={reprlib.repr(value)} must be a {noun} {sign} "
                f"{least}{top}"
            )

    def _check_ranks(self) -> None:
        where = f"scenario {self.name!r}: ranks"
        for item in fields(RankTraits):
            if item.name in ("source", "curve"):
                continue
            values = self.values(item.name)
            if item.name.endswith("_bytes_per_s") and not (values > 0).all():
                raise ArgumentError(f"{where}.{item.name} must be > 0, but is {values}")
            is_share = item.name == "overlap" or item.name.endswith("_probability")
            if is_share and not (values <= 1).all():
                raise ArgumentError(f"{where}.{item.name} must be in [0, 1], but is {values}")
        for name, rate in self.sources.items():
            self._check_number(f"bytes_per_s of source {name!r}", rate, 0, is_open=True)
        for what in ("source", "curve"):
            given = getattr(self.ranks, what)
            if not isinstance(given, Sequence):
                raise ArgumentError(f"{where}.{what}={given!r} must be a name or names")
            names = self.names(what)
            if not all(isinstance(name, str) for name in names):
                raise ArgumentError(f"{where}.{what}={reprlib.repr(names)}: each must be a name")
            if len(names) != self.world_size:
                raise ArgumentError(
                    f"{where}.{what} has {len(names)} names for world_size={self.world_size}"
                )
        for rank, name in enumerate(self.names("source")):
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
                self._check_number(what, getattr(event, item.name), 0, _MOST_STEPS, kind=Integral)
        self._check_number("event factor", event.factor, 0, 1e6)
        outside = [rank for rank in event.ranks if not 0 <= rank < self.world_size]
        wrong = [
            f"{what}={getattr(event, what)!r} is not one of {list(known)}"
            for what, known in _EVENT_CHOICES.items()
            if getattr(event, what) not in known
        ]
        if outside:
            wrong.append(f"ranks {outside} are not in 0..{self.world_size - 1}")
        if event.factor <= 0 or min(event.period_steps, event.busy_steps, event.quiet_steps) < 1:
            wrong.append("factor must be > 0, and period, busy and quiet steps >= 1")
        if wrong:
            raise ArgumentError(f"scenario {self.name!r}: event {event}: {'; '.join(wrong)}")

    def names(self, what: str) -> tuple[str, ...]:
        """Return a field of ``ranks`` that names something, of every rank, "" for none."""
        names = getattr(self.ranks, what)
        return (names,) * self.world_size if isinstance(names, str) else tuple(names)

    def values(self, what: str) -> Floats:
        """Return a field of ``ranks`` for every rank, [world_size]; random ones from the seed."""
        value = getattr(self.ranks, what)
        if value is None:
            return np.full(self.world_size, 1.0 / self.world_size)
        place = [item.name for item in fields(RankTraits)].index(what)
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


def _spread(value: Value, world_size: int, rng: np.random.Generator, where: str) -> Floats:
    if isinstance(value, Mapping):
        kind, numbers = next(iter(value.items())) if len(value) == 1 else ("", ())
        if kind == "cycle" and len(numbers):
            cycled: Floats = np.resize(np.asarray(numbers, dtype=np.float64), world_size)
            return cycled
        if kind in ("uniform", "loguniform") and len(numbers) == 2:
            low, high = map(float, numbers)  # no lists: NumPy has words of its own for deep ones
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


def shipped_scenarios() -> dict[str, Path]:
    """Return the scenario files that come with the package, by name."""
    folder = Path(__file__).parent / "scenarios"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Read a scenario, a file or the name of a shipped one.

    Raises:
        ArgumentError: it is not TOML, or not of the schema.
        OSError: it cannot be read.
    """
    if not os.path.exists(path):
        path = shipped_scenarios().get(os.fspath(path), path)
    return scenario_from_dict(read_toml(path, what="scenario"), where=os.fspath(path))


def scenario_from_dict(content: Mapping[str, Any], *, where: str = "scenario") -> Scenario:
    """Build a scenario from the tables of a scenario file; a wrong key is an error."""
    if not isinstance(content, Mapping):
        raise ArgumentError(f"{where} is of type {type(content).__name__}; give a table")
    values = dict(content)
    sources = _tables(values, "sources", where)
    for source in sources:
        _check_keys(source, {"name", "bytes_per_s"}, f"{where}: [[sources]]", least=2)
    ranks = values.pop("ranks", {})
    if not isinstance(ranks, Mapping):
        raise ArgumentError(f"{where}: ranks={ranks!r} must be a table, [ranks]")
    _check_keys(ranks, {item.name for item in fields(RankTraits)}, f"{where}: [ranks]")
    events = _tables(values, "events", where)
    for event in events:
        _check_keys(event, {item.name for item in fields(Event)}, f"{where}: [[events]]")
        if not {"kind", "ranks"} <= set(event):
            raise ArgumentError(f"{where}: [[events]] {event} needs kind and ranks")
        if not isinstance(event["ranks"], list):
            raise ArgumentError(
                f"{where}: [[events]] ranks={event['ranks']!r} must be a list, such as [0, 3]"
            )
        event["ranks"] = tuple(event["ranks"])
    known = {item.name for item in fields(Scenario)} - {"ranks", "sources", "events"}
    _check_keys(values, known, where)
    needed = [
        item.name for item in fields(Scenario) if item.default is item.default_factory is MISSING
    ]
    needed = [name for name in needed if name not in values and name in known]
    if needed:
        raise ArgumentError(f"{where}: {needed} must be given")
    if "policies" in values:
        values["policies"] = _policies(values["policies"], where)
    return Scenario(
        **values,
        ranks=RankTraits(**ranks),
        sources={str(source["name"]): source["bytes_per_s"] for source in sources},
        events=tuple(Event(**event) for event in events),
    )


def _tables(values: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    tables = values.pop(key, [])
    if not isinstance(tables, list) or not all(isinstance(entry, Mapping) for entry in tables):
        raise ArgumentError(f"{where}: {key}={tables!r} must be tables, [[{key}]]")
    return [dict(entry) for entry in tables]


def _policies(given: object, where: str) -> tuple[str | tuple[int, ...], ...]:
    found: list[str | tuple[int, ...]] = []
    for item in given if isinstance(given, list) else [None]:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and all(type(size) is int for size in item):
            found.append(tuple(item))
        else:
            raise ArgumentError(
                f"{where}: policies={given!r} must be a list of names and of lists with every "
                'rank\'s samples, such as ["loft", [32, 16]]'
            )
    return tuple(found)


def _check_keys(table: Mapping[str, Any], known: set[str], where: str, *, least: int = 0) -> None:
    unknown = sorted(set(table) - known, key=repr)  # not all need be text
    if unknown or len(table) < least:
        raise ArgumentError(f"{where}: {unknown or 'a key is missing'}; keys are {sorted(known)}")
