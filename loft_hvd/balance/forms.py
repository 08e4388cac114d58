"""Which form a rank's times have, chosen by evidence: linear or saturating, hits, overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["choose_knee", "compute_features", "fit_hits", "fit_overlap"]

Floats = npt.NDArray[np.float64]

_KNEES = 12
_EVIDENCE = 6.0  # gain in -2 log likelihood that one more parameter must bring
_SPAN = 1.2  # sizes must span this ratio before a form can be told
_SNAP = 0.03
_COUNTS_FADE = 0.65  # a row: counts are exact, so few rows will do


def compute_features(size: Floats, knee: Floats) -> Floats:
    """Return (1, samples above the knee) on a new last axis; a knee of 0 is the linear form."""
    return np.stack([np.ones_like(size), np.maximum(size - knee, 0.0)], axis=-1)


def choose_knee(size: Floats, seconds: Floats, weights: Floats, now: Floats) -> Floats:
    """Choose where each rank's device saturates, or 0 where a straight line explains as much.

    Args:
        size: samples, [num_rows, world_size].
        seconds: compute time, same shape.
        weights: how much each row counts, same shape.
        now: the knees chosen before; kept where the sizes do not span enough to tell.

    Returns:
        Knees, [world_size].
    """
    counts = weights > 0
    most = np.where(counts, size, 0.0).max(axis=0)
    least = np.where(counts, size, np.inf).min(axis=0)
    can_tell = (counts.sum(axis=0) >= 4) & (most > _SPAN * least)
    if not can_tell.any():
        return now
    low = np.where(can_tell, least, 1.0)
    ratio = np.where(can_tell, most / low, 1.0)
    steps = np.linspace(0.0, 1.0, _KNEES + 2)[1:-1, None]
    knees = np.concatenate([np.zeros((1, len(now))), low * ratio**steps])  # [1 + knees, world_size]
    loss = np.stack([_line_loss(np.maximum(size - knee, 0.0), seconds, weights) for knee in knees])
    best = loss.argmin(axis=0)
    rows = np.maximum(weights.sum(axis=0), 1.0)
    floor = 1e-6 * rows  # what no measurement resolves is no evidence
    gain = rows * np.log((loss[0] + floor) / (loss.min(axis=0) + floor))
    bends = gain > np.where(now > 0, 0.5, 1.0) * _EVIDENCE  # leaving a form takes evidence too
    chosen = np.where(bends, knees[best, np.arange(len(now))], 0.0)
    return np.where(can_tell, chosen, now)


def _line_loss(feature: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the weighted squared relative residuals of a line with slope >= 0, [world_size]."""
    scale = weights / np.square(np.maximum(seconds, 1e-9))
    total = np.maximum(scale.sum(axis=0), 1e-300)
    mean_x, mean_y = (scale * feature).sum(axis=0) / total, (scale * seconds).sum(axis=0) / total
    dx, dy = feature - mean_x, seconds - mean_y
    variance = (scale * dx * dx).sum(axis=0)
    slope = np.maximum((scale * dx * dy).sum(axis=0) / np.maximum(variance, 1e-300), 0.0)
    loss: Floats = (scale * np.square(dy - slope * dx)).sum(axis=0)
    return loss


def fit_hits(size: Floats, local: Floats, weights: Floats, known: Floats) -> tuple[Floats, Floats]:
    """Fit ``local = min(hit_share * size, hits)``: home-first reading, or a share of any batch.

    Args:
        size: samples, [num_rows, world_size].
        local: of them local, same shape.
        weights: how much each row counts, same shape.
        known: local samples of a global batch where they are known, else NaN, [world_size].

    Returns:
        ``hit_share`` and ``hits``, [world_size] each; ``hits`` is infinite where nothing was
        remote so far.
    """
    ran_out = np.where(local < 0.995 * size, weights, 0.0)  # rows whose local samples ran out
    ran_out = ran_out * _COUNTS_FADE ** np.arange(len(size))[::-1, None]  # a cache may be filling
    rows = ran_out.sum(axis=0)
    mean = (ran_out * local).sum(axis=0) / np.maximum(rows, 1e-300)
    share = (ran_out * local).sum(axis=0) / np.maximum((ran_out * size).sum(axis=0), 1e-300)
    miss_fixed = (ran_out * np.square(local - mean)).sum(axis=0)
    miss_share = (ran_out * np.square(local - share * size)).sum(axis=0)
    is_share = (rows > 0) & np.isnan(known) & (miss_share < 0.5 * miss_fixed)
    hits = np.where(rows > 0, mean, np.where(np.isnan(known), np.inf, known))
    return np.where(is_share, share, 1.0), np.where(is_share, np.inf, hits)


def fit_overlap(fetch: Floats, stall: Floats, compute: Floats, weights: Floats) -> Floats:
    """Return the share of the shorter of fetch and compute that was hidden, [world_size].

    ``fetch - stall`` is what overlap hid; a rank with nothing to hide counts as serial.
    """
    shorter = (weights * np.minimum(fetch, compute)).sum(axis=0)
    hidden = (weights * np.clip(fetch - stall, 0.0, None)).sum(axis=0)
    overlap = np.clip(hidden / np.maximum(shorter, 1e-9), 0.0, 1.0)
    overlap = np.where(overlap < _SNAP, 0.0, overlap)
    return np.where(overlap > 1.0 - _SNAP, 1.0, overlap)
