"""Who does not reach whom, by what kernels show: tables, and a small model of three hosts' TCP."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from loft_hvd.failures.cuts import (
    ConnectionEnd,
    Cut,
    EndWatch,
    decode_ends,
    encode_ends,
    find_cuts,
)
from loft_hvd.transport.tcp import HostLink, TcpState
from tests.support.clock import Clock

HOSTS = [f"10.0.0.{rank}" for rank in range(3)]
RANKS_AT = {host: rank for rank, host in enumerate(HOSTS)}
PAIRS = list(itertools.combinations(range(3), 2))
WAYS = list(itertools.permutations(range(3), 2))
LEAST_S = 5.0
NEVER = -math.inf


def end(
    local: int,
    peer: int,
    *,
    unanswered_s: float = 0.0,
    tries: int = 0,
    tried_s: float = math.inf,
    arrived_s: float = math.inf,
    watched_s: float = 9.0,
) -> ConnectionEnd:
    """Return what is seen at time 0 at the end of a connection between two ranks' hosts."""
    ports = {(a, b): 100 * min(a, b) + max(a, b) for a, b in WAYS}
    port = ports[local, peer]
    return ConnectionEnd(
        f"{HOSTS[local]} {port}",
        f"{HOSTS[peer]} {port}",
        -watched_s,
        0.0,
        -unanswered_s if unanswered_s else math.inf,
        tries,
        -tried_s,
        -arrived_s,
    )


def in_vain(
    local: int, peer: int, *, arrived_s: float = math.inf, **others: float
) -> ConnectionEnd:
    seen = {"unanswered_s": 6.0, "tries": 5, "tried_s": 2.0} | others
    return end(local, peer, arrived_s=arrived_s, **seen)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("told", "silent", "cuts"),
    [
        # Rank 1 does not reach rank 2, and either has something to send, or both.
        ([in_vain(1, 2, arrived_s=1), in_vain(2, 1)], [], [Cut(1, 2)]),
        ([in_vain(1, 2), end(2, 1)], [], [Cut(1, 2)]),
        ([end(1, 2, arrived_s=1), in_vain(2, 1)], [], [Cut(1, 2)]),
        ([in_vain(1, 2), in_vain(2, 1)], [], [Cut(1, 2), Cut(2, 1)]),  # neither way
        # One end suffices where what arrives acknowledges nothing; else it does not.
        ([in_vain(1, 2, arrived_s=1)], [], [Cut(1, 2)]),
        ([in_vain(0, 1, arrived_s=1)], [1], [Cut(0, 1)]),
        ([in_vain(1, 2)], [], []),
        ([in_vain(0, 1)], [1], []),
        # Of a silent rank others know that its host is up.
        ([in_vain(0, 1), end(2, 1, arrived_s=1)], [1], [Cut(1, 0)]),
        ([in_vain(0, 1), end(2, 1, arrived_s=1)], [], []),  # it is heard, and has yet to tell
        ([in_vain(0, 1), end(2, 1)], [1], []),  # its host is down
        ([in_vain(0, 1), end(2, 1, arrived_s=5)], [1], []),  # perhaps since then
        # By other ports it reaches this very host.
        ([in_vain(0, 1), replace(end(0, 1, arrived_s=1), peer=f"{HOSTS[1]} 9")], [1], []),
        # Too early, and too few tries.
        ([in_vain(1, 2, unanswered_s=4.9), end(2, 1)], [], []),
        ([in_vain(1, 2, tries=3), end(2, 1)], [], []),
        # The other end was not looked at while this one sent again.
        ([in_vain(1, 2), end(2, 1, watched_s=3.4)], [], []),
        ([in_vain(1, 2, tried_s=0.4), end(2, 1)], [], []),
        ([in_vain(1, 2, tried_s=math.inf), end(2, 1)], [], []),
        # It has heard this one, but perhaps before.
        ([in_vain(1, 2), end(2, 1, arrived_s=4.6)], [], [Cut(1, 2)]),
    ],
)
def test_what_follows_from_both_ends(
    told: list[ConnectionEnd], silent: list[int], cuts: list[Cut]
) -> None:
    by_rank = {
        rank: [each for each in told if RANKS_AT[each.local.split()[0]] == rank]
        for rank in range(3)
    }
    assert find_cuts(by_rank, ranks_at=RANKS_AT, silent=silent, least_s=LEAST_S) == cuts


def test_who_is_no_rank_is_not_named() -> None:
    stranger = ConnectionEnd("10.0.0.1 5", "10.9.9.9 443", -9.0, 0.0, -8.0, 6, -2.0, -1.0)
    assert find_cuts({1: [stranger]}, ranks_at=RANKS_AT, silent=[], least_s=LEAST_S) == []


def test_ends_travel_without_a_clock_in_common() -> None:
    ends = [in_vain(1, 2, arrived_s=1.25), end(1, 0)]
    assert decode_ends(encode_ends(ends, 3.0), 1003.0) == [
        ConnectionEnd(
            each.local,
            each.peer,
            each.first_at + 1000,
            each.last_at + 1000,
            each.unanswered_at + 1000,
            each.tries,
            each.tried_at + 1000,
            each.arrived_at + 1000,
        )
        for each in ends
    ]


@pytest.mark.parametrize("text", ["", "|", "a,b", "a,b,x,1,1,1,1,1", "a,b,1,nan,nan,nan,nan,nan"])
def test_what_does_not_parse_is_no_end(text: str) -> None:
    assert decode_ends(text, 0.0) == []


def test_a_message_holds_the_ends_that_send_in_vain_for_the_longest() -> None:
    ends = [in_vain(1, 2, unanswered_s=float(seconds)) for seconds in range(1, 200)]
    text = encode_ends(ends, 0.0)
    assert len(text) < 12_000
    assert decode_ends(text, 0.0)[0].unanswered_s == 199.0


# A model of TCP.


@dataclass
class Side:
    """One end of a connection in its kernel."""

    waits_since: float = math.inf  # for an acknowledgement
    tries: int = 0
    num_acked: int = 0
    num_arrived: int = 0
    is_probed: bool = False


@dataclass
class Network:
    """Three hosts, a connection between each two, and ways that are open from the start."""

    clock: Clock = field(default_factory=Clock)
    sides: dict[tuple[int, int], Side] = field(
        default_factory=lambda: {way: Side() for way in WAYS}
    )
    closed: set[tuple[int, int]] = field(default_factory=set)
    loss: float = 0.0
    random: random.Random = field(default_factory=random.Random)

    def send(self, sender: int, receiver: int) -> None:
        """Have one host send something to another."""
        side = self.sides[sender, receiver]
        side.waits_since = min(side.waits_since, self.clock.now)
        self._deliver(sender, receiver)

    def advance(self, seconds: float) -> None:
        """Let time pass, in steps of 0.1 s; kernels send again what is not acknowledged."""
        for _ in range(round(10 * seconds)):
            self.clock.now += 0.1
            for way, side in self.sides.items():
                waited_s = self.clock.now - side.waits_since
                if waited_s >= 0.2 * (2 ** (side.tries + 1) - 1):
                    side.tries += 1
                    self._deliver(*way)
                elif side.is_probed and waited_s < 0 and round(10 * self.clock.now) % 20 == 0:
                    self._deliver(*way)

    def _deliver(self, sender: int, receiver: int) -> None:
        if not self._passes(sender, receiver):
            return
        self.sides[receiver, sender].num_arrived += 1
        if not self._passes(receiver, sender):  # the acknowledgement
            return
        side = self.sides[sender, receiver]
        side.num_arrived += 1
        side.num_acked += side.waits_since < math.inf
        side.waits_since, side.tries = math.inf, 0

    def _passes(self, *way: int) -> bool:
        return way not in self.closed and self.random.random() >= self.loss

    def watch_of(self, rank: int) -> EndWatch:
        """Return what looks at a host's connections."""
        others = [other for other in range(3) if other != rank]
        links = [
            HostLink(other, "", f"{HOSTS[rank]} {rank + other}", f"{HOSTS[other]} {rank + other}")
            for other in others
        ]

        def state_of(other: int) -> TcpState:
            side = self.sides[rank, other]
            return TcpState(
                is_established=True,
                tries=side.tries,
                is_waiting=side.waits_since < math.inf,
                num_acked=side.num_acked,
                num_arrived=side.num_arrived,
            )

        def probe(other: int, *, is_on: bool) -> bool:
            side = self.sides[rank, other]
            side.is_probed, before = is_on, side.is_probed
            return before != is_on

        return EndWatch(self.clock, links=lambda: links, state_of=state_of, probe=probe)


class Ranks:
    """Ranks that look once a second, and tell rank 0, whose words they hear: as ``Observer``."""

    def __init__(self, network: Network, *, offset_s: float = 0.0) -> None:
        self.network = network
        self._offset_s = offset_s  # between the looks of two ranks
        self._watches = [network.watch_of(rank) for rank in range(3)]
        self._told: dict[int, list[ConnectionEnd]] = {}
        self._asked: list[str] = []

    def second(self) -> list[Cut]:
        """Let a second pass; returns what rank 0 then concludes."""
        now = self.network.clock
        silent = [
            rank for rank in (1, 2) if {(0, rank), (rank, 0)} & self.network.closed
        ]  # a connection that is cut in one direction carries nothing in the other either
        for rank, watch in enumerate(self._watches):
            ends = watch.look([] if rank in silent else self._asked)
            if rank not in silent:
                self._told[rank] = decode_ends(encode_ends(ends, now.now), now.now)
            else:
                self._told.pop(rank, None)
            self.network.advance(self._offset_s)
        tried = [each for ends in self._told.values() for each in ends if each.unanswered_s]
        self._asked = sorted({a.split()[0] for each in tried for a in (each.local, each.peer)})
        self.network.advance(1.0 - 3 * self._offset_s)
        return find_cuts(self._told, ranks_at=RANKS_AT, silent=silent, least_s=LEAST_S)


def closings() -> Iterator[set[tuple[int, int]]]:
    """Yield each way that may be closed, alone and with its other direction."""
    for way in WAYS:
        yield {way}
    for pair in PAIRS:
        yield {pair, pair[::-1]}


@pytest.mark.parametrize("offset_s", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("who", ["sender", "receiver", "both"])
@pytest.mark.parametrize("closed", list(closings()), ids=str)
def test_whichever_way_is_closed_it_is_found_and_no_other(
    closed: set[tuple[int, int]], who: str, offset_s: float
) -> None:
    network = Network()
    ranks = Ranks(network, offset_s=offset_s)
    for way in WAYS:
        network.send(*way)
    network.advance(1.0)
    network.closed = closed
    sender, receiver = min(closed)
    if 0 in (sender, receiver) or who != "receiver":  # the heartbeat sends both ways
        network.send(sender, receiver)
    if 0 in (sender, receiver) or who != "sender":
        network.send(receiver, sender)
    network.advance(2.0)  # until ranks have waited for so long
    found = [ranks.second() for _ in range(9)]
    first = next(filter(None, found), [])
    assert first
    assert {(cut.sender, cut.receiver) for each in found for cut in each} <= closed


@pytest.mark.parametrize("seed", range(20))
def test_links_that_lose_a_tenth_are_not_cut(seed: int) -> None:
    network = Network(loss=0.1, random=random.Random(seed))
    ranks = Ranks(network)
    for _ in range(120):
        for way in WAYS:
            network.send(*way)
        assert ranks.second() == [], f"seed {seed}"


def test_a_host_that_is_down_is_no_cut() -> None:
    network = Network()
    ranks = Ranks(network)
    network.closed = {way for way in WAYS if 2 in way}
    for way in WAYS:
        network.send(*way)
    assert [ranks.second() for _ in range(30)] == [[]] * 30


def test_a_way_that_opens_again_is_forgotten_and_nobody_is_asked_any_more() -> None:
    network = Network()
    ranks = Ranks(network)
    network.closed = {(1, 2)}
    network.send(1, 2)
    for _ in range(4):
        assert ranks.second() == []
    assert network.sides[2, 1].is_probed
    network.closed = set()
    network.advance(5.0)
    assert [ranks.second() for _ in range(10)] == [[]] * 10
    assert not any(side.is_probed for side in network.sides.values())


def test_a_look_after_a_pause_is_a_first_one() -> None:
    network = Network()
    watch = network.watch_of(1)
    network.closed = {(1, 2)}
    network.send(1, 2)
    network.advance(1.0)
    watch.look()
    watch.forget()
    network.advance(60.0)
    (seen,) = watch.look()
    assert (seen.unanswered_s, seen.tries, seen.tried_at) == (0.0, 8, NEVER)
    watch.look([HOSTS[0]])
    assert network.sides[1, 0].is_probed
    watch.forget()
    assert not network.sides[1, 0].is_probed
    network.sides[1, 0].is_probed = True  # by whoever has made the connection
    watch.look([HOSTS[0]])
    watch.forget()
    assert network.sides[1, 0].is_probed


@pytest.mark.parametrize(("acked", "vain_s"), [(0, 10.0), (100, 4.0)])
def test_what_is_acknowledged_between_two_looks_was_not_in_vain(acked: int, vain_s: float) -> None:
    clock, state = Clock(), TcpState(is_established=True, tries=5, is_waiting=True)
    link = HostLink(3, "", "10.0.0.0 3", "10.0.0.1 3")
    watch = EndWatch(clock, links=lambda: [link], state_of=lambda _: state)
    for at in range(6):
        (seen,) = watch.look()
        clock.now += 2.0
        if at == 1:
            state = replace(state, num_acked=acked)
    assert seen.unanswered_s == vain_s


def test_a_connection_that_is_being_closed_or_is_gone_is_none() -> None:
    clock = Clock()
    states = {3: TcpState(tries=5, is_waiting=True)}  # no more established
    links = [HostLink(fd, "", f"10.0.0.0 {fd}", f"10.0.0.1 {fd}") for fd in (3, 4)]

    def state_of(descriptor: int) -> TcpState:
        if descriptor == 4:
            raise OSError("bad file descriptor")
        return states[descriptor]

    watch = EndWatch(clock, links=lambda: links, state_of=state_of, probe=lambda *_, **__: False)
    for _ in range(10):
        assert watch.look() == []
        clock.now += 1.0
    assert [each.local for each in watch.look(["10.0.0.1"])] == ["10.0.0.0 3"]
