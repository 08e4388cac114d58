"""What bounds a store's server: calls and bytes under way, connections, and its own memory.

gRPC bounds none of them by itself: it takes every connection, reads a request of any length before
anybody may look at it, and makes a thread for each call that waits.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loft_hvd.errors import DataError

__all__ = ["Gate", "limit_connections", "watch_memory"]

MOST_CALLS = 256  # a choice: 64 ranks with 4 loader processes each, all at once
_MOST_CONNECTIONS = 1024  # a choice: 64 ranks with 16 loader processes each
_MOST_BYTES = 64 << 20  # of answers under way; a choice: 32 record batches
_LONGEST_WAIT_S = 2.5  # a choice: half of what peers wait by default, so that they hear of it
# Connections and threads at their bounds take 100 MB, answers 64 MB or the largest sample, and
# calls that wait for room 80 MB: what they know of 1,024 samples each.
_MOST_MEMORY_BYTES = 256 << 20
_LOOK_S = 0.05  # a choice: a request over loopback grows by 100 MB until the next look


class Gate:
    """Lets calls in, and answers out, as many at once as a server can hold.

    Args:
        most_calls: calls at once, those that wait for room included.
        most_bytes: bytes of answers at once; a larger one goes alone.
        longest_wait_s: longest wait for room, in seconds.
    """

    def __init__(
        self,
        *,
        most_calls: int = MOST_CALLS,
        most_bytes: int = _MOST_BYTES,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        self._most_calls, self._most_bytes = most_calls, most_bytes
        self._longest_wait_s = longest_wait_s
        self._changed = threading.Condition()
        self.num_calls = 0
        self.num_bytes = 0  # of answers under way
        self.largest = 0  # bytes of the largest answer so far

    @contextmanager
    def call(self) -> Iterator[None]:
        """Be one of the calls; a DataError where there are too many."""
        with self._changed:
            if self.num_calls >= self._most_calls:
                raise DataError(
                    f"this rank's store answers {self._most_calls} calls at once, and has as "
                    "many; ask again"
                )
            self.num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self.num_calls -= 1

    @contextmanager
    def room(self, num_bytes: int) -> Iterator[None]:
        """Wait until an answer of so many bytes may be under way; a DataError where it may not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(num_bytes), self._longest_wait_s):
                raise DataError(
                    f"this rank's store has had {self._most_bytes} bytes of answers under way for "
                    f"{self._longest_wait_s:g} s; ask again"
                )
            self.num_bytes += num_bytes
            self.largest = max(self.largest, num_bytes)
        try:
            yield
        finally:
            with self._changed:
                self.num_bytes -= num_bytes
                self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        return self.num_bytes == 0 or self.num_bytes + num_bytes <= self._most_bytes


def limit_connections() -> None:
    """Let this process have so many connections; later ones wait until one of them ends."""
    most = len(os.listdir("/proc/self/fd")) + _MOST_CONNECTIONS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def watch_memory(gate: Gate, too_much: Callable[[int], None]) -> None:
    """Watch, on a thread that ends with the process, that its own memory stays small.

    The samples are not among it: they lie in files that are mapped. ``too_much`` gets the bytes.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    # Kept open: where connections have taken all descriptors there is none to open it again.
    table = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def look() -> None:
        while True:
            time.sleep(_LOOK_S)
            _, resident, shared, *_ = map(int, os.pread(table, 200, 0).split())
            num_bytes = (resident - shared) * page
            if num_bytes > _MOST_MEMORY_BYTES + 4 * gate.largest:
                too_much(num_bytes)

    threading.Thread(target=look, name="loft_hvd memory", daemon=True).start()
