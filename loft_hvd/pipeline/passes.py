"""The backward passes of one optimizer step: whose batch each is, and what its gradients weigh.

Every front end has one ``Passes`` and tells it when a pass begins. It takes the pass's batch from
the balancer, and says by which numbers gradients are multiplied on their way to the other ranks:
a pass's share as they come where passes add up, else a row's scale in its bucket. With worker
momentum it is a ``Blend`` of a gradient and its average.

Under a plain mean rank i of n has ``x_i`` of a batch's ``X`` samples, so that the mean of rows
``n x_i / X * g_i`` is exact. Robust rules take the ranks' own mean gradients and cap what rows
weigh (``weights.py``). Where the loss itself was weighed before the backward pass, gradients come
times ``n x_i / X``: a mean leaves them so, and for other rules it is taken back. Where the script
counts what its losses are over, ranks' claims (``counts.py``) take the place of samples.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.balance.plan import Counted, StepSizes
from loft_hvd.errors import UsageError
from loft_hvd.pipeline.counts import StepCounts
from loft_hvd.pipeline.momentum import AverageWeights, Blend, WorkerMomentum
from loft_hvd.pipeline.noise import StepSamples
from loft_hvd.pipeline.weights import PassWeights, capped_weights, combine_passes, in_training
from loft_hvd.transport.base import Channel

__all__ = ["Passes", "StepSource"]

_logger = logging.getLogger(__name__)


@runtime_checkable
class StepSource(Protocol):
    """What front ends ask of a balancer, and tell it."""

    @property
    def most_samples(self) -> int:
        """Samples of one backward pass, at most, on all ranks that there are now together."""

    @property
    def splits(self) -> bool:
        """Whether a batch may come in micro-batches, a backward pass each."""

    @property
    def has_none(self) -> bool:
        """Whether the batch whose turn it is leaves this rank without samples."""

    def pass_over(self) -> None:
        """Hear that this rank takes part in the step without computing anything."""

    def take_step(self) -> StepSizes:
        """Return the sizes of the batch that the next backward pass belongs to."""

    def is_weighed(self, batch: StepSizes) -> bool:
        """Say whether a batch's loss was weighed before its backward pass: n x_i / X."""

    @property
    def min_ranks(self) -> int:
        """Ranks that have samples in every step: as many as the rule needs."""

    @property
    def max_count(self) -> int | None:
        """Most that is counted of one sample; None where nobody knows."""

    def take_count(self) -> Counted | None:
        """Return what the next backward pass is over, once; None where nobody counts."""

    def count_cut(self, rank: int, what: str) -> None:
        """Hear of a rank whose claim is not taken as it is, and why."""

    def gradient_arrived(self, *, blocked_s: float) -> None:
        """Hear of each gradient, and what its hook and those before it spent on the wire.

        Waits are not in it.
        """


def _all_there(weights: PassWeights) -> PassWeights:
    return weights


class Passes:
    """The passes of a step, over and over; a pass begins once, whichever thread comes first.

    Args:
        source: gives each pass's batch; None where all batches weigh the same.
        channel: the ranks.
        num_passes: backward passes of a step, as the script says; None where it does not.
        momentum: keeps this rank's averages, if ranks send such.
        mask: takes from a step's weights who is left out.
        predivide: what a mean divides by before ranks' rows are added up.

    Attributes:
        has_shares: gradients are weighed as they come (``weigh``), as passes add up in ``.grad``.
        parts: this rank's backward passes of the step so far: which pass each is of, and its share
            of the rank's samples in that. Other ranks may make more or fewer.
        num_begun: passes that have begun.
    """

    def __init__(
        self,
        source: StepSource | None,
        channel: Channel,
        *,
        num_passes: int | None = None,
        momentum: WorkerMomentum | None = None,
        mask: Callable[[PassWeights], PassWeights] = _all_there,
        predivide: float = 1.0,
    ) -> None:
        self._source = source
        self._channel = channel
        self._num_passes = num_passes
        self._momentum = momentum
        self._mask = mask
        self._predivide = predivide
        self._is_passed_over = False  # the pass that begins is none: this rank has no samples
        self._has_warned = False  # of a step that ended with other passes than asked
        # Autograd has a thread for each device. Reentrant, as a signal handler of the script's may
        # compute gradients.
        self._beginning = threading.RLock()
        self._counts: StepCounts | None = None
        if source is not None:
            self._counts = StepCounts(channel, most=source.max_count, tell=source.count_cut)
        self._resolving = threading.RLock()  # claims, which two threads may ask for
        self.has_shares = False
        self.clear()

    def clear(self) -> None:
        """Forget the step: gradients are new from here on."""
        self.num_begun = 0
        self.parts: list[tuple[int, float]] = []
        self._num_told = 0  # of the parts, those of which the script has told all
        self._sizes: list[StepSizes] = []  # of the passes that have begun, with a source
        self._weighed: list[bool] = []  # whether their losses were weighed by shares
        self._weights: PassWeights | None = None
        self._averages_weigh: AverageWeights | None = None
        self._blends: dict[tuple[Rule, bool], Blend] = {}
        if self._counts is not None:
            self._counts.clear()

    # Passes.

    def begin(self, number: int) -> bool:
        """Let this rank's backward pass ``number`` (from 0) begin; say whether that is news.

        Raises:
            UsageError: the step has had all of its passes.
        """
        if number < self._num_told:  # without the lock: so for all gradients of a pass but one
            return False
        with self._beginning:
            if number < self._num_told:  # another device's thread has begun it meanwhile
                return False
            if number < len(self.parts):  # a micro-batch of a batch that has begun
                self._take_count()
                return False
            if self._num_passes is not None and self.num_begun >= self._num_passes:
                raise UsageError(
                    f"a gradient arrived for backward pass {number + 1} of a step, but "
                    f"{self._expected()}; call step() in between or raise backward_passes_per_step"
                    ". After one loss.backward() it is of a part of the model that runs twice "
                    "inside torch.utils.checkpoint: use checkpoint(..., use_reentrant=False)"
                )
            self.join()
            # The first gradient of a pass takes the pass's batch off the source's queue; the
            # others of the pass find it here.
            at = self.num_begun
            self.num_begun += 1
            sizes: Sequence[int] = (1,)
            if self._source is not None:
                self._sizes.append(self._source.take_step())
                self._weighed.append(self._source.is_weighed(self._sizes[at]))
                sizes = self._sizes[at].micro_sizes(self._channel.rank)
            self.parts += [(at, size / sum(sizes) if sum(sizes) else 1.0) for size in sizes]
            self._take_count()
            return True

    def _take_count(self) -> None:
        """Take what the script has counted for the next part."""
        if self._source is not None and self._counts is not None:
            at, _ = self.parts[self._num_told]
            count = self._source.take_count()
            if self._is_passed_over and self._counts.is_used:
                count = Counted(0, 0.0, is_mean=False)
            self._counts.add(
                count,
                num_samples=self._sizes[at].sizes[self._channel.rank],
                is_weighed=self._weighed[at],
            )
        self._num_told += 1  # at last: who finds it here takes the rest as it is

    @property
    def is_passed_over(self) -> bool:
        """Whether a step takes place in which this rank has computed nothing, as it need not."""
        return self.num_begun == 0 and self._source is not None and self._source.has_none

    def pass_over(self) -> None:
        """Begin, in place of a backward pass, the pass of a batch that has none of this rank's."""
        assert self._source is not None
        self._source.pass_over()
        self._is_passed_over = True
        self.begin(0)
        self._is_passed_over = False

    def join(self) -> None:
        """Let ranks learn what each other's averages weigh, in the first step of a world."""
        if self._momentum is None:
            return
        most = self._channel.world_size  # a sample each, as in ``AverageWeights``
        if self._source is not None:
            most = self._source.most_samples * (self._num_passes or 1)
        self._momentum.join(self._channel, most_samples=most)

    @property
    def has_begun_all(self) -> bool:
        """Whether the last pass of the step has begun, as far as the script says how many."""
        return self.num_begun == self._num_passes

    def _expected(self) -> str:
        text = f"backward_passes_per_step={self._num_passes}"
        if len(self.parts) > self.num_begun:
            rank = self._channel.rank
            sizes = [list(sizes.micro_sizes(rank)) for sizes in self._sizes]
            text += f" and rank {rank} has micro-batches of {sizes} samples"
        return text

    def check_complete(self, num_seen: int) -> None:
        """Raise when micro-batches of a batch are missing: the step would leave them out."""
        if num_seen < len(self.parts):
            raise UsageError(
                f"{num_seen} backward passes came before step(), but {self._expected()}: "
                "with Balancer(micro_batches=True) a loader yields the list of a step's "
                "micro-batches; run forward and backward on each, then step() once"
            )

    def warn_of_other_passes(self) -> None:
        """Say once of a step that ends after other numbers of passes than asked."""
        if self._has_warned or self.num_begun in (0, self._num_passes):
            return
        self._has_warned = True
        _logger.warning(
            "rank %d: a step ends after %d of backward_passes_per_step=%d backward passes; where "
            "ranks have unequal batches, what each pass does with other ranks (a metric's "
            "hvd.allreduce, say) is done more often on one rank than on another: use loft.Metric, "
            "which talks to other ranks once a step",
            self._channel.rank,
            self.num_begun,
            self._num_passes,
        )

    # What gradients are multiplied by.

    @property
    def _counted(self) -> StepCounts | None:
        """What was counted, where the script counts."""
        return self._counts if self._counts is not None and self._counts.is_used else None

    @property
    def _adds_up(self) -> bool:
        """Whether what was counted is in ``.grad`` times its weight already."""
        return self.has_shares or (self._source is not None and self._source.splits)

    def _counted_scale(self, counts: StepCounts, *, is_mean: bool) -> float:
        """Return what makes this rank's row of ``.grad``: its part of a mean, or its mean."""
        if not counts.own:
            return 0.0
        scale = float(self.num_begun) if counts.is_mean else 1.0
        if not self._adds_up:
            scale *= counts.to_sums[0] / counts.unit
        return scale if is_mean else scale * counts.unit / counts.own

    @property
    def mean_factor(self) -> float:
        """What the mean of rows is multiplied by at last, on every rank alike; waits for counts."""
        counts = self._counted
        if counts is None or self._momentum is not None:
            return 1.0
        total = sum(counts.claims(self._num_samples()))
        return self._channel.world_size * counts.unit / total if total else 1.0

    @property
    def sum_factor(self) -> float:
        """``mean_factor`` of what passes have added up, where rows have no scale beside."""
        counts = self._counted
        return self.mean_factor * (self.num_begun if counts is not None and counts.is_mean else 1)

    @property
    def alone_factor(self) -> float:
        """What a rank that is alone multiplies its gradients by, which nothing else weighs."""
        counts = self._counted
        if counts is None:
            return 1.0
        factor = self._counted_scale(counts, is_mean=False)
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor

    def share(self, at: int) -> float:
        """Return this rank's part of pass ``at``'s batch, times the number of ranks: n x_i / X."""
        if not self._sizes:
            return 1.0
        sizes = self._sizes[at]
        return sizes.sizes[self._channel.rank] * self._channel.world_size / sizes.total

    def weigh(self, number: int, gradient: Tensor, *, is_mean: bool) -> Tensor | None:
        """Return a gradient of backward pass ``number`` as it adds up in ``.grad``.

        None where it stays as it is.
        """
        at, scale = self.parts[number]
        if (counts := self._counted) is not None:
            if counts.to_sums[number] == 0:
                return torch.zeros_like(gradient)  # a mean over nothing is NaN
            return gradient * (counts.to_sums[number] / counts.unit) if self._adds_up else None
        if self._sizes and self._sizes[at].sizes[self._channel.rank] == 0:
            return torch.zeros_like(gradient)  # of a dummy batch: 0 * NaN is NaN
        if self._sizes and self._weighed[at]:
            scale = 1 / self.share(at) if self.has_shares and not is_mean else 1.0
        elif self.has_shares and is_mean and self._channel.world_size > 1:
            scale *= self.share(at)
        return None if scale == 1.0 else gradient * scale

    def scale(self, rule: Rule, *, is_sum: bool) -> float | Blend:
        """Return what this rank's gradients are multiplied by before they are sent.

        ``is_sum``: the lane only adds rows up, so that each rank sends its part of the mean.
        """
        if self._momentum is None:
            return self.row_scale(rule, is_sum=is_sum)
        if (rule, is_sum) not in self._blends:  # once a step, not once a parameter
            self._blends[rule, is_sum] = self._blend(rule, is_sum=is_sum)
        return self._blends[rule, is_sum]

    def row_scale(self, rule: Rule, *, is_sum: bool) -> float:
        """Return ``scale`` without momentum."""
        if (counts := self._counted) is not None:
            is_mean = isinstance(rule, Mean)
            scale = self._counted_scale(counts, is_mean=is_mean)
            if is_mean:
                scale /= self._predivide * (self._channel.world_size if is_sum else 1)
            return scale
        if not isinstance(rule, Mean):
            return self.weights().row_scale * self._taken_back
        scale = 1 / self._predivide
        if self._sizes and not self._has_share:
            scale *= self.share(0)
        return scale / self._channel.world_size if is_sum else scale

    @property
    def _has_share(self) -> bool:
        """Whether what is in ``.grad`` is times this rank's share already."""
        return bool(self._sizes) and (self.has_shares or self._weighed[0])

    @property
    def _taken_back(self) -> float:
        """By what ``.grad`` is multiplied to be a mean gradient, where the loss was weighed."""
        if not self._sizes or self.has_shares or not self._weighed[0]:
            return 1.0
        share = self.share(0)
        return 1 / share if share else 1.0

    def _blend(self, rule: Rule, *, is_sum: bool) -> Blend:
        """Return how this rank's row comes about of its averages and its gradients."""
        weights, ages = self.weights(), self._average_weights()
        rank, num_ranks = self._channel.rank, self._channel.world_size
        count, total = ages.counts[rank], sum(ages.counts)
        if (counts := self._counted) is not None:
            gain = count * self._counted_scale(counts, is_mean=False)
        elif not isinstance(rule, Mean):
            gain = count * weights.row_scale * self._taken_back
        else:  # gradients with shares are n x_i / X times theirs already
            gain = total / num_ranks if self._has_share else count
        if not isinstance(rule, Mean):
            return ages.blend(rank, gain=gain, scale=1.0)
        # A row is scaled as in row_scale, by its average's weight in place of its samples.
        scale = 1.0
        if num_ranks > 1:
            scale = ages.weights[rank] * num_ranks / ages.total / self._predivide
        return ages.blend(rank, gain=gain, scale=scale / num_ranks if is_sum else scale)

    # What rows weigh.

    def row_weights(self, rule: Rule) -> PassWeights:
        """Return what the rows of all ranks weigh under a rule."""
        if isinstance(rule, Mean):
            # Its weights are in the values already, zeros for an absent rank: rows count alike.
            present = (True,) * self._channel.world_size
            return PassWeights(weights=None, present=present, row_scale=1.0)
        return in_training(rule, self.weights())

    def sends_zeros(self, rule: Rule) -> bool:
        """Say whether this rank has nothing to send: never 0 times what an absent rank has.

        An absent rank's average goes on: in quarantine it has samples all the same. A mean takes
        averages, however faint.
        """
        return not self.is_present and not (isinstance(rule, Mean) and self._momentum is not None)

    @property
    def is_present(self) -> bool:
        """Whether this rank's row of the step counts."""
        if self._counted is None or self._weights is not None:
            return self.weights().present[self._channel.rank]
        # Of itself it knows at once, and need not wait for the others, unless it is in quarantine:
        # that depends on who else has counted anything.
        every = PassWeights(None, (True,) * self._channel.world_size, 1.0)
        if not self._mask(every).present[self._channel.rank]:
            return self.weights().present[self._channel.rank]
        return self._counted.own > 0

    @property
    def has_gradient(self) -> bool:
        """Whether this rank's gradients go anywhere: to other ranks, or into its averages."""
        return self._momentum is not None or self.is_present

    def weights(self) -> PassWeights:
        """Return what ranks weigh in the step, once all of its passes have begun.

        Where the script counts it waits for the other ranks' counts.
        """
        if self._weights is not None:
            return self._weights
        if (counts := self._counted) is not None:
            with self._resolving:
                self._weights = self._weighed_by(counts)
            return self._weights
        if self._sizes:
            weights = combine_passes(self.batches(), rank=self._channel.rank)
        else:
            weights = PassWeights(None, (True,) * self._channel.world_size, 1.0)
        if self._momentum is not None:
            weights = self._average_weights().weigh(weights)
        return self._mask(weights)

    def _weighed_by(self, counts: StepCounts) -> PassWeights:
        """Return what ranks weigh by their claims."""
        samples = self._num_samples()
        claims = counts.fair(samples)
        assert self._source is not None
        if samples and sum(claim > 0 for claim in claims) < self._source.min_ranks:
            # Too few for the rule: who has samples and counts nothing is a row of zeros.
            claims = tuple(
                max(claim, 1) if size else 0 for claim, size in zip(claims, samples, strict=True)
            )
        present = tuple(claim > 0 for claim in claims)
        scale = self._counted_scale(counts, is_mean=False)
        weights = PassWeights(capped_weights(claims), present, scale, counts=claims)
        if self._momentum is not None:
            weights = self._average_weights().weigh(weights)
        return self._mask(weights)

    def _num_samples(self) -> list[int]:
        """Return every rank's samples in the step, [world_size]; empty without a backward pass."""
        return [sum(each) for each in zip(*(each.sizes for each in self.batches()), strict=True)]

    def fix_weights(self) -> None:
        """Let weights stay as they are by now: every pass of the step has begun."""
        if self._counted is not None:
            self._counted.send()
        else:
            self._weights = self.weights()

    def batches(self) -> list[StepSizes]:
        """Return the step's batches: one that the script cuts up itself takes several passes."""
        passes = self._sizes
        return [each for at, each in enumerate(passes) if not at or each is not passes[at - 1]]

    def samples(self, *, is_mean: bool, is_sum: bool = False) -> StepSamples | None:
        """Return what the step's gradients are of; None where nobody says of how many samples.

        ``is_mean``: they are reduced by a plain mean, and ``is_sum``: then multiplied by the number
        of ranks.
        """
        batches, rank, num_ranks = self.batches(), self._channel.rank, self._channel.world_size
        if not batches or not all(each.total for each in batches):
            return None
        if (
            is_mean and self._counted is not None
        ):  # rows are of tokens, and as long as they are many
            return None
        # How much of each pass's mean gradient a rank's sum has, [num_ranks][num_batches].
        shares = [
            [num_ranks * each.sizes[at] / each.total if is_mean else 1.0 for each in batches]
            for at in range(num_ranks)
        ]
        counts = []
        for at, present in enumerate(self.weights().present):
            # A pass of x samples adds its share of G, and noise of share**2 / x.
            own_passes = [
                (share, each.sizes[at])
                for share, each in zip(shares[at], batches, strict=True)
                if each.sizes[at]
            ]
            noise = sum(share**2 / size for share, size in own_passes)
            whole = sum(share for share, _ in own_passes)
            counts.append(whole**2 / noise if present and noise else 0.0)
        own = 1.0
        if self._has_share:
            own = sum(shares[rank]) if is_mean else self.share(0)
        return StepSamples(
            counts=tuple(counts),
            total=len(batches) ** 2 / sum(1 / each.total for each in batches),
            own=own or 1.0,
            rows=len(batches),
            result=len(batches) * (num_ranks if is_sum else 1),
            averages=None if self._momentum is None else self._average_weights(),
        )

    def _average_weights(self) -> AverageWeights:
        assert self._momentum is not None
        if self._averages_weigh is None:
            # Not before all passes have begun. Two threads that come here find the same.
            samples: Sequence[float] | None = None
            if self._sizes:
                samples = self._num_samples()
            if (counts := self._counted) is not None:
                # By parts of the step: a process that takes the mean of each step over all that is
                # counted lets them weigh alike, however much that was.
                claims = counts.fair(self._num_samples())
                per_count = sum(self._num_samples()) / (sum(claims) or 1)
                samples = [claim * per_count for claim in claims]
            self._averages_weigh = self._momentum.average_weights(samples)
        return self._averages_weigh

    def step_reduced(self) -> None:
        """Let averages be those after the step, and begin the next one."""
        if self._momentum is not None:
            self._momentum.step_ended(self._average_weights())
        self.clear()
