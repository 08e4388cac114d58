"""A wait for other ranks is known as one, whoever calls what waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import loft_hvd as loft
from loft_hvd.balance.interval import SUMS
from loft_hvd.balance.stopwatch import DeviceClock, StepTimer
from loft_hvd.transport import waits
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.clock import Clock

LATE_S = 0.3


def waited_in(call: Callable[[], object]) -> float:
    before = waits.totals()
    call()
    return waits.seconds([threading.get_ident()], before)


def group_of(rank: int, store: Any) -> Any:
    """Return a process group of two threads, by Gloo."""
    group = c10d.ProcessGroup(store, rank, 2)
    backend = c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group


def later(group: Any) -> None:
    group.allreduce([torch.ones(3)]).wait()


TORCHS: dict[str, Callable[[Any], object]] = {
    "wait": later,
    "future": lambda group: group.allreduce([torch.ones(3)]).get_future().wait(),
    "barrier": lambda group: group.barrier().wait(),
    "gather": lambda group: group._allgather_base(torch.ones(6), torch.ones(3)).wait(),
    "buffers": lambda group: vars(dist)["_broadcast_coalesced"](group, [torch.ones(3)], 2**20, 1),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_collectives_however_they_are_waited_for(name: str) -> None:
    waits.meter_torch()
    waits.meter_torch()  # once is enough, and twice the same
    store, found = vars(dist)["HashStore"](), {}

    def work(rank: int) -> None:
        group = group_of(rank, store)
        later(group)  # connected
        time.sleep(LATE_S * rank)
        found[rank] = waited_in(lambda: TORCHS[name](group))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30.0)
    assert found[0] > 0.8 * LATE_S > found[1]


OURS: dict[str, Callable[[LocalTransport], object]] = {
    "average": lambda end: loft.average(1.0, 3, transport=end),
    "allreduce": lambda end: loft.allreduce(torch.ones(3), name="x", transport=end),
    "handle": lambda end: loft.allreduce_async(
        torch.ones(3), loft.Median(), name="x", transport=end
    ).wait(),
    "metric": lambda end: loft.Metric("x", transport=end).avg,
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_ones(name: str) -> None:
    def work(end: LocalTransport) -> float:
        time.sleep(LATE_S * end.rank)
        return waited_in(lambda: OURS[name](end))

    first, second = run_ranks(2, work)
    assert first > 0.8 * LATE_S > second


def test_what_waits_within_a_wait_counts_once() -> None:
    def nested() -> None:
        with waits.waiting():
            time.sleep(0.05)
            with waits.waiting():
                time.sleep(0.05)

    assert 0.1 <= waited_in(nested) < 0.15


def test_what_is_traced_is_not_timed() -> None:
    module = SimpleNamespace(wait=lambda x: x + 1)
    waits.meter(module, "wait", "not there")
    traced = torch.compile(lambda x: module.wait(x) * 2, fullgraph=True, backend="eager")
    assert traced(torch.ones(2)).tolist() == [4.0, 4.0]


def step(timer: StepTimer, clock: Clock, *, fetch_s: float, waited_s: float) -> None:
    clock.now += fetch_s
    timer.batch_arrived(local=8, remote=0, fetch_s=fetch_s, stall_s=fetch_s)
    clock.now += 0.1
    waits.add(waited_s)  # a loss that is averaged before the backward pass
    clock.now += waited_s
    timer.gradient_arrived()
    clock.now += 0.1
    timer.gradient_arrived()
    timer.computing_ended()
    waits.add(0.4)
    clock.now += 0.4
    timer.step_ended()


def test_a_loss_that_is_averaged_before_the_backward_pass_is_no_computing() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    waits.add(7.0)  # before the first step
    for _ in range(3):
        step(timer, clock, fetch_s=0.05, waited_s=0.3)
    sums = dict(zip(SUMS, timer.take() / 3, strict=True))
    assert sums["compute_s"] == pytest.approx(0.2)
    assert sums["wait_s"] == pytest.approx(0.7)
    assert sums["wall_s"] == pytest.approx(0.95)
    assert sums["other_s"] == pytest.approx(0.0)


def test_a_wait_that_is_left_out_is_left_out_once() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.batch_arrived(local=8, remote=0, fetch_s=0.0, stall_s=0.0)
    clock.now += 0.1
    with timer.exclude():
        clock.now += 5.0
        waits.add(5.0)
    timer.gradient_arrived()
    timer.step_ended()
    sums = dict(zip(SUMS, timer.take(), strict=True))
    assert (sums["compute_s"], sums["wait_s"]) == pytest.approx((0.1, 0.0))


def test_a_metric_between_two_steps_is_no_fetch() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.batch_arrived(local=8, remote=0, fetch_s=0.0, stall_s=0.0)
    timer.step_ended()
    waits.add(3.0)
    clock.now += 3.5
    assert timer.since_step_s() == pytest.approx(0.5)


class FakeEvent:
    def __init__(self, device: Clock) -> None:
        self._device = device

    def record(self, _: object) -> None:
        self.at = self._device.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


def test_a_device_that_waits_does_not_compute() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.device_clock = DeviceClock(lambda: FakeEvent(clock))
    timer.batch_arrived(local=8, remote=0, fetch_s=0.0, stall_s=0.0)
    clock.now += 0.1
    with waits.waiting():  # NCCL's, which the host only queues
        clock.now += 0.3
    clock.now += 0.1
    timer.gradient_arrived()
    with waits.waiting():  # after the last gradient: of the step, not of its computing
        clock.now += 0.2
    timer.computing_ended()
    waits.add(0.2)
    timer.step_ended()
    sums = dict(zip(SUMS, timer.take(), strict=True))
    assert sums["compute_s"] == pytest.approx(0.2)
    assert sums["wait_s"] == pytest.approx(0.3 + 0.2, abs=1e-3)


def test_what_is_queued_for_while_waiting_is_no_computing_either() -> None:
    clock, queue = Clock(), Clock()
    timer = StepTimer(clock, queue)
    timer.batch_arrived(local=8, remote=0, fetch_s=0.0, stall_s=0.0)
    queue.now += 0.05
    clock.now += 0.2
    with waits.waiting():  # asks and asks, on a crowded machine
        queue.now += 0.1
    timer.gradient_arrived()
    timer.computing_ended()
    timer.step_ended()
    sums = dict(zip(SUMS, timer.take(), strict=True))
    assert sums["queued_s"] == pytest.approx(0.05)
    assert sums["compute_s"] == pytest.approx(0.15, abs=1e-3)


def test_a_process_group_in_python_still_has_what_it_does_not_override() -> None:
    waits.meter_torch()

    class Own(dist.ProcessGroup):  # as of a library that wraps groups
        def allreduce(self, *arguments: Any) -> Any:
            return super().allreduce(*arguments)

    group: Any = vars()["Own"](0, 1)
    calls: list[Callable[[], Any]] = [group.barrier, lambda: group.allreduce([torch.ones(1)])]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:  # torch's own words: it has no backend
            call()
        assert not isinstance(caught.value, RecursionError)


def test_watchers_may_come_and_go_while_threads_wait() -> None:
    ends = threading.Event()

    def make() -> None:
        while not ends.is_set():
            DeviceClock(lambda: None)

    makers = [threading.Thread(target=make) for _ in range(2)]
    for each in makers:
        each.start()
    for _ in range(3000):
        with waits.waiting():
            pass
    ends.set()
    for each in makers:
        each.join(10.0)
    assert waited_in(lambda: TORCHS["barrier"](group_alone())) > 0


def group_alone() -> Any:
    store = vars(dist)["HashStore"]()
    group = c10d.ProcessGroup(store, 0, 1)
    backend = c10d.ProcessGroupGloo(store, 0, 1, timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group


def test_a_wait_on_another_stream_is_not_the_batchs() -> None:
    clock, stream = Clock(), [0]
    marks = DeviceClock(lambda: FakeEvent(clock), lambda: stream[0])
    marks.arrived()
    clock.now += 0.2
    stream[0] = 1
    with waits.waiting():
        clock.now += 0.3
    stream[0] = 0
    marks.gradient()
    span = marks.take()
    assert span is not None
    assert (span.seconds, span.waited_s) == pytest.approx((0.5, 0.0))
