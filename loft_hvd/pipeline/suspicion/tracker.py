"""Who was off: from what shard owners see of each worker's row to one suspicion a worker. Pure.

In a step each owner scores the rows of its shard from 0 (as the others) to 1 (``score_rows``).
Every few steps the owners' scores are joined by their median, so that one owner alone cannot frame
a worker, and smoothed over steps. A worker stands out whose suspicion stays above the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from loft_hvd.aggregation.diagnostics import Diagnostics
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.pipeline.suspicion.scores import Floats, score_rows

__all__ = ["Evidence", "Suspicion", "SuspicionTracker", "WorkerState"]

_MEMORY_STEPS = 20.0  # a step counts 1/20 in the smoothed numbers
_COLUMNS = 6  # score, steps, seen, outside, non-finite, squared distance


@dataclass(frozen=True)
class Suspicion:
    """How closely rows are watched; equal on every rank.

    Attributes:
        every: look at one block of 16,384 coordinates of a shard in so many; 1 looks at all.
        interval: optimizer steps between two exchanges of what owners saw.
        threshold: a worker stands out while its suspicion is so far above the median of the
            others'; above 0, below 1.
        patience: steps that a worker must stand out in a row before it is named; the next
            warnings follow after twice, four times, ... as many.
    """

    every: int = 32
    interval: int = 10
    threshold: float = 0.6
    patience: int = 20

    def __post_init__(self) -> None:
        for what in ("every", "interval", "patience"):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"Suspicion: {what}={value!r} must be a whole number")
            if value < 1:
                raise ArgumentError(f"Suspicion: {what}={value} must be >= 1")
        if not 0 < self.threshold < 1:
            raise ArgumentError(f"Suspicion: threshold={self.threshold} must be > 0 and < 1")


class Evidence:
    """What one owner saw of every row since the last exchange.

    Args:
        num_rows: workers, [num_rows] in everything.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._step = Diagnostics.empty(num_rows)
        self._clear()

    def _clear(self) -> None:
        self._num_steps = np.zeros(self._num_rows)  # in which a row was there
        self._scores = np.zeros(self._num_rows)
        self._sum = Diagnostics.empty(self._num_rows)

    def add(self, found: Diagnostics) -> None:
        """Take what was found in a shard of one bucket in this step."""
        self._step += found

    def end_step(self, rule: Rule, *, weights: Sequence[int] | None = None) -> None:
        """Score the step's rows over all buckets."""
        found, self._step = self._step, Diagnostics.empty(self._num_rows)
        scores = score_rows(found, rule, weights=weights)
        if scores is not None:
            self._num_steps += np.array(found.num_seen) > 0
            self._scores += scores
            self._sum += found

    def take(self) -> Floats:
        """Return what was seen since the last call, float64, [num_rows * 6]."""
        columns = (
            self._scores,
            self._num_steps,
            self._sum.num_seen,
            self._sum.num_outside,
            self._sum.num_non_finite,
            self._sum.squared_distance,
        )
        wire = np.concatenate(columns).astype(np.float64)
        self._clear()
        return wire


@dataclass
class WorkerState:
    """What is known of one worker.

    Attributes:
        suspicion: 0 (as the others) to 1, smoothed over about 20 steps.
        share_outside: share of its coordinates outside the rule's window, smoothed.
        distance: its squared distance to the result over the median worker's, smoothed.
        num_non_finite: NaN or infinite coordinates among those looked at, all steps together.
        num_steps: steps in which something could be said of it.
        steps_out: steps in a row, up to now, in which it stood out.
    """

    suspicion: float = 0.0
    share_outside: float = 0.0
    distance: float = 1.0
    num_non_finite: int = 0
    num_steps: int = 0
    steps_out: int = 0
    next_warning: int = field(default=0, repr=False)

    def blend(self, score: float, share: float, distance: float, *, num_steps: int) -> None:
        """Let the averages of some steps into the smoothed numbers."""
        kept = 1.0
        for _ in range(num_steps):  # not a power: libraries differ in the last bit of one
            kept *= 1 - 1 / _MEMORY_STEPS
        part = 1 - kept
        self.suspicion += part * (score - self.suspicion)
        part = max(part, num_steps / (self.num_steps + num_steps))  # a plain average at first
        self.share_outside += part * (share - self.share_outside)
        self.distance += part * (distance - self.distance)
        self.num_steps += num_steps


class SuspicionTracker:
    """One suspicion a worker, from the owners' evidence; the same on every rank.

    Args:
        num_rows: workers.
        settings: how closely they are watched.
    """

    def __init__(self, num_rows: int, settings: Suspicion) -> None:
        self.workers = [WorkerState() for _ in range(num_rows)]
        self._settings = settings

    def observe(self, table: Floats) -> list[int]:
        """Take the evidence of all owners.

        Args:
            table: what each owner's ``Evidence.take`` returned, [num_owners, num_rows * 6];
                owners that saw nothing, or claim what cannot be, abstain.

        Returns:
            The workers to warn of now.
        """
        num_rows = len(self.workers)
        cells = np.asarray(table, dtype=np.float64).reshape(len(table), _COLUMNS, num_rows)
        cells = _believable(cells)
        if len(cells) == 0:
            return []
        steps, seen, outside, non_finite, squared = (cells[:, at] for at in range(1, _COLUMNS))
        scores = np.minimum(1.0, cells[:, 0] / np.maximum(steps, 1.0))
        shares = np.divide(outside, seen, out=np.zeros_like(seen), where=seen > 0)
        usual = [_low_median(line[was > 0]) for line, was in zip(squared, seen, strict=True)]
        distances = squared / np.maximum(np.array(usual), 1e-300)[:, None]
        present = np.flatnonzero((seen > 0).any(axis=0)).tolist()
        num_steps = {row: int(_low_median(steps[seen[:, row] > 0, row])) for row in present}
        for row in present:
            sees = seen[:, row] > 0
            self.workers[row].num_non_finite += int(non_finite[:, row].sum())
            self.workers[row].blend(
                _low_median(scores[sees, row]),
                _low_median(shares[sees, row]),
                _low_median(distances[sees, row]),
                num_steps=num_steps[row],
            )
        return [row for row in present if self._should_warn(row, num_steps[row])]

    def excess(self, row: int) -> float:
        """Return how far a worker's suspicion is above the median of the others'."""
        others = [worker.suspicion for other, worker in enumerate(self.workers) if other != row]
        return self.workers[row].suspicion - float(np.median(others)) if others else 0.0

    def named(self) -> list[int]:
        """Return the workers that have stood out for ``patience`` steps in a row."""
        patience = self._settings.patience
        return [row for row, worker in enumerate(self.workers) if worker.steps_out >= patience]

    def forgive(self, row: int) -> None:
        """Start a worker's suspicion afresh; its counts stay."""
        self.workers[row].suspicion = 0.0
        self.workers[row].steps_out = 0

    def _should_warn(self, row: int, num_steps: int) -> bool:
        worker = self.workers[row]
        if self.excess(row) < self._settings.threshold:
            worker.steps_out = 0
            return False
        worker.steps_out += num_steps
        if worker.steps_out < max(self._settings.patience, worker.next_warning):
            return False
        worker.next_warning = 2 * max(self._settings.patience, worker.next_warning)
        return True


def _believable(cells: Floats) -> Floats:
    """Return the cells of owners that have something to say and claim nothing that cannot be."""
    steps, seen = cells[:, 1], cells[:, 2:3]
    with np.errstate(invalid="ignore"):
        fits = np.isfinite(cells).all(axis=(1, 2)) & (cells >= 0).all(axis=(1, 2))
        fits &= (cells[:, 3:5] <= seen).all(axis=(1, 2)) & (steps > 0).any(axis=1)
    chosen: Floats = cells[fits]
    return chosen


def _low_median(values: Floats) -> float:
    """Return the middle value, the lower one of two: half of the owners cannot accuse alone."""
    return float(np.sort(values)[(len(values) - 1) // 2]) if len(values) else 0.0
