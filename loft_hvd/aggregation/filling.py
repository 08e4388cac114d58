"""Rows of which blocks did not come: what stands in their place, before a rule sees the rows.

A hole is filled with what the rows that came make of its coordinates, by ``filling_rule``; the law
is in ``reference.py``. So every rule, weight and table of distances stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loft_hvd.aggregation.compute import fill_rows
from loft_hvd.aggregation.inputs import counting_rows
from loft_hvd.aggregation.reference import filling_rule, filling_weights
from loft_hvd.aggregation.rules import Mean, Rule
from loft_hvd.errors import AggregationError

__all__ = ["Holes", "fill_holes"]


@dataclass(frozen=True, eq=False)
class Holes:
    """Which blocks of which rows did not come.

    Attributes:
        missing: not 0 where one did not, uint8, [num_rows, num_blocks].
        block_numel: values of a block; the last one of a row has what is left.
    """

    missing: Tensor
    block_numel: int

    def __post_init__(self) -> None:
        assert self.missing.ndim == 2, self.missing.shape
        assert self.missing.dtype == torch.uint8, self.missing.dtype
        assert self.missing.is_cpu
        assert self.missing.is_contiguous()
        assert self.block_numel >= 1, self.block_numel

    @property
    def num_holes(self) -> int:
        """How many blocks did not come, over all rows."""
        return int(torch.count_nonzero(self.missing))

    @property
    def is_any(self) -> bool:
        """Whether there is one."""
        return self.num_holes > 0


def fill_holes(
    rows: Tensor | Sequence[Tensor],
    holes: Holes,
    rule: Rule,
    *,
    own: int,
    weights: Sequence[int] | None = None,
    present: Sequence[bool] | None = None,
) -> None:
    """Fill the holes of rows that count, in place.

    All holes of a block are filled alike: under a median with the median of the rows that came,
    under a mean with the mean of those that came by the wire, by ``filling_weights``, else with
    their trimmed mean. So with 2f + 1 rows of a block, of which f may hold anything, the filled
    values lie in the range of the others; and nobody who holds blocks back has more to say than who
    does not.

    Args:
        rows: on a CPU, [num_rows, numel], or one by one, each contiguous; of one dtype.
        holes: of the same rows.
        rule: any but ``Custom``; what aggregates the rows afterwards.
        own: the row that did not travel. It has no hole, and fills none under a mean: where others
            lose blocks it would come to weigh more than they do.
        weights: of each row, [num_rows]; those of weight 0 do not count.
        present: which rows count, [num_rows]; others neither fill a hole nor have theirs filled.

    Raises:
        AggregationError: a block that has a hole came from fewer rows than the rule needs.
    """
    num_rows = len(rows)
    each = rows.unbind(0) if isinstance(rows, Tensor) else rows
    num_blocks = -(-len(each[0]) // holes.block_numel)
    assert holes.missing.shape == (num_rows, num_blocks), (holes.missing.shape, num_blocks)
    is_mean = isinstance(rule, Mean)
    counting = counting_rows(num_rows, weights, present)
    chosen = [row for row in counting if not (is_mean and row == own)]
    if not chosen:
        return
    missing = holes.missing if len(chosen) == num_rows else holes.missing[chosen]
    least = 1 if is_mean else rule.min_rows
    by = None
    if is_mean and weights is not None:
        by = filling_weights(tuple(int(weights[row]) for row in chosen))
    short = fill_rows(
        [each[row] for row in chosen],
        missing,
        filling_rule(rule),
        block_numel=holes.block_numel,
        least=least,
        weights=by,
    )
    if short is not None:
        num_missing = int(torch.count_nonzero(missing[:, short]))
        which = "that travelled" if is_mean else "in all"
        raise AggregationError(
            f"{rule} fills a block from at least {least} rows, but of block {short} of "
            f"{num_blocks} only {len(chosen) - num_missing} came, of {len(chosen)} {which}; wait "
            "for more of them"
        )
