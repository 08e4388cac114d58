"""Rules that see rows as a whole: what they are called, what they need, what they survive.

They judge a row by how far it lies from the others, in squared Euclidean distances over the block
of coordinates that they are given; ``mixing.py`` holds the arithmetic. ``ARC``, ``NNM``, ``Clip``
and ``Bucketing`` stand around another rule: they change the rows, which that one then aggregates.
The others are rules of their own.

Papers: NNM, Allouah et al., AISTATS 2023 (arXiv 2302.01772); ARC, Allouah et al., 2024 (arXiv
2405.14432); bucketing and centred clipping, Karimireddy et al., ICLR 2022 and ICML 2021 (arXiv
2006.09365, 2012.10333); Krum, Blanchard et al., NeurIPS 2017 (arXiv 1703.02757); geometric median,
Pillutla et al., 2019 (arXiv 1912.13445); Bulyan and the minimum diameter, El Mhamdi et al., ICML
2018 (arXiv 1802.07927); CAF, Allouah et al., ICML 2025 (arXiv 2505.01874). ``PrincipalAxis`` is of
this project.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from loft_hvd.aggregation.inputs import read_count
from loft_hvd.aggregation.rules import (
    RULES,
    Custom,
    Mean,
    Median,
    Rule,
    RuleWithF,
    outvoted,
)
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = [
    "ARC",
    "CAF",
    "NNM",
    "ROW_RULES",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "Clip",
    "GeometricMedian",
    "MinimumDiameter",
    "MultiKrum",
    "PrincipalAxis",
    "Robust",
    "RowRule",
    "check_is_ours",
]

# Most rows that MinimumDiameter may leave out: finding them takes up to 2**f trials. Measured: f=8
# of 24 rows takes some milliseconds in the worst case that was found.
_MOST_LEFT_OUT = 8


class RowRule(Rule):
    """Base class of the rules that see rows as a whole."""

    sees_rows: ClassVar[bool] = True

    @property
    def over_model(self) -> RowRule:
        """As of ``Rule``: a rule that sees rows."""
        return self

    def _explain_too_few(self, num_rows: int, absent: int, where: str, values: str) -> str:
        if num_rows == 0 or self.min_rows == 1:
            way_out = "give rows that are present, with a weight above 0"
        elif num_rows <= 2:
            # Of rules in others and buckets, too: 2f + 1 rows are 3 where f=1.
            can_three = self.min_rows == 2 * self.f + 1
            way_out = outvoted(num_rows, absent, can_three=can_three)
        elif absent:
            way_out = f"use a smaller f, add workers, or let more of the other {absent} count"
        else:
            way_out = "use a smaller f or add workers"
        return (
            f"{self} needs {self._needs()}, so at least {self.min_rows} rows, but {num_rows} "
            f"count{where} ({values}); {way_out}"
        )

    def _needs(self) -> str:
        """Say what ``min_rows`` follows from."""
        return f"0 <= 2*f < rows with f={self.f}"


@dataclass(frozen=True)
class _Around(RowRule):
    """A rule around another one, which aggregates the rows that this one leaves."""

    rule: Rule
    f: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise ArgumentTypeError(
                f"{self.name}: rule={self.rule!r} must be a rule such as TrimmedMean(f=1); text is "
                f"read by parse_rule('{self.name}+trimmed_mean:f=1')"
            )
        if isinstance(self.rule, Custom):
            raise ArgumentTypeError(
                f"{self.name} cannot stand around {self.rule}: what its function does is not "
                "known; call the function on rows that you have mixed yourself"
            )
        object.__setattr__(self, "f", self.rule.f)  # frozen from here on

    def _require_f(self) -> None:
        """Raise unless the inner rule says how many Byzantine rows to expect."""
        inner = self.rule
        while isinstance(inner, Clip | Bucketing):
            inner = inner.rule
        if isinstance(inner, Mean | Median):
            raise ArgumentError(
                f"{self.name}: {inner} takes no f, the Byzantine rows to expect, which {self.name} "
                "takes from it; use trimmed_mean:f=1, or another rule with f"
            )

    @property
    def min_rows(self) -> int:
        """Fewest rows that count: as many as the inner rule needs."""
        return self.rule.min_rows

    @property
    def counts_weight(self) -> bool:
        """As the inner rule."""
        return self.rule.counts_weight

    def _needs(self) -> str:
        return self.rule._needs() if isinstance(self.rule, RowRule) else super()._needs()

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        return self.rule._rows_survived(counting, spoils)

    def __str__(self) -> str:
        return f"{self.name}+{self.rule}"


@dataclass(frozen=True)
class ARC(_Around):
    """Adaptive clipping: ``floor(2 f (n - f) / n)`` longest rows shrink to the next one's length.

    f is the inner rule's. A row that is not finite stays as it is, for the inner rule to drop.

    Attributes:
        rule: aggregates the clipped rows; it says how many Byzantine rows to expect.
    """

    name: ClassVar[str] = "arc"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_f()


@dataclass(frozen=True)
class NNM(_Around):
    """Nearest-neighbour mixing: each row becomes the mean by weight of its ``n - f`` nearest ones.

    A row is its own nearest; of rows equally near those of lower number are taken. A row that is
    not finite is nobody's neighbour, and stays as it is. Mixed rows weigh the same. f is the inner
    rule's.

    Attributes:
        rule: aggregates the mixed rows; it says how many Byzantine rows to expect.
    """

    name: ClassVar[str] = "nnm"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_f()

    @property
    def counts_weight(self) -> bool:
        """False: mixed rows weigh the same."""
        return False

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        return self.f  # of more, right rows' neighbours may be wrong ones


@dataclass(frozen=True)
class Clip(_Around):
    """Rows longer than ``norm`` shrink to that length.

    Attributes:
        rule: aggregates the clipped rows.
        norm: the greatest Euclidean length that a row may have in the block that the rule sees. In
            training that is a shard, about ``sqrt(its values / all values)`` as long as the whole.
    """

    name: ClassVar[str] = "clip"
    norm: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.norm, bool) or not isinstance(self.norm, int | float):
            raise ArgumentTypeError(f"clip: norm={self.norm!r} must be a number, a length")
        if not 0 < self.norm < math.inf:
            raise ArgumentError(f"clip: norm={self.norm} must be > 0 and finite")
        object.__setattr__(self, "norm", float(self.norm))

    def __str__(self) -> str:
        return f"{self.name}:norm={self.norm!r}+{self.rule}"


@dataclass(frozen=True)
class Bucketing(_Around):
    """The inner rule sees means by weight of ``size`` neighbouring rows each.

    Neighbours are rows of following numbers that count; the last bucket may hold fewer. A bucket
    weighs what its rows weigh together. One wrong row spoils one bucket, so the inner rule needs
    2f+1 buckets. (In the paper rows are shuffled anew in each step.)

    Attributes:
        rule: aggregates the buckets.
        size: rows a bucket, >= 1.
    """

    name: ClassVar[str] = "bucketing"
    size: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = read_count("bucketing: size", self.size, "the rows of a bucket")
        if size < 1:
            raise ArgumentError(f"bucketing: size={size} must be >= 1")
        object.__setattr__(self, "size", size)

    @property
    def min_rows(self) -> int:
        """Fewest rows that count: one more than would leave a bucket too few."""
        return (self.rule.min_rows - 1) * self.size + 1

    def _needs(self) -> str:
        return f"{self.rule.min_rows} buckets of up to {self.size} rows"

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        # A wrong row is a wrong bucket, which holds up to `size` times as many of the rows.
        return self.rule._rows_survived(counting, spoils * self.size)

    def __str__(self) -> str:
        return f"{self.name}:size={self.size}+{self.rule}"


@dataclass(frozen=True)
class MultiKrum(RowRule, RuleWithF):
    """The mean by weight of the ``n - f`` rows of the lowest scores.

    A row's score is the sum of its squared distances to its ``n - f`` nearest rows, itself
    included; of equal scores the row of lower number goes first.
    """

    name: ClassVar[str] = "multi_krum"


@dataclass(frozen=True)
class GeometricMedian(RowRule, RuleWithF):
    """The point whose distances to the rows, by weight, have the least sum.

    f sets how many rows are needed. With weights it survives rows of less than half of the weight;
    in training it takes none, as ``Median``.
    """

    name: ClassVar[str] = "geometric_median"

    @property
    def counts_weight(self) -> bool:
        """True: distances count by weight."""
        return True

    def _rows_survived(self, counting: list[int], spoils: int = 1) -> int:
        return Median()._rows_survived(counting, spoils)

    def _weight_survived(self, counting: list[int], rows: int) -> int:
        return Median()._weight_survived(counting, rows)


@dataclass(frozen=True)
class CentredClipping(RowRule, RuleWithF):
    """Clip the rows' differences from a centre, move the centre by their mean; five times.

    The first centre is the row of the lowest ``MultiKrum`` score. Differences shrink to their
    median length.
    """

    name: ClassVar[str] = "centred_clipping"


@dataclass(frozen=True)
class CAF(RowRule, RuleWithF):
    """Covariance-bound agnostic filter: rows that stand out where rows vary most lose weight.

    All rows begin with a weight of 1. In each round every row loses the share ``t / max t`` of its
    weight, where ``t`` is its squared distance from the rows' mean along the direction in which
    they vary most, and the largest is that of the rows with weight left. Rounds end when the
    weights add up to ``n - 2f`` or less. The result is the mean of that round in which rows varied
    least along their direction. It is the mean by these weights times the rows' own, which count
    for nothing else.
    """

    name: ClassVar[str] = "caf"


@dataclass(frozen=True)
class Bulyan(RowRule, RuleWithF):
    """Choose ``n - 2f`` rows by Krum, one after the other; of these the mean around the median.

    Each coordinate is the mean by weight of the ``n - 4f`` chosen values nearest to their median.
    """

    name: ClassVar[str] = "bulyan"

    @property
    def min_rows(self) -> int:
        """Fewest rows that count: 4f + 3."""
        return 4 * self.f + 3

    def _needs(self) -> str:
        return f"rows >= 4*f + 3 with f={self.f}"


@dataclass(frozen=True)
class MinimumDiameter(RowRule, RuleWithF):
    """The mean by weight of those ``n - f`` rows whose greatest distance is the smallest.

    Of several such sets the one whose row numbers come first. f is at most 8: to find the set takes
    up to ``2**f`` trials.
    """

    name: ClassVar[str] = "minimum_diameter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.f > _MOST_LEFT_OUT:
            raise AggregationError(
                f"{self}: f must be <= {_MOST_LEFT_OUT}, for up to 2**f sets are tried; use "
                f"multi_krum:f={self.f}, which needs one sort"
            )


@dataclass(frozen=True)
class PrincipalAxis(RowRule, RuleWithF):
    """The mean by weight of rows that are clipped, and winsorised along their principal axes.

    Rows longer than the median length shrink to it: of two middle ones the upper, but with 2f + 2
    rows the lower, as wrong rows could else be as long as the longest right one. The principal axis
    is the one along which rows vary most: wrong rows that agree make rows vary in the direction in
    which they pull. Along it the f lowest rows move to where the next one is, and so do the f
    highest. So it goes on, f times at most, while the variance along the next axis is more than six
    times the mean of those along the others: wrong rows may pull in f directions. All rows stay in
    the mean, so right rows that differ for good lose little. A row that is not finite is left out,
    and counts as one of the f. With f = 0 it is the mean.

    Attributes:
        f: the Byzantine rows to expect.
        lengthens: gives the mean back most of the length that shrinking took: it is multiplied by
            the mean length of the rows, none longer than the (n - f)th, over that of the shrunk
            ones, to the power of 0.75. At least one right row is as long as the (n - f)th.
    """

    name: ClassVar[str] = "principal_axis"
    lengthens: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.lengthens, bool):
            raise ArgumentTypeError(f"{self.name}: lengthens={self.lengthens!r} must be a bool")

    def __str__(self) -> str:
        return super().__str__() + ",lengthens=true" * self.lengthens


@dataclass(frozen=True)
class Robust(RowRule, RuleWithF):
    """The advised rule: ``PrincipalAxis(f)``, over the whole model with ``lengthens=True``."""

    name: ClassVar[str] = "robust"

    @property
    def rule(self) -> RowRule:
        """What it stands for."""
        return PrincipalAxis(self.f)

    @property
    def over_model(self) -> RowRule:
        """What it stands for where rows are those of a whole model: ``scope="model"``."""
        return PrincipalAxis(self.f, lengthens=True)


# Every rule that sees rows, by its name in text. A new one is added here; its law to mixing.py.
ROW_RULES: dict[str, type[RowRule]] = {
    rule.name: rule
    for rule in (
        ARC,
        NNM,
        Clip,
        Bucketing,
        MultiKrum,
        GeometricMedian,
        CentredClipping,
        CAF,
        Bulyan,
        MinimumDiameter,
        PrincipalAxis,
        Robust,
    )
}


def check_is_ours(rule: Rule) -> None:
    """Raise for a rule from elsewhere: a subclass of ours may mean something else than ours."""
    ours = RULES.get(rule.name) or ROW_RULES.get(rule.name)
    if ours is not type(rule):
        raise ArgumentTypeError(f"{rule} has no kernel; use Custom(fn) for rules from elsewhere")
