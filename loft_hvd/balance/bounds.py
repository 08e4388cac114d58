"""Limits of each rank's batch, and whether a global batch fits into them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import PlanError

__all__ = ["Bounds"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bounds:
    """Limits of each rank's batch.

    Attributes:
        floor: least samples, [world_size], int64.
        cap: most samples (device memory), [world_size], int64.
        grain: sizes are multiples of this many samples.
    """

    floor: Ints
    cap: Ints
    grain: int = 1

    @classmethod
    def of(
        cls, world_size: int, *, floor: npt.ArrayLike = 1, cap: npt.ArrayLike, grain: int = 1
    ) -> Bounds:
        """Make bounds from numbers or one number a rank."""
        return cls(
            np.broadcast_to(np.asarray(floor, dtype=np.int64), world_size).copy(),
            np.broadcast_to(np.asarray(cap, dtype=np.int64), world_size).copy(),
            grain,
        )

    def lattice(self, global_batch_size: int) -> tuple[Ints, Ints, int]:
        """Return floor and cap in grains and the samples that one rank carries beside them.

        Raises:
            PlanError: no sizes within the bounds add up to ``global_batch_size``.
        """
        if self.grain < 1 or len(self.floor) != len(self.cap) or (self.floor > self.cap).any():
            raise PlanError(
                f"bounds need grain >= 1 and floor <= cap on every rank, but grain={self.grain}, "
                f"floor={self.floor.tolist()}, cap={self.cap.tolist()}"
            )
        low = -(-self.floor // self.grain)
        high = self.cap // self.grain
        if (low > high).any():
            rank = int(np.argmax(low > high))
            raise PlanError(
                f"rank {rank} may have {self.floor[rank]} to {self.cap[rank]} samples, but none of "
                f"these is a multiple of grain={self.grain}; lower grain or min_batch, or raise "
                "max_batch"
            )
        grains, rest = divmod(global_batch_size, self.grain)
        has_spare = int(high.sum()) > grains or (high * self.grain + rest <= self.cap).any()
        rest_fits = rest == 0 or bool(has_spare)
        if int(self.cap.sum()) < global_batch_size or high.sum() < grains or not rest_fits:
            raise PlanError(self.describe_shortage(global_batch_size))
        if low.sum() > grains:
            raise PlanError(
                f"global_batch_size={global_batch_size} is less than the {int(low.sum())} grains "
                f"of {self.grain} that floors {self.floor.tolist()} ask for; lower min_batch or "
                "grain, or raise global_batch_size"
            )
        return low, high, rest

    def admits(self, global_batch_size: int) -> bool:
        """Say whether any sizes within the bounds add up to ``global_batch_size``."""
        try:
            self.lattice(global_batch_size)
        except PlanError:
            return False
        return True

    def describe_shortage(self, global_batch_size: int) -> str:
        """Say how many samples fit, and how many backward passes would do."""
        room = int((self.cap // self.grain * self.grain).sum())
        if room < 1:
            return f"caps {self.cap.tolist()} leave no room for a grain of {self.grain}"
        passes = -(-global_batch_size // room)
        return (
            f"global_batch_size={global_batch_size} does not fit: caps {self.cap.tolist()} with "
            f"grain={self.grain} hold {room} samples; raise max_batch, or use "
            f"backward_passes_per_step={passes} with "
            f"global_batch_size={math.ceil(global_batch_size / passes)}"
        )
