"""Ranks in groups, such as the ranks of each node: who is with whom, and transports among some.

A ``Groups`` lays ranks out in a table, one group a row. Its rows exchange among themselves, and so
do its columns: the i-th rank of every group.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loft_hvd.config import config
from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.transport.addresses import listening_addresses, own_addresses
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import Channel

__all__ = ["Groups", "Over", "address_for_others", "find_groups", "nodes_of"]

_MOST_ADDRESSES = 16  # a choice: they travel at a fixed length

Over = str | Sequence[Sequence[int]] | None
"""``"nodes"``, or the ranks of every group; None for no groups."""


@dataclass(frozen=True)
class Groups:
    """Every rank in one of some groups of one size."""

    members: tuple[tuple[int, ...], ...]  # the ranks of each, ascending, [num_groups, group_size]

    @classmethod
    def of(cls, members: Sequence[Sequence[int]], *, world_size: int) -> Groups:
        """Check groups and put them in order."""
        # In one order, however a user wrote them: every rank makes its parts in this order.
        groups = tuple(sorted(tuple(sorted(group)) for group in members))
        if sorted(rank for group in groups for rank in group) != list(range(world_size)):
            raise ArgumentError(
                f"over={[list(group) for group in groups]} must hold every rank from 0 to "
                f'{world_size - 1} once; over="nodes" follows the ranks there are, also in elastic '
                "training"
            )
        if len({len(group) for group in groups}) > 1:
            raise ArgumentError(
                f"over: groups need one size, but theirs are {[len(group) for group in groups]} "
                f"({[list(group) for group in groups]}); give groups of one size, start as many "
                "ranks on every node (elastic training: on every host that may come), or leave "
                "over= away"
            )
        return cls(groups)

    @property
    def num_groups(self) -> int:
        return len(self.members)

    @property
    def group_size(self) -> int:
        """Ranks of each group."""
        return len(self.members[0])

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """The i-th rank of every group, for each i, [group_size, num_groups]."""
        # ((0, 1), (2, 3), (4, 5)) gives ((0, 2, 4), (1, 3, 5)).
        return tuple(zip(*self.members, strict=True))

    def sums(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the sum of every group's counts, given one a rank, [num_groups]."""
        return tuple(sum(counts[rank] for rank in group) for group in self.members)


def nodes_of(channel: Channel) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node; every rank calls it alike."""
    rows = channel.sub("nodes").allgather_rows(torch.tensor([digest(channel.transport.node)]))
    # [world_size, 1]: a digest instead of the name, so that every row has the same length.
    # Ranks of a node need not follow each other: a launcher may deal them out in turn.
    ranks: dict[int, list[int]] = {}
    for rank, key in enumerate(rows.flatten().tolist()):
        ranks.setdefault(key, []).append(rank)
    return tuple(sorted(tuple(group) for group in ranks.values()))


def find_groups(channel: Channel, over: Over) -> Groups | None:
    """Return the groups that a user asked for; every rank calls it alike.

    Returns None for ``over=None``, and for groups of a single rank each: that is no grouping.
    """
    if over is None:
        return None
    if isinstance(over, str):
        if over != "nodes":
            raise ArgumentError(
                f'over={over!r} is not known; it takes "nodes", or the ranks of every group, such '
                "as [[0, 1], [2, 3]]"
            )
        # Asked of the ranks, not of the launcher: each names its node in a way of its own.
        groups = Groups.of(nodes_of(channel), world_size=channel.world_size)
    else:
        try:
            members = [[int(rank) for rank in group] for group in over]
        except TypeError as error:
            raise ArgumentTypeError(
                f'over={over!r} must be "nodes", or the ranks of every group, such as '
                "[[0, 1], [2, 3]]"
            ) from error
        groups = Groups.of(members, world_size=channel.world_size)
    return groups if groups.group_size > 1 else None


def address_for_others(channel: Channel) -> str:
    """Return the address at which the other ranks reach this one; all ranks call it alike."""
    is_one_host = channel.transport.local_size == channel.world_size
    own = own_addresses()[:_MOST_ADDRESSES]
    row = torch.zeros(_MOST_ADDRESSES, dtype=torch.int64)  # 0: no address
    row[: len(own)] = torch.tensor([int.from_bytes(socket.inet_aton(each), "big") for each in own])
    numbers = channel.sub("hosts").allgather_rows(row).flatten().tolist()
    others = [socket.inet_ntoa(number.to_bytes(4, "big")) for number in numbers if number]
    name = config().interface
    of_interface = own_addresses(name) if name else ()
    return listening_addresses(own, others, is_one_host=is_one_host, of_interface=of_interface)[0]
