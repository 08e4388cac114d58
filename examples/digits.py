"""Train a small convolutional network on handwritten digits with Horovod and loft_hvd.

A plain Horovod script; what loft_hvd changes is marked with `# loft`. Run it as it is, under
`horovodrun -np 4 --gloo`, or under `mpirun -np 4`:

    horovodrun -np 4 --gloo python examples/digits.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import horovod.torch as hvd
import sklearn.datasets
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import loft_hvd as loft  # loft

NUM_TEST = 360


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, split once and for all."""

    train: TensorDataset
    test: TensorDataset

    @classmethod
    def load(cls) -> Digits:
        """Read the digits that ship inside scikit-learn; no network is needed."""
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(images, dtype=torch.float32).div(16).view(-1, 1, 8, 8)[order]
        y = torch.tensor(labels)[order]
        return cls(
            train=TensorDataset(x[NUM_TEST:], y[NUM_TEST:]),
            test=TensorDataset(x[:NUM_TEST], y[:NUM_TEST]),
        )


def make_model() -> torch.nn.Sequential:
    """Return the network, with the same first weights on every rank."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        *convolution(1, 32),
        *convolution(32, 64),
        *convolution(64, 64),
        torch.nn.MaxPool2d(2),
        *convolution(64, 64),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 16, 10),
    )
    for values in model[-1].parameters():
        torch.nn.init.zeros_(values)
    return model


def convolution(before: int, after: int) -> list[torch.nn.Module]:
    """Return a layer whose gradients differ little between ranks: docs/attacks.md, "The CNN"."""
    layer = torch.nn.Conv2d(before, after, 3, padding=1)
    weight, bias = layer.parameters()
    torch.nn.init.kaiming_normal_(weight, nonlinearity="relu")
    torch.nn.init.zeros_(bias)
    return [layer, torch.nn.GroupNorm(8, after), torch.nn.ReLU()]


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the model names rightly."""
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


class Training:
    """A model in training, epoch by epoch.

    Args:
        data: training and test images.
        rule: how gradients are aggregated.
        balancer: how many samples each rank computes.
        slowdown: this rank does every forward and backward pass so many times.
    """

    def __init__(
        self, data: Digits, *, rule: loft.Rule, balancer: loft.Balancer, slowdown: int = 1
    ) -> None:
        self.model = make_model()
        self.slowdown = slowdown
        # loft: was torch's DataLoader with a DistributedSampler
        self.loader = loft.DataLoader(data.train, balancer, seed=3)
        self.optimizer = loft.DistributedOptimizer(  # loft: was hvd.DistributedOptimizer
            torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            rule=rule,  # loft
            balancer=balancer,  # loft
        )
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self.optimizer, root_rank=0)

    def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Train on every image once, and call ``on_step`` after each step."""
        self.loader.set_epoch(epoch)
        for images, labels in self.loader:
            for _ in range(self.slowdown - 1):  # a slower machine: the same work, done in vain
                loss = F.cross_entropy(self.model(images), labels)
                torch.autograd.grad(loss, [*self.model.parameters()])
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            on_step()


def main() -> None:
    """Train with the rule and sizes given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rule", type=loft.parse_rule, default=loft.Mean(), help="trimmed_mean:f=1"
    )
    parser.add_argument("--sizes", type=int, nargs="*", help="samples of every rank")
    parser.add_argument("--batch-size", type=int, default=256, help="samples of all ranks")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    sizes = options.sizes or "report"
    balancer = loft.Balancer(options.batch_size, policy=sizes)  # loft
    data = Digits.load()
    training = Training(data, rule=options.rule, balancer=balancer)
    for epoch in range(options.epochs):
        training.run_epoch(epoch)
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(training.model, data.test):.3f}")
        print(balancer.explain())  # loft


if __name__ == "__main__":
    main()
