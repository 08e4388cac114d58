"""How many samples a rank's memory holds: found by trying, or when it was full in training.

An error for want of memory ends the job, as any does; the other ranks' errors name the rank and the
batch. Rank 0 writes the rank's cap to the run log, and a run that writes to the same folder honours
it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from loft_hvd.balance.batches import BatchQueue
from loft_hvd.balance.limits import RankLimits
from loft_hvd.codec import Within, decode
from loft_hvd.errors import ArgumentError, LoftError, PeerError, PlanError
from loft_hvd.failures.causes import FailureNote, annotate_failures
from loft_hvd.runlog import RunLog, find_entries
from loft_hvd.transport.base import Channel, Transport

__all__ = [
    "MemoryWatch",
    "Probed",
    "agree_on_probes",
    "cap_after",
    "is_out_of_memory",
    "largest_that_fits",
    "logged_caps",
    "try_batches",
]

# What CUDA, ROCm, cuBLAS and the host's allocator say in errors of no class of their own.
_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
# Who raises those: torch, by Python's own class or, for a device, by this one where torch has it.
_TORCH_ERRORS = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
_ENGINES = ("horovod.", "torch.distributed.")  # modules whose errors may tell of other ranks


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that this rank's memory, of a device or of the host, is full.

    Told by its class, and by its words only for the very class that torch raises. An error of ours
    or of the engine's, which may tell of another rank, never counts, nor what was raised from one.
    """
    causes = list(_causes(error))
    if any(isinstance(cause, LoftError) or _is_of_engine(cause) for cause in causes):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) in _TORCH_ERRORS and any(text in str(error) for text in _TEXTS)


def _is_of_engine(error: BaseException) -> bool:
    return any(f"{kind.__module__}.".startswith(_ENGINES) for kind in type(error).__mro__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from or while handling, each once."""
    seen: set[int] = set()  # by id: errors may refer to each other in a circle
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            todo += [each.__cause__, None if each.__suppress_context__ else each.__context__]


# Full in training.


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


@dataclass(frozen=True)
class _LoggedCap:
    """What a ``cap`` line says of a device."""

    device: str
    cap: Annotated[int, Within(1)]


def logged_caps(folder: str | Path) -> dict[str, int]:
    """Return the caps that the run logs of a folder hold, by device; the newest counts.

    A line that says no such thing is passed over: a run must not end for want of an old one's log.
    """
    caps = {}
    for entry in find_entries(folder, "cap"):
        with suppress(ArgumentError):
            found = decode(_LoggedCap, entry, what="cap", is_open=True)
            caps[found.device] = found.cap
    return caps


class MemoryWatch:
    """Knows which batch is being computed, and remembers what did not fit."""

    def __init__(
        self,
        transport: Transport,
        limits: RankLimits,
        batches: BatchQueue,
        log: RunLog,
        *,
        is_planned: bool = True,
    ) -> None:
        self._transport, self._batches = transport, batches
        self._is_planned = is_planned  # whether sizes are what ranks compute
        self.limits, self.log = limits, log  # set anew in each world
        self.caps: dict[str, int] = {}  # most samples by device, as found so far
        self._last: tuple[BaseException, FailureNote] | None = None
        annotate_failures(self)

    def describe_failure(self, error: BaseException) -> FailureNote | None:
        """Say with which batch this rank ran out of memory; None for any other error."""
        if self._last is not None and self._last[0] is error:  # asked again: in_work has gone on
            return self._last[1]
        sizes = self._batches.in_work
        if sizes is None or not self._is_planned or not is_out_of_memory(error):
            return None
        rank = self._transport.rank
        micro = sizes.micro_sizes(rank)
        size = max(micro)
        if size == 0:
            return None  # a dummy batch: the sizes are not at fault
        cap = self._cap(rank, size)
        batch = "batch" if len(micro) == 1 else "micro-batch"
        note = FailureNote(
            f"rank {rank} ran out of memory with a {batch} of {size} samples (step {sizes.step}, "
            f"plan {sizes.plan_id}, sizes {list(sizes.sizes)}); give it at most {cap} by "
            "max_batch (a run log remembers that for runs with the same log_dir)",
            size,
        )
        self._last = error, note
        self.rank_failed(rank, size)
        return note

    def rank_failed(self, rank: int, num_samples: int) -> None:
        """Write the cap of a rank whose memory did not hold a batch; on rank 0."""
        if self._transport.rank == 0 and rank < len(self.limits):
            self.found(rank, self._cap(rank, num_samples), size=num_samples, source="out of memory")

    def found(self, rank: int, cap: int, *, size: int | None, source: str) -> None:
        """Remember a rank's cap, how it was found, and the size that did not fit, if one did."""
        device = self.limits.keys[rank]
        self.caps[device] = cap
        self.log.write("cap", rank=rank, device=device, size=size, cap=cap, source=source)

    def _cap(self, rank: int, size: int) -> int:
        done = self._batches.largest_done(rank)
        return cap_after(size, largest_done=done, grain=self.limits.grain)


# Tried before training.


@dataclass(frozen=True)
class Probed:
    """What a rank has found."""

    cap: int  # most samples of a batch, 0 where not even the smallest fits
    error: Exception | None = None  # what ended the trying, other than full memory


def largest_that_fits(fits: Callable[[int], bool], *, limit: int, grain: int) -> int:
    """Return the largest multiple of ``grain`` that fits, at most ``limit``; 0 if none does.

    Doubles until something does not fit, then bisects: at most ``2 * log2(limit / grain) + 2``
    tries, and none beyond twice what fits. Whatever ``fits``, less must too.
    """
    most = max(limit // grain, 1)  # in grains, as all that follows
    good, bad = 0, most + 1  # good fits; bad does not, or is more than is wanted
    # With room for 37 of 100: 1, 2, 4, 8, 16, 32, 64, then between 32 and 64: 48, 40, 36, 38, 37.
    while bad - good > 1:
        size = min(max(2 * good, 1), most) if bad > most else (good + bad) // 2
        if fits(size * grain):
            good = size
        else:
            bad = size
    return good * grain


def try_batches(
    step_fn: Callable[[int], object], *, limit: int, grain: int, headroom: float
) -> Probed:
    """Find this rank's cap, a multiple of ``grain``; touches no other rank (``Balancer.probe``)."""
    if not 0 <= headroom < 1:
        raise ArgumentError(f"probe: headroom={headroom} must be in [0, 1)")

    def fits(num_samples: int) -> bool:
        try:
            step_fn(num_samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:  # what this try has left behind would be in the way of the next
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return True

    # No rank may raise alone here, since the others wait in ``agree_on_probes``.
    try:
        found = largest_that_fits(fits, limit=limit, grain=grain)
    except Exception as error:
        return Probed(0, error)
    if 0 < found < limit // grain * grain:
        found = max(int(found * (1.0 - headroom)) // grain * grain, grain)
    return Probed(found)


def agree_on_probes(transport: Transport, own: Probed, *, grain: int) -> tuple[int, ...]:
    """Return every rank's cap, or raise on every rank when one has none or has failed."""
    row = torch.tensor([own.cap, int(own.error is not None)])
    rows = Channel(transport, "loft.balancer.probe").allgather_rows(row)
    if own.error is not None:
        raise own.error
    failed = torch.nonzero(rows[:, 1]).flatten().tolist()
    if failed:
        raise PeerError(f"probe: step_fn has failed on ranks {failed}; see their own errors")
    caps: list[int] = rows[:, 0].tolist()
    if 0 in caps:
        raise PlanError(
            f"probe: rank {caps.index(0)} cannot compute even {grain} samples (caps found: "
            f"{caps}); lower grain, make the model or the sample smaller, or leave that rank out"
        )
    return tuple(caps)
