"""Who is silent, gone or astray: conclusions on a fake clock, and two ends that beat for real."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from loft_hvd.config import Config
from loft_hvd.errors import MismatchError, PeerError, TransportError
from loft_hvd.transport.base import Channel, locate, wait_for
from loft_hvd.transport.heartbeat.diagnosis import Diagnosis, HeartbeatSettings, Limits, Place
from loft_hvd.transport.heartbeat.heartbeat import Heartbeat
from loft_hvd.transport.heartbeat.links import Line, Link, open_links, own_place, process_state
from loft_hvd.transport.heartbeat.progress import Progress, key_of
from loft_hvd.transport.heartbeat.watched import open_heartbeat, watched
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks


def at(waited_s: float, in_flight: str = "", started: str | None = None) -> Progress:
    """Return a progress; each letter of in_flight is an operation, as often as in started."""
    counts = {key_of(name): (started or in_flight).count(name) for name in started or in_flight}
    flying = frozenset((name, counts[key_of(name)]) for name in in_flight)
    return Progress(waited_s, flying, counts)


WAITING = at(1.0, "a")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def diagnosis(clock: Clock) -> Diagnosis:
    """Return what rank 0 knows of ranks 1 and 2, who have just been heard."""
    places = {rank: Place(rank, 1000 + rank, 5, f"host{rank}") for rank in (1, 2)}
    return Diagnosis(0, places, limits=Limits(3.0, 10.0, 5.0), clock=clock)


def hear(diagnosis: Diagnosis, *ranks: int, progress: Progress | None = None) -> None:
    for rank in ranks:
        diagnosis.heard(rank, Progress() if progress is None else progress)


def test_ranks_that_beat_are_left_in_peace(diagnosis: Diagnosis, clock: Clock) -> None:
    for _ in range(100):
        clock.now += 1.0
        hear(diagnosis, 1, 2, progress=WAITING)
        assert diagnosis.suspects() == []
        assert diagnosis.judge(at(50.0, "a")) is None


@pytest.mark.parametrize(
    ("state", "silent_s", "own", "says"),
    [
        ("T", 3.0, WAITING, "rank 1 (process 1001 on host1) is frozen"),
        ("T", 2.9, WAITING, None),
        ("T", 3.0, Progress(), "is frozen"),  # others may wait in calls that are not ours
        ("X", 3.0, Progress(), "rank 1 (process 1001 on host1) is gone"),
        ("Z", 3.0, WAITING, "is gone"),
        ("R", 1e6, WAITING, None),  # it runs: its interpreter is held, as in a long call
        ("S", 1e6, WAITING, None),
        ("D", 1e6, WAITING, None),
        ("t", 1e6, WAITING, None),  # in a debugger
        ("?", 9.9, WAITING, None),
        ("?", 10.0, WAITING, "has been silent for 10 s"),
        ("?", 1e6, Progress(), None),
    ],
)
def test_silence_counts_by_what_the_process_does(
    state: str,
    silent_s: float,
    own: Progress,
    says: str | None,
    diagnosis: Diagnosis,
    clock: Clock,
) -> None:
    clock.now += silent_s
    hear(diagnosis, 2)
    if diagnosis.is_silent(1):
        diagnosis.saw(1, state)
    verdict = diagnosis.judge(own)
    assert (verdict is None) == (says is None)
    if verdict is not None and says is not None:
        assert verdict.rank == 1
        assert says in verdict.text
        assert isinstance(verdict.error(), PeerError)


def test_a_peer_that_is_heard_again_is_no_suspect(diagnosis: Diagnosis, clock: Clock) -> None:
    clock.now += 8.0
    assert diagnosis.suspects() == [1, 2]
    diagnosis.saw(1, "T")
    hear(diagnosis, 1, 2)
    assert diagnosis.suspects() == []
    clock.now += 4.0
    assert diagnosis.judge(WAITING) is None  # what was seen then does not count now


def test_a_rank_that_was_out_itself_starts_anew(diagnosis: Diagnosis, clock: Clock) -> None:
    clock.now += 1000.0
    diagnosis.restarted()
    assert diagnosis.suspects() == []


def test_only_a_rank_that_runs_but_is_silent_is_warned_of_once(
    diagnosis: Diagnosis, clock: Clock
) -> None:
    clock.now += 11.0
    diagnosis.saw(1, "R")
    diagnosis.saw(2, "T")
    (warning,) = diagnosis.held()
    assert "rank 1 (process 1001 on host1) runs, but has been silent for 11 s" in warning
    assert diagnosis.held() == []


def test_an_end_without_good_bye_is_a_verdict_and_with_it_is_none(diagnosis: Diagnosis) -> None:
    diagnosis.left(1)
    assert diagnosis.closed(1) is None
    verdict = diagnosis.closed(2)
    assert verdict is not None
    assert "rank 2 (process 1002 on host2) has ended without a word" in verdict.text
    assert diagnosis.left_ranks() == [1, 2]


def test_a_rank_that_left_while_others_wait_is_named(diagnosis: Diagnosis) -> None:
    diagnosis.heard(2, at(0.0, "", "ab"))
    diagnosis.left(2)
    assert diagnosis.judge(at(4.9, "b", "abb")) is None
    assert diagnosis.judge(at(50.0, "b", "ab")) is None  # it did its part; the link is slow
    verdict = diagnosis.judge(at(5.0, "b", "abb"))
    assert verdict is not None
    assert verdict.rank == 2
    assert "has ended its script while others wait for it in 'b'" in verdict.text


@pytest.mark.parametrize(
    ("ranks", "odd"),
    [
        ([at(5.0, "a"), at(5.0, "b"), at(5.0, "a")], [1]),
        ([at(5.0, "a"), at(5.0, "b"), at(5.0, "b")], [0]),
        ([at(5.0, "a"), at(4.9, "b"), at(5.0, "a")], None),
        ([at(50.0, "a")] * 3, None),
        # Rank 1 has done its part of a and gone on to b: the others' link is slow.
        ([at(50.0, "a"), at(50.0, "b", "ab"), at(50.0, "a")], None),
        ([at(50.0, "ab"), at(50.0, "bc"), at(50.0, "b")], None),  # b is on its way
        ([at(50.0, "ab"), at(50.0, "bc"), at(50.0, "ca")], [1]),
        ([at(50.0, "a"), at(0.0), at(50.0, "a")], None),  # rank 1 still computes
        # One rank is a step behind, in the same operation: not the same number of them.
        ([at(50.0, "a", "aab"), at(50.0, "b", "abb"), at(50.0, "a", "aab")], [1]),
        ([at(50.0, "*a"), at(50.0, "*b"), at(50.0, "*a")], None),  # of some ranks only
        ([at(50.0, "a"), Progress(50.0, frozenset({("b", 1)})), at(50.0, "a")], None),
    ],
)
def test_all_waiting_for_what_others_lack_is_a_mismatch(
    ranks: list[Progress], odd: list[int] | None, diagnosis: Diagnosis, clock: Clock
) -> None:
    for rank in (1, 2):
        diagnosis.heard(rank, ranks[rank])
    assert diagnosis.judge(ranks[0]) is None  # it may pass
    clock.now += 2.6
    verdict = diagnosis.judge(ranks[0])
    assert (verdict is None) == (odd is None)
    if verdict is not None:
        assert f"ranks {odd} wait for" in verdict.text
        assert isinstance(verdict.error(), MismatchError)


@pytest.mark.parametrize("rank", [1, 2])
def test_only_rank_0_finds_a_mismatch_as_others_do_not_see_all_ranks(
    rank: int, clock: Clock
) -> None:
    places = {0: Place(0, 1000, 5, "host0")}
    diagnosis = Diagnosis(rank, places, limits=Limits(3.0, 10.0, 5.0), clock=clock)
    for _ in range(10):
        diagnosis.heard(0, at(50.0, "a"))
        assert diagnosis.judge(at(50.0, "b")) is None
        clock.now += 2.6


def test_a_stall_that_moves_is_none(diagnosis: Diagnosis, clock: Clock) -> None:
    for step in range(1, 20):
        mine, theirs = at(50.0, "a", "a" * step), at(50.0, "b", "b" * step)
        hear(diagnosis, 1, 2, progress=theirs)
        assert diagnosis.judge(mine) is None
        clock.now += 2.0


def test_late_ranks_have_not_started_what_is_waited_for(diagnosis: Diagnosis) -> None:
    diagnosis.heard(1, at(0.0, "", "z"))
    diagnosis.heard(2, at(2.0, "b", "ab"))
    assert diagnosis.late_for(0, WAITING) == [1]
    assert diagnosis.late_for(2, WAITING) == [0, 1]
    assert diagnosis.late_for(0, Progress()) == []


@pytest.mark.parametrize("progress", [Progress(2.0), at(2.0, "ab#c", "abb#c"), at(2.0, "", "x")])
def test_progress_travels_as_text(progress: Progress) -> None:
    back = Progress.decode(2.0, progress.encode(1000))
    assert back.in_flight == progress.in_flight
    assert back.counts == (progress.counts or {})


@pytest.mark.parametrize("text", ["", "x", "a#b;", "a#1;k=v", ";;;="])
def test_progress_that_does_not_parse_tells_nothing(text: str) -> None:
    assert Progress.decode(2.0, text) == Progress(2.0)


def test_progress_that_is_too_long_tells_nothing() -> None:
    assert at(2.0, "abc").encode(5) == ""


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


def test_process_states() -> None:
    own = own_place()
    assert process_state(own.pid, own.start) in "RS"
    assert process_state(own.pid, own.start + 1) == "X"  # another process had that id


Pair = Callable[..., tuple[Heartbeat, Heartbeat]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return a maker of two ranks' heartbeats, which are closed in the end."""
    made: list[Heartbeat] = []

    def make(*, is_elastic: bool = False, pid: int | None = None, **more: object) -> object:
        settings = HeartbeatSettings(
            period_s=0.01,
            grace_s=0.0,
            is_elastic=is_elastic,
            limits=Limits(suspect_s=0.05, silent_s=30.0, stall_s=30.0),
            owns_process=False,
        )
        own = own_place()
        place = own if pid is None else Place(own.host_key, pid, 0, "here")
        ends = [Link(end) for end in socket.socketpair()]
        for rank in (0, 1) if pid is None else (0,):
            made.append(
                Heartbeat(
                    rank,
                    {1 - rank: ends[rank]},
                    {1 - rank: place},
                    settings=settings,
                    own_place=own,
                    **more,  # type: ignore[arg-type]  # kill=
                )
            )
        return (made[0], made[1]) if pid is None else (made[0], ends[1])

    yield make  # type: ignore[misc]  # two results, told apart by pid
    for heartbeat in made:
        heartbeat.close()


def test_a_rank_that_fails_ends_the_wait_of_the_other_with_its_error(pair: Pair) -> None:
    first, second = pair()
    work = LocalWorld(2).transport(0).allreduce(torch.zeros(1), name="x")
    second.report(ValueError("what it was"))
    with pytest.raises(PeerError, match=r"the sum: rank 1 .* has failed: ValueError: what it was"):
        wait_for(watched(work, "x", first), what="the sum", timeout_s=10)
    assert first.board.progress().in_flight == frozenset()


@pytest.mark.parametrize("error", [PeerError("of another"), TransportError("of the wire")])
def test_an_error_that_came_from_others_is_not_passed_on(error: Exception, pair: Pair) -> None:
    first, second = pair()
    second.report(error)
    second.report(ValueError("a consequence"))
    second.close()
    assert not first._has_verdict.wait(0.1)


def test_good_bye_is_no_failure(pair: Pair) -> None:
    first, second = pair()
    second.close()
    first._thread.join(0.1)
    assert first.verdict is None


@pytest.fixture
def star() -> Iterator[list[Heartbeat]]:
    """Return three ranks' heartbeats, closed in the end; ranks 1 and 2 are linked to rank 0."""
    settings = HeartbeatSettings(period_s=0.01, grace_s=0.0, owns_process=False)
    own = own_place()
    ends = {rank: [Link(end) for end in socket.socketpair()] for rank in (1, 2)}
    links = [{rank: pair[0] for rank, pair in ends.items()}, {0: ends[1][1]}, {0: ends[2][1]}]
    made = [
        Heartbeat(rank, each, dict.fromkeys(each, own), settings=settings, own_place=own)
        for rank, each in enumerate(links)
    ]
    yield made
    for heartbeat in made:
        heartbeat.close()


@pytest.mark.parametrize("astray", [0, 1, 2])
def test_all_ranks_hear_the_same_of_a_mismatch_whoever_compares_first(
    astray: int, star: list[Heartbeat]
) -> None:
    hasty = Limits(stall_s=0.0, confirm_s=0.0)
    for rank, heartbeat in enumerate(star):
        heartbeat.board.posted("b" if rank == astray else "a")
    with ExitStack() as waits:
        for heartbeat in star:
            waits.enter_context(heartbeat.waiting())
        for heartbeat in star[1:]:  # they would compare at once, rank 0 only later
            heartbeat._diagnosis._limits = hasty
        for heartbeat in star[1:]:
            assert not heartbeat._has_verdict.wait(0.05)
        star[0]._diagnosis._limits = hasty
        verdicts = [h.verdict for h in star if h._has_verdict.wait(10)]
    others = [rank for rank in range(3) if rank != astray]
    says = f"ranks [{astray}] wait for 'b' while ranks {others} wait for 'a'"
    assert len(verdicts) == 3
    assert all(v is not None and v.is_mismatch and says in v.text for v in verdicts), verdicts


class _NotedError(RuntimeError):
    """An engine's error that keeps its notes, also before Python 3.11."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def add_note(self, note: str) -> None:
        self.notes.append(note)


def test_a_good_bye_reaches_ranks_that_have_no_link_to_who_left(star: list[Heartbeat]) -> None:
    star[2].close()
    for heartbeat in star[:2]:
        for _ in range(200):  # 2 s at most
            if heartbeat._gone:
                break
            heartbeat._thread.join(0.01)
        error = _NotedError()
        heartbeat.explain(error)
        assert error.notes == ["loft_hvd: ranks [2] have ended their scripts"]
        assert heartbeat.verdict is None
    assert star[1]._diagnosis.left_ranks() == []  # rank 0 has passed it on, and is still there


def test_a_forked_process_does_not_speak_for_its_rank(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair()
    with monkeypatch.context() as child:
        child.setattr("loft_hvd.transport.heartbeat.heartbeat.os.getpid", lambda: 1)
        second.report(ValueError("of a loader process"))
        second.close()
    assert not second.is_closed
    assert not first._has_verdict.wait(0.1)


def test_elastic_waits_are_left_to_the_engine(pair: Pair) -> None:
    first, second = pair(is_elastic=True)
    second.report(ValueError("x"))
    assert first._has_verdict.wait(10)
    assert first.final_verdict() is None


class _Armed:
    """Stands for the end of a process whose script an error has ended."""

    is_armed = True

    def leave_if_due(self) -> None: ...

    def remove(self) -> None: ...

    def arm(self, reason: str) -> None: ...


@pytest.mark.parametrize(("is_elastic", "is_over"), [(False, False), (True, False), (False, True)])
def test_a_frozen_process_is_named_and_killed_only_where_the_job_recovers_or_is_over(
    is_elastic: bool, is_over: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    kills = is_elastic or is_over
    monkeypatch.setattr("loft_hvd.transport.heartbeat.silent.process_state", lambda pid, start: "T")
    first, link = pair(is_elastic=is_elastic, pid=4242, kill=killed.append)
    monkeypatch.setattr(first, "_exit", _Armed() if is_over else None)
    with first.waiting():
        assert first._has_verdict.wait(10)
        assert first.verdict is not None
        assert "rank 1 (process 4242 on here) is frozen" in first.verdict.text
        for _ in range(1000 if kills else 10):
            if killed:
                break
            first._thread.join(0.01)
    monkeypatch.setattr(first, "_exit", None)  # a process that lives on
    first.close()
    assert set(killed) == ({4242} if kills else set())
    assert isinstance(link, Link)
    link.close()


def test_an_end_without_a_word_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the rank is silent for long before its end is seen: then it runs.
    monkeypatch.setattr("loft_hvd.transport.heartbeat.silent.process_state", lambda pid, start: "R")
    first, link = pair(pid=4242)
    assert isinstance(link, Link)
    link.close()
    assert first._has_verdict.wait(10)
    assert first.verdict is not None
    assert "has ended without a word" in first.verdict.text


def test_engine_errors_keep_their_identity_and_gain_a_note() -> None:
    error = RuntimeError("of the engine")
    assert locate(error, "bucket 0 (w)") is error
    located = locate(PeerError("rank 1 is gone"), "bucket 0 (w)")
    assert isinstance(located, PeerError)
    assert str(located) == "bucket 0 (w): rank 1 is gone"


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_star_connects_all_ranks_and_ignores_strangers(
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
        links, places = open_links(Channel(transport, "star", 10))
        assert {place.pid for place in places.values()} == {os.getpid()}
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


def test_no_heartbeat_where_a_rank_cannot_reach_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = open_links

    def without_rank_2(channel: Channel) -> object:
        links, places = real(replace(channel, timeout_s=0.5))
        if channel.rank != 2:
            return links, places
        for link in links.values():
            link.close()
        return {}, {}

    monkeypatch.setattr("loft_hvd.transport.heartbeat.watched.open_links", without_rank_2)

    def work(transport: LocalTransport) -> object:
        return open_heartbeat(transport, "test", engine_is_down=lambda: False)

    assert run_ranks(3, work) == [None] * 3
    assert "heartbeat off: ranks [2] cannot reach rank 0 by TCP" in caplog.text


def test_no_heartbeat_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "loft_hvd.transport.heartbeat.watched.config", lambda: Config(heartbeat_s=0.0)
    )
    assert run_ranks(2, lambda t: open_heartbeat(t, "x", engine_is_down=bool)) == [None] * 2
