"""The extension: same bits at every level, thread count and alignment; no byte beyond the rows."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute, fallback
from loft_hvd.aggregation.distances import distances, finish_table
from loft_hvd.config import Config
from loft_hvd.errors import ArgumentTypeError
from tests.support.gradients import (
    DTYPES,
    assert_same_bits,
    expected,
    hard_gradients,
    rules_for,
)

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


# --- rules that see rows


def _row_rules(rows: int) -> list[loft.Rule]:
    texts = ["clip:norm=2.5+median", "geometric_median:f=0", "bucketing:size=2+median:kind=lower"]
    f = (rows - 1) // 2
    texts += [f"robust:f={f}", f"nnm+phocas:f={f // 2}", f"arc+mean_around_median:f={f}"]
    return [loft.parse_rule(text) for text in texts]


@pytest.mark.parametrize("level", [*LEVELS, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 17, 21, 35])
def test_distances_are_the_definitions_bits(
    monkeypatch: pytest.MonkeyPatch, level: str, dtype: torch.dtype, rows: int
) -> None:
    assert MODULE is not None
    _configure(monkeypatch, isa=level)
    gradients = torch.randn(rows, 1_201, generator=torch.Generator().manual_seed(rows)).to(dtype)
    gradients[rows // 2, ::7] = torch.nan
    table = torch.from_numpy(finish_table(compute.measure_rows(list(gradients))))
    assert_same_bits(table.view(-1), torch.from_numpy(distances(list(gradients))).view(-1))


@pytest.mark.every(4)
@pytest.mark.parametrize("level", [*LEVELS, "baseline"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 21])
def test_mixed_rows_give_the_bits_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch, level: str, dtype: torch.dtype, rows: int
) -> None:
    _configure(monkeypatch, isa=level)
    for gradients in (
        hard_gradients(rows, 701, dtype, seed=rows),
        torch.randn(rows, 701, generator=torch.Generator().manual_seed(rows)).to(dtype),
    ):
        for rule in _row_rules(rows):
            for weights in (None, [1 + row % 3 for row in range(rows)]):
                result, found = loft.diagnose(gradients, rule, weights=weights, every=1)
                assert_same_bits(result, expected(gradients, rule, weights=weights))
                assert_same_bits(result, loft.aggregate(gradients, rule, weights=weights))
                assert found.num_outside == (0,) * rows
                wrong = (~gradients.isfinite()).sum(dim=1)
                assert found.num_non_finite == tuple(wrong.tolist())


def test_threads_do_not_change_a_bit_of_rules_that_see_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradients = torch.randn(6, 400_001, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 2, 5):
        _configure(monkeypatch, threads=threads)
        table = torch.from_numpy(finish_table(compute.measure_rows(list(gradients))))
        found.append((table.view(-1), loft.diagnose(gradients, loft.Robust(2), every=3)))
    for table, (result, what) in found[1:]:
        assert_same_bits(table, found[0][0])
        assert_same_bits(result, found[0][1][0])
        assert what == found[0][1][1]


def test_any_alignment_and_read_only_rows_will_do() -> None:
    source = torch.randn(5, 1_000, generator=torch.Generator().manual_seed(0))
    wanted = loft.aggregate(source, loft.Robust(1))
    memory = torch.zeros(5 * 1_003 + 1)
    rows = [memory[1 + 1_003 * at :][:1_000].copy_(row) for at, row in enumerate(source)]
    assert_same_bits(loft.aggregate(rows, loft.Robust(1)), wanted)
    arrays = [row.numpy() for row in rows]
    arrays[0].flags.writeable = False
    assert_same_bits(torch.from_numpy(loft.aggregate(arrays, loft.Robust(1))), wanted)


def test_a_matrix_of_another_shape_is_refused() -> None:
    assert MODULE is not None
    rows, out = torch.ones(3, 8), torch.empty(8)
    job = ([row.data_ptr() for row in rows], 8, 1)
    for scales, matrix in (([1.0] * 2, [1.0] * 6), ([1.0] * 3, [1.0] * 5)):
        with pytest.raises(ValueError, match="need a weight of every row for each of 2 mixed rows"):
            MODULE.mix_cpu(*job, scales, matrix, 2, 1, 0, 0, [], out.data_ptr(), 1, "", 0)


def test_flushing_changes_no_scale_of_rules_that_see_rows() -> None:
    rows = torch.full((3, 4), 4e18)
    rule = loft.Clip(loft.Mean(), norm=1e-21)
    wanted = loft.aggregate(rows, rule)
    assert torch.set_flush_denormal(True)
    try:
        assert_same_bits(loft.aggregate(rows, rule), wanted)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("numel", [100, 3_000_000])
def test_a_result_lies_where_rows_do_whatever_torchs_default_is(numel: int) -> None:
    rows = torch.ones(3, numel)
    with torch.device("meta"):
        assert loft.median(rows).device.type == "cpu"


@pytest.mark.parametrize("around", [loft.NNM, loft.ARC])
def test_a_subclass_of_a_rule_is_not_taken_for_it(around: type[Any]) -> None:
    class Mine(loft.TrimmedMean):
        pass

    with pytest.raises(ArgumentTypeError, match="has no kernel"):
        loft.aggregate(torch.randn(5, 4), around(Mine(f=1)))


def test_a_thread_in_a_kernel_does_not_abort_the_interpreters_end() -> None:
    if extension() is None:
        pytest.skip("the C++ extension is not built")
    # Straight to the kernel: torch's own calls may still abort there.
    code = (
        "import threading, time, torch\n"
        "from loft_hvd import _loft\n"
        "rows = torch.randn(8, 2_000_000); out = torch.empty(2_000_000)\n"
        "at, to = [row.data_ptr() for row in rows], out.data_ptr()\n"
        "def work():\n"
        "    while True: _loft.aggregate_cpu(at, 2_000_000, 1, 1, 0, 0, [], to, 1, '', 0)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
