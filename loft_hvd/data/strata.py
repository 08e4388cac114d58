"""Assignment under a cap on every rank's share of a stratum, such as a class.

Home-first assignment of class-sorted shards gives each rank the samples of few classes, and a
robust rule then takes honest gradients for outliers. A cap limits that, and costs remote reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loft_hvd.data.flow import Network
from loft_hvd.data.homes import Homes, Ints, Shares, place, proportional

__all__ = ["assign_capped", "strata_caps"]


@dataclass(frozen=True)
class Classes:
    """Samples by what decides where they may go: their stratum and the ranks that hold them.

    Attributes:
        strata: stratum of each class, [num_classes].
        counts: samples of each class, [num_classes].
        holders: whether a rank holds a class, [num_classes, world_size].
    """

    strata: Ints
    counts: Ints
    holders: npt.NDArray[np.bool_]


def strata_caps(counts: Ints, sizes: Ints, cap: Fraction) -> Ints:
    """Return the most samples of each stratum that each rank may take, [num_strata, world_size].

    ``ceil(cap * size / total * count)``, in whole numbers.
    """
    over = max(int(sizes.sum()), 1) * cap.denominator
    result: Ints = -(-cap.numerator * np.multiply.outer(counts, sizes) // over)
    return result


def assign_capped(
    rows: npt.NDArray[np.integer], strata: npt.NDArray[np.integer], sizes: Ints, homes: Homes
) -> Ints:
    """Return the owners with the most local reads among those that keep every cap.

    Args:
        rows: row of holders of each sample, [num_samples].
        strata: stratum of each sample, [num_samples].
        sizes: samples of each rank, [world_size], adding up to ``num_samples``.
        homes: the placement.

    Returns:
        Rank of each sample, [num_samples].
    """
    strata, caps = _binding(np.unique(strata, return_inverse=True)[1], sizes, homes.strata_cap)
    keys, numbers, counts = np.unique(
        strata * len(homes.local.holders) + rows, return_inverse=True, return_counts=True
    )
    class_strata, class_rows = np.divmod(keys, len(homes.local.holders))
    classes = Classes(class_strata, counts, homes.local.holders[class_rows])
    local, remote = _local_first(classes, caps, sizes) or _exactly(classes, caps, sizes)

    owners = np.full(len(rows), -1, np.int64)
    place(owners, np.arange(len(rows)), numbers, local)
    for stratum in np.flatnonzero(remote.any(axis=1)):
        free = np.flatnonzero((owners < 0) & (strata == stratum))
        owners[free] = np.repeat(np.arange(len(sizes)), remote[stratum])
    return owners


def _binding(strata: Ints, sizes: Ints, cap: Fraction) -> tuple[Ints, Ints]:
    """Merge the strata whose cap cannot bind into one without a cap, to keep the network small.

    Returns:
        Stratum of each sample in the new numbering, and caps, [num_strata, world_size].
    """
    counts = np.bincount(strata)
    caps = strata_caps(counts, sizes, cap)
    binds = (caps < np.minimum.outer(counts, sizes)).any(axis=1)
    number = np.where(binds, np.cumsum(binds) - 1, binds.sum())
    return number[strata], np.vstack([caps[binds], sizes])


def _local_first(classes: Classes, caps: Ints, sizes: Ints) -> tuple[Shares, Ints] | None:
    """Take the most local reads, then find ranks for the rest; None when the caps leave none.

    Caps on remote reads are ignored at first, so what is found here is the optimum whenever the
    rest fits, which is nearly always. It needs far fewer arcs than the exact network.

    Returns:
        Local shares by class, and remote samples, [num_strata, world_size].
    """
    num_strata, world_size = caps.shape
    network = Network(2 + world_size)
    for rank, size in enumerate(sizes.tolist()):
        network.add_arc(2 + rank, 1, size)
    cells: dict[tuple[int, int], int] = {}
    k, ranks = np.nonzero(classes.holders)
    nodes = [network.add_node() for _ in classes.counts]
    for node, count in zip(nodes, classes.counts.tolist(), strict=True):
        network.add_arc(0, node, count)
    arcs = []
    for number, stratum, rank in zip(
        k.tolist(), classes.strata[k].tolist(), ranks.tolist(), strict=True
    ):
        if (stratum, rank) not in cells:
            cells[stratum, rank] = network.add_node()
            network.add_arc(cells[stratum, rank], 2 + rank, int(caps[stratum, rank]))
        arcs.append(network.add_arc(nodes[number], cells[stratum, rank], int(sizes[rank])))
    network.maximise(0, 1)

    local = Shares(k, ranks, np.array([network.flow(arc) for arc in arcs], np.int64))
    taken = np.zeros_like(caps)
    np.add.at(taken, (classes.strata[k], ranks), local.counts)
    left = np.bincount(classes.strata, classes.counts, num_strata).astype(np.int64)
    remote = _spread_rest(left - taken.sum(axis=1), sizes - taken.sum(axis=0), caps - taken)
    return None if remote is None else (local, remote)


def _spread_rest(counts: Ints, spare: Ints, room: Ints) -> Ints | None:
    """Give every sample to a rank: in proportion to what the ranks still need, then by a flow.

    Args:
        counts: samples of each stratum, [num_strata].
        spare: samples that each rank must take, [world_size], adding up to those of ``counts``.
        room: what the caps allow, [num_strata, world_size].

    Returns:
        Samples, [num_strata, world_size]; None when the caps do not let them through.
    """
    given = np.zeros_like(room)
    needed = spare.copy()
    for stratum in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]:
        fair = proportional(counts[stratum, None], needed[None])[0]
        given[stratum] = np.minimum(fair, room[stratum])
        needed -= given[stratum]
    if needed.any():
        given = _complete(counts, spare, room, given)
    return given if (given.sum(axis=0) == spare).all() else None


def _complete(counts: Ints, spare: Ints, room: Ints, given: Ints) -> Ints:
    """Raise ``given`` to a maximum flow from strata to ranks."""
    num_strata, world_size = room.shape
    network = Network(2 + world_size + num_strata)
    for rank, (need, flow) in enumerate(
        zip(spare.tolist(), given.sum(axis=0).tolist(), strict=True)
    ):
        network.add_arc(2 + rank, 1, need, flow=flow)
    arcs = {}
    for stratum in np.flatnonzero(counts).tolist():
        node = 2 + world_size + stratum
        network.add_arc(0, node, int(counts[stratum]), flow=int(given[stratum].sum()))
        for rank in np.flatnonzero(np.minimum(room[stratum], spare)).tolist():
            limit, flow = int(room[stratum, rank]), int(given[stratum, rank])
            arcs[stratum, rank] = network.add_arc(node, 2 + rank, limit, flow=flow)
    network.maximise(0, 1)
    result = np.zeros_like(given)
    for cell, arc in arcs.items():
        result[cell] = network.flow(arc)
    return result


def _exactly(classes: Classes, caps: Ints, sizes: Ints) -> tuple[Shares, Ints]:
    """Find the most local reads among the assignments that keep every cap, as a min-cost flow.

    Classes flow to cells (stratum, rank) for nothing where the rank holds them, else for 1 through
    the hub of their stratum. Caps of at least the fair share always leave room for all: splitting
    every stratum in proportion to the sizes keeps them.

    Returns:
        Local shares by class, and remote samples, [num_strata, world_size].
    """
    num_strata, world_size = caps.shape
    network = Network(2 + world_size)  # source, sink, ranks
    for rank, size in enumerate(sizes.tolist()):
        network.add_arc(2 + rank, 1, size)
    hubs = [network.add_node() for _ in range(num_strata)]
    cells = [[network.add_node() for _ in range(world_size)] for _ in range(num_strata)]
    remote_arcs = []
    for hub, nodes, row in zip(hubs, cells, caps.tolist(), strict=True):
        for rank, cap in enumerate(row):
            network.add_arc(nodes[rank], 2 + rank, cap)
        remote_arcs.append([network.add_arc(hub, nodes[r], cap) for r, cap in enumerate(row)])
    local = []
    for k, (stratum, count) in enumerate(
        zip(classes.strata.tolist(), classes.counts.tolist(), strict=True)
    ):
        node = network.add_node()
        network.add_arc(0, node, count)
        for rank in np.flatnonzero(classes.holders[k]).tolist():
            local.append((k, rank, network.add_arc(node, cells[stratum][rank], count)))
        network.add_arc(node, hubs[stratum], count, cost=1)
    network.maximise(0, 1)
    table = np.array([(k, rank, network.flow(arc)) for k, rank, arc in local], np.int64)
    table = table.reshape(-1, 3)
    remote = [[network.flow(arc) for arc in arcs] for arcs in remote_arcs]
    return Shares(table[:, 0], table[:, 1], table[:, 2]), np.array(remote, np.int64)
