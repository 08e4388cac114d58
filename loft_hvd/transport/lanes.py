"""Which lanes there are, and which of them values take: chosen once for each engine.

========================  ======  =====================================================
lane                      values  how they move
========================  ======  =====================================================
``shared-memory``         CPU     one host: a rank's buffers are read where they lie
``datagram``              CPU     packets, of which rows may lose some: where that is asked for
``mesh``                  CPU     connections of our own, any number of exchanges at once
``peer-memory``           GPU     one host: GPUs read each other's memory; by name alone so far
``device``                GPU     collectives of a torch process group, queued on a stream
``engine``                any     the transport's own collectives: in elastic jobs, process
                                  sets, and wherever no other lane can be opened
========================  ======  =====================================================

A transport declares what its ranks can (``Abilities``); nobody else asks for it. What a lane needs,
such as connections, is opened with all ranks by the first engine that may take it, and serves all
later ones of the same world. A new lane is a file with a subclass of ``Lane`` and a row below.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from loft_hvd.config import config
from loft_hvd.transport.base import Abilities, Channel, Lane
from loft_hvd.transport.datagram import DatagramLane, DatagramPort, LossTolerant, open_datagrams
from loft_hvd.transport.device import DeviceLane
from loft_hvd.transport.mesh import MeshLane
from loft_hvd.transport.peer_memory import open_peer_memory, over_peers
from loft_hvd.transport.shared_memory import open_shared_memory, over_memory

__all__ = ["Needs", "choose_lane", "datagram_ports"]

_logger = logging.getLogger(__name__)
_Given = TypeVar("_Given")


@dataclass(frozen=True)
class Needs:
    """What is asked of a lane; equal on every rank.

    Attributes:
        device: of the values, such as "cpu" or "cuda:0".
        is_named: exchanges may begin in another order on every rank, and are told apart by their
            names alone.
        has_buffers: what is sent lies in buffers of the lane's own.
        gather: how rows may travel to shard owners; None for the best way that loses nothing.
    """

    device: str = "cpu"
    is_named: bool = False
    has_buffers: bool = True
    gather: LossTolerant | None = None


@dataclass(frozen=True)
class _Kind:
    """A lane that may be taken."""

    name: str  # as LOFT_HVD_LANE has it
    device: str  # whose values take it unless LOFT_HVD_LANE names it
    suits: Callable[[Channel, Needs], bool]
    opens: Callable[[Channel, Needs], Any]  # once a world; None where some rank cannot
    lane: Callable[[Channel, Any], Lane]  # once an engine


def _is_one_host(channel: Channel) -> bool:
    return channel.transport.local_size == channel.world_size


def _made(call: _Given | None) -> _Given:
    assert call is not None  # ``suits`` has asked
    return call


_KINDS = (
    _Kind(
        "shared-memory",
        "cpu",
        suits=lambda channel, needs: needs.has_buffers and _is_one_host(channel),
        opens=lambda channel, _: open_shared_memory(channel),
        lane=over_memory,
    ),
    _Kind(
        "datagram",
        "cpu",
        suits=lambda _, needs: needs.gather is not None,
        opens=lambda channel, needs: open_datagrams(channel, _made(needs.gather)),
        lane=lambda channel, ends: DatagramLane(channel.transport, ends),
    ),
    _Kind(
        "mesh",
        "cpu",
        suits=lambda channel, _: channel.transport.can.open_mesh is not None,
        opens=lambda channel, _: _made(channel.transport.can.open_mesh)(channel),
        lane=lambda channel, mesh: MeshLane(channel.transport, mesh),
    ),
    _Kind(
        "peer-memory",
        "cuda",
        suits=lambda channel, needs: (
            # By name alone until it has run on a GPU: nobody shall meet it unasked before.
            config().lane == "peer-memory"
            and torch.device(needs.device).type == "cuda"
            and needs.has_buffers
            and _is_one_host(channel)
        ),
        opens=lambda channel, needs: open_peer_memory(channel, torch.device(needs.device)),
        lane=over_peers,
    ),
    _Kind(
        "device",
        "cuda",
        suits=lambda channel, needs: (
            channel.transport.can.open_group is not None and not needs.is_named
        ),
        opens=lambda channel, needs: _made(channel.transport.can.open_group)(
            channel, torch.device(needs.device)
        ),
        lane=lambda channel, group: DeviceLane(channel.transport, group),
    ),
)


def choose_lane(channel: Channel, needs: Needs) -> Lane:
    """Return the lane of values among a channel's ranks; every rank calls it alike.

    Args:
        channel: the ranks. Those that call at the same time have the same name.
        needs: of the values.
    """
    lane = _chosen(channel, needs)
    wanted, device = config().lane, torch.device(needs.device).type
    is_named = wanted not in ("auto", "engine") and not needs.is_named  # any order: as documented
    if is_named and type(lane) is Lane and channel.rank == 0 and channel.world_size > 1:
        _warn_once(wanted, device)
    if reason := _why_no_datagrams(channel, needs, lane):
        _tell_of_gather(reason)
    return lane


def _why_no_datagrams(channel: Channel, needs: Needs, lane: Lane) -> str:
    """Say on rank 0 why rows do not travel by datagrams, where that was asked for.

    Returns "" where they do, or where nothing is to be told.
    """
    if needs.gather is None or channel.rank != 0 or channel.world_size == 1:
        return ""
    # Where rows are read in place nothing is lost; why ports were not opened is told there.
    if isinstance(lane, DatagramLane) or lane.lends:
        return ""
    if channel.transport.can.world is None:
        if config().is_elastic:
            return "the ranks of an elastic job change"
        return "these ranks are a process set, or their transport opens no ports"
    if torch.device(needs.device).type != "cpu":
        return f"values on {needs.device} do not travel by datagrams"
    if config().lane not in ("auto", "datagram"):
        return f"LOFT_HVD_LANE={config().lane} names another lane"
    if config().mesh == "off":
        return "LOFT_HVD_MESH=off"
    kept = _worlds().get(channel.transport.can.world)
    was_tried = kept is not None and _key("datagram", needs) in kept.by_kind
    return "" if was_tried else "some ranks have values on a GPU"


@functools.cache
def _tell_of_gather(reason: str) -> None:
    _logger.warning(
        "gather=LossTolerant(): %s; rows take the way that they take without it, and all of them "
        "arrive",
        reason,
    )


@functools.cache
def _warn_once(wanted: str, device: str) -> None:
    _logger.warning(
        "LOFT_HVD_LANE=%s: values on a %s device cannot take this lane among these ranks, and take "
        "the engine's collectives instead; auto takes the best lane that they can",
        wanted,
        device,
    )


def _chosen(channel: Channel, needs: Needs) -> Lane:
    transport = channel.transport
    # One rank takes the device lane where that is named: so NCCL is tried by a single GPU.
    is_alone = transport.world_size == 1 and config().lane != "device"
    device = torch.device(needs.device).type
    if needs.gather is not None and not is_alone and _may_lose(transport.can, device):
        lane: Lane = _made(transport.can.open_lossy)(channel, needs.gather)
        return lane
    if transport.can.world is None or is_alone:
        return Lane(transport)
    if transport.can.mixes_devices:
        # A rank on a CPU would wait in one lane for who is in that of GPUs.
        kinds = channel.sub("device").allgather_rows(torch.tensor([int(device == "cpu")]))
        if kinds.unique().numel() > 1:
            return Lane(transport)
    for kind in _KINDS:
        if not (_is_allowed(kind, device) and kind.suits(channel, needs)):
            continue
        named = Channel(transport, f"loft.{kind.name}", channel.timeout_s)
        if (opened := _opened(kind, named, needs)) is not None:
            return kind.lane(named, opened)
    return Lane(transport)


def _may_lose(can: Abilities, device: str) -> bool:
    """Say whether a transport's own lossy lane stands for datagrams."""
    is_left = config().lane in ("auto", "datagram")
    return can.open_lossy is not None and device == "cpu" and is_left


def _is_allowed(kind: _Kind, device: str) -> bool:
    """Say whether users leave a lane to us, or have named it."""
    wanted, mesh = config().lane, config().mesh
    if kind.device == "cpu" and device != "cpu":
        return False  # whoever names it: the host cannot read what is on a GPU
    if wanted != "auto":
        return kind.name == wanted
    if kind.device != device or (device == "cpu" and mesh == "off"):
        return False
    return mesh != "on" or device != "cpu" or kind.name != "shared-memory"


# What is open.


@dataclass(frozen=True)
class _OpenedWorld:
    """What this process has open for the lanes of a world; None where ranks cannot have it."""

    # Reentrant: a signal handler may shut the engine down while this opens.
    lock: threading.RLock = field(default_factory=threading.RLock)
    by_kind: dict[Hashable, Any] = field(default_factory=dict)

    def close(self) -> None:
        with self.lock:
            for each in self.by_kind.values():
                if each is not None:
                    each.close()
            self.by_kind.clear()


@functools.cache
def _worlds() -> dict[Hashable, _OpenedWorld]:
    return {}


def _opened(kind: _Kind, channel: Channel, needs: Needs) -> Any:
    """Return what a lane needs, which the first call opens with all ranks of the world."""
    can = channel.transport.can
    fresh = _OpenedWorld()
    kept = _worlds().setdefault(can.world, fresh)
    if kept is fresh:
        can.at_end(functools.partial(_close, can.world))
    key = _key(kind.name, needs)
    with kept.lock:
        if key not in kept.by_kind:
            kept.by_kind[key] = kind.opens(channel, needs)
        return kept.by_kind[key]


def _key(name: str, needs: Needs) -> Hashable:
    """Return by which a world keeps what a lane needs."""
    return (name, needs.device, needs.gather) if name == "datagram" else (name, needs.device)


def datagram_ports(world: Hashable, gather: LossTolerant | None = None) -> tuple[DatagramPort, ...]:
    """Return the open UDP ports of this rank in a world.

    Args:
        world: of a transport's ``Abilities``.
        gather: what a port was opened for; None for all of them.
    """
    kept = _worlds().get(world)
    ports = () if kept is None else tuple(kept.by_kind.values())
    return tuple(
        port
        for port in ports
        if isinstance(port, DatagramPort) and port.port and gather in (None, port.gather)
    )


def _close(world: Hashable) -> None:
    if (kept := _worlds().pop(world, None)) is not None:
        kept.close()
