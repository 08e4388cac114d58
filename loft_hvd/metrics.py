"""Averages over samples instead of over ranks."""

from __future__ import annotations

from numbers import Real
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from loft_hvd.errors import ArgumentError, ArgumentTypeError
from loft_hvd.transport.base import Channel, Transport
from loft_hvd.transport.default import default_transport

__all__ = ["Metric", "average"]

_Value = TypeVar("_Value", float, Tensor)


def average(
    value: _Value, count: int, *, name: str = "metric", transport: Transport | None = None
) -> _Value:
    """Average a metric over the samples of all ranks; every rank calls it alike.

    Args:
        value: this rank's mean over its samples, a number or a tensor of one value; ignored where
            ``count`` is 0.
        count: samples behind it, >= 0.
        name: tells averages apart that are in flight at once.
        transport: the ranks; by default Horovod's, else those of torch.distributed, else this one
            alone.

    Returns:
        ``sum(value * count) / sum(count)``, worked out in float64, equal on every rank; NaN when no
        rank has a sample. What was given: a float, or a tensor of that shape, device and floating
        dtype (the default one for whole numbers), without a gradient.

    Raises:
        ArgumentTypeError: ``count`` is not a whole number.
        ArgumentError: ``count`` is negative, or the tensor has not one value.
    """
    check_count(count, what="average")
    if count and isinstance(value, Tensor) and value.numel() != 1:
        raise ArgumentError(
            f"average of {name!r}: the value has shape {list(value.shape)}; give its mean over "
            "this rank's samples, value.mean(), or use loft.Metric for one value a sample"
        )
    if count and not isinstance(value, Tensor | Real | np.generic):
        raise ArgumentTypeError(
            f"average of {name!r}: the value is of type {type(value).__name__}; give a number or a "
            "tensor of one value, the mean over this rank's samples"
        )
    ends = default_transport() if transport is None else transport
    # Where there is no sample the value may be NaN, which 0 would not take away.
    own = value.detach() if isinstance(value, Tensor) else value
    sum_ = float(own) * count if count else 0.0
    sums = torch.tensor([sum_, float(count)], dtype=torch.float64)
    if ends.world_size > 1:
        channel = Channel(ends, f"loft.average.{name}")
        channel.wait(ends.allreduce(sums, name=channel.name), what=f"average of {name!r}")
    total, samples = sums.tolist()
    mean = total / samples if samples else float("nan")
    if isinstance(value, Tensor):
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        return torch.full_like(value, mean, dtype=dtype, requires_grad=False)
    return mean


def check_count(count: int, *, what: str) -> None:
    """Raise unless a count of samples is one."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise ArgumentTypeError(
            f"{what}: count={count!r} is of type {type(count).__name__}; give the samples behind "
            "the value as a whole number, such as loader.local_batch_size"
        )
    if count < 0:
        raise ArgumentError(f"{what}: count={count} must be >= 0")


class Padded(Protocol):
    """What knows whether this rank's batch is a dummy one: ``loft.DataLoader``."""

    @property
    def is_padding(self) -> bool: ...


class Metric:
    """A running average over the samples of all ranks, for each epoch a new one.

    In place of a class that calls ``hvd.allreduce`` for every value::

        loss_of_epoch = loft.Metric("loss")
        for x, y in loader:
            for part in ...:                  # as many on a rank as its batch has
                loss = ...
                loss_of_epoch.update(loss, len(part))
            optimizer.step()
            print(loss_of_epoch.avg)          # on every rank

    ``update`` waits for nobody: ranks may call it unequally often, or not at all. Reading ``avg``
    is a collective of 16 bytes a rank: every rank reads it equally often, so not in
    ``if hvd.rank() == 0``.

    Args:
        name: tells metrics apart; equal on every rank.
        loader: a ``loft.DataLoader`` whose padding, dummy batches on a rank without samples, is
            left out by itself.
        transport: the ranks; by default Horovod's, else those of torch.distributed, else this one
            alone.
    """

    def __init__(
        self, name: str, *, loader: Padded | None = None, transport: Transport | None = None
    ) -> None:
        self.name = name
        self._loader = loader
        self._transport = transport
        self._new = torch.zeros(2, dtype=torch.float64)  # of this rank: sum of values, samples
        self._totals = torch.zeros(2, dtype=torch.float64)  # the same of all ranks, without new

    def update(self, value: float | Tensor, count: int | None = None) -> None:
        """Add values of this rank.

        Args:
            value: a mean over samples, or one value a sample, any shape, any device.
            count: samples behind a mean, >= 0; where it is 0 the value is ignored. None counts
                each value of ``value`` as one sample: without ``count``, means of sub-batches
                weigh the same.

        Raises:
            ArgumentTypeError: ``count`` is not a whole number.
            ArgumentError: ``count`` is negative, or given for a value that is not one number.
        """
        values = torch.as_tensor(value).detach().to("cpu", torch.float64)
        if count is not None:
            check_count(count, what=f"Metric {self.name!r}")
            if values.numel() != 1:
                raise ArgumentError(
                    f"Metric {self.name!r}: count={count} is for one mean, but the value has "
                    f"shape {list(values.shape)}; leave count away, or give value.mean()"
                )
        if count == 0 or (self._loader is not None and self._loader.is_padding):
            return  # what a dummy batch gives may be NaN, which 0 would not take away
        weight = 1 if count is None else count
        added = [float(values.sum()) * weight, float(values.numel() * weight)]
        self._new += torch.tensor(added, dtype=torch.float64)

    @property
    def avg(self) -> Tensor:
        """The average so far: float64, of no dimension, equal on every rank; NaN without a sample.

        A collective: every rank reads it equally often, whatever was updated where. A rank without
        new values adds 0 samples.
        """
        # What this rank has added never decides whether it takes part: others cannot know it.
        sums = self._new.clone()  # what fails leaves this rank's values as they were
        ends = default_transport() if self._transport is None else self._transport
        if ends.world_size > 1:
            channel = Channel(ends, f"loft.metric.{self.name}")
            work = ends.allreduce(sums, name=channel.name)
            channel.wait(work, what=f"average of {self.name!r}")
        self._totals += sums
        self._new = torch.zeros(2, dtype=torch.float64)
        return self._totals[0] / self._totals[1]  # 0 / 0 is NaN
