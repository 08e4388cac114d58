"""Operations under the eyes of a heartbeat: who asks the engine, and when."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from loft_hvd.errors import MismatchError
from loft_hvd.transport.base import wait_for
from loft_hvd.transport.heartbeat.diagnosis import HeartbeatSettings, Limits, Verdict
from loft_hvd.transport.heartbeat.heartbeat import Heartbeat
from loft_hvd.transport.heartbeat.links import Link, own_place
from loft_hvd.transport.heartbeat.progress import key_of
from loft_hvd.transport.heartbeat.watched import watched
from loft_hvd.transport.local import LocalWorld

Maker = Callable[..., Heartbeat]


@pytest.fixture
def make_heartbeat() -> Iterator[Maker]:
    """Return a maker of rank 0's heartbeat, whose only peer is silent; closed in the end."""
    made: list[Heartbeat] = []
    peers: list[socket.socket] = []

    def make(*, is_elastic: bool = False) -> Heartbeat:
        own_end, peer = socket.socketpair()
        peers.append(peer)
        made.append(
            Heartbeat(
                0,
                {1: Link(own_end)},
                {1: own_place()},
                settings=HeartbeatSettings(
                    grace_s=0.0,
                    is_elastic=is_elastic,
                    limits=Limits(suspect_s=30.0, silent_s=30.0, stall_s=30.0),
                    owns_process=False,
                ),
                own_place=own_place(),
            )
        )
        return made[-1]

    yield make
    for heartbeat in made:
        heartbeat.close()
    for peer in peers:
        peer.close()


@pytest.fixture
def heartbeat(make_heartbeat: Maker) -> Heartbeat:
    """Return one such heartbeat."""
    return make_heartbeat()


class _Engine:
    """An operation that an engine may have done, though nobody has asked."""

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
    assert heartbeat.board.progress().in_flight == {("times", 1)}
    engine.is_done = True
    assert heartbeat.board.progress().in_flight == frozenset()
    assert (heartbeat.board.progress().counts or {})[key_of("times")] == 1
    wait_for(work, what="times", timeout_s=10)
    assert engine.is_released
    assert heartbeat.board.progress().in_flight == frozenset()


def test_what_the_engine_has_forgotten_is_asked_for_in_peace(heartbeat: Heartbeat) -> None:
    engine = _Engine()
    work = watched(engine, "x", heartbeat)
    engine.is_released = True  # with its world, by Horovod itself
    assert heartbeat.board.progress().in_flight == {("x", 1)}
    with pytest.raises(ValueError, match="cleared"):  # a wait must not take it for done
        work.done()


def test_nobody_asks_the_engine_for_what_has_been_released(heartbeat: Heartbeat) -> None:
    engine = _Engine()
    engine.is_done = True
    work = watched(engine, "x", heartbeat)
    (asks,) = heartbeat.board._in_flight.values()  # what a beat has just copied
    work.finish()
    assert engine.is_released
    assert asks()  # an engine that was asked now would raise


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
    asking = threading.Thread(target=heartbeat.board.progress)
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
    assert heartbeat.board.progress().in_flight == {("x", 1)}
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
    assert heartbeat.board.progress().in_flight == {("x", 1)}


class _Failed:
    """An operation that the engine has given up."""

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        raise RuntimeError("of the engine")


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_mismatch_ends_every_wait_and_is_not_tried_again(
    is_elastic: bool, make_heartbeat: Maker
) -> None:
    heartbeat = make_heartbeat(is_elastic=is_elastic)
    work = LocalWorld(2).transport(0).allreduce(torch.zeros(1), name="x")
    open_work, failed = watched(work, "x", heartbeat), watched(_Failed(), "y", heartbeat)
    heartbeat._decide(Verdict(1, "ranks take other steps", is_mismatch=True))
    for each in (open_work, failed):
        with pytest.raises(MismatchError, match="take other steps"):
            wait_for(each, what="the sum", timeout_s=10)
