"""What ranks report: sums become averages, and only what a clock can have measured is believed."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.balance.interval import SUMS, read_times, screen, unpaused_step_s
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


@pytest.mark.parametrize(
    ("held_s", "others_s", "step_s"),
    [(0, 0, 5), (20, 20, 3), (0, 20, 5), (20, 0, 5), (20, 10, 4), (10, 1e9, 4)],
)
def test_rank_0s_step_does_not_hold_the_pauses_of_others_that_it_saw_itself(
    held_s: float, others_s: float, step_s: float
) -> None:
    first = row(steps=10, samples=80, compute_s=20, wall_s=50, held_s=held_s)
    other = row(steps=10, samples=80, compute_s=20, wall_s=30, paused_s=others_s)
    assert unpaused_step_s(read_times(np.array([first, other]))) == pytest.approx(step_s)


def test_rows_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"shape \(4, 10\).*cpu_use"):
        screen(np.zeros((4, 7)), step=19, sizes=(64,) * 4)
