"""Every rank knows what all keep, without asking, and the next owners are the keepers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loft_hvd.balance.plan import equal_sizes
from loft_hvd.data.draws import EpochSettings
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.data.sampler import GlobalBatches
from loft_hvd.store.keepers import NOBODY, Keepers, with_keepers
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.caches import SOURCE, Cache, train
from tests.support.plans import FakePlans

EQUAL = equal_sizes(512, 8)
UNEQUAL = (94, 94, 93, 93, 46, 46, 23, 23)


@pytest.mark.parametrize(
    ("sizes", "share_kept", "goal"),
    [(EQUAL, 8, 0.90), (UNEQUAL, 8, 0.70), (UNEQUAL, 4, 0.90)],
    ids=["equal, N/8", "4:2:1, N/8", "4:2:1, N/4"],
)
def test_the_next_epoch_is_computed_where_it_is_kept(
    sizes: Sequence[int], share_kept: int, goal: float
) -> None:
    """The goals are those of the hit shares that a replay of caches promises (25,600 samples)."""
    num = 25_600

    def rank(transport: LocalTransport) -> list[int]:
        ahead = transport.rank % 3  # ranks draw ahead by different numbers of steps
        cache = Cache(num, num // share_kept, transport)
        return train(cache, sizes, num_epochs=4, ahead=ahead)

    hits = np.array(run_ranks(8, rank)).sum(axis=0) / num  # [epoch]
    assert hits[0] == 0
    assert (hits[1:] >= goal).all(), hits


def test_all_ranks_know_the_same_keepers_and_they_are_true() -> None:
    def rank(transport: LocalTransport) -> Cache:
        cache = Cache(2000, 300, transport)
        train(cache, (40, 30, 20, 10), num_epochs=4, ahead=transport.rank)
        return cache

    caches = run_ranks(4, rank)
    for cache in caches:
        np.testing.assert_array_equal(cache.first, caches[0].first)
        assert cache.held[cache.first == cache.rank].all()
    kept = [int((caches[0].first == rank).sum()) for rank in range(4)]
    assert kept[:3] == [300, 300, 300]  # their budgets; rank 3 computes 200 samples an epoch
    assert 200 <= kept[3] < 300


def test_ranks_that_noted_different_owners_tell_what_they_keep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def rank(transport: LocalTransport) -> Cache:
        cache = Cache(100, 20, transport)
        sizes = (10, 5, 5) if transport.rank == 1 else (8, 6, 6)  # a plan that is not the others'
        plans = FakePlans(sizes, rank=transport.rank)
        settings = EpochSettings(Placement.replicated(100), True, 3, False, False)
        batches = GlobalBatches(settings, plans, keeper=cache)
        _, draws = batches.start(first_step=0)
        for draw in draws:
            cache.read(draw.indices(transport.rank, dummy_size=1, homes=batches.homes))
        batches.start(first_step=5)
        return cache

    caches = run_ranks(3, rank)
    for cache in caches:
        np.testing.assert_array_equal(cache.first, caches[0].first)
        assert cache.held[cache.first == cache.rank].all()
    assert (caches[0].first != NOBODY).sum() >= 40  # some samples are kept twice
    assert "ranks [1] noted other owners" in caplog.text


def test_what_was_kept_before_is_announced() -> None:
    def rank(transport: LocalTransport) -> np.ndarray:
        cache = Cache(30, 0, transport)
        cache.held[transport.rank * 10 : transport.rank * 10 + 15] = True
        cache.homes.announce(cache.held)
        return cache.first

    for keepers in run_ranks(2, rank):
        assert keepers.tolist() == [0] * 15 + [1] * 10 + [NOBODY] * 5


def test_what_is_kept_without_an_order_is_told() -> None:
    """A rank that kept the last of its samples, not the first, as no filling shelf does."""

    def rank(transport: LocalTransport) -> Cache:
        cache = Cache(200, 0, transport)
        plans = FakePlans((10, 10), rank=transport.rank)
        settings = EpochSettings(Placement.replicated(200), True, 3, False, False)
        batches = GlobalBatches(settings, plans, keeper=cache)
        _, draws = batches.start(first_step=0)
        for number, draw in enumerate(draws):
            if number >= 6:
                samples = draw.indices(transport.rank, dummy_size=1, homes=batches.homes)
                cache.held[samples] = True
        batches.start(first_step=10)
        return cache

    caches = run_ranks(2, rank)
    for cache in caches:
        np.testing.assert_array_equal(cache.first == cache.rank, cache.held)
        np.testing.assert_array_equal(cache.first, caches[0].first)


def test_keepers_join_the_homes_that_a_user_gave() -> None:
    given = Placement(np.array([0, 0, 1, 1], np.int32), (HomeSet(ranks=(2,)), SOURCE))
    keepers = Keepers(np.array([NOBODY, 0, NOBODY, 1], np.int16), np.zeros(4, np.int16))
    placement = with_keepers(given, keepers)
    homes = [placement.home_sets[group] for group in placement.groups]
    assert homes == [
        HomeSet(ranks=(2,)),
        HomeSet(ranks=(0, 2)),
        SOURCE,
        HomeSet(ranks=(1,), shared=("source",)),
    ]
