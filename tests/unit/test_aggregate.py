"""The public functions: every rule and dtype, bit for bit as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import AggregationError
from tests.support.gradients import (
    CANONICAL_NAN,
    DTYPES,
    assert_same_bits,
    bits,
    expected,
    hard_gradients,
    rules_for,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 31, 32, 33, 40, 64, 65, 130])
def test_every_rule_gives_the_bits_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    gradients = hard_gradients(rows, 83, dtype, seed=rows)
    for rule in rules_for(rows):
        assert_same_bits(loft.aggregate(gradients, rule), expected(gradients, rule))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 13, 16, 17, 33])
def test_weighted_rules_give_the_bits_of_the_reference(rows: int, dtype: torch.dtype) -> None:
    gradients = hard_gradients(rows, 83, dtype, seed=100 + rows)
    weights = [1 + (7 * row) % 5 for row in range(rows)]
    for rule in rules_for(rows):
        assert_same_bits(
            loft.aggregate(gradients, rule, weights=weights),
            expected(gradients, rule, weights=weights),
        )


@pytest.mark.parametrize("rows", [200, 1024])
def test_very_many_rows_give_the_bits_of_the_reference(rows: int) -> None:
    gradients = hard_gradients(rows, 37, torch.float32, seed=rows)
    for rule in (loft.Median(), loft.TrimmedMean(rows // 3), loft.MeanAroundMedian(rows // 4)):
        assert_same_bits(loft.aggregate(gradients, rule), expected(gradients, rule))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("weights", [None, [1, 2, 1, 3]])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "values",
    [
        [-float("inf"), -float("inf"), float("inf"), float("inf")],
        [float("nan")] * 4,
        [-float("nan")] * 4,
        [-float("nan"), float("nan"), float("inf"), -float("inf")],
    ],
    ids=str,
)
def test_every_nan_of_a_result_is_the_canonical_one(
    values: list[float], dtype: torch.dtype, weights: list[int] | None
) -> None:
    gradients = torch.tensor(values)[:, None].expand(-1, 83).to(dtype)  # vectors and a rest
    canonical = bits(torch.empty(1, dtype=dtype)).fill_(CANONICAL_NAN[dtype]).view(dtype)
    found = 0
    for rule in rules_for(4):
        result = loft.aggregate(gradients, rule, weights=weights)
        is_nan = result.isnan()
        assert_same_bits(result[is_nan], canonical.expand(int(is_nan.sum())))
        found += int(is_nan.sum())
    assert found >= 83


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_payloads_and_signs_of_nan_do_not_reach_the_result(dtype: torch.dtype) -> None:
    ones = torch.full((3, 83), -1, dtype=bits(torch.empty(0, dtype=dtype)).dtype)
    quiet = expected(torch.full((1, 83), float("nan"), dtype=dtype), loft.Mean())
    for rule in rules_for(3):
        assert_same_bits(loft.aggregate(ones.view(dtype), rule), quiet)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 15, 16, 17, 31, 33, 63, 65, 1000, 40_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_is_aggregated_to_its_last_value(numel: int, dtype: torch.dtype) -> None:
    gradients = hard_gradients(5, numel, dtype, seed=numel)
    for rule in (loft.Median(), loft.TrimmedMean(1), loft.Phocas(1)):
        result = loft.aggregate(gradients, rule)
        assert result.shape == (numel,)
        assert result.dtype == dtype
        assert_same_bits(result, expected(gradients, rule))


@pytest.mark.parametrize("weights", [[2, 2, 2, 2, 2], torch.full((5,), 7), np.full(5, 3.0)])
def test_equal_weights_give_the_bits_of_no_weights(weights: Any) -> None:
    gradients = hard_gradients(5, 99, torch.float32, seed=3)
    for rule in rules_for(5):
        weighted = loft.aggregate(gradients, rule, weights=weights)
        assert_same_bits(weighted, loft.aggregate(gradients, rule))


@pytest.mark.parametrize("rule", rules_for(4), ids=str)
def test_absent_rows_and_rows_of_weight_zero_are_as_if_deleted(rule: Rule) -> None:
    gradients = hard_gradients(6, 99, torch.float32, seed=4)
    kept = gradients[[0, 2, 3, 5]]
    present = [True, False, True, True, False, True]
    assert_same_bits(loft.aggregate(gradients, rule, present=present), loft.aggregate(kept, rule))
    weighted = loft.aggregate(gradients, rule, weights=[4, 0, 2, 6, 0, 2])
    assert_same_bits(weighted, loft.aggregate(kept, rule, weights=[2, 1, 3, 1]))


def test_presence_by_block_masks_a_range_of_coordinates() -> None:
    gradients = hard_gradients(4, 103, torch.float32, seed=5)
    present = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    result = loft.median(gradients, present=present)
    assert_same_bits(result, expected(gradients, loft.Median(), present=present.numpy()))


def test_custom_rule_sees_the_rows_that_count_and_its_weights() -> None:
    gradients = torch.arange(12.0).reshape(4, 3)
    rule = loft.Custom(lambda rows, w: rows[w.index(max(w))], takes_weights=True)
    result = loft.aggregate(gradients, rule, weights=[1, 0, 5, 2])
    torch.testing.assert_close(result, gradients[2])


def test_custom_rule_of_a_wrong_shape_is_named() -> None:
    with pytest.raises(AggregationError, match=r"must return Tensor of shape \(3,\)"):
        loft.aggregate(torch.ones(4, 3), loft.Custom(lambda rows: rows))
