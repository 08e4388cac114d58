"""What a step costs each rank: fetch, compute, and how far the two overlap.

Per rank, with ``x`` samples of which ``local(x)`` are found on the rank's own store or cache::

    local(x)  = min(hit_share * x, hits)            remote(x) = x - local(x)
    fetch(x)   = fetch_fixed_s + local_s * local(x) + remote_s * remote(x) + shared_s * queued(x)
    compute(x) = k * max(plateau_s, compute_fixed_s + compute_s * x / k),    k = ceil(x / pass_size)
    time(x)    = max(fetch, compute) + (1 - overlap) * min(fetch, compute)

``overlap`` is 0 for a serial loader and 1 in the steady state of a prefetching one. A plateau of 0
is a CPU; above 0 it is a device that costs the same until it is saturated. A batch of more than
``pass_size`` samples is computed in k micro-batches, and what each costs beside its samples comes k
times; without micro-batches k is 1.

``queued`` is the queue at a source that several ranks share (one NFS server, a node's NIC). Served
fairly, a request for r samples is finished when every sharing rank has got min(r, its own)
samples, so ``queued_i = sum_j min(remote_i, remote_j)``. It couples the ranks: a plan that fetches
less on one of them is faster for all. Everything else is separable and piecewise linear. ``Curves``
holds that as straight pieces, which the search inverts: how many samples fit under a target time?
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from loft_hvd.balance.keeping import Keeping
from loft_hvd.balance.plan import Floats, Ints
from loft_hvd.errors import ArgumentError

__all__ = ["Curves", "Held", "StepModel", "queued_samples", "typical_longest"]

_COMPUTE_TERMS = ("compute_fixed_s", "compute_s", "plateau_s")
_NO_TERMS = ("source", "aggregate_s", "is_coupled", "tables")
_POINTS = 96  # of an integral over time


def queued_samples(remote: Floats, source: Ints) -> tuple[Floats, Floats]:
    """Return how long the queue of a shared source is for each rank, and how fast it grows.

    Sorted by what they fetch, the ranks of a source are done one after the other, so one running
    sum serves them all. Three ranks at one source that fetch 3, 5 and 2 samples::

        sorted     2  3  5     ranks 2, 0, 1
        running    2  5 10     what those done so far have fetched
        queued     6  8 10     and as much as this rank for each one still fetching: 2 + 2 * 2, ...
        sharing    3  2  1     ranks still fetching, this one included

    ``sharing`` is the slope of ``queued`` in the rank's own samples.

    Args:
        remote: samples each rank fetches, [..., world_size], as what is returned.
        source: number of the shared source of each rank, [world_size]; -1 for none, which makes
            ``queued`` 0.
    """
    shape, num_ranks = remote.shape, remote.shape[-1]
    homes = np.broadcast_to(source, shape)
    order = np.lexsort((remote, homes), axis=-1)  # by source, then by samples
    # Indices into the flattened arrays: the search comes here often, and take_along_axis takes
    # forty times as long on eight ranks (measured with NumPy 2.4).
    rows = np.arange(remote.size // max(num_ranks, 1)).reshape(*shape[:-1], 1)  # [..., 1]
    order = order + num_ranks * rows  # [..., world_size], as all that follows
    ordered, home = remote.ravel()[order], homes.ravel()[order]
    position = np.arange(num_ranks)  # [world_size]
    is_start = np.ones(shape, dtype=bool)  # the first rank of its source
    is_start[..., 1:] = home[..., 1:] != home[..., :-1]
    start = np.maximum.accumulate(np.where(is_start, position, 0), axis=-1)  # its position
    members = np.bincount(source + 1)[home + 1]  # ranks at the same source
    total = np.cumsum(ordered, axis=-1)
    before = (total - ordered).ravel()[start + num_ranks * rows]  # fetched from other sources
    queued = total - before + (members - (position - start) - 1) * ordered
    # Ranks that fetch alike end together: each of them counts as still fetching when one is done.
    is_start[..., 1:] |= ordered[..., 1:] != ordered[..., :-1]
    run = np.maximum.accumulate(np.where(is_start, position, 0), axis=-1)
    flat_queued, flat_sharing = np.empty((2, remote.size))  # back in the order of the ranks
    flat_queued[order] = np.where(home >= 0, queued, 0.0)
    flat_sharing[order] = members - (run - start)
    return flat_queued.reshape(shape), flat_sharing.reshape(shape)


def count_passes(sizes: npt.ArrayLike, pass_size: Floats) -> Floats:
    """Return the backward passes of batches ``sizes``, [..., world_size] as ``pass_size``, >= 1."""
    return np.maximum(np.ceil(np.asarray(sizes, dtype=np.float64) / pass_size), 1.0)


@functools.lru_cache(maxsize=64)
def _standard(skew: float) -> tuple[float, float]:
    """Return what ``typical`` finds in times that are ``(exp(skew * normal) - 1) / skew``.

    That is the trimmed mean, and the square root of the variance that comes with it.
    """
    normal = [NormalDist().inv_cdf((i + 0.5) / 200) for i in range(40, 160)]  # those not dropped
    kept = _bent(np.array(normal), skew)
    ends = _bent(np.array([NormalDist().inv_cdf(0.2), NormalDist().inv_cdf(0.8)]), skew)
    drawn_in = np.concatenate([kept, np.repeat(ends, 40)])
    return float(kept.mean()), float(drawn_in.std() / 0.6)


def _bent(normal: Floats, skew: float) -> Floats:
    """Return quantiles of the times for those of the normal distribution (Tukey's g, 1977)."""
    return np.expm1(skew * normal) / skew if skew > 0 else normal


def typical_longest(mean_s: Floats, deviation_s: Floats, skew: float) -> tuple[float, Floats]:
    """Return what the longest of independent times usually is, and each one's chance to be it.

    Times are normal, bent by ``skew`` (Tukey's g): 0 is normal, 0.5 a log-normal distribution,
    1.1 has tails like those of a Pareto distribution of index 2.5. Their means and deviations
    [world_size] are those of ``interval.typical``, and so is the usual longest: its trimmed mean.
    The chances, [world_size], are also its derivatives by the means.

    Of the steps, ordered by the longest time, a fifth is dropped at either end. What is left lies
    between ``low``, below which some rank alone has a fifth of its times, and ``high``, beyond
    which all ranks together have no more; ``usual = low + integral of 1 - P(longest <= t)`` as seen
    among the kept, on 96 points.
    """
    centre, unit = _standard(skew)
    scale = np.maximum(deviation_s, 1e-4 * max(float(mean_s.max()), 1e-12)) / unit
    median = mean_s - centre * scale
    ends = (NormalDist().inv_cdf(0.2), NormalDist().inv_cdf(1.0 - 0.2 / len(mean_s)), 5.0)
    reach = _bent(np.array(ends), skew)
    low, high = float((median + reach[0] * scale).max()), float((median + reach[1] * scale).max())
    near = np.flatnonzero(median + reach[2] * scale > low)  # no other is ever the longest
    points = np.linspace(low, high, _POINTS)
    bent = (points[:, None] - median[near]) / scale[near]  # [points, near]
    stretch = np.maximum(1.0 + skew * bent, 1e-9)
    z = np.log(stretch) / skew if skew > 0 else bent
    # P(time <= t) by the logistic of a cubic: within 3e-4 of the normal distribution (Page 1977).
    cubic = 2.0 * np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)
    tail = np.exp(-np.abs(cubic))
    log_share = np.minimum(cubic, 0.0) - np.log1p(tail)
    all_below = np.exp(log_share.sum(axis=1))  # [points]
    of_kept = np.clip((all_below - 0.2) / 0.6, 0.0, 1.0)
    step = points[1] - points[0]
    value = low + step * float((1.0 - of_kept).sum() - 0.5 * (2.0 - of_kept[0] - of_kept[-1]))
    above = np.where(cubic < 0, 1.0, tail) / (1.0 + tail)  # 1 - P(time <= t)
    slope = 2.0 * np.sqrt(2.0 / np.pi) * (1.0 + 0.134145 * z**2) / (scale[near] * stretch)
    is_kept = (all_below > 0.2) & (all_below < 0.8)
    weight = ((all_below * is_kept)[:, None] * slope * above).sum(axis=0)
    chance = np.zeros(len(mean_s))
    chance[near] = weight / max(float(weight.sum()), 1e-300)
    return value, chance


@dataclass(frozen=True)
class Curves:
    """Time against batch size for each rank: a nondecreasing curve made of straight pieces."""

    knot_sizes: Floats  # batch sizes of the knots, [world_size, num_knots], none falls in a row
    knot_times: Floats  # seconds at the knots, likewise

    def __post_init__(self) -> None:
        shape = self.knot_sizes.shape
        if len(shape) != 2 or shape != self.knot_times.shape or not self.knot_sizes.size:
            raise ArgumentError(
                f"curves need knot_sizes and knot_times of one shape [world_size, num_knots], but "
                f"got {shape} and {self.knot_times.shape}"
            )
        # Rounding may make a plateau fall by some bits: flattened below, it is no mistake.
        falling = np.diff(self.knot_times, axis=1) < -1e-9 * np.abs(self.knot_times[:, 1:])
        if not np.isfinite(self.knot_times).all() or falling.any():
            rank = int(np.argmax(falling.any(axis=1) | ~np.isfinite(self.knot_times).all(axis=1)))
            raise ArgumentError(
                f"the time of rank {rank} must be finite and must not fall as its batch grows, "
                f"but it is {self.knot_times[rank].tolist()} s at {self.knot_sizes[rank].tolist()}"
            )
        object.__setattr__(self, "knot_times", np.maximum.accumulate(self.knot_times, axis=1))

    # What ``search.Model`` asks for, of a model that is separable and tabulated already.

    @property
    def world_size(self) -> int:
        return len(self.knot_sizes)

    @property
    def is_coupled(self) -> bool:
        return False

    def curves(self, low: Floats, high: Floats) -> Curves:
        """Return the curves themselves, which must reach over [low, high] where that is not 0."""
        misses = (self.knot_sizes[:, 0] > low) | (self.knot_sizes[:, -1] < high)
        if (misses & (high > 0)).any():
            raise ArgumentError(
                f"curves known from {self.knot_sizes[:, 0].max():g} to "
                f"{self.knot_sizes[:, -1].min():g} samples do not reach from {low.min():g} to "
                f"{high.max():g}"
            )
        return self

    def without_sharing(self, sizes: npt.ArrayLike) -> Curves:
        del sizes
        return self

    def times(self, sizes: npt.ArrayLike) -> Floats:
        """Return seconds of each rank at ``sizes`` [world_size], by straight interpolation."""
        batch = np.asarray(sizes, dtype=np.float64)
        rows = zip(batch, self.knot_sizes, self.knot_times, strict=True)
        found = [np.interp(size, knots, times) for size, knots, times in rows]
        return np.where(batch > 0, found, 0.0)  # without samples nothing is computed

    def largest_within(self, limit_s: Floats) -> Floats:
        """Return the largest batches that take at most ``limit_s`` [num_targets] seconds.

        The sizes are [num_targets, world_size]; a rank that is too slow even for its first knot
        gets that knot's size.
        """
        sizes, times = self._by_knot  # [num_knots, world_size]
        last, num_ranks = sizes.shape[0] - 1, sizes.shape[1]
        limit = limit_s[:, None]  # [num_targets, 1]
        index = np.zeros((len(limit_s), num_ranks), dtype=np.int64)  # [num_targets, world_size]
        for knot in times[1:]:  # few knots, many ranks: ends at the last knot within the limit
            index += knot <= limit
        flat = index * num_ranks + np.arange(num_ranks)  # of that knot, in the flattened arrays
        later = np.where(index == last, flat, flat + num_ranks)  # and of the next one, if any
        left = times.take(flat)
        rise = times.take(later) - left
        share = np.clip((limit - left) / np.where(rise > 0, rise, np.inf), 0.0, 1.0)
        size = sizes.take(flat)
        largest: Floats = size + share * (sizes.take(later) - size)
        return largest

    def level(self, total: float) -> Floats:
        """Return fractional sizes that add up to ``total`` samples and take the same time.

        Ranks that stand still at a plateau, or at an end of their curve, fill up in proportion.
        """
        sizes, times = self._by_knot  # [num_knots, world_size]
        gain, rise = sizes[1:] - sizes[:-1], times[1:] - times[:-1]
        climbs = rise > 0
        pace = np.divide(gain, rise, out=np.zeros_like(gain), where=climbs)  # samples a second
        # The sum of all sizes, as a function of the target time, is made of straight pieces too.
        # At each knot of a rank its pace changes by that rank's; a rank's plateau makes it jump.
        change, jump = np.zeros_like(times), np.zeros_like(times)
        change[:-1], jump[:-1] = pace, np.where(climbs, 0.0, gain)
        change[1:] -= pace
        order = np.argsort(times, axis=None)  # from here on [num_knots * world_size], by time
        times, jumps = times.ravel()[order], jump.ravel()[order]
        grown = np.zeros_like(times)
        grown[1:] = np.cumsum(change.ravel()[order])[:-1] * (times[1:] - times[:-1])
        before = sizes[0].sum() + np.cumsum(grown + jumps) - jumps  # the sum ahead of each jump
        at = min(int(np.searchsorted(before + jumps, total)), len(times) - 1)
        short = max(before[at] - total, 0.0)
        step = times[at] - times[at - 1] if at else 0.0
        target = times[at] - (short / grown[at] * step if grown[at] > 0 else 0.0)
        # Just under and just over the target: the difference is what plateaus hold.
        under, over = self.largest_within(np.array([target * (1 - 1e-9), target * (1 + 1e-12)]))
        room = float((over - under).sum())
        missing = np.clip(total - under.sum(), 0.0, room)
        filled: Floats = under + (over - under) * (missing / room if room > 0 else 0.0)
        return filled

    @functools.cached_property
    def _by_knot(self) -> tuple[Floats, Floats]:
        """Sizes and times, [num_knots, world_size]: a knot of all ranks lies together."""
        return np.ascontiguousarray(self.knot_sizes.T), np.ascontiguousarray(self.knot_times.T)


@dataclass(frozen=True)
class Held:
    """What ranks keep of the data set, known before it is measured."""

    shares: tuple[float, ...]  # of all samples that each rank has at hand, [world_size]
    num_samples: int  # of the data set
    sample_bytes: float  # of a usual one, 0 where none is known
    keeping: Keeping | None = None  # what they should keep besides


@dataclass(frozen=True)
class StepModel:
    """The latency model of every rank, in seconds; each array is [world_size]."""

    fetch_fixed_s: Floats  # a fetch, whatever the batch
    local_s: Floats  # a sample from the rank's own store or cache
    remote_s: Floats  # a sample from elsewhere, over a way of the rank's own
    shared_s: Floats  # a sample at the shared source when nobody else asks
    hit_share: Floats  # largest share of a batch that can be local, 1 where the sampler looks
    hits: Floats  # largest number of local samples in one global batch; may be infinite
    compute_fixed_s: Floats  # a computation, whatever the batch
    compute_s: Floats  # a sample
    plateau_s: Floats  # the least that computing takes; 0 for a linear device
    overlap: Floats  # share of the shorter of fetch and compute that is hidden, in [0, 1]
    source: Ints  # number of the shared source, -1 for none
    pass_size: Floats  # most samples of one backward pass, >= 1; infinite where none is split
    aggregate_s: float = 0.0  # what the step adds after the slowest rank
    is_coupled: bool = field(init=False)  # the time of a rank depends on others' batches

    def __post_init__(self) -> None:
        num_ranks = len(self.source)
        names = [item.name for item in fields(self) if item.name not in _NO_TERMS]
        terms = [getattr(self, name) for name in names]
        for name, values in zip(names, terms, strict=True):
            if values.shape != (num_ranks,):
                raise ArgumentError(
                    f"StepModel.{name}: needs {num_ranks} numbers, one a rank, but got {values}"
                )
        is_wrong = ~(np.array(terms) >= 0)  # [terms, world_size]: one test, as a search makes many
        is_wrong[names.index("compute_fixed_s")] = False  # a saturated device may have any sign
        if is_wrong.any():
            at = int(np.argmax(is_wrong.any(axis=1)))
            raise ArgumentError(f"StepModel.{names[at]}: needs numbers >= 0, but got {terms[at]}")
        if (self.overlap > 1).any() or (self.hit_share > 1).any():
            raise ArgumentError(
                f"StepModel: overlap {self.overlap} and hit_share {self.hit_share} must be <= 1"
            )
        is_coupled = bool(((self.source >= 0) & (self.shared_s > 0)).any())
        object.__setattr__(self, "is_coupled", is_coupled)

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
        ones = {"hit_share": 1.0, "hits": np.inf, "pass_size": np.inf}
        given = {**dict.fromkeys(names, 0.0), **ones, **terms}
        arrays = {
            name: np.broadcast_to(np.asarray(value, dtype=np.float64), world_size)
            for name, value in given.items()
        }
        return cls(**arrays, source=source, aggregate_s=aggregate_s)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.source)

    def holding(self, hits: Floats) -> StepModel:
        """Return the model of ranks that hold at least ``hits`` samples of a global batch now.

        What was measured is of caches that have grown since. Both are [world_size].
        """
        known = np.where((self.hit_share < 1) & (hits > 0), 0.0, self.hits)  # a share was measured
        share = np.where(hits > 0, 1.0, self.hit_share)
        return replace(self, hits=np.maximum(known, hits), hit_share=share)

    def slower(self, fetch: Floats, compute: Floats) -> StepModel:
        """Return the model with what fetching and computing take multiplied, [world_size] each."""
        times = [item.name for item in fields(self) if item.name.endswith("_s")]
        times.remove("aggregate_s")
        by_part = {
            name: (compute if name in _COMPUTE_TERMS else fetch) * getattr(self, name)
            for name in times
        }
        return replace(self, **by_part)

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
        passes = count_passes(sizes, self.pass_size)
        fixed = passes * self.compute_fixed_s
        return np.maximum(passes * self.plateau_s, fixed + self.compute_s * sizes)

    def combine(self, fetch: Floats, compute: Floats) -> Floats:
        """Return how long the rank is busy when ``fetch`` and ``compute`` seconds overlap."""
        longer, shorter = np.maximum(fetch, compute), np.minimum(fetch, compute)
        return longer + (1.0 - self.overlap) * shorter

    def times(self, sizes: npt.ArrayLike) -> Floats:
        """Return busy seconds of each rank for batches ``sizes``, both [..., world_size]."""
        batch = np.asarray(sizes, dtype=np.float64)
        local = self.local(batch)
        busy = self.combine(self.fetch(local, batch - local), self.compute(batch))
        return np.where(batch > 0, busy, 0.0)  # without samples nothing is computed

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

        Between two numbers of micro-batches lies a jump of one sample; in between it is straight as
        without them. The pieces of k micro-batches are those of k times the fixed part.
        """
        most = int(count_passes(high, self.pass_size).max(initial=1))
        if most == 1:
            return self._curves(low, high)
        whole, knots, times = np.full(self.world_size, np.inf), [], []
        for k in range(1, most + 1):
            # A rank whose numbers of micro-batches end before k stays at its last point.
            first = low if k == 1 else (k - 1) * self.pass_size + 1
            start = np.clip(first, low, np.maximum(high, low))
            end = np.clip(k * self.pass_size, start, np.maximum(high, low))
            passes = count_passes(end, self.pass_size)
            one = replace(
                self,
                plateau_s=passes * self.plateau_s,
                compute_fixed_s=passes * self.compute_fixed_s,
                pass_size=whole,
            )
            pieces = one._curves(start, end)
            knots.append(pieces.knot_sizes)
            times.append(pieces.knot_times)
        # Two micro-batches of a saturated device may be cheaper than one; a search needs more to
        # take longer, and is told so.
        rising = np.maximum.accumulate(np.concatenate(times, axis=1), axis=1)
        return Curves(np.concatenate(knots, axis=1), rising)

    def _curves(self, low: Floats, high: Floats) -> Curves:
        """Tabulate the model of one backward pass.

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
        # [4, world_size], as are their times
        corners = np.stack([low, np.minimum(first, second), np.maximum(first, second), span])
        local = self.local(corners)
        fetch, compute = self.fetch(local, corners - local), self.compute(corners)
        lead = fetch - compute  # straight between corners
        crosses = lead[:-1] * lead[1:] < 0
        ratio = np.where(crosses, lead[:-1] / np.where(crosses, lead[:-1] - lead[1:], 1.0), 0.0)
        # Even knots are the corners, odd ones the crossings between them; where two corners have
        # no crossing, the odd knot repeats the corner before it.
        knots, times = np.empty((2, 7, self.world_size))
        knots[0::2], times[0::2] = corners, self.combine(fetch, compute)
        knots[1::2] = corners[:-1] + ratio * (corners[1:] - corners[:-1])
        met = fetch[:-1] + ratio * (fetch[1:] - fetch[:-1])  # where the two cross they are equal
        times[1::2] = np.where(crosses, (2.0 - self.overlap) * met, times[0:-1:2])
        return Curves(knots.T, times.T)
