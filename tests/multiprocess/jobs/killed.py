"""A job whose ranks are killed at one moment: ``killed.py RULE STEP RANK,RANK``.

All ranks tell the others their process ids; the lowest that is to die kills the others of its list
and then itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import horovod.torch as hvd
import torch

import loft_hvd as loft
from tests.support.training import make_data, make_model


def main(rule: str, fault_step: int, killed: list[int]) -> None:
    hvd.init()
    torch.set_num_threads(1)
    processes = hvd.allgather(torch.tensor([os.getpid()])).tolist()
    model = make_model()
    balancer = loft.Balancer(48, [24, 16, 8])
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        rule=loft.parse_rule(rule),
        balancer=balancer,
    )
    for step, (x, y) in enumerate(loft.DataLoader(make_data(48 * 20), balancer)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if step == fault_step and hvd.rank() == killed[0]:
            print(f"fault at {time.time()}", flush=True)
            for rank in reversed(killed):
                os.kill(processes[rank], signal.SIGKILL)
        loss.backward()
        optimizer.step()
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(rank) for rank in sys.argv[3].split(",")])
