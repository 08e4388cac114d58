"""Sample stores in a simulated cluster: the real orders, assignments, keepers and decisions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.keeping import ReadCosts, choose_keeping
from loft_hvd.balance.latency import Held, StepModel
from loft_hvd.balance.plan import StepSizes
from loft_hvd.data.assign import Homes, assign
from loft_hvd.data.draws import Draw, EpochSettings
from loft_hvd.simulate.build import build_placement
from loft_hvd.simulate.cluster import Served
from loft_hvd.simulate.scenario import Scenario
from loft_hvd.store.keepers import NOBODY, Claims, Drawn, Keepers, with_keepers

__all__ = ["Stores"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Stores:
    """The stores of all ranks, in one process: they agree without telling each other anything.

    Args:
        scenario: its ``cache_samples`` are the budgets.
        model: the true model, for what a read from peer and source takes.
    """

    def __init__(self, scenario: Scenario, model: StepModel) -> None:
        self._scenario, self._model = scenario, model
        num_samples, world_size = scenario.num_samples, scenario.world_size
        self._base = build_placement(scenario)
        self._settings = EpochSettings(
            self._base, shuffle=True, seed=scenario.seed, drop_last=True, relaxed=False
        )
        self._per_epoch = num_samples // scenario.global_batch_size
        self._capacity = scenario.values("cache_samples").astype(np.int64)
        self._num_kept = np.zeros(world_size, np.int64)
        first = np.full(num_samples, NOBODY, np.int16)
        self._keepers = Keepers(first, np.zeros(num_samples, np.int16))
        self._keepers.live_at(self._base.at(world_size))
        self._keeping = choose_keeping(num_samples, [0] * world_size, ReadCosts())
        self._drawn: list[Drawn] = []
        self._read = np.zeros((2, 2))  # from peer and from source: samples, seconds
        self._costs = ReadCosts()
        link_s = scenario.sample_bytes / scenario.values("remote_bytes_per_s")
        self.peer_s: Floats = scenario.values("remote_latency_s") + link_s  # a sample, [world_size]
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        """Settle what the epoch before has left, and begin another one."""
        copies = np.array(self._keeping.copies, np.int64)
        for claims in self._keepers.claims(self._drawn):
            self._keepers.take(claims, self._fit(claims, copies))
        self._drawn = []
        costs = np.divide(
            self._read[:, 1],
            self._read[:, 0],
            where=self._read[:, 0] > 0,
            out=np.array([self._costs.peer_s, self._costs.source_s]),
        )
        self._costs = ReadCosts(*costs.tolist())
        self._read[:] = 0
        # As a store: what it has room for is only known once it keeps something.
        room = np.where(self._num_kept > 0, self._capacity - self._num_kept, 0)
        self._keeping = choose_keeping(self._keepers.num_unkept, room.tolist(), self._costs)
        self._keepers.begin(self._keeping.copies)
        adopts = np.array(self._keeping.of_a_step(self._per_epoch), np.int64)
        homes = with_keepers(self._base, self._keepers).at(self._scenario.world_size)
        first = self._keeping.comes_first
        self._homes: Homes = replace(homes, adopts=adopts, adopts_first=first)
        self._order = self._settings.order(epoch)
        self.epoch = epoch

    def _fit(self, claims: Claims, copies: Ints) -> npt.NDArray[np.bool_]:
        """Return which claims ranks had room for, in order; uses ``copies`` [world_size] up."""
        granted = np.zeros(len(claims.samples), bool)
        for rank in np.flatnonzero(np.bincount(claims.owners)).tolist():
            mine = np.flatnonzero(claims.owners == rank)
            is_copy = claims.is_copy[mine]
            wanted = ~is_copy | (np.cumsum(is_copy) <= copies[rank])
            fits = wanted & (np.cumsum(wanted) <= self._capacity[rank] - self._num_kept[rank])
            granted[mine] = fits
            self._num_kept[rank] += int(fits.sum())
            copies[rank] -= int((fits & is_copy).sum())
        return granted

    def serve(self, first: int, last: int, sizes: Ints) -> Served:
        """Read the samples of steps first..last-1 with one plan."""
        total, local, peer = self._scenario.global_batch_size, [], []
        sizes_told = tuple(sizes.tolist())
        for step in range(first, last):
            epoch, at = divmod(step, self._per_epoch)
            if epoch != self.epoch:
                self._begin(epoch)
            batch = self._order[at * total : (at + 1) * total]
            assignment = assign(batch, sizes, self._homes)
            owners = assignment.owners
            step_sizes = StepSizes(0, step, sizes_told, 0)
            draw = Draw(step_sizes, batch, assignment, (at + 1) * total)
            before = self._drawn[-1] if self._drawn else None
            self._drawn.append(self._keepers.drawn(draw, before))
            here = assignment.local.astype(np.float64)
            local.append(here)
            # What a rank has anyway, as on its disk, is local there, whether or not it is kept.
            is_local = self._homes.local.holders[self._homes.rows[batch], owners]
            is_peers = (self._keepers.first[batch] != NOBODY) & ~is_local
            peer.append(np.bincount(owners[is_peers], minlength=len(sizes)).astype(np.float64))
            self._note_costs(sizes - here - peer[-1], peer[-1])
        return Served(np.array(local), np.array(peer))

    def _note_costs(self, source: Floats, peer: Floats) -> None:
        none = np.zeros_like(source)
        source_s = self._model.fetch(none, source) - self._model.fetch(none, none)
        self._read += [[peer.sum(), peer @ self.peer_s], [source.sum(), source_s.sum()]]

    def held(self) -> Held:
        """Return what ranks keep in this epoch, as loaders tell a policy."""
        sets, num_samples = self._homes.local.holders, self._scenario.num_samples
        shares = np.bincount(self._homes.rows, minlength=len(sets)) @ sets / num_samples
        if self._keeping.comes_first:
            shares = np.maximum(shares - np.array(self._keeping.adopts) / num_samples, 0.0)
        size = self._scenario.sample_bytes
        return Held(tuple(shares.tolist()), num_samples, size, self._keeping)

    def model(self, model: StepModel) -> StepModel:
        """Return the model with what is kept now: of other samples some are at peers."""
        held = self.held()
        hits = np.array(held.shares) * self._scenario.global_batch_size
        elsewhere = max(1.0 - float(np.sum(held.shares)), 1e-9)
        unkept = min(self._keeping.num_unkept / held.num_samples / elsewhere, 1.0)
        return replace(
            model,
            hits=hits,
            hit_share=np.ones_like(hits),
            remote_s=unkept * model.remote_s + (1.0 - unkept) * self.peer_s,
            shared_s=unkept * model.shared_s,
        )
