"""Rows so long that a grid, which fills the device, repeats: every block works more than once.

Grids have at most 32 blocks a multiprocessor, whatever the rows' length, so the lengths here follow
from the device. The CPU's kernels say what is right; other tests compare those with the definition.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loft_hvd as loft
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.distances import BLOCK
from tests.gpu.each_kernel import KERNELS, Kernel, apart, run_kernel
from tests.gpu.test_cuda_kernels import DEVICES
from tests.support.gradients import assert_same_bits

pytestmark = pytest.mark.parametrize("device", DEVICES)


def long_rows(kernel: Kernel, device: str, *, offset: int = 0) -> torch.Tensor:
    """Return rows of two grids and a bit, no whole block at the end; ties and a NaN among them."""
    multiprocessors = 2  # a small machine, to show on the CPU that the tests work
    if device == "cuda":
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    numel = 2 * 32 * multiprocessors * kernel.coordinates + 7
    random = torch.Generator().manual_seed(numel)
    # One stretch many times over, moved from row to row: no two of them need the same.
    stretch = torch.randn(100_003 + kernel.rows, generator=random).mul(4).round().div(4)
    repeated = stretch.repeat(-(-(numel + kernel.rows + offset) // len(stretch)))
    rows = torch.stack([repeated[row : row + numel + offset] for row in range(kernel.rows)])
    rows[0, -1] = float("nan")
    return rows.to(kernel.dtype)[:, offset:]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_block_of_coordinates_is_aggregated(device: str, kernel: Kernel) -> None:
    rows = long_rows(kernel, device)
    weights = [1 + row % 3 for row in range(kernel.rows)] if kernel.weighted else None
    found = loft.aggregate(apart(rows, device), kernel.rule, weights=weights)
    assert_same_bits(found.cpu(), loft.aggregate(rows, kernel.rule, weights=weights))


def test_rows_that_are_not_aligned_are_aggregated_one_by_one(device: str) -> None:
    kernel = Kernel("register, unaligned", 128, 8, loft.TrimmedMean(2))
    rows = long_rows(kernel, device, offset=1)
    wide = torch.nn.functional.pad(rows, (1, 0)).to(device)[:, 1:]
    found = loft.aggregate(list(wide), kernel.rule)
    assert_same_bits(found.cpu(), loft.aggregate(rows, kernel.rule))


def test_every_pair_of_many_rows_is_measured(device: str) -> None:
    rows = 1024 if device == "cuda" else 40  # 8,256 pairs of groups of 8
    gradients = torch.randn(rows, 300, generator=torch.Generator().manual_seed(rows))
    found = compute.measure_rows(list(gradients.to(device)))
    np.testing.assert_array_equal(found, compute.measure_rows(list(gradients)))


def test_every_block_of_coordinates_is_measured(device: str) -> None:
    # A block of threads has a block of coordinates at a time: 70 million of 2 rows for 132
    # multiprocessors.
    rows = long_rows(Kernel("distances", BLOCK // 2, 2, loft.Robust(0)), device)[:, :-1]
    assert rows.isfinite().all()
    found = compute.measure_rows(list(rows.to(device)))
    np.testing.assert_array_equal(found, compute.measure_rows(list(rows)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_kernel_gives_the_bits_of_the_cpu_on_few_coordinates(
    device: str, kernel: Kernel
) -> None:
    run_kernel(kernel, device, numel=2 * kernel.coordinates + 7)
