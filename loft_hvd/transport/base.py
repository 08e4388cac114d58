"""The protocol between the pipeline and whatever moves its bytes.

A transport offers four collectives on preallocated tensors. Each is started by every rank under
the same name and returns a ``Work``. Names tell operations apart; at most one operation of a name
is in flight. Outputs are never reallocated, inputs are never written, and both must stay alive
and untouched until the work is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from loft_hvd.errors import TransportTimeoutError

__all__ = ["Transport", "Work", "allgather_rows", "wait_for"]

_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 200e-6


class Work(Protocol):
    """A collective in flight."""

    def done(self) -> bool:
        """Say whether the operation has ended, well or badly; never blocks."""
        ...

    def finish(self) -> None:
        """Release a done operation.

        Raises:
            Exception: the engine's own error if the operation failed.
        """
        ...


class Transport(Protocol):
    """What the pipeline needs from an engine such as Horovod."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        ...

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        """Send shard j of ``send`` to rank j and receive rank i's shard as shard i of ``recv``.

        Args:
            send: contiguous, shape [world_size * shard].
            recv: contiguous, shape and dtype of ``send``.
            name: equal on every rank.
        """
        ...

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Work:
        """Receive every rank's ``send`` in rank order.

        Args:
            send: contiguous, shape [numel].
            recv: contiguous, shape [world_size * numel], dtype of ``send``.
            name: equal on every rank.
        """
        ...

    def allreduce(self, buffer: Tensor, *, name: str) -> Work:
        """Replace ``buffer``, contiguous float32, float64 or int64, by its sum over ranks."""
        ...

    def broadcast(self, buffer: Tensor, *, name: str) -> Work:
        """Replace ``buffer``, any contiguous tensor, by rank 0's."""
        ...


def wait_for(
    work: Work,
    *,
    what: str,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for a collective without spinning, then release it.

    Args:
        work: the operation.
        what: its description for the error message.
        timeout_s: longest wait in seconds.
        clock: seconds that never go back.
        sleep: how to let other threads run.

    Raises:
        TransportTimeoutError: the limit was reached.
        Exception: the engine's own error if the operation failed.
    """
    start = clock()
    pause = _SHORTEST_SLEEP_S
    while not work.done():
        if clock() - start > timeout_s:
            raise TransportTimeoutError(
                f"{what}: no answer from all ranks within {timeout_s:g} s; a rank has stopped, is "
                "very slow, or takes other steps than this one (look for an error above, or raise "
                "LOFT_HVD_TIMEOUT_S)"
            )
        sleep(pause)
        pause = min(pause * 1.5, _LONGEST_SLEEP_S)
    work.finish()


def allgather_rows(transport: Transport, row: Tensor, *, name: str, timeout_s: float) -> Tensor:
    """Return every rank's ``row``, shape [numel], as rows of a matrix [world_size, numel]."""
    rows = torch.empty(transport.world_size, row.numel(), dtype=row.dtype)
    if transport.world_size == 1:
        return rows.copy_(row.view(1, -1))
    work = transport.allgather(row.contiguous(), rows.view(-1), name=name)
    wait_for(work, what=f"exchange {name!r}", timeout_s=timeout_s)
    return rows
