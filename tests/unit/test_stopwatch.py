"""The stopwatch, on a clock of the test's own."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.explain import describe
from loft_hvd.balance.interval import SUM, SUMS, read_times, typical
from loft_hvd.balance.plan import Bools, Floats
from loft_hvd.balance.stopwatch import DeviceClock, StepSums, StepTimer
from loft_hvd.transport import waits
from tests.support.clock import Clock

FOLLOWS = {
    "busy_s2",
    "busy_skew",
    *(name for name in SUMS if "typical" in name or "spread" in name),
}


def assert_sums(timer: StepTimer, **expected: float) -> None:
    """Compare the sums; what follows from the steps is left to tests of its own."""
    found = dict(zip(SUMS, timer.take(), strict=True))
    found = {name: value for name, value in found.items() if name not in FOLLOWS}
    wanted = {field: expected.get(field, 0.0) for field in found}
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def one_step(timer: StepTimer, clock: Clock, *, samples: int = 8, counts: bool = True) -> None:
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
    waits.add(3.0)
    timer.step_ended(counts=counts)


def test_a_step_is_told_apart_into_its_parts(clock: Clock) -> None:
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


def test_a_step_that_does_not_count_is_left_out(clock: Clock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock, counts=False)
    assert_sums(timer)


def test_excluded_time_belongs_to_no_part(clock: Clock) -> None:
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
    timer.step_ended()
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


def test_a_pause_between_epochs_belongs_to_no_step(clock: Clock) -> None:
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


def test_time_queued_for_a_core_is_not_computing(clock: Clock) -> None:
    queue = Clock(100.0)
    timer = StepTimer(clock, queue)
    clock.now += 1
    timer.batch_arrived(local=8, remote=0, fetch_s=1.0, stall_s=1.0)
    clock.now += 10
    queue.now += 4
    timer.gradient_arrived()
    timer.computing_ended()
    timer.step_ended()
    assert_sums(
        timer, steps=1, samples=8, local=8, fetch_s=1, stall_s=1, compute_s=6, queued_s=4, wall_s=11
    )


@pytest.mark.parametrize(("queued_s", "own_s"), [(0.0, 0.0), (1.25, 2.5), (9.0, 6.0)])
def test_what_the_threads_of_the_exchange_queue_for_is_no_wait_for_others(
    queued_s: float, own_s: float, clock: Clock
) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    one_step(timer, clock)
    timer.own_batch_arrived(samples=1, stall_s=0.0, is_first=False)  # a script that is watched
    [rank] = read_times(timer.take(carriers_queued_s=queued_s)[None])
    assert (rank.queued_s, rank.typical_queued_s) == pytest.approx((own_s / 2, own_s / 2))
    assert rank.wait_s == pytest.approx(3.0 - own_s / 2)
    assert rank.wall_s == pytest.approx(12.0)


def test_threads_of_other_exchanges_are_not_looked_at(clock: Clock) -> None:
    timer = StepTimer(clock)
    one_step(timer, clock)
    [rank] = read_times(timer.take(carriers_queued_s=1.25)[None])
    assert (rank.queued_s, rank.wait_s) == (0.0, 3.0)


def test_fetching_beside_the_computing_stalls_nobody(clock: Clock) -> None:
    timer = StepTimer(clock)
    clock.now += 1
    timer.batch_arrived(local=8, remote=0, fetch_s=6.0, stall_s=0.5)
    clock.now += 10
    timer.gradient_arrived()
    timer.step_ended()
    assert_sums(
        timer, steps=1, samples=8, local=8, fetch_s=6, stall_s=0.5, compute_s=10, wall_s=10.5
    )


def test_a_checkpoint_that_nobody_announced_is_a_pause_and_no_step(clock: Clock) -> None:
    timer = StepTimer(clock)
    for step in range(10):
        if step == 6:
            clock.now += 600  # between two steps
        one_step(timer, clock)
    assert_sums(
        timer,
        steps=9,
        samples=72,
        local=72,
        fetch_s=18,
        stall_s=18,
        compute_s=45,
        wait_s=27,
        other_s=18,
        wall_s=108,
        paused_s=600,
    )


@pytest.mark.parametrize("num_steps", [257, 260])
def test_a_pause_is_none_of_the_steps_wherever_it_is_in_a_long_interval(
    num_steps: int, clock: Clock
) -> None:
    timer = StepTimer(clock)
    for step in range(num_steps):
        if step == num_steps - 1:
            clock.now += 600
        one_step(timer, clock)
    sums = timer.take()
    assert sums[SUM["steps"]] == num_steps - 1
    assert sums[SUM["paused_s"]] == 600


@pytest.mark.parametrize("num_pauses", [1, 40])
def test_pauses_add_up_to_what_they_took_however_long_the_interval(num_pauses: int) -> None:
    num_steps = 20_000  # of which 4,096 stand for all
    rows = np.zeros((num_steps, len(SUMS)))
    rows[:, SUM["steps"]] = rows[:, SUM["compute_s"]] = rows[:, SUM["wall_s"]] = 1.0
    at = np.random.default_rng(0).choice(num_steps, num_pauses, replace=False)
    rows[at, SUM["other_s"]] = 600.0
    rows[at, SUM["wall_s"]] = 601.0
    sums = StepSums()
    for _ in range(2):  # nothing of an interval is left for the next
        for row in rows:
            sums.add(row)
        [rank] = read_times(sums.take()[None])
        assert rank.paused_s * rank.steps == pytest.approx(600 * num_pauses)
        assert f"rank 0: {600 * num_pauses:.2f} s of pauses are left out" in describe([rank])


@pytest.mark.parametrize("seed", range(20))
def test_steps_with_a_pause_are_left_out_and_no_others(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_steps = int(rng.integers(5, 60))
    rows = rng.uniform(1.0, 2.0, (num_steps, len(SUMS)))
    rows[:, SUM["steps"]] = 1.0
    rows[:, SUM["other_s"]] *= 0.1
    is_paused = rng.permutation(num_steps) < rng.integers(0, num_steps // 2 + 1)
    rows[is_paused, SUM["other_s"]] = 60.0
    sums = StepSums()
    for row in rows:
        sums.add(row)
    found, kept = sums.take(), rows[~is_paused]
    whole = [at for name, at in SUM.items() if name not in FOLLOWS | {"paused_s"}]
    np.testing.assert_allclose(found[whole], kept[:, whole].sum(axis=0))
    usual = np.mean(typical(kept[:, SUM["compute_s"]])[0]) * len(kept)
    assert found[SUM["typical_compute_s"]] - kept[:, SUM["typical_compute_s"]].sum() == (
        pytest.approx(usual)
    )


@pytest.mark.parametrize("num_steps", [6, 20])
def test_pauses_are_told_where_half_of_the_steps_have_one(num_steps: int) -> None:
    sums = StepSums()
    pauses = np.random.default_rng(0).uniform(60.0, 600.0, num_steps // 2)
    for pause_s in [*pauses, *np.zeros(num_steps // 2)]:
        row = np.zeros(len(SUMS))
        row[[SUM["steps"], SUM["compute_s"]]] = 1.0
        row[SUM["other_s"]], row[SUM["wall_s"]] = pause_s, 1.0 + pause_s
        sums.add(row)
    [rank] = read_times(sums.take()[None])
    assert (rank.steps, rank.wall_s) == (num_steps // 2, 1.0)
    assert rank.paused_s * rank.steps == pytest.approx(pauses.sum())


def test_a_block_left_out_within_another_is_left_out_once(clock: Clock) -> None:
    timer = StepTimer(clock)
    for _ in range(2):
        with timer.exclude():
            clock.now += 1
            with timer.exclude():
                clock.now += 2
        one_step(timer, clock)
    plain = StepTimer(clock)
    for _ in range(2):
        one_step(plain, clock)
    assert timer.take().tolist() == plain.take().tolist()


def test_slow_steps_are_no_pauses(clock: Clock) -> None:
    timer = StepTimer(clock)
    for step in range(10):
        clock.now += 500 if step == 6 else 2
        fetch_s = 500.0 if step == 6 else 2.0
        timer.batch_arrived(local=8, remote=0, fetch_s=fetch_s, stall_s=fetch_s)
        clock.now += 5
        timer.gradient_arrived()
        timer.step_ended()
    sums = dict(zip(SUMS, timer.take(), strict=True))
    assert (sums["steps"], sums["stall_s"], sums["paused_s"]) == (10, 518, 0)


def test_the_square_of_the_work_gives_its_variation(clock: Clock) -> None:
    timer = StepTimer(clock)
    for seconds in (3.0, 5.0):
        clock.now += 1
        timer.batch_arrived(local=8, remote=0, fetch_s=1.0, stall_s=1.0)
        clock.now += seconds
        timer.gradient_arrived()
        timer.step_ended()
    assert timer.take()[SUM["busy_s2"]] == pytest.approx(4**2 + 6**2)


def test_samples_from_a_cache_are_local_and_told_apart(clock: Clock) -> None:
    timer = StepTimer(clock)
    timer.batch_arrived(local=6, remote=2, cached=4, fetch_s=0.0, stall_s=0.0)
    clock.now += 1
    timer.gradient_arrived()
    timer.step_ended()
    assert_sums(timer, steps=1, samples=8, local=6, remote=2, cached=4, compute_s=1, wall_s=1)


class FakeDevice:
    """A stream: work queued on it ends at ``ends``, whatever the host's clock says."""

    def __init__(self) -> None:
        self.ends = 0.0
        self.now = 0.0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at = -1.0

    def record(self, stream: None) -> None:
        assert stream is None
        self.at = self._device.ends

    def query(self) -> bool:
        return self._device.now >= self.at

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


def test_a_device_is_timed_by_its_own_clock_and_never_waited_for(clock: Clock) -> None:
    """The host queues 10 s of work in 1 s, then waits 12 s: 9 for the device, 3 for the wire."""
    device = FakeDevice()
    timer = StepTimer(clock)
    timer.device_clock = DeviceClock(device.event)
    clock.now += 2
    timer.batch_arrived(local=8, remote=0, fetch_s=2.0, stall_s=2.0)
    device.ends += 4
    timer.gradient_arrived()
    clock.now += 1
    device.ends += 6
    timer.gradient_arrived()
    timer.computing_ended()
    clock.now += 12
    waits.add(12.0)
    timer.step_ended()
    assert_sums(timer)  # not known yet
    device.now = 20.0
    assert_sums(
        timer,
        steps=1,
        samples=8,
        local=8,
        fetch_s=2,
        stall_s=2,
        compute_s=10,
        wait_s=3,
        wall_s=15,
    )


def test_a_device_computes_on_while_the_next_batch_is_fetched(clock: Clock) -> None:
    """4 s forward and 6 s backward on the device, and a fetch of 3 s beside them."""
    device = FakeDevice()
    timer = StepTimer(clock)
    timer.device_clock = DeviceClock(device.event)
    timer.batch_arrived(local=8, remote=0, fetch_s=3.0, stall_s=0.0)
    device.ends += 4
    clock.now += 3
    timer.fetched_ahead(stall_s=3.0)
    device.ends += 6
    timer.gradient_arrived()
    timer.computing_ended()
    clock.now += 7
    timer.step_ended()
    device.now = 10.0
    assert_sums(timer, steps=1, samples=8, local=8, fetch_s=3, compute_s=10, wall_s=10)


def test_steps_of_older_sizes_do_not_come_back_from_a_slow_device(clock: Clock) -> None:
    device = FakeDevice()
    timer = StepTimer(clock)
    timer.device_clock = DeviceClock(device.event)
    timer.batch_arrived(local=8, remote=0, fetch_s=0.0, stall_s=0.0)
    device.ends += 4
    timer.gradient_arrived()
    timer.step_ended()
    timer.discard()
    device.now = 9.0
    assert_sums(timer)


def test_what_is_summed_ahead_is_taken_once_and_later_steps_the_next_time(
    clock: Clock,
) -> None:
    timer = StepTimer(clock)
    timer.sum_up()  # nothing so far, which hides nothing of what follows
    one_step(timer, clock)
    assert timer.take()[SUM["steps"]] == 1
    for _ in range(3):
        one_step(timer, clock)
    timer.sum_up()
    one_step(timer, clock)
    assert timer.take()[SUM["steps"]] == 3
    assert timer.take()[SUM["steps"]] == 1
    one_step(timer, clock)
    timer.sum_up()
    timer.discard()
    assert_sums(timer)


def summed(compute_s: Floats) -> dict[str, float]:
    """Return the sums of an interval whose steps computed for so long, [num_steps]."""
    sums = StepSums()
    for seconds in compute_s.tolist():
        row = np.zeros(len(SUMS))
        row[[SUM["steps"], SUM["compute_s"], SUM["wall_s"]]] = 1.0, seconds, seconds
        sums.add(row)
    return dict(zip(SUMS, sums.take().tolist(), strict=True))


@pytest.mark.parametrize("long_s", [0.2, 8.0])
@pytest.mark.parametrize(
    ("num_steps", "num_long"), [(20, 3), (257, 1), (260, 4), (300, 50), (4096, 800)]
)
def test_an_interval_is_trimmed_as_a_whole_wherever_its_long_steps_are(
    num_steps: int, num_long: int, long_s: float
) -> None:
    seconds = np.random.default_rng(0).normal(0.1, 0.003, num_steps)
    seconds[-num_long:] = long_s
    sums = summed(seconds)
    assert sums["typical_compute_s"] / num_steps == pytest.approx(float(typical(seconds)[0]))
    assert sums["typical_compute_s"] / num_steps == pytest.approx(0.1, abs=0.003)
    assert sums["compute_spread_s2"] / num_steps == pytest.approx(float(typical(seconds)[1]))


@pytest.mark.parametrize(
    "is_long",
    [
        np.arange(20_000) >= 16_600,
        np.arange(20_000) < 3_400,
        np.arange(20_000) % 16 < 2,
        np.arange(20_000) % 6 == 5,
    ],
    ids=["in the end", "at first", "two of sixteen", "every sixth"],
)
def test_long_steps_are_no_more_than_their_share_of_an_interval_of_many_steps(
    is_long: Bools,
) -> None:
    seconds = np.random.default_rng(0).normal(0.001, 3e-5, len(is_long))
    seconds[is_long] = 8.0
    sums = summed(seconds)
    assert sums["steps"] == 4096
    assert sums["typical_compute_s"] / 4096 == pytest.approx(0.001, abs=3e-5)
    assert sums["compute_s"] / 4096 == pytest.approx(seconds.mean(), rel=0.1)
