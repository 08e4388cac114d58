"""Aggregation rules: what they are called, what they need, what they survive.

A rule maps one gradient row per worker, [world_size, numel], to one row, [numel], coordinate by
coordinate. This page holds names, parameters and limits; ``reference.py`` holds the arithmetic.

Papers: median and trimmed mean, Yin et al., ICML 2018; mean around the median, Xie et al., 2018
(Generalized Byzantine-tolerant SGD); Phocas, Xie et al., 2018 (Phocas: dimensional
Byzantine-resilient stochastic gradient descent).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from loft_hvd.aggregation.counts import read_count
from loft_hvd.aggregation.rule import MAX_ROWS, Rule, Tolerance
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = [
    "MAX_ROWS",
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

_KINDS = ("midpoint", "lower", "upper")


def _read_f(name: str, f: int) -> int:
    """Return ``f`` as an int; raise unless it is a count of rows."""
    count = read_count(f"{name}: f", f, "the Byzantine rows to expect")
    if count < 0:
        raise AggregationError(f"{name}: f={count} must be >= 0")
    return count


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

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        return "mean:reproducible=True" if self.reproducible else "mean"


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

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        return "median" if self.kind == "midpoint" else f"median:kind={self.kind}"

    def _rows_survived(self, counting: list[int]) -> int:
        total, heaviest, rows = sum(counting), 0, 0
        for weight in reversed(counting):
            heaviest += weight
            if 2 * heaviest >= total:
                break
            rows += 1
        return rows

    def _weight_survived(self, counting: list[int], rows: int) -> int:
        return (sum(counting) - 1) // 2  # less than half


@dataclass(frozen=True)
class _Trimming(Rule):
    """A rule with a number of Byzantine rows, which it validates."""

    f: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "f", _read_f(self.name, self.f))  # frozen from here on

    def __str__(self) -> str:
        """Return the text that ``parse_rule`` turns back into this rule."""
        return f"{self.name}:f={self.f}"


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
        if not isinstance(self.takes_weights, bool):
            raise ArgumentTypeError(f"custom: takes_weights={self.takes_weights!r} must be a bool")
        object.__setattr__(self, "f", _read_f(self.name, self.f))  # frozen from here on

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
