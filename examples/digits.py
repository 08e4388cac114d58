"""Train a small convolutional network on handwritten digits with Horovod and loft_hvd.

A plain Horovod script; what loft_hvd changes is marked with `# loft`. Run it as it is, under
`horovodrun -np 4 --gloo`, or under `mpirun -np 4`:

    horovodrun -np 4 --gloo python examples/digits.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_task import Digits, accuracy, make_model

import loft_hvd as loft  # loft


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
