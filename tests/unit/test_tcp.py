"""What the kernel knows of this process's connections, asked without touching their sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from loft_hvd.transport import tcp
from loft_hvd.transport.addresses import own_addresses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux knows its connections")

Pair = tuple[socket.socket, socket.socket]


def connected(address: str) -> Pair:
    with socket.create_server((address, 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = connected("127.0.0.1")
    with one, other:
        yield one, other


def test_what_the_kernel_knows_of_a_connection(pair: Pair) -> None:
    one, other = pair
    reader = threading.Thread(target=lambda: list(iter(lambda: other.recv(2**16), b"")))
    reader.start()
    for _ in range(64):
        one.sendall(bytes(2**14))
    state = tcp.tcp_state(one.fileno())
    one.shutdown(socket.SHUT_WR)
    reader.join(20.0)
    assert state.is_established
    assert 0 < state.round_trip_s < 0.5
    assert state.num_sent >= 1  # of up to 64 kB each; others wait behind them
    assert state.num_sent_again <= state.num_sent


def test_what_is_acknowledged_waits_no_more_and_counts_as_arrived(pair: Pair) -> None:
    one, other = pair
    before = tcp.tcp_state(other.fileno())
    one.sendall(bytes(100))
    while tcp.tcp_state(one.fileno()).is_waiting:  # its kernel acknowledges, the process need not
        pass
    state = tcp.tcp_state(one.fileno())
    assert (state.num_acked, state.tries) == (101, 0)  # with the opening
    assert tcp.tcp_state(other.fileno()).num_arrived == before.num_arrived + 1


def test_what_a_process_does_not_read_waits_and_is_not_sent_in_vain(pair: Pair) -> None:
    """As of one that is stopped: its kernel answers, and has no room."""
    one, other = pair
    one.setblocking(False)
    with suppress(BlockingIOError):
        while one.send(bytes(2**16)):
            pass
    waiting = tcp.tcp_state(one.fileno())
    assert (waiting.is_waiting, waiting.tries) == (True, 0)
    assert other.recv(1) == b"\0"


@pytest.mark.parametrize(
    ("retransmits", "probes", "unacked", "unsent", "tries", "is_waiting"),
    [
        (0, 0, 0, 0, 0, False),
        (3, 0, 1, 0, 3, True),
        (0, 4, 0, 1, 4, True),  # no room, or no route: nothing was let go
        (0, 5, 0, 0, 5, False),  # probes of an idle connection
    ],
)
def test_how_often_a_kernel_tries_in_vain(
    retransmits: int,
    probes: int,
    unacked: int,
    unsent: int,
    tries: int,
    is_waiting: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = bytearray(160)
    info[:4] = 1, 0, retransmits, probes
    info[24:28], info[144:148] = (
        unacked.to_bytes(4, sys.byteorder),
        unsent.to_bytes(4, sys.byteorder),
    )
    monkeypatch.setattr(tcp, "_option", lambda *_: bytes(info))
    state = tcp.tcp_state(3)
    assert (state.is_established, state.tries, state.is_waiting) == (True, tries, is_waiting)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_connection_is_probed_while_it_is_asked_to_be(is_on: bool, pair: Pair) -> None:
    end = pair[0]
    assert tcp.probe(end.fileno(), is_on=True)
    assert tcp.probe(end.fileno(), is_on=is_on) == (not is_on)
    assert bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == is_on
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


def test_loopback_and_what_listens_are_no_links_between_hosts(pair: Pair) -> None:
    own = {each.fileno() for each in pair}
    with socket.create_server(("0.0.0.0", 0)) as server:
        own.add(server.fileno())
        found = list(tcp.host_links())
    assert not own & {each.descriptor for each in found}
    assert not any(ipaddress.ip_address(each.peer_address).is_loopback for each in found)


def test_a_connection_is_found_once_however_many_descriptors_it_has() -> None:
    addresses = own_addresses()
    if not addresses:
        pytest.skip("this host has no address but loopback's")
    one, other = connected(addresses[0])
    with one, other, one.dup():
        local, peer = ("{} {}".format(*end.getsockname()) for end in (one, other))
        found = [each for each in tcp.host_links() if each.local == local]
        assert [(each.peer, each.is_there()) for each in found] == [(peer, True)]


def test_addresses_of_both_ends_are_those_that_python_knows(pair: Pair) -> None:
    for end in pair:
        for name in ("getsockname", "getpeername"):
            host, port = getattr(end, name)()
            assert tcp._address(end.fileno(), name) == f"{host} {port}"


def test_an_address_of_version_4_is_the_same_behind_version_6() -> None:
    head = int(socket.AF_INET6).to_bytes(2, sys.byteorder) + (5).to_bytes(2, "big") + bytes(4)
    mapped = head + ipaddress.ip_address("::ffff:10.0.0.1").packed
    assert tcp._text_of(mapped) == "10.0.0.1 5"
    assert tcp._text_of(head + ipaddress.ip_address("fe80::1").packed) == "fe80::1 5"
    with pytest.raises(OSError, match="family"):
        tcp._text_of(bytes(128))


def test_a_socket_of_anothers_blocks_as_before(pair: Pair) -> None:
    socket.setdefaulttimeout(5.0)
    try:
        list(tcp.host_links())
        tcp.tcp_state(pair[0].fileno())
    finally:
        socket.setdefaulttimeout(None)
    assert all(os.get_blocking(each.fileno()) for each in pair)


def test_a_round_trip_that_nobody_has_timed_is_not_long() -> None:
    with socket.socket() as end:  # to nobody
        assert tcp.tcp_state(end.fileno()) == tcp.TcpState()
