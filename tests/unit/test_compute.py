"""The extension: same bits at every level, thread count and alignment; no byte beyond the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute, fallback
from loft_hvd.config import Config
from tests.support.gradients import DTYPES, assert_same_bits, hard_gradients, rules_for

MODULE = extension()
pytestmark = pytest.mark.skipif(MODULE is None, reason="the C++ extension is not built")
# Those above the baseline, which the baseline is compared with.
LEVELS = MODULE.isa_levels()[1:] if MODULE is not None else []


def _configure(patch: pytest.MonkeyPatch, **settings: Any) -> None:
    patch.setattr(compute, "config", lambda: Config(**settings))


def test_plain_torch_looks_at_the_kernels_blocks() -> None:
    assert MODULE is not None
    assert MODULE.block == fallback.BLOCK


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 8, 11, 16, 21, 32, 37, 64, 100])
def test_every_instruction_set_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, level: str, dtype: torch.dtype, rows: int
) -> None:
    gradients = hard_gradients(rows, 151, dtype, seed=rows)
    weights = [1 + row % 3 for row in range(rows)]
    _configure(monkeypatch, isa="baseline")
    wanted = [loft.aggregate(gradients, rule) for rule in rules_for(rows)]
    weighted = [loft.aggregate(gradients, rule, weights=weights) for rule in rules_for(rows)]
    _configure(monkeypatch, isa=level)
    for rule, plain, heavy in zip(rules_for(rows), wanted, weighted, strict=True):
        assert_same_bits(loft.aggregate(gradients, rule), plain)
        assert_same_bits(loft.aggregate(gradients, rule, weights=weights), heavy)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 4, 6, 9, 35])
def test_every_instruction_set_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, level: str, dtype: torch.dtype, rows: int
) -> None:
    gradients = torch.randn(rows, 1_201, generator=torch.Generator().manual_seed(rows)).to(dtype)
    gradients[rows // 2 :, ::7] = torch.nan  # windows end in NaN where other rows are finite
    for rule in rules_for(rows):
        _configure(monkeypatch, isa="baseline")
        wanted = loft.diagnose(gradients, rule, every=1)[1]
        _configure(monkeypatch, isa=level)
        assert loft.diagnose(gradients, rule, every=1)[1] == wanted, rule


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    gradients = hard_gradients(7, 400_003, torch.float32, seed=1)
    _configure(monkeypatch, threads=1)
    wanted = loft.trimmed_mean(gradients, f=2)
    _, found = loft.diagnose(gradients, loft.TrimmedMean(2), every=2)
    _configure(monkeypatch, threads=threads)
    assert_same_bits(loft.trimmed_mean(gradients, f=2), wanted)
    assert loft.diagnose(gradients, loft.TrimmedMean(2), every=2)[1] == found


@pytest.mark.parametrize("offset", range(1, 16, 3))
def test_alignment_does_not_change_a_bit(offset: int) -> None:
    gradients = hard_gradients(5, 300, torch.float32, seed=2)
    apart = [
        torch.nn.functional.pad(row, (offset + i, 1))[offset + i : -1]
        for i, row in enumerate(gradients)
    ]
    assert_same_bits(loft.median(apart), loft.median(gradients))


def test_flushing_of_subnormals_is_not_inherited() -> None:
    gradients = torch.full((3, 40), 1e-42)
    wanted = loft.trimmed_mean(gradients, f=0)
    assert torch.set_flush_denormal(True)
    try:
        assert_same_bits(loft.trimmed_mean(gradients, f=0), wanted)
    finally:
        torch.set_flush_denormal(False)
    assert float(wanted[0]) == pytest.approx(1e-42, rel=1e-2)


@pytest.mark.long
def test_coordinates_beyond_two_to_the_31_are_addressed() -> None:
    numel = 2**31 + 77  # one row of 4 GiB, used three times; the result takes as much
    row = np.zeros(numel, np.float16)
    row[-3:] = [1, 2, 3]
    row[2**31 - 1] = 5
    result = loft.median([row, row, row])
    np.testing.assert_array_equal(result[-3:], [1, 2, 3])
    assert result[2**31 - 1] == 5
    assert np.count_nonzero(result) == 4


def test_a_job_that_breaks_a_limit_is_refused_by_the_extension_itself() -> None:
    assert MODULE is not None
    row = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"2\*f < rows"):
        MODULE.aggregate_cpu([row.ctypes.data] * 2, 4, 1, 1, 0, 1, [], row.ctypes.data, 1, "", 0)
