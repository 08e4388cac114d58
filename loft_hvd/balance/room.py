"""How many samples a rank's device has room for: foretold from what smaller batches took.

A backward pass of ``x`` samples needs ``a + b x`` bytes at its peak: the model, its gradients and
the optimizer's state, and what each sample leaves for the backward pass. The device tells the
highest peak so far, so that each batch larger than all before adds a point. Two points give both
numbers. Of one it is only known that ``a`` is not negative, and ``x`` grows with the room in
proportion at least.

Nobody goes to the limit at once: a batch is at most half-way from the largest that was computed to
what is foretold, and each one tells more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["MemoryUse", "Room", "device_memory"]

# Of the memory that is left free, as ``Balancer.probe`` does: for fragments, and batches in which
# samples are larger than usual.
_HEADROOM = 0.1
_SPAN = 1.2  # sizes must be so far apart that their difference tells a sample's bytes


class MemoryUse(NamedTuple):
    """What a device tells of its memory, in bytes."""

    peak: int  # most that this process has had allocated, > 0
    room: int  # most that it could have: what it holds, and what is free


def device_memory() -> MemoryUse | None:
    """Return what the current CUDA device tells; None without one."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    free, _ = torch.cuda.mem_get_info()
    return MemoryUse(torch.cuda.max_memory_allocated(), free + torch.cuda.memory_reserved())


class Room:
    """Foretells the most samples of this rank's backward pass.

    Args:
        read: returns what the device tells by now, or None where it tells nothing.
    """

    def __init__(self, read: Callable[[], MemoryUse | None] | None = None) -> None:
        self._read = read or device_memory
        self._first = self._largest = 0, 0  # samples of a pass, and the peak by then
        self._room = 0

    def computed(self, num_samples: int) -> None:
        """Note that passes of at most so many samples have been computed by now."""
        if num_samples < max(self._largest[0], 1) or (told := self._read()) is None:
            return
        self._room = told.room
        self._largest = num_samples, told.peak
        # The first steps make the optimizer's state: the same size may still reach a higher peak.
        if self._first[0] in (0, num_samples):
            self._first = self._largest

    def most(self, *, grain: int) -> int | None:
        """Return the most samples of the next pass, a multiple of ``grain``; None: unknown.

        At least as many as were computed.
        """
        largest, _ = self._largest
        if not largest:
            return None
        fits = int(self._fits()) // grain * grain
        # Of what is left a half; the last grain is whole.
        half_way = largest + max((fits - largest) // 2, grain)
        return max(min(half_way // grain * grain, fits), largest)

    def _fits(self) -> float:
        """Return the samples that should fit."""
        (few, low), (many, high) = self._first, self._largest
        if many < _SPAN * few:  # cautious by itself
            return self._room / high * many
        per_sample = max(high - low, 1) / (many - few)
        fixed = max(high - per_sample * many, 0.0)
        return min(((1 - _HEADROOM) * self._room - fixed) / per_sample, 2.0**31)
