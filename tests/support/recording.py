"""A local transport that writes down what is sent, or holds it back."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from loft_hvd.transport.local import LocalTransport

__all__ = ["RecordingTransport"]


class RecordingTransport(LocalTransport):
    """One rank's end of a local world, with a list of its operations.

    Attributes:
        names: the operations, in the order in which they were started.
        sent_bytes: what this rank has sent to others.
        gate: operations start only while it is set.
    """

    def __init__(self, end: LocalTransport) -> None:
        super().__init__(end._world, end.rank)
        self.names: list[str] = []
        self.sent_bytes = 0
        self.gate = threading.Event()
        self.gate.set()

    def _note(self, name: str, num_bytes: int) -> None:
        assert self.gate.wait(20)
        self.names.append(name)
        self.sent_bytes += num_bytes

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Any:
        share = 1 if skips_own else (self.world_size - 1) / self.world_size
        self._note(name, int(send.nbytes * share))
        return super().alltoall(send, recv, name=name, skips_own=skips_own)

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Any:
        self._note(name, send.nbytes * (self.world_size - 1))
        return super().allgather(send, recv, name=name)

    def allreduce(self, buffer: Tensor, *, name: str) -> Any:
        # What a ring all-reduce sends.
        self._note(name, 2 * buffer.nbytes * (self.world_size - 1) // self.world_size)
        return super().allreduce(buffer, name=name)
