"""All that is taken of Horovod beyond its public names, of Horovod 0.28 alone.

Its public calls of all-to-all and all-gather allocate their output on every call, which costs more
than the exchange itself for large buckets; their private halves take the output tensor. Which
operations a script has started, whether Horovod is down and which process sets there are it tells
nobody, and it calls nobody when it ends.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loft_hvd.errors import MissingDependencyError
from loft_hvd.failures.call_sites import locals_of
from loft_hvd.transport.waits import meter

__all__ = [
    "allgather_of",
    "alltoall_of",
    "calls_at_shutdown",
    "check_version",
    "count_others",
    "hosts_updated_error",
    "meter_waits",
    "operations",
    "process_sets_of",
    "starting",
    "table_question",
]

_VERSION = "0.28."  # what the set-up builds; all that is private here is of this one
_JOINED = 2**53  # operations of a rank that has joined: more than any rank starts


def check_version(found: str) -> None:
    """Refuse a Horovod whose private names are not known.

    Raises:
        MissingDependencyError: it is not Horovod 0.28.
    """
    if not found.startswith(_VERSION):
        raise MissingDependencyError(
            f"Horovod {found} is installed, and loft_hvd works with {_VERSION}x alone, of which it "
            "uses names that are not public; `make setup` builds 0.28.1, and `loft-hvd doctor` "
            "says what is there"
        )


def operations() -> Any:
    """Return the module of Horovod's operations; ``ops`` in the functions below."""
    return importlib.import_module("horovod.torch.mpi_ops")


def alltoall_of(ops: Any) -> Callable[..., int]:
    """Return what takes (send, splits, output, received splits); no splits: in equal shards."""
    call: Callable[..., int] = ops._alltoall_async
    return call


def allgather_of(ops: Any) -> Callable[..., int]:
    """Return what takes (send, output)."""
    call: Callable[..., int] = ops._allgather_async
    return call


def process_sets_of(ops: Any) -> Callable[[], dict[int, list[int]]]:
    """Return what tells the ranks of every process set, by its number.

    It waits for Horovod's table of sets, with the interpreter's lock in hand where sets are
    dynamic. A ValueError of it says that Horovod is down, and its table with it.
    """
    ask: Callable[[], dict[int, list[int]]] = ops._basics._get_process_set_ids_and_ranks
    return ask


def table_question(ops: Any) -> Callable[[], object]:
    """Return what waits for Horovod's table of process sets, without the interpreter's lock.

    It is a function of ctypes, which gives the lock up around each call; pybind11's do not.
    """
    question: Callable[[], object] = ops._basics.MPI_LIB_CTYPES.horovod_number_of_process_sets
    return question


def hosts_updated_error() -> type[Exception]:
    """Return the error that says that hosts have come or gone."""
    error: type[Exception] = importlib.import_module(
        "horovod.common.exceptions"
    ).HostsUpdatedInterrupt
    return error


def meter_waits(ops: Any) -> None:
    """Have what waits in Horovod's operations count as waits, from now on.

    All that is synchronous, and ``hvd.synchronize``, ends in this call of the library.
    """
    meter(ops.mpi_lib, "horovod_torch_wait_and_clear")


# What a script starts by itself.


@functools.cache
def _starting() -> set[int]:
    """Return the threads that are starting an operation of ours."""
    return set()


@contextmanager
def starting() -> Iterator[None]:
    """Start an operation of ours inside, which is not the script's."""
    me = threading.get_ident()
    _starting().add(me)
    try:
        yield
    finally:
        _starting().discard(me)


class _HandleMap(dict[int, Any]):
    """Horovod's own map from handles to tensors, which also counts what the script starts.

    Each of Horovod's functions puts its operation in here once, right after starting it. Counted
    are those over all ranks. Handles themselves do not tell: one that was started and released
    between two looks leaves no trace, and operations of ours and of process sets have some, too.
    """

    def __init__(self, handles: dict[int, Any]) -> None:
        super().__init__(handles)
        self.num_others = 0
        self.has_joined = False  # what others have done meanwhile is in no count of this rank's
        self._counting = threading.RLock()  # a signal handler of the script's may start one, too

    def __setitem__(self, handle: int, tensors: Any) -> None:
        super().__setitem__(handle, tensors)
        function = sys._getframe(1)
        some = locals_of(function, "process_set").get("process_set")  # that of all has the number 0
        if threading.get_ident() in _starting() or getattr(some, "process_set_id", 0) != 0:
            return
        with self._counting:
            self.num_others += 1
            self.has_joined |= function.f_code.co_name == "join"


def count_others(ops: Any) -> Callable[[], int]:
    """Count what the script starts over all ranks from now on; every rank calls it alike.

    Returns:
        What tells their number; it tells -1 once Horovod has been initialised anew. A rank that has
        joined has come to all that the others may do, for good.
    """
    known = ops._handle_map
    if not isinstance(known, _HandleMap):
        ops._handle_map = _HandleMap(known)
        ops._handle_map.update(known)  # with what another thread has just started
    counted: _HandleMap = ops._handle_map
    num_before = counted.num_others

    def num_others() -> int:
        if ops._handle_map is not counted:  # hvd.init() has made another one
            return -1
        return _JOINED if counted.has_joined else counted.num_others - num_before

    return num_others


@functools.cache
def calls_at_shutdown() -> list[Callable[[], None]]:
    """Return what ``hvd.shutdown`` calls at its end, once; any thread may add to it."""
    # Both ``hvd.shutdown`` and one that a script has imported look it up here when they are called.
    basics = operations()._basics
    shut_down, calls = basics.shutdown, list[Callable[[], None]]()

    @functools.wraps(shut_down)
    def shut_down_and_call() -> None:
        try:
            shut_down()
        finally:
            while calls:
                calls.pop()()

    basics.shutdown = shut_down_and_call
    return calls
