"""A small model, and an optimizer wrapped in a world of one unless a transport is given."""

from __future__ import annotations

from typing import Any

import torch

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld

__all__ = ["ALONE", "Model", "model", "wrap"]

ALONE: Any = LocalWorld(1).transport(0)


class Model(torch.nn.Module):
    """Two layers; ranks are threads, which would draw from one generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


def model() -> Model:
    return Model()


def wrap(inner: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    found = model()
    inner = torch.optim.SGD(found.parameters(), lr=0.1) if inner is None else inner
    return loft.DistributedOptimizer(inner, **{"transport": ALONE, **options})
