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
def test_memory_is_used_again_when_the_last_tensor_that_shares_it_has_gone() -> None:
    row = empty_row(16_000_000, torch.float32).fill_(3.0)
    address = row.data_ptr()
    part = row[-5:]
    del row
    other = empty_row(16_000_000, torch.float32).fill_(4.0)
    assert other.data_ptr() != address
    assert part.tolist() == [3.0] * 5
    del part
    before = num_faults()
    assert empty_row(32_000_000, torch.float16).fill_(5.0).data_ptr() == address
    assert num_faults() - before < 20
    assert bool((other == 4.0).all())


@needs_huge_pages
def test_little_memory_lies_idle() -> None:
    rows = [empty_row(10_000_000 + 2_000_000 * at, torch.float32) for at in range(8)]
    spans = [(row.data_ptr(), row.nbytes) for row in rows]
    while rows:
        rows.pop(0).fill_(1.0)
    kept = [num_bytes for address, num_bytes in spans if is_mapped(address + num_bytes // 2)]
    assert kept == [80_000_000, 88_000_000, 96_000_000]  # 252 MiB, the ones that went last


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [0, 8, 40_000_008])
def test_a_row_is_like_any_other(num_bytes: int, dtype: torch.dtype) -> None:
    numel = num_bytes // dtype.itemsize
    row = empty_row(numel, dtype)
    assert (row.shape, row.dtype, row.device.type) == ((numel,), dtype, "cpu")
    assert row.untyped_storage().nbytes() == numel * dtype.itemsize
    row.fill_(2.0)
    assert torch.equal(row.share_memory_(), torch.full((numel,), 2.0, dtype=dtype))


def test_without_huge_pages_rows_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loft_hvd.aggregation.pages.are_on_offer", lambda: False)
    assert empty_row(10_000_000, torch.float32).untyped_storage().resizable()


def test_small_rows_are_torchs_own() -> None:
    assert empty_row(1_000_000, torch.float32).untyped_storage().resizable()  # 4 MB
