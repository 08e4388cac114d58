"""Gradients given to a ``ddp_hook`` as DDP gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Bucket", "backward"]


@dataclass
class Bucket:
    """What DDP gives its hook: parameters, and their gradients in one flat buffer."""

    at: int
    of: int
    members: list[torch.nn.Parameter]
    values: Tensor

    def buffer(self) -> Tensor:
        return self.values

    def index(self) -> int:
        return self.at

    def is_last(self) -> bool:
        return self.at == self.of - 1

    def parameters(self) -> list[torch.nn.Parameter]:
        return self.members

    def gradients(self) -> list[Tensor]:
        return list(self.values.split([p.numel() for p in self.members]))


def backward(
    hook: Any, layout: list[list[torch.nn.Parameter]], grads: dict[torch.nn.Parameter, Tensor]
) -> dict[torch.nn.Parameter, Tensor]:
    """Give a hook a pass's gradients in buckets, and return the reduced ones by parameter."""
    buckets = [
        Bucket(at, len(layout), members, torch.cat([grads[p] for p in members]))
        for at, members in enumerate(layout)
    ]
    futures = [hook(None, bucket) for bucket in buckets]
    reduced: dict[torch.nn.Parameter, Tensor] = {}
    for bucket, future in zip(buckets, futures, strict=True):
        parts = future.value().split([p.numel() for p in bucket.members])
        reduced |= dict(zip(bucket.members, parts, strict=True))
    return reduced
