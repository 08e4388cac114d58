"""Who computes which sample: as many local reads as the sizes allow."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.data.assign import Shares, assign, count_local, count_rows, hand_out
from loft_hvd.data.draws import EpochSettings
from loft_hvd.data.flow import proportional
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import GlobalBatches
from tests.support.plans import FakePlans


def test_several_homes_go_to_the_least_loaded() -> None:
    # Rank 0 has 6 samples of its own; the 6 that ranks 0 and 1 both hold should ease it.
    placement = Placement.from_function(lambda i: 0 if i < 6 else [0, 1], 12)
    assignment = assign(np.arange(12), np.array([8, 4]), placement.at(2))
    assert assignment.owners[:6].tolist() == [0] * 6
    assert assignment.local.tolist() == [8, 4]


def test_replicas_are_read_evenly_by_ranks_of_equal_size() -> None:
    placement = Placement.from_function(lambda i: [0, 1] if i < 4 else 2, 8)
    assignment = assign(np.arange(8), np.array([3, 3, 2]), placement.at(3))
    assert assignment.local.tolist() == [2, 2, 2]


def test_what_only_a_node_holds_comes_before_what_all_hold() -> None:
    placement = Placement.from_function(
        lambda i: "everywhere" if i < 4 else "node:a", 8, nodes=["a", "a", "b", "b"]
    )
    homes = placement.at(4)
    assert homes.local.is_nested
    assert assign(np.arange(8), np.array([2, 2, 2, 2]), homes).local.sum() == 8


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 0]])
def test_overlapping_homes_are_rearranged_to_the_optimum(ranks: list[int]) -> None:
    # Rank b may read all samples; those that only it can read must not find it taken.
    a, b, c = ranks
    placement = Placement.from_function(lambda i: [a, b] if i < 4 else [b, c], 8)
    homes = placement.at(3)
    assert not homes.local.is_nested
    sizes = np.zeros(3, np.int64)
    sizes[[a, b]] = 4
    assert assign(np.arange(8), sizes, homes).owners.tolist() == [a] * 4 + [b] * 4


def test_counting_many_steps_agrees_with_drawing_them() -> None:
    placement = Placement.sharded(500, 4)
    plans = FakePlans([20, 12, 6, 2])
    settings = EpochSettings(placement, True, 3, True, False)
    draws = list(GlobalBatches(settings, plans).start(first_step=0)[1])
    homes = placement.at(4)
    rows = homes.rows[settings.order(0)]
    counts = count_rows(rows, len(homes.local.holders), batch_size=40)
    local = count_local(counts, np.array(plans.sizes), homes)
    assert local.tolist() == [draw.assignment.local.tolist() for draw in draws]


@pytest.mark.parametrize(
    ("sizes", "relaxed", "share", "deviation"),
    [
        ([64] * 8, False, 0.954, 4.2),
        ([64] * 8, True, 1.0, 0.0),
        ([147, 26, 147, 26, 80, 24, 42, 20], False, 0.644, 7.1),
        ([147, 26, 147, 26, 80, 24, 42, 20], True, 0.645, 0.0),
    ],
)
def test_relaxed_order_takes_the_variation_out_of_local_reads(
    sizes: list[int], relaxed: bool, share: float, deviation: float
) -> None:
    placement = Placement.sharded(50_000, 8)
    homes = placement.at(8)
    rows = homes.rows[EpochSettings(placement, True, 0, False, relaxed).order(0)]
    local = count_local(count_rows(rows, 8, batch_size=512), np.array(sizes), homes)
    assert local.sum() / (len(local) * 512) == pytest.approx(share, abs=1e-3)
    assert local[:, [0, 2, 4]].std(axis=0) == pytest.approx([deviation] * 3, abs=0.8)


def test_what_is_not_local_goes_to_the_holders_node_first() -> None:
    placement = Placement.from_function(lambda i: 2 - i // 4 * 2, 8, nodes=[0, 0, 1, 1])
    owners = assign(np.arange(8), np.array([2, 2, 2, 2]), placement.at(4)).owners
    assert owners.tolist() == [2, 2, 3, 3, 0, 0, 1, 1]


def test_samples_are_handed_out_as_the_worked_examples_say() -> None:
    assert proportional(np.array([5]), np.array([[4, 2, 2]])).tolist() == [[3, 1, 1]]
    owners = np.full(5, -1)
    shares = Shares(np.array([1, 0, 1]), np.array([3, 2, 0]), np.array([1, 1, 2]))
    hand_out(owners, np.arange(5), np.array([1, 0, 1, 0, 1]), shares)
    assert owners.tolist() == [0, 2, 0, -1, 3]
