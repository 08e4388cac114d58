"""Laws of the rules, for any gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import loft_hvd as loft
from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.reference import reference
from loft_hvd.aggregation.rules import Rule
from tests.support.gradients import (
    DTYPES,
    assert_same_bits,
    expected,
    hard_gradients,
    rules_for,
)

Array = npt.NDArray[np.float32]
Build = Callable[[int], Rule]

RULES: list[Build] = [loft.TrimmedMean, loft.MeanAroundMedian, loft.Phocas, lambda f: loft.Median()]
rules = st.sampled_from(RULES)
sizes = st.integers(1, 40)
any_float = st.floats(width=32)
finite = st.floats(-1e6, 1e6, width=32)


def matrices(
    values: st.SearchStrategy[float], rows: st.SearchStrategy[int] = sizes
) -> st.SearchStrategy[Array]:
    """Gradients [rows, numel]."""
    shapes = st.tuples(rows, st.integers(1, 9))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=values))


def pick_f(data: st.DataObject, rows: int) -> int:
    return data.draw(st.integers(0, (rows - 1) // 2), label="f")


@settings(deadline=None)
@given(gradients=matrices(any_float), build=rules, data=st.data())
def test_kernels_and_fallback_give_the_bits_of_the_reference(
    gradients: Array, build: Build, data: st.DataObject
) -> None:
    rule = build(pick_f(data, len(gradients)))
    counts = st.lists(st.integers(1, 9), min_size=len(gradients), max_size=len(gradients))
    weights = data.draw(st.none() | counts, label="weights")
    rows = torch.from_numpy(gradients)
    wanted = expected(rows, rule, weights=weights)
    assert_same_bits(loft.aggregate(rows, rule, weights=weights), wanted)
    if weights is None:
        out = torch.empty(rows.shape[1])
        fallback.aggregate_rows(list(rows), rule, weights=None, out=out)
        assert_same_bits(out, wanted)


@settings(deadline=None)
@given(gradients=matrices(any_float), build=rules, data=st.data())
def test_order_of_the_rows_does_not_change_a_bit(
    gradients: Array, build: Build, data: st.DataObject
) -> None:
    rows = len(gradients)
    rule = build(pick_f(data, rows))
    order = data.draw(st.permutations(range(rows)), label="order")
    weights = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows), label="weights")
    moved = loft.aggregate(gradients[order], rule, weights=[weights[row] for row in order])
    wanted = torch.from_numpy(loft.aggregate(gradients, rule, weights=weights))
    assert_same_bits(torch.from_numpy(moved), wanted)


@settings(deadline=None)
@given(honest=matrices(finite, st.integers(2, 12)), attack=matrices(any_float), data=st.data())
def test_trimmed_mean_and_median_stay_within_the_honest_range(
    honest: Array, attack: Array, data: st.DataObject
) -> None:
    f = data.draw(st.integers(0, len(honest) - 1), label="f")
    assume(f <= len(attack) and attack.shape[1] >= honest.shape[1])
    gradients = np.concatenate([honest, attack[:f, : honest.shape[1]]])
    for rule in (loft.TrimmedMean(f), loft.Median()):
        result = loft.aggregate(gradients, rule)
        assert (result >= honest.min(axis=0)).all()
        assert (result <= honest.max(axis=0)).all()


@settings(deadline=None)
@given(honest=matrices(finite, st.integers(2, 12)), attack=matrices(any_float), data=st.data())
def test_rules_around_a_centre_stay_within_one_range_of_the_honest(
    honest: Array, attack: Array, data: st.DataObject
) -> None:
    f = data.draw(st.integers(0, len(honest) - 1), label="f")
    assume(f <= len(attack) and attack.shape[1] >= honest.shape[1])
    gradients = np.concatenate([honest, attack[:f, : honest.shape[1]]]).astype(np.float64)
    low, high = gradients[: len(honest)].min(axis=0), gradients[: len(honest)].max(axis=0)
    slack = 1e-12 * np.abs(gradients[: len(honest)]).max()
    for rule in (loft.MeanAroundMedian(f), loft.Phocas(f)):
        result = loft.aggregate(
            gradients, rule, weights=[1 + row % 3 for row in range(len(gradients))]
        )
        assert (result >= low - (high - low) - slack).all()
        assert (result <= high + (high - low) + slack).all()


def kept_ranks(rule: Rule, rows: int) -> tuple[int, int]:
    """Return the first and the last rank that a median or trimmed mean of ``rows`` rows keeps."""
    if isinstance(rule, loft.Median):
        lower, upper = (rows - 1) // 2, rows // 2
        return (upper if rule.kind == "upper" else lower, lower if rule.kind == "lower" else upper)
    return rule.f, rows - 1 - rule.f


highest = st.sampled_from([1e30, 3e38, float("inf"), float("nan")])
lowest = st.sampled_from([-1e30, -3e38, -float("inf")])
kinds = st.sampled_from(["midpoint", "lower", "upper"]).map(loft.Median)


@settings(deadline=None)
@given(gradients=matrices(finite, st.integers(3, 20)), is_median=st.booleans(), data=st.data())
def test_a_value_dropped_by_rank_never_changes_a_bit(
    gradients: Array, is_median: bool, data: st.DataObject
) -> None:
    most = (len(gradients) - 1) // 2
    rule = data.draw(kinds if is_median else st.integers(1, most).map(loft.TrimmedMean))
    wanted = loft.aggregate(gradients, rule)
    order = gradients.argsort(axis=0, kind="stable")
    first, last = kept_ranks(rule, len(gradients))
    for rank in range(last + 1, len(gradients)):
        np.put_along_axis(gradients, order[rank][None], data.draw(highest), axis=0)
    for rank in range(first):
        np.put_along_axis(gradients, order[rank][None], data.draw(lowest), axis=0)
    assert_same_bits(loft.aggregate(gradients, rule), torch.from_numpy(wanted))


@settings(deadline=None)
@given(
    gradients=matrices(finite, st.integers(3, 20)),
    build=st.sampled_from([loft.MeanAroundMedian, loft.Phocas]),
    is_weighted=st.booleans(),
    data=st.data(),
)
def test_the_value_farthest_from_the_centre_never_changes_a_bit(
    gradients: Array, build: Build, is_weighted: bool, data: st.DataObject
) -> None:
    rows = len(gradients)
    rule = build(data.draw(st.integers(1, (rows - 1) // 2), label="f"))
    weights = data.draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows), label="weights")
    given_weights = weights if is_weighted else None
    gradients += np.float32(0)  # no -0, which NumPy does not order below +0
    wanted = loft.aggregate(gradients, rule, weights=given_weights)
    is_around_median = isinstance(rule, loft.MeanAroundMedian)
    centre = loft.median(gradients) if is_around_median else loft.trimmed_mean(gradients, f=rule.f)
    # Rows that tie are ordered by weight; of two values equally near the upper one is dropped.
    order = np.lexsort((np.repeat(np.array(weights)[:, None], len(centre), 1), gradients), axis=0)
    is_low = centre - gradients.min(axis=0) > gradients.max(axis=0) - centre
    pushed = np.where(is_low, data.draw(lowest), data.draw(highest)).astype(np.float32)
    dropped = np.where(is_low, order[0], order[-1])
    np.put_along_axis(gradients, dropped[None], pushed[None], axis=0)
    changed = loft.aggregate(gradients, rule, weights=given_weights)
    assert_same_bits(changed, torch.from_numpy(wanted))


@settings(deadline=None)
@given(gradients=matrices(any_float))
def test_negation_turns_the_lower_median_into_the_upper(gradients: Array) -> None:
    assume(not np.isnan(gradients).any())
    lower = loft.median(-gradients, kind="lower")
    np.testing.assert_array_equal(lower, -loft.median(gradients, kind="upper"))


@settings(deadline=None)
@given(gradients=matrices(finite), data=st.data())
def test_negation_negates_a_trimmed_mean_exactly(gradients: Array, data: st.DataObject) -> None:
    f = pick_f(data, len(gradients))
    np.testing.assert_array_equal(
        loft.trimmed_mean(-gradients, f=f), -loft.trimmed_mean(gradients, f=f)
    )


@settings(deadline=None)
@given(gradients=matrices(finite), build=rules, power=st.integers(-8, 8), data=st.data())
def test_scaling_by_a_power_of_two_scales_the_result(
    gradients: Array, build: Build, power: int, data: st.DataObject
) -> None:
    rule = build(pick_f(data, len(gradients)))
    assume((np.abs(gradients[gradients != 0]) > 1e-20).all())
    scaled = loft.aggregate(np.ldexp(gradients, power), rule)
    np.testing.assert_array_equal(scaled, np.ldexp(loft.aggregate(gradients, rule), power))


@settings(deadline=None)
@given(gradients=matrices(finite), weights=st.lists(st.integers(1, 3), min_size=40, max_size=40))
@example(gradients=np.full((15, 1), 1e-45, np.float32), weights=[1] * 14 + [2] + [1] * 25)
def test_weight_of_two_is_a_row_given_twice(gradients: Array, weights: list[int]) -> None:
    counts = weights[: len(gradients)]
    repeated = np.repeat(gradients, counts, axis=0)
    np.testing.assert_array_equal(loft.median(gradients, weights=counts), loft.median(repeated))


@settings(deadline=None)
@given(gradients=matrices(finite))
def test_no_trim_is_the_mean_and_full_trim_the_median(gradients: Array) -> None:
    f = (len(gradients) - 1) // 2
    np.testing.assert_array_equal(loft.trimmed_mean(gradients, f=0), loft.mean(gradients))
    np.testing.assert_allclose(loft.trimmed_mean(gradients, f=f), loft.median(gradients), rtol=2e-7)


@settings(deadline=None)
@given(gradients=matrices(finite), build=rules, data=st.data())
def test_means_err_by_no_more_than_the_depth_of_their_tree(
    gradients: Array, build: Build, data: st.DataObject
) -> None:
    rule = build(pick_f(data, len(gradients)))
    assume(not isinstance(rule, loft.MeanAroundMedian | loft.Phocas))  # they choose by rounding
    exact = reference(gradients.astype(np.float64), rule)
    depth = max(1, (len(gradients) - 1).bit_length()) + 1
    size = np.abs(gradients.astype(np.float64)).max(axis=0)
    error = np.abs(loft.aggregate(gradients, rule) - exact)
    assert (error <= depth * 2.0**-24 * size + 2.0**-149).all()


@pytest.mark.parametrize("rows", range(1, 131))
def test_median_and_trimmed_mean_agree_with_the_oracle_at_every_row_count(rows: int) -> None:
    gradients = torch.randn(rows, 67, generator=torch.Generator().manual_seed(rows))
    for rule in (loft.Median(), loft.TrimmedMean((rows - 1) // 3), loft.Phocas((rows - 1) // 2)):
        assert_same_bits(loft.aggregate(gradients, rule), expected(gradients, rule))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rule_and_weight_agrees_with_the_oracle_at_every_row_count(
    dtype: torch.dtype,
) -> None:
    for rows in (*range(1, 131), 257, 1024):
        gradients = hard_gradients(rows, 37, dtype, seed=rows)
        weights = [1 + (7 * row) % 5 for row in range(rows)]
        for rule in rules_for(rows):
            assert_same_bits(loft.aggregate(gradients, rule), expected(gradients, rule))
            assert_same_bits(
                loft.aggregate(gradients, rule, weights=weights),
                expected(gradients, rule, weights=weights),
            )
