"""How much gradients differ from batch to batch, measured by what ranks exchange anyway.

Let single samples' gradients have the mean ``G`` and the covariance ``S``. A rank's gradient
``g_i``, the mean over ``x_i`` samples, is ``G`` and an error of covariance ``S / x_i``, so for any
two ranks::

    E |g_i - g_j|^2 = tr(S) (1 / x_i + 1 / x_j)        E g_i . g_j = |G|^2

Where a rule sees rows, every pair gives an estimate of both, unbiased whatever the sizes. Weighing
the first by ``x_i + x_j`` and the second by ``x_i x_j`` makes sums over pairs (``PairSums``)::

    tr(S) = sum x_i x_j |g_i - g_j|^2 / sum (x_i + x_j)
    |G|^2 = sum x_i x_j g_i . g_j / sum x_i x_j

The first is ``X / (n - 1) (A - B)``, where ``A`` is the mean of ``|g_i|^2``, each weighed by
``x_i / X``, and ``B`` is ``|sum x_i / X g_i|^2``, after McCandlish et al. (arXiv 1812.06162). Pairs
that lie much farther apart than the usual one, or closer together, are left out, so that a few
wrong rows do not reach the estimates.

A plain mean shows no rows. There each rank measures its own ``|g_i|^2``, and ``B`` is of the
result, as in Pollux (OSDI 2021), but for unequal sizes. One rank's wrong length reaches that
estimate, as its wrong gradient reaches the mean.

One block of 256 values in up to 128 is looked at, others every ten steps. Then one small all-gather
travels beside the step's buckets, and every rank reads the same numbers at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.goodput import GradientNoise
from loft_hvd.pipeline.momentum import AverageWeights
from loft_hvd.pipeline.ring import Rows
from loft_hvd.pipeline.streams import used_here
from loft_hvd.transport.base import Channel, Work
from loft_hvd.transport.groups import Groups

__all__ = ["INTERVAL", "NoiseMeter", "PairSums", "StepSamples", "estimate", "estimate_pairs"]

Floats = npt.NDArray[np.float64]
_Known = TypeVar("_Known")  # what an interval showed

INTERVAL = 10  # steps between two exchanges; half of them in the first steps, to know it soon
_FIRST_STEPS = 50
_BLOCK = 256  # values next to each other that are looked at: 16 cache lines of float32
_EVERY = 128  # one block in so many, of rows below a million values in fewer
_FEWEST_VALUES = 1 << 13  # of a row are looked at, where it has them: 1.6 % by chance, in one step
_MOST_ROWS = 32  # of which all pairs are compared: 1,024 sums an exchange
_FEWEST, _MOST = 5, 100  # intervals that an estimate is of: the later half of the run, up to these
# Pairs farther apart than the usual one by this factor, or closer, are left out. Honest pairs of
# one size stay within it from some ten degrees of freedom on, over 50 steps and more.
_ODD = 1.5
_ASTRAY = 0.5  # of what is usual: by so much a row points elsewhere, and
_SURE = 4.0  # standard errors by which a row must point elsewhere to be left out for it


@dataclass(frozen=True)
class StepSamples:
    """What the gradients of one optimizer step are of, equal on every rank.

    Attributes:
        counts: samples that each rank's gradient is a mean of, [world_size]; 0 for none. Of several
            passes with unequal sizes, those of one pass with as much noise.
        total: likewise of the ranks' mean.
        own: by what this rank's ``.grad`` is divided to be a mean gradient; 0 where it has none.
        rows: the same of a row; all ranks' alike.
        result: the same of the reduced gradient.
        averages: what averages over time weigh after the step, where ranks send such.
    """

    counts: tuple[float, ...]
    total: float
    own: float = 1.0
    rows: float = 1.0
    result: float = 1.0
    averages: AverageWeights | None = None


def estimate(
    steps: Sequence[float], variance: Sequence[float], signal: Sequence[float]
) -> GradientNoise | None:
    """Return the means of what some intervals showed, with standard errors by their differences.

    Args:
        steps: that each interval has, [num_intervals].
        variance: the mean estimate of ``tr(S)`` in each, likewise.
        signal: that of ``|G|^2``.

    Returns:
        None where too few intervals are finite.
    """
    rows = np.array([steps, variance, signal], np.float64)
    weights, traces, squares = rows[:, np.isfinite(rows).all(axis=0) & (rows[0] > 0)]
    if len(weights) < _FEWEST:
        return None
    shares = weights / weights.sum()
    trace, squared = float(shares @ traces), float(shares @ squares)

    def error(apart: Floats) -> float:
        """Return the standard error of a mean of intervals, which are so far from it."""
        freedom = 1 - 1 / len(shares)
        return math.sqrt(float(((shares * apart) ** 2).sum()) / freedom)

    scale_error = math.inf
    if squared > 0:  # of a ratio: the error of what is left over by it
        scale_error = error(traces - trace / squared * squares) / squared
    return GradientNoise(
        signal=squared,
        signal_error=error(squares - squared),
        variance=trace,
        variance_error=error(traces - trace),
        scale_error=scale_error,
        num_steps=int(weights.sum()),
    )


def _looked_at(values: Tensor, turn: int) -> tuple[Tensor, float]:
    """Return what is looked at of values [..., numel] in a turn, and for how many each stands."""
    *rows, numel = values.shape
    every = min(_EVERY, numel // _FEWEST_VALUES)
    if every <= 1:
        return values, 1.0
    # With every = 3 and turn 1: blocks 1, 4, 7, ... What is left at the end is never looked at,
    # at most a 32nd.
    num_blocks = numel // (_BLOCK * every)
    whole = values[..., : num_blocks * _BLOCK * every].view(*rows, num_blocks, every, _BLOCK)
    return whole[..., turn % every, :].reshape(*rows, -1), numel / (num_blocks * _BLOCK)


@dataclass
class PairSums:
    """Sums over some steps, for each pair of rows; [num_rows, num_rows], the diagonal unused.

    Sums over coordinates may be of one owner's; those of all owners are added up.
    """

    apart: Floats  # of x_i x_j |g_i - g_j|^2; not finite where a row is not
    along: Floats  # of x_i x_j g_i . g_j
    sizes: Floats  # of x_i + x_j
    products: Floats  # of x_i x_j
    num_steps: int = 0

    @classmethod
    def of(cls, num_rows: int) -> PairSums:
        """Return sums over no step."""
        return cls(*np.zeros((4, num_rows, num_rows)))

    def add(self, gram: Floats, counts: Floats) -> None:
        """Take in a step: the products of its rows, [num_rows, num_rows], and their samples.

        A row of 0 samples is absent.
        """
        there = np.outer(counts > 0, counts > 0)
        lengths = np.diagonal(gram)
        products = np.outer(counts, counts)
        with np.errstate(all="ignore"):  # a row that is not finite makes its own pairs so
            apart = lengths[:, None] + lengths - gram - gram.T
            self.apart += np.where(there, products * apart, 0.0)
            self.along += np.where(there, products * gram, 0.0)
        self.sizes += np.where(there, counts[:, None] + counts, 0.0)
        self.products += products
        self.num_steps += 1

    def finite(self) -> PairSums:
        """Return the sums without pairs that are not finite in one of them."""
        says = np.isfinite(self.apart) & np.isfinite(self.along)
        return PairSums(
            np.where(says, self.apart, 0.0),
            np.where(says, self.along, 0.0),
            np.where(says, self.sizes, 0.0),
            np.where(says, self.products, 0.0),
            self.num_steps,
        )


def _lower_median(values: Floats) -> Floats:
    """Return the middle value of each row, the lower of two; what is not finite is the largest."""
    ordered = np.sort(np.where(np.isfinite(values), values, np.inf), axis=-1)
    middle: Floats = ordered[..., (values.shape[-1] - 1) // 2]
    return middle


def _kept_pairs(sums: Sequence[PairSums]) -> npt.NDArray[np.bool_]:
    """Return which pairs estimates are of, [num_rows, num_rows], each once."""
    num_rows = len(sums[0].apart)
    once = np.triu(np.ones((num_rows, num_rows), bool), 1)
    if num_rows < 3:  # of two rows nobody can say which one is wrong
        return once
    others = ~np.eye(num_rows, dtype=bool)
    along = np.stack([each.along for each in sums])  # [num_intervals, num_rows, num_rows]
    products = np.stack([each.products for each in sums])
    with np.errstate(all="ignore"):  # of absent rows nothing is known: NaN, which is like nothing
        sizes = np.stack([each.sizes for each in sums])
        apart = np.stack([each.apart for each in sums]).sum(axis=0) / sizes.sum(axis=0)
        usual = _lower_median(_lower_median(apart[others].reshape(num_rows, num_rows - 1)))
        alike = others & (apart < _ODD * usual) & (apart > usual / _ODD)
        # A row may lie as far from the others as they do, and point elsewhere.
        weights = np.where(alike, products, 0.0).sum(axis=-1)  # [num_intervals, num_rows]
        sides = np.where(alike, along, 0.0).sum(axis=-1)
        means = sides.sum(axis=0) / weights.sum(axis=0)  # [num_rows]
        errors = np.sqrt(((sides - means * weights) ** 2).sum(axis=0)) / weights.sum(axis=0)
        off = np.abs(means - _lower_median(means))
        is_odd = (off > _ASTRAY * np.abs(_lower_median(means))) & (off > _SURE * errors)
    kept: npt.NDArray[np.bool_] = once & alike & ~is_odd[:, None] & ~is_odd
    return kept


def estimate_pairs(sums: Sequence[PairSums]) -> GradientNoise | None:
    """Return what rows of some intervals show, without those that are odd; None where too few."""
    if not sums:
        return None
    kept = _kept_pairs(sums)
    with np.errstate(all="ignore"):  # an interval without a pair is NaN, and is left out
        return estimate(
            [each.num_steps for each in sums],
            [each.apart[kept].sum() / each.sizes[kept].sum() for each in sums],
            [each.along[kept].sum() / each.products[kept].sum() for each in sums],
        )


class _RowNoise:
    """Of rows that a shard owner sees; ``groups`` are those of ranks, if any."""

    def __init__(self, channel: Channel, groups: Groups | None) -> None:
        self._groups = groups
        num_rows = groups.num_groups if groups else channel.world_size
        num_chosen = min(num_rows, _MOST_ROWS)
        self._chosen = [num_rows * at // num_chosen for at in range(num_chosen)]  # evenly spread
        self._grams: list[Tensor] = []  # of the step under way, one of each part of a bucket
        # With averages, by where results go: what was looked at in this step and the one before.
        self._newest: dict[tuple[int, int], Tensor] = {}
        self._before: dict[tuple[int, int], Tensor] = {}
        self._there: npt.NDArray[np.bool_] | None = None  # rows that the step before had
        self._steps: list[tuple[Tensor, Floats, Floats, Floats]] = []
        self._sent = PairSums.of(num_chosen)
        self._known: deque[PairSums] = deque(maxlen=_MOST)
        self._num_read = 0

    def look(self, rows: Rows, out: Tensor, *, turn: int, is_average: bool) -> None:
        """Look at rows, [num_rows, numel], of what is aggregated into ``out``."""
        if isinstance(rows, Tensor) and len(rows) == len(self._chosen):
            values, stands_for = _looked_at(rows, turn)
        else:
            looked = [_looked_at(rows[at], turn) for at in self._chosen]
            values, stands_for = torch.stack([each for each, _ in looked]), looked[0][1]
        if values.itemsize < 4:
            values = values.float()
        if is_average:
            place = out.data_ptr(), out.numel()  # the same step after step
            self._newest[place] = values.clone() if stands_for == 1.0 else values
            before = self._before.get(place)
            if before is None:
                return  # nothing is known of the step before; all ranks see it alike
            values = torch.cat([values, before])  # [2 * num_rows, looked at]
        # What float32 does not hold says as little as what is not finite.
        self._grams.append((values @ values.T).double() * stands_for)

    def step_reduced(
        self, samples: StepSamples, results: Sequence[Tensor | None], *, turn: int
    ) -> None:
        """Take in a step, whose rows have been looked at."""
        del results, turn
        grams, self._grams = self._grams, []
        self._before, self._newest = self._newest, {}
        counts, averages = self._of_rows(samples.counts), samples.averages
        before, self._there = self._there, counts > 0
        gain, gain_before = np.full(len(counts), 1 / samples.rows), np.zeros(len(counts))
        if averages is not None:
            # x_i g_i is w_i m_i less what it was before, faded: (w_i - x_i) m_i.
            if before is None:
                return  # nothing is known of the step before: all ranks turn together
            counts = np.where(before, counts, 0.0)
            gain_before = self._of_rows(averages.weights) / np.maximum(counts, 1e-9) - 1.0
            gain, gain_before = (gain_before + 1.0) * gain, gain_before * gain
        if (counts > 0).sum() < 2:
            return
        used_here(*grams)
        size = len(counts) * (1 if averages is None else 2)
        total = torch.stack(grams).sum(dim=0) if grams else torch.zeros(size, size).double()
        self._steps.append((total, counts, gain, gain_before))

    def _of_rows(self, of_ranks: Sequence[float]) -> Floats:
        """Return the numbers of the chosen rows, by those of all ranks."""
        by_row = np.array(of_ranks, np.float64)
        if self._groups is not None:
            by_row = np.array([by_row[list(each)].sum() for each in self._groups.members])
        return by_row[self._chosen]

    def turned(self) -> None:
        """Look at other blocks from the next step on."""
        self._before, self._there = {}, None

    def take(self) -> Floats:
        """Return what this owner tells of its steps so far, [num_rows ** 2], and begin anew."""
        steps, self._steps = self._steps, []
        self._sent = PairSums.of(len(self._chosen))
        for total, counts, gain, gain_before in steps:
            gram, num_rows = total.cpu().numpy(), len(counts)
            with np.errstate(all="ignore"):  # what is not finite stays in its own pairs
                raw = np.outer(gain, gain) * gram[:num_rows, :num_rows]
                if len(gram) > num_rows:
                    cross = np.outer(gain, gain_before) * gram[:num_rows, num_rows:]
                    old = gram[num_rows:, num_rows:]
                    raw = raw - cross - cross.T + np.outer(gain_before, gain_before) * old
            self._sent.add(raw, counts)
        return (np.triu(self._sent.apart, 1) + np.tril(self._sent.along, -1)).reshape(-1)

    def read(self, rows: Floats) -> GradientNoise | None:
        """Take in what all owners tell; return what is known by now."""
        own = self._sent
        with np.errstate(all="ignore"):
            table = rows.sum(axis=0).reshape(own.sizes.shape)  # of all owners
        apart, along = np.triu(table, 1), np.tril(table, -1)
        told = replace(own, apart=apart + apart.T, along=along + along.T)
        self._num_read += 1
        self._known.append(told.finite())
        return estimate_pairs(_later_half(self._known, self._num_read))


class _NormNoise:
    """Of a mean, whose rows nobody sees: by each rank's own length, and that of the result."""

    def __init__(self, channel: Channel) -> None:
        self._rank = channel.rank
        self._own: dict[int, Tensor] = {}  # squared lengths of the step under way, by parameter
        self._before: dict[int, Tensor] | None = None  # with averages: what results were
        self._steps: list[Tensor] = []  # what counts for tr(S) and for |G|^2, [2] on its device
        self._num_steps = 0
        self._known: deque[tuple[int, float, float]] = deque(maxlen=_MOST)
        self._num_read = 0

    def sent(self, at: int, gradient: Tensor, *, turn: int) -> None:
        """Look at this rank's gradient of a parameter; of several passes the last call counts."""
        if gradient.layout == torch.strided:
            self._own[at] = _squared(*_looked_at(gradient.detach().reshape(-1), turn))

    def step_reduced(
        self, samples: StepSamples, results: Sequence[Tensor | None], *, turn: int
    ) -> None:
        """Take in a step, by its reduced gradients."""
        own, self._own = self._own, {}
        counts = np.array(samples.counts)
        num_ranks, share = int((counts > 0).sum()), counts[self._rank] / max(counts.sum(), 1.0)
        is_primed = samples.averages is None or self._before is not None
        reduced = self._reduced(samples, results, turn)
        if num_ranks < 2 or not is_primed:
            return
        # E A = |G|^2 + tr(S) n / sum x_i and E B = |G|^2 + tr(S) / X: so A - B is tr(S) times this.
        apart = num_ranks / float(counts.sum()) - 1 / samples.total
        parts = []
        if share > 0 and own:
            parts.append((_sum(list(own.values())), share / samples.own**2, 0.0))
        if reduced:  # on one rank
            parts.append((_sum(reduced), -1.0, 1.0))
        for squared, factor, of_signal in parts:
            trace = factor / apart
            weights = squared.new_tensor([trace, of_signal - trace / samples.total])
            self._steps.append(squared * weights)
        self._num_steps += 1

    def _reduced(
        self, samples: StepSamples, results: Sequence[Tensor | None], turn: int
    ) -> list[Tensor]:
        """Return the squared length of the step's mean gradient, in parts; on rank 0 alone."""
        averages, before = samples.averages, self._before
        if averages is not None:
            self._before = {}
        if self._rank > 0:
            return []
        found = []
        for at, result in enumerate(results):
            if result is None or result.layout != torch.strided:
                continue
            values, stands_for = _looked_at(result.detach().reshape(-1), turn)
            if averages is not None and self._before is not None:
                # As rows of averages: sum x_i g_i is W m less what it was before, faded.
                self._before[at] = values.clone()
                own, whole = sum(averages.counts), averages.total
                old = None if before is None else before.get(at)
                if old is None or old.shape != values.shape or not own:
                    continue
                values = values * (whole / own) - old * (whole / own - 1)
            found.append(_squared(values, stands_for) / samples.result**2)
        return found

    def turned(self) -> None:
        """Look at other blocks from the next step on."""
        self._before = None

    def take(self) -> Floats:
        """Return what this rank tells of its steps so far, [2], and begin anew."""
        steps, self._steps = self._steps, []
        return _sum(steps).cpu().numpy() if steps else np.zeros(2)

    def read(self, rows: Floats) -> GradientNoise | None:
        """Take in what all ranks tell, [world_size, 2]; return what is known by now."""
        num_steps, self._num_steps = self._num_steps, 0
        with np.errstate(all="ignore"):  # what is not finite is left out
            trace, squared = rows.sum(axis=0) / max(num_steps, 1)
        self._num_read += 1
        self._known.append((num_steps, float(trace), float(squared)))
        return estimate(*zip(*_later_half(self._known, self._num_read), strict=True))


def _squared(values: Tensor, stands_for: float) -> Tensor:
    """Return the squared length of values, each for so many, float64."""
    wide = values if values.itemsize >= 4 else values.float()
    return wide.dot(wide).double() * stands_for


def _sum(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, on the first one's device."""
    return torch.stack([each.to(values[0].device) for each in values]).sum(dim=0)


def _later_half(known: Sequence[_Known], num_read: int) -> list[_Known]:
    """Return the intervals that an estimate is of: gradients change most as a run begins."""
    return list(known)[-max(_FEWEST, num_read // 2) :]


def _are_means(rules: Sequence[Rule]) -> bool:
    return all(isinstance(rule, Mean) for rule in rules)


class NoiseMeter:
    """Measures the noise of some ranks' gradients, and lets all of them know it.

    A step calls ``sent`` for each gradient, ``look`` for all rows that an owner aggregates,
    ``computing_ended`` and ``step_reduced``. Every rank makes and calls it alike.
    """

    def __init__(self, channel: Channel, rules: Sequence[Rule], groups: Groups | None) -> None:
        self._channel = channel.sub("noise")
        self._way: _RowNoise | _NormNoise = _NormNoise(channel)
        if not _are_means(rules):
            self._way = _RowNoise(channel, groups)
        self._sends_averages = False  # in the step before
        self._num_steps = 0
        self._turn = 0  # exchanges so far: other blocks are looked at after each
        self._next = INTERVAL // 2  # the step that the next one comes after
        self._exchange: tuple[Work, Tensor, Tensor] | None = None  # what is sent, what arrives
        self.newest: GradientNoise | None = None

    def suits(self, rules: Sequence[Rule]) -> bool:
        """Say whether it can measure under other rules, too."""
        return _are_means(rules) == isinstance(self._way, _NormNoise)

    def look(self, rows: Rows, out: Tensor) -> None:
        """Look at rows, [num_rows, numel], of what is aggregated into ``out``; in any thread."""
        # Not in the first step, after which buckets are laid out anew.
        if isinstance(self._way, _RowNoise) and self._num_steps:
            self._way.look(rows, out, turn=self._turn, is_average=self._sends_averages)

    def sent(self, at: int, gradient: Tensor) -> None:
        """Look at this rank's own gradient of a parameter, before anything changes it."""
        if isinstance(self._way, _NormNoise):
            self._way.sent(at, gradient, turn=self._turn)

    def computing_ended(self) -> None:
        """Tell others of the steps before, if it is time to, beside buckets in flight."""
        if self._num_steps < self._next:
            return
        self._next += INTERVAL if self._next >= _FIRST_STEPS else INTERVAL // 2
        row = torch.from_numpy(self._way.take())
        rows = torch.zeros(self._channel.world_size, row.numel(), dtype=torch.float64)
        name = self._channel.name
        work = self._channel.transport.allgather(row, rows.view(-1), name=name)
        self._exchange = work, row, rows

    def step_reduced(
        self, samples: StepSamples | None, results: Sequence[Tensor | None]
    ) -> GradientNoise | None:
        """Close a step, by its reduced gradients.

        ``samples`` are None where nobody says how many there are: then nothing is measured.

        Returns:
            What is known by now, if that is news.
        """
        if samples is None:
            return None
        found = None
        if self._exchange is not None:
            (work, _, rows), self._exchange = self._exchange, None
            self._channel.wait(work, what="exchange of gradient noise")
            found = self.newest = self._way.read(rows.numpy())
        self._way.step_reduced(samples, results, turn=self._turn)
        self._sends_averages = samples.averages is not None
        self._num_steps += 1
        if self._num_steps == self._next:
            self._turn += 1
            self._way.turned()
        return found
