"""Laws of what is filled, for any gradients and any holes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import loft_hvd as loft
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.rules import Rule
from tests.support.gradients import DTYPES, assert_same_bits
from tests.support.holes import expected_filled, is_filled

Array = npt.NDArray[np.float32]

any_float = st.floats(width=32)
finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def missing_blocks(draw: st.DrawFn, num_rows: int, num_blocks: int, own: int, least: int) -> Any:
    """Which blocks of rows did not come; of each block the own row did, and ``least`` in all."""
    missing = draw(arrays(np.uint8, (num_rows, num_blocks), elements=st.integers(0, 1)))
    for block in range(num_blocks):
        order = draw(st.permutations([row for row in range(num_rows) if row != own]))
        missing[[own, *order[: least - 1]], block] = 0
    return missing


@settings(deadline=None)
@given(data=st.data())
def test_extension_and_plain_torch_give_the_bits_of_the_definition(data: st.DataObject) -> None:
    num_rows, numel = data.draw(st.integers(2, 20)), data.draw(st.integers(1, 40))
    block_numel = data.draw(st.integers(1, numel + 3), label="block_numel")
    own = data.draw(st.integers(0, num_rows - 1), label="own")
    f = data.draw(st.integers(0, (num_rows - 1) // 2), label="f")
    rule: Rule = data.draw(
        st.sampled_from([loft.Mean(), loft.Median(), loft.Median("upper"), loft.TrimmedMean(f)])
    )
    least = 2 if isinstance(rule, loft.Mean) else 2 * rule.f + 1
    missing = data.draw(missing_blocks(num_rows, -(-numel // block_numel), own, least))
    counts = st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows)
    weights = data.draw(st.none() | counts, label="weights")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    values = data.draw(arrays(np.float32, (num_rows, numel), elements=any_float))
    rows = torch.from_numpy(values).to(dtype)
    holes = Holes(torch.from_numpy(missing), block_numel)
    wanted = expected_filled(rows, holes, rule, own=own, weights=weights)
    plain = rows.clone()
    fill_holes(rows, holes, rule, own=own, weights=weights)
    assert_same_bits(rows.view(-1), wanted.view(-1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "extension", lambda: None)
        patch.setattr(compute, "warn_once", lambda: None)
        fill_holes(plain, holes, rule, own=own, weights=weights)
    assert_same_bits(plain.view(-1), wanted.view(-1))


@settings(deadline=None)
@given(is_median=st.booleans(), data=st.data())
def test_whatever_f_rows_hold_or_hold_back_values_stay_in_the_honest_range(
    is_median: bool, data: st.DataObject
) -> None:
    # 2f + 1 rows of every block come, f of which may hold anything; those f may lack any block.
    f = data.draw(st.integers(1, 3), label="f")
    num_rows = data.draw(st.integers(2 * f + 1, 12), label="num_rows")
    wrong = data.draw(st.permutations(range(num_rows)), label="wrong")[:f]
    honest = np.array([row not in wrong for row in range(num_rows)])
    own = data.draw(st.integers(0, num_rows - 1), label="own")
    values = data.draw(arrays(np.float32, (num_rows, 8), elements=finite))
    values[wrong] = data.draw(arrays(np.float32, (f, 8), elements=any_float))
    missing = data.draw(missing_blocks(num_rows, 4, own, 2 * f + 1))
    holes = Holes(torch.from_numpy(missing), 2)
    is_hole = is_filled(holes, 8).numpy()
    came = np.where(honest[:, None] & ~is_hole, values, np.nan)  # [num_rows, 8]
    low, high = np.nanmin(came, axis=0), np.nanmax(came, axis=0)  # f + 1 of each at least
    rows = torch.from_numpy(values.copy())
    rule = loft.Median() if is_median else loft.TrimmedMean(f)
    fill_holes(rows, holes, rule, own=own)
    filled = rows.numpy()
    is_within = (filled >= low) & (filled <= high)
    assert is_within[is_hole].all()
    assert is_within[honest].all()
    result = loft.aggregate(filled, rule)
    assert (result >= low).all()
    assert (result <= high).all()
