"""Plans: how many samples of each global batch every rank computes, and from which step on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from loft_hvd.errors import PlanError

__all__ = ["Plan", "StepSizes", "equal_sizes", "proportional_sizes", "scale_sizes"]

_HEADER = 2  # plan_id, first_step


@dataclass(frozen=True)
class StepSizes:
    """The sample counts of one step, equal on every rank: what one backward pass is weighted by.

    Attributes:
        plan_id: number of the plan that was in force.
        step: steps since the start of the run, over epochs.
        sizes: samples of each rank in this step, [world_size]; 0 marks a rank that computes a
            dummy batch and whose gradient must not count.
        digest: of the samples that form the global batch, 32 bits; 0 where they are not known.
    """

    plan_id: int
    step: int
    sizes: tuple[int, ...]
    digest: int = field(default=0, compare=False)

    @property
    def total(self) -> int:
        """Samples of all ranks in this step."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Plan:
    """Local batch sizes for every rank, in force from ``first_step`` on.

    Attributes:
        plan_id: 0 for the first plan of a run, then counting up.
        first_step: the first step (over epochs) that uses these sizes.
        sizes: ``local_batch_size`` of each rank, [world_size], samples.
    """

    plan_id: int
    first_step: int
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 0 or sum(self.sizes) == 0:
            raise PlanError(
                f"plan {self.plan_id}: sizes {list(self.sizes)} must be one count >= 0 a rank, "
                "with at least one sample in all"
            )
        if self.plan_id < 0 or self.first_step < 0:
            raise PlanError(f"plan_id={self.plan_id} and first_step={self.first_step} must be >= 0")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def global_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        return sum(self.sizes)

    def to_wire(self) -> npt.NDArray[np.int64]:
        """Return the plan as one int64 array, shape [2 + world_size]."""
        return np.array([self.plan_id, self.first_step, *self.sizes], dtype=np.int64)

    @classmethod
    def from_wire(
        cls, wire: npt.NDArray[np.int64], *, world_size: int, global_batch_size: int
    ) -> Plan:
        """Read and validate what ``to_wire`` wrote on another rank.

        Raises:
            PlanError: the array is not a plan for this world and global batch.
        """
        values = [int(value) for value in wire]
        if len(values) != _HEADER + world_size:
            raise PlanError(
                f"a plan for world_size={world_size} has {_HEADER + world_size} numbers, "
                f"but {len(values)} arrived: {values}"
            )
        plan = cls(values[0], values[1], tuple(values[_HEADER:]))
        if plan.global_batch_size != global_batch_size:
            raise PlanError(
                f"plan {plan.plan_id}: sizes {list(plan.sizes)} add up to "
                f"{plan.global_batch_size}, but global_batch_size={global_batch_size}"
            )
        return plan


def equal_sizes(global_batch_size: int, world_size: int) -> tuple[int, ...]:
    """Split a global batch as evenly as whole samples allow, the first ranks taking the rest."""
    share, rest = divmod(global_batch_size, world_size)
    return tuple(share + (rank < rest) for rank in range(world_size))


def proportional_sizes(
    speeds: Sequence[float], global_batch_size: int, *, min_batch: int = 1
) -> tuple[int, ...]:
    """Split a global batch in proportion to speeds, by largest remainders, ties to lower ranks.

    Args:
        speeds: samples a second of each rank, [world_size], >= 0, finite.
        global_batch_size: samples to give out.
        min_batch: fewest samples of a rank, world_size * min_batch <= global_batch_size.

    Returns:
        Samples of each rank, [world_size], adding up to ``global_batch_size``.

    Raises:
        PlanError: speeds are not positive numbers in sum, or the floor does not fit.
    """
    floor = min_batch * len(speeds)
    total = sum(speeds)
    if not 0 < total < float("inf") or min(speeds) < 0 or floor > global_batch_size:
        raise PlanError(
            f"cannot split global_batch_size={global_batch_size} by speeds {list(speeds)} with "
            f"min_batch={min_batch}: speeds must be >= 0 with a positive sum, and the batch at "
            f"least {floor}"
        )
    fixed: dict[int, int] = {}  # ranks whose share is below the floor
    while True:
        rest = global_batch_size - sum(fixed.values())
        open_ranks = [rank for rank in range(len(speeds)) if rank not in fixed]
        total = sum(speeds[rank] for rank in open_ranks)
        exact = {rank: rest * speeds[rank] / total for rank in open_ranks}
        below = [rank for rank in open_ranks if exact[rank] < min_batch]
        if not below:
            break
        fixed.update(dict.fromkeys(below, min_batch))
    given = {rank: int(share) for rank, share in exact.items()} | fixed
    by_remainder = sorted(open_ranks, key=lambda rank: (given[rank] - exact[rank], rank))
    for rank in by_remainder[: global_batch_size - sum(given.values())]:
        given[rank] += 1
    return tuple(given[rank] for rank in range(len(speeds)))


def scale_sizes(
    sizes: Sequence[int], num_samples: int, *, min_ranks: int = 1
) -> tuple[int, ...] | None:
    """Give ``num_samples``, a last batch smaller than the plan's, out in the plan's proportions.

    Largest remainders decide, ties go to the lower rank. When the proportions leave fewer than
    ``min_ranks`` ranks with a sample, the smallest ranks are topped up from the largest.

    Args:
        sizes: the plan's sizes, [world_size], samples.
        num_samples: samples to give out, 0 <= num_samples <= sum(sizes).
        min_ranks: ranks that must hold at least one sample (2f+1 for a rule with f).

    Returns:
        Samples of each rank, [world_size], adding up to ``num_samples``; None when there are
        fewer samples than ``min_ranks``, so that the batch must be skipped.

    Raises:
        PlanError: ``num_samples`` is out of range, or the plan has fewer than ``min_ranks`` ranks.
    """
    total = sum(sizes)
    if not 0 <= num_samples <= total or min_ranks > len(sizes):
        raise PlanError(
            f"cannot give {num_samples} samples out over sizes {list(sizes)} (sum {total}) with "
            f"min_ranks={min_ranks}: need 0 <= samples <= sum and min_ranks <= {len(sizes)}"
        )
    if num_samples < min_ranks:
        return None
    shares = [divmod(size * num_samples, total) for size in sizes]  # (whole, remainder)
    given = [whole for whole, _ in shares]
    by_remainder = sorted(range(len(sizes)), key=lambda rank: (-shares[rank][1], rank))
    for rank in by_remainder[: num_samples - sum(given)]:
        given[rank] += 1
    while sum(count > 0 for count in given) < min_ranks:
        donor = max(range(len(given)), key=lambda rank: (given[rank], -rank))
        taker = min(
            (rank for rank, count in enumerate(given) if count == 0),
            key=lambda rank: (-sizes[rank], rank),
        )
        given[donor] -= 1
        given[taker] += 1
    return tuple(given)
