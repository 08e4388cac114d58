"""The stopwatch, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.timing import StepTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def one_step(timer: StepTimer, clock: FakeClock, *, samples: int = 8) -> None:
    """Fetch 2 s, compute 5 s (1 s of it blocked in hooks), wait 3 s, 1 s of everything else."""
    clock.now += 2
    timer.batch_arrived(samples, fetch_s=2.0)
    clock.now += 4
    timer.gradient_arrived(blocked_s=0.0)
    clock.now += 2
    timer.gradient_arrived(blocked_s=1.0)
    timer.computing_ended()
    clock.now += 3
    timer.waited(3.0)
    clock.now += 1
    timer.step_ended()


def test_a_step_is_told_apart_into_its_parts(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    one_step(timer, clock)
    np.testing.assert_allclose(timer.take(), [2, 16, 4, 10, 0, 6, 4])
    np.testing.assert_array_equal(timer.take(), np.zeros(7))


def test_a_step_without_samples_is_left_out(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock, samples=0)
    np.testing.assert_array_equal(timer.take(), np.zeros(7))


def test_excluded_time_belongs_to_no_part(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    with timer.exclude():
        clock.now += 50
    clock.now += 2
    timer.batch_arrived(8, fetch_s=2.0)
    with timer.exclude():
        clock.now += 70
    clock.now += 5
    timer.gradient_arrived()
    timer.step_ended()
    np.testing.assert_allclose(timer.take(), [2, 16, 4, 10, 0, 3, 2])


def test_a_pause_between_epochs_belongs_to_no_step(clock: FakeClock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    timer.pause()
    clock.now += 500
    one_step(timer, clock)
    np.testing.assert_allclose(timer.take(), [2, 16, 4, 10, 0, 6, 4])


def test_time_queued_for_a_core_is_not_computing(clock: FakeClock) -> None:
    queue = FakeClock()
    timer = StepTimer(clock, queue)
    clock.now += 1
    timer.batch_arrived(8, fetch_s=1.0)
    clock.now += 10
    queue.now += 4
    timer.gradient_arrived()
    timer.computing_ended()
    timer.step_ended()
    np.testing.assert_allclose(timer.take(), [1, 8, 1, 6, 4, 0, 0])
