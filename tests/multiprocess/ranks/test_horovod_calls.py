"""What a script starts in Horovod is counted alike on every rank."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch

from loft_hvd.transport.base import wait_for
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.horovod_private import count_others, operations

ONES = torch.ones(4)
CALLS: dict[str, Callable[[], object]] = {
    "allreduce": lambda: hvd.allreduce(ONES, name="calls.allreduce"),
    "allreduce_": lambda: hvd.allreduce_(ONES.clone(), name="calls.allreduce_"),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([ONES, ONES], name="calls.grouped"),
    "allgather": lambda: hvd.allgather(ONES, name="calls.allgather"),
    "grouped_allgather": lambda: hvd.grouped_allgather([ONES, ONES], name="calls.gathers"),
    "broadcast": lambda: hvd.broadcast(ONES, 0, name="calls.broadcast"),
    "broadcast_": lambda: hvd.broadcast_(ONES.clone(), 0, name="calls.broadcast_"),
    "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size()), name="calls.alltoall"),
    "barrier": hvd.barrier,
}


@pytest.mark.parametrize("call", CALLS)
def test_each_of_horovods_operations_counts_once(call: str) -> None:
    num_others = count_others(operations())
    CALLS[call]()
    own = HorovodTransport().allreduce(torch.zeros(2), name="calls.own")
    wait_for(own, what="the sum", timeout_s=10)
    assert num_others() == 1
