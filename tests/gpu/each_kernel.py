"""A job for each CUDA kernel; ``python -m tests.gpu.each_kernel`` runs them, for sanitizers.

Rows are short, as a sanitizer makes kernels hundreds of times slower, and no memory is handed out
twice where ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` is set: reads beyond a row are then seen.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import torch

import loft_hvd as loft
from loft_hvd._native import extension
from loft_hvd.aggregation import compute
from loft_hvd.aggregation.fallback import BLOCK
from loft_hvd.aggregation.rules import Rule
from tests.support.gradients import assert_same_bits


class Kernel(NamedTuple):
    """A job that one kernel takes, and how many coordinates a block of it has at a time."""

    name: str
    coordinates: int
    rows: int
    rule: Rule
    dtype: torch.dtype = torch.float32
    weighted: bool = False


KERNELS = [
    Kernel("register, exact, wide", 512, 8, loft.Median()),
    Kernel("register, exact, wide, trimmed", 512, 8, loft.TrimmedMean(2)),
    Kernel("register, exact, 16 bits", 1024, 4, loft.TrimmedMean(1), torch.bfloat16),
    Kernel("register, exact, 64 bits", 256, 5, loft.Median(), torch.float64),
    Kernel("register, padded", 256, 20, loft.TrimmedMean(5)),
    Kernel("register, padded, narrow", 128, 50, loft.Median()),
    Kernel("two lanes", 64, 66, loft.Median()),
    Kernel("two lanes, trimmed", 64, 70, loft.TrimmedMean(10)),
    Kernel("any rule", 128, 6, loft.Phocas(2)),
    Kernel("any rule, weighted", 128, 6, loft.MeanAroundMedian(2), weighted=True),
    Kernel("any rule, 64 rows", 128, 40, loft.Phocas(9)),
    Kernel("two lanes, any rule", 64, 70, loft.MeanAroundMedian(10)),
    Kernel("shared", 32, 140, loft.Phocas(9)),
    Kernel("shared, weighted", 32, 40, loft.TrimmedMean(9), weighted=True),
    Kernel("mix, ranked", 256, 8, loft.Robust(2)),
    Kernel("mix, ranked, 32 rows", 128, 20, loft.NNM(loft.TrimmedMean(4))),
    Kernel("mix, one row", 256, 8, loft.MultiKrum(2)),
    Kernel("mix, any rule", 128, 7, loft.NNM(loft.Phocas(2)), weighted=True),
    Kernel("mix, shared, one thread", 64, 40, loft.Robust(9)),
    Kernel("mix, shared, two lanes", 32, 70, loft.NNM(loft.TrimmedMean(9))),
    Kernel("mix, shared, Batcher", 32, 140, loft.Robust(30)),
    Kernel("mix, shared, weighted", 32, 40, loft.Robust(9), weighted=True),
    Kernel("register, padded, 16 bits", 128, 30, loft.TrimmedMean(7), torch.float16),
    Kernel("two lanes, 16 bits", 64, 90, loft.Phocas(20), torch.bfloat16),
    Kernel("any rule, 64 bits", 128, 6, loft.Phocas(2), torch.float64),
    Kernel("shared, weighted, 64 bits", 32, 40, loft.Phocas(9), torch.float64, weighted=True),
    Kernel("mix, 64 bits", 128, 8, loft.Robust(2), torch.float64),
    Kernel("mix, 16 bits", 256, 8, loft.Robust(2), torch.bfloat16),
    Kernel("mix, shared, 64 bits", 32, 40, loft.Robust(9), torch.float64, weighted=True),
    Kernel("mix, shared, 16 bits", 32, 70, loft.Robust(9), torch.float16),
]


def rows_for(kernel: Kernel, numel: int) -> torch.Tensor:
    """Return finite rows [kernel.rows, numel] on the CPU."""
    random = torch.Generator().manual_seed(numel)
    return torch.randn(kernel.rows, numel, generator=random).to(kernel.dtype)


def apart(rows: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Return rows on a device, each in memory of its own.

    So they are aligned, as shards in training are, and kernels take several coordinates at a time;
    and a sanitizer sees reads beyond a row.
    """
    return [row.clone().to(device) for row in rows]


def run_kernel(kernel: Kernel, device: str, *, numel: int) -> None:
    """Run a kernel and those of diagnostics, and compare with the CPU's, bit by bit."""
    rows = rows_for(kernel, numel)
    weights = [1 + row % 3 for row in range(kernel.rows)] if kernel.weighted else None
    found, seen = loft.diagnose(apart(rows, device), kernel.rule, weights=weights, every=1)
    wanted, said = loft.diagnose(rows, kernel.rule, weights=weights, every=1)
    assert_same_bits(found.cpu(), wanted)
    assert seen.num_outside == said.num_outside, kernel.name
    table = compute.measure_rows(apart(rows[:, 1:], device))
    np.testing.assert_array_equal(table, compute.measure_rows(list(rows[:, 1:])))


def main(device: str = "cuda") -> int:
    """Run each kernel on lengths with and without a tail."""
    module = extension()
    if device == "cuda" and (module is None or not module.has_cuda):
        sys.stderr.write("each_kernel: the extension was built without CUDA kernels\n")
        return 1
    for kernel in KERNELS:
        for numel in (1, 2 * kernel.coordinates + 7):
            run_kernel(kernel, device, numel=numel)
        sys.stdout.write(f"{kernel.name}: as on the CPU\n")
        sys.stdout.flush()  # a sanitizer's words follow the kernel that they are about
    run_kernel(KERNELS[0], device, numel=BLOCK + 5)  # two blocks of coordinates
    sys.stdout.write(f"{len(KERNELS)} kernels\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
