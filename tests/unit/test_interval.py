"""What ranks report: sums become averages, and only what a clock can have measured is believed."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.interval import (
    SUMS,
    USES,
    Head,
    Report,
    read_times,
    screen,
    skewness,
    typical,
    usual_stall,
)
from loft_hvd.errors import ArgumentError


def row(**sums: float) -> list[float]:
    return [sums.get(field, 0.0) for field in SUMS]


def test_sums_become_means_and_what_no_clock_measured_counts_as_nothing() -> None:
    good = row(steps=4, samples=64, local=64, fetch_s=0.8, stall_s=0.4, compute_s=0.8)
    bad = row(steps=2, samples=10, fetch_s=np.nan, stall_s=-1, compute_s=np.inf)
    first, second = read_times(np.array([good, bad]))
    assert (first.samples, first.fetch_s, first.stall_s, first.compute_s) == (16, 0.2, 0.1, 0.2)
    assert first.samples_per_s == pytest.approx(16 / 0.3)
    assert (second.fetch_s, second.stall_s, second.compute_s) == (0, 0, 0)
    assert second.samples_per_s == 0.0


@pytest.mark.parametrize("num_long", [0, 1, 3])
def test_a_few_long_steps_are_not_what_a_step_usually_takes(num_long: int) -> None:
    rng = np.random.default_rng(0)
    steps = rng.normal(1.0, 0.05, 20)
    steps[rng.choice(20, num_long, replace=False)] = 1e3
    mean, variance = typical(steps)
    assert mean == pytest.approx(1.0, abs=0.05)
    assert np.sqrt(variance / 20) < 0.05


def test_the_standard_error_of_a_typical_step_is_what_it_says() -> None:
    steps = np.random.default_rng(1).normal(1.0, 0.05, (17, 20_000))
    mean, variance = typical(steps)
    assert np.sqrt(variance / 17).mean() == pytest.approx(mean.std(), rel=0.05)
    # Student's t with 2 * 3 fewer degrees of freedom, 10: 4.5 % lie beyond 2.3 of its errors.
    beyond = np.abs(mean - 1.0) > 2.3 * np.sqrt(variance / 17)
    assert beyond.mean() == pytest.approx(0.045, abs=0.01)


def test_skewness_tells_long_tails_from_normal_noise_and_knows_no_hiccups() -> None:
    rng = np.random.default_rng(2)
    normal, pareto = 1.0 + 0.05 * rng.normal(size=(20, 4000)), rng.pareto(2.5, (20, 4000))
    assert np.median(skewness(normal)) == pytest.approx(1.0, rel=0.03)
    assert np.median(skewness(pareto)) == pytest.approx(2.6, rel=0.05)
    hiccups = np.where(np.arange(20)[:, None] % 20 == 7, 8.0 * normal, normal)
    assert np.median(skewness(hiccups)) < 1.2
    assert skewness(normal[:4]).tolist() == [0.0] * 4000  # too few
    assert skewness(np.ones((20, 2))).tolist() == [0.0, 0.0]  # all alike


@pytest.mark.parametrize("num_steps", [5, 6, 7, 8, 20, 301])
def test_skewness_is_of_quantiles_that_are_right_in_the_median(num_steps: int) -> None:
    steps = np.random.default_rng(num_steps).lognormal(size=(num_steps, 50))
    ends = np.quantile(steps, (0.2, 0.5, 0.8), axis=0, method="median_unbiased")
    assert skewness(steps) == pytest.approx((ends[2] - ends[1]) / (ends[1] - ends[0]))


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_of_few_steps_all_count(num_steps: int) -> None:
    steps = np.arange(2.0 * num_steps).reshape(num_steps, 2)
    mean, variance = typical(steps)
    assert mean == pytest.approx(steps.mean(axis=0))
    assert variance == pytest.approx(steps.var(axis=0, ddof=1) if num_steps > 1 else [0.0, 0.0])


def test_stalls_in_every_eighth_step_are_no_accidents() -> None:
    # Eight processes take 16 s for a batch each, 2 s together; the script computes for 1 s, and
    # waits for 8 s in every eighth step.
    found = usual_stall(np.array([2.0]), np.array([2.0]), np.array([1.0]))
    assert found == pytest.approx([1.0])
    # A serial loader: one of ten fetches took 101 s.
    found = usual_stall(np.array([1.0]), np.array([11.0]), np.array([11.0]))
    assert found == pytest.approx([1.0])


def test_rows_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"shape \(4, 14\).*cpu_use"):
        screen(np.zeros((4, 7)), step=19, sizes=(64,) * 4)


def report(world_size: int, *, interval: int = 20, drawn: int = 40, **sums: float) -> Report:
    """Return what ranks send that all did the same."""
    head = Head(num_steps=39, plan_id=1, trail=7, drawn_ahead=drawn, next_interval=interval)
    return Report(np.array([[*head, *row(**sums), *(0.0 for _ in USES)]] * world_size))


@pytest.mark.parametrize(
    ("world_size", "step_s", "num_passes", "interval", "num_steps"),
    [
        (8, 1.0, 1, 20, 1),
        (8, 0.01, 1, 20, 6),  # 0.05 s and 0.5 ms a rank
        (8, 0.01, 2, 20, 3),
        (4096, 0.1, 1, 300, 21),
        (8, 1e-3, 1, 20, 18),  # before the next times leave
        (8, 1e-3, 1, 3, 1),
        (8, 0.0, 1, 20, 18),  # no step was counted: nothing is decided either
    ],
)
def test_rank_0_has_as_many_steps_to_decide_as_that_takes(
    world_size: int, step_s: float, num_passes: int, interval: int, num_steps: int
) -> None:
    told = report(world_size, interval=interval, steps=10, wall_s=10 * step_s)
    assert told.steps_to_decide(num_passes) == num_steps
    at_once = told.first_free_step(num_passes, next_batch=40, deciding=0)
    assert told.first_free_step(num_passes, next_batch=40, deciding=5) == at_once + 5 * num_passes


@pytest.mark.parametrize("next_batch", range(37, 45))
def test_a_plan_begins_with_a_step_however_many_batches_earlier_ones_had(next_batch: int) -> None:
    # 39 steps are taken, but their passes may have changed: 39 * 4 need not begin a step.
    first = report(2, drawn=47).first_free_step(4, next_batch=next_batch, deciding=1)
    assert (first - next_batch) % 4 == 0
    assert 64 <= first < 68  # 47 are drawn, 3 steps of 4 are slack, and one is to decide


@pytest.mark.parametrize(
    ("steps", "is_measured"), [(0, False), (3, True), (0.5, False), (np.nan, False), (-1, False)]
)
def test_a_report_is_measured_when_some_rank_has_counted_a_step(
    steps: float, is_measured: bool
) -> None:
    told = report(3, steps=steps)
    assert told.is_measured == is_measured == any(each.steps > 0 for each in told.times)
