"""Choose batch sizes: minimise the slowest rank's time while the sizes add up to the global batch.

Two solvers after LOFT's problem statement. ``exact`` bisects the target time; because every rank's
time is nondecreasing in its batch, the sizes that fit under a target are known at once, and their
sum grows with it: O(world_size * log(1/eps)). ``grid`` is an adaptive coarse-to-fine grid over the
target time, finished by transfers between the slowest and the fastest rank with a shrinking step.
Sizes are multiples of ``grain``; when the global batch is not, one rank carries the rest. Equal
inputs give equal plans: ties go to the lower rank.

A shared source couples the ranks. Both solvers then work on the model's tangent at the last sizes,
renew it a few times, keep the tangent whose true step is shortest, and end with transfers that
look at the true times: first from the slowest rank, then between any. ``exact`` tries what ``grid``
finds too, and is never above it, but its name holds for separable times only: ``least_s`` proves
how far the best of all plans can be, and docs/balance.md has how near both come to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.latency import Curves, StepModel, count_passes
from loft_hvd.balance.plan import Bools, Bounds, Floats, Ints, Sizes
from loft_hvd.errors import ArgumentError, PlanError

__all__ = ["SOLVERS", "Model", "equal_within", "exact", "grid", "least_s", "round_to_lattice"]
__all__ += ["with_none"]

# Tangents of a shared source. Measured (commit 119ab9a): 12 in place of 5, beside transfers, took
# the worst of 300 clusters from 5.7 % above the best known to 1.2 %; a thousand ranks have 10 ms.
_RENEWALS, _FEW_RENEWALS = 12, 5
_SMALL_WORLD = 256  # ranks up to which the many cost little
_GRID_POINTS = 9  # each round narrows the target to an eighth
_ENOUGH = 1e-6  # of the target time: the grid's end, since transfers follow
_FINE = 1e-12  # of the target time: near the last bit, so that ``exact`` is exact
# Where ranks share a source: times of ranks worked out in a round of transfers, and rounds.
_TRIED_TIMES, _ROUNDS = 4096, 40
_POWER = 32  # of the times in the mean that such transfers are judged by
_HALVINGS = 44  # of a bound: to the 13th digit
_TRANSFERS = 64  # tries, of which halving the step takes some ten: bounds the time of a search


class Model(Protocol):
    """What a solver needs to know of the ranks: ``StepModel`` and ``Curves`` are two."""

    @property
    def world_size(self) -> int: ...

    @property
    def is_coupled(self) -> bool: ...  # the time of a rank depends on the batches of others

    def curves(self, low: Floats, high: Floats) -> Curves: ...  # of a separable model

    def times(self, sizes: npt.ArrayLike) -> Floats: ...  # seconds of each rank, [world_size]

    def without_sharing(self, sizes: npt.ArrayLike) -> Model: ...  # its tangent at these sizes


def exact(model: Model, global_batch_size: int, bounds: Bounds) -> Sizes:
    """Return the sizes whose slowest rank is fastest, by bisection of the target time.

    Of ranks that share a source, the best sizes found: no bound is proven there.

    The model's times must not fall as a batch grows; a PlanError where the bounds do not admit
    ``global_batch_size``.
    """
    task = _Separable.of(model, global_batch_size, bounds)
    if not model.is_coupled:
        return task.solve(_bisect)
    starts = dict.fromkeys((task.solve(_bisect), task.solve(_refine_grid)))
    ends = [_improve(model, task.model, start, bounds) for start in starts]
    return min(ends, key=lambda found: float(model.times(found).max()))


def grid(model: Model, global_batch_size: int, bounds: Bounds) -> Sizes:
    """Return sizes by LOFT's adaptive grid, then transfers; as ``exact`` otherwise."""
    task = _Separable.of(model, global_batch_size, bounds)
    return _improve(model, task.model, task.solve(_refine_grid), bounds)


SOLVERS: dict[str, Callable[[Model, int, Bounds], Sizes]] = {"grid": grid, "exact": exact}


def equal_within(global_batch_size: int, bounds: Bounds) -> Sizes:
    """Return sizes as equal as the bounds allow: all alike, but for caps, floors and grain."""
    reach = np.stack([np.zeros(len(bounds.cap)), bounds.cap + 2.0 * bounds.grain], axis=1)
    return exact(Curves(reach, reach), global_batch_size, bounds)


def with_none(
    curves: Curves,
    global_batch_size: int,
    bounds: Bounds,
    *,
    least: int = 1,
    kept: Bools | None = None,
    barred: Bools | None = None,
) -> Sizes:
    """Return the sizes whose slowest rank is fastest where ranks may also have no samples.

    A rank without samples takes no time, others have at least their floor. In a step of T seconds
    everybody may have samples whose floor takes T at most, and of what they can do by then the sum
    grows with T. So the least T at which it reaches the global batch is bisected for, and sizes are
    those of ``exact`` among the ranks that it admits.

    Args:
        curves: times of all ranks from floor to cap.
        global_batch_size: samples of all ranks.
        bounds: of ranks that have samples.
        least: ranks that must have samples.
        kept: ranks that must, [world_size].
        barred: ranks that must not, likewise.
    """
    first_s = curves.times(bounds.floor)  # seconds of each rank's floor
    first_s = np.where(kept if kept is not None else False, -np.inf, first_s)
    first_s = np.where(barred if barred is not None else False, np.inf, first_s)
    under = float(np.sort(first_s)[max(least, 1) - 1])  # so many must have samples
    caps = bounds.cap // bounds.grain * bounds.grain

    def admits(limit_s: float) -> bool:
        reach = np.minimum(curves.largest_within(np.array([limit_s]))[0] + 1e-9, caps)
        # One rank may carry what is left of a grain.
        whole = np.floor(reach / bounds.grain) * bounds.grain
        return (
            float(whole[first_s <= limit_s].sum())
            >= global_batch_size // bounds.grain * bounds.grain
        )

    over = float(curves.knot_times.max())
    under = max(under, float(curves.knot_times.min()))
    if not admits(under):
        while over - under > _FINE * over:
            middle = 0.5 * (under + over)
            if not under < middle < over:
                break
            under, over = (under, middle) if admits(middle) else (middle, over)
    else:
        over = under
    return exact(curves, global_batch_size, bounds.only(first_s <= over))


def round_to_lattice(wanted: Floats, global_batch_size: int, bounds: Bounds) -> Sizes:
    """Return the sizes within the bounds that follow ``wanted`` [world_size] most closely."""
    low, high, rest = bounds.lattice(global_batch_size)
    wanted = np.clip(np.nan_to_num(wanted, nan=0.0, posinf=0.0), 1e-9, None) / bounds.grain
    reach = np.array([0.0, float(high.max()) + 1.0])
    # A common factor on what is wanted is a target time whose curve is a straight line.
    lines = Curves(np.broadcast_to(reach, (len(low), 2)), reach / wanted[:, None])
    grains = _settle(lines, int(global_batch_size // bounds.grain), low, high, _bisect)
    return _carry_rest(lambda sizes: sizes / wanted, grains, rest, bounds)


# Given how many samples fit under a target time, narrow two targets down on those wanted.
_Total = Callable[[Floats], Floats]
_Narrow = Callable[[_Total, float, float, float], tuple[float, float]]


def _touch(model: Model, total: int, bounds: Bounds) -> Model:
    """Return the separable model to solve: the tangent near the best sizes of a coupled one."""
    if not model.is_coupled:
        return model
    low, high = bounds.floor.astype(np.float64), bounds.cap.astype(np.float64)
    level = np.clip(total / model.world_size, low, high)
    best, best_s, gone = model, math.inf, math.inf
    for _ in range(_RENEWALS if model.world_size <= _SMALL_WORLD else _FEW_RENEWALS):
        tangent = model.without_sharing(level)
        step_s = float(tangent.times(level).max())  # the model's own: they touch here
        if step_s < best_s:
            best, best_s = tangent, step_s
        if gone < 0.5:  # of a sample: the same whole sizes
            break
        before, level = level, tangent.curves(low, high).level(float(total))
        gone = float(np.abs(level - before).max())
    return best


@dataclass(frozen=True)
class _Separable:
    """A problem in which each rank's time depends on its own batch only."""

    model: Model  # the model, or its tangent
    curves: Curves  # its times against whole grains
    low: Ints  # least grains, [world_size]
    high: Ints  # most grains, [world_size]
    grains: int  # to give out
    rest: int  # samples that one rank carries beside them
    bounds: Bounds  # of the sizes

    @classmethod
    def of(cls, model: Model, total: int, bounds: Bounds) -> _Separable:
        low, high, rest = bounds.lattice(total)
        if model.world_size != len(low):
            known = f"the model knows {model.world_size} ranks, the bounds {len(low)}"
            raise ArgumentError(f"{known}; pass one for each")
        touching, grain = _touch(model, total, bounds), bounds.grain
        curves = touching.curves(np.float64(grain) * low, np.float64(grain) * high)
        if grain > 1:
            curves = Curves(curves.knot_sizes / grain, curves.knot_times)
        return cls(touching, curves, low, high, total // grain, rest, bounds)

    def solve(self, narrow: _Narrow) -> Sizes:
        found = _settle(self.curves, self.grains, self.low, self.high, narrow)
        return _carry_rest(self.model.times, found, self.rest, self.bounds)


def _settle(curves: Curves, grains: int, low: Ints, high: Ints, narrow: _Narrow) -> Ints:
    """Return grains of each rank: those under the target, and a fair share of the next ones."""

    def allowed(limits: Floats) -> Floats:  # [num_targets, world_size], whole grains
        return np.clip(np.floor(curves.largest_within(limits) + 1e-9), low, high)

    # Just below the least time: there even a first knot is out of reach, so floors alone count.
    bottom = float(curves.knot_times.min()) * (1 - 1e-9) - 1e-15
    top = float(curves.knot_times.max())
    under, over = narrow(lambda limits: allowed(limits).sum(axis=1), bottom, top, float(grains))
    ends = allowed(np.array([under, over])).astype(np.int64)
    if ends[0].sum() >= grains:  # floors alone reach the sum
        ends[0] = low
    missing = grains - int(ends[0].sum())
    settled: Ints = ends[0] + _share(ends[1] - ends[0], missing)
    return settled


def _share(room: Ints, missing: int) -> Ints:
    """Give ``missing`` grains out in proportion to ``room``; ties go to the lower rank."""
    total = int(room.sum())
    if missing == 0 or total == 0:
        return np.zeros_like(room)
    given, remainders = np.divmod(room * missing, total)
    order = np.argsort(-remainders, kind="stable")
    given[order[: missing - int(given.sum())]] += 1
    return given


def _bisect(total: _Total, under: float, over: float, wanted: float) -> tuple[float, float]:
    while over - under > _FINE * abs(over):
        middle = 0.5 * (under + over)
        if not under < middle < over:
            break
        reached = total(np.array([middle]))[0]
        if reached == wanted:  # whole sizes that add up: no lower target gives other ones
            return middle, middle
        if reached > wanted:
            over = middle
        else:
            under = middle
    return under, over


def _refine_grid(total: _Total, under: float, over: float, wanted: float) -> tuple[float, float]:
    while over - under > _ENOUGH * abs(over):
        points = np.linspace(under, over, _GRID_POINTS)
        reached = total(points)
        enough = reached >= wanted
        first = int(np.argmax(enough)) if enough.any() else _GRID_POINTS - 1  # rounding, at the top
        if first == 0:
            return under, under
        if reached[first] == wanted:
            return float(points[first]), float(points[first])
        nearer = float(points[first - 1]), float(points[first])
        if nearer == (under, over):  # no number lies between them
            break
        under, over = nearer
    return under, over


def _carry_rest(times: _Total, grains: Ints, rest: int, bounds: Bounds) -> Sizes:
    """Turn grains into samples and let the rank that is then fastest carry the rest."""
    sizes = grains * bounds.grain
    if rest:
        after = np.where(sizes + rest <= bounds.cap, times((sizes + rest).astype(float)), np.inf)
        if not np.isfinite(after).any():
            raise PlanError(bounds.describe_shortage(int(sizes.sum()) + rest))
        sizes[int(np.argmin(after))] += rest
    return tuple(int(size) for size in sizes)


def _improve(model: Model, touching: Model, start: Sizes, bounds: Bounds) -> Sizes:
    """Transfer from the slowest rank; where ranks share a source, from all who slow it down too."""
    found = _transfer(model, touching, start, bounds)
    return _rearrange(model, found, bounds) if model.is_coupled else found


def _rearrange(model: Model, start: Sizes, bounds: Bounds) -> Sizes:
    """Try transfers of many widths between many ranks at once while any shortens the step.

    A rank is slow also because of those that it shares a source with, and several may be slow
    alike: then no transfer from one of them shortens the step, but one after the other does. So
    transfers are judged by a power mean of the true times, which the slowest ranks dominate.
    """
    sizes = best = np.array(start, dtype=np.int64)
    now, grain, num_ranks = model.times(sizes), bounds.grain, len(sizes)
    best_s, floor = float(now.max()), -(-bounds.floor // grain) * grain  # in whole grains
    # 1, 2, 4, .. grains, and what one rank carries beside whole grains.
    doubled = grain * 2 ** np.arange(max(int(sizes.max()) // grain, 1).bit_length())
    widths = np.unique(np.append(doubled, (sizes % grain).max() or grain))
    reach = max(int((_TRIED_TIMES / num_ranks / len(widths)) ** 0.5), 1)  # ranks at either end
    for _ in range(_ROUNDS if num_ranks <= _SMALL_WORLD else _FEW_RENEWALS):
        by_time = np.argsort(-now, kind="stable")
        ends = np.meshgrid(by_time[:reach], by_time[::-1][:reach], widths, indexing="ij")
        giver, taker, width = (each.ravel() for each in ends)
        tried = np.repeat(sizes[None], len(giver), axis=0)  # [num_transfers, world_size]
        tried[np.arange(len(giver)), giver] -= width
        tried[np.arange(len(giver)), taker] += width
        fits = ((tried >= floor) & (tried <= bounds.cap)).all(axis=1)
        tried = tried[fits & ((tried % grain > 0).sum(axis=1) <= 1)]
        if not len(tried):
            break
        then, level = model.times(tried), float(now.max())
        badness = ((then / level) ** _POWER).mean(axis=1)
        at = int(np.argmin(badness))
        if badness[at] >= ((now / level) ** _POWER).mean() * (1 - 1e-9):
            break
        sizes, now = tried[at], then[at]
        if float(now.max()) < best_s * (1 - 1e-12):
            best, best_s = sizes, float(now.max())
    return tuple(int(size) for size in best)


def _transfer(model: Model, touching: Model, start: Sizes, bounds: Bounds) -> Sizes:
    """Move samples from the slowest rank to one that is faster with them, halving the step.

    ``touching``, the model or its tangent, chooses who takes them; ``model`` judges the outcome.
    """
    sizes = np.array(start, dtype=np.int64)
    now = model.times(sizes)
    step = max(int(sizes.max()) // 8 // bounds.grain, 1) * bounds.grain
    for _ in range(_TRANSFERS):
        giver = int(np.argmax(now))
        tried = sizes + step
        fits = (tried <= bounds.cap) & (np.arange(len(sizes)) != giver)
        after = np.where(fits, touching.times(np.minimum(tried, bounds.cap)), np.inf)
        taker = int(np.argmin(after))
        if after[taker] < now[giver] and sizes[giver] - step >= bounds.floor[giver]:
            moved = sizes.copy()
            moved[giver] -= step
            moved[taker] += step
            then = model.times(moved)
            if then.max() < now[giver] * (1 - 1e-12):
                sizes, now = moved, then
                touching = model.without_sharing(sizes) if step > bounds.grain else touching
                continue
        if step == bounds.grain:
            break
        step = max(step // 2 // bounds.grain, 1) * bounds.grain
    return tuple(int(size) for size in sizes)


# How much better any other sizes could be.


def least_s(model: StepModel, global_batch_size: int, bounds: Bounds) -> float:
    """Return seconds that the slowest rank takes at least, whatever the sizes; a proven bound.

    It is for ranks that share sources, where no solver is exact. Sizes of a step of T seconds keep
    two laws, of which each forgets a part of the model:

    * No rank has more samples than it could do in T with its source to itself, since the queue is
      never shorter than the rank's own samples.
    * The rank that fetches most from a source waits for all that is fetched there. So it is no
      more in all than a rank could wait for within T that fetches at least the mean.

    The most samples that ranks can have under both grow with T, which is bisected for the global
    batch. 0 where shares are split into micro-batches: there times may fall as a batch grows.
    """
    low, high = bounds.floor.astype(np.float64), bounds.cap.astype(np.float64)
    if int(count_passes(high, model.pass_size).max(initial=1)) > 1:
        return 0.0
    is_shared = (model.source >= 0) & (model.shared_s > 0)
    alone = replace(
        model,
        remote_s=model.remote_s + np.where(is_shared, model.shared_s, 0.0),
        shared_s=np.zeros_like(model.shared_s),
    ).curves(low, high)
    members = [np.flatnonzero(is_shared & (model.source == one)) for one in set(model.source)]
    under, over = (
        0.0,
        float(alone.knot_times[:, -1].max()) + float((model.shared_s * high.sum()).max()),
    )
    for _ in range(_HALVINGS):
        limit_s = 0.5 * (under + over)
        most = np.floor(alone.largest_within(np.array([limit_s]))[0] + 1e-9)  # of each rank
        total = float(most[~is_shared].sum())
        for ranks in members:
            if len(ranks):
                total += _most_shared(model, most, low, high, ranks, limit_s)
        is_reached = total >= global_batch_size and (alone.knot_times[:, 0] <= limit_s).all()
        under, over = (under, limit_s) if is_reached else (limit_s, over)
    return under


def _most_shared(
    model: StepModel, most: Floats, low: Floats, high: Floats, ranks: Ints, limit_s: float
) -> float:
    """Return the most samples of ``ranks``, which share a source, in a step of ``limit_s``."""
    share, hits = model.hit_share[ranks], model.hits[ranks]
    # A rank's remote samples are max((1 - share) x, x - hits): they begin at a slope of 1 - share,
    # and go on at a slope of 1 where the local samples have run out.
    runs_out = np.divide(hits, share, out=np.full(len(ranks), np.inf), where=share > 0)
    first, rest = np.minimum(most[ranks], runs_out), np.maximum(most[ranks] - runs_out, 0.0)
    slope = np.concatenate([1.0 - share, np.ones(len(ranks))])  # remote samples for one more
    taken = np.concatenate([first, rest])
    # The cheapest samples first: an upper bound even for fractions of samples.
    order = np.argsort(slope, kind="stable")
    slope, taken = slope[order], taken[order]
    before = np.cumsum(slope * taken) - slope * taken
    room = np.maximum(_most_remote(model, low, high, ranks, limit_s) - before, 0.0)
    fits = np.divide(room, slope, out=np.full(len(slope), np.inf), where=slope > 0)
    return float(np.minimum(taken, fits).sum())


def _most_remote(model: StepModel, low: Floats, high: Floats, ranks: Ints, limit_s: float) -> float:
    """Return the most samples that ``ranks`` together can fetch from their source in a step."""
    share, hits = model.hit_share[ranks], model.hits[ranks]

    def is_within(remote: float) -> bool:
        each = remote / len(ranks)
        size = np.divide(each, 1.0 - share, out=np.full(len(ranks), np.inf), where=share < 1)
        size = np.maximum(np.minimum(size, each + hits), low[ranks])
        fits = size <= high[ranks]
        sizes = low.copy()
        sizes[ranks] = np.where(fits, size, low[ranks])
        local = model.local(sizes)
        fetch = model.fetch_fixed_s + model.local_s * local + model.remote_s * (sizes - local)
        seconds = model.combine(fetch + model.shared_s * remote, model.compute(sizes))[ranks]
        return bool((fits & (seconds <= limit_s)).any())

    under, over = 0.0, float(high[ranks].sum())
    if is_within(over):
        return over
    for _ in range(_HALVINGS):
        middle = 0.5 * (under + over)
        under, over = (middle, over) if is_within(middle) else (under, middle)
    return over
