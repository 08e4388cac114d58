"""A hostile client: ``flood.py FOLDER NUM BURSTS``: NUM connections to the place in FOLDER/place.

They say nothing, long or short nonsense, or a well-formed hello; the last 500 are held open. They
come in BURSTS, as fast as ``PER_S``. Where there are several, each ends when rank 0 has met its
last connection, and is followed by as many, for as long, to a listener of this process: connecting
takes of this machine's cores, of which strangers elsewhere would take nothing, in both.

FOLDER/state says where they go, "flood" or "calm"; there is none at first, in between, and after
the last. FOLDER/crowd is there from the CROWD-th connection of a burst on.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

PER_S = 2000
MET_S = 60.0  # until rank 0 must have met all connections of a burst
BETWEEN_S = 0.3  # two bursts, which counts for neither
CROWD = 4000  # nearly as many as the kernel lets wait for a process that takes none, 4,096
SAYS = (
    b"",
    b"GET / HTTP/1.1\r\n" + b"x" * 700,
    b"\n" * 400,
    b"beat 1 0 x\n" * 30,
    b"hello 1 0.0 0123456789abcdef\n",
)


def wait_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


class State:
    """What is said to be going on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "state"

    def tell(self, state: str) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(state)
        part.rename(self._path)

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)


def connect(place: tuple[str, int], says: bytes) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(2.0)
    try:
        connection.connect(place)
        connection.send(says, socket.MSG_NOSIGNAL)
    except OSError:  # sent away already, or the queue is full
        pass
    return connection


def step_back() -> None:
    """Leave this machine's cores to others: a stranger's work is done on another machine."""
    os.nice(19)
    with suppress(OSError):  # no such file, or no session of its own
        os.setsid()
        # Where Linux shares cores between sessions, niceness counts inside one alone.
        Path("/proc/self/autogroup").write_text("19")


def come(place: tuple[str, int], num: int, held: deque[socket.socket], crowd: Path) -> None:
    """Connect so many times."""
    began = time.monotonic()
    for count in range(num):
        held.append(connect(place, SAYS[count % len(SAYS)]))
        if len(held) > 500:
            held.popleft().close()
        if count == CROWD:
            crowd.touch()
        wait_until(began + count / PER_S)


def wait_for_its_end(last: socket.socket) -> None:
    """Wait until rank 0 has met somebody that talks nonsense, and sent them away."""
    last.settimeout(MET_S)
    with suppress(ConnectionError):
        assert last.recv(1) == b""


def main(folder: Path, num: int, num_bursts: int) -> None:
    step_back()
    while not (folder / "place").exists():
        time.sleep(0.005)
    address, port = (folder / "place").read_text().split()
    held: deque[socket.socket] = deque()
    state = State(folder)
    each = num // num_bursts
    for _ in range(num_bursts):
        began = time.monotonic()
        state.tell("flood")
        come((address, int(port)), each, held, folder / "crowd")
        if num_bursts == 1:
            state.clear()
            break
        wait_for_its_end(connect((address, int(port)), b"x" * 600))
        state.clear()
        took_s = time.monotonic() - began
        time.sleep(BETWEEN_S)
        with socket.create_server((address, 0), backlog=socket.SOMAXCONN) as nobody:
            began = time.monotonic()
            state.tell("calm")
            come(nobody.getsockname(), each, held, folder / "crowd")
            wait_until(began + took_s)
            state.clear()
        time.sleep(BETWEEN_S)
    (folder / "ended").touch()
    time.sleep(2.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
