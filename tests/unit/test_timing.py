"""The stopwatch, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.explain import TIME_FIELDS
from loft_hvd.balance.timing import StepTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def assert_sums(timer: StepTimer, **expected: float) -> None:
    wanted = [expected.get(field, 0.0) for field in TIME_FIELDS]
    np.testing.assert_allclose(timer.take(), wanted, atol=1e-12)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def one_step(timer: StepTimer, clock: FakeClock, *, samples: int = 8, counts: bool = True) -> None:
    """Fetch 2 s, compute 5 s (1 s of it blocked in hooks), wait 3 s, 1 s of everything else."""
    clock.now += 2
    timer.batch_arrived(local=samples, remote=0, fetch_s=2.0, stall_s=2.0)
    clock.now += 4
    timer.gradient_arrived(blocked_s=0.0)
    clock.now += 2
    timer.gradient_arrived(blocked_s=1.0)
    timer.computing_ended()
    clock.now += 3
    clock.now += 1
    timer.step_ended(waited_s=3.0, counts=counts)


def test_a_step_is_told_apart_into_its_parts(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    one_step(timer, clock)
    assert_sums(
        timer,
        steps=2,
        samples=16,
        local=16,
        fetch_s=4,
        stall_s=4,
        compute_s=10,
        wait_s=6,
        other_s=4,
        wall_s=24,
    )
    assert_sums(timer)


def test_a_step_that_does_not_count_is_left_out(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock, counts=False)
    assert_sums(timer)


def test_excluded_time_belongs_to_no_part(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    with timer.exclude():
        clock.now += 50
    clock.now += 2
    timer.batch_arrived(local=5, remote=3, fetch_s=2.0, stall_s=2.0)
    with timer.exclude():
        clock.now += 70
    clock.now += 5
    timer.gradient_arrived()
    timer.step_ended(waited_s=0.0)
    assert_sums(
        timer,
        steps=2,
        samples=16,
        local=13,
        remote=3,
        fetch_s=4,
        stall_s=4,
        compute_s=10,
        wait_s=3,
        other_s=2,
        wall_s=19,
    )


def test_a_pause_between_epochs_belongs_to_no_step(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    timer.pause()
    clock.now += 500
    one_step(timer, clock)
    assert_sums(
        timer,
        steps=2,
        samples=16,
        local=16,
        fetch_s=4,
        stall_s=4,
        compute_s=10,
        wait_s=6,
        other_s=4,
        wall_s=24,
    )


def test_time_queued_for_a_core_is_not_computing(clock: FakeClock) -> None:
    queue = FakeClock()
    timer = StepTimer(clock, queue)
    clock.now += 1
    timer.batch_arrived(local=8, remote=0, fetch_s=1.0, stall_s=1.0)
    clock.now += 10
    queue.now += 4
    timer.gradient_arrived()
    timer.computing_ended()
    timer.step_ended(waited_s=0.0)
    assert_sums(
        timer, steps=1, samples=8, local=8, fetch_s=1, stall_s=1, compute_s=6, queued_s=4, wall_s=11
    )


def test_fetching_beside_the_computing_stalls_nobody(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    clock.now += 1
    timer.batch_arrived(local=8, remote=0, fetch_s=6.0, stall_s=0.5)
    clock.now += 10
    timer.gradient_arrived()
    timer.step_ended(waited_s=0.0)
    assert_sums(
        timer, steps=1, samples=8, local=8, fetch_s=6, stall_s=0.5, compute_s=10, wall_s=10.5
    )
