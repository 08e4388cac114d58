"""The definition of every rule; the kernels are tested against this page.

Order. The values of one coordinate are ordered -inf < ... < -0 < +0 < ... < +inf < NaN; every NaN,
of either sign and any payload, is the same last value. Rows that tie are ordered by weight. A NaN
takes a rank like any other value, so a rule that drops f a side survives f rows of NaN.

Sums. ``_fold_sum`` adds the kept values in pairs from the middle outwards and the pairs by a binary
tree: the order depends on ranks alone, so the result is the same for every order of the rows,
and negating every value negates it exactly.

Results. A selected NaN gives NaN, -0 becomes +0, and a mean of finite values is finite and lies
between the smallest and the largest kept value.

``apply`` is the law: what a rule makes of values in order. ``reference`` puts whole rows in
order by the book and applies it; ``fallback.py`` orders them faster and applies the same law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)

__all__ = ["Kept", "apply", "reference", "window"]

Array = npt.NDArray[Any]

# No sum of 2**10 rows with weights that add up to less than 2**30, scaled by this, overflows.
_SCALE = 2.0**-64


class Kept(NamedTuple):
    """What a rule makes of each coordinate, [numel] each.

    Attributes:
        result: the aggregate.
        low: the smallest value that the rule kept.
        high: the largest one; NaN is larger than +inf.
    """

    result: Tensor
    low: Tensor
    high: Tensor


def apply(rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Apply ``rule`` to values in order.

    Args:
        rule: any rule but ``Custom``, already checked against the rows.
        ranked: the values of each coordinate in ascending order, [rows, numel], in the precision
            of the arithmetic.
        weights: the weight of each value, int64, [rows, numel], or [rows, 1] where all are equal.
    """
    return _LAWS[type(rule)](rule, ranked, weights)


def _apply_mean(rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Average what is left without the f smallest and f largest values; f is 0 for ``Mean``."""
    last = len(ranked) - rule.f
    return Kept(
        _mean(ranked[rule.f : last], weights[rule.f : last]), ranked[rule.f], ranked[last - 1]
    )


def _apply_median(rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Take the middle value by weight, or what lies between two of them."""
    lower, upper = _middle(ranked, weights)
    kind = rule.kind if isinstance(rule, Median) else "midpoint"
    picked = {"lower": lower, "upper": upper, "midpoint": _midpoint(lower, upper)}
    return Kept(picked[kind], lower, upper)


def _apply_around_median(rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Average the rows - f values nearest to the median; weights do not move the centre."""
    centre = _midpoint(*_middle(ranked, torch.ones_like(weights)))
    return _around(centre, rule, ranked, weights)


def _apply_phocas(rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Average the rows - f values nearest to the trimmed mean; weights do not move the centre."""
    trimmed = slice(rule.f, len(ranked) - rule.f)
    centre = _mean(ranked[trimmed], torch.ones_like(weights[trimmed]))
    return _around(centre, rule, ranked, weights)


_LAWS: dict[type[Rule], Callable[[Rule, Tensor, Tensor], Kept]] = {
    Mean: _apply_mean,
    Median: _apply_median,
    TrimmedMean: _apply_mean,
    MeanAroundMedian: _apply_around_median,
    Phocas: _apply_phocas,
}


def _middle(ranked: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first value with at least half of the weight up to it, and with more than half.

    Weights 1 1 2 2 add up to 1 2 4 6 of 6: half, 3, is reached and passed by the third value, which
    is both. With 1 1 1 1 the second value reaches half, and only the third passes it.
    """
    up_to = weights.cumsum(0)  # [rows, numel] or [rows, 1], exact: int64
    first = (2 * up_to >= up_to[-1]).int().argmax(0, keepdim=True)  # argmax: the first True
    last = (2 * up_to > up_to[-1]).int().argmax(0, keepdim=True)
    return ranked.take_along_dim(first, 0)[0], ranked.take_along_dim(last, 0)[0]


def _midpoint(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the middle of two values; halving before adding cannot overflow."""
    # Half of the smallest subnormal is 0, so equal values are taken as they are.
    return torch.where(lower == upper, lower, 0.5 * lower + 0.5 * upper)


def _around(centre: Tensor, rule: Rule, ranked: Tensor, weights: Tensor) -> Kept:
    """Average the rows - f values nearest to ``centre``, [numel]; of two equally near, the lower.

    -inf is farther than any finite value, though both distances may overflow.

    The nearest values are neighbours in rank, so a window of them slides up while that helps. Slot
    ``i % keep`` holds the value that leaves when the window moves from i to i + 1. With keep = 3:

        window 0: ranks 0 1 2   slots 0 1 2
        window 1: ranks 1 2 3   slots 3 1 2     0 leaves slot 0, 3 enters it
        window 2: ranks 2 3 4   slots 3 4 2     1 leaves slot 1, 4 enters it
    """
    keep = len(ranked) - rule.f
    weights = weights.expand_as(ranked)
    near, near_weights = ranked[:keep].clone(), weights[:keep].clone()
    low, high = ranked[0], ranked[keep - 1]
    for i in range(rule.f):
        leaving, entering = ranked[i], ranked[i + keep]
        below, above = centre - leaving, entering - centre
        overflows = (below == above) & leaving.isinf() & entering.isfinite()
        moves = (below > above) | overflows
        near[i % keep] = torch.where(moves, entering, near[i % keep])
        near_weights[i % keep] = torch.where(moves, weights[i + keep], near_weights[i % keep])
        low, high = torch.where(moves, ranked[i + 1], low), torch.where(moves, entering, high)
    return Kept(torch.where(centre.isnan(), centre, _mean(near, near_weights)), low, high)


def _mean(kept: Tensor, weights: Tensor) -> Tensor:
    """Average ``kept``, [m, numel], by weight; finite values have a finite mean."""
    low, high = kept.amin(0), kept.amax(0)  # NaN if one is NaN
    total = weights.sum(0)  # a tensor: by a number CUDA would multiply with its reciprocal
    mean = _fold_sum(kept * weights.to(kept.dtype)) / total.to(kept.dtype)
    overflowed = ~mean.isfinite() & low.isfinite() & high.isfinite()
    if bool(overflowed.any()):
        scaled = _fold_sum(kept.double() * _SCALE * weights) / total / _SCALE
        mean = torch.where(overflowed, scaled.to(kept.dtype), mean)
    # Roundings may carry a mean past its values. Comparing with NaN is false, so NaN stays.
    mean = torch.where(mean < low, low, mean)
    return torch.where(mean > high, high, mean)


def _fold_sum(values: Tensor) -> Tensor:
    """Sum [m, numel] over the first axis: pairs from the middle outwards, then a binary tree.

    Five values a b c d e are the leaves c, b + d, a + e, and their sum (c + (b + d)) + (a + e).
    Six, a to f, are c + d, b + e, a + f, summed likewise.
    """
    half = len(values) // 2
    if len(values) % 2:
        leaves = [values[half]] + [values[half - k] + values[half + k] for k in range(1, half + 1)]
    else:
        leaves = [values[half - 1 - k] + values[half + k] for k in range(half)]
    while len(leaves) > 1:
        pairs = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves) - 1, 2)]
        leaves = pairs + leaves[len(leaves) - len(leaves) % 2 :]  # an odd one goes up as it is
    return leaves[0]


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
    counts = np.ones(world_size, np.int64) if weights is None else np.asarray(weights, np.int64)
    mask = np.ones((world_size, 1), bool) if present is None else np.asarray(present, bool)
    mask = mask.reshape(world_size, -1)  # [world_size, num_blocks]
    block = max(1, -(-numel // mask.shape[1]))
    result = np.empty(numel, precision)
    for column in range(mask.shape[1]):
        span = slice(min(numel, column * block), min(numel, (column + 1) * block))
        if span.start == span.stop and mask.shape[1] > 1:
            continue  # a block without coordinates asks for no rows
        rule.check(world_size, weights=weights, present=list(mask[:, column]))
        rows = mask[:, column] & (counts > 0)
        if isinstance(rule, Custom):
            extra = (_reduced(counts[rows]).tolist(),) if rule.takes_weights else ()
            result[span] = np.asarray(rule.fn(values[rows, span], *extra), precision)
        else:
            result[span] = _ranked_and_applied(values[rows, span], rule, counts[rows], precision)[0]
        result[span] += np.dtype(precision).type(0)  # -0 becomes +0
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
    return _ranked_and_applied(values, rule, counts, precision)[1:]


def _reduced(counts: Array) -> Array:
    """Divide weights by their common divisor, so that equal weights are the unweighted rule."""
    reduced: Array = counts // np.gcd.reduce(counts)
    return reduced


def _ranked_and_applied(
    values: Array, rule: Rule, counts: Array, precision: npt.DTypeLike
) -> tuple[Array, Array, Array]:
    """Order every coordinate of [rows, numel] by (value, weight) and apply the rule."""
    values = values.astype(precision)
    weights = np.broadcast_to(_reduced(counts)[:, None], values.shape)
    is_positive = ~np.signbit(values) & (values == 0)  # -0 before +0
    order = np.lexsort((weights, is_positive, values), axis=0)  # NaN, of either sign, comes last
    ranked, by_rank = (np.take_along_axis(part, order, 0) for part in (values, weights))
    kept = apply(rule, torch.from_numpy(ranked), torch.from_numpy(by_rank))
    return kept.result.numpy(), kept.low.numpy(), kept.high.numpy()
