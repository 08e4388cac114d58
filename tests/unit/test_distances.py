"""The table of squared distances, and the weighted pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.aggregation import compute, fallback
from loft_hvd.aggregation.distances import BLOCK, distance_sums, distances, mixed_rows
from loft_hvd.aggregation.mixing import Mix, MixedRule
from tests.support.gradients import DTYPES, assert_same_bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 257, BLOCK + 1])
def test_table_holds_squared_distances_and_lengths(dtype: torch.dtype, numel: int) -> None:
    rows = torch.randn(4, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    table = distances(list(rows))
    wide = torch.cat([rows.double(), torch.zeros(1, numel)])
    wanted = (wide[:, None] - wide).square().sum(dim=2).numpy()
    np.testing.assert_allclose(table, wanted, rtol=2e-6)


def test_more_blocks_than_are_taken_at_once_add_up() -> None:
    rows = torch.randn(2, 33 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    wanted = (rows[0].double() - rows[1].double()).square().sum()
    np.testing.assert_allclose(distances(list(rows))[0, 1], wanted, rtol=2e-6)


def test_a_part_that_all_rows_have_in_common_costs_nothing() -> None:
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    common = 2.0**12 * torch.ones(5000)
    moved = rows + common  # rounded here, so compare with what is left after it
    table = distances(list(moved))[:3, :3]
    left = (moved - common).double()
    wanted = (left[:, None] - left).square().sum(dim=2).numpy()
    np.testing.assert_allclose(table, wanted, rtol=2e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e30])
def test_a_row_that_cannot_be_measured_is_infinitely_far_from_all(wrong: float) -> None:
    rows = torch.ones(3, 100)
    rows[1, 50] = wrong
    table = distances(list(rows))
    is_infinite = np.zeros((4, 4), bool)
    is_infinite[1] = is_infinite[:, 1] = True
    np.testing.assert_array_equal(np.isinf(table), is_infinite)


def test_two_equal_rows_too_long_for_their_squares_are_not_measured() -> None:
    rows = torch.tensor([[1e30], [1e30], [1.0]])
    assert np.isinf(distances(list(rows))[:2]).all()


def test_a_row_of_weight_zero_is_not_read() -> None:
    rows = [torch.tensor([float("nan")]), torch.tensor([2.0]), torch.tensor([4.0])]
    matrix = np.array([[0.0, 0.5, 0.5], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    mixed = torch.cat(mixed_rows(rows, Mix(np.ones(3), matrix, None, loft.Mean())))
    assert_same_bits(mixed, torch.tensor([3.0, 0.0, float("nan")]))


def test_weights_are_rounded_to_the_arithmetic_first() -> None:
    row = torch.tensor([3.0])
    by = np.array([1 / 3])
    for mix in (
        Mix(by, np.ones((1, 1)), None, loft.Mean()),
        Mix(by / by, by[None], None, loft.Mean()),
    ):
        third = mixed_rows([row], mix)[0]
        assert_same_bits(third, row * torch.tensor([np.float32(1 / 3)]))


def test_equal_weights_are_multiplied_with_the_sum() -> None:
    rows = [torch.tensor([value]) for value in (0.1, 0.2, 0.3)]
    mix = Mix(np.ones(3), np.full((1, 3), 1 / 3), None, loft.Mean())
    assert_same_bits(mixed_rows(rows, mix)[0], sum(rows) * torch.tensor([np.float32(1 / 3)]))


@pytest.mark.parametrize("is_common", [True, False])
@pytest.mark.parametrize("num_rows", [3, 8, 16, 33])
def test_mixed_rows_that_begin_alike_have_the_bits_of_rows_alone(
    num_rows: int, is_common: bool
) -> None:
    # The kernels add what several mixed rows begin with once, and go on from there.
    draw = np.random.default_rng(num_rows)
    by = np.ones(num_rows) / num_rows if is_common else draw.uniform(0.1, 1.0, num_rows)
    names = np.tri(num_rows, dtype=np.bool_)[draw.permutation(num_rows)]
    names |= draw.random(names.shape) < 0.3
    matrix = np.where(names, by, 0.0)
    mix = Mix(np.ones(num_rows), matrix, None, loft.TrimmedMean(num_rows // 4))
    rows = list(torch.from_numpy(draw.standard_normal((num_rows, 1111)).astype(np.float32)))
    found, wanted = torch.empty(1111), torch.empty(1111)
    decided = MixedRule(loft.NNM(loft.TrimmedMean(num_rows // 4)), mix)
    compute.aggregate_rows(rows, decided, weights=None, out=found)
    fallback.aggregate_mixed(rows, mix, out=wanted)
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("num_rows", [2, 5, 7, 10, 16, 17, 23, 37])
def test_the_kernel_measures_every_pair(num_rows: int) -> None:
    rows = list(torch.randn(num_rows, 600, generator=torch.Generator().manual_seed(num_rows)))
    np.testing.assert_array_equal(compute.measure_rows(rows), distance_sums(rows))
