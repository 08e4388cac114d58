"""Samples given out by their cost: ranks end together, and training stays that of one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import loft_hvd as loft
from loft_hvd.balance.plan import Sizes
from loft_hvd.data.assign import Assignment, Ints
from loft_hvd.data.costs import deal, padded_costs
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError, MismatchError
from loft_hvd.transport import waits
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks
from tests.support.clock import Clock
from tests.support.plans import FakePlans

SPEEDS = (4, 2, 1, 1)


def lognormal(num_samples: int, *, seed: int) -> Ints:
    """Return lengths with a median of 50, of which a few are above 500."""
    lengths = np.random.default_rng(seed).lognormal(size=num_samples)
    whole: Ints = np.ceil(50 * lengths).astype(np.int64)
    return whole


def times(costs: Ints, dealt: Assignment, speeds: Sequence[int]) -> list[float]:
    """Return what each rank needs for its micro-batches, padded."""
    assert dealt.places is not None
    found = []
    for rank, speed in enumerate(speeds):
        mine = costs[dealt.places[dealt.owners[dealt.places] == rank]].tolist()
        found.append(sum(padded_costs(mine, dealt.micro[rank])) / speed)
    return found


def given_out(costs: Ints, shares: Sizes, *, num_micro: int = 1) -> Assignment:
    free: list[int | None] = [None] * len(shares)
    return deal(costs, shares, caps=free, slots=(num_micro,) * len(shares))


@pytest.mark.parametrize("num_samples", [64, 256, 1024])
def test_unequal_ranks_end_within_5_percent_of_the_lower_bound(num_samples: int) -> None:
    for seed in range(20):
        costs = lognormal(num_samples, seed=seed)
        shares = tuple(num_samples * speed // 8 for speed in SPEEDS)
        step = max(times(costs, given_out(costs, shares, num_micro=16), SPEEDS))
        # Without padding, and with one sample on the fastest rank.
        assert step <= 1.05 * max(costs.sum() / 8, costs.max() / 4), seed


def best_runs(costs: list[int], speeds: Sequence[int]) -> float:
    """Return the least step of all ways to cut ``costs``, in order, into a run for each rank."""
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), len(speeds) - 1):
        ends = [0, *cuts, len(costs)]
        padded = [costs[a] * (b - a) for a, b in itertools.pairwise(ends)]
        for order in itertools.permutations(speeds):
            pairs = zip(padded, order, strict=True)
            best = min(best, max(cost / speed for cost, speed in pairs))
    return best


def test_one_batch_a_rank_is_near_the_best_of_all_cuts() -> None:
    ratios = []
    for seed in range(40):
        costs = lognormal(24, seed=seed)
        step = max(times(costs, given_out(costs, (12, 6, 3, 3)), SPEEDS))
        ratios.append(step / best_runs(sorted(costs.tolist(), reverse=True), SPEEDS))
    assert min(ratios) >= 1.0
    assert np.median(ratios) <= 1.02
    assert max(ratios) <= 1.15


def dealt_in_turn(costs: Ints, num_micro: int) -> int:
    """Return the longest of four equal ranks that get every fourth sample, cut alike."""
    hands = [costs[rank::4].tolist() for rank in range(4)]
    parts = [len(part) for part in np.array_split(hands[0], num_micro)]
    return max(sum(padded_costs(hand, parts)) for hand in hands)


@pytest.mark.parametrize("num_micro", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_samples", [64, 256, 1024])
def test_equal_ranks_are_no_slower_than_with_samples_dealt_in_turn(
    num_samples: int, num_micro: int
) -> None:
    for seed in range(10):
        costs = lognormal(num_samples, seed=seed)
        dealt = given_out(costs, (num_samples // 4,) * 4, num_micro=num_micro)
        in_turn = dealt_in_turn(np.sort(costs)[::-1], num_micro)
        assert max(times(costs, dealt, (1, 1, 1, 1))) <= in_turn, seed


@pytest.mark.parametrize(
    ("num_micro", "equal", "unequal", "in_turn", "as_they_come"),
    [
        (1, 1.68, 1.74, 9.80, 9.80),
        (2, 1.30, 1.30, 5.21, 7.08),
        (4, 1.13, 1.14, 2.99, 5.23),
        (8, 1.06, 1.06, 1.92, 3.73),
        (16, 1.03, 1.03, 1.41, 2.61),
    ],
)
def test_the_table_of_the_page_on_data(
    num_micro: int, equal: float, unequal: float, in_turn: float, as_they_come: float
) -> None:
    rows = []
    for seed in range(20):
        costs = lognormal(256, seed=seed)
        alike = given_out(costs, (64,) * 4, num_micro=num_micro)
        apart = given_out(costs, (128, 64, 32, 32), num_micro=num_micro)
        least = max(costs.sum() / 4, costs.max())
        rows.append(
            [
                max(times(costs, alike, (1, 1, 1, 1))) / least,
                max(times(costs, apart, SPEEDS)) / max(costs.sum() / 8, costs.max() / 4),
                dealt_in_turn(np.sort(costs)[::-1], num_micro) / least,
                dealt_in_turn(costs, num_micro) / least,
            ]
        )
    found = np.mean(rows, axis=0).tolist()
    assert found == pytest.approx([equal, unequal, in_turn, as_they_come], abs=0.006)


@settings(deadline=None, derandomize=True)
@given(
    costs=st.lists(st.integers(1, 2**31), min_size=1, max_size=60),
    world_size=st.integers(1, 6),
)
def test_one_batch_a_rank_never_costs_more_than_the_longest_times_the_most_samples(
    costs: list[int], world_size: int
) -> None:
    shares = tuple(len(part) for part in np.array_split(costs, world_size))
    step = max(times(np.array(costs), given_out(np.array(costs), shares), (1,) * world_size))
    assert step <= max(shares) * max(costs) * 1.01


class Texts(Dataset[Tensor]):
    """Rows of numbers of other lengths."""

    def __init__(self, num_samples: int = 203) -> None:
        self.lengths = np.minimum(lognormal(num_samples, seed=1) // 10 + 1, 40)
        random = torch.Generator().manual_seed(3)
        self.rows = [
            torch.randn(int(length), 3, generator=random, dtype=torch.float64)
            for length in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


TEXTS = Texts()


def pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Summing(torch.nn.Module):
    """A network for padded rows: zeros add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.outer = torch.nn.Linear(5, 1, dtype=torch.float64)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.4, 0.4, generator=random)

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.outer(torch.tanh(self.inner(x)).sum(dim=1))
        return summed


def train(
    transport: LocalTransport,
    *,
    sizes: Sequence[int],
    kind: str = "loader",
    by_cost: bool = True,
    **given: Any,
) -> tuple[list[Tensor], list[list[int]]]:
    """Train two epochs, short last batches included; returns weights and sizes of micro-batches."""
    balancer = loft.Balancer(sum(sizes), list(sizes), transport=transport, **given)
    model = Summing()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        model.named_parameters(),
        balancer=balancer,
        transport=transport,
    )
    cost = TEXTS.lengths if by_cost else None
    sampler: Any = loft.BatchSampler(TEXTS, balancer, cost=cost)
    loader: Any = TorchDataLoader(TEXTS, batch_sampler=sampler, collate_fn=pad)
    if kind == "loader":
        sampler = loader = loft.DataLoader(TEXTS, balancer, cost=cost, collate_fn=pad)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            parts = batch if balancer.splits and kind == "loader" else [batch]
            if balancer.splits and kind == "sampler":
                parts = batch.split(balancer.micro_batch_sizes)
            optimizer.zero_grad()
            seen.append([len(x) for x in parts])
            for x in parts:
                model(x).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()], seen


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ([20, 10, 5, 5], {}),
        ([20, 0, 15, 5], {}),
        ([20, 10, 5, 5], {"micro_batches": 4}),
        ([20, 0, 15, 5], {"micro_batches": True, "max_batch": [6, 6, 5, 2]}),
    ],
    ids=str,
)
def test_training_by_cost_is_that_of_one_process(
    sizes: list[int], given: dict[str, Any], kind: str
) -> None:
    (alone, _), *_ = run_ranks(1, lambda rank: train(rank, sizes=[40], by_cost=False))
    ranks = run_ranks(4, lambda rank: train(rank, sizes=sizes, kind=kind, **given))
    for weights, _ in ranks:
        for got, want in zip(weights, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    numbers = [[sum(step) for step in seen] for _, seen in ranks]
    assert numbers[0] != [sizes[0]] * len(numbers[0]), "samples follow from cost"
    for (_, seen), cap in zip(ranks, given.get("max_batch", [40] * 4), strict=True):
        assert max(map(max, seen)) <= cap


def test_the_average_of_an_evaluation_by_cost_is_that_of_one_process() -> None:
    def evaluate(transport: LocalTransport) -> tuple[float, int]:
        balancer = loft.Balancer(40, [20, 15, 0, 5], max_batch=30, transport=transport)
        loader = loft.DataLoader(TEXTS, balancer, train=False, cost=TEXTS.lengths, collate_fn=pad)
        total, count, most = 0.0, 0, 0
        for x in loader:
            if not loader.is_padding:
                assert len(x) == loader.local_batch_size
                total, count = total + float(x.sum()), count + len(x)
                most = max(most, len(x))
        return loft.average(total / max(count, 1), count, transport=transport), most

    expected = sum(float(row.sum()) for row in TEXTS.rows) / len(TEXTS)
    for average, most in run_ranks(4, evaluate):
        assert average == pytest.approx(expected)
        assert most <= 30


def test_times_are_told_for_the_share_of_the_cost() -> None:
    plans = FakePlans((20, 10, 5, 5), rank=1)
    loader = loft.DataLoader(TEXTS, plans, cost=TEXTS.lengths, collate_fn=pad)
    batches = list(loader)
    assert {(fetch.local, fetch.remote) for fetch in plans.fetches[:-1]} == {(10, 0)}
    assert len({len(batch) for batch in batches}) > 1


def test_ranks_of_unknown_speed_end_together_once_sizes_have_followed() -> None:
    """Speeds 4, 2, 1, 1 on a clock of the test's own; from equal sizes."""
    costs = lognormal(4096, seed=2)

    def work(transport: LocalTransport) -> list[float]:
        clock = Clock()
        balancer = loft.Balancer(
            256, micro_batches=16, interval=8, transport=transport, clock=clock
        )
        loader = loft.DataLoader(range(4096), balancer, cost=costs)  # type: ignore[arg-type]
        ratios = []
        for epoch in range(8):
            loader.set_epoch(epoch)
            for parts in loader:
                taken = balancer.take_step()
                mine = sum(len(part) * int(costs[part].max()) for part in parts)
                mine_s = 1e-3 * mine / SPEEDS[transport.rank]
                used = 1e-3 * float(costs[torch.cat(parts)].sum())
                rows = Channel(transport, "times").allgather_rows(torch.tensor([mine_s, used]))
                seconds, costs_used = rows.T
                clock.now += mine_s
                balancer.gradient_arrived(blocked_s=0.0)
                balancer.computing_ended()
                waited_s = float(seconds.max()) - mine_s
                clock.now += waited_s
                waits.add(waited_s)
                balancer.step_ended()
                assert sum(taken.sizes) == 256
                ratios.append(float(seconds.max() / (costs_used.sum() / 8)))
        return ratios

    ratios = run_ranks(4, work)[0]
    assert np.mean(ratios[:8]) > 1.5
    assert np.mean(ratios[-32:]) <= 1.06


def test_ranks_with_other_costs_are_told() -> None:
    def work(transport: LocalTransport) -> None:
        train_costs = TEXTS.lengths.copy()
        train_costs[7] += transport.rank
        balancer = loft.Balancer(40, transport=transport)
        loader = loft.DataLoader(TEXTS, balancer, cost=train_costs, collate_fn=pad)
        for _ in loader:
            balancer.take_step()
            balancer.step_ended()

    with pytest.raises(MismatchError, match="batch of the first step"):
        run_ranks(2, work)


ALONE = LocalWorld(1).transport(0)


@pytest.mark.parametrize(
    ("cost", "error", "message"),
    [
        ([1, 2], DataError, r"shape \[2\], but the data set has 4"),
        ([1.0, 2.0, 3.0, 4.0], ArgumentTypeError, "values of type float64"),
        ([1, 0, 3, 4], ArgumentError, "1 of 4 are not: that of sample 1 is 0"),
        ([1, 2, 3, 2**31 + 1], ArgumentError, "sample 3 is 2147483649"),
        (len, ArgumentTypeError, "one whole number for each sample"),
    ],
)
@pytest.mark.parametrize("make", [loft.DataLoader, loft.BatchSampler])
def test_costs_that_are_none_are_refused(
    make: Any, cost: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make([5, 6, 7, 8.5], loft.Balancer(2, transport=ALONE), cost=cost)


@pytest.mark.parametrize("make", [loft.DataLoader, loft.BatchSampler])
def test_cost_and_placement_are_refused_together(make: Any) -> None:
    with pytest.raises(DataError, match="cost= gives samples to ranks by what they cost"):
        make(
            TEXTS,
            loft.Balancer(2, transport=ALONE),
            cost=TEXTS.lengths,
            placement=loft.Placement.sharded(len(TEXTS), 1),
        )


def test_a_tensor_of_costs_and_draws_by_weight_go_together() -> None:
    balancer = loft.Balancer(40, transport=ALONE)
    loader = loft.DataLoader(
        TEXTS,
        balancer,
        cost=torch.from_numpy(TEXTS.lengths),
        weights=1.0 / TEXTS.lengths,
        collate_fn=pad,
    )
    assert [len(batch) for batch in loader] == [40] * 5 + [3]
