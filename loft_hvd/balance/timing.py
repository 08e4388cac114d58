"""Where a rank's steps go: a small stopwatch that the loader and the optimizer feed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.explain import TIME_FIELDS

__all__ = ["StepTimer"]


class StepTimer:
    """Sums of this rank's times, batch by batch, since the last ``take``.

    A step runs from the end of the step before to its own end. Time inside ``exclude`` (a user's
    own collectives, evaluation, checkpoints) belongs to no step. Where ranks share CPUs, the time
    that a rank was ready to compute but another held the CPU says nothing of its own speed: it is
    told apart from the computing.

    Args:
        clock: seconds that never go back.
        queue_clock: seconds that this thread has waited for a CPU, or None to leave it unasked.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        queue_clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._queue_clock = queue_clock or (lambda: 0.0)
        self._sums = np.zeros(len(TIME_FIELDS))
        self._step_began: float | None = None
        self._excluded_s = 0.0
        self._clear_step()

    def _clear_step(self) -> None:
        self._step = np.zeros(len(TIME_FIELDS))  # this step's share of the sums
        self._batch_compute_s = 0.0
        self._arrived: float | None = None
        self._is_left_out = False
        self._queue_at_arrival = 0.0
        self._excluded_at_arrival = 0.0

    def _add(self, **amounts: float) -> None:
        for field, amount in amounts.items():
            self._step[TIME_FIELDS.index(field)] += amount

    def batch_arrived(self, *, local: int, remote: int, fetch_s: float, stall_s: float) -> None:
        """Note that a batch is here, and what fetching it took.

        Args:
            local: its samples from this rank's own node; 0 for padding.
            remote: its samples from elsewhere.
            fetch_s: seconds to read and prepare it, wherever that happened.
            stall_s: seconds of it that the script waited for.
        """
        self.computing_ended()
        now = self._clock()
        if self._step_began is None:
            self._step_began = now - stall_s
        samples = local + remote
        self._add(steps=1, samples=samples, local=local, remote=remote)
        self._add(fetch_s=fetch_s, stall_s=stall_s)
        self._arrived = now
        self._queue_at_arrival = self._queue_clock()
        self._excluded_at_arrival = self._excluded_s

    def gradient_arrived(self, *, blocked_s: float = 0.0) -> None:
        """Note that a gradient of the newest batch is there; its last one ends the computing.

        Args:
            blocked_s: seconds since the batch's arrival that hooks spent on communication.
        """
        if self._arrived is not None:
            excluded = self._excluded_s - self._excluded_at_arrival
            spent = self._clock() - self._arrived - blocked_s - excluded
            self._batch_compute_s = max(0.0, spent)

    def computing_ended(self) -> None:
        """Note that no more gradients of the newest batch will come, before waiting for others."""
        if self._arrived is not None:
            queued = min(self._queue_clock() - self._queue_at_arrival, self._batch_compute_s)
            self._add(compute_s=self._batch_compute_s - queued, queued_s=queued)
            self._batch_compute_s = 0.0
            self._arrived = None

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Leave the time inside out of every step."""
        began = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - began

    def step_ended(self, *, waited_s: float, counts: bool = True) -> None:
        """Close a step and add it to the sums.

        Args:
            waited_s: seconds of it spent waiting for other ranks and the wire.
            counts: False leaves it out: other sizes than the plan's, or the first steps with it.
        """
        self.computing_ended()
        now = self._clock()
        counts = counts and not self._is_left_out
        if self._step_began is not None and counts and self._step[TIME_FIELDS.index("steps")]:
            wall_s = now - self._step_began - self._excluded_s
            parts = ("stall_s", "compute_s", "queued_s")
            spent = waited_s + sum(self._step[TIME_FIELDS.index(part)] for part in parts)
            self._add(wait_s=waited_s, wall_s=wall_s, other_s=max(0.0, wall_s - spent))
            self._sums += self._step
        self._step_began = now
        self._excluded_s = 0.0
        self._clear_step()

    def since_step_s(self) -> float | None:
        """Return the seconds since the last step ended, less those excluded; None if unknown."""
        if self._step_began is None:
            return None
        return max(0.0, self._clock() - self._step_began - self._excluded_s)

    def leave_out(self) -> None:
        """Leave the step that goes on out of the sums."""
        self._is_left_out = True

    def pause(self) -> None:
        """Forget when the last step ended: what follows is not part of a step."""
        self._step_began = None
        self._excluded_s = 0.0
        self._clear_step()

    def take(self) -> npt.NDArray[np.float64]:
        """Return the sums in the order of ``TIME_FIELDS``, [11], and start afresh."""
        taken, self._sums = self._sums, np.zeros(len(TIME_FIELDS))
        return taken
