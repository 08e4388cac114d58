"""The public functions: every rule, dtype and form of input, bit for bit as the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loft_hvd import aggregation as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError, LoftError
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


@pytest.fixture(params=["extension", "plain torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain torch":
        monkeypatch.setattr(compute, "extension", lambda: None)
        monkeypatch.setattr(compute, "_warn_once", lambda: None)
    elif extension() is None:
        pytest.skip("the C++ extension is not built")


@pytest.mark.usefixtures("path")
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


@pytest.mark.usefixtures("path")
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


@pytest.mark.parametrize(
    "layout",
    [
        lambda g: g.t().contiguous().t(),
        lambda g: torch.stack([g, g], dim=2).reshape(len(g), -1)[:, ::2],
        lambda g: torch.nn.functional.pad(g, (3, 5))[:, 3:-5],
        lambda g: list(g),
        lambda g: [row.clone() for row in g],
        lambda g: g.numpy(),
        lambda g: list(g.numpy()),
        lambda g: np.asfortranarray(g.numpy()),
        lambda g: g.numpy()[:, ::-1][:, ::-1],
        lambda g: g.clone().requires_grad_(),
    ],
    ids=[
        "transposed",
        "strided",
        "padded",
        "rows",
        "apart",
        "numpy",
        "numpy rows",
        "fortran",
        "reversed twice",
        "requires grad",
    ],
)
def test_layout_of_the_rows_does_not_change_a_bit(layout: Callable[[Tensor], Any]) -> None:
    gradients = hard_gradients(6, 131, torch.float32, seed=1)
    rule = loft.TrimmedMean(2)
    assert_same_bits(loft.aggregate(layout(gradients), rule), expected(gradients, rule))


def test_one_row_used_many_times_needs_no_memory_of_its_own() -> None:
    row = hard_gradients(1, 77, torch.float32, seed=2)[0]
    assert_same_bits(loft.median(row.expand(9, -1)), expected(row[None], loft.Median()))


def test_read_only_arrays_are_read() -> None:
    values = np.ones((3, 5), np.float32)
    values.flags.writeable = False
    np.testing.assert_array_equal(loft.median(values), np.ones(5))


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


def test_out_is_filled_and_returned() -> None:
    gradients = hard_gradients(3, 50, torch.float32, seed=6)
    out = torch.full((50,), float("nan"))
    assert loft.median(gradients, out=out) is out
    assert_same_bits(out, expected(gradients, loft.Median()))


def test_custom_rule_sees_the_rows_that_count_and_its_weights() -> None:
    gradients = torch.arange(12.0).reshape(4, 3)
    rule = loft.Custom(lambda rows, w: rows[w.index(max(w))], takes_weights=True)
    result = loft.aggregate(gradients, rule, weights=[1, 0, 5, 2])
    torch.testing.assert_close(result, gradients[2])


def test_custom_rule_of_a_wrong_shape_is_named() -> None:
    with pytest.raises(AggregationError, match=r"must return Tensor of shape \(3,\)"):
        loft.aggregate(torch.ones(4, 3), loft.Custom(lambda rows: rows))


_GOOD = torch.ones(5, 4)
_UNTYPED: Any = loft  # wrong types are the test


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: _UNTYPED.trimmed_mean(_GOOD, f=3), AggregationError, "f=3 .* f <= 2"),
        (
            lambda: _UNTYPED.trimmed_mean(_GOOD, f=1, present=[1, 1, 0, 0, 0]),
            AggregationError,
            "absent",
        ),
        (lambda: _UNTYPED.median(_GOOD, weights=[0] * 5), AggregationError, "weight 0"),
        (lambda: _UNTYPED.median(_GOOD.int()), ArgumentTypeError, "int32"),
        (lambda: _UNTYPED.median(_GOOD.bool()), ArgumentTypeError, "bool"),
        (lambda: _UNTYPED.median(torch.ones(3)), ArgumentError, "world_size, numel"),
        (lambda: _UNTYPED.median([]), AggregationError, "no rows"),
        (lambda: _UNTYPED.median([torch.ones(3), torch.ones(4)]), ArgumentError, "row 1"),
        (
            lambda: _UNTYPED.median([torch.ones(3), torch.ones(3).half()]),
            ArgumentTypeError,
            "row 1",
        ),
        (lambda: _UNTYPED.median([torch.ones(3), np.ones(3)]), ArgumentTypeError, "one kind"),
        (lambda: _UNTYPED.median(_GOOD, weights=[1, 1]), ArgumentError, "5 rows"),
        (lambda: _UNTYPED.median(_GOOD, weights=[1, 1, 1, 1, -1]), ArgumentError, "row 4"),
        (lambda: _UNTYPED.median(_GOOD, weights=[1, 1, 1, 1, 0.5]), ArgumentTypeError, "row 4"),
        (
            lambda: _UNTYPED.median(_GOOD, weights=[1, 1, 1, 1, float("nan")]),
            ArgumentTypeError,
            "row",
        ),
        (lambda: _UNTYPED.median(_GOOD, weights=[2**30, 1, 1, 1, 1]), ArgumentError, "exact"),
        (lambda: _UNTYPED.median(_GOOD, present=[1, 1, 1]), ArgumentError, "present has shape"),
        (lambda: _UNTYPED.median(_GOOD, present=[0.5] * 5), ArgumentTypeError, "float values"),
        (
            lambda: _UNTYPED.median(_GOOD, present=[[1, 1]] * 4 + [[1]]),
            ArgumentError,
            r"\(5, 1, 2\)",
        ),
        (lambda: _UNTYPED.median(_GOOD, present=[]), ArgumentError, r"shape \(0,\)"),
        (lambda: _UNTYPED.median(_GOOD, present=[2] * 5), ArgumentTypeError, "such as 2"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(3)), ArgumentError, "out has shape"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(4).double()), ArgumentTypeError, "out has"),
        (lambda: _UNTYPED.median(_GOOD, out=_GOOD[2]), ArgumentError, "overlaps row 2"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(4, 2)[:, 0]), ArgumentError, "contiguous"),
        (lambda: _UNTYPED.aggregate(_GOOD, "median"), ArgumentTypeError, "parse_rule"),
        (lambda: _UNTYPED.median("rows"), ArgumentTypeError, "str"),
    ],
)
def test_wrong_arguments_say_what_was_asked_and_the_way_out(
    call: Callable[[], Any], error: type[LoftError], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()
