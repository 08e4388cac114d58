"""The order of an epoch: the same on every rank, machine and version."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.data.draws import epoch_order, spread


def test_the_permutation_is_the_documented_one() -> None:
    # Written down once: ranks and restarts with other versions must draw the same order.
    assert epoch_order(8, seed=7, epoch=3).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]
    assert epoch_order(4, seed=7, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("seed", "epoch"), [(8, 3), (7, 4), (3, 7)])
def test_seed_and_epoch_change_the_permutation(seed: int, epoch: int) -> None:
    assert (epoch_order(100, seed=7, epoch=3) != epoch_order(100, seed=seed, epoch=epoch)).any()


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
