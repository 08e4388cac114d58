"""What is taken of Horovod beyond its public names: of which version, and what it tells."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from loft_hvd.errors import MissingDependencyError
from loft_hvd.transport.horovod import HorovodTransport
from loft_hvd.transport.horovod_private import (
    calls_at_shutdown,
    check_version,
    count_others,
    table_question,
)
from tests.support.fake_horovod import ALL, SOME, basics, fake_operations


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a Horovod whose operations end at once."""
    return fake_operations(monkeypatch)


def test_the_table_of_the_real_horovod_is_asked_without_the_interpreters_lock() -> None:
    ops = pytest.importorskip("horovod.torch.mpi_ops")
    question = table_question(ops)
    library = ops._basics.MPI_LIB_CTYPES
    assert question is library.horovod_number_of_process_sets
    # Of PyDLL, a kind of CDLL, it would keep the lock.
    assert isinstance(library, ctypes.CDLL)
    assert not isinstance(library, ctypes.PyDLL)


@pytest.mark.parametrize(("process_set", "num_counted"), [(None, 1), (ALL, 1), (SOME, 0)])
def test_operations_of_the_script_over_all_ranks_are_counted(
    process_set: object, num_counted: int, ops: Any
) -> None:
    ops.allreduce_async_(7)
    num_others = count_others(ops)
    for number in range(3):
        assert num_others() == number * num_counted
        # Released before anybody looks.
        assert ops.synchronize(ops.allreduce_async_(8, process_set=process_set)) == 8


def test_operations_of_ours_are_not_counted(ops: Any) -> None:
    num_others = count_others(ops)
    HorovodTransport().allreduce(torch.zeros(4), name="sum").finish()
    assert num_others() == 0


def test_every_heartbeat_counts_from_its_own_start(ops: Any) -> None:
    first = count_others(ops)
    ops.allreduce_async_(7)
    second = count_others(ops)
    ops.allreduce_async_(7)
    assert (first(), second()) == (2, 1)


def test_what_was_in_flight_when_the_counting_began_is_still_there(ops: Any) -> None:
    handle = ops.allreduce_async_(7)
    count_others(ops)
    assert ops.synchronize(handle) == 7


def test_a_rank_that_has_joined_has_come_to_all_that_others_do(ops: Any) -> None:
    """Others go on without it, so that their counts and its own are not compared any more."""
    num_others = count_others(ops)
    ops.join()
    joined = num_others()
    assert joined > 10**12
    ops.allreduce_async_(7)
    assert num_others() == joined


def test_nothing_is_counted_once_horovod_is_initialised_anew(ops: Any) -> None:
    num_others = count_others(ops)
    ops.init()
    assert num_others() == -1


@pytest.mark.parametrize(("version", "fits"), [("0.28.1", True), ("0.29.0", False), ("0.2", False)])
def test_only_the_horovod_whose_private_names_are_known_is_used(version: str, fits: bool) -> None:
    says = rf"Horovod {version} is installed, and loft_hvd works with 0\.28\.x alone"
    with nullcontext() if fits else pytest.raises(MissingDependencyError, match=says):
        check_version(version)


def test_what_is_to_be_called_as_horovod_ends_is_called_once_also_where_that_fails(
    ops: Any,
) -> None:
    def fail() -> None:
        raise RuntimeError("it has died")

    ops._basics = basics(shutdown=fail)
    calls_at_shutdown.cache_clear()
    called: list[str] = []
    calls_at_shutdown().append(lambda: called.append("memory"))
    calls_at_shutdown().append(lambda: called.append("mesh"))
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it has died"):
                ops._basics.shutdown()
    finally:
        calls_at_shutdown.cache_clear()
    assert sorted(called) == ["memory", "mesh"]
