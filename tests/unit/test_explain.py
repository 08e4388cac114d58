"""Who is slow and why, from the times that ranks exchanged."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.explain import TIME_FIELDS, RankTimes, describe, find_slow, read_times


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


def test_nothing_is_slow_among_equals() -> None:
    equal = times([1, 1.05, 1, 1], [10, 10.2, 9.9, 10])
    assert find_slow(equal) == ()
    assert "no rank is slow" in describe(equal)


def test_slow_ranks_come_slowest_first() -> None:
    assert [slow.rank for slow in find_slow(times([0] * 5, [10, 20, 10, 40, 10]))] == [3, 1]


def row(**sums: float) -> list[float]:
    return [sums.get(field, 0.0) for field in TIME_FIELDS]


def test_sums_become_means_and_what_no_clock_measured_counts_as_nothing() -> None:
    good = row(steps=4, samples=64, local=64, fetch_s=0.8, stall_s=0.4, compute_s=0.8)
    bad = row(steps=2, samples=10, fetch_s=np.nan, stall_s=-1, compute_s=np.inf)
    first, second = read_times(np.array([good, bad]))
    assert (first.samples, first.fetch_s, first.stall_s, first.compute_s) == (16, 0.2, 0.1, 0.2)
    assert first.samples_per_s == pytest.approx(16 / 0.3)
    assert (second.fetch_s, second.stall_s, second.compute_s) == (0, 0, 0)
    assert second.samples_per_s == 0.0


def test_ranks_without_samples_are_not_judged() -> None:
    idle = row(steps=5, compute_s=50)
    busy = row(steps=5, samples=50, compute_s=0.5)
    assert find_slow(read_times(np.array([idle, busy, busy]))) == ()


def test_a_fetch_hidden_behind_the_computing_is_not_slow() -> None:
    hidden = row(steps=5, samples=50, fetch_s=5, stall_s=0, compute_s=5)
    plain = row(steps=5, samples=50, compute_s=5)
    assert find_slow(read_times(np.array([hidden, plain, plain]))) == ()
