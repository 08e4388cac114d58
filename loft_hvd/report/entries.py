"""The lines of a run log as what they say: read once, by types, before anything is made of them.

A log comes from anywhere: another version, a crash, a stranger. What is not of these types is a
DataError; keys that are not known are passed over, as a newer version may write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from loft_hvd.balance.interval import RankTimes
from loft_hvd.codec import Count, Within, decode
from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.pipeline.suspicion.report import WorkerReport

__all__ = ["Explain", "Fault", "Line", "Plans", "Run", "Spread", "Suspicion", "Thinned", "Times"]
__all__ += ["read_lines"]


@dataclass(frozen=True)
class Line:
    """What every line has."""

    step: Count  # optimizer steps taken


@dataclass(frozen=True)
class Run(Line):
    """What is trained: written at the start, and in each elastic world."""

    world_size: Annotated[int, Within(1)]
    global_batch_size: Count | None = None
    policy: str | None = None

    @property
    def facts(self) -> list[str]:
        """The line in words."""
        facts = [f"{self.world_size} ranks"]
        if self.policy is not None:
            facts += [f"global_batch_size={self.global_batch_size}", f"policy {self.policy}"]
        return facts


@dataclass(frozen=True)
class Plans(Line):
    """A plan that came into force."""

    plan_id: Count
    first_step: Count
    sizes: list[Count]


@dataclass(frozen=True)
class Times(Line):
    """Averages of an interval."""

    ranks: list[RankTimes]
    num_ranks: Count | None = None  # that those in ``ranks`` stand for; None where they are all

    @property
    def which(self) -> str:
        """Which ranks stand for all, in words; empty where all are there."""
        if self.num_ranks in (None, len(self.ranks)):
            return ""
        return f", {len(self.ranks)} of {self.num_ranks} ranks from the fastest to the slowest"


@dataclass(frozen=True)
class Explain(Line):
    """The policy's own words."""

    text: str


@dataclass(frozen=True)
class Spread(Line):
    """How far ranks' gradients lie apart for good."""

    ratios: list[float | None]  # None where too little was seen of a rank


@dataclass(frozen=True)
class Suspicion(Line):
    """What is known of each worker."""

    num_steps: Count
    workers: list[WorkerReport]


@dataclass(frozen=True)
class Fault(Line):
    """An error that ended the run."""

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
            f"{self.num_lines} older lines of times, fits and suspicion were left out, to keep the "
            "log small or because the disk was full"
        )


_KINDS: dict[str, type[Line]] = {
    "run": Run,
    "plan": Plans,
    "times": Times,
    "explain": Explain,
    "spread": Spread,
    "suspicion": Suspicion,
    "fault": Fault,
    "thinned": Thinned,
}


def read_lines(entries: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the entries of ``read_run_log`` as what they say, those of other kinds bare."""
    return [_read_line(number, entry) for number, entry in enumerate(entries, start=1)]


def _read_line(number: int, entry: Mapping[str, Any]) -> Line:
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
