"""Ranks that beat for real, two or three of them in one process: who hears what, and who acts."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pytest
import torch

from loft_hvd.errors import PeerError, TransportError
from loft_hvd.failures import causes
from loft_hvd.failures.actions import HeartbeatSettings, ProcessControl
from loft_hvd.failures.causes import FailureNote, annotate_failures
from loft_hvd.failures.connections import ReadClock
from loft_hvd.failures.diagnosis import Diagnosis, DiagnosisLimits, Verdict
from loft_hvd.failures.guards import LauncherGuard
from loft_hvd.failures.handshake import Caller, OpenedLinks, open_links
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.observer import Observer
from loft_hvd.failures.process import ProcessExit, RankProcess, own_process
from loft_hvd.failures.progress import Progress, ProgressMeter, key_of
from loft_hvd.failures.watched import watched
from loft_hvd.transport.base import Channel, wait_for
from loft_hvd.transport.local import LocalWorld, run_ranks


@dataclass
class Pairs:
    """Makes heartbeats of ranks 0 and 1, or of rank 0 alone, whose peer is a process with an id."""

    made: list[Heartbeat] = field(default_factory=list)

    def both(self, *, is_elastic: bool = False) -> tuple[Heartbeat, Heartbeat]:
        own, ends = own_process(), _linked()
        made = [self._make(rank, ends[rank], own, is_elastic=is_elastic) for rank in (0, 1)]
        return made[0], made[1]

    def first(
        self, pid: int, *, is_elastic: bool = False, control: ProcessControl, held_s: float = 30.0
    ) -> tuple[Heartbeat, Link]:
        """Return rank 0's heartbeat, and rank 1's end of the link."""
        other, ends = RankProcess(control.own.host_key, pid, 0, "here"), _linked()
        made = self._make(0, ends[0], other, is_elastic=is_elastic, control=control, held_s=held_s)
        return made, ends[1]

    def _make(
        self,
        rank: int,
        link: Link,
        other: RankProcess,
        *,
        is_elastic: bool,
        control: ProcessControl | None = None,
        held_s: float = 30.0,
    ) -> Heartbeat:
        limits = DiagnosisLimits(suspect_s=0.05, silent_s=30.0, stall_s=30.0, held_s=held_s)
        heartbeat = Heartbeat(
            {1 - rank: link},
            Diagnosis(rank, {1 - rank: other}, limits=limits),
            settings=HeartbeatSettings(period_s=0.01, grace_s=0.0, is_elastic=is_elastic),
            control=control or ProcessControl(),
        )
        self.made.append(heartbeat)
        return heartbeat


def _linked() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Return a maker of heartbeats, which are closed in the end."""
    maker = Pairs()
    yield maker
    for heartbeat in maker.made:
        heartbeat.close()
        # After an error it lives as long as its process: here that has more tests to run.
        heartbeat._is_closed = True
        heartbeat._thread.join(5.0)
        assert not heartbeat._thread.is_alive()


def test_a_rank_that_fails_ends_the_wait_of_the_other_with_its_error(pairs: Pairs) -> None:
    first, second = pairs.both()
    work = LocalWorld(2).transport(0).allreduce(torch.zeros(1), name="x")
    second.report(ValueError("what it was"))
    with pytest.raises(PeerError, match=r"the sum: rank 1 .* has failed: ValueError: what it was"):
        wait_for(watched(work, "x", first), what="the sum", timeout_s=10)
    assert first.meter.progress().in_flight == ()


@pytest.mark.parametrize("error", [PeerError("of another"), TransportError("of the wire")])
def test_an_error_that_came_from_others_is_not_passed_on(error: Exception, pairs: Pairs) -> None:
    first, second = pairs.both()
    second.report(error)
    second.report(ValueError("a consequence"))
    second.close()
    assert first.wait_verdict(0.1) is None


class HorovodInternalError(RuntimeError):
    """By its name the engine's own."""


def _synchronize(error_of_engine: RuntimeError | None = None) -> None:
    """Wait as ``hvd.synchronize`` does, which makes every RuntimeError its own."""
    try:
        if error_of_engine is not None:
            raise error_of_engine
        signal.raise_signal(signal.SIGCHLD)
    except RuntimeError as error:
        raise HorovodInternalError(error)  # noqa: B904  # as Horovod does


def _fail(*_: object) -> None:
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")


@pytest.fixture
def killed_loader() -> Iterator[HorovodInternalError]:
    """Return the engine's error after a loader process was killed, as torch finds it."""
    previous = signal.signal(signal.SIGCHLD, _fail)
    try:
        with pytest.raises(HorovodInternalError) as raised:
            _synchronize()
        yield raised.value
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_what_a_signal_handler_raises_inside_the_engine_is_this_ranks_failure(
    killed_loader: HorovodInternalError, pairs: Pairs
) -> None:
    first, second = pairs.both()
    second.explain(killed_loader)
    assert not second._diagnosis._has_engine_failed
    second.report(killed_loader)
    verdict = first.wait_verdict(10)
    assert verdict is not None
    assert "has failed: RuntimeError: DataLoader worker (pid 7) is killed" in verdict.text
    assert not first._diagnosis._has_engine_failed


def test_an_error_of_the_engine_inside_a_signal_handler_is_not_passed_on(pairs: Pairs) -> None:
    def save(*_: object) -> None:  # as a handler that saves a checkpoint
        _synchronize(RuntimeError("a peer is gone"))

    first, second = pairs.both()
    previous = signal.signal(signal.SIGTERM, save)
    try:
        with pytest.raises(HorovodInternalError) as raised:
            signal.raise_signal(signal.SIGTERM)
        second.report(raised.value)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert first.wait_verdict(0.1) is None


def test_good_bye_is_no_failure(pairs: Pairs) -> None:
    first, second = pairs.both()
    second.close()
    assert first.wait_verdict(0.1) is None


class Clock:
    """Seconds that pass only when told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Three:
    """Three ranks' heartbeats; rank 0 compares ranks only once its clock moves on."""

    ranks: list[Heartbeat]
    clock_of_rank_0: Clock


@pytest.fixture
def three() -> Iterator[Three]:
    """Return heartbeats of ranks 0 to 2, closed in the end; 1 and 2 are linked to 0."""
    clock, own = Clock(), own_process()
    ends = {rank: _linked() for rank in (1, 2)}
    links = [{rank: near for rank, (near, _) in ends.items()}, {0: ends[1][1]}, {0: ends[2][1]}]
    made = []
    for rank, each in enumerate(links):
        # Ranks 1 and 2 would compare at once, and nobody is silent however long it takes.
        confirm_s = 0.0 if rank else 5.0
        limits = DiagnosisLimits(suspect_s=30.0, stall_s=0.0, confirm_s=confirm_s)
        known = dict.fromkeys(each, own)
        diagnosis = Diagnosis(rank, known, limits=limits)
        if rank == 0:
            diagnosis = Diagnosis(0, known, limits=limits, clock=clock)
        settings = HeartbeatSettings(period_s=0.01, grace_s=0.0)
        made.append(Heartbeat(each, diagnosis, settings=settings, control=ProcessControl()))
    yield Three(made, clock)
    for heartbeat in made:
        heartbeat.close()


@pytest.mark.parametrize("astray", [0, 1, 2])
def test_all_ranks_hear_the_same_of_a_mismatch_whoever_compares_first(
    astray: int, three: Three
) -> None:
    for rank, heartbeat in enumerate(three.ranks):
        heartbeat.meter.posted("b" if rank == astray else "a")
    with ExitStack() as waits:
        for heartbeat in three.ranks:
            waits.enter_context(heartbeat.waiting())
        for heartbeat in three.ranks[1:]:
            assert heartbeat.wait_verdict(0.05) is None
        three.clock_of_rank_0.now += 6.0
        verdicts = [heartbeat.wait_verdict(10) for heartbeat in three.ranks]
    others = [rank for rank in range(3) if rank != astray]
    first = rf"ranks \[{astray}\] wait for 'b' at test_heartbeat.py:\d+ in \S+"
    says = rf"{first} while ranks {re.escape(str(others))} wait for 'a'"
    assert len(verdicts) == 3
    assert all(v and v.is_mismatch and re.search(says, v.text) for v in verdicts), verdicts


class _NotedError(RuntimeError):
    """An engine's error that keeps its notes, also before Python 3.11."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def add_note(self, note: str) -> None:
        self.notes.append(note)


def test_a_good_bye_reaches_ranks_that_have_no_link_to_who_left(three: Three) -> None:
    three.ranks[2].close()
    for heartbeat in three.ranks[:2]:
        for _ in range(200):  # 2 s at most
            if heartbeat.left_ranks():
                break
            heartbeat.wait_verdict(0.01)
        # Rank 0 has passed it on to rank 1, and is itself still there.
        assert heartbeat.left_ranks() == [2]
        error = _NotedError()
        heartbeat.explain(error)
        assert error.notes == ["loft_hvd: ranks [2] have ended their scripts"]
        assert heartbeat.verdict is None


def test_an_error_that_comes_before_the_good_bye_does_not_wait_longer(pairs: Pairs) -> None:
    """The launcher ends all ranks half a second after one has left."""
    first, second = pairs.both()
    leaving = threading.Timer(0.1, second.close)
    leaving.name = "leaving"
    leaving.start()
    began = time.monotonic()
    first.explain(error := _NotedError())
    took_s = time.monotonic() - began
    leaving.join(timeout=10)
    assert error.notes == ["loft_hvd: ranks [1] have ended their scripts"]
    assert took_s < 0.9  # of the second that it has


def test_who_has_left_an_elastic_job_is_logged(
    pairs: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is caught by what recovers, and the launcher ends the job."""
    first, second = pairs.both(is_elastic=True)
    second.close()
    for _ in range(200):  # 2 s at most
        if first.left_ranks():
            break
        first.wait_verdict(0.01)
    first.explain(_NotedError())
    assert "rank 0: ranks [1] have ended their scripts" in caplog.text


def test_a_rank_that_the_engines_failure_has_ended_is_not_blamed_for_it(three: Three) -> None:
    three.ranks[2].explain(_NotedError())  # of another rank's end, which nobody has seen so far
    three.ranks[2].close()
    for heartbeat in three.ranks[:2]:
        for _ in range(200):  # 2 s at most
            if 2 in heartbeat._observer.gone:
                break
            heartbeat.wait_verdict(0.01)
        assert 2 in heartbeat._observer.gone
        assert heartbeat.left_ranks() == []
        error = _NotedError()
        heartbeat.explain(error)
        assert error.notes == []


@pytest.mark.parametrize(
    "message",
    [
        Message("left", 2),
        Message("state", 1, 0.0, "X"),
        Message("look", 1, 0.0, "1|2|2"),
        Message("verdict", 2, 0.0, "rank 2 has failed"),
    ],
)
def test_a_rank_can_say_nothing_of_others(message: Message, pairs: Pairs) -> None:
    first, link = pairs.first(4242, control=ProcessControl(look=lambda pid, start: "S"))
    assert first.wait_verdict(0.1) is None  # it has been silent for long enough to be looked at
    for _ in range(3):
        link.send(message)
        assert first.wait_verdict(0.1) is None
    assert first.left_ranks() == []
    link.close()


def test_a_rank_that_fails_speaks_of_itself_whatever_it_says(pairs: Pairs) -> None:
    first, link = pairs.first(4242, control=ProcessControl(look=lambda pid, start: "S"))
    link.send(Message("failed", 1, 0.0, "rank 2 (process 7 on there) has failed: it is late"))
    verdict = first.wait_verdict(10)
    assert verdict is not None
    assert verdict.rank == 1
    assert verdict.text.startswith("rank 1 (process 4242 on here) has failed: rank 2 (")
    link.close()


def test_a_forked_process_does_not_speak_for_its_rank(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pairs.both()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        second.report(ValueError("of a loader process"))
        second.close()
    assert not second.is_closed
    assert first.wait_verdict(0.1) is None


def test_elastic_waits_are_left_to_the_engine(pairs: Pairs) -> None:
    first, second = pairs.both(is_elastic=True)
    second.report(ValueError("x"))
    assert first.wait_verdict(10) is not None
    assert first.final_verdict() is None


class _ArmedExit(ProcessExit):
    """Stands for the end of a process whose script an error has ended; never leaves it."""

    is_armed = True

    def install(self, *hooks: object, **options: object) -> None: ...

    def remove(self) -> None:
        self.is_armed = False  # a process that lives on: close ends all

    def leave_if_due(self) -> None: ...


@pytest.mark.parametrize(("is_elastic", "is_over"), [(False, False), (True, False), (False, True)])
def test_a_frozen_process_is_named_and_killed_only_where_the_job_recovers_or_is_over(
    is_elastic: bool, is_over: bool, pairs: Pairs
) -> None:
    killed: list[int] = []
    kills = is_elastic or is_over
    control = ProcessControl(
        exit=_ArmedExit(leave_s=None) if is_over else None,
        look=lambda pid, start: "T",
        kill=killed.append,
    )
    first, link = pairs.first(4242, is_elastic=is_elastic, control=control)
    with first.waiting():
        verdict = first.wait_verdict(10)
        assert verdict is not None
        assert "rank 1 (process 4242 on here) is frozen" in verdict.text
        for _ in range(1000 if kills else 10):
            if killed:
                break
            threading.Event().wait(0.01)  # let it look again
    first.close()
    assert set(killed) == ({4242} if kills else set())
    link.close()


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_process_whose_interpreter_stands_still_is_killed_only_where_the_job_recovers(
    is_elastic: bool, pairs: Pairs
) -> None:
    killed = threading.Event()
    control = ProcessControl(look=lambda pid, start: "S", kill=lambda pid: killed.set())
    first, link = pairs.first(4242, is_elastic=is_elastic, control=control, held_s=0.3)
    with first.waiting():
        for _ in range(1000):
            link.send(Message("pulse", 1))
            if first.wait_verdict(0.01) is not None:
                break
        verdict = first.verdict
        assert verdict is not None
        assert "rank 1 (process 4242 on here) runs, but its Python interpreter has" in verdict.text
        assert killed.wait(10.0 if is_elastic else 0.2) == is_elastic
    link.close()


def test_a_handler_of_logs_that_hangs_keeps_no_verdict_from_its_deeds(pairs: Pairs) -> None:
    """As where a script waits for other ranks in it, or a disk does not answer."""
    killed, handler = threading.Event(), logging.StreamHandler(io.StringIO())
    control = ProcessControl(look=lambda pid, start: "T", kill=lambda pid: killed.set())
    logger = logging.getLogger("loft_hvd")
    logger.addHandler(handler)
    handler.acquire()
    try:
        first, link = pairs.first(4242, is_elastic=True, control=control)
        assert killed.wait(10.0)
        verdict = first.wait_verdict(10.0)
    finally:
        handler.release()
        logger.removeHandler(handler)
    assert verdict is not None
    first.close()
    assert verdict.text in handler.stream.getvalue()
    link.close()


def test_an_annotator_that_hangs_keeps_no_verdict_back(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run log on a disk that does not answer."""

    class Annotator:
        def describe_failure(self, error: BaseException) -> FailureNote | None:
            return FailureNote("it had 7 samples", 7)

        def rank_failed(self, rank: int, num_samples: int) -> None:
            heard.append((rank, num_samples))
            goes_on.wait(30.0)

    heard: list[tuple[int, int]] = []
    goes_on, annotator = threading.Event(), Annotator()
    # Balancers of other tests in this process may live on, and would know the error as well.
    own = weakref.WeakSet[Annotator]()
    monkeypatch.setattr(causes, "_annotators", lambda: own)
    annotate_failures(annotator)
    first, second = pairs.both()
    second.report(MemoryError("full"))
    try:
        verdict = first.wait_verdict(10.0)
        assert verdict is not None
        assert "it had 7 samples" in verdict.text
    finally:
        goes_on.set()
    first.close()
    assert heard == [(1, 7)]


def test_a_signal_handler_may_wait_for_ranks_in_the_midst_of_anything(pairs: Pairs) -> None:
    """A script's handler may save a checkpoint, whatever this thread does right now."""
    first, _ = pairs.both()
    work = LocalWorld(1).transport(0).allreduce(torch.zeros(1), name="x")
    mine = watched(work, "x", first)
    link = first._connections._links[1]
    locks = [first.meter._lock, vars(mine)["_releasing"], link._lock]
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        first.late()
        first._observer.beat()
        wait_for(watched(work, "y", first), what="the sum", timeout_s=10)
    assert first.meter.progress().counts == {key_of("x"): 1, key_of("y"): 1}


@pytest.mark.parametrize("call", ["allreduce 'loss'", ""])
def test_a_frozen_rank_that_a_script_waits_for_in_the_engine_is_killed(
    call: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails by that; else its script would hang until the process is left."""
    monkeypatch.setattr("loft_hvd.failures.actions.engine_call", lambda: call)
    is_killed, end = threading.Event(), _Leaving()
    control = ProcessControl(
        exit=end, look=lambda pid, start: "T", kill=lambda pid: is_killed.set()
    )
    first, link = pairs.first(4242, control=control)
    assert first.wait_verdict(10) is not None
    assert is_killed.wait(10.0 if call else 0.2) == (call != "")
    assert not end.has_left.is_set()
    link.close()


class _Leaving(ProcessExit):
    """The clock of leaving a process, which is not left."""

    def __init__(self) -> None:
        super().__init__(leave_s=60.0)
        self.has_left = threading.Event()

    def install(self, *hooks: object, **options: object) -> None: ...

    def remove(self) -> None:
        self._leave_at = None  # a process that lives on: close ends all

    def _leave_without_python(self) -> None: ...

    def leave_if_due(self) -> None:
        if self._leave_at is not None and time.monotonic() >= self._leave_at:
            self.has_left.set()


class _LeavingAtOnce(_Leaving):
    """Leaves as soon as it is due, and remembers whether something was done by then."""

    def __init__(self, is_done: threading.Event) -> None:
        super().__init__()
        self._leave_s, self._is_done = 0.0, is_done
        self.was_done = False

    def leave_if_due(self) -> None:
        if not self.has_left.is_set():
            self.was_done = self._is_done.is_set()
            super().leave_if_due()


def test_a_rank_that_leaves_for_a_frozen_one_kills_it_first(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its launcher waits for it, long after all others have gone."""
    monkeypatch.setattr("loft_hvd.failures.actions.engine_call", lambda: "")
    killed = threading.Event()
    end = _LeavingAtOnce(killed)
    control = ProcessControl(exit=end, look=lambda pid, start: "T", kill=lambda pid: killed.set())
    first, link = pairs.first(4242, control=control)
    first._actions.settings = replace(first._actions.settings, leave_s=0.05)
    assert end.has_left.wait(20.0)
    assert end.was_done
    link.close()


@pytest.mark.parametrize(
    ("goes_on", "held_s", "leaves"), [(False, 30.0, True), (True, 30.0, False), (True, 0.2, True)]
)
def test_a_script_that_hangs_after_a_verdict_is_left_and_one_that_goes_on_only_late(
    goes_on: bool, held_s: float, leaves: bool, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be writing a checkpoint; here the main thread stands, and waits to be left."""
    if goes_on:  # another frame at every look
        monkeypatch.setattr(
            "loft_hvd.failures.call_sites.stack_of",
            lambda thread, most=1: [sys._getframe()],
        )
    end = _LeavingAtOnce(threading.Event())
    control = ProcessControl(exit=end, look=lambda pid, start: "R")
    first, link = pairs.first(4242, control=control, held_s=held_s)
    first._actions.settings = replace(first._actions.settings, leave_s=0.05)
    first._actions.decide(Verdict(1, "rank 1 has failed"))
    assert end.has_left.wait(20.0 if leaves else 0.5) == leaves
    link.close()


class _Launcher(LauncherGuard):
    """Notes that it is to be ended."""

    def __init__(self) -> None:
        super().__init__(own_process(), limit_s=0.0)
        self.is_started = False

    def start(self) -> None:
        self.is_started = True


@pytest.mark.parametrize(
    ("lost", "call", "leaves"),
    [
        ("is_unseen", "shutdown", True),
        ("is_cut", "shutdown", True),
        ("is_unseen", "allreduce 'loss'", True),  # the script's: it has not heard of the verdict
        ("is_unseen", "", False),  # it may be writing a checkpoint
        ("", "shutdown", False),  # the rank is gone, and the engine will see it
    ],
)
def test_who_hangs_in_the_engine_after_the_loss_of_a_host_leaves_at_once_and_ends_the_launcher(
    lost: str, call: str, leaves: bool, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loft_hvd.failures.actions.engine_call", lambda: call)
    end, launcher = _Leaving(), _Launcher()
    first, link = pairs.first(4242, control=ProcessControl(exit=end, launcher=launcher))
    first._actions.decide(Verdict(1, "rank 1 has been silent", **({lost: True} if lost else {})))
    if not call:
        first.heard()
        end.arm("an error has ended the script")
    assert end.has_left.wait(10.0 if leaves else 0.2) == leaves
    assert launcher.is_started == bool(lost)
    link.close()


@pytest.mark.parametrize("sign", ["process", "engine", "engine of another"])
def test_an_end_without_a_word_is_named(sign: str, pairs: Pairs) -> None:
    # On a busy machine the rank is silent for long before its end is seen: then it runs.
    def look(pid: int, start: int) -> str:
        return "X" if sign == "process" else "R"

    first, link = pairs.first(4242, control=ProcessControl(look=look))
    if sign == "engine of another":
        link.send(Message("engine", 1))
    link.close()
    error = _NotedError()
    if sign == "engine":
        first.explain(error)
    verdict = first.wait_verdict(10)
    assert verdict is not None
    assert "has ended without a word" in verdict.text
    assert error.notes == ([f"loft_hvd: {verdict.text}"] if sign == "engine" else [])


def test_the_end_of_a_link_alone_is_no_verdict(pairs: Pairs) -> None:
    first, link = pairs.first(4242, control=ProcessControl(look=lambda pid, start: "R"))
    link.close()
    assert first.wait_verdict(0.2) is None


def test_a_link_that_has_ended_before_it_is_taken_is_dropped(pairs: Pairs) -> None:
    """Its end may come with the welcome; the handshake has read both then."""
    ours, theirs = _linked()
    theirs.close()
    assert ours.receive() == []
    assert ours.is_closed
    own = own_process()
    first = pairs._make(0, ours, RankProcess(own.host_key + 1, 7, 0, "there"), is_elastic=False)
    until = time.monotonic() + 10
    # The heartbeat's thread closes it first, and then takes note.
    peer = first._diagnosis._peers[1]
    while peer.lost_at is None and time.monotonic() < until:
        time.sleep(0.01)
    assert peer.lost_at is not None
    assert ours.fileno() < 0


@pytest.mark.parametrize("how", ["is seen to end", "was never seen", "says good-bye"])
def test_where_ranks_are_told_to_end_processes_tell_who_has_ended(how: str) -> None:
    """The link of rank 2, which is killed, is held by a process that it has started."""
    ends = {rank: _linked() for rank in (1, 2)}
    looks = Counter[int]()

    def look(pid: int, start: int) -> str:
        del start
        looks[pid] += 1
        if pid == 1001 or (looks[pid] == 1 and how != "was never seen"):
            return "S"
        if how == "says good-bye":  # and is gone, right before this look
            ends[2][1].send(Message("left", 2))
        return "X"

    control = ProcessControl(look=look)
    known = {rank: RankProcess(control.own.host_key, 1000 + rank, 5, "here") for rank in ends}
    made = Heartbeat(
        {rank: ours for rank, (ours, _) in ends.items()},
        Diagnosis(0, known),
        settings=HeartbeatSettings(period_s=0.05),
        control=control,
    )
    ends[1][1].send(Message("term", 1))
    verdict = made.wait_verdict(10 if how == "is seen to end" else 0.5)
    made.close()
    for _, theirs in ends.values():
        theirs.close()
    if how == "is seen to end":
        assert verdict is not None
        assert verdict.text.startswith("rank 2 (process 1002 on here) has ended without a word")
    else:
        assert verdict is None


@pytest.mark.parametrize("says_good_bye", [False, True])
def test_a_rank_that_dies_as_another_one_does_is_named_with_it(says_good_bye: bool) -> None:
    """Though its own link has not ended yet: a launcher leaves no time to wait for that."""
    ends = {rank: _linked() for rank in (1, 2, 3)}
    seen = Counter[int]()

    def look(pid: int, start: int) -> str:
        del start
        seen[pid] += 1
        return "S" if pid == 1003 or seen[pid] == 1 else "X"  # they live when their links begin

    control = ProcessControl(look=look)
    known = {rank: RankProcess(control.own.host_key, 1000 + rank, 5, "here") for rank in ends}
    if says_good_bye:
        ends[2][1].send(Message("left", 2))
    ends[1][1].close()
    made = Heartbeat(
        {rank: ours for rank, (ours, _) in ends.items()},
        Diagnosis(0, known, clock=Clock()),
        settings=HeartbeatSettings(period_s=60.0),
        control=control,
    )
    verdict = made.wait_verdict(10)
    made.close()
    for _, theirs in ends.values():
        theirs.close()
    assert verdict is not None
    named = re.findall(r"rank (\d) \(process \d+ on here\) has ended without a word", verdict.text)
    assert named == (["1"] if says_good_bye else ["1", "2"])


@pytest.mark.parametrize("goes_by_reading", [True, False])
def test_a_rank_that_is_kept_from_running_blames_nobody_for_what_it_has_not_read(
    goes_by_reading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that runs on it blames the other: that is what the clock of reading is for."""
    beat, is_kept, clock = Observer.beat, threading.Event(), ReadClock()
    ours, theirs = _linked()

    def slow_beat(self: Observer) -> None:
        beat(self)
        for _ in range(0 if is_kept.is_set() else 12):  # 0.6 s between reading and judging
            theirs.send(Message("beat", 1))
            is_kept.wait(0.05)
        is_kept.set()

    monkeypatch.setattr(Observer, "beat", slow_beat)
    monkeypatch.setattr(ProgressMeter, "progress", lambda self: Progress(waited_s=100.0))
    limits = DiagnosisLimits(suspect_s=0.2, silent_s=0.4, stall_s=30.0)
    known = {1: RankProcess(1, 4242, 5, "far")}
    made = Heartbeat(
        {1: ours},
        Diagnosis(0, known, limits=limits, clock=clock if goes_by_reading else time.monotonic),
        settings=HeartbeatSettings(period_s=0.01, grace_s=0.0),
        control=ProcessControl(),
        clock=clock,
    )
    assert is_kept.wait(10)
    assert (made.wait_verdict(0.1) is None) == goes_by_reading
    made.close()
    theirs.close()


# Links that are made again.


@dataclass
class Reunion:
    """Ranks 0 and 1, which make links anew; closed in the end."""

    ranks: list[Heartbeat]

    def cut(self) -> None:
        """End the link as a network does, so that both sides see it."""
        link = self.ranks[0]._connections._links[1]  # rank 1 may not have heard of a new one yet
        link._socket.shutdown(socket.SHUT_RDWR)

    def wait_link(self, old: Link) -> None:
        for _ in range(1000):  # 10 s at most
            if self.ranks[0]._connections._links[1] is not old:
                return
            threading.Event().wait(0.01)
        raise AssertionError("no new link")


@pytest.fixture
def reunion() -> Iterator[Reunion]:
    own, limits = own_process(), DiagnosisLimits(suspect_s=1.5, silent_s=30.0, stall_s=30.0)
    links: list[OpenedLinks] = run_ranks(2, lambda t: open_links(Channel(t, "links", 10)))
    made = []
    for rank, each in enumerate(links):
        made.append(
            Heartbeat(
                {peer: new.link for peer, new in each.made.items()},
                Diagnosis(rank, {1 - rank: own}, limits=limits),
                settings=HeartbeatSettings(period_s=0.01, grace_s=0.0),
                control=ProcessControl(),
                maker=each.maker,
            )
        )
    yield Reunion(made)
    for heartbeat in made:
        heartbeat.close()


def test_a_lost_link_is_made_again_and_carries_what_was_said(reunion: Reunion) -> None:
    first, second = reunion.ranks
    for _ in range(2):
        old = first._connections._links[1]
        reunion.cut()
        reunion.wait_link(old)
        assert (first.verdict, second.verdict) == (None, None)
    second.report(ValueError("said on the new link"))
    verdict = first.wait_verdict(10)
    assert verdict is not None
    assert "said on the new link" in verdict.text


def test_what_is_said_while_the_link_is_lost_is_said_again(reunion: Reunion) -> None:
    first, second = reunion.ranks
    old = first._connections._links[1]
    reunion.cut()
    second.report(ValueError("said into the void"))
    reunion.wait_link(old)
    verdict = first.wait_verdict(10)
    assert verdict is not None
    assert "said into the void" in verdict.text


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(5, "rank 5 is frozen"),
        Verdict(5, "rank 5 takes other steps", is_mismatch=True),
        Verdict(5, "rank 5 has been silent", is_unseen=True),
    ],
)
def test_a_verdict_reaches_a_rank_that_comes_back(verdict: Verdict, reunion: Reunion) -> None:
    first, second = reunion.ranks
    reunion.cut()
    first._actions.decide(verdict)
    assert second.wait_verdict(10) == verdict


def test_a_rank_whose_link_is_silent_calls_again() -> None:
    own, clock = own_process(), Clock()
    links: list[OpenedLinks] = run_ranks(2, lambda t: open_links(Channel(t, "links", 10)))
    old, cut_off = links[0].made[1].link, links[1].made[0].link
    deaf, dead = _linked()  # what swallows all, as a firewall does
    limits = DiagnosisLimits(suspect_s=30.0, silent_s=60.0, stall_s=60.0)
    ends, clocks = [{1: old}, {0: deaf}], [Clock(), clock]  # only rank 1's time goes on
    made = [
        Heartbeat(
            ends[rank],
            Diagnosis(rank, {1 - rank: own}, limits=limits, clock=clocks[rank]),
            settings=HeartbeatSettings(period_s=0.01, grace_s=0.0),
            control=ProcessControl(),
            maker=links[rank].maker,
        )
        for rank in (0, 1)
    ]
    try:
        assert made[1].wait_verdict(0.05) is None
        assert made[0]._connections._links[1] is old  # it has not been silent for long
        clock.now += 31.0
        Reunion(made).wait_link(old)
        made[1].report(ValueError("heard"))
        verdict = made[0].wait_verdict(10)
        assert verdict is not None
        assert "heard" in verdict.text
    finally:
        for heartbeat in made:
            heartbeat.close()
        dead.close()
        cut_off.close()


def test_a_heartbeat_that_fails_closes_its_links(caplog: pytest.LogCaptureFixture) -> None:
    """And does not look alive to the others, who have nobody to hear them."""

    def look(pid: int, start: int) -> str:
        raise ValueError("a fault of our own")

    control = ProcessControl(look=look)
    (lost, gone), (kept, theirs) = _linked(), _linked()
    gone.close()
    known = {rank: RankProcess(control.own.host_key, 4242, 0, "here") for rank in (1, 2)}
    made = Heartbeat(
        {1: lost, 2: kept},
        Diagnosis(0, known, clock=Clock()),
        settings=HeartbeatSettings(period_s=60.0),
        control=control,
    )
    theirs._socket.settimeout(3)
    while theirs._socket.recv(4096):  # raises where the end does not come
        pass
    made.close()
    theirs.close()
    assert "the heartbeat has ended by an error of its own" in caplog.text


def test_nobody_calls_a_rank_that_has_said_good_bye(
    reunion: Reunion, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = reunion.ranks
    calls: list[None] = []
    monkeypatch.setattr(Caller, "_begin", lambda self: calls.append(None))
    first.close()
    assert second.wait_verdict(0.3) is None
    assert calls == []
