"""The heartbeat's lines and connections: what travels, and what is cut off."""

from __future__ import annotations

import socket
import threading

import pytest

from loft_hvd.failures.links import PULSE, Link, Message


@pytest.mark.parametrize("text", ["", "a b  c", "line\nbreak", "ü" * 10, "x" * 20_000])
def test_lines_keep_their_words_and_their_limit(text: str) -> None:
    data = Message("failed", 3, 1.5, text).encode()
    assert data.count(b"\n") == 2
    line = Message.parse(data[1:-1])
    assert line == Message("failed", 3, 1.5, text[:12_000].replace("\n", " "))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"beat",
        b"beat x 0 ",
        b"beat 1 y ",
        b"beat 1 nan ",
        b"exec 1 0 x",
        b"\x80\x04\x95 1 2 3",
    ],
)
def test_what_does_not_parse_is_dropped(data: bytes) -> None:
    assert Message.parse(data) is None


def test_a_stranger_that_sends_no_lines_is_cut_off() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(b"x" * 40_000)
    assert link.receive() == []
    assert link.is_closed
    theirs.close()
    link.close()


def test_a_line_that_is_cut_off_does_not_spoil_the_next() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Link(ours), Link(theirs)
    for _ in range(1000):
        sender.send(Message("beat", 1, 0.0, "x" * 9000))  # until the buffer is full
    while receiver.receive():
        pass
    ours.sendall(PULSE)  # from a thread of its own, between any two sends
    sender.send(Message("left", 1))
    assert receiver.receive()[-2:] == [Message("pulse", 0), Message("left", 1)]
    sender.close()
    receiver.close()


def test_a_link_is_not_closed_while_a_thread_sends() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with link._lock:  # as in the middle of ``send``
        closing = threading.Thread(target=link.close)
        closing.start()
        closing.join(0.05)
        assert link.fileno() >= 0
    closing.join(10)
    assert link.fileno() < 0
    theirs.close()
