"""The heartbeat's lines and connections: what travels, and who is cut off."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from loft_hvd.transport.base import Channel
from loft_hvd.transport.heartbeat.links import Line, Link, open_links
from loft_hvd.transport.local import LocalTransport, run_ranks


@pytest.mark.parametrize("text", ["", "a b  c", "line\nbreak", "ü" * 10, "x" * 20_000])
def test_lines_keep_their_words_and_their_limit(text: str) -> None:
    data = Line("failed", 3, 1.5, text).encode()
    assert data.count(b"\n") == 1
    line = Line.parse(data[:-1])
    assert line == Line("failed", 3, 1.5, text[:12_000].replace("\n", " "))


@pytest.mark.parametrize(
    "data", [b"", b"beat", b"beat x 0 ", b"beat 1 y ", b"exec 1 0 x", b"\x80\x04\x95 1 2 3"]
)
def test_what_does_not_parse_is_dropped(data: bytes) -> None:
    assert Line.parse(data) is None


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
        sender.send(Line("beat", 1, 0.0, "x" * 9000))  # until the buffer is full
    while receiver.receive():
        pass
    sender.send(Line("left", 1))
    assert receiver.receive()[-1] == Line("left", 1)
    sender.close()
    receiver.close()


@pytest.mark.parametrize("world_size", [2, 5])
def test_links_connect_all_ranks_and_ignore_strangers(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalTransport.broadcast

    def broadcast(self: LocalTransport, buffer: torch.Tensor, *, name: str) -> object:
        if self.rank == 0:  # someone else is there first, with a wrong token
            self.stranger = socket.create_connection(  # type: ignore[attr-defined]
                ("127.0.0.1", int(buffer[0]))
            )
            self.stranger.sendall(  # type: ignore[attr-defined]
                Line("hello", 1, 0.0, "123 1 2 3 stranger").encode()
            )
        return real(self, buffer, name=name)

    monkeypatch.setattr(LocalTransport, "broadcast", broadcast)

    def work(transport: LocalTransport) -> list[int]:
        links, processes = open_links(Channel(transport, "links", 10))
        assert {process.pid for process in processes.values()} == {os.getpid()}
        if transport.rank == 0:
            for link in links.values():
                link.send(Line("beat", 0, 0.0, "x"))
        else:
            line = links[0].wait_line(10)
            assert line == Line("beat", 0, 0.0, "x")
        found = sorted(links)
        for link in links.values():
            link.close()
        if transport.rank == 0:
            stranger = transport.stranger  # type: ignore[attr-defined]
            assert stranger.recv(1) == b""  # cut off
            stranger.close()
        return found

    found = run_ranks(world_size, work)
    assert found == [list(range(1, world_size))] + [[0]] * (world_size - 1)
