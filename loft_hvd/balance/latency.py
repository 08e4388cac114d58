"""What a step costs each rank: fetch, compute, and how far the two overlap.

Per rank, with ``x`` samples of which ``local(x)`` are found on the rank's own store or cache::

    local(x)  = min(hit_share * x, hits)            remote(x) = x - local(x)
    fetch(x)   = fetch_fixed_s + local_s * local(x) + remote_s * remote(x) + shared_s * queued(x)
    compute(x) = max(plateau_s, compute_fixed_s + compute_s * x)
    time(x)    = max(fetch, compute) + (1 - overlap) * min(fetch, compute)

``overlap`` is 0 for a serial loader and 1 in the steady state of a prefetching one. A plateau of 0
is a CPU; above 0 it is a device that costs the same until it is saturated.

``queued`` is the queue at a source that several ranks share (one NFS server, a node's NIC). Served
fairly, a request for r samples is finished when every sharing rank has got min(r, its own)
samples, so ``queued_i = sum_j min(remote_i, remote_j)``. It couples the ranks: a plan that fetches
less on one of them is faster for all. Everything else is separable and piecewise linear, which is
what the search lives on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.curves import Curves
from loft_hvd.errors import ArgumentError

__all__ = ["StepModel", "queued_samples"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_TERMS = ("source", "aggregate_s", "is_coupled")


def queued_samples(remote: Floats, source: Ints) -> tuple[Floats, Floats]:
    """Return how long the queue of a shared source is for each rank, and how fast it grows.

    Args:
        remote: samples each rank fetches, [..., world_size].
        source: number of the shared source of each rank, [world_size]; -1 for none.

    Returns:
        ``queued``, samples served before the rank is done, [..., world_size], 0 without a source;
        ``sharing``, ranks that are still fetching when it is done (itself included), the slope of
        ``queued`` in the rank's own ``remote``.
    """
    shape, num_ranks = remote.shape, remote.shape[-1]
    homes = np.broadcast_to(source, shape)
    order = np.lexsort((remote, homes), axis=-1)
    rows = np.arange(remote.size // max(num_ranks, 1)).reshape(*shape[:-1], 1)
    order = order + num_ranks * rows  # of the flattened arrays
    ordered, home = remote.ravel()[order], homes.ravel()[order]
    position = np.arange(num_ranks)
    is_start = np.ones(shape, dtype=bool)
    is_start[..., 1:] = home[..., 1:] != home[..., :-1]
    start = np.maximum.accumulate(np.where(is_start, position, 0), axis=-1)
    members = np.bincount(source + 1)[home + 1]  # ranks at the same source
    total = np.cumsum(ordered, axis=-1)
    before = (total - ordered).ravel()[start + num_ranks * rows]
    queued = total - before + (members - (position - start) - 1) * ordered
    is_start[..., 1:] |= ordered[..., 1:] != ordered[..., :-1]  # ties count as still fetching
    run = np.maximum.accumulate(np.where(is_start, position, 0), axis=-1)
    flat_queued, flat_sharing = np.empty((2, remote.size))
    flat_queued[order] = np.where(home >= 0, queued, 0.0)
    flat_sharing[order] = members - (run - start)
    return flat_queued.reshape(shape), flat_sharing.reshape(shape)


@dataclass(frozen=True)
class StepModel:
    """The latency model of every rank; each field but the last is an array [world_size].

    Attributes:
        fetch_fixed_s: fetch time that does not depend on the batch, seconds.
        local_s: seconds for a sample from the rank's own store or cache.
        remote_s: seconds for a sample from elsewhere, over a way of the rank's own.
        shared_s: seconds for a sample at the shared source when nobody else asks.
        hit_share: largest share of a batch that can be local, 1 with a locality-aware sampler.
        hits: largest number of local samples in one global batch; may be infinite.
        compute_fixed_s: compute time that does not depend on the batch, seconds.
        compute_s: seconds of compute for a sample.
        plateau_s: least compute time, seconds; 0 for a linear device.
        overlap: share of the shorter of fetch and compute that the longer one hides, in [0, 1].
        source: number of the shared source, int64, -1 for none.
        aggregate_s: what the step adds after the slowest rank, seconds (a scalar).
    """

    fetch_fixed_s: Floats
    local_s: Floats
    remote_s: Floats
    shared_s: Floats
    hit_share: Floats
    hits: Floats
    compute_fixed_s: Floats
    compute_s: Floats
    plateau_s: Floats
    overlap: Floats
    source: Ints
    aggregate_s: float = 0.0
    is_coupled: bool = field(init=False)

    def __post_init__(self) -> None:
        num_ranks = len(self.source)
        names = [item.name for item in fields(self) if item.name not in _NO_TERMS]
        terms = [getattr(self, name) for name in names]
        for name, values in zip(names, terms, strict=True):
            if values.shape != (num_ranks,):
                raise ArgumentError(
                    f"StepModel.{name}: needs {num_ranks} numbers, one a rank, but got {values}"
                )
        is_wrong = ~(np.array(terms) >= 0)
        is_wrong[names.index("compute_fixed_s")] = False  # a saturated device may have any sign
        if is_wrong.any():
            name, values = next(
                (name, terms[k]) for k, name in enumerate(names) if is_wrong[k].any()
            )
            raise ArgumentError(f"StepModel.{name}: needs numbers >= 0, but got {values}")
        if (self.overlap > 1).any() or (self.hit_share > 1).any():
            raise ArgumentError(
                f"StepModel: overlap {self.overlap} and hit_share {self.hit_share} must be <= 1"
            )
        coupled = bool(((self.source >= 0) & (self.shared_s > 0)).any())
        object.__setattr__(self, "is_coupled", coupled)

    @classmethod
    def build(
        cls, world_size: int, *, aggregate_s: float = 0.0, **terms: npt.ArrayLike
    ) -> StepModel:
        """Make a model from the terms that are not zero; a scalar holds for every rank.

        Without ``hit_share`` and ``hits`` every sample is local.
        """
        source = np.broadcast_to(np.asarray(terms.pop("source", -1), dtype=np.int64), world_size)
        names = {item.name for item in fields(cls)} - {*_NO_TERMS}
        unknown = sorted(set(terms) - names)
        if unknown:
            raise ArgumentError(f"StepModel.build: no term {unknown}; terms are {sorted(names)}")
        defaults = {"hit_share": 1.0, "hits": np.inf}
        arrays = {
            name: np.broadcast_to(
                np.asarray(terms.get(name, defaults.get(name, 0.0)), dtype=np.float64), world_size
            )
            for name in names
        }
        return cls(**arrays, source=source, aggregate_s=aggregate_s)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.source)

    def local(self, sizes: Floats) -> Floats:
        """Return the expected local samples of batches ``sizes``, both [..., world_size]."""
        return np.minimum(self.hit_share * sizes, self.hits)

    def fetch(self, local: Floats, remote: Floats) -> Floats:
        """Return fetch seconds for these counts, all [..., world_size]."""
        seconds = self.fetch_fixed_s + self.local_s * local + self.remote_s * remote
        if self.is_coupled:
            seconds = seconds + self.shared_s * queued_samples(remote, self.source)[0]
        return seconds

    def compute(self, sizes: Floats) -> Floats:
        """Return compute seconds for batches ``sizes``, both [..., world_size]."""
        return np.maximum(self.plateau_s, self.compute_fixed_s + self.compute_s * sizes)

    def combine(self, fetch: Floats, compute: Floats) -> Floats:
        """Return what the rank is busy for when ``fetch`` and ``compute`` seconds overlap."""
        longer, shorter = np.maximum(fetch, compute), np.minimum(fetch, compute)
        return longer + (1.0 - self.overlap) * shorter

    def times(self, sizes: npt.ArrayLike) -> Floats:
        """Return busy seconds of each rank for batches ``sizes``, both [..., world_size]."""
        batch = np.asarray(sizes, dtype=np.float64)
        local = self.local(batch)
        return self.combine(self.fetch(local, batch - local), self.compute(batch))

    def step_s(self, sizes: npt.ArrayLike) -> float:
        """Return the seconds of a step: the slowest rank, then the aggregation."""
        return float(self.times(sizes).max()) + self.aggregate_s

    def without_sharing(self, sizes: npt.ArrayLike) -> StepModel:
        """Return the separable model that touches this one at ``sizes`` [world_size].

        The queue of a shared source becomes its tangent: a fixed part and a part for each of the
        rank's own remote samples.
        """
        if not self.is_coupled:
            return self
        batch = np.asarray(sizes, dtype=np.float64)
        remote = batch - self.local(batch)
        queued, sharing = queued_samples(remote, self.source)
        per_sample = np.where(self.source >= 0, self.shared_s * sharing, 0.0)
        rest = np.maximum(self.shared_s * queued - per_sample * remote, 0.0)
        return replace(
            self,
            fetch_fixed_s=self.fetch_fixed_s + rest,
            remote_s=self.remote_s + per_sample,
            shared_s=np.zeros_like(self.shared_s),
        )

    def curves(self, low: Floats, high: Floats) -> Curves:
        """Tabulate the separable model on [low, high], each [world_size], as straight pieces.

        Fetch bends where the local samples run out, compute where the device saturates, and the
        time where fetch and compute cross; between those seven points it is straight.
        """
        span = np.maximum(high, low)
        with np.errstate(divide="ignore", invalid="ignore"):
            runs_out = np.where(self.hit_share > 0, self.hits / self.hit_share, np.inf)
            saturates = (self.plateau_s - self.compute_fixed_s) / self.compute_s
        first, second = (
            np.clip(np.nan_to_num(bend, nan=0.0), low, span) for bend in (runs_out, saturates)
        )
        corners = np.stack(
            [low, np.minimum(first, second), np.maximum(first, second), span]
        )  # [4, world_size], as are their times
        local = self.local(corners)
        fetch, compute = self.fetch(local, corners - local), self.compute(corners)
        lead = fetch - compute  # straight between corners
        crosses = lead[:-1] * lead[1:] < 0
        ratio = np.where(crosses, lead[:-1] / np.where(crosses, lead[:-1] - lead[1:], 1.0), 0.0)
        knots, times = np.empty((2, 7, self.world_size))
        knots[0::2], times[0::2] = corners, self.combine(fetch, compute)
        knots[1::2] = corners[:-1] + ratio * (corners[1:] - corners[:-1])
        met = fetch[:-1] + ratio * (fetch[1:] - fetch[:-1])  # where the two cross they are equal
        times[1::2] = np.where(crosses, (2.0 - self.overlap) * met, times[0:-1:2])
        return Curves(knots.T, times.T)
