"""Where a thread waits for other ranks: the script's own line, and the engine's call, if any.

Seen from outside, by the heartbeat's thread, in the stack of the thread that trains: a script's
``hvd.allreduce`` is found without touching Horovod, and costs nothing while it runs.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import FrameType
from typing import Any
from urllib.parse import quote, unquote

from loft_hvd._native import extension

__all__ = ["Place", "PlaceWatch", "StandWatch", "engine_call", "find_place", "innermost_frame"]

_ENGINES = ("horovod.", "torch.distributed.")
_OWN = "loft_hvd."
# Between a script's line and the call that waits: no script's own frames.
_INNER = (*_ENGINES, _OWN, "torch.", "contextlib.", "functools.", "threading.")
_UNNAMED = ("wrapper", "forward", "backward", "apply", "synchronize")  # names that tell nothing
_MOST_CHARS = 200  # of a text on the wire; a choice
_MOST_FRAMES = 100  # bound: deeper stacks, such as recursions, hold no wait of ours


@dataclass(frozen=True)
class Place:
    """Where a rank's training thread is; texts for messages."""

    line: str = ""  # of the script: "train.py:88 in train"; "" where that is not known
    call: str = ""  # of the engine's, over all ranks, outside of loft: "allreduce 'loss'"; "" none
    call_s: float = 0.0  # seconds that it has been seen in that call
    # How many operations over all ranks the script itself has started in the engine, from a moment
    # that is the same on every rank; -1: not known.
    num_others: int = -1

    def __str__(self) -> str:
        return f" at {self.line}" if self.line else ""

    def encode(self) -> str:
        """Return it as text: "train.py%3A88%20in%20train|allreduce%20%27loss%27|7.0|3"."""
        texts = quote(self.line[:_MOST_CHARS]), quote(self.call[:_MOST_CHARS])
        return "|".join([*texts, f"{self.call_s:.1f}", str(self.num_others)])

    @classmethod
    def decode(cls, text: str) -> Place:
        """Return the place that a text tells; nowhere where it does not parse."""
        parts = text.split("|")
        try:
            line, call, call_s, num_others = parts
            place = cls(unquote(line), unquote(call), float(call_s), int(num_others))
        except ValueError:
            return cls()
        return place if math.isfinite(place.call_s) else cls()


def innermost_frame(thread: int) -> FrameType | None:
    """Return where a thread is, by its number; None where that cannot be told.

    Before Python 3.12 a garbage collection may begin while Python lists the frames, under a lock
    that every start of a thread takes. A destructor that lets other threads run, as a tensor's
    does, then leaves both waiting for ever (python/cpython#106883). The extension keeps it out.
    """
    if sys.version_info >= (3, 12):
        list_frames = sys._current_frames
    else:
        list_frames = getattr(extension(), "current_frames", dict)
    frames: dict[int, FrameType] = list_frames()
    return frames.get(thread)


def find_place(frame: FrameType | None) -> tuple[Place, object]:
    """Return the place of a thread by its innermost frame, and what tells one wait from another."""
    calls: list[FrameType] = []  # the engine's, innermost first
    is_outside = frame is not None and _is_of(frame, _ENGINES)
    key: object = None
    if frame is not None and is_outside:
        handle = frame.f_locals.get("handle")  # never asked itself: a tensor would wait for its GPU
        key = id(frame), frame.f_lasti, handle if isinstance(handle, int) else id(handle)
    for _ in range(_MOST_FRAMES):
        if frame is None or not _is_of(frame, _INNER):
            break
        is_outside &= not _is_of(frame, (_OWN,))
        if _is_of(frame, _ENGINES):
            calls.append(frame)
        frame = frame.f_back
    line = ""
    if frame is not None and not _is_of(frame, _INNER):
        code = frame.f_code
        line = f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    call = _describe(calls) if is_outside else ""
    return Place(line, call), key if call else None


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith(modules)


def _describe(calls: list[FrameType]) -> str:
    """Say which call of the engine's waits; "" when it is of some ranks only."""
    for frame in calls:
        some = frame.f_locals.get("process_set")
        some = frame.f_locals.get("group") if some is None else some
        if some is not None and getattr(some, "process_set_id", None) != 0:
            return ""  # who takes part is not known here
    named = [frame for frame in calls if frame.f_code.co_name not in _UNNAMED] or calls[-1:]
    call = named[-1]  # the one that the script has called
    name: Any = call.f_locals.get("name")
    return f"{call.f_code.co_name} {name!r}" if isinstance(name, str) else call.f_code.co_name


class PlaceWatch:
    """Sees since when a thread has been in one call of the engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key: object = None
        self._since = 0.0

    def look(self, thread: int) -> Place:
        """Return where a thread is."""
        place, key = find_place(innermost_frame(thread))
        now = self._clock()
        if key is None or key != self._key:
            self._key, self._since = key, now
        return replace(place, call_s=now - self._since)


class StandWatch:
    """Sees since when a thread has stood in one instruction, as a call of C is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Itself, not its id: the next call's frame often takes the memory of one that is gone.
        self._frame: FrameType | None = None
        self._instruction = -1
        self._since = 0.0

    def look(self, thread: int) -> float:
        """Return for how many seconds it has; infinite where that cannot be told."""
        frame = innermost_frame(thread)
        if frame is None:
            return math.inf
        now, instruction = self._clock(), frame.f_lasti
        if frame is not self._frame or instruction != self._instruction:
            self._frame, self._instruction, self._since = frame, instruction, now
        return now - self._since

    def forget(self) -> None:
        """Let go of the frame, which keeps variables of the script's alive."""
        self._frame = None


def engine_call() -> str:
    """Return the engine's function that the main thread hangs in, or ""; whoever has called it."""
    frame = innermost_frame(threading.main_thread().ident or 0)
    # Not poll, which comes back: our own waits call it.
    if frame is None or not _is_of(frame, _ENGINES) or frame.f_code.co_name == "poll":
        return ""
    return frame.f_code.co_name
