"""Ranks without which a step is shorter, and when they are worth their while again.

Where a device takes as long for few samples as for many, the least batch that a rank can have may
hold all others up for longer than its samples are worth. Then a plan gives it none. What it would
take is known from before, and from trials: once an interval its loader hands it a small batch all
the same, whose gradient does not count. The first trial is what it took when it was left out; by
how much later ones differ from that, in fetching and in computing, its times have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from loft_hvd.balance.fit import Fit
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.latency import Curves
from loft_hvd.balance.plan import Bools, Bounds, Floats, Ints, Sizes
from loft_hvd.balance.search import exact, with_none
from loft_hvd.codec import Count, Shape

__all__ = ["Leaving", "LeavingState", "Membership"]

# Of the step, that another set of ranks must save: more than chance and the error of models bring,
# and so much that a set does not come and go.
_WORTH = 0.05
_GROWTH = 2  # times the largest batch that a rank has had: a wrong model cannot cost more
_TINY_S = 1e-4  # of a trial: less is noise, and no part of a step
_LONGEST_WAIT = 64  # intervals; doubled with each return that was no good


@dataclass(frozen=True)
class Membership:
    """Sizes for another set of ranks than the one in force."""

    sizes: Sizes
    reason: str
    then_s: float  # of a step with them
    now_s: float  # of a step with the present ranks at their best


_Parts = Annotated[Floats, Shape(2, "world_size")]


@dataclass
class LeavingState:
    """What is known of ranks that are left out, by trials."""

    # Of fetching and of computing, [2, world_size] each.
    trials: _Parts  # seconds of the first since a rank is out; 0 where there was none
    changes: _Parts  # factors since then
    waits: Annotated[list[Count], Shape("world_size")]  # intervals until a rank may come back
    next_wait: Annotated[list[Count], Shape("world_size")]  # and the time after that

    @classmethod
    def of(cls, world_size: int) -> LeavingState:
        """Return that of ranks of which none was ever left out."""
        none = [0] * world_size
        shape = (2, world_size)
        return cls(np.zeros(shape), np.ones(shape), none, list(none))


class Leaving:
    """Decides which ranks have samples at all; lives on rank 0, whose clock tells steps' lengths.

    Attributes:
        min_ranks: that must have samples, 2f+1 for a rule with f.
        note: what left-out ranks would cost; "" while there are none.
        state: what a run goes on from.
    """

    def __init__(self, world_size: int) -> None:
        self.min_ranks, self.note = 1, ""
        self.state = LeavingState.of(world_size)

    def consider(
        self, interval: Interval, fit: Fit, bounds: Bounds, *, largest: Ints
    ) -> Membership | None:
        """Return the best sizes of other ranks than those in force, if they are worth it.

        Args:
            interval: what was measured, with the sizes in force.
            fit: the newest models of all ranks.
            bounds: of the sizes of ranks that have samples, whoever has.
            largest: batches that each rank has had, [world_size].
        """
        sizes = interval.sizes
        is_in = sizes > 0
        self._hear(interval, is_in)
        if fit.is_poor[is_in].any():
            return None
        total = int(sizes.sum())
        grain = bounds.grain
        # How the time of a rank that comes back depends on its batch has been measured elsewhere.
        equal = -(-total // len(sizes) // grain) * grain
        most = np.where(is_in, _GROWTH * largest // grain * grain, equal)
        cap = np.minimum(bounds.cap, np.maximum(most, bounds.floor))
        limits = Bounds(bounds.floor, cap, grain)
        curves = self._curves(interval, fit, limits)
        barred = ~is_in & ((np.array(self.state.waits) > 0) | fit.is_poor)
        kept = np.arange(len(sizes)) == 0  # its clock is what all plans are judged by
        found = with_none(curves, total, limits, least=self.min_ranks, kept=kept, barred=barred)
        stay = exact(curves, total, limits.only(is_in))
        then_s, now_s = (_longest(curves, each) + fit.model.aggregate_s for each in (found, stay))
        everybody = exact(curves, total, limits)
        self._say(~is_in, now_s, _longest(curves, everybody) + fit.model.aggregate_s)
        is_then = np.array(found) > 0
        if (is_then == is_in).all() or then_s > now_s * (1 - _WORTH):
            return None
        self._note_change(is_in, is_then)
        reason = _reason(is_in, is_then, 1 - then_s / now_s)
        return Membership(found, reason, then_s, now_s)

    def _hear(self, interval: Interval, is_in: Bools) -> None:
        """Take in the trials of ranks that are left out."""
        state = self.state
        state.waits = [max(wait - 1, 0) for wait in state.waits]
        tried_s = interval.idle_s
        is_told = ~is_in & (tried_s.sum(axis=0) > 0)
        is_first = is_told & (state.trials.sum(axis=0) == 0)
        state.trials = np.where(is_in, 0.0, np.where(is_first, tried_s, state.trials))
        before_s = np.maximum(state.trials, _TINY_S)
        state.changes = np.where(is_told, np.maximum(tried_s, _TINY_S) / before_s, state.changes)
        state.changes = np.where(is_in, 1.0, state.changes)

    def _curves(self, interval: Interval, fit: Fit, limits: Bounds) -> Curves:
        """Return the times of all ranks: as they depend on sizes by the models, as long as now."""
        touching = fit.model.without_sharing(interval.sizes).slower(*self.state.changes)
        curves = touching.curves(limits.floor.astype(float), limits.cap.astype(float))
        # A model learns of a change only by and by, as it may be an accident: a rank that has come
        # back would be left out again for what it took before.
        foretold = np.maximum(fit.model.times(interval.sizes), 1e-9)
        changes = np.where(interval.valid, interval.busy_s / foretold, 1.0)
        return Curves(curves.knot_sizes, curves.knot_times * changes[:, None])

    def _note_change(self, is_in: Bools, is_then: Bools) -> None:
        for rank in np.flatnonzero(is_in & ~is_then).tolist():
            # One that came back, and was no good, comes back later and later.
            state = self.state
            state.waits[rank] = state.next_wait[rank]
            state.next_wait[rank] = min(max(2 * state.next_wait[rank], 1), _LONGEST_WAIT)

    def _say(self, is_out: Bools, now_s: float, with_all_s: float) -> None:
        saved = 1 - now_s / with_all_s
        names = _names(np.flatnonzero(is_out).tolist())
        self.note = ""
        if is_out.any() and saved > 0:
            self.note = (
                f"{names[0]} {names[1]} nothing: without {names[2]} a step is {saved:.0%} shorter"
            )


def _longest(curves: Curves, sizes: Sizes) -> float:
    return float(np.where(np.array(sizes) > 0, curves.times(sizes), 0.0).max())


def _names(ranks: Sequence[int]) -> tuple[str, str, str]:
    """Return ranks as a subject, its verb, and what stands for it."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}", "adds", "it"
    return f"ranks {', '.join(map(str, ranks))}", "add", "them"


def _reason(is_in: Bools, is_then: Bools, gain: float) -> str:
    goes, comes = (
        np.flatnonzero(is_in & ~is_then).tolist(),
        np.flatnonzero(~is_in & is_then).tolist(),
    )
    parts = []
    if goes:
        who, adds, it = _names(goes)
        parts.append(f"{who} {adds} nothing: without {it} a step is {gain:.0%} shorter")
    if comes:
        who, _, it = _names(comes)
        parts.append(f"{who} may compute again: with {it} a step is {gain:.0%} shorter")
    return "; ".join(parts)
