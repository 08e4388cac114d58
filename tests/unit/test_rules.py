"""Names, limits and tolerances of the rules."""

from __future__ import annotations

import pytest

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError, LoftError

RULES = [
    loft.Mean(),
    loft.Mean(reproducible=True),
    loft.Median(),
    loft.Median(kind="lower"),
    loft.TrimmedMean(f=2),
    loft.MeanAroundMedian(f=1),
    loft.Phocas(f=3),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_text_round_trip(rule: loft.Rule) -> None:
    assert loft.parse_rule(str(rule)) == rule
    assert hash(loft.parse_rule(str(rule))) == hash(rule)


@pytest.mark.parametrize(
    "text", ["", "krum", "trimmed_mean", "trimmed_mean:f=x", "median:kind=outer", "mean:f=1"]
)
def test_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        loft.parse_rule(text)


@pytest.mark.parametrize("f", [0, 1, 2, 5])
@pytest.mark.parametrize("make", [loft.TrimmedMean, loft.MeanAroundMedian, loft.Phocas])
def test_a_rule_with_f_needs_2f_plus_1_rows(make: type[loft.TrimmedMean], f: int) -> None:
    rule = make(f=f)
    assert rule.min_rows == 2 * f + 1
    rule.check(2 * f + 1)
    with pytest.raises(AggregationError, match=f"at least {2 * f + 1} row"):
        rule.check(2 * f)


def test_rows_that_are_absent_or_weigh_nothing_do_not_count() -> None:
    rule = loft.TrimmedMean(f=1)
    assert rule.check(4, weights=[1, 0, 2, 3]) == 3
    with pytest.raises(AggregationError, match="use f <= 0"):
        rule.check(4, weights=[1, 0, 2, 3], present=[True, True, False, True])


@pytest.mark.parametrize(("f", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_f_must_be_a_count(f: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        loft.TrimmedMean(f=f)  # type: ignore[arg-type]  # that is the point
    assert isinstance(caught.value, LoftError)


@pytest.mark.parametrize(
    ("rule", "weights", "rows"),
    [
        (loft.Mean(), 8, 0),
        (loft.Median(), 8, 3),
        (loft.Median(), 7, 3),
        (loft.Median(), [97, 1, 1, 1], 0),
        (loft.TrimmedMean(f=2), 8, 2),
        (loft.TrimmedMean(f=1), [97, 1, 1, 1], 1),
    ],
)
def test_tolerance_counts_rows(rule: loft.Rule, weights: int | list[int], rows: int) -> None:
    assert rule.tolerance(weights).rows == rows


def test_custom_rules_must_be_callable() -> None:
    with pytest.raises(ArgumentTypeError, match="must be callable"):
        loft.Custom(3)  # type: ignore[arg-type]  # that is the point
