"""What this rank has on the wire and since when it waits, as its heartbeat reports it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loft_hvd.transport.heartbeat.progress import Progress, key_of

__all__ = ["Board"]

IsOver = Callable[[], bool]


class Board:
    """Operations in flight and waits of one rank; any thread may write.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._in_flight: dict[tuple[str, int], IsOver] = {}
        self._waits: dict[int, float] = {}
        self._tickets = itertools.count()

    def posted(self, name: str, is_over: IsOver = lambda: False) -> tuple[str, int]:
        """Note an operation that has been started; returns it, to be given to ``ended``.

        Args:
            name: its name.
            is_over: says whether the engine is done with it, though nobody may have asked: what
                a rank starts now and takes up much later keeps no rank from going on.
        """
        with self._lock:
            self._counts[name] += 1
            operation = name, self._counts[name]
            self._in_flight[operation] = is_over
        return operation

    def ended(self, operation: tuple[str, int]) -> None:
        """Note that it has ended, well or badly."""
        with self._lock:
            self._in_flight.pop(operation, None)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that a thread waits for other ranks inside."""
        ticket = next(self._tickets)
        with self._lock:
            self._waits[ticket] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[ticket]

    def progress(self) -> Progress:
        """Return how far this rank has come."""
        with self._lock:
            since = min(self._waits.values(), default=None)
            posted = list(self._in_flight.items())
            counts = {key_of(name): count for name, count in self._counts.items()}
        in_flight = frozenset(operation for operation, is_over in posted if not is_over())
        # A wait that has only begun is a wait: 0 means none.
        waited_s = 0.0 if since is None else max(self._clock() - since, 1e-3)
        return Progress(waited_s, in_flight, counts)
