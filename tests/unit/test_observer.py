"""What a rank tells of its connections, and when it looks at them; without a thread."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pytest

from loft_hvd.failures import observer
from loft_hvd.failures.actions import Actions, HeartbeatSettings, ProcessControl
from loft_hvd.failures.connections import Connections
from loft_hvd.failures.cuts import ConnectionEnd
from loft_hvd.failures.diagnosis import Diagnosis
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.observer import Observer
from loft_hvd.failures.process import RankProcess
from loft_hvd.failures.progress import ProgressMeter
from tests.support.clock import Clock

ADDRESSES = {f"10.0.0.{rank}": rank for rank in range(2)}
IN_VAIN = ConnectionEnd("10.0.0.1 7", "10.0.0.0 7", 0.0, 10.0, 5.0, 4, 9.0)


@dataclass
class Looks:
    """Stands for what looks at connections, and notes how it was asked to."""

    ends: list[ConnectionEnd] = field(default_factory=list)
    asked: list[list[str]] = field(default_factory=list)

    def look(self, asked: Collection[str] = ()) -> list[ConnectionEnd]:
        self.asked.append(list(asked))
        return self.ends

    def forget(self) -> None:
        self.asked.clear()


class End:
    """A rank's observer, and the far end of its one link."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = socket.socketpair()
        self.far, self.looks, self.clock = Link(theirs), Looks(), Clock()
        monkeypatch.setattr(observer, "EndWatch", lambda: self.looks)
        monkeypatch.setattr("loft_hvd.failures.observer.time.monotonic", self.clock)
        peer = 1 - rank
        self.connections = Connections({peer: Link(ours)}, period_s=60.0)
        self.diagnosis = Diagnosis(
            rank, {peer: RankProcess(7, 5, 5, "there")}, ranks_at=ADDRESSES, clock=self.clock
        )
        self.meter = ProgressMeter(self.clock)
        self.actions = Actions(
            self.diagnosis,
            self.connections,
            settings=HeartbeatSettings(),
            control=ProcessControl(),
            engine_is_down=lambda: False,
        )
        self.observer = Observer(self.diagnosis, self.connections, self.meter, self.actions)
        self.connections.open()
        self.observer.watch(peer)

    def told(self) -> list[str]:
        """Return what the other has been told of ends."""
        return [each.text for each in self.far.receive() if each.kind == "ends"]

    def hear(self, message: Message) -> None:
        self.far.send(message)
        self.observer.receive(1 - self.diagnosis.rank)

    def close(self) -> None:
        self.connections.close()
        self.actions.close()
        self.far.close()


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[End]:
    end = End(0, monkeypatch)
    yield end
    end.close()


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[End]:
    end = End(1, monkeypatch)
    yield end
    end.close()


def test_only_who_waits_looks_and_tells(other: End) -> None:
    other.looks.ends = [IN_VAIN]
    other.observer.tell_ends()
    with other.meter.waiting():
        other.clock.now = 0.9
        other.observer.tell_ends()
        assert (other.looks.asked, other.told()) == ([], [])
        other.clock.now = 10.0
        other.observer.tell_ends()
        assert other.looks.asked == [[]]
        assert other.told() == ["10.0.0.1 7,10.0.0.0 7,4,10.00,0.00,5.00,1.00,inf"]
    other.observer.tell_ends()
    assert other.told() == [""]  # it waits no more
    other.observer.tell_ends()
    assert other.told() == []


def test_who_is_asked_looks_until_it_is_not(other: End) -> None:
    other.hear(Message("ends", 0, 0.0, "10.0.0.0|10.0.0.1"))
    other.observer.tell_ends()
    assert other.looks.asked == [["10.0.0.0", "10.0.0.1"]]
    other.hear(Message("ends", 0))
    other.observer.tell_ends()
    assert other.looks.asked == []


def test_rank_0_asks_all_about_what_a_rank_tells_and_stops(first: End) -> None:
    first.clock.now = 100.0
    first.hear(Message("ends", 1, 0.0, "10.0.0.1 7,10.0.0.0 7,4,10.00,0.00,5.00,1.00,inf"))
    first.observer.tell_ends()
    assert first.told() == ["10.0.0.1|10.0.0.0"]
    first.observer.tell_ends()
    assert first.looks.asked == [["10.0.0.1", "10.0.0.0"]]  # it is one of all
    first.told()
    first.hear(Message("ends", 1))
    first.observer.tell_ends()
    assert first.told() == [""]
    first.observer.tell_ends()
    assert first.told() == []
