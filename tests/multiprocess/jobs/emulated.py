"""A job whose devices are emulated: a sample takes a fixed time, on one rank three times as long.

``python emulated.py RUNS``: each run trains under ``policy="loft"`` and slows rank 2 half-way; then
fixed splits are tried, interleaved, on the slowed ranks. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import loft_hvd as loft

SAMPLE_S, SLOW_RANK, FACTOR = 1.5e-3, 2, 3.0
GLOBAL_BATCH, INTERVAL, CHANGE_STEP, REPLANS, MEASURED = 96, 10, 50, 5, 20


class Device(nn.Module):
    """A layer that takes as long as an accelerator with a fixed time a sample would."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.sample_s = SAMPLE_S

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.sample_s * len(x))
        out: Tensor = self.layer(x)
        return out


class Run:
    """One balancer with model, optimizer and loader; ``step`` trains one batch."""

    def __init__(self, policy: str | list[int]) -> None:
        torch.manual_seed(0)
        self.model = Device()
        self.balancer = loft.Balancer(GLOBAL_BATCH, policy, interval=INTERVAL)
        dataset = TensorDataset(torch.randn(14_400, 16), torch.randint(0, 4, (14_400,)))
        self.loader = loft.DataLoader(dataset, self.balancer, num_workers=0)
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            named_parameters=self.model.named_parameters(),
            balancer=self.balancer,
        )
        self.batches = iter(self.loader)

    def step(self) -> float:
        """Train one batch and return the seconds it took, the optimizer's step included."""
        began = time.perf_counter()
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        return time.perf_counter() - began


def sample_s(*, is_slowed: bool) -> float:
    return SAMPLE_S * (FACTOR if is_slowed and hvd.rank() == SLOW_RANK else 1.0)


def adapt() -> tuple[float, list[int]]:
    """Return the median step after the change and five re-plans, and the sizes there."""
    run = Run("loft")
    for _ in range(CHANGE_STEP):
        run.step()
    run.model.sample_s = sample_s(is_slowed=True)
    for _ in range(REPLANS * INTERVAL):
        run.step()
    taken = [run.step() for _ in range(MEASURED)]
    return statistics.median(taken), list(run.balancer.plan.sizes)


def splits() -> list[list[int]]:
    """Return fixed splits that give the slow rank 2 to 24 samples, and the others the rest."""
    found = []
    for slow in (2, 4, 6, 8, 9, 10, 11, 12, 14, 16, 20, 24):
        rest = GLOBAL_BATCH - slow
        sizes = [rest // 3 + (place < rest % 3) for place in range(3)]
        found.append([*sizes[:SLOW_RANK], slow, *sizes[SLOW_RANK:]])
    return found


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    runs = [adapt() for _ in range(int(sys.argv[1]))]
    tried = {str(sizes): Run(sizes) for sizes in splits()}
    taken: dict[str, list[float]] = {name: [] for name in tried}
    for run in tried.values():
        run.model.sample_s = sample_s(is_slowed=True)
        run.step()
    for _ in range(8):  # interleaved: a slow moment of the machine falls on all
        for name, run in tried.items():
            taken[name].append(run.step())
    fixed = {name: statistics.median(times) for name, times in taken.items()}
    if hvd.rank() == 0:
        best = min(fixed, key=lambda name: fixed[name])
        print("found " + json.dumps({"runs": runs, "best": best, "best_s": fixed[best]}))


if __name__ == "__main__":
    main()
