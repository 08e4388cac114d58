"""A cable that is long and loses packets: passes frames on, later and not all of them.

A process between a host's port on the switch (a packet socket) and a tap device on the bridge,
as many kernels lack tc's netem. Order is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass, field

__all__ = ["relay"]

_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33
_PACKET_OUTGOING = 4
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_LARGEST_FRAME = 65_600  # bytes
_MOST_FRAMES = 20_000  # on their way; more are lost, as in a full queue
_AT_ONCE = 64  # frames read from one side before the other has its turn


@dataclass
class _Way:
    """One direction."""

    source: int  # descriptor
    target: int
    last: float = 0.0  # when the latest frame is due


@dataclass
class _Cable:
    """Both directions, and what is on its way."""

    raw: socket.socket  # the host's port
    tap: int
    delay_s: float  # each way, as the two below
    jitter_s: float
    loss: float
    frames: list[tuple[float, int, int, bytes]] = field(default_factory=list)  # due, number, to
    number: int = 0

    def __post_init__(self) -> None:
        port = self.raw.fileno()
        self.ways = (_Way(port, self.tap), _Way(self.tap, port))

    def _read(self, source: int) -> bytes | None:
        """Return a frame; None for one that this process has sent itself."""
        if source == self.tap:
            return os.read(self.tap, _LARGEST_FRAME)
        frame, sender = self.raw.recvfrom(_LARGEST_FRAME)
        return None if sender[2] == _PACKET_OUTGOING else frame

    def take(self, way: _Way) -> None:
        """Take what has come from one side."""
        now = time.monotonic()
        for _ in range(_AT_ONCE):
            try:
                frame = self._read(way.source)
            except OSError:  # nothing more; or the port is down
                return
            if frame is None or (self.loss and random.random() < self.loss):
                continue
            due = now + self.delay_s + random.uniform(-self.jitter_s, self.jitter_s)
            due = way.last = max(due, way.last)
            self.number += 1
            if len(self.frames) < _MOST_FRAMES:
                heapq.heappush(self.frames, (due, self.number, way.target, frame))

    def give(self) -> None:
        """Pass on what is due."""
        now = time.monotonic()
        while self.frames and self.frames[0][0] <= now:
            _, _, target, frame = heapq.heappop(self.frames)
            with contextlib.suppress(OSError):  # queue full or link down: lost, as on a wire
                if target == self.tap:
                    os.write(self.tap, frame)
                else:
                    self.raw.send(frame)

    def wait(self) -> None:
        """Wait until a frame has come or is due, and take what has come."""
        wait_s = max(0.0, self.frames[0][0] - time.monotonic()) if self.frames else None
        ready = select.select([way.source for way in self.ways], (), (), wait_s)[0]
        for way in self.ways:
            if way.source in ready:
                self.take(way)


def relay(port: str, tap: str, delay_ms: float, jitter_ms: float, loss: float) -> None:
    """Pass frames between two devices, for ever; delay, jitter and loss hold for each direction."""
    try:  # a wire does not wait for a busy CPU: 200 ms late is a TCP timeout
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        os.nice(-20)
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    raw.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 4 << 20)
    raw.bind((port, _ETH_P_ALL))
    raw.setblocking(False)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", tap.encode(), _TAP_WITHOUT_HEADER))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    cable = _Cable(raw, device, delay_ms / 1e3, jitter_ms / 1e3, loss)
    while True:
        cable.wait()
        cable.give()
