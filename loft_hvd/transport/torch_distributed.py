"""``torch.distributed`` as the engine, for scripts that use it instead of Horovod.

Its collectives match by the order in which ranks issue them, but buckets finish in another order
on every rank. So they are made here of sends and receives, which Gloo matches by a tag: the digest
of the operation's name. Sums are added up in rank order, so they too have the same bits
everywhere. Traffic per rank is that of a ring: 2 (n-1)/n of the bytes for a sum.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.errors import ArgumentTypeError, TransportError, UsageError
from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import Work
from loft_hvd.transport.heartbeat.heartbeat import Heartbeat
from loft_hvd.transport.heartbeat.watched import heartbeat_of, open_heartbeat, watched

__all__ = ["TorchDistributedTransport"]

_TAGS = 2**30  # bound from torch, whose tags are C's int; each name takes two


class _TorchWork:
    """An operation whose sends and receives a thread waits for; the work joins it."""

    # A thread each, as Gloo's receives say that they are done only to who waits for them.

    watch = None

    def __init__(self, name: str, move: Callable[[], None]) -> None:
        self._move = move
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"loft-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._move()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise TransportError(f"torch.distributed: {self._error}") from self._error


class TorchDistributedTransport:
    """The ranks of a ``torch.distributed`` process group; see ``Transport``.

    Make it on every rank of the group alike. Where the group's backend is not Gloo it makes a Gloo
    group of the same ranks, and values on other devices travel by way of the CPU.

    Args:
        group: the process group; the default one if None.

    Raises:
        UsageError: ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                "TorchDistributedTransport: torch.distributed is not initialised; call "
                "torch.distributed.init_process_group() first"
            )
        # Numbers within the default group, by which torch addresses sends and receives.
        self._ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        if dist.get_backend(group) != dist.Backend.GLOO:
            group = dist.new_group(self._ranks, backend="gloo")
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = len(self._ranks)
        self.node = socket.gethostname()
        self.local_size = min(config().local_ranks, self.world_size)  # as the launcher tells
        self._world = "torch." + ".".join(map(str, self._ranks))
        self._timeout = timedelta(seconds=config().timeout_s)

    @property
    def watch(self) -> Heartbeat | None:
        """The heartbeat of these ranks; None where none was opened."""
        return heartbeat_of(self._world)

    def open_heartbeat(self) -> None:
        """Open the heartbeat of these ranks, unless it is open; every one of them calls it."""
        if self.world_size > 1:
            open_heartbeat(self, self._world, engine_is_down=lambda: False)

    def subset(self, parts: Sequence[tuple[int, ...]]) -> TorchDistributedTransport:
        """Return the ranks of this rank's part, as a group; every rank calls it alike."""
        part = next(part for part in parts if self.rank in part)
        ranks = [self._ranks[rank] for rank in part]
        # Locally: the ranks of other parts make groups of their own at the same time.
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return TorchDistributedTransport(group)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        sent, received = _on_cpu(send), _on_cpu(recv)
        num_shards = self.world_size - skips_own
        sends, recvs = list(sent.chunk(num_shards)), list(received.chunk(num_shards))
        if skips_own:  # an empty shard in its place, so that shard j is rank j's again
            sends.insert(self.rank, sent[:0])
            recvs.insert(self.rank, received[:0])
        return self._post(name, self._exchange(sends, recvs, _tag(name)), received, recv)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        sent, received = _on_cpu(send), _on_cpu(recv)
        recvs = received.chunk(self.world_size)
        waits = self._exchange([sent] * self.world_size, recvs, _tag(name))
        return self._post(name, waits, received, recv)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        if buffer.dtype == torch.bool:
            raise ArgumentTypeError(f"allreduce {name!r}: truth values have no sum; send int64")
        summed = _on_cpu(buffer).view(-1)
        shards = summed.tensor_split(self.world_size)
        own = shards[self.rank]
        # Each rank adds up one shard of all, then tells everyone its sum.
        rows = torch.empty(self.world_size, own.numel(), dtype=own.dtype)
        tag = _tag(name)
        gather = self._exchange(shards, list(rows), tag)

        # On the operation's thread, as the sums' phase starts only once all shards have come.
        def move() -> None:
            gather()
            total = rows[0]
            for row in rows[1:]:  # one by one: torch.sum may add in another order
                total += row
            own.copy_(total)
            self._exchange([own] * self.world_size, shards, tag + 1)()

        return self._post(name, move, summed, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        values, tag = _on_cpu(buffer), _tag(name)
        others = range(1, self.world_size)
        started = (
            [self._send(values, peer, tag) for peer in others]
            if self.rank == 0
            else [self._recv(values, 0, tag)]
        )
        return self._post(name, functools.partial(self._wait, started), values, buffer)

    def _exchange(
        self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int
    ) -> Callable[[], None]:
        """Start to send ``sends[j]`` to rank j and to fill ``recvs[i]`` from rank i, near first."""
        # Of 4 ranks rank 1 sends to 2, 3, 0 in turn: at no time do all send to the same rank.
        started = []
        for shift in range(1, self.world_size):
            source = (self.rank - shift) % self.world_size
            target = (self.rank + shift) % self.world_size
            started.append(self._recv(recvs[source], source, tag))
            started.append(self._send(sends[target], target, tag))
        # The own part is copied, unless it is the same memory, as in the second phase of a sum.
        if recvs[self.rank].data_ptr() != sends[self.rank].data_ptr():
            recvs[self.rank].copy_(sends[self.rank].view_as(recvs[self.rank]))
        return functools.partial(self._wait, started)

    def _send(self, values: Tensor, peer: int, tag: int) -> Any:
        return dist.isend(values, self._ranks[peer], group=self._group, tag=tag)

    def _recv(self, values: Tensor, peer: int, tag: int) -> Any:
        return dist.irecv(values, self._ranks[peer], group=self._group, tag=tag)

    def _wait(self, started: list[Any]) -> None:
        for each in started:
            each.wait(self._timeout)

    def _post(self, name: str, move: Callable[[], None], result: Tensor, target: Tensor) -> Work:
        # Values of a GPU come back here, once the CPU's copy is complete.
        def run() -> None:
            move()
            if result.data_ptr() != target.data_ptr():
                target.copy_(result.view_as(target))

        return watched(_TorchWork(name, run), name, self.watch)


def _tag(name: str) -> int:
    """Return an even tag, the same on every rank; the odd one after it is its second phase."""
    return 2 * (digest(name) % (_TAGS // 2))


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
