"""Nondecreasing curves made of straight pieces, one a rank: what the search inverts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import ArgumentError

__all__ = ["Curves"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Time against batch size for each rank.

    Attributes:
        knot_sizes: batch sizes of the knots, [world_size, num_knots], nondecreasing along a row.
        knot_times: seconds at the knots, same shape, nondecreasing along a row.
    """

    knot_sizes: Floats
    knot_times: Floats

    def __post_init__(self) -> None:
        if (
            self.knot_sizes.ndim != 2
            or self.knot_sizes.shape != self.knot_times.shape
            or not self.knot_sizes.size
        ):
            raise ArgumentError(
                f"curves need knot_sizes and knot_times of one shape [world_size, num_knots], but "
                f"got {self.knot_sizes.shape} and {self.knot_times.shape}"
            )
        falling = np.diff(self.knot_times, axis=1) < -1e-9 * np.abs(self.knot_times[:, 1:])
        if not np.isfinite(self.knot_times).all() or falling.any():
            rank = int(np.argmax(falling.any(axis=1) | ~np.isfinite(self.knot_times).all(axis=1)))
            raise ArgumentError(
                f"the time of rank {rank} must be finite and must not fall as its batch grows, "
                f"but it is {self.knot_times[rank].tolist()} s at {self.knot_sizes[rank].tolist()}"
            )
        object.__setattr__(self, "knot_times", np.maximum.accumulate(self.knot_times, axis=1))

    @classmethod
    def from_functions(
        cls, functions: Sequence[Callable[[int], float]], *, low: int, high: int, grain: int = 1
    ) -> Curves:
        """Tabulate any nondecreasing functions of the batch size at low, low + grain, ..., high."""
        sizes = np.arange(low, high + 1, grain)
        times = [[function(int(size)) for size in sizes] for function in functions]
        return cls(np.broadcast_to(sizes.astype(float), (len(times), len(sizes))), np.array(times))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.knot_sizes)

    @property
    def is_coupled(self) -> bool:
        """False: the time of a rank depends on its own batch only."""
        return False

    def curves(self, low: Floats, high: Floats) -> Curves:
        """Return the curves themselves, which must reach over [low, high]."""
        if (self.knot_sizes[:, 0] > low).any() or (self.knot_sizes[:, -1] < high).any():
            raise ArgumentError(
                f"curves known from {self.knot_sizes[:, 0].max():g} to "
                f"{self.knot_sizes[:, -1].min():g} samples do not reach from {low.min():g} to "
                f"{high.max():g}"
            )
        return self

    def without_sharing(self, sizes: npt.ArrayLike) -> Curves:
        """Return the curves themselves."""
        del sizes
        return self

    def times(self, sizes: npt.ArrayLike) -> Floats:
        """Return seconds of each rank at ``sizes`` [world_size], by straight interpolation."""
        batch = np.asarray(sizes, dtype=np.float64)
        return np.array(
            [
                np.interp(size, knots, times)
                for size, knots, times in zip(batch, self.knot_sizes, self.knot_times, strict=True)
            ]
        )

    def largest_within(self, limit_s: Floats) -> Floats:
        """Return the largest batches that take at most ``limit_s`` seconds.

        Args:
            limit_s: target times, [num_targets].

        Returns:
            Sizes, [num_targets, world_size]; a rank that is too slow even for its first knot gets
            that knot's size.
        """
        sizes, times = self._by_knot
        last, num_ranks = sizes.shape[0] - 1, sizes.shape[1]
        limit = limit_s[:, None]
        index = np.zeros((len(limit_s), num_ranks), dtype=np.int64)
        for knot in times[1:]:  # ends at the last knot within the limit
            index += knot <= limit
        flat = index * num_ranks + np.arange(num_ranks)
        later = np.where(index == last, flat, flat + num_ranks)
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
        sizes, times = self._by_knot
        gain, rise = sizes[1:] - sizes[:-1], times[1:] - times[:-1]
        climbs = rise > 0
        pace = np.divide(gain, rise, out=np.zeros_like(gain), where=climbs)
        # At each knot the pace of the sum changes, and a plateau makes the sum jump.
        change, jump = np.zeros_like(times), np.zeros_like(times)
        change[:-1], jump[:-1] = pace, np.where(climbs, 0.0, gain)
        change[1:] -= pace
        order = np.argsort(times, axis=None)
        times, jumps = times.ravel()[order], jump.ravel()[order]
        grown = np.zeros_like(times)
        grown[1:] = np.cumsum(change.ravel()[order])[:-1] * (times[1:] - times[:-1])
        before = sizes[0].sum() + np.cumsum(grown + jumps) - jumps  # ahead of the jump
        at = min(int(np.searchsorted(before + jumps, total)), len(times) - 1)
        short = max(before[at] - total, 0.0)
        step = times[at] - times[at - 1] if at else 0.0
        target = times[at] - (short / grown[at] * step if grown[at] > 0 else 0.0)
        under, over = self.largest_within(np.array([target * (1 - 1e-9), target * (1 + 1e-12)]))
        room = float((over - under).sum())
        missing = np.clip(total - under.sum(), 0.0, room)
        filled: Floats = under + (over - under) * (missing / room if room > 0 else 0.0)
        return filled

    @functools.cached_property
    def _by_knot(self) -> tuple[Floats, Floats]:
        return np.ascontiguousarray(self.knot_sizes.T), np.ascontiguousarray(self.knot_times.T)
