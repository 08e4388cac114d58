"""The engine that the demo was started under: Horovod, or torch.distributed under torchrun.

Each has the training of its examples: `digits.py`, and the same lines without Horovod here.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from digits_task import Digits, make_model
from torch import Tensor

import loft_hvd as loft

if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it
    import torch.distributed as dist

    def start() -> None:
        """Meet the other ranks."""
        dist.init_process_group("gloo")

    def end() -> None:
        """Leave them."""
        dist.destroy_process_group()

    def rank() -> int:
        """Return this rank."""
        return dist.get_rank()

    def world_size() -> int:
        """Return the number of ranks."""
        return dist.get_world_size()

    def gather(values: Tensor) -> Tensor:
        """Return the values of all ranks, [world_size, numel], from this one's, [numel]."""
        everyone = values.new_empty(world_size() * len(values))
        dist.all_gather_into_tensor(everyone, values)
        return everyone.view(world_size(), -1)

    class Training:
        """As `digits.Training`, under torch.distributed."""

        def __init__(
            self, data: Digits, *, rule: loft.Rule, balancer: loft.Balancer, slowdown: int = 1
        ) -> None:
            self.model = make_model()  # with the same first weights on every rank
            self.slowdown = slowdown
            self.loader = loft.DataLoader(data.train, balancer, seed=3)
            self.optimizer = loft.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9),
                named_parameters=self.model.named_parameters(),
                rule=rule,
                balancer=balancer,
            )

        def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> None:
            """Train on every image once, and call ``on_step`` after each step."""
            self.loader.set_epoch(epoch)
            for images, labels in self.loader:
                for _ in range(self.slowdown - 1):
                    loss = F.cross_entropy(self.model(images), labels)
                    torch.autograd.grad(loss, [*self.model.parameters()])
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(images), labels).backward()
                self.optimizer.step()
                on_step()

else:
    import digits
    import horovod.torch as hvd

    start, end, rank, world_size = hvd.init, hvd.shutdown, hvd.rank, hvd.size
    Training = digits.Training  # type: ignore[misc,assignment]

    def gather(values: Tensor) -> Tensor:
        """Return the values of all ranks, [world_size, numel], from this one's, [numel]."""
        everyone: Tensor = hvd.allgather(values.unsqueeze(0))
        return everyone
