"""A hostile client: ``flood.py FOLDER NUM``: NUM connections to the place in FOLDER/place.

A third says nothing, a third talks nonsense, a third says a well-formed hello; the last 500 are
held open. FOLDER/began appears after 1,000 of them, FOLDER/ended after all.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from pathlib import Path

PER_S = 2000
SAYS = (b"", b"GET / HTTP/1.1\r\n" + b"x" * 700, b"hello 1 0.0 0123456789abcdef\n")


def main(folder: Path, num: int) -> None:
    os.nice(19)  # another machine's work: it must not take this one's cores
    while not (folder / "place").exists():
        time.sleep(0.005)
    address, port = (folder / "place").read_text().split()
    held: deque[socket.socket] = deque()
    began = time.monotonic()
    for count in range(num):
        connection = socket.socket()
        connection.settimeout(2.0)
        try:
            connection.connect((address, int(port)))
            connection.send(SAYS[count % len(SAYS)], socket.MSG_NOSIGNAL)
        except OSError:  # sent away already, or the queue is full
            pass
        held.append(connection)
        if len(held) > 500:
            held.popleft().close()
        if count == 1000:
            (folder / "began").touch()
        if (early_s := began + count / PER_S - time.monotonic()) > 0:
            time.sleep(early_s)
    (folder / "ended").touch()
    time.sleep(2.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
