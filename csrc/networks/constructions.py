"""Compare-exchange networks: where they come from, what can go, and in which order to run the rest.

Two published constructions, Batcher's odd-even merge sort (1968) and Parberry's pairwise sorting
network (1992), for powers of two. Other sizes are cut from the next one by fixing wires to -inf and
+inf and removing what then cannot exchange. What no wanted output depends on is removed by
liveness, backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = [
    "Network",
    "Step",
    "cost",
    "cut",
    "in_few_registers",
    "odd_even_pairs",
    "pairwise_pairs",
    "prune",
]


class Step(NamedTuple):
    """One step on registers a and b: "exchange" (a gets the minimum), "min" or "max"."""

    kind: str
    a: int
    b: int

    @property
    def cost(self) -> int:
        """Number of minimum and maximum operations."""
        return 2 if self.kind == "exchange" else 1


Network = tuple[Step, ...]


def cost(network: Iterable[Step]) -> int:
    """Return the number of minimum and maximum operations."""
    return sum(step.cost for step in network)


def odd_even_pairs(size: int) -> list[tuple[int, int]]:
    """Return Batcher's odd-even merge sort for a power of two."""
    pairs = []
    p = 1
    while p < size:
        k = p
        while k >= 1:
            for j in range(k % p, size - k, 2 * k):
                for i in range(min(k, size - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs.append((i + j, i + j + k))
            k //= 2
        p *= 2
    return pairs


def pairwise_pairs(size: int) -> list[tuple[int, int]]:
    """Return Parberry's pairwise sorting network for a power of two."""
    pairs: list[tuple[int, int]] = []

    def sort(wires: range) -> None:
        if len(wires) < 2:
            return
        pairs.extend((wires[i], wires[i + 1]) for i in range(0, len(wires) - 1, 2))
        sort(wires[0::2])
        sort(wires[1::2])
        for i in range(1, len(wires) - 1, 2):
            reach = len(wires) // 2  # a power of two
            while reach > 1:
                if i + reach - 1 < len(wires):
                    pairs.append((wires[i], wires[i + reach - 1]))
                reach //= 2

    sort(range(size))
    return pairs


def cut(pairs: Sequence[tuple[int, int]], size: int, rows: int, num_low: int) -> Network:
    """Fix ``num_low`` wires of ``size`` to -inf and the surplus others to +inf, leaving ``rows``.

    Returns:
        A network on ``rows`` registers that leaves rank r in register r.
    """
    low, high = -1, -2
    wires = [low] * num_low + list(range(rows)) + [high] * (size - rows - num_low)
    steps = []
    for i, j in pairs:
        a, b = wires[i], wires[j]
        if a == low or b == high:
            continue
        if b == low or a == high:
            wires[i], wires[j] = b, a
        else:
            steps.append(Step("exchange", a, b))
    rank = {register: place for place, register in enumerate(wires[num_low : num_low + rows])}
    return tuple(Step(step.kind, rank[step.a], rank[step.b]) for step in steps)


def prune(network: Network, wanted: Iterable[int]) -> Network:
    """Remove what no wanted register depends on."""
    live = set(wanted)
    kept = []
    for step in reversed(network):
        is_low, is_high = step.a in live, step.b in live
        if is_low or is_high:
            kind = "exchange" if is_low and is_high else "min" if is_low else "max"
            kept.append(Step(kind, step.a, step.b))
            live |= {step.a, step.b}
    return tuple(reversed(kept))


def in_few_registers(network: Network, registers: int) -> Network:
    """Reorder independent steps so that they meet values that lately were in a register.

    Greedy: of the steps whose operands are ready, run the one that misses the fewest values in a
    set of the last ``registers`` used ones, brings in the fewest new rows, and goes on with what
    was used last. The result does the same exchanges, each on the same values.

    Args:
        network: what to reorder.
        registers: values that are taken to stay in registers.
    """
    before = _predecessors(network)
    after: list[list[int]] = [[] for _ in network]
    for place, earlier in enumerate(before):
        for other in earlier:
            after[other].append(place)
    missing = [len(earlier) for earlier in before]
    ready = [place for place, count in enumerate(missing) if count == 0]
    last_use: dict[int, int] = {}  # of the values in registers
    seen: set[int] = set()
    steps: list[Step] = []

    def price(place: int) -> tuple[int, int, int, int]:
        a, b = network[place].a, network[place].b
        loads = (a not in last_use) + (b not in last_use)
        latest = max(last_use.get(a, -1), last_use.get(b, -1))
        return loads, (a not in seen) + (b not in seen), -latest, place

    while ready:
        place = min(ready, key=price)
        ready.remove(place)
        step = network[place]
        seen |= {step.a, step.b}
        last_use[step.a] = last_use[step.b] = len(steps)
        steps.append(step)
        if step.kind != "exchange":  # the other output is dead
            del last_use[step.b if step.kind == "min" else step.a]
        while len(last_use) > registers:
            del last_use[min(last_use, key=last_use.__getitem__)]
        for other in after[place]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    return tuple(steps)


def _predecessors(network: Network) -> list[set[int]]:
    """Return for every step the places of the steps that made its operands."""
    maker: dict[int, int] = {}
    found = []
    for place, step in enumerate(network):
        found.append({maker[wire] for wire in (step.a, step.b) if wire in maker})
        maker[step.a] = maker[step.b] = place
    return found
