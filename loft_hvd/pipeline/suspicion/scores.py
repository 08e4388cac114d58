"""How far each row of a shard was off in one step: the others are the measure. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose
from loft_hvd.aggregation.rules import Custom, Median, Rule

__all__ = ["Floats", "score_rows"]

_FEWEST_ROWS = 3  # of two rows nobody can say which one is off
_DISTANCE_DOUBLINGS = 4.0  # squared distance 16 times what it should be: score 1
_DRAWS = 2048

Floats = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=64)
def _expected(rule: Rule, weights: tuple[int, ...]) -> tuple[Floats, Floats]:
    """Return what honest rows look like that differ in their batch sizes only.

    A mean over fewer samples is noisier: its row is outside more often, and farther away. Returns
    the share outside and log2 of the squared distance of each row.
    """
    rows = torch.randn(len(weights), _DRAWS, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor(weights).rsqrt().unsqueeze(1)
    used = None if isinstance(rule, Median) else weights  # in training it takes none
    _, found = diagnose(rows, rule, weights=used, every=1)
    return np.array(found.share_outside), _log2(np.array(found.squared_distance))


@functools.lru_cache(maxsize=64)
def _others(num_rows: int) -> npt.NDArray[np.int64]:
    """Return for each row the indices of all other rows, [num_rows, num_rows - 1]."""
    return np.array([[o for o in range(num_rows) if o != row] for row in range(num_rows)])


def _log2(values: Floats) -> Floats:
    logarithms: Floats = np.log2(np.maximum(values, 1e-300))
    return logarithms


def _medians(lines: Floats) -> Floats:
    """Return the median of each line; np.median is several times slower on a few values."""
    ordered = np.sort(lines, axis=1)
    last = lines.shape[1] - 1
    middle: Floats = (ordered[:, last // 2] + ordered[:, (last + 1) // 2]) / 2
    return middle


def score_rows(
    found: Diagnostics, rule: Rule, *, weights: Sequence[int] | None = None
) -> tuple[float, ...] | None:
    """Score how far each row was off in one step of one shard, from 0 (as the others) to 1.

    The score is the largest of three: the share outside the window, from the others' median (0) to
    always (1); the squared distance to the result, from what the others reach (0) to 16 times that
    (1); non-finite values (1). Rows that come from fewer samples may be off by what that explains.

    Args:
        found: what was seen of the rows; absent rows have ``num_seen`` 0.
        rule: the rule that aggregated them.
        weights: samples behind each row, where they differ, [world_size].

    Returns:
        One score a row, 0 for an absent one, [world_size]; None where nothing can be said: fewer
        than 3 rows, rows that are equal everywhere, or as many as half of the rows non-finite (an
        overflow, such as a loss scale that has grown too far, and nobody's fault).
    """
    seen = np.array(found.num_seen)
    rows = np.flatnonzero(seen)
    non_finite = np.array(found.num_non_finite)[rows] > 0
    if len(rows) < _FEWEST_ROWS or 2 * non_finite.sum() >= len(rows):
        return None
    outside, distances = np.array(found.num_outside), np.array(found.squared_distance)
    if not (non_finite.any() or outside.any() or distances.any()):
        return None
    others = _others(len(rows))  # [rows, rows - 1]
    shares, log2 = outside[rows] / seen[rows], _log2(distances[rows])
    base, explained = _medians(shares[others]), np.zeros(len(rows))
    if weights is not None and not isinstance(rule, Custom):
        usual_shares, usual_log2 = _expected(rule, tuple(weights[int(row)] for row in rows))
        base = np.maximum(base, usual_shares)
        explained = np.maximum(0.0, usual_log2 - _medians(usual_log2[others]))
    outsides = (shares - base) / np.maximum(1 - base, 1e-12)
    middle = _medians(log2[others])
    # Of the others' spread the widest f - 1 are left out: they may be Byzantine as well.
    spread = np.sort(np.abs(log2[others] - middle[:, None]))[:, -max(rule.f, 1)]
    aways = (log2 - middle - spread - explained) / _DISTANCE_DOUBLINGS
    scores = np.zeros(len(seen))
    scores[rows] = np.where(non_finite, 1.0, np.clip(np.maximum(outsides, aways), 0.0, 1.0))
    return tuple(scores.tolist())
