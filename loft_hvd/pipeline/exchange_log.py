"""How long gradients travel, in the run log: every half a minute a line of rank 0's steps.

It is measured where buckets start and end, so it holds what rank 0 waits there for ranks that come
later. What a step takes beyond all ranks' own work is in the line ``fit``, as ``exposed_s``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from loft_hvd.balance.interval import typical
from loft_hvd.runlog import RunLog
from loft_hvd.transport.base import Lane

__all__ = ["ExchangeLog", "ExchangeTimes"]

_FIRST_S, _EVERY_S = 5.0, 30.0  # as of links
_MOST_STEPS = 1000  # of a line, the first ones: of half a minute that is a step of 30 ms


@dataclass(frozen=True)
class ExchangeTimes:
    """What one step's exchange took this rank, in seconds."""

    whole_s: float  # from the first bucket's start to the last one's end
    waited_s: float  # of it, that the script waited


class ExchangeLog:
    """The exchange of one optimizer in one world; rank 0 writes of it.

    Args:
        log: the run log.
        lane: by which values travel.
        num_bytes: of all gradients, as they lie in buckets.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        log: RunLog,
        lane: Lane,
        *,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._lane, self._num_bytes, self._clock = log, lane, num_bytes, clock
        self._steps: list[tuple[float, float]] = []
        self._since, self._due = log.step, clock() + _FIRST_S

    def step_ended(self, times: ExchangeTimes | None) -> None:
        """Take in a step, None where nothing was sent, and write a line if it is time to."""
        if self._log.path is None or times is None:
            return
        if len(self._steps) < _MOST_STEPS:
            self._steps.append((times.whole_s, times.waited_s))
        if (now := self._clock()) < self._due:
            return
        (whole_s, waited_s), _ = typical(self._steps)
        self._log.write(
            "exchange",
            since=self._since,
            num_steps=len(self._steps),
            lane=self._lane.name,
            bytes_per_s=self._lane.bytes_per_s,
            num_bytes=self._num_bytes,
            whole_s=float(whole_s),
            waited_s=float(waited_s),
        )
        self._steps, self._since, self._due = [], self._log.step, now + _EVERY_S
