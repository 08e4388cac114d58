"""Ranks in groups: who is with whom, and exchanges among some of a world's ranks."""

from __future__ import annotations

import pytest
import torch

from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.transport.base import Channel, Transport, subset, wait_for
from loft_hvd.transport.groups import Groups, Over, find_groups, nodes_of
from loft_hvd.transport.local import Faults, LocalTransport, LocalWorld, run_ranks


def test_groups_are_rows_of_a_table_and_across_are_its_columns() -> None:
    groups = Groups.of([[5, 2, 4], [0, 1, 3]], world_size=6)
    assert groups.members == ((0, 1, 3), (2, 4, 5))
    assert groups.across == ((0, 2), (1, 4), (3, 5))
    assert groups.sums([1, 2, 4, 8, 16, 32]) == (11, 52)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([[0, 1], [2]], r"groups need one size, but theirs are \[2, 1\]"),
        ([[0, 1]], "every rank from 0 to 2 once"),
        ([[0, 1], [1, 2]], "every rank from 0 to 2 once"),
        ([[0, 1, 2], []], "one size"),
    ],
)
def test_groups_that_do_not_fit_are_refused(members: list[list[int]], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Groups.of(members, world_size=3)


@pytest.mark.parametrize(
    ("ranks_per_node", "expected"),
    [(2, ((0, 1), (2, 3), (4, 5))), (6, ((0, 1, 2, 3, 4, 5),)), (4, ((0, 1, 2, 3), (4, 5)))],
)
def test_nodes_are_found_alike_on_every_rank(
    ranks_per_node: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    def find(transport: LocalTransport) -> tuple[tuple[tuple[int, ...], ...], int]:
        return nodes_of(Channel(transport, "x", 10)), transport.local_size

    found = run_ranks(6, find, ranks_per_node=ranks_per_node)
    sizes = [len(node) for node in expected for _ in node]
    assert found == [(expected, size) for size in sizes]


def test_one_rank_a_node_is_no_grouping() -> None:
    def find(transport: LocalTransport) -> Groups | None:
        return find_groups(Channel(transport, "x", 10), "nodes")

    assert run_ranks(3, find, ranks_per_node=1) == [None] * 3


@pytest.mark.parametrize(
    ("over", "error"),
    [("racks", ArgumentError), (3, ArgumentTypeError), ([1, 2], ArgumentTypeError)],
)
def test_over_is_checked(over: Over, error: type[Exception]) -> None:
    with pytest.raises(error, match="over="):
        find_groups(Channel(LocalWorld(2).transport(0), "x", 1), over)


def test_parts_of_a_world_exchange_at_the_same_time() -> None:
    groups = Groups.of([[0, 1], [2, 3], [4, 5]], world_size=6)

    def exchange(transport: LocalTransport) -> list[list[float]]:
        found = []
        for part in (groups.members, groups.across):
            among = subset(transport, part)
            own = torch.full((among.world_size,), float(transport.rank))
            rows = torch.empty_like(own)
            wait_for(among.alltoall(own, rows, name="x"), what="x", timeout_s=10)
            everyone = torch.empty(among.world_size)
            wait_for(among.allgather(own[:1], everyone, name="x"), what="x", timeout_s=10)
            wait_for(among.allreduce(own, name="s"), what="s", timeout_s=10)
            first = torch.tensor([float(transport.rank)])
            wait_for(among.broadcast(first, name="b"), what="b", timeout_s=10)
            assert rows.tolist() == everyone.tolist()
            assert own.tolist() == [float(rows.sum())] * among.world_size
            assert first.item() == rows[0].item()
            found.append(rows.tolist())
        return found

    found = run_ranks(6, exchange, faults=Faults(seed=2, reorder=True, max_delay_s=0.002))
    for rank, (inside, across) in enumerate(found):
        assert inside == [rank // 2 * 2.0, rank // 2 * 2.0 + 1]
        assert across == [rank % 2, rank % 2 + 2.0, rank % 2 + 4.0]


def test_a_rank_that_fails_ends_waits_in_parts_it_is_not_in() -> None:
    def exchange(transport: LocalTransport) -> None:
        among = subset(transport, [(0, 1), (2, 3)])
        if transport.rank == 3:
            raise KeyError("rank 3")
        values = torch.zeros(2)
        wait_for(among.allreduce(values, name="x"), what="x", timeout_s=10)

    with pytest.raises(KeyError, match="rank 3"):
        run_ranks(4, exchange)


def test_a_transport_without_parts_says_so() -> None:
    class Plain:
        rank, world_size, local_size = 0, 2, 1

    plain: Transport = Plain()  # type: ignore[assignment]  # what it lacks is what is tested
    with pytest.raises(UsageError, match="Plain cannot exchange among some of its ranks"):
        subset(plain, [(0,), (1,)])
