"""Laws of the rules that see rows, for any gradients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import loft_hvd as loft
from tests.support.gradients import assert_same_bits, expected

Array = npt.NDArray[np.float32]

MOVING = [  # with every row that moves, the result does
    "nnm+trimmed_mean:f={f}",
    "multi_krum:f={f}",
    "geometric_median:f={f}",
    "centred_clipping:f={f}",
    "caf:f={f}",
    "minimum_diameter:f={f}",
    "nnm+multi_krum:f={f}",
    "bucketing:size=1+nnm+phocas:f={f}",
]
TEXTS = [
    *MOVING,
    "arc+trimmed_mean:f={f}",
    "robust:f={f}",
    "nnm+principal_axis:f={f}",
    "nnm+arc+geometric_median:f={f}",
]
any_float = st.floats(width=32)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def matrices(draw: st.DrawFn) -> Array:
    """Rows without two equal scores, of which the row of lower number goes first."""
    source = np.random.default_rng(draw(seeds))
    # With 3 rows and f=1 the two nearest rows have the same score, for it is their distance.
    rows = source.standard_normal((draw(st.integers(4, 12)), draw(st.integers(2, 40))))
    return rows.astype(np.float32)


def pick(data: st.DataObject, rows: Array, texts: list[str]) -> loft.Rule:
    f = data.draw(st.integers(0, min(8, (len(rows) - 1) // 2)), label="f")
    return loft.parse_rule(data.draw(st.sampled_from(texts), label="rule").format(f=f))


@settings(deadline=None, max_examples=150)
@given(gradients=matrices(), data=st.data())
def test_order_of_the_rows_does_not_matter(gradients: Array, data: st.DataObject) -> None:
    # Of two rows that are farthest apart either may go, with the same diameter of those left: then
    # the order does matter.
    rule = pick(data, gradients, [text for text in TEXTS if "minimum" not in text])
    order = data.draw(st.permutations(range(len(gradients))), label="order")
    moved = loft.aggregate(gradients[order], rule)
    np.testing.assert_allclose(moved, loft.aggregate(gradients, rule), atol=1e-5)


@settings(deadline=None, max_examples=100)
@given(gradients=matrices(), power=st.integers(-20, 20), data=st.data())
def test_scaling_by_a_power_of_two_scales_the_result(
    gradients: Array, power: int, data: st.DataObject
) -> None:
    rule = pick(data, gradients, TEXTS)
    scaled = loft.aggregate(np.ldexp(gradients, power), rule)
    wanted = np.ldexp(loft.aggregate(gradients, rule), power)
    np.testing.assert_allclose(scaled, wanted, rtol=1e-5, atol=1e-6 * 2.0**power)


@settings(deadline=None, max_examples=100)
@given(gradients=matrices(), shift=st.integers(-64, 64), data=st.data())
def test_moving_all_rows_moves_the_result(
    gradients: Array, shift: int, data: st.DataObject
) -> None:
    rule = pick(data, gradients, MOVING)
    steps = np.float32(2**12)
    gradients = np.round(gradients * steps) / steps  # so that moving rounds nothing
    moved = loft.aggregate(gradients + np.float32(shift), rule)
    wanted = loft.aggregate(gradients, rule) + np.float32(shift)
    np.testing.assert_allclose(moved, wanted, atol=1e-6 * max(10, 10 * abs(shift)))


@settings(deadline=None, max_examples=50)
@given(gradients=matrices())
def test_without_byzantine_rows_to_expect_a_rule_is_the_mean(gradients: Array) -> None:
    wanted = loft.mean(gradients)
    for text in (
        "arc+nnm+trimmed_mean:f=0",
        "robust:f=0",
        "multi_krum:f=0",
        "minimum_diameter:f=0",
        "arc+caf:f=0",
    ):
        np.testing.assert_allclose(
            loft.aggregate(gradients, loft.parse_rule(text)), wanted, atol=1e-6
        )


@settings(deadline=None, max_examples=150)
@given(
    gradients=st.tuples(st.integers(3, 9), st.integers(1, 9)).flatmap(
        lambda shape: arrays(np.float32, shape, elements=any_float)
    ),
    is_weighted=st.booleans(),
    data=st.data(),
)
def test_results_are_the_references_bits_for_any_values(
    gradients: Array, is_weighted: bool, data: st.DataObject
) -> None:
    rule = pick(data, gradients, TEXTS)
    weights = [1 + row % 3 for row in range(len(gradients))] if is_weighted else None
    rows = torch.from_numpy(gradients)
    wanted = expected(rows, rule, weights=weights)
    assert_same_bits(loft.aggregate(rows, rule, weights=weights), wanted)
