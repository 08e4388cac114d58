"""Emit straight-line compare-exchange networks as C++ and prove every one of them.

Run at build time: ``python generate.py OUTPUT.h``; standard library only. For each number of rows
it emits a sorting network and a median network (only the middle two ranks come out right).

Every network is made here, from two published constructions: Batcher's odd-even merge sort (1968)
and Parberry's pairwise sorting network (1992). Sizes that are no power of two are cut from the
next one by fixing wires to -inf and +inf and removing what then cannot exchange. What no wanted
output depends on is removed by liveness, backwards. For an odd number of rows the median may also
be the median of three of the last row and the middle two of the others. The cheapest wins.

Proof: the 0-1 principle, exhaustively up to 20 rows, on 200,000 random vectors per network above.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SORT_SIZES = (*range(1, 33), 48, 64)
MEDIAN_SIZES = SORT_SIZES
EXHAUSTIVE_UP_TO = 20
RANDOM_VECTORS = 200_000


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


def candidates(rows: int) -> list[Network]:
    """Return every sorting network we know how to make for ``rows``."""
    size = 1
    while size < rows:
        size *= 2
    surplus = size - rows
    found = []
    for pairs in (odd_even_pairs(size), pairwise_pairs(size)):
        paddings = range(surplus + 1) if rows <= 33 else (0, surplus // 2, surplus)
        for num_low in paddings:
            network = cut(pairs, size, rows, num_low)
            if is_plausible(network, rows):
                found.append(network)
    return found


def is_plausible(network: Network, rows: int) -> bool:
    """Reject a construction that does not sort, before the full proof of the winner."""
    return proves(network, rows, range(rows), random_columns(rows, 512))


def sorting_network(rows: int) -> Network:
    """Return the cheapest sorting network."""
    return min(candidates(rows), key=cost)


def middle(rows: int) -> tuple[int, int]:
    """Return the two middle ranks, which are one for an odd number of rows."""
    return (rows - 1) // 2, rows // 2


def median_network(rows: int) -> Network:
    """Return the cheapest network that brings the middle ranks to their registers."""
    found = [prune(network, middle(rows)) for network in candidates(rows)]
    if rows % 2 and rows > 1:
        lower, upper = middle(rows - 1)
        shift = [prune(network, (lower, upper)) for network in candidates(rows - 1)]
        # max(lower, min(last, upper)); rank `upper` of the rows - 1 is the middle of all rows
        ending = (Step("min", upper, rows - 1), Step("max", lower, upper))
        found += [network + ending for network in shift]
    return min(found, key=cost)


def run(network: Network, wires: Sequence[int]) -> list[int]:
    """Run the network on bit sets: each wire holds one bit of every test vector."""
    registers = list(wires)
    for kind, a, b in network:
        low, high = registers[a] & registers[b], registers[a] | registers[b]
        if kind != "max":
            registers[a] = low
        if kind != "min":
            registers[b] = high
    return registers


def all_columns(rows: int) -> list[int]:
    """Return the bit sets of all 2**rows vectors of zeros and ones."""
    columns = []
    for row in range(rows):
        half = 1 << row
        period = ((1 << half) - 1) << half
        columns.append(repeat(period, 2 * half, 1 << rows))
    return columns


def repeat(pattern: int, width: int, total: int) -> int:
    """Repeat ``width`` bits until ``total`` bits are filled, by doubling."""
    while width < total:
        pattern |= pattern << width
        width *= 2
    return pattern


def random_columns(rows: int, vectors: int) -> list[int]:
    """Return the bit sets of random vectors: many weights, and every step function."""
    source = random.Random(rows)
    columns = [0] * rows
    for place in range(vectors):
        ones = range(place % (rows + 1)) if place <= rows else None
        if ones is None:
            chosen: Iterable[int] = source.sample(range(rows), source.randint(0, rows))
        else:
            chosen = ones
        for row in chosen:
            columns[row] |= 1 << place
    return columns


def proves(
    network: Network, rows: int, wanted: Iterable[int], columns: Sequence[int] | None = None
) -> bool:
    """Say whether the wanted registers end with their ranks, by the 0-1 principle."""
    if columns is None:
        few = rows <= EXHAUSTIVE_UP_TO
        columns = all_columns(rows) if few else random_columns_fast(rows, RANDOM_VECTORS)
    at_least = [-1] + [0] * rows  # at_least[k]: the vectors with k ones or more; -1 is all
    for column in columns:
        for k in range(rows, 0, -1):
            at_least[k] |= at_least[k - 1] & column
    result = run(network, columns)
    return all(result[rank] == at_least[rows - rank] for rank in wanted)


def random_columns_fast(rows: int, vectors: int) -> list[int]:
    """Return random vectors of many densities, with the step functions and their reverses."""
    source = random.Random(rows)
    columns = [0] * rows
    densities = 16
    share = vectors // densities
    for step in range(densities):
        for row in range(rows):
            bits = source.getrandbits(share)
            for level in range(3):  # and, or: densities from 1/16 to 15/16
                other = source.getrandbits(share)
                bits = bits & other if step >> level & 1 else bits | other
            if step >= densities // 2:
                bits = source.getrandbits(share)
            columns[row] |= bits << (step * share)
    place = share * densities
    for ones in range(rows + 1):
        for row in range(rows):
            columns[row] |= (row < ones) << place | (row >= ones) << (place + 1)
        place += 2
    return columns


def emit(name: str, rows: int, network: Network) -> str:
    """Return one struct with the network as straight-line code."""
    call = {"exchange": "exchange", "min": "keep_min", "max": "keep_max"}
    lines = [f"    {call[kind]}(v[{a}], v[{b}]);" for kind, a, b in network]
    return "\n".join(
        [
            f"// {len(network)} steps, {cost(network)} operations",
            "template <>",
            f"struct {name}<{rows}> {{",
            "  template <typename Entry>",
            "  static LOFT_INLINE void apply(Entry* v) {",
            *(lines or ["    (void)v;"]),
            "  }",
            "};",
            "",
        ]
    )


def generate() -> str:
    """Return the whole header; raise if a network fails its proof."""
    parts = [
        "// Made by csrc/networks/generate.py at build time, proved by the 0-1 principle.",
        "// Include it inside a namespace that declares exchange, keep_min and keep_max.",
        "template <int kRows> struct SortNetwork;",
        "template <int kRows> struct MedianNetwork;",
        "",
    ]
    for rows in SORT_SIZES:
        network = sorting_network(rows)
        if not proves(network, rows, range(rows)):
            raise AssertionError(f"the sorting network for {rows} rows does not sort")
        parts.append(emit("SortNetwork", rows, network))
    for rows in MEDIAN_SIZES:
        network = median_network(rows)
        if not proves(network, rows, wanted_registers(rows, network)):
            raise AssertionError(f"the median network for {rows} rows finds another value")
        parts.append(emit("MedianNetwork", rows, network))
    return "\n".join(parts)


def wanted_registers(rows: int, network: Network) -> tuple[int, ...]:
    """Return the registers that must hold the middle ranks."""
    del network
    return middle(rows)


def main() -> None:
    """Write the header, leaving the file alone when nothing changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    path = parser.parse_args().output
    text = generate()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


if __name__ == "__main__":
    main()
