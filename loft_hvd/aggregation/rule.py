"""What every aggregation rule has: a name, an f, its limits, and what it survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from loft_hvd.aggregation.counts import Weights, read_count, read_weights
from loft_hvd.errors import AggregationError, ArgumentError

__all__ = ["MAX_ROWS", "Rule", "Tolerance"]

MAX_ROWS = 1024  # rows one call may aggregate; csrc/rules.h has the same limit


@dataclass(frozen=True)
class Tolerance:
    """What a rule survives; both statements hold, the caller may use either.

    Attributes:
        rows: any set of at most this many rows may hold any values at all.
        weight: any set of rows whose weights add up to at most this may hold any values at all.
    """

    rows: int
    weight: int


class Rule:
    """Base class of the aggregation rules: frozen dataclasses, comparable, hashable, printable.

    ``str(rule)`` is what ``parse_rule`` reads.

    Attributes:
        name: the rule's name in text.
        f: Byzantine rows that the rule is told to expect, 0 where it takes no such number.
    """

    name: ClassVar[str] = "rule"
    f: int

    @property
    def min_rows(self) -> int:
        """Fewest rows, present and with weight > 0, that the rule can aggregate: 2f + 1."""
        return 2 * self.f + 1

    def check(
        self,
        world_size: int,
        *,
        weights: Sequence[int] | None = None,
        present: Sequence[bool] | None = None,
        block: int | None = None,
    ) -> int:
        """Raise unless the rule fits the rows; f is never rescaled to make it fit.

        Args:
            world_size: number of rows.
            weights: sample count of each row, [world_size]; rows of weight 0 do not count.
            present: which rows are there, [world_size]; the others do not count.
            block: the block of coordinates that ``present`` is of, for the error.

        Returns:
            The number of rows that count.

        Raises:
            AggregationError: fewer than ``min_rows`` rows count, or more than 1024.
            ArgumentTypeError: ``world_size`` is no whole number.
        """
        world_size = read_count(f"{self}: world_size", world_size, "the number of rows")
        rows = _counting_rows(world_size, weights, present)
        if len(rows) > MAX_ROWS:
            raise AggregationError(
                f"{self}: {len(rows)} rows, but one call takes at most {MAX_ROWS}; aggregate in "
                "two levels (ranks of a node, then nodes)"
            )
        if len(rows) < self.min_rows:
            where = "" if block is None else f" in block {block} of present"
            values = _describe(world_size, weights, present)
            absent = world_size - len(rows)
            raise AggregationError(self._explain_too_few(len(rows), absent, where, values))
        return len(rows)

    def _explain_too_few(self, num_rows: int, absent: int, where: str, values: str) -> str:
        """Say what was asked, the limit, the values, and the way out."""
        if self.f == 0:
            return (
                f"{self} needs at least {self.min_rows} row, but {num_rows} count{where} "
                f"({values}); give one that is present, with a weight above 0"
            )
        if num_rows == 0:
            way_out = "give rows that are present, with a weight above 0"
        elif absent:
            way_out = (
                f"use f <= {(num_rows - 1) // 2}, add workers, or let more of the other {absent} "
                "count: present, with a weight above 0"
            )
        else:
            way_out = f"use f <= {(num_rows - 1) // 2} or add workers"
        return (
            f"{self}: f={self.f} needs 0 <= 2*f < rows, so at least {self.min_rows} rows, but "
            f"{num_rows} count{where} ({values}); {way_out}"
        )

    def tolerance(self, weights: Weights | int) -> Tolerance:
        """State how many rows, and how much weight, the rule survives.

        Args:
            weights: sample count of each row, [world_size], or a plain number of equal rows.

        Returns:
            The largest numbers for which the result stays bounded by the other rows.

        Raises:
            AggregationError: the rule does not fit that many rows.
            ArgumentError: a weight is negative, or their sum is too large.
            ArgumentTypeError: weights, or the number of rows, are no whole numbers.
        """
        if isinstance(weights, int | np.integer):
            rows = read_count("tolerance: weights", weights, "the number of equal rows")
            if rows < 0:
                raise ArgumentError(f"tolerance: {rows} equal rows must be >= 0; or list weights")
            counts = [1] * rows
        else:
            counts = read_weights(weights)
        self.check(len(counts), weights=counts)
        counting = sorted(weight for weight in counts if weight > 0)
        rows = self._rows_survived(counting)
        return Tolerance(rows=rows, weight=self._weight_survived(counting, rows))

    def _rows_survived(self, counting: list[int]) -> int:
        """Return how many of the rows, weights ascending, may hold any values."""
        return self.f

    def _weight_survived(self, counting: list[int], rows: int) -> int:
        """Return how much weight may hold any values, where ``rows`` of any weight may."""
        return sum(counting[: rows + 1]) - 1  # one row more weighs at least this sum

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        return self.name


def _describe(
    world_size: int, weights: Sequence[int] | None, present: Sequence[bool] | None
) -> str:
    """Return how many rows there are, and why some do not count."""
    counted = [f"world_size={world_size}"]
    if present is not None:
        counted.append(f"{world_size - sum(map(bool, present))} absent")
    if weights is not None:
        counted.append(f"{sum(weight == 0 for weight in weights)} of weight 0")
    return ", ".join(counted)


def _counting_rows(
    world_size: int, weights: Sequence[int] | None, present: Sequence[bool] | None
) -> list[int]:
    """Return the rows that are present and weigh something."""
    for label, values in (("weights", weights), ("present", present)):
        if values is not None and len(values) != world_size:
            raise ArgumentError(
                f"{label} has {len(values)} values, but there are {world_size} rows; give one a row"
            )
    return [
        row
        for row in range(world_size)
        if (present is None or present[row]) and (weights is None or weights[row] > 0)
    ]
