"""Streams of a GPU without one: what must have run before what a thread queues next."""

from __future__ import annotations

import threading

import pytest

from loft_hvd.pipeline import allreduce, engine, flights, streams

__all__ = ["FakeStream", "FakeStreams"]


class FakeStream:
    """Knows what is queued on it, and what that waits for.

    Attributes:
        before: what has run before anything that is queued from now on.
    """

    def __init__(self) -> None:
        self.before: frozenset[str] = frozenset()

    def queue(self, what: str) -> None:
        """Queue some work."""
        self.before |= {what}

    def record_event(self) -> frozenset[str]:
        return self.before

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def wait_stream(self, other: FakeStream) -> None:
        self.before |= other.before


class FakeStreams:
    """Gives each thread a stream of its own, and the CPU's tensors one of those."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own = threading.local()
        for module in (allreduce, engine, flights, streams):
            monkeypatch.setattr(module, "current_stream", lambda device: self.current)

    @property
    def current(self) -> FakeStream:
        """The calling thread's stream; it can be set, as by ``torch.cuda.stream``."""
        if not hasattr(self._own, "stream"):
            self._own.stream = FakeStream()
        stream: FakeStream = self._own.stream
        return stream

    @current.setter
    def current(self, stream: FakeStream) -> None:
        self._own.stream = stream
