"""A backward pass that raises, for jobs that meet a fault."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["raise_in_backward"]


class _Raise(torch.autograd.Function):
    """The identity, whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, text: str) -> Tensor:
        ctx.text = text
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise RuntimeError(ctx.text)


def raise_in_backward(x: Tensor, text: str) -> Tensor:
    """Return the same values; the backward pass through them raises ``RuntimeError(text)``."""
    out: Tensor = _Raise.apply(x, text)  # type: ignore[no-untyped-call]  # by torch
    return out
