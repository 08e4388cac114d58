"""The order in which gradients become ready, as rank 0 saw it; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loft_hvd.errors import MismatchError
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Transport, wait_for

__all__ = ["agree_on_order"]


def agree_on_order(
    transport: Transport,
    arrived: Sequence[int],
    num_parameters: int,
    *,
    name: str,
    timeout_s: float,
) -> tuple[int, ...]:
    """Return the order of rank 0's gradients; every rank calls it alike.

    Args:
        transport: the ranks.
        arrived: indices of the parameters whose gradients came on this rank, in that order.
        num_parameters: of the optimizer; those that did not come on rank 0 go last, the last
            parameter first.
        name: stem of the exchange's names, equal on every rank.
        timeout_s: longest wait in seconds.

    Raises:
        MismatchError: ranks end with different orders, or with one that is none.
        TransportTimeoutError: other ranks did not answer in time.
    """
    came = set(arrived)
    missing = [index for index in reversed(range(num_parameters)) if index not in came]
    row = torch.tensor([*arrived, *missing], dtype=torch.int64)
    if transport.world_size > 1:
        work = transport.broadcast(row, name=f"{name}.order")
        wait_for(work, what="the order of gradients", timeout_s=timeout_s)
    order = tuple(row.tolist())
    if sorted(order) != list(range(num_parameters)):
        raise MismatchError(
            f"rank {transport.rank}: rank 0's order of gradients is no order of this rank's "
            f"{num_parameters} parameters; build the same model on every rank"
        )
    check_agreement(
        transport,
        {"order of gradients": " ".join(map(str, order))},
        what="DistributedOptimizer",
        name=f"{name}.order",
        timeout_s=timeout_s,
    )
    return order
