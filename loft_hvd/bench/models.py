"""The networks that steps are timed with, and data for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "random_inputs", "random_targets"]

_VOCABULARY, _TOKENS = 20_000, 32
_WIDTH = 2048  # of the perceptron
_CLASSES = 1000


class _ResidualBlock(nn.Module):
    """A basic block of a residual network (He et al., CVPR 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.skip(x)
        return out.relu()


def _resnet18() -> nn.Module:
    """Return a network with ResNet-18's blocks: 11.7 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_ResidualBlock(before, width, stride), _ResidualBlock(width, width, 1)]
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, _CLASSES)]
    return nn.Sequential(*layers)


class _Transformer(nn.Module):
    """An encoder of 6 layers over tokens: 29.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(512, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        return found


def _mlp() -> nn.Module:
    """Return three linear layers, 12.6 million parameters: many gradients for little computing."""
    layers: list[nn.Module] = [nn.Linear(_WIDTH, _WIDTH)]
    for _ in range(2):
        layers += [nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)]
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _resnet18,
    "transformer": _Transformer,
    "mlp": _mlp,
}


def random_inputs(model: str, batch: int, generator: torch.Generator) -> Tensor:
    """Return a batch that a network of `MODELS` takes."""
    if model == "transformer":
        return torch.randint(0, _VOCABULARY, (batch, _TOKENS), generator=generator)
    shape = (_WIDTH,) if model == "mlp" else (3, 64, 64)
    return torch.randn(batch, *shape, generator=generator)


def random_targets(batch: int, generator: torch.Generator) -> Tensor:
    """Return the classes of a batch."""
    return torch.randint(0, _CLASSES, (batch,), generator=generator)
