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
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 16, 10),
    )


def accuracy(model: torch.nn.Module, data: TensorDataset) -> float:
    """Return the share of images that the model names rightly."""
    images, labels = data.tensors
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).float().mean())


def train(
    data: Digits,
    *,
    rule: loft.Rule,
    balancer: loft.Balancer,
    epochs: int,
    slowdown: int = 1,
    attack: loft.attacks.Attack | None = None,
    attackers: tuple[int, ...] = (),
    on_step: Callable[[], None] = lambda: None,
) -> torch.nn.Module:
    """Train and return the model.

    Args:
        data: training and test images.
        rule: how gradients are aggregated.
        balancer: how many samples each rank computes.
        epochs: passes over the training images.
        slowdown: this rank does every forward and backward pass so many times.
        attack: what the Byzantine ranks send, if there are any.
        attackers: the Byzantine ranks.
        on_step: called after each step.
    """
    model = make_model()
    loader = loft.DataLoader(data.train, balancer, seed=3)  # loft: was torch's, with its sampler
    optimizer = loft.DistributedOptimizer(  # loft: was hvd.DistributedOptimizer
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        rule=rule,  # loft
        balancer=balancer,  # loft
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if attack is not None:
        loft.attacks.attach(optimizer, attack, ranks=attackers)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            for _ in range(slowdown - 1):  # a slower machine: the same work, done in vain
                torch.autograd.grad(F.cross_entropy(model(images), labels), [*model.parameters()])
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            on_step()
    return model


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
    model = train(
        data, rule=loft.parse_rule(options.rule), balancer=balancer, epochs=options.epochs
    )
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(model, data.test):.3f}")
        print(balancer.explain())  # loft


if __name__ == "__main__":
    main()
