"""Sets of ranks that hold the same samples, and how many of those samples each rank gets.

Samples that the same ranks hold are interchangeable, so an assignment is a flow from sets of
holders to ranks, not a matching of samples. Where the sets are nested or disjoint (shards, nodes,
everywhere) filling the small sets first is exact and vectorised; overlapping sets go through the
exact flow of ``flow.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loft_hvd.data.flow import Network

__all__ = ["HomeSets", "Homes", "Ints", "Shares", "place", "proportional"]

Ints = npt.NDArray[np.int64]
_MAX_NESTED_CHECK = 4096  # rows; beyond it the pairwise test costs more than the flow saves


@dataclass(frozen=True)
class Shares:
    """Samples given out: ``counts[i]`` samples held by row ``rows[i]`` go to ``ranks[i]``."""

    rows: Ints
    ranks: Ints
    counts: Ints


@dataclass(frozen=True)
class Homes:
    """A placement prepared for one world.

    Attributes:
        rows: index of the holders of each sample, [num_samples], int32.
        local: the distinct sets of ranks that hold samples.
        near: for each of them the ranks on a holder's node, or None without nodes.
        strata: stratum of each sample, [num_samples], or None.
        strata_cap: how many times its fair share of a stratum one rank may take.
    """

    rows: npt.NDArray[np.int32]
    local: HomeSets
    near: HomeSets | None = None
    strata: npt.NDArray[np.int32] | None = None
    strata_cap: Fraction = Fraction(1)

    @property
    def world_size(self) -> int:
        """Number of ranks that it was prepared for."""
        return int(self.local.holders.shape[1])


class HomeSets:
    """The distinct sets of ranks that hold samples.

    Attributes:
        holders: whether a rank belongs to a set, [num_rows, world_size], bool.
        is_nested: any two sets are nested or disjoint, so that filling small sets first is exact.
    """

    def __init__(self, holders: npt.NDArray[np.bool_]) -> None:
        self.holders = holders
        width = holders.sum(axis=1)
        self._single_rows = np.flatnonzero(width == 1)
        self._single_ranks = holders[self._single_rows].argmax(axis=1)
        self._wide_rows = [int(r) for r in np.argsort(width, kind="stable") if width[r] > 1]
        self._wide_ranks = [np.flatnonzero(holders[row]) for row in self._wide_rows]
        inner = holders[(width > 1) & (width < holders.shape[1])].astype(np.float32)
        self.is_nested = len(inner) <= _MAX_NESTED_CHECK
        if self.is_nested and len(inner):
            shared = inner @ inner.T
            smaller = np.minimum.outer(inner.sum(axis=1), inner.sum(axis=1))
            self.is_nested = bool(((shared == 0) | (shared == smaller)).all())

    def share(self, counts: Ints, spare: Ints) -> Shares:
        """Give samples to ranks that hold them, as many as ``spare`` allows.

        Of several holders the one with the most room left gets the most.

        Args:
            counts: samples of each row, [num_rows].
            spare: samples that each rank can still take, [world_size].
        """
        blocks = list(self._fill(counts[None], spare[None].copy()))
        shares = Shares(
            np.concatenate([np.broadcast_to(rows, ranks.shape) for rows, ranks, _ in blocks]),
            np.concatenate([ranks for _, ranks, _ in blocks]),
            np.concatenate([given[0] for _, _, given in blocks]),
        )
        return shares if self.is_nested else self._improve(counts, spare, shares)

    def count(self, counts: Ints, spare: Ints) -> Ints:
        """Return how many samples each rank would get from ``share``, for many steps at once.

        Args:
            counts: samples of each row in each step, [num_steps, num_rows].
            spare: samples that each rank can take in each step, [num_steps, world_size].

        Returns:
            Samples of each rank in each step, [num_steps, world_size].
        """
        taken = np.zeros_like(spare)
        if self.is_nested:
            for _, ranks, given in self._fill(counts, spare.copy()):
                taken[:, ranks] += given
        else:
            for step in range(len(counts)):
                shares = self.share(counts[step], spare[step])
                np.add.at(taken[step], shares.ranks, shares.counts)
        return taken

    def _fill(self, counts: Ints, spare: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Fill small sets first; yields (rows, ranks, given [num_steps, ranks]) and uses up spare.

        In a family of nested or disjoint sets, whatever a set leaves of a rank serves only larger
        sets that hold all of its ranks alike, so no choice here can cost a later local read.
        """
        rows, ranks = self._single_rows, self._single_ranks
        given = np.minimum(counts[:, rows], spare[:, ranks])
        spare[:, ranks] -= given
        yield rows, ranks, given
        for row, ranks in zip(self._wide_rows, self._wide_ranks, strict=True):
            given = proportional(counts[:, row], spare[:, ranks])
            spare[:, ranks] -= given
            yield np.array([row]), ranks, given

    def _improve(self, counts: Ints, spare: Ints, start: Shares) -> Shares:
        """Raise ``start`` to a maximum flow."""
        num_rows, world_size = self.holders.shape
        source, sink = num_rows + world_size, num_rows + world_size + 1
        network = Network(sink + 1)
        out = np.bincount(start.rows, start.counts, num_rows).astype(int).tolist()
        into = np.bincount(start.ranks, start.counts, world_size).astype(int).tolist()
        for row, count in enumerate(counts.tolist()):
            network.add_arc(source, row, count, flow=out[row])
        for rank, room in enumerate(spare.tolist()):
            network.add_arc(num_rows + rank, sink, room, flow=into[rank])
        cells = zip(start.rows.tolist(), start.ranks.tolist(), start.counts.tolist(), strict=True)
        arcs = [
            network.add_arc(row, num_rows + rank, int(counts[row]), flow=given)
            for row, rank, given in cells
        ]
        network.maximise(source, sink)
        return Shares(start.rows, start.ranks, np.array([network.flow(arc) for arc in arcs]))


def proportional(count: Ints, spare: Ints) -> Ints:
    """Give ``min(count, sum of spare)`` out in proportion to ``spare``, by largest remainders.

    Args:
        count: [num_steps].
        spare: [num_steps, num_ranks].
    """
    total = spare.sum(axis=1)
    product = np.minimum(count, total)[:, None] * spare
    given, remainder = np.divmod(product, np.maximum(total, 1)[:, None])
    missing = np.minimum(count, total) - given.sum(axis=1)
    place = np.argsort(np.argsort(-remainder, axis=1, kind="stable"), axis=1, kind="stable")
    result: Ints = given + (place < missing[:, None])
    return result


def place(owners: Ints, free: Ints, classes: npt.NDArray[np.integer], shares: Shares) -> None:
    """Give the first samples of each class to the ranks of its shares, in batch order.

    Args:
        owners: written at ``free``.
        free: positions in the batch, [num_free].
        classes: class of each of them, [num_free].
        shares: its rows are classes.
    """
    by_class = np.argsort(classes, kind="stable")
    order = np.lexsort((shares.ranks, shares.rows))
    share_class, counts = shares.rows[order], shares.counts[order]
    before = np.cumsum(counts) - counts  # samples given out by earlier shares
    first = np.searchsorted(share_class, share_class)  # first share of the same class
    start = np.searchsorted(classes[by_class], share_class) + before - before[first]
    slots = np.repeat(start - before, counts) + np.arange(counts.sum())
    owners[free[by_class[slots]]] = np.repeat(shares.ranks[order], counts)
