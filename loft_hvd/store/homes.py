"""Homes that follow the plan: which rank keeps which sample, known on all ranks without asking.

A rank keeps what it computes, first come, and throws nothing away. Who computes what follows from
the seed, the epoch and the plans, which all ranks have: each draws every step for all ranks anyway.
So every rank notes who computed a sample, and knows what all others keep, up to the point where
their budget ended. That point, the room that is left, and a digest that shows that all noted the
same, are all that ranks tell each other, once an iteration. From it each works out the next
iteration's owners, which are those who keep, and what ranks should keep besides.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from loft_hvd.balance.keeping import Keeping, ReadCosts, choose_keeping
from loft_hvd.data.draws import Draw
from loft_hvd.store.keepers import Drawn, Keepers, Ranks, grant
from loft_hvd.transport.agreement import odd_ones
from loft_hvd.transport.base import Channel

__all__ = ["KeptHomes"]

_logger = logging.getLogger(__name__)
_Bools = npt.NDArray[np.bool_]


class KeptHomes:
    """The keepers of every sample, and what ranks should keep next, equal on all ranks.

    Args:
        first, second: as of ``Keepers``; changed in place, between iterations.
        channel: the ranks.
    """

    def __init__(self, first: Ranks, second: Ranks, channel: Channel) -> None:
        self.keepers = Keepers(first, second)
        self._channel = channel
        self._drawn: list[Drawn] = []
        self._digest = 0
        self.counts: list[list[int]] = []  # that each rank gave ``settle`` last, [world_size, k]
        self._room = [0] * channel.world_size
        self.choose(ReadCosts())

    def note(self, draw: Draw) -> None:
        """Note who computes the samples of a step that was drawn; ranks may draw ahead."""
        before = self._drawn[-1] if self._drawn else None
        self._drawn.append(self.keepers.drawn(draw, before))

    def settle(
        self, *, first_step: int, held: _Bools, room: int = 0, counts: Sequence[int] = ()
    ) -> None:
        """Agree on who keeps what after the steps before ``first_step``; all ranks call it.

        ``held`` says which samples this rank keeps, [num_samples], and ``room`` how many more it
        could. ``counts`` are told to all.
        """
        # How far ranks drew ahead differs; what was trained does not.
        done = [each for each in self._drawn if each.step < first_step]
        self._drawn = []
        digests = np.array([each.digest for each in done], np.uint32)
        self._digest = zlib.crc32(digests.tobytes(), self._digest)
        new, copies = self._own_claims(done, held)
        # A shelf that fills keeps the first of what it is given. Where it does not, as when it was
        # full before, or loader processes overtook one another, ranks tell what they keep.
        is_prefix = all(bool(kept[: kept.sum()].all()) for kept in (new, copies))
        row = [self._digest, int(new.sum()), int(copies.sum()), int(is_prefix), room, *counts]
        told = self._channel.allgather_rows(torch.tensor(row))
        self.counts = told[:, 5:].tolist()
        noted = told[:, 0].tolist()
        if len(set(noted)) > 1:
            self._start_over(noted)
        if len(set(noted)) > 1 or not bool(told[:, 3].all()):
            self.announce(held)
        else:
            left = told[:, 1].numpy().copy(), told[:, 2].numpy().copy()  # [world_size] each
            for claims in self.keepers.claims(done):
                self.keepers.take(claims, grant(claims, *left))
        self._room = told[:, 4].tolist()

    def choose(self, costs: ReadCosts) -> Keeping:
        """Decide what ranks keep besides, from what they told; the same on all ranks."""
        self.keeping = choose_keeping(self.keepers.num_unkept, self._room, costs)
        self.keepers.begin(self.keeping.copies)
        return self.keeping

    def _own_claims(self, done: Sequence[Drawn], held: _Bools) -> tuple[_Bools, _Bools]:
        """Return which of this rank's claims it keeps, in order: the new ones, and the copies."""
        rank = self._channel.rank
        new, copies = [np.zeros(0, bool)], [np.zeros(0, bool)]
        for samples, owners, is_copy in self.keepers.claims(done):
            new.append(held[samples[(owners == rank) & ~is_copy]])
            copies.append(held[samples[(owners == rank) & is_copy]])
        return np.concatenate(new), np.concatenate(copies)

    def _start_over(self, digests: list[float]) -> None:
        """Forget all keepers, on all ranks alike: a rank that noted another would lose samples."""
        self.keepers.forget()
        self._digest = 0
        _logger.warning(
            "ranks %s noted other owners of samples than the rest; all ranks tell what they keep, "
            "and go on from there",
            odd_ones(digests),
        )

    def announce(self, held: _Bools) -> None:
        """Tell all ranks what this one keeps, such as on disk from an earlier run."""
        count = self._channel.sub("held").allgather_rows(torch.tensor([int(held.sum())]))
        if not bool(count.any()):
            self.keepers.forget()
            return
        bits = torch.from_numpy(np.packbits(held))
        rows = self._channel.sub("bits").allgather_rows(bits).numpy()  # [world_size, samples / 8]
        self.keepers.read(_masks(rows, len(held)))


def _masks(rows: npt.NDArray[np.uint8], num_samples: int) -> Iterator[tuple[int, _Bools]]:
    for rank in reversed(range(len(rows))):
        yield rank, np.unpackbits(rows[rank], count=num_samples).astype(bool)
