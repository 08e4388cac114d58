"""Operations under the eyes of a heartbeat: who asks the engine, and when."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from loft_hvd.config import config
from loft_hvd.errors import MismatchError
from loft_hvd.failures.actions import HeartbeatSettings, ProcessControl
from loft_hvd.failures.diagnosis import Diagnosis, DiagnosisLimits
from loft_hvd.failures.handshake import open_links
from loft_hvd.failures.heartbeat import Heartbeat
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.process import own_process
from loft_hvd.failures.progress import key_of
from loft_hvd.failures.watched import open_heartbeat, watched
from loft_hvd.transport.base import Channel, wait_for
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks


@dataclass
class Watching:
    """Makes heartbeats of rank 1, whose only peer is rank 0, silent but where a test speaks."""

    made: list[Heartbeat] = field(default_factory=list)
    peers: list[Link] = field(default_factory=list)

    def make(self, *, is_elastic: bool = False) -> Heartbeat:
        own_end, peer = socket.socketpair()
        self.peers.append(Link(peer))
        limits = DiagnosisLimits(suspect_s=30.0, silent_s=30.0, stall_s=30.0)
        heartbeat = Heartbeat(
            {0: Link(own_end)},
            Diagnosis(1, {0: own_process()}, limits=limits),
            settings=HeartbeatSettings(grace_s=0.0, is_elastic=is_elastic),
            control=ProcessControl(),
        )
        self.made.append(heartbeat)
        return heartbeat


@pytest.fixture
def watching() -> Iterator[Watching]:
    """Return a maker of heartbeats, which are closed in the end."""
    maker = Watching()
    yield maker
    for heartbeat in maker.made:
        heartbeat.close()
    for peer in maker.peers:
        peer.close()


@pytest.fixture
def heartbeat(watching: Watching) -> Heartbeat:
    """Return one such heartbeat."""
    return watching.make()


class _Engine:
    """An operation that an engine may have done, though nobody has asked."""

    watch = None

    def __init__(self) -> None:
        self.is_done = self.is_released = False

    def done(self) -> bool:
        if self.is_released:
            raise ValueError("handle was not created or has been cleared")  # as Horovod says it
        return self.is_done

    def finish(self) -> None:
        self.is_released = True


def test_what_the_engine_has_done_is_not_in_flight_though_nobody_has_asked(
    heartbeat: Heartbeat,
) -> None:
    """Times travel now and are taken up steps later: else they hide that ranks are astray."""
    engine = _Engine()
    work = watched(engine, "times", heartbeat)
    assert heartbeat.meter.progress().in_flight == (("times", 1),)
    engine.is_done = True
    assert heartbeat.meter.progress().in_flight == ()
    assert (heartbeat.meter.progress().counts or {})[key_of("times")] == 1
    wait_for(work, what="times", timeout_s=10)
    assert engine.is_released
    assert heartbeat.meter.progress().in_flight == ()


def test_what_the_engine_has_forgotten_is_asked_for_in_peace(heartbeat: Heartbeat) -> None:
    engine = _Engine()
    work = watched(engine, "x", heartbeat)
    engine.is_released = True  # with its world, by Horovod itself
    assert heartbeat.meter.progress().in_flight == (("x", 1),)
    with pytest.raises(ValueError, match="cleared"):  # a wait must not take it for done
        work.done()


def test_nobody_asks_the_engine_for_what_has_been_released(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[], bool]] = []  # what a beat has just copied
    posted = heartbeat.meter.posted

    def note(name: str, is_over: Callable[[], bool]) -> tuple[str, int]:
        asked.append(is_over)
        return posted(name, is_over)

    monkeypatch.setattr(heartbeat.meter, "posted", note)
    engine = _Engine()
    engine.is_done = True
    work = watched(engine, "x", heartbeat)
    work.finish()
    assert engine.is_released
    (is_over,) = asked
    assert is_over()  # an engine that was asked now would raise


class _SlowEngine(_Engine):
    """One whose first question is under way until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = True
        self.entered, self.may_leave, self.has_left = (threading.Event() for _ in range(3))
        self.was_released_meanwhile = False

    def done(self) -> bool:
        is_first = not self.entered.is_set()
        self.entered.set()
        if is_first:
            self.may_leave.wait(10)
            self.was_released_meanwhile = self.is_released
            self.has_left.set()
        return self.is_done


def test_what_is_being_asked_for_is_not_released_meanwhile(heartbeat: Heartbeat) -> None:
    engine = _SlowEngine()
    work = watched(engine, "x", heartbeat)
    asking = threading.Thread(target=heartbeat.meter.progress)
    releasing = threading.Thread(target=work.finish)
    asking.start()
    assert engine.entered.wait(10)
    releasing.start()
    releasing.join(0.4)  # time to do it wrongly
    engine.may_leave.set()
    assert engine.has_left.wait(10)  # whichever thread it was, a beat's or ours
    for thread in (asking, releasing):
        thread.join(10)
    assert engine.is_released
    assert not engine.was_released_meanwhile


@pytest.mark.parametrize("error", [ValueError("cleared"), RuntimeError("of another engine")])
def test_an_engine_that_fails_when_asked_does_not_end_the_heartbeat(
    error: Exception, heartbeat: Heartbeat
) -> None:
    class Failing(_Engine):
        def done(self) -> bool:
            raise error

    work = watched(Failing(), "x", heartbeat)
    assert heartbeat.meter.progress().in_flight == (("x", 1),)
    with pytest.raises(type(error), match=str(error)):
        work.done()


def test_an_operation_that_was_given_up_stays_in_flight_without_its_tensors(
    heartbeat: Heartbeat,
) -> None:
    engine = _Engine()
    held = weakref.ref(engine)
    work: object = watched(engine, "x", heartbeat)
    del engine, work
    gc.collect()
    assert held() is None
    assert heartbeat.meter.progress().in_flight == (("x", 1),)


class _Failed:
    """An operation that the engine has given up."""

    watch = None

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        raise RuntimeError("of the engine")


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_mismatch_ends_every_wait_and_is_not_tried_again(
    is_elastic: bool, watching: Watching
) -> None:
    heartbeat = watching.make(is_elastic=is_elastic)
    work = LocalWorld(2).transport(0).allreduce(torch.zeros(1), name="x")
    open_work, failed = watched(work, "x", heartbeat), watched(_Failed(), "y", heartbeat)
    watching.peers[0].send(Message("verdict", 1, 1.0, "ranks take other steps"))  # 1.0: a mismatch
    assert heartbeat.wait_verdict(10) is not None
    for each in (open_work, failed):
        with pytest.raises(MismatchError, match="take other steps"):
            wait_for(each, what="the sum", timeout_s=10)


def test_no_heartbeat_where_a_rank_cannot_reach_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = open_links

    def without_rank_2(channel: Channel) -> object:
        links = real(replace(channel, timeout_s=0.5))
        if channel.rank == 2:
            links.close()
            links.made.clear()
        return links

    monkeypatch.setattr("loft_hvd.failures.watched.open_links", without_rank_2)

    def work(transport: LocalTransport) -> object:
        return open_heartbeat(transport, "test", engine_is_down=lambda: False)

    assert run_ranks(3, work) == [None] * 3
    assert "heartbeat off: ranks [2] cannot reach rank 0 by TCP" in caplog.text


def test_no_heartbeat_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOFT_HVD_HEARTBEAT_S", "0")
    config.cache_clear()
    try:
        assert run_ranks(2, lambda t: open_heartbeat(t, "x", engine_is_down=bool)) == [None] * 2
    finally:
        config.cache_clear()
