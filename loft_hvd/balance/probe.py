"""How many samples a rank's memory holds, found by trying."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loft_hvd.balance.memory import is_out_of_memory
from loft_hvd.errors import ArgumentError, PeerError, PlanError
from loft_hvd.transport.base import Channel, Transport

__all__ = ["Probed", "agree_on_probes", "largest_that_fits", "try_batches"]


@dataclass(frozen=True)
class Probed:
    """What a rank has found.

    Attributes:
        cap: most samples of a batch, 0 where not even the smallest fits.
        error: what ended the trying, other than full memory, or None.
    """

    cap: int
    error: Exception | None = None


def largest_that_fits(fits: Callable[[int], bool], *, limit: int, grain: int) -> int:
    """Return the largest multiple of ``grain`` that fits, at most ``limit``; 0 if none does.

    Doubles until something does not fit, then bisects: at most ``2 * log2(limit / grain) + 2``
    tries, and none beyond twice what fits.

    Args:
        fits: says whether that many samples fit; whatever fits, less does too.
        limit: nobody needs more.
        grain: smallest number of samples tried.
    """
    most = max(limit // grain, 1)  # in grains, as all that follows
    good, bad = 0, most + 1
    size = 1
    while good < most:
        if fits(size * grain):
            good = size
        else:
            bad = size
            break
        size = min(2 * size, most)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle * grain):
            good = middle
        else:
            bad = middle
    return good * grain


def try_batches(
    step_fn: Callable[[int], object], *, limit: int, grain: int, headroom: float
) -> Probed:
    """Find this rank's cap; touches no other rank.

    Args:
        step_fn: computes a batch of so many samples as training does.
        limit: most samples to try.
        grain: the cap is a multiple of it.
        headroom: share of what fits that is left free, where memory was full at all.

    Raises:
        ArgumentError: ``headroom`` is outside its limits.
    """
    if not 0 <= headroom < 1:
        raise ArgumentError(f"probe: headroom={headroom} must be in [0, 1)")

    def fits(num_samples: int) -> bool:
        try:
            step_fn(num_samples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            _free()
        return True

    try:
        found = largest_that_fits(fits, limit=limit, grain=grain)
    except Exception as error:
        return Probed(0, error)
    if 0 < found < limit // grain * grain:
        found = max(int(found * (1.0 - headroom)) // grain * grain, grain)
    return Probed(found)


def _free() -> None:
    """Give back what the last try has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def agree_on_probes(transport: Transport, own: Probed, *, grain: int) -> tuple[int, ...]:
    """Return every rank's cap, or raise on every rank when one has none.

    Raises:
        PlanError: a rank's memory does not hold the smallest batch.
        PeerError: ``step_fn`` has failed on another rank; here it raises what it raised.
    """
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
