"""Ranks that are threads, as devices that read each other's memory: what there is without a GPU.

What is queued is done at once, so an event has happened as soon as it is recorded; to wait for one
that was not is an error. Each description is for one rank, and can be mapped once.
"""

from __future__ import annotations

import ctypes
import itertools
import threading

import torch
from torch import Tensor

from loft_hvd.transport.cuda_peers import DESCRIPTION_BYTES, EVENT_BYTES

__all__ = ["Happening", "Memories", "ThreadPeers"]


class Happening:
    """An event."""

    def __init__(self) -> None:
        self.num_records = 0


class Memories:
    """What the ranks of a world have shared."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.shared: dict[int, Tensor] = {}
        self.events: dict[int, Happening] = {}
        self.num_mapped = 0


class ThreadPeers:
    """One rank's device; see ``loft_hvd.transport.cuda_peers.CudaPeers``."""

    def __init__(self, memories: Memories) -> None:
        self._memories = memories
        self.identity = 7
        self.counted: list[Tensor] = []
        self.withholds_counts = False

    def unreachable(self, identity: int) -> str:
        assert identity == self.identity
        return ""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def share(self, values: Tensor) -> bytes:
        with self._memories.lock:
            number = next(self._memories.numbers)
            # By its address: the buffer can end.
            shown = (ctypes.c_uint8 * values.nbytes).from_address(values.data_ptr())
            self._memories.shared[number] = torch.frombuffer(shown, dtype=torch.uint8)
        return number.to_bytes(8, "little").ljust(DESCRIPTION_BYTES, b"\0")

    def map(self, description: bytes) -> Tensor:
        with self._memories.lock:
            self._memories.num_mapped += 1
            return self._memories.shared.pop(int.from_bytes(description[:8], "little"))

    def make_event(self) -> tuple[Happening, bytes]:
        with self._memories.lock:
            number, event = next(self._memories.numbers), Happening()
            self._memories.events[number] = event
        return event, number.to_bytes(EVENT_BYTES, "little")

    def open_event(self, handle: bytes) -> Happening:
        return self._memories.events[int.from_bytes(handle, "little")]

    def record(self, event: Happening) -> None:
        event.num_records += 1

    def wait(self, event: Happening) -> None:
        assert event.num_records, "an event is waited for that nobody has recorded"

    def count_into(self, words: Tensor) -> None:
        self.counted.append(words)

    def count(self, words: Tensor) -> None:
        if not self.withholds_counts:
            words += 1

    def end_count(self, words: Tensor) -> None:
        self.counted = [each for each in self.counted if each is not words]
