"""Whether what is kept is what the data set has: a few of the samples kept are read again.

Let c of M samples that earlier runs have kept be others by now. Each is looked at once, by the rank
that reads it first, with the probability 300 / M (all, where M is less). That none of them is found
has the probability (1 - 300 / M)^c: for c = 5 % of M less than e^-15 = 3e-7, whatever M is, and for
1 % less than 5 %. It costs 300 reads of the data set, of all ranks together.

What is kept may also grow old while a run goes on. So of the other samples a trickle is looked at,
again and again: 300 an epoch, and 1 % at most, so that little is read of few and large samples.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from loft_hvd.store.samples import encode_sample
from loft_hvd.store.shelf import Shelf, checksum

__all__ = ["Checks"]

_logger = logging.getLogger(__name__)
_NUM_CHECKED = 300  # of all ranks, an epoch: see above
_MOST_SHARE = 0.01  # a choice, of what this run has kept itself
# How often a sample that differs is read again, to tell a change from a draw: of a coin's flips all
# are alike once in 65,536 times.
_NUM_DRAWS = 16


class Checks:
    """Compares samples that were kept with those of the data set.

    Args:
        read: reads samples from the data set, by their numbers.
        shelf: of this rank, which knows which samples earlier runs have kept.
        rank: this one, for what is said.
    """

    def __init__(
        self, read: Callable[[Sequence[int]], Sequence[Any]], shelf: Shelf, *, rank: int
    ) -> None:
        self._read, self._shelf, self._rank = read, shelf, rank
        num_old = int(np.count_nonzero(shelf.is_of_earlier_run))
        self._old_rate = min(_NUM_CHECKED / max(num_old, 1), 1.0)
        self._rate = min(_NUM_CHECKED / max(shelf.num_samples, 1), _MOST_SHARE)

    def chosen(self, numbers: Sequence[int]) -> list[int]:
        """Return which of some samples that are read are to be looked at, by lot."""
        return [] if self._shelf.is_unchecked else [each for each in numbers if self._is_due(each)]

    def _is_due(self, number: int) -> bool:
        is_old = self._shelf.is_of_earlier_run
        rate = self._rate
        if is_old[number]:
            rate, is_old[number] = self._old_rate, False
        # Not by a generator: loader processes that are forked would draw the same numbers.
        return secrets.randbits(32) < rate * (1 << 32)

    def find_changed(self, digests: Mapping[int, int]) -> int | None:
        """Read samples again; return one that has changed since its checksum was taken, if any.

        Nothing raises: where the data set cannot be read, or gives other bytes at each read, a
        warning says so once, and nothing is compared from then on.
        """
        try:
            for number, found in zip(digests, self._digests(list(digests)), strict=True):
                if found != digests[number]:
                    return None if self._is_drawn(number, found) else number
        except Exception as error:
            if self._shelf.end_checks():
                _logger.warning(
                    "samples %s cannot be read from the data set again (%r): what rank %d keeps is "
                    "read on, and compared no more",
                    list(digests)[:3], error, self._rank,
                )  # fmt: skip
        return None

    def _digests(self, numbers: Sequence[int]) -> list[int]:
        return [checksum(encode_sample(sample)) for sample in self._read(numbers)]

    def _is_drawn(self, number: int, found: int) -> bool:
        """Whether a sample is another one each time that it is read; says so."""
        if all(self._digests([number]) == [found] for _ in range(_NUM_DRAWS)):
            return False
        if self._shelf.end_checks():
            _logger.warning(
                "the data set gives other bytes each time that sample %d is read: rank %d keeps "
                "one draw of each sample, and compares no more. What is random belongs into "
                "transform=, or each epoch has the same draw",
                number, self._rank,
            )  # fmt: skip
        return True
