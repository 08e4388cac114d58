"""One rank is slow, and all average their losses before ``backward``: ``culprits.py horovod|ddp``.

Averaging, the fast ranks wait inside what else would be their computing. For each way to average,
and each place where the slow rank's time goes, rank 0 prints whom the balancer names after its
first interval, and the sizes of its last plan.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

import loft_hvd as loft

ENGINE = sys.argv[1]
BATCH, WIDTH, INTERVAL, NUM_STEPS = 12, 64, 10, 48
MOST_STEPS = 4 * NUM_STEPS  # where the first plan was undone
NUM_SAMPLES = 20_000  # more than those steps take
OWN_S, SLOW_S = 0.5e-3, 4e-3  # of a sample
CALLBACK_S = 0.15  # a batch, whatever its size
CASES = [("fetch", "sum"), ("forward", "average"), ("backward", "metric"), ("forward", "later")]
if ENGINE == "ddp":
    CASES += [("forward", "torchmetrics")]  # it knows torch.distributed alone
CALLBACKS = ("before step", "after step")  # of the script's own
CASES += [(each, "sum") for each in CALLBACKS]


class Slow(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample_s: float) -> Tensor:
        ctx.seconds = sample_s * len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SlowBackward(nn.Module):
    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self._sample_s = sample_s

    def forward(self, x: Tensor) -> Tensor:
        slowed: Tensor = Slow.apply(x, self._sample_s)  # type: ignore[no-untyped-call]  # as torch has it
        return slowed


class Samples(Dataset[Tensor]):
    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._sample_s)
        return torch.full((WIDTH,), index / NUM_SAMPLES)


if ENGINE == "horovod":
    import horovod.torch as hvd

    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()

    def summed(value: Tensor) -> Tensor:
        total: Tensor = hvd.allreduce(value)
        return total

    def later(value: Tensor) -> Tensor:
        handle = hvd.allreduce_async(value)
        total: Tensor = hvd.synchronize(handle)
        return total
else:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def summed(value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def later(value: Tensor) -> Tensor:
        total = value.clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        return total


def run(where: str | None, way: str) -> dict[str, Any]:
    """Train a while; return who was named, and the last sizes."""
    slow = rank == world_size - 1
    seconds = {each: OWN_S for each in ("fetch", "forward", "backward")}
    seconds |= dict.fromkeys(CALLBACKS, 0.0)
    if slow and where is not None:
        seconds[where] = CALLBACK_S if where in CALLBACKS else SLOW_S
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), SlowBackward(seconds["backward"]), nn.Linear(WIDTH, 1)
    )
    balancer = loft.Balancer(BATCH * world_size, policy="loft", interval=INTERVAL)
    loader = loft.DataLoader(Samples(seconds["fetch"]), balancer)
    optimizer: Any
    if ENGINE == "horovod":
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            named_parameters=model.named_parameters(),
            balancer=balancer,
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model = nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(None, loft.ddp_hook(loft.Mean(), balancer))
    metric = loft.Metric("loss")

    def by_metric(value: Tensor) -> Tensor:
        metric.update(value, 1)
        return metric.avg

    mean = MeanMetric()

    def by_torchmetrics(value: Tensor) -> Tensor:
        mean.update(value)
        total: Tensor = mean.compute()  # waits in a barrier and an all-gather
        mean.reset()
        return total

    ways: dict[str, Callable[[Tensor], object]] = {
        "sum": summed,
        "later": later,
        "average": lambda value: loft.average(float(value), 1),
        "metric": by_metric,
        "torchmetrics": by_torchmetrics,
    }
    named: list[str] = []
    for step, x in enumerate(loader):
        time.sleep(seconds["forward"] * len(x))
        loss = model(x).square().mean()
        ways[way](loss.detach().reshape(1))
        loss.backward()
        time.sleep(seconds["before step"])
        optimizer.step()
        time.sleep(seconds["after step"])
        optimizer.zero_grad()
        if step == INTERVAL + 1:
            text = balancer.explain()
            named = [" ".join(each) for each in re.findall(r"rank (\d) is slow: (\w+)", text)]
        if step == INTERVAL + 1 and where in CALLBACKS:
            break
        # A plan that other processes made longer by chance is undone, and tried again later.
        least, most = min(balancer.plan.sizes), max(balancer.plan.sizes)
        has_answered = least < 0.6 * most or where is None
        if step == MOST_STEPS or (step >= NUM_STEPS and has_answered):
            break
    found = {"where": where, "way": way, "named": named, "sizes": list(balancer.plan.sizes)}
    return {**found, "steps": step, "told": balancer.explain()}


for place, by in [*CASES, (None, "sum")]:
    found = run(place, by)
    if rank == 0:
        print(f"CASE {json.dumps(found)}", flush=True)
print(f"rank {rank} has finished", flush=True)
