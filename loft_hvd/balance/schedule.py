"""When ranks exchange their times: counted in steps, so that all come to it together."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import SUM

__all__ = ["Schedule"]

_LEAST_STEPS = 20
_LEAST_S = 30.0
_GROWTH = 4  # an interval has at most this many times the steps of the one before


class Schedule:
    """The step of the next exchange.

    Without a given interval the first one is 20 steps; each after it is at least 20 steps and 30
    seconds, as steps took on rank 0 in the one before, and at most four times as many steps.

    Args:
        interval: steps between two exchanges, or None.

    Attributes:
        interval: steps from the last exchange to the next.
        at: the next exchange's step, counted from the start of the run.
    """

    def __init__(self, interval: int | None) -> None:
        self._given = interval
        self.interval = interval or _LEAST_STEPS
        self.at = self.interval

    def restart(self, num_steps: int) -> None:
        """Count from a step, on every rank."""
        self.at = num_steps + self.interval

    def follow(self, num_steps: int, interval: int) -> None:
        """Take what was agreed at an exchange."""
        self.interval = interval
        self.at = num_steps + interval

    def propose(self, sums: npt.NDArray[np.float64], *, num_passes: int) -> int:
        """Return how many steps the next interval should have, from this rank's times.

        Args:
            sums: in the order of ``interval.SUMS``, [15].
            num_passes: backward passes of an optimizer step.
        """
        if self._given is not None:
            return self._given
        steps, wall_s = float(sums[SUM["steps"]]), float(sums[SUM["wall_s"]])
        step_s = wall_s / steps * num_passes if steps > 0 else 0.0
        if not step_s > 0:
            return self.interval
        wanted = max(_LEAST_STEPS, math.ceil(_LEAST_S / step_s))
        return min(wanted, _GROWTH * self.interval)  # a few fast steps must not put off the next
