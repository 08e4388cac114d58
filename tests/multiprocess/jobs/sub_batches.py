"""Training by sub-batches, with a metric of each: ``sub_batches.py METRIC``.

Ranks have batches of 24, 16 and 8 samples, and sub-batches of 8. With "engine" the metric of every
sub-batch is averaged by ``hvd.allreduce``, as scripts for equal batches do; with "loft" by
``loft.Metric``.
"""

from __future__ import annotations

import sys
import time
import zlib

import horovod.torch as hvd
import torch

import loft_hvd as loft
from tests.support.training import make_data, make_model

SUB_BATCH, NUM_STEPS = 8, 6


class EngineMetric:
    """An average over ranks of what each of them has at the same time."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.num_values = name, 0.0, 0

    def update(self, value: torch.Tensor, count: int) -> None:
        self.total += float(hvd.allreduce(value.detach(), name=self.name))
        self.num_values += 1

    @property
    def avg(self) -> float:
        return self.total / self.num_values


def main(kind: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = make_model()
    balancer = loft.Balancer(48, [24, 16, 8])
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        backward_passes_per_step=3,
        balancer=balancer,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    metric = EngineMetric("train_loss") if kind == "engine" else loft.Metric("train_loss")
    print(f"fault at {time.time()}", flush=True)
    for x, y in loft.DataLoader(make_data(48 * NUM_STEPS), balancer):
        optimizer.zero_grad()
        parts = list(zip(x.split(SUB_BATCH), y.split(SUB_BATCH), strict=True))
        for own_x, own_y in parts:
            loss = torch.nn.functional.mse_loss(model(own_x), own_y)
            metric.update(loss, len(own_x))
            (loss / len(parts)).backward()
        optimizer.step()
        average = float(metric.avg)
    weights = [zlib.crc32(p.detach().numpy().tobytes()) for p in model.parameters()]
    text = f"rank {hvd.rank()} has finished, loss {average:.6f}"
    rows = hvd.allgather(torch.tensor([[sum(weights) % 2**31]]))
    print(f"{text}, bits equal: {len(set(rows.flatten().tolist())) == 1}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
