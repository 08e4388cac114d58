"""Averages over samples instead of over ranks."""

from __future__ import annotations

import torch

from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport

__all__ = ["average"]


def average(
    value: float, count: int, *, name: str = "metric", transport: Transport | None = None
) -> float:
    """Average a metric over the samples of all ranks; every rank calls it alike.

    Args:
        value: this rank's mean over its samples; ignored where ``count`` is 0.
        count: samples behind it, >= 0.
        name: tells averages apart that are in flight at once.
        transport: the ranks; Horovod's by default.

    Returns:
        ``sum(value * count) / sum(count)``, equal on every rank; NaN when no rank has a sample.

    Raises:
        ArgumentTypeError: ``count`` is not a whole number.
        ArgumentError: ``count`` is negative.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(
            f"average: count={count!r} is of type {type(count).__name__}; give the samples behind "
            "the value as a whole number, such as loader.local_batch_size"
        )
    if count < 0:
        raise ArgumentError(f"average: count={count} must be >= 0")
    ends = default_transport() if transport is None else transport
    # Where there is no sample the value may be NaN, which 0 would not take away.
    sums = torch.tensor([float(value) * count if count else 0.0, float(count)], dtype=torch.float64)
    if ends.world_size > 1:
        channel = Channel(ends, f"loft.average.{name}")
        channel.wait(ends.allreduce(sums, name=channel.name), what=f"average of {name!r}")
    total, samples = sums.tolist()
    return total / samples if samples else float("nan")
