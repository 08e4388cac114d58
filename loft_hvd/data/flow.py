"""Whole samples shared out among ranks: exact flows, and filling in proportion.

Every rank works out the same shares for itself, in plain integers and in a fixed order: a library's
solver may break ties another way in its next version. The extension does the same steps in C++
(``csrc/shares``), a hundred times as fast and without Python's lock; what stands here defines them,
and is used where the extension is not built.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import numpy.typing as npt

from loft_hvd._native import extension

__all__ = [
    "Arcs",
    "Ints",
    "Network",
    "Pairs",
    "fill_room",
    "fill_rows",
    "proportional",
    "raise_flow",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arcs:
    """A directed network, [num_arcs] each: nodes count from 0, capacities and flows in units."""

    tails: Ints
    heads: Ints
    capacities: Ints
    costs: Ints | None = None  # of a unit, >= 0; None for 0 everywhere

    @classmethod
    def joined(cls, parts: Sequence[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]) -> Arcs:
        """Join parts of (tails, heads, capacities), of which each may be one number for all."""
        wide = [np.broadcast_arrays(*map(np.atleast_1d, part)) for part in parts]
        columns = (np.concatenate(column).astype(np.int64) for column in zip(*wide, strict=True))
        return cls(*columns)


def _native() -> ModuleType | None:
    """Return the extension, or None where it is not built, or was before it had these functions."""
    module = extension()
    return module if hasattr(module, "raise_flow") else None


def raise_flow(arcs: Arcs, source: int, sink: int, *, start: Ints | None = None) -> Ints:
    """Return a maximum flow from ``source`` to ``sink`` of the least cost, units of each arc.

    It goes on from ``start``, which must be a cheapest flow of its value, such as one of cost 0.
    """
    flows = np.zeros(len(arcs.tails), np.int64) if start is None else start.copy()
    num_nodes = max(source, sink, arcs.tails.max(initial=0), arcs.heads.max(initial=0)) + 1
    native = _native()
    if native is None:
        network = Network(num_nodes)
        costs = np.zeros_like(flows) if arcs.costs is None else arcs.costs
        columns = (arcs.tails, arcs.heads, arcs.capacities, costs, flows)
        for tail, head, capacity, cost, flow in zip(*(a.tolist() for a in columns), strict=True):
            network.add_arc(tail, head, capacity, cost=cost, flow=flow)
        network.maximise(source, sink)
        return np.array([network.flow(2 * k) for k in range(len(flows))], np.int64)
    tails, heads, capacities = map(_words, (arcs.tails, arcs.heads, arcs.capacities))
    costs = None if arcs.costs is None else _words(arcs.costs)
    native.raise_flow(
        num_nodes=int(num_nodes),
        num_arcs=len(flows),
        tails=tails.ctypes.data,
        heads=heads.ctypes.data,
        capacities=capacities.ctypes.data,
        costs=0 if costs is None else costs.ctypes.data,
        flows=flows.ctypes.data,
        source=source,
        sink=sink,
    )
    return flows


@dataclass(frozen=True)
class Pairs:
    """Rows of samples, and for each the ranks that may take some."""

    starts: Ints  # where each row's ranks begin, and the end of the last, [num_rows + 1]
    ranks: Ints  # ranks of all rows, one row behind the other, [num_pairs]

    @property
    def rows(self) -> Ints:
        """The row of each of ``ranks``, [num_pairs]."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


def fill_rows(
    counts: Ints, pairs: Pairs, spare: Ints, *, cells: Ints | None = None, room: Ints | None = None
) -> Ints:
    """Give samples of each row to its ranks in proportion to what they can take, row after row.

    Args:
        counts: samples of each row, [num_rows].
        pairs: the ranks of each row.
        spare: samples that each rank can take, [world_size].
        cells: the cell of each pair, [num_pairs]; None without ``room``.
        room: samples that each cell can take, [num_cells].

    Returns:
        What each rank gets from its row, [num_pairs].
    """
    given, spare = np.zeros(len(pairs.ranks), np.int64), spare.copy()
    room = np.zeros(0, np.int64) if room is None else room.copy()
    native = _native()
    if native is None:
        for row, (begin, end) in enumerate(zip(pairs.starts[:-1], pairs.starts[1:], strict=True)):
            mine = pairs.ranks[begin:end]
            can_take = spare[mine]
            if cells is not None:
                can_take = np.minimum(can_take, room[cells[begin:end]])
                room[cells[begin:end]] -= proportional(counts[row], can_take)
            given[begin:end] = proportional(counts[row], can_take)
            spare[mine] -= given[begin:end]
        return given
    counts, starts, ranks = map(_words, (counts, pairs.starts, pairs.ranks))
    cells = None if cells is None else _words(cells)
    native.fill_rows(
        num_rows=len(counts),
        counts=counts.ctypes.data,
        starts=starts.ctypes.data,
        ranks=ranks.ctypes.data,
        cells=0 if cells is None else cells.ctypes.data,
        spare=spare.ctypes.data,
        room=room.ctypes.data,
        given=given.ctypes.data,
    )
    return given


def fill_room(counts: Ints, needed: Ints, room: Ints) -> Ints:
    """Give samples of each row to all ranks in proportion to what they still need, within room.

    Large rows come first: small ones fit into what these leave.

    Args:
        counts: samples of each row, [num_rows].
        needed: samples that each rank must take, [world_size].
        room: the most that a rank may take of a row, [num_rows, world_size].

    Returns:
        What each rank gets of each row, [num_rows, world_size].
    """
    given, needed = np.zeros(room.shape, np.int64), needed.copy()
    native = _native()
    if native is None:
        for row in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]:
            given[row] = np.minimum(proportional(counts[row], needed), room[row])
            needed -= given[row]
        return given
    counts, room = map(_words, (counts, room))
    native.fill_room(
        num_rows=len(counts),
        num_ranks=len(needed),
        counts=counts.ctypes.data,
        needed=needed.ctypes.data,
        room=room.ctypes.data,
        given=given.ctypes.data,
    )
    return given


def _words(values: Ints) -> Ints:
    """Return values as the extension reads them: int64, one behind the other."""
    return np.ascontiguousarray(values, np.int64)


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


def proportional(count: npt.ArrayLike, spare: Ints) -> Ints:
    """Give ``min(count, sum of spare)`` out in proportion to ``spare``, by largest remainders.

    Args:
        count: [...], for instance one a step.
        spare: [..., num_ranks].

    Returns:
        Shape [..., num_ranks]. With count 5::

            spare            4   2   2
            5 * spare / 8    2   1   1   and remainders 4, 2, 2: one sample is missing
            result           3   1   1   the largest remainder gets it; of equals the lowest rank
    """
    total = spare.sum(axis=-1)  # [...]
    count = np.asarray(np.minimum(count, total))
    given, remainder = np.divmod(count[..., None] * spare, np.maximum(total, 1)[..., None])
    missing = count - given.sum(axis=-1)  # [...]
    # Sorting twice gives each rank its position in the order of remainders, largest first.
    position = np.argsort(np.argsort(-remainder, axis=-1, kind="stable"), axis=-1, kind="stable")
    result: Ints = given + (position < missing[..., None])
    return result
