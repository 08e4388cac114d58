"""Who is slow and why, from the times that ranks exchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loft_hvd.balance.explain import describe, find_slow
from loft_hvd.balance.interval import SUMS, RankTimes, read_times


def times(fetch_ms: list[float], compute_ms: list[float]) -> list[RankTimes]:
    return [
        RankTimes(rank, 20, 32, 32, 0, fetch / 1e3, fetch / 1e3, compute / 1e3, 0, 0, 0, 0)
        for rank, (fetch, compute) in enumerate(zip(fetch_ms, compute_ms, strict=True))
    ]


@pytest.mark.parametrize(
    ("fetch_ms", "compute_ms", "rank", "cause"),
    [
        ([1, 1, 1, 1], [10, 10, 30, 10], 2, "compute"),
        ([1, 40, 1, 1], [10, 10, 10, 10], 1, "fetch"),
        ([20, 20, 20, 35], [10, 10, 10, 12], 3, "fetch"),
    ],
)
def test_the_slow_rank_and_its_cause_are_named(
    fetch_ms: list[float], compute_ms: list[float], rank: int, cause: str
) -> None:
    (slow,) = find_slow(times(fetch_ms, compute_ms))
    assert (slow.rank, slow.cause) == (rank, cause)
    assert f"rank {rank} is slow: {cause}" in describe(times(fetch_ms, compute_ms))


def test_a_slow_rank_costs_nothing_while_a_longer_one_may_not_be_slow() -> None:
    line = times([0] * 5, [10, 30, 25, 10, 10])
    line = [replace(each, wall_s=0.04, busy_s2=0.0028 * (each.rank == 1)) for each in line]
    (slow,) = find_slow(line)
    assert (slow.rank, slow.share) == (2, 0.0)


def test_nothing_is_slow_among_equals() -> None:
    equal = times([1, 1.05, 1, 1], [10, 10.2, 9.9, 10])
    assert find_slow(equal) == ()
    assert "no rank is slow" in describe(equal)


def test_slow_ranks_come_slowest_first() -> None:
    assert [slow.rank for slow in find_slow(times([0] * 5, [10, 20, 10, 40, 10]))] == [3, 1]


def row(**sums: float) -> list[float]:
    return [sums.get(field, 0.0) for field in SUMS]


def test_ranks_without_samples_are_not_judged() -> None:
    idle = row(steps=5, compute_s=50)
    busy = row(steps=5, samples=50, compute_s=0.5)
    assert find_slow(read_times(np.array([idle, busy, busy]))) == ()


def test_a_fetch_hidden_behind_the_computing_is_not_slow() -> None:
    hidden = row(steps=5, samples=50, fetch_s=5, stall_s=0, compute_s=5)
    plain = row(steps=5, samples=50, compute_s=5)
    assert find_slow(read_times(np.array([hidden, plain, plain]))) == ()


def test_a_difference_within_the_ranks_own_variation_is_not_slow() -> None:
    steady = [row(steps=20, samples=200, compute_s=2.0, busy_s2=0.2)] * 2
    slower = row(steps=20, samples=200, compute_s=2.6, busy_s2=0.34)
    shaky = row(steps=20, samples=200, compute_s=2.6, busy_s2=2.6)
    assert [entry.rank for entry in find_slow(read_times(np.array([*steady, slower])))] == [2]
    assert find_slow(read_times(np.array([*steady, shaky]))) == ()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_ranks_differ_by_a_tenth_of_what_they_queue(num_ranks: int) -> None:
    # As four ranks on two cores did, 32 % of whose steps was their queue.
    busy_ms = [4.3] * (num_ranks - 1)

    def queueing(own_ms: float, queued_ms: float) -> list[RankTimes]:
        line = times([0.0] * num_ranks, [*busy_ms, own_ms])
        return [replace(each, wall_s=0.048, queued_s=queued_ms / 1e3) for each in line]

    assert find_slow(queueing(5.8, 15.3)) == ()
    assert "they differ by less than a quarter of what they queue" in describe(queueing(7.9, 15.3))
    assert [each.rank for each in find_slow(queueing(8.5, 15.3))] == [num_ranks - 1]
    assert [each.rank for each in find_slow(queueing(5.8, 1.0))] == [num_ranks - 1]
    # Its own queue alone excuses nobody.
    (*others, slow) = queueing(5.8, 1.0)
    (found,) = find_slow([*others, replace(slow, queued_s=0.0153)])
    assert found.rank == num_ranks - 1
    # Nor does that of the others, where it has a core to itself.
    (*others, slow) = queueing(5.8, 15.3)
    (found,) = find_slow([*others, replace(slow, queued_s=0.0)])
    assert found.rank == num_ranks - 1


def test_overlap_is_the_hidden_share_of_the_shorter_part() -> None:
    half = row(steps=1, samples=8, fetch_s=4, stall_s=3, compute_s=2)
    serial = row(steps=1, samples=8, fetch_s=4, stall_s=4, compute_s=2)
    first, second = read_times(np.array([half, serial]))
    assert (first.overlap, second.overlap) == (0.5, 0.0)
    assert "50%" in describe([first, second])


def test_what_waiting_costs_comes_first_and_a_slow_rank_with_what_it_costs() -> None:
    plain = row(steps=10, samples=80, compute_s=1.0, wall_s=2.0)
    slow = row(steps=10, samples=80, compute_s=2.0, wall_s=2.0)
    lines = describe(read_times(np.array([plain, plain, plain, slow]))).splitlines()
    assert lines[0] == (
        "ranks wait for the longest one 75.0 ms of a step of 200.0 ms on average, 38%"
    )
    assert lines[1].startswith("rank 3 is slow: compute (its own work takes 2.00x")
    assert lines[1].endswith("without it a step would be 50.0% shorter")


def test_a_few_long_steps_are_told_and_make_no_slow_rank() -> None:
    plain = row(steps=100, samples=800, compute_s=10, wall_s=13, typical_compute_s=10, busy_s2=1)
    # One step of 100 took 3 s in place of 0.1 s.
    shaky = row(
        steps=100, samples=800, compute_s=12.9, wall_s=13, typical_compute_s=10, busy_s2=9.99
    )
    text = describe(read_times(np.array([plain, plain, shaky])))
    assert "rank 2: a few long steps add 29.0 ms to its average" in text
    assert "no rank is slow" in text


def test_a_slow_fetch_says_how_much_comes_from_elsewhere() -> None:
    far = row(steps=5, samples=50, remote=40, fetch_s=5, stall_s=5, compute_s=1)
    near = row(steps=5, samples=50, local=50, compute_s=1)
    text = describe(read_times(np.array([far, near, near])))
    assert "rank 0 is slow: fetch" in text
    assert "8.0 samples a batch come from elsewhere" in text


def test_a_wait_for_less_than_a_tenth_is_told_as_that() -> None:
    line = [replace(each, wall_s=0.0109) for each in times([0] * 4, [10, 10, 10, 10.9])]
    assert "no rank is slow: none takes a tenth more than the others" in describe(line)


def called_back(seconds: float, *compute_ms: float) -> list[RankTimes]:
    """Return ranks of which the last one spends so long beside its passes, while all others wait.

    Steps of 0.2 s.
    """
    line = [replace(each, wall_s=0.2) for each in times([0] * len(compute_ms), list(compute_ms))]
    own = [replace(each, wait_s=seconds, typical_other_s=0.002) for each in line[:-1]]
    return [*own, replace(line[-1], typical_other_s=seconds + 0.002)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_wait_for_who_is_slow_between_its_passes(num_ranks: int) -> None:
    said = describe(called_back(0.1, *[20.0] * num_ranks)).splitlines()
    share = 0.1 * (num_ranks - 1) / num_ranks / 0.2
    assert said[0].startswith(f"ranks wait for the longest one {200 * share:.1f} ms of a step of")
    assert said[0].endswith(f"on average, {share:.0%}")
    assert said[1].startswith(f"rank {num_ranks - 1} is slow: other (its time in a step takes ")
    assert said[1].endswith("without it a step would be 50.0% shorter")


def test_whoever_costs_most_is_named_by_work_or_beside_it() -> None:
    assert [(each.rank, each.cause) for each in find_slow(called_back(0.1, 50, 20, 20, 20))] == [
        (3, "other")
    ]
    assert [(each.rank, each.cause) for each in find_slow(called_back(0.03, 90, 20, 20, 20))] == [
        (0, "compute")
    ]


def test_the_passes_are_told_apart_where_they_are_known() -> None:
    line = [replace(each, forward_s=0.004) for each in times([0, 0, 0], [10, 10, 30])]
    (slow,) = find_slow(line)
    assert (slow.rank, slow.cause) == (2, "backward")
    (slow,) = find_slow([replace(each, forward_s=each.compute_s - 0.006) for each in line])
    assert (slow.rank, slow.cause) == (2, "forward")
    title, *rows = describe(line).splitlines()[-4:]
    assert title.split()[2:12:2] == ["fetch", "stall", "forward", "backward", "queued"]
    assert rows[2].split()[4:6] == ["4.00", "26.00"]
