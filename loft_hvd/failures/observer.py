"""What a rank hears and sees of the others: all that its diagnosis knows comes from here.

Ranks beat: each says how far it has come, and what it waits for. What is not heard is looked at:
the process of a silent rank, by this rank or by one of its host.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Iterable

from loft_hvd.failures.actions import Actions, read_verdict
from loft_hvd.failures.causes import tell_failure
from loft_hvd.failures.connections import Connections
from loft_hvd.failures.cuts import EndWatch, decode_ends, encode_ends
from loft_hvd.failures.diagnosis import Diagnosis, Verdict
from loft_hvd.failures.handshake import NewLink
from loft_hvd.failures.links import MAX_TEXT, Message
from loft_hvd.failures.process import ENDED, FROZEN, UNKNOWN
from loft_hvd.failures.progress import Progress, ProgressMeter

__all__ = ["Observer"]

_WAITED_S = 1.0  # a choice: who waits for that long looks at its connections, in 1.5 ms
_MOST_READS = 64  # bound: each takes 64 kB at least, more than a kernel keeps for a link


class Observer:
    """Feeds a rank's diagnosis; the heartbeat's thread calls it.

    Args:
        diagnosis: what it feeds.
        connections: over which it hears and asks.
        meter: how far this rank has come.
        actions: what is done about a verdict that it hears, or a process that it sees stopped.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        connections: Connections,
        meter: ProgressMeter,
        actions: Actions,
    ) -> None:
        self.late: list[int] = []  # who keeps this rank waiting, as rank 0 says
        # Ranks that have said good-bye, to whomever; 1 where an error has ended them.
        self.gone: dict[int, float] = {}
        self.has_news = False  # what ranks are judged by at once, not at the next beat
        self._rank = diagnosis.rank
        self._diagnosis = diagnosis
        self._connections = connections
        self._meter = meter
        self._actions = actions
        self._own, self._look_at = actions.control.own, actions.control.look
        self._background = actions.background
        self._awaited: list[str] = []  # what rank 0 wants to know: keys of names
        self._ends = EndWatch()
        self._asked_about: list[str] = []  # addresses of hosts, which rank 0 wants to know of
        self._has_told_ends = False
        self._in_view: set[int] = set()  # ranks whose processes were seen here, alive
        # By rank, who was asked to look at its process.
        self._asked_to_look: dict[int, int] = {}

    # What is said and heard.

    def beat(self) -> None:
        """Say how far this rank has come."""
        progress = self._meter.progress()
        text = progress.encode(MAX_TEXT, asked=self._awaited)
        awaited = "|".join(self._diagnosis.asked_for(progress)) if self._rank == 0 else ""
        for rank in self._connections:
            self._connections.say(Message("beat", self._rank, progress.waited_s, text), to=rank)
            if self._rank == 0:  # the others cannot see who keeps them waiting
                late = "|".join(map(str, self._diagnosis.late_for(rank, progress)))
                self._connections.say(Message("late", 0, 0.0, late), to=rank)
                self._connections.say(Message("ask", 0, 0.0, awaited), to=rank)

    def tell_ends(self) -> None:
        """Say what connections to other hosts show, while this rank waits or is asked."""
        if self._asked_about or self._meter.progress().stuck_s >= _WAITED_S:
            ends = self._ends.look(self._asked_about)
        else:
            ends = []
            self._ends.forget()
        if ends or self._has_told_ends:  # once more: that there is nothing any more
            self._has_told_ends = bool(ends)
            self._diagnosis.told_ends(self._rank, ends)
            if self._rank != 0:
                text = encode_ends(ends, time.monotonic())
                self._connections.say(Message("ends", self._rank, 0.0, text), to=0)
        if self._rank == 0:
            asked, self._asked_about = self._asked_about, self._diagnosis.asks_about()
            if asked or self._asked_about:
                text = "|".join(self._asked_about)
                self._connections.say_to_all(Message("ends", 0, 0.0, text))

    def watch(self, rank: int, messages: Iterable[Message] = ()) -> None:
        """Hear what a rank says from now on; some has come with its link."""
        if not self._connections.watch(rank):
            self._diagnosis.lost(rank)
            return
        if self._is_near(rank) and self._state_of(rank) not in (UNKNOWN, *ENDED):
            self._in_view.add(rank)
        for message in messages:
            self._hear(rank, message)
        self.receive(rank)

    def receive(self, rank: int) -> bool:
        """Take what a rank has said; returns whether there may be more."""
        if self._connections.is_lost(rank):  # that is noted
            return False
        messages = self._connections.receive(rank)
        for message in messages:
            self._hear(rank, message)
        if self._connections.is_lost(rank):
            self._diagnosis.lost(rank)
            self.has_news = True
            return False
        return bool(messages)

    def go_on(self, new: NewLink) -> None:
        """Go on with a new link to a rank, and say again what the old one may have lost."""
        self._connections.replace(new.rank, new.link)
        self._diagnosis.found(new.rank)
        text = "rank %d: a new link to rank %d"
        self._background.log(logging.INFO, text, self._rank, new.rank)
        self.watch(new.rank, new.messages)
        self._connections.say_again(new.rank)
        if self._rank == 0:
            for rank, by_error in sorted(self.gone.items()):
                self._connections.say(Message("left", rank, by_error), to=new.rank)
            self._actions.tell_verdict(new.rank)
        self.beat()  # at once, for who has missed this rank

    def _hear(self, peer: int, message: Message) -> None:
        # Rank 0 is trusted with all; from others count only words about themselves, and what they
        # were asked to look at.
        kind = message.kind
        if kind == "beat":
            if self._diagnosis.is_missed(peer):  # once: a beat takes the warning back
                text, process = "rank %d (%s) is heard again", self._diagnosis.process(peer)
                self._background.log(logging.WARNING, text, peer, process)
            self._diagnosis.heard(peer, Progress.decode(message.seconds, message.text))
        elif kind == "pulse":
            self._diagnosis.pulsed(peer)
        elif kind == "term":
            self._diagnosis.told(peer)
            self.has_news = True
        elif kind == "engine":
            self._diagnosis.engine_failed()
            self.has_news = True
        elif kind == "left":
            self._hear_good_bye(peer, message)
        elif kind == "failed" and peer not in self._diagnosis.left_ranks():  # not said again
            self._hear_failure(peer, message)
        elif kind == "ends" and peer != 0:
            ends = decode_ends(message.text, time.monotonic())
            self._diagnosis.told_ends(peer, ends)
        elif kind == "state" and self._asked_to_look.get(message.rank) == peer:
            self._saw(message.rank, message.text[:1])
        elif peer == 0:
            self._hear_rank_0(message)

    def _hear_rank_0(self, message: Message) -> None:
        """Take what rank 0, which alone has links to all, says of others."""
        kind, words = message.kind, list(filter(None, message.text.split("|")))
        if kind == "late":
            self.late = [int(word) for word in words if word.isdecimal()]
        elif kind == "ask":
            self._awaited = words
        elif kind == "ends":
            self._asked_about = words
        elif kind == "verdict":
            self._actions.decide(read_verdict(message))
        elif kind == "look" and len(words) == 3 and "".join(words).isdecimal():
            self._look_for_rank_0(message.rank, *(int(word) for word in words))

    def _hear_good_bye(self, peer: int, message: Message) -> None:
        """Note who has left; rank 0 passes it on, as the others have no link to that rank."""
        if peer not in (0, message.rank):
            return
        is_news = message.rank not in self.gone
        self.gone[message.rank] = message.seconds
        if message.rank == peer:
            self._diagnosis.left(peer, by_error=message.seconds != 0)
        for rank in self._connections:
            if self._rank == 0 and rank != peer and is_news:
                self._connections.say(message, to=rank)

    def _hear_failure(self, peer: int, message: Message) -> None:
        """Note the error that has ended a rank; from others than rank 0 about themselves only."""
        self._diagnosis.left(peer)
        self._background.do(functools.partial(tell_failure, peer, message.seconds))
        who, text = f"rank {peer} ({self._diagnosis.process(peer)})", message.text
        is_own = peer == 0 or text.startswith(f"{who} ")
        self._actions.decide(Verdict(peer, text if is_own else f"{who} has failed: {text}"))

    # What is seen.

    def look(self) -> None:
        """Look at the processes of silent ranks, or ask a rank of their host to."""
        suspects = self._diagnosis.suspects()
        if self._diagnosis.is_over() or any(map(self._connections.is_lost, suspects)):
            self._look_at_the_rest(suspects)
            suspects = self._diagnosis.suspects()
        for rank in {*suspects, *filter(self._actions.is_held, self._connections)}:
            if self._is_near(rank):
                self._saw(rank, self._state_of(rank))
            else:
                self._ask_to_look(rank)
        for warning in self._diagnosis.warnings():
            self._background.log(logging.WARNING, "%s", warning)

    def _look_at_the_rest(self, suspects: Collection[int]) -> None:
        """See who of this host has ended, too, though its own link is not lost yet.

        That may take long: the kernel takes back its memory first, and processes that it has forked
        hold the link. Where ranks are told to end, their launcher has seen such an end.
        """
        for rank in self._in_view - {*suspects, *self._diagnosis.left_ranks()}:
            if (state := self._state_of(rank)) in ENDED:
                for _ in range(_MOST_READS):  # all that it has said: a good-bye, or its error
                    if not self.receive(rank):
                        break
                self._diagnosis.saw(rank, state)

    def _ask_to_look(self, rank: int) -> None:
        """Ask one that is heard and sees a rank's process; only rank 0 has links to such ranks."""
        process = self._diagnosis.process(rank)
        for other in self._connections:
            is_near = self._diagnosis.process(other).host_key == process.host_key
            if is_near and not self._diagnosis.is_silent(other):
                # 2: whatever state it is in.
                kill = self._actions.dooms(rank) * (2 if self._actions.is_held(rank) else 1)
                self._asked_to_look[rank] = other
                text = f"{process.pid}|{process.start}|{kill}"
                self._connections.say(Message("look", rank, 0.0, text), to=other)
                break

    def _look_for_rank_0(self, rank: int, pid: int, start: int, kill: int) -> None:
        """Look at a rank's process on this host and tell rank 0; end it if it is to be killed."""
        state = self._look_at(pid, start)
        self._connections.say(Message("state", rank, 0.0, state), to=0)
        if (kill == 1 and state == FROZEN) or (kill == 2 and state not in (UNKNOWN, *ENDED)):
            self._actions.kill(pid)

    def _saw(self, rank: int, state: str) -> None:
        """Take the state of a rank's process, and end it here if it is stopped and doomed."""
        if self._diagnosis.is_silent(rank):  # else it was heard while the answer came
            self._diagnosis.saw(rank, state)
        elif not self._actions.is_held(rank):
            return
        is_stopped = state == FROZEN or (self._actions.is_held(rank) and state not in ENDED)
        if is_stopped and self._is_near(rank) and self._actions.dooms(rank):
            self._actions.kill(self._diagnosis.process(rank).pid)

    def _state_of(self, rank: int) -> str:
        process = self._diagnosis.process(rank)
        return self._look_at(process.pid, process.start)

    def _is_near(self, rank: int) -> bool:
        return self._diagnosis.process(rank).host_key == self._own.host_key
