"""A job that ends with rank 0's plan on its way: ``last_step.py``.

Rank 0 thinks for a second about the plan that leaves at the end of the last step, while the others
reach the end of the script, where Horovod's shutdown on one rank would take the engine away from
all.
"""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

import loft_hvd as loft
from loft_hvd.balance.interval import Interval
from loft_hvd.balance.policy import Policy, Proposal

# An interval ends with step 9, and its plan leaves at the end of step 10.
GLOBAL_BATCH, INTERVAL, NUM_STEPS = 12, 3, 10


class Slow(Policy):
    """Thinks long and changes nothing."""

    name = "slow"

    def propose(self, interval: Interval, *, first_step: int) -> Proposal | None:
        time.sleep(1.0)
        return None


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # one start for all ranks
    model = torch.nn.Linear(2, 1)
    balancer = loft.Balancer(GLOBAL_BATCH, Slow(), interval=INTERVAL)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), balancer=balancer
    )
    for _ in range(NUM_STEPS):
        with balancer.step(balancer.local_batch_size):
            optimizer.zero_grad()
            model(torch.ones(balancer.local_batch_size, 2)).mean().backward()
            optimizer.step()
    print(f"rank {hvd.rank()} has finished")


if __name__ == "__main__":
    main()
