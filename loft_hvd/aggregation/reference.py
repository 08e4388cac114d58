"""The definition of every rule; the kernels are tested against this page.

Order. The values of one coordinate are ordered -inf < ... < -0 < +0 < ... < +inf < NaN; every NaN,
of either sign and any payload, is the same last value. Rows that tie are ordered by weight. A NaN
takes a rank like any other value, so a rule that drops f a side survives f rows of NaN.

Sums. ``_fold_sum`` adds the kept values in pairs from the middle outwards and the pairs by a binary
tree: the order depends on ranks alone, so the result is the same for every order of the rows,
and negating every value negates it exactly.

Results. A selected NaN gives NaN, -0 becomes +0, and a mean of finite values is finite and lies
between the smallest and the largest kept value.

Rules that see rows mix them first: ``distances.py`` and ``mixing.py`` hold their law, and the rule
that aggregates the mixed rows is one of this page's.

Holes. Where a block did not come of some rows, ``filling_rule`` makes values of the rows that came,
which are put into all others (``filled``). It survives as many wrong rows as the rule does. What it
makes has no -0, and one NaN, as results have.

``apply`` is the law: what a rule makes of values in order. ``reference`` puts whole rows in
order by the book and applies it; ``fallback.py`` orders them faster and applies the same law.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.distances import distances, mixed_rows, precision_of
from loft_hvd.aggregation.mixing import mix_of
from loft_hvd.aggregation.row_rules import RowRule
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)

__all__ = ["Kept", "apply", "filled", "filling_rule", "filling_weights", "reference", "window"]

Array = npt.NDArray[Any]
RankedRows: TypeAlias = "list[Tensor]"  # [numel] each, one a rank

# No sum of 2**10 rows with weights that add up to less than 2**30, scaled by this, overflows.
_SCALE = 2.0**-64
# Steps towards the weights by which holes are filled, u_i <- w_i / (1 - u_i), and what they add up
# to. A row that dominates leaves the others a thousandth, so that these keep their ratios.
_FILLING_STEPS, _FILLING_UNITS, _FILLING_LEAST = 100, 2**20, 2.0**-10


class Kept(NamedTuple):
    """What a rule makes of each coordinate, [numel] each."""

    result: Tensor  # the aggregate
    low: Tensor  # the smallest value that the rule kept
    high: Tensor  # the largest one; NaN is larger than +inf


def apply(rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Apply ``rule`` to values in order.

    Args:
        rule: a coordinate-wise one, already checked against the rows.
        ranked: the values of each coordinate in ascending order, one [numel] a rank, in the
            precision of the arithmetic.
        weights: int64, the weight of each of these values, or None where all are equal.
    """
    return _LAWS[type(rule)](rule, ranked, weights)


def _apply_mean(rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Average what is left without the f smallest and f largest values; f is 0 for ``Mean``."""
    inner = slice(rule.f, len(ranked) - rule.f)
    kept = ranked[inner]
    return Kept(_mean(kept, weights[inner] if weights else None), kept[0], kept[-1])


def _apply_median(rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Take the middle value by weight, or what lies between two of them."""
    lower, upper = _middle(ranked, weights)
    kind = rule.kind if isinstance(rule, Median) else "midpoint"
    if kind != "midpoint":
        return Kept(lower if kind == "lower" else upper, lower, upper)
    return Kept(_midpoint(lower, upper), lower, upper)


def _apply_around_median(rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Average the rows - f values nearest to the median; weights do not move the centre."""
    return _around(_midpoint(*_middle(ranked, None)), rule, ranked, weights)


def _apply_phocas(rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Average the rows - f values nearest to the trimmed mean; weights do not move the centre."""
    centre = _mean(ranked[rule.f : len(ranked) - rule.f], None)
    return _around(centre, rule, ranked, weights)


_LAWS: dict[type[Rule], Callable[[Rule, RankedRows, RankedRows | None], Kept]] = {
    Mean: _apply_mean,
    Median: _apply_median,
    TrimmedMean: _apply_mean,
    MeanAroundMedian: _apply_around_median,
    Phocas: _apply_phocas,
}


def _middle(ranked: RankedRows, weights: RankedRows | None) -> tuple[Tensor, Tensor]:
    """Return the first value with at least half of the weight up to it, and with more than half."""
    # Weights 1 1 2 2 add up to 1 2 4 6: the third value reaches half, 3, and passes it: it is both.
    # With 1 1 1 1 the second value reaches half, 2, and only the third passes it.
    if weights is None:
        return ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2]
    values = torch.stack(ranked)  # [rows, numel]
    up_to = torch.stack(weights).cumsum(0)  # [rows, numel], exact: int64
    first = (2 * up_to >= up_to[-1]).int().argmax(0, keepdim=True)  # argmax: the first True
    last = (2 * up_to > up_to[-1]).int().argmax(0, keepdim=True)
    return values.gather(0, first)[0], values.gather(0, last)[0]


def _midpoint(lower: Tensor, upper: Tensor) -> Tensor:
    """Return the middle of two values; halving before adding cannot overflow."""
    # Half of the smallest subnormal is 0, so equal values are taken as they are.
    return torch.where(lower == upper, lower, 0.5 * lower + 0.5 * upper)


def _around(centre: Tensor, rule: Rule, ranked: RankedRows, weights: RankedRows | None) -> Kept:
    """Average the rows - f values nearest to ``centre``; of two equally near, the lower."""
    # The nearest values are neighbours in rank, so a window of them slides up while that helps.
    # Slot i % keep holds the value that leaves when the window moves from i to i + 1. With keep 3:
    #     window 0: ranks 0 1 2   slots 0 1 2
    #     window 1: ranks 1 2 3   slots 3 1 2     0 leaves slot 0, 3 enters it
    #     window 2: ranks 2 3 4   slots 3 4 2     1 leaves slot 1, 4 enters it
    keep = len(ranked) - rule.f
    near, near_weights = list(ranked[:keep]), list(weights[:keep]) if weights else None
    low, high = ranked[0], ranked[keep - 1]
    for i in range(rule.f):
        leaving, entering = ranked[i], ranked[i + keep]
        below, above = centre - leaving, entering - centre
        # -inf is farther than any finite value, though both distances may overflow.
        overflows = (below == above) & leaving.isinf() & entering.isfinite()
        moves = (below > above) | overflows
        near[i % keep] = torch.where(moves, entering, near[i % keep])
        if weights and near_weights:
            near_weights[i % keep] = torch.where(moves, weights[i + keep], near_weights[i % keep])
        low, high = torch.where(moves, ranked[i + 1], low), torch.where(moves, entering, high)
    return Kept(torch.where(centre.isnan(), centre, _mean(near, near_weights)), low, high)


def _mean(kept: RankedRows, weights: RankedRows | None) -> Tensor:
    """Average by weight; a mean of finite values is finite and lies between them."""
    low, high = functools.reduce(torch.minimum, kept), functools.reduce(torch.maximum, kept)
    if weights is None:
        # A tensor: by a plain number CUDA would multiply with its reciprocal, which rounds twice.
        total = torch.full_like(low[:1], len(kept), dtype=torch.int64)
        mean = _fold_sum(kept) / total.to(low.dtype)
    else:
        total = functools.reduce(torch.add, weights)
        products = [value * by.to(low.dtype) for value, by in zip(kept, weights, strict=True)]
        mean = _fold_sum(products) / total.to(low.dtype)
    overflowed = ~mean.isfinite() & low.isfinite() & high.isfinite()  # NaN if one is NaN
    if bool(overflowed.any()):
        scaled = [value.double() * _SCALE for value in kept]
        if weights is not None:
            scaled = [value * by for value, by in zip(scaled, weights, strict=True)]
        mean = torch.where(overflowed, (_fold_sum(scaled) / total / _SCALE).to(low.dtype), mean)
    # Roundings may carry a mean past its values. Comparing with NaN is false, so NaN stays.
    mean = torch.where(mean < low, low, mean)
    return torch.where(mean > high, high, mean)


def _fold_sum(values: RankedRows) -> Tensor:
    """Sum over ranks: pairs from the middle outwards, then a binary tree."""
    # Five values a b c d e: the leaves c, b + d, a + e are summed as (c + (b + d)) + (a + e).
    # Six values a to f: the leaves are c + d, b + e, a + f.
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

    Takes what ``aggregate`` takes, as arrays, and returns [numel] of dtype ``precision``.

    Args:
        gradients: one row per worker, shape [world_size, numel], floating point.
        rule: any rule.
        weights: sample count of each row, [world_size]; None for equal weights.
        present: [world_size], or [world_size, num_blocks]; None for all.
        precision: type of the arithmetic after sorting; float32 gives the kernels' bits for
            float32 and, before the last rounding, for float16 and bfloat16.
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
            part, inner, by = values[rows, span].astype(precision), rule, _reduced(counts[rows])
            if isinstance(inner, RowRule):
                given = [torch.from_numpy(row) for row in part]
                kind = precision_of(given[0].dtype)
                mix = mix_of(inner, distances(given), by.tolist(), precision=kind)
                part = torch.stack(mixed_rows(given, mix)).numpy()
                inner, by = mix.rule, np.array(mix.weights or [1] * len(part))
            result[span] = _ranked_and_applied(part, inner, by, precision)[0]
        result[span] += np.dtype(precision).type(0)  # -0 becomes +0
    return result


def filling_rule(rule: Rule) -> Rule:
    """Return what fills holes of rows that ``rule`` aggregates afterwards."""
    if isinstance(rule, Mean):
        return Mean()
    if not rule.counts_weight:
        return TrimmedMean(rule.f)
    # A median, or a rule that survives what a median does whatever its f: perhaps around one.
    inner: Any = rule
    while isinstance(getattr(inner, "rule", None), Rule):
        inner = inner.rule
    return inner if isinstance(inner, Median) else Median()


@functools.lru_cache(maxsize=64)
def filling_weights(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return by what weights rows fill each other's holes under a mean, so that each keeps its own.

    Where row j is missing, the others count for its weight w_j by their shares u_i / (U - u_j),
    with U the sum of u. If rows are missing equally seldom, row i so gains what it loses when
    w_i = sum over j != i of w_j u_i / (U - u_j). That holds for u_i (U - u_i) = c w_i, whatever c.
    There is such a u unless a row weighs more than half of all; then that row's u dominates.

    Args:
        weights: > 0, of the rows that travel.

    Returns:
        Whole numbers, equal ones for equal weights.
    """
    by = np.array(weights, np.float64)
    shares = by / by.sum()
    for _ in range(_FILLING_STEPS):
        shares = by / np.maximum(1.0 - shares, _FILLING_LEAST)
        shares = shares / shares.sum()
    whole = np.maximum(np.rint(shares * _FILLING_UNITS), 1.0)
    return tuple(int(each) for each in whole)


def filled(
    gradients: npt.ArrayLike,
    missing: npt.ArrayLike,
    block_numel: int,
    rule: Rule,
    *,
    own: int,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
    precision: npt.DTypeLike = np.float64,
) -> Array:
    """Fill the holes of ``gradients`` as ``filling.fill_holes`` does, slowly and by the book.

    Args:
        gradients: one row per worker, shape [world_size, numel], floating point.
        missing: true where a block did not come, [world_size, num_blocks].
        block_numel: values of a block; the last one has what is left.
        rule: any rule but ``Custom``.
        own: the row that did not travel, and fills no hole under a mean.
        weights: sample count of each row, [world_size]; None for equal weights.
        present: [world_size]; None for all.
        precision: as in ``reference``; of the result, too.
    """
    values, is_missing = np.array(gradients, precision), np.asarray(missing, bool)
    world_size = len(values)
    counts = np.ones(world_size, np.int64) if weights is None else np.asarray(weights, np.int64)
    counts = counts * (np.ones(world_size, bool) if present is None else np.asarray(present, bool))
    for block in range(is_missing.shape[1]):
        span = slice(block * block_numel, (block + 1) * block_numel)
        holes, came = is_missing[:, block] & (counts > 0), ~is_missing[:, block] & (counts > 0)
        by = None
        if isinstance(rule, Mean):
            came[own] = False
            travel = np.flatnonzero((counts > 0) & (np.arange(world_size) != own))
            fills = dict(zip(travel, filling_weights(tuple(counts[travel].tolist())), strict=True))
            by = [fills[row] for row in np.flatnonzero(came)]
        if holes.any():
            part, law = values[came, span], filling_rule(rule)
            values[holes, span] = reference(part, law, weights=by, precision=precision)
    return values


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
    # The last key counts most: by value, equal values by sign, then by weight. NumPy puts NaN, of
    # either sign, last.
    order = np.lexsort((weights, is_positive, values), axis=0)
    ranked, by_rank = (np.take_along_axis(part, order, 0) for part in (values, weights))
    kept = apply(rule, *(list(torch.from_numpy(part).unbind()) for part in (ranked, by_rank)))
    return kept.result.numpy(), kept.low.numpy(), kept.high.numpy()
