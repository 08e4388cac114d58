"""Where a thread waits for other ranks: the script's own line, and the engine's call, if any.

Seen from outside, by the heartbeat's thread, in the stack of the thread that trains: a script's
``hvd.allreduce`` is found without touching Horovod, and costs nothing while it runs.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import FrameType
from typing import Any
from urllib.parse import quote, unquote

from loft_hvd._native import extension

__all__ = [
    "CallSite",
    "CallSiteWatch",
    "StandWatch",
    "engine_call",
    "find_call_site",
    "locals_of",
    "stack_of",
]

_ENGINES = ("horovod.", "torch.distributed.")
_OWN = "loft_hvd."
_TIMING = "loft_hvd.transport.waits"
# Between a script's line and the call that waits: no script's own frames.
_INNER = (*_ENGINES, _OWN, "torch.", "contextlib.", "functools.", "threading.")
_UNNAMED = ("wrapper", "forward", "backward", "apply", "synchronize")  # names that tell nothing
_MOST_CHARS = 200  # of a text on the wire; a choice
_MOST_FRAMES = 100  # bound: deeper stacks, such as recursions, hold no wait of ours


@dataclass(frozen=True)
class CallSite:
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
    def decode(cls, text: str) -> CallSite:
        """Return the call site that a text tells; nowhere where it does not parse."""
        parts = text.split("|")
        try:
            line, call, call_s, num_others = parts
            call_site = cls(unquote(line), unquote(call), float(call_s), int(num_others))
        except ValueError:
            return cls()
        return call_site if math.isfinite(call_site.call_s) else cls()


def stack_of(thread: int, most: int = _MOST_FRAMES) -> list[FrameType]:
    """Return the frames of a thread, by its number, the innermost first; [] where none are known.

    Without those that time an engine's wait for us (``waits.py``): it is the engine's all the same.
    Never ``f_back`` of another thread's frame: before Python 3.12 that may crash the process.
    """
    native = extension()
    stack = [] if native is None else native.stack_of(thread, most)
    return [frame for frame in stack if frame.f_globals.get("__name__") != _TIMING]


def locals_of(frame: FrameType, *names: str) -> dict[str, Any]:
    """Return those of a frame's variables that have these names, whichever thread runs it.

    Never ``f_locals`` of a frame that another thread may look at, for the same reason.
    """
    native = extension()
    if native is None:  # then no thread looks at another one
        return {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    found: dict[str, Any] = native.locals_of(frame, names)
    return found


def find_call_site(stack: Sequence[FrameType]) -> tuple[CallSite, object]:
    """Return where a thread is by its stack, and what tells one wait from another."""
    is_outside = bool(stack) and _is_of(stack[0], _ENGINES)
    key: object = None
    if is_outside:
        # Never asked itself: a tensor would wait for its GPU.
        handle = locals_of(stack[0], "handle").get("handle")
        key = id(stack[0]), stack[0].f_lasti, handle if isinstance(handle, int) else id(handle)
    inner = list(itertools.takewhile(lambda frame: _is_of(frame, _INNER), stack))
    is_outside &= not any(_is_of(frame, (_OWN,)) for frame in inner)
    line = ""
    if len(inner) < len(stack):
        frame = stack[len(inner)]
        code = frame.f_code
        line = f"{PurePath(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
    # The engine's, innermost first.
    calls = [frame for frame in inner if _is_of(frame, _ENGINES)]
    call = _describe(calls) if is_outside else ""
    return CallSite(line, call), key if call else None


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith(modules)


def _describe(calls: list[FrameType]) -> str:
    """Say which call of the engine's waits; "" when it is of some ranks only."""
    for frame in calls:
        sets = locals_of(frame, "process_set", "group")
        some = sets.get("process_set")
        some = sets.get("group") if some is None else some
        if some is not None and getattr(some, "process_set_id", None) != 0:
            return ""  # who takes part is not known here
    named = [frame for frame in calls if frame.f_code.co_name not in _UNNAMED] or calls[-1:]
    call = named[-1]  # the one that the script has called
    name: Any = locals_of(call, "name").get("name")
    return f"{call.f_code.co_name} {name!r}" if isinstance(name, str) else call.f_code.co_name


class CallSiteWatch:
    """Sees since when a thread has been in one call of the engine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key: object = None
        self._since = 0.0

    def look(self, thread: int) -> CallSite:
        """Return where a thread is."""
        call_site, key = find_call_site(stack_of(thread))
        now = self._clock()
        if key is None or key != self._key:
            self._key, self._since = key, now
        return replace(call_site, call_s=now - self._since)


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
        stack = stack_of(thread, most=1)
        if not stack:
            return math.inf
        frame = stack[0]
        now, instruction = self._clock(), frame.f_lasti
        if frame is not self._frame or instruction != self._instruction:
            self._frame, self._instruction, self._since = frame, instruction, now
        return now - self._since

    def forget(self) -> None:
        """Let go of the frame, which keeps variables of the script's alive."""
        self._frame = None


def engine_call() -> str:
    """Return the engine's function that the main thread hangs in, or ""; whoever has called it."""
    stack = stack_of(threading.main_thread().ident or 0, most=1)
    # Not poll, which comes back: our own waits call it.
    if not stack or not _is_of(stack[0], _ENGINES) or stack[0].f_code.co_name == "poll":
        return ""
    return stack[0].f_code.co_name
