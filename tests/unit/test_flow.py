"""Shares of whole samples: flows are largest and cheapest ones, rows are filled as defined."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.data import flow
from loft_hvd.data.flow import Arcs, Ints, Pairs, fill_room, fill_rows, proportional, raise_flow
from loft_hvd.errors import MissingDependencyError
from tests.support.plans import FakePlans

pytestmark = pytest.mark.skipif(extension() is None, reason="the C++ extension is not built")


def draws(seed: int, most: int, count: int) -> Ints:
    """Return ``count`` numbers below ``most``, the same with every version of NumPy."""
    words = np.asarray(np.random.PCG64(seed).random_raw(count), np.uint64)
    return np.asarray(words % np.uint64(most), np.int64)


def random_arcs(seed: int, *, has_costs: bool) -> Arcs:
    """Draw a network of up to 40 nodes in which the source is 0 and the sink 1."""
    num_nodes, num_arcs = int(draws(seed, 39, 1)[0]) + 2, int(draws(seed + 1, 299, 1)[0]) + 1
    tails, heads = draws(seed + 2, num_nodes, 2 * num_arcs).reshape(2, -1)
    costs = np.minimum(draws(seed + 3, 9, num_arcs), 2) if has_costs else None
    return Arcs(tails, heads, draws(seed + 4, 9, num_arcs), costs)


def balance(arcs: Arcs, flows: Ints) -> Ints:
    """Return what each node receives beyond what it sends."""
    num_nodes = int(max(arcs.tails.max(), arcs.heads.max(), 1)) + 1
    got = np.bincount(arcs.heads, flows, num_nodes) - np.bincount(arcs.tails, flows, num_nodes)
    return got.astype(np.int64)


def still_open(arcs: Arcs, flows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return tails, heads and costs of what may still flow, and of what may be taken back."""
    costs = np.zeros_like(flows) if arcs.costs is None else arcs.costs
    has_room = np.concatenate([flows < arcs.capacities, flows > 0])
    ends = [arcs.tails, arcs.heads], [arcs.heads, arcs.tails], [costs, -costs]
    tails, heads, costs = (np.concatenate(each)[has_room] for each in ends)
    return tails, heads, costs


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("seed", range(0, 300, 5))
def test_a_flow_keeps_capacities_and_is_a_largest_and_cheapest_one(
    seed: int, has_costs: bool
) -> None:
    arcs = random_arcs(seed, has_costs=has_costs)
    flows = raise_flow(arcs, 0, 1)
    assert ((flows >= 0) & (flows <= arcs.capacities)).all()
    got = balance(arcs, flows)
    assert (got[2:] == 0).all(), "only source and sink keep or make units"
    tails, heads, costs = still_open(arcs, flows)
    # The largest: what is open does not lead from the source to the sink.
    is_reached = np.arange(len(got)) == 0
    for _ in range(len(got)):
        is_reached[heads[is_reached[tails]]] = True
    assert not is_reached[1]
    # The cheapest: no round trip through what is open costs less than nothing, so that distances
    # from anywhere settle (Bellman and Ford).
    far = np.zeros(len(got), np.int64)
    for _ in range(len(got)):
        np.minimum.at(far, heads, far[tails] + costs)
    assert (far[tails] + costs >= far[heads]).all()


def test_of_equal_flows_all_builds_find_the_same() -> None:
    """Ranks whose builds differed in one tie would compute a sample twice, and another never."""
    found = hashlib.sha256()
    for seed in range(0, 300, 5):
        for has_costs in (False, True):
            arcs = random_arcs(seed, has_costs=has_costs)
            found.update(raise_flow(arcs, 0, 1).astype("<i8").tobytes())
    assert found.hexdigest() == "ae8e5c6105a9a99ec38d3e876ed3cf8f72c1031419686a78c042eedeef3f0d29"


def test_a_flow_takes_a_cheap_detour_before_a_dear_arc() -> None:
    tails, heads, capacities, costs = np.array(
        [(0, 1, 2, 0), (1, 3, 2, 1), (1, 2, 1, 0), (2, 3, 5, 0)]
    ).T
    assert raise_flow(Arcs(tails, heads, capacities, costs), 0, 3).tolist() == [2, 1, 1, 1]


def test_a_flow_goes_on_from_a_start() -> None:
    arcs = Arcs(*(np.array(each) for each in ([0, 0, 2, 3], [2, 3, 1, 1], [4, 5, 3, 9])))
    start = np.array([2, 0, 2, 0])
    assert raise_flow(arcs, 0, 1, start=start).tolist() == [3, 5, 3, 5]
    assert start.tolist() == [2, 0, 2, 0]


def test_an_arc_to_a_node_that_is_not_there_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(ValueError, match="a node that is not there"):
        raise_flow(Arcs(tails=-one, heads=one, capacities=one), 0, 1)


def rows_as_defined(counts: Ints, pairs: Pairs, spare: Ints, cells: Ints, room: Ints) -> list[int]:
    """Fill row after row, each in proportion to what its ranks and cells can take."""
    given: list[int] = []
    spare, room = spare.copy(), room.copy()
    for count, begin, end in zip(counts, pairs.starts[:-1], pairs.starts[1:], strict=True):
        mine, cell = pairs.ranks[begin:end], cells[begin:end]
        of_row = proportional(count, np.minimum(spare[mine], room[cell]))
        spare[mine] -= of_row
        room[cell] -= of_row
        given += of_row.tolist()
    return given


def room_as_defined(counts: Ints, needed: Ints, room: Ints) -> list[list[int]]:
    """Fill the largest rows first, of equals the first, in proportion to what ranks still need."""
    given, needed = np.zeros_like(room), needed.copy()
    for row in sorted(range(len(counts)), key=lambda row: -counts[row]):
        given[row] = np.minimum(proportional(counts[row], needed), room[row])
        needed -= given[row]
    found: list[list[int]] = given.tolist()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_filled_as_defined(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, world_size = int(rng.integers(1, 30)), int(rng.integers(1, 12))
    widths = rng.integers(1, world_size + 1, num_rows)
    ranks = np.concatenate([rng.choice(world_size, width, replace=False) for width in widths])
    pairs = Pairs(np.concatenate([[0], np.cumsum(widths)]), ranks)
    counts, spare = rng.integers(0, 20, num_rows), rng.integers(0, 60, world_size)
    limits = rng.integers(0, 9, (num_rows, world_size))
    cells = ranks + world_size * rng.integers(0, 2, num_rows)[pairs.rows]
    room = rng.integers(0, 30, 2 * world_size)
    ample = np.full(2 * world_size, 10**6)
    assert fill_rows(counts, pairs, spare).tolist() == rows_as_defined(
        counts, pairs, spare, cells, ample
    )
    assert fill_room(counts, spare, limits).tolist() == room_as_defined(counts, spare, limits)
    given = fill_rows(counts, pairs, spare, cells=cells, room=room)
    assert given.tolist() == rows_as_defined(counts, pairs, spare, cells, room)
    assert (np.bincount(cells, given, 2 * world_size) <= room).all()
    assert (np.bincount(pairs.ranks, given, world_size) <= spare).all()


def test_homes_that_overlap_need_the_extension_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "extension", lambda: None)
    data = TensorDataset(torch.arange(80))
    nested = loft.Placement.sharded(80, 2)
    assert len(list(loft.DataLoader(data, FakePlans([6, 2]), placement=nested))) == 10
    overlapping = loft.Placement.from_function(lambda i: [i % 3, (i + 1) % 3], 80)
    loader = loft.DataLoader(data, FakePlans([4, 2, 2]), placement=overlapping)
    with pytest.raises(MissingDependencyError, match="homes that overlap"):
        next(iter(loader))


def test_several_rows_of_steps_are_filled_at_once() -> None:
    spare = np.array([[[4, 2, 2], [0, 0, 0]], [[1, 1, 1], [9, 0, 1]]])  # [steps, sets, ranks]
    count = np.array([[5, 3], [2, 20]])
    assert proportional(count, spare).tolist() == [
        [[3, 1, 1], [0, 0, 0]],
        [[1, 1, 0], [9, 0, 1]],
    ]
