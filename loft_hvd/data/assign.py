"""Who computes which sample of one global batch: as many local reads as the sizes allow.

Samples that the same ranks hold are interchangeable, so the assignment is a flow from sets of
holders to ranks, not a matching of samples. Where the sets are nested or disjoint (shards, nodes,
everywhere) filling the small sets first is exact and vectorised; overlapping sets and caps on
strata go through the exact flow of ``flow.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loft_hvd.data.flow import Network

__all__ = ["Assignment", "HomeSets", "Homes", "assign", "count_local", "count_rows"]

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


@dataclass(frozen=True)
class Assignment:
    """The owner of every sample of a global batch.

    Attributes:
        owners: rank that computes each sample, [num_samples].
        local: samples of each rank that it holds itself, [world_size].
    """

    owners: Ints
    local: Ints


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
            given = _proportional(counts[:, row], spare[:, ranks])
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


def _proportional(count: Ints, spare: Ints) -> Ints:
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
        _, strata = np.unique(homes.strata[batch], return_inverse=True)
        owners = _assign_capped(rows, strata, sizes, homes)
    is_local = homes.local.holders[rows, owners]
    local = np.bincount(owners[is_local], minlength=len(sizes))
    return Assignment(owners, local)


def _give(owners: Ints, rows: npt.NDArray[np.integer], sets: HomeSets, spare: Ints) -> None:
    """Write the ranks that ``sets`` finds for samples without an owner; takes from ``spare``."""
    free = np.flatnonzero(owners < 0)
    shares = sets.share(np.bincount(rows[free], minlength=len(sets.holders)), spare)
    _place(owners, free, rows[free], shares)
    np.subtract.at(spare, shares.ranks, shares.counts)


def _place(owners: Ints, free: Ints, classes: npt.NDArray[np.integer], shares: Shares) -> None:
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


def _assign_capped(rows: npt.NDArray[np.integer], strata: Ints, sizes: Ints, homes: Homes) -> Ints:
    """Return owners with the most local reads among those where no rank is above a strata cap.

    A class is the samples of one row and one stratum. Its samples flow to a cell (stratum, rank)
    for nothing where the rank holds them, else at cost 1 through the hub of the stratum. A cap of
    at least the fair share always leaves room: splitting every stratum like the sizes satisfies it.
    Strata whose cap cannot bind share one stratum, which keeps the network small.
    """
    world_size, num_samples = len(sizes), len(rows)
    caps = strata_caps(np.bincount(strata), sizes, homes.strata_cap)
    binds = (caps < np.minimum.outer(np.bincount(strata), sizes)).any(axis=1)
    caps = np.vstack([caps[binds], np.minimum(sizes, num_samples)])
    strata = np.where(binds, np.cumsum(binds) - 1, binds.sum())[strata]
    num_strata = len(caps)
    keys, classes, counts = np.unique(
        strata * len(homes.local.holders) + rows, return_inverse=True, return_counts=True
    )
    class_strata, class_rows = np.divmod(keys, len(homes.local.holders))

    hub, cell = world_size, world_size + num_strata  # ranks first, then hubs, cells, classes
    first_class = cell + num_strata * world_size
    source, sink = first_class + len(keys), first_class + len(keys) + 1
    network = Network(sink + 1)
    for rank, size in enumerate(sizes.tolist()):
        network.add_arc(rank, sink, size)
    from_hub = np.empty((num_strata, world_size), np.int64)
    for stratum, row_caps in enumerate(caps.tolist()):
        for rank, cap in enumerate(row_caps):
            node = cell + stratum * world_size + rank
            network.add_arc(node, rank, cap)
            from_hub[stratum, rank] = network.add_arc(hub + stratum, node, cap)
    arcs: list[tuple[int, int, int]] = []  # class, rank, arc
    to_hub = []
    for k, (stratum, row, count) in enumerate(
        zip(class_strata.tolist(), class_rows.tolist(), counts.tolist(), strict=True)
    ):
        network.add_arc(source, first_class + k, count)
        for rank in np.flatnonzero(homes.local.holders[row]).tolist():
            node = cell + stratum * world_size + rank
            arcs.append((k, rank, network.add_arc(first_class + k, node, count)))
        to_hub.append(network.add_arc(first_class + k, hub + stratum, count, cost=1))
    network.maximise(source, sink)

    shares = np.array([(k, rank, network.flow(arc)) for k, rank, arc in arcs], np.int64)
    owners = np.full(num_samples, -1, np.int64)
    shares = shares.reshape(-1, 3)
    _place(
        owners, np.arange(num_samples), classes, Shares(shares[:, 0], shares[:, 1], shares[:, 2])
    )
    for stratum in range(num_strata):
        free = np.flatnonzero((owners < 0) & (strata == stratum))
        taken = [network.flow(int(arc)) for arc in from_hub[stratum]]
        owners[free] = np.repeat(np.arange(world_size), taken)
    return owners


def strata_caps(counts: Ints, sizes: Ints, cap: Fraction) -> Ints:
    """Return the most samples of each stratum that each rank may take, [num_strata, world_size].

    ``ceil(cap * size / total * count)``, in whole numbers.
    """
    over = max(int(sizes.sum()), 1) * cap.denominator
    result: Ints = -(-cap.numerator * np.multiply.outer(counts, sizes) // over)
    return result
