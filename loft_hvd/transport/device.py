"""Collectives of a process group of torch's, queued on a device: for GPUs, by NCCL.

Each is done for the host as soon as it is queued, and what the rule computes is queued behind it:
no thread moves anything on, nothing is polled, no value is copied to the host. What orders
collectives on all ranks is the order of the calls, so ``Needs.is_named`` values take other lanes.

On a CPU, by Gloo, a collective is waited for where a stream would wait: the same code, and the same
bits, without a GPU.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loft_hvd.config import config
from loft_hvd.transport.agreement import digest, on_all
from loft_hvd.transport.base import Channel, Lane, Transport, Watch, Work, subset, wait_for
from loft_hvd.transport.groups import address_for_others

__all__ = ["DeviceGroup", "DeviceLane", "group_beside", "has_own_devices"]

_CONNECT_S = 20.0  # a choice: ranks that do not reach the store by then are behind a firewall

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceGroup:
    """A process group that a lane's collectives are queued on, for tensors of a device."""

    group: Any
    device: torch.device
    close: Callable[[], None] = lambda: None  # takes it down


class _Real:
    """A collective of the group, as far as the device has come."""

    watch: Watch | None = None

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def finish(self) -> None:
        self._work.wait()


class _Queued:
    """A collective that is done for the host, and that what is queued from here on comes after."""

    watch: Watch | None = None

    def __init__(self, work: Any, followed: Work, *, waits: bool, what: str) -> None:
        self._work = work
        self._followed = followed
        self._waits = waits
        self._what = what

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        if self._waits:
            wait_for(self._followed, what=self._what, timeout_s=config().timeout_s)
        else:
            self._work.wait()  # not the host, but its current stream


class DeviceLane(Lane):
    """Exchanges on a process group; one after the other, in one order on all ranks."""

    name = "device"
    is_queued = True
    has_stream = True

    def __init__(self, below: Transport, opened: DeviceGroup) -> None:
        super().__init__(below)
        self.overlaps = False
        self._group, self._device = opened.group, opened.device
        self._under_way: deque[Work] = deque()  # on the device, for the watch

    def subset(self, parts: Sequence[tuple[int, ...]]) -> Lane:
        part = subset(self.below, parts)
        if part.can.open_group is None:
            return Lane(part)
        opened = part.can.open_group(Channel(part, "loft.device"), self._device)
        return Lane(part) if opened is None else DeviceLane(part, opened)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Work:
        splits: list[int] = []
        if skips_own:
            splits = [send.nbytes // (self.world_size - 1)] * self.world_size
            splits[self.rank] = 0
        options = _options("AllToAllOptions")
        work = self._group.alltoall_base(_bytes(recv), _bytes(send), splits, splits, options)
        return self._queued(work, name, send)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        options = _options("AllgatherOptions")
        work = self._group._allgather_base(_bytes(recv), _bytes(send), options)
        return self._queued(work, name, send)

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        work = self._group.allreduce([buffer], _options("AllreduceOptions"))
        return self._queued(work, name, buffer)

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        work = self._group.broadcast([_bytes(buffer)], _options("BroadcastOptions"))
        return self._queued(work, name, buffer)

    def _queued(self, work: Any, name: str, like: Tensor) -> Work:
        followed = self.can.follow(_Real(work), name)
        # Who watches learns of the end of what nobody waits for.
        self._under_way.append(followed)
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        return _Queued(work, followed, waits=like.device.type == "cpu", what=f"exchange {name!r}")


def _options(name: str) -> Any:
    return getattr(torch._C._distributed_c10d, name)()


def _bytes(values: Tensor) -> Tensor:
    """Show values, [numel], as bytes, which every group carries."""
    return values.view(-1).view(torch.uint8)


def has_own_devices(channel: Channel, device: torch.device) -> bool:
    """Say whether each rank has a GPU to itself, as NCCL demands; every rank calls it alike."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    keys = channel.sub("gpus").allgather_rows(torch.tensor([digest(uuid)])).flatten()
    return len(set(keys.tolist())) == channel.world_size


def group_beside(channel: Channel, device: torch.device) -> DeviceGroup | None:
    """Make an NCCL group beside an engine that is not torch's; every rank calls it alike.

    Returns:
        None on every rank where torch has no NCCL, ranks share a GPU, or some rank fails.
    """
    if not on_all(channel.sub("nccl"), dist.is_nccl_available()):
        return None
    if not has_own_devices(channel, device):
        return None
    store, reason = _store_of(channel)
    group: Any = None
    if on_all(channel.sub("met"), store is not None):
        try:
            make: Any = vars(dist)["ProcessGroupNCCL"]  # not in a torch without CUDA
            group = make(store, channel.rank, channel.world_size)
        except Exception as error:  # what it raises differs from version to version
            reason = str(error)
    if not on_all(channel.sub("made"), group is not None):
        _logger.warning(
            "rank %d: no NCCL group of all ranks (%s); values of GPUs take the engine's "
            "collectives. LOFT_HVD_LANE=engine does so without a trial",
            channel.rank,
            reason or "another rank says why",
        )
        return None
    return DeviceGroup(group, device, group.shutdown)


def _store_of(channel: Channel) -> tuple[Any, str]:
    """Return a store by which ranks meet, on rank 0's host; every rank calls it alike.

    Returns:
        None and the reason on a rank that cannot have it; it waits for no rank in vain.
    """
    host = address_for_others(channel)
    options = {"timeout": timedelta(seconds=min(_CONNECT_S, channel.timeout_s / 2))}
    make: Any = vars(dist)["TCPStore"]
    store, reason = None, ""
    place = torch.zeros(2, dtype=torch.int64)  # port 0: there is none
    if channel.rank == 0:
        try:
            store = make(
                host, 0, channel.world_size, is_master=True, wait_for_workers=False, **options
            )
            place = torch.tensor([int.from_bytes(socket.inet_aton(host), "big"), store.port])
        except Exception as error:  # what it raises differs from version to version
            reason = f"no store at {host}: {error}"
    channel.sub("store").broadcast(place, what="where ranks meet")
    number, port = place.tolist()
    if channel.rank != 0 and port:
        host = socket.inet_ntoa(number.to_bytes(4, "big"))
        try:
            store = make(host, port, channel.world_size, is_master=False, **options)
        except Exception as error:
            reason = f"no answer from the store at {host}:{port}: {error}"
    return store, reason
