"""Who computes which sample of one global batch: as many local reads as the sizes allow.

Samples that the same ranks hold are interchangeable, so an assignment is a flow from sets of
holders to ranks, not a matching of samples. Where the sets are nested or disjoint (shards, nodes,
everywhere), filling the small sets first is exact and vectorised; overlapping sets go through an
exact flow. A cap on every rank's share of a stratum, such as a class, makes it a flow again:
home-first assignment of class-sorted shards gives each rank the samples of few classes, and a
robust rule then takes honest gradients for outliers.

From bottom to top: sets of holders (``HolderSets``), classes of samples under caps
(``assign_capped``), and ``assign``. ``flow.py`` has the flows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from loft_hvd.data.flow import Arcs, Ints, Pairs, fill_room, fill_rows, proportional, raise_flow

__all__ = [
    "Assignment",
    "HolderSets",
    "Homes",
    "Ints",
    "assign",
    "count_local",
    "count_rows",
    "strata_caps",
]

_GOLDEN = 2654435769  # 2 ** 32 over the golden ratio: its multiples fill 32 bits most evenly
_BLOCK = 1 << 18  # samples counted at a time: bounds what they take beside the counts
_MANY_RANKS = 128  # measured: more take above a millisecond a step even where sets are nested
_NARROW = 1 << 15
_MAX_NESTED_CHECK = 4096  # rows; bound from memory: all pairs of them, float32, take 64 MB


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
    near_rows: Ints | None = None  # the set in ``near`` of each set in ``local``, [num_rows]
    strata: npt.NDArray[np.int32] | None = None  # [num_samples]
    strata_cap: Fraction = Fraction(1)  # times its fair share of a stratum that a rank may take
    # Of samples that nobody holds, how many each rank should take of a step, [world_size]; with
    # strata they are left out. First is before the samples that it holds, else after them.
    adopts: Ints | None = None
    adopts_first: bool = False

    @property
    def is_dear(self) -> bool:
        """Whether an assignment takes milliseconds: caps, many ranks, or holders that overlap."""
        sets = [each for each in (self.local, self.near) if each is not None]
        is_large = self.world_size > _MANY_RANKS
        return self.strata is not None or is_large or not all(each.is_nested for each in sets)

    @property
    def world_size(self) -> int:
        """Number of ranks that it was prepared for."""
        return int(self.local.holders.shape[1])


class HolderSets:
    """The distinct sets of ranks that hold samples."""

    def __init__(self, holders: npt.NDArray[np.bool_]) -> None:
        self.holders = holders  # [num_rows, world_size], whether a rank belongs; all sets differ
        self.width = width = holders.sum(axis=1)  # ranks of each set, [num_rows]
        # The ranks of all sets, small sets first: those of ``_order[k]`` begin at ``_starts[k]``.
        # Sets of a width come in an order far from their numbers: one rank's sets would otherwise
        # follow one another, and a greedy filling of overlapping sets would miss many more reads.
        shuffled = np.arange(len(width), dtype=np.uint32) * np.uint32(_GOLDEN)
        self._order = np.lexsort((shuffled, width))
        self._starts = np.concatenate([[0], np.cumsum(width[self._order])])
        self._ranks = np.nonzero(holders[self._order])[1]
        self._place = np.argsort(self._order)  # [num_rows], of each set in that order
        # Sets of one rank and of all are nested with or apart from any other: no need to compare.
        inner = holders[(width > 1) & (width < holders.shape[1])].astype(np.float32)
        # Any two sets are nested or disjoint: filling small sets first is exact.
        self.is_nested = len(inner) <= _MAX_NESTED_CHECK
        if self.is_nested and len(inner):
            shared = inner @ inner.T  # [num_inner, num_inner], ranks that both sets have
            smaller = np.minimum.outer(inner.sum(axis=1), inner.sum(axis=1))
            # Apart: they share none. Nested: they share all of the smaller one.
            self.is_nested = bool(((shared == 0) | (shared == smaller)).all())
        # Sets of one width that nest or are apart are apart, so they can be filled together.
        widths = [int(each) for each in np.unique(width) if each] if self.is_nested else []
        self._by_width = [self._all_of(width, each) for each in widths]

    def _all_of(self, width: Ints, wanted: int) -> tuple[Ints, Ints]:
        """Return the sets of one width, [num_sets], and their ranks, [num_sets, width]."""
        rows = np.flatnonzero(width == wanted)
        return rows, np.nonzero(self.holders[rows])[1].reshape(len(rows), wanted)

    def pairs_of(self, rows: Ints) -> Pairs:
        """Return the ranks that hold each of ``rows`` [num_rows]."""
        place = self._place[rows]
        begin, width = self._starts[place], self._starts[place + 1] - self._starts[place]
        starts = np.concatenate([[0], np.cumsum(width)])
        # Runs that begin at 7 and 2 with widths 2 and 3: 7 8 2 3 4, of which 0 1 2 3 4 is known.
        at = np.repeat(begin - starts[:-1], width) + np.arange(starts[-1])
        return Pairs(starts, self._ranks[at])

    def share(self, counts: Ints, spare: Ints) -> Shares:
        """Give samples to ranks that hold them, as many as ``spare`` [world_size] allows.

        ``counts`` are those of each row, [num_rows]. Of several holders the one with the most room
        left gets the most.
        """
        if not self.is_nested:
            return self._share_overlapping(counts, spare)
        blocks = list(self.fill(counts[None], spare[None].copy()))
        if not blocks:  # no rank holds anything
            return Shares(*np.zeros((3, 0), np.int64))
        return Shares(
            np.concatenate([np.repeat(rows, ranks.shape[1]) for rows, ranks, _ in blocks]),
            np.concatenate([ranks.ravel() for _, ranks, _ in blocks]),
            np.concatenate([given.ravel() for _, _, given in blocks]),
        )

    def fill(self, counts: Ints, spare: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Fill small sets first, for many steps at once; yields (rows, ranks, given).

        ``counts`` is [num_steps, num_rows]; ``spare``, [num_steps, world_size], is used up. Each
        block has the sets of one width: their rows, [num_sets], their ranks, [num_sets, width],
        and what these get, [num_steps, num_sets, width].

        In a family of nested or disjoint sets, whatever a set leaves of a rank serves only larger
        sets that hold all of its ranks alike, so no choice here can cost a later local read.
        """
        for rows, ranks in self._by_width:
            if ranks.shape[1] == 1:  # as in proportion, in one operation
                given = np.minimum(counts[:, rows], spare[:, ranks[:, 0]])[..., None]
            else:
                given = proportional(counts[:, rows], spare[:, ranks])
            spare[:, ranks] -= given
            yield rows, ranks, given

    def _share_overlapping(self, counts: Ints, spare: Ints) -> Shares:
        """Fill small sets first, then rearrange until no more local reads are possible."""
        rows = self._order[counts[self._order] > 0]
        pairs = self.pairs_of(rows)
        given = fill_rows(counts[rows], pairs, spare)
        start = Shares(pairs.rows, pairs.ranks, given)  # its rows are places in ``rows``
        if given.sum() < min(counts.sum(), spare.sum()):
            given = complete(counts[rows], spare, start, room=counts[rows[pairs.rows]])
        return Shares(rows[pairs.rows], pairs.ranks, given)


def complete(supply: Ints, demand: Ints, start: Shares, *, room: Ints) -> Ints:
    """Raise what ``start`` gives from rows to ranks to a maximum flow, and return its counts.

    ``supply`` is [num_rows], ``demand`` [world_size]; ``start`` names each pair that may exchange
    once, and ``room``, [num_pairs], the most that it may.
    """
    num_rows, world_size = len(supply), len(demand)
    source, sink = num_rows + world_size, num_rows + world_size + 1  # after rows and ranks
    arcs = Arcs.joined(
        [
            (source, np.arange(num_rows), supply),
            (num_rows + np.arange(world_size), sink, demand),
            (start.rows, num_rows + start.ranks, room),
        ]
    )
    given = start.counts
    sums = _sums(start.rows, given, num_rows), _sums(start.ranks, given, world_size)
    flows = raise_flow(arcs, source, sink, start=np.concatenate([*sums, given]))
    return flows[num_rows + world_size :]


def _sums(keys: Ints, counts: Ints, num_keys: int) -> Ints:
    """Add up the counts of each key, [num_keys]; exact, as they are far below 2 ** 53."""
    return np.bincount(keys, counts, num_keys).astype(np.int64)


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
    if classes.max(initial=0) < _NARROW:  # numbers of 16 bits are sorted without comparing any
        classes = classes.astype(np.int16)
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
    held: Ints  # the classes that some ranks hold and others do not, small sets first, [num_held]
    pairs: Pairs  # the ranks of each of these; reads of all other classes are alike on all ranks


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
    strata, caps = _binding(strata, sizes, homes.strata_cap)
    num_rows = len(homes.local.holders)
    # One number for each pair (stratum, row): stratum 2 and row 1 of 5 are class 11.
    keys, numbers, counts = np.unique(
        strata * num_rows + rows, return_inverse=True, return_counts=True
    )
    class_strata, class_rows = np.divmod(keys, num_rows)  # [num_classes] each
    width = homes.local.width[class_rows]
    held = np.flatnonzero((width > 0) & (width < len(sizes)))
    held = held[np.argsort(width[held], kind="stable")]
    pairs = homes.local.pairs_of(class_rows[held])
    classes = SampleClasses(class_strata, counts, held, pairs)
    local, remote = _local_first(classes, caps, sizes) or _exactly(classes, caps, sizes)

    owners = np.full(len(rows), -1, np.int64)
    hand_out(owners, np.arange(len(rows)), numbers, local)
    free = np.flatnonzero(owners < 0)
    hand_out(owners, free, strata[free], _shares_of(remote))
    return owners


def _shares_of(table: Ints) -> Shares:
    """Return what a table [num_rows, world_size] gives."""
    rows, ranks = np.nonzero(table)
    return Shares(rows, ranks, table[rows, ranks])


def _binding(strata: npt.NDArray[np.integer], sizes: Ints, cap: Fraction) -> tuple[Ints, Ints]:
    """Merge the strata whose cap cannot bind into one without a cap, to keep the network small.

    Returns each sample's stratum in the new numbering, and caps, [num_strata, world_size].
    """
    counts = np.bincount(strata)
    found = np.flatnonzero(counts)  # of a thousand classes, those in this batch
    caps = strata_caps(counts[found], sizes, cap)
    binds = (caps < np.minimum.outer(counts[found], sizes)).any(axis=1)
    # Strata 0 to 3 of which 1 and 3 bind become 2, 0, 2, 1: the last number is of all the rest.
    number = np.zeros(len(counts), np.int64)
    number[found] = np.where(binds, np.cumsum(binds) - 1, binds.sum())
    return number[strata], np.vstack([caps[binds], sizes])


def _local_first(classes: SampleClasses, caps: Ints, sizes: Ints) -> tuple[Shares, Ints] | None:
    """Take the most local reads, then find ranks for the rest; None when the caps leave none.

    Caps on remote reads are ignored at first, so what is found here is the optimum whenever the
    rest fits, which is nearly always. It needs far fewer arcs than the exact network. Returns local
    shares by class, and remote samples, [num_strata, world_size].
    """
    num_strata, world_size = caps.shape
    held, pairs, counts = classes.held, classes.pairs, classes.counts[classes.held]
    rows, ranks = pairs.rows, pairs.ranks
    # Cells (stratum, rank) with a class that the rank holds: classes flow to ranks through them.
    cells, cell = np.unique(classes.strata[held[rows]] * world_size + ranks, return_inverse=True)
    room = caps.ravel()[cells]
    given = fill_rows(counts, pairs, sizes, cells=cell, room=room)
    into = _sums(cell, given, len(cells))
    if given.sum() < min(counts.sum(), sizes.sum()):
        nodes = 2 + world_size + np.arange(len(held) + len(cells))  # after source, sink and ranks
        class_nodes, cell_nodes = nodes[: len(held)], nodes[len(held) :]
        arcs = Arcs.joined(
            [
                (2 + np.arange(world_size), 1, sizes),
                (0, class_nodes, counts),
                (cell_nodes, 2 + cells % world_size, room),
                (class_nodes[rows], cell_nodes[cell], counts[rows]),
            ]
        )
        start = (_sums(ranks, given, world_size), _sums(rows, given, len(held)), into, given)
        flows = raise_flow(arcs, 0, 1, start=np.concatenate(start))
        given = flows[-len(rows) :]
        into = _sums(cell, given, len(cells))
    local = Shares(held[rows], ranks, given)
    taken = np.zeros_like(caps)
    taken.ravel()[cells] = into
    left = _sums(classes.strata, classes.counts, num_strata)
    remote = _spread_rest(left - taken.sum(axis=1), sizes - taken.sum(axis=0), caps - taken)
    return None if remote is None else (local, remote)


def _spread_rest(counts: Ints, spare: Ints, room: Ints) -> Ints | None:
    """Give every sample to a rank: in proportion to what the ranks still need, then by a flow.

    ``counts`` [num_strata] and ``spare`` [world_size], what each rank must take, have one sum; caps
    leave ``room``, [num_strata, world_size] as what is returned; None when not all get through.
    """
    given = fill_room(counts, spare, room)
    may_take = np.minimum(room, spare) * (counts > 0)[:, None] > 0
    # A few samples are left, mostly. They push others from rank to rank: from the strata that they
    # are of, through cells that gave some, to ranks that need more. All other cells come second.
    has_left, needs = given.sum(axis=1) < counts, given.sum(axis=0) < spare
    for near in (has_left[:, None] | (given > 0) | needs, True):
        if given.sum() < spare.sum():
            rows, ranks = np.nonzero(may_take & near)
            start = Shares(rows, ranks, given[rows, ranks])
            given[rows, ranks] = complete(counts, spare, start, room=room[rows, ranks])
    return given if given.sum() == spare.sum() else None


def _exactly(classes: SampleClasses, caps: Ints, sizes: Ints) -> tuple[Shares, Ints]:
    """Find the most local reads among the assignments that keep every cap, as a min-cost flow.

    Classes flow to cells (stratum, rank) for nothing where the rank holds them, else for 1 through
    the hub of their stratum. Caps of at least the fair share always leave room for all: splitting
    every stratum in proportion to the sizes keeps them. Returns what ``_local_first`` does.
    """
    num_strata, world_size = caps.shape
    k, ranks = classes.held[classes.pairs.rows], classes.pairs.ranks
    # Nodes: source, sink, ranks, hubs, cells, classes.
    hubs = 2 + world_size + np.arange(num_strata)
    cells = hubs[-1] + 1 + np.arange(caps.size).reshape(caps.shape)
    nodes = cells[-1, -1] + 1 + np.arange(len(classes.counts))
    parts = [
        (2 + np.arange(world_size), 1, sizes),
        (cells.ravel(), np.tile(2 + np.arange(world_size), num_strata), caps.ravel()),
        (0, nodes, classes.counts),
        (nodes, hubs[classes.strata], classes.counts),  # the only arcs with a cost
        (nodes[k], cells[classes.strata[k], ranks], classes.counts[k]),
        (np.repeat(hubs, world_size), cells.ravel(), caps.ravel()),
    ]
    arcs = Arcs.joined(parts)
    costs = np.zeros_like(arcs.tails)
    costs[(arcs.tails >= nodes[0]) & (arcs.heads <= hubs[-1])] = 1
    flows = raise_flow(replace(arcs, costs=costs), 0, 1)
    remote = flows[-caps.size :].reshape(caps.shape)
    return Shares(k, ranks, flows[-caps.size - len(k) : -caps.size]), remote


@dataclass(frozen=True)
class Assignment:
    """The owner of every sample of a global batch."""

    owners: Ints  # rank that computes each sample, [num_samples]
    local: Ints  # samples of each rank that it holds itself, [world_size]
    # Where samples went by cost: their places in the batch in the order in which ranks take them,
    # [num_samples], and how many each micro-batch of each rank has.
    places: Ints | None = None
    micro: tuple[tuple[int, ...], ...] = ()


def count_rows(rows: npt.NDArray[np.integer], num_rows: int, *, batch_size: int) -> Ints:
    """Count the samples of every row in each full global batch, [num_steps, num_rows].

    ``rows`` are those of the samples in the order of the epoch, ``homes.rows[order]``.
    """
    num_steps = len(rows) // batch_size
    counts = np.zeros((num_steps, num_rows), np.int64)
    at_once = max(_BLOCK // batch_size, 1)  # steps
    for first in range(0, num_steps, at_once):
        last = min(first + at_once, num_steps)
        # One count for many steps: of 3 rows, row 1 of the block's step 2 has the key 2 * 3 + 1.
        keys = rows[first * batch_size : last * batch_size].astype(np.int64)
        keys += np.repeat(np.arange(last - first) * num_rows, batch_size)
        found = np.bincount(keys, minlength=(last - first) * num_rows)
        counts[first:last] = found.reshape(last - first, num_rows)
    return counts


def count_local(counts: Ints, sizes: Ints, homes: Homes) -> Ints:
    """Return how many samples of each step every rank reads locally, [num_steps, world_size].

    ``counts`` are those of ``count_rows``, ``sizes`` [world_size] or [num_steps, world_size]. The
    result is that of ``assign``, without naming samples; strata caps are not taken into account.
    """
    spare = np.broadcast_to(np.asarray(sizes, np.int64), (len(counts), np.shape(sizes)[-1])).copy()
    taken: Ints = np.zeros_like(spare)
    if homes.local.is_nested:
        for _, ranks, given in homes.local.fill(counts, spare):
            taken[:, ranks] += given  # the sets of a block are apart: each rank comes once
    else:
        for step in range(len(counts)):
            shares = homes.local.share(counts[step], spare[step])
            np.add.at(taken[step], shares.ranks, shares.counts)
    return taken


def assign(batch: npt.NDArray[np.integer], sizes: Ints, homes: Homes) -> Assignment:
    """Decide who computes each sample of a global batch: local first, then near, then anywhere.

    ``batch`` holds indices of samples; ``sizes``, [world_size], add up to their number.
    """
    # Not homes.rows[batch], which takes half as long again where rows are far apart in memory.
    rows: npt.NDArray[np.integer] = homes.rows.take(batch)
    if homes.strata is not None:
        owners = assign_capped(rows, homes.strata[batch], sizes, homes)
        is_local = homes.local.holders[rows, owners]
        return Assignment(owners, np.bincount(owners[is_local], minlength=len(sizes)))
    owners = np.full(len(batch), -1, np.int64)
    spare, local = sizes.copy(), np.zeros_like(sizes)
    if homes.adopts_first:
        _adopt(owners, rows, spare, homes)
    for sets, set_of_row in ((homes.local, None), (homes.near, homes.near_rows)):
        if sets is not None and spare.any():
            free = np.flatnonzero(owners < 0)
            here = rows if len(free) == len(rows) else rows[free]
            here = here if set_of_row is None else set_of_row[here]
            shares = sets.share(np.bincount(here, minlength=len(sets.holders)), spare)
            hand_out(owners, free, here, shares)
            given = _sums(shares.ranks, shares.counts, len(sizes))
            spare -= given
            if sets is homes.local:
                # All local reads: one more among the rest would mean that this flow is not maximal.
                local = given
    if not homes.adopts_first:
        _adopt(owners, rows, spare, homes)
    owners[owners < 0] = np.repeat(np.arange(len(sizes)), spare)  # the rest, from anywhere
    return Assignment(owners, local)


def _adopt(owners: Ints, rows: npt.NDArray[np.integer], spare: Ints, homes: Homes) -> None:
    """Give samples that nobody holds to the ranks that should take some; uses ``spare`` up."""
    if homes.adopts is None:
        return
    free = np.flatnonzero((owners < 0) & (homes.local.width[rows] == 0))
    given = proportional(len(free), np.minimum(homes.adopts, spare))
    owners[free[: given.sum()]] = np.repeat(np.arange(len(given)), given)
    spare -= given
