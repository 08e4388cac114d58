"""Results worked out by hand, of the kernels and of the definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.reference import reference
from tests.support.gradients import rules_for

NAN, INF = math.nan, math.inf
# Relative to the largest kept value: one rounding of the result, and of the sums behind it.
TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def test_the_extension_is_there() -> None:
    assert extension() is not None, "build it: make setup"


@pytest.mark.parametrize(
    ("rule", "column", "expected"),
    [
        (loft.Median(), [1, 2, 3, 4], 2.5),
        (loft.Median(kind="lower"), [1, 2, 3, 4], 2),
        (loft.Median(kind="upper"), [1, 2, 3, 4], 3),
        (loft.Median(), [7], 7),
        (loft.Median(), [1, 3], 2),
        (loft.Median(), [1, 2, 3, 4, NAN], 3),
        (loft.Median(), [1, 2, 3, NAN, NAN], 3),
        (loft.Median(), [1, 2, 3, -INF, -INF], 1),
        (loft.Median(), [-INF, 1, 2, INF], 1.5),
        (loft.Median(), [1, 2, INF, INF], INF),
        (loft.Median(), [-INF, -INF, INF, INF], NAN),
        (loft.Median(), [3e38, 3e38, 3.2e38, 3.2e38], 3.1e38),
        (loft.TrimmedMean(f=1), [1e-8, 1e-8, 1e-8, 1e-8, 1e30, -1e30], 1e-8),
        (loft.TrimmedMean(f=2), [1e-8, 1e-8, 1e-8, 1e-8, 1e30, 2e30], 1e-8),
        (loft.TrimmedMean(f=1), [1, 2, 3, INF, -INF], 2),
        (loft.TrimmedMean(f=1), [1, 2, 3, 4, NAN], 3),
        (loft.TrimmedMean(f=1), [1, 2, 3, NAN, NAN], NAN),
        (loft.TrimmedMean(f=1), [3e38, 3e38, 3e38, 3.2e38, 1], 3e38),
        (loft.MeanAroundMedian(f=1), [0, 1, 2, 10], 1),
        (loft.Phocas(f=1), [0, 1, 2, 9], 1),
        (loft.MeanAroundMedian(f=1), [-INF, -2e38, 2e38], 0),
        (loft.MeanAroundMedian(f=1), [-2e38, 2e38, INF], 0),
        (loft.Phocas(f=1), [-INF, -2e38, -2e38, -1e38, 2e38], -0.75e38),
        (loft.Mean(), [1, 2, 3, 6], 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("numel", [1, 19])
def test_known_answers_in_every_order_of_rows(
    rule: loft.Rule, column: list[float], expected: float, numel: int
) -> None:
    for order in itertools.islice(itertools.permutations(column), 24):
        rows = torch.tensor(order, dtype=torch.float32).view(-1, 1).repeat(1, numel)
        want = torch.full((numel,), expected, dtype=torch.float32)
        torch.testing.assert_close(loft.aggregate(rows, rule), want, equal_nan=True)
        by_hand = reference(np.array(order).reshape(-1, 1), rule)
        np.testing.assert_allclose(by_hand, [expected], rtol=1e-6)


@pytest.mark.parametrize("num_rows", [2, 5, 8, 20])
def test_a_shift_of_all_rows_shifts_the_result(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, 50, generator=generator, dtype=torch.float64)
    for rule in rules_for(num_rows):
        wanted = loft.aggregate(rows, rule) + 2
        torch.testing.assert_close(loft.aggregate(rows + 2, rule), wanted)


def test_numpy_in_numpy_out() -> None:
    rows = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    out = loft.median(rows.numpy())
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, loft.median(rows).numpy())


def test_stride_0_rows_reach_beyond_what_memory_holds() -> None:
    rows = torch.ones(1).expand(6, 100_000)
    assert torch.equal(loft.median(rows), torch.ones(100_000))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("rule", [loft.MeanAroundMedian(f=1), loft.Phocas(f=1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("infinity", [-INF, INF])
@pytest.mark.parametrize("num_rows", [3, 6, 20, 33, 70, 130])
def test_an_infinity_goes_though_every_distance_overflows(
    num_rows: int, infinity: float, dtype: torch.dtype, rule: loft.Rule, is_weighted: bool
) -> None:
    """Farther from the centre than any value is one that the type cannot even subtract."""
    near = math.copysign(0.6 * torch.finfo(dtype).max, infinity)
    rows = torch.full((num_rows, 19), near, dtype=dtype)
    rows[0], rows[-1] = infinity, -rows[1]
    weights = [2] + [1] * (num_rows - 1) if is_weighted else None
    out = loft.aggregate(rows, rule, weights=weights)
    plain = torch.empty_like(out)
    fallback.aggregate_rows(list(rows.unbind()), rule, weights=weights, out=plain)
    assert torch.equal(out, plain)
    expected = (num_rows - 3) / (num_rows - 1) * rows[1].double()
    torch.testing.assert_close(out.double(), expected, rtol=4 * TOLERANCES[dtype], atol=0.0)
