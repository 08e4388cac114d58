"""Why a rank waits in vain: a heartbeat between rank 0 and every other rank.

Once a second each rank says that it lives, what it has started and whether it waits. That finds
the rank that is killed, frozen, raises, leaves early or takes other steps; the others' waits then
end with an error that names it. In elastic mode only a mismatch is raised, as Horovod's own error
must reach ``hvd.elastic.run``. A frozen process is killed: at once in elastic mode, so that the job
recovers, and elsewhere when its verdict has ended the script, so that the job ends.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from loft_hvd.errors import TransportError
from loft_hvd.transport.heartbeat.board import Board
from loft_hvd.transport.heartbeat.diagnosis import Diagnosis, HeartbeatSettings, Place, Verdict
from loft_hvd.transport.heartbeat.exits import ProcessExit, kill_process
from loft_hvd.transport.heartbeat.failures import describe_failure, tell_failure
from loft_hvd.transport.heartbeat.guard import Guard
from loft_hvd.transport.heartbeat.links import MAX_TEXT, Line, Link
from loft_hvd.transport.heartbeat.progress import Progress
from loft_hvd.transport.heartbeat.silent import SilentRanks

__all__ = ["Heartbeat"]

_logger = logging.getLogger(__name__)
_EXPLAIN_S = 1.0
_ENGINE_ERRORS = ("HorovodInternalError", "HostsUpdatedInterrupt")


class Heartbeat:
    """One rank's part of the star; owns its thread and links.

    Args:
        rank: this rank.
        links: to all other ranks on rank 0, to rank 0 elsewhere.
        places: where those ranks run.
        settings: how it beats and acts.
        own_place: where this rank runs.
        engine_is_down: says whether the engine has ended, so that its calls fail by themselves.
        kill: ends a process of this host.
        guard: watches this process from outside, or None.
    """

    def __init__(
        self,
        rank: int,
        links: Mapping[int, Link],
        places: Mapping[int, Place],
        *,
        settings: HeartbeatSettings,
        own_place: Place,
        engine_is_down: Callable[[], bool] = lambda: False,
        kill: Callable[[int], None] = kill_process,
        guard: Guard | None = None,
    ) -> None:
        self.rank = rank
        self.settings = settings
        self.verdict: Verdict | None = None
        self.board = Board()
        self._links = dict(links)
        self._place = own_place
        self._engine_is_down = engine_is_down
        self._guard = guard
        self._diagnosis = Diagnosis(rank, places, limits=settings.limits)
        self._silent = SilentRanks(
            self._diagnosis, self._links, places, own_place, kill=kill, dooms=self._dooms
        )
        self._has_verdict = threading.Event()
        self._verdict_at = 0.0
        self._is_heard = self._has_failed = self._is_closed = False
        self._late: list[int] = []
        self._gone: set[int] = set()  # ranks that have said good-bye, to whomever
        self._waker, self._sleeper = socket.socketpair()
        self._exit: ProcessExit | None = None
        if settings.owns_process:
            leave_s = None if settings.is_elastic else settings.leave_s
            self._exit = ProcessExit(self.report, self.close, leave_s=leave_s)
        self._thread = threading.Thread(target=self._run, name="loft-heartbeat", daemon=True)
        self._thread.start()

    # What waits ask and tell; any thread.

    def waiting(self) -> AbstractContextManager[None]:
        """Note that the calling thread waits for other ranks inside."""
        return self.board.waiting()

    def late(self) -> list[int]:
        """Return the ranks that have not come to what this rank waits for, as far as known."""
        progress = self.board.progress()
        return self._diagnosis.late_for(0, progress) if self.rank == 0 else self._late

    def final_verdict(self, *, at_once: bool = False) -> Verdict | None:
        """Return the verdict that ends waits, not in its first moment.

        In elastic mode that is only a mismatch, which a new world would meet again; from all else
        the engine recovers. A wait that ends by it calls ``heard``.

        Args:
            at_once: in its first moment too, as the engine has failed already.
        """
        verdict = self.verdict
        if verdict is None or (self.settings.is_elastic and not verdict.is_mismatch):
            return None
        is_due = time.monotonic() - self._verdict_at >= self.settings.grace_s
        return verdict if at_once or is_due else None

    def heard(self) -> None:
        """Note that a wait raises the verdict: from here on the script is in charge."""
        self._is_heard = True

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank fails; its first error only, and none that came to it."""
        if self._has_failed or self._is_in_child():
            return
        self._has_failed = True
        is_echo = isinstance(error, TransportError) or type(error).__name__ in _ENGINE_ERRORS
        if self.verdict is not None or is_echo:
            return
        note = describe_failure(f"rank {self.rank} ({self._place})", error)
        for link in self._links.values():
            link.send(Line("failed", self.rank, float(note.num_samples), note.text))

    def explain(self, error: BaseException) -> None:
        """Add to an engine's own error which rank is behind it; waits up to a second for that."""
        self._is_heard = True
        if not (left := sorted({*self._diagnosis.left_ranks(), *self._gone})):
            self._has_verdict.wait(_EXPLAIN_S)
            left = sorted(self._gone)
        reason = f"ranks {left} have ended their scripts" if left else ""
        reason = self.verdict.text if self.verdict is not None else reason
        if reason and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"loft_hvd: {reason}")

    def close(self) -> None:
        """Say good-bye and end the thread; can be called again.

        After an error the thread stays until the process has ended, and leaves it when the engine
        does not come down: a rank that hangs in its last breath would keep the job alive.
        """
        if self._is_closed or self._is_in_child():
            return
        self._beat()  # what this rank has done, for those who still wait
        for link in self._links.values():
            link.send(Line("left", self.rank))
        if self._exit is not None:
            self._exit.remove()
            if self._has_failed or self.verdict is not None:
                self._exit.arm("an error has ended the script")
            if self._exit.is_armed:
                return
        self._is_closed = True
        if self._guard is not None:
            self._guard.close()
        self._waker.send(b"!")
        self._thread.join(timeout=5.0)
        for link in self._links.values():
            link.close()
        self._waker.close()
        self._sleeper.close()

    def _is_in_child(self) -> bool:
        """Say whether this is a fork, such as a loader process: it must not speak for the rank."""
        return os.getpid() != self._place.pid

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has ended the thread."""
        return self._is_closed

    # The thread.

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._sleeper, selectors.EVENT_READ)
                for rank, link in self._links.items():
                    selector.register(link, selectors.EVENT_READ, data=rank)
                    self._receive(rank, selector)  # what came with the welcome
                self._loop(selector)
        except Exception:
            _logger.exception("rank %d: the heartbeat has ended by an error of its own", self.rank)

    def _loop(self, selector: selectors.BaseSelector) -> None:
        next_beat = time.monotonic()
        while not self._is_closed:
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                if key.data is not None:
                    self._receive(key.data, selector)
            if time.monotonic() - next_beat > self.settings.limits.suspect_s:
                self._diagnosis.restarted()  # suspended, or kept from the interpreter
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + self.settings.period_s
                self._beat()
                self._silent.look()
                self._decide(self._diagnosis.judge(self.board.progress()))
                self._leave_if_stuck()

    def _receive(self, peer: int, selector: selectors.BaseSelector) -> None:
        link = self._links[peer]
        for line in link.receive():
            self._handle(peer, line)
        if link.is_closed:
            selector.unregister(link)
            self._decide(self._diagnosis.closed(peer))

    def _handle(self, peer: int, line: Line) -> None:
        words = list(filter(None, line.text.split("|")))
        if line.kind == "beat":
            self._diagnosis.heard(peer, Progress.decode(line.seconds, line.text))
        elif line.kind == "late" and peer == 0:
            self._late = [int(word) for word in words if word.isdecimal()]
        elif line.kind == "left":
            self._hear_good_bye(peer, line)
        elif line.kind == "failed":
            self._diagnosis.left(peer)
            tell_failure(peer, line.seconds)
            self._decide(Verdict(peer, line.text))
        elif peer == 0 and line.kind == "verdict":
            self._decide(Verdict(line.rank, line.text, is_mismatch=line.seconds > 0))
        elif peer == 0 and line.kind == "look" and len(words) == 3 and "".join(words).isdecimal():
            self._silent.look_for_rank_0(line.rank, *(int(word) for word in words))
        elif line.kind == "state" and line.rank in self._links:
            self._silent.saw(line.rank, line.text[:1])

    def _hear_good_bye(self, peer: int, line: Line) -> None:
        """Note who has left; rank 0 passes it on, as the others have no link to that rank."""
        self._gone.add(line.rank if peer == 0 else peer)
        if line.rank == peer:
            self._diagnosis.left(peer)
        for rank, link in self._links.items():
            if self.rank == 0 and rank != peer:
                link.send(line)

    def _beat(self) -> None:
        progress = self.board.progress()
        text = progress.encode(MAX_TEXT)
        for rank, link in self._links.items():
            link.send(Line("beat", self.rank, progress.waited_s, text))
            if self.rank == 0:
                late = self._diagnosis.late_for(rank, progress)
                link.send(Line("late", 0, 0.0, "|".join(map(str, late))))

    # Verdicts.

    def _dooms(self, rank: int) -> bool:
        """Say whether to end a frozen rank: when the job goes on, or is over, without it."""
        is_over = self.settings.is_elastic or (self._exit is not None and self._exit.is_armed)
        return is_over and self.verdict is not None and self.verdict.rank == rank

    def _decide(self, verdict: Verdict | None) -> None:
        if verdict is None or self.verdict is not None:
            return
        self._verdict_at = time.monotonic()  # first: waits look at the verdict
        self.verdict = verdict
        self._has_verdict.set()
        level = logging.ERROR if 0 in (self.rank, verdict.rank) else logging.INFO
        _logger.log(level, "%s", verdict.text)  # once: rank 0's verdicts reach the others
        if self.rank == 0:
            for rank, link in self._links.items():
                if rank != verdict.rank or verdict.is_mismatch:
                    seconds = float(verdict.is_mismatch)
                    link.send(Line("verdict", verdict.rank, seconds, verdict.text))

    def _leave_if_stuck(self) -> None:
        """Leave a process that an error has ended, or that hangs in a call that is not ours."""
        if self._exit is None:
            return
        if self.verdict is not None and not self._is_heard and not self._exit.is_armed:
            unheard_s = time.monotonic() - self._verdict_at
            if unheard_s >= self.settings.leave_s and not self._engine_is_down():
                self._exit.arm(self.verdict.text, since_s=unheard_s)
        self._exit.leave_if_due()
