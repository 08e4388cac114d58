"""Call all that an extension offers, rightly and wrongly: ``bound.py LIBRARY``.

For a build with sanitizers, so with NumPy alone: rows and results are blocks of just their size.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = (np.float64, np.float32, np.float16, np.uint16)  # the last one: bfloat16's bits


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("_loft", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Calls:
    """Counts calls, and those that did not end as they should."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.num_calls = self.num_wrong = 0

    def right(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.num_calls += 1
        call(*arguments)

    def refused(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.num_calls += 1
        try:
            call(*arguments)
        except (ValueError, TypeError):
            return
        self.num_wrong += 1
        print(f"not refused: {call.__name__}{arguments}")


def rows_of(draw: np.random.Generator, rows: int, numel: int, code: int) -> list[Any]:
    if code == 3:
        return [draw.integers(0, 2**16, numel, np.uint16) for _ in range(rows + 1)]
    return [draw.standard_normal(numel).astype(DTYPES[code]) for _ in range(rows + 1)]


def aggregate_all(calls: Calls, draw: np.random.Generator) -> None:
    module = calls.module
    for code in range(4):
        for num_rows, numel in ((1, 1), (3, 17), (8, 300), (17, 33), (40, 5), (5, 20_000)):
            *rows, out = rows_of(draw, num_rows, numel, code)
            given = [row.ctypes.data for row in rows], numel, code
            weights = [1 + row % 3 for row in range(num_rows)]
            f = (num_rows - 1) // 2
            to, end = out.ctypes.data, (2, "", 1)
            for rule in range(4):
                for by in ([], weights):
                    calls.right(module.aggregate_cpu, *given, rule, 0, f, by, to, *end)
            table = np.zeros((num_rows + 1, num_rows + 1))
            calls.right(module.distances_cpu, *given, table.ctypes.data, 2, "")
            matrix = draw.random(2 * num_rows).tolist()
            ones = [1.0] * num_rows
            if num_rows > 1:
                mixed = ones, matrix, 2, 1, 0, 0, [1, 2], to
                calls.right(module.mix_cpu, *given, *mixed, *end)
            if code == 1:
                calls.right(module.pass_cpu, given[0], numel, to, 2, "", False)
            refuse_all(calls, given, weights, f, to, end, ones)


def refuse_all(
    calls: Calls, given: Any, weights: Any, f: int, to: int, end: Any, ones: list[float]
) -> None:
    module, (rows, numel, code) = calls.module, given
    no_row = [0, *rows[1:]], numel, code
    none: Any = []
    aggregate, mix, distances = module.aggregate_cpu, module.mix_cpu, module.distances_cpu
    calls.refused(aggregate, *no_row, 0, 0, 0, none, to, *end)
    calls.refused(aggregate, *given, 0, 0, 0, none, 0, *end)
    calls.refused(aggregate, *given, 0, 0, f + 1, none, to, *end)
    calls.refused(aggregate, *given, 0, 0, -1, none, to, *end)
    calls.refused(aggregate, *given, 9, 0, 0, none, to, *end)
    calls.refused(aggregate, rows, -1, code, 0, 0, 0, none, to, *end)
    calls.refused(aggregate, none, numel, code, 0, 0, 0, none, to, *end)
    calls.refused(aggregate, *given, 0, 0, 0, [*weights, 1], to, *end)
    calls.refused(aggregate, *given, 0, 0, 0, [0] * len(rows), to, *end)
    calls.refused(aggregate, *given, 0, 0, 0, [2**30] * len(rows), to, *end)
    calls.refused(aggregate, *given, 0, 0, 0, none, to, 1, "wide", 0)
    calls.refused(distances, *given, 0, 1, "")
    calls.refused(distances, *no_row, to, 1, "")
    last = [*rows[:-1], 0], numel, code
    one = 1, 1, 0, 0, none
    calls.refused(mix, *last, ones, ones, *one, to, *end)
    calls.refused(mix, *given, ones, ones, *one, 0, *end)
    calls.refused(mix, *given, ones[1:], ones, *one, to, *end)
    calls.refused(mix, *given, ones, [*ones, 1.0], *one, to, *end)
    calls.refused(mix, *given, ones, none, 0, 1, 0, 0, none, to, *end)
    calls.refused(mix, *given, ones, none, -1, 1, 0, 0, none, to, *end)
    calls.refused(mix, *given, ones, ones, 1, 1, 0, 1, none, to, *end)


def fill_all(calls: Calls, draw: np.random.Generator) -> None:
    """Blocks of rows of just their size are filled; what says which is of just its size as well."""
    fill = calls.module.fill_cpu
    for code in range(4):
        for num_rows, numel, block_numel in ((3, 17, 5), (8, 1000, 320), (17, 33, 64), (4, 0, 1)):
            *rows, _ = rows_of(draw, num_rows, numel, code)
            missing = np.zeros((num_rows, -(-numel // block_numel)), np.uint8)
            missing[1], missing[2, :1] = 1, 1
            given = [row.ctypes.data for row in rows], numel, code
            where = missing.ctypes.data, block_numel
            for rule, weights in ((0, []), (1, []), (1, [1 + row % 3 for row in range(num_rows)])):
                calls.right(fill, *given, rule, 0, 0, weights, *where, 1, 2, "")
                calls.right(fill, *given, rule, 0, 0, weights, *where, num_rows, 2, "")
            calls.refused(fill, *given, 1, 0, 0, [], *where, 0, 1, "")
            calls.refused(fill, *given, 1, 0, 0, [], where[0], 0, 1, 1, "")
            calls.refused(fill, *given, 1, 0, 0, [1], *where, 1, 1, "")
            calls.refused(fill, *given, 1, 0, num_rows, [], *where, num_rows, 1, "")


def absorb_all(calls: Calls, draw: np.random.Generator) -> None:
    """Gradients go into averages, in blocks of just their size."""
    absorb = calls.module.absorb_cpu
    for code in range(2):
        for numel in (1, 16, 17, 20_000):
            gradient, average, out = rows_of(draw, 2, numel, code)
            places = [each.ctypes.data for each in (gradient, average, out)]
            end = 0.3, 0.7, 2, ""
            calls.right(absorb, *places, numel, code, *end)
            calls.right(absorb, 0, *places[1:], numel, code, *end)
            calls.right(absorb, places[0], places[1], places[0], numel, code, *end)
            calls.right(absorb, 0, 0, 0, 0, code, *end)
            calls.refused(absorb, *places, numel, 2, *end)
            calls.refused(absorb, *places, numel, -1, *end)
            calls.refused(absorb, *places, -1, code, *end)
            calls.refused(absorb, places[0], 0, places[2], numel, code, *end)
            calls.refused(absorb, *places[:2], 0, numel, code, *end)
            calls.refused(absorb, *places, numel, code, 0.3, 0.7, 2, "wide")


def compact_all(calls: Calls, draw: np.random.Generator) -> None:
    """Values become messages in rooms of just their size, and values again."""
    module = calls.module
    for code in range(1, 4):
        for count in (0, 1, 512, 5000):
            (values,) = rows_of(draw, 0, count, code)
            room = np.zeros(module.compact_room(count, code), np.uint8)
            back = np.zeros_like(values)
            given = values.ctypes.data, count, code, room.ctypes.data, ""
            length = module.compact_cpu(*given)
            calls.right(module.compact_cpu, *given)
            message = room[:length].copy()
            place = message.ctypes.data, length, back.ctypes.data, count, code, ""
            calls.right(module.expand_cpu, *place)
            assert module.expand_cpu(*place)
            assert np.array_equal(back.view(np.uint8), values.view(np.uint8))
            for size, wanted in ((length - 1, count), (7, count), (length, count + 1)):
                more = np.zeros(count + 1, DTYPES[code])
                at = more.ctypes.data
                assert not module.expand_cpu(place[0], size, at, wanted, code, "")
            calls.refused(module.expand_cpu, 0, *place[1:])
            calls.refused(module.compact_cpu, *given[:3], 0, "")
            if count > 0:
                calls.refused(module.compact_cpu, 0, *given[1:])
    for code in (0, 4, -1):
        calls.refused(module.compact_room, 8, code)
    calls.refused(module.compact_room, -1, 1)
    calls.refused(module.compact_room, 2**62, 1)


def share_all(calls: Calls) -> None:
    """Give samples to ranks: two rows of 6 and 4 samples, three ranks."""
    module = calls.module

    def numbers(*values: int) -> Any:
        return np.array(values, np.int64)

    counts, starts = numbers(6, 4), numbers(0, 2, 4)
    ranks, cells, spare, room = (
        numbers(0, 1, 1, 2),
        numbers(0, 1, 2, 3),
        numbers(3, 3, 2),
        numbers(9, 9, 9, 9),
    )
    given = np.zeros(4, np.int64)
    places = [each.ctypes.data for each in (counts, starts, ranks, cells, spare, room, given)]
    calls.right(module.fill_rows, 2, *places)
    needed, wide, table = numbers(4, 3, 3), numbers(9, 9, 9, 9, 9, 9), np.zeros(6, np.int64)
    places = [each.ctypes.data for each in (counts, needed, wide, table)]
    calls.right(module.fill_room, 2, 3, *places)
    tails, heads, capacities = numbers(0, 0, 1, 2), numbers(1, 2, 3, 3), numbers(3, 2, 2, 4)
    flows = np.zeros(4, np.int64)
    for costs in (0, numbers(1, 2, 1, 1)):
        at = 0 if isinstance(costs, int) else costs.ctypes.data
        flows[:] = 0
        places = [tails.ctypes.data, heads.ctypes.data, capacities.ctypes.data, at]
        calls.right(module.raise_flow, 4, 4, *places, flows.ctypes.data, 0, 3)
        assert flows.tolist() == [2, 2, 2, 2], flows


def beat(calls: Calls) -> None:
    pulse = calls.module.Pulse(0.001, b"\nbeat\n")
    one, other = socket.socketpair()
    calls.right(pulse.add, one.fileno())
    calls.right(pulse.add, 10**6)  # no such descriptor
    other.settimeout(10)
    calls.right(other.recv, 6)
    calls.right(pulse.remove, one.fileno())
    calls.right(pulse.stop)
    calls.right(pulse.stop)
    calls.right(pulse.add, one.fileno())
    one.close()
    other.close()


def main(path: str) -> int:
    calls = Calls(load(path))
    aggregate_all(calls, np.random.default_rng(0))
    fill_all(calls, np.random.default_rng(3))
    absorb_all(calls, np.random.default_rng(2))
    compact_all(calls, np.random.default_rng(1))
    share_all(calls)
    beat(calls)
    print(f"{calls.num_calls} calls, {calls.num_wrong} wrong")
    return 1 if calls.num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
