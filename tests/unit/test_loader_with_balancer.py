"""``DataLoader`` and ``BatchSampler`` with the real ``Balancer``, ranks as threads."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.transport.local import LocalTransport, run_ranks

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
