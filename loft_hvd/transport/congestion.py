"""Which congestion control the connections between ranks have: by how long and lossy each is.

Cubic, which most kernels take, halves what it sends for each lost packet, and needs many round
trips to come back: with 50 ms and 1 % loss an all-reduce of 6 MB takes ten times what BBR needs. On
short links BBR gains nothing, and where many send to one through shallow queues it loses. So each
rank looks at its own connections as its kernel knows them (``TCP_INFO``), and takes BBR for those
that need it. The sender alone decides; the other end is not asked.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loft_hvd.transport.agreement import digest
from loft_hvd.transport.base import Channel

__all__ = ["CongestionControl", "has_bbr", "links_between"]

_logger = logging.getLogger(__name__)
_FOLDER = Path("/proc/self/fd")
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_BBR = b"bbr"
_LOOK_S = 5.0  # a choice: between two looks at the connections, which take 10 us each
# From which round trip on a link is long, and from which it counts as lossy at which share of
# packets sent again. Measured (all-reduces of 6 MB at 100 Mb/s): BBR takes 1.1 times cubic's time
# at 1 ms without loss, 0.9 with 1 %, 0.3 at 10 ms with 1 %; 1.4 at 1 ms where queues of 8 kB
# overflow. What lies between are choices.
_LONG_S, _LOSSY_S, _LOSSY_SHARE = 5e-3, 2e-3, 0.005
# Where a sockaddr has its address.
_PLACES = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
_NAMES = ("getsockname", "getpeername")
# Connections that a process tells the others of: Horovod's and ours were 5 to each of 3 ranks.
_MOST_A_RANK, _MOST_OTHERS = 8, 64
_FEWEST_TRIPS = 20  # packets, of which the quickest says how long a link is: the first may be slow
_FEWEST_SENT = 1000  # packets, before their losses say something
# Of Linux's struct tcp_info: total_retrans, then min_rtt in us and data_segs_out behind it.
_RETRANSMITTED, _REST, _INFO_BYTES = (100, "=I"), (148, "=III"), 160
_UNKNOWN_US = 2**32 - 1  # bound from Linux: no round trip was timed


@dataclass(frozen=True)
class HostLink:
    """One connection of this process, by its descriptor and the socket behind it."""

    descriptor: int
    name: str  # as /proc has it: another socket with this descriptor has another name
    peer: str


@dataclass(frozen=True)
class LinkQuality:
    """What the kernel knows of a connection."""

    round_trip_s: float  # the least that was seen
    num_sent: int
    num_sent_again: int

    @property
    def needs_bbr(self) -> bool:
        """Whether it is long, or loses packets on a way that is not short."""
        lost = self.num_sent_again / max(1, self.num_sent)
        is_lossy = self.num_sent >= _FEWEST_SENT and lost >= _LOSSY_SHARE
        is_long = self.num_sent >= _FEWEST_TRIPS and self.round_trip_s >= _LONG_S
        return is_long or (is_lossy and self.round_trip_s >= _LOSSY_S)

    def __str__(self) -> str:
        lost = self.num_sent_again / max(1, self.num_sent)
        return f"{1e3 * self.round_trip_s:.1f} ms there and back, {lost:.1%} sent again"


def links_between(channel: Channel) -> list[HostLink]:
    """Return this process's connections to processes of other ranks; every rank calls it alike.

    Whatever library has made them: libraries keep their sockets to themselves. A connection is one
    of ours if its other end is in another rank's process, which all tell each other.
    """
    ends = {(local, peer): found for found, local, peer in _ends()}
    room = _MOST_A_RANK * channel.world_size + _MOST_OTHERS
    told = torch.zeros(room, dtype=torch.int64)
    own = [digest(f"{local} to {peer}") for local, peer in ends][:room]
    told[: len(own)] = torch.tensor(own, dtype=torch.int64)
    rows = channel.allgather_rows(told).tolist()
    others = {each for rank, row in enumerate(rows) if rank != channel.rank for each in row}
    return [
        found for (local, peer), found in ends.items() if digest(f"{peer} to {local}") in others
    ]


def _ends() -> Iterator[tuple[HostLink, str, str]]:
    """Yield this process's connections to other hosts, with the addresses of both ends."""
    with suppress(OSError):  # no /proc
        for entry in os.listdir(_FOLDER):
            with suppress(OSError):  # gone meanwhile, or no connection
                name = os.readlink(_FOLDER / entry)
                if not name.startswith("socket:"):
                    continue
                descriptor = int(entry)
                kind = _option(descriptor, socket.SOL_SOCKET, socket.SO_TYPE, 4)
                if int.from_bytes(kind, sys.byteorder) == socket.SOCK_STREAM:
                    local, peer = (_address(descriptor, end) for end in _NAMES)
                    if not ipaddress.ip_address(peer.split()[0]).is_loopback:
                        yield HostLink(descriptor, name, peer.split()[0]), local, peer


# By calls of C: a socket object of Python's, even of a copy of the descriptor, changes whether the
# other library's own socket blocks, where the script has set a default time limit.


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc(), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _option(descriptor: int, level: int, option: int, most_bytes: int) -> bytes:
    """Return a socket's option, of at most so many bytes."""
    room = ctypes.create_string_buffer(most_bytes)
    size = ctypes.c_uint32(most_bytes)
    _call("getsockopt", descriptor, level, option, room, ctypes.byref(size))
    return room.raw[: size.value]


def _set_control(descriptor: int, control: bytes) -> None:
    at = socket.IPPROTO_TCP, socket.TCP_CONGESTION
    _call("setsockopt", descriptor, *at, control, len(control))


def _address(descriptor: int, end: str) -> str:
    """Return address and port of an end of a connection: "getsockname" or "getpeername"."""
    room = ctypes.create_string_buffer(128)
    size = ctypes.c_uint32(len(room))
    _call(end, descriptor, room, ctypes.byref(size))
    return _text_of(room.raw)


def _text_of(name: bytes) -> str:
    """Return address and port of a ``sockaddr``.

    Raises:
        OSError: it is of no such family.
    """
    family, port = int.from_bytes(name[:2], sys.byteorder), int.from_bytes(name[2:4], "big")
    if family not in _PLACES:
        raise OSError(f"a socket of family {family}")
    address = ipaddress.ip_address(name[_PLACES[family]])
    return f"{getattr(address, 'ipv4_mapped', None) or address} {port}"


def has_bbr() -> bool:
    """Say whether this host's kernel has BBR at hand."""
    with suppress(OSError):
        return _BBR.decode() in _AVAILABLE.read_text(encoding="ascii").split()
    return False


class CongestionControl:
    """The connections between this rank and others, looked at now and then.

    ``wish`` is ``LOFT_HVD_LINKS``: "auto", "off", or "bbr" for all of them.
    """

    def __init__(
        self,
        connections: Sequence[HostLink],
        *,
        rank: int,
        wish: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        is_linux = sys.platform == "linux"
        self._undecided = list(connections) if is_linux and wish != "off" else []
        self._rank = rank
        self._takes_all = wish == "bbr"
        self._clock = clock
        self._due = 0.0
        self._looking = threading.Lock()
        self._is_refused = False  # by the kernel
        self._taken: list[tuple[HostLink, LinkQuality]] = []  # in this look

    def look(self) -> None:
        """Take BBR where it is due; costs nothing between two looks, and never waits."""
        if not self._undecided or self._clock() < self._due:
            return
        if not self._looking.acquire(blocking=False):
            return
        try:
            self._due = self._clock() + _LOOK_S
            self._taken = []
            left = [each for each in self._undecided if not self._is_decided(each)]
            self._undecided = [] if self._is_refused else left  # the kernel is the same for all
            if self._taken:
                peers = sorted({link.peer for link, _ in self._taken})
                longest = max((quality for _, quality in self._taken), key=_round_trip)
                _logger.info(
                    "rank %d: BBR on %d connections to %s (up to %s)",
                    self._rank,
                    len(self._taken),
                    ", ".join(peers),
                    longest,
                )
        finally:
            self._looking.release()

    def _is_decided(self, connection: HostLink) -> bool:
        if self._is_refused:
            return True
        try:
            if os.readlink(_FOLDER / str(connection.descriptor)) != connection.name:
                return True  # it is closed
            at = socket.IPPROTO_TCP, socket.TCP_CONGESTION
            if _option(connection.descriptor, *at, 16).rstrip(b"\0") == _BBR:
                return True
            quality = _quality_of(connection.descriptor)
            if not (self._takes_all or quality.needs_bbr):
                return False
            try:
                _set_control(connection.descriptor, _BBR)
            except OSError as error:
                self._warn(connection, quality, error)
                return True
        except OSError:  # it is closed
            return True
        self._taken.append((connection, quality))
        return True

    def _warn(self, connection: HostLink, quality: LinkQuality, error: OSError) -> None:
        _logger.warning(
            "rank %d: the link to %s (%s) shall have BBR, which is up to ten times as fast on "
            "links that are long or lose packets, and this host's kernel refuses it (%s): "
            "`modprobe tcp_bbr` on the host suffices. LOFT_HVD_LINKS=off does without",
            self._rank,
            connection.peer,
            quality,
            error.strerror or error,
        )
        self._is_refused = True


def _round_trip(quality: LinkQuality) -> float:
    return quality.round_trip_s


def _quality_of(descriptor: int) -> LinkQuality:
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:  # before Linux 4.9
        return LinkQuality(0.0, 0, 0)
    (num_sent_again,) = struct.unpack_from(_RETRANSMITTED[1], info, _RETRANSMITTED[0])
    round_trip_us, _, num_sent = struct.unpack_from(_REST[1], info, _REST[0])
    if round_trip_us == _UNKNOWN_US:
        round_trip_us = 0
    return LinkQuality(1e-6 * round_trip_us, num_sent, num_sent_again)
