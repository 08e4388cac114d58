"""A sample store without samples: what a rank keeps, by the real homes and the real sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loft_hvd.balance.keeping import Keeping, ReadCosts
from loft_hvd.data.draws import Draw, EpochSettings
from loft_hvd.data.placement import HomeSet, Placement
from loft_hvd.data.sampler import GlobalBatches
from loft_hvd.store.homes import KeptHomes
from loft_hvd.store.keepers import NOBODY, with_keepers
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport
from tests.support.plans import FakePlans

SOURCE = HomeSet(shared=("source",))
UNKNOWN = ReadCosts()  # nothing was measured


class Cache:
    """What a rank keeps, as a store does it.

    Args:
        num_samples: of the data set.
        budget: samples that it can keep.
        transport: the ranks.
        costs: what ranks have measured.
    """

    sample_bytes = 0.0

    def __init__(
        self,
        num_samples: int,
        budget: int,
        transport: LocalTransport,
        costs: ReadCosts = UNKNOWN,
    ) -> None:
        self.held = np.zeros(num_samples, bool)
        self.budget, self.costs = budget, costs
        self.rank = transport.rank
        self.first = np.full(num_samples, NOBODY, np.int16)
        self.copies = np.zeros(num_samples, np.int16)  # rank that has a copy, plus 1
        self.homes = KeptHomes(self.first, self.copies, Channel(transport, "test"))
        self.num_hits = self.num_source = self.copies_left = 0
        self.next_step = 0
        self.is_home = np.zeros(num_samples, bool)
        self.base = Placement(np.zeros(num_samples, np.int32), (SOURCE,))

    def placement_after(
        self, given: Placement | None, *, first_step: int, world_size: int
    ) -> Placement:
        if given is not None and given is not self.base:
            self.base, homes = given, given.at(world_size)
            self.homes.keepers.live_at(homes)
            self.is_home = homes.local.holders[homes.rows, self.rank]
        room = self.budget if self.held.any() else 0
        self.homes.settle(first_step=first_step, held=self.held, room=room)
        self.copies_left = self.homes.choose(self.costs).copies[self.rank]
        return with_keepers(self.base, self.homes.keepers)

    @property
    def keeping(self) -> Keeping:
        return self.homes.keeping

    def reads(self) -> tuple[()]:
        return ()

    def note(self, draw: Draw) -> None:
        self.homes.note(draw)

    def read(self, samples: Sequence[int]) -> None:
        """Read a batch: keep what there is room for, in order."""
        for sample in samples:
            self.num_hits += int(self.held[sample] or self.is_home[sample])
            if self.is_home[sample]:
                continue
            is_copy = self.first[sample] not in (NOBODY, self.rank)
            self.num_source += int(not self.held[sample] and not is_copy)
            if self.held[sample] or not self.budget:
                continue
            if is_copy and (self.copies_left == 0 or self.copies[sample]):
                continue
            self.held[sample] = True
            self.budget -= 1
            self.copies_left -= int(is_copy)


def train(
    cache: Cache,
    sizes: Sequence[int],
    *,
    num_epochs: int,
    first_epoch: int = 0,
    ahead: int = 0,
    given: Placement | None = None,
) -> list[int]:
    """Draw epochs, up to ``ahead`` steps ahead; return the hits of each."""
    plans: Any = FakePlans(sizes, rank=cache.rank, next_step=cache.next_step)
    settings = EpochSettings(Placement.replicated(len(cache.held)), True, 3, False, False)
    batches = GlobalBatches(settings, plans, keeper=cache, given=given)
    hits = []
    for epoch in range(first_epoch, first_epoch + num_epochs):
        cache.num_hits = cache.num_source = 0
        batches.set_epoch(epoch)
        _, draws = batches.start(first_step=plans.next_step)
        waiting = []
        for draw in draws:
            waiting.append(draw)
            if len(waiting) > ahead:
                cache.read(waiting.pop(0).indices(cache.rank, dummy_size=1, homes=batches.homes))
                plans.next_step += 1
        for draw in waiting:
            cache.read(draw.indices(cache.rank, dummy_size=1, homes=batches.homes))
            plans.next_step += 1
        hits.append(cache.num_hits)
    cache.next_step = plans.next_step
    return hits
