"""Large results lie in huge pages where the kernel has them, and live as long as they are used."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

import loft_hvd as loft
from loft_hvd.aggregation.pages import are_on_offer, empty_row

needs_huge_pages = pytest.mark.skipif(
    not are_on_offer(), reason="this kernel has no transparent huge pages on offer"
)


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(begin <= address < end for begin, end in spans)


@needs_huge_pages
def test_a_large_result_faults_in_few_pages() -> None:
    rows = torch.ones(4, 10_000_000)
    loft.median(rows[:, :1000])
    before = num_faults()
    result = loft.median(rows)
    assert num_faults() - before < 1500  # 40 MB: 20 of 2 MiB, 9,766 of 4 KiB; some are refused
    assert bool((result == 1).all())


@needs_huge_pages
def test_memory_goes_with_the_last_tensor_that_shares_it() -> None:
    row = empty_row(16_000_000, torch.float32).fill_(3.0)
    middle = row.data_ptr() + row.nbytes // 2
    part = row[-5:]
    del row
    assert part.tolist() == [3.0] * 5
    assert is_mapped(middle)
    del part
    assert not is_mapped(middle)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [0, 8, 40_000_008])
def test_a_row_is_like_any_other(num_bytes: int, dtype: torch.dtype) -> None:
    numel = num_bytes // dtype.itemsize
    row = empty_row(numel, dtype)
    assert (row.shape, row.dtype, row.device.type) == ((numel,), dtype, "cpu")
    assert row.untyped_storage().nbytes() == numel * dtype.itemsize
    row.fill_(2.0)
    assert torch.equal(row.clone().share_memory_(), torch.full((numel,), 2.0, dtype=dtype))


def test_without_huge_pages_rows_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loft_hvd.aggregation.pages.are_on_offer", lambda: False)
    assert empty_row(10_000_000, torch.float32).untyped_storage().resizable()


def test_rows_whose_memory_is_used_again_are_torchs_own() -> None:
    assert empty_row(6_250_000, torch.float32).untyped_storage().resizable()  # 25 MB
