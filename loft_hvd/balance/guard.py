"""Judge plans by rank 0's own clock: what is worse than equal sizes is undone.

Ranks may report wrong times, by mistake or on purpose. Their reports choose a plan; whether it was
any good is read off the step's own length. A plan that turns out worse than equal sizes is in
force for one interval. Equal sizes are then measured anew: when they are no better, the cluster
changed and the plan comes back; otherwise it was a miss. A miss that no rank admits to in its
report halves the next change and doubles the pause before it. From the second miss on, the rank
that most likely misled the model is pinned at its equal share; misses that a rank did admit to are
forgiven with time, since neighbours on a machine come and go.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import Interval

__all__ = ["Forecast", "Guard"]

Floats = npt.NDArray[np.float64]

_MARGIN = 0.02  # of the step: less is noise
_UNEXPLAINED = 0.10  # of the step that no rank says it was busy for
_LONGEST_PAUSE = 64
_PINNING_STRIKES = 1.5
_FADE = 0.9  # an interval


@dataclass(frozen=True)
class Forecast:
    """What the model said before a plan came into force.

    Attributes:
        sizes: the plan.
        times: predicted seconds of each rank with it, [world_size].
    """

    sizes: tuple[int, ...]
    times: Floats


@dataclass
class Guard:
    """The verdicts so far.

    Attributes:
        equal: the equal sizes of the run.
        equal_s: seconds of a step with equal sizes, as last measured; NaN before.
        aggregate_s: seconds of such a step that the slowest report left over.
        suspicion: how much each rank's reports misled the model, [world_size].
        pinned: ranks held at their equal share.
        num_misses: plans that were worse than equal sizes.
        strikes: misses that count; they fade with plans that pass if a rank admitted the last one.
        is_admitted: some rank said that it was busy for as long as the step last undone.
        pause: intervals to let pass before the next change.
        scale: share of a wanted change that is carried out, in (0, 1].
        proven: largest batch of each rank that a passing plan had, [world_size].
        on_trial: a plan that was undone and the step it took, until equal sizes are measured.
        misled: how much each rank may have misled the plan on trial, [world_size].
    """

    equal: tuple[int, ...]
    equal_s: float = float("nan")
    aggregate_s: float = 0.0
    suspicion: list[float] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    num_misses: int = 0
    strikes: float = 0.0
    is_admitted: bool = False
    pause: int = 0
    scale: float = 1.0
    proven: list[int] = field(default_factory=list)
    on_trial: tuple[tuple[int, ...], float] | None = None
    misled: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.proven = self.proven or list(self.equal)
        self.suspicion = self.suspicion or [0.0] * len(self.equal)

    def measure_equal(self, interval: Interval) -> bool:
        """Take in an interval with equal sizes; returns whether the plan on trial comes back."""
        step_s = interval.step_s
        if self.on_trial is None:
            known = self.equal_s > 0
            self.equal_s = 0.5 * (self.equal_s + step_s) if known else step_s
        else:
            self.equal_s = step_s
        left_over = max(step_s - float(interval.busy_s.max()), 0.0)
        self.aggregate_s = left_over if self.num_misses == 0 else min(self.aggregate_s, left_over)
        if self.on_trial is None:
            return False
        if step_s >= self.on_trial[1] * (1 - 0.5 * _MARGIN):
            return True
        self._count_miss()
        return False

    def is_worse(self, interval: Interval, *, is_new: bool, drift: float) -> bool:
        """Judge the plan in force by the step it took.

        A new plan is judged whatever the reason; one that passed before only when no rank says it
        was busy that long, since a slow rank that says so is the model's business.

        Args:
            interval: what was measured with it.
            is_new: it is the plan's first interval.
            drift: how much longer equal sizes should take now than when they were measured, by
                what the ranks report; believed only while their reports explain the step.
        """
        step_s = interval.step_s
        explained_s = float(interval.busy_s.max()) + self.aggregate_s
        if step_s > explained_s * (1 + _UNEXPLAINED):
            return step_s > self.equal_s * (1 + _MARGIN)
        held_up = interval.valid & (interval.busy_s > 0.95 * interval.busy_s.max())
        has_less = (interval.sizes[held_up] <= np.array(self.equal)[held_up]).all()
        if has_less and step_s <= explained_s * (1 + _MARGIN):
            return False  # with equal sizes those ranks would have had more to do, not less
        return is_new and step_s > self.equal_s * max(drift, 1.0) * (1 + _MARGIN)

    def undo(self, interval: Interval, forecast: Forecast) -> None:
        """Put the plan on trial, and note which rank's reports may have misled the model."""
        self.on_trial = (forecast.sizes, interval.step_s)
        misses = np.abs(interval.busy_s / np.maximum(forecast.times, 1e-9) - 1.0)
        misses = np.where(interval.valid, np.minimum(misses, 1.0), 0.0)
        explained_s = float(interval.busy_s.max()) + self.aggregate_s
        self.is_admitted = interval.step_s <= explained_s * (1 + _UNEXPLAINED)
        if not self.is_admitted:
            # Nobody admits to the long step: suspect those who were given the most on their word.
            growth = np.array(forecast.sizes) / np.maximum(self.equal, 1) - 1.0
            misses = misses + np.maximum(growth, 0.0)
        self.misled = misses.tolist()

    def _count_miss(self) -> None:
        suspicion = np.array(self.suspicion) + np.array(self.misled)
        self.on_trial = None
        self.num_misses += 1
        self.strikes += 1.0
        if self.is_admitted:
            self.pause = 1  # a rank says that it was slow: the next fit knows
        else:
            self.scale *= 0.5
            self.pause = min(2**self.num_misses, _LONGEST_PAUSE)
        if self.strikes > _PINNING_STRIKES:
            free = suspicion.copy()
            free[self.pinned] = -1.0
            self.pinned = sorted({*self.pinned, int(np.argmax(free))})
            suspicion[self.pinned] = 0.0
            self.scale = 1.0
        self.suspicion = suspicion.tolist()

    def passed(self, sizes: npt.NDArray[np.int64]) -> None:
        """Note that a plan was no worse than equal sizes: its batches are proven."""
        self.proven = np.maximum(self.proven, sizes).tolist()
        self.scale = min(1.0, 1.5 * self.scale)
        self.on_trial = None
        if self.is_admitted:
            self.strikes *= _FADE
            self.suspicion = (_FADE * np.array(self.suspicion)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the verdicts, JSON-able."""
        state = asdict(self)
        state["equal_s"] = self.equal_s if self.equal_s > 0 else -1.0
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Guard:
        """Go on where ``state_dict`` was taken."""
        values = dict(state)
        values["equal"] = tuple(values["equal"])
        values["equal_s"] = values["equal_s"] if values["equal_s"] > 0 else float("nan")
        trial = values["on_trial"]
        values["on_trial"] = None if trial is None else (tuple(trial[0]), trial[1])
        return cls(**values)
