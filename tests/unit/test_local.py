"""Ranks as threads: collectives move the right bytes, and failures reach everybody."""

from __future__ import annotations

import pytest
import torch

from loft_hvd.errors import MismatchError, PeerError
from loft_hvd.transport.base import Channel, wait_for
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks

SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])


@SIZES
def test_alltoall_brings_every_ranks_shard(world_size: int) -> None:
    def work(transport: LocalTransport) -> torch.Tensor:
        send = torch.arange(2 * world_size) + 100 * transport.rank
        recv = torch.empty_like(send)
        wait_for(transport.alltoall(send, recv, name="x"), what="x", timeout_s=10)
        return recv.view(world_size, 2)

    for rank, rows in enumerate(run_ranks(world_size, work)):
        for peer in range(world_size):
            assert rows[peer].tolist() == [100 * peer + 2 * rank, 100 * peer + 2 * rank + 1]


@SIZES
def test_allgather_sum_and_broadcast(world_size: int) -> None:
    def work(transport: LocalTransport) -> tuple[list[int], float, float]:
        rows = Channel(transport, "g", 10).allgather_rows(torch.tensor([transport.rank]))
        total = torch.tensor([float(transport.rank)])
        wait_for(transport.allreduce(total, name="s"), what="s", timeout_s=10)
        first = torch.tensor([7.0 + transport.rank])
        wait_for(transport.broadcast(first, name="b"), what="b", timeout_s=10)
        return rows.flatten().tolist(), float(total), float(first)

    everyone = list(range(world_size))
    for gathered, total, first in run_ranks(world_size, work):
        assert (gathered, total, first) == (everyone, sum(everyone), 7.0)


def test_a_rank_that_raises_ends_the_others_with_its_error() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise ValueError("the first to fail")
        Channel(transport, "never", 10).allgather_rows(torch.zeros(1))

    with pytest.raises(ValueError, match="the first to fail"):
        run_ranks(3, work)


def test_a_failed_peer_is_named() -> None:
    world = LocalWorld(2)
    work = world.transport(0).allreduce(torch.zeros(1), name="x")
    world.fail(1)
    with pytest.raises(PeerError, match="rank 1 has failed"):
        wait_for(work, what="x", timeout_s=10)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_tensors_that_differ_are_refused(other: torch.Tensor) -> None:
    def work(transport: LocalTransport) -> None:
        tensor = other if transport.rank == 1 else torch.zeros(2)
        wait_for(transport.allreduce(tensor.clone(), name="x"), what="x", timeout_s=10)

    with pytest.raises(MismatchError, match="rank 1 brought"):
        run_ranks(2, work)
