"""Aggregation rules: what they are called, what they need, what they survive.

A rule maps one gradient row per worker, [world_size, numel], to one row, [numel]; those of this
page coordinate by coordinate, those of ``row_rules.py`` by what rows are as a whole. Here are
names, parameters and limits; ``reference.py`` holds the arithmetic.

Papers: median and trimmed mean, Yin et al., ICML 2018; mean around the median, Xie et al., 2018
(Generalized Byzantine-tolerant SGD); Phocas, Xie et al., 2018 (Phocas: dimensional
Byzantine-resilient stochastic gradient descent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from loft_hvd.aggregation.inputs import Weights, counting_rows, read_count, read_weights
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_ROWS",
    "RULES",
    "Custom",
    "Mean",
    "MeanAroundMedian",
    "Median",
    "Phocas",
    "Rule",
    "RuleWithF",
    "Tolerance",
    "TrimmedMean",
    "outvoted",
    "read_f",
]

# Rows that one call may aggregate, as in csrc/rules.h. Bound from the kernels' buffers: the fixed
# tree of sums in csrc/coordinate_rules.h has room for 512 pairs.
MAX_ROWS = 1024
_KINDS = ("midpoint", "lower", "upper")  # in the order of csrc/rules.h


def read_f(name: str, f: int) -> int:
    """Return ``f`` as an int; raise unless it is a count of rows."""
    count = read_count(f"{name}: f", f, "the Byzantine rows to expect")
    if count < 0:
        raise AggregationError(f"{name}: f={count} must be >= 0")
    return count


def outvoted(num_rows: int, absent: int, *, can_three: bool) -> str:
    """Say the way out where so few rows count, 1 or 2, that no f above 0 fits."""
    who = "one row" if num_rows == 1 else "two rows"
    three = "; three can, with f=1" if can_three else ""
    more = f"let more of the other {absent} count (present, with a weight above 0), " * bool(absent)
    return f"{who} cannot outvote a wrong one{three}: add workers, {more}or use Mean()"


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
        code: the rule's number in csrc/rules.h, by which the kernels know it.
        f: Byzantine rows that the rule is told to expect, 0 where it takes no such number.
        sees_rows: whether it looks at rows as a whole. Its result then depends on which coordinates
            it is given together; without, every coordinate is a matter of its own.
    """

    name: ClassVar[str] = "rule"
    code: ClassVar[int]
    sees_rows: ClassVar[bool] = False
    f: int

    @property
    def kind_code(self) -> int:
        """The number in csrc/rules.h of a choice that the rule offers; 0 where it offers none."""
        return 0

    @property
    def counts_weight(self) -> bool:
        """Whether it survives an amount of weight, not of rows: in training it takes no weights."""
        return False

    @property
    def over_model(self) -> Rule:
        """What it stands for where rows are those of a whole model: ``scope="model"``."""
        return self

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
        rows = counting_rows(world_size, weights, present)
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
        elif num_rows <= 2:
            way_out = outvoted(num_rows, absent, can_three=True)
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
            ArgumentError: weights, or the number of rows, are not what ``check`` takes.
        """
        if isinstance(weights, int | np.integer):
            rows = read_count("tolerance: weights", weights, "the number of equal rows")
            if rows < 0:
                raise ArgumentError(f"tolerance: {rows} equal rows must be >= 0; or list weights")
            counts = [1] * rows
        else:
            counts = read_weights(weights)
        self.check(len(counts), weights=counts)
        counting = sorted(weight for weight in counts if weight > 0)  # the lightest first
        rows = self._rows_survived(counting)
        return Tolerance(rows=rows, weight=self._weight_survived(counting, rows))

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        """Return how many of the rows, weights ascending, may hold any values.

        Each spoils up to ``spoils`` rows: those that it was averaged with, on the way to the rule.
        """
        return self.f

    def _weight_survived(self, counting: list[int], rows: int) -> int:
        """Return how much weight may hold any values, where ``rows`` of any weight may."""
        # More than `rows` rows weigh at least as much as the `rows + 1` lightest ones.
        return sum(counting[: rows + 1]) - 1

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        return self.name


@dataclass(frozen=True)
class Mean(Rule):
    """The average by weight; survives no Byzantine row.

    Attributes:
        reproducible: in training, aggregate on shard owners, bit-identical on every rank and
            transport, in place of the engine's own all-reduce. One call of a kernel always is.
    """

    name: ClassVar[str] = "mean"
    code: ClassVar[int] = 1  # the kernels see a trimmed mean with f = 0
    reproducible: bool = False
    f: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.reproducible, bool):
            raise ArgumentTypeError(f"mean: reproducible={self.reproducible!r} must be a bool")

    def __str__(self) -> str:
        return "mean:reproducible=True" if self.reproducible else "mean"


@dataclass(frozen=True)
class Median(Rule):
    """The middle value of each coordinate; survives fewer than half of the rows.

    Attributes:
        kind: for an even number of rows "midpoint" of the two middle values, the "lower" or the
            "upper" one. On zero-mean noise the lower and upper medians of few rows are biased.
    """

    name: ClassVar[str] = "median"
    code: ClassVar[int] = 0
    kind: str = "midpoint"
    f: int = field(default=0, init=False, repr=False)

    @property
    def counts_weight(self) -> bool:
        """True: the middle value is found by weight."""
        return True

    @property
    def kind_code(self) -> int:
        """The number of ``kind`` in csrc/rules.h."""
        return _KINDS.index(self.kind)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ArgumentError(f"median: kind={self.kind!r} must be one of {', '.join(_KINDS)}")

    def __str__(self) -> str:
        return "median" if self.kind == "midpoint" else f"median:kind={self.kind}"

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        # Spoilt rows that weigh half of the total together can move the middle value anywhere. The
        # fewest rows that weigh so much are the heaviest: weights 1 1 2 3 survive one row, as 3 is
        # less than half of 7 and 3 + 2 is more.
        total, rows = sum(counting), 0
        while 2 * sum(counting[-(rows + 1) * spoils :]) < total:
            rows += 1
        return rows

    def _weight_survived(self, counting: list[int], rows: int) -> int:
        return (sum(counting) - 1) // 2  # less than half


@dataclass(frozen=True)
class RuleWithF(Rule):
    """Base class of the rules with a number of Byzantine rows, which they validate."""

    f: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "f", read_f(self.name, self.f))  # frozen from here on

    def __str__(self) -> str:
        return f"{self.name}:f={self.f}"


@dataclass(frozen=True)
class TrimmedMean(RuleWithF):
    """Average what is left after dropping the f smallest and f largest values of a coordinate."""

    name: ClassVar[str] = "trimmed_mean"
    code: ClassVar[int] = 1


@dataclass(frozen=True)
class MeanAroundMedian(RuleWithF):
    """Average the rows - f values nearest to the median; of two equally near the lower stays."""

    name: ClassVar[str] = "mean_around_median"
    code: ClassVar[int] = 2


@dataclass(frozen=True)
class Phocas(RuleWithF):
    """Average the rows - f values nearest to the f-trimmed mean; ties keep the lower."""

    name: ClassVar[str] = "phocas"
    code: ClassVar[int] = 3


@dataclass(frozen=True)
class Custom(Rule):
    """A rule from elsewhere: ``fn`` maps [rows, numel] to [numel], on the shard a rank holds.

    Rows that are absent or of weight 0 are taken out first. Unless ``takes_weights``, the weights
    of the others are not used, as with ``Median`` in training.

    Attributes:
        fn: called as ``fn(gradients)``, or ``fn(gradients, weights)`` with ``takes_weights``.
        f: the number of Byzantine rows that ``fn`` was built for, which sets ``min_rows``.
        takes_weights: pass the weights, a list of int, as the second argument.
    """

    name: ClassVar[str] = "custom"
    sees_rows: ClassVar[bool] = True  # it may
    fn: Callable[..., Any]
    f: int = 0
    takes_weights: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentTypeError(f"custom: fn={self.fn!r} must be callable")
        if not isinstance(self.takes_weights, bool):
            raise ArgumentTypeError(f"custom: takes_weights={self.takes_weights!r} must be a bool")
        object.__setattr__(self, "f", read_f(self.name, self.f))  # frozen from here on

    def __str__(self) -> str:
        """Return a name for messages; a function cannot be read back by ``parse_rule``."""
        return f"custom:{getattr(self.fn, '__qualname__', type(self.fn).__name__)}"


# Every rule that looks at coordinates, by its name in text. A new one is added here; its law to
# reference.py.
RULES: dict[str, type[Mean | Median | TrimmedMean | MeanAroundMedian | Phocas]] = {
    rule.name: rule for rule in (Mean, Median, TrimmedMean, MeanAroundMedian, Phocas)
}
