"""Samples given out by their cost, so that ranks of unequal speed end together.

Lengths of texts differ by a hundred, and a batch is padded to its longest sample: what a
micro-batch costs is its samples times the longest of them. So the samples of a step, from the
longest down, are cut into runs, and each run is a micro-batch of one rank. The plan's sizes say
which share of the cost each rank gets; how many samples that is follows from the samples.

A target says what a unit of share may cost. From the longest sample down each micro-batch takes as
many samples as its part of its rank's share pays for at the target, and what it leaves of that goes
to the rank's next one. The least target under which all samples are taken is bisected for. Two
ranks with shares 2 and 1, one micro-batch each, at a target of 24::

    costs     20 12 12  8  8  4  4     in order
    rank 0    20 12                    2 samples of 20: 40 of the 48 that it may take
    rank 1          12  8 ...          12 is 2 samples, 24 of 24; and four are left: too low

In which order micro-batches take their samples is open: those with the largest parts come first,
and then two are exchanged while the longest rank gets shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loft_hvd.balance.plan import Sizes, StepSizes
from loft_hvd.data.assign import Assignment, Ints
from loft_hvd.errors import ArgumentError, ArgumentTypeError, DataError

__all__ = ["Costs", "check_costs", "deal", "padded_costs", "sizes_by_cost", "whole_cost"]

MOST_COST = 2**31  # of a sample; bound: sums of all ranks fit an int64
# The target is bisected to 0.2 %: a choice, as times of ranks are known no better.
_NEAR = 2e-3
_GROWTH = 1.3  # of a target that is too low
# Micro-batches laid out, for every target, in search of a better order. Measured with 8 unequal
# ranks and 256 lengths: half as many leave steps 1.3 % longer, twice as many 0.2 % shorter.
_LOOKED_AT = 256

Costs = Sequence[int] | npt.NDArray[np.integer] | Tensor


# What samples cost.


def whole_cost(cost: object) -> int:
    """Return a sample's cost, or raise where it is no whole number from 1 to 2**31."""
    if isinstance(cost, bool) or not isinstance(cost, int | np.integer):
        raise ArgumentTypeError(
            f"cost={cost!r} of a sample is of type {type(cost).__name__}; it is a whole number, "
            "such as its tokens"
        )
    if not 1 <= cost <= MOST_COST:
        raise ArgumentError(f"cost={cost} of a sample must be >= 1 and <= 2**31")
    return int(cost)


def check_costs(
    cost: Costs | None, num_samples: int, *, has_places: bool
) -> npt.NDArray[np.int64] | None:
    """Return what each sample of a data set costs, [num_samples]; None where nothing is given.

    ``has_places``: owners follow a placement, or what a data set keeps.
    """
    if cost is None:
        return None
    if has_places:
        raise DataError(
            "cost= gives samples to ranks by what they cost, and placement=, or a data set that "
            "keeps samples, by where they are; leave one of them away"
        )
    if callable(cost):
        raise ArgumentTypeError(
            "cost= is a function; for a map-style data set give one whole number for each sample: "
            "cost=[len(text) for text in texts]"
        )
    values = np.asarray(cost.detach().cpu().numpy() if isinstance(cost, Tensor) else cost)
    if values.shape != (num_samples,):
        raise DataError(
            f"cost= has the shape {list(values.shape)}, but the data set has {num_samples} "
            "samples; give one whole number for each sample, such as its tokens"
        )
    if values.dtype.kind not in "iu" and num_samples:
        raise ArgumentTypeError(
            f"cost= has values of type {values.dtype}; give a whole number for each sample, such "
            "as its tokens"
        )
    bad = np.flatnonzero((values < 1) | (values > MOST_COST))
    if len(bad):
        raise ArgumentError(
            f"cost= must be >= 1 and <= 2**31, but {len(bad)} of {num_samples} are not: that of "
            f"sample {bad[0]} is {values[bad[0]]}"
        )
    return values.astype(np.int64)


def padded_costs(costs: Sequence[int], micro_sizes: Sequence[int]) -> list[int]:
    """Return what micro-batches of so many samples each cost, in the order of the samples."""
    begin, padded = 0, []
    for size in micro_sizes:
        padded.append(size * max(costs[begin : begin + size], default=0))
        begin += size
    return padded


# Who computes them.


@dataclass(frozen=True)
class _Handout:
    """What is given out: samples from the longest down, to the micro-batches of ranks."""

    costs: list[int]  # in descending order
    shares: Sizes  # of the cost, one a rank
    caps: Sizes  # most samples of a micro-batch of each rank
    slots: Sizes  # most micro-batches of each rank

    def lay_out(self, order: Sequence[int], target: float) -> list[tuple[int, int]] | None:
        """Return runs (rank, samples) that keep a target, longest samples first; None for none.

        ``order`` names the rank of each micro-batch.
        """
        left = [target * share for share in self.shares]  # of what a rank may cost
        slots, done, num_left = list(self.slots), 0, len(self.costs)
        num_idle = sum(share > 0 for share in self.shares)
        is_idle, runs = [True] * len(left), []
        for rank in order:
            if not num_left:
                break
            longest, num_slots = self.costs[done], slots[rank]
            slots[rank] -= 1
            if left[rank] + 1e-9 < longest:
                if num_slots == 1 and is_idle[rank]:
                    return None
                continue  # to its next micro-batch, whose samples are shorter
            # One sample at least, where a part of the share does not pay for it but the rest does.
            size = max(int(left[rank] / (num_slots * longest) + 1e-9), 1)
            # And one is left for each rank that has none: whoever has a share computes.
            size = min(size, self.caps[rank], num_left - (num_idle - is_idle[rank]))
            if size < 1:
                continue
            num_idle -= is_idle[rank]
            is_idle[rank] = False
            left[rank] -= size * longest
            runs.append((rank, size))
            done, num_left = done + size, num_left - size
        return None if num_left else runs

    def solve(self, order: Sequence[int]) -> tuple[float, list[tuple[int, int]]]:
        """Return the runs of the least target, and what the longest rank costs for its share."""
        low = sum(self.costs) / sum(self.shares)  # without padding, at best
        high = low * (1 + _NEAR)
        while (found := self.lay_out(order, high)) is None:
            low, high = high, high * _GROWTH
        while high - low > _NEAR * high:
            middle = 0.5 * (low + high)
            runs = self.lay_out(order, middle)
            if runs is None:
                low = middle
            else:
                high, found = middle, runs
        padded, done = [0] * len(self.shares), 0
        for rank, size in found:
            padded[rank] += size * self.costs[done]
            done += size
        pairs = zip(padded, self.shares, strict=True)
        return max(cost / share for cost, share in pairs if share), found


def deal(costs: Ints, shares: Sizes, *, caps: Sequence[int | None], slots: Sizes) -> Assignment:
    """Decide who computes each sample of a global batch, by cost; equal on every rank.

    Args:
        costs: of the samples of the batch, [num_samples].
        shares: of the cost that each rank should have, [world_size], adding up to num_samples. A
            rank whose share is not 0 has one sample at least.
        caps: most samples of each rank's micro-batch, [world_size]; None for no limit.
        slots: most micro-batches of each rank, [world_size]; with caps they hold the shares.
    """
    places = np.argsort(-costs, kind="stable")  # [num_samples], the longest first
    num_samples = len(costs)
    limits = tuple(
        num_samples if cap is None else max(cap, -(-share // num))
        for cap, share, num in zip(caps, shares, slots, strict=True)
    )
    task = _Handout(costs[places].tolist(), shares, limits, slots)
    parts = [(-shares[rank] / slots[rank], rank) for rank in range(len(shares)) if shares[rank]]
    order = [rank for _, rank in sorted(part for part in parts for _ in range(slots[part[1]]))]
    longest, runs = task.solve(order)
    tries = _LOOKED_AT // len(order)
    pairs = _exchanges(order, shares)
    while tries and pairs:
        first, second = pairs.pop(0)
        tried = list(order)
        tried[first], tried[second] = tried[second], tried[first]
        found = task.solve(tried)
        tries -= 1
        if found[0] < longest * (1 - _NEAR):
            (longest, runs), order = found, tried
            pairs = _exchanges(order, shares)
    ranks, sizes = np.array(runs, np.int64).T
    owners = np.empty(num_samples, np.int64)
    owners[places] = np.repeat(ranks, sizes)
    micro: list[list[int]] = [[] for _ in shares]
    for rank, size in runs:
        micro[rank].append(size)
    return Assignment(
        owners,
        np.bincount(owners, minlength=len(shares)),
        places=places,
        micro=tuple(tuple(each) or (0,) for each in micro),
    )


def _exchanges(order: Sequence[int], shares: Sizes) -> list[tuple[int, int]]:
    """Return the pairs of places whose exchange makes another order."""
    return [
        (first, second)
        for first in range(len(order))
        for second in range(first + 1, len(order))
        if shares[order[first]] != shares[order[second]]
    ]


def sizes_by_cost(planned: StepSizes, micro: tuple[Sizes, ...], *, splits: bool) -> StepSizes:
    """Return the sizes of a step whose samples were given out in shares ``planned.sizes``.

    ``micro`` are the samples of each rank's micro-batches; where nothing ``splits`` it is one.
    """
    sizes = tuple(map(sum, micro))
    return replace(
        planned,
        sizes=sizes,
        shares=planned.sizes,
        num_micro=tuple(map(len, micro)) if splits else (),
        micro=micro if splits else (),
    )
