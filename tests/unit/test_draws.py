"""The order of an epoch: the same on every rank, machine and version."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from loft_hvd.data import draws as draws_module
from loft_hvd.data.assign import Assignment, Homes, assign
from loft_hvd.data.blocks import Order
from loft_hvd.data.draws import (
    Draw,
    EpochOrders,
    EpochSettings,
    draw_epoch,
    epoch_order,
    spread,
)
from loft_hvd.data.placement import Placement
from loft_hvd.errors import DataError
from tests.support.plans import FakePlans


def test_the_permutation_is_the_documented_one() -> None:
    # Written down once: ranks and restarts with other versions must draw the same order.
    assert epoch_order(8, seed=7, epoch=3).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]
    assert epoch_order(4, seed=7, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("seed", "epoch"), [(8, 3), (7, 4), (3, 7)])
def test_seed_and_epoch_change_the_permutation(seed: int, epoch: int) -> None:
    assert (epoch_order(100, seed=7, epoch=3) != epoch_order(100, seed=seed, epoch=epoch)).any()


@pytest.mark.parametrize("num_samples", [0, 1, 2, 1000, 600_000])
def test_the_permutation_is_made_in_one_array(num_samples: int) -> None:
    tracemalloc.start()
    try:
        order = epoch_order(num_samples, seed=5, epoch=2)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most <= 8 * num_samples + 5_000_000  # and what a block of a megabyte takes
    words = np.random.PCG64(np.random.SeedSequence([5, 2])).random_raw(num_samples)
    low = np.uint64((1 << max(num_samples - 1, 0).bit_length()) - 1)
    keys = (words & ~low) | np.arange(num_samples, dtype=np.uint64)
    assert (order == np.argsort(keys)).all()
    assert order.dtype == np.int32


def test_many_samples_come_in_the_order_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bins that hold more than a cache does, and more samples than 32 bits number."""
    expected = epoch_order(1000, seed=5, epoch=2)
    monkeypatch.setattr(draws_module, "_BIN", 10)  # 1000 samples would take 7 bits
    monkeypatch.setattr(draws_module, "_MOST_BIN_BITS", 3)
    monkeypatch.setattr(draws_module, "_MOST_NARROW", 999)
    found = epoch_order(1000, seed=5, epoch=2)
    assert found.dtype == np.int64
    assert (found == expected).all()


class Noting(EpochSettings):
    """Settings that note on which thread an order is made."""

    threads: ClassVar[list[tuple[int, bool]]] = []

    def order(self, epoch: int, *, done: npt.NDArray[np.bool_] | None = None) -> Order:
        is_main = threading.current_thread() is threading.main_thread()
        self.threads.append((epoch, is_main))
        return super().order(epoch, done=done)


def test_the_order_of_a_large_epoch_is_made_while_the_one_before_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draws_module, "_MANY", 500)
    settings = Noting(Placement.replicated(1000), True, 3, False, False)
    settings.threads.clear()
    orders, done = EpochOrders(settings), np.arange(1000) % 3 == 0
    for epoch in (0, 1, 2, 7, 7, 8):
        assert (orders.take(epoch) == epoch_order(1000, seed=3, epoch=epoch)).all()
    beside = [epoch for epoch, is_main in settings.threads if not is_main]
    assert beside[:5] == [1, 2, 3, 8, 8]
    assert [epoch for epoch, is_main in settings.threads if is_main] == [0, 7, 7]
    # What is left of an epoch that goes on in another world is in no order made ahead.
    assert (orders.take(9, done=done) == settings.order(9, done=done)).all()


class Stuck(EpochSettings):
    """Settings whose second order is never done in time."""

    told: ClassVar[threading.Event] = threading.Event()

    def order(self, epoch: int, *, done: npt.NDArray[np.bool_] | None = None) -> Order:
        if epoch == 1:
            self.told.wait(10)
        return super().order(epoch, done=done)


def test_an_order_that_is_not_done_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "_MANY", 500)
    monkeypatch.setattr(draws_module, "config", lambda: SimpleNamespace(timeout_s=0.05))
    orders = EpochOrders(Stuck(Placement.replicated(1000), True, 3, False, False))
    orders.take(0)
    try:
        with pytest.raises(DataError, match=r"epoch 1: its order .* within 0\.05 s"):
            orders.take(1)
    finally:
        Stuck.told.set()


def test_spread_holds_every_group_in_proportion_in_any_run() -> None:
    rng = np.random.default_rng(0)
    groups = np.sort(rng.integers(0, 5, 1000) ** 2 // 4).astype(np.int32)
    order = spread(epoch_order(1000, seed=0, epoch=0), groups)
    assert sorted(order.tolist()) == list(range(1000))
    share = np.bincount(groups) / 1000
    for batch in order.reshape(-1, 50):
        assert (abs(np.bincount(groups[batch], minlength=5) - 50 * share) <= 2).all()


def test_spread_takes_turns_as_the_worked_example_says() -> None:
    groups = np.array([0, 0, 0, 0, 1, 1], np.int32)
    assert groups[spread(np.arange(6), groups)].tolist() == [1, 0, 0, 1, 0, 0]


def overlapping(world_size: int) -> Placement:
    """Each sample on a rank and the next: sets that neither nest nor keep apart."""
    return Placement.from_function(lambda i: [i % world_size, (i + 1) % world_size], 60)


class InTime(Homes):
    """Homes whose assignments are said to cost nothing."""

    is_dear = False


def drawn(placement: Placement, plans: FakePlans, *, is_ahead: bool) -> list[Draw]:
    """Draw an epoch, with assignments begun ahead or not, whatever they cost."""
    homes = placement.at(plans.world_size)
    assert homes.is_dear
    if not is_ahead:
        homes = InTime(**vars(homes))
    order = epoch_order(len(placement), seed=0, epoch=0)
    return list(draw_epoch(order, homes, plans, first_step=3, position=6, drop_last=False))


def test_what_is_begun_ahead_is_what_would_be_found_in_time() -> None:
    later = {5: [2, 3, 5], 8: [8, 1, 1]}
    ahead, in_time = (
        drawn(overlapping(3), FakePlans([4, 4, 2], later=later), is_ahead=is_ahead)
        for is_ahead in (True, False)
    )
    assert [draw.step_sizes for draw in ahead] == [draw.step_sizes for draw in in_time]
    assert [draw.position for draw in ahead] == [16, 26, 36, 46, 56, 60]
    for one, other in zip(ahead, in_time, strict=True):
        assert one.assignment.owners.tolist() == other.assignment.owners.tolist()
        assert one.batch.tolist() == other.batch.tolist()


def test_a_plan_is_asked_for_in_its_own_step_also_where_the_assignment_was_begun_before() -> None:
    plans, homes = FakePlans([4, 4, 2]), overlapping(3).at(3)
    assert homes.is_dear
    order = epoch_order(60, seed=0, epoch=0)
    draws = draw_epoch(order, homes, plans, first_step=0, position=0, drop_last=False)
    assert next(draws).step_sizes.sizes == (4, 4, 2)
    assert plans.asked == [0]
    plans.later = {1: [2, 3, 5]}  # while the assignment of step 1 by the older plan is under way
    second = next(draws)
    assert second.step_sizes.sizes == (2, 3, 5)
    assert np.bincount(second.assignment.owners).tolist() == [2, 3, 5]
    assert plans.asked == [0, 1]


def test_an_assignment_is_found_once_but_where_the_plan_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[list[int]] = []

    def noted(batch: Any, sizes: Any, homes: Homes) -> Assignment:
        begun.append(sizes.tolist())
        return assign(batch, sizes, homes)

    monkeypatch.setattr(draws_module, "assign", noted)
    drawn(overlapping(3), FakePlans([4, 4, 2], later={7: [8, 1, 1]}), is_ahead=True)
    assert begun == [[4, 4, 2]] * 5 + [[8, 1, 1]] + [[3, 1, 0]]  # steps 3 to 7, 7 anew, 8


def assigning_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("loft_hvd-assign")]


@pytest.mark.parametrize("late", [3, 5])  # the first step of the iteration, and a later one
def test_an_assignment_that_is_not_done_in_time_is_an_error(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free, numbers, limit = threading.Event(), itertools.count(3), SimpleNamespace(timeout_s=60)

    def slow_assign(*arguments: Any) -> Assignment:
        if next(numbers) == late:
            is_free.wait(10)
        return assign(*arguments)

    monkeypatch.setattr(draws_module, "assign", slow_assign)
    monkeypatch.setattr(draws_module, "config", lambda: limit)
    homes, order = overlapping(3).at(3), epoch_order(60, seed=0, epoch=0)
    plans = FakePlans([4, 4, 2])
    draws = draw_epoch(order, homes, plans, first_step=3, position=0, drop_last=False)
    assert [next(draws).step_sizes.step for _ in range(3, late)] == [*range(3, late)]
    limit.timeout_s = 0.05
    try:
        with pytest.raises(DataError, match=rf"step {late}: the assignment .* within 0\.05 s"):
            next(draws)
    finally:
        is_free.set()
        draws.close()  # type: ignore[attr-defined]  # it is a generator
        for thread in assigning_threads():
            thread.join(30)


def test_the_thread_that_assigns_ahead_ends_with_the_iteration_which_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever thread collects an iteration that was left closes it, in whatever it is doing."""
    is_free, begun = threading.Event(), threading.Semaphore(0)

    def slow_assign(*arguments: Any) -> Assignment:
        begun.release()
        if arguments[0][0] != order[0]:  # all but the first batch
            assert is_free.wait(30)
        return assign(*arguments)

    monkeypatch.setattr(draws_module, "assign", slow_assign)
    homes, order = overlapping(3).at(3), epoch_order(60, seed=0, epoch=0)
    plans = FakePlans([4, 4, 2])
    draws = draw_epoch(order, homes, plans, first_step=0, position=0, drop_last=False)
    next(draws)
    assert begun.acquire(timeout=30)
    assert begun.acquire(timeout=30)  # the second is under way
    (thread,) = assigning_threads()
    draws.close()  # type: ignore[attr-defined]  # it is a generator
    assert thread.is_alive()
    is_free.set()
    thread.join(30)
    assert not thread.is_alive()
