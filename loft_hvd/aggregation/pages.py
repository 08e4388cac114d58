"""Memory for large results, in huge pages where the kernel has them on offer.

A new result of 40 MB is 9,766 pages of 4 KiB, and to fault them in takes longer than the rule: a
median of 4 rows of 10 million took 3.6 passes over the rows. In pages of 2 MiB it takes 1.4.

Memory of results that are gone serves the next one of its size, as glibc does with small blocks: a
new row of 100 MB takes 12 ms to fill then, and 19 where its huge pages are cleared first. Where a
virtual machine gets its memory from the host page by page, clearing took up to 400 ms (2 shared
cores, 2026-11-23). The kernel may take what lies idle whenever it is short of memory.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import weakref
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["HUGE_PAGE_BYTES", "are_on_offer", "empty_row"]

HUGE_PAGE_BYTES = 2 * 1024 * 1024  # bound from x86-64 and from arm64 with pages of 4 KiB
# A choice, two huge pages: glibc uses smaller blocks again by itself. Between 4 and 25 MB a new row
# filled again and again takes the same CPU time by either, beyond 32 MB a fifth of glibc's.
_LEAST_BYTES = 4 * 1024 * 1024
# Of idle memory at most: a choice, two results of a ResNet-50 or one of 60 million values.
_MOST_IDLE_BYTES = 256 * 1024 * 1024
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
        return torch.empty(numel, dtype=dtype, device="cpu")  # whatever torch's default is
    # Whole huge pages, which kernels place at a multiple of their size.
    memory = _take(-(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    values = np.frombuffer(memory, dtype=np.uint8, count=num_bytes)
    # The tensor's storage keeps the array, which goes with the last tensor that shares it.
    weakref.finalize(values, _give_back, memory).atexit = False
    return torch.from_numpy(values).view(dtype)


@functools.cache
def _idle() -> deque[mmap.mmap]:
    """Return the memory that nobody uses, what was used last at its end."""
    return deque()


def _take(num_bytes: int) -> mmap.mmap:
    """Return memory that nobody uses: an idle one of that size, or a new one."""
    for memory in reversed(_idle().copy()):
        if len(memory) == num_bytes:
            try:
                _idle().remove(memory)
            except ValueError:  # another thread was faster
                continue
            return memory
    # Private: shared memory has a setting of its own for huge pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap) -> None:
    """Keep memory for the next result, and let go of what is idle for longest."""
    # Runs wherever the last tensor goes, also in the midst of the functions of this file: each
    # step on the queue is whole by itself, so there is no lock to wait for.
    if len(memory) > _MOST_IDLE_BYTES:
        return
    with contextlib.suppress(OSError, AttributeError):  # kernels before 4.5, and locked memory
        memory.madvise(mmap.MADV_FREE)
    _idle().append(memory)
    while sum(map(len, _idle().copy())) > _MOST_IDLE_BYTES:
        try:
            _idle().popleft()
        except IndexError:  # other threads were faster
            return
