"""This process among ranks: where it runs, what others are told of its end, and how it ends.

Horovod's shutdown waits for ranks that may never answer. So a process is left some seconds after
an error has ended its script, or when the script hangs in a call that is not ours; a process that
is frozen is killed.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from loft_hvd._native import extension

__all__ = [
    "ENDED",
    "FROZEN",
    "STILL_ENDS_S",
    "TERM",
    "UNKNOWN",
    "FailureNote",
    "FailureObserver",
    "ProcessExit",
    "ProcessGuard",
    "RankProcess",
    "describe_failure",
    "kill_process",
    "observe_failures",
    "own_process",
    "process_state",
    "stat_fields",
    "tell_failure",
]

_logger = logging.getLogger(__name__)
FROZEN = "T"  # the kernel's letter for a process that SIGSTOP has stopped
UNKNOWN = "?"  # nobody has looked at the process yet, or nobody can
ENDED = ("X", "Z")  # its letters: has ended; has ended, but its parent has not asked
_EXITING = 4  # from the kernel's sched.h, PF_EXITING: the process is giving back what it holds
_KILL_IS_PENDING = 1 << (signal.SIGKILL - 1)
_MOST_SAMPLES = 2**53  # bound from float64, in which counts travel: whole numbers are exact to here


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
    is_ending = int(fields[6]) & _EXITING or int(fields[28]) & _KILL_IS_PENDING
    return "X" if is_another or is_ending else fields[0]


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


# What is known of a rank's failure beyond the error's own words, and who hears of it. A balancer
# knows which batch an error has hit, the heartbeat tells the other ranks; neither knows the other.


@dataclass(frozen=True)
class FailureNote:
    """What an observer adds to an error."""

    text: str  # a sentence for the message
    num_samples: int = 0  # samples of the batch that did not fit into memory, or 0


class FailureObserver(Protocol):
    """Who knows more of failures, or wants to know of them."""

    def describe_failure(self, error: BaseException) -> FailureNote | None:
        """Add to an error that ends this rank; called again for the same error now and then."""

    def rank_failed(self, rank: int, num_samples: int) -> None:
        """Hear that a rank's memory did not hold a batch; on rank 0, from any thread."""


@functools.cache
def _observers() -> weakref.WeakSet[FailureObserver]:
    """Return who observes in this process."""
    return weakref.WeakSet()


def observe_failures(observer: FailureObserver) -> None:
    """Ask an observer about errors that nothing catches, for as long as it lives."""
    _observers().add(observer)
    _print_notes_of_uncaught_errors()


def _note_of(error: BaseException) -> FailureNote | None:
    """Return what an observer knows of an error that ends this rank."""
    notes = (observer.describe_failure(error) for observer in list(_observers()))
    return next((note for note in notes if note is not None), None)


def describe_failure(who: str, error: BaseException) -> FailureNote:
    """Return what the other ranks are told of an error that ends this one."""
    note = _note_of(error)
    text = f"{who} has failed: {type(error).__name__}: {error}"
    if note is None:
        return FailureNote(text)
    return FailureNote(f"{text}; {note.text}", note.num_samples)


def tell_failure(rank: int, num_samples: float) -> None:
    """Tell observers what another rank has said of its failure."""
    if 0 < num_samples < _MOST_SAMPLES:  # what comes from another rank is checked
        for observer in list(_observers()):
            observer.rank_failed(rank, int(num_samples))


@functools.cache
def _print_notes_of_uncaught_errors() -> None:
    """Say what is known of an error that ends the script; hooked in once a process."""
    previous = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        note = _note_of(error)
        previous(kind, error, trace)
        if note is not None:
            _logger.error("%s", note.text)

    sys.excepthook = say


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


# Run by a Python of its own with nothing imported but this: 8 MB (measured by its RSS).
_GUARD_SCRIPT = """
import os, signal, sys, time
pid, start, limit_s, who = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
stopped_s = 0.0
while True:
    time.sleep(1.0)
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        break
    if fields[19] != start or fields[0] in "ZX":
        break
    stopped_s = stopped_s + 1.0 if fields[0] == "T" else 0.0
    if stopped_s >= limit_s:
        print(f"{who} is frozen (SIGSTOP): killing it, an elastic job can do without it",
              file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
        break
"""


class ProcessGuard:
    """Ends a frozen rank that has no other rank on its host to do so: a small process beside it.

    Horovod's elastic launcher waits for a frozen process for ever. Ranks of one host end each
    other; a rank that is alone gets this guard, which looks at it in ``/proc`` once a second and
    ends with it. It lets the process be stopped for ``limit_s``. Owned by the rank's heartbeat.
    """

    def __init__(self, rank: int, guarded: RankProcess, *, limit_s: float) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                *("-I", "-S", "-c", _GUARD_SCRIPT),  # no site, no user's folders: quick and small
                *(str(guarded.pid), str(guarded.start), str(limit_s), f"rank {rank} ({guarded})"),
            ],
            stdin=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """End the guard; can be called again."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5.0)
