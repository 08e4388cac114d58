"""Horovod as the engine, without it: process sets that exist, may not be added, or are lost."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from loft_hvd.errors import UsageError
from loft_hvd.transport.horovod import (
    HorovodTransport,
    _warn_of_sets_in_elastic_jobs,
    own_process_set,
)
from tests.support.worlds import elastic_job


class _FakeHorovod:
    """Process sets as Horovod has them: known ones, and none may be added."""

    class ProcessSet:
        def __init__(self, ranks: list[int]) -> None:
            self.ranks, self.process_set_id = ranks, -1

    class _basics:  # noqa: N801 - Horovod's name
        @staticmethod
        def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
            return {0: [0, 1, 2, 3], 1: [0, 1], 4: [2, 3]}

    @staticmethod
    def rank() -> int:
        return 2

    @staticmethod
    def size() -> int:
        return 4

    @staticmethod
    def add_process_set(_: object) -> None:
        raise ValueError("Set HOROVOD_DYNAMIC_PROCESS_SETS=1")


def test_process_sets_that_exist_are_used() -> None:
    fake = _FakeHorovod()
    own = own_process_set(fake, fake, [(0, 1), (2, 3)])
    assert (own.ranks, own.process_set_id) == ([2, 3], 4)


def test_process_sets_that_may_not_be_added_are_an_error_with_ways_out() -> None:
    fake = _FakeHorovod()
    with pytest.raises(
        UsageError, match=r"\[0, 2\].*process_sets=\"dynamic\".*HOROVOD_DYNAMIC"
    ) as raised:
        own_process_set(fake, fake, [(0, 2), (1, 3)])
    assert "hvd.init(process_sets=[hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])])" in str(
        raised.value
    )


class _LargerHorovod(_FakeHorovod):
    """A fifth rank does not call: adding a set would wait for it for ever."""

    @staticmethod
    def size() -> int:
        return 5

    @staticmethod
    def add_process_set(_: object) -> None:
        pytest.fail("waits for ranks that do not call")


def test_process_sets_among_some_ranks_are_found_but_never_added() -> None:
    fake = _LargerHorovod()
    assert own_process_set(fake, fake, [(0, 1), (2, 3)]).process_set_id == 4
    says = r"over= with process_set=: .*\[0, 2\].*hvd\.add_process_set, or .*: hvd\.init\(.*State\("
    with pytest.raises(UsageError, match=says):
        own_process_set(fake, fake, [(0, 2), (1, 3)])


def test_process_sets_in_an_elastic_job_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every = SimpleNamespace(process_set_id=0)
    engine = SimpleNamespace(allreduce_async_=print, Sum="sum", global_process_set=every)
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    _warn_of_sets_in_elastic_jobs.cache_clear()
    HorovodTransport(SimpleNamespace(process_set_id=3))
    with elastic_job():
        HorovodTransport()
        assert caplog.text == ""
        for _ in range(2):
            HorovodTransport(SimpleNamespace(process_set_id=3))
    assert caplog.text.count("but not from a rank that is killed") == 1


class _InternalError(RuntimeError):
    """Stands for Horovod's own, which ``hvd.elastic.run`` recovers from."""


@pytest.mark.parametrize("ask", ["rank", "world_size"])
@pytest.mark.parametrize(
    ("is_elastic", "message", "raised"),
    [
        (True, "Process set does not exist or has not been registered.", _InternalError),
        (False, "Process set does not exist or has not been registered.", ValueError),
        (True, "Horovod has not been initialized; use hvd.init().", ValueError),
    ],
    ids=["lost", "not elastic", "not begun"],
)
def test_an_elastic_job_recovers_from_a_set_that_is_gone_but_not_from_mistakes(
    is_elastic: bool,
    message: str,
    raised: type[Exception],
    ask: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimpleNamespace(HorovodInternalError=_InternalError, allreduce_async_=print, Sum="sum")
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)

    def gone() -> int:
        raise ValueError(message)

    lost = SimpleNamespace(rank=gone, size=gone, process_set_id=3)
    with elastic_job() if is_elastic else nullcontext():
        transport = HorovodTransport(lost)
        with pytest.raises(raised, match=message.split(";", maxsplit=1)[0]):
            getattr(transport, ask)


@pytest.mark.parametrize("fails", ["size", "alltoall_async"])
def test_an_error_of_starting_says_which_rank_is_behind_it(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> int:
        raise ValueError("Horovod has been shut down")

    told: list[Exception] = []
    calls = {"size": lambda: 2, "rank": lambda: 0, "alltoall_async": print} | {fails: gone}
    engine = SimpleNamespace(allreduce_async_=print, Sum="sum", process_set_id=0, **calls)
    heartbeat = SimpleNamespace(explain=told.append)
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setattr("loft_hvd.transport.horovod.heartbeat_of", lambda _: heartbeat)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    transport = HorovodTransport(engine)
    with pytest.raises(ValueError, match="shut down") as raised:
        transport.alltoall(torch.zeros(4), torch.zeros(4), name="shards")
    assert told == [raised.value]


class _Probed:
    """Horovod as its handles tell: what is started is in flight until it ``ends``."""

    Sum = "sum"

    def __init__(self) -> None:
        self.process_set_id = 0
        self.global_process_set = self
        self.open: set[int] = set()
        self.ended: set[int] = set()
        self.num_started = 0
        self.is_down = False

    def allreduce_async_(self, _: torch.Tensor, **__: object) -> int:
        if self.is_down:
            raise _InternalError("Horovod has been shut down")
        self.num_started += 1
        self.open.add(self.num_started)
        return self.num_started

    def size(self) -> int:
        return 2

    def end(self, *, badly: bool = False) -> None:
        self.is_down |= badly
        self.ended |= self.open

    def poll(self, handle: int) -> bool:
        if handle not in self.open:
            raise ValueError(f"Handle {handle} was not created or has been cleared.")
        return handle in self.ended

    def synchronize(self, handle: int) -> None:
        self.open.discard(handle)
        if self.is_down:
            raise _InternalError("Horovod has been shut down")


def test_asking_whether_horovod_is_down_keeps_one_operation_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _Probed()
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    transport = HorovodTransport()
    assert [transport._is_down() for _ in range(5)] == [False] * 5
    assert len(engine.open) == 1
    engine.end()  # every rank has asked
    assert [transport._is_down() for _ in range(5)] == [False] * 5
    assert (len(engine.open), engine.num_started) == (1, 2)
    engine.end(badly=True)
    assert [transport._is_down() for _ in range(2)] == [True] * 2
    assert not engine.open


@pytest.mark.parametrize("opens", [False, True])
def test_a_new_world_is_asked_by_an_operation_of_its_own(
    opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _Probed()
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setattr("loft_hvd.transport.horovod.open_heartbeat", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    transport = HorovodTransport()
    assert not transport._is_down()
    engine.open.clear()  # the world has ended, and its handles with it
    if opens:
        transport.open_heartbeat()
    # Without that the first answer is of the old world.
    assert [transport._is_down() for _ in range(3)] == [not opens, False, False]


def test_an_open_heartbeat_keeps_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _Probed()
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setattr("loft_hvd.transport.horovod.open_heartbeat", lambda *_, **__: None)
    monkeypatch.setattr("loft_hvd.transport.horovod.heartbeat_of", lambda _: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    transport = HorovodTransport()
    assert not transport._is_down()
    transport.open_heartbeat()  # by another optimizer
    assert not transport._is_down()
    assert engine.num_started == 1  # Horovod refuses two of one name
