"""The heartbeat's wire: lines of text on connections that never block.

Nothing is pickled: a message is a word, a rank, seconds and a short text on one line, and whatever
does not parse is dropped. ``handshake.py`` says who may connect.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from dataclasses import dataclass

__all__ = ["MAX_TEXT", "PULSE", "Link", "Message"]

MAX_TEXT = 12_000  # characters; a choice: what is in flight on a rank takes a few hundred
_MAX_LINE = 16_384  # bytes; bound from MAX_TEXT, with room for the words before it
_MOST_READS = 8  # of who has not proven itself: two lines, each in a few pieces; a choice
_MOST_ENDS = 8  # of lines in one of those reads; bound: a line has one before it and one after it
_OPENING_KINDS = ("hello", "challenge", "proof", "welcome")  # see handshake.py
_KINDS = (
    *_OPENING_KINDS,
    *(
        "beat",
        "pulse",
        "late",
        "ask",
        "left",
        "failed",
        "engine",
        "verdict",
        "look",
        "state",
        "term",
        "ends",
    ),
)


@dataclass(frozen=True)
class Message:
    """One message."""

    kind: str  # one of ``_KINDS``
    rank: int  # the rank it is about
    seconds: float = 0.0  # a number of seconds
    text: str = ""  # at most 12,000 characters

    def encode(self) -> bytes:
        """Return its line's bytes, with an end before it and after it."""
        # A full buffer takes part of a line; the end before the next one keeps that from spoiling
        # it: "\nbeat 1 0.0 a" + "\nleft 1 0.0 \n".
        text = " ".join(self.text[:MAX_TEXT].split("\n"))
        return f"\n{self.kind} {self.rank} {self.seconds:.3f} {text}\n".encode(errors="replace")

    @classmethod
    def parse(cls, data: bytes) -> Message | None:
        """Return the message that a line holds, without its ends; None when it holds none."""
        parts = data.decode(errors="replace").split(" ", 3)
        if len(parts) != 4 or parts[0] not in _KINDS:
            return None
        try:
            message = cls(parts[0], int(parts[1]), float(parts[2]), parts[3][:MAX_TEXT])
        except ValueError:
            return None
        return message if math.isfinite(message.seconds) else None


# Says that a process runs, whoever holds its interpreter. Of no rank: a link knows its other end.
PULSE = Message("pulse", 0).encode()


class Link:
    """One end of a connection that never blocks; any thread may send, one thread receives.

    Args:
        connection: the connected socket, which the link owns from here on.
        max_line: longest line in bytes that the other side may send; it is cut off otherwise. With
            less than ours may have the other side is a stranger until ``trust`` is called: it has
            few reads, and nothing but lines that parse.
    """

    def __init__(self, connection: socket.socket, *, max_line: int = _MAX_LINE) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._lock = threading.RLock()  # a signal handler may send, too
        self._received = b""
        self._max_line = max_line
        self._is_stranger, self._reads_left = max_line < _MAX_LINE, _MOST_READS
        self.is_closed = False

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def trust(self) -> None:
        """Allow lines of full length: the other side has proven who it is."""
        self._max_line, self._is_stranger = _MAX_LINE, False

    def send(self, message: Message) -> None:
        """Send a message, or lose it when the other side has not read for long."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.send(message.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> list[Message]:
        """Return the messages that have come; sets ``is_closed`` at the connection's end."""
        try:
            while data := self._socket.recv(self._max_line):
                self._received += data
                self._reads_left -= self._is_stranger
                if len(self._received) > 8 * self._max_line or not self._reads_left:
                    break  # let others have a turn
            else:  # no bytes: the other side has closed
                self.is_closed = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_closed = True
        *lines, self._received = self._received.split(b"\n")
        if max(map(len, [*lines, self._received])) > self._max_line:
            self.is_closed = True  # not one of ours
            return []
        if not self._reads_left or (self._is_stranger and len(lines) > _MOST_ENDS):
            self.is_closed = True  # before its lines are parsed, which costs most
            return []
        parsed = [Message.parse(line) for line in lines if line]
        known = [message for message in parsed if message is not None]
        if self._is_stranger and len(known) < len(parsed):
            self.is_closed = True
        return known

    def close(self) -> None:
        """Close the connection; can be called again."""
        self.is_closed = True
        with self._lock:  # else a thread that sends may write to what has its descriptor next
            with contextlib.suppress(OSError):  # it has ended
                # For both sides at once, also where a pulse or a forked process has it open too.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def reset(self) -> None:
        """Close the connection of a stranger so that the kernel keeps nothing of it either."""
        with contextlib.suppress(OSError):
            no_time = struct.pack("ii", 1, 0)  # on, 0 seconds
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
        self.is_closed = True
        self._socket.close()
