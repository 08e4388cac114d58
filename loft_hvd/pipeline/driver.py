"""A named thread that moves work on while the user's own thread computes.

It sleeps on a condition while there is nothing to do, and polls with sleeps in between while
something is in flight: it never spins on the interpreter's lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["ProgressThread"]

_logger = logging.getLogger(__name__)
_JOIN_S = 5.0


class ProgressThread:
    """Calls a method again and again while there is work; started by the first ``wake``.

    The thread keeps the method's object alive only while there is work, so that it can be
    dropped like any other; whoever owns the thread calls ``close``.

    Args:
        advance: a bound method that does what can be done without waiting, never raises, and
            returns after how many seconds it wants to be called again; None when all is done.
        name: the thread's name.
    """

    def __init__(self, advance: Callable[[], float | None], *, name: str) -> None:
        self._advance = weakref.WeakMethod(advance)
        self._name = name
        self._changed = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """Say that there is work; returns at once."""
        with self._changed:
            self._has_news = True
            self._changed.notify()
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a daemon thread must not meet the interpreter's end

    def close(self, *, should_join: bool = True) -> None:
        """End the thread, whatever is in flight; can be called again, and from any thread.

        Args:
            should_join: wait until it has ended, a few seconds at most.
        """
        if self._process != os.getpid():
            return  # a forked copy: its thread, and who holds its lock, stayed behind
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        thread = self._thread
        if should_join and thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                _logger.warning("%s does not end: it hangs in a call of the engine", self._name)

    def _run(self) -> None:
        pause: float | None = None
        while self._wait(pause):
            advance = self._advance()
            if advance is None:
                return
            pause = advance()
            del advance  # its object may be dropped while this thread sleeps

    def _wait(self, pause: float | None) -> bool:
        """Sleep until there are news, or for ``pause`` seconds; False when closed."""
        with self._changed:
            if pause is None:
                while not self._has_news and not self._is_closed:
                    self._changed.wait()
            elif not self._has_news and not self._is_closed:
                self._changed.wait(pause)
            self._has_news = False
            return not self._is_closed
