"""Memory between two pages that may be neither read nor written."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch import Tensor

__all__ = ["Guarded"]


class Guarded:
    """Memory whose first or last byte touches a page that ends the process when it is touched.

    Attributes:
        address: of the first byte.
    """

    def __init__(self, num_bytes: int, *, at_end: bool) -> None:
        page = mmap.PAGESIZE
        inner = -(-max(num_bytes, 1) // page) * page
        self._map = mmap.mmap(-1, inner + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for address in (start, start + page + inner):
            assert protect(address, page, 0) == 0
        self._size = num_bytes
        self.address = start + page + (inner - num_bytes if at_end else 0)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """View all of the memory as one row of ``dtype``; valid while this object lives."""
        if self._size == 0:
            return torch.empty(0, dtype=dtype)
        view: Any = (ctypes.c_char * self._size).from_address(self.address)
        return torch.frombuffer(view, dtype=dtype)
