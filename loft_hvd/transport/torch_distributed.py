"""``torch.distributed`` as the engine, for scripts that use it instead of Horovod.

Its collectives match by the order in which ranks issue them, but buckets finish in another order
on every rank. So they are made of sends and receives, which are matched by the operation's name
(``mesh.py``). Sums are added up in rank order, so they too have the same bits everywhere. Traffic
per rank is that of a ring: 2 (n-1)/n of the bytes for a sum.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.errors import ArgumentTypeError, TransportError, UsageError
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.watched import heartbeat_of, open_heartbeat, watched
from loft_hvd.transport.base import Abilities, Channel, Work
from loft_hvd.transport.device import DeviceGroup, has_own_devices
from loft_hvd.transport.groups import nodes_of
from loft_hvd.transport.mesh import Mesh, MeshWork, Move, try_mesh

__all__ = ["TorchDistributedTransport"]


class TorchDistributedTransport:
    """The ranks of a ``torch.distributed`` process group; see ``Transport``.

    Make it on every rank of the group alike. Where the group's backend is not Gloo the first one
    makes a Gloo group of the same ranks. Values on other devices travel by way of the CPU.

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
        group = group or dist.group.WORLD
        # Numbers within the default group, by which torch addresses sends and receives.
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._given = group
        if dist.get_backend(group) != dist.Backend.GLOO:
            group = _gloo_beside(group)
        self.rank = dist.get_rank(group)
        self.world_size = len(self._ranks)
        self._group = group
        self._parts: dict[tuple[int, ...], TorchDistributedTransport] = {}
        self._mesh = Mesh(group, rank=self.rank, ranks=range(self.world_size))
        self.node = socket.gethostname()
        self._world = "torch." + ".".join(map(str, self._ranks))
        self.can = Abilities(
            overlaps=True,
            mixes_devices=True,
            world=("torch", group),
            open_mesh=self._open_mesh,
            open_group=self._open_group,
            follow=lambda work, name: watched(work, name, self.watch),
            open_heartbeat=self.open_heartbeat,
        )
        # Where a launcher tells that the whole job is on this host, nobody need be asked.
        self.local_size = self.world_size
        if config().local_ranks < dist.get_world_size():
            nodes = nodes_of(Channel(self, f"loft.{self._world}"))
            self.local_size = next(len(node) for node in nodes if self.rank in node)

    @property
    def watch(self) -> Heartbeat | None:
        """The heartbeat of these ranks; None where none was opened."""
        return heartbeat_of(self._world)

    def _open_mesh(self, channel: Channel) -> Mesh | None:
        if self.local_size == self.world_size:
            return self._mesh  # loopback needs no trial
        mesh = try_mesh(
            self._group,
            range(self.world_size),
            channel,
            lambda _, num_groups: [self._new_group("gloo") for _ in range(num_groups)],
            compact_floats=config().compact,
        )
        if isinstance(mesh, str):
            raise TransportError(
                f"{channel.name}: {mesh}, by the process group's connections; look at the "
                "network between these hosts (GLOO_SOCKET_IFNAME names the interface)"
            )
        return mesh

    def _open_group(self, channel: Channel, device: torch.device) -> DeviceGroup | None:
        if device.type == "cpu":  # without a GPU
            return DeviceGroup(self._new_group("gloo"), device)
        if "nccl" in str(dist.get_backend_config(self._given)):
            return DeviceGroup(self._given, device)
        if not dist.is_nccl_available() or not has_own_devices(channel, device):
            return None
        return DeviceGroup(self._new_group("nccl"), device)

    def _new_group(self, backend: str) -> Any:
        # Locally: the ranks of other parts make groups of their own at the same time.
        return dist.new_group(self._ranks, backend=backend, use_local_synchronization=True)

    def open_heartbeat(self) -> None:
        """Open the heartbeat of these ranks, unless it is open; every one of them calls it."""
        if self.world_size > 1:
            open_heartbeat(self, self._world, engine_is_down=lambda: False)

    def subset(self, parts: Sequence[tuple[int, ...]]) -> TorchDistributedTransport:
        """Return the ranks of this rank's part, as a group; every rank calls it alike."""
        part = next(part for part in parts if self.rank in part)
        ranks = [self._ranks[rank] for rank in part]
        if (key := tuple(ranks)) not in self._parts:  # torch keeps each group that it made
            # Locally: the ranks of other parts make groups of their own at the same time.
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self._parts[key] = TorchDistributedTransport(group)
        return self._parts[key]

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        received = _on_cpu(recv)
        move = self._mesh.alltoall(_on_cpu(send), received, name=name, skips_own=skips_own)
        return self._post(name, move, received, recv)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        received = _on_cpu(recv)
        move = self._mesh.allgather(_on_cpu(send), received, name=name)
        return self._post(name, move, received, recv)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        if buffer.dtype == torch.bool:
            raise ArgumentTypeError(f"allreduce {name!r}: truth values have no sum; send int64")
        summed = _on_cpu(buffer).view(-1)
        shards = summed.tensor_split(self.world_size)
        own = shards[self.rank]
        # Each rank adds up one shard of all, then tells everyone its sum.
        rows = torch.empty(self.world_size, own.numel(), dtype=own.dtype)
        gather = self._mesh.exchange(shards, list(rows), name=name)

        # On the operation's thread, as the sums' phase starts only once all shards have come.
        def move() -> None:
            gather()
            total = rows[0]
            for row in rows[1:]:  # one by one: torch.sum may add in another order
                total += row
            own.copy_(total)
            self._mesh.exchange([own] * self.world_size, shards, name=name, phase=1)()

        return self._post(name, move, summed, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        values = _on_cpu(buffer)
        return self._post(name, self._mesh.broadcast(values, name=name), values, buffer)

    def _post(self, name: str, move: Move, result: Tensor, target: Tensor) -> Work:
        # Values of a GPU come back here, once the CPU's copy is complete.
        def run() -> None:
            move()
            if result.data_ptr() != target.data_ptr():
                target.copy_(result.view_as(target))

        return self.can.follow(MeshWork(name, run, self._mesh), name)


@functools.cache
def _gloo_beside(group: Any) -> Any:
    """Return a Gloo group of a group's ranks, one for each group: torch keeps every one it made."""
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo")


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
