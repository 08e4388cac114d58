"""A store's server holds no more calls, bytes, connections and memory than its bounds."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from loft_hvd.errors import DataError
from loft_hvd.store.gate import Gate
from loft_hvd.store.shelf import Shelf

flight = pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")
from loft_hvd.store.peers import Peers, Received, Server, sign_ticket  # noqa: E402 - the extra
from tests.support.processes import (  # noqa: E402 - as above
    arguments_of,
    num_open,
    num_threads,
    own_bytes,
    where_shown,
)

KEY = bytes(range(1, 33))


def test_calls_beyond_the_bound_are_refused() -> None:
    gate = Gate(most_calls=2)
    refused = pytest.raises(DataError, match="2 calls at once")
    with gate.call(), gate.call(), refused, gate.call():
        pass
    with gate.call():
        assert gate.num_calls == 1


def test_answers_wait_for_room() -> None:
    gate = Gate(most_bytes=100, longest_wait_s=20.0)
    first = ExitStack()
    first.enter_context(gate.room(70))
    went: list[int] = []

    def answer() -> None:
        with gate.room(40):
            went.append(gate.num_bytes)

    thread = threading.Thread(target=answer)
    thread.start()
    with gate.room(30):  # fits beside the first
        assert gate.num_bytes == 100
    assert went == []
    first.close()
    thread.join(20)
    assert went == [40]
    assert gate.num_bytes == 0


def test_an_answer_above_the_bound_goes_alone() -> None:
    gate = Gate(most_bytes=100, longest_wait_s=0.0)
    with gate.room(5000), pytest.raises(DataError, match="ask again"), gate.room(1):
        pass
    assert gate.largest == 5000


@pytest.fixture
def server() -> Iterator[Server]:
    shelf = Shelf(400, memory_bytes=50 << 20)
    for sample in range(400):
        shelf.add(sample, bytes([sample % 256]) * 100_000)
    server = Server(shelf, host="127.0.0.1", key=KEY, owner=0)
    yield server
    server.close()


def test_a_call_that_is_not_do_get_is_refused_before_it_is_read(server: Server) -> None:
    host, port = server.address()
    client = flight.FlightClient(f"grpc://{host}:{port}")
    before = num_threads(server.process.pid)
    for _ in range(30):  # each would have a thread wait for the first message
        with pytest.raises(flight.FlightUnauthenticatedError, match="do_get alone"):
            client.do_exchange(flight.FlightDescriptor.for_path("x"))[1].read_chunk()
    assert num_threads(server.process.pid) - before < 15


def test_readers_that_stop_reading_hold_a_bound_of_memory_and_end_at_their_limit(
    server: Server,
) -> None:
    host, port = server.address()
    client = flight.FlightClient(f"grpc://{host}:{port}")
    ticket = flight.Ticket(sign_ticket(KEY, 0, range(400)))  # 40 MB
    options = flight.FlightCallOptions(timeout=3.0)
    frozen = [client.do_get(ticket, options) for _ in range(12)]
    found = Peers([server.address()], KEY, timeout_s=20.0).fetch({0: [1, 2, 3]})
    assert own_bytes(server.process.pid) < 256e6
    assert len(found) in (0, 3)  # in time, or refused: never wrong
    time.sleep(3.0)  # the limit of the calls that nobody reads
    assert len(Peers([server.address()], KEY, timeout_s=20.0).fetch({0: [1, 2, 3]})) == 3
    del frozen


@pytest.fixture
def descriptors() -> Iterator[int]:
    """Let this process, and what it starts, have more of them than a server takes connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may have {hard} descriptors here (ulimit -Hn); {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_are_bounded_and_the_server_works_on_once_they_end(
    descriptors: int, server: Server
) -> None:
    place, pid = server.address(), server.process.pid
    before = num_open(pid)
    most, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert 1000 < most - before < 1100 < descriptors
    strangers: list[socket.socket] = []
    until = time.monotonic() + 30
    try:
        while len(strangers) < most + 100:  # the last ones wait until one of the first ends
            strangers.append(socket.create_connection(place, timeout=10))
        while num_open(pid) < most and time.monotonic() < until:
            time.sleep(0.05)
        assert num_open(pid) == most
    finally:
        for stranger in strangers:
            stranger.close()
    found: dict[int, Received] = {}
    while not found and time.monotonic() < until:
        found = Peers([place], KEY, timeout_s=5.0).fetch({0: [1]})
    assert len(found) == 1


def test_a_server_that_was_fed_too_much_starts_anew_with_the_same_samples(server: Server) -> None:
    host, port = server.address()
    client = flight.FlightClient(f"grpc://{host}:{port}")
    before = arguments_of(server.process.pid)
    with pytest.raises(Exception, match=r"navailable|nauthenticated|reset"):
        client.do_get(
            flight.Ticket(bytes(400 << 20)), flight.FlightCallOptions(timeout=20.0)
        ).read_all()
    until = time.monotonic() + 30
    while len(Peers([server.address()], KEY, timeout_s=20.0).fetch({0: [7]})) != 1:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert server.process.poll() is None
    after = arguments_of(server.process.pid)
    assert len(after) == len(before) + 1  # it has found its state, and is the same process
    assert where_shown(KEY, server.process.pid) == []
