"""What ranks keep besides: samples that nobody keeps, and copies; simulated as it is live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from loft_hvd.balance.keeping import ReadCosts, choose_keeping
from loft_hvd.balance.plan import equal_sizes
from loft_hvd.data.placement import Placement
from loft_hvd.simulate.build import Draws, build_cluster, build_placement
from loft_hvd.simulate.scenario import RankTraits, Scenario
from loft_hvd.simulate.simulation import simulate
from loft_hvd.simulate.stores import Stores
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.caches import UNKNOWN, Cache, train

NUM_SAMPLES = 6400
EQUAL = equal_sizes(256, 8)
UNEQUAL = (47, 47, 47, 47, 23, 23, 11, 11)  # speeds 4:2:1
SHARED = RankTraits(local_share=0.0, source="nfs")
DEAR = ReadCosts(peer_s=1e-3, source_s=5e-3)


def test_room_is_shared_out_among_what_nobody_keeps_first() -> None:
    keeping = choose_keeping(30, (0, 40, 20), ReadCosts())
    assert keeping.adopts == (0, 20, 10)
    assert keeping.copies == (0, 20, 10)  # what adopting leaves
    assert not keeping.comes_first
    assert keeping.of_a_step(7) == (0, 3, 2)


def test_copies_wait_until_all_samples_have_a_place() -> None:
    keeping = choose_keeping(100, (0, 40, 20), ReadCosts())
    assert keeping.adopts == (0, 40, 20)
    assert keeping.copies == (0, 0, 0)


@pytest.mark.parametrize(
    ("costs", "comes_first"),
    [
        (ReadCosts(1e-3, 5e-3), True),
        (ReadCosts(1e-3, 1.5e-3), False),  # it would not pay within an epoch
        (ReadCosts(0.0, 5e-3), False),  # nothing was read from a peer: nobody knows
    ],
)
def test_a_dear_source_lets_adopting_come_first(costs: ReadCosts, comes_first: bool) -> None:
    assert choose_keeping(30, (0, 40, 20), costs).comes_first is comes_first
    assert not choose_keeping(30, (0, 0, 0), costs).comes_first  # nobody has room
    assert not choose_keeping(0, (0, 40, 20), costs).comes_first  # all are kept


def test_a_decision_is_said_in_words() -> None:
    costs = ReadCosts(peer_s=1e-3, source_s=5e-3)
    assert choose_keeping(25, (0, 0, 40, 30, 0, 1), costs).describe(100) == [
        "25% of the samples are kept by no rank: ranks 2-3, 5 take them first and keep them "
        "(a sample takes 5 ms from the source, 1 ms from a peer)",
        "ranks 2-3 keep copies of what they read from peers: budgets have room for 44 more "
        "samples than there are",
    ]
    assert choose_keeping(0, (0, 0), costs).describe(100) == []


def run(
    sizes: Sequence[int], budget: int, costs: ReadCosts = UNKNOWN, *, num_epochs: int = 4
) -> tuple[np.ndarray, list[Cache]]:
    """Train on caches; return local samples of each epoch and rank, and the caches."""

    def rank(transport: LocalTransport) -> tuple[list[int], Cache]:
        cache = Cache(NUM_SAMPLES, budget, transport, costs)
        ahead = transport.rank % 3  # ranks draw ahead by different numbers of steps
        return train(cache, sizes, num_epochs=num_epochs, ahead=ahead), cache

    by_rank = run_ranks(len(sizes), rank)
    return np.array([hits for hits, _ in by_rank]).T, [cache for _, cache in by_rank]


def scenario_of(sizes: Sequence[int], budget: int, ranks: RankTraits) -> Scenario:
    """Return four epochs with stores of a budget each."""
    return Scenario(
        "store",
        len(sizes),
        sum(sizes),
        seed=3,
        steps=4 * (NUM_SAMPLES // sum(sizes)),
        interval=7,
        num_samples=NUM_SAMPLES,
        policies=(tuple(sizes),),
        store=True,
        ranks=RankTraits(**{**vars(ranks), "cache_samples": budget}),
        sources={"nfs": 1e9},
    )


def simulated(sizes: Sequence[int], budget: int, ranks: RankTraits) -> np.ndarray:
    """Return local samples of each epoch and rank, as the simulator counts them."""
    local = simulate(scenario_of(sizes, budget, ranks)).runs[0].local
    hits: np.ndarray = local.reshape(4, -1, len(sizes)).sum(axis=1)
    return hits


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "4:2:1"])
@pytest.mark.parametrize("share_kept", [8, 5, 2])
def test_the_simulator_counts_the_hits_of_a_run(sizes: Sequence[int], share_kept: int) -> None:
    hits, _ = run(sizes, NUM_SAMPLES // share_kept)
    np.testing.assert_array_equal(simulated(sizes, NUM_SAMPLES // share_kept, SHARED), hits)


@pytest.mark.parametrize("share_kept", [8, 4])
def test_what_a_rank_has_anyway_takes_no_budget(share_kept: int) -> None:
    """Each rank has an eighth on its disk. At 4:2:1 the fast ones compute more, and keep that."""
    given = Placement.sharded(NUM_SAMPLES, 8)
    budget = NUM_SAMPLES // share_kept

    def rank(transport: LocalTransport) -> tuple[list[int], Cache]:
        cache = Cache(NUM_SAMPLES, budget, transport)
        return train(cache, UNEQUAL, num_epochs=4, given=given), cache

    by_rank = run_ranks(8, rank)
    for _, cache in by_rank:
        assert not (cache.held & cache.is_home).any()
    hits = np.array([hits for hits, _ in by_rank]).T
    shares = hits.sum(axis=1) / NUM_SAMPLES
    assert 0.6 < shares[0] < 0.8  # disks alone
    assert shares[3] > 0.95
    ranks = RankTraits(local_share=None, source="")
    np.testing.assert_array_equal(simulated(UNEQUAL, budget, ranks), hits)


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "4:2:1"])
def test_the_simulator_counts_what_a_run_reads_from_peers_and_source(sizes: Sequence[int]) -> None:
    """Each rank has 5 % on its disk, and reads the rest of the data set from a shared source."""
    budget = NUM_SAMPLES // 8
    scenario = scenario_of(sizes, budget, RankTraits(local_share=0.05, source="nfs"))
    given = build_placement(scenario)

    def rank(transport: LocalTransport) -> tuple[list[int], int]:
        cache = Cache(NUM_SAMPLES, budget, transport)
        return train(cache, sizes, num_epochs=4, given=given), cache.num_source

    by_rank = run_ranks(8, rank)
    cluster = build_cluster(scenario, Draws(scenario).average_hits)
    served = Stores(scenario, cluster.model).serve(0, scenario.steps, np.array(sizes))
    local, peer = (each.reshape(4, -1, 8).sum(axis=1) for each in served)  # [epoch, rank]
    np.testing.assert_array_equal(local.T, [hits for hits, _ in by_rank])
    source = NUM_SAMPLES // sum(sizes) * np.array(sizes) - local[3] - peer[3]
    np.testing.assert_array_equal(source, [num_source for _, num_source in by_rank])


def test_copies_let_fewer_samples_be_fetched() -> None:
    """Steps with too many samples of a rank leave 6 % to be fetched; each becomes a copy."""
    hits, caches = run(EQUAL, NUM_SAMPLES // 4)
    shares = hits.sum(axis=1) / NUM_SAMPLES
    assert 0.9 < shares[1] < shares[2] < shares[3]
    assert shares[3] > 0.955
    for cache in caches:
        np.testing.assert_array_equal(cache.copies, caches[0].copies)
        assert cache.held[cache.copies == cache.rank + 1].all()
        assert not (cache.copies == cache.first + 1)[cache.copies > 0].any()


def test_samples_follow_sizes_that_move() -> None:
    """Ranks keep what they compute now: sizes that change places lose an epoch, not the run."""
    hits, _ = run((40, 40, 10, 10), NUM_SAMPLES, num_epochs=1)
    assert hits.sum() == 0

    def rank(transport: LocalTransport) -> list[int]:
        cache = Cache(NUM_SAMPLES, NUM_SAMPLES, transport)
        before = train(cache, (40, 40, 10, 10), num_epochs=2)
        return before + train(cache, (10, 10, 40, 40), num_epochs=3, first_epoch=2)

    shares = np.array(run_ranks(4, rank)).sum(axis=0) / NUM_SAMPLES
    assert shares[1] > 0.9
    assert shares[2] < 0.6
    assert shares[3] > 0.9


def test_a_dear_source_is_left_alone_once_all_have_room() -> None:
    """At 4:2:1 fast ranks cannot keep what they compute; slow ones adopt it, as the source is dear.

    Their budgets together hold all samples.
    """
    _, caches = run(UNEQUAL, NUM_SAMPLES // 8, ReadCosts())
    cheap = sum(cache.num_source for cache in caches)
    assert cheap > 0.1 * NUM_SAMPLES  # in the fourth epoch
    _, caches = run(UNEQUAL, NUM_SAMPLES // 8, DEAR)
    assert sum(cache.num_source for cache in caches) < 0.01 * NUM_SAMPLES
    assert (caches[0].first >= 0).mean() > 0.99


def test_the_simulator_adopts_where_a_source_is_dear() -> None:
    """With a source that many ranks wait for, what is unkept is adopted, as costs are measured."""
    slow_source = RankTraits(local_share=0.0, source="nfs", remote_bytes_per_s=1e9)
    scenario = Scenario(
        "store",
        8,
        256,
        seed=3,
        steps=8 * 25,
        interval=5,
        num_samples=NUM_SAMPLES,
        store=True,
        policies=(UNEQUAL,),
        sources={"nfs": 1e8},
        ranks=RankTraits(**{**vars(slow_source), "cache_samples": NUM_SAMPLES // 8}),
    )
    run = simulate(scenario).runs[0]
    steps = run.step_s.reshape(8, 25).mean(axis=1)
    assert steps[-1] < 0.5 * steps[1]  # before: a quarter of an epoch comes from the source
