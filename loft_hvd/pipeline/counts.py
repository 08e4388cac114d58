"""What ranks count in a step where a loss is over tokens, pixels or the like: claims, and caps.

``Balancer.count`` says what each backward pass is over. Rank i claims ``c_i`` of a step, of ``C``
that all ranks claim, and the step's gradient is the sum over what was counted, divided by ``C``.
A rank knows its own claim as it computes, and the others' only with its first bucket. So under a
mean it sends its sum divided by a ``unit`` that all ranks know, what a rank usually claims, and the
mean of rows is multiplied by ``n unit / C`` when it is back.

A claim is a worker's own word, and cannot be checked. No rank takes one for more than ``most``
times the samples that the plan gives that rank. A mean keeps every value, so there a claim up to
that is exact. Robust rules defend honest ranks from f others: a row weighs at most twice as much a
sample as the median rank's, which f wrong ones cannot move beyond honest ones'.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loft_hvd.balance.plan import Counted
from loft_hvd.errors import UsageError
from loft_hvd.transport.base import Channel, Work

__all__ = ["StepCounts"]

Tell = Callable[[int, str], None]
"""``(rank, what)``: says of a rank why its claim is not taken as it is."""

_MORE = 2  # times the median: what a row may weigh a sample; as ``capped_weights`` for samples
_STEPS_ABOVE = 10  # in a row, before it is told: a few samples may well be long ones; a choice


class StepCounts:
    """The counts of one step after the other; every rank makes and asks it alike.

    Args:
        channel: the ranks.
        most: that is counted of one sample; None where nobody knows.
        tell: hears, on every rank alike, of claims that are cut.

    Attributes:
        is_used: whether this run counts; None before its first backward pass.
        unit: what rows of a mean are divided by, equal on every rank: the median claim of the step
            before. 0.0 before ranks have met.
        own: this rank's claim of the step so far, within its cap.
        is_mean: whether losses are means, so that several passes divide each by their number.
    """

    def __init__(self, channel: Channel, *, most: int | None, tell: Tell) -> None:
        self._channel = channel.sub("counts")
        self._most = most
        self._tell = tell
        self._num_above = [0] * channel.world_size  # steps in a row, by rank
        self.is_used: bool | None = None
        self.unit = 0.0
        self._told: list[list[int]] = []  # of all ranks, as it has come: alike on each of them
        self.clear()

    def clear(self) -> None:
        """Forget the step."""
        if self._told:
            self._take_unit([number for number, _ in self._told])
            self._told = []
        self.own = 0
        self.is_mean = False
        self.to_sums: list[float] = []  # by backward pass: times its loss is a sum, within caps
        self._given = 0  # this rank's claim, caps or not
        self._work: tuple[Work, Tensor, Tensor] | None = None
        self._claims: tuple[int, ...] | None = None
        self._fair: tuple[int, ...] | None = None

    def add(self, count: Counted | None, *, num_samples: int, is_weighed: bool) -> None:
        """Take what the next backward pass is over; ``num_samples`` of this rank are in its batch.

        Raises:
            UsageError: some passes are counted and others are not, or in another way.
        """
        if self.is_used is None:
            self.is_used = count is not None
        if (count is not None) != self.is_used:
            raise UsageError(
                f"rank {self._channel.rank}: this backward pass "
                f"{'was counted' if count else 'has no balancer.count(n)'}, and those before it "
                f"{'were not' if count else 'had one'}: call it for each backward pass of a "
                "training, before it and on every rank, or for none; where nothing is to be "
                "counted, with 0"
            )
        if count is None:
            return
        if is_weighed:
            raise UsageError(
                "balancer.count(n) and balancer.weigh(loss) both say what one loss weighs: call "
                "count alone, and the optimizer weighs its gradients"
            )
        if self.to_sums and self.is_mean != count.is_mean:
            raise UsageError(
                "balancer.count(n): losses of one step are means in one backward pass and sums in "
                "another; take is_sum= alike for all"
            )
        number = min(count.number, self._cap(num_samples, count.number))
        self.is_mean = count.is_mean
        self.own += number
        self._given += count.number
        self.to_sums.append(count.to_sum * number / count.number if number else 0.0)
        if not self.unit:
            self._meet(number)

    def _cap(self, num_samples: int, claim: int) -> int:
        """Return the most that is counted of so many samples."""
        if num_samples == 0:
            return 0
        return claim if self._most is None else num_samples * self._most

    def _meet(self, number: int) -> None:
        """Agree on the unit, in the first backward pass of a run."""
        channel = self._channel.sub("unit")
        self._take_unit(channel.allgather_rows(torch.tensor([number]))[:, 0].tolist())

    def _take_unit(self, claims: Sequence[int]) -> None:
        # Any would do. The median keeps rows as long as gradients are, whatever one rank says, so
        # that 16 bits hold them.
        counted = [claim for claim in claims if claim > 0]
        self.unit = float(statistics.median_low(counted)) if counted else 1.0

    def send(self) -> None:
        """Tell the other ranks, once all passes of the step have begun; before its buckets."""
        if self._work is not None or self._channel.world_size == 1:
            return
        row = torch.tensor([self.own, self._given])
        rows = torch.empty(self._channel.world_size, 2, dtype=row.dtype)
        work = self._channel.transport.allgather(row, rows.view(-1), name=self._channel.name)
        self._work = work, row, rows

    def claims(self, num_samples: Sequence[int]) -> tuple[int, ...]:
        """Return what every rank claims of the step, within caps, [world_size]; waits for it.

        ``num_samples``: of every rank in the step; empty where this rank has made no backward pass,
        and does not know them.
        """
        if self._claims is not None:
            return self._claims
        told: list[list[int]] = [[self.own, self._given]]
        if self._channel.world_size > 1:
            self.send()
            assert self._work is not None
            work, _, rows = self._work
            what = "balancer.count(n) of all ranks, which each of them calls for each backward pass"
            self._channel.wait(work, what=what)
            told = rows.tolist()
        self._told = told
        if not num_samples:
            self._claims = tuple(max(0, number) for number, _ in told)
            return self._claims
        claims = []
        for rank, ((number, given), size) in enumerate(zip(told, num_samples, strict=True)):
            cap = self._cap(size, max(number, given))
            claims.append(max(0, min(number, cap)))
            if size and max(number, given) > cap:
                self._tell(
                    rank,
                    f"counts {max(number, given)} in a step of which it has {size} samples, and "
                    f"max_count={self._most} of each: it is taken for {claims[-1]}",
                )
        self._claims = tuple(claims)
        return self._claims

    def fair(self, num_samples: Sequence[int]) -> tuple[int, ...]:
        """Return ``claims`` as robust rules weigh by them, [world_size]."""
        if self._fair is not None:
            return self._fair
        claims = self.claims(num_samples)
        there = [pair for pair in zip(claims, num_samples, strict=bool(num_samples)) if pair[0] > 0]
        if not there:
            return claims
        median, of = sorted(there, key=lambda pair: pair[0] / pair[1])[(len(there) - 1) // 2]
        fair = []
        for rank, (claim, size) in enumerate(zip(claims, num_samples, strict=True)):
            most = max(1, _MORE * median * size // of)
            fair.append(min(claim, most))
            self._num_above[rank] = self._num_above[rank] + 1 if claim > most else 0
            if self._num_above[rank] == _STEPS_ABOVE:
                self._tell(
                    rank,
                    f"counts more than {_MORE} times as much a sample as the median rank, "
                    f"{_STEPS_ABOVE} steps in a row ({claim} of {size} samples, and {median} of "
                    f"{of}): in a robust rule it is taken for {most}",
                )
        self._fair = tuple(fair)
        return self._fair
