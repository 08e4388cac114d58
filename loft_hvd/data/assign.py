"""Who computes which sample of one global batch: as many local reads as the sizes allow.

Samples that the same ranks hold are interchangeable, so an assignment is a flow from sets of
holders to ranks, not a matching of samples. Where the sets are nested or disjoint (shards, nodes,
everywhere), filling the small sets first is exact and vectorised; overlapping sets go through an
exact flow. A cap on every rank's share of a stratum, such as a class, makes it a flow again:
home-first assignment of class-sorted shards gives each rank the samples of few classes, and a
robust rule then takes honest gradients for outliers.

From bottom to top: the flow (``Network``), sets of holders (``HolderSets``), classes of samples
under caps (``assign_capped``), and ``assign``. Every rank computes the assignment for itself, so
all of it is plain integer arithmetic in a fixed order: a library's solver may break ties another
way in its next version.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

__all__ = [
    "Assignment",
    "HolderSets",
    "Homes",
    "Ints",
    "Network",
    "assign",
    "count_local",
    "count_rows",
    "strata_caps",
]

Ints = npt.NDArray[np.int64]
_MAX_NESTED_CHECK = 4096  # rows; bound from memory: all pairs of them, float32, take 64 MB


class Network:
    """Exact min-cost flow in a directed network with a capacity and a cost >= 0 an arc.

    Primal-dual: price the nodes by shortest paths, then push blocking flows through the arcs of
    reduced cost 0 (Dinic), until the sink is out of reach. With costs 0 and 1 only few prices
    arise, so the number of rounds is small.
    """

    def __init__(self, num_nodes: int) -> None:
        # Arcs come in pairs, 2k and its reverse 2k + 1, so ``arc ^ 1`` is the twin of either. What
        # flows through an arc is the room of its twin.
        self._out: list[list[int]] = [[] for _ in range(num_nodes)]  # arcs that leave a node
        self._head: list[int] = []
        self._room: list[int] = []
        self._cost: list[int] = []
        self._price = [0] * num_nodes

    def add_node(self) -> int:
        """Add a node and return its number."""
        self._out.append([])
        self._price.append(0)
        return len(self._out) - 1

    def add_arc(self, tail: int, head: int, capacity: int, *, cost: int = 0, flow: int = 0) -> int:
        """Add an arc that already carries ``flow`` units and return its id.

        A flow given here must be part of a cheapest flow of its value, such as one of cost 0.
        """
        arc = len(self._head)
        self._head += [head, tail]
        self._room += [capacity - flow, flow]
        self._cost += [cost, -cost]
        self._out[tail].append(arc)
        self._out[head].append(arc + 1)
        return arc

    def flow(self, arc: int) -> int:
        """Return the units that ``arc`` carries."""
        return self._room[arc ^ 1]

    def maximise(self, source: int, sink: int) -> None:
        """Push as much as fits from ``source`` to ``sink``, at the least cost."""
        while self._reprice(source, sink):
            while levels := self._levels(source, sink):
                self._push_blocking(source, sink, levels)

    def _reprice(self, source: int, sink: int) -> bool:
        """Raise prices by the shortest distances (Dijkstra); False when the sink is cut off."""
        far: dict[int, int] = {}
        queue = [(0, source)]
        while queue:
            distance, node = heapq.heappop(queue)
            if node in far:
                continue
            far[node] = distance
            if node == sink:
                break
            for arc in self._out[node]:
                head = self._head[arc]
                if self._room[arc] and head not in far:
                    step = self._cost[arc] + self._price[node] - self._price[head]
                    heapq.heappush(queue, (distance + step, head))
        if sink not in far:
            return False
        # Nodes beyond the sink rise by as much as it does: no reduced cost falls below 0.
        for node in range(len(self._price)):
            self._price[node] += far.get(node, far[sink])
        return True

    def _is_open(self, arc: int, tail: int) -> bool:
        head = self._head[arc]
        return self._room[arc] > 0 and self._cost[arc] + self._price[tail] - self._price[head] == 0

    def _levels(self, source: int, sink: int) -> dict[int, int]:
        """Return how many open arcs each node lies from the source; empty when the sink is not."""
        levels = {source: 0}
        frontier = [source]
        while frontier and sink not in levels:
            reached = []
            for node in frontier:
                for arc in self._out[node]:
                    head = self._head[arc]
                    if head not in levels and self._is_open(arc, node):
                        levels[head] = levels[node] + 1
                        reached.append(head)
            frontier = reached
        return levels if sink in levels else {}

    def _push_blocking(self, source: int, sink: int, levels: dict[int, int]) -> None:
        """Push along level-increasing open arcs until every such path has a full arc."""
        # An arc that led nowhere is not tried again: each iterator goes on where it stopped.
        untried = {node: iter(self._out[node]) for node in levels}
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                units = min(self._room[arc] for arc in path)
                for arc in path:
                    self._room[arc] -= units
                    self._room[arc ^ 1] += units
                # Go on from the tail of the first full arc: what leads there still has room.
                full = next(i for i, arc in enumerate(path) if self._room[arc] == 0)
                node = self._head[path[full] ^ 1]
                del path[full:]
                continue
            for arc in untried[node]:
                head = self._head[arc]
                if levels.get(head) == levels[node] + 1 and self._is_open(arc, node):
                    path.append(arc)
                    node = head
                    break
            else:  # no way on from here
                if not path:
                    return
                node = self._head[path.pop() ^ 1]


@dataclass(frozen=True)
class Shares:
    """Samples given out: ``counts[i]`` samples held by row ``rows[i]`` go to ``ranks[i]``."""

    rows: Ints
    ranks: Ints
    counts: Ints


@dataclass(frozen=True)
class Homes:
    """A placement prepared for one world."""

    rows: npt.NDArray[np.int32]  # [num_samples], index of each sample's set of holders
    local: HolderSets  # the distinct sets of ranks that hold samples
    near: HolderSets | None = None  # likewise on a holder's node; None without nodes
    strata: npt.NDArray[np.int32] | None = None  # [num_samples]
    strata_cap: Fraction = Fraction(1)  # times its fair share of a stratum that a rank may take

    @property
    def world_size(self) -> int:
        """Number of ranks that it was prepared for."""
        return int(self.local.holders.shape[1])


class HolderSets:
    """The distinct sets of ranks that hold samples."""

    def __init__(self, holders: npt.NDArray[np.bool_]) -> None:
        self.holders = holders  # [num_rows, world_size], whether a rank belongs to a set
        width = holders.sum(axis=1)
        self._single_rows = np.flatnonzero(width == 1)
        self._single_ranks = holders[self._single_rows].argmax(axis=1)
        self._wide_rows = [int(r) for r in np.argsort(width, kind="stable") if width[r] > 1]
        self._wide_ranks = [np.flatnonzero(holders[row]) for row in self._wide_rows]
        # Sets of one rank and of all are nested with or apart from any other: no need to compare.
        inner = holders[(width > 1) & (width < holders.shape[1])].astype(np.float32)
        # Any two sets are nested or disjoint: filling small sets first is exact.
        self.is_nested = len(inner) <= _MAX_NESTED_CHECK
        if self.is_nested and len(inner):
            shared = inner @ inner.T  # [num_inner, num_inner], ranks that both sets have
            smaller = np.minimum.outer(inner.sum(axis=1), inner.sum(axis=1))
            # Apart: they share none. Nested: they share all of the smaller one.
            self.is_nested = bool(((shared == 0) | (shared == smaller)).all())

    def share(self, counts: Ints, spare: Ints) -> Shares:
        """Give samples to ranks that hold them, as many as ``spare`` [world_size] allows.

        ``counts`` are those of each row, [num_rows]. Of several holders the one with the most room
        left gets the most.
        """
        blocks = list(self.fill(counts[None], spare[None].copy()))
        shares = Shares(
            np.concatenate([np.broadcast_to(rows, ranks.shape) for rows, ranks, _ in blocks]),
            np.concatenate([ranks for _, ranks, _ in blocks]),
            np.concatenate([given[0] for _, _, given in blocks]),
        )
        if self.is_nested:
            return shares
        given = complete(counts, spare, shares, room=counts[shares.rows])
        return Shares(shares.rows, shares.ranks, given)

    def fill(self, counts: Ints, spare: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Fill small sets first, for many steps at once; yields (rows, ranks, given).

        ``counts`` is [num_steps, num_rows]; ``spare``, [num_steps, world_size], is used up. Given
        is what each of ``ranks`` gets, [num_steps, num_ranks].

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


def complete(supply: Ints, demand: Ints, start: Shares, *, room: Ints) -> Ints:
    """Raise what ``start`` gives from rows to ranks to a maximum flow, and return its counts.

    ``supply`` is [num_rows], ``demand`` [world_size]; ``start`` names each pair that may exchange
    once, and ``room``, [num_pairs], the most that it may.
    """
    num_rows, world_size = len(supply), len(demand)
    source, sink = num_rows + world_size, num_rows + world_size + 1  # after rows and ranks
    network = Network(sink + 1)
    out = np.bincount(start.rows, start.counts, num_rows).astype(int).tolist()
    into = np.bincount(start.ranks, start.counts, world_size).astype(int).tolist()
    for row, count in enumerate(supply.tolist()):
        network.add_arc(source, row, count, flow=out[row])
    for rank, count in enumerate(demand.tolist()):
        network.add_arc(num_rows + rank, sink, count, flow=into[rank])
    pairs = zip(*(a.tolist() for a in (start.rows, start.ranks, room, start.counts)), strict=True)
    arcs = [network.add_arc(r, num_rows + k, most, flow=flow) for r, k, most, flow in pairs]
    network.maximise(source, sink)
    return np.array([network.flow(arc) for arc in arcs], np.int64)


def proportional(count: Ints, spare: Ints) -> Ints:
    """Give ``min(count, sum of spare)`` out in proportion to ``spare``, by largest remainders.

    Args:
        count: [num_steps].
        spare: [num_steps, num_ranks].

    Returns:
        Shape [num_steps, num_ranks]. One step with count 5::

            spare            4   2   2
            5 * spare / 8    2   1   1   and remainders 4, 2, 2: one sample is missing
            result           3   1   1   the largest remainder gets it; of equals the lowest rank
    """
    total = spare.sum(axis=1)  # [num_steps]
    product = np.minimum(count, total)[:, None] * spare  # [num_steps, num_ranks]
    given, remainder = np.divmod(product, np.maximum(total, 1)[:, None])
    missing = np.minimum(count, total) - given.sum(axis=1)  # [num_steps]
    # Sorting twice gives each rank its position in the order of remainders, largest first.
    position = np.argsort(np.argsort(-remainder, axis=1, kind="stable"), axis=1, kind="stable")
    result: Ints = given + (position < missing[:, None])
    return result


def hand_out(owners: Ints, free: Ints, classes: npt.NDArray[np.integer], shares: Shares) -> None:
    """Give the first samples of each class to the ranks of its shares, in batch order.

    Args:
        owners: written at ``free``.
        free: positions in the batch, [num_free].
        classes: class of each of them, [num_free].
        shares: its rows are classes.

    Five samples, of which one of class 0 is left for later::

        classes     1  0  1  0  1      positions 0 to 4
        by_class    1  3 | 0  2  4     their positions, class by class
        shares      one of class 0 to rank 2; of class 1 two to rank 0 and one to rank 3
        owners      0  2  0 -1  3
    """
    by_class = np.argsort(classes, kind="stable")  # [num_free]
    order = np.lexsort((shares.ranks, shares.rows))  # [num_shares], by class, then by rank
    share_class, counts = shares.rows[order], shares.counts[order]  # [num_shares] each
    before = np.cumsum(counts) - counts  # [num_shares], samples given out by earlier shares
    first = np.searchsorted(share_class, share_class)  # [num_shares], first one of the same class
    # Where in by_class a share begins: where its class does, behind earlier shares of the class.
    start = np.searchsorted(classes[by_class], share_class) + before - before[first]
    # [counts.sum()]: start, start + 1, .. of each share, as arange runs on from its ``before``.
    slots = np.repeat(start - before, counts) + np.arange(counts.sum())
    owners[free[by_class[slots]]] = np.repeat(shares.ranks[order], counts)


@dataclass(frozen=True)
class SampleClasses:
    """Samples by what decides where they may go: their stratum and the ranks that hold them."""

    strata: Ints  # stratum of each class, [num_classes]
    counts: Ints  # samples of each class, [num_classes]
    holders: npt.NDArray[np.bool_]  # whether a rank holds a class, [num_classes, world_size]


def strata_caps(counts: Ints, sizes: Ints, cap: Fraction) -> Ints:
    """Return the most samples of each stratum that each rank may take, [num_strata, world_size].

    ``ceil(cap * size / total * count)``, in whole numbers.
    """
    over = max(int(sizes.sum()), 1) * cap.denominator
    # Rounded up: -(-a // b) is ceil(a / b), with no float between.
    result: Ints = -(-cap.numerator * np.multiply.outer(counts, sizes) // over)
    return result


def assign_capped(
    rows: npt.NDArray[np.integer], strata: npt.NDArray[np.integer], sizes: Ints, homes: Homes
) -> Ints:
    """Return the owners [num_samples] with the most local reads among those that keep every cap.

    ``rows`` and ``strata`` are each sample's; ``sizes``, [world_size], add up to num_samples.
    """
    strata, caps = _binding(np.unique(strata, return_inverse=True)[1], sizes, homes.strata_cap)
    num_rows = len(homes.local.holders)
    # One number for each pair (stratum, row): stratum 2 and row 1 of 5 are class 11.
    keys, numbers, counts = np.unique(
        strata * num_rows + rows, return_inverse=True, return_counts=True
    )
    class_strata, class_rows = np.divmod(keys, num_rows)  # [num_classes] each
    classes = SampleClasses(class_strata, counts, homes.local.holders[class_rows])
    local, remote = _local_first(classes, caps, sizes) or _exactly(classes, caps, sizes)

    owners = np.full(len(rows), -1, np.int64)
    hand_out(owners, np.arange(len(rows)), numbers, local)
    for stratum in np.flatnonzero(remote.any(axis=1)):
        free = np.flatnonzero((owners < 0) & (strata == stratum))
        owners[free] = np.repeat(np.arange(len(sizes)), remote[stratum])
    return owners


def _binding(strata: Ints, sizes: Ints, cap: Fraction) -> tuple[Ints, Ints]:
    """Merge the strata whose cap cannot bind into one without a cap, to keep the network small.

    Returns each sample's stratum in the new numbering, and caps, [num_strata, world_size].
    """
    counts = np.bincount(strata)
    caps = strata_caps(counts, sizes, cap)
    binds = (caps < np.minimum.outer(counts, sizes)).any(axis=1)
    # Strata 0 to 3 of which 1 and 3 bind become 2, 0, 2, 1: the last number is of all the rest.
    number = np.where(binds, np.cumsum(binds) - 1, binds.sum())
    return number[strata], np.vstack([caps[binds], sizes])


def _local_first(classes: SampleClasses, caps: Ints, sizes: Ints) -> tuple[Shares, Ints] | None:
    """Take the most local reads, then find ranks for the rest; None when the caps leave none.

    Caps on remote reads are ignored at first, so what is found here is the optimum whenever the
    rest fits, which is nearly always. It needs far fewer arcs than the exact network. Returns local
    shares by class, and remote samples, [num_strata, world_size].
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

    ``counts`` [num_strata] and ``spare`` [world_size], what each rank must take, have one sum; caps
    leave ``room``, [num_strata, world_size] as what is returned; None when not all get through.
    """
    given = np.zeros_like(room)
    needed = spare.copy()
    # Large strata first: small ones fit into what these leave.
    for stratum in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]:
        fair = proportional(counts[stratum, None], needed[None])[0]
        given[stratum] = np.minimum(fair, room[stratum])
        needed -= given[stratum]
    if needed.any():
        rows, ranks = np.nonzero(np.minimum(room, spare) * (counts > 0)[:, None])
        start = Shares(rows, ranks, given[rows, ranks])
        given[rows, ranks] = complete(counts, spare, start, room=room[rows, ranks])
    return given if (given.sum(axis=0) == spare).all() else None


def _exactly(classes: SampleClasses, caps: Ints, sizes: Ints) -> tuple[Shares, Ints]:
    """Find the most local reads among the assignments that keep every cap, as a min-cost flow.

    Classes flow to cells (stratum, rank) for nothing where the rank holds them, else for 1 through
    the hub of their stratum. Caps of at least the fair share always leave room for all: splitting
    every stratum in proportion to the sizes keeps them. Returns what ``_local_first`` does.
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
    table = table.reshape(-1, 3)  # where no rank holds anything, too
    remote = [[network.flow(arc) for arc in arcs] for arcs in remote_arcs]
    return Shares(table[:, 0], table[:, 1], table[:, 2]), np.array(remote, np.int64)


@dataclass(frozen=True)
class Assignment:
    """The owner of every sample of a global batch."""

    owners: Ints  # rank that computes each sample, [num_samples]
    local: Ints  # samples of each rank that it holds itself, [world_size]


def count_rows(rows: npt.NDArray[np.integer], num_rows: int, *, batch_size: int) -> Ints:
    """Count the samples of every row in each full global batch, [num_steps, num_rows].

    ``rows`` are those of the samples in the order of the epoch, ``homes.rows[order]``.
    """
    num_steps = len(rows) // batch_size
    # One count for all steps: of 3 rows, row 1 of step 2 has the key 2 * 3 + 1.
    keys = rows[: num_steps * batch_size].astype(np.int64)  # [num_steps * batch_size]
    keys += np.repeat(np.arange(num_steps) * num_rows, batch_size)
    return np.bincount(keys, minlength=num_steps * num_rows).reshape(num_steps, num_rows)


def count_local(counts: Ints, sizes: Ints, homes: Homes) -> Ints:
    """Return how many samples of each step every rank reads locally, [num_steps, world_size].

    ``counts`` are those of ``count_rows``, ``sizes`` [world_size] or [num_steps, world_size]. The
    result is that of ``assign``, without naming samples; strata caps are not taken into account.
    """
    spare = np.broadcast_to(np.asarray(sizes, np.int64), (len(counts), np.shape(sizes)[-1])).copy()
    taken: Ints = np.zeros_like(spare)
    if homes.local.is_nested:
        for _, ranks, given in homes.local.fill(counts, spare):
            taken[:, ranks] += given
    else:
        for step in range(len(counts)):
            shares = homes.local.share(counts[step], spare[step])
            np.add.at(taken[step], shares.ranks, shares.counts)
    return taken


def assign(batch: Ints, sizes: Ints, homes: Homes) -> Assignment:
    """Decide who computes each sample of a global batch: local first, then near, then anywhere.

    ``batch`` holds indices of samples; ``sizes``, [world_size], add up to their number.
    """
    rows = homes.rows[batch]
    owners = np.full(len(batch), -1, np.int64)
    spare = sizes.copy()
    if homes.strata is None:
        for sets in (homes.local, homes.near):
            if sets is not None and spare.any():
                free = np.flatnonzero(owners < 0)
                shares = sets.share(np.bincount(rows[free], minlength=len(sets.holders)), spare)
                hand_out(owners, free, rows[free], shares)
                np.subtract.at(spare, shares.ranks, shares.counts)
        owners[owners < 0] = np.repeat(np.arange(len(sizes)), spare)  # the rest, from anywhere
    else:
        owners = assign_capped(rows, homes.strata[batch], sizes, homes)
    is_local = homes.local.holders[rows, owners]
    local = np.bincount(owners[is_local], minlength=len(sizes))
    return Assignment(owners, local)
