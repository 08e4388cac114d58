"""What is on its way between ranks, moved on by a thread of its own, or by the thread that waits.

Whoever puts something on its way only queues it. A thread begins it, in the order of the queue, and
moves everything under way on, so that exchanges and rules overlap with what the script computes.
Who waits does the same in the thread that waits, and never without a limit. On a lane that is
queued on a device there is nothing to move on: each call begins what it is given, at once.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from loft_hvd.pipeline.streams import StreamOrder, current_stream
from loft_hvd.transport.base import LONGEST_SLEEP_S, SHORTEST_SLEEP_S, Lane, locate
from loft_hvd.transport.waits import waiting

__all__ = ["Flight", "Flights", "ProgressThread"]

_logger = logging.getLogger(__name__)
_UNAWAITED_SLEEP_S = 2e-3  # while the user's thread computes: polling takes time from it
_JOIN_S = 5.0  # longest that ending a thread may hold the user's up
_LAST_WORD_S = 0.5  # a choice: from a limit in one thread to what another, at its own, says


class ProgressThread:
    """Calls a method again and again while there is work; started by the first ``wake``.

    ``advance``, a bound method, does what can be done without waiting, never raises, and returns
    after how many seconds it wants to be called again; None when all is done. Its object lives on
    only while there is work, so whoever owns the thread calls ``close``.
    """

    def __init__(self, advance: Callable[[], float | None], *, name: str) -> None:
        self._advance = weakref.WeakMethod(advance)
        self._name = name
        self._changed = threading.Condition()
        self._has_news = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

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
        """End the thread, whatever is in flight; can be called again, and from any thread."""
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


class Flight(Protocol):
    """One thing on its way; only who has the turn calls its methods, of which none waits."""

    @property
    def device(self) -> str:
        """Where its values are."""

    @property
    def place(self) -> str:
        """What it is and how far it has come, for errors; "" where they say so themselves."""

    @property
    def has_news(self) -> bool:
        """Whether ``advance`` has something to do; asking costs little."""

    def begin(self) -> None:
        """Put it on its way."""

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether it has arrived."""

    def failed(self, error: BaseException) -> None:
        """Take what has ended it; it is asked nothing any more."""


class Flights:
    """What is under way on the lanes of one engine.

    With ``is_queued`` lanes everything is done by the thread that calls.
    """

    def __init__(self, *, name: str) -> None:
        self.is_queued = False
        self.has_stream = False  # of its own, for what is queued on a GPU
        # Filled by the user's thread, emptied by the one that has the turn. A deque needs no lock:
        # hooks must not wait for the turn, which lasts as long as a rule.
        self._queue: deque[tuple[Flight, list[Any]]] = deque()
        # Of the thread that has the turn: only it touches what follows, and only it starts
        # operations. That keeps them in one order on every rank.
        self._turn = threading.Lock()
        self._open: list[Flight] = []
        self._streams = StreamOrder()
        self._side: dict[str, Any] = {}  # by device, the stream of what is queued there
        self._pause = SHORTEST_SLEEP_S
        self._is_stopped = False
        self._num_awaiting = 0
        self._counting = threading.RLock()  # a signal handler of the script's may wait, too
        self._thread = ProgressThread(self._take_turn, name=f"{name}.progress")
        weakref.finalize(self, self._thread.close, should_join=False)

    # In the user's thread.

    def post(self, flight: Flight, marks: list[Any]) -> None:
        """Put something on its way, after the events ``marks`` on its device; returns at once."""
        self._queue.append((flight, marks))
        if self.is_queued:
            with self._turn:
                self._advance()
        else:
            self._thread.wake()

    def under_way(self) -> list[Flight]:
        """Return what is under way, or queued where nothing is; a look, to be told in errors."""
        return self._open.copy() or [flight for flight, _ in self._queue.copy()]

    def wait(
        self,
        is_over: Callable[[], bool],
        *,
        timeout_s: float,
        too_late: Callable[[], Exception],
        meanwhile: Callable[[], None] | None = None,
        pauses: Callable[[float], float] | None = None,
    ) -> None:
        """Move things on in this thread until ``is_over``; raise ``too_late()`` at the limit.

        ``meanwhile`` is called once all that is queued has begun. None moves on before it returns,
        so it must be short. ``pauses`` says how long to sleep after so many seconds of waiting.
        """
        # From here the thread leaves its turns to this one: two threads that poll would fight for
        # the interpreter's lock, and waking one takes as long as a small exchange.
        with self._counting:
            self._num_awaiting += 1
        try:
            with waiting():
                self._move_until(is_over, timeout_s, too_late, meanwhile, pauses)
        finally:
            with self._counting:
                self._num_awaiting -= 1
            if self._num_awaiting == 0 and (self._open or self._queue) and not self.is_queued:
                self._thread.wake()

    def _move_until(
        self,
        is_over: Callable[[], bool],
        timeout_s: float,
        too_late: Callable[[], Exception],
        meanwhile: Callable[[], None] | None,
        pauses: Callable[[float], float] | None,
    ) -> None:
        began = time.monotonic()
        while True:
            left_s = timeout_s - (time.monotonic() - began)
            if left_s <= 0 and not is_over():
                raise too_late()
            pause: float | None = 0.0
            # Who has the turn may be at its own limit, as in the start of an operation, and its
            # error says more.
            if self._turn.acquire(timeout=max(0.0, left_s) + _LAST_WORD_S):
                try:
                    pause = self._advance()
                finally:
                    self._turn.release()
                if meanwhile is not None and not self._is_stopped:
                    call, meanwhile = meanwhile, None
                    call()
                    pause = 0.0
            if is_over():
                self.follow()
                return
            if pauses is not None:
                pause = pauses(time.monotonic() - began)
            time.sleep(pause or 0.0)  # at least lets the other thread have the lock

    def in_turn(
        self,
        call: Callable[[], None],
        *,
        timeout_s: float,
        too_late: Callable[[], Exception],
    ) -> None:
        """Call something while nobody moves anything on; raise ``too_late()`` at the limit."""
        # As in ``wait``: who has the turn may be at its own limit, and its error says more.
        if not self._turn.acquire(timeout=timeout_s + _LAST_WORD_S):
            raise too_late()
        try:
            call()
        finally:
            self._turn.release()

    def follow(self) -> None:
        """Let what this thread queues on devices come after all that is queued by now."""
        self._streams.follow()
        for device, side in self._side.items():
            current_stream(device).wait_stream(side)

    def add(self, device: str, lane: Lane) -> None:
        """Take what goes on a lane, and keep the order of what is queued on its device."""
        self.is_queued |= lane.is_queued
        self.has_stream |= lane.has_stream
        self._streams.add(device)

    def stop(self) -> None:
        """Move nothing on any more; from any thread."""
        self._is_stopped = True

    def close(self) -> None:
        """End the thread; what is in flight is given up."""
        self._thread.close()

    # In the thread that has the turn: the own one, or the user's while that waits.

    def _take_turn(self) -> float | None:
        # Never waited for: who has it does all there is to do. If an interrupt has ended that
        # thread's wait between taking the turn and giving it back, nobody gives it back.
        if not self._turn.acquire(blocking=False):
            return None
        try:
            return None if self._num_awaiting else self._advance()
        finally:
            self._turn.release()

    def _advance(self) -> float | None:
        """Do what can be done without waiting; return when to come again, None when all is done."""
        # All that is queued begins before anything is polled: what is not on the wire yet is what
        # others wait for.
        before = len(self._open)
        has_begun = has_arrived = False
        # Also where nothing is left to do: what the thread before has queued comes first.
        self._streams.take()
        # Mostly nothing has come, and ranks that share cores take time from each other by asking:
        # more than that costs only where there is something to do.
        if self._queue or any(map(self._has_news, self._open)):
            with torch.no_grad():
                while self._queue and not self._is_stopped:
                    has_begun = True
                    flight, marks = self._queue.popleft()
                    self._open.append(flight)
                    if not self._done_by(flight, functools.partial(self._begin, flight, marks)):
                        self._open.remove(flight)
                if not self._is_stopped:
                    left = [each for each in self._open if self._moves_on(each)]
                    has_arrived = len(left) < len(self._open)
                    self._open = left
        if self._is_stopped or not (self._open or self._queue):
            return None
        if not self._num_awaiting:
            return _UNAWAITED_SLEEP_S
        # Short sleeps right after something has moved, as the next step is then often close.
        has_moved = has_begun or has_arrived or before != len(self._open)
        self._pause = SHORTEST_SLEEP_S if has_moved else min(self._pause * 1.5, LONGEST_SLEEP_S)
        return self._pause

    def _has_news(self, flight: Flight) -> bool:
        try:
            return flight.has_news
        except BaseException:  # ``advance`` meets it, too, and says where
            return True

    def _begin(self, flight: Flight, marks: list[Any]) -> None:
        with self._on_side(flight.device):
            for mark in marks:
                current_stream(flight.device).wait_event(mark)
            flight.begin()

    def _moves_on(self, flight: Flight) -> bool:
        """Move one on; say whether it is under way still."""
        arrived = False

        def advance() -> None:
            nonlocal arrived
            with self._on_side(flight.device):
                arrived = flight.advance()

        return self._is_stopped or (self._done_by(flight, advance) and not arrived)

    def _done_by(self, flight: Flight, call: Callable[[], None]) -> bool:
        """Call something of a flight; let it know of an error, and say whether there was none."""
        try:
            call()
        except BaseException as error:
            flight.failed(locate(error, place) if (place := flight.place) else error)
            if not isinstance(error, Exception):  # as when the user interrupts
                raise
            return False
        return True

    def _on_side(self, device: str) -> AbstractContextManager[Any]:
        """Queue on a stream of our own what is queued, so that it runs beside the script's."""
        if not (self.has_stream and device.startswith("cuda")):
            return nullcontext()
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(torch.device(device))
        return torch.cuda.stream(self._side[device])
