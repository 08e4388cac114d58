"""Who was off: every number against the definition, with and without the extension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.aggregation import fallback
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError
from tests.support.gradients import (
    DTYPES,
    as_found,
    assert_same_bits,
    hard_gradients,
    rules_for,
)

BLOCK = fallback.BLOCK


pytestmark = pytest.mark.usefixtures("both_paths")


def assert_alike(found: loft.Diagnostics, wanted: loft.Diagnostics) -> None:
    assert found.num_seen == wanted.num_seen
    assert found.num_outside == wanted.num_outside
    assert found.num_non_finite == wanted.num_non_finite
    np.testing.assert_allclose(found.squared_distance, wanted.squared_distance, rtol=1e-12)


@pytest.mark.every(3)
@pytest.mark.parametrize("weights", [None, "unequal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 35])
def test_every_number_is_that_of_the_definition(
    rows: int, dtype: torch.dtype, weights: str | None
) -> None:
    gradients = hard_gradients(rows, 203, dtype, seed=rows)
    counts = None if weights is None else [1 + (5 * row) % 3 for row in range(rows)]
    for rule in rules_for(rows):
        result, found = loft.diagnose(gradients, rule, weights=counts, every=1)
        assert_same_bits(result, loft.aggregate(gradients, rule, weights=counts))
        assert_alike(found, as_found(gradients, result, rule, counts))


@pytest.mark.every(5)
@pytest.mark.parametrize("weights", [None, "unequal"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 35])
def test_every_number_of_finite_rows_is_that_of_the_definition(
    rows: int, dtype: torch.dtype, weights: str | None
) -> None:
    # What is not finite sends a whole tile of the kernels the slow way; here none goes it.
    gradients = torch.randn(rows, 1_201, generator=torch.Generator().manual_seed(rows)).to(dtype)
    counts = None if weights is None else [1 + (5 * row) % 3 for row in range(rows)]
    for rule in rules_for(rows):
        result, found = loft.diagnose(gradients, rule, weights=counts, every=1)
        assert_same_bits(result, loft.aggregate(gradients, rule, weights=counts))
        assert_alike(found, as_found(gradients, result, rule, counts))


@pytest.mark.parametrize("every", [1, 2, 16])
def test_one_block_in_so_many_is_looked_at(every: int) -> None:
    gradients = hard_gradients(5, 3 * BLOCK + 1_001, torch.float32, seed=7)
    rule = loft.TrimmedMean(1)
    result, found = loft.diagnose(gradients, rule, every=every)
    assert_same_bits(result, loft.aggregate(gradients, rule))
    blocks = range(0, gradients.shape[1], BLOCK * every)
    seen = torch.cat([gradients[:, at : at + BLOCK] for at in blocks], dim=1)
    assert_alike(found, as_found(seen, torch.cat([result[at : at + BLOCK] for at in blocks]), rule))


def test_a_finite_row_lies_inside_a_window_that_ends_in_nan() -> None:
    gradients = torch.randn(4, 700, generator=torch.Generator().manual_seed(2))
    gradients[2:] = torch.nan
    rule = loft.Median(kind="lower")
    result, found = loft.diagnose(gradients, rule, every=1)
    assert_same_bits(result, torch.maximum(gradients[0], gradients[1]))
    assert found.num_outside[0] + found.num_outside[1] == 700  # the lower one of the two
    assert_alike(found, as_found(gradients, result, rule))


def test_rows_that_do_not_count_are_not_looked_at() -> None:
    gradients = hard_gradients(6, 500, torch.float32, seed=8)
    present = [True, False, True, True, True, True]
    rule = loft.TrimmedMean(1)
    result, found = loft.diagnose(
        gradients, rule, weights=[2, 9, 0, 4, 6, 2], present=present, every=1
    )
    kept, counts = gradients[[0, 3, 4, 5]], [1, 2, 3, 1]
    assert_same_bits(result, loft.aggregate(kept, rule, weights=counts))
    wanted = as_found(kept, result, rule, counts)
    assert found.num_seen == (500, 0, 0, 500, 500, 500)
    assert [found.num_outside[row] for row in (0, 3, 4, 5)] == list(wanted.num_outside)
    assert found.num_outside[1] == found.num_non_finite[2] == 0
    assert found.share_outside[1] == 0.0


def test_presence_by_block_counts_the_blocks_where_a_row_is_there() -> None:
    gradients = hard_gradients(4, 400, torch.float32, seed=9)
    present = np.array([[1, 1], [1, 0], [1, 1], [1, 1]], bool)
    rule = loft.TrimmedMean(1)
    result, found = loft.diagnose(gradients, rule, present=present, every=1)
    assert_same_bits(result, loft.aggregate(gradients, rule, present=present))
    first = loft.diagnose(gradients[:, :200], rule, every=1)[1]
    second = loft.diagnose(gradients[:, 200:], rule, present=present[:, 1], every=1)[1]
    assert found == first + second
    assert found.num_seen == (400, 200, 400, 400)


def test_a_wrong_row_stands_out() -> None:
    gradients = torch.randn(8, 4_000, generator=torch.Generator().manual_seed(3))
    gradients[5] *= -50
    _, found = loft.diagnose(gradients, loft.TrimmedMean(2))
    shares = found.share_outside
    assert shares[5] > 0.95
    assert max(share for row, share in enumerate(shares) if row != 5) < 0.6
    assert found.squared_distance[5] > 100 * found.squared_distance[0]


def test_custom_rule_has_no_window_but_distances() -> None:
    gradients = torch.randn(4, 300, generator=torch.Generator().manual_seed(4))
    gradients[2, 7] = float("inf")
    rule = loft.Custom(lambda rows: rows[0].clone())
    result, found = loft.diagnose(gradients, rule)
    assert_same_bits(result, gradients[0])
    assert found.num_outside == (0, 0, 0, 0)
    assert found.num_non_finite == (0, 0, 1, 0)
    assert found.squared_distance[0] == 0.0
    squared = (gradients[1].double() - gradients[0].double()).square().sum()
    assert found.squared_distance[1] == pytest.approx(float(squared), rel=1e-12)


def test_numpy_rows_and_out_are_taken() -> None:
    gradients = np.random.default_rng(5).standard_normal((5, 300)).astype(np.float32)
    gradients.flags.writeable = False
    out = np.empty(300, np.float32)
    result, found = loft.diagnose(gradients, loft.Phocas(1), out=out)
    assert result is out
    np.testing.assert_array_equal(out, loft.phocas(gradients, f=1))
    assert found.num_seen == (300,) * 5


def test_nothing_to_look_at_is_nothing_seen() -> None:
    _, found = loft.diagnose(torch.ones(3, 0), loft.Median())
    assert found == loft.Diagnostics.empty(3)
    assert found.share_outside == (0.0, 0.0, 0.0)


_UNTYPED: Any = loft  # wrong types are the test


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: loft.diagnose(torch.ones(3, 4), loft.Median(), every=0), ArgumentError, "every=0"),
        (
            lambda: _UNTYPED.diagnose(torch.ones(3, 4), loft.Median(), every=1.5),
            ArgumentTypeError,
            "every=1.5",
        ),
        (lambda: _UNTYPED.diagnose(torch.ones(3, 4), "median"), ArgumentTypeError, "rule='median'"),
        (
            lambda: loft.diagnose(
                torch.ones(3, 4), loft.TrimmedMean(1), present=[True, True, False]
            ),
            AggregationError,
            "1 absent",
        ),
        (
            lambda: loft.Diagnostics.empty(2) + loft.Diagnostics.empty(3),
            ArgumentError,
            "2 and of 3 rows",
        ),
    ],
)
def test_a_wrong_call_says_what_to_do(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_sum_joins_diagnostics_and_nothing_else() -> None:
    _, found = loft.diagnose(torch.ones(3, 5), loft.Median(), every=1)
    assert sum([found, found]) == found + found
    wrong: list[Any] = [3, 0.5, None]
    for other in wrong:
        with pytest.raises(TypeError, match="unsupported operand"):
            found + other


def test_a_rule_that_sees_rows_says_who_was_left_out_clipped_and_found_twice() -> None:
    rows = torch.randn(6, 100, generator=torch.Generator().manual_seed(4))
    rows[5] *= 100
    rows[4] = float("nan")
    rows[1] = rows[0]
    _, found = loft.diagnose(rows, loft.Robust(2), every=1)
    assert found.left_out[4] == 100
    assert found.clipped == (0, 0, 100, 0, 0, 100)  # longer than the third shortest
    assert found.copied == (100, 100, 0, 0, 0, 0)
    _, both = loft.diagnose(rows, loft.Robust(2), every=1)
    assert (found + both).copied == (200, 200, 0, 0, 0, 0)
    _, plain = loft.diagnose(rows, loft.TrimmedMean(2), every=1)
    assert plain.left_out == plain.clipped == plain.copied == (0.0,) * 6


@pytest.mark.parametrize(
    ("before", "last"),
    [
        ("", (13, 1)),  # of the 15 neighbourhoods of others
        ("bucketing:size=1+", (13, 1)),
        ("arc+", (5, 9)),
        ("bucketing:size=2+", (7, 7)),  # of all 8: they lie in one bucket, which all but it lack
    ],
)
@pytest.mark.parametrize(
    "inner", ["multi_krum:f=1", "minimum_diameter:f=1", "nnm+trimmed_mean:f=1", "nnm+bulyan:f=1"]
)
def test_neighbourhoods_judge_whatever_is_made_of_the_mixed_rows(
    before: str, inner: str, last: tuple[int, int]
) -> None:
    rows = torch.randn(16, 100, generator=torch.Generator().manual_seed(1))
    rows[14:] += 3
    _, found = loft.diagnose(rows, loft.parse_rule(f"{before}nnm+{inner}"), every=1)
    judges = 8 if before == "bucketing:size=2+" else 15
    assert found.left_out[14:] == pytest.approx([100 * count / judges for count in last])
    _, wanted = loft.diagnose(rows, loft.parse_rule(f"{before}nnm+trimmed_mean:f=1"), every=1)
    assert found.left_out == wanted.left_out


def test_who_is_farther_than_the_others_is_in_nobodys_neighbourhood() -> None:
    rows = torch.randn(5, 200, generator=torch.Generator().manual_seed(5))
    rows[3] += 10.0
    for rule in (loft.NNM(loft.TrimmedMean(1)), loft.MultiKrum(1)):
        _, found = loft.diagnose(rows, rule, present=[True] * 5, every=1)
        assert found.left_out[3] == 200
        assert max(found.left_out[:3]) <= 50  # of row 3's own, that lacks one
