"""Waits and their errors, and what travels under one name with one time limit."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from loft_hvd.config import config
from loft_hvd.errors import PeerError, TransportTimeoutError
from loft_hvd.transport.base import Channel, locate, wait_for
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks


def test_waiting_has_a_limit() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 1.0

    work = LocalWorld(2).transport(0).allreduce(torch.zeros(1), name="alone")
    with pytest.raises(
        TransportTimeoutError, match=r"the sum: waited 3 s; ranks \[1\] have not come to it"
    ):
        wait_for(work, what="the sum", timeout_s=3, clock=lambda: now[0], sleep=sleep)


def test_engine_errors_keep_their_identity_and_gain_a_note() -> None:
    error = RuntimeError("of the engine")
    assert locate(error, "bucket 0 (w)") is error
    located = locate(PeerError("rank 1 is gone"), "bucket 0 (w)")
    assert isinstance(located, PeerError)
    assert str(located) == "bucket 0 (w): rank 1 is gone"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
def test_an_error_of_ours_keeps_its_notes_when_it_says_where_it_was_met() -> None:
    error: Any = PeerError("rank 1 is gone")
    error.add_note("loft_hvd: ranks [1] have ended their scripts")
    located: Any = locate(error, "bucket 0 (w)")
    assert located.__notes__ == ["loft_hvd: ranks [1] have ended their scripts"]


def test_a_channel_names_its_parts_and_keeps_its_limit() -> None:
    channel = Channel(LocalWorld(1).transport(0), "loft", 7.0)
    assert channel.sub("order").sub("agree") == Channel(channel.transport, "loft.order.agree", 7.0)
    assert Channel(channel.transport, "loft").timeout_s == config().timeout_s


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_channel_moves_what_its_transport_does(world_size: int) -> None:
    def work(transport: LocalTransport) -> tuple[float, list[list[int]]]:
        channel = Channel(transport, "x", 10)
        first = torch.tensor([7.0 + transport.rank])
        channel.broadcast(first, what="the first")
        rows = channel.allgather_rows(torch.tensor([transport.rank, 5]))
        return float(first), rows.tolist()

    everyone = [[rank, 5] for rank in range(world_size)]
    assert run_ranks(world_size, work) == [(7.0, everyone)] * world_size


def test_a_channel_waits_no_longer_than_its_limit() -> None:
    channel = Channel(LocalWorld(2).transport(0), "x", 0.01)
    with pytest.raises(TransportTimeoutError, match=r"exchange 'x': waited 0\.01 s"):
        channel.allgather_rows(torch.zeros(1))
