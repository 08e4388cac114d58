"""The definition, against results worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import (
    Custom,
    Mean,
    MeanAroundMedian,
    Median,
    Phocas,
    Rule,
    TrimmedMean,
)
from loft_hvd.errors import AggregationError

NAN, INF = float("nan"), float("inf")


def one(rule: Rule, *values: float, weights: list[int] | None = None) -> float:
    """Aggregate one coordinate."""
    return float(reference(np.array(values)[:, None], rule, weights=weights)[0])


@pytest.mark.parametrize(
    ("rule", "values", "result"),
    [
        (Median(), (4, 1, 3), 3),
        (Median(), (4, 1, 3, 2), 2.5),
        (Median("lower"), (4, 1, 3, 2), 2),
        (Median("upper"), (4, 1, 3, 2), 3),
        (Median(), (1, 2, 3, NAN), 2.5),
        (Median(), (1, NAN, -NAN, 2, 3), 3),
        (Median(), (-INF, 1, INF), 1),
        (Median(), (-INF, INF), NAN),
        (Median(), (-0.0, -0.0, -0.0), 0),
        (Mean(), (1, 2, 6), 3),
        (TrimmedMean(1), (1e-8, 1e-8, 1e-8, 1e-8, 1e30, -1e30), 1e-8),
        (TrimmedMean(2), (1e-8, 1e-8, 1e-8, 1e-8, 1e30, 2e30), 1e-8),
        (TrimmedMean(1), (1, 2, 3, INF, -INF), 2),
        (TrimmedMean(1), (1, 2, 3, 4, NAN), 3),
        (TrimmedMean(1), (1, 2, 3, NAN, NAN), NAN),
        (TrimmedMean(0), (1.7e308, 1.7e308, 1.7e308), 1.7e308),
        (TrimmedMean(1), (5, 5, 5, 5, 5), 5),
        (MeanAroundMedian(1), (1, 2, 3, 10), 2),
        (MeanAroundMedian(1), (0, 1, 2), 0.5),
        (MeanAroundMedian(2), (-9, 1, 2, 3, 100), 2),
        (MeanAroundMedian(1), (NAN, NAN, NAN), NAN),
        (Phocas(1), (0, 1, 2, 3, 100), 1.5),
    ],
)
def test_rule_gives_the_value_worked_out_by_hand(
    rule: Rule, values: tuple[float, ...], result: float
) -> None:
    np.testing.assert_equal(one(rule, *values), result)


@pytest.mark.parametrize(
    ("rule", "values", "weights", "result"),
    [
        (Mean(), (1, 5), [3, 1], 2),
        (Median(), (0, 0, 0, 9), [1, 1, 1, 97], 9),
        (Median(), (1, 2, 3), [1, 2, 1], 2),
        (Median(), (1, 2), [2, 2], 1.5),
        (Median("lower"), (1, 2, 3), [2, 1, 1], 1),
        (Median("upper"), (1, 2, 3), [2, 1, 1], 2),
        (Median(), (1, 2, 3), [2, 1, 1], 1.5),
        (TrimmedMean(1), (1, 2, 6, 100), [9, 3, 1, 50], 3),
        (TrimmedMean(1), (1, 1, 2, 9), [5, 1, 1, 1], 7 / 6),  # of the tied ones the light one goes
        (MeanAroundMedian(1), (1, 2, 3, 100), [1, 1, 2, 7], 2.25),
    ],
)
def test_weighted_rule_drops_by_count_and_averages_by_weight(
    rule: Rule, values: tuple[float, ...], weights: list[int], result: float
) -> None:
    assert one(rule, *values, weights=weights) == pytest.approx(result, rel=1e-15)


def test_weight_zero_is_no_row() -> None:
    assert one(Median(), 1, 2, 3, weights=[1, 0, 0]) == 1
    with pytest.raises(AggregationError):
        one(TrimmedMean(1), 1, 2, 3, weights=[1, 1, 0])


def test_presence_by_block_cuts_coordinates_into_equal_blocks() -> None:
    values = np.array([[1.0, 1, 1, 1, 1], [3, 3, 3, 3, 3]])
    result = reference(values, Mean(), present=[[True, True], [True, False]])
    np.testing.assert_array_equal(result, [2, 2, 2, 1, 1])


def test_custom_rule_gets_the_rows_that_count() -> None:
    rule = Custom(lambda rows: rows.max(axis=0))
    assert one(rule, 1, 7, 3, weights=[1, 0, 2]) == 3
