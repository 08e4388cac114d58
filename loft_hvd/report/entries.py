"""The lines of a run log as what they say: read once, by types, before anything is made of them.

A log comes from anywhere: another version, a crash, a stranger. What is not of these types is a
DataError; keys that are not known are passed over, as a newer version may write them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from loft_hvd.balance.controller import Decision
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.balance.interval import RankTimes
from loft_hvd.balance.turns import Crowd, Turns
from loft_hvd.codec import Count, Within, decode
from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.pipeline.suspicion.report import NotFinite, SameData, WorkerReport
from loft_hvd.transport.datagram import LinkLosses

__all__ = ["DecisionLine", "Explain", "Fault", "FitOfRank", "Fits", "Line", "LinksLine"]
__all__ += ["NoiseLine", "PassCounts", "Plans"]
__all__ += ["Rules", "Run", "Scalars", "ScheduleLine", "SpreadLine", "Store", "StoreReads"]
__all__ += ["SuspicionLine", "Thinned", "Times"]
__all__ += ["newest_of", "of_kind", "read_line", "read_lines"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """What every line has."""

    step: Count  # optimizer steps taken
    time_s: float = math.nan  # since 1970


@dataclass(frozen=True)
class Run(Line):
    """What is trained: written at the start, and in each elastic world."""

    world_size: Annotated[int, Within(1)]
    global_batch_size: Count | None = None
    policy: str | None = None
    times_at: Count | None = None  # the step of the first times; None without a balancer
    num_passes: Annotated[int, Within(1)] | None = None  # batches of an optimizer step
    next_batch: Count | None = None  # the first one of the next step; None in older logs
    devices: list[str] | None = None  # of each rank, host/number and name
    host: str | None = None  # rank 0's
    script: str | None = None
    commit: str | None = None  # of the repository that the script lies in
    version: str | None = None  # of this package

    @property
    def facts(self) -> list[str]:
        """The line in words."""
        facts = [f"{self.world_size} ranks"]
        if self.policy is not None:
            if self.global_batch_size is not None:
                facts.append(f"global_batch_size={self.global_batch_size}")
            facts.append(f"policy {self.policy}")
        return facts


@dataclass(frozen=True)
class ScheduleLine(Line):
    """What was said of a run and has changed, as an optimizer was made or a state loaded."""

    times_at: Count
    num_passes: Annotated[int, Within(1)]
    next_batch: Count | None = None  # as in ``Run``


@dataclass(frozen=True)
class Rules(Line):
    """How an optimizer aggregates gradients, and when workers are first looked at."""

    rules: list[str]
    over: str | None = None  # the ranks of a worker; None where each is one
    watched_from: Count | None = None  # the step; None where nobody is watched
    note: str = ""  # why nobody is


@dataclass(frozen=True)
class Plans(Line):
    """A plan that came into force."""

    plan_id: Count
    first_step: Count  # counted in batches; ``PassCounts`` counts as the other lines do
    sizes: list[Count]


@dataclass(frozen=True)
class Times(Line):
    """Averages of an interval."""

    ranks: list[RankTimes]
    since: Count | None = None  # the step at whose end the interval began
    num_ranks: Count | None = None  # that those in ``ranks`` stand for; None where they are all
    crowd: Crowd | None = None  # ranks that share too few cores
    turns: Turns | None = None  # ranks that are slow by turns

    @property
    def which(self) -> str:
        """Which ranks stand for all, in words; empty where all are there."""
        if self.num_ranks in (None, len(self.ranks)):
            return ""
        return f", {len(self.ranks)} of {self.num_ranks} ranks from the fastest to the slowest"


@dataclass(frozen=True)
class FitOfRank:
    """What a model says of a rank."""

    rank: Count
    predicted_s: float = math.nan  # its own work on a batch of the newest plan


@dataclass(frozen=True)
class Fits(Line):
    """What models say of the interval to come."""

    ranks: list[FitOfRank]
    plan_id: Count | None = None
    predicted_s: float = math.nan  # of a step


@dataclass(frozen=True)
class DecisionLine(Line, Decision):
    """Why a plan was made."""


@dataclass(frozen=True)
class SavedLine(Line):
    """What a plan saved of a step in its first interval."""

    plan_id: Count
    share: float


@dataclass(frozen=True)
class Scalars(Line):
    """What a script says of its training."""

    values: dict[str, float]


@dataclass(frozen=True)
class StoreReads:
    """Samples that a rank has read of a sample store, by where they came from."""

    rank: Count
    own: Count
    peer: Count
    source: Count
    own_bytes: Count = 0
    peer_bytes: Count = 0
    source_bytes: Count = 0

    @property
    def num_samples(self) -> int:
        """All of them."""
        return self.own + self.peer + self.source


@dataclass(frozen=True)
class Store(Line):
    """What ranks read of a sample store in an epoch."""

    epoch: Count
    ranks: list[StoreReads]


@dataclass(frozen=True)
class Explain(Line):
    """The policy's own words."""

    text: str


@dataclass(frozen=True)
class SpreadLine(Line):
    """How far ranks' gradients lie apart for good."""

    ratios: list[float | None]  # None where too little was seen of a rank
    usual: float = math.nan  # the median rank's


@dataclass(frozen=True)
class NoiseLine(Line):
    """How much gradients differ from sample to sample."""

    signal: float
    signal_error: float
    variance: float
    variance_error: float
    num_steps: Count
    scale_error: float | None = None  # None where the scale is infinite
    scale: float | None = None  # likewise

    @property
    def noise(self) -> GradientNoise:
        """What was measured."""
        return GradientNoise(
            signal=self.signal,
            signal_error=self.signal_error,
            variance=self.variance,
            variance_error=self.variance_error,
            scale_error=math.inf if self.scale_error is None else self.scale_error,
            num_steps=self.num_steps,
        )


@dataclass(frozen=True)
class SameDataLine(Line):
    """Which ranks read the same data."""

    groups: list[SameData]


@dataclass(frozen=True)
class NotFiniteLine(Line):
    """Who sent values into a mean that were not finite."""

    found: NotFinite


@dataclass(frozen=True)
class SuspicionLine(Line):
    """What is known of each worker."""

    num_steps: Count
    workers: list[WorkerReport]


@dataclass(frozen=True)
class LinksLine(Line):
    """What links between a rank and others have lost, since the line before."""

    rank: Count
    links: list[LinkLosses]
    since: Count | None = None  # the step of the line before
    seconds: float = math.nan
    num_links: Count | None = None  # of which those in ``links`` lost most

    @property
    def filled_share(self) -> float:
        """Of the values that came to the rank, as the owner of a shard."""
        return sum(each.blocks_filled for each in self.links) / max(
            1, sum(each.blocks for each in self.links)
        )


@dataclass(frozen=True)
class Fault(Line):
    """An error that the run has met, and most often ended by."""

    error: str
    text: str

    def __str__(self) -> str:
        return f"{self.error} at step {self.step}: {self.text}"


@dataclass(frozen=True)
class Thinned(Line):
    """What is not in the log."""

    num_lines: Count

    def __str__(self) -> str:
        return (
            f"{self.num_lines} older lines of times, fits, links, suspicion and scalars were left "
            "out, to keep the log small or because the disk was full"
        )


_KINDS: dict[str, type[Line]] = {
    "run": Run,
    "schedule": ScheduleLine,
    "rules": Rules,
    "plan": Plans,
    "decision": DecisionLine,
    "saved": SavedLine,
    "times": Times,
    "fit": Fits,
    "scalars": Scalars,
    "store": Store,
    "explain": Explain,
    "same_data": SameDataLine,
    "not_finite": NotFiniteLine,
    "noise": NoiseLine,
    "spread": SpreadLine,
    "links": LinksLine,
    "suspicion": SuspicionLine,
    "fault": Fault,
    "thinned": Thinned,
}

LineT = TypeVar("LineT", bound=Line)
PlannedT = TypeVar("PlannedT", Plans, DecisionLine)


def of_kind(kind: type[LineT], read: Sequence[Line]) -> list[LineT]:
    """Return the lines of one kind, in their order."""
    return [line for line in read if isinstance(line, kind)]


def newest_of(kind: type[LineT], read: Sequence[Line]) -> LineT | None:
    """Return the last line of a kind, if any."""
    return next((line for line in reversed(read) if isinstance(line, kind)), None)


class PassCounts:
    """How many batches the optimizer steps of one world had, from its lines: it may change."""

    def __init__(self, world: Sequence[Line]) -> None:
        # From a step on: the step, its first batch, and the batches of each.
        self._stretches = [(0, 0, 1)]
        for line in world:
            if isinstance(line, Run | ScheduleLine) and line.num_passes is not None:
                begins = line.next_batch
                begins = line.step * line.num_passes if begins is None else begins
                while self._stretches and self._stretches[-1][0] >= line.step:
                    self._stretches.pop()  # said anew before a step was taken
                self._stretches.append((line.step, begins, line.num_passes))

    def in_steps(self, line: PlannedT) -> PlannedT:
        """Return a plan with its first whole optimizer step, as plans count batches.

        With 4 passes the batch 100 is the first of step 25, and 101 is in it.
        """
        return replace(line, first_step=self._step_of(line.first_step))

    def _step_of(self, batch: int) -> int:
        """Return the first step that holds no batch before this one."""
        at = max(0, sum(begins <= batch for _, begins, _ in self._stretches) - 1)
        step, begins, num_passes = self._stretches[at]
        for next_step, next_begins, next_passes in self._stretches[at + 1 : at + 2]:
            if next_begins - begins == (next_step - step) * num_passes:
                break
            # A state was loaded in between: what was before it in its run is not in this log.
            step, begins, num_passes = next_step, next_begins, next_passes
        # 100 steps of 1 batch, then of 4: batch 181 is in step 120, so 121 is the first without.
        return max(0, step - (begins - batch) // num_passes)


def read_lines(entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the entries of ``read_run_log`` as what they say, those of other kinds bare."""
    return [read_line(number, entry) for number, entry in enumerate(entries, start=1)]


def read_line(number: int, entry: Mapping[str, Any]) -> Line:
    """Return the entry of a line as what it says; a DataError names the line's number."""
    kind = entry["kind"]
    try:
        return decode(
            _KINDS.get(kind, Line) if isinstance(kind, str) else Line,
            entry,
            what=f"line {number}",
            call="report",
            is_open=True,
            advice="a line lacks a field, or was written by another version of loft_hvd",
        )
    except ArgumentError as error:
        raise DataError(str(error)) from error
