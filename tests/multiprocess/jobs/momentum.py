"""Worker momentum over processes: ``momentum.py BY``.

It trains a large layer with momentum by "worker" or "sgd", and says how much memory that took.
"""

from __future__ import annotations

import resource
import sys

import horovod.torch as hvd
import torch

import loft_hvd as loft

B, LR = 0.9, 0.01
NUM_VALUES = 20_000_000


def main(by: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(NUM_VALUES))
    own, theirs = (B, 0.0) if by == "sgd" else (0.0, B)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD([weight], lr=LR, momentum=own, foreach=False), worker_momentum=theirs
    )
    for _ in range(4):
        optimizer.zero_grad()
        (weight * 2.0).sum().backward()
        optimizer.step()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"rank {hvd.rank()} took {most} bytes by {by}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
