"""What one optimizer step is weighted by, worked out alike on every rank.

The plain mean weighs a rank by its samples exactly: ``sum_i x_i / X * g_i``. Robust rules take the
ranks' own mean gradients and cap a rank's weight at twice the mean weight, so that no rank owns
the result; a rank without samples is absent, never multiplied by 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loft_hvd.aggregation.rules import Rule
from loft_hvd.balance.plan import StepSizes

# Kernels take whole weights that add up to less than 2**30. Tokens and pixels are more.
_MOST_WHOLE = 2**29

__all__ = ["PassWeights", "capped_weights", "combine_passes", "in_training"]


@dataclass(frozen=True)
class PassWeights:
    """The weights of one optimizer step, over its backward passes; of ranks [world_size]."""

    weights: tuple[int, ...] | None  # whole numbers, for robust rules; None for equal ones
    present: tuple[bool, ...]  # which ranks computed at least one real batch
    # What this rank's summed gradients are multiplied by to be its row in a robust rule: the
    # passes of the step over the passes in which it had samples.
    row_scale: float
    # Samples in the step, or what was counted; None where all are equal.
    counts: tuple[int, ...] | None = None


def capped_weights(sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return whole-number weights for robust rules, none above twice the mean weight.

    They have the proportions of min(size, twice the mean of the present sizes), where a size of 0
    marks an absent rank, [world_size]; None when all present ranks weigh the same.
    """
    # All times num_present, so that twice the mean is a whole number. Sizes 40, 1, 1, 0 and 2:
    # 44 samples on 4 ranks, so min(4 * size, 88) = 88, 4, 4, 0 and 8; by their divisor 4
    # that is 22, 1, 1, 0 and 2, and the largest is twice the mean of the samples, 11.
    num_present = sum(size > 0 for size in sizes)
    total = sum(sizes)
    weights = [min(size * num_present, 2 * total) for size in sizes]  # [world_size]
    divisor = math.gcd(*weights)
    if divisor == 0 or len({weight for weight in weights if weight > 0}) == 1:
        return None
    whole = sum(weights) // divisor
    if whole > _MOST_WHOLE:  # rounded, and none of those present to 0
        return tuple(
            weight and max(1, weight * _MOST_WHOLE // (whole * divisor)) for weight in weights
        )
    return tuple(weight // divisor for weight in weights)


def in_training(rule: Rule, weights: PassWeights) -> PassWeights:
    """Return what rows weigh under a rule in training: medians take no weights there.

    With unequal batches the largest few would hold half of the weight, and own the result.
    """
    # A trimming rule drops rows by count before it weighs them, and the weight is capped above; a
    # weighted median picks the row where half of the weight is reached.
    return replace(weights, weights=None) if rule.counts_weight else weights


def combine_passes(passes: Sequence[StepSizes], *, rank: int) -> PassWeights:
    """Combine the sizes of a step's backward passes, one or more, into its weights."""
    # [num_passes, world_size] -> [world_size]
    totals = [sum(counts) for counts in zip(*(step.sizes for step in passes), strict=True)]
    # A rank that had samples in 1 of 2 passes summed 1 mean gradient, the others 2: twice its sum
    # is a row of their size. Without, it would pull the result towards 0.
    num_real = sum(step.sizes[rank] > 0 for step in passes)
    return PassWeights(
        weights=capped_weights(totals),
        present=tuple(total > 0 for total in totals),
        row_scale=len(passes) / num_real if num_real else 0.0,
        counts=tuple(totals),
    )
