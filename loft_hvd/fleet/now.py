"""What runs already when a plan is made: it is not moved, and others are planned around it."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated

from loft_hvd.codec import Within, decode
from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.fleet.jobs import Instant
from loft_hvd.toml import read_toml

__all__ = ["NowState", "RunningJob", "read_now"]


@dataclass(frozen=True)
class RunningJob:
    """A job that runs, where, and how far it is."""

    job: str
    hosts: dict[str, Annotated[int, Within(1, 4096)]]  # ranks on each
    done: Annotated[float, Within(0.0, 1.0)] = 0.0  # share of its steps


@dataclass(frozen=True)
class NowState:
    """The instant of a plan, and what there is by then."""

    now_s: Instant = 0.0  # on the clock of the jobs' ``arrival_s``
    finished: list[str] = field(default_factory=list)
    running: list[RunningJob] = field(default_factory=list)

    def check(self, known: Collection[str]) -> None:
        """Raise where a job is named twice, or is none of the file's."""
        names = [*self.finished, *(each.job for each in self.running)]
        for name in names:
            if name not in known:
                raise ArgumentError(f"--now: job {name!r} is none of {sorted(known)}")
            if names.count(name) > 1:
                raise ArgumentError(
                    f"--now: job {name!r} stands twice; it has either finished or runs once"
                )


def read_now(path: str | os.PathLike[str]) -> NowState:
    """Read what runs.

    Raises:
        ArgumentError: it is not TOML, or not of the schema.
    """
    try:
        content = read_toml(path, what="now")
    except OSError as error:
        raise DataError(f"--now {os.fspath(path)!r} cannot be read ({error})") from error
    return decode(
        NowState,
        content,
        what="now",
        call=os.fspath(path),
        advice="docs/plan.md lists the keys",
    )
