"""Which ranks read the same data: a sampler that a script forgot, or two ranks with one number.

Ranks on the same samples have equal gradients, step after step, whatever the rule makes of them,
and a mean shows nothing of it: the job trains as fewer ranks would. So in its first steps each rank
keeps 61 sums over its own gradient, before the exchange; then all ranks' sums are compared once.

One step says nothing: in a tiny data set two ranks draw the same samples now and then. Nor do equal
sums by themselves, where most of a gradient comes from the model alone (a penalty in the loss):
between two ranks they must differ by far less than one rank's own do from step to step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loft_hvd.pipeline.suspicion.report import SameData
from loft_hvd.pipeline.suspicion.tracker import Floats
from loft_hvd.transport.base import Channel

__all__ = ["COMPARED_AFTER", "NUM_SUMS", "Likeness", "SameDataWatch", "likeness"]

COMPARED_AFTER = 24  # steps; one exchange of 4 * 24 * 62 bytes a rank, 6 kB
_FEWEST_STEPS = 10  # of them that two ranks must have in common
# How many sums. A prime: in rows of a layer whose length has a factor in common with it one sum
# would get whole columns, and those of a softmax's gradient add up to 0.
NUM_SUMS = 61
_EQUAL_STEPS = 0.9  # share of the steps in which equal gradients are equal; a choice
# Equal but for the order in which devices add up: float32 gives 1e-6 and less, squared 1e-12.
_EQUAL = 1e-8
_EQUAL_TO_CHANGE = 1e-2  # and so much of the squared change from the step before
# Ranks that read the same samples and drop out, or augment, others: their squared difference over
# that of other pairs, and over the change from the step before. Measured on digits, 3 to 8 ranks:
# dropout of 0.1 gives 0.13 and 0.12 at most, noise of 0.1 on the inputs 0.09 and 0.1; without the
# same samples 0.69 and 0.20 are the least.
_ALIKE = 0.3
# Share of the squared differences that lasts. Above it ranks draw from data of different kinds, and
# those with the same kind look like this without a sample in common. Shuffled data give 0.37 at
# most, and 0.02 to 0.15 but for batches of 128 of 200 samples; data sorted by class 0.57 or more.
_LASTING = 0.25
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Likeness:
    """What one rank found: the ranks that read its data, by their gradients' equality or likeness.

    Attributes:
        first: the lowest of these ranks and itself; itself where there is none.
        num_equal: steps in which gradients are equal; 0 where they are only alike.
        ratio: their squared difference over that of other pairs, the usual step's.
    """

    first: int
    num_equal: int = 0
    ratio: float = 0.0


def likeness(samples: Floats, sums: Floats, rank: int) -> Likeness:
    """Find the ranks that read what ``rank`` reads.

    Args:
        samples: of each rank and step, in the same unit; 0 where it had none. [world_size, steps]
        sums: over its gradient. [world_size, steps, 61]
        rank: whose likes are looked for.
    """
    with np.errstate(all="ignore"):  # what is not finite is left out, or is like nothing
        own = sums[rank]
        apart = ((sums - own) ** 2).sum(axis=-1)  # [world_size, steps]
        length = (own**2).sum(axis=-1)  # [steps]
        change = np.full(len(own), np.nan)
        change[1:] = ((own[1:] - own[:-1]) ** 2).sum(axis=-1)
        # A gradient that is 0, or stays as it is, says nothing of the data.
        says = np.isfinite(length) & (length > 0) & np.isfinite(change) & (change > 0)
        common = np.isfinite(apart) & says & (samples > 0) & (samples == samples[rank])
        others = [
            each
            for each in range(len(sums))
            if each != rank and common[each].sum() >= _FEWEST_STEPS
        ]
        is_equal = (apart <= _EQUAL * length) & (apart <= _EQUAL_TO_CHANGE * change) & common
        num_equal = {each: int(is_equal[each].sum()) for each in others}
        equal = [each for each in others if num_equal[each] >= _EQUAL_STEPS * common[each].sum()]
        if equal:
            return Likeness(min(rank, *equal), min(num_equal[each] for each in equal))
        steps = common[others].all(axis=0)
        # Of one other rank nobody can say what is usual.
        if len(others) < 2 or steps.sum() < _FEWEST_STEPS:
            return Likeness(rank)
        return _alike(sums[others][:, steps] - own[steps], change[steps], others, rank)


def _alike(differences: Floats, change: Floats, others: Sequence[int], rank: int) -> Likeness:
    """Find ranks whose gradients differ from this one's, [others, steps, 61], by far the least."""
    apart = (differences**2).sum(axis=-1)  # [others, steps]
    lasting = (differences.mean(axis=1) ** 2).sum(axis=-1) / apart.mean(axis=1)
    if not _high_median(lasting) <= _LASTING:
        return Likeness(rank)
    usual = _high_median(apart)  # [steps]
    ratios = np.median(apart / usual, axis=1)  # [others]
    is_alike = (ratios < _ALIKE) & (np.median(apart / change, axis=1) < _ALIKE)
    if not is_alike.any():
        return Likeness(rank)
    first = min(rank, *np.array(others)[is_alike].tolist())
    return Likeness(first, ratio=float(ratios[is_alike].max()))


def _high_median(values: Floats) -> Floats:
    """Return the middle value of each column, the higher one of two."""
    middle: Floats = np.sort(values, axis=0)[len(values) // 2]
    return middle


class SameDataWatch:
    """Keeps sums over this rank's gradients for 24 steps, then compares ranks once.

    A step calls ``sent`` for each parameter, in any order, then ``step_reduced``. Every rank makes
    and asks it alike. What is kept are sums over every 61st value of a gradient (``sum_up``).
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel.sub("same_data")
        self._sums: dict[int, Tensor] = {}  # of this step, by parameter
        self._noted: list[tuple[int, list[Tensor]]] = []  # samples, and sums on each device
        self.has_ended = channel.world_size < 2

    def sent(self, at: int, sums: Tensor | None) -> None:
        """Note this rank's own gradient of a parameter; of several passes the last call counts."""
        if sums is not None:
            self._sums[at] = sums

    def step_reduced(self, num_samples: int) -> tuple[SameData, ...] | None:
        """Note a step of this rank's ``num_samples``, in any unit; after the last one compare.

        Returns:
            The groups of ranks that read the same data, after the last step; else None.
        """
        if self.has_ended:
            return None
        sums, self._sums = self._sums, {}
        by_device: dict[torch.device, list[Tensor]] = {}
        for at in sorted(sums):  # in one order on every rank: their sums round alike
            by_device.setdefault(sums[at].device, []).append(sums[at])
        self._noted.append(
            (num_samples, [torch.stack(each).sum(dim=0) for each in by_device.values()])
        )
        return None if len(self._noted) < COMPARED_AFTER else self._compare()

    def _compare(self) -> tuple[SameData, ...]:
        noted, self._noted, self.has_ended = self._noted, [], True
        row = torch.zeros(len(noted), 1 + NUM_SUMS)
        for line, (num_samples, parts) in zip(row, noted, strict=True):
            line[0] = num_samples
            for part in parts:
                line[1:] += part.cpu()
        table = self._channel.allgather_rows(row.view(-1)).double().numpy()
        table = table.reshape(len(table), len(noted), 1 + NUM_SUMS)
        own = likeness(table[:, :, 0], table[:, :, 1:], self._channel.rank)
        # Each rank compares its own: the work of all pairs would grow with the square of ranks.
        told = torch.tensor([own.first, own.num_equal, own.ratio], dtype=torch.float64)
        found = self._channel.sub("found").allgather_rows(told).tolist()
        groups = _groups([Likeness(int(first), int(num), ratio) for first, num, ratio in found])
        if self._channel.rank == 0:
            for group in groups:
                _logger.warning("%s", group)
        return groups


def _groups(found: Sequence[Likeness]) -> tuple[SameData, ...]:
    """Return who reads the same data, from what each rank has found."""
    members: dict[int, list[int]] = {}
    for rank, each in enumerate(found):
        members.setdefault(each.first, []).append(rank)
    groups = []
    for ranks in members.values():
        said = [found[rank] for rank in ranks if found[rank] != Likeness(rank)]
        if len(ranks) > 1:
            num_equal = min(each.num_equal for each in said)
            ratio = max(each.ratio for each in said)
            groups.append(SameData(tuple(ranks), len(found), COMPARED_AFTER, num_equal, ratio))
    return tuple(groups)
