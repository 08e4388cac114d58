"""Sampling with replacement by weight: the same draws on every rank, whatever the sizes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, WeightedRandomSampler

import loft_hvd as loft
from loft_hvd.data.draws import WeightedDraws, check_weights
from loft_hvd.data.loader import DataLoader
from loft_hvd.data.sampler import BatchSampler
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.caches import Cache
from tests.support.plans import FakePlans

WEIGHTS = [(number % 5) * 0.75 for number in range(90)]  # every fifth sample is never drawn
DATA = TensorDataset(torch.arange(90))
SIZES = [[16], [6, 6, 4], [9, 1, 6], [4, 4, 4, 4], [16, 0, 0, 0], [1, 7, 0, 8]]


def draws_of(weights: Any, num_draws: int | None = None) -> WeightedDraws:
    made = check_weights(weights, num_draws, len(weights), shuffle=None)
    assert made is not None
    return made


def global_batches(sizes: Sequence[int], **given: Any) -> list[list[int]]:
    """Return the samples of all ranks of each step of an epoch, in order."""
    by_rank = []
    for rank in range(len(sizes)):
        loader = DataLoader(DATA, FakePlans(sizes, rank=rank), weights=WEIGHTS, seed=3, **given)
        by_rank.append([[] if loader.is_padding else x.tolist() for (x,) in loader])
    return [sorted(itertools.chain(*batches)) for batches in zip(*by_rank, strict=True)]


def test_the_draws_are_the_documented_ones() -> None:
    # Written down once: ranks and restarts with other versions must draw the same samples.
    drawn = draws_of([1.0, 0.0, 3.0, 2.0], 12).order(seed=7, epoch=3)
    words = np.random.PCG64(np.random.SeedSequence([7, 3, 2])).random_raw(12)
    shares = words.astype(np.float64) / 2.0**64
    expected = [0 if share < 1 / 6 else 2 if share < 4 / 6 else 3 for share in shares]
    assert drawn.tolist() == expected == [3, 0, 2, 2, 2, 3, 2, 3, 2, 2, 2, 3]
    assert drawn.dtype == np.int32


@pytest.mark.parametrize(
    "weights",
    [
        [1.0, 0.0, 3.0, 0.5, 0.0],
        torch.tensor([1e-3, 1.0, 0.0, 2.0], dtype=torch.bfloat16),
        np.array([5e-324, 0.0, 5e-324]),  # whose sums a float64 could not hold as they are
        np.array([1e308, 1e308, 0.0, 1e308]),
        [0, 0, 1],
    ],
    ids=["floats", "bfloat16", "denormal", "huge", "one"],
)
def test_samples_come_as_often_as_their_weights_say(weights: Any) -> None:
    num_draws = 100_000
    drawn = draws_of(weights, num_draws)
    counts = np.zeros(len(weights))
    for epoch in range(3):
        counts += np.bincount(drawn.order(seed=1, epoch=epoch), minlength=len(weights))
    values = np.array([float(weight) for weight in weights])
    shares = values / values.max() / (values / values.max()).sum()
    sigma = np.sqrt(3 * num_draws * shares * (1 - shares))
    assert (np.abs(counts - 3 * num_draws * shares) <= 3 * sigma).all(), counts
    assert (counts[values == 0] == 0).all()


def test_epochs_and_seeds_draw_apart() -> None:
    drawn = draws_of(np.ones(1000))
    orders = [drawn.order(seed=seed, epoch=epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).mean() < 0.01  # 1 in 1000 is by chance


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "given", [{}, {"num_samples": 250}, {"num_samples": 250, "drop_last": True}], ids=str
)
def test_global_batches_are_the_same_whatever_the_sizes(
    sizes: list[int], given: dict[str, Any]
) -> None:
    batches = global_batches(sizes, **given)
    assert batches == global_batches([16], **given)
    num_draws = given.get("num_samples", 90)
    if given.get("drop_last"):
        num_draws -= num_draws % 16
    assert list(map(len, batches)) == [16] * (num_draws // 16) + [num_draws % 16] * (
        num_draws % 16 > 0
    )
    assert not {sample for batch in batches for sample in batch if sample % 5 == 0}


@pytest.mark.parametrize(
    "given",
    [
        {"num_workers": 2},
        {"placement": loft.Placement.sharded(90, 3)},
        {"placement": loft.Placement.sharded(90, 3, nodes=["a", "a", "b"])},
        {"placement": loft.Placement.sharded(90, 3).with_strata(np.arange(90) % 4, cap=1.5)},
        {"placement": loft.Placement.from_function(lambda i: [i % 3, (i + 1) % 3], 90)},
    ],
    ids=["processes", "shards", "nodes", "strata", "overlapping"],
)
def test_draws_do_not_depend_on_how_they_are_loaded(given: dict[str, Any]) -> None:
    assert global_batches([9, 1, 6], **given) == global_batches([16])


def test_homes_are_kept_to_as_far_as_sizes_allow() -> None:
    placement = loft.Placement.sharded(90, 3)
    reads = 0
    for rank in range(3):
        plans = FakePlans([6, 5, 5], rank=rank)
        list(DataLoader(DATA, plans, placement=placement, weights=WEIGHTS))
        reads += sum(fetch.local for fetch in plans.fetches)
    assert reads > 0.7 * 90  # a third by chance


def test_micro_batches_hold_the_same_draws() -> None:
    plans = FakePlans([12, 4], caps=[5, None])
    batches = [
        [x.tolist() for (x,) in micro] for micro in DataLoader(DATA, plans, weights=WEIGHTS, seed=3)
    ]
    assert [list(map(len, micro)) for micro in batches][:2] == [[4, 4, 4]] * 2
    whole = [x.tolist() for (x,) in DataLoader(DATA, FakePlans([12, 4]), weights=WEIGHTS, seed=3)]
    assert [list(itertools.chain(*micro)) for micro in batches] == whole


@pytest.mark.parametrize("others", [[6, 6, 4], [16], [1, 7, 0, 8]], ids=str)
def test_a_run_goes_on_within_an_epoch_with_other_ranks(others: list[int]) -> None:
    loader = DataLoader(DATA, FakePlans([4, 4, 8]), weights=WEIGHTS, seed=3)
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    by_rank = []
    for rank in range(len(others)):
        again = DataLoader(DATA, FakePlans(others, rank=rank), weights=WEIGHTS, seed=3)
        again.load_state_dict(state)
        again.set_epoch(2)
        by_rank.append([[] if again.is_padding else x.tolist() for (x,) in again])
    rest = [sorted(itertools.chain(*batches)) for batches in zip(*by_rank, strict=True)]
    order = draws_of(WEIGHTS).order(seed=3, epoch=2).tolist()
    assert rest == [sorted(order[at : at + 16]) for at in range(48, 90, 16)]


def test_a_sampler_draws_and_goes_on_as_a_loader_does() -> None:
    order = draws_of(WEIGHTS, 200).order(seed=0, epoch=0).tolist()
    sampler = BatchSampler(90, FakePlans([16]), weights=WEIGHTS, num_samples=200)
    lists = list(sampler)
    assert lists == [order[at : at + 16] for at in range(0, 200, 16)]
    assert len(sampler) == 13
    again = BatchSampler(90, FakePlans([16]), weights=WEIGHTS, num_samples=200)
    again.load_state_dict(sampler.state_dict(num_trained=11))
    assert list(again) == lists[11:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "weights is None here"),
        ({"weights": WEIGHTS[::-1]}, "weights is"),
        ({"weights": WEIGHTS, "num_samples": 80}, "num_samples is 80 here but 90"),
    ],
)
def test_a_state_of_other_draws_is_refused(given: dict[str, Any], message: str) -> None:
    state = DataLoader(DATA, FakePlans([16]), weights=WEIGHTS).state_dict()
    with pytest.raises(DataError, match=message):
        DataLoader(DATA, FakePlans([16]), **given).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"weights": [1.0, 2.0]}, DataError, r"shape \[2\].* 90 samples.*class_weights\[labels\]"),
        ({"weights": np.ones((90, 1))}, DataError, r"shape \[90, 1\]"),
        ({"weights": 3.0}, DataError, r"shape \[\]"),
        ({"weights": "heavy"}, ArgumentTypeError, "of type str and no row of numbers"),
        ({"weights": [1.0] * 89 + [float("nan")]}, DataError, "that of sample 89 is nan"),
        ({"weights": [float("inf")] * 90}, DataError, "90 of 90 are not: that of sample 0 is inf"),
        ({"weights": [1.0, -0.5] * 45}, DataError, "45 of 90 are not: that of sample 1 is -0.5"),
        ({"weights": np.zeros(90)}, DataError, "at least one must be positive"),
        ({"weights": WEIGHTS, "num_samples": 0}, DataError, "num_samples=0 must be >= 1"),
        ({"weights": WEIGHTS, "num_samples": 9.5}, ArgumentTypeError, "num_samples=9.5 must be a"),
        ({"num_samples": 9}, DataError, "num_samples=9 is how many samples an epoch draws by"),
        ({"weights": WEIGHTS, "relaxed": True}, DataError, "drop relaxed=True"),
        ({"weights": WEIGHTS, "shuffle": False}, DataError, "leave shuffle away"),
        (
            {"weights": WEIGHTS, "shuffle": loft.BlockShuffle()},
            DataError,
            "shuffle=BlockShuffle.*leave shuffle away",
        ),
    ],
)
@pytest.mark.parametrize("kind", [DataLoader, BatchSampler])
def test_weights_that_cannot_be_drawn_by_are_refused_with_their_values(
    kind: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        kind(DATA, FakePlans([16]), **given)
    assert isinstance(raised.value, ArgumentError | ArgumentTypeError)


def test_an_evaluation_takes_no_weights() -> None:
    with pytest.raises(DataError, match="train=False takes every sample once"):
        DataLoader(DATA, FakePlans([16]), weights=WEIGHTS, train=False)


def test_a_forgotten_epoch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(DATA, FakePlans([16]), weights=WEIGHTS)
    for _ in range(3):
        list(loader)
    for epoch in range(3):
        loader.set_epoch(epoch)
        list(loader)
    (told,) = [each for each in caplog.messages if "begins again" in each]
    assert told.startswith("epoch 0 begins again, with the same samples in each step")


def test_shards_are_drawn_from_and_read_in_their_order() -> None:
    class Shards(TensorDataset):
        shard_sizes = (30, 30, 30)

    batches = [
        x.tolist()
        for (x,) in DataLoader(Shards(torch.arange(90)), FakePlans([16]), weights=WEIGHTS, seed=3)
    ]
    assert list(map(sorted, batches)) == global_batches([16])
    for batch in batches:
        shards = [sample // 30 for sample in batch]
        assert len(list(itertools.groupby(shards))) == len(set(shards))


def test_ranks_with_other_weights_are_told() -> None:
    def work(transport: LocalTransport) -> str:
        balancer = loft.Balancer(16, [8, 8], transport=transport)
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), balancer=balancer, transport=transport
        )
        weights = WEIGHTS if transport.rank else WEIGHTS[::-1]
        try:
            for (x,) in loft.DataLoader(DATA, balancer, weights=weights):
                (weight * x.float().mean()).sum().backward()
                optimizer.step()
        except loft.errors.MismatchError as error:
            return str(error)
        return ""

    for told in run_ranks(2, work):
        assert "the batch trained on (data set, seed, epoch, loaded state) differs" in told


def test_ranks_know_what_each_keeps_of_samples_that_come_again() -> None:
    """Two ranks may compute a sample in one step, and a rank a sample twice."""

    def work(transport: LocalTransport) -> Cache:
        cache = Cache(90, 20, transport)
        plans = FakePlans([7, 5, 4], rank=transport.rank)
        loader = BatchSampler(90, plans, weights=WEIGHTS, num_samples=160)
        loader._batches._keeper = cache
        for epoch in range(4):
            loader.set_epoch(epoch)
            for indices in loader:
                cache.read(indices)
                plans.next_step += 1
        loader.set_epoch(9)
        next(iter(loader))  # ranks agree on the last epoch
        return cache

    caches = run_ranks(3, work)
    for cache in caches:
        np.testing.assert_array_equal(cache.first, caches[0].first)
        assert cache.held[cache.first == cache.rank].all()
    assert (caches[0].first >= 0).sum() > 40


def test_a_store_keeps_what_is_drawn_and_draws_stay_the_same() -> None:
    pytest.importorskip("pyarrow.flight", reason="the extra [store] is not installed")

    def work(transport: LocalTransport) -> tuple[list[list[list[int]]], Mapping[str, int]]:
        store = loft.SampleStore(DATA, memory_bytes=1 << 20, transport=transport)
        balancer = loft.Balancer(16, [6, 10], transport=transport)
        loader = loft.DataLoader(store, balancer, weights=WEIGHTS, seed=3)
        epochs = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            batches = []
            for (x,) in loader:
                batches.append(x.tolist())
                balancer.take_step()
                balancer.step_ended()
            epochs.append(batches)
        counters = dict(store.counters)
        store.close()
        return epochs, counters

    (mine, counters), (theirs, others) = run_ranks(2, work)
    for epoch in range(3):
        order = draws_of(WEIGHTS).order(seed=3, epoch=epoch).tolist()
        batches = [sorted(a + b) for a, b in zip(mine[epoch], theirs[epoch], strict=True)]
        assert batches == [sorted(order[at : at + 16]) for at in range(0, 90, 16)]
    # Of 270 draws, 72 samples that can be drawn are read once, or twice where both ranks had them.
    assert counters["source"] + others["source"] <= 2 * 72
    assert sum(each["own"] + each["peer"] for each in (counters, others)) >= 270 - 2 * 72


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sampler_of_torchs_is_refused_with_the_line_to_write(replacement: bool) -> None:
    sampler = WeightedRandomSampler(WEIGHTS, 70, replacement=replacement)
    for make in (
        lambda: BatchSampler(sampler, FakePlans([16])),
        lambda: DataLoader(sampler, FakePlans([16])),  # type: ignore[arg-type]
        lambda: DataLoader(DATA, FakePlans([16]), sampler=sampler),
    ):
        with pytest.raises(ArgumentTypeError, match="weights=weights, num_samples=70"):
            make()
