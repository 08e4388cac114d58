"""Who is connected to this rank: its links, which may be lost and made again.

Rank 0 has a link to every other rank, these have one to rank 0. What is said here reaches whom the
links lead to; what comes is for ``observer.py``.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from loft_hvd._native import extension
from loft_hvd.failures.handshake import Caller, LinkMaker, NewLink
from loft_hvd.failures.links import PULSE, Link, Message
from loft_hvd.failures.process import TERM

__all__ = ["Connections", "ReadClock", "Wakeup"]


class ReadClock:
    """The time at which links were read last, for a diagnosis.

    A process may be kept from running between reading and judging. What others have said
    meanwhile is not read yet: by this clock no time has passed.
    """

    def __init__(self) -> None:
        self._now = time.monotonic()

    def __call__(self) -> float:
        return self._now

    def read(self) -> None:
        """Note that links are read now."""
        self._now = time.monotonic()


class _Pulse(Protocol):
    """The extension's ``Pulse``."""

    def add(self, descriptor: int) -> None: ...
    def remove(self, descriptor: int) -> None: ...
    def stop(self) -> None: ...


def _make_pulse(period_s: float) -> _Pulse | None:
    """Return what beats without the interpreter, or None where the extension is not built."""
    make = getattr(extension(), "Pulse", None)  # nor in one of an older checkout
    pulse: _Pulse | None = None if make is None else make(period_s, PULSE)
    return pulse


@dataclass(frozen=True)
class Wakeup:
    """Why a wait for messages has ended."""

    ranks: tuple[int, ...] = ()  # whose links can be read
    is_woken: bool = False  # whether a thread of this process has called ``wake``
    is_told: bool = False  # whether this process is told to end, by SIGTERM


class Connections:
    """This rank's links. Any thread may say something or wake; one does the rest, and closes all.

    Args:
        links: the links there are, by rank.
        maker: how ranks that have lost their link come to another; None for links of one life.
        period_s: seconds between two pulses, on every link.
    """

    def __init__(
        self, links: Mapping[int, Link], *, maker: LinkMaker | None = None, period_s: float
    ) -> None:
        self._links = dict(links)
        self._maker = maker
        self._last_words: list[Message] = []
        self._pulse = _make_pulse(period_s)
        self._selector = selectors.DefaultSelector()
        # What is written to the waker, also from a signal handler of C, ends a wait.
        self.waker, self._sleeper = socket.socketpair()

    # Any thread.

    def say(self, message: Message, *, to: int) -> None:
        """Say something to a rank, which it loses if its link is lost."""
        self._links[to].send(message)

    def say_to_all(self, message: Message) -> None:
        """Say something to everybody there is a link to."""
        for link in list(self._links.values()):
            link.send(message)

    def say_at_last(self, message: Message) -> None:
        """Say to all what is said again on every new link."""
        self._last_words.append(message)
        self.say_to_all(message)

    def wake(self) -> None:
        """End a wait for messages, this one or the next."""
        with suppress(OSError):  # closed, or so full that it wakes anyway
            self.waker.send(b"!", socket.MSG_DONTWAIT)

    # The thread that reads.

    def __iter__(self) -> Iterator[int]:
        """Go through the ranks that there are links to, lost ones too."""
        return iter(self._links)

    def open(self) -> None:
        """Begin to wait for wakers and new links; ``watch`` adds the links there are."""
        self._selector.register(self._sleeper, selectors.EVENT_READ)
        if self._maker is not None:
            self._selector.register(self._maker, selectors.EVENT_READ)

    def watch(self, rank: int) -> bool:
        """Wait for what a rank says from now on; without success its link is lost."""
        link = self._links[rank]
        try:
            self._selector.register(link, selectors.EVENT_READ, data=rank)
        except OSError:  # the kernel watches no more
            link.close()
            return False
        if self._pulse is not None:
            self._pulse.add(link.fileno())
        return True

    def is_lost(self, rank: int) -> bool:
        """Say whether the link to a rank has ended, and there is no new one yet."""
        return self._links[rank].fileno() < 0

    def wait(self, seconds: float, *, is_searching: bool) -> Wakeup:
        """Wait until something has come, or a new link is to be made where this rank searches."""
        if self._maker is not None and is_searching:
            seconds = min(seconds, self._maker.due_s())
        ranks, signs = [], None
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._sleeper:
                signs = self._sleeper.recv(64)
            elif key.fileobj is not self._maker:
                ranks.append(key.data)
        return Wakeup(tuple(ranks), signs is not None, signs is not None and TERM in signs)

    def receive(self, rank: int) -> list[Message]:
        """Return what a rank has said; its link may be lost behind that."""
        link = self._links[rank]
        messages = [] if self.is_lost(rank) else link.receive()
        if link.is_closed:
            self._drop(rank)
        return messages

    def new_links(self, *, is_searching: bool) -> list[NewLink]:
        """Go on with making links, without waiting; returns those made."""
        if self._maker is None:
            return []
        if is_searching:
            return self._maker.poll()
        assert isinstance(self._maker, Caller)  # rank 0 always searches
        self._maker.hang_up()
        return []

    def replace(self, rank: int, link: Link) -> None:
        """Close a rank's old link and take a new one, which is not watched yet."""
        self._drop(rank)
        self._links[rank] = link

    def say_again(self, rank: int) -> None:
        """Say on a new link what the old one may have lost."""
        for message in self._last_words:
            self._links[rank].send(message)

    def close(self) -> None:
        """Close everything."""
        if self._pulse is not None:
            self._pulse.stop()
        if self._maker is not None:
            self._maker.close()
        for link in self._links.values():
            link.close()
        self._selector.close()
        self.waker.close()
        self._sleeper.close()

    def _drop(self, rank: int) -> None:
        """Close the link to a rank, which stays in its place until there is another."""
        link = self._links[rank]
        if link.fileno() < 0:
            return
        self._selector.unregister(link)
        if self._pulse is not None:
            self._pulse.remove(link.fileno())
        link.close()
