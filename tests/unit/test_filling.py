"""Blocks of rows that did not come are filled from those that did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.reference import filling_rule, filling_weights
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import AggregationError
from tests.support.gradients import DTYPES, assert_same_bits, hard_gradients
from tests.support.holes import draw_holes, expected_filled, least_rows

MODULE: Any = extension()  # None where it is not built
RULES = (
    "mean",
    "median",
    "median:kind=lower",
    "median:kind=upper",
    "trimmed_mean:f=0",
    "trimmed_mean:f=2",
    "mean_around_median:f=1",
    "phocas:f=1",
    "robust:f=1",
    "nnm+trimmed_mean:f=2",
    "clip:norm=1.0+median:kind=lower",
    "geometric_median:f=1",
)
OWN = 2


def filled_by_us(
    rows: Tensor, holes: Holes, rule: Rule, *, own: int = OWN, **others: Any
) -> Tensor:
    given = rows.clone()
    fill_holes(given, holes, rule, own=own, **others)
    return given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", RULES)
@pytest.mark.usefixtures("both_paths")
def test_holes_have_the_bits_of_the_definition(text: str, dtype: torch.dtype) -> None:
    rule, rows = parse_rule(text), hard_gradients(8, 1000, dtype, seed=1)
    holes = draw_holes((8, 1000), block_numel=96, shares=0.3, own=OWN, least=5, seed=2)
    assert holes.is_any
    wanted = expected_filled(rows, holes, rule, own=OWN)
    assert_same_bits(filled_by_us(rows, holes, rule).view(-1), wanted.view(-1))


@pytest.mark.parametrize("num_rows", [2, 3, 8, 17, 40])
@pytest.mark.parametrize("weights", [None, (3, 1), (4, 2), (5, 5)], ids=str)
@pytest.mark.usefixtures("both_paths")
def test_holes_under_a_mean_are_filled_by_weight(
    num_rows: int, weights: tuple[int, ...] | None
) -> None:
    own = num_rows - 1
    by = None if weights is None else [weights[row % 2] for row in range(num_rows)]
    rows = hard_gradients(num_rows, 333, torch.float32, seed=num_rows)
    holes = draw_holes((num_rows, 333), block_numel=10, shares=0.4, own=own, least=2, seed=3)
    wanted = expected_filled(rows, holes, loft.Mean(), own=own, weights=by)
    actual = filled_by_us(rows, holes, loft.Mean(), own=own, weights=by)
    assert_same_bits(actual.view(-1), wanted.view(-1))


def mean_weights(weights: list[int], loss: float, *, own: int = 0) -> Tensor:
    """Return what rows weigh in a mean on average, exact ones 1, where so large a share is lost.

    Of all patterns of holes each is a block of one value; at least one row travelled there.
    """
    num_rows = len(weights)
    patterns = torch.arange(1 << num_rows)
    missing = torch.stack([patterns >> row & 1 for row in range(num_rows)])
    travelled = [row for row in range(num_rows) if row != own]
    missing = missing[:, (missing[own] == 0) & (missing[travelled].sum(0) < num_rows - 1)]
    lost = missing[travelled].double()
    chance = (loss**lost * (1 - loss) ** (1 - lost)).prod(0)
    found = []
    for row in range(num_rows):
        rows = torch.zeros(missing.shape, dtype=torch.float64)
        rows[row] = 1.0
        holes = Holes(missing.to(torch.uint8).contiguous(), 1)
        fill_holes(rows, holes, loft.Mean(), own=own, weights=weights)
        aggregate = loft.mean(rows, weights=weights)
        found.append((aggregate * chance).sum() / chance.sum())
    return torch.stack(found) * sum(weights) / torch.tensor(weights)


@pytest.mark.parametrize(
    "weights",
    [
        [7, 7, 5, 5, 5],
        [96, 96, 96, 48, 48],
        [64, 64, 64, 32, 32, 64],
        [7, 100, 50, 50, 40, 10, 6],
        [1, 5, 1, 1, 1, 1, 1, 1],
        [90, 1, 2, 3, 4, 5, 6, 7],
    ],
)
@pytest.mark.usefixtures("both_paths")
def test_under_a_mean_rows_that_lose_alike_keep_their_weights(weights: list[int]) -> None:
    assert (mean_weights(weights, 0.1) - 1).abs().max() < 1e-2
    assert (mean_weights(weights, 0.01) - 1).abs().max() < 1.5e-4


@pytest.mark.parametrize("weights", [(1,), (5, 5), (3, 2, 2), (100, 50, 50, 40, 10, 6), (2,) * 9])
def test_a_row_gains_by_others_holes_what_it_loses_by_its_own(weights: tuple[int, ...]) -> None:
    by = np.array(filling_weights(weights), float)
    gains = by * (by.sum() - by) if len(weights) > 1 else by
    np.testing.assert_allclose(gains / gains.sum(), np.array(weights) / sum(weights), rtol=1e-4)


@pytest.mark.parametrize("weights", [(4, 2, 1), (100, 1), (1, 3, 1)])
def test_a_row_of_more_than_half_of_the_weight_fills_nearly_alone(weights: tuple[int, ...]) -> None:
    by = filling_weights(weights)
    assert max(by) > 0.95 * sum(by)
    assert min(by) > 0


@pytest.mark.parametrize("numel", [0, 1, 31, 320, 321, 5000])
@pytest.mark.parametrize("rule", [loft.Median(), loft.TrimmedMean(1)], ids=str)
@pytest.mark.usefixtures("both_paths")
def test_rows_of_any_length_are_filled(rule: Rule, numel: int) -> None:
    rows = hard_gradients(5, numel, torch.float32, seed=numel)
    holes = draw_holes((5, numel), block_numel=320, shares=0.9, own=OWN, least=3, seed=5)
    wanted = expected_filled(rows, holes, rule, own=OWN)
    assert_same_bits(filled_by_us(rows, holes, rule).view(-1), wanted.view(-1))


@pytest.mark.usefixtures("both_paths")
def test_rows_may_lie_apart_at_any_address() -> None:
    matrix = hard_gradients(6, 700, torch.float16, seed=6)
    holes = draw_holes((6, 700), block_numel=64, shares=0.3, own=OWN, least=3, seed=7)
    rows = [torch.zeros(701 + row, dtype=matrix.dtype)[row + 1 :] for row in range(6)]
    for row, values in zip(rows, matrix, strict=True):
        row.copy_(values)
    fill_holes(rows, holes, loft.TrimmedMean(1), own=OWN)
    wanted = expected_filled(matrix, holes, loft.TrimmedMean(1), own=OWN)
    assert_same_bits(torch.stack(rows).view(-1), wanted.view(-1))


@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median(), loft.TrimmedMean(1)], ids=str)
@pytest.mark.parametrize("is_by_weight", [False, True])
@pytest.mark.usefixtures("both_paths")
def test_absent_rows_fill_nothing_and_are_not_filled(rule: Rule, is_by_weight: bool) -> None:
    rows = hard_gradients(7, 500, torch.float32, seed=8)
    rows[[0, 5]] = torch.nan  # whatever their memory holds
    holes = draw_holes((7, 500), block_numel=50, shares=0.2, own=OWN, least=7, seed=9)
    holes.missing[0] = 1
    holes.missing[3, ::2] = 1
    is_there = [row not in (0, 5) for row in range(7)]
    how = {"weights": [int(there) for there in is_there]} if is_by_weight else {"present": is_there}
    actual = filled_by_us(rows, holes, rule, **how)
    wanted = expected_filled(rows, holes, rule, own=OWN, **how)
    assert_same_bits(actual.view(-1), wanted.view(-1))
    assert actual[0].isnan().all()
    assert not torch.equal(actual[3], rows[3])


@pytest.mark.parametrize(
    ("rule", "wanted"), [(loft.Mean(), 3.0), (loft.TrimmedMean(0), 12.0), (loft.Median(), 4.0)]
)
@pytest.mark.usefixtures("both_paths")
def test_the_own_row_fills_holes_but_those_under_a_mean(rule: Rule, wanted: float) -> None:
    rows = torch.tensor([[30.0, 2.0], [7.0, 2.0], [4.0, 4.0], [2.0, 9.0]])
    holes = Holes(torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]], dtype=torch.uint8), 1)
    fill_holes(rows, holes, rule, own=0)
    assert rows.tolist() == [[30.0, 2.0], [wanted, 2.0], [4.0, 4.0], [2.0, 9.0]]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mean", "mean"),
        ("mean:reproducible=True", "mean"),
        ("median:kind=upper", "median:kind=upper"),
        ("trimmed_mean:f=3", "trimmed_mean:f=3"),
        ("phocas:f=2", "trimmed_mean:f=2"),
        ("robust:f=1", "trimmed_mean:f=1"),
        ("arc+nnm+trimmed_mean:f=2", "trimmed_mean:f=2"),
        ("bulyan:f=1", "trimmed_mean:f=1"),
        ("bucketing:size=2+multi_krum:f=1", "trimmed_mean:f=1"),
        # Whose f is no bound on what they survive.
        ("clip:norm=2.0+median:kind=lower", "median:kind=lower"),
        ("bucketing:size=2+median", "median"),
        ("geometric_median:f=0", "median"),
        ("clip:norm=1.0+geometric_median:f=1", "median"),
        # It averages its rows' neighbours.
        ("nnm+geometric_median:f=1", "trimmed_mean:f=1"),
    ],
)
def test_what_fills_survives_what_the_rule_survives(text: str, wanted: str) -> None:
    assert str(filling_rule(parse_rule(text))) == wanted


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        (loft.TrimmedMean(2), r"at least 5 rows, but of block 1 of 3 only 4 came, of 6 in all"),
        (loft.Robust(2), r"robust:f=2 .* at least 5 rows, but of block 1 of 3 only 4 came"),
        (loft.MultiKrum(2), r"at least 5 rows"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("both_paths")
def test_too_few_rows_of_a_block_are_refused(rule: Rule, match: str) -> None:
    rows = torch.randn(6, 25)
    before = rows.clone()
    holes = Holes(torch.zeros(6, 3, dtype=torch.uint8), 10)
    holes.missing[0] = holes.missing[1, 1] = 1
    with pytest.raises(AggregationError, match=match):
        fill_holes(rows, holes, rule, own=3)
    assert torch.equal(rows, before)


@pytest.mark.usefixtures("both_paths")
def test_under_a_mean_a_row_that_travelled_must_have_come() -> None:
    holes = Holes(torch.tensor([[0], [1], [1]], dtype=torch.uint8), 10)
    with pytest.raises(AggregationError, match="only 0 came, of 2 that travelled"):
        fill_holes(torch.randn(3, 10), holes, loft.Mean(), own=0)


def test_without_holes_nothing_is_looked_at() -> None:
    rows = torch.randn(3, 10)
    before = rows.clone()
    holes = Holes(torch.zeros(3, 1, dtype=torch.uint8), 320)
    assert not holes.is_any
    fill_holes(rows, holes, loft.TrimmedMean(1), own=0)
    assert torch.equal(rows, before)


def test_holes_are_counted() -> None:
    missing = torch.tensor([[0, 0, 0], [1, 0, 1]], dtype=torch.uint8)
    assert Holes(missing, 320).num_holes == 2


@pytest.mark.skipif(MODULE is None, reason="the C++ extension is not built")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [loft.Mean(), loft.Median(), loft.TrimmedMean(2)], ids=str)
def test_neither_threads_nor_the_instruction_set_change_a_bit_of_what_is_filled(
    rule: Rule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = hard_gradients(9, 40_000, dtype, seed=10)
    holes = draw_holes((9, 40_000), block_numel=320, shares=0.2, own=OWN, least=5, seed=11)
    weights = [1 + row % 3 for row in range(9)]
    wanted = expected_filled(rows, holes, rule, own=OWN, weights=weights)
    for level in MODULE.isa_levels():
        for threads in ("1", "3"):
            monkeypatch.setenv("LOFT_HVD_ISA", level)
            monkeypatch.setenv("LOFT_HVD_THREADS", threads)
            actual = filled_by_us(rows, holes, rule, weights=weights)
            assert_same_bits(actual.view(-1), wanted.view(-1))


def test_an_older_extension_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "extension", lambda: object())
    rows = hard_gradients(5, 100, torch.float32, seed=12)
    holes = draw_holes((5, 100), block_numel=32, shares=0.4, own=OWN, least=3, seed=13)
    wanted = expected_filled(rows, holes, loft.TrimmedMean(1), own=OWN)
    assert_same_bits(filled_by_us(rows, holes, loft.TrimmedMean(1)).view(-1), wanted.view(-1))


@pytest.mark.usefixtures("both_paths")
def test_autograd_is_told_that_rows_have_changed() -> None:
    weight = torch.ones(3, 10, requires_grad=True)
    rows = torch.randn(3, 10)
    product = (weight * rows).sum()
    holes = Holes(torch.tensor([[0], [0], [1]], dtype=torch.uint8), 10)
    fill_holes(rows, holes, loft.Median(), own=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.skipif(MODULE is None, reason="the C++ extension is not built")
def test_the_extension_itself_refuses_what_it_cannot_fill() -> None:
    rows, missing = np.ones((3, 8), np.float32), np.zeros((3, 2), np.uint8)
    missing[1, 1] = 1
    places = [row.ctypes.data for row in rows]
    where = missing.ctypes.data
    assert MODULE.fill_cpu(places, 8, 1, 1, 0, 1, [], where, 4, 3, 1, "") == 1
    for weights, block_numel, least, match in (
        ([], 0, 3, "block_numel=0, least=3: need blocks of values"),
        ([], 4, 2, r"least=2: need blocks of values, 2\*f < least"),
        ([1, 1], 4, 3, "one weight a row"),
    ):
        with pytest.raises(ValueError, match=match):
            MODULE.fill_cpu(places, 8, 1, 1, 0, 1, weights, where, block_numel, least, 1, "")
    with pytest.raises(ValueError, match="what is missing"):
        MODULE.fill_cpu(places, 8, 1, 1, 0, 1, [], 0, 4, 3, 1, "")
    assert (rows == 1).all()


@pytest.mark.parametrize("world_size", [4, 8])
def test_under_a_mean_every_row_keeps_its_share_where_all_lose_alike(world_size: int) -> None:
    # Rows of unit vectors show how much of each is in the mean: coordinate (i, k) of a block is 1
    # in row i alone. Zeros in the place of holes would leave 0.9 of the rows that travel.
    num_trials, share = 4000, np.zeros(world_size)
    unit = torch.eye(world_size).repeat(1, num_trials)  # [n, n * trials], a block a trial
    for own in range(world_size):
        shape = (world_size, unit.shape[1])
        holes = draw_holes(shape, block_numel=world_size, shares=0.1, own=own, least=2, seed=own)
        rows = filled_by_us(unit, holes, loft.Mean(), own=own)
        mean = loft.aggregate(rows, loft.Mean()).view(num_trials, world_size).double().mean(dim=0)
        share += mean.numpy()
    np.testing.assert_allclose(share, 1.0, atol=0.01)
    np.testing.assert_allclose(mean.numpy() * world_size, 1.0, atol=0.015)  # of one owner alone


def test_holes_of_rows_that_need_few_are_drawn_as_asked() -> None:
    """What the other tests rely on."""
    for text in RULES:
        least = least_rows(parse_rule(text))
        holes = draw_holes((8, 1000), block_numel=96, shares=0.9, own=1, least=least, seed=0)
        assert holes.missing.shape == (8, 11)
        assert not holes.missing[1].any()
        assert int((holes.missing == 0).sum(dim=0).min()) >= least
