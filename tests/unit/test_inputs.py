"""What the public functions take: rows of any layout, presence, out; and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import loft_hvd as loft
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError, LoftError
from tests.support.gradients import assert_same_bits, expected, hard_gradients


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


@pytest.mark.parametrize("numel", [1, 8, 9, 14])
def test_blocks_that_hold_no_coordinate_need_no_rows(numel: int) -> None:
    gradients = hard_gradients(4, numel, torch.float32, seed=numel)
    present = np.ones((4, 7), bool)
    size = -(-numel // 7)  # coordinates of a block
    present[:, -(-numel // size) :] = False
    present[1, 0] = False
    result = loft.trimmed_mean(gradients, f=1, present=present)
    assert_same_bits(result, expected(gradients, loft.TrimmedMean(1), present=present))
    diagnosed, found = loft.diagnose(gradients, loft.TrimmedMean(1), present=present)
    assert_same_bits(diagnosed, result)
    assert found.num_seen == (numel, numel - min(size, numel), numel, numel)


@pytest.mark.parametrize("block", [0, 2, 4])
def test_a_block_with_too_few_rows_is_named(block: int) -> None:
    present = np.ones((4, 7), bool)
    present[:2, block] = False  # nine coordinates in seven blocks of two: the fifth holds one
    for call in (loft.aggregate, loft.diagnose):
        with pytest.raises(AggregationError, match=f"2 count in block {block} of present .*2 abs"):
            call(torch.ones(4, 9), loft.TrimmedMean(1), present=present)


def test_out_is_filled_and_returned() -> None:
    gradients = hard_gradients(3, 50, torch.float32, seed=6)
    out = torch.full((50,), float("nan"))
    assert loft.median(gradients, out=out) is out
    assert_same_bits(out, expected(gradients, loft.Median()))


def test_out_that_requires_grad_is_refused() -> None:
    exponential = torch.zeros(4, requires_grad=True).exp()
    for call in (loft.aggregate, loft.diagnose):
        with pytest.raises(ArgumentError, match=r"requires grad.*out\.detach\(\)"):
            call(torch.ones(3, 4), loft.Median(), out=exponential)
    assert exponential.tolist() == [1.0] * 4


@pytest.mark.usefixtures("both_paths")
def test_backward_raises_where_it_saved_what_was_overwritten() -> None:
    exponential = torch.zeros(4, requires_grad=True).exp()
    loft.median(torch.ones(3, 4), out=exponential.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        exponential.sum().backward()


@pytest.mark.usefixtures("both_paths")
def test_inference_mode_takes_out() -> None:
    with torch.inference_mode():
        out = torch.empty(4)
        loft.median(torch.ones(3, 4), out=out)
        assert out.tolist() == [1.0] * 4


def test_memory_maps_and_plain_arrays_mix(tmp_path: Path) -> None:
    values = hard_gradients(3, 50, torch.float32, seed=6)
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(4, 50))
    mapped[:3] = values.numpy()
    out = np.empty(50, np.float32)
    assert loft.median(mapped[:3], out=out) is out
    assert_same_bits(out, expected(values, loft.Median()))
    loft.median(values.numpy(), out=mapped[3])
    assert_same_bits(np.array(mapped[3]), expected(values, loft.Median()))


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("numel", [1, 2, 40])
def test_rows_that_negate_what_they_view_keep_their_sign(rows: int, numel: int) -> None:
    values = hard_gradients(2 * rows, numel, torch.float32, seed=numel)
    conjugate = torch.complex(values[:rows], values[rows:]).conj().imag
    wanted = expected(-values[rows:], loft.Median())
    assert_same_bits(loft.median(conjugate), wanted)
    assert_same_bits(loft.median(list(torch._neg_view(values[rows:]))), wanted)


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
        (lambda: _UNTYPED.median(_GOOD, weights=[0] * 5), AggregationError, "weight above 0"),
        (lambda: _UNTYPED.median(_GOOD.int()), ArgumentTypeError, "int32"),
        (lambda: _UNTYPED.median(_GOOD.bool()), ArgumentTypeError, "bool"),
        (lambda: _UNTYPED.median(torch.ones(3)), ArgumentError, r"numel\]; .* reshape\(1, -1\)"),
        (lambda: _UNTYPED.median(torch.ones(3, 2, 2)), ArgumentError, r"reshape\(3, -1\)"),
        (lambda: _UNTYPED.median([torch.ones(2, 2)] * 3), ArgumentError, r"must be 1-D; .*shape"),
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
            "row 4 of present has 1 blocks, row 0 2",
        ),
        (lambda: _UNTYPED.median(_GOOD, present=[]), ArgumentError, r"shape \(0,\)"),
        (lambda: _UNTYPED.median(_GOOD, present=[2] * 5), ArgumentTypeError, "such as 2"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(3)), ArgumentError, "out has shape"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(4).double()), ArgumentTypeError, "out has"),
        (lambda: _UNTYPED.median(_GOOD, out=_GOOD[2]), ArgumentError, "overlaps row 2"),
        (lambda: _UNTYPED.median(_GOOD, out=torch.ones(4, 2)[:, 0]), ArgumentError, "contiguous"),
        (lambda: _UNTYPED.aggregate(_GOOD, "median"), ArgumentTypeError, "parse_rule"),
        (lambda: _UNTYPED.median("rows"), ArgumentTypeError, "str"),
        (lambda: _UNTYPED.median(None), ArgumentTypeError, "2-D tensor.*type NoneType"),
        (lambda: _UNTYPED.median(5), ArgumentTypeError, "2-D tensor.*type int"),
        (lambda: _UNTYPED.median(_GOOD, weights=5), ArgumentTypeError, "weights=5 .* a list"),
        (
            lambda: _UNTYPED.median(_GOOD, weights=torch.tensor(5)),
            ArgumentTypeError,
            r"weights=tensor\(5\)",
        ),
        (lambda: _UNTYPED.median(_GOOD, weights={1, 2, 3, 4, 5}), ArgumentTypeError, "type set"),
        (lambda: _UNTYPED.median(_GOOD, present=True), ArgumentTypeError, "present=True .* a list"),
        (
            lambda: _UNTYPED.median(_GOOD, present=torch.tensor(True)),
            ArgumentTypeError,
            r"present=tensor\(True\)",
        ),
        (
            lambda: _UNTYPED.median(np.ma.masked_less(np.ones((3, 4)), 2)),
            ArgumentTypeError,
            "row 0 is a masked array.*present=",
        ),
        (lambda: _UNTYPED.Median().check(5.5), ArgumentTypeError, "world_size=5.5"),
        (lambda: _UNTYPED.median(_GOOD.to_sparse()), ArgumentTypeError, "sparse_coo.*to_dense"),
        (
            lambda: _UNTYPED.median([_GOOD[0], _GOOD[1].to_sparse()]),
            ArgumentTypeError,
            "row 1 has layout sparse_coo",
        ),
        (
            lambda: _UNTYPED.median(_GOOD, out=np.ones(4)),
            ArgumentTypeError,
            "out is of type nd",
        ),
        (
            lambda: _UNTYPED.median(_GOOD, out=torch._neg_view(torch.ones(4))),
            ArgumentError,
            "out is a view that negates",
        ),
    ],
)
def test_wrong_arguments_say_what_was_asked_and_the_way_out(
    call: Callable[[], Any], error: type[LoftError], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


def _freed(values: Tensor) -> Tensor:
    values.untyped_storage().resize_(0)
    return values


def _fake(num_rows: int) -> Tensor:
    with FakeTensorMode():
        return torch.randn(num_rows, 33)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _fake(5),
        lambda: list(_fake(5)),
        lambda: torch.empty(5, 33, device="meta"),
        lambda: list(torch.empty(5, 33, device="meta")),
        lambda: _freed(torch.randn(5, 33)),
        lambda: [torch.randn(33), _freed(torch.randn(33))],
        lambda: torch._to_functional_tensor(torch.randn(5, 33)),
    ],
)
def test_gradients_that_have_no_values_in_memory_are_refused(make: Callable[[], Any]) -> None:
    for call in (loft.median, loft.mean):
        with pytest.raises(ArgumentTypeError, match="has no values in memory"):
            call(make())
    with pytest.raises(ArgumentTypeError, match="has no values in memory"):
        loft.diagnose(make(), loft.Median())


@pytest.mark.parametrize(
    "transform",
    [
        lambda call: torch.vmap(call)(torch.randn(3, 5, 33)),
        lambda call: torch.func.grad(lambda rows: call(rows).sum())(torch.randn(5, 33)),
    ],
)
def test_gradients_inside_a_transform_are_refused(transform: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"inside torch\.vmap"):
        transform(loft.median)


def test_an_out_whose_storage_was_freed_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"out .*has no values in memory"):
        loft.median(torch.randn(5, 33), out=_freed(torch.randn(33)))


def test_a_copy_that_does_not_fit_in_memory_is_a_memory_error_of_ours() -> None:
    rows = torch.zeros(1, 1).expand(3, 2**46)  # 256 TiB where it must be copied, 4 bytes here
    with pytest.raises(MemoryError, match="no memory for a row of 70368744177664 values") as caught:
        loft.median(rows)
    assert isinstance(caught.value, LoftError)
