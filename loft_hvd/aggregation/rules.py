"""Aggregation rules: what they are called, what they need, what they survive.

A rule maps one gradient row per worker, [world_size, numel], to one row, [numel], coordinate by
coordinate. This page holds names, parameters and limits; ``reference.py`` holds the arithmetic.

Papers: median and trimmed mean, Yin et al., ICML 2018; mean around the median, Xie et al., 2018
(Generalized Byzantine-tolerant SGD); Phocas, Xie et al., 2018 (Phocas: dimensional
Byzantine-resilient stochastic gradient descent).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, cast

from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_ROWS",
    "MAX_TOTAL_WEIGHT",
    "Custom",
    "Mean",
    "MeanAroundMedian",
    "Median",
    "Phocas",
    "Rule",
    "Tolerance",
    "TrimmedMean",
    "parse_rule",
]

MAX_ROWS = 1024  # rows one call may aggregate; csrc/rules.h has the same limit
MAX_TOTAL_WEIGHT = 2**30 - 1  # after division by the common divisor; csrc/rules.h likewise

_KINDS = ("midpoint", "lower", "upper")


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
    ) -> int:
        """Raise unless the rule fits the rows; f is never rescaled to make it fit.

        Args:
            world_size: number of rows.
            weights: sample count of each row, [world_size]; rows of weight 0 do not count.
            present: which rows are there, [world_size]; the others do not count.

        Returns:
            The number of rows that count.

        Raises:
            AggregationError: fewer than ``min_rows`` rows count, or more than 1024.
        """
        rows = _counting_rows(world_size, weights, present)
        if len(rows) > MAX_ROWS:
            raise AggregationError(
                f"{self}: {len(rows)} rows, but one call takes at most {MAX_ROWS}; aggregate in "
                "two levels (nodes, then ranks)"
            )
        if len(rows) < self.min_rows:
            raise AggregationError(self._explain_too_few(world_size, len(rows), weights, present))
        return len(rows)

    def _explain_too_few(
        self,
        world_size: int,
        num_rows: int,
        weights: Sequence[int] | None,
        present: Sequence[bool] | None,
    ) -> str:
        """Say what was asked, the limit, the values, and the way out."""
        counted = [f"world_size={world_size}"]
        if present is not None:
            counted.append(f"{world_size - sum(map(bool, present))} absent")
        if weights is not None:
            counted.append(f"{sum(weight == 0 for weight in weights)} of weight 0")
        values = ", ".join(counted)
        if self.f == 0:
            return f"{self} needs at least {self.min_rows} row, but {num_rows} count ({values})"
        largest = max(0, (num_rows - 1) // 2)
        return (
            f"{self}: f={self.f} needs 0 <= 2*f < rows, so at least {self.min_rows} rows, but "
            f"{num_rows} count ({values}); use f <= {largest} or add workers"
        )

    def tolerance(self, weights: Sequence[int] | int) -> Tolerance:
        """State how many rows, and how much weight, the rule survives.

        Args:
            weights: sample count of each row, [world_size], or a plain number of equal rows.

        Returns:
            The largest numbers for which the result stays bounded by the other rows.

        Raises:
            AggregationError: the rule does not fit that many rows.
        """
        if isinstance(weights, int):
            weights = [1] * weights
        self.check(len(weights), weights=weights)
        counting = sorted(int(weight) for weight in weights if weight > 0)
        rows = self._rows_survived(counting)
        lightest = sum(counting[: rows + 1])  # one row more than it survives weighs at least this
        return Tolerance(rows=rows, weight=lightest - 1)

    def _rows_survived(self, counting: list[int]) -> int:
        """Return how many of the rows, weights ascending, may hold any values."""
        return self.f

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        options = [
            f"{item.name}={getattr(self, item.name)}"
            for item in fields(cast("Mean", self))  # every rule is a dataclass
            if item.init and getattr(self, item.name) != item.default
        ]
        return self.name + (":" + ",".join(options) if options else "")


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


def _check_f(name: str, f: int) -> None:
    """Raise unless ``f`` is a count of rows."""
    if isinstance(f, bool) or not isinstance(f, int):
        raise ArgumentTypeError(f"{name}: f={f!r} must be an int, the Byzantine rows to expect")
    if f < 0:
        raise AggregationError(f"{name}: f={f} must be >= 0")


@dataclass(frozen=True)
class Mean(Rule):
    """The average by weight; survives no Byzantine row.

    Attributes:
        reproducible: in training, aggregate on shard owners, bit-identical on every rank and
            transport, in place of the engine's own all-reduce. One call of a kernel always is.
    """

    name: ClassVar[str] = "mean"
    reproducible: bool = False
    f: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.reproducible, bool):
            raise ArgumentTypeError(f"mean: reproducible={self.reproducible!r} must be a bool")


@dataclass(frozen=True)
class Median(Rule):
    """The middle value of each coordinate; survives fewer than half of the rows.

    Attributes:
        kind: for an even number of rows "midpoint" of the two middle values, the "lower" or the
            "upper" one. On zero-mean noise the lower and upper medians of few rows are biased.
    """

    name: ClassVar[str] = "median"
    kind: str = "midpoint"
    f: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ArgumentError(f"median: kind={self.kind!r} must be one of {', '.join(_KINDS)}")

    def _rows_survived(self, counting: list[int]) -> int:
        total, heaviest, rows = sum(counting), 0, 0
        for weight in reversed(counting):
            heaviest += weight
            if 2 * heaviest >= total:
                break
            rows += 1
        return rows

    def tolerance(self, weights: Sequence[int] | int) -> Tolerance:
        """State how many rows, and how much weight, survive: less than half of the weight."""
        survived = super().tolerance(weights)
        total = weights if isinstance(weights, int) else sum(int(weight) for weight in weights)
        return Tolerance(rows=survived.rows, weight=(total - 1) // 2)


@dataclass(frozen=True)
class _Trimming(Rule):
    """A rule with a number of Byzantine rows, which it validates."""

    f: int

    def __post_init__(self) -> None:
        _check_f(self.name, self.f)


@dataclass(frozen=True)
class TrimmedMean(_Trimming):
    """Average what is left after dropping the f smallest and f largest values of a coordinate."""

    name: ClassVar[str] = "trimmed_mean"


@dataclass(frozen=True)
class MeanAroundMedian(_Trimming):
    """Average the rows - f values nearest to the median; of two equally near the lower stays."""

    name: ClassVar[str] = "mean_around_median"


@dataclass(frozen=True)
class Phocas(_Trimming):
    """Average the rows - f values nearest to the f-trimmed mean; ties keep the lower."""

    name: ClassVar[str] = "phocas"


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
    fn: Callable[..., Any]
    f: int = 0
    takes_weights: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentTypeError(f"custom: fn={self.fn!r} must be callable")
        _check_f(self.name, self.f)

    def __str__(self) -> str:
        """Return a name for messages; a function cannot be read back by ``parse_rule``."""
        return f"custom:{getattr(self.fn, '__qualname__', type(self.fn).__name__)}"


_RULES: dict[str, type[Mean | Median | TrimmedMean | MeanAroundMedian | Phocas]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "mean_around_median": MeanAroundMedian,
    "phocas": Phocas,
}


def _parse_option(rule: str, key: str, text: str) -> bool | int | str:
    """Read one option's value by its name."""
    if key == "f":
        try:
            return int(text)
        except ValueError:
            raise ArgumentError(f"rule {rule!r}: f={text!r} must be a whole number") from None
    if key == "reproducible":
        if text.lower() not in ("true", "false"):
            raise ArgumentError(f"rule {rule!r}: reproducible={text!r} must be true or false")
        return text.lower() == "true"
    return text


def parse_rule(text: str) -> Rule:
    """Read a rule from text such as ``"trimmed_mean:f=2"`` or ``"median:kind=lower"``.

    Args:
        text: a name, then optionally a colon and ``key=value`` pairs separated by commas.

    Returns:
        The rule; ``parse_rule(str(rule)) == rule`` for every rule but ``Custom``.

    Raises:
        ArgumentError: the name or an option is unknown, missing or has a wrong value.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"parse_rule takes text such as 'trimmed_mean:f=1', not {text!r}")
    name, _, tail = text.strip().partition(":")
    rule = _RULES.get(name.strip())
    if rule is None:
        raise ArgumentError(f"rule {text!r} is unknown; the names are {', '.join(sorted(_RULES))}")
    known = [item.name for item in fields(rule) if item.init]
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in tail.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in options:
            takes = ", ".join(known) or "no options"
            raise ArgumentError(f"rule {text!r}: cannot use {part!r}; {name} takes {takes}, once")
        options[key] = _parse_option(text, key, value)
    if "f" in known and "f" not in options:
        raise ArgumentError(f"rule {text!r} needs f, the Byzantine rows to expect: '{name}:f=1'")
    return rule(**options)
