"""Two levels over 4 ranks, 2 groups of 2, against the definition; the argument: how sets come."""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.errors import UsageError

NUMEL = 100_003
GROUPS = [[0, 1], [2, 3]]
MEAN = loft.Mean(reproducible=True)


def row_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * step + rank))


def expected(step: int, rule: loft.Rule) -> torch.Tensor:
    rows = torch.stack([row_of(rank, step) for rank in range(4)])
    means = torch.stack([aggregate(rows[group], MEAN) for group in GROUPS])
    result: torch.Tensor = aggregate(means, rule)
    return result


def train() -> None:
    weight = torch.nn.Parameter(torch.zeros(NUMEL))
    rule = loft.Median()
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), rule=rule, over=GROUPS, bucket_bytes=4 * NUMEL // 3
    )
    for step in range(5):
        optimizer.zero_grad()
        (weight * row_of(hvd.rank(), step)).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        assert torch.equal(weight.grad, expected(step, rule)), step


def main(what: str) -> None:
    listed = [hvd.ProcessSet(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    process_sets = {"dynamic": "dynamic", "listed": listed, "none": None}[what]
    hvd.init(process_sets=process_sets)
    torch.set_num_threads(1)
    if what == "none":
        try:
            train()
        except UsageError as error:
            print(f"refused: {error}", flush=True)
    else:
        train()
        print(f"rank {hvd.rank()}: equal", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
