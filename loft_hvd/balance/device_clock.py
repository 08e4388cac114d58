"""How long a device was busy with a batch, whose host only queues the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["DeviceClock", "Span", "make_device_clock"]


class Span:
    """The device's time between a batch's arrival and its last gradient.

    Args:
        start: an event on the device's stream, recorded when the batch arrived.
        end: one that each gradient records anew.
    """

    def __init__(self, start: Any, end: Any) -> None:
        self._start = start
        self._end = end

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the last gradient."""
        return bool(self._end.query())

    @property
    def seconds(self) -> float:
        """Seconds on the device; only once it is over."""
        return float(self._start.elapsed_time(self._end)) * 1e-3


class DeviceClock:
    """Marks batches and gradients on the stream that computes them; never waits for the device.

    Args:
        make_event: returns an event with ``record``, ``query`` and ``elapsed_time`` (milliseconds),
            as ``torch.cuda.Event(enable_timing=True)``.
        stream: returns the stream to mark, or None for the current one.
    """

    def __init__(
        self, make_event: Callable[[], Any], stream: Callable[[], Any] = lambda: None
    ) -> None:
        self._make_event = make_event
        self._stream = stream
        self._start: Any = None
        self._end: Any = None

    def arrived(self) -> None:
        """Mark the arrival of a batch."""
        self._start, self._end = self._make_event(), None
        self._start.record(self._stream())

    def gradient(self) -> None:
        """Mark a gradient; the last one counts."""
        if self._start is not None:
            if self._end is None:
                self._end = self._make_event()
            self._end.record(self._stream())

    def take(self) -> Span | None:
        """Return the span of the batch that arrived last, or None when it had no gradient."""
        start, end = self._start, self._end
        self._start = self._end = None
        return None if start is None or end is None else Span(start, end)


def make_device_clock(device: torch.device) -> DeviceClock | None:
    """Return a clock for a device that runs beside its host; None for a CPU, which does not."""
    if device.type != "cuda":
        return None
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True), lambda: torch.cuda.current_stream(device)
    )
