"""One collective of a ``LocalWorld``, how its bytes are moved, and who watches it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from loft_hvd.errors import MismatchError, PeerError, TransportTimeoutError

__all__ = ["Operation", "Witness"]


@dataclass
class Operation:
    """One collective: what each rank brought, and who has taken its result."""

    kind: str
    members: tuple[int, ...]  # the ranks that take part, ascending
    sends: dict[int, Tensor] = field(default_factory=dict)
    recvs: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    is_done: bool = False
    arrives_at: float = 0.0  # when what the slowest rank sent is there

    def complete(self) -> None:
        """Move the bytes; called once, by the last rank to arrive."""
        first = self.sends[self.members[0]]
        for rank, send in self.sends.items():
            if send.dtype != first.dtype or send.numel() != first.numel():
                self.error = MismatchError(
                    f"{self.kind}: rank {rank} brought {send.numel()} values of {send.dtype}, "
                    f"rank {self.members[0]} {first.numel()} of {first.dtype}; all must be equal"
                )
                return
        numel = first.numel()
        shard = numel // len(self.members)
        for at, rank in enumerate(self.members):
            recv = self.recvs[rank]
            for place, peer in enumerate(self.members):
                if self.kind == "alltoall":
                    part = self.sends[peer][at * shard : (at + 1) * shard]
                    recv[place * shard : (place + 1) * shard].copy_(part)
                elif self.kind == "swap" and peer != rank:
                    recv.copy_(self.sends[peer])
                elif self.kind == "allgather":
                    recv[place * numel : (place + 1) * numel].copy_(self.sends[peer])
            if self.kind == "allreduce":
                recv.copy_(torch.stack([self.sends[peer] for peer in self.members]).sum(dim=0))
            elif self.kind == "broadcast":
                recv.copy_(first)


class _World(Protocol):
    def late(self, rank: int) -> list[int]:
        """Return the ranks that a rank's oldest operation in flight still lacks."""
        ...

    def fail(self, rank: int, error: BaseException | None = None) -> None:
        """Record that a rank has failed."""
        ...


@dataclass(frozen=True)
class Witness:
    """What a rank knows of the others, and tells them: the ``Watch`` of a local world."""

    world: _World
    rank: int

    def waiting(self) -> AbstractContextManager[None]:
        """See ``Watch.waiting``."""
        return nullcontext()

    def late(self) -> list[int]:
        """See ``Watch.late``."""
        return self.world.late(self.rank)

    def report(self, error: BaseException) -> None:
        """See ``Watch.report``."""
        if not isinstance(error, PeerError | TransportTimeoutError):
            self.world.fail(self.rank, error)
