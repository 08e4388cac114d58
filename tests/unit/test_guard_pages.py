"""No kernel touches a byte beyond its rows and its result: one that did would end the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.config import Config
from tests.support.gradients import DTYPES, assert_same_bits, hard_gradients, rules_for
from tests.support.guarded import Guarded

MODULE = extension()
pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ extension is not built")
LEVELS = MODULE.isa_levels() if MODULE is not None else []


def _use(patch: pytest.MonkeyPatch, level: str) -> None:
    config: Any = Config(isa=level)
    patch.setattr(compute, "config", lambda: config)


@pytest.mark.parametrize("at_end", [False, True], ids=["page start", "page end"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "numel"),
    [(1, 31), (5, 1), (9, 67), (33, 35)]
    + [
        pytest.param(rows, numel, marks=pytest.mark.long)
        for rows in (1, 2, 8, 16, 17, 33, 70, 129)
        for numel in (1, 7, 63, 100, 1031)
    ],
)
def test_no_byte_beyond_rows_and_result_is_touched(
    monkeypatch: pytest.MonkeyPatch,
    numel: int,
    rows: int,
    dtype: torch.dtype,
    level: str,
    at_end: bool,
) -> None:
    _use(monkeypatch, level)
    values = hard_gradients(rows, numel, dtype, seed=numel)
    guards = [Guarded(numel * dtype.itemsize, at_end=at_end) for _ in range(rows + 1)]
    *guarded, out = [guard.tensor(dtype) for guard in guards]
    for row, value in zip(guarded, values, strict=True):
        row.copy_(value)
    weights = [1 + row % 3 for row in range(rows)]
    for rule in [loft.Median(), *rules_for(rows)[-3:]]:
        out.fill_(float("nan"))
        loft.aggregate(guarded, rule, out=out)
        assert_same_bits(out, loft.aggregate(values, rule))
        loft.aggregate(guarded, rule, weights=weights, out=out)
        assert_same_bits(out, loft.aggregate(values, rule, weights=weights))
        loft.diagnose(guarded, rule, out=out, every=1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_alignment_next_to_a_guard_page(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, level: str
) -> None:
    _use(monkeypatch, level)
    longest = 80
    values = hard_gradients(5, longest, dtype, seed=3)
    first = [Guarded(longest * dtype.itemsize, at_end=True) for _ in range(6)]
    last = [Guarded(longest * dtype.itemsize, at_end=False) for _ in range(6)]
    for skip in range(0, 64 // dtype.itemsize, 3):  # distances from a cache line
        for guards, part in (
            (first, slice(skip, longest)),
            (last, slice(0, longest - skip)),
        ):
            *rows, out = [guard.tensor(dtype)[part] for guard in guards]
            for row, value in zip(rows, values, strict=True):
                row.copy_(value[part])
            for rule in (loft.Median(), loft.TrimmedMean(1), loft.Phocas(2)):
                loft.aggregate(rows, rule, out=out)
                assert_same_bits(out, loft.aggregate(values[:, part].clone(), rule))
