"""How ranks come to their links: they do whoever else calls, and nobody else does."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from loft_hvd.errors import TransportError
from loft_hvd.failures.handshake import (
    Caller,
    Listener,
    NewLink,
    StrangerLimits,
    open_links,
)
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.process import RankProcess
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks

KEYS = {1: b"1" * 32, 2: b"2" * 32}
HOST = RankProcess(7, 100, 5, "node 7")


class Clock:
    """Seconds that pass only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class CpuClock:
    """Seconds of CPU: a millisecond passes between two looks."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Street:
    """Rank 0's listener, and everybody who calls it; closed in the end."""

    clock: Clock = field(default_factory=Clock)
    cpu_clock: CpuClock = field(default_factory=CpuClock)
    listener: Listener = field(init=False)
    ends: list[Callable[[], None]] = field(default_factory=list)
    met: list[NewLink] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = Listener(
            KEYS, HOST, ["127.0.0.1"], clock=self.clock, cpu_clock=self.cpu_clock
        )
        self.ends.append(self.listener.close)

    def caller(self, rank: int, key: bytes | None = None) -> Caller:
        own = RankProcess(8, 100 + rank, 6, f"node {rank}")
        made = Caller(self.listener.addresses, rank, key or KEYS[rank], own, clock=self.clock)
        self.ends.append(made.close)
        return made

    def stranger(self, data: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.listener.addresses[0])
        self.ends.append(made.close)
        made.sendall(data)
        return made

    def poll(self, caller: Caller | None = None, *, rounds: int = 20) -> list[NewLink]:
        """Let both sides go on; returns the caller's new links, the listener's are in ``met``."""
        found = []
        for _ in range(rounds):
            found += [] if caller is None else caller.poll()
            self.met += self.listener.poll()
            if found and self.met:
                break
            time.sleep(0)  # let the kernel deliver
        return found


@pytest.fixture
def street() -> Iterator[Street]:
    """Return a listener that only tests speak to."""
    made = Street()
    yield made
    for end in reversed(made.ends):
        end()
    for met in made.met:
        met.link.close()


def is_cut_off(end: socket.socket) -> bool:
    """Say whether the other side has closed, after what it may have sent before."""
    end.settimeout(5)
    try:
        while end.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_a_rank_and_rank_0_learn_where_the_other_runs(street: Street) -> None:
    (there,) = street.poll(street.caller(2))
    (here,) = street.met
    assert (there.rank, there.process) == (0, HOST)
    assert (here.rank, here.process) == (2, RankProcess(8, 102, 6, "node 2"))
    there.link.send(Message("beat", 2, 1.5, "x" * 9000))  # of full length from now on
    heard: list[Message] = []
    for _ in range(100):
        heard += here.link.receive()
    assert heard == [Message("beat", 2, 1.5, "x" * 9000)]
    there.link.close()


@pytest.mark.parametrize(("rank", "key"), [(1, b"x" * 32), (1, KEYS[2]), (2, KEYS[1])])
def test_a_rank_with_another_key_than_its_own_is_not_met(
    rank: int, key: bytes, street: Street
) -> None:
    assert street.poll(street.caller(rank, key)) == []
    assert street.met == []


def handshake(street: Street, rank: int) -> tuple[bytes, bytes]:
    """Return all that an honest rank sends to come in, as someone on the network sees it."""
    sent: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        real = Link.send

        def send(self: Link, message: Message) -> None:
            if message.kind in ("hello", "proof"):
                sent.append(message.encode())
            real(self, message)

        patch.setattr(Link, "send", send)
        for met in street.poll(street.caller(rank)):
            met.link.close()
    hello, proof = sent
    return hello, proof


@pytest.mark.parametrize("at_once", [True, False])
def test_what_was_overheard_makes_no_link(at_once: bool, street: Street) -> None:
    hello, proof = handshake(street, 1)
    (met,) = street.met
    assert not any(KEYS[1].hex().encode() in each or KEYS[1] in each for each in (hello, proof))
    thief = street.stranger(hello + proof if at_once else hello)
    street.poll()
    if not at_once:
        thief.sendall(proof)
        street.poll()
    assert street.met == [met]
    assert is_cut_off(thief)


def test_a_rank_proves_nothing_to_whom_it_does_not_know() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        caller = Caller([impostor.getsockname()], 1, KEYS[1], HOST)
        caller.poll()
        end, _ = impostor.accept()
        caller.poll()
        end.settimeout(5)
        assert end.recv(4096).startswith(b"\nhello 1 ")
        end.sendall(Message("challenge", 0, 0.0, f"{'a' * 32} {'b' * 64}").encode())
        end.sendall(Message("welcome", 0, 0.0, "7 100 5 node").encode())
        for _ in range(20):
            assert caller.poll() == []
            time.sleep(0.001)
        assert is_cut_off(end)  # and no proof came
        caller.close()
        end.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 600,
        b"x" * 10_000,
        b"hello 1 0 " + b"n" * 600 + b"\n",
        b"hello 9 0 nonce\n",
        b"proof 1 0 " + b"0" * 64 + b" 1 2 3 x\n",
        b"hello 1 0 a\nhello 1 0 b\n",
        b"beat 1 0 \n",
        b"\x80\x04\x95" * 300,
        b"nonsense\n",
        b"\n" * 100,
    ],
)
def test_who_says_anything_else_is_sent_away_at_once(data: bytes, street: Street) -> None:
    end = street.stranger(data)
    street.poll()
    assert street.listener.num_strangers == 0
    assert is_cut_off(end)


def test_a_stranger_that_speaks_in_drops_is_soon_sent_away(street: Street) -> None:
    end = street.stranger()
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    num_said = 0
    while num_said < 20 and (not num_said or street.listener.num_strangers):
        with suppress(ConnectionError):
            end.sendall(b"\n")
        num_said += 1
        time.sleep(0.002)
        street.poll(rounds=1)
    assert 2 < num_said < 20
    assert is_cut_off(end)


def test_what_rank_0_says_right_behind_its_welcome_is_read(street: Street) -> None:
    caller, long = street.caller(1), Message("beat", 0, 0.0, "x" * 10_000)
    real_send = Link.send

    def send(link: Link, message: Message) -> None:
        if message.kind == "welcome":
            link._socket.send(message.encode() + long.encode())
        else:
            real_send(link, message)

    with pytest.MonkeyPatch.context() as both:
        both.setattr(Link, "send", send)
        (there,) = street.poll(caller)
    assert there.messages == [long]
    there.link.close()


def test_strangers_have_two_seconds(street: Street) -> None:
    silent = street.stranger()
    street.poll()
    assert street.listener.num_strangers == 1
    assert street.listener.due_s() == 2.0
    street.clock.now += 1.9
    street.poll()
    assert street.listener.num_strangers == 1
    street.clock.now += 0.1
    street.poll()
    assert street.listener.num_strangers == 0
    assert is_cut_off(silent)


@pytest.mark.parametrize("data", [b"", b"hello 1 0 nonce\n"])
def test_strangers_are_few_and_a_rank_comes_through_them(data: bytes, street: Street) -> None:
    crowd = [street.stranger(data) for _ in range(300)]
    caller = street.caller(2)
    caller.poll()
    latecomers = [street.stranger(data) for _ in range(50)]
    (there,) = street.poll(caller, rounds=200)
    assert street.listener.num_strangers <= 64
    assert [met.rank for met in street.met] == [2]
    there.link.close()
    for end in crowd + latecomers:
        end.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_descriptors_listens_again_when_it_has_some(street: Street) -> None:
    early = street.stranger()
    street.poll()
    assert street.listener.num_strangers == 1
    caller = street.caller(1)
    caller.poll()  # it is connected as far as the kernel is concerned
    with no_descriptor_left():
        street.poll()  # a listener ended here once, by an OSError
        assert street.listener.num_strangers == 0  # what strangers held is given back
        assert 0 < street.listener.due_s() < 1
        street.poll()
    assert is_cut_off(early)
    street.clock.now += 1.0
    (there,) = street.poll(caller)
    assert [met.rank for met in street.met] == [1]
    there.link.close()


def test_a_kernel_that_watches_no_more_connections_is_survived(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, caller = street.stranger(), street.caller(1)
    street.poll()
    caller.poll()  # it is connected as far as the kernel is concerned

    def refuse(*args: object) -> None:
        raise OSError(28, "no watch left")

    with monkeypatch.context() as full:
        full.setattr(street.listener._selector, "register", refuse)
        street.poll()
        assert street.listener.num_strangers == 0
        street.clock.now += 1.0
        street.poll()  # it tries to listen again, in vain
    assert is_cut_off(early)
    street.clock.now += 1.0
    (there,) = street.poll(caller)
    assert [met.rank for met in street.met] == [1]
    there.link.close()


def test_a_caller_without_descriptors_calls_later(street: Street) -> None:
    caller = street.caller(1)
    with no_descriptor_left():
        assert caller.poll() == []
    street.clock.now += 1.0
    (there,) = street.poll(caller)
    there.link.close()


def test_a_caller_whose_call_is_not_watched_by_the_kernel_gives_it_up(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = street.caller(1)

    def refuse(*args: object) -> None:
        raise OSError(28, "no watch left")

    with monkeypatch.context() as full:
        full.setattr(caller._selector, "register", refuse)
        assert caller.poll() == []
    street.clock.now += 1.0
    (there,) = street.poll(caller)
    there.link.close()


def test_an_opening_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[Listener] = []
    real = Listener.__init__

    def note(self: Listener, *args: object, **options: object) -> None:
        listeners.append(self)
        real(self, *args, **options)  # type: ignore[arg-type]

    def fail(self: LocalTransport, *args: object, **options: object) -> None:
        raise TransportError("the keys are not carried")

    monkeypatch.setattr(Listener, "__init__", note)
    monkeypatch.setattr(LocalTransport, "alltoall", fail)

    def work(transport: LocalTransport) -> None:
        with pytest.raises(TransportError, match="not carried"):
            open_links(Channel(transport, "links", 10))

    run_ranks(2, work)
    (listener,) = listeners
    assert [server.fileno() for server in listener._servers] == [-1]


def test_a_caller_tries_every_address_until_one_answers(street: Street) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nowhere = gone.getsockname()
    caller = Caller([nowhere, street.listener.addresses[0]], 1, KEYS[1], HOST, clock=street.clock)
    street.ends.append(caller.close)
    assert street.poll(caller) == []
    assert caller.due_s() == 0.5
    street.clock.now += 0.5
    (there,) = street.poll(caller)
    there.link.close()


def test_the_limits_are_those_that_the_docs_name() -> None:
    assert StrangerLimits() == StrangerLimits(
        strangers=64, hello_s=2.0, pause_s=0.25, core_share=0.05, num_burst=16
    )


def test_in_training_a_crowd_takes_a_share_of_a_core_at_most(street: Street) -> None:
    street.listener.is_opening = False
    crowd = [street.stranger(b"x" * 600) for _ in range(200)]
    caller = street.caller(1)
    caller.poll()
    for _ in range(12):
        assert street.poll(caller, rounds=1) == []  # lets 16 in, and sends them away
        assert street.listener.due_s() == pytest.approx(0.019)  # a millisecond of work is 5 % then
        street.clock.now += 0.018
        assert street.poll(caller, rounds=1) == []  # lets nobody in yet
        assert street.listener.due_s() == pytest.approx(0.001)
        street.clock.now += 0.0011
    (there,) = street.poll(caller)
    there.link.close()
    assert all(is_cut_off(end) for end in crowd)


def test_only_what_strangers_cost_in_training_keeps_the_listener_shut(street: Street) -> None:
    for _ in range(40):
        street.stranger(b"x" * 600)
    street.poll()  # at the opening all are let in, whatever that costs
    street.listener.is_opening = False
    street.poll(rounds=1000)  # nobody is there
    street.stranger(b"x" * 600)
    street.poll(rounds=1)
    assert street.listener.due_s() == pytest.approx(0.019)


def test_a_caller_that_nobody_answers_waits_longer_each_time(street: Street) -> None:
    caller = street.caller(1)
    for answer_s in (2.0, 4.0, 8.0, 16.0, 16.0):
        caller.poll()  # calls
        caller.poll()  # is connected as far as the kernel is concerned
        assert caller.due_s() == pytest.approx(answer_s)
        street.clock.now += answer_s
        caller.poll()  # hangs up
    (there,) = street.poll(caller)
    there.link.close()
    street.clock.now += 0.5
    caller.poll()
    caller.poll()
    assert caller.due_s() == pytest.approx(2.0)


@pytest.mark.parametrize("world_size", [2, 5])
def test_links_connect_all_ranks_whoever_is_there_first(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalTransport.alltoall
    strangers: list[socket.socket] = []

    def alltoall(self: LocalTransport, send: object, *args: object, **options: object) -> object:
        if self.rank == 0:
            port = int(send.view(world_size, -1)[1, 1])  # type: ignore[attr-defined]
            for data in (b"", b"hello 1 0 123\n"):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(data)
        return real(self, send, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalTransport, "alltoall", alltoall)

    def work(transport: LocalTransport) -> list[int]:
        links = open_links(Channel(transport, "links", 10))
        assert {met.process.pid for met in links.made.values()} == {os.getpid()}
        found = sorted(links.made)
        links.close()
        return found

    found = run_ranks(world_size, work)
    assert found == [list(range(1, world_size))] + [[0]] * (world_size - 1)
    assert len(strangers) == 2
    assert all(is_cut_off(stranger) for stranger in strangers)
    for stranger in strangers:
        with suppress(OSError):
            stranger.close()


def test_nobody_waits_or_calls_where_rank_0_cannot_listen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # An address for documentation (RFC 5737), which no host has.
    monkeypatch.setattr(
        "loft_hvd.failures.handshake.listening_addresses", lambda *_, **__: ["192.0.2.1"]
    )

    def work(transport: LocalTransport) -> tuple[bool, int]:
        links = open_links(Channel(transport, "links", 2))
        links.close()
        return links.maker is None, len(links.made)

    assert run_ranks(3, work) == [(True, 0)] * 3
    assert "rank 0 cannot listen on ['192.0.2.1']" in caplog.text


def test_every_rank_learns_a_rank_at_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr("loft_hvd.failures.handshake.own_addresses", lambda *_: own.addresses)

    def work(transport: LocalTransport) -> dict[str, int]:
        # Ranks 1 and 2 are on one host, which has two networks.
        own.addresses = [["10.0.0.1"], ["10.0.0.2", "10.1.0.2"]][transport.rank > 0]
        links = open_links(Channel(transport, "links", 10))
        links.close()
        return links.ranks_at

    assert run_ranks(3, work) == [{"10.0.0.1": 0, "10.0.0.2": 1, "10.1.0.2": 1}] * 3


def test_every_rank_gets_its_own_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[int, bytes] = {}
    real = Caller.__init__

    def note(self: Caller, places: object, rank: int, key: bytes, *args: object) -> None:
        given[rank] = key
        real(self, places, rank, key, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Caller, "__init__", note)

    def work(transport: LocalTransport) -> None:
        open_links(Channel(transport, "links", 10)).close()

    run_ranks(3, work)
    assert set(given) == {1, 2}
    assert given[1] != given[2]
    assert all(len(key) == 32 and any(key) for key in given.values())
