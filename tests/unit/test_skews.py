"""Who draws what in the simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.bench.skews import SKEWS, draw_batches
from loft_hvd.errors import ArgumentError

LABELS = np.random.default_rng(0).integers(0, 10, 1437)


def shares(skew: str, num_workers: int = 8) -> np.ndarray:
    """Return each worker's share of each class over many steps, [num_workers, 10]."""
    drawn = draw_batches(skew, LABELS, num_workers=num_workers, batch=32, steps=50, seed=1)
    assert drawn.shape == (50, num_workers, 32)
    counts = np.stack([np.bincount(LABELS[drawn[:, w]].ravel(), minlength=10) for w in range(8)])
    found: np.ndarray = counts / counts.sum(axis=0)
    return found


@pytest.mark.parametrize(
    ("skew", "least", "most"),
    [
        ("shuffled", 0.125, 0.17),
        ("capped", 0.17, 0.22),  # ceil(1.5 / 8 of a class in a step): a little above 0.19
        ("dirichlet", 0.4, 1.0),
        ("sorted", 0.6, 1.0),
    ],
)
def test_a_workers_largest_share_of_a_class(skew: str, least: float, most: float) -> None:
    assert least <= shares(skew).max() <= most


@pytest.mark.parametrize("skew", SKEWS)
def test_draws_repeat_and_differ_by_seed(skew: str) -> None:
    def draw(seed: int) -> np.ndarray:
        return draw_batches(skew, LABELS, num_workers=3, batch=8, steps=4, seed=seed)

    np.testing.assert_array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


@pytest.mark.parametrize("skew", ["shuffled", "capped"])
def test_no_sample_is_drawn_twice_within_an_epoch(skew: str) -> None:
    drawn = draw_batches(skew, LABELS, num_workers=4, batch=32, steps=11, seed=0)  # 1,408 of 1,437
    assert len(np.unique(drawn)) == drawn.size


def test_too_few_samples_for_shares_are_refused() -> None:
    with pytest.raises(ArgumentError, match="40 samples for 2 workers"):
        draw_batches("dirichlet", LABELS[:40], num_workers=2, batch=4, steps=1, seed=0)


def test_unknown_skews_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'sort' is unknown"):
        draw_batches("sort", LABELS, num_workers=2, batch=4, steps=1, seed=0)
