"""How an optimizer's gradients are reduced, and by whom a reducer is told and watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from loft_hvd.balance.plan import StepSizes
from loft_hvd.pipeline.buckets import Bucket
from loft_hvd.pipeline.wire import Compression, Wire

__all__ = ["OutgoingHook", "ReducerSettings", "StepSource"]

OutgoingHook = Callable[[Bucket, Tensor], None]


@runtime_checkable
class StepSource(Protocol):
    """What the reducer asks of a balancer, and tells it."""

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to."""
        ...

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Hear of each gradient, and what its hook and those before it spent on the wire."""
        ...


@dataclass(frozen=True)
class ReducerSettings:
    """How gradients are reduced; equal on every rank.

    Attributes:
        bucket_bytes: most bytes of a bucket.
        num_passes: backward passes that are summed into one step.
        is_sum: whether the result is a sum over ranks instead of an average.
        predivide: what the plain mean divides by before the sum, and multiplies by after it.
        sparse_as_dense: whether sparse gradients are made dense.
        wire: the format in which values travel.
        timeout_s: longest wait for other ranks in seconds.
    """

    bucket_bytes: int
    timeout_s: float
    num_passes: int = 1
    is_sum: bool = False
    predivide: float = 1.0
    sparse_as_dense: bool = False
    wire: Wire = Compression.none
