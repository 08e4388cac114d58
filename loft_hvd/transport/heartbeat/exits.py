"""How a process ends after an error: the others hear of it, and it does not hang in its last call.

Horovod's shutdown waits for ranks that may never answer. Once an error has ended the script, or
was not heard of because the script hangs in a call that is not ours, the process is left.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

__all__ = ["ProcessExit", "kill_process"]

_logger = logging.getLogger(__name__)


class ProcessExit:
    """Hooks at the end of this process, and the clock of leaving it.

    Args:
        on_error: called with an error that nothing has caught.
        on_exit: called when the interpreter ends.
        leave_s: seconds from ``arm`` to leaving, or None never to leave.
    """

    def __init__(
        self,
        on_error: Callable[[BaseException], None],
        on_exit: Callable[[], None],
        *,
        leave_s: float | None,
    ) -> None:
        self._on_error = on_error
        self._on_exit = on_exit
        self._leave_s = leave_s
        self._leave_at: float | None = None
        self._reason = ""
        self._previous_hook = sys.excepthook
        self._hook = self._uncaught  # one object, to be recognised later
        sys.excepthook = self._hook
        atexit.register(on_exit)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._on_error(error)
        self.arm(f"{kind.__name__} has ended the script")
        self._previous_hook(kind, error, trace)

    @property
    def is_armed(self) -> bool:
        """Whether the process will be left."""
        return self._leave_at is not None

    def arm(self, reason: str, *, since_s: float = 0.0) -> None:
        """Start the clock, unless it runs already or the process is never left.

        Args:
            reason: what has happened, for the log.
            since_s: how long ago.
        """
        if self._leave_s is not None and self._leave_at is None:
            self._reason = reason
            self._leave_at = time.monotonic() + self._leave_s - since_s

    def leave_if_due(self) -> None:
        """Leave the process with status 1 when the clock has run out."""
        if self._leave_at is None or time.monotonic() < self._leave_at:
            return
        _logger.error(
            "%s, and after %g s the engine is not down: leaving the process",
            self._reason,
            self._leave_s,
        )
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed, or its reader is gone
        logging.shutdown()
        os._exit(1)

    def remove(self) -> None:
        """Take the hooks away; an armed clock runs on."""
        atexit.unregister(self._on_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook


def kill_process(pid: int) -> None:
    """End a frozen process of this host."""
    _logger.error("killing process %d: it is frozen, and the job goes on or ends without it", pid)
    with suppress(OSError):  # it has ended, or is somebody else's
        os.kill(pid, signal.SIGKILL)
