"""Which rank sent gradients that are not finite into a mean, and of which parameter first.

A mean takes one rank's NaN to all, and after the step every model has it: nobody can say any more
where it came from. So each rank adds up each of its buckets before they are sent, and where the sum
is not finite makes the bucket's first value NaN. It is NaN on every rank once the mean is back: to
look at one value a bucket costs no message. Only then ranks tell each other whose it was, before
the optimizer steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from loft_hvd.pipeline.buckets import Bucket, Slot
from loft_hvd.pipeline.scalers import is_loss_scaled
from loft_hvd.pipeline.suspicion.report import NotFinite
from loft_hvd.transport.base import Channel

__all__ = ["FiniteWatch"]

_logger = logging.getLogger(__name__)
# Steps in a row after which it is told under a GradScaler, too. Bound from its start: a scale of
# 2**16 that is halved in each of them has become 2**-4, which makes nothing overflow.
_SCALED_STEPS = 20
_MOST_KEPT = 8  # for the report; a choice


class FiniteWatch:
    """Looks at what ranks send into means; every rank makes and asks it alike.

    Where the script scales its loss, steps that overflow are skipped, now and then, and nobody's
    fault.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel.sub("finite")
        # Of the step under way: the parameter of each bucket's first value, and this rank's slots
        # with values that are not finite, by bucket; whether the first of them is NaN.
        self._firsts: dict[int, int] = {}
        self._own: dict[int, tuple[int, bool]] = {}
        self._num_found = self._num_in_row = 0
        self.found: tuple[NotFinite, ...] = ()  # the first ones

    # In the engine's thread.

    def packed(self, bucket: Bucket, values: Tensor, *, num_owners: int = 1) -> None:
        """Look at what this rank is about to send of a bucket, [numel], and mark it if need be.

        The bucket's slots are in the order of the backward pass. Where each of ``num_owners`` keeps
        the mean of its shard to itself, each shard is marked.
        """
        slot = next((slot for slot in bucket.slots if slot.numel and slot.offset == 0), None)
        if slot is None:
            return
        self._firsts[bucket.index] = slot.parameter
        # By a sum, which 16 bits would not hold: of 25 M values it takes 2.6 ms, and
        # isfinite().all() 106 (one thread of 2 cores, 2026-11-29).
        wide = torch.float32 if values.itemsize < 4 else None
        if bool(values.sum(dtype=wide).isfinite()):
            return
        found = _first_not_finite(bucket.slots, values)
        if found is not None:  # else finite values overflow by adding up
            self._own[bucket.index] = found
            values.view(num_owners, -1)[:, 0] = torch.nan

    # In the user's thread.

    @property
    def parameters(self) -> list[int]:
        """Those whose first value is NaN, after the exchange, where their bucket was marked."""
        return list(self._firsts.values())

    def step_reduced(
        self, step: int, results: Sequence[Tensor | None], names: Sequence[str]
    ) -> NotFinite | None:
        """Look at the gradients of ``parameters`` after the exchange; rank 0 warns.

        Returns:
            On rank 0 what it has told, if there was something to tell.
        """
        own, self._own = self._own, {}
        self._firsts.clear()
        if not any(map(_is_marked, results)):
            self._num_in_row = 0
            return None
        # Buckets are numbered in the order of the backward pass.
        row = own[min(own)] if own else (-1, False)
        table = self._channel.allgather_rows(torch.tensor([int(each) for each in row])).tolist()
        ranks = tuple(rank for rank, (parameter, _) in enumerate(table) if parameter >= 0)
        if not ranks:  # it is NaN only now, as where infinities of two ranks are added up
            return None
        parameter, is_nan = table[ranks[0]]
        found = NotFinite(step, ranks, len(table), names[parameter], bool(is_nan))
        self._num_found += 1
        self._num_in_row += 1
        self.found = (*self.found, found)[:_MOST_KEPT]
        if self._channel.rank > 0 or not self._is_to_tell(found):
            return None
        _logger.warning("%s", found)
        return found

    def _is_to_tell(self, found: NotFinite) -> bool:
        # Once models have it all ranks send it, step after step: that is no news.
        is_news = self._num_found == 1 or len(found.ranks) < found.world_size
        is_due = is_news and self._num_found & (self._num_found - 1) == 0  # 1, 2, 4, 8, ...
        is_lasting = self._num_in_row == _SCALED_STEPS
        if not (is_due or is_lasting):
            return False
        return is_lasting if is_loss_scaled() else is_due


def _first_not_finite(slots: Sequence[Slot], values: Tensor) -> tuple[int, bool] | None:
    """Return the first parameter with values that are not finite, and whether one is NaN."""
    for slot in slots:
        own = values[slot.offset : slot.offset + slot.numel]
        if not bool(own.isfinite().all()):
            return slot.parameter, bool(own.isnan().any())
    return None


def _is_marked(result: Tensor | None) -> bool:
    """Say whether the first value is NaN, of a sparse gradient any."""
    if result is None:
        return False
    if result.layout == torch.sparse_coo:
        return bool(result._values().isnan().any())
    return bool(result[(0,) * result.dim()].isnan())
