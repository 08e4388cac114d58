"""The order in which gradients become ready, as rank 0 saw it; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loft_hvd.errors import MismatchError
from loft_hvd.transport.agreement import check_agreement
from loft_hvd.transport.base import Channel

__all__ = ["agree_on_order"]


def agree_on_order(
    channel: Channel, arrived: Sequence[int], num_parameters: int
) -> tuple[int, ...]:
    """Return the order of rank 0's gradients; every rank calls it alike.

    Args:
        channel: the ranks.
        arrived: indices of the parameters whose gradients came on this rank, in that order.
        num_parameters: of the optimizer; those that did not come on rank 0 go last, the last
            parameter first.

    Raises:
        MismatchError: ranks end with different orders, or with one that is none.
        TransportTimeoutError: other ranks did not answer in time.
    """
    came = set(arrived)
    missing = [index for index in reversed(range(num_parameters)) if index not in came]
    row = torch.tensor([*arrived, *missing], dtype=torch.int64)
    channel = channel.sub("order")
    channel.broadcast(row, what="the order of gradients")
    order = tuple(row.tolist())
    if sorted(order) != list(range(num_parameters)):
        raise MismatchError(
            f"rank {channel.rank}: rank 0's order of gradients is no order of this rank's "
            f"{num_parameters} parameters; build the same model on every rank"
        )
    fields = {"order of gradients": " ".join(map(str, order))}
    check_agreement(channel, fields, what="DistributedOptimizer")
    return order
