"""What is done once it is known who has failed: others are told, waits end, processes end.

A process that is frozen, or whose interpreter stands still for too long, is killed: at once in
elastic mode, so that the job recovers, and elsewhere when its verdict has ended the script, so that
the job ends. This process is left where its script hangs.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from loft_hvd.failures.call_sites import StandWatch, engine_call
from loft_hvd.failures.connections import Connections
from loft_hvd.failures.diagnosis import Diagnosis, Verdict
from loft_hvd.failures.guards import LauncherGuard, ProcessGuard
from loft_hvd.failures.links import Message
from loft_hvd.failures.process import (
    ProcessExit,
    RankProcess,
    kill_process,
    own_process,
    process_state,
)

__all__ = ["Actions", "BackgroundCalls", "HeartbeatSettings", "ProcessControl", "read_verdict"]

_logger = logging.getLogger(__name__)
_FLUSH_S = 1.0  # a choice: at the end, for handlers to write what is still to be logged
_MISMATCH, _UNSEEN, _CUT = 1.0, 2.0, 3.0  # kinds of verdicts, in the number of their message


@dataclass(frozen=True)
class HeartbeatSettings:
    """How a heartbeat beats and acts."""

    period_s: float = 1.0  # between two beats
    # Until a verdict ends waits: an engine's own error, or one that all ranks find by themselves,
    # goes before it. A choice.
    grace_s: float = 0.5
    leave_s: float = 5.0  # after an error, until a process that hangs is left
    is_elastic: bool = False  # whether Horovod runs elastically


@dataclass(frozen=True)
class ProcessControl:
    """What a heartbeat can do with processes of its host."""

    own: RankProcess = field(default_factory=own_process)  # where this process runs
    exit: ProcessExit | None = None  # reports uncaught errors, and leaves this process if it hangs
    guard: ProcessGuard | None = None  # watches this process from outside
    launcher: LauncherGuard | None = None  # ends a launcher that waits for a lost host
    look: Callable[[int, int], str] = process_state  # a process by id and start
    kill: Callable[[int], None] = kill_process


class BackgroundCalls:
    """Does what the heartbeat's thread must not wait for, in order, on a thread of its own.

    That is to log, and to tell others in this process: a handler's lock may be held by a thread
    that waits for other ranks, and a disk may not answer. The thread begins with the first call.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Log a text some time soon."""
        self.do(functools.partial(_logger.log, level, text, *arguments))

    def do(self, call: Callable[[], object]) -> None:
        """Call something some time soon; from one thread only."""
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="loft-background", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until all is done, for a moment at most; from any thread."""
        if self._thread is not None:
            is_done = threading.Event()
            self._calls.put(is_done.set)
            is_done.wait(_FLUSH_S)

    def close(self) -> None:
        """End the thread once all is done, and wait for a moment at most; nothing may follow."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # of an annotator; a handler of logging's keeps its own
                _logger.exception("the heartbeat has met an error of its own")


def read_verdict(message: Message) -> Verdict:
    """Return the verdict that rank 0 tells."""
    kinds = {_MISMATCH: "is_mismatch", _UNSEEN: "is_unseen", _CUT: "is_cut"}
    flags = {kinds[message.seconds]: True} if message.seconds in kinds else {}
    return Verdict(message.rank, message.text, **flags)


class Actions:
    """What this rank does about a verdict; the heartbeat's thread calls it, but for ``close``.

    Args:
        diagnosis: knows this rank, and whether an interpreter still stands still.
        connections: whom it tells.
        settings: when it acts.
        control: what it can do with processes.
        engine_is_down: whether the engine has ended, so that its calls fail by themselves.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        connections: Connections,
        *,
        settings: HeartbeatSettings,
        control: ProcessControl,
        engine_is_down: Callable[[], bool],
    ) -> None:
        self.settings = settings
        self.control = control
        self.verdict: Verdict | None = None
        self.verdict_at = 0.0
        self.has_verdict = threading.Event()
        self.is_heard = False  # whether a wait has raised the verdict: the script is in charge
        self.background = BackgroundCalls()
        self._diagnosis = diagnosis
        self._connections = connections
        self._engine_is_down = engine_is_down
        self._ends_by_term = False  # once there is a verdict
        # Whether the main thread was in one call of the engine's at the last two looks, and which.
        self._is_stuck, self._last_call = False, ""
        self._stand = StandWatch()

    # Verdicts.

    def decide(self, verdict: Verdict | None) -> None:
        """Take the first verdict there is: waits end by it, and rank 0 tells the others."""
        if verdict is None or self.verdict is not None:
            return
        self.verdict_at = time.monotonic()  # first: waits look at the verdict
        self.verdict = verdict
        self.has_verdict.set()
        rank = self._diagnosis.rank
        if rank == 0:
            for other in self._connections:
                self.tell_verdict(other)
        # Once, as rank 0's verdicts reach the others.
        level = logging.ERROR if 0 in (rank, verdict.rank) else logging.INFO
        self.background.log(level, "%s", verdict.text)

    def tell_verdict(self, rank: int) -> None:
        """Tell a rank of the verdict, if there is one, and not on itself alone."""
        verdict = self.verdict
        if verdict is None:
            return
        if rank != verdict.rank or verdict.is_mismatch or verdict.is_cut:
            seconds = _MISMATCH * verdict.is_mismatch + _UNSEEN * verdict.is_unseen
            seconds += _CUT * verdict.is_cut
            self._connections.say(Message("verdict", verdict.rank, seconds, verdict.text), to=rank)

    # Processes of others.

    def is_held(self, rank: int) -> bool:
        """Say whether there is a verdict on a rank whose interpreter stands still, and still so."""
        verdict = self.verdict
        is_named = verdict is not None and verdict.is_held and verdict.rank == rank
        return is_named and self._diagnosis.is_held(rank)

    def dooms(self, rank: int) -> bool:
        """Say whether to end a stopped rank: when the job goes on, or is over, without it.

        Also where the script waits for it in a call of the engine's, which fails by that.
        """
        if self.verdict is None or self.verdict.rank != rank:
            return False
        end = self.control.exit
        is_over = self.settings.is_elastic or (end is not None and end.is_armed)
        return is_over or self._is_stuck

    def kill(self, pid: int) -> None:
        """End a process of this host that is frozen, or whose interpreter stands still."""
        self.control.kill(pid)
        text = "killed process %d, which stands still: the job goes on or ends without it"
        self.background.log(logging.ERROR, text, pid)

    # This process.

    @property
    def is_told(self) -> bool:
        """Whether this process is told to end by SIGTERM, and does in a moment."""
        return self.control.exit is not None and self.control.exit.is_told

    def told(self) -> None:
        """Note that this process is told to end, as by its launcher when another rank has."""
        self._ends_by_term = True

    def end_if_told(self) -> None:
        """End a process that was told to, once it has said which rank was the first to end."""
        end = self.control.exit
        if not self._ends_by_term or self.verdict is None or end is None:
            return
        self._ends_by_term = False
        if end.is_told:  # still: its script has not prevented it
            self.background.flush()
            end.end_by_term()

    def arm_if_stuck(self) -> bool:
        """Start the clock of leaving this process where it hangs in a call that is not ours.

        Returns whether that has doomed a rank right now. Its launcher waits for it, ten seconds at
        worst, and this process may leave at once: nobody would be here to kill it.
        """
        end, verdict = self.control.exit, self.verdict
        if end is None:
            return False
        # The engine's own call over all ranks, its shutdown too: a lost host never answers it, nor
        # does a frozen rank before it is killed.
        call = engine_call() if verdict is not None else ""
        self._is_stuck, self._last_call = call != "" and call == self._last_call, call
        if verdict is None or self.is_heard or end.is_armed or end.is_kept:
            self._stand.forget()
            return False
        unheard_s = time.monotonic() - self.verdict_at
        # A script that goes on, as it evaluates or saves, comes to a call of ours and hears of
        # the verdict there. One that never comes to any is left after the longest wait.
        stands_s = self._stand.look(threading.main_thread().ident or 0)
        hangs = min(unheard_s, stands_s) >= self.settings.leave_s
        is_late = unheard_s >= self._diagnosis.limits.held_s
        # Where the engine is down its calls fail, so the script goes on by itself.
        if not (self._waits_for_ever or hangs or is_late) or self._engine_is_down():
            return False
        end.arm(verdict.text, since_s=unheard_s)
        return True

    def leave_if_due(self) -> None:
        """Leave a process that an error has ended, or that hangs, when its clock has run out."""
        end = self.control.exit
        if end is None:
            return
        if end.is_armed:
            self._end_launcher()
            if self._waits_for_ever:
                end.leave_now()
        end.leave_if_due()

    def unhook(self, *, has_failed: bool) -> bool:
        """Take the hooks away as the script ends; returns whether this process may be left yet."""
        end = self.control.exit
        if end is None:
            return False
        end.remove()
        if has_failed or self.verdict is not None:
            end.arm("an error has ended the script")
        if end.is_armed:
            self._end_launcher()
            self.background.flush()
        return end.is_armed

    def close(self) -> None:
        """End the guard, and what runs in the background."""
        if self.control.guard is not None:
            self.control.guard.close()
        self.background.close()

    @property
    def _waits_for_ever(self) -> bool:
        return self._is_stuck and self._has_lost_host

    @property
    def _has_lost_host(self) -> bool:
        verdict = self.verdict  # what is not reached answers as little as what is gone
        return verdict is not None and (verdict.is_unseen or verdict.is_cut)

    def _end_launcher(self) -> None:
        """See to it that the launcher does not wait for a host that is gone."""
        if self.control.launcher is not None and self._has_lost_host:
            self.control.launcher.start()
