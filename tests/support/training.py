"""The same training over ranks and in one process, for comparing the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld

__all__ = ["OPTIMIZERS", "make_data", "make_model", "max_difference", "train_alone"]

MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05),
}


def make_data(num_samples: int) -> TensorDataset:
    """Return a regression data set, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 6, generator=generator)
    noise = torch.randn(num_samples, 2, generator=generator)
    return TensorDataset(x, torch.sin(x[:, :2] * 2) + 0.1 * noise)


def make_model() -> torch.nn.Module:
    """Return a small network, the same on every rank."""
    torch.manual_seed(11)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def train_alone(
    data: TensorDataset,
    make_optimizer: MakeOptimizer,
    *,
    global_batch_size: int,
    num_steps: int,
    num_passes: int = 1,
) -> torch.nn.Module:
    """Train in this process on the same global batches, with torch's own optimizer."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    balancer = loft.Balancer(global_batch_size, transport=LocalWorld(1).transport(0))
    loader = loft.DataLoader(data, balancer, seed=3)
    done = passes = epoch = 0
    while done < num_steps:
        loader.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            passes += 1
            if passes % num_passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == num_steps:
                    break
    return model


def max_difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest difference between two models' weights."""
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)
