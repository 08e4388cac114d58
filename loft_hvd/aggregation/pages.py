"""Memory for large results, in huge pages where the kernel has them on offer.

A new result of 40 MB is 9,766 pages of 4 KiB, and to fault them in takes longer than the rule: a
median of 4 rows of 10 million took 3.6 passes over the rows. In pages of 2 MiB it takes 1.4.
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["HUGE_PAGE_BYTES", "are_on_offer", "empty_row"]

HUGE_PAGE_BYTES = 2 * 1024 * 1024  # bound from x86-64 and from arm64 with pages of 4 KiB
# Bound from glibc, which keeps what is smaller when it is freed (DEFAULT_MMAP_THRESHOLD_MAX) and
# gives it to the next result with its pages. Measured, a new row filled again and again, CPU time
# against glibc's memory: 1.7 times at 25 MB, 0.3 times at 40 and 100 MB.
_LEAST_BYTES = 32 * 1024 * 1024
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def are_on_offer() -> bool:
    """Say whether the kernel gives huge pages to those who ask."""
    try:
        setting = _SETTING.read_text(encoding="ascii")
    except (OSError, ValueError):
        return False  # not Linux, or a kernel without
    return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in setting


def empty_row(numel: int, dtype: torch.dtype) -> Tensor:
    """Return an unset row on the CPU, [numel]."""
    num_bytes = numel * dtype.itemsize
    if num_bytes < _LEAST_BYTES or not are_on_offer():
        return torch.empty(numel, dtype=dtype)
    # Whole huge pages, which kernels place at a multiple of their size. Private: shared memory has
    # a setting of its own.
    whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor's storage keeps the mapping, which goes with the last tensor that shares it.
    return torch.frombuffer(memory, dtype=dtype, count=numel)
