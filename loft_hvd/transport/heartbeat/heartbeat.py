"""Why a rank waits in vain: a heartbeat between rank 0 and every other rank.

Once a second each rank says that it lives, what it has started and whether it waits. That finds
the rank that is killed, frozen, raises, leaves early or takes other steps; the others' waits then
end with an error that names it. A link that is lost is made again, and is no failure by itself.
In elastic mode only a mismatch is raised, as Horovod's own error must reach ``hvd.elastic.run``. A
process that is frozen, or whose interpreter stands still for too long, is killed: at once in
elastic mode, so that the job recovers, and elsewhere when its verdict has ended the script, so that
the job ends.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from loft_hvd._native import extension
from loft_hvd.errors import TransportError
from loft_hvd.transport.heartbeat.diagnosis import Diagnosis, Progress, ProgressMeter, Verdict
from loft_hvd.transport.heartbeat.door import Caller, Entrance, Met
from loft_hvd.transport.heartbeat.launcher import LauncherGuard
from loft_hvd.transport.heartbeat.links import MAX_TEXT, PULSE, Line, Link
from loft_hvd.transport.heartbeat.places import StandWatch, engine_call
from loft_hvd.transport.heartbeat.process import (
    ENDED,
    FROZEN,
    TERM,
    UNKNOWN,
    ProcessExit,
    ProcessGuard,
    RankProcess,
    describe_failure,
    kill_process,
    own_process,
    process_state,
    tell_failure,
)

__all__ = [
    "Aside",
    "Heartbeat",
    "HeartbeatSettings",
    "ProcessControl",
    "ReadClock",
    "is_of_engine",
]

_logger = logging.getLogger(__name__)
_EXPLAIN_S = 1.0  # bound from the beats: what others have seen by now comes with their next one
_LISTEN_S = 0.02  # a choice: between two looks for a good-bye
_ASIDE_S = 1.0  # a choice: at the end, for handlers to write what is still to be logged
_MOST_READS = 64  # bound: each takes 64 kB at least, more than a kernel keeps for a link
_LOOK_S = 0.25  # a choice: between looks at what this rank does after a verdict
_MISMATCH, _UNSEEN = 1.0, 2.0  # kinds of verdicts, in the number of their line
_ENGINE_ERRORS = ("HorovodInternalError", "HostsUpdatedInterrupt")


def is_of_engine(error: BaseException) -> bool:
    """Say whether an error is Horovod's own, so that the cause may be another rank."""
    return type(error).__name__ in _ENGINE_ERRORS and _interruption(error) is None


def _interruption(error: BaseException) -> BaseException | None:
    """Return what a signal handler has raised inside Horovod's call, which made it its error.

    So torch says that a loader process was killed: its handler raises wherever the script is, and
    Horovod takes every RuntimeError inside its calls for one of its own.
    """
    inner = error.__context__ if type(error).__name__ in _ENGINE_ERRORS else None
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {code for each in handlers if (code := getattr(each, "__code__", None)) is not None}
    # From the call on: a handler that itself calls the engine is no frame of the inner error.
    frames = traceback.walk_tb(None if inner is None else inner.__traceback__)
    return inner if any(frame.f_code in codes for frame, _ in frames) else None


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


class ReadClock:
    """The time at which links were read last, for a diagnosis.

    A process may be kept from running between reading and judging. What others have said
    meanwhile is not read yet: by this clock no time has passed.
    """

    def __init__(self) -> None:
        self._now = time.monotonic()

    def __call__(self) -> float:
        return self._now

    def read(self) -> None:
        """Note that links are read now."""
        self._now = time.monotonic()


class Aside:
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
            self._thread = threading.Thread(target=self._run, name="loft-aside", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until all is done, for a moment at most; from any thread."""
        if self._thread is not None:
            is_done = threading.Event()
            self._calls.put(is_done.set)
            is_done.wait(_ASIDE_S)

    def close(self) -> None:
        """End the thread once all is done, and wait for a moment at most; nothing may follow."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_ASIDE_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # of an observer; a handler of logging's keeps its own
                _logger.exception("the heartbeat has met an error of its own")


class _Pulse(Protocol):
    """The extension's ``Pulse``."""

    def add(self, descriptor: int) -> None: ...
    def remove(self, descriptor: int) -> None: ...
    def stop(self) -> None: ...


def _make_pulse(period_s: float) -> _Pulse | None:
    """Return what beats without the interpreter, or None where the extension is not built."""
    make = getattr(extension(), "Pulse", None)  # nor in one of an older checkout
    pulse: _Pulse | None = None if make is None else make(period_s, PULSE)
    return pulse


class Heartbeat:
    """One rank's part: rank 0 has a link to every other rank, these have one to rank 0.

    Args:
        links: the links there are, by rank.
        diagnosis: what is known of those ranks.
        settings: how it beats.
        control: what it can do with processes.
        entrance: how ranks that have lost their link come to another; None for links of one life.
        clock: the diagnosis' clock, where it goes by what was read.
        engine_is_down: whether the engine has ended, so that its calls fail by themselves.
        num_others: how many operations of the engine's the script has started, as in ``Place``.

    Owns its threads; its own thread closes its links and its entrance.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        diagnosis: Diagnosis,
        *,
        settings: HeartbeatSettings,
        control: ProcessControl,
        entrance: Entrance | None = None,
        clock: ReadClock | None = None,
        engine_is_down: Callable[[], bool] = lambda: False,
        num_others: Callable[[], int] = lambda: -1,
    ) -> None:
        self.rank = diagnosis.rank
        self.settings = settings
        self.verdict: Verdict | None = None
        self.meter = ProgressMeter(num_others=num_others)
        self._links = dict(links)
        self._entrance = entrance
        self._clock = ReadClock() if clock is None else clock
        self._diagnosis = diagnosis
        self._control = control
        self._engine_is_down = engine_is_down
        self._has_verdict = threading.Event()
        self._verdict_at = 0.0
        self._is_heard = self._has_failed = self._is_closed = False
        self._has_engine_failed = False  # here
        self._ends_by_term = False  # once there is a verdict
        # Whether the main thread was in one call of the engine's at the last two looks, and which.
        self._is_stuck, self._last_call = False, ""
        self._stand = StandWatch()
        self._late: list[int] = []
        self._asked: list[str] = []  # what rank 0 wants to know: keys of names
        # Ranks that have said good-bye, to whomever; 1 where an error has ended them.
        self._gone: dict[int, float] = {}
        self._in_view: set[int] = set()  # ranks whose processes were seen here, alive
        # By rank, who was asked to look at its process.
        self._asked_to_look: dict[int, int] = {}
        self._has_news = False  # what ranks are judged by at once, not at the next beat
        self._last_words: list[Line] = []  # of this rank; said again on a new link
        self._aside = Aside()
        self._pulse = _make_pulse(settings.period_s)
        self._selector = selectors.DefaultSelector()
        self._waker, self._sleeper = socket.socketpair()  # what is written here ends a select
        if control.exit is not None:
            control.exit.install(self.report, self.close, waker=self._waker)
        self._thread = threading.Thread(target=self._run, name="loft-heartbeat", daemon=True)
        self._thread.start()

    # What waits ask and tell; any thread.

    def waiting(self) -> AbstractContextManager[None]:
        """Note that the calling thread waits for other ranks inside."""
        return self.meter.waiting()

    def late(self) -> list[int]:
        """Return the ranks that have not come to what this rank waits for, as far as known."""
        progress = self.meter.progress()
        return self._diagnosis.late_for(0, progress) if self.rank == 0 else self._late

    def final_verdict(self, *, at_once: bool = False) -> Verdict | None:
        """Return the verdict that ends waits, not in its first moment.

        In elastic mode that is only a mismatch, which a new world would meet again; from all else
        the engine recovers. A wait that ends by it calls ``heard``. Where the engine has failed
        already it is returned ``at_once``, in its first moment too.
        """
        verdict = self.verdict
        if verdict is None or (self.settings.is_elastic and not verdict.is_mismatch):
            return None
        is_due = time.monotonic() - self._verdict_at >= self.settings.grace_s
        return verdict if at_once or is_due else None

    def wait_verdict(self, timeout_s: float) -> Verdict | None:
        """Return the verdict, in its first moment too, or None when none has come in time."""
        self._has_verdict.wait(timeout_s)
        return self.verdict

    def left_ranks(self) -> list[int]:
        """Return the ranks that have ended by themselves, as far as this one has heard.

        Not those that an error has ended, the engine's or a wait's: another rank is behind that.
        """
        gone = dict(self._gone)  # the heartbeat's thread may add to it
        ended = {rank for rank, by_error in gone.items() if by_error}
        return sorted({*self._diagnosis.left_ranks(), *gone} - ended)

    def heard(self) -> None:
        """Note that a wait raises the verdict: from here on the script is in charge."""
        self._is_heard = True

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank fails; its first error only, and none that came to it."""
        if self._has_failed or self._is_in_child():
            return
        self._has_failed = True
        if is_of_engine(error):
            self._note_engine_failure()
        is_echo = isinstance(error, TransportError) or is_of_engine(error)
        # Who is told to end may lose processes of its own in that moment, which are told, too.
        is_told = self._control.exit is not None and self._control.exit.is_told
        if self.verdict is not None or is_echo or is_told:
            return
        who = f"rank {self.rank} ({self._control.own})"
        note = describe_failure(who, _interruption(error) or error)
        self._say_at_last(Line("failed", self.rank, float(note.num_samples), note.text))

    def explain(self, error: BaseException) -> None:
        """Add to an engine's own error which rank is behind it; waits up to a second for that.

        Every error that it is given counts as a failure of the engine, which is never taken back;
        not where a signal handler has raised it inside the engine's call.
        """
        if _interruption(error) is not None:
            return  # the engine lives
        self._is_heard = True
        self._note_engine_failure()
        until = time.monotonic() + _EXPLAIN_S
        while not (left := self.left_ranks()) and not self._has_verdict.is_set():
            # In parts: a good-bye may come first, and nobody is woken by it.
            if (left_s := until - time.monotonic()) <= 0:
                break
            self.wait_verdict(min(left_s, _LISTEN_S))
        reason = f"ranks {left} have ended their scripts" if left else ""
        reason = self.verdict.text if self.verdict is not None else reason
        note = f"loft_hvd: {reason}"
        is_told = note in getattr(error, "__notes__", ())
        if reason and hasattr(error, "add_note") and not is_told:  # Python 3.11
            error.add_note(note)
        if left and self.settings.is_elastic:  # where nobody prints the error
            _logger.error("rank %d: %s", self.rank, reason)

    def close(self) -> None:
        """Say good-bye and end the thread; can be called again.

        After an error the thread stays until the process has ended, and leaves it when the engine
        does not come down: a rank that hangs in its last breath would keep the job alive.
        """
        if self._is_closed or self._is_in_child():
            return
        self._beat()  # what this rank has done, for those who still wait
        was_ended = self._has_failed or self._has_engine_failed
        self._say_at_last(Line("left", self.rank, float(was_ended)))
        if self._control.exit is not None:
            self._control.exit.remove()
            if self._has_failed or self.verdict is not None:
                self._control.exit.arm("an error has ended the script")
            if self._control.exit.is_armed:
                self._end_launcher()
                self._aside.flush()
                return  # the thread leaves the process if its end takes too long
        self._is_closed = True
        if self._control.guard is not None:
            self._control.guard.close()
        self._wake()
        self._thread.join(timeout=5.0)
        self._aside.close()

    def _say_at_last(self, line: Line) -> None:
        self._last_words.append(line)
        for link in list(self._links.values()):
            link.send(line)

    def _note_engine_failure(self) -> None:
        """Let this rank and rank 0 know that the engine has failed: it makes lost links count."""
        self._has_engine_failed = True
        self._diagnosis.engine_failed()
        for link in list(self._links.values()):
            link.send(Line("engine", self.rank))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # closed, or so full that it wakes anyway
            self._waker.send(b"!", socket.MSG_DONTWAIT)

    def _is_in_child(self) -> bool:
        """Say whether this is a fork, such as a loader process: it must not speak for the rank."""
        return os.getpid() != self._control.own.pid

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has ended the thread."""
        return self._is_closed

    # The thread.

    def _run(self) -> None:
        try:
            self._selector.register(self._sleeper, selectors.EVENT_READ)
            if self._entrance is not None:
                self._selector.register(self._entrance, selectors.EVENT_READ)
            for rank, link in list(self._links.items()):
                self._take(rank, link, [])
            self._loop()
        except Exception:
            text = "rank %d: the heartbeat has ended by an error of its own\n%s"
            self._aside.log(logging.ERROR, text, self.rank, traceback.format_exc())
        finally:
            self._close_all()

    def _close_all(self) -> None:
        """Close what this thread works on: itself, so that nothing ends under its hands."""
        if self._pulse is not None:
            self._pulse.stop()
        if self._entrance is not None:
            self._entrance.close()
        for link in self._links.values():
            link.close()
        self._selector.close()
        self._waker.close()
        self._sleeper.close()

    def _loop(self) -> None:
        next_beat = next_look = time.monotonic()
        while not self._is_closed:
            events = self._selector.select(max(0.0, self._due_s(min(next_beat, next_look))))
            self._clock.read()
            # Before what has come is read: the end of one link must not judge the others.
            if time.monotonic() - next_beat > self._diagnosis.limits.suspect_s:
                self._diagnosis.restarted()  # suspended, or kept from the interpreter
            for key, _ in events:
                if key.fileobj is self._sleeper:
                    if TERM in self._sleeper.recv(64):
                        self._hear_term()
                    self._has_news = True
                elif isinstance(key.fileobj, Link):
                    self._receive(key.data)
            self._meet()
            is_due = time.monotonic() >= next_beat
            if is_due:
                next_beat = time.monotonic() + self.settings.period_s
                self._beat()
            if is_due or self._has_news:
                self._judge()
            self._end_if_told()
            if time.monotonic() >= next_look:
                self._leave_if_stuck()
                pause_s = self.settings.period_s if self.verdict is None else _LOOK_S
                next_look = time.monotonic() + min(pause_s, self.settings.period_s)

    def _hear_term(self) -> None:
        """Note that this process is told to end, as by its launcher when another rank has."""
        self._ends_by_term = True
        self._diagnosis.told()
        for link in self._links.values():  # not again on a new one: the end comes first
            link.send(Line("term", self.rank))

    def _end_if_told(self) -> None:
        """End a process that was told to, once it has said which rank was the first to end."""
        end = self._control.exit
        if not self._ends_by_term or self.verdict is None or end is None:
            return
        self._ends_by_term = False
        if end.is_told:  # still: its script has not prevented it
            self._aside.flush()
            end.end_by_term()

    def _due_s(self, due_at: float) -> float:
        due_s = due_at - time.monotonic()
        if self._entrance is not None and self._is_meeting():
            due_s = min(due_s, self._entrance.due_s())
        return due_s

    def _judge(self) -> None:
        self._has_news = False
        progress = self.meter.progress()
        self._diagnosis.moved(progress.moved_s, progress.began_s)
        self._look_at_silent()
        self._decide(self._diagnosis.judge(progress))

    # Links: lost, made again.

    def _is_meeting(self) -> bool:
        """Say whether this rank is to meet others: rank 0 always, the rest when it is lost."""
        return self.rank == 0 or self._diagnosis.misses_link(0)

    def _meet(self) -> None:
        if self._entrance is None:
            return
        if not self._is_meeting():
            assert isinstance(self._entrance, Caller)
            self._entrance.hang_up()
            return
        for met in self._entrance.meet():
            self._replace(met)

    def _replace(self, met: Met) -> None:
        """Go on with a new link to a rank, and say again what the old one may have lost."""
        self._drop(met.rank)
        self._diagnosis.found(met.rank)
        self._aside.log(logging.INFO, "rank %d: a new link to rank %d", self.rank, met.rank)
        self._take(met.rank, met.link, met.lines)
        for line in self._last_words:
            met.link.send(line)
        if self.rank == 0:
            for rank, by_error in sorted(self._gone.items()):
                met.link.send(Line("left", rank, by_error))
            self._tell_verdict(met.rank)
        self._beat()  # at once, for who has missed this rank

    def _take(self, rank: int, link: Link, lines: Iterable[Line]) -> None:
        self._links[rank] = link
        try:
            self._selector.register(link, selectors.EVENT_READ, data=rank)
        except OSError:  # the kernel watches no more: as if the link were lost
            link.close()
            self._diagnosis.lost(rank)
            return
        process = self._diagnosis.process(rank)
        is_near = process.host_key == self._control.own.host_key
        if is_near and self._control.look(process.pid, process.start) not in (UNKNOWN, *ENDED):
            self._in_view.add(rank)
        if self._pulse is not None:
            self._pulse.add(link.fileno())
        for line in lines:  # what came with its welcome
            self._handle(rank, line)
        self._receive(rank)

    def _drop(self, rank: int) -> None:
        """Close the link to a rank, which stays in its place until there is another."""
        link = self._links[rank]
        if link.fileno() < 0:
            return
        self._selector.unregister(link)
        if self._pulse is not None:
            self._pulse.remove(link.fileno())
        link.close()

    def _receive(self, peer: int) -> bool:
        """Take what a peer has said; returns whether there may be more."""
        link = self._links[peer]
        if link.fileno() < 0:  # dropped
            return False
        lines = link.receive()
        for line in lines:
            self._handle(peer, line)
        if link.is_closed:
            self._drop(peer)
            self._diagnosis.lost(peer)
            self._has_news = True
        return bool(lines) and not link.is_closed

    def _handle(self, peer: int, line: Line) -> None:
        # Rank 0 is trusted with all; from others count only words about themselves, and what they
        # were asked to look at.
        words = list(filter(None, line.text.split("|")))
        if line.kind == "beat":
            if self._diagnosis.is_missed(peer):  # once: a beat takes the warning back
                process = self._diagnosis.process(peer)
                self._aside.log(logging.WARNING, "rank %d (%s) is heard again", peer, process)
            self._diagnosis.heard(peer, Progress.decode(line.seconds, line.text))
        elif line.kind in ("pulse", "engine", "term"):
            self._hear_sign(peer, line.kind)
        elif line.kind == "late" and peer == 0:
            self._late = [int(word) for word in words if word.isdecimal()]
        elif line.kind == "ask" and peer == 0:
            self._asked = words
        elif line.kind == "left":
            self._hear_good_bye(peer, line)
        elif line.kind == "failed" and peer not in self._diagnosis.left_ranks():  # not said again
            self._diagnosis.left(peer)
            self._aside.do(functools.partial(tell_failure, peer, line.seconds))
            # From others about themselves only.
            who = f"rank {peer} ({self._diagnosis.process(peer)})"
            is_own = peer == 0 or line.text.startswith(f"{who} ")
            self._decide(Verdict(peer, line.text if is_own else f"{who} has failed: {line.text}"))
        elif peer == 0 and line.kind == "verdict":
            kinds = {_MISMATCH: "is_mismatch", _UNSEEN: "is_unseen"}
            flags = {kinds[line.seconds]: True} if line.seconds in kinds else {}
            self._decide(Verdict(line.rank, line.text, **flags))
        elif peer == 0 and line.kind == "look" and len(words) == 3 and "".join(words).isdecimal():
            self._look_for_rank_0(line.rank, *(int(word) for word in words))
        elif line.kind == "state" and self._asked_to_look.get(line.rank) == peer:
            self._saw(line.rank, line.text[:1])

    def _hear_sign(self, peer: int, kind: str) -> None:
        """Take what a peer says of itself in a word."""
        if kind == "pulse":
            self._diagnosis.pulsed(peer)
        elif kind == "term":
            self._diagnosis.told(peer)
            self._has_news = True
        else:
            self._diagnosis.engine_failed()
            self._has_news = True

    def _hear_good_bye(self, peer: int, line: Line) -> None:
        """Note who has left; rank 0 passes it on, as the others have no link to that rank."""
        if peer not in (0, line.rank):
            return
        is_news = line.rank not in self._gone
        self._gone[line.rank] = line.seconds
        if line.rank == peer:
            self._diagnosis.left(peer, by_error=line.seconds != 0)
        for rank, link in self._links.items():
            if self.rank == 0 and rank != peer and is_news:
                link.send(line)

    def _beat(self) -> None:
        progress = self.meter.progress()
        text = progress.encode(MAX_TEXT, asked=self._asked)
        asked = "|".join(self._diagnosis.asked_for(progress)) if self.rank == 0 else ""
        for rank, link in self._links.items():
            link.send(Line("beat", self.rank, progress.waited_s, text))
            if self.rank == 0:  # the others cannot see who keeps them waiting
                late = self._diagnosis.late_for(rank, progress)
                link.send(Line("late", 0, 0.0, "|".join(map(str, late))))
                link.send(Line("ask", 0, 0.0, asked))

    # Silent ranks: what keeps them so, seen by this rank or by one of their host.

    def _look_at_silent(self) -> None:
        """Look at the processes of silent ranks, or ask a rank of their host to."""
        suspects = self._diagnosis.suspects()
        if self._diagnosis.is_over() or any(self._links[rank].is_closed for rank in suspects):
            self._look_at_the_rest(suspects)
            suspects = self._diagnosis.suspects()
        for rank in {*suspects, *filter(self._is_held, self._links)}:
            process = self._diagnosis.process(rank)
            if process.host_key == self._control.own.host_key:
                self._saw(rank, self._control.look(process.pid, process.start))
                continue
            # Ask one that is heard and sees that process; only rank 0 has links to such ranks.
            for other, link in self._links.items():
                is_near = self._diagnosis.process(other).host_key == process.host_key
                if is_near and not self._diagnosis.is_silent(other):
                    # 2: whatever state it is in.
                    kill = self._dooms(rank) * (2 if self._is_held(rank) else 1)
                    self._asked_to_look[rank] = other
                    link.send(Line("look", rank, 0.0, f"{process.pid}|{process.start}|{kill}"))
                    break
        for warning in self._diagnosis.warnings():
            self._aside.log(logging.WARNING, "%s", warning)

    def _look_at_the_rest(self, suspects: Collection[int]) -> None:
        """See who of this host has ended, too, though its own link is not lost yet.

        That may take long: the kernel takes back its memory first, and processes that it has forked
        hold the link. Where ranks are told to end, their launcher has seen such an end.
        """
        for rank in self._in_view - {*suspects, *self._diagnosis.left_ranks()}:
            process = self._diagnosis.process(rank)
            state = self._control.look(process.pid, process.start)
            if state in ENDED:
                for _ in range(_MOST_READS):  # all that it has said: a good-bye, or its error
                    if not self._receive(rank):
                        break
                self._diagnosis.saw(rank, state)

    def _look_for_rank_0(self, rank: int, pid: int, start: int, kill: int) -> None:
        """Look at a rank's process on this host and tell rank 0; end it if it is to be killed."""
        state = self._control.look(pid, start)
        self._links[0].send(Line("state", rank, 0.0, state))
        if (kill == 1 and state == FROZEN) or (kill == 2 and state not in (UNKNOWN, *ENDED)):
            self._kill(pid)

    def _saw(self, rank: int, state: str) -> None:
        """Take the state of a rank's process, and end it here if it is stopped and doomed."""
        if self._diagnosis.is_silent(rank):  # else it was heard while the answer came
            self._diagnosis.saw(rank, state)
        elif not self._is_held(rank):
            return
        process = self._diagnosis.process(rank)
        is_near = process.host_key == self._control.own.host_key
        is_stopped = state == FROZEN or (self._is_held(rank) and state not in ENDED)
        if is_stopped and is_near and self._dooms(rank):
            self._kill(process.pid)

    def _kill(self, pid: int) -> None:
        """End a process of this host that is frozen, or whose interpreter stands still."""
        self._control.kill(pid)
        text = "killed process %d, which stands still: the job goes on or ends without it"
        self._aside.log(logging.ERROR, text, pid)

    # Verdicts.

    def _is_held(self, rank: int) -> bool:
        """Say whether there is a verdict on a rank whose interpreter stands still, and still so."""
        verdict = self.verdict
        is_named = verdict is not None and verdict.is_held and verdict.rank == rank
        return is_named and self._diagnosis.is_held(rank)

    def _dooms(self, rank: int) -> bool:
        """Say whether to end a stopped rank: when the job goes on, or is over, without it.

        Also where the script waits for it in a call of the engine's, which fails by that.
        """
        if self.verdict is None or self.verdict.rank != rank:
            return False
        end = self._control.exit
        is_over = self.settings.is_elastic or (end is not None and end.is_armed)
        return is_over or self._is_stuck

    def _decide(self, verdict: Verdict | None) -> None:
        if verdict is None or self.verdict is not None:
            return
        self._verdict_at = time.monotonic()  # first: waits look at the verdict
        self.verdict = verdict
        self._has_verdict.set()
        if self.rank == 0:
            for rank in self._links:
                self._tell_verdict(rank)
        # Once, as rank 0's verdicts reach the others.
        level = logging.ERROR if 0 in (self.rank, verdict.rank) else logging.INFO
        self._aside.log(level, "%s", verdict.text)

    def _tell_verdict(self, rank: int) -> None:
        verdict = self.verdict
        if verdict is not None and (rank != verdict.rank or verdict.is_mismatch):
            seconds = _MISMATCH * verdict.is_mismatch + _UNSEEN * verdict.is_unseen
            self._links[rank].send(Line("verdict", verdict.rank, seconds, verdict.text))

    def _leave_if_stuck(self) -> None:
        """Leave a process that an error has ended, or that hangs in a call that is not ours."""
        end, verdict = self._control.exit, self.verdict
        if end is None:
            return
        # The engine's own call over all ranks, its shutdown too: a lost host never answers it, nor
        # does a frozen rank before it is killed.
        call = engine_call() if verdict is not None else ""
        self._is_stuck, self._last_call = call != "" and call == self._last_call, call
        waits_for_ever = self._is_stuck and self._has_lost_host()
        if verdict is not None and not (self._is_heard or end.is_armed or end.is_kept):
            unheard_s = time.monotonic() - self._verdict_at
            # A script that goes on, as it evaluates or saves, comes to a call of ours and hears of
            # the verdict there. One that never comes to any is left after the longest wait.
            stands_s = self._stand.look(threading.main_thread().ident or 0)
            hangs = min(unheard_s, stands_s) >= self.settings.leave_s
            is_due = waits_for_ever or hangs or unheard_s >= self._diagnosis.limits.held_s
            # Where the engine is down its calls fail, so the script goes on by itself.
            if is_due and not self._engine_is_down():
                end.arm(verdict.text, since_s=unheard_s)
                # By this a frozen rank is doomed. Its launcher waits for it, ten seconds at worst,
                # and this process may leave right now: nobody would be here to kill it.
                self._look_at_silent()
        else:
            self._stand.forget()
        if end.is_armed:
            self._end_launcher()
            if waits_for_ever:
                end.leave_now()
        end.leave_if_due()

    def _has_lost_host(self) -> bool:
        return self.verdict is not None and self.verdict.is_unseen

    def _end_launcher(self) -> None:
        """See to it that the launcher does not wait for a host that is gone."""
        if self._control.launcher is not None and self._has_lost_host():
            self._control.launcher.start()
