"""Emit straight-line compare-exchange networks as C++ and prove every one of them.

Run at build time: ``python generate.py FOLDER``; standard library only. It writes networks.h, for
each number of rows a sorting network and a median network (only the middle two ranks come out
right), and windows.h, networks in which the ranks from one to its mirror image come out right.

constructions.py makes them and cuts away what no wanted rank depends on. For an odd number of rows
the median may also be the median of three of the last row and the middle two of the others. The
cheapest wins. Its steps are ordered so that few values leave the registers, and rows are loaded
where they are first needed.

Proof: the 0-1 principle, exhaustively up to 20 rows, on 200,000 random vectors per network above.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from csrc.networks.constructions import (  # found from anywhere by the line above
    Network,
    Step,
    cost,
    cut,
    in_few_registers,
    odd_even_pairs,
    pairwise_pairs,
    prune,
)

SORT_SIZES = (*range(1, 33), 48, 64)
MEDIAN_SIZES = range(1, 65)
WINDOW_SIZES = range(17, 65)
EXHAUSTIVE_UP_TO = 20
RANDOM_VECTORS = 200_000
Ranked = tuple[Sequence[int], list[int]]  # see ranked
REGISTERS = 13  # of AVX2's 16; for AVX-512 GCC spills no less with an order for its 32


@functools.cache
def candidates(rows: int) -> list[Network]:
    """Return every sorting network we know how to make for ``rows``."""
    size = 1
    while size < rows:
        size *= 2
    surplus = size - rows
    few = ranked(random_columns(rows, 512))  # the winner's full proof comes later
    found = []
    for pairs in (odd_even_pairs(size), pairwise_pairs(size)):
        paddings = range(surplus + 1) if rows <= 33 else (0, surplus // 2, surplus)
        for num_low in paddings:
            network = cut(pairs, size, rows, num_low)
            if sorts(network, range(rows), few):
                found.append(network)
    return found


def sorting_network(rows: int) -> Network:
    """Return the cheapest sorting network."""
    return min(candidates(rows), key=cost)


def window_starts(rows: int) -> tuple[int, ...]:
    """Return the first ranks of the windows that have a network, ascending."""
    return tuple(sorted({0, rows // 8, rows // 4}))


def window_network(rows: int, start: int) -> Network:
    """Return the cheapest network that brings ranks start .. rows - 1 - start to their places."""
    wanted = range(start, rows - start)
    return min((prune(network, wanted) for network in candidates(rows)), key=cost)


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


def sorts(network: Network, wanted: Iterable[int], test: Ranked) -> bool:
    """Say whether the wanted registers end with their ranks, for each vector of the test."""
    columns, at_least = test
    result = run(network, columns)
    return all(result[rank] == at_least[len(columns) - rank] for rank in wanted)


@functools.lru_cache(maxsize=1)
def proof(rows: int) -> Ranked:
    """Return the test vectors of the full proof, by the 0-1 principle."""
    few = rows <= EXHAUSTIVE_UP_TO
    return ranked(all_columns(rows) if few else random_columns_fast(rows, RANDOM_VECTORS))


def ranked(columns: Sequence[int]) -> Ranked:
    """Return the columns and, for k = 0, 1, ..., the set of vectors with k ones or more."""
    rows = len(columns)
    at_least = [-1] + [0] * rows  # -1 is all
    for column in columns:
        for k in range(rows, 0, -1):
            at_least[k] |= at_least[k - 1] & column
    return columns, at_least


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


def emit(name: str, arguments: str, network: Network) -> str:
    """Return one struct with the network as straight-line code."""
    call = {"exchange": "exchange", "min": "keep_min", "max": "keep_max"}
    lines = []
    loaded: set[int] = set()
    for kind, a, b in network:
        lines += [f"    v[{row}] = load({row});" for row in (a, b) if row not in loaded]
        loaded |= {a, b}
        lines.append(f"    {call[kind]}(v[{a}], v[{b}]);")
    return "\n".join(
        [
            f"// {len(network)} steps, {cost(network)} operations",
            "template <>",
            f"struct {name}<{arguments}> {{",
            "  template <typename Entry, typename Load>",
            "  static LOFT_INLINE void apply(Entry* v, const Load& load) {",
            *(lines or ["    v[0] = load(0);"]),
            "  }",
            "  template <typename Entry>",
            "  static LOFT_INLINE void apply(Entry* v) { apply(v, InPlace<Entry>{v}); }",
            "};",
            "",
        ]
    )


def proved(network: Network, rows: int, wanted: Iterable[int], what: str) -> Network:
    """Return the network, its steps ordered; raise if a wanted register may end wrong."""
    ordered = in_few_registers(network, REGISTERS)
    if not sorts(ordered, wanted, proof(rows)):
        raise AssertionError(f"the {what} network for {rows} rows is wrong")
    return ordered


def generate_networks() -> str:
    """Return networks.h; raise if a network fails its proof."""
    parts = [
        "// Made by csrc/networks/generate.py at build time, proved by the 0-1 principle.",
        "// Include it inside a namespace that declares exchange, keep_min and keep_max.",
        "// load(i) gives row i, asked for once and when it is first needed.",
        "template <typename Entry>",
        "struct InPlace {",
        "  Entry* v;",
        "  LOFT_INLINE Entry operator()(int row) const { return v[row]; }",
        "};",
        "template <int kRows> struct SortNetwork;",
        "template <int kRows> struct MedianNetwork;",
        "",
    ]
    for rows in MEDIAN_SIZES:
        if rows in SORT_SIZES:
            network = proved(sorting_network(rows), rows, range(rows), "sorting")
            parts.append(emit("SortNetwork", f"{rows}", network))
        network = proved(median_network(rows), rows, middle(rows), "median")
        parts.append(emit("MedianNetwork", f"{rows}", network))
    return "\n".join(parts)


def generate_windows() -> str:
    """Return windows.h; raise if a network fails its proof."""
    parts = [
        "// Made by csrc/networks/generate.py at build time, proved by the 0-1 principle.",
        "// Include it after networks.h. Ranks kFrom .. kRows - 1 - kFrom end in their places.",
        "template <int kRows, int kFrom> struct WindowNetwork;",
        "",
    ]
    for rows in WINDOW_SIZES:
        for start in window_starts(rows):
            wanted = range(start, rows - start)
            network = proved(window_network(rows, start), rows, wanted, "window")
            parts.append(emit("WindowNetwork", f"{rows}, {start}", network))
    return "\n".join(parts)


def main() -> None:
    """Write both headers, leaving alone what has not changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    made = {"networks.h": generate_networks(), "windows.h": generate_windows()}
    for name, text in made.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
