"""The kernels and the plain torch path against the definition, and the definition by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.reference import reference
from loft_hvd.errors import AggregationError, ArgumentTypeError, LoftError

NAN, INF = math.nan, math.inf
NUMELS = (0, 1, 15, 17, 31, 33, 1000)
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 40, 64, 65, 130)
# Relative to the largest kept value: one rounding of the result, and of the sums behind it.
TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def rules_for(num_rows: int) -> list[loft.Rule]:
    f = (num_rows - 1) // 2
    made: list[loft.Rule] = [loft.Mean(), loft.Median(), loft.Median(kind="lower")]
    made += [loft.Median(kind="upper"), loft.TrimmedMean(f=f), loft.TrimmedMean(f=f // 2)]
    return [*made, loft.MeanAroundMedian(f=f // 2), loft.Phocas(f=f // 2)]


def gradients(num_rows: int, numel: int, dtype: torch.dtype, *, special: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * 7919 + numel)
    rows = torch.randn(num_rows, numel, generator=generator, dtype=torch.float64)
    if special:
        values = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 1e-42])
        picks = torch.randint(0, len(values), rows.shape, generator=generator)
        rows = torch.where(torch.rand(rows.shape, generator=generator) < 0.2, values[picks], rows)
    return rows.to(dtype)


def assert_is_reference(out: Tensor, rows: Tensor, rule: loft.Rule, **options: object) -> None:
    expected = reference(rows.double().numpy(), rule, **options)  # type: ignore[arg-type]
    tolerance = TOLERANCES[rows.dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = torch.from_numpy(expected).to(rows.dtype).double().numpy()
    np.testing.assert_allclose(out.double().numpy(), rounded, rtol=tolerance, atol=tolerance)


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


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", SIZES)
def test_kernels_equal_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    for numel in NUMELS:
        rows = gradients(num_rows, numel, dtype)
        for rule in rules_for(num_rows):
            assert_is_reference(loft.aggregate(rows, rule), rows, rule)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 16, 33])
def test_special_values_equal_the_reference(num_rows: int) -> None:
    rows = gradients(num_rows, 500, torch.float32, special=True)
    for rule in [rule for rule in rules_for(num_rows) if not isinstance(rule, loft.Mean)]:
        out = loft.aggregate(rows, rule)
        expected = reference(rows.numpy(), rule, precision=np.float32)
        np.testing.assert_array_equal(out.numpy(), expected, err_msg=str(rule))


@pytest.mark.parametrize("weights", [[1, 2, 3, 4, 5], [97, 1, 1, 1, 1], [3, 0, 3, 1, 2]], ids=str)
def test_weights_equal_the_reference(weights: list[int]) -> None:
    rows = gradients(5, 333, torch.float32)
    for rule in [loft.Mean(), loft.Median(), *rules_for(3)[4:]]:
        out = loft.aggregate(rows, rule, weights=weights)
        assert_is_reference(out, rows, rule, weights=weights)


@pytest.mark.parametrize("num_rows", [3, 4, 9, 17])
def test_equal_weights_give_the_bits_of_no_weights(num_rows: int) -> None:
    rows = gradients(num_rows, 100, torch.float32)
    for rule in rules_for(num_rows):
        weighted = loft.aggregate(rows, rule, weights=[7] * num_rows)
        assert torch.equal(weighted, loft.aggregate(rows, rule))


@pytest.mark.parametrize("num_rows", [4, 8, 16])
def test_an_absent_row_is_as_if_deleted_whatever_it_holds(num_rows: int) -> None:
    rows = gradients(num_rows, 77, torch.float32)
    present = [row != 2 for row in range(num_rows)]
    kept = rows[torch.tensor(present)]
    rows[2] = NAN
    for rule in rules_for(num_rows - 1):
        masked = loft.aggregate(rows, rule, present=present)
        assert torch.equal(masked, loft.aggregate(kept, rule))


@pytest.mark.parametrize("num_rows", [3, 6, 11, 24])
def test_the_order_of_rows_changes_no_bit(num_rows: int) -> None:
    rows = gradients(num_rows, 200, torch.float32, special=True)
    weights = [row % 4 + 1 for row in range(num_rows)]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    for rule in rules_for(num_rows):
        one = loft.aggregate(rows, rule, weights=weights)
        other = loft.aggregate(rows[order], rule, weights=[weights[i] for i in order.tolist()])
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), str(rule)


@pytest.mark.parametrize("num_rows", [3, 5, 12])
def test_what_is_dropped_leaves_no_trace(num_rows: int) -> None:
    f = (num_rows - 1) // 2
    rows = gradients(num_rows, 64, torch.float32)
    wild = rows.clone()
    wild[rows.argsort(dim=0)[:f], torch.arange(64)] = -1e30
    wild[rows.argsort(dim=0)[num_rows - f :], torch.arange(64)] = NAN
    rule = loft.TrimmedMean(f=f)
    assert torch.equal(loft.aggregate(rows, rule), loft.aggregate(wild, rule))


@pytest.mark.parametrize("num_rows", [2, 5, 8, 20])
def test_shift_scale_and_sign(num_rows: int) -> None:
    rows = gradients(num_rows, 50, torch.float64)
    for rule in rules_for(num_rows):
        base = loft.aggregate(rows, rule)
        torch.testing.assert_close(loft.aggregate(rows * 4, rule), base * 4)
        torch.testing.assert_close(loft.aggregate(rows + 2, rule), base + 2)
    lower = loft.aggregate(rows, loft.Median(kind="lower"))
    assert torch.equal(lower, -loft.aggregate(-rows, loft.Median(kind="upper")))


@pytest.mark.parametrize("num_rows", [2, 5, 9])
def test_f_0_is_the_mean(num_rows: int) -> None:
    rows = gradients(num_rows, 50, torch.float32)
    assert torch.equal(loft.trimmed_mean(rows, f=0), loft.aggregate(rows, loft.Mean()))


def inputs_of(rows: Tensor) -> dict[str, Tensor | Sequence[Tensor]]:
    wide = torch.zeros(rows.shape[0], 2 * rows.shape[1] + 3)
    wide[:, 3::2][:, : rows.shape[1]] = rows
    return {
        "separate tensors": list(rows.clone().unbind()),
        "padded rows": torch.cat([rows, rows], dim=1)[:, : rows.shape[1]],
        "transposed": rows.t().contiguous().t(),
        "every other column": wide[:, 3::2][:, : rows.shape[1]],
        "unaligned": torch.cat([torch.zeros(1), rows.flatten()])[1:].view_as(rows),
    }


@pytest.mark.parametrize("kind", inputs_of(torch.zeros(1, 1)))
def test_memory_layout_changes_no_bit(kind: str) -> None:
    rows = gradients(5, 101, torch.float32)
    laid_out = inputs_of(rows)[kind]
    for rule in rules_for(5):
        assert torch.equal(loft.aggregate(laid_out, rule), loft.aggregate(rows, rule))


def test_numpy_in_numpy_out() -> None:
    rows = gradients(5, 40, torch.float64)
    out = loft.median(rows.numpy())
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(out, loft.median(rows).numpy())


def test_out_is_filled_and_returned() -> None:
    rows = gradients(4, 40, torch.float32)
    out = torch.full((40,), NAN)
    assert loft.median(rows, out=out) is out
    assert torch.equal(out, loft.median(rows))


def test_stride_0_rows_reach_beyond_what_memory_holds() -> None:
    rows = torch.ones(1).expand(6, 100_000)
    assert torch.equal(loft.median(rows), torch.ones(100_000))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 9, 20])
def test_plain_torch_path_equals_the_kernels(num_rows: int) -> None:
    rows = gradients(num_rows, 300, torch.float32, special=True)
    for rule in [rule for rule in rules_for(num_rows) if not isinstance(rule, loft.Mean)]:
        out = torch.empty(300)
        fallback.aggregate_rows(list(rows.unbind()), rule, weights=None, out=out)
        np.testing.assert_array_equal(out.numpy(), loft.aggregate(rows, rule).numpy(), str(rule))


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


def test_custom_rules_see_the_rows_that_count() -> None:
    rule = loft.Custom(lambda rows: rows.amax(dim=0))
    rows = torch.tensor([[1.0, 5.0], [9.0, 9.0], [3.0, 2.0]])
    assert loft.aggregate(rows, rule, present=[True, False, True]).tolist() == [3.0, 5.0]


@pytest.mark.parametrize(
    ("rows", "rule", "error"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), loft.Median(), ArgumentTypeError),
        (torch.zeros(4, 2), loft.TrimmedMean(f=2), AggregationError),
        (torch.zeros(0, 2), loft.Median(), AggregationError),
        ([torch.zeros(2), torch.zeros(3)], loft.Median(), LoftError),
        ([torch.zeros(2), torch.zeros(2).double()], loft.Median(), LoftError),
    ],
)
def test_what_does_not_fit_is_refused(
    rows: Tensor, rule: loft.Rule, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        loft.aggregate(rows, rule)
    assert isinstance(caught.value, LoftError)
    assert isinstance(caught.value, ValueError | TypeError)
