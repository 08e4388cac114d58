"""The heartbeat's wire: lines of text between rank 0 and every other rank.

Nothing is pickled: a line is a word, a rank, seconds and a short text, and whatever does not parse
is dropped. Rank 0 listens only while the links are opened; a connection that does not begin with
the token, which travelled through the transport, is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

import torch

from loft_hvd.transport.base import Channel
from loft_hvd.transport.heartbeat.process import RankProcess, own_process

__all__ = ["MAX_TEXT", "Line", "Link", "open_links"]

MAX_TEXT = 12_000  # characters; a choice: what is in flight on a rank takes a few hundred
_MAX_LINE = 16_384  # bytes; bound from MAX_TEXT, with room for the words before it
_MAX_ADDRESSES = 16  # bound from the header's fixed length: more interfaces go unused
_SIOCGIFADDR = 0x8915  # from the kernel's sockios.h: ask for an interface's address
_CONNECT_S = 2.0  # a choice: an address behind a firewall must not use up the time of the next
_KINDS = ("hello", "welcome", "beat", "late", "ask", "left", "failed", "verdict", "look", "state")


@dataclass(frozen=True)
class Line:
    """One message."""

    kind: str  # one of ``_KINDS``
    rank: int  # the rank it is about
    seconds: float = 0.0  # a number of seconds
    text: str = ""  # at most 12,000 characters

    def encode(self) -> bytes:
        """Return the line's bytes, with its end."""
        text = " ".join(self.text[:MAX_TEXT].split("\n"))
        return f"{self.kind} {self.rank} {self.seconds:.3f} {text}\n".encode(errors="replace")

    @classmethod
    def parse(cls, data: bytes) -> Line | None:
        """Return the line that some bytes, without their end, hold; None when they hold none."""
        parts = data.decode(errors="replace").split(" ", 3)
        if len(parts) != 4 or parts[0] not in _KINDS:
            return None
        try:
            return cls(parts[0], int(parts[1]), float(parts[2]), parts[3][:MAX_TEXT])
        except ValueError:
            return None


class Link:
    """One end of a connection that never blocks; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._lock = threading.Lock()
        self._received = b""
        self._is_cut = False
        self._kept: list[Line] = []
        self.is_closed = False

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, line: Line) -> None:
        """Send a line, or lose it when the other side has not read for long."""
        with self._lock, contextlib.suppress(OSError):
            data = b"\n" + line.encode() if self._is_cut else line.encode()
            sent = self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            # A full buffer takes part of a line: the receiver drops that once the next line ends
            # it: "beat 1 0.0 a" + "\n" + "left 1 0.0 \n".
            self._is_cut = sent < len(data)

    def receive(self) -> list[Line]:
        """Return the lines that have come; sets ``is_closed`` at the connection's end."""
        try:
            while data := self._socket.recv(_MAX_LINE):
                self._received += data
                if len(self._received) > 8 * _MAX_LINE:  # let others have a turn
                    break
            else:  # no bytes: the other side has closed
                self.is_closed = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_closed = True
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _MAX_LINE:
            self.is_closed = True  # not one of ours
        parsed = [Line.parse(line) for line in lines]
        kept, self._kept = self._kept, []
        return kept + [line for line in parsed if line is not None]

    def wait_line(self, timeout_s: float) -> Line | None:
        """Return the next line, or None when none has come in time."""
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            lines = self.receive()
            while not lines and not self.is_closed and (left_s := until - time.monotonic()) > 0:
                selector.select(left_s)
                lines = self.receive()
        self._kept = lines[1:]
        return lines[0] if lines else None

    def close(self) -> None:
        """Close the connection; can be called again."""
        self._socket.close()


@functools.cache
def _own_addresses() -> tuple[str, ...]:
    """Return this host's IPv4 addresses, loopback last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # In: a name of at most 15 bytes. Out: the address is in bytes 20 to 24, behind
                # the name (16), its family (2) and its port (2).
                request = struct.pack("256s", name.encode()[:15])
                found.append(
                    socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
                )
    return tuple(sorted(set(found), key=lambda address: (address.startswith("127."), address)))


# Opening.


def open_links(channel: Channel) -> tuple[dict[int, Link], dict[int, RankProcess]]:
    """Connect every rank to rank 0; every rank calls it alike.

    The channel carries the address and a token; its limit holds for that and for connecting.
    Returns links and processes by rank: of all others on rank 0, of rank 0 elsewhere. Ranks that
    could not be reached are missing.
    """
    token = secrets.randbits(63)  # as int64 holds it
    own = own_process()
    # [port, token, key of rank 0's host, number of addresses, addresses.., zeros]
    header = torch.zeros(4 + _MAX_ADDRESSES, dtype=torch.int64)
    if channel.rank == 0:
        with socket.create_server(("", 0), backlog=max(16, channel.world_size)) as server:
            numbers = [int.from_bytes(socket.inet_aton(a), "big") for a in _own_addresses()]
            numbers = numbers[:_MAX_ADDRESSES]
            row = [server.getsockname()[1], token, own.host_key, len(numbers), *numbers]
            header[: len(row)] = torch.tensor(row)
            channel.sub("address").broadcast(header, what="the heartbeat's address")
            return _accept(server, channel.world_size, token, own, channel.timeout_s)
    channel.sub("address").broadcast(header, what="the heartbeat's address")
    port, token, host_key, count, *numbers = header.tolist()
    addresses = [socket.inet_ntoa(number.to_bytes(4, "big")) for number in numbers[:count]]
    if host_key == own.host_key:
        addresses.reverse()  # loopback first
    else:
        addresses = [address for address in addresses if not address.startswith("127.")]
    until = time.monotonic() + channel.timeout_s
    for address in addresses:
        if (left_s := until - time.monotonic()) > 0:
            found = _connect((address, port), channel.rank, token, own, min(left_s, _CONNECT_S))
            if found is not None:
                return {0: found[0]}, {0: found[1]}
    return {}, {}


def _describe(process: RankProcess) -> str:
    return f"{process.host_key} {process.pid} {process.start} {process.host}"


def _parse_process(text: str) -> RankProcess | None:
    parts = text.split(" ", 3)
    try:
        return RankProcess(int(parts[0]), int(parts[1]), int(parts[2]), parts[3][:100])
    except (ValueError, IndexError):
        return None


def _connect(
    address: tuple[str, int], rank: int, token: int, own: RankProcess, timeout_s: float
) -> tuple[Link, RankProcess] | None:
    try:
        link = Link(socket.create_connection(address, timeout=timeout_s))
    except OSError:
        return None
    link.send(Line("hello", rank, 0.0, f"{token} {_describe(own)}"))
    answer = link.wait_line(timeout_s)
    process = None
    if answer is not None and answer.kind == "welcome":
        process = _parse_process(answer.text)
    if process is None:
        link.close()
        return None
    return link, process


def _accept(
    server: socket.socket, world_size: int, token: int, own: RankProcess, timeout_s: float
) -> tuple[dict[int, Link], dict[int, RankProcess]]:
    links: dict[int, Link] = {}
    processes: dict[int, RankProcess] = {}
    unknown: list[Link] = []
    until = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while len(links) < world_size - 1 and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                if not isinstance(key.fileobj, Link):
                    unknown.append(Link(server.accept()[0]))
                    selector.register(unknown[-1], selectors.EVENT_READ)
                    continue
                link = key.fileobj
                lines = link.receive()
                if not lines and not link.is_closed:
                    continue
                selector.unregister(link)  # its first line decides, and nothing else is read
                if lines and (process := _greeted(lines[0], world_size, token)) is not None:
                    unknown.remove(link)
                    links[lines[0].rank], processes[lines[0].rank] = link, process
                    link.send(Line("welcome", 0, 0.0, _describe(own)))
    for link in unknown:
        link.close()
    return links, processes


def _greeted(line: Line, world_size: int, token: int) -> RankProcess | None:
    """Return where a rank runs that has said hello with the token, or None for strangers."""
    secret, _, text = line.text.partition(" ")
    # In constant time: how long it takes must not tell a stranger how much of it was right.
    is_ours = hmac.compare_digest(secret.encode(), str(token).encode())
    if line.kind == "hello" and is_ours and 0 < line.rank < world_size:
        return _parse_process(text)
    return None
