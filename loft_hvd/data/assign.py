"""Who computes which sample of one global batch: as many local reads as the sizes allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loft_hvd.data.homes import Homes, HomeSets, Ints, place
from loft_hvd.data.strata import assign_capped

__all__ = ["Assignment", "assign", "count_local", "count_rows"]


@dataclass(frozen=True)
class Assignment:
    """The owner of every sample of a global batch.

    Attributes:
        owners: rank that computes each sample, [num_samples].
        local: samples of each rank that it holds itself, [world_size].
    """

    owners: Ints
    local: Ints


def count_rows(rows: npt.NDArray[np.integer], num_rows: int, *, batch_size: int) -> Ints:
    """Count the samples of every row in each full global batch.

    Args:
        rows: row of each sample in the order of the epoch, ``homes.rows[order]``, [num_samples].
        num_rows: number of rows, ``len(homes.local.holders)``.
        batch_size: samples of a global batch.

    Returns:
        Counts, [num_samples // batch_size, num_rows].
    """
    num_steps = len(rows) // batch_size
    keys = rows[: num_steps * batch_size].astype(np.int64)
    keys += np.repeat(np.arange(num_steps) * num_rows, batch_size)
    return np.bincount(keys, minlength=num_steps * num_rows).reshape(num_steps, num_rows)


def count_local(counts: Ints, sizes: Ints, homes: Homes) -> Ints:
    """Return how many samples of each step every rank reads locally, without naming samples.

    The counts are those of ``assign``; strata caps are not taken into account.

    Args:
        counts: samples of each row in each step, [num_steps, num_rows], as from ``count_rows``.
        sizes: samples of each rank, [world_size] or [num_steps, world_size].
        homes: the placement, ``placement.at(world_size)``.

    Returns:
        Local samples, [num_steps, world_size]; ``sizes`` minus these are remote.
    """
    spare = np.broadcast_to(np.asarray(sizes, np.int64), (len(counts), np.shape(sizes)[-1]))
    return homes.local.count(counts, spare)


def assign(batch: Ints, sizes: Ints, homes: Homes) -> Assignment:
    """Decide who computes each sample of a global batch: local first, then near, then anywhere.

    Args:
        batch: indices of the samples, [num_samples].
        sizes: samples of each rank, [world_size], adding up to ``num_samples``.
        homes: the placement, ``placement.at(world_size)``.
    """
    rows = homes.rows[batch]
    owners = np.full(len(batch), -1, np.int64)
    spare = sizes.copy()
    if homes.strata is None:
        for sets in (homes.local, homes.near):
            if sets is not None and spare.any():
                _give(owners, rows, sets, spare)
        owners[owners < 0] = np.repeat(np.arange(len(sizes)), spare)
    else:
        owners = assign_capped(rows, homes.strata[batch], sizes, homes)
    is_local = homes.local.holders[rows, owners]
    local = np.bincount(owners[is_local], minlength=len(sizes))
    return Assignment(owners, local)


def _give(owners: Ints, rows: npt.NDArray[np.integer], sets: HomeSets, spare: Ints) -> None:
    """Write the ranks that ``sets`` finds for samples without an owner; takes from ``spare``."""
    free = np.flatnonzero(owners < 0)
    shares = sets.share(np.bincount(rows[free], minlength=len(sets.holders)), spare)
    place(owners, free, rows[free], shares)
    np.subtract.at(spare, shares.ranks, shares.counts)
