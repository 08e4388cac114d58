"""The definition of every rule, in plain NumPy; the kernels are tested against this page.

Order. The values of one coordinate are ordered -inf < ... < -0 < +0 < ... < +inf < NaN; every NaN,
of either sign and any payload, is the same last value. Rows that tie are ordered by weight. A NaN
takes a rank like any other value, so a rule that drops f a side survives f rows of NaN.

Sums. ``_fold_sum`` adds the kept values in pairs from the middle outwards and the pairs by a binary
tree: the order depends on ranks alone, so the result is the same for every order of the rows,
and negating every value negates it exactly.

Results. A selected NaN gives NaN, -0 becomes +0, and a mean of finite values is finite and lies
between the smallest and the largest kept value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from loft_hvd.aggregation.rules import (
    Custom,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)

__all__ = ["reference", "window"]

Array = npt.NDArray[Any]

_SCALE = 2.0**-64  # no sum of 2**10 values with weights below 2**30, scaled by this, overflows


def reference(
    gradients: npt.ArrayLike,
    rule: Rule,
    *,
    weights: Sequence[int] | None = None,
    present: npt.ArrayLike | None = None,
    precision: npt.DTypeLike = np.float64,
) -> Array:
    """Aggregate ``gradients`` with ``rule``, slowly and by the book.

    Args:
        gradients: one row per worker, shape [world_size, numel], floating point.
        rule: any rule.
        weights: sample count of each row, [world_size]; None for equal weights.
        present: which rows are there, [world_size], or [world_size, num_blocks] for blocks of
            ceil(numel / num_blocks) coordinates; None for all.
        precision: type of the arithmetic after sorting; float32 gives the kernels' bits for
            float32 and, before the last rounding, for float16 and bfloat16.

    Returns:
        Shape [numel], dtype ``precision``.

    Raises:
        AggregationError: the rule does not fit the rows.
    """
    values = np.asarray(gradients)
    world_size, numel = values.shape
    mask = np.ones((world_size, 1), bool) if present is None else np.asarray(present, bool)
    mask = mask.reshape(world_size, -1)
    block = max(1, -(-numel // mask.shape[1]))
    result = np.empty(numel, precision)
    for column in range(mask.shape[1]):
        span = slice(min(numel, column * block), min(numel, (column + 1) * block))
        if span.start == span.stop and mask.shape[1] > 1:
            continue  # a block without coordinates asks for no rows
        rule.check(world_size, weights=weights, present=list(mask[:, column]))
        rows = [
            row for row in range(world_size) if mask[row, column] and not _is_zero(weights, row)
        ]
        counts = np.array([1 if weights is None else int(weights[row]) for row in rows], np.int64)
        counts //= np.gcd.reduce(counts)  # so that equal weights are the unweighted rule
        with np.errstate(all="ignore"):
            part = _apply(values[rows, span], rule, counts, np.dtype(precision))
            result[span] = part + np.dtype(precision).type(0)  # -0 becomes +0
    return result


def window(
    gradients: npt.ArrayLike,
    rule: Rule,
    *,
    weights: Sequence[int] | None = None,
    precision: npt.DTypeLike = np.float64,
) -> tuple[Array, Array]:
    """Return the smallest and the largest value that each coordinate keeps, [numel] each.

    All rows are present with weight > 0. What lies strictly outside is what diagnostics count: the
    middle one or two values of a median, ranks f to n - 1 - f of a trimmed mean, the n - f nearest
    values of the rules around a centre.
    """
    values = np.asarray(gradients)
    counts = np.ones(len(values), np.int64) if weights is None else np.asarray(weights, np.int64)
    ranked, by_rank = _sort(values.astype(precision), counts // np.gcd.reduce(counts))
    rows = len(ranked)
    with np.errstate(all="ignore"):
        if isinstance(rule, Median):
            return _median(ranked, by_rank, "lower"), _median(ranked, by_rank, "upper")
        if not isinstance(rule, MeanAroundMedian | Phocas):
            return ranked[rule.f], ranked[rows - 1 - rule.f]
        near, _ = _nearest(ranked, by_rank, _centre(ranked, rule), rows - rule.f)
        order = near.argsort(axis=0, kind="stable")  # NaN last
        picked = np.take_along_axis(near, order, 0)
        return picked[0], picked[-1]


def _is_zero(weights: Sequence[int] | None, row: int) -> bool:
    return weights is not None and weights[row] == 0


def _apply(values: Array, rule: Rule, counts: Array, precision: np.dtype[Any]) -> Array:
    """Apply ``rule`` to the rows that count: values [rows, numel], counts [rows]."""
    if isinstance(rule, Custom):
        called = rule.fn(values, counts.tolist()) if rule.takes_weights else rule.fn(values)
        return np.asarray(called, precision)
    ranked, weights = _sort(values.astype(precision), counts)
    rows = len(ranked)
    if isinstance(rule, Median):
        return _median(ranked, weights, rule.kind)
    if isinstance(rule, MeanAroundMedian | Phocas):
        centre = _centre(ranked, rule)
        near, near_weights = _nearest(ranked, weights, centre, rows - rule.f)
        mean = _mean(near, near_weights)
        return np.where(np.isnan(centre), centre, mean)
    trim = rule.f if isinstance(rule, TrimmedMean) else 0
    return _mean(ranked[trim : rows - trim], weights[trim : rows - trim])


def _centre(ranked: Array, rule: MeanAroundMedian | Phocas) -> Array:
    """Return what the kept values are nearest to, [numel]; weights do not move it."""
    equal = np.ones(ranked.shape, np.int64)
    if isinstance(rule, Phocas):
        return _mean(ranked[rule.f : len(ranked) - rule.f], equal[2 * rule.f :])
    return _median(ranked, equal, "midpoint")


def _sort(values: Array, counts: Array) -> tuple[Array, Array]:
    """Order every coordinate by (value, weight): values and weights, [rows, numel] each."""
    weights = np.broadcast_to(counts[:, None], values.shape)
    is_positive = ~np.signbit(values) & (values == 0)  # -0 before +0
    order = np.lexsort((weights, is_positive, values), axis=0)  # NaN, of either sign, comes last
    return np.take_along_axis(values, order, 0), np.take_along_axis(weights, order, 0)


def _median(ranked: Array, weights: Array, kind: str) -> Array:
    """Return the smallest value with at least half of the weight at or below it, or the next."""
    below = np.cumsum(weights, axis=0)  # exact: int64
    total = below[-1]
    first = np.argmax(2 * below >= total, axis=0)[None]
    last = np.argmax(2 * below > total, axis=0)[None]
    lower = np.take_along_axis(ranked, first, 0)[0]
    upper = np.take_along_axis(ranked, last, 0)[0]
    half = ranked.dtype.type(0.5)
    middle = np.where(lower == upper, lower, half * lower + half * upper)
    picked: Array = {"lower": lower, "upper": upper, "midpoint": middle}[kind]
    return picked


def _nearest(ranked: Array, weights: Array, centre: Array, keep: int) -> tuple[Array, Array]:
    """Keep the ``keep`` values nearest to ``centre``, [numel]; of two equally near, the lower.

    -inf is farther than any finite value, though both distances may overflow.

    The nearest values are neighbours in rank, so a window slides up while that helps. Slot
    ``i % keep`` holds the value that leaves when the window moves from i to i + 1.
    """
    near, near_weights = ranked[:keep].copy(), weights[:keep].copy()
    for i in range(len(ranked) - keep):
        leaving, entering = ranked[i], ranked[i + keep]
        below, above = centre - leaving, entering - centre
        overflows = (below == above) & np.isinf(leaving) & np.isfinite(entering)
        moves = (below > above) | overflows
        near[i % keep] = np.where(moves, entering, near[i % keep])
        near_weights[i % keep] = np.where(moves, weights[i + keep], near_weights[i % keep])
    return near, near_weights


def _mean(kept: Array, weights: Array) -> Array:
    """Average ``kept`` [m, numel] by ``weights`` [m, numel]; finite values have a finite mean."""
    precision = kept.dtype.type
    low, high = kept.min(axis=0), kept.max(axis=0)  # NaN if one is NaN
    total = weights.sum(axis=0)
    mean = _fold_sum(kept * weights.astype(precision)) / total.astype(precision)
    scaled = _fold_sum((kept * np.float64(_SCALE)) * weights) / total / _SCALE
    overflowed = ~np.isfinite(mean) & np.isfinite(low) & np.isfinite(high)
    mean = np.where(overflowed, scaled.astype(precision), mean)
    mean = np.where(mean < low, low, mean)  # false for NaN
    bounded: Array = np.where(mean > high, high, mean).astype(precision)
    return bounded


def _fold_sum(values: Array) -> Array:
    """Sum [m, numel] over the first axis: pairs from the middle outwards, then a binary tree."""
    half = len(values) // 2
    if len(values) % 2:
        leaves = [values[half]] + [values[half - k] + values[half + k] for k in range(1, half + 1)]
    else:
        leaves = [values[half - 1 - k] + values[half + k] for k in range(half)]
    while len(leaves) > 1:
        pairs = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves) - 1, 2)]
        leaves = pairs + leaves[len(leaves) - len(leaves) % 2 :]
    return np.asarray(leaves[0])
