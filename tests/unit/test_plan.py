"""Plans and the arithmetic of sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loft_hvd.balance.plan import (
    Bounds,
    Plan,
    Sizes,
    choose_used,
    equal_sizes,
    proportional_sizes,
    scale_sizes,
)
from loft_hvd.errors import PlanError

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0)


@given(world_size=st.integers(1, 64), total=st.integers(0, 5000))
def test_equal_sizes_add_up_and_differ_by_one_at_most(world_size: int, total: int) -> None:
    sizes = equal_sizes(total, world_size)
    assert (len(sizes), sum(sizes)) == (world_size, total)
    assert max(sizes) - min(sizes) <= 1


@given(sizes=SIZES, part=st.floats(0, 1))
def test_scaled_sizes_add_up_and_stay_near_the_proportions(sizes: list[int], part: float) -> None:
    num_samples = int(part * sum(sizes))
    scaled = scale_sizes(sizes, num_samples, min_ranks=0)
    assert scaled is not None
    assert sum(scaled) == num_samples
    for given_size, size in zip(scaled, sizes, strict=True):
        assert abs(given_size - size * num_samples / sum(sizes)) < 1


@given(sizes=SIZES, num_samples=st.integers(0, 50), min_ranks=st.integers(1, 8))
def test_scaled_sizes_reach_min_ranks_or_say_that_they_cannot(
    sizes: list[int], num_samples: int, min_ranks: int
) -> None:
    num_samples = min(num_samples, sum(sizes))
    if min_ranks > len(sizes):
        with pytest.raises(PlanError, match="min_ranks"):
            scale_sizes(sizes, num_samples, min_ranks=min_ranks)
        return
    scaled = scale_sizes(sizes, num_samples, min_ranks=min_ranks)
    assert (scaled is None) == (num_samples < min_ranks)
    if scaled is not None:
        assert sum(scaled) == num_samples
        assert sum(size > 0 for size in scaled) >= min_ranks


@given(
    speeds=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=8),
    total=st.integers(8, 2000),
    min_batch=st.integers(0, 1),
)
def test_proportional_sizes_add_up_and_keep_the_floor(
    speeds: list[float], total: int, min_batch: int
) -> None:
    sizes = proportional_sizes(speeds, total, min_batch=min_batch)
    assert sum(sizes) == total
    assert min(sizes) >= min_batch
    fastest = max(range(len(speeds)), key=lambda rank: speeds[rank])
    assert sizes[fastest] >= max(sizes) - 1


def test_proportional_sizes_of_a_3_to_1_cluster() -> None:
    assert proportional_sizes([3.0, 3.0, 1.0, 3.0], 100) == (30, 30, 10, 30)


@pytest.mark.parametrize("speeds", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_speeds_that_are_none_are_refused(speeds: list[float]) -> None:
    with pytest.raises(PlanError, match="speeds"):
        proportional_sizes(speeds, 10)


def test_plan_survives_the_wire() -> None:
    plan = Plan(3, 40, (5, 0, 7))
    assert Plan.from_wire(plan.to_wire(), world_size=3, global_batch_size=12) == plan


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ([1, 0, 4, 4], "has 5 numbers"),
        ([1, 0, 4, 4, 5], "add up to 13"),
        ([1, 0, 16, -4, 0], "must be one count >= 0"),
        ([-1, 0, 4, 4, 4], "must be >= 0"),
    ],
)
def test_a_wire_that_is_no_plan_is_refused(wire: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_wire(np.array(wire), world_size=3, global_batch_size=12)


def test_the_nearest_sizes_used_are_the_best_of_all_combinations() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        used = [tuple(rng.multinomial(60, [0.25] * 4).tolist()) for _ in range(4)]
        wanted = tuple(rng.multinomial(60, rng.dirichlet([4.0] * 4)).tolist())
        floor = np.minimum(rng.integers(0, 15, 4), wanted)
        bounds = Bounds.of(4, floor=floor, cap=np.maximum(rng.integers(15, 30, 4), wanted))
        found = choose_used(wanted, used, max_sizes=3, bounds=bounds)
        columns = [sorted(set(column)) for column in zip(*used, strict=True)]
        options = [
            {size for size in (*had, *([want] if len(had) < 3 else [])) if low <= size <= high}
            for had, want, low, high in zip(
                columns, wanted, bounds.floor.tolist(), bounds.cap.tolist(), strict=True
            )
        ]
        legal = [sizes for sizes in itertools.product(*options) if sum(sizes) == 60] or [wanted]
        assert found in legal
        excess = [
            max(size / max(want, 1) for size, want in zip(sizes, wanted, strict=True))
            for sizes in (found, *legal)
        ]
        assert excess[0] == min(excess)


@pytest.mark.parametrize(
    ("wanted", "used", "cap", "expected"),
    [
        ((19, 19, 18, 8), [(16,) * 4, (22, 21, 21, 0), (16,) * 4], 64, (16,) * 4),  # a quarantine
        ((19, 13), [(16, 16), (22, 10)], 20, (16, 16)),  # a cap that was found since
        ((19, 13), [(22, 10), (23, 9)], 20, (19, 13)),  # no rank has had what it may have
    ],
)
def test_sizes_that_a_rank_may_not_have_any_more_are_not_chosen(
    wanted: Sizes, used: list[Sizes], cap: int, expected: Sizes
) -> None:
    bounds = Bounds.of(len(wanted), floor=2, cap=cap)
    assert choose_used(wanted, used, max_sizes=2, bounds=bounds) == expected
