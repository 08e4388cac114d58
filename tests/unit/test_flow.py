"""Shares of whole samples: what the extension finds is what the Python that defines it finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from loft_hvd.data import flow
from loft_hvd.data.flow import Arcs, Ints, Pairs, fill_room, fill_rows, proportional, raise_flow

needs_extension = pytest.mark.skipif(flow._native() is None, reason="the extension is not built")


def in_python(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Ints]) -> Ints:
    """Call what is tested as if the extension were not built."""
    with monkeypatch.context() as patch:
        patch.setattr(flow, "_native", lambda: None)
        return call()


def random_arcs(seed: int, *, has_costs: bool) -> Arcs:
    """Draw a network of up to 40 nodes in which the source is 0 and the sink 1."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(2, 41))
    tails, heads = rng.integers(0, num_nodes, (2, int(rng.integers(1, 300))))
    capacities, costs = rng.integers(0, 9, (2, len(tails)))
    return Arcs(tails, heads, capacities, np.minimum(costs, 2) if has_costs else None)


def balance(arcs: Arcs, flows: Ints) -> Ints:
    """Return what each node receives beyond what it sends."""
    num_nodes = int(max(arcs.tails.max(), arcs.heads.max(), 1)) + 1
    got = np.bincount(arcs.heads, flows, num_nodes) - np.bincount(arcs.tails, flows, num_nodes)
    return got.astype(np.int64)


@needs_extension
@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_extension_finds_the_same_flow(
    monkeypatch: pytest.MonkeyPatch, seed: int, has_costs: bool
) -> None:
    arcs = random_arcs(seed, has_costs=has_costs)
    expected = in_python(monkeypatch, lambda: raise_flow(arcs, 0, 1))
    assert raise_flow(arcs, 0, 1).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_a_flow_keeps_capacities_and_is_a_largest_one(seed: int) -> None:
    arcs = random_arcs(seed, has_costs=False)
    flows = raise_flow(arcs, 0, 1)
    assert ((flows >= 0) & (flows <= arcs.capacities)).all()
    assert (balance(arcs, flows)[2:] == 0).all(), "only source and sink keep or make units"
    reached = {0}  # by arcs that have room, or back along arcs that carry some
    for _ in range(len(arcs.tails)):
        for tail, head, room, used in zip(
            arcs.tails.tolist(),
            arcs.heads.tolist(),
            (arcs.capacities - flows).tolist(),
            flows.tolist(),
            strict=True,
        ):
            reached |= {head} if tail in reached and room else set()
            reached |= {tail} if head in reached and used else set()
    assert 1 not in reached


def test_a_flow_goes_on_from_a_start() -> None:
    arcs = Arcs(*(np.array(each) for each in ([0, 0, 2, 3], [2, 3, 1, 1], [4, 5, 3, 9])))
    start = np.array([2, 0, 2, 0])
    assert raise_flow(arcs, 0, 1, start=start).tolist() == [3, 5, 3, 5]
    assert start.tolist() == [2, 0, 2, 0]


@needs_extension
def test_an_arc_to_a_node_that_is_not_there_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(ValueError, match="a node that is not there"):
        raise_flow(Arcs(tails=-one, heads=one, capacities=one), 0, 1)


@needs_extension
@pytest.mark.parametrize("seed", range(40))
def test_the_extension_fills_as_defined(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, world_size = int(rng.integers(1, 30)), int(rng.integers(1, 12))
    widths = rng.integers(1, world_size + 1, num_rows)
    ranks = np.concatenate([rng.choice(world_size, width, replace=False) for width in widths])
    pairs = Pairs(np.concatenate([[0], np.cumsum(widths)]), ranks)
    counts, spare = rng.integers(0, 20, num_rows), rng.integers(0, 60, world_size)
    limits = rng.integers(0, 9, (num_rows, world_size))
    cells = ranks + world_size * rng.integers(0, 2, num_rows)[pairs.rows]
    room = rng.integers(0, 30, 2 * world_size)
    calls: list[Callable[[], Ints]] = [
        lambda: fill_rows(counts, pairs, spare),
        lambda: fill_room(counts, spare, limits),
        lambda: fill_rows(counts, pairs, spare, cells=cells, room=room),
    ]
    for call in calls:
        given = call()
        assert given.tolist() == in_python(monkeypatch, call).tolist()
    assert (np.bincount(cells, given, 2 * world_size) <= room).all()
    assert (np.bincount(pairs.ranks, given, world_size) <= spare).all()


def test_several_rows_of_steps_are_filled_at_once() -> None:
    spare = np.array([[[4, 2, 2], [0, 0, 0]], [[1, 1, 1], [9, 0, 1]]])  # [steps, sets, ranks]
    count = np.array([[5, 3], [2, 20]])
    assert proportional(count, spare).tolist() == [
        [[3, 1, 1], [0, 0, 0]],
        [[1, 1, 0], [9, 0, 1]],
    ]
