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
from dataclasses import replace

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
_Ints = npt.NDArray[np.int64]


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
        self._drawn: list[tuple[int, Order, _Ints]] = []  # step, samples, who computes each
        self._digest = 0

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step that was drawn; ranks may draw ahead."""
        self._drawn.append((draw.step_sizes.step, draw.batch, draw.assignment.owners))

    def settle(self, *, first_step: int, held: npt.NDArray[np.bool_]) -> None:
        """Agree on who keeps what after the steps before ``first_step``; all ranks call it.

        ``held`` says which samples this rank keeps, [num_samples].
        """
        # How far ranks drew ahead differs; what was trained does not.
        done = [each for each in self._drawn if each[0] < first_step]
        self._drawn = []
        samples, owners = self._claims(done)
        mine = held[samples[owners == self._channel.rank]]
        num_kept = int(mine.sum())
        # A shelf that fills keeps the first of what it is given. Where it does not, as when it was
        # full before, or loader processes overtook one another, ranks tell what they keep.
        is_prefix = bool(mine[:num_kept].all())
        row = torch.tensor([self._digest, num_kept, int(is_prefix)])
        told = self._channel.allgather_rows(row)
        digests = told[:, 0].tolist()
        if len(set(digests)) > 1:
            self._start_over(digests)
        if len(set(digests)) > 1 or not bool(told[:, 2].all()):
            self.announce(held)
            return
        for rank, count in enumerate(told[:, 1].tolist()):
            self.keepers[samples[owners == rank][:count]] = rank

    def _claims(self, done: list[tuple[int, Order, _Ints]]) -> tuple[Order, _Ints]:
        """Return the samples that nobody kept before, in order, and who computed each."""
        if not done:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        samples = np.concatenate([batch for _, batch, _ in done])
        owners = np.concatenate([who for _, _, who in done])
        self._digest = zlib.crc32(owners.tobytes(), zlib.crc32(samples.tobytes(), self._digest))
        is_new = self.keepers[samples] == NOBODY
        samples, owners = samples[is_new], owners[is_new]
        _, first = np.unique(samples, return_index=True)  # two epochs may lie in one iteration
        first.sort()
        return samples[first], owners[first]

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
    keys = placement.groups.astype(np.int64) * (num_ranks + 1) + (keepers.astype(np.int64) + 1)
    found, groups = np.unique(keys, return_inverse=True)
    sets = []
    for key in found.tolist():
        home, keeper = placement.home_sets[key // (num_ranks + 1)], key % (num_ranks + 1) - 1
        ranks = home.ranks if keeper == NOBODY else tuple(sorted({*home.ranks, keeper}))
        sets.append(HomeSet(ranks, home.nodes, home.shared, is_everywhere=home.is_everywhere))
    return replace(placement, groups=groups.reshape(-1).astype(np.int32), home_sets=tuple(sets))
