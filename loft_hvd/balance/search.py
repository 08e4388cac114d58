"""Choose batch sizes: minimise the slowest rank's time while the sizes add up to the global batch.

Two solvers after LOFT's problem statement. ``exact`` bisects the target time; because every rank's
time is nondecreasing in its batch, the sizes that fit under a target are known at once, and their
sum grows with it: O(world_size * log(1/eps)). ``grid`` is an adaptive coarse-to-fine grid over the
target time, finished by transfers between the slowest and the fastest rank with a shrinking step.
Sizes are multiples of ``grain``; when the global batch is not, one rank carries the rest. Equal
inputs give equal plans: ties go to the lower rank.

A shared source couples the ranks. Both solvers then work on the model's tangent at the last plan,
renew it a few times, and keep the plan whose true step is shortest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.bounds import Bounds
from loft_hvd.balance.curves import Curves
from loft_hvd.errors import ArgumentError, PlanError

__all__ = ["SOLVERS", "Bounds", "Model", "equal_within", "exact", "grid", "round_to_lattice"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_RENEWALS = 5  # tangents of a shared source; the plan mostly stands still after 3 or 4
_GRID_POINTS = 9
_FINE = 1e-12  # of the target time


class Model(Protocol):
    """What a solver needs to know of the ranks: ``StepModel`` and ``Curves`` are two."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def is_coupled(self) -> bool:
        """Whether the time of a rank depends on the batches of others."""

    def curves(self, low: Floats, high: Floats) -> Curves:
        """Tabulate a separable model on [low, high]."""

    def times(self, sizes: npt.ArrayLike) -> Floats:
        """Return seconds of each rank at ``sizes`` [world_size]."""

    def without_sharing(self, sizes: npt.ArrayLike) -> Model:
        """Return the separable model that touches this one at ``sizes``."""


def exact(model: Model, global_batch_size: int, bounds: Bounds) -> tuple[int, ...]:
    """Return the sizes whose slowest rank is fastest, by bisection of the target time.

    Args:
        model: nondecreasing times of every rank.
        global_batch_size: samples of all ranks.
        bounds: floors, caps and grain.

    Returns:
        Samples of each rank, [world_size], adding up to ``global_batch_size``.

    Raises:
        PlanError: the bounds do not admit ``global_batch_size``.
    """
    return _solve(model, global_batch_size, bounds, _bisect)


def grid(model: Model, global_batch_size: int, bounds: Bounds) -> tuple[int, ...]:
    """Return sizes by an adaptive coarse-to-fine grid search, then transfers between ranks.

    Takes, returns and raises what ``exact`` does.
    """
    sizes = _solve(model, global_batch_size, bounds, _refine_grid)
    return _transfer(model, np.array(sizes, dtype=np.int64), bounds)


SOLVERS: dict[str, Callable[[Model, int, Bounds], tuple[int, ...]]] = {"grid": grid, "exact": exact}


def equal_within(global_batch_size: int, bounds: Bounds) -> tuple[int, ...]:
    """Return sizes as equal as the bounds allow: all alike, but for caps, floors and grain."""
    reach = np.stack([np.zeros(len(bounds.cap)), bounds.cap + 2.0 * bounds.grain], axis=1)
    return exact(Curves(reach, reach), global_batch_size, bounds)


def round_to_lattice(wanted: Floats, global_batch_size: int, bounds: Bounds) -> tuple[int, ...]:
    """Return the sizes within the bounds that follow ``wanted`` [world_size] most closely.

    Raises:
        PlanError: the bounds do not admit ``global_batch_size``.
    """
    low, high, rest = bounds.lattice(global_batch_size)
    wanted = np.clip(np.nan_to_num(wanted, nan=0.0, posinf=0.0), 1e-9, None) / bounds.grain
    reach = np.array([0.0, float(high.max()) + 1.0])
    # A common factor on what is wanted is a target time whose curve is a straight line.
    lines = Curves(np.broadcast_to(reach, (len(low), 2)), reach / wanted[:, None])
    grains = _settle(lines, int(global_batch_size // bounds.grain), low, high, _bisect)
    return _carry_rest(lambda sizes: sizes / wanted, grains, rest, bounds)


_Narrow = Callable[[Callable[[Floats], Floats], float, float, float], tuple[float, float]]


def _solve(model: Model, total: int, bounds: Bounds, narrow: _Narrow) -> tuple[int, ...]:
    low, high, rest = bounds.lattice(total)
    if model.world_size != len(low):
        raise ArgumentError(
            f"the model knows {model.world_size} ranks, the bounds {len(low)}; pass one for each"
        )
    grain, grains = bounds.grain, total // bounds.grain

    def plan(separable: Model) -> tuple[int, ...]:
        curves = separable.curves(np.float64(grain) * low, np.float64(grain) * high)
        in_grains = Curves(curves.knot_sizes / grain, curves.knot_times)
        found = _settle(in_grains, grains, low, high, narrow)
        return _carry_rest(lambda sizes: separable.times(sizes), found, rest, bounds)

    if not model.is_coupled:
        return plan(model)
    level = np.array(equal_within(total, bounds), dtype=np.float64)
    best, best_s = level, math.inf
    for _ in range(_RENEWALS):
        curves = model.without_sharing(level).curves(
            np.float64(grain) * low, np.float64(grain) * high
        )
        before, level = level, curves.level(float(total))
        step_s = float(model.times(level).max())
        if step_s < best_s:
            best, best_s = level, step_s
        if np.abs(level - before).max() < 0.5:
            break
    return plan(model.without_sharing(best))


def _settle(curves: Curves, grains: int, low: Ints, high: Ints, narrow: _Narrow) -> Ints:
    """Return grains of each rank: those under the target, and a fair share of the next ones."""

    def allowed(limits: Floats) -> Floats:  # [num_targets, world_size], whole grains
        return np.clip(np.floor(curves.largest_within(limits) + 1e-9), low, high)

    bottom, top = (
        float(curves.knot_times.min()) * (1 - 1e-9) - 1e-15,
        float(curves.knot_times.max()),
    )
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


def _bisect(
    total: Callable[[Floats], Floats], under: float, over: float, wanted: float
) -> tuple[float, float]:
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


def _refine_grid(
    total: Callable[[Floats], Floats], under: float, over: float, wanted: float
) -> tuple[float, float]:
    while over - under > 1e-6 * abs(over):
        points = np.linspace(under, over, _GRID_POINTS)
        reached = total(points)
        enough = reached >= wanted
        first = int(np.argmax(enough)) if enough.any() else _GRID_POINTS - 1
        if first == 0:
            return under, under
        if reached[first] == wanted:
            return float(points[first]), float(points[first])
        under, over = float(points[first - 1]), float(points[first])
    return under, over


def _carry_rest(
    times: Callable[[Floats], Floats], grains: Ints, rest: int, bounds: Bounds
) -> tuple[int, ...]:
    """Turn grains into samples and let the rank that is then fastest carry the rest."""
    sizes = grains * bounds.grain
    if rest:
        after = np.where(sizes + rest <= bounds.cap, times((sizes + rest).astype(float)), np.inf)
        if not np.isfinite(after).any():
            raise PlanError(bounds.describe_shortage(int(sizes.sum()) + rest))
        sizes[int(np.argmin(after))] += rest
    return tuple(int(size) for size in sizes)


def _transfer(model: Model, sizes: Ints, bounds: Bounds) -> tuple[int, ...]:
    """Move samples from the slowest rank to the one fastest with them, halving the step."""
    now = model.times(sizes)
    step = max(int(sizes.max()) // 8 // bounds.grain, 1) * bounds.grain
    for _ in range(64):
        giver = int(np.argmax(now))
        tried = sizes + step
        fits = (tried <= bounds.cap) & (np.arange(len(sizes)) != giver)
        after = np.where(fits, model.times(np.minimum(tried, bounds.cap)), np.inf)
        taker = int(np.argmin(after))
        moved = sizes.copy()
        moved[giver] -= step
        moved[taker] += step
        then = model.times(moved) if np.isfinite(after[taker]) else now
        if moved[giver] >= bounds.floor[giver] and then.max() < now.max() * (1 - 1e-12):
            sizes, now = moved, then
        elif step == bounds.grain:
            break
        else:
            step = max(step // 2 // bounds.grain, 1) * bounds.grain
    return tuple(int(size) for size in sizes)
