"""Processes of ranks: where one runs, what state it is in, and how this one ends.

Horovod's shutdown waits for ranks that may never answer. So a process is left some seconds after
an error has ended its script, or when the script hangs in a call that is not ours.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from loft_hvd._native import extension

__all__ = [
    "ENDED",
    "FROZEN",
    "STILL_ENDS_S",
    "TERM",
    "UNKNOWN",
    "ProcessExit",
    "RankProcess",
    "kill_process",
    "own_process",
    "process_state",
    "stat_fields",
]

_logger = logging.getLogger(__name__)
FROZEN = "T"  # the kernel's letter for a process that SIGSTOP has stopped
UNKNOWN = "?"  # nobody has looked at the process yet, or nobody can
ENDED = ("X", "Z")  # its letters: has ended; has ended, but its parent has not asked
_EXITING = 4  # from the kernel's sched.h, PF_EXITING: the process is giving back what it holds
_KILL_IS_PENDING = 1 << (signal.SIGKILL - 1)


@dataclass(frozen=True)
class RankProcess:
    """Where a rank's process runs."""

    host_key: int  # equal for processes that can see each other in /proc
    pid: int  # process id on that host
    start: int  # when the process started, in the kernel's ticks; tells it from a later one
    host: str  # the host's name, for messages

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def own_process() -> RankProcess:
    """Return where this process runs."""
    try:
        # Two containers of one host may share its boot id, but not the view of its processes.
        visible = Path("/proc/sys/kernel/random/boot_id").read_text()
        visible += str(Path("/proc/self/ns/pid").readlink())
        start = int(stat_fields("self")[19])
    except OSError:  # no /proc: nobody can look at this process
        visible, start = secrets.token_hex(8), 0
    digest = hashlib.sha256(visible.encode()).digest()
    host_key = int.from_bytes(digest[:8], "little") >> 1  # 63 bits: it travels as int64
    return RankProcess(host_key, os.getpid(), start, socket.gethostname())


def process_state(pid: int, start: int) -> str:
    """Return a process's state letter as ``/proc`` of this host shows it; X when it ends.

    That is before its connections end: a process gives back its memory first, which takes 70 ms
    for 800 MB (measured on two cores). ``UNKNOWN`` where it cannot be read.
    """
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError:
        return UNKNOWN
    # Another start: the process has ended, and its id was given to a later one.
    is_another = start != 0 and int(fields[19]) != start
    # Newer kernels show what ends it as its exit code, also between the two other signs. SIGKILL
    # alone: others may be what a debugger has stopped it with.
    is_killed = int(fields[28]) & _KILL_IS_PENDING or int(fields[49]) == signal.SIGKILL
    return "X" if is_another or is_killed or int(fields[6]) & _EXITING else fields[0]


def stat_fields(pid: int | str, *, proc: Path = Path("/proc")) -> list[str]:
    """Return ``/proc/PID/stat`` from the state letter on; 19 places later comes the start.

    The command before it, in brackets, may hold blanks and brackets itself: split at the last.
    ``7 (my (odd) name) S 1 7 ..`` gives ``["S", "1", "7", ..]``.
    """
    # The kernel cuts the command after 15 bytes, also inside a character of UTF-8.
    stat = (proc / str(pid) / "stat").read_bytes().decode(errors="replace")
    return stat.rpartition(")")[2].split()


def kill_process(pid: int) -> None:
    """End a process of this host."""
    with suppress(OSError):  # it has ended, or is somebody else's
        os.kill(pid, signal.SIGKILL)


_LAST_WORDS_S = 2.0  # a choice: for logs and their handlers to be written, at the end
TERM = b"T"  # what a waker gets; from csrc/process/grace.h
# From SIGTERM to the end of a process that has no verdict by then. A choice: a rank's end takes
# tenths of a second on a busy host, and Open MPI kills 1 s after SIGTERM, horovodrun 5 s.
_TERM_S = 0.5
STILL_ENDS_S = 2.0  # a choice: who lives after that has prevented its end


class ProcessExit:
    """Hooks at the end of this process, and the clock of leaving it.

    Args:
        leave_s: seconds from ``arm`` to leaving, or None never to leave.
    """

    def __init__(self, *, leave_s: float | None) -> None:
        self._leave_s = leave_s
        self._leave_at: float | None = None
        self._reason = ""
        self._armed_at = 0.0

    def install(
        self,
        on_error: Callable[[BaseException], None],
        on_exit: Callable[[], None],
        *,
        waker: socket.socket,
    ) -> None:
        """Call these with an error that nothing has caught, and when the interpreter ends.

        The first SIGTERM, where the script does not handle it, writes ``TERM`` to the waker,
        whatever the main thread does, and ends the process a moment later: its launcher may end it
        before it has seen which rank has ended first.
        """
        self._on_error = on_error
        self._on_exit = on_exit
        self._told_by = waker.fileno()
        if (add_grace := getattr(extension(), "add_grace", None)) is not None:
            add_grace(self._told_by, _TERM_S)
        self._previous_hook = sys.excepthook
        self._hook = self._uncaught  # one object: each access to a bound method makes a new one
        sys.excepthook = self._hook
        atexit.register(on_exit)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._on_error(error)
        self.arm(f"{kind.__name__} has ended the script")
        self._previous_hook(kind, error, trace)

    @property
    def is_kept(self) -> bool:
        """Whether the process is never left."""
        return self._leave_s is None

    @property
    def is_armed(self) -> bool:
        """Whether the process will be left."""
        return self._leave_at is not None

    def arm(self, reason: str, *, since_s: float = 0.0) -> None:
        """Start the clock as of ``since_s`` ago, unless it runs or the process is never left."""
        if self._leave_s is not None and self._leave_at is None:
            self._reason = reason
            self._armed_at = time.monotonic() - since_s
            self._leave_at = time.monotonic() + self._leave_s - since_s
            self._leave_without_python()

    def leave_now(self) -> None:
        """Let an armed clock run out."""
        if self._leave_at is not None:
            self._leave_at = min(self._leave_at, time.monotonic())
            self._leave_without_python()

    def _leave_without_python(self) -> None:
        """Leave soon after the clock also where no thread of Python's can: the last resort.

        The interpreter's lock or a log's may be held for ever, or the interpreter be gone while a
        library's last words hang.
        """
        leave_in = getattr(extension(), "leave_in", None)  # not in one of an older checkout
        if leave_in is not None and self._leave_at is not None:
            left_s = max(0.0, self._leave_at - time.monotonic())
            why = f"loft_hvd: {self._reason}, and the process does not end: leaving it"
            leave_in(left_s + _LAST_WORDS_S, why)

    def leave_if_due(self) -> None:
        """Leave the process with status 1 when the clock has run out."""
        if self._leave_at is None or time.monotonic() < self._leave_at:
            return
        _logger.error(
            "%s, and after %.0f s the engine is not down: leaving the process",
            self._reason,
            time.monotonic() - self._armed_at,
        )
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue  # closed, or its reader is gone
        logging.shutdown()
        os._exit(1)  # sys.exit would run the engine's exit hook, which is what hangs

    @property
    def is_told(self) -> bool:
        """Whether this process is told to end, and does in a moment; from any thread."""
        since_sigterm_s = getattr(extension(), "since_sigterm_s", None)
        return since_sigterm_s is not None and 0.0 <= since_sigterm_s() < STILL_ENDS_S

    def end_by_term(self) -> None:
        """End this process by the SIGTERM that it has had."""
        os.kill(os.getpid(), signal.SIGTERM)  # which has its default action again, or the script's

    def remove(self) -> None:
        """Take the hooks away; an armed clock runs on."""
        if (remove_grace := getattr(extension(), "remove_grace", None)) is not None:
            remove_grace(self._told_by)
        atexit.unregister(self._on_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
