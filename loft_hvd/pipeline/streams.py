"""The order of what several threads queue on one GPU: each has a current stream of its own.

Streams run beside each other, and the allocator gives a tensor's memory away as soon as the stream
that it was made on has come so far. Where all threads queue on the default stream there is one
order anyway; a script that trains on a stream of its own has another one there than the engine's
thread. On a CPU nothing here does anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["StreamOrder", "current_stream", "used_here"]


def current_stream(device: str) -> Any:
    """Return the stream that this thread queues its work for a device on; None for a CPU."""
    return torch.cuda.current_stream(torch.device(device)) if device.startswith("cuda") else None


class StreamOrder:
    """Lets what threads queue for the same values, one thread after the other, run in that order.

    ``take`` and ``follow`` never block. Only who has the values to itself takes.
    """

    def __init__(self, *devices: str) -> None:
        self._last: dict[str, Any] = dict.fromkeys(devices)  # the streams of who took last

    def add(self, *devices: str) -> None:
        """Keep the order on these devices, too."""
        for device in devices:
            self._last.setdefault(device, None)

    def take(self) -> None:
        """Have this thread's work follow what there is; what others queue later follows it."""
        self.follow()
        for device in self._last:
            self._last[device] = current_stream(device)

    def follow(self) -> None:
        """Let what this thread queues from now on come after what is queued by now."""
        for device, last in self._last.items():
            if last is not None and (stream := current_stream(device)) != last:
                stream.wait_stream(last)


def used_here(*values: object) -> None:
    """Keep the memory of tensors until what this thread has queued by now is over.

    For those that another thread may have made, on its stream.
    """
    for value in values:
        if isinstance(value, Tensor) and value.is_cuda:
            value.record_stream(current_stream(str(value.device)))
