"""Links that are lost and made again, and why a wait for messages ends; without a thread."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from loft_hvd.failures.connections import Connections, Wakeup
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.process import TERM


class Pair:
    """This rank's connections, and the far end of its link to rank 1."""

    def __init__(self) -> None:
        self.far: list[Link] = []
        self.near = Connections({1: self.link()}, period_s=60.0)
        self.near.open()
        assert self.near.watch(1)

    def link(self) -> Link:
        """Return a new link, whose far end is the last of ``far``."""
        ours, theirs = socket.socketpair()
        self.far.append(Link(theirs))
        return Link(ours)

    def wait(self) -> Wakeup:
        return self.near.wait(0.0, is_searching=False)

    def heard(self) -> list[str]:
        """Return the kinds of what has come to the newest far end, but for pulses."""
        return [each.kind for each in self.far[-1].receive() if each.kind != "pulse"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.near.close()
    for link in made.far:
        link.close()


def test_only_the_last_words_are_said_again_on_a_new_link(pair: Pair) -> None:
    pair.near.say(Message("beat", 0), to=1)
    pair.near.say_at_last(Message("failed", 0, 0.0, "no"))
    assert pair.heard() == ["beat", "failed"]
    pair.near.replace(1, pair.link())
    pair.near.say_again(1)
    assert pair.heard() == ["failed"]


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        (b"", Wakeup()),
        (b"!", Wakeup(is_woken=True)),
        (b"!" + TERM + b"!", Wakeup(is_woken=True, is_told=True)),
    ],
)
def test_a_wait_tells_who_has_ended_it(signs: bytes, expected: Wakeup, pair: Pair) -> None:
    pair.near.waker.sendall(signs)
    assert pair.wait() == expected
    assert pair.wait() == Wakeup()
    pair.far[0].send(Message("beat", 1))
    assert pair.wait() == Wakeup(ranks=(1,))


def test_a_link_that_has_ended_is_lost_once_what_was_said_before_is_read(pair: Pair) -> None:
    pair.far[0].send(Message("left", 1))
    pair.far[0].close()
    assert not pair.near.is_lost(1)
    assert pair.wait() == Wakeup(ranks=(1,))
    assert pair.near.receive(1) == [Message("left", 1)]
    assert pair.near.is_lost(1)
    assert pair.near.receive(1) == []
    pair.near.say(Message("beat", 0), to=1)  # goes nowhere
    assert pair.wait() == Wakeup()
    pair.near.replace(1, pair.link())
    assert pair.near.watch(1)
    pair.far[-1].send(Message("beat", 1))
    assert pair.wait() == Wakeup(ranks=(1,))
