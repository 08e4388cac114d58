"""Sizes for ranks that may have only so many distinct ones in a run.

On some devices every new batch size costs a recompilation or a round of autotuning.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["choose_used"]

Sizes = tuple[int, ...]


def choose_used(wanted: Sizes, used: Sequence[Sizes], *, max_sizes: int) -> Sizes:
    """Return the sizes nearest to ``wanted`` that give no rank more than ``max_sizes`` of them.

    Each rank takes a size it has had, or the one wanted if it has had fewer than ``max_sizes``.
    Near is the rank with the largest share above what is wanted for it: with the wanted sizes all
    ranks take about the same time, so that rank would set the step. Where a past plan is as near
    as anything else, the result may be that plan.

    Args:
        wanted: samples of each rank, [world_size].
        used: the plans of the run, the first at least, each [world_size] with the same sum.
        max_sizes: distinct sizes that a rank may have, >= 1.
    """
    options = [set(column) for column in zip(*used, strict=True)]
    for had, size in zip(options, wanted, strict=True):
        if len(had) < max_sizes:
            had.add(size)
    if all(size in had for size, had in zip(wanted, options, strict=True)):
        return wanted
    excess = [
        {size: size / max(want, 1) for size in had}
        for had, want in zip(options, wanted, strict=True)
    ]
    limits = sorted({ratio for of_rank in excess for ratio in of_rank.values()})
    low, high = 0, len(limits) - 1  # with no limit the past plans add up
    while low < high:
        middle = (low + high) // 2
        if _reaches(_within(excess, limits[middle]), sum(wanted)):
            high = middle
        else:
            low = middle + 1
    return _pick(_within(excess, limits[low]), wanted)


def _within(excess: list[dict[int, float]], limit: float) -> list[list[int]]:
    return [[size for size, ratio in of_rank.items() if ratio <= limit] for of_rank in excess]


def _sums(options: list[list[int]], total: int) -> list[int]:
    """Return the sums that the first k ranks can have, as the bits of a number, for each k."""
    mask = (1 << (total + 1)) - 1
    reached = [1]
    for sizes in options:
        bits = 0
        for size in sizes:
            bits |= reached[-1] << size
        reached.append(bits & mask)
    return reached


def _reaches(options: list[list[int]], total: int) -> bool:
    return bool(_sums(options, total)[-1] >> total & 1)


def _pick(options: list[list[int]], wanted: Sizes) -> Sizes:
    """Walk back from the sum, each rank taking the option nearest to what is wanted for it."""
    left = sum(wanted)
    reached = _sums(options, left)
    picked = []
    for rank in reversed(range(len(wanted))):
        fitting = [
            size for size in options[rank] if size <= left and reached[rank] >> (left - size) & 1
        ]
        picked.append(min(fitting, key=lambda size: (abs(size - wanted[rank]), size)))
        left -= picked[-1]
    return tuple(reversed(picked))
