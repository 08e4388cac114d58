"""What the set-up says, and the one error that it raises on purpose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

__all__ = ["SetupError", "say", "step"]


class SetupError(Exception):
    """The set-up cannot go on; the message says what is missing and the way out."""


def say(text: str) -> None:
    """Print one line at once, also when the output is a pipe."""
    print(text, flush=True)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Announce a step and say how long it took."""
    say(f"setup: {title}")
    start_s = time.monotonic()
    yield
    say(f"setup:   done in {time.monotonic() - start_s:.1f} s")
