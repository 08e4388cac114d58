"""Horovod as the engine, without it: process sets that exist, may not be added, or are lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loft_hvd.errors import (
    MismatchError,
    PeerError,
    TransportTimeoutError,
    UsageError,
)
from loft_hvd.failures.diagnosis import Verdict
from loft_hvd.transport.horovod import (
    _UNFUSED_BYTES,
    HorovodTransport,
    _unfused,
    _warn_of_dynamic_sets,
    _warn_of_sets_in_elastic_jobs,
    own_process_set,
)
from tests.support.fake_horovod import basics, fake_operations
from tests.support.worlds import elastic_job, environment


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
        UsageError, match=r"\[0, 2\].*list all sets.*process_sets=\"dynamic\".*HOROVOD_DYNAMIC"
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
    engine = SimpleNamespace(
        mpi_lib=None, allreduce_async_=print, Sum="sum", global_process_set=every, _basics=basics()
    )
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
    def gone() -> int:
        raise ValueError(message)

    engine = SimpleNamespace(
        mpi_lib=None,
        HorovodInternalError=_InternalError,
        allreduce_async_=print,
        Sum="sum",
        _basics=basics(_get_process_set_ids_and_ranks=gone),
    )
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)

    lost = SimpleNamespace(rank=gone, size=gone, process_set_id=3)
    with elastic_job() if is_elastic else nullcontext():
        transport = HorovodTransport(lost)
        with pytest.raises(raised, match=message.split(";", maxsplit=1)[0]):
            getattr(transport, ask)


@pytest.mark.parametrize("is_down", [True, False])
@pytest.mark.parametrize("fails", ["size", "_alltoall_async"])
def test_an_error_of_starting_says_which_rank_is_behind_it(
    fails: str, is_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that has only refused what it was given says nothing of ranks."""

    def gone(*_: object, **__: object) -> int:
        raise ValueError("Horovod has been shut down")

    told: list[Exception] = []
    calls = {"size": lambda: 2, "rank": lambda: 0, "_alltoall_async": print} | {fails: gone}
    engine = SimpleNamespace(
        mpi_lib=None,
        allreduce_async_=print,
        Sum="sum",
        process_set_id=0,
        _basics=basics(_get_process_set_ids_and_ranks=gone if is_down else dict),
        **calls,
    )
    heartbeat = SimpleNamespace(explain=told.append)
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setattr("loft_hvd.transport.horovod.heartbeat_of", lambda _: heartbeat)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    transport = HorovodTransport(engine)
    with pytest.raises(ValueError, match="shut down") as raised:
        transport.alltoall(torch.zeros(4), torch.zeros(4), name="shards")
    assert told == ([raised.value] if is_down else [])


def test_process_sets_that_are_added_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    class Dynamic(_FakeHorovod):
        rank = staticmethod(lambda: 0)
        add_process_set = staticmethod(lambda _: None)

    _warn_of_dynamic_sets.cache_clear()
    own_process_set(Dynamic(), Dynamic(), [(0, 1), (2, 3)])  # they exist
    assert caplog.text == ""
    with elastic_job():
        own_process_set(Dynamic(), Dynamic(), [(0, 2), (1, 3)])
    assert caplog.text == ""
    for _ in range(2):
        own_process_set(Dynamic(), Dynamic(), [(0, 2), (1, 3)])
    assert caplog.text.count("hvd.init(process_sets=[...])") == 1


class _Table:
    """Horovod as its table of process sets tells, which may be held for long."""

    Sum = "sum"
    mpi_lib = None
    process_set_id, ranks = 0, None

    def __init__(self) -> None:
        self.global_process_set = self._basics = self.MPI_LIB_CTYPES = self
        self.is_free = threading.Event()
        self.is_free.set()
        self.is_added = threading.Event()  # a process set, by all ranks
        self.is_down = False
        self.calls: list[str] = []

    def ProcessSet(self, ranks: list[int]) -> Any:  # noqa: N802 - Horovod's name
        return SimpleNamespace(ranks=ranks, process_set_id=None)

    def size(self) -> int:
        return 2  # of all ranks: Horovod knows it without its table

    def size_of_set(self) -> int:
        self.calls.append("size")
        self.is_free.wait()
        return 1

    def add_process_set(self, _: object) -> None:
        self.is_added.wait()

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        self.is_free.wait()
        if self.is_down:
            raise ValueError("Horovod has not been initialized properly; use hvd.init().")
        return {0: [0, 1]}

    def horovod_number_of_process_sets(self) -> int:
        self.calls.append("table")
        self.is_free.wait()
        return 1

    def allreduce_async_(self, *_: object, **__: object) -> int:
        self.calls.append("allreduce")
        return 7


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Table]:
    """Return a Horovod whose table is free, and free in the end."""
    engine = _Table()
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: engine)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", engine)
    yield engine
    engine.is_free.set()
    engine.is_added.set()


@pytest.mark.parametrize("is_down", [False, True])
def test_whether_horovod_is_down_is_told_by_its_table(is_down: bool, table: _Table) -> None:
    table.is_down = is_down
    assert HorovodTransport()._is_down() == is_down


def test_nobody_waits_for_a_table_that_horovod_holds_over_a_collective(table: _Table) -> None:
    transport = HorovodTransport()
    table.is_free.clear()  # a rank is frozen
    began = time.monotonic()
    assert not transport._is_down()
    assert time.monotonic() - began < 5.0
    assert table.calls == []  # nothing is started there


@pytest.mark.parametrize(("dynamic", "times"), [("0", 1), ("1", 2)])
def test_an_operation_first_waits_for_the_table_without_the_interpreters_lock(
    dynamic: str, times: int, table: _Table
) -> None:
    with environment(HOROVOD_DYNAMIC_PROCESS_SETS=dynamic):
        HorovodTransport().allreduce(torch.zeros(4), name="sum")
    assert table.calls == ["table"] * times + ["allreduce"]


def _start(table: _Table) -> None:
    table.is_free.clear()  # a rank is frozen, or its host is gone
    HorovodTransport().allreduce(torch.zeros(4), name="sum")


def _ask_for_size(table: _Table) -> None:
    table.is_free.clear()
    some: Any = SimpleNamespace(process_set_id=3, size=table.size_of_set)
    assert HorovodTransport(some).world_size == 1


def _find_sets(table: _Table) -> None:
    table.is_free.clear()
    HorovodTransport().subset([(0, 1)])


def _add_sets(_: _Table) -> None:
    HorovodTransport().subset([(0,), (1,)])  # and the other rank adds none


_WAITS = [
    pytest.param(_start, "starting 'sum'", id="start"),
    pytest.param(_ask_for_size, "asking for the ranks of horovod.3", id="size"),
    pytest.param(_find_sets, "over=: asking for process sets", id="find"),
    pytest.param(_add_sets, r"over=: adding the process set of ranks \[0\]", id="add"),
]


@pytest.mark.parametrize(("wait", "what"), _WAITS)
def test_a_wait_for_the_table_has_a_limit_and_a_way_out(
    wait: Callable[[_Table], None], what: str, table: _Table
) -> None:
    says = rf"{what}: no answer from Horovod within 0\.3 s; .*hvd\.init\(process_sets=\[\.\.\.\]\)"
    variables = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "LOFT_HVD_TIMEOUT_S": "0.3"}
    with environment(**variables), pytest.raises(TransportTimeoutError, match=says):
        wait(table)
    assert "allreduce" not in table.calls


@pytest.mark.parametrize(("elastic", "times"), [("0", 1), ("1", 3)])
def test_dynamic_sets_are_asked_for_their_ranks_once_unless_the_world_may_change(
    elastic: str, times: int, table: _Table
) -> None:
    some: Any = SimpleNamespace(process_set_id=3, size=table.size_of_set)
    with environment(HOROVOD_DYNAMIC_PROCESS_SETS="1", HOROVOD_ELASTIC=elastic):
        transport = HorovodTransport(some)
        assert [transport.world_size for _ in range(3)] == [1, 1, 1]
    assert table.calls == ["size"] * times


class _Knowing:
    """A heartbeat with a verdict, which it tells to whom it knows to wait."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._has_waiter = False
        self.is_heard = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._has_waiter = True
        yield

    def final_verdict(self) -> Verdict | None:
        return self._verdict if self._has_waiter else None

    def heard(self) -> None:
        self.is_heard = True

    def explain(self, _: Exception) -> None:
        pytest.fail("it is not Horovod that has failed")


@pytest.mark.parametrize(("is_mismatch", "error"), [(False, PeerError), (True, MismatchError)])
@pytest.mark.parametrize(("wait", "_what"), _WAITS)
def test_a_wait_for_the_table_ends_when_the_heartbeat_knows_who_is_behind_it(
    wait: Callable[[_Table], None],
    _what: str,
    is_mismatch: bool,
    error: type[Exception],
    table: _Table,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heartbeat = _Knowing(Verdict(1, "rank 1 is frozen", is_mismatch=is_mismatch))
    monkeypatch.setattr("loft_hvd.transport.horovod.heartbeat_of", lambda _: heartbeat)
    variables = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "LOFT_HVD_TIMEOUT_S": "60"}
    with environment(**variables), pytest.raises(error, match="rank 1 is frozen"):
        wait(table)
    assert heartbeat.is_heard


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a Horovod whose operations end at once."""
    return fake_operations(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int16])
@pytest.mark.parametrize("name", ["loft.b{:02d}.ag", "grad.1.p{}.ag"])
def test_large_results_of_neighbours_have_different_dtypes(name: str, dtype: torch.dtype) -> None:
    # Of one dtype, Horovod would fuse them.
    shard, result = (torch.zeros(each * 2**22, dtype=dtype) for each in (1, 4))
    views = [_unfused(shard, result, name.format(number)) for number in range(8, 12)]
    assert len({source.dtype for source, _ in views}) == 4
    for source, target in views:
        assert source.dtype == target.dtype
        assert (source.nbytes, target.nbytes) == (shard.nbytes, result.nbytes)
        assert (source.data_ptr(), target.data_ptr()) == (shard.data_ptr(), result.data_ptr())


@pytest.mark.parametrize("name", ["", "gradients", "\u00b2", "9" * 5000, "b3", "b4", "b5", "b6"])
@pytest.mark.parametrize(
    ("numel", "dtype"),
    [
        (_UNFUSED_BYTES // 4 - 4, torch.float32),  # small ones share a cycle
        (2**26, torch.uint8),  # no dtype is narrower
        (2**29, torch.float32),  # more bytes than MPI can count
    ],
)
def test_other_results_keep_their_dtype(numel: int, dtype: torch.dtype, name: str) -> None:
    shard, result = (torch.empty(each, dtype=dtype, device="meta") for each in (numel // 4, numel))
    assert [each.dtype for each in _unfused(shard, result, name)] == [dtype, dtype]


@pytest.mark.parametrize("name", ["", "gradients", "\u00b2", "9" * 5000])
def test_a_large_result_may_have_any_name(name: str) -> None:
    shard, result = (torch.zeros(each * 2**22) for each in (1, 4))
    assert _unfused(shard, result, name)[0].dtype in (torch.uint8, torch.int8, torch.int16)


def test_a_large_result_is_gathered_as_another_dtype(ops: Any) -> None:
    given: list[torch.Tensor] = []

    def gather(tensor: torch.Tensor, output: torch.Tensor, name: str, process_set: object) -> int:
        given.append(tensor)
        handle: int = ops.allreduce_async_(output.copy_(tensor.repeat(4)))
        return handle

    ops._allgather_async = gather
    shard = torch.arange(2**22, dtype=torch.float32)
    result = torch.zeros(4 * 2**22)
    HorovodTransport().allgather(shard, result, name="b1").finish()
    assert given[0].dtype == torch.int8
    assert torch.equal(result, shard.repeat(4))
