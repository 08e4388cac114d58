"""Handwritten digits and the small network that the examples train on them."""

from __future__ import annotations

from dataclasses import dataclass

import sklearn.datasets
import torch
from torch.utils.data import TensorDataset

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
