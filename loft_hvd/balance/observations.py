"""What ranks report each interval, screened: nothing a rank sends is trusted to be a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import ArgumentError

__all__ = ["COLUMNS", "Interval", "screen"]

Floats = npt.NDArray[np.float64]

COLUMNS = (
    "size",  # samples of the rank's batch
    "local",  # of them from its own store or cache
    "remote",  # of them from elsewhere
    "fetch_s",  # to read and prepare the batch, where that happens
    "stall_s",  # of it the training process waited for: what overlap did not hide
    "compute_s",  # from the batch's arrival to the last gradient
    "wait_s",  # for other ranks and the wire
    "other_s",  # evaluation, checkpoints, user code: never fitted
    "cpu_use",  # by others, as a share of what the rank could use, 0 to 1; 0 when unknown
    "memory_use",  # the same of memory
)
SIZE, LOCAL, REMOTE, FETCH, STALL, COMPUTE, WAIT, OTHER, CPU, MEMORY = range(len(COLUMNS))

_LONGEST_S = 3600.0
_SLACK = 1.25  # a rank cannot have been busy for longer than the step took on rank 0's clock


@dataclass(frozen=True)
class Interval:
    """What one interval showed: averages over its counted steps.

    Attributes:
        step: its last step.
        sizes: the plan that was in force, [world_size].
        rows: what each rank reported, [world_size, len(COLUMNS)], 0 where it was discarded.
        valid: which rows may be used, [world_size], bool.
        step_s: seconds of a step by rank 0's own clock; NaN when not measured.
    """

    step: int
    sizes: npt.NDArray[np.int64]
    rows: Floats
    valid: npt.NDArray[np.bool_]
    step_s: float

    @property
    def busy_s(self) -> Floats:
        """Seconds each rank says it was busy, [world_size]."""
        busy: Floats = self.rows[:, STALL] + self.rows[:, COMPUTE]
        return busy


def screen(
    rows: npt.ArrayLike, *, step: int, sizes: tuple[int, ...], step_s: float
) -> tuple[Interval, dict[str, list[int]]]:
    """Check what ranks reported; returns what may be used, and the ranks discarded by reason.

    Args:
        rows: averages a step in the order of ``COLUMNS``, [world_size, 10]; a rank that computed
            no samples sends size 0 and is left out without being counted.
        step: the interval's last step.
        sizes: the plan in force, [world_size].
        step_s: seconds of a step by rank 0's clock; NaN when not measured.

    Raises:
        ArgumentError: the array is not of that shape.
    """
    given: Floats = np.array(rows, dtype=np.float64)
    if given.shape != (len(sizes), len(COLUMNS)):
        raise ArgumentError(
            f"observe: rows must have shape ({len(sizes)}, {len(COLUMNS)}), one row a rank with "
            f"{', '.join(COLUMNS)}, but it is {given.shape}"
        )
    finite = np.all(np.isfinite(given), axis=1)
    known = np.where(finite[:, None], given, 0.0)
    positive = np.all(known >= 0, axis=1)
    planned = np.array(sizes, dtype=np.float64)
    counts = np.abs(known[:, LOCAL] + known[:, REMOTE] - known[:, SIZE]) > 0.01 * planned + 0.01
    limit_s = min(_LONGEST_S, step_s * _SLACK) if step_s > 0 else _LONGEST_S
    busy = known[:, STALL] + known[:, COMPUTE]
    hidden = known[:, FETCH] > 10 * _LONGEST_S
    shares = (known[:, CPU] > 1.01) | (known[:, MEMORY] > 1.01)
    out_of_range = counts | (busy > limit_s) | hidden | shares
    wrong_size = np.abs(known[:, SIZE] - planned) > 0.1 * planned + 0.5
    idle = finite & (known[:, SIZE] == 0)
    reasons = {
        "not finite": ~finite,
        "negative": finite & ~positive,
        "out of range": finite & positive & ~idle & out_of_range,
        "not the planned size": finite & positive & ~idle & ~out_of_range & wrong_size,
    }
    valid = ~np.any(list(reasons.values()), axis=0) & ~idle
    interval = Interval(
        step, np.array(sizes), np.where(valid[:, None], known, 0.0), valid, float(step_s)
    )
    found = {reason: np.flatnonzero(which).tolist() for reason, which in reasons.items()}
    return interval, {reason: ranks for reason, ranks in found.items() if ranks}
