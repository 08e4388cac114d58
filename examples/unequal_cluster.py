"""Train on an unequal cluster: sizes that follow what each rank can do, and a robust rule.

    horovodrun -np 4 -H fast1:1,fast2:1,old1:1,old2:1 python examples/unequal_cluster.py

On one machine, with rank 2 made three times slower half-way through the run:

    horovodrun -np 4 --gloo python examples/unequal_cluster.py --slow 2 --times 3

Each rank holds a shard of the samples (`Placement`): a sample is computed where it lies if that
keeps the step short. `with_strata` sees to it that a shard sorted by class does not give a rank a
class of its own, which a robust rule would take for a fault. In a script of your own leave out
`Emulated`: it stands for devices that this machine has not.
"""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import numpy as np
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import loft_hvd as loft

GLOBAL_BATCH_SIZE = 96
DEVICE_S = 1e-3  # of a sample, on an emulated device


def load() -> tuple[TensorDataset, np.ndarray]:
    """Return scikit-learn's digits, sorted by class as shards often are, and their classes."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.argsort(labels, kind="stable")
    x = torch.tensor(images[order], dtype=torch.float32) / 16
    return TensorDataset(x, torch.tensor(labels[order])), labels[order]


class Emulated(nn.Module):
    """A model on a device that takes a fixed time a sample; your own model needs no such thing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sample_s = DEVICE_S

    def forward(self, x: Tensor) -> Tensor:
        """Compute, then wait as long as the device would still be busy."""
        time.sleep(self.sample_s * len(x))
        out: Tensor = self.model(x)
        return out


def make_model() -> Emulated:
    """Return the network, with the same first weights on every rank."""
    torch.manual_seed(1)
    return Emulated(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))


def main() -> None:
    """Train; say when sizes change, and at the end why they are what they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--slow", type=int, default=-1, metavar="RANK")
    parser.add_argument("--times", type=float, default=3.0, help="how many times slower")
    parser.add_argument("--interval", type=int, default=15, help="steps between two plans")
    parser.add_argument("--log-dir", default=None, help="write the run log there")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share this machine's cores
    dataset, classes = load()
    placement = loft.Placement.sharded(len(dataset), hvd.size()).with_strata(classes, cap=1.2)
    model = make_model()
    balancer = loft.Balancer(
        GLOBAL_BATCH_SIZE, policy="loft", interval=options.interval, log_dir=options.log_dir
    )
    loader = loft.DataLoader(dataset, balancer, placement=placement, seed=3)
    optimizer = loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        rule=loft.TrimmedMean(f=1) if hvd.size() > 2 else loft.Mean(),
        balancer=balancer,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(options.epochs):
        if epoch == options.epochs // 2 and hvd.rank() == options.slow:
            model.sample_s = DEVICE_S * options.times
        loader.set_epoch(epoch)
        began = time.monotonic()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        step_s = (time.monotonic() - began) / len(loader)
        if hvd.rank() == 0:
            sizes = list(balancer.plan.sizes)
            print(f"epoch {epoch}: {1e3 * step_s:.1f} ms a step, sizes {sizes}", flush=True)
    if hvd.rank() == 0:
        print(balancer.explain())


if __name__ == "__main__":
    main()
