"""What rules that see rows make of them: from a table of squared distances to weights of rows.

Every such rule is a ``Mix``: mixed rows, each a sum of the given rows with weights, and a
coordinate-wise rule that aggregates the mixed ones. ``mix_of`` finds it from the table alone; rows
themselves are read only twice, by ``distances.table`` before it and by one weighted pass after it.

The table is [n + 1, n + 1] float64: squared distances of the n rows and, last, of the zero vector,
so that the last row holds squared lengths. A row that is not finite, or too long for its squares,
is *not measured*: infinitely far from all. Such rows are never added to others.

Why tables of mixed rows need no rows: for weights a and b that each add up to 1 (the zero vector
takes what is left), and the table D,

    |sum a_k x_k - sum b_k x_k|^2 = a'Db - a'Da / 2 - b'Db / 2

All is float64, added up in row order, so that the same table gives the same weights everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.aggregation.row_rules import (
    ARC,
    CAF,
    NNM,
    Bucketing,
    Bulyan,
    CentredClipping,
    Clip,
    GeometricMedian,
    MinimumDiameter,
    MultiKrum,
    PrincipalAxis,
    Robust,
    RowRule,
    check_is_ours,
)
from loft_hvd.aggregation.rules import Custom, Mean, MeanAroundMedian, Rule
from loft_hvd.errors import ArgumentTypeError

__all__ = ["Floats", "Mix", "MixedRule", "RowVerdicts", "mix_of"]

Floats = npt.NDArray[np.float64]

# How much longer than others a row may be for its distances to say something of theirs. A longer
# one is clipped as if it were as far away as its length allows, and left out of a centre. The table
# holds about 1e-7 of a squared distance, of float64 rows 1e-16; times this, 1e-4 of the square of
# the others' lengths, or 1e-9.
_REACH = {torch.float32: 1e3, torch.float64: 1e7}
_CLIPPING_STEPS = 5
_MEDIAN_STEPS = 200  # a bound: some 20 to 60 do, but where the median is nearly a row
_SQUARINGS = 60  # a bound: some 6 do; by it what differs by 1e-17 is told apart
# The variance along an axis after the first, over the mean of those along the others, from which on
# wrong rows are taken to be behind it. Measured, 8 to 20 rows: up to 6 wrong rows stay within what
# right ones vary, at 10 they no longer do; below 6 it costs accuracy where each has other classes.
_STANDS_OUT = 6.0
# Of the length that shrinking took, as a power. Measured: all of it costs 2 to 4 points where
# classes are dealt out by Dirichlet(0.1), none costs 1 to 10 where data is sorted.
_GIVEN_BACK = 0.75
_NEWTON_STEPS = 50  # a bound: some 5 do
_NEWTON_ROWS = 128  # a step takes 1.2 ms of 64 rows, and grows with their cube


class Mix(NamedTuple):
    """What a rule comes to for given rows.

    Row i of the mixed rows is ``sum_k matrix[i, k] scales[k] x_k``; where a weight or a scale is 0
    the row is not read.
    """

    scales: Floats  # [n]
    matrix: Floats  # [num_mixed, n]
    weights: list[int] | None  # of the mixed rows, all > 0; None for equal ones
    rule: Rule  # coordinate-wise: aggregates the mixed rows
    is_copy: tuple[bool, ...] = ()  # [n]: equals another row, and is not all zeros; or not known
    # [m, n]: which given rows are in each neighbourhood of the first NNM or PrincipalAxis; None
    # without them.
    near: npt.NDArray[np.bool_] | None = None


class RowVerdicts(NamedTuple):
    """What a mix made of each row, [n] each, from 0 to 1."""

    left_out: list[float]  # share of the other rows' neighbourhoods that lack it
    clipped: list[float]  # 1 where it was longer than what it was clipped to
    copied: list[float]  # 1 where it equals another row


@dataclass(frozen=True, eq=False)
class MixedRule(Rule):
    """A rule that sees rows, and what it has made of some: it aggregates any of their coordinates.

    Attributes:
        rule: what has decided.
        mix: its weights, of the rows that count.
    """

    name: ClassVar[str] = "decided"
    sees_rows: ClassVar[bool] = True
    rule: RowRule
    mix: Mix
    f: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "f", self.rule.f)  # frozen from here on

    @property
    def min_rows(self) -> int:
        """As the rule that has decided."""
        return self.rule.min_rows

    @functools.cached_property
    def verdicts(self) -> RowVerdicts:
        """What became of each row: left out, clipped, or found twice."""
        mix, num_rows = self.mix, len(self.mix.scales)
        # A rule after NNM may keep few mixed rows; every neighbourhood still counts.
        lacks = mix.matrix == 0 if mix.near is None else ~mix.near  # [num_mixed, n]
        # A mixed row of one row alone judges nobody: it was not mixed, or is not measured.
        judges = (~lacks).sum(axis=1) > 1
        is_own = np.zeros_like(lacks)
        if len(lacks) == num_rows:  # row by row: nobody is a judge of its own
            np.fill_diagonal(is_own, True)
        counts = judges[:, None] & ~is_own
        left_out = (lacks & counts).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
        return RowVerdicts(
            left_out.tolist(),
            (mix.scales < 1).astype(np.float64).tolist(),
            [float(is_copy) for is_copy in mix.is_copy or (False,) * num_rows],
        )

    def __str__(self) -> str:
        return str(self.rule)


class _MeasuredRows(NamedTuple):
    """Rows on their way from the given ones to the mixed ones; m of them."""

    scales: Floats  # [n], of the given rows
    matrix: Floats  # [m, n], of the scaled ones
    table: Floats  # [m + 1, m + 1]
    weights: list[int] | None  # [m]
    reach: float  # one of _REACH
    is_mixed: bool = False  # else the matrix is that of ones on the diagonal
    near: npt.NDArray[np.bool_] | None = None  # as `Mix.near`

    @property
    def distances(self) -> Floats:
        """Squared distances of the rows among each other, [m, m]."""
        return self.table[:-1, :-1]

    @property
    def lengths(self) -> Floats:
        """Euclidean lengths, [m]; infinite for rows that are not measured."""
        lengths: Floats = np.sqrt(self.table[-1, :-1])
        return lengths

    @property
    def is_measured(self) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.table[-1, :-1])


def mix_of(
    rule: RowRule, table: Floats, weights: Sequence[int] | None, *, precision: torch.dtype
) -> Mix:
    """Return what ``rule`` makes of rows with these distances.

    Args:
        rule: already checked against the rows.
        table: squared distances, [n + 1, n + 1], as the module's head says.
        weights: a weight above 0 for each row, or None for equal ones, [n].
        precision: float32 or float64, in which distances were taken before they were added up.
    """
    ones, counts = np.ones(len(table) - 1), None if weights is None else list(weights)
    rows = _MeasuredRows(ones, np.diag(ones), table, counts, _REACH[precision])
    inner: Rule = rule
    while isinstance(inner, RowRule):
        law = _LAWS.get(type(inner))
        if law is None:
            raise ArgumentTypeError(f"{inner} has no law; use Custom(fn) for rules from elsewhere")
        rows, inner = law(inner, rows)
    if not isinstance(inner, Custom):
        check_is_ours(inner)
    # Zeros are no copies: of an embedding's rows two batches may use none.
    alike = (table[:-1, :-1] == 0) & ~np.eye(len(ones), dtype=np.bool_)
    is_copy = alike.any(axis=1) & (table[-1, :-1] > 0)
    return Mix(rows.scales, rows.matrix, rows.weights, inner, tuple(is_copy.tolist()), rows.near)


# --- rules around rules


def _arc(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows, f = len(rows.matrix), rule.f
    num_clipped = 2 * f * (num_rows - f) // num_rows
    limit = np.sort(rows.lengths)[num_rows - num_clipped - 1]
    return _clipped(rows, float(limit)), rule.rule


def _clip(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    return _clipped(rows, rule.norm), rule.rule


def _clipped(rows: _MeasuredRows, limit: float) -> _MeasuredRows:
    """Shrink rows that are longer than ``limit`` to that length; those not measured stay."""
    lengths = rows.lengths
    shrinks = (lengths > limit) & rows.is_measured
    if not shrinks.any():
        return rows
    scales = np.where(shrinks, limit / np.where(shrinks, lengths, 1.0), 1.0)  # [m]
    # |c x - d y|^2 = c d |x - y|^2 + (c - d) (c |x|^2 - d |y|^2). Whatever roundings say, it lies
    # between the squares of the lengths' difference and sum.
    short = np.append(np.where(shrinks, limit, lengths), 0.0)  # [m + 1], the zero vector last
    known = np.where(np.isfinite(short), short, 0.0)
    by = np.append(scales, 1.0)
    squared = by * np.where(np.isfinite(short), rows.table[-1], 0.0)  # c |x|^2
    table = by[:, None] * by * np.where(np.isfinite(rows.table), rows.table, 0.0)
    table += (by[:, None] - by) * (squared[:, None] - squared)
    least, most = (known[:, None] - known) ** 2, (known[:, None] + known) ** 2
    is_far = by < 1.0 / rows.reach
    table = np.where(is_far[:, None] | is_far, most, np.clip(table, least, most))
    table = np.where(np.isfinite(rows.table), table, np.inf)
    np.fill_diagonal(table, np.diag(rows.table))
    # Scales of given rows stay apart: what is mixed of them then often has one weight for all.
    if not rows.is_mixed:
        return rows._replace(scales=rows.scales * scales, table=table)
    return rows._replace(matrix=scales[:, None] * rows.matrix, table=table)


def _nnm(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    by = _neighbourhoods(rows, rule.f)
    mixed, inner = _mixed(rows, by, None, rule.rule)
    return mixed if rows.near is not None else mixed._replace(near=mixed.matrix != 0), inner


def _neighbourhoods(rows: _MeasuredRows, f: int) -> Floats:
    """Return the shares, by weight, of each row's ``m - f`` nearest rows, [m, m]."""
    num_rows = len(rows.matrix)
    near = np.argsort(rows.distances, axis=1, kind="stable")[:, : num_rows - f]
    by = np.zeros((num_rows, num_rows))
    np.put_along_axis(by, near, _shares(rows.weights, num_rows)[near], axis=1)
    by[:, ~rows.is_measured] = 0.0
    lost = np.flatnonzero(~rows.is_measured)
    by[lost], by[lost, lost] = 0.0, 1.0
    shares: Floats = by / _sum(by.T)[:, None]
    return shares


def _bucketing(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows = len(rows.matrix)
    shares = _shares(rows.weights, num_rows)
    starts = range(0, num_rows, rule.size)
    by = np.zeros((len(starts), num_rows))
    for bucket, start in enumerate(starts):
        span = slice(start, start + rule.size)
        by[bucket, span] = shares[span] / _total(shares[span])
    counts = rows.weights or [1] * num_rows
    return _mixed(rows, by, [sum(counts[at : at + rule.size]) for at in starts], rule.rule)


def _robust(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    return rows, rule.rule


# --- rules of their own


def _multi_krum(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    keep = len(rows.matrix) - rule.f
    return _mean_of(rows, _lowest(_scores(rows.distances, keep), keep))


def _geometric_median(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    shares = _shares(rows.weights, len(rows.matrix))
    # By weight, as what the rule survives: a ball with more than half of it holds a right row,
    # and the smallest is no wider than right rows are apart. By f neighbours it would not be.
    radii = _radii(rows.distances, shares)
    first = int(_lowest(radii, 1)[0])
    near = np.flatnonzero(_is_near(rows, first, float(radii[first])))
    if len(near) == 0:  # none is measured
        return _mean_of(rows, np.arange(len(rows.matrix)))
    by = np.zeros(len(rows.matrix))
    by[near] = _weiszfeld(rows.distances[np.ix_(near, near)], shares[near] / _total(shares[near]))
    return _mixed(rows, by[None], None, Mean())


def _radii(squared: Floats, shares: Floats) -> Floats:
    """Return for each row the squared distance within which more than half of the weight lies."""
    order = np.argsort(squared, axis=1, kind="stable")
    reaches = 2 * np.cumsum(shares[order], axis=1) > _total(shares)  # whole numbers: exact
    last = np.take_along_axis(order, reaches.argmax(axis=1)[:, None], axis=1)
    radii: Floats = np.take_along_axis(squared, last, axis=1)[:, 0]
    return radii


def _weiszfeld(squared: Floats, shares: Floats) -> Floats:
    """Return the weights of the geometric median, [m]; all distances are finite."""
    distances: Floats = np.sqrt(squared)
    # A row is the median itself if the pull of the others, a sum of unit vectors, is no stronger
    # than its own weight. Only the row of the least sum of distances can be.
    best = int(np.argmin(_sum(distances * shares[:, None])))
    alone: Floats = (np.arange(len(shares)) == best).astype(np.float64)
    away = distances[best] > 0
    if not away.any():
        return alone
    pulls = np.where(away, shares / np.where(away, distances[best], 1.0), 0.0)
    # |sum q_k (x_k - x)|^2 = sum q_k q_l (|x_k - x|^2 + |x_l - x|^2 - |x_k - x_l|^2) / 2
    angles = (squared[best][:, None] + squared[best] - squared) / 2
    if _total(_sum(pulls[:, None] * pulls * angles)) <= _total(shares[~away]) ** 2:
        return alone
    nearest = 1e-9 * float(distances[best][away].min())  # no division by 0
    weights = np.where(np.arange(len(shares)) == best, 0.5, shares / 2)
    weights /= _total(weights)
    for _ in range(_MEDIAN_STEPS):
        pulls = shares / _lengths(squared, weights, nearest)
        moved = pulls / _total(pulls)
        step = float(np.abs(moved - weights).max())
        weights = moved
        if step < 1e-10:
            return weights
    cost = _total(shares * _lengths(squared, weights, nearest))
    for _ in range(_NEWTON_STEPS if len(shares) <= _NEWTON_ROWS else 0):
        moved = _newton(squared, shares, weights, nearest=nearest)
        with np.errstate(all="ignore"):
            then = _total(shares * _lengths(squared, moved, nearest))
        if not then < cost:
            break
        weights, cost = moved, then
    return weights


def _lengths(squared: Floats, weights: Floats, nearest: float) -> Floats:
    """Return the distances of rows from ``sum weights_k x_k``, but at least ``nearest``."""
    lengths: Floats = np.sqrt(np.maximum(_squared_from(squared, weights), nearest**2))
    return lengths


def _newton(squared: Floats, shares: Floats, weights: Floats, *, nearest: float) -> Floats:
    """Return the weights after a step of Newton's method on the sum of distances.

    Weiszfeld's steps shorten as the point comes near a row, long before the sum is at its least.
    """
    # At a distance r_i, with unit vectors u_i from the rows to the point, U their matrix,
    # p_i = shares_i / r_i and P their sum, the gradient is U shares and the second derivative
    # P I - U diag(p) U'. By the Woodbury identity the step is -U v / P, where
    # v = shares + (P diag(1 / p) - U'U)^-1 U'U shares.
    lengths = _lengths(squared, weights, nearest)
    pulls = shares / lengths
    total = _total(pulls)
    angles = (lengths[:, None] ** 2 + lengths**2 - squared) / 2
    angles = angles / lengths[:, None] / lengths  # U'U
    turned = _product(angles, shares[:, None])
    with np.errstate(all="ignore"):  # what is singular: the step is not taken
        by = (shares + _solved(np.diag(total / pulls) - angles, turned)[:, 0]) / lengths
        moved: Floats = weights * (1.0 - _total(by) / total) + by / total
    return moved


def _solved(matrix: Floats, right: Floats) -> Floats:
    """Solve ``matrix x = right``, [m, 1], by elimination; what is singular gives what is no number.

    A library's order of operations, and so its bits, depends on the machine.
    """
    rows: Floats = np.concatenate([matrix, right], axis=1)
    for at in range(len(rows)):
        pivot = at + int(np.argmax(np.abs(rows[at:, at])))
        rows[[at, pivot]] = rows[[pivot, at]]
        rows[at] = rows[at] / rows[at, at]
        others = np.arange(len(rows)) != at
        rows[others] = rows[others] - rows[others, at][:, None] * rows[at]
    return rows[:, -1:]


def _centred_clipping(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows = len(rows.matrix)
    shares = _shares(rows.weights, num_rows)
    shares = shares / _total(shares)
    first = int(_lowest(_scores(rows.distances, num_rows - rule.f), 1)[0])
    median = float(np.sort(rows.distances[first])[(num_rows - 1) // 2])
    near = _is_near(rows, first, median)
    squared = np.where(np.isfinite(rows.distances), rows.distances, 0.0)
    centre = np.zeros(num_rows)
    centre[first] = 1.0
    for _ in range(_CLIPPING_STEPS):
        lengths = np.sqrt(np.maximum(_squared_from(squared, centre), 0.0))
        limit = np.sort(np.where(near, lengths, np.inf))[(num_rows - 1) // 2]
        if not np.isfinite(limit):
            break  # more rows than f are out of reach
        is_long = lengths > limit  # a length of 0 is never divided by
        pull = shares * np.where(is_long, limit / np.where(is_long, lengths, 1.0), 1.0)
        pull = np.where(near, pull, 0.0)
        centre = centre * (1.0 - _total(pull)) + pull
    return _mixed(rows, centre[None], None, Mean())


def _caf(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows = len(rows.matrix)
    left = rows.is_measured.astype(np.float64)  # [n], the weight that each row has left
    if _total(left) < num_rows - rule.f:
        return _mean_of(rows, np.arange(num_rows))  # more rows than f are lost, and so is the sum
    squared = np.where(np.isfinite(rows.distances), rows.distances, 0.0)
    best, least = left, np.inf
    while _total(left) > num_rows - 2 * rule.f:
        variance, along = _widest(squared, left / _total(left))
        if variance < least:
            best, least = left, variance
        most = float(along[left > 0].max())
        if most == 0.0:
            break  # rows with weight left are equal
        # At least one row loses all, so rounds end; whoever has, may lie farther away than `most`.
        left = np.where(left > 0, left * (1.0 - np.minimum(along / most, 1.0)), 0.0)
    by = best * _shares(rows.weights, num_rows)
    return _mixed(rows, by[None] / _total(by), None, Mean())


def _widest(squared: Floats, shares: Floats) -> tuple[float, Floats]:
    """Return how much rows vary, by ``shares``, in the direction in which they vary most.

    Returns:
        The variance along it; and each row's squared distance from the mean along it, [n], as
        shares of a common value.
    """
    # With S the roots of the shares on a diagonal, S products S has the eigenvalues of the
    # covariance, and of its eigenvector u the direction is sum_i S_i u_i (x_i - m).
    products, roots = _centred_products(squared, shares), np.sqrt(shares)
    variance, vector = _largest_eigenvalue(roots[:, None] * products * roots)
    if variance == 0.0:
        return 0.0, np.zeros(len(shares))
    along = _product(products / variance, (roots * vector)[:, None])[:, 0]
    return variance, along**2


def _centred_products(squared: Floats, shares: Floats) -> Floats:
    """Return the inner products of rows less their mean by ``shares``, [n, n]."""
    # With m the mean and a_i = |x_i - m|^2 they are (a_i + a_k - |x_i - x_k|^2) / 2.
    lengths = np.maximum(_squared_from(squared, shares), 0.0)
    products: Floats = (lengths[:, None] + lengths - squared) / 2
    return products


def _largest_eigenvalue(matrix: Floats) -> tuple[float, Floats]:
    """Return the largest eigenvalue, and its eigenvector of length 1, of a positive matrix, [n, n].

    By squarings, in a fixed order: a library's order, and so its bits, depends on the machine.
    """
    total = _total(np.diag(matrix))
    if not total > 0.0:
        return 0.0, np.zeros(len(matrix))
    powers = matrix / total
    for _ in range(_SQUARINGS):
        # Each squaring doubles how often the eigenvalues are multiplied. With one left the trace of
        # the square is that of what is squared.
        powers = _product(powers, powers)
        trace = _total(np.diag(powers))
        powers = powers / trace
        if trace > 1.0 - 1e-15:
            break
    vector = powers[:, int(np.argmax(np.diag(powers)))]
    vector = vector / np.sqrt(_total(vector**2))
    value = _total(_product(matrix / total, vector[:, None])[:, 0] * vector)
    return total * max(value, 0.0), vector


def _principal_axis(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows = len(rows.matrix)
    kept = np.flatnonzero(rows.is_measured)
    f = rule.f - (num_rows - len(kept))  # wrong rows that may be among those kept
    if f < 0:
        return _mean_of(rows, np.arange(num_rows))  # more rows than f are lost, and so is the sum
    # With f = 0 nothing shrinks: the rule is the mean.
    is_lower = num_rows == 2 * rule.f + 2
    longest = num_rows // 2 - is_lower if rule.f else num_rows - 1
    ordered = np.sort(rows.lengths)
    clipped = _clipped(rows, float(ordered[longest]))
    near = rows.near
    if near is None:  # what this rule mixes leaves nobody out, so it does not say who is far away
        near = _product(_neighbourhoods(clipped, rule.f), clipped.matrix) != 0
    by = np.zeros((len(kept), num_rows))
    by[:, kept] = _winsorised(clipped.distances[np.ix_(kept, kept)], f)
    shares = _shares(rows.weights, num_rows)[kept]
    mean = _product(shares[None] / _total(shares), by)
    mixed, inner = _mixed(clipped, mean, None, Mean())
    if rule.lengthens:
        whole, shrunk = (
            _total(shares * np.minimum(rows.lengths[kept], ordered[at]))
            for at in (num_rows - rule.f - 1, longest)
        )
        if shrunk > 0:
            mixed = mixed._replace(matrix=mixed.matrix * (whole / shrunk) ** _GIVEN_BACK)
    return mixed._replace(near=near), inner


def _winsorised(squared: Floats, f: int) -> Floats:
    """Return the mixes by which rows are winsorised along their principal axes, [n, n]."""
    num_rows = len(squared)
    products = _centred_products(squared, np.full(num_rows, 1.0 / num_rows))
    by: Floats = np.eye(num_rows)
    for number in range(f):  # f wrong rows pull in f directions at most
        # Of products of rows less their mean m, with the eigenvalue v and its eigenvector u: rows
        # lie at sqrt(v) u along the axis, whose direction, of length 1, is the sum of
        # u_i (x_i - m) / sqrt(v).
        value, vector = _largest_eigenvalue(products)
        others = (_total(np.diag(products)) - value) / max(1, num_rows - 2)
        if number and value <= _STANDS_OUT * others:
            break
        ordered = np.sort(vector)
        moves = np.clip(vector, ordered[f], ordered[num_rows - f - 1]) - vector
        step = np.eye(num_rows) + moves[:, None] * (vector - _total(vector) / num_rows)
        by = _product(step, by)
        moved = _product(_product(step, products), step.T)
        means = _sum(moved) / num_rows
        products = moved - means - means[:, None] + _total(means) / num_rows
    return by


def _bulyan(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows, f = len(rows.matrix), rule.f
    left = np.arange(num_rows)
    chosen = []
    for _ in range(num_rows - 2 * f):
        scores = _scores(rows.distances[np.ix_(left, left)], max(1, len(left) - f))
        best = int(_lowest(scores, 1)[0])
        chosen.append(int(left[best]))
        left = np.delete(left, best)
    chosen.sort()
    weights = None if rows.weights is None else [rows.weights[row] for row in chosen]
    inner = MeanAroundMedian(2 * f)
    return _mixed(rows, np.eye(num_rows)[chosen], weights, inner)


def _minimum_diameter(rule: Any, rows: _MeasuredRows) -> tuple[_MeasuredRows, Rule]:
    num_rows, squared = len(rows.matrix), rows.distances
    low, diameters = 0, np.unique(squared)  # ascending; some set has one of these
    high = len(diameters) - 1
    while low < high:
        middle = (low + high) // 2
        if _leaves_out(_conflicts(squared > diameters[middle]), 0, rule.f) is None:
            low = middle + 1
        else:
            high = middle
    conflicts = _conflicts(squared > diameters[low])
    # Rows in order: each is kept if the rest can still be chosen with it.
    out, num_kept = 0, 0
    for row in range(num_rows):
        if num_kept == num_rows - rule.f:
            out |= 1 << row
        elif not out >> row & 1:
            with_it = out | conflicts[row]
            spare = rule.f - with_it.bit_count()
            if spare >= 0 and _leaves_out(conflicts, with_it, spare) is not None:
                out, num_kept = with_it, num_kept + 1
            else:
                out |= 1 << row
    return _mean_of(rows, np.array([row for row in range(num_rows) if not out >> row & 1]))


def _conflicts(is_far: npt.NDArray[np.bool_]) -> list[int]:
    """Return for each row the rows it cannot go with, as bits."""
    return [sum(1 << int(other) for other in np.flatnonzero(line)) for line in is_far]


def _leaves_out(conflicts: list[int], out: int, spare: int) -> int | None:
    """Leave out ``spare`` more rows at most so that no two rows left conflict; None if it fails."""
    # Of the row with most conflicts either it goes or all that it conflicts with.
    left = [0 if out >> row & 1 else theirs & ~out for row, theirs in enumerate(conflicts)]
    row = max(range(len(left)), key=lambda row: left[row].bit_count())
    most = left[row].bit_count()
    if most == 0:
        return out
    # Every row that goes ends `most` conflicts at best; each is counted with both of its rows.
    if sum(theirs.bit_count() for theirs in left) > 2 * spare * most:
        return None
    without = _leaves_out(conflicts, out | 1 << row, spare - 1)
    if without is not None or most > spare:
        return without
    return _leaves_out(conflicts, out | left[row], spare - most)


_LAWS: dict[type[RowRule], Callable[[Any, _MeasuredRows], tuple[_MeasuredRows, Rule]]] = {
    ARC: _arc,
    NNM: _nnm,
    Clip: _clip,
    Bucketing: _bucketing,
    MultiKrum: _multi_krum,
    GeometricMedian: _geometric_median,
    CentredClipping: _centred_clipping,
    CAF: _caf,
    PrincipalAxis: _principal_axis,
    Bulyan: _bulyan,
    MinimumDiameter: _minimum_diameter,
    Robust: _robust,
}


# --- what they share


def _sum(values: Floats) -> Floats:
    """Add up along the first axis, in order: no machine may add in another one."""
    total: Floats = np.zeros(values.shape[1:])
    for part in values:
        total = total + part
    return total


def _total(values: Floats) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def _shares(weights: list[int] | None, num_rows: int) -> Floats:
    return np.ones(num_rows) if weights is None else np.array(weights, np.float64)


def _lowest(values: Floats, count: int) -> npt.NDArray[np.intp]:
    """Return where the ``count`` lowest values are, ascending; of equal ones the first."""
    return np.sort(np.argsort(values, kind="stable")[:count])


def _scores(squared: Floats, keep: int) -> Floats:
    """Return for each row the sum of its ``keep`` smallest squared distances, its own included."""
    return _sum(np.sort(squared, axis=1)[:, :keep].T)


def _is_near(rows: _MeasuredRows, first: int, usual: float) -> npt.NDArray[np.bool_]:
    """Return which rows are near enough to row ``first`` for a centre; ``usual`` is squared.

    Those left out are so far away that the weight of one, times its squared distance as the table
    holds it, would drown the distances of the others.
    """
    limit = rows.reach**2 * usual
    near: npt.NDArray[np.bool_] = rows.is_measured & (
        (rows.distances[first] <= limit) | (limit == 0)
    )
    return near


def _squared_from(squared: Floats, weights: Floats) -> Floats:
    """Return squared distances of rows from ``sum weights_k x_k``; the weights add up to 1."""
    to_rows = _sum(squared * weights[:, None])
    return to_rows - _total(weights * to_rows) / 2


def _mean_of(rows: _MeasuredRows, chosen: npt.NDArray[np.intp]) -> tuple[_MeasuredRows, Rule]:
    """Average the chosen rows by weight."""
    shares = _shares(rows.weights, len(rows.matrix))[chosen]
    by = np.zeros((1, len(rows.matrix)))
    by[0, chosen] = shares / _total(shares)
    return _mixed(rows, by, None, Mean())


def _mixed(
    rows: _MeasuredRows, by: Floats, weights: list[int] | None, inner: Rule
) -> tuple[_MeasuredRows, Rule]:
    """Mix rows by the weights ``by``, [num_mixed, m], for ``inner`` to aggregate."""
    matrix = _product(by, rows.matrix)
    table = _table_of(rows, by) if isinstance(inner, RowRule) else rows.table
    changed = rows._replace(matrix=matrix, table=table, weights=weights, is_mixed=True)
    return changed, inner


def _table_of(rows: _MeasuredRows, by: Floats) -> Floats:
    """Return the table of mixed rows, by the formula of the module's head."""
    num_mixed = len(by)
    full = np.zeros((num_mixed + 1, len(rows.table)))
    full[:-1, :-1] = by
    full[:, -1] = 1.0 - _sum(full.T)  # the zero vector takes what is left
    finite = np.where(np.isfinite(rows.table), rows.table, 0.0)
    cross = _product(full, _product(finite, full.T))
    halves = np.diag(cross) / 2
    # Both halves the same, whatever roundings say: two rows are as far from each other either way.
    upper = np.triu(np.maximum(cross - halves[:, None] - halves, 0.0), 1)
    table: Floats = upper + upper.T
    # A mix of a row that is not measured is not either.
    is_lost = (by[:, ~rows.is_measured] != 0).any(axis=1)
    lost = np.append(is_lost, False)
    table[lost] = np.inf
    table[:, lost] = np.inf
    return table


def _product(left: Floats, right: Floats) -> Floats:
    """Return the product of two matrices, added up in order."""
    total: Floats = np.zeros((left.shape[0], right.shape[1]))
    for column, row in zip(left.T, right, strict=True):
        total = total + column[:, None] * row
    return total
