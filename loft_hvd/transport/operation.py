"""One collective of a ``LocalWorld``: what ranks bring, and how it is moved."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from loft_hvd.errors import MismatchError

__all__ = ["Operation"]


@dataclass
class Operation:
    """One collective: what each rank brought, and who has taken its result."""

    kind: str
    sends: dict[int, Tensor] = field(default_factory=dict)
    recvs: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    is_done: bool = False
    arrives_at: float = 0.0  # when what the slowest rank sent is there

    def complete(self, world_size: int) -> None:
        """Move the bytes; called once, by the last rank to arrive."""
        first = self.sends[0]
        for rank, send in self.sends.items():
            if send.dtype != first.dtype or send.numel() != first.numel():
                self.error = MismatchError(
                    f"{self.kind}: rank {rank} brought {send.numel()} values of {send.dtype}, "
                    f"rank 0 {first.numel()} of {first.dtype}; all must be equal"
                )
                return
        for rank, recv in self.recvs.items():
            if self.kind == "alltoall":
                shard = first.numel() // world_size
                for peer in range(world_size):
                    part = self.sends[peer][rank * shard : (rank + 1) * shard]
                    recv[peer * shard : (peer + 1) * shard].copy_(part)
            elif self.kind == "allgather":
                for peer in range(world_size):
                    recv[peer * first.numel() : (peer + 1) * first.numel()].copy_(self.sends[peer])
            elif self.kind == "allreduce":
                recv.copy_(torch.stack([self.sends[peer] for peer in range(world_size)]).sum(dim=0))
            else:  # broadcast
                recv.copy_(first)
