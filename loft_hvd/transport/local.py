"""Ranks as threads of one process: the transport for tests and for a single process.

``LocalWorld(world_size)`` is the wire; ``world.transport(rank)`` is one rank's end of it;
``run_ranks(world_size, function)`` runs a function on every rank and returns what each returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from loft_hvd.errors import ArgumentError, MismatchError, PeerError, TransportTimeoutError

__all__ = ["LocalTransport", "LocalWorld", "run_ranks"]

_T = TypeVar("_T")


@dataclass
class _Operation:
    """One collective: what each rank brought, and who has taken its result."""

    kind: str
    sends: dict[int, Tensor] = field(default_factory=dict)
    recvs: dict[int, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    is_done: bool = False

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


class LocalWorld:
    """The wire between ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ArgumentError(f"LocalWorld: world_size={world_size} must be >= 1")
        self.world_size = world_size
        self.failed_rank: int | None = None
        self._changed = threading.Condition()
        self._open: dict[str, _Operation] = {}

    def transport(self, rank: int) -> LocalTransport:
        """Return one rank's end of the wire."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"LocalWorld: rank={rank} must be >= 0 and < {self.world_size}")
        return LocalTransport(self, rank)

    def fail(self, rank: int) -> None:
        """Record that a rank has failed, so that the others' waits end with an error."""
        with self._changed:
            if self.failed_rank is None:
                self.failed_rank = rank
            self._changed.notify_all()

    def _post(self, kind: str, name: str, rank: int, send: Tensor, recv: Tensor) -> _LocalWork:
        with self._changed:
            operation = self._open.setdefault(name, _Operation(kind))
            if operation.kind != kind or rank in operation.sends:
                raise MismatchError(
                    f"rank {rank}: {kind} {name!r} cannot start, since {operation.kind} of that "
                    f"name is in flight on ranks {sorted(operation.sends)}"
                )
            operation.sends[rank] = send
            operation.recvs[rank] = recv
            if len(operation.sends) == self.world_size:
                del self._open[name]
                if kind == "allreduce":
                    operation.sends = {r: t.clone() for r, t in operation.sends.items()}
                operation.complete(self.world_size)
                operation.is_done = True
                self._changed.notify_all()
        return _LocalWork(self, operation)


@dataclass
class _LocalWork:
    """One rank's view of an operation."""

    world: LocalWorld
    operation: _Operation

    def done(self) -> bool:
        """Say whether the operation has ended, well or badly."""
        return self.operation.is_done or self.world.failed_rank is not None

    def finish(self) -> None:
        """Raise the operation's error, if it has one."""
        if self.operation.error is not None:
            raise self.operation.error
        if not self.operation.is_done:
            raise PeerError(f"rank {self.world.failed_rank} has failed; this rank stops with it")


class LocalTransport:
    """One rank's end of a ``LocalWorld``."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.world_size

    @property
    def local_size(self) -> int:
        """Number of ranks on this node: all of them."""
        return self._world.world_size

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str) -> _LocalWork:
        """Exchange shards; see ``Transport.alltoall``."""
        return self._world._post("alltoall", name, self._rank, send, recv)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> _LocalWork:
        """Collect every rank's tensor; see ``Transport.allgather``."""
        return self._world._post("allgather", name, self._rank, send, recv)

    def allreduce(self, buffer: Tensor, *, name: str) -> _LocalWork:
        """Sum in place; see ``Transport.allreduce``."""
        return self._world._post("allreduce", name, self._rank, buffer, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> _LocalWork:
        """Take rank 0's tensor; see ``Transport.broadcast``."""
        return self._world._post("broadcast", name, self._rank, buffer, buffer)


def run_ranks(
    world_size: int, function: Callable[[LocalTransport], _T], *, timeout_s: float = 60.0
) -> list[_T]:
    """Run ``function(transport)`` on every rank of a new world, each in a thread of its own.

    Args:
        world_size: number of ranks.
        function: what every rank does with its end of the wire.
        timeout_s: longest wait in seconds for all ranks together.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the error of the rank that failed first.
        TransportTimeoutError: a rank did not end in time.
    """
    world = LocalWorld(world_size)
    results: dict[int, _T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(world.transport(rank))
        except BaseException as error:
            errors.append(error)
            world.fail(rank)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"loft-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        raise TransportTimeoutError(f"run_ranks: ranks {late} did not end within {timeout_s:g} s")
    return [results[rank] for rank in range(world_size)]
