"""Homes that follow the plan: which rank keeps which sample, known on all ranks without asking.

A rank keeps what it computes, first come, and throws nothing away. Who computes what follows from
the seed, the epoch and the plans, which all ranks have: each draws every step for all ranks anyway.
So every rank notes who computed a sample first, and knows what all others keep, up to the point
where their budget ended. That point, and a digest that shows that all noted the same, are all that
ranks tell each other, once an iteration. The next iteration's owners are those who keep.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.data.draws import Draw, Order
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.transport.agreement import odd_ones
from loft_hvd.transport.base import Channel

__all__ = ["KeptHomes", "with_keepers"]

_logger = logging.getLogger(__name__)
NOBODY = -1
_Ranks = npt.NDArray[np.int16]
_BLOCK = 1 << 18  # samples worked on at a time: a megabyte or two, which a second-level cache holds
_MANY_KEYS = 1 << 24  # pairs of homes and keepers; more take more memory than sorting does


class _Drawn(NamedTuple):
    """A step that was drawn."""

    step: int
    samples: Order
    owners: _Ranks  # who computes each
    position: int  # samples of the epoch up to its end
    follows: bool  # it begins where the one noted before it ended


class KeptHomes:
    """The first keeper of every sample, equal on all ranks.

    Args:
        keepers: rank that keeps each sample, [num_samples], int16, ``NOBODY`` where none does;
            changed in place, between iterations.
        channel: the ranks.
    """

    def __init__(self, keepers: npt.NDArray[np.int16], channel: Channel) -> None:
        self.keepers = keepers
        self._channel = channel
        self._drawn: list[_Drawn] = []
        self._digest = 0
        self.counts: list[list[int]] = []  # that each rank gave ``settle`` last, [world_size, k]

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step that was drawn; ranks may draw ahead."""
        begin = draw.position - len(draw.batch)
        follows = bool(self._drawn) and begin == self._drawn[-1].position
        owners = draw.assignment.owners.astype(np.int16)  # a quarter: they are kept for an epoch
        step = draw.step_sizes.step
        self._drawn.append(_Drawn(step, draw.batch, owners, draw.position, follows))

    def settle(
        self, *, first_step: int, held: npt.NDArray[np.bool_], counts: Sequence[int] = ()
    ) -> None:
        """Agree on who keeps what after the steps before ``first_step``; all ranks call it.

        ``held`` says which samples this rank keeps, [num_samples]. ``counts`` are told to all.
        """
        # How far ranks drew ahead differs; what was trained does not.
        done = [each for each in self._drawn if each.step < first_step]
        self._drawn = []
        for each in done:
            digest = zlib.crc32(each.samples.tobytes(), self._digest)
            self._digest = zlib.crc32(each.owners.tobytes(), digest)
        rank = self._channel.rank
        mine = [held[samples[owners == rank]] for samples, owners in self._claims(done)]
        kept = np.concatenate([np.zeros(0, bool), *mine])
        num_kept = int(kept.sum())
        # A shelf that fills keeps the first of what it is given. Where it does not, as when it was
        # full before, or loader processes overtook one another, ranks tell what they keep.
        is_prefix = bool(kept[:num_kept].all())
        row = torch.tensor([self._digest, num_kept, int(is_prefix), *counts])
        told = self._channel.allgather_rows(row)
        self.counts = told[:, 3:].tolist()
        digests = told[:, 0].tolist()
        if len(set(digests)) > 1:
            self._start_over(digests)
        if len(set(digests)) > 1 or not bool(told[:, 2].all()):
            self.announce(held)
            return
        left = told[:, 1].numpy().copy()  # of what each rank keeps, [world_size]
        for samples, owners in self._claims(done):
            claimed = np.bincount(owners, minlength=len(left))
            is_kept = np.ones(len(samples), bool)
            for rank in np.flatnonzero(claimed > left).tolist():  # its budget ended here
                is_kept[np.flatnonzero(owners == rank)[left[rank] :]] = False
            self.keepers[samples[is_kept]] = owners[is_kept]
            left = np.maximum(left - claimed, 0)

    def _claims(self, done: Sequence[_Drawn]) -> Iterator[tuple[Order, _Ranks]]:
        """Yield the samples that nobody kept before, in order, and who computed each.

        Some steps at a time: of an epoch of many samples nothing is copied as a whole.
        """
        seen = np.zeros(len(self.keepers), bool)  # of two loaders, both may have had a sample
        begin = 0
        while begin < len(done):
            end, size = begin + 1, len(done[begin].samples)
            # Within steps that follow one another each sample comes once.
            while end < len(done) and done[end].follows and size < _BLOCK:
                size += len(done[end].samples)
                end += 1
            samples = np.concatenate([each.samples for each in done[begin:end]])
            owners = np.concatenate([each.owners for each in done[begin:end]])
            begin = end
            is_new = (self.keepers[samples] == NOBODY) & ~seen[samples]
            seen[samples] = True
            yield samples[is_new], owners[is_new]

    def _start_over(self, digests: list[float]) -> None:
        """Forget all keepers, on all ranks alike: a rank that noted another would lose samples."""
        self.keepers[:] = NOBODY
        self._digest = 0
        _logger.warning(
            "ranks %s noted other owners of samples than the rest; all ranks tell what they keep, "
            "and go on from there",
            odd_ones(digests),
        )

    def announce(self, held: npt.NDArray[np.bool_]) -> None:
        """Tell all ranks what this one keeps, such as on disk from an earlier run."""
        count = self._channel.sub("held").allgather_rows(torch.tensor([int(held.sum())]))
        if not bool(count.any()):
            self.keepers[:] = NOBODY
            return
        bits = torch.from_numpy(np.packbits(held))
        rows = self._channel.sub("bits").allgather_rows(bits).numpy()  # [world_size, samples / 8]
        keepers, still = np.full(len(held), NOBODY, np.int16), np.zeros(len(held), bool)
        for rank in reversed(range(len(rows))):  # of several the first, unless one is known
            mask = np.unpackbits(rows[rank], count=len(held)).astype(bool)
            keepers[mask] = rank
            still |= mask & (self.keepers == rank)
        self.keepers[:] = np.where(still, self.keepers, keepers)


def with_keepers(placement: Placement, keepers: npt.NDArray[np.int16]) -> Placement:
    """Return a placement in which samples are also where they are kept."""
    # Of 3 ranks, group 2 kept by nobody is 2 * 4 + 0, by rank 1 it is 2 * 4 + 2.
    num_ranks = int(keepers.max(initial=NOBODY)) + 1
    num_keys = len(placement.home_sets) * (num_ranks + 1)
    dtype = np.int32 if num_keys < 2**31 else np.int64
    keys: npt.NDArray[Any] = np.empty(len(keepers), dtype)
    found = np.zeros(num_keys, bool) if num_keys <= _MANY_KEYS else None
    for begin in range(0, len(keys), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        keys[part] = placement.groups[part].astype(dtype) * (num_ranks + 1)
        keys[part] += keepers[part] + np.int16(1)
        if found is not None:
            found[keys[part]] = True
    if found is None:
        used, groups = np.unique(keys, return_inverse=True)
        groups = groups.reshape(-1).astype(np.int32)
    else:
        used = np.flatnonzero(found)
        number = np.zeros(num_keys, np.int32)
        number[used] = np.arange(len(used))
        for begin in range(0, len(keys), _BLOCK):  # in place: there may be many millions
            keys[begin : begin + _BLOCK] = number[keys[begin : begin + _BLOCK]]
        groups = keys
    sets = []
    for key in used.tolist():
        home, keeper = placement.home_sets[key // (num_ranks + 1)], key % (num_ranks + 1) - 1
        ranks = home.ranks if keeper == NOBODY else tuple(sorted({*home.ranks, keeper}))
        sets.append(HomeSet(ranks, home.nodes, home.shared, is_everywhere=home.is_everywhere))
    return replace(placement, groups=np.asarray(groups, np.int32), home_sets=tuple(sets))
