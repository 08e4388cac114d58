"""A clock for objects that take one."""

from __future__ import annotations

__all__ = ["Clock"]


class Clock:
    """Seconds that pass only when told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """Let them pass, as a ``time.sleep``."""
        self.now += seconds
