"""Sums over an interval's steps, without the steps in which the script did something else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.interval import SUM, SUMS

__all__ = ["StepSums"]

Floats = npt.NDArray[np.float64]

_FEWEST = 5  # steps that say what is usual
_MOST = 256  # steps kept one by one
_USUAL = 3.0  # times the median of "other", or of waiting,
_OF_STEP = 0.5  # and of the median step, that make a pause


class StepSums:
    """Adds steps up; a checkpoint or an evaluation between two of them is a pause, not a step.

    A step has a pause in it when its time outside fetch, computing and waiting is more than three
    times the usual one and half a usual step on top. It is left out whole; only the length of the
    pause is kept. By the same measure, waiting beyond the usual is counted (``held_s``): rank 0
    takes others' pauses off its own steps, but no more than its own clock has seen.
    """

    def __init__(self) -> None:
        self._sums: Floats = np.zeros(len(SUMS))
        self._rows: list[Floats] = []

    def add(self, row: Floats) -> None:
        """Add a step, in the order of ``SUMS``."""
        self._rows.append(row)
        if len(self._rows) >= _MOST:
            self._fold()

    def take(self) -> Floats:
        """Return the sums, [len(SUMS)], and start afresh."""
        self._fold()
        taken, self._sums = self._sums, np.zeros(len(SUMS))
        return taken

    def _fold(self) -> None:
        if not self._rows:
            return
        rows = np.stack(self._rows)
        self._rows.clear()
        if len(rows) < _FEWEST:
            self._sums += rows.sum(axis=0)
            return
        other = rows[:, SUM["other_s"]]
        usual = float(np.median(other))
        limit = _USUAL * usual + _OF_STEP * float(np.median(rows[:, SUM["wall_s"]]))
        is_paused = other > limit
        kept = rows[~is_paused]
        self._sums += kept.sum(axis=0)
        wait = kept[:, SUM["wait_s"]]
        beyond = wait - float(np.median(wait))
        step_s = float(np.median(kept[:, SUM["wall_s"]]))
        limit = (_USUAL - 1) * float(np.median(wait)) + _OF_STEP * step_s
        self._sums[SUM["held_s"]] += float(beyond[beyond > limit].sum())
        self._sums[SUM["paused_s"]] += float((other[is_paused] - usual).sum())
