"""This process's TCP connections to other hosts, as its kernel knows them (``TCP_INFO``).

Whatever library has made them: libraries keep their sockets to themselves, and ``/proc`` shows them
all. All is read by calls of C: a socket object of Python's, even of a copy of the descriptor,
changes whether the other library's own socket blocks, where the script has set a default time
limit.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["HostLink", "TcpState", "control_of", "host_links", "probe", "set_control", "tcp_state"]

_FOLDER = Path("/proc/self/fd")
# Where a sockaddr has its address.
_PLACES = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
_NAMES = ("getsockname", "getpeername")
# Of Linux's struct tcp_info, by offset: state, -, retransmits, probes; unacked; total_retrans;
# bytes_acked; segs_in, notsent_bytes, min_rtt, data_segs_in, data_segs_out.
_FIRST, _UNACKED, _RETRANSMITTED, _ACKED, _REST, _INFO_BYTES = 0, 24, 100, 120, 140, 160
_ESTABLISHED = 1  # bound from Linux's tcp_states.h
_UNKNOWN_US = 2**32 - 1  # bound from Linux: no round trip was timed
# Of an idle connection, in seconds: after how long its kernel asks the other, how often, and how
# many times in vain until it gives the connection up. Choices, but for the last: Linux's most.
_IDLE_S, _AGAIN_S, _MOST_PROBES = 1, 2, 127


@dataclass(frozen=True)
class HostLink:
    """One connection of this process, by its descriptor and the socket behind it."""

    descriptor: int
    name: str  # as /proc has it: another socket with this descriptor has another name
    local: str  # address and port of this end: "10.0.0.1 40000"
    peer: str  # and of the other

    @property
    def peer_address(self) -> str:
        """The other host's address."""
        return self.peer.split()[0]

    def is_there(self) -> bool:
        """Say whether the descriptor is still this connection's; raises OSError where not open."""
        return os.readlink(_FOLDER / str(self.descriptor)) == self.name


@dataclass(frozen=True)
class TcpState:
    """What the kernel knows of a connection; zeros before Linux 4.9."""

    is_established: bool = False
    tries: int = 0  # how often, in a row, it has sent in vain what waits for an acknowledgement
    is_waiting: bool = False  # whether something was given to it that is not acknowledged
    num_acked: int = 0  # bytes
    num_arrived: int = 0  # segments, also those that bring nothing new
    round_trip_s: float = 0.0  # the least that was seen
    num_sent: int = 0  # segments with data
    num_sent_again: int = 0


def host_links() -> Iterator[HostLink]:
    """Yield this process's connections to other hosts, each once."""
    seen = set()  # there may be several descriptors of one
    with suppress(OSError):  # no /proc
        for entry in os.listdir(_FOLDER):
            with suppress(OSError):  # gone meanwhile, or no connection
                name = os.readlink(_FOLDER / entry)
                if not name.startswith("socket:") or name in seen:
                    continue
                seen.add(name)
                descriptor = int(entry)
                kind = _option(descriptor, socket.SOL_SOCKET, socket.SO_TYPE, 4)
                if int.from_bytes(kind, sys.byteorder) == socket.SOCK_STREAM:
                    local, peer = (_address(descriptor, end) for end in _NAMES)
                    if not ipaddress.ip_address(peer.split()[0]).is_loopback:
                        yield HostLink(descriptor, name, local, peer)


def tcp_state(descriptor: int) -> TcpState:
    """Return what the kernel knows of a connection.

    Raises:
        OSError: it is none, or none any more.
    """
    info = _option(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return TcpState()
    state, _, retransmits, probes = struct.unpack_from("=4B", info, _FIRST)
    (num_unacked,) = struct.unpack_from("=I", info, _UNACKED)
    (num_sent_again,) = struct.unpack_from("=I", info, _RETRANSMITTED)
    (num_acked,) = struct.unpack_from("=Q", info, _ACKED)
    num_arrived, num_unsent, round_trip_us, _, num_sent = struct.unpack_from("=5I", info, _REST)
    return TcpState(
        is_established=state == _ESTABLISHED,
        # Probes: what a kernel sends where it has no room, or no route, for what waits.
        tries=max(retransmits, probes),
        is_waiting=num_unacked + num_unsent > 0,
        num_acked=num_acked,
        num_arrived=num_arrived,
        round_trip_s=0.0 if round_trip_us == _UNKNOWN_US else 1e-6 * round_trip_us,
        num_sent=num_sent,
        num_sent_again=num_sent_again,
    )


def probe(descriptor: int, *, is_on: bool) -> bool:
    """Have the kernel ask the other end every few seconds whether it is there, or no more.

    Only while nothing else is under way; the answer counts as arrived. A connection whose other end
    answers nothing for four minutes is given up. One that its owner has probed stays as it is.

    Returns:
        Whether that was changed.
    """
    if any(_option(descriptor, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 4)) == is_on:
        return False
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _AGAIN_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(is_on)),
    ):
        _set_option(descriptor, level, option, value.to_bytes(4, sys.byteorder))
    return True


def control_of(descriptor: int) -> bytes:
    """Return the name of a connection's congestion control, such as b"cubic"."""
    return _option(descriptor, socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def set_control(descriptor: int, control: bytes) -> None:
    """Give a connection another congestion control; raises OSError where the kernel refuses."""
    _set_option(descriptor, socket.IPPROTO_TCP, socket.TCP_CONGESTION, control)


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


def _set_option(descriptor: int, level: int, option: int, value: bytes) -> None:
    _call("setsockopt", descriptor, level, option, value, len(value))


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
