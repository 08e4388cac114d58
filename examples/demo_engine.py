"""The demo's training, and the engine that it was started under: Horovod's, or torchrun's."""

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
        everyone = values.new_empty(world_size(), len(values))
        dist.all_gather(list(everyone), values)
        return everyone

    def share_first_weights(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: `make_model` gives every rank the same ones."""

else:
    import horovod.torch as hvd

    start, end, rank, world_size = hvd.init, hvd.shutdown, hvd.rank, hvd.size

    def gather(values: Tensor) -> Tensor:
        """Return the values of all ranks, [world_size, numel], from this one's, [numel]."""
        everyone: Tensor = hvd.allgather(values.unsqueeze(0))
        return everyone

    def share_first_weights(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let all ranks begin with rank 0's."""
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


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
        self.loader = loft.DataLoader(data.train, balancer, seed=3)
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            rule=rule,
            balancer=balancer,
        )
        share_first_weights(self.model, self.optimizer)

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
