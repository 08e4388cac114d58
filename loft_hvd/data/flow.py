"""Exact min-cost flow on small networks, in whole numbers and the same on every machine.

Ranks compute their assignment each for itself, so they must all reach the same one. A library
solver may break ties another way in its next version; this one is plain integer arithmetic in a
fixed order.
"""

from __future__ import annotations

import heapq

__all__ = ["Network"]


class Network:
    """A directed network with a capacity and a cost >= 0 an arc.

    Primal-dual: price the nodes by shortest paths, then push blocking flows through the arcs of
    reduced cost 0 (Dinic), until the sink is out of reach. With costs 0 and 1 only few prices
    arise, so the number of rounds is small.
    """

    def __init__(self, num_nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(num_nodes)]  # arc ids; arc ^ 1 is its twin
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
        untried = {node: iter(self._out[node]) for node in levels}
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                units = min(self._room[arc] for arc in path)
                for arc in path:
                    self._room[arc] -= units
                    self._room[arc ^ 1] += units
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
            else:
                if not path:
                    return
                node = self._head[path.pop() ^ 1]
