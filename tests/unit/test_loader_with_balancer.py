"""``DataLoader`` and ``BatchSampler`` with the real ``Balancer``, ranks as threads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.errors import ArgumentTypeError
from loft_hvd.transport.local import LocalTransport, LocalWorld, run_ranks

ALONE = LocalWorld(1).transport(0)
NUMBERS = torch.arange(53)


@pytest.mark.parametrize("num_samples", [1, 2, 13, 53])
def test_the_average_of_an_evaluation_is_that_of_one_process(num_samples: int) -> None:
    def evaluate(transport: LocalTransport) -> float:
        balancer = loft.Balancer(8, [5, 2, 1], transport=transport)
        data = TensorDataset(NUMBERS[:num_samples])
        loader = loft.DataLoader(data, balancer, train=False)
        total, count = 0.0, 0
        for (x,) in loader:
            if not loader.is_padding:
                total += float(x.sum())
                count += len(x)
        return loft.average(total / max(count, 1), count, transport=transport)

    expected = pytest.approx(float(NUMBERS[:num_samples].double().mean()))
    assert run_ranks(3, evaluate) == [expected] * 3


def test_an_evaluation_keeps_within_the_caps_and_sees_every_sample_once() -> None:
    caps = [96, 96, 48, 16]

    def evaluate(transport: LocalTransport) -> list[list[int]]:
        balancer = loft.Balancer(256, max_batch=caps, transport=transport)
        loader = loft.DataLoader(TensorDataset(torch.arange(1000)), balancer, train=False)
        return [x.tolist() for (x,) in loader if not loader.is_padding]

    by_rank = run_ranks(4, evaluate)
    for batches, cap in zip(by_rank, caps, strict=True):
        assert max(map(len, batches)) <= cap
    assert sorted(x for batches in by_rank for batch in batches for x in batch) == [*range(1000)]


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_backward_passes_take_the_sizes_of_their_own_batch_after_a_break(kind: str) -> None:
    def train(transport: LocalTransport) -> list[int]:
        balancer = loft.Balancer(8, [5, 2, 1], transport=transport)
        data = TensorDataset(NUMBERS)
        sampler = loft.BatchSampler(data, balancer)
        loader = (
            loft.DataLoader(data, balancer)
            if kind == "loader"
            else TorchDataLoader(data, batch_sampler=sampler)
        )
        next(iter(loader))  # a batch that is never trained
        seen: list[int] = []
        for (x,) in loader:
            step_sizes = balancer.take_step()
            size = step_sizes.sizes[transport.rank]
            assert len(x) == (size or min(2, step_sizes.total))
            seen += x.tolist() if size else []
        return seen

    seen = [sample for rank in run_ranks(3, train) for sample in rank]
    assert sorted(seen) == NUMBERS.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 16}, "'batch_size'; leave it away: the balancer gives"),
        ({"sampler": None}, "'sampler'; leave it away: seed="),
        ({"workers": 3}, "'workers'; there is no argument of this name"),
    ],
)
def test_a_ported_loader_hears_what_stands_for_its_arguments(
    arguments: dict[str, Any], message: str
) -> None:
    balancer = loft.Balancer(8, transport=ALONE)
    with pytest.raises(ArgumentTypeError, match=message):
        loft.DataLoader([1, 2, 3], balancer, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", ["a", 1.5, None])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    loader: Any = loft.BatchSampler(10, loft.Balancer(8, transport=ALONE))
    with pytest.raises(ArgumentTypeError, match="give a whole number"):
        loader.set_epoch(epoch)


def test_a_forgotten_balancer_is_missed() -> None:
    def work(transport: LocalTransport) -> int:
        balancer = loft.Balancer(6, "uniform", transport=transport)
        loader = loft.DataLoader(list(range(90)), balancer)  # type: ignore[arg-type]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                pass
        return sum("no backward pass takes their sizes" in str(one.message) for one in caught)

    # Threads share the filters of warnings, so say only that one came, and from one rank.
    assert sum(run_ranks(2, work)) in (1, 2)


def test_an_epoch_without_a_step_is_said() -> None:
    balancer = loft.Balancer(6, "uniform", transport=ALONE)
    loader = loft.DataLoader(list(range(5)), balancer, drop_last=True)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="an epoch has no step: 5 samples, global_batch_size=6"):
        assert list(loader) == []


def test_a_look_on_one_rank_moves_no_steps() -> None:
    def work(transport: LocalTransport) -> list[int]:
        balancer = loft.Balancer(8, [5, 3], transport=transport)
        loader = loft.DataLoader(TensorDataset(torch.arange(64)), balancer)
        if transport.rank == 0:
            next(iter(loader))
        return [balancer.take_step().step for _ in loader]

    assert run_ranks(2, work) == [list(range(8))] * 2


def test_a_batch_that_is_skipped_is_not_taken_for_reading_ahead() -> None:
    balancer = loft.Balancer(8, [8], transport=LocalWorld(1).transport(0))
    for number, _ in enumerate(loft.DataLoader(TensorDataset(torch.arange(64)), balancer)):
        if number != 3:
            balancer.take_step()
