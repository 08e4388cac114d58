"""Who is slow by turns, and who shares too few cores: what no average shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loft_hvd.balance.explain import describe
from loft_hvd.balance.interval import PARTS, RECENT, Floats, Place, RankTimes
from loft_hvd.balance.turns import Turns, find_crowd, find_turns


def _steps(num_ranks: int, *, seed: int = 0, spread: float = 0.05) -> Floats:
    """Return honest steps of about 100 ms, [num_ranks, RECENT, len(PARTS)]."""
    random = np.random.default_rng(seed)
    parts = np.array([0.01, 0.03, 0.05, 0.01, 0.0])
    return parts * random.lognormal(0.0, spread, (num_ranks, RECENT, len(PARTS)))


@pytest.mark.parametrize("part", ["fetch", "forward", "backward", "other"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ranks_that_are_slow_by_turns_are_found_with_their_cause(num_ranks: int, part: str) -> None:
    steps = _steps(num_ranks)
    for at in range(RECENT):
        steps[at % num_ranks, at, PARTS.index(part)] += 0.03
    turns = find_turns(steps, step_s=0.13)
    assert turns is not None
    assert (turns.ranks, turns.cause) == (list(range(num_ranks)), part)
    assert turns.steps > (0.9 if num_ranks > 2 else 0.6) * RECENT
    assert turns.share == pytest.approx(0.03 / 0.13, rel=0.2 if num_ranks > 2 else 0.4)


def test_without_a_mark_between_the_passes_it_is_computing() -> None:
    steps = _steps(4)
    steps[..., PARTS.index("forward")] = 0.0
    for at in range(RECENT):
        steps[at % 4, at, PARTS.index("backward")] += 0.03
    turns = find_turns(steps, step_s=0.13)
    assert turns is not None
    assert turns.cause == "compute"


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seed", range(10))
def test_honest_ranks_take_no_turns(seed: int, spread: float) -> None:
    assert find_turns(_steps(4, seed=seed, spread=spread), step_s=0.11) is None


def test_a_rank_that_is_slow_always_or_alone_takes_no_turns() -> None:
    steps = _steps(4)
    steps[2, :, 1] += 0.05
    assert find_turns(steps, step_s=0.16) is None
    now_and_then = _steps(4)
    now_and_then[1, ::3, 1] += 0.05
    assert find_turns(now_and_then, step_s=0.16) is None


def test_queueing_goes_by_turns_and_is_nobodys_own_work() -> None:
    steps = _steps(4)
    for at in range(RECENT):
        steps[at % 4, at, PARTS.index("queue")] += 0.05
    assert find_turns(steps, step_s=0.15) is None


def test_steps_that_a_rank_has_not_counted_are_passed_over() -> None:
    steps = _steps(4)
    for at in range(RECENT):
        steps[at % 4, at, 0] += 0.03
    steps[1, ::2] = np.nan
    turns = find_turns(steps, step_s=0.13)
    assert turns is not None
    assert turns.num_steps == RECENT // 2
    steps[1] = np.nan
    assert find_turns(steps, step_s=0.13) is None


def _times(queued_ms: list[float]) -> list[RankTimes]:
    times = RankTimes(0, 20, 32, 32, 0, 0, 0, 0.05, 0, 0, 0, wall_s=0.15)
    return [replace(times, rank=i, queued_s=ms / 1e3) for i, ms in enumerate(queued_ms)]


def test_ranks_that_share_cores_are_told_so_in_the_first_line() -> None:
    times = _times([70, 80, 75, 75])
    crowd = find_crowd(times, [Place(4, 2, 0, 0.0)] * 4)
    assert crowd is not None
    assert (crowd.num_ranks, crowd.cpus) == (4, 2)
    assert (crowd.queued_s, crowd.share) == pytest.approx((0.075, 0.5))
    first = describe(times, crowd).splitlines()[0]
    assert first == "4 ranks share 2 cores: each waits 75 ms a step for a core, 50% of it"


def test_cores_are_scarce_only_where_there_are_fewer_than_ranks_and_they_queue() -> None:
    assert find_crowd(_times([70] * 4), [Place(4, 8, 0, 0.0)] * 4) is None
    assert find_crowd(_times([10] * 4), [Place(4, 2, 0, 0.0)] * 4) is None
    assert find_crowd(_times([70] * 4), []) is None
    # Of two hosts the one that queues.
    crowd = find_crowd(
        _times([1, 1, 60, 60, 60]), [Place(2, 1, 0, 0.0)] * 2 + [Place(3, 2, 0, 0.0)] * 3
    )
    assert crowd is not None
    assert (crowd.num_ranks, crowd.cpus) == (3, 2)


def test_threads_beside_the_main_one_queue_for_their_rank() -> None:
    crowd = find_crowd(_times([1] * 4), [Place(4, 2, 0, 0.06)] * 4)
    assert crowd is not None
    assert crowd.queued_s == pytest.approx(0.06)


def test_ranks_that_are_bound_to_cpus_of_their_own_share_none() -> None:
    assert find_crowd(_times([70] * 4), [Place(4, 1, rank, 0.0) for rank in range(4)]) is None


def test_one_rank_that_queues_long_is_no_crowd() -> None:
    assert find_crowd(_times([70, 1, 2, 1]), [Place(4, 2, 0, 0.0)] * 4) is None


def test_turns_are_told_in_place_of_no_rank_is_slow() -> None:
    turns = Turns([0, 1, 2, 3], "forward", 0.2, 30, 32)
    text = describe(_times([0] * 4), None, turns)
    assert "no rank is slow" not in text
    assert (
        "ranks 0 1 2 3 are slow by turns: in 30 of the last 32 steps one of them alone takes long "
        "by its forward passes, which costs 20% of a step"
    ) in text
