"""Train a small convolutional network on handwritten digits with Horovod and loft_hvd.

A plain Horovod script; what loft_hvd changes is marked with `# loft`. Run it as it is, under
`horovodrun -np 4 --gloo`, or under `mpirun -np 4`:

    horovodrun -np 4 --gloo python examples/digits.py
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from digits_task import Digits, accuracy, make_model

import loft_hvd as loft  # loft


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
    model = make_model()
    # loft: was torch's DataLoader with a DistributedSampler
    loader = loft.DataLoader(data.train, balancer, seed=3)
    optimizer = loft.DistributedOptimizer(  # loft: was hvd.DistributedOptimizer
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        rule=options.rule,  # loft
        balancer=balancer,  # loft
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(options.epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy(model, data.test):.3f}")
        print(balancer.explain())  # loft


if __name__ == "__main__":
    main()
