"""A job whose rank 1 runs out of memory: ``memory.py [probe]``.

The device of rank 1 is emulated: it is fast, and holds 20 samples. The others are slower, so the
policy gives rank 1 more and more. With "probe" ranks try what they hold before they train.
"""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch

import loft_hvd as loft

GLOBAL_BATCH, NUM_STEPS, HOLDS = 48, 60, 20


def compute(num_samples: int) -> None:
    """Take the time of this rank's device, or run out of its memory."""
    if hvd.rank() == 1 and num_samples > HOLDS:
        raise MemoryError(f"the emulated device holds {HOLDS} samples")
    time.sleep(num_samples * (1e-4 if hvd.rank() == 1 else 1e-3))


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # one start for all ranks
    model = torch.nn.Linear(2, 1)
    balancer = loft.Balancer(GLOBAL_BATCH, "lbbsp-cpu:last", interval=4)
    if "probe" in sys.argv:
        print(f"rank {hvd.rank()} has probed {balancer.probe(compute, headroom=0.0)}")
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
    )
    data = torch.utils.data.TensorDataset(torch.ones(GLOBAL_BATCH * NUM_STEPS, 2))
    for (x,) in loft.DataLoader(data, balancer):
        optimizer.zero_grad()
        loss = model(x).mean()
        compute(len(x))
        loss.backward()
        optimizer.step()
    largest = max(plan.sizes[1] for plan in balancer.history)
    print(f"rank {hvd.rank()} has finished; rank 1 had {largest} samples at most")


if __name__ == "__main__":
    main()
