"""What a step is weighted by."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from loft_hvd.balance.plan import StepSizes
from loft_hvd.pipeline.weights import capped_weights, combine_passes

SIZES = st.lists(st.integers(0, 500), min_size=1, max_size=12).filter(lambda s: sum(s) > 0)


@given(sizes=SIZES)
def test_no_weight_exceeds_twice_the_mean_and_smaller_ones_keep_their_proportions(
    sizes: list[int],
) -> None:
    weights = capped_weights(sizes)
    present = [size for size in sizes if size > 0]
    cap = Fraction(2 * sum(sizes), len(present))
    expected = [min(Fraction(size), cap) for size in sizes]
    if weights is None:
        assert len({value for value in expected if value > 0}) == 1
        return
    unit = Fraction(expected[sizes.index(max(sizes))]) / weights[sizes.index(max(sizes))]
    assert [weight * unit for weight in weights] == expected


def test_equal_sizes_need_no_weights() -> None:
    assert capped_weights([8, 8, 0, 8]) is None


@given(sizes=SIZES)
def test_a_rank_without_samples_is_absent(sizes: list[int]) -> None:
    weights = combine_passes([StepSizes(0, 0, tuple(sizes))], rank=0)
    assert weights.present == tuple(size > 0 for size in sizes)


def test_rows_of_ranks_that_missed_a_pass_are_scaled_up() -> None:
    passes = [StepSizes(0, 0, (4, 4)), StepSizes(0, 1, (3, 0))]
    assert combine_passes(passes, rank=0).row_scale == 1.0
    assert combine_passes(passes, rank=1).row_scale == 2.0
    assert combine_passes(passes, rank=1).present == (True, True)
    assert combine_passes(passes, rank=1).weights == (7, 4)
