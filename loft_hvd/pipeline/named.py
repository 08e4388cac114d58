"""What ``allreduce`` keeps of one name from call to call, and how a row gets there and back."""

from __future__ import annotations

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Rule
from loft_hvd.pipeline.buckets import accumulation_dtype
from loft_hvd.pipeline.direct import DirectReduction, can_swap
from loft_hvd.pipeline.reduction import Reduction
from loft_hvd.pipeline.weights import PassWeights
from loft_hvd.transport.base import Transport

__all__ = ["NamedExchange", "share_of"]

_PART_BYTES = 16 * 1024 * 1024


class NamedExchange:
    """The buffers of one name, kept from call to call."""

    def __init__(self, transport: Transport, tensor: Tensor, rule: Rule, name: str) -> None:
        dtype = accumulation_dtype(tensor.dtype)
        device = str(tensor.device)
        self.key = (tensor.shape, tensor.dtype, device, rule, transport.world_size)
        self.is_busy = False
        numel = tensor.numel()
        is_even = numel % transport.world_size == 0 or can_swap(transport, rule)
        is_direct = dtype == tensor.dtype and numel > 0 and is_even
        make = DirectReduction if is_direct else Reduction
        self._reduction: DirectReduction | Reduction = make(
            transport,
            numel=numel,
            dtype=dtype,
            device=device,
            rule=rule,
            name=name,
            part_bytes=_PART_BYTES,
        )

    def start(self, row: Tensor, weights: PassWeights, *, share: float) -> None:
        """Put a rank's row on the wire; ``share`` is what the engine's sum multiplies it by."""
        if isinstance(self._reduction, DirectReduction):
            self._reduction.start(row.contiguous().view(-1), weights, share=share)
        else:
            self._reduction.start(lambda bucket: _fill(bucket, row, weights, share))

    def advance(self) -> bool:
        """Do what can be done without waiting, and say whether the result is there."""
        return self._reduction.advance()

    def take(self, like: Tensor) -> Tensor:
        """Return the result as a tensor of its own, with shape and dtype of ``like``."""
        if isinstance(self._reduction, DirectReduction):
            result = self._reduction.take().view(like.shape)
            is_plain = like.is_contiguous()
            return result if is_plain else torch.empty_like(like).copy_(result)
        return torch.empty_like(like).copy_(self._reduction.bucket.view(like.shape))


def share_of(rank: int, alive: list[bool], weights: tuple[int, ...] | None) -> float:
    """Return what a rank's row is multiplied by where the engine sums; 0 for an absent one."""
    counts = [1] * len(alive) if weights is None else weights
    total = sum(count for count, is_alive in zip(counts, alive, strict=True) if is_alive)
    return counts[rank] / total if alive[rank] else 0.0


def _fill(bucket: Tensor, row: Tensor, weights: PassWeights, share: float) -> PassWeights:
    """Copy this rank's row into its bucket, times its share."""
    if share:
        bucket.view(row.shape).copy_(row)
        if share != 1.0:
            bucket.mul_(share)
    else:
        bucket.zero_()  # never 0 times what an absent rank has
    return weights
