"""Why a rank waits in vain: a heartbeat between rank 0 and every other rank.

Once a second each rank says that it lives, what it has started and whether it waits. That finds
the rank that is killed, frozen, raises, leaves early or takes other steps; the others' waits then
end with an error that names it. A link that is lost is made again, and is no failure by itself.
In elastic mode only a mismatch is raised, as Horovod's own error must reach ``hvd.elastic.run``.

``Connections`` carries what ranks say, ``Observer`` feeds it to the ``Diagnosis``, and ``Actions``
are what follows from its verdict. Here are the thread that does so, and what waits ask and tell.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from loft_hvd.errors import TransportError
from loft_hvd.failures.actions import Actions, HeartbeatSettings, ProcessControl
from loft_hvd.failures.causes import describe_failure, interruption, is_of_engine
from loft_hvd.failures.connections import Connections, ReadClock
from loft_hvd.failures.diagnosis import Diagnosis, Verdict
from loft_hvd.failures.handshake import LinkMaker
from loft_hvd.failures.links import Link, Message
from loft_hvd.failures.observer import Observer
from loft_hvd.failures.progress import ProgressMeter

__all__ = ["Heartbeat"]

_logger = logging.getLogger(__name__)
_EXPLAIN_S = 1.0  # bound from the beats: what others have seen by now comes with their next one
_LISTEN_S = 0.02  # a choice: between two looks for a good-bye
_LOOK_S = 0.25  # a choice: between looks at what this rank does after a verdict
_LAST_LOOK_S = 1.0  # a choice: longest that a look at frozen ranks may hold the end up


class Heartbeat:
    """One rank's part: rank 0 has a link to every other rank, these have one to rank 0.

    Args:
        links: the links there are, by rank.
        diagnosis: what is known of those ranks.
        settings: how it beats and acts.
        control: what it can do with processes.
        maker: how ranks that have lost their link come to another; None for links of one life.
        clock: the diagnosis' clock, where it goes by what was read.
        engine_is_down: whether the engine has ended, so that its calls fail by themselves.
        num_others: how many operations of the engine's the script has started, as in ``CallSite``.

    Owns its threads; its own thread closes its connections.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        diagnosis: Diagnosis,
        *,
        settings: HeartbeatSettings,
        control: ProcessControl,
        maker: LinkMaker | None = None,
        clock: ReadClock | None = None,
        engine_is_down: Callable[[], bool] = lambda: False,
        num_others: Callable[[], int] = lambda: -1,
    ) -> None:
        self.rank = diagnosis.rank
        self.meter = ProgressMeter(num_others=num_others)
        self._own = control.own
        self._clock = ReadClock() if clock is None else clock
        self._diagnosis = diagnosis
        self._connections = Connections(links, maker=maker, period_s=settings.period_s)
        self._actions = Actions(
            diagnosis,
            self._connections,
            settings=settings,
            control=control,
            engine_is_down=engine_is_down,
        )
        self._observer = Observer(diagnosis, self._connections, self.meter, self._actions)
        self._has_failed = self._is_closed = False
        self._has_looked = threading.Event()
        self._has_engine_failed = False  # here
        if control.exit is not None:
            control.exit.install(self.report, self.close, waker=self._connections.waker)
        self._thread = threading.Thread(target=self._run, name="loft-heartbeat", daemon=True)
        self._thread.start()

    # What waits ask and tell; any thread.

    @property
    def verdict(self) -> Verdict | None:
        """Why ranks cannot go on, once that is known."""
        return self._actions.verdict

    def waiting(self) -> AbstractContextManager[None]:
        """Note that the calling thread waits for other ranks inside."""
        return self.meter.waiting()

    def late(self) -> list[int]:
        """Return the ranks that have not come to what this rank waits for, as far as known."""
        progress = self.meter.progress()
        return self._diagnosis.late_for(0, progress) if self.rank == 0 else self._observer.late

    def final_verdict(self, *, at_once: bool = False) -> Verdict | None:
        """Return the verdict that ends waits, not in its first moment.

        In elastic mode that is only a mismatch, which a new world would meet again; from all else
        the engine recovers. A wait that ends by it calls ``heard``. Where the engine has failed
        already it is returned ``at_once``, in its first moment too.
        """
        verdict, settings = self.verdict, self._actions.settings
        if verdict is None or (settings.is_elastic and not verdict.is_mismatch):
            return None
        is_due = time.monotonic() - self._actions.verdict_at >= settings.grace_s
        return verdict if at_once or is_due else None

    def wait_verdict(self, timeout_s: float) -> Verdict | None:
        """Return the verdict, in its first moment too, or None when none has come in time."""
        self._actions.has_verdict.wait(timeout_s)
        return self.verdict

    def heard(self) -> None:
        """Note that a wait raises the verdict: from here on the script is in charge."""
        self._actions.is_heard = True

    def left_ranks(self) -> list[int]:
        """Return the ranks that have ended by themselves, as far as this one has heard.

        Not those that an error has ended, the engine's or a wait's: another rank is behind that.
        """
        gone = dict(self._observer.gone)  # the heartbeat's thread may add to it
        ended = {rank for rank, by_error in gone.items() if by_error}
        return sorted({*self._diagnosis.left_ranks(), *gone} - ended)

    # Errors of this rank, and its end; any thread.

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank fails; its first error only, and none that came to it."""
        if self._has_failed or self._is_in_child():
            return
        self._has_failed = True
        if is_of_engine(error):
            self._note_engine_failure()
        is_echo = isinstance(error, TransportError) or is_of_engine(error)
        # Who is told to end may lose processes of its own in that moment, which are told, too.
        if self.verdict is not None or is_echo or self._actions.is_told:
            return
        who = f"rank {self.rank} ({self._own})"
        note = describe_failure(who, interruption(error) or error)
        failed = Message("failed", self.rank, float(note.num_samples), note.text)
        self._connections.say_at_last(failed)

    def explain(self, error: BaseException) -> None:
        """Add to an engine's own error which rank is behind it; waits up to a second for that.

        Every error that it is given counts as a failure of the engine, which is never taken back;
        not where a signal handler has raised it inside the engine's call.
        """
        if interruption(error) is not None:
            return  # the engine lives
        self.heard()
        self._note_engine_failure()
        until = time.monotonic() + _EXPLAIN_S
        while not (left := self.left_ranks()) and self.verdict is None:
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
        if left and self._actions.settings.is_elastic:  # where nobody prints the error
            _logger.error("rank %d: %s", self.rank, reason)

    def close(self) -> None:
        """Say good-bye and end the thread; can be called again.

        After an error the thread stays until the process has ended, and leaves it when the engine
        does not come down: a rank that hangs in its last breath would keep the job alive.
        """
        if self._is_closed or self._is_in_child():
            return
        self._observer.beat()  # what this rank has done, for those who still wait
        was_ended = self._has_failed or self._has_engine_failed
        self._connections.say_at_last(Message("left", self.rank, float(was_ended)))
        if self._actions.unhook(has_failed=self._has_failed):
            # A frozen rank is doomed by that: who leaves at once would leave it there.
            self._has_looked.clear()
            self._connections.wake()
            self._has_looked.wait(_LAST_LOOK_S)
            return  # the thread leaves the process if its end takes too long
        self._is_closed = True
        self._connections.wake()
        self._thread.join(timeout=5.0)
        self._actions.close()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has ended the thread."""
        return self._is_closed

    def _note_engine_failure(self) -> None:
        """Let this rank and rank 0 know that the engine has failed: it makes lost links count."""
        self._has_engine_failed = True
        self._diagnosis.engine_failed()
        self._connections.say_to_all(Message("engine", self.rank))
        self._connections.wake()

    def _is_in_child(self) -> bool:
        """Say whether this is a fork, such as a loader process: it must not speak for the rank."""
        return os.getpid() != self._own.pid

    # The thread.

    def _run(self) -> None:
        try:
            self._connections.open()
            for rank in self._connections:
                self._observer.watch(rank)
            self._loop()
        except Exception:
            text = "rank %d: the heartbeat has ended by an error of its own\n%s"
            background = self._actions.background
            background.log(logging.ERROR, text, self.rank, traceback.format_exc())
        finally:
            self._connections.close()  # by this thread, so that nothing ends under its hands

    def _loop(self) -> None:
        period_s, observer, actions = self._actions.settings.period_s, self._observer, self._actions
        next_beat = next_look = time.monotonic()
        while not self._is_closed:
            due_s = min(next_beat, next_look) - time.monotonic()
            came = self._connections.wait(due_s, is_searching=self._is_searching())
            self._clock.read()
            # Before what has come is read: the end of one link must not judge the others.
            if time.monotonic() - next_beat > self._diagnosis.limits.suspect_s:
                self._diagnosis.restarted()  # suspended, or kept from the interpreter
            observer.has_news |= came.is_woken
            if came.is_told:
                actions.told()
                self._diagnosis.told()
                # Not again on a new link: the end comes first.
                self._connections.say_to_all(Message("term", self.rank))
            for rank in came.ranks:
                observer.receive(rank)
            for new in self._connections.new_links(is_searching=self._is_searching()):
                observer.go_on(new)
            is_due = time.monotonic() >= next_beat
            if is_due:
                next_beat = time.monotonic() + period_s
                observer.beat()
                observer.tell_ends()
            if is_due or observer.has_news:
                self._judge()
            actions.end_if_told()
            if time.monotonic() >= next_look:
                self._leave_if_stuck()
                pause_s = period_s if self.verdict is None else min(period_s, _LOOK_S)
                next_look = time.monotonic() + pause_s

    def _is_searching(self) -> bool:
        """Say whether this rank makes links: rank 0 always, the rest when theirs is lost."""
        return self.rank == 0 or self._diagnosis.misses_link(0)

    def _judge(self) -> None:
        self._observer.has_news = False
        progress = self.meter.progress()
        self._diagnosis.moved(progress.moved_s, progress.began_s)
        self._observer.look()
        self._has_looked.set()
        self._actions.decide(self._diagnosis.judge(progress))

    def _leave_if_stuck(self) -> None:
        if self._actions.arm_if_stuck():
            self._observer.look()  # a frozen rank is doomed by that
        self._actions.leave_if_due()
