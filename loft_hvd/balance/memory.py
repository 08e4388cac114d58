"""Out of memory: which batch it was, and what the rank gets from then on.

The error ends the job, as any does; the other ranks' errors name the rank and the batch. Rank 0
writes the rank's cap to the run log, and a run that writes to the same folder honours it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from loft_hvd.balance.batches import BatchQueue
from loft_hvd.runlog import RunLog, find_entries
from loft_hvd.transport.heartbeat.process import FailureNote, observe_failures

__all__ = ["MemoryWatch", "cap_after", "is_out_of_memory", "logged_caps"]

_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory, of a device or of the host, is full."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def cap_after(size: int, *, largest_done: int, grain: int) -> int:
    """Return the most samples of a rank whose memory did not hold ``size``.

    The largest batch that it has finished, if that is smaller; three quarters where it has
    finished this size before, since then little was missing; half where it has finished none.
    A multiple of ``grain`` where that is at least one.
    """
    cap = largest_done
    if not 0 < largest_done < size:
        cap = size * 3 // 4 if largest_done else size // 2
    return max(cap // grain * grain if cap >= grain else cap, 1)


def logged_caps(folder: str | Path) -> dict[str, int]:
    """Return the caps that the run logs of a folder hold, by device; the newest counts."""
    caps = {}
    for entry in find_entries(folder, "cap"):
        if isinstance(entry.get("device"), str) and isinstance(entry.get("cap"), int):
            caps[entry["device"]] = entry["cap"]
    return caps


class Limits(Protocol):
    """What a watch needs of its world of ranks."""

    @property
    def keys(self) -> tuple[str, ...]:
        """A name of each rank's device."""

    @property
    def grain(self) -> int:
        """Sizes are multiples of it."""


class MemoryWatch:
    """Knows which batch is being computed, and remembers what did not fit.

    Args:
        rank: this rank's number now.
        limits: its world now.
        batches: what is drawn and trained on.
        log: where caps are written.

    Attributes:
        caps: most samples by device, as found so far.
    """

    def __init__(
        self,
        rank: Callable[[], int],
        limits: Callable[[], Limits],
        batches: BatchQueue,
        log: Callable[[], RunLog],
    ) -> None:
        self._rank, self._limits, self._batches, self._log = rank, limits, batches, log
        self._last: tuple[BaseException, FailureNote] | None = None
        self.caps: dict[str, int] = {}
        observe_failures(self)

    def describe_failure(self, error: BaseException) -> FailureNote | None:
        """Say with which batch this rank ran out of memory; None for any other error."""
        if self._last is not None and self._last[0] is error:
            return self._last[1]
        sizes = self._batches.in_work
        if sizes is None or not is_out_of_memory(error):
            return None
        rank, size = self._rank(), sizes.sizes[self._rank()]
        if size == 0:
            return None  # a dummy batch: the sizes are not at fault
        cap = self._cap(rank, size)
        note = FailureNote(
            f"rank {rank} ran out of memory with a batch of {size} samples (step {sizes.step}, "
            f"plan {sizes.plan_id}, sizes {list(sizes.sizes)}); give it at most {cap} by "
            "max_batch (a run log remembers that for runs with the same log_dir)",
            size,
        )
        self._last = error, note
        if rank == 0:
            self.rank_failed(rank, size)
        return note

    def rank_failed(self, rank: int, num_samples: int) -> None:
        """Write the cap of a rank whose memory did not hold a batch; on rank 0."""
        keys = self._limits().keys
        if self._rank() == 0 and rank < len(keys):
            self.found(rank, self._cap(rank, num_samples), size=num_samples, source="out of memory")

    def found(self, rank: int, cap: int, *, size: int | None, source: str) -> None:
        """Remember a cap.

        Args:
            rank: the rank.
            cap: its samples at most.
            size: the samples that did not fit, if any were tried.
            source: how it was found.
        """
        device = self._limits().keys[rank]
        self.caps[device] = cap
        self._log().write("cap", rank=rank, device=device, size=size, cap=cap, source=source)

    def _cap(self, rank: int, size: int) -> int:
        done = self._batches.largest_done(rank)
        return cap_after(size, largest_done=done, grain=self._limits().grain)
