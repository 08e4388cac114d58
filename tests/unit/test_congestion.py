"""BBR for links that are long or lossy, on real connections of this process."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loft_hvd.transport import congestion
from loft_hvd.transport.base import Channel
from loft_hvd.transport.congestion import CongestionControl, LinkQuality, links_between
from loft_hvd.transport.local import LocalTransport, run_ranks
from loft_hvd.transport.tcp import HostLink
from tests.support.clock import Clock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux knows its connections")

LONG = LinkQuality(0.05, 100, 0)


def control_of(end: socket.socket) -> str:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def connection_of(end: socket.socket) -> HostLink:
    name = os.readlink(f"/proc/self/fd/{end.fileno()}")
    return HostLink(end.fileno(), name, "10.0.0.1 1", "10.0.0.2 2")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection that have reno, which every process may take."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            for each in (one, other):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            yield one, other


needs_bbr = pytest.mark.skipif(not congestion.has_bbr(), reason="this kernel has no BBR loaded")


@pytest.mark.parametrize(
    ("quality", "needs"),
    [
        (LinkQuality(0.05, 20, 0), True),
        (LinkQuality(0.05, 19, 0), False),  # the handshake's may be slow by chance
        (LinkQuality(0.005, 100, 0), True),
        (LinkQuality(0.0049, 10**6, 0), False),
        (LinkQuality(0.003, 10**4, 50), True),
        (LinkQuality(0.003, 10**4, 49), False),
        (LinkQuality(0.003, 999, 500), False),  # so few say nothing
        (LinkQuality(0.001, 10**4, 260), False),  # full queues on a short way, where BBR loses
        (LinkQuality(0.0, 0, 0), False),
    ],
)
def test_which_links_need_it(quality: LinkQuality, needs: bool) -> None:
    assert quality.needs_bbr == needs


@needs_bbr
@pytest.mark.parametrize(
    ("wish", "quality", "taken"),
    [
        ("auto", LONG, "bbr"),
        ("auto", LinkQuality(0.001, 10**6, 10**5), "reno"),
        ("bbr", LinkQuality(0.0001, 0, 0), "bbr"),
        ("off", LONG, "reno"),
    ],
)
def test_the_senders_end_takes_it(
    pair: Any, wish: str, quality: LinkQuality, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(congestion, "_quality_of", lambda _: quality)
    one, other = pair
    CongestionControl([connection_of(one)], rank=0, wish=wish).look()
    assert (control_of(one), control_of(other)) == (taken, "reno")
    one.sendall(b"still here")
    assert other.recv(10) == b"still here"


@needs_bbr
def test_a_link_that_grows_lossy_is_seen_at_a_later_look(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [LinkQuality(0.003, 10**4, 0)]
    monkeypatch.setattr(congestion, "_quality_of", lambda _: found[0])
    clock = Clock(100.0)
    connections = CongestionControl([connection_of(pair[0])], rank=0, wish="auto", clock=clock)
    connections.look()
    found[0] = LinkQuality(0.003, 10**5, 10**3)
    clock.now += 1.0
    connections.look()  # not so soon
    assert control_of(pair[0]) == "reno"
    clock.now += 4.0
    connections.look()
    assert control_of(pair[0]) == "bbr"


def test_a_kernel_that_refuses_is_told_of_once(
    pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(congestion, "_quality_of", lambda _: LONG)
    monkeypatch.setattr(congestion, "_BBR", b"no such one")
    ends = [connection_of(each) for each in pair]
    connections = CongestionControl(ends, rank=3, wish="auto", clock=(clock := Clock()))
    for _ in range(3):
        connections.look()
        clock.now += 10.0
    assert caplog.text.count("modprobe tcp_bbr") == 1
    assert "rank 3: the link to 10.0.0.2 (50.0 ms" in caplog.text


def test_a_connection_that_is_closed_is_left_alone(
    pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(congestion, "_quality_of", lambda _: LONG)
    caplog.set_level(logging.INFO)
    one, other = pair
    gone = connection_of(one)
    one.close()
    reused = HostLink(
        other.fileno(), gone.name, "10.0.0.1 1", "10.0.0.2 2"
    )  # its descriptor is another's now
    CongestionControl([gone, reused], rank=0, wish="auto").look()
    assert control_of(other) == "reno"
    assert not caplog.records


def test_connections_between_ranks_are_found_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = {
        0: [
            HostLink(3, "a", "10.0.0.1 40000", "10.0.0.2 555"),  # to rank 1
            HostLink(4, "b", "10.0.0.1 40001", "10.0.0.9 443"),  # a store of data
        ],
        1: [HostLink(7, "c", "10.0.0.2 555", "10.0.0.1 40000")],
        2: [],
    }
    own = threading.local()
    monkeypatch.setattr(congestion, "host_links", lambda: iter(links[own.rank]))

    def work(end: LocalTransport) -> list[int]:
        own.rank = end.rank
        return [each.descriptor for each in links_between(Channel(end, "x"))]

    assert run_ranks(3, work) == [[3], [7], []]
