"""One thread's work on a GPU before another's; nothing on a CPU."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Fence"]


class Fence:
    """A point in the work that a thread has queued on a device."""

    def __init__(self, device: str, event: Any) -> None:
        self._device = device
        self._event = event

    @classmethod
    def after(cls, device: str) -> Fence:
        """Return the point that this thread has reached."""
        if not device.startswith("cuda"):
            return cls(device, None)
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(torch.device(device)))
        return cls(device, event)

    def wait(self) -> None:
        """Let what this thread queues from now on come after that point; does not block."""
        if self._event is not None:
            torch.cuda.current_stream(torch.device(self._device)).wait_event(self._event)
