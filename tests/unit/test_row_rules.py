"""Rules that see rows: text, limits, what they survive."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

RULES = [
    loft.ARC(loft.TrimmedMean(2)),
    loft.NNM(loft.Phocas(1)),
    loft.ARC(loft.NNM(loft.TrimmedMean(f=2))),
    loft.Clip(loft.Median(), norm=2.5),
    loft.Clip(loft.Mean(), norm=1e30),
    loft.Bucketing(loft.Median("lower"), size=3),
    loft.Bucketing(loft.NNM(loft.GeometricMedian(1)), size=2),
    loft.MultiKrum(0),
    loft.GeometricMedian(2),
    loft.CentredClipping(1),
    loft.CAF(2),
    loft.PrincipalAxis(2),
    loft.PrincipalAxis(1, lengthens=True),
    loft.ARC(loft.CAF(1)),
    loft.Bulyan(1),
    loft.MinimumDiameter(3),
    loft.Robust(f=2),
    loft.ARC(loft.Bulyan(2)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_text_of_a_rule_reads_back_as_the_rule(rule: loft.Rule) -> None:
    assert loft.parse_rule(str(rule)) == rule


def test_the_outermost_rule_comes_first_in_text() -> None:
    rule = loft.ARC(loft.NNM(loft.TrimmedMean(f=2)))
    assert loft.parse_rule("arc + nnm+ trimmed_mean: f=2") == rule
    assert loft.parse_rule("nnm+arc+trimmed_mean:f=2") != rule


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("arc", "stands around another rule"),
        ("arc+", "unknown"),
        ("+median", "unknown"),
        ("arc:f=1+trimmed_mean:f=1", "arc takes no options"),
        ("trimmed_mean:f=1+arc", "stands around another rule"),
        ("trimmed_mean:f=1+median", "stands around no other rule.*arc, bucketing, clip, nnm"),
        ("nnm+median", "takes no f"),
        ("arc+mean", "takes no f"),
        ("arc+bucketing:size=2+median", "takes no f"),
        ("clip+median", "needs norm, the greatest length of a row: 'clip:norm=1.median'"),
        ("clip:norm=x+median", "must be a number"),
        ("clip:norm=nan+median", "must be > 0 and finite"),
        ("clip:norm=0+median", "must be > 0 and finite"),
        ("bucketing+median", "needs size, the rows of a bucket"),
        ("bucketing:size=0+median", "must be >= 1"),
        ("robust", "needs f"),
        ("multi_krum:f=-1", "must be >= 0"),
        ("minimum_diameter:f=9", "must be <= 8"),
    ],
)
def test_wrong_text_says_what_is_wrong(text: str, match: str) -> None:
    with pytest.raises((ArgumentError, AggregationError), match=match):
        loft.parse_rule(text)


def test_a_function_of_the_users_is_not_stood_around() -> None:
    with pytest.raises(ArgumentTypeError, match="what its function does is not known"):
        loft.NNM(loft.Custom(max, f=1))
    with pytest.raises(ArgumentTypeError, match="must be a rule"):
        loft.ARC("trimmed_mean:f=1")  # type: ignore[arg-type]  # the wrong type is the test


@pytest.mark.parametrize(
    ("text", "min_rows", "rows"),
    [
        ("arc+nnm+trimmed_mean:f=2", 5, 2),
        ("robust:f=2", 5, 2),
        ("clip:norm=1.0+median", 1, 4),
        ("bucketing:size=2+trimmed_mean:f=2", 9, 2),  # 5 buckets: 4 of two rows and one of one
        ("bucketing:size=2+median", 1, 2),  # 2 of 5 buckets
        ("bucketing:size=2+bucketing:size=2+median", 1, 1),  # 1 of 3, of at most 4 rows
        ("bucketing:size=2+bucketing:size=2+trimmed_mean:f=1", 9, 1),
        ("multi_krum:f=2", 5, 2),
        ("geometric_median:f=2", 5, 4),
        ("nnm+geometric_median:f=2", 5, 2),
        ("centred_clipping:f=2", 5, 2),
        ("caf:f=2", 5, 2),
        ("principal_axis:f=2", 5, 2),
        ("arc+caf:f=2", 5, 2),
        ("bulyan:f=1", 7, 1),
        ("arc+bulyan:f=1", 7, 1),
        ("minimum_diameter:f=2", 5, 2),
    ],
)
def test_a_rule_states_what_it_needs_and_survives(text: str, min_rows: int, rows: int) -> None:
    rule = loft.parse_rule(text)
    assert rule.min_rows == min_rows
    assert rule.tolerance(9).rows == rows
    if min_rows > 1:
        way_out = "smaller f" if min_rows > 3 else "two ranks cannot outvote a wrong one"
        with pytest.raises(AggregationError, match=f"at least {min_rows} rows.*{way_out}"):
            rule.check(min_rows - 1)


def test_a_bucket_too_few_is_said_in_buckets() -> None:
    with pytest.raises(AggregationError, match="needs 5 buckets of up to 2 rows"):
        loft.Bucketing(loft.TrimmedMean(2), size=2).check(8)


def test_weights_that_a_median_of_buckets_counts_are_those_of_the_heaviest_rows() -> None:
    rule = loft.Bucketing(loft.Median(), size=2)
    # The wrong row may share its bucket with a heavy one: 3 + 3 of 10 are less than half, all four
    # heaviest rows are more.
    assert rule.tolerance([1, 1, 1, 1, 3, 3]).rows == 0
    assert rule.tolerance([1] * 6).rows == 1


NESTED = [
    "bucketing:size=2+bucketing:size=2+median",
    "bucketing:size=3+bucketing:size=2+median:kind=lower",
    "bucketing:size=2+clip:norm=9.0+bucketing:size=2+median",
    "clip:norm=9.0+bucketing:size=3+median",
    "bucketing:size=2+arc+bucketing:size=2+geometric_median:f=1",
    "bucketing:size=2+bucketing:size=2+trimmed_mean:f=1",
    "bucketing:size=2+nnm+bucketing:size=2+trimmed_mean:f=1",
    "nnm+bucketing:size=2+geometric_median:f=1",
    "arc+bucketing:size=3+multi_krum:f=1",
    "bucketing:size=2+principal_axis:f=1",
]


@pytest.mark.every(5)
@pytest.mark.parametrize("text", NESTED)
@pytest.mark.parametrize("more", range(9))
@pytest.mark.parametrize("is_weighted", [False, True])
def test_nested_rules_survive_what_they_state(text: str, more: int, is_weighted: bool) -> None:
    rule = loft.parse_rule(text)
    num_rows = rule.min_rows + more
    source = np.random.default_rng(more)
    weights = source.integers(1, 4, num_rows).tolist() if is_weighted else [1] * num_rows
    honest = source.standard_normal((num_rows, 5)) + 3
    survived = rule.tolerance(weights)
    for count in range(1, num_rows):
        for wrong in itertools.combinations(range(num_rows), count):
            if count > survived.rows and sum(weights[row] for row in wrong) > survived.weight:
                continue
            rows = honest.copy()
            rows[list(wrong)] = 1e9
            result = loft.aggregate(rows, rule, weights=weights)
            assert np.linalg.norm(result) <= 10 * np.linalg.norm(honest, axis=1).max(), wrong


def test_rules_of_coordinates_do_not_see_rows() -> None:
    assert not loft.TrimmedMean(1).sees_rows
    assert loft.Custom(max).sees_rows
    assert all(rule.sees_rows for rule in RULES)


@pytest.mark.parametrize(
    ("rule", "can_three"),
    [
        (loft.Robust(1), True),
        (loft.Bucketing(loft.TrimmedMean(1), size=2), False),
        (loft.ARC(loft.Bulyan(1)), False),
    ],
    ids=str,
)
def test_three_rows_are_advised_where_three_would_do(rule: loft.Rule, can_three: bool) -> None:
    three = "; three can, with f=1" if can_three else ""
    with pytest.raises(AggregationError, match=f"two rows cannot outvote a wrong one{three}: add"):
        rule.check(2)
