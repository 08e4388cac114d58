"""What ``loft.watch`` adds to a step: seconds of one process, the least of many pairs of steps.

``python -m benchmarks.watching 20`` takes a model of 20 parameters, of which hardly any computing
comes, so that what is left is Python. What is watched is told no times of other ranks: exchanging
them costs once an interval.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from loft_hvd.optimizer.watching import TrainingWatch
from loft_hvd.transport.local import LocalWorld

_PAIRS = 2500
_FOREVER = 10**7  # steps to the first exchange


def main(num_parameters: int) -> None:
    """Print what a step takes, and what it takes when it is watched, in microseconds."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_parameters // 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(4, 8)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    gc.disable()
    before = _least_us(step)
    transport = LocalWorld(1).transport(0)
    with TrainingWatch(model, interval=_FOREVER, transport=transport):
        watched = _least_us(step)
    alone = min(before, _least_us(step))
    said = f"a step {alone:.0f} us, watched {watched:.0f}: {watched - alone:.0f} us more"
    print(said)  # noqa: T201 - a command's output


def _least_us(step: Callable[[], None]) -> float:
    spent = []
    for _ in range(_PAIRS):
        began = time.perf_counter()
        step()
        step()
        spent.append((time.perf_counter() - began) / 2)
    return 1e6 * min(spent)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
