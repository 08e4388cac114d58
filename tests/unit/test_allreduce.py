"""``loft.allreduce`` on ranks that are threads: with and without a bucket in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.aggregation.reference import reference
from loft_hvd.errors import (
    ArgumentError,
    ArgumentTypeError,
    MismatchError,
    TransportTimeoutError,
)
from loft_hvd.pipeline import allreduce as allreduce_module
from loft_hvd.pipeline import flights
from loft_hvd.pipeline import reduction as reduction_module
from loft_hvd.pipeline.streams import StreamOrder
from loft_hvd.transport.base import Lane, Transport
from loft_hvd.transport.local import (
    LocalTransport,
    LocalWatch,
    LocalWorld,
    _LocalWork,
    run_ranks,
)
from tests.support.streams import FakeStreams

WORLD_SIZE = 4
RULES = [loft.Mean(), loft.Mean(reproducible=True), loft.Median(), loft.TrimmedMean(f=1)]


def row_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("part_bytes", [None, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 4, 2004, 2005])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_result_is_the_definitions_on_every_rank(
    rule: loft.Rule,
    numel: int,
    dtype: torch.dtype,
    part_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if part_bytes is not None:
        monkeypatch.setattr(reduction_module, "PART_BYTES", part_bytes)

    def work(transport: LocalTransport) -> Tensor:
        row = row_of(transport.rank, numel, dtype)
        for _ in range(2):  # buffers serve again
            result = loft.allreduce(row, rule, name="x", transport=transport)
        assert torch.equal(row, row_of(transport.rank, numel, dtype))
        return result

    rows = torch.stack([row_of(rank, numel, dtype) for rank in range(WORLD_SIZE)])
    expected = torch.from_numpy(reference(rows.double().numpy(), rule))
    results = run_ranks(WORLD_SIZE, work)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_wait_is_known_to_the_watch_and_names_who_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[int] = []

    @contextmanager
    def waiting(self: LocalWatch) -> Iterator[None]:
        waits.append(self.rank)  # else ranks that take other steps are not found
        yield

    monkeypatch.setattr(LocalWatch, "waiting", waiting)
    alone = LocalWorld(2).transport(0)
    with pytest.raises(TransportTimeoutError, match=r"'x': .* ranks \[1\] have not come to it"):
        loft.allreduce(torch.zeros(4), name="x", transport=alone, timeout_s=0.01)
    assert waits == [0]


def _refuse(_: Tensor) -> Tensor:
    raise ArithmeticError("a rule of the user's fails")


@pytest.mark.parametrize(
    ("rule", "differs", "error"),
    [(loft.Median(), True, MismatchError), (loft.Custom(_refuse), False, ArithmeticError)],
    ids=["ranks differ", "the rule fails"],
)
def test_what_has_failed_has_no_result_when_it_is_waited_for_again(
    rule: loft.Rule, differs: bool, error: type[Exception]
) -> None:
    def work(transport: LocalTransport) -> None:
        weights = [1 + transport.rank * differs] * WORLD_SIZE
        handle = loft.allreduce_async(
            torch.ones(400), rule, name="x", weights=weights, transport=transport
        )
        for _ in range(2):
            with pytest.raises(error):
                handle.wait(10.0)

    run_ranks(WORLD_SIZE, work)


def reduce_ones(transport: LocalTransport, name: str, **options: Any) -> list[float]:
    values: list[float] = loft.allreduce(
        torch.ones(3), loft.Median(), name=name, transport=transport, **options
    ).tolist()
    return values


def test_a_name_serves_again_when_its_operation_has_ended_after_its_wait() -> None:
    gave_up = threading.Event()

    def work(transport: LocalTransport) -> list[float]:
        if transport.rank == 0:
            with pytest.raises(TransportTimeoutError):
                reduce_ones(transport, "x", timeout_s=0.1)
            with pytest.raises(ArgumentError, match="is in flight"):
                reduce_ones(transport, "x")
            gave_up.set()
        else:
            assert gave_up.wait(20.0)
            reduce_ones(transport, "x")
        for other in ("y", "z"):  # they move it on, to its end
            reduce_ones(transport, other)
        return reduce_ones(transport, "x")

    assert run_ranks(2, work) == [[1.0] * 3] * 2


@pytest.mark.parametrize("numel", [400, 401])
def test_a_result_that_nobody_has_taken_yet_is_kept_while_its_name_serves_again(
    numel: int,
) -> None:
    def work(transport: LocalTransport) -> list[float]:
        handles = []
        for value in (1.0, 2.0):
            row = torch.full((numel,), value)
            handles.append(loft.allreduce_async(row, loft.Median(), name="x", transport=transport))
            until = time.monotonic() + 20.0
            while not handles[-1].done():
                assert time.monotonic() < until, "it does not end"
                time.sleep(0.001)
        return [float(handle.wait()[-1]) for handle in handles]

    assert run_ranks(2, work) == [[1.0, 2.0]] * 2


def test_a_name_that_has_failed_is_refused_with_what_has_ended_it() -> None:
    def work(transport: LocalTransport) -> list[float]:
        with pytest.raises(ArithmeticError):
            loft.allreduce(torch.ones(3), loft.Custom(_refuse), name="x", transport=transport)
        says = (
            r"'x': .* failed before \(ArithmeticError: a rule of the user's fails\).*another name"
        )
        with pytest.raises(ArgumentError, match=says):
            reduce_ones(transport, "x")
        return reduce_ones(transport, "y")

    assert run_ranks(2, work) == [[1.0] * 3] * 2


def test_a_name_whose_start_has_failed_is_refused_with_what_has_ended_it() -> None:
    class Broken(LocalTransport):
        def alltoall(self, *_: object, **__: object) -> _LocalWork:
            raise ConnectionError("the wire is cut")

    alone = Broken(LocalWorld(2), 0)
    with pytest.raises(ConnectionError):
        reduce_ones(alone, "x")
    with pytest.raises(ArgumentError, match=r"failed before \(ConnectionError: the wire is cut"):
        reduce_ones(alone, "x")


@pytest.mark.parametrize("numel", [400, 401])
@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=str)
def test_an_absent_rank_may_hold_anything(rule: loft.Rule, numel: int) -> None:
    present, weights = [True, True, False, True], [1, 2, 5, 3]

    def work(transport: LocalTransport) -> Tensor:
        row = row_of(transport.rank, numel, torch.float32)
        if transport.rank == 2:
            row.fill_(float("nan"))
        options = {"weights": weights, "present": present}
        return loft.allreduce(row, rule, name="x", transport=transport, **options)  # type: ignore[arg-type]

    rows = np.stack([row_of(rank, numel, torch.float32).numpy() for rank in (0, 1, 3)])
    expected = reference(rows, rule, weights=[1, 2, 3])
    for result in run_ranks(WORLD_SIZE, work):
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_results_are_tensors_of_their_own() -> None:
    def work(transport: LocalTransport) -> list[float]:
        results = [
            loft.allreduce(torch.full((8,), value), loft.Median(), name="x", transport=transport)
            for value in (1.0, 2.0)
        ]
        return [float(result[0]) for result in results]

    assert run_ranks(WORLD_SIZE, work) == [[1.0, 2.0]] * WORLD_SIZE


@pytest.mark.parametrize(("numel", "is_direct"), [(400, True), (401, False)])
def test_even_tensors_take_no_bucket(numel: int, is_direct: bool) -> None:
    def work(transport: LocalTransport) -> bool:
        tensor = torch.zeros(numel)
        return (
            allreduce_module.NamedReduction(
                Lane(transport), tensor, loft.Median(), "x"
            )._reduction.padded.numel()
            == 0
        )

    assert run_ranks(WORLD_SIZE, work) == [is_direct] * WORLD_SIZE


def test_tensors_of_other_layouts_keep_shape_and_values() -> None:
    def work(transport: LocalTransport) -> Tensor:
        tensor = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
        return loft.allreduce(tensor, loft.Median(), name="x", transport=transport)

    for result in run_ranks(2, work):
        assert torch.equal(result, torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1))


def test_names_that_never_come_again_keep_no_buffers() -> None:
    def work(transport: LocalTransport) -> int:
        first = loft.allreduce_async(torch.ones(4), name="first", transport=transport)
        for step in range(300):
            loft.allreduce(torch.ones(4), name=f"loss of step {step}", transport=transport)
        assert torch.equal(first.wait(), torch.ones(4))  # what is in flight is kept
        return len(allreduce_module._worlds()[transport][None].by_name)

    assert max(run_ranks(2, work)) <= 256


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("numel", [2004, 2005])
def test_16_bits_travel_as_16_bits_and_are_rounded_once(
    numel: int, rule: loft.Rule, dtype: torch.dtype
) -> None:
    class Counting(LocalTransport):
        sent_bytes = 0

        def _post(self, kind: str, name: str, send: Tensor, recv: Tensor) -> _LocalWork:
            self.sent_bytes += 0 if name.endswith(".agree") else send.nbytes
            return super()._post(kind, name, send, recv)

    def work(transport: LocalTransport) -> tuple[Tensor, int]:
        ends = Counting(transport._world, transport.rank)
        row = row_of(transport.rank, numel, dtype)
        return loft.allreduce(row, rule, name="x", transport=ends), ends.sent_bytes

    rows = torch.stack([row_of(rank, numel, dtype) for rank in range(WORLD_SIZE)])
    exact = torch.from_numpy(reference(rows.float().numpy(), rule)).to(dtype)
    for result, sent_bytes in run_ranks(WORLD_SIZE, work):
        assert torch.equal(result, exact)
        shards = -(-numel // WORLD_SIZE // 16) * 16 if numel % WORLD_SIZE else numel // WORLD_SIZE
        assert sent_bytes == 2 * shards * (WORLD_SIZE + 1)  # all shards, then the own one's result


def test_a_long_wait_asks_seldom_and_a_short_one_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer comes late by half a hundredth of the wait, or 0.1 ms, and 1 ms at most."""
    now = 0.0
    pauses: list[tuple[float, float]] = []

    def sleep(pause_s: float) -> None:
        nonlocal now
        pauses.append((now, pause_s))
        now += pause_s

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(flights, "time", clock)
    alone = LocalWorld(2).transport(0)  # the other rank never comes
    handle = loft.allreduce_async(torch.ones(6), loft.Median(), name="x", transport=alone)
    with pytest.raises(TransportTimeoutError):
        handle.wait(1.0)
    allreduce_module.forget_reductions()  # and with them who still asks for it
    for at, pause_s in pauses:
        assert 1e-4 <= pause_s <= max(1e-4, 0.005 * at) + 1e-12
        assert pause_s <= 1e-3
    assert len(pauses) < 2000


def test_threads_that_wait_for_one_handle_all_get_its_result() -> None:
    def work(transport: LocalTransport) -> list[float]:
        handle = loft.allreduce_async(torch.ones(3), name="x", transport=transport)
        found: list[float] = []
        others = [
            threading.Thread(target=lambda: found.append(float(handle.wait(20.0)[0])))
            for _ in range(3)
        ]
        for other in others:
            other.start()
        for other in others:
            other.join(30.0)
        return found

    assert run_ranks(2, work) == [[1.0] * 3] * 2


def test_who_waits_on_a_gpu_follows_the_thread_that_has_moved_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = FakeStreams(monkeypatch)

    def rule(rows: Tensor) -> Tensor:
        assert "tensor" in streams.current.before  # which the owner's stream has made
        streams.current.queue("rule")
        return rows.mean(dim=0)

    def work(transport: LocalTransport) -> tuple[bool, bool]:
        streams.current.queue("tensor")
        handle = loft.allreduce_async(
            torch.ones(3), loft.Custom(rule), name="x", transport=transport
        )
        mover = threading.Thread(target=handle.wait, args=(20.0,))
        mover.start()
        mover.join(30.0)
        before = "rule" in streams.current.before
        handle.wait()
        return before, "rule" in streams.current.before

    assert run_ranks(3, work) == [(False, True)] * 3


def test_an_interrupt_in_the_midst_of_a_wait_leaves_the_handle_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted: list[threading.Thread] = []
    take = StreamOrder.take

    def interrupt(self: StreamOrder) -> None:
        thread = threading.current_thread()
        if thread.name.startswith("loft-rank") and thread not in interrupted:
            interrupted.append(thread)
            raise KeyboardInterrupt
        take(self)

    monkeypatch.setattr(StreamOrder, "take", interrupt)
    # Else it may have done all before the wait begins.
    monkeypatch.setattr(flights.ProgressThread, "wake", lambda _: None)

    def work(transport: LocalTransport) -> list[float]:
        handle = loft.allreduce_async(torch.ones(3), loft.Median(), name="x", transport=transport)
        with pytest.raises(KeyboardInterrupt):
            handle.wait(30.0)
        values: list[float] = handle.wait(30.0).tolist()
        return values

    assert run_ranks(2, work) == [[1.0] * 3] * 2


@pytest.mark.parametrize("weights", [[0.75, 1.25, 1.0], [1.5, 1.0, 1.0], [1, float("nan"), 1]])
def test_weights_that_are_no_counts_are_refused(weights: Any) -> None:
    def work(end: LocalTransport) -> None:
        with pytest.raises(ArgumentTypeError, match="whole numbers"):
            loft.allreduce(torch.ones(4), name="x", weights=weights, transport=end)

    run_ranks(3, work)


def test_the_turn_is_waited_for_no_longer_than_the_limit() -> None:
    moving = flights.Flights(name="test.turn")
    done: list[int] = []
    moving.in_turn(lambda: done.append(1), timeout_s=5, too_late=lambda: ValueError("late"))
    with moving._turn, pytest.raises(ValueError, match="late"):
        moving.in_turn(lambda: done.append(2), timeout_s=0.01, too_late=lambda: ValueError("late"))
    assert done == [1]
    moving.close()


def test_a_world_of_the_same_size_that_is_opened_anew_has_its_own_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def world(key: str) -> Transport:
        end = run_ranks(1, lambda end: end)[0]
        end.can = replace(end.can, world=key)
        return end

    allreduce_module._kept_end.cache_clear()
    ends = []
    for key in ("first", "first", "second"):
        monkeypatch.setattr(allreduce_module, "default_transport", lambda key=key: world(key))
        ends.append(allreduce_module._default_end())
    assert ends[0] is ends[1]
    assert ends[2] is not ends[1]
    assert ends[2].can.world == "second"
    allreduce_module._kept_end.cache_clear()
